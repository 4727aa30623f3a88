//! Ordinary accesses to global memory on the SIMT device, whose blocks are threads of the host.
//!
//! Some operations let threads store to one place, unordered, where any of the values will do: tokens with one slot of a cache. On a GPU that is defined. Of threads
//! of the host it is only where accesses are atomic: so these are, relaxed, by words as large as the type's alignment has them, which are the instructions of plain ones.

use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Does `$each` with the largest word that a `$V` consists of, and how many there are.
macro_rules! by_words {
    ($V:ty, $each:ident) => {
        match align_of::<$V>() {
            1 => $each!(AtomicU8, u8, size_of::<$V>()),
            2 => $each!(AtomicU16, u16, size_of::<$V>() / 2),
            4 => $each!(AtomicU32, u32, size_of::<$V>() / 4),
            _ => $each!(AtomicU64, u64, size_of::<$V>() / 8),
        }
    };
}

/// # Safety
/// As for [`core::ptr::read`], but that others may store there with [`store`]; a `V` has no padding.
#[inline(always)]
pub(crate) unsafe fn load<V: Copy>(ptr: *const V) -> V {
    let mut value = MaybeUninit::<V>::uninit();
    macro_rules! each {
        ($Atomic:ident, $word:ty, $n:expr) => {
            for i in 0..$n {
                // SAFETY: forwarded to the caller; it is one of the words of a `V`.
                unsafe {
                    let word = $Atomic::from_ptr(ptr.cast_mut().cast::<$word>().add(i)).load(Relaxed);
                    value.as_mut_ptr().cast::<$word>().add(i).write(word);
                }
            }
        };
    }
    by_words!(V, each);
    // SAFETY: its words were just written.
    unsafe { value.assume_init() }
}

/// # Safety
/// As for [`core::ptr::write`], but that others may access it with [`load`] and [`store`]; a `V` has no padding.
#[inline(always)]
pub(crate) unsafe fn store<V: Copy>(ptr: *mut V, value: V) {
    macro_rules! each {
        ($Atomic:ident, $word:ty, $n:expr) => {
            for i in 0..$n {
                // SAFETY: forwarded to the caller; it is one of the words of a `V`.
                unsafe {
                    let word = (&raw const value).cast::<$word>().add(i).read();
                    $Atomic::from_ptr(ptr.cast::<$word>().add(i)).store(word, Relaxed);
                }
            }
        };
    }
    by_words!(V, each);
}
