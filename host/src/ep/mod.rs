//! Expert parallelism: the experts of a mixture-of-experts layer spread over several GPUs.

pub mod eplb;
