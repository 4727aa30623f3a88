//! Extents that no memory has: an error or the largest number, never a panic, and never a tensor over memory that is not there.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use warploom::attention::{DecodeShape, DecodeWorkspace};
use warploom::kv_cache::swap::{HostCache, runs};
use warploom::kv_cache::{
    BlockAllocator, CacheLayers, CacheLayout, CacheShape, KvCache, PageStrides, check_slots, check_tables,
};
use warploom::moe::{FusedShape, sort, statistics};
use warploom::rope::{self, Scaling};
use warploom::sampling::top_k_top_p::Layout;
use warploom::sampling::{LogProbs, SamplingWorkspace};
use warploom::{DType, Pinned, Tensor};
use warploom_tests::property;

const LAYOUTS: [CacheLayout; 3] = [CacheLayout::XSplit, CacheLayout::Nhd, CacheLayout::Hnd];

/// Small ones, and such that whatever has one of them and is not empty is larger than any memory.
fn extent() -> impl Strategy<Value = usize> + Clone {
    let large = [1 << 48, (1 << 48) + 1, 1 << 61, 1 << 63, isize::MAX as usize, usize::MAX - 7, usize::MAX];
    prop_oneof![2 => 0usize..9, 1 => select(large.to_vec())]
}

/// The product, if it fits 64 bits, or the largest number.
fn saturated(sizes: &[usize]) -> usize {
    let product = |n: Option<u128>, &d: &usize| n?.checked_mul(d as u128);
    if sizes.contains(&0) {
        return 0;
    }
    sizes.iter().fold(Some(1), product).and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX)
}

/// A workspace for many tokens is one for fewer.
#[test]
fn workspaces_do_not_shrink() {
    let models =
        [(8, 2, 4096, 14336), (128, 8, 2048, 768), (256, 8, 7168, 2048), (32, 4, 2880, 2880), (16, 1, 5120, 8192)];
    for (experts, top_k, hidden, intermediate) in models {
        for dtype in [DType::F32, DType::Bf16] {
            let shape = |tokens| FusedShape::new(tokens, top_k, experts, hidden, intermediate);
            let (mut fused, mut quant) = (0, 0);
            for tokens in (0..600).chain((600..40_000).step_by(37)) {
                let (f, q) = (shape(tokens).workspace_bytes(dtype), shape(tokens).quant_workspace_bytes(dtype));
                assert!(f >= fused && q >= quant, "{experts} experts, {tokens} tokens: {fused} to {f}, {quant} to {q}");
                (fused, quant) = (f, q);
            }
        }
    }
    let around = [8191, 8192, 8193, 32_767, 32_768, 32_769, 262_143, 262_144, 262_145];
    let mut numbers: Vec<usize> = (0..2100).chain((2100..300_000).step_by(61)).chain(around).collect();
    numbers.sort_unstable();
    for bins in [1, 8, 128, 129, 256, 600, 2048] {
        let (mut sorting, mut counting) = (0, 0);
        for &n in &numbers {
            let (s, c) = (sort::workspace_bytes(n, bins), statistics::workspace_bytes(n, bins));
            assert!(s >= sorting && c >= counting, "{n} of {bins}: {sorting} to {s}, {counting} to {c}");
            (sorting, counting) = (s, c);
        }
    }
}

/// A tensor says how many elements it has, and has them.
fn sound(x: &Tensor<u32>) -> Result<(), TestCaseError> {
    let len = x.shape().iter().try_fold(1u128, |n, &d| n.checked_mul(d as u128));
    prop_assert_eq!(len, Some(x.len() as u128));
    prop_assert_eq!(x.is_empty(), x.shape().contains(&0));
    // Of a broadcast view there are more elements than there is memory.
    if x.len() < 1 << 16 {
        prop_assert_eq!(x.to_vec().unwrap().len(), x.len());
    }
    Ok(())
}

#[test]
fn views_stay_in_their_memory() {
    property(200, (vec(extent(), 0..5), vec(extent(), 0..5), extent()), |device, _, (shape, strides, offset)| {
        let few = Tensor::from_slice(device, &[7u32; 24], &[24]).unwrap();
        let rows = few.as_strided(&[3, 4], &[6, 1], 2).unwrap();
        let broadcast = few.as_strided(&[1 << 20, 3, 1 << 20], &[0, 2, 0], 1).unwrap();
        let empty = few.as_strided(&[8, 0, 8], &[1 << 20, 0, 1 << 40], 0).unwrap();
        let views = [&few, &rows, &broadcast, &empty].into_iter().flat_map(|x| {
            sound(x).unwrap();
            [x.reshape(&shape), x.as_strided(&shape, &strides, offset)]
        });
        for view in views.chain([Tensor::zeros(device, &shape)]).flatten() {
            sound(&view)?;
            for d in 0..view.shape().len() {
                let n = view.dim(d);
                sound(&view.narrow(d, n / 2, n - n / 2).unwrap())?;
                prop_assert!(view.narrow(d, n, 1).is_err() && view.narrow(d, 1, usize::MAX).is_err());
            }
            if view.len() < 1 << 16 {
                match view.reshape(&[view.len()]) {
                    Ok(again) => prop_assert_eq!(again.to_vec().unwrap(), view.to_vec().unwrap()),
                    Err(_) => prop_assert!(!view.is_contiguous()),
                }
            }
        }
        Ok(())
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn sizes_are_exact_or_the_largest(e in vec(extent(), 7)) {
        let [a, b, c, d, f, g, h] = e[..] else { unreachable!("seven") };
        let cache = CacheShape::new(a, b, c, d);
        prop_assert_eq!(cache.slots(), saturated(&[a, b]));
        prop_assert_eq!(cache.block_len(), saturated(&[b, c, d]));
        for layout in LAYOUTS {
            for dtype in [DType::F32, DType::Bf16, DType::E4m3] {
                prop_assert_eq!(PageStrides::keys(layout, cache, dtype).block, saturated(&[b, c, d]));
                prop_assert_eq!(PageStrides::values(layout, cache).block, saturated(&[b, c, d]));
            }
        }

        // Of 8000 keys there are several chunks.
        let decode = DecodeShape::new(a, b, c, d, if f < 9 { 1000 * f } else { f }).q_len(g);
        for decode in [decode, decode.chunk(h), decode.chunk(64)] {
            let (floats, tickets) = (decode.partial_floats(), decode.tickets());
            let rows = saturated(&[b.checked_div(c).unwrap_or(0), g]);
            prop_assert!(tickets >= saturated(&[a, c, rows.div_ceil(16)]), "{tickets} for {decode:?}");
            prop_assert!(floats >= tickets || f < 3 || decode.chunk.is_some(), "{floats}, {tickets} for {decode:?}");
            prop_assert!(floats == usize::MAX || f < 9);
        }

        let fused = FusedShape::new(a, b, c, d, f).shared_experts(g);
        prop_assert_eq!(fused.pairs(), saturated(&[a, b.saturating_add(g)]));
        for dtype in [DType::F32, DType::Bf16] {
            let least = saturated(&[fused.pairs(), d, 4]);
            prop_assert!(fused.workspace_bytes(dtype) >= least, "{} bytes", fused.workspace_bytes(dtype));
            prop_assert!(fused.quant_workspace_bytes(dtype) >= least);
        }
        prop_assert!(statistics::workspace_bytes(a, b) >= b || a == 0);
        for keep_empty in [false, true] {
            prop_assert!(sort::capacity(a, b, c.max(1), keep_empty) >= a / c.max(1) * c.max(1));
            sort::capacity(a, b, 0, keep_empty);
        }
        let bytes = sort::workspace_bytes(a, b);
        prop_assert!(bytes == usize::MAX || (a <= i32::MAX as usize && b <= sort::MAX_EXPERTS));
        for adjusted in [false, true] {
            let bytes = Layout::new(a, b, adjusted).bytes();
            prop_assert!(bytes >= a && (!adjusted || bytes >= saturated(&[a, b, 4])));
        }
    }

    #[test]
    fn blocks_and_slots_of_any_number(e in vec(extent(), 6)) {
        let covered: u128 = runs(&[(e[0], e[1]), (e[2], e[3]), (e[4], e[5])]).iter().map(|r| r.len as u128).sum();
        prop_assert_eq!(covered, 3);
        let shape = CacheShape::new(e[0], e[1], e[2], e[3]);
        prop_assert_eq!(check_slots(&[3, -1], shape).is_ok(), saturated(&[e[0], e[1]]) > 3);
        // Three keys in two blocks at most, or in one, which is block 1.
        prop_assert_eq!(check_tables(&[1, 0, -1, -1], &[3, 0], shape).is_ok(), e[1] >= 2 && e[0] >= 2);
        if let Ok(mut blocks) = BlockAllocator::new(e[0], e[1]) {
            let sequence = blocks.start(&[1], 0).unwrap();
            let slot = sequence.slots(0..1).unwrap()[0];
            prop_assert_eq!(slot as u128, sequence.blocks()[0] as u128 * e[1] as u128);
            blocks.free(sequence).unwrap();
        }
    }
}

/// What allocates has what it says, or gives an error.
#[test]
fn what_is_larger_than_memory_is_an_error() {
    property(100, vec(extent(), 5), |device, _, e| {
        let [a, b, c, d, f] = e[..] else { unreachable!("five") };
        let large = |n: usize| n >= 1 << 48;
        if let Ok(workspace) = SamplingWorkspace::with_adjustments(device, a, b) {
            prop_assert!(!large(a) && !large(b), "{:?}", workspace.layout());
        }
        prop_assert!(LogProbs::<i32>::new(device, a, b).is_err() || !large(a));
        prop_assert!(DecodeWorkspace::new(device, DecodeShape::new(a, b, c, d, f)).is_err() || !large(f));
        prop_assert!(Pinned::<u64>::zeros(device, a).map_or(large(a), |p| p.len() == a));
        let cache = rope::cache::<f32>(device, a, b, 1e4, Scaling::None);
        prop_assert!(cache.map_or(true, |x| x.len() == a * b));
        for layout in LAYOUTS {
            let shape = CacheShape::new(a, b, c, d);
            if let Ok(caches) = CacheLayers::<f32>::zeros(device, 1, layout, shape) {
                prop_assert_eq!(caches.shape(), shape);
                if let Ok(host) = HostCache::zeros(&caches, f) {
                    prop_assert!(!large(f));
                    prop_assert_eq!(host.shape().slots(), f * b);
                    prop_assert_eq!(host.block(0, f.max(1) - 1).is_ok(), f > 0);
                }
            }
            prop_assert!(
                CacheLayers::<f32>::zeros(device, a, layout, CacheShape::new(1, 1, 1, 8)).is_err() || !large(a)
            );
            // Nothing in it, so that only what the extents say is there.
            let of = |dims: &[usize]| Tensor::<f32>::uninit(device, dims);
            let (key, value) = match layout {
                CacheLayout::XSplit => (of(&[0, b, c, d, 4]), of(&[0, b, c.wrapping_mul(4), d])),
                _ => (of(&[0, b, c, d]), of(&[0, b, c, d])),
            };
            if let (Ok(key), Ok(value)) = (key, value) {
                let cache = KvCache::from_tensors(layout, key, value);
                prop_assert!(cache.is_err() || !(large(b) || large(c) || large(d)), "{cache:?}");
            }
        }
        Ok(())
    });
}
