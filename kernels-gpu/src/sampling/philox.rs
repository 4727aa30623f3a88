//! Philox4x32-10: random numbers as a function of (seed, subsequence, offset).
//!
//! Source: Salmon, Moraes, Dror and Shaw, *Parallel random numbers: as easy as 1, 2, 3*, SC 2011. Key and counter are laid
//! out as cuRAND's `curandStatePhilox4_32_10_t` does it, so that [`draw`] is the first `curand()` after
//! `curand_init(seed, subsequence, offset)`.

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

/// The 32 bits number `offset` of a subsequence.
#[inline(always)]
pub const fn draw(seed: u64, subsequence: u64, offset: u64) -> u32 {
    let block = offset / 4;
    let counter = [block as u32, (block >> 32) as u32, subsequence as u32, (subsequence >> 32) as u32];
    let [a, b, c, d] = philox4x32_10(counter, [seed as u32, (seed >> 32) as u32]);
    match offset % 4 {
        0 => a,
        1 => b,
        2 => c,
        _ => d,
    }
}
