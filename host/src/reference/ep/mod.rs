//! Expert parallelism.

mod combine;
mod dispatch;
mod layout;
pub use combine::combine;
pub use dispatch::{Arrived, dispatch};
pub use layout::{Layout, layout};
