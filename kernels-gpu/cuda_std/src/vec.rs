//! Vectors that one instruction moves.
//!
//! A plain copy through an aligned pointer becomes one `ld`/`st` of that width:
//!
//! ```ignore
//! let B128(x) = input.get_as::<B128<bf16, 8>>(i);   // ld.global.v4.b32
//! ```

macro_rules! vectors {
    ($($(#[$m:meta])* $name:ident($align:literal);)*) => { $(
        $(#[$m])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[repr(C, align($align))]
        pub struct $name<T, const N: usize>(pub [T; N]);
    )* };
}
vectors! {
    /// 4 bytes: `N * size_of::<T>()` is 4.
    B32(4);
    /// 8 bytes.
    B64(8);
    /// 16 bytes, the widest access of one thread.
    B128(16);
}
