use crate::far::FAR;
use crate::rows::{all_bytes, assert_rounded, vector};
use cuda_std::Float;
use proptest::sample::select;
use warploom::norm::{self, qk_norm};
use warploom::reference::norm as reference;
use warploom::{DType, Device, Error, Graph, Stream, Tensor, bf16, f16};
use warploom_tests::{noise_of, on_every_device, property, widen};

/// Heads of a fused tensor `[tokens, (q_heads + 2 kv_heads) * n + pad]`, from element `offset` on.
#[derive(Clone, Copy, Debug)]
struct Fused {
    tokens: usize,
    q_heads: usize,
    kv_heads: usize,
    n: usize,
    pad: usize,
    offset: usize,
}

impl Fused {
    fn width(self) -> usize {
        (self.q_heads + 2 * self.kv_heads) * self.n + self.pad
    }

    fn len(self) -> usize {
        self.offset + self.tokens * self.width()
    }

    fn views<T: Float>(self, all: &Tensor<T>) -> (Tensor<T>, Tensor<T>) {
        let view = |heads, offset| {
            all.as_strided(&[self.tokens, heads, self.n], &[self.width(), self.n, 1], self.offset + offset).unwrap()
        };
        (view(self.q_heads, 0), view(self.kv_heads, self.q_heads * self.n))
    }
}

fn check<T: Float>() {
    let sizes = (0usize..4, 0usize..6, 0usize..4, select(vec![1usize, 46, 64, 80, 96, 128, 192, 256, 512]));
    let strategy = (sizes, select(vec![0usize, 8, 5]), select(vec![0usize, 8, 1]), 0usize..3);
    property(24, strategy, |device, stream, ((tokens, q_heads, kv_heads, n), pad, offset, how)| {
        let fused = Fused { tokens, q_heads, kv_heads, n, pad, offset };
        let x = noise_of::<T>(fused.len(), 1);
        let all = Tensor::from_slice(device, &x, &[fused.len()]).unwrap();
        let (mut q, mut k) = fused.views(&all);
        let (qw, kw) = (noise_of::<T>(n, 2), noise_of::<T>(n, 3));
        let vector = |v: &[T]| Tensor::from_slice(device, v, &[n]).unwrap();
        let (dqw, dkw) = (vector(&qw), vector(&kw));
        match how {
            0 => norm::qk_norm(stream, &mut q, &mut k, None, None, 1e-6).unwrap(),
            1 => norm::qk_norm(stream, &mut q, &mut k, Some(&dqw), Some(&dkw), 1e-6).unwrap(),
            _ => norm::gemma_qk_norm(stream, &mut q, &mut k, &dqw, &dkw, 1e-6).unwrap(),
        }
        let got = all.to_vec().unwrap();
        let weight = |w: &[T]| match how {
            0 => None,
            1 => Some(widen(w)),
            _ => Some(widen(w).iter().map(|w| 1.0 + w).collect()),
        };
        let weights = [weight(&qw), weight(&kw)];
        let mut at = offset;
        assert_eq!(all_bytes(&got[..at]), all_bytes(&x[..at]));
        for _ in 0..tokens {
            for head in 0..q_heads + kv_heads {
                let w = weights[(head >= q_heads) as usize].as_deref();
                let want = reference::rms_norm(&widen(&x[at..at + n]), w, 1e-6);
                assert_rounded(&got[at..at + n], &want, 2f64.powi(-19), 2f64.powi(-21));
                at += n;
            }
            // Values and padding stay as they are.
            let rest = kv_heads * n + pad;
            assert_eq!(all_bytes(&got[at..at + rest]), all_bytes(&x[at..at + rest]));
            at += rest;
        }
        Ok(())
    });
}

#[test]
fn matches_the_reference() {
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

/// Everything in whole pieces but for where one of the weights begins; and heads of 46 and 80.
#[test]
fn weights_that_begin_off_a_piece() {
    fn check<T: Float>(device: &Device, stream: &Stream) {
        for (n, at) in [(128, [1, 0]), (128, [0, 1]), (64, [1, 1]), (46, [0, 0]), (80, [0, 0]), (80, [1, 0])] {
            let fused = Fused { tokens: 2, q_heads: 3, kv_heads: 2, n, pad: 0, offset: 0 };
            let (x, w) = (noise_of::<T>(fused.len(), 1), [2, 3].map(|seed| noise_of::<T>(n, seed)));
            let all = Tensor::from_slice(device, &x, &[fused.len()]).unwrap();
            let (mut q, mut k) = fused.views(&all);
            let [qw, kw] = [0, 1].map(|i| vector(device, &w[i], at[i]));
            norm::qk_norm(stream, &mut q, &mut k, Some(&qw), Some(&kw), 1e-6).unwrap();
            let (got, weights) = (all.to_vec().unwrap(), w.map(|w| widen(&w)));
            for (t, head) in (0..2).flat_map(|t| (0..5).map(move |h| (t, h))) {
                let at = t * fused.width() + head * n;
                let want = reference::rms_norm(&widen(&x[at..at + n]), Some(&weights[(head >= 3) as usize]), 1e-6);
                assert_rounded(&got[at..at + n], &want, 2f64.powi(-19), 2f64.powi(-21));
            }
        }
    }
    on_every_device(|device, stream| {
        check::<f32>(device, stream);
        check::<bf16>(device, stream);
    });
}

/// Tokens more than 2^31 elements apart: the same bits as in a small tensor.
#[test]
fn tokens_far_apart() {
    FAR.on_every_device(6, |device, stream, rows| {
        for n in [128, 46] {
            let width = 5 * n;
            let x = noise_of::<bf16>(rows * width, 1);
            let (near, far) = (Tensor::from_slice(device, &x, &[rows * width]).unwrap(), FAR.rows(device, &x, width));
            for (tensor, stride) in [(&near, width), (&far, FAR.stride)] {
                let part = |heads, at| tensor.as_strided(&[rows, heads, n], &[stride, n, 1], at).unwrap();
                norm::qk_norm(stream, &mut part(3, 0), &mut part(2, 3 * n), None, None, 1e-6).unwrap();
            }
            assert_eq!(FAR.read(&far, width), near.to_vec().unwrap());
        }
    });
}

/// Strides of dimensions of one element, and of none, are of no consequence.
#[test]
fn strides_that_nothing_follows() {
    const FREE: usize = (isize::MAX as usize / 4) & !7;
    on_every_device(|device, stream| {
        let all = Tensor::from_slice(device, &noise_of::<f32>(24, 4), &[24]).unwrap();
        let want = |first: usize| {
            let mut q = Tensor::from_slice(device, &noise_of::<f32>(24, 4)[first..first + 8], &[1, 1, 8]).unwrap();
            let mut k = Tensor::<f32>::zeros(device, &[1, 0, 8]).unwrap();
            norm::qk_norm(stream, &mut q, &mut k, None, None, 1e-6).unwrap();
            q.to_vec().unwrap()
        };
        for heads in [1, 0] {
            let mut q = all.as_strided(&[1, 1, 8], &[FREE, FREE, 1], 8 * heads).unwrap();
            let mut k = all.as_strided(&[1, heads, 8], &[FREE, FREE, 1], 16).unwrap();
            norm::qk_norm(stream, &mut q, &mut k, None, None, 1e-6).unwrap();
        }
        let got = all.to_vec().unwrap();
        assert_eq!(got, [want(0), want(8), want(16)].concat());
    });
}

#[test]
fn captures_and_repeats_bit_for_bit() {
    on_every_device(|device, stream| {
        device.preload(&["norm"]).unwrap();
        let fused = Fused { tokens: 3, q_heads: 4, kv_heads: 2, n: 80, pad: 0, offset: 0 };
        let mut all = Tensor::<bf16>::uninit(device, &[fused.len()]).unwrap();
        let (mut q, mut k) = fused.views(&all);
        let weights = vector(device, &noise_of::<bf16>(80, 9), 0);
        let graph = Graph::capture(stream, |s| norm::qk_norm(s, &mut q, &mut k, Some(&weights), None, 1e-6)).unwrap();
        let mut run = |seed| {
            all.copy_from_slice(&noise_of::<bf16>(fused.len(), seed)).unwrap();
            graph.launch(stream).unwrap();
            all_bytes(&all.to_vec().unwrap())
        };
        let (first, second, again) = (run(1), run(5), run(1));
        assert!(first == again && first != second && first != all_bytes(&noise_of::<bf16>(fused.len(), 1)));
        let direct = Tensor::from_slice(device, &noise_of::<bf16>(fused.len(), 1), &[fused.len()]).unwrap();
        let (mut q, mut k) = fused.views(&direct);
        norm::qk_norm(stream, &mut q, &mut k, Some(&weights), None, 1e-6).unwrap();
        assert!(all_bytes(&direct.to_vec().unwrap()) == first);
    });
}

/// A token's heads have the same bits alone and among others, and twice.
#[test]
fn repeats_bit_for_bit() {
    on_every_device(|device, stream| {
        let fused = Fused { tokens: 7, q_heads: 40, kv_heads: 3, n: 128, pad: 0, offset: 0 };
        let run = |tokens: usize| {
            let fused = Fused { tokens, ..fused };
            let all = Tensor::from_slice(device, &noise_of::<bf16>(fused.len(), 1), &[fused.len()]).unwrap();
            let (mut q, mut k) = fused.views(&all);
            norm::qk_norm(stream, &mut q, &mut k, None, None, 1e-6).unwrap();
            all_bytes(&all.to_vec().unwrap())
        };
        let all = run(7);
        assert_eq!(run(7), all);
        assert_eq!(run(2), all[..2 * fused.width() * 2]);
    });
}

#[test]
fn refuses_what_it_cannot_do() {
    let device = Device::simt();
    let stream = Stream::new(&device).unwrap();
    let tensor = |shape: &[usize]| Tensor::<f32>::zeros(&device, shape).unwrap();
    let refused = |mut q: Tensor<f32>, mut k: Tensor<f32>, w: Option<&Tensor<f32>>, eps: f32| {
        norm::qk_norm(&stream, &mut q, &mut k, w, None, eps).unwrap_err()
    };
    let (q, k) = (tensor(&[3, 4, 16]), tensor(&[3, 2, 16]));
    assert!(matches!(refused(tensor(&[3, 64]), k.clone(), None, 0.0), Error::Shape { arg: "query", .. }));
    assert!(matches!(refused(q.clone(), tensor(&[2, 2, 16]), None, 0.0), Error::Shape { arg: "key", .. }));
    assert!(matches!(refused(q.clone(), tensor(&[3, 2, 8]), None, 0.0), Error::Shape { arg: "key", .. }));
    assert!(matches!(
        refused(q.clone(), k.clone(), Some(&tensor(&[8])), 0.0),
        Error::Shape { arg: "query_weight", .. }
    ));
    assert!(matches!(refused(q.clone(), k.clone(), None, -0.5), Error::Value { arg: "eps", .. }));
    let folded = tensor(&[256]).as_strided(&[3, 4, 16], &[32, 16, 1], 0).unwrap();
    assert!(matches!(refused(folded, k.clone(), None, 0.0), Error::Stride { arg: "query", .. }));
    let spread = tensor(&[512]).as_strided(&[3, 2, 16], &[64, 32, 2], 0).unwrap();
    assert!(matches!(refused(q.clone(), spread, None, 0.0), Error::Stride { arg: "key", .. }));
    assert!(matches!(refused(q.clone(), q.narrow(1, 3, 1).unwrap(), None, 0.0), Error::Overlap { .. }));
    let weight = q.as_strided(&[16], &[1], 0).unwrap();
    assert!(matches!(refused(q, k, Some(&weight), 0.0), Error::Overlap { .. }));
    let wide = || tensor(&[1, 1, 513]);
    assert!(matches!(refused(wide(), wide(), None, 0.0), Error::Unsupported { .. }));
}

#[test]
fn entries_have_the_names_of_what_they_do() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        assert_eq!(qk_norm::entry(dtype, true).unwrap().name, format!("qk_norm_{dtype}"));
        assert_eq!(qk_norm::entry(dtype, false).unwrap().name, format!("qk_norm_any_{dtype}"));
    }
}

/// Heads that no entry takes have a geometry nevertheless, which a launch refuses.
#[test]
fn geometries_of_heads_beyond_the_most() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for n in [qk_norm::MAX_HEAD_DIM as u32, 4096, 8192, 1 << 20] {
            let geometry = qk_norm::geometry(dtype, true, 3, 5, n);
            assert!(geometry.block[0] * geometry.block[1] >= 128 && geometry.grid[0] == 3, "{geometry:?}");
        }
    }
}
