//! Strides of the host against the address arithmetic of the kernels.

use proptest::prelude::*;
use warploom::DType;
use warploom::kernels::kv_cache::layout::{Flat, PageLayout, XSplitKey, XSplitValue, split_slot};
use warploom::kv_cache::{CacheLayout, CacheShape, PageStrides};

fn place<L: PageLayout>(s: PageStrides, shape: CacheShape, (block, head, token, dim): (usize, u32, u32, u32)) -> usize {
    let layout = L::new(s.block, s.head, s.token, shape.block_size as u32);
    layout.page(block, head) + layout.within(token, dim)
}

proptest! {
    #[test]
    fn kernels_and_host_agree_on_every_place(
        (block_size, heads, parts) in (1usize..130, 1usize..50, 1usize..17),
        at in any::<[u32; 4]>(),
        blocks in 1usize..1 << 22,
    ) {
        let shape = CacheShape::new(blocks, block_size, heads, 16 * parts);
        let (block, head) = (at[0] as usize % blocks, at[1] % heads as u32);
        let (token, dim) = (at[2] % block_size as u32, at[3] % (16 * parts) as u32);
        let place_of = (block, head, token, dim);
        let index = |s: PageStrides| s.index(block, head as usize, token as usize, dim as usize);
        for layout in [CacheLayout::Nhd, CacheLayout::Hnd] {
            let s = PageStrides::keys(layout, shape, DType::F16);
            prop_assert_eq!(place::<Flat>(s, shape, place_of), index(s));
            prop_assert_eq!(s, PageStrides::values(layout, shape));
        }
        let s = PageStrides::keys(CacheLayout::XSplit, shape, DType::E4m3);
        prop_assert_eq!(place::<XSplitKey<16>>(s, shape, place_of), index(s));
        let s = PageStrides::keys(CacheLayout::XSplit, shape, DType::Bf16);
        prop_assert_eq!(place::<XSplitKey<8>>(s, shape, place_of), index(s));
        let s = PageStrides::keys(CacheLayout::XSplit, shape, DType::F32);
        prop_assert_eq!(place::<XSplitKey<4>>(s, shape, place_of), index(s));
        let s = PageStrides::values(CacheLayout::XSplit, shape);
        prop_assert_eq!(place::<XSplitValue>(s, shape, place_of), index(s));
    }

    #[test]
    fn slots_split_by_division(slot in 0..1u64 << 50, block_size in 1u32..1000, shift in 0u32..51) {
        let slot = slot >> shift;
        for block_size in [block_size, block_size.next_power_of_two()] {
            // SAFETY: not 0.
            let (block, token) = unsafe { split_slot(slot, block_size) };
            prop_assert_eq!((block as u64, token as u64), (slot / block_size as u64, slot % block_size as u64));
        }
    }
}

#[test]
fn every_element_has_a_place_of_its_own() {
    let shape = CacheShape::new(2, 3, 2, 16);
    for layout in [CacheLayout::XSplit, CacheLayout::Nhd, CacheLayout::Hnd] {
        for strides in [PageStrides::keys(layout, shape, DType::F16), PageStrides::values(layout, shape)] {
            let mut seen = vec![false; 2 * shape.block_len()];
            for (b, h) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                for (t, d) in (0..3).flat_map(|t| (0..16).map(move |d| (t, d))) {
                    assert!(!std::mem::replace(&mut seen[strides.index(b, h, t, d)], true));
                }
            }
            assert!(seen.iter().all(|s| *s));
        }
    }
}
