//! Philox4x32-10: random numbers as a function of (seed, subsequence, offset).
//!
//! Source: Salmon, Moraes, Dror and Shaw, *Parallel random numbers: as easy as 1, 2, 3*, SC 2011. Key and counter are laid
//! out as cuRAND's `curandStatePhilox4_32_10_t` does it, so that [`draw`] is the first `curand()` after
//! `curand_init(seed, subsequence, offset)`.
//!
//! Used by kernels of several families, so it lies outside of all of them.

use cuda_std::float;

/// Ten rounds of Philox4x32.
#[inline(always)]
pub const fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    let mut round = 0;
    while round < 10 {
        let p0 = c0 as u64 * 0xd251_1f53;
        let p1 = c2 as u64 * 0xcd9e_8d57;
        (c0, c2) = ((p1 >> 32) as u32 ^ c1 ^ k0, (p0 >> 32) as u32 ^ c3 ^ k1);
        (c1, c3) = (p1 as u32, p0 as u32);
        k0 = k0.wrapping_add(0x9e37_79b9);
        k1 = k1.wrapping_add(0xbb67_ae85);
        round += 1;
    }
    [c0, c1, c2, c3]
}

/// Four times 32 bits: those with the numbers `4 block` to `4 block + 3` of a subsequence.
#[inline(always)]
pub const fn draw_four(seed: u64, subsequence: u64, block: u64) -> [u32; 4] {
    let counter = [block as u32, (block >> 32) as u32, subsequence as u32, (subsequence >> 32) as u32];
    philox4x32_10(counter, [seed as u32, (seed >> 32) as u32])
}

/// The 32 bits number `offset` of a subsequence.
#[inline(always)]
pub const fn draw(seed: u64, subsequence: u64, offset: u64) -> u32 {
    let [a, b, c, d] = draw_four(seed, subsequence, offset / 4);
    match offset % 4 {
        0 => a,
        1 => b,
        2 => c,
        _ => d,
    }
}

/// Two independent normally distributed numbers from twice 32 bits: `r sin a` and `r cos a` with `r = sqrt(-2 ln u)`, `u = (x +
/// 1/2) / 2^32` and `a = 2 pi (y + 1/2) / 2^32` (Box and Muller 1958). None is larger than 6.77.
///
/// `ln u` is taken by way of `1 - u` where that is the smaller one, so that small numbers are as accurate as large ones.
#[inline(always)]
pub fn normals(x: u32, y: u32) -> [f32; 2] {
    const UNIT: f32 = 1.0 / 4_294_967_296.0;
    let part = |bits: u32| float::fma(bits as f32, UNIT, 0.5 * UNIT);
    let ln = if x >> 31 == 0 { float::log(part(x)) } else { float::log1p(-part(!x)) };
    let r = float::sqrt(-2.0 * ln);
    let (sin, cos) = float::sin_cos(core::f32::consts::TAU * part(y));
    [r * sin, r * cos]
}
