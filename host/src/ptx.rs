//! The PTX of this crate (layer L0): text, by architecture and kernel family.
//!
//! `sm_80` runs on every GPU from compute capability 8.0 on; `sm_90a` has Hopper's own instructions and runs on
//! compute capability 9.0 only. Entry names are those of [`crate::kernels`]' entry tables.

use cuda_std::Arch;

macro_rules! families {
    ($($family:literal),* $(,)?) => {
        /// Every kernel family.
        pub const FAMILIES: &[&str] = &[$($family),*];

        /// The PTX of a family, or `None` if there is no such family.
        ///
        /// ```
        /// assert!(warploom::ptx::module(warploom::Arch::Sm80, "norm").is_some());
        /// assert!(warploom::ptx::module(warploom::Arch::Sm80, "nonsense").is_none());
        /// ```
        pub fn module(arch: Arch, family: &str) -> Option<&'static str> {
            match (arch, family) {
                $(
                    (Arch::Sm80, $family) => Some(include_str!(concat!("../ptx/sm_80/", $family, ".ptx"))),
                    (Arch::Sm90a, $family) => Some(include_str!(concat!("../ptx/sm_90a/", $family, ".ptx"))),
                )*
                _ => None,
            }
        }
    };
}
families!("activation", "attention", "conformance", "ep", "gemm", "kv_cache", "moe", "norm", "rope", "sampling",);
