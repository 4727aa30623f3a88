//! Bulk copies by the copy engine (TMA, sm_90): contiguous bytes, and boxes of tensors that a [`TensorMap`] describes.
//!
//! One thread issues a copy. Copies into shared memory are counted in bytes on an [`mbarrier`](crate::mbarrier); copies
//! out of it are collected in groups, like those of [`cp_async`](crate::cp_async).
//!
//! What ordinary instructions wrote to shared memory is visible to the copy engine (and to
//! [`wgmma`](crate::wgmma)) after [`fence_async`] by the threads that wrote it, and a barrier.
//!
//! A kernel takes a tensor map by value in its `entries!` and gets a pointer to it:
//!
//! ```ignore
//! unsafe fn kernel(x: *const TensorMap, n: u32) { tma::load_tensor::<2>(tile, x, [0, row], bar) }
//! entries! { pub struct Args(x: TensorMap, n: u32); kernel_bf16 {} [128; Sm90a] => kernel; }
//! ```

use crate::DType;
use crate::second_level::Policy;
use crate::shared::SharedAddress;

/// How the copy engine permutes 16-byte units of a box in shared memory so that columns meet different banks.
///
/// The unit's number within its line of 128, 64 or 32 bytes is exclusive-ored with the line's number in the pattern,
/// which repeats every 1024, 512 or 256 bytes; the box begins at a multiple of that. [`Swizzle::apply`] says where a
/// byte goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Swizzle {
    /// Row after row.
    None,
    /// Over lines of 32 bytes.
    B32,
    /// Over lines of 64 bytes.
    B64,
    /// Over lines of 128 bytes.
    B128,
}

impl Swizzle {
    /// Address bits that are exchanged: 0 to 3.
    const fn bits(self) -> u32 {
        self as u32
    }

    /// Bytes that the innermost dimension of a box has, if the box is swizzled.
    pub const fn line_bytes(self) -> usize {
        16 << self.bits()
    }

    /// Where the byte at `offset` of a box that begins at a multiple of 1024 lies.
    #[inline(always)]
    pub const fn apply(self, offset: u32) -> u32 {
        offset ^ ((offset >> 7 & ((1 << self.bits()) - 1)) << 4)
    }
}

/// What a tensor map says, in the terms of `cuTensorMapEncodeTiled`. Dimension 0 is the innermost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMapDescription {
    /// Address of the first element in global memory; a multiple of 16.
    pub base: u64,
    /// Type of the elements, which only matters to [`add_tensor`].
    pub dtype: DType,
    /// Dimensions: 1 to 5.
    pub rank: u32,
    /// Elements of each dimension; the first `rank` count.
    pub dims: [u64; 5],
    /// Bytes from one element to the next in dimensions 1 and up, `strides[d - 1]` for dimension `d`; multiples of 16.
    pub strides: [u64; 4],
    /// Elements of the box that a copy moves: 1 to 256 in each dimension.
    pub box_dims: [u32; 5],
    /// Layout of the box in shared memory.
    pub swizzle: Swizzle,
}

impl TensorMapDescription {
    /// Checks what the driver would check, and that swizzled boxes fill lines: of narrower ones, which the driver takes, a
    /// GPU lays the rows a line apart, while their own bytes alone count.
    ///
    /// # Errors
    /// What the description must be such that, in words.
    pub fn validate(&self) -> Result<(), &'static str> {
        let rank = self.rank as usize;
        if !(1..=5).contains(&rank) {
            return Err("a tensor map has 1 to 5 dimensions");
        }
        if !self.base.is_multiple_of(16) {
            return Err("the base of a tensor map is a multiple of 16 bytes");
        }
        if self.dims[..rank].iter().any(|&d| d == 0 || d > 1 << 32) {
            return Err("a dimension of a tensor map has 1 to 2^32 elements");
        }
        if self.strides[..rank - 1].iter().any(|&s| !s.is_multiple_of(16) || s >= 1 << 40) {
            return Err("a stride of a tensor map is a multiple of 16 bytes below 2^40");
        }
        if self.box_dims[..rank].iter().any(|&d| d == 0 || d > 256) {
            return Err("a box of a tensor map has 1 to 256 elements in each dimension");
        }
        let line = self.box_dims[0] as usize * self.dtype.size();
        if !line.is_multiple_of(16) {
            return Err("the innermost dimension of a box is a multiple of 16 bytes");
        }
        if self.swizzle != Swizzle::None && line != self.swizzle.line_bytes() {
            return Err("the innermost dimension of a swizzled box is a whole line of the swizzle");
        }
        Ok(())
    }

    /// Bytes of a box, which a load adds to its mbarrier.
    pub fn box_bytes(&self) -> u32 {
        let elements = self.box_dims[..self.rank as usize].iter().fold(1, |all: u32, &n| all.saturating_mul(n));
        elements.saturating_mul(self.dtype.size() as u32)
    }
}

/// A tensor map: 128 opaque bytes. A host makes it with the driver for a GPU (`CUtensorMap`), and with
/// [`TensorMap::for_simt`] for the SIMT device.
///
/// Kernel parameters aligned above 16 bytes are beyond rustc on the GPU; the PTX builder raises the alignment there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(target_arch = "nvptx64", repr(C, align(16)))]
#[cfg_attr(not(target_arch = "nvptx64"), repr(C, align(64)))]
pub struct TensorMap(pub [u64; 16]);

/// Marks the tensor maps of the SIMT device.
#[cfg(not(target_arch = "nvptx64"))]
const SIMT_MARK: u64 = u64::from_le_bytes(*b"simt map");

#[cfg(not(target_arch = "nvptx64"))]
impl TensorMap {
    /// A map for the SIMT device.
    ///
    /// # Errors
    /// What [`TensorMapDescription::validate`] found.
    pub fn for_simt(description: &TensorMapDescription) -> Result<Self, &'static str> {
        description.validate()?;
        let d = description;
        let mut words = [0; 16];
        words[0] = SIMT_MARK;
        words[1] = d.base;
        words[2] = (d.dtype as u64) << 48 | (d.dtype.size() as u64) << 32 | (d.rank as u64) << 8 | d.swizzle as u64;
        for i in 0..d.rank as usize {
            words[3 + i] = d.dims[i];
            words[8 + i] = if i == 0 { d.dtype.size() as u64 } else { d.strides[i - 1] };
            words[13 + i / 3] |= (d.box_dims[i] as u64) << (i % 3 * 16);
        }
        Ok(Self(words))
    }

    #[track_caller]
    fn tile<const RANK: usize>(self, coords: [i32; 5]) -> simt::TensorTile {
        let w = self.0;
        if w[0] != SIMT_MARK {
            simt::trap("not a tensor map of the SIMT device");
        }
        if (w[2] >> 8 & 0xff) as usize != RANK {
            simt::trap(format!("a copy with {RANK} coordinates by a tensor map of {}", w[2] >> 8 & 0xff));
        }
        let element = (w[2] >> 32 & 0xff) as usize;
        if RANK == 1 && !(coords[0].unsigned_abs() as usize * element).is_multiple_of(16) {
            simt::trap(format!(
                "a copy of one dimension from element {}, which is not a multiple of 16 bytes",
                coords[0]
            ));
        }
        let one_if_absent = |i: usize, v: u64| if i < RANK { v } else { 1 };
        simt::TensorTile {
            base: w[1] as usize,
            element,
            rank: RANK,
            dims: core::array::from_fn(|i| one_if_absent(i, w[3 + i])),
            strides: core::array::from_fn(|i| w[8 + i]),
            box_dims: core::array::from_fn(|i| one_if_absent(i, w[13 + i / 3] >> (i % 3 * 16) & 0xffff) as u32),
            swizzle: (w[2] & 0xff) as u32,
        }
    }
}

/// `cp.async.bulk`: one thread has the TMA unit copy `bytes` (a multiple of 16)
/// into shared memory and count them on `bar`.
///
/// # Safety
/// As for [`cp_async::copy_16`](crate::cp_async::copy_16), until a wait on `bar`.
#[inline(always)]
#[track_caller]
pub unsafe fn copy_bulk<T>(dst: impl SharedAddress, src: *const T, bytes: u32, bar: impl SharedAddress) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        ptx!(
            "{{ .reg .b64 %g; cvta.to.global.u64 %g, {s}; \
             cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{d}], [%g], {n}, [{b}]; }}",
            d = in(reg32) dst.shared_address(), s = in(reg64) src, n = in(reg32) bytes,
            b = in(reg32) bar.shared_address(), options(nostack, preserves_flags)
        )
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::cp_async_bulk(dst.shared_address(), src.cast(), bytes as usize, bar.shared_address());
}

/// The opposite direction: `bytes` (a multiple of 16) from shared to global memory, in the thread's open group.
///
/// # Safety
/// Both are 16-byte aligned; the source stays as it is until a [`wait_group_read`], and nobody accesses the
/// destination unordered.
#[inline(always)]
#[track_caller]
pub unsafe fn store_bulk<T>(dst: *mut T, src: impl SharedAddress, bytes: u32) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        ptx!(
            "{{ .reg .b64 %g; cvta.to.global.u64 %g, {d}; \
             cp.async.bulk.global.shared::cta.bulk_group [%g], [{s}], {n}; }}",
            d = in(reg64) dst, s = in(reg32) src.shared_address(), n = in(reg32) bytes,
            options(nostack, preserves_flags)
        )
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::store_bulk(dst.cast(), src.shared_address(), bytes as usize, false);
}

/// [`store_bulk`] that adds `f32` values to what is there, each addition atomic.
///
/// # Safety
/// As for [`store_bulk`]; others access the destination atomically only.
#[inline(always)]
#[track_caller]
pub unsafe fn add_bulk_f32(dst: *mut f32, src: impl SharedAddress, bytes: u32) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        ptx!(
            "{{ .reg .b64 %g; cvta.to.global.u64 %g, {d}; \
             cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%g], [{s}], {n}; }}",
            d = in(reg64) dst, s = in(reg32) src.shared_address(), n = in(reg32) bytes,
            options(nostack, preserves_flags)
        )
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::store_bulk(dst.cast(), src.shared_address(), bytes as usize, true);
}

/// The tensor instructions, which differ in the number of coordinates.
#[cfg(target_arch = "nvptx64")]
macro_rules! tensor {
    ($rank:ident, $c:ident, $before:literal, $between:literal, $after:literal, ($($args:tt)*)) => {
        match $rank {
            1 => tensor!(@asm "1d", "{x}", $before, $between, $after, ($($args)*, x = in(reg32) $c[0])),
            2 => tensor!(@asm "2d", "{x}, {y}", $before, $between, $after,
                ($($args)*, x = in(reg32) $c[0], y = in(reg32) $c[1])),
            3 => tensor!(@asm "3d", "{x}, {y}, {z}", $before, $between, $after,
                ($($args)*, x = in(reg32) $c[0], y = in(reg32) $c[1], z = in(reg32) $c[2])),
            4 => tensor!(@asm "4d", "{x}, {y}, {z}, {v}", $before, $between, $after,
                ($($args)*, x = in(reg32) $c[0], y = in(reg32) $c[1], z = in(reg32) $c[2], v = in(reg32) $c[3])),
            _ => tensor!(@asm "5d", "{x}, {y}, {z}, {v}, {w}", $before, $between, $after,
                ($($args)*, x = in(reg32) $c[0], y = in(reg32) $c[1], z = in(reg32) $c[2], v = in(reg32) $c[3],
                 w = in(reg32) $c[4])),
        }
    };
    (@asm $dim:literal, $coords:literal, $before:literal, $between:literal, $after:literal, ($($args:tt)*)) => {
        ptx!(concat!($before, ".", $dim, $between, "{{", $coords, "}}", $after), $($args)*,
            options(nostack, preserves_flags))
    };
}

/// The first coordinates, and zeroes.
#[inline(always)]
fn five<const RANK: usize>(coords: [i32; RANK]) -> [i32; 5] {
    const { assert!(RANK >= 1 && RANK <= 5) };
    let mut all = [0; 5];
    let mut i = 0;
    while i < RANK {
        all[i] = coords[i];
        i += 1;
    }
    all
}

/// Copies the box whose first element has these coordinates (innermost first) into shared memory, and counts its bytes
/// on `bar`. Elements outside the tensor become zero; all bytes of the box count.
///
/// # Safety
/// `dst` is aligned to 128 bytes, and to the swizzle's pattern if there is one; the box's bytes there stay untouched
/// until a wait on `bar`. The map is valid and of rank `RANK`. With one dimension the box starts at a multiple of 16
/// bytes: an H200 calls anything else an illegal instruction (seen; the PTX ISA does not mention it).
#[inline(always)]
#[track_caller]
pub unsafe fn load_tensor<const RANK: usize>(
    dst: impl SharedAddress,
    map: *const TensorMap,
    coords: [i32; RANK],
    bar: impl SharedAddress,
) {
    let c = five(coords);
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        tensor!(
            RANK, c, "cp.async.bulk.tensor",
            ".shared::cluster.global.tile.mbarrier::complete_tx::bytes [{d}], [{m}, ", "], [{b}];",
            (d = in(reg32) dst.shared_address(), m = in(reg64) map, b = in(reg32) bar.shared_address())
        )
    };
    #[cfg(not(target_arch = "nvptx64"))]
    {
        // SAFETY: forwarded to the caller.
        let tile = unsafe { *map }.tile::<RANK>(c);
        simt::cp_async_bulk_tensor(dst.shared_address(), &tile, c, bar.shared_address());
    }
}

/// [`load_tensor`] with a policy for the second-level cache.
///
/// # Safety
/// As for [`load_tensor`].
#[inline(always)]
#[track_caller]
pub unsafe fn load_tensor_for<const RANK: usize>(
    dst: impl SharedAddress,
    map: *const TensorMap,
    coords: [i32; RANK],
    bar: impl SharedAddress,
    policy: Policy,
) {
    #[cfg(target_arch = "nvptx64")]
    {
        let c = five(coords);
        // SAFETY: forwarded to the caller.
        unsafe {
            tensor!(
                RANK, c, "cp.async.bulk.tensor",
                ".shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [{d}], [{m}, ",
                "], [{b}], {p};",
                (d = in(reg32) dst.shared_address(), m = in(reg64) map, b = in(reg32) bar.shared_address(),
                 p = in(reg64) policy.bits())
            )
        };
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let _ = policy;
        // SAFETY: forwarded to the caller.
        unsafe { load_tensor(dst, map, coords, bar) }
    }
}

/// Asks for a box in the second-level cache: `cp.async.bulk.prefetch.tensor`.
///
/// # Safety
/// The map is valid and of rank `RANK`.
#[inline(always)]
pub unsafe fn prefetch_tensor<const RANK: usize>(map: *const TensorMap, coords: [i32; RANK]) {
    #[cfg(target_arch = "nvptx64")]
    {
        let c = five(coords);
        // SAFETY: forwarded to the caller.
        unsafe {
            tensor!(RANK, c, "cp.async.bulk.prefetch.tensor", ".L2.global.tile [{m}, ", "];", (m = in(reg64) map))
        };
    }
    #[cfg(not(target_arch = "nvptx64"))]
    let _ = (map, coords);
}

/// [`load_tensor`] to the same place in every block of the cluster whose bit is in `blocks`; the mbarrier at the place
/// of `bar` in each of them counts the bytes.
///
/// # Safety
/// As for [`load_tensor`], in each of the blocks. The launch has clusters, which this needs.
#[inline(always)]
#[track_caller]
pub unsafe fn load_tensor_multicast<const RANK: usize>(
    dst: impl SharedAddress,
    map: *const TensorMap,
    coords: [i32; RANK],
    bar: impl SharedAddress,
    blocks: u16,
) {
    let c = five(coords);
    #[cfg(target_arch = "nvptx64")]
    {
        // SAFETY: forwarded to the caller.
        unsafe {
            tensor!(
                RANK, c, "cp.async.bulk.tensor",
                ".shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [{d}], [{m}, ",
                "], [{b}], {k};",
                (d = in(reg32) dst.shared_address(), m = in(reg64) map, b = in(reg32) bar.shared_address(),
                 k = in(reg16) blocks)
            )
        };
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        // SAFETY: forwarded to the caller.
        let tile = unsafe { *map }.tile::<RANK>(c);
        simt::cp_async_bulk_tensor_multicast(dst.shared_address(), &tile, c, bar.shared_address(), blocks);
    }
}

/// [`load_tensor_multicast`] with a policy for the second-level cache.
///
/// # Safety
/// As for [`load_tensor_multicast`].
#[inline(always)]
#[track_caller]
pub unsafe fn load_tensor_multicast_for<const RANK: usize>(
    dst: impl SharedAddress,
    map: *const TensorMap,
    coords: [i32; RANK],
    bar: impl SharedAddress,
    blocks: u16,
    policy: Policy,
) {
    #[cfg(target_arch = "nvptx64")]
    {
        let c = five(coords);
        // SAFETY: forwarded to the caller.
        unsafe {
            tensor!(
                RANK, c, "cp.async.bulk.tensor",
                ".shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [{d}], [{m}, ",
                "], [{b}], {k}, {p};",
                (d = in(reg32) dst.shared_address(), m = in(reg64) map, b = in(reg32) bar.shared_address(),
                 k = in(reg16) blocks, p = in(reg64) policy.bits())
            )
        };
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let _ = policy;
        // SAFETY: forwarded to the caller.
        unsafe { load_tensor_multicast(dst, map, coords, bar, blocks) }
    }
}

/// Copies a box from shared memory to the tensor, in the thread's open group. Elements outside the tensor are skipped.
///
/// An H200 was seen to write beyond the end of rows that are no multiple of 16 bytes, so boxes must not reach there.
///
/// # Safety
/// `src` is aligned as for [`load_tensor`] and stays as it is until a [`wait_group_read`]; nobody accesses the
/// destination unordered. The map is valid and of rank `RANK`.
#[inline(always)]
#[track_caller]
pub unsafe fn store_tensor<const RANK: usize>(map: *const TensorMap, coords: [i32; RANK], src: impl SharedAddress) {
    let c = five(coords);
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        tensor!(
            RANK, c, "cp.async.bulk.tensor", ".global.shared::cta.tile.bulk_group [{m}, ", "], [{s}];",
            (m = in(reg64) map, s = in(reg32) src.shared_address())
        )
    };
    #[cfg(not(target_arch = "nvptx64"))]
    {
        // SAFETY: forwarded to the caller.
        let tile = unsafe { *map }.tile::<RANK>(c);
        check_stored(&tile, c);
        simt::store_bulk_tensor(&tile, c, src.shared_address(), false);
    }
}

/// [`store_tensor`] that adds to what is there, each addition atomic. On the SIMT device for `f32` tensors only.
///
/// # Safety
/// As for [`store_tensor`]; others access the destination atomically only.
#[inline(always)]
#[track_caller]
pub unsafe fn add_tensor<const RANK: usize>(map: *const TensorMap, coords: [i32; RANK], src: impl SharedAddress) {
    let c = five(coords);
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        tensor!(
            RANK, c, "cp.reduce.async.bulk.tensor", ".global.shared::cta.add.tile.bulk_group [{m}, ", "], [{s}];",
            (m = in(reg64) map, s = in(reg32) src.shared_address())
        )
    };
    #[cfg(not(target_arch = "nvptx64"))]
    {
        // SAFETY: forwarded to the caller.
        let tile = unsafe { *map }.tile::<RANK>(c);
        // SAFETY: as above.
        if unsafe { (*map).0[2] } >> 48 != crate::DType::F32 as u64 {
            simt::trap("the SIMT device adds boxes of f32 only");
        }
        check_stored(&tile, c);
        simt::store_bulk_tensor(&tile, c, src.shared_address(), true);
    }
}

/// A box that reaches beyond rows that are no multiple of 16 bytes.
#[cfg(not(target_arch = "nvptx64"))]
#[track_caller]
fn check_stored(tile: &simt::TensorTile, coords: [i32; 5]) {
    let row = tile.dims[0] as usize * tile.element;
    if !row.is_multiple_of(16) && i64::from(coords[0]) + i64::from(tile.box_dims[0]) > tile.dims[0] as i64 {
        simt::trap(format!("a box stored beyond the end of rows of {row} bytes, which is no multiple of 16"));
    }
}

/// `cp.async.bulk.commit_group`: ends the group of the thread's stores since the last one.
#[inline(always)]
pub fn commit_group() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: concerns this thread's copies only.
    unsafe {
        ptx!("cp.async.bulk.commit_group;", options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::bulk_commit();
}

/// Waits until at most the latest `N` groups of the thread still read their source in shared memory. A block may not end
/// before.
#[inline(always)]
#[track_caller]
pub fn wait_group_read<const N: usize>() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: waits.
    unsafe {
        ptx!("cp.async.bulk.wait_group.read {n};", n = const N, options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::bulk_wait(N);
}

/// Waits until at most the latest `N` groups of the thread are under way: what the others wrote is visible to it.
#[inline(always)]
#[track_caller]
pub fn wait_group<const N: usize>() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: waits.
    unsafe {
        ptx!("cp.async.bulk.wait_group {n};", n = const N, options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::bulk_wait(N);
}

/// Brings a tensor map into the cache for descriptors: `prefetch.tensormap`.
#[inline(always)]
pub fn prefetch_map(map: *const TensorMap) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: a hint.
    unsafe {
        ptx!("prefetch.tensormap [{m}];", m = in(reg64) map, options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    let _ = map;
}

/// Orders this thread's ordinary accesses to shared memory before later ones of the copy engine and of
/// [`wgmma`](crate::wgmma): `fence.proxy.async.shared::cta`.
#[inline(always)]
pub fn fence_async() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: a fence.
    unsafe {
        ptx!("fence.proxy.async.shared::cta;", options(nostack, preserves_flags))
    };
}

/// Orders what this thread has seen of ordinary accesses to global memory before later ones of the copy engine: `fence.proxy.async.global`.
#[inline(always)]
pub fn fence_async_global() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: a fence.
    unsafe {
        ptx!("fence.proxy.async.global;", options(nostack, preserves_flags))
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swizzled_boxes_fill_their_lines() {
        let refused = |swizzle, elements| {
            let description = TensorMapDescription {
                base: 0,
                dtype: DType::F32,
                rank: 2,
                dims: [64, 8, 1, 1, 1],
                strides: [256, 0, 0, 0],
                box_dims: [elements, 8, 1, 1, 1],
                swizzle,
            };
            description.validate().is_err_and(|e| e.contains("a whole line of the swizzle"))
        };
        for (swizzle, line) in [(Swizzle::B32, 8), (Swizzle::B64, 16), (Swizzle::B128, 32)] {
            assert!(!refused(swizzle, line) && !refused(Swizzle::None, line));
            assert!(refused(swizzle, line - 4) && refused(swizzle, line + 4));
            assert!(!refused(Swizzle::None, line - 4));
        }
    }
}
