use cuda_std::Float;
use proptest::prelude::*;
use warploom::moe::sort::{capacity, workspace_bytes};
use warploom::moe::{SortInput, SortOptions, SortOutput, permute, unpermute};
use warploom::{Device, Error, Stream, Tensor, bf16, f16, reference};
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
