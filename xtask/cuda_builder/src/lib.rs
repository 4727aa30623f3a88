//! Builds Rust kernel crates to PTX with stock rustc's NVPTX back end, and checks the result.
//!
//! The shape is that of Rust-CUDA's `cuda_builder`; the compiler behind it is not `rustc_codegen_nvvm` but a pinned
//! nightly ([`Pin`]), which [`DeviceToolchain::obtain`] finds or installs.
//!
//! ```no_run
//! use cuda_builder::{CudaBuilder, DeviceToolchain, Options, Pin};
//!
//! let pin = Pin::read("xtask/device-toolchain.toml".as_ref())?;
//! let toolchain = DeviceToolchain::obtain(&pin, &Options::new("target/device-toolchain"))?;
//! let built = CudaBuilder::new("kernels-gpu")
//!     .toolchain(&toolchain)
//!     .arch(pin.arch("sm_80")?)
//!     .features(["norm"])
//!     .copy_to("norm.ptx")
//!     .build()?;
//! println!("{} entries", built.module.entries.len());
//! # Ok::<(), cuda_builder::Error>(())
//! ```
//!
//! # From rustc's output to a PTX file
//!
//! The compiler emits assembly for one fat-LTO unit, so no linker is needed. [`ptx::process`] then turns what the
//! kernels say in PTX comments into directives, drops what no entry reaches, rejects what would be slow or wrong on
//! a GPU, and brings the text into one canonical form, so that the same source gives the same bytes on any machine.
//! [`ptxas`] assembles it and reads registers, spills and shared memory from the assembler's report.

mod builder;
mod error;
mod pin;
pub mod ptx;
pub mod ptxas;
mod rust_src;
mod toolchain;

pub use builder::{Built, CudaBuilder};
pub use error::{Error, Result};
pub use pin::{Arch, Pin, Wheel};
pub use ptxas::CudaTools;
pub use toolchain::{DeviceToolchain, Options};
