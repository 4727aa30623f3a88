use warploom::kernels::sampling::philox::{draw, philox4x32_10};
use warploom::reference::sampling::philox;
use warploom_tests::noise;

/// Known answers of Random123 (kat_vectors): counter, key, result.
const KNOWN: [([u32; 4], [u32; 2], [u32; 4]); 3] = [
    ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
    ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
    (
        [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
        [0xa409_3822, 0x299f_31d0],
        [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
    ),
];

#[test]
fn known_answers() {
    for (counter, key, want) in KNOWN {
        assert_eq!(philox4x32_10(counter, key), want);
        assert_eq!(philox::philox4x32_10(counter, key), want);
    }
}

/// cuRAND puts the offset's blocks of four in the low half of the counter and the subsequence in the high one.
#[test]
fn numbers_of_a_sequence() {
    let [a, b, c, d] = KNOWN[0].2;
    assert_eq!([0, 1, 2, 3].map(|offset| draw(0, 0, offset)), [a, b, c, d]);
    let (counter, key, want) = KNOWN[2];
    let join = |lo: u32, hi: u32| u64::from(lo) | u64::from(hi) << 32;
    // A block number of 62 bits; its two top bits fall off where offsets count single numbers.
    let block = join(counter[0], counter[1] & 0x3fff_ffff);
    let same = philox4x32_10([counter[0], counter[1] & 0x3fff_ffff, counter[2], counter[3]], key);
    for i in 0..4 {
        assert_eq!(draw(join(key[0], key[1]), join(counter[2], counter[3]), block * 4 + i), same[i as usize]);
    }
    assert_ne!(same, want);
    for v in noise(400, 1).chunks(3).filter(|v| v.len() == 3) {
        let [seed, subsequence, offset] = [v[0], v[1], v[2]].map(|x| (f64::from(x) * 1e18) as i64 as u64);
        assert_eq!(draw(seed, subsequence, offset), philox::curand(seed, subsequence, offset));
    }
}
