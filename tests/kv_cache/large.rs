//! Caches and batches of more than 2^31 elements, on a GPU: what lands at their ends and what is read from there.

use warploom::kv_cache::{CacheLayers, CacheLayout, CacheShape, KvCache};
use warploom::{Stream, Tensor, bf16, kv_cache};
use warploom_tests::{large_gpu, noise_of};

const SHAPE: CacheShape = CacheShape::new(140_000, 16, 8, 128);
const ROW: usize = SHAPE.heads * SHAPE.head_dim;
/// Between two tokens.
const STRIDE: usize = (1 << 31) + 8;

#[test]
fn large_caches_on_a_gpu() {
    let Some((device, _turn)) = large_gpu(24) else { return };
    let stream = Stream::new(&device).unwrap();
    // Two tokens, one at the start and one at the end, and values behind the keys.
    let input = Tensor::<bf16>::uninit(&device, &[STRIDE + 2 * ROW]).unwrap();
    let rows = noise_of::<bf16>(4 * ROW, 1);
    for (i, start) in [0, ROW, STRIDE, STRIDE + ROW].into_iter().enumerate() {
        input.narrow(0, start, ROW).unwrap().copy_from_slice(&rows[i * ROW..][..ROW]).unwrap();
    }
    let tokens =
        |offset| input.as_strided(&[2, SHAPE.heads, SHAPE.head_dim], &[STRIDE, SHAPE.head_dim, 1], offset).unwrap();
    let wanted = |of: usize| [&rows[of * ROW..][..ROW], &rows[(of + 2) * ROW..][..ROW]].concat();

    for layout in [CacheLayout::XSplit, CacheLayout::Nhd, CacheLayout::Hnd] {
        let mut cache = KvCache::<bf16>::zeros(&device, layout, SHAPE).unwrap();
        let last = SHAPE.blocks - 1;
        let slots = Tensor::from_slice(&device, &[(last * 16 + 15) as i64, (last * 16 + 14) as i64], &[2]).unwrap();
        let options = kv_cache::ReshapeAndCacheOptions::default;
        kv_cache::reshape_and_cache(&stream, &mut cache, None, &tokens(0), &tokens(ROW), &slots, &options()).unwrap();

        let mut layers = CacheLayers::new(vec![cache]).unwrap();
        let pairs = Tensor::from_slice(&device, &[last as i64, 5], &[1, 2]).unwrap();
        kv_cache::copy_blocks(&stream, &mut layers, None, &pairs).unwrap();
        let pairs = Tensor::from_slice(&device, &[5, last as i64 - 1], &[1, 2]).unwrap();
        kv_cache::copy_blocks(&stream, &mut layers, None, &pairs).unwrap();

        for block in [last, 5, last - 1] {
            let table = Tensor::from_slice(&device, &[block as i32], &[1, 1]).unwrap();
            let starts = Tensor::from_slice(&device, &[0, 16], &[2]).unwrap();
            let mut keys = Tensor::<bf16>::zeros(&device, &[16, SHAPE.heads, SHAPE.head_dim]).unwrap();
            let mut values = Tensor::<bf16>::zeros(&device, keys.shape()).unwrap();
            let options = kv_cache::GatherCacheOptions::default();
            let cache = &layers.layers()[0];
            kv_cache::gather_cache(&stream, &mut keys, &mut values, None, cache, &table, &starts, &options).unwrap();
            for (got, want) in [(keys, wanted(0)), (values, wanted(1))] {
                let got = got.to_vec().unwrap();
                assert_eq!(got[15 * ROW..], want[..ROW], "{layout:?}, block {block}");
                assert_eq!(got[14 * ROW..15 * ROW], want[ROW..], "{layout:?}, block {block}");
                assert!(got[..14 * ROW].iter().all(|x| x.to_bits() == 0));
            }
        }
    }
}
