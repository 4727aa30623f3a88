//! Philox4x32-10, as the paper (Salmon et al., SC 2011) writes it.

/// The ten rounds on a counter and a key.
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut x, mut k) = (counter, key);
    for _ in 0..10 {
        let product = |multiplier: u32, v: u32| {
            let p = u64::from(multiplier) * u64::from(v);
            ((p >> 32) as u32, p as u32)
        };
        let (hi0, lo0) = product(0xD251_1F53, x[0]);
        let (hi1, lo1) = product(0xCD9E_8D57, x[2]);
        x = [hi1 ^ x[1] ^ k[0], lo1, hi0 ^ x[3] ^ k[1], lo0];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    x
}

/// What cuRAND's `curand()` returns first after `curand_init(seed, subsequence, offset)` of a Philox4_32_10 state.
pub fn curand(seed: u64, subsequence: u64, offset: u64) -> u32 {
    let split = |v: u64| [v as u32, (v >> 32) as u32];
    let ([c0, c1], [c2, c3]) = (split(offset / 4), split(subsequence));
    philox4x32_10([c0, c1, c2, c3], split(seed))[(offset % 4) as usize]
}
