mod all_to_all;
mod block;
mod dispatch;
mod eplb;
mod expert_map;
mod faults;
mod layout;
mod lifetimes;
#[cfg(feature = "nccl")]
mod nccl;
mod processes;
mod ranks;
