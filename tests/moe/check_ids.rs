use warploom::gemm::Quantised;
use warploom::moe::{FusedOptions, FusedQuantOptions, FusedShape, check_ids, fused, fused_quant};
use warploom::{DType, Error, Graph, Stream, Tensor, bf16};
use warploom_tests::on_every_device;

#[test]
fn ids_out_of_range_are_named() {
    on_every_device(|d, s| {
        let check = |ids: &[i32], tokens: usize, experts: usize, count: Option<i32>| {
            let ids = Tensor::from_slice(d, ids, &[tokens, ids.len() / tokens.max(1)]).unwrap();
            let count = count.map(|n| Tensor::from_slice(d, &[n], &[1]).unwrap());
            check_ids(s, &ids, experts, count.as_ref())
        };
        check(&[0, -1, 7, 3], 2, 8, None).unwrap();
        check(&[], 0, 8, None).unwrap();
        check(&[], 3, 8, None).unwrap();
        for bad in [8, -2, i32::MAX, i32::MIN] {
            let e = check(&[0, 1, 2, bad, bad, 3], 3, 8, None);
            assert!(matches!(e, Err(Error::Value { arg: "topk_ids", .. })), "{e:?}");
            let e = e.unwrap_err().to_string();
            assert!(e.contains(&format!("{bad} for token 1 in slot 1 and 1 more")), "{e}");
        }
        // Of tokens that are not there nobody asks.
        check(&[0, 1, 2, 8], 2, 8, Some(1)).unwrap();
        check(&[0, 1, 2, 8], 2, 8, Some(-1)).unwrap();
        for count in [2, 9] {
            let e = check(&[0, 1, 2, 8], 2, 8, Some(count));
            assert!(matches!(e, Err(Error::Value { arg: "topk_ids", .. })), "{e:?}");
        }
        assert!(check(&[0], 1, 0, None).is_err() && check(&[-1], 1, 0, None).is_ok());
        let e = check_ids(s, &Tensor::from_slice(d, &[0], &[1]).unwrap(), 8, None);
        assert!(matches!(e, Err(Error::Shape { arg: "topk_ids", .. })), "{e:?}");
        let ids = Tensor::from_slice(d, &[0, 1], &[2, 1]).unwrap();
        let counts = Tensor::from_slice(d, &[1, 1], &[2]).unwrap();
        let e = check_ids(s, &ids, 8, Some(&counts));
        assert!(matches!(e, Err(Error::Shape { arg: "num_tokens", .. })), "{e:?}");
    });
}

/// The blocks of experts, 4 of them in all: an id out of range is an error before anything is written, or contributes nothing; a shared expert that is listed is in range.
#[test]
fn blocks_of_experts() {
    on_every_device(|d, s| {
        let (tokens, top_k, experts, width) = (3usize, 2usize, 4usize, 16usize);
        let ones =
            |shape: &[usize]| Tensor::from_slice(d, &vec![bf16::from_f32(1.0); shape.iter().product()], shape).unwrap();
        let (x, w13, w2) = (ones(&[tokens, width]), ones(&[experts, 2 * width, width]), ones(&[experts, width, width]));
        let (shared13, shared2) = (ones(&[1, 2 * width, width]), ones(&[1, width, width]));
        let weights = Tensor::from_slice(d, &vec![1.0f32; tokens * top_k], &[tokens, top_k]).unwrap();
        // With room for a shared expert, listed or not.
        let shape = FusedShape::new(tokens, top_k + 1, experts + 1, width, width);
        let bytes = shape.workspace_bytes(DType::Bf16).max(shape.quant_workspace_bytes(DType::Bf16));
        let mut workspace = Tensor::<u8>::uninit(d, &[bytes]).unwrap();
        let poison = bf16::from_f32(77.0);
        let run = |s: &Stream, ids: &[i32], options: &FusedOptions<'_, bf16>, workspace: &mut Tensor<u8>| {
            let ids = Tensor::from_slice(d, ids, &[tokens, top_k]).unwrap();
            let mut out = Tensor::from_slice(d, &[poison; 48], &[tokens, width]).unwrap();
            let result = fused(s, &mut out, &x, &w13, &w2, &ids, &weights, options, workspace);
            (result, out.to_vec().unwrap())
        };
        let (good, bad) = ([0, 1, -1, 3, 2, 0], [0, 1, -1, 3, 4, 0]);
        let plain = FusedOptions::default();
        let checked = plain.checked(true);
        let (result, out) = run(s, &good, &checked, &mut workspace);
        assert!(result.is_ok() && out == run(s, &good, &plain, &mut workspace).1 && !out.contains(&poison));
        let (result, out) = run(s, &bad, &checked, &mut workspace);
        assert!(matches!(result, Err(Error::Value { arg: "topk_ids", .. })), "{result:?}");
        assert!(out.iter().all(|&v| v == poison));
        assert!(run(s, &bad, &plain, &mut workspace).0.is_ok());
        // The last of the ids is that of the shared expert.
        let listed = checked.shared(&shared13, &shared2).shared_listed(true);
        assert!(run(s, &bad, &listed, &mut workspace).0.is_ok());
        assert!(run(s, &[5; 6], &listed, &mut workspace).0.is_err());
        // It is one whether it is expected there or not.
        let besides = checked.shared(&shared13, &shared2);
        assert!(run(s, &bad, &besides, &mut workspace).0.is_ok());
        assert!(run(s, &[5; 6], &besides, &mut workspace).0.is_err());
        // All of them may live elsewhere, and only so many tokens be there.
        let map = Tensor::from_slice(d, &[0, 1, 2, 3, -1, -1], &[6]).unwrap();
        assert!(run(s, &[5; 6], &checked.expert_map(&map), &mut workspace).0.is_ok());
        assert!(run(s, &[6; 6], &checked.expert_map(&map), &mut workspace).0.is_err());
        // A map that names experts which are not here.
        for wrong in [4, -2, i32::MAX, i32::MIN] {
            let map = Tensor::from_slice(d, &[0, 1, 2, 3, wrong, -1], &[6]).unwrap();
            let (result, out) = run(s, &good, &checked.expert_map(&map), &mut workspace);
            let error = result.unwrap_err();
            assert!(
                matches!(error, Error::Value { arg: "expert_map", .. }) && error.to_string().contains("for expert 4")
            );
            assert!(out.iter().all(|&v| v == poison));
        }
        let count = Tensor::from_slice(d, &[2], &[1]).unwrap();
        assert!(run(s, &bad, &checked.num_tokens(&count), &mut workspace).0.is_ok());

        // In a capture there is nothing to look at.
        let ids = Tensor::from_slice(d, &good, &[tokens, top_k]).unwrap();
        let mut out = Tensor::from_slice(d, &[poison; 48], &[tokens, width]).unwrap();
        let e = Graph::capture(s, |s| fused(s, &mut out, &x, &w13, &w2, &ids, &weights, &checked, &mut workspace));
        assert!(matches!(e.map(drop), Err(Error::Capture(_))));

        let bytes = |shape: &[usize]| Tensor::from_slice(d, &vec![1i8; shape.iter().product()], shape).unwrap();
        let (w13, w2) = (bytes(&[experts, 2 * width, width]), bytes(&[experts, width, width]));
        let scales = |n: usize| Tensor::from_slice(d, &vec![1.0f32; experts * n], &[experts, n]).unwrap();
        let (scales13, scales2) = (scales(2 * width), scales(width));
        let mut run = |ids: &[i32], checked: bool| {
            let ids = Tensor::from_slice(d, ids, &[tokens, top_k]).unwrap();
            let options = FusedQuantOptions::default().checked(checked);
            let (w13, w2) = (Quantised::new(&w13, &scales13), Quantised::new(&w2, &scales2));
            fused_quant(s, &mut out, &x, w13, w2, &ids, &weights, &options, &mut workspace)
        };
        assert!(run(&good, true).is_ok() && run(&bad, false).is_ok());
        let e = run(&bad, true);
        assert!(matches!(e, Err(Error::Value { arg: "topk_ids", .. })), "{e:?}");
    });
}
