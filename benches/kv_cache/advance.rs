//! A step of decoding, for so many sequences.

use super::block;
use warploom::Tensor;
use warploom::kv_cache::{CacheShape, advance};
use warploom_benches::{Cost, Harness};

pub fn benches(harness: &mut Harness) {
    // Far more blocks of a sequence than launches fill.
    const BLOCKS: usize = 4096;
    for &n in harness.pick(&[1, 16, 256, 1024][..], &[1, 16]) {
        let cost = Cost::bytes(n * (4 + 4), n * (4 + 8 + 8 + 4));
        harness.case(&format!("kv_cache/advance/{n}"), cost, |device, _, _| {
            let table: Vec<i32> = (0..n * BLOCKS).map(|i| block(i, BLOCKS) as i32).collect();
            let table = Tensor::from_slice(device, &table, &[n, BLOCKS])?;
            let mut lens = Tensor::from_slice(device, &vec![1i32; n], &[n])?;
            let (mut positions, mut slots) =
                (Tensor::<i32>::uninit(device, &[n])?, Tensor::<i64>::uninit(device, &[n])?);
            let mut counters = Tensor::<u64>::uninit(device, &[n])?;
            let shape = CacheShape::new(BLOCKS, 16, 8, 128);
            Ok(move |s: &_| advance(s, &mut lens, &mut positions, &mut slots, Some(&mut counters), None, &table, shape))
        });
    }
}
