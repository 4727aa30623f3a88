use cuda_std::Float;
use proptest::prelude::*;
use warploom::moe::sort::{capacity, workspace_bytes};
use warploom::moe::{Local, SortInput, SortOptions, SortOutput, permute, unpermute};
use warploom::{Device, E4M3, Element, Error, Graph, Stream, Tensor, bf16, f16, reference};
use warploom_tests::{assert_close, noise, noise_of, on_every_device, property, widen};

/// Permutes and goes back, with padding, and experts that are none.
fn check<T: Float>(d: &Device, s: &Stream, shape: [usize; 4], align: usize, weighted: bool, offset: usize) {
    let [tokens, slots, experts, n] = shape;
    let ids: Vec<i32> = noise(tokens * slots, 1).iter().map(|x| ((x + 1.0) * experts as f32) as i32 - 1).collect();
    let x = noise_of::<T>(tokens * (n + offset), 2);
    let length = capacity(tokens * slots, experts, align, false) + 3;
    let options = SortOptions::default().block_size(align);
    let (identity, labels): (Vec<_>, Vec<_>) = (0..experts as i32).map(|e| (e, Some(e))).unzip();
    let none = vec![0.0; ids.len()];
    let sorted = reference::moe::sort(&ids, &none, tokens, tokens, slots, &identity, &labels, &options);

    let dx = Tensor::from_slice(d, &x, &[tokens, n + offset]).unwrap().narrow(1, offset, n).unwrap();
    let dids = Tensor::from_slice(d, &ids, &[tokens, slots]).unwrap();
    let [mut list, mut blocks, mut totals] =
        [length, length / align, 1].map(|n| Tensor::<i32>::uninit(d, &[n]).unwrap());
    let mut positions = Tensor::<i32>::uninit(d, &[tokens, slots]).unwrap();
    let mut offsets = Tensor::<i32>::uninit(d, &[experts + 1]).unwrap();
    let mut permuted = Tensor::<T>::uninit(d, &[length, n]).unwrap();
    s.fill_bytes(&mut permuted, 0xff).unwrap();
    let mut workspace = Tensor::zeros(d, &[workspace_bytes(tokens * slots, experts)]).unwrap();
    let mut out = SortOutput::new(&mut list, &mut blocks, &mut totals).positions(&mut positions).offsets(&mut offsets);
    permute(s, &mut permuted, &mut out, &dx, &SortInput::new(&dids, experts), &options, &mut workspace).unwrap();
    assert_eq!(offsets.to_vec().unwrap(), sorted.offsets);
    assert_eq!(positions.to_vec().unwrap(), sorted.positions);
    let x = widen(&dx.to_vec().unwrap());
    let mut rows = vec![0.0; length * n];
    for (i, &place) in sorted.positions.iter().enumerate().filter(|(_, p)| **p >= 0) {
        rows[place as usize * n..][..n].copy_from_slice(&x[i / slots * n..][..n]);
    }
    assert_eq!(widen(&permuted.to_vec().unwrap()), rows);

    let weights = noise(tokens * slots, 3);
    let dw = Tensor::from_slice(d, &weights, &[tokens, slots]).unwrap();
    // Rows with a gap after them, which vectors can skip or not.
    let gap = [0, 8, 3][tokens % 3];
    let mut wide = Tensor::<T>::uninit(d, &[tokens, n + gap]).unwrap();
    s.fill_bytes(&mut wide, 0xff).unwrap();
    let mut back = wide.narrow(1, 0, n).unwrap();
    unpermute(s, &mut back, &permuted, &positions, weighted.then_some(&dw), Some(&dx)).unwrap();
    let weights: Vec<f64> = weights.iter().map(|&w| if weighted { w as f64 } else { 1.0 }).collect();
    let want = reference::moe::unpermute(&rows, &sorted.positions, &weights, &x, slots, n);
    assert_close(&back.to_vec().unwrap(), &want, (slots + 2) as f64 * 2f64.powi(-24), slots as f64);
    assert!(widen(&wide.narrow(1, n, gap).unwrap().to_vec().unwrap()).iter().all(|x| x.is_nan()));
}

#[test]
fn matches_the_reference() {
    let shape = ((0usize..30, 1usize..20, 1usize..20, 1usize..50), 1usize..9, any::<bool>(), 0usize..2);
    property(6, shape, |d, s, ((tokens, slots, experts, n), align, weighted, offset)| {
        check::<f32>(d, s, [tokens, slots, experts, n], align, weighted, offset);
        check::<f16>(d, s, [tokens, slots, experts, n], align, weighted, offset);
        check::<bf16>(d, s, [tokens, slots, experts, 8 * n], align, weighted, 0);
        Ok(())
    });
}

#[test]
fn long_rows() {
    on_every_device(|d, s| {
        check::<bf16>(d, s, [3, 2, 4, 4104], 16, true, 0);
        check::<f16>(d, s, [2, 1, 4, 1031], 1, true, 0);
    });
}

/// Rows that nothing wider than a byte moves, because of their width or of where they begin, and rows of bytes that wider units move.
#[test]
fn rows_of_bytes() {
    fn check<T: Element + PartialEq + std::fmt::Debug>(d: &Device, s: &Stream, of: impl Fn(usize) -> T) {
        for (n, offset) in [(13, 0), (16, 1), (16, 0), (6, 0), (4, 4), (1, 0), (300, 3)] {
            let (tokens, experts) = (4, 3);
            let ids = [2, 0, 1, 2, -1, 1, 0, 2];
            let x: Vec<T> = (0..tokens * (n + offset)).map(&of).collect();
            let dx = Tensor::from_slice(d, &x, &[tokens, n + offset]).unwrap().narrow(1, offset, n).unwrap();
            let dids = Tensor::from_slice(d, &ids, &[tokens, 2]).unwrap();
            let length = capacity(8, experts, 2, false);
            let [mut list, mut blocks, mut totals] =
                [length, length / 2, 1].map(|n| Tensor::<i32>::uninit(d, &[n]).unwrap());
            let mut permuted = Tensor::<T>::uninit(d, &[length, n]).unwrap();
            s.fill_bytes(&mut permuted, 0xff).unwrap();
            let mut out = SortOutput::new(&mut list, &mut blocks, &mut totals);
            let options = SortOptions::default().block_size(2);
            let mut none = Tensor::zeros(d, &[0]).unwrap();
            permute(s, &mut permuted, &mut out, &dx, &SortInput::new(&dids, experts), &options, &mut none).unwrap();
            let (list, got, rows) = (list.to_vec().unwrap(), permuted.to_vec().unwrap(), dx.to_vec().unwrap());
            let zeros = Tensor::<T>::zeros(d, &[n]).unwrap().to_vec().unwrap();
            for (row, &pair) in got.chunks(n).zip(&list) {
                let want = rows.chunks(n).nth(pair as usize / 2).unwrap_or(&zeros);
                assert_eq!(row, want, "{} x {n}, {offset} further on", T::DTYPE);
            }
            assert_eq!(list.iter().filter(|&&pair| pair < 8).count(), 7);
        }
    }
    on_every_device(|d, s| {
        check(d, s, |i| (i * 7 % 251) as u8 as i8);
        check(d, s, |i| E4M3((i * 7 % 126) as u8));
    });
}

/// Experts elsewhere, shared ones that every token goes to, and a number of tokens on the device that another replay finds changed.
#[test]
fn parts_of_a_batch_by_replays() {
    on_every_device(|d, s| {
        let (room, top_k, experts, n, block) = (9, 3, 6, 20, 4);
        let x = noise_of::<bf16>(room * n, 2);
        let ids: Vec<i32> = noise(room * top_k, 1).iter().map(|x| ((x + 1.0) * 4.0) as i32 - 1).collect();
        let mut dx = Tensor::from_slice(d, &x, &[room, n]).unwrap();
        let mut dids = Tensor::from_slice(d, &ids, &[room, top_k]).unwrap();
        let all: Vec<i32> = (0..experts as i32).collect();
        for (map, shared) in
            [(all.clone(), 0), (vec![1, -1, 0, -1, -1, 2], 0), (all, 2), (vec![-1, 0, -1, 1, 2, -1], 1)]
        {
            let local = map.iter().filter(|&&e| e >= 0).count();
            let (slots, bins) = (top_k + shared, local + shared);
            let options = SortOptions::default().block_size(block).shared_experts(shared, true);
            let length = capacity(room * slots, bins, block, false);
            let dmap = Tensor::from_slice(d, &map, &[experts]).unwrap();
            let mut count = Tensor::from_slice(d, &[5], &[1]).unwrap();
            let input = SortInput::new(&dids, experts).num_tokens(&count).local(Local::Map(&dmap, local));
            let [mut list, mut blocks, mut totals] =
                [length, length / block, 1].map(|n| Tensor::<i32>::uninit(d, &[n]).unwrap());
            let mut positions = Tensor::<i32>::uninit(d, &[room, slots]).unwrap();
            let mut permuted = Tensor::<bf16>::uninit(d, &[length, n]).unwrap();
            let mut back = Tensor::<bf16>::uninit(d, &[room, n]).unwrap();
            let weights = noise(room * slots, 3);
            let dweights = Tensor::from_slice(d, &weights, &[room, slots]).unwrap();
            let mut workspace = Tensor::zeros(d, &[workspace_bytes(room * slots, bins)]).unwrap();
            d.preload(&["moe"]).unwrap();
            let graph = Graph::capture(s, |s| {
                let mut out = SortOutput::new(&mut list, &mut blocks, &mut totals).positions(&mut positions);
                permute(s, &mut permuted, &mut out, &dx, &input, &options, &mut workspace)?;
                unpermute(s, &mut back, &permuted, &positions, Some(&dweights), Some(&dx))
            })
            .unwrap();
            for (seed, tokens) in [(0, 5), (1, 9), (2, 0), (3, 7)] {
                let x = noise_of::<bf16>(room * n, 2 + seed);
                let ids: Vec<i32> = ids.iter().map(|id| (id + 1 + seed as i32) % (experts as i32 + 1) - 1).collect();
                dx.copy_from_slice(&x).unwrap();
                dids.copy_from_slice(&ids).unwrap();
                count.copy_from_slice(&[tokens as i32]).unwrap();
                s.fill_bytes(&mut permuted, 0xff).unwrap();
                s.fill_bytes(&mut back, 0xff).unwrap();
                graph.launch(s).unwrap();
                let labels: Vec<_> = (0..bins as i32).map(Some).collect();
                let none = vec![0.0; ids.len()];
                let sorted = reference::moe::sort(&ids, &none, tokens, room, top_k, &map, &labels, &options);
                assert_eq!(positions.to_vec().unwrap(), sorted.positions, "{tokens} tokens, {map:?}, {shared}");
                let x = widen(&x);
                let mut rows = vec![0.0; length * n];
                for (pair, &place) in sorted.positions.iter().enumerate().filter(|(_, p)| **p >= 0) {
                    rows[place as usize * n..][..n].copy_from_slice(&x[pair / slots * n..][..n]);
                }
                assert_eq!(widen(&permuted.to_vec().unwrap()), rows, "{tokens} tokens, {map:?}, {shared}");
                let wide: Vec<f64> = weights.iter().map(|&w| w as f64).collect();
                let want = reference::moe::unpermute(&rows, &sorted.positions, &wide, &x, slots, n);
                assert_close(&back.to_vec().unwrap(), &want, (slots + 2) as f64 * 2f64.powi(-24), slots as f64);
            }
        }
    });
}

/// Positions that are no row of `y` are none.
#[test]
fn positions_of_nothing() {
    on_every_device(|d, s| {
        let y = Tensor::from_slice(d, &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], &[2, 4]).unwrap();
        let x = Tensor::from_slice(d, &[9.0f32; 8], &[2, 4]).unwrap();
        let positions = [i32::MIN, 1, -2, 2, i32::MAX, -1];
        let positions = Tensor::from_slice(d, &positions, &[2, 3]).unwrap();
        let mut out = Tensor::zeros(d, &[2, 4]).unwrap();
        unpermute(s, &mut out, &y, &positions, None, Some(&x)).unwrap();
        assert_eq!(out.to_vec().unwrap(), [5.0, 6.0, 7.0, 8.0, 9.0, 9.0, 9.0, 9.0]);
    });
}

#[test]
fn bad_input() {
    on_every_device(|d, s| {
        let t = |shape: &[usize]| Tensor::<f32>::zeros(d, shape).unwrap();
        let positions = Tensor::<i32>::zeros(d, &[3, 2]).unwrap();
        let y = t(&[6, 4]);
        assert!(unpermute(s, &mut t(&[3, 4]), &y, &positions, None, None).is_ok());
        let e = unpermute(s, &mut t(&[3, 5]), &y, &positions, None, None);
        assert!(matches!(e, Err(Error::Shape { arg: "out", .. })), "{e:?}");
        let e = unpermute(s, &mut t(&[3, 4]), &y, &positions, Some(&t(&[3, 3])), None);
        assert!(matches!(e, Err(Error::Shape { arg: "topk_weights", .. })), "{e:?}");
        let e = unpermute(s, &mut t(&[3, 4]), &y, &positions, None, Some(&t(&[4, 4])));
        assert!(matches!(e, Err(Error::Shape { arg: "pass_through", .. })), "{e:?}");
        let e = unpermute(s, &mut y.narrow(0, 0, 3).unwrap(), &y, &positions, None, None);
        assert!(matches!(e, Err(Error::Overlap { .. })), "{e:?}");

        let ids = Tensor::<i32>::zeros(d, &[3, 2]).unwrap();
        let list = |n: usize| Tensor::<i32>::zeros(d, &[n]).unwrap();
        let run = |rows: &[usize], x: &[usize], options: &SortOptions| {
            let [mut a, mut b, mut c] = [list(6), list(6), list(1)];
            let mut out = SortOutput::new(&mut a, &mut b, &mut c);
            let mut workspace = Tensor::zeros(d, &[0]).unwrap();
            permute(s, &mut t(rows), &mut out, &t(x), &SortInput::new(&ids, 4), options, &mut workspace)
        };
        let options = SortOptions::default().block_size(1);
        assert!(run(&[6, 8], &[3, 8], &options).is_ok());
        let e = run(&[5, 8], &[3, 8], &options);
        assert!(matches!(e, Err(Error::Shape { arg: "permuted", .. })), "{e:?}");
        let e = run(&[6, 8], &[4, 8], &options);
        assert!(matches!(e, Err(Error::Shape { arg: "input.topk_ids", .. })), "{e:?}");
        let e = run(&[6, 8], &[3, 8], &options.convention(warploom::moe::SortConvention::Packed));
        assert!(matches!(e, Err(Error::Value { arg: "convention", .. })), "{e:?}");
        let e = run(&[6, 8], &[3, 8], &options.block_size(4));
        assert!(matches!(e, Err(Error::Value { arg: "out.sorted_ids", .. })), "{e:?}");
        let e = run(&[6, 8], &[3, 8], &options.shared_experts(usize::MAX, true));
        assert!(matches!(e, Err(Error::Value { .. })), "{e:?}");
        // The copy reads the list while it writes rows, and after sorting: neither rows may be in it.
        let shared = list(24);
        for x_too in [false, true] {
            let (mut a, mut b, mut c) = (shared.narrow(0, 6, 6).unwrap(), list(6), list(1));
            let mut out = SortOutput::new(&mut a, &mut b, &mut c);
            let rows = shared.reshape(&[6, 4]).unwrap();
            let (to, x) =
                if x_too { (list(24), rows.narrow(0, 0, 3)) } else { (shared.clone(), list(12).reshape(&[3, 4])) };
            let (mut to, mut none) = (to.reshape(&[6, 4]).unwrap(), Tensor::zeros(d, &[0]).unwrap());
            let e = permute(s, &mut to, &mut out, &x.unwrap(), &SortInput::new(&ids, 4), &options, &mut none);
            assert!(matches!(e, Err(Error::Overlap { .. })), "{e:?}");
        }
    });
}
