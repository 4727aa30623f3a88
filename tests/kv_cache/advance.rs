use proptest::prelude::*;
use warploom::kv_cache::{CacheShape, advance};
use warploom::{Device, Error, Graph, Tensor, reference};
use warploom_tests::{on_every_device, property};

#[test]
fn matches_the_reference() {
    let input = (1usize..6, 1usize..6, 1usize..8, proptest::collection::vec(-2i32..40, 0..40), any::<u32>());
    property(12, input, |d, s, (block_size, max_blocks, blocks, lens, seed)| {
        let shape = CacheShape::new(blocks, block_size, 1, 8);
        let n = lens.len();
        let page = |i: usize| ((seed >> (i % 27)) as usize + i) as i32 % (blocks as i32 + 2) - 1;
        let table: Vec<i32> = (0..n * max_blocks).map(page).collect();
        let mut device_lens = Tensor::from_slice(d, &lens, &[n]).unwrap();
        let mut positions = Tensor::uninit(d, &[n]).unwrap();
        let mut slots = Tensor::uninit(d, &[n]).unwrap();
        let mut counters = Tensor::uninit(d, &[n]).unwrap();
        let device_table = Tensor::from_slice(d, &table, &[n, max_blocks]).unwrap();
        let counted = seed % 2 == 0;
        let given = counted.then_some(&mut counters);
        let mut status = Tensor::from_slice(d, &[5u32], &[1]).unwrap();
        let told = (seed % 3 > 0).then_some(&mut status);
        advance(s, &mut device_lens, &mut positions, &mut slots, given, told, &device_table, shape).unwrap();
        let want = reference::kv_cache::advance(&lens, &table, max_blocks, shape);
        let got: Vec<(i32, i64, i32)> = (positions.to_vec().unwrap().into_iter())
            .zip(slots.to_vec().unwrap())
            .zip(device_lens.to_vec().unwrap())
            .map(|((p, s), l)| (p, s, l))
            .collect();
        prop_assert_eq!(&got, &want);
        if counted {
            let want: Vec<u64> = want.iter().map(|w| w.0.max(0) as u64).collect();
            prop_assert_eq!(counters.to_vec().unwrap(), want);
        }
        let stuck = lens.iter().zip(&got).filter(|(len, row)| **len > 0 && row.1 < 0).count() as u32;
        prop_assert_eq!(status.to_vec().unwrap(), [if seed % 3 > 0 { 5 + stuck } else { 5 }]);
        Ok(())
    });
}

#[test]
fn replayed_it_walks_through_the_blocks() {
    on_every_device(|d, s| {
        let shape = CacheShape::new(9, 2, 1, 8);
        let table = Tensor::from_slice(d, &[7, 3, 8], &[1, 3]).unwrap();
        let mut lens = Tensor::from_slice(d, &[1], &[1]).unwrap();
        let (mut positions, mut slots) = (Tensor::zeros(d, &[1]).unwrap(), Tensor::zeros(d, &[1]).unwrap());
        d.preload(&["kv_cache"]).unwrap();
        let step = Graph::capture(s, |s| advance(s, &mut lens, &mut positions, &mut slots, None, None, &table, shape));
        let step = step.unwrap();
        for expected in [(1, 15), (2, 6), (3, 7), (4, 16), (5, 17), (-1, -1), (-1, -1)] {
            step.launch(s).unwrap();
            assert_eq!((positions.to_vec().unwrap()[0], slots.to_vec().unwrap()[0]), expected);
        }
        assert_eq!(lens.to_vec().unwrap(), [6]);
    });
}

#[test]
fn bad_input() {
    on_every_device(|d, s| {
        let shape = CacheShape::new(4, 2, 1, 8);
        let i = |n: usize| Tensor::<i32>::zeros(d, &[n]).unwrap();
        let slots = |n: usize| Tensor::<i64>::zeros(d, &[n]).unwrap();
        let table = Tensor::<i32>::zeros(d, &[2, 3]).unwrap();
        let e = advance(s, &mut i(3), &mut i(2), &mut slots(2), None, None, &table, shape);
        assert!(matches!(e, Err(Error::Shape { arg: "lens", .. })));
        let e = advance(s, &mut i(2), &mut i(1), &mut slots(2), None, None, &table, shape);
        assert!(matches!(e, Err(Error::Shape { arg: "positions", .. })));
        let e = advance(s, &mut i(2), &mut i(2), &mut slots(3), None, None, &table, shape);
        assert!(matches!(e, Err(Error::Shape { arg: "slots", .. })));
        let e = advance(s, &mut i(2), &mut i(2), &mut slots(2), None, None, &i(6), shape);
        assert!(matches!(e, Err(Error::Shape { arg: "block_table", .. })));
        let mut empty = shape;
        empty.block_size = 0;
        let e = advance(s, &mut i(2), &mut i(2), &mut slots(2), None, None, &table, empty);
        assert!(matches!(e, Err(Error::Value { arg: "shape", .. })));
        let endless = CacheShape::new(4, 1 << 30, 1, 8);
        let e = advance(s, &mut i(2), &mut i(2), &mut slots(2), None, None, &table, endless);
        assert!(matches!(e, Err(Error::Value { arg: "block_table", .. })), "{e:?}");
        let mut same = i(2);
        let mut view = same.narrow(0, 0, 2).unwrap();
        let e = advance(s, &mut same, &mut view, &mut slots(2), None, None, &table, shape);
        assert!(matches!(e, Err(Error::Overlap { .. })));
        let mut foreign = Tensor::<i32>::zeros(&Device::simt(), &[2]).unwrap();
        let e = advance(s, &mut foreign, &mut i(2), &mut slots(2), None, None, &table, shape);
        assert!(matches!(e, Err(Error::WrongDevice { arg: "lens", .. })));
    });
}
