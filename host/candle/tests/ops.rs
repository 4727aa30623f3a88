//! Every operation against the same thing put together from candle's own, which runs on the CPU. With the feature `cuda` the
//! operations run on the first GPU (candle's build needs nvcc for that), otherwise on the SIMT device; without either there is nothing to test.
#![cfg(any(feature = "simt", feature = "cuda"))]

use candle_core::{D, DType, Device, Result, Tensor};
use warploom_candle::{
    CacheLayout, FusedAddRmsNorm, FusedMoe, Gate, PagedDecode, Pairing, RmsNorm, Rotary, Sampler, Scoring, SiluAndMul,
};

const CPU: &Device = &Device::Cpu;

/// A tensor on the device where operations run, with the layout that it has.
fn on(tensor: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    {
        // One for all tests: candle's devices are equal only to themselves.
        static GPU: std::sync::OnceLock<Device> = std::sync::OnceLock::new();
        tensor.to_device(GPU.get_or_init(|| Device::new_cuda(0).expect("a GPU: these tests were built with `cuda`")))
    }
    #[cfg(not(feature = "cuda"))]
    Ok(tensor.clone())
}

/// A tensor where candle computes what is expected.
fn back(tensor: &Tensor) -> Result<Tensor> {
    tensor.to_device(CPU)
}

/// Deterministic numbers, uniform in [-1, 1).
fn noise(shape: &[usize], seed: u64) -> Tensor {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let data: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    Tensor::from_vec(data, shape, CPU).unwrap()
}

/// The largest difference, in units of the larger of 1 and the largest number.
fn difference(got: &Tensor, want: &Tensor) -> Result<f32> {
    assert_eq!(got.dims(), want.dims());
    let (got, want) = (back(got)?.to_dtype(DType::F32)?, back(want)?.to_dtype(DType::F32)?);
    let scale = want.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?.max(1.0);
    Ok((got - want)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()? / scale)
}

#[track_caller]
fn assert_close(got: &Tensor, want: &Tensor) {
    let tolerance = match got.dtype() {
        DType::F32 => 2e-6,
        DType::F16 => 1e-3,
        _ => 8e-3,
    };
    let difference = difference(got, want).unwrap();
    assert!(difference <= tolerance, "{difference:e} apart");
}

fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let x = x.to_dtype(DType::F32)?;
    let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean + eps)?.sqrt()?)?.broadcast_mul(&weight.to_dtype(DType::F32)?)
}

#[test]
fn norms() -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let (wide, weight) = (noise(&[3, 5, 96], 1).to_dtype(dtype)?, noise(&[64], 2).to_dtype(dtype)?);
        // A view with gaps between its rows, and an offset.
        let x = wide.narrow(2, 32, 64)?.narrow(0, 1, 2)?;
        let y = RmsNorm::new(1e-5).forward(&on(&x)?, &on(&weight)?)?;
        assert_eq!(y.dtype(), dtype);
        assert_close(&y, &rms_norm(&x, &weight, 1e-5)?);
        let custom = on(&x)?.apply_op2_no_bwd(&on(&weight)?, &RmsNorm::new(1e-5))?;
        assert_eq!(difference(&custom, &y)?, 0.0);

        let residual = noise(&[2, 5, 64], 3).to_dtype(dtype)?;
        let (normed, sum) = FusedAddRmsNorm::new(1e-5).forward(&on(&x)?, &on(&residual)?, &on(&weight)?)?;
        let want = (&x + &residual)?;
        assert_close(&sum, &want);
        assert_close(&normed, &rms_norm(&back(&sum)?, &weight, 1e-5)?);
    }
    Ok(())
}

#[test]
fn gated_activation() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let x = (noise(&[4, 66], 1) * 4.0)?.to_dtype(dtype)?;
        let exact = x.to_dtype(DType::F32)?;
        let want = (exact.narrow(1, 0, 33)?.silu()? * exact.narrow(1, 33, 33)?)?;
        assert_close(&SiluAndMul.forward(&on(&x)?)?, &want);
        assert_close(&on(&x)?.apply_op1_no_bwd(&SiluAndMul)?, &want);
    }
    Ok(())
}

#[test]
fn rotary_embedding() -> Result<()> {
    let (tokens, heads, kv_heads, dim) = (5, 4, 2, 16);
    let (query, key) = (noise(&[tokens, heads, dim], 1), noise(&[tokens, kv_heads, dim], 2));
    let theta: Vec<f32> = (0..dim / 2).map(|i| 10_000f32.powf(-2.0 * i as f32 / dim as f32)).collect();
    let all = Tensor::arange(0f32, 32.0, CPU)?.unsqueeze(1)?.matmul(&Tensor::from_vec(theta, (1, dim / 2), CPU)?)?;
    let angles = Tensor::cat(&[all.cos()?, all.sin()?], 1)?;
    let positions = [3u32, 0, 31, 7, 7];
    let at = Tensor::new(&positions, CPU)?;
    let (cos, sin) = (all.cos()?.index_select(&at, 0)?.unsqueeze(1)?, all.sin()?.index_select(&at, 0)?.unsqueeze(1)?);
    let turned = |a: &Tensor, b: &Tensor| -> Result<(Tensor, Tensor)> {
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        Ok((first, (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?))
    };
    let neox = |x: &Tensor| -> Result<Tensor> {
        let (a, b) = turned(&x.narrow(2, 0, dim / 2)?, &x.narrow(2, dim / 2, dim / 2)?)?;
        Tensor::cat(&[a, b], 2)
    };
    let gptj = |x: &Tensor| -> Result<Tensor> {
        let pairs = x.reshape((tokens, (), dim / 2, 2))?;
        let (a, b) = turned(&pairs.narrow(3, 0, 1)?.squeeze(3)?, &pairs.narrow(3, 1, 1)?.squeeze(3)?)?;
        Tensor::stack(&[a, b], 3)?.reshape(x.shape())
    };
    let (q, k, angles) = (on(&query)?, on(&key)?, on(&angles)?);
    for positions in [at.clone(), at.to_dtype(DType::I64)?] {
        let positions = on(&positions)?;
        let (turned_q, turned_k) = Rotary::new(Pairing::Neox).forward(&q, &k, &positions, &angles)?;
        assert_close(&turned_q, &neox(&query)?);
        assert_close(&turned_k, &neox(&key)?);
        let (turned_q, turned_k) = Rotary::new(Pairing::Gptj).forward(&q, &k, &positions, &angles)?;
        assert_close(&turned_q, &gptj(&query)?);
        assert_close(&turned_k, &gptj(&key)?);
    }
    Ok(())
}

fn softmax(x: &Tensor) -> Result<Tensor> {
    let e = x.broadcast_sub(&x.max_keepdim(D::Minus1)?)?.exp()?;
    e.broadcast_div(&e.sum_keepdim(D::Minus1)?)
}

#[test]
fn gate() -> Result<()> {
    let (tokens, experts, top_k) = (7, 16, 3);
    let logits = (noise(&[tokens, experts], 1) * 3.0)?;
    let (weights, ids) = Gate::new(top_k, Scoring::Softmax).forward(&on(&logits)?)?;
    let (scores, order) = softmax(&logits)?.sort_last_dim(false)?;
    let chosen = scores.narrow(1, 0, top_k)?;
    assert_eq!(back(&ids)?.to_vec2::<u32>()?, order.narrow(1, 0, top_k)?.to_vec2::<u32>()?);
    assert_close(&weights, &chosen.broadcast_div(&chosen.sum_keepdim(1)?)?);

    // With a bias for the choice, of sigmoids, without dividing.
    let bias = noise(&[experts], 2);
    let sigmoid = ((logits.neg()?.exp()? + 1.0)?.recip())?;
    let (_, order) = sigmoid.broadcast_add(&bias)?.sort_last_dim(false)?;
    let order = order.narrow(1, 0, top_k)?.contiguous()?;
    let (weights, ids) =
        Gate::new(top_k, Scoring::Sigmoid).bias(&on(&bias)?).renormalize(false).scale(2.5).forward(&on(&logits)?)?;
    assert_eq!(back(&ids)?.to_vec2::<u32>()?, order.to_vec2::<u32>()?);
    assert_close(&weights, &(sigmoid.gather(&order, 1)? * 2.5)?);
    Ok(())
}

#[test]
fn fused_moe() -> Result<()> {
    let (tokens, experts, top_k, hidden, width) = (5, 4, 2, 32, 24);
    for dtype in [DType::F32, DType::BF16] {
        let x = noise(&[tokens, hidden], 1).to_dtype(dtype)?;
        let w13 = noise(&[experts, 2 * width, hidden], 2).to_dtype(dtype)?;
        let w2 = noise(&[experts, hidden, width], 3).to_dtype(dtype)?;
        let (weights, ids) = Gate::new(top_k, Scoring::Softmax).forward(&on(&noise(&[tokens, experts], 4))?)?;
        let op = FusedMoe::new(&ids, &weights);
        let out = op.forward(&on(&x)?, &on(&w13)?, &on(&w2)?)?;
        let exact = |t: &Tensor| t.to_dtype(DType::F32);
        let (x32, up, down) = (exact(&x)?, exact(&w13)?, exact(&w2)?);
        let mut rows = vec![];
        for (t, (ids, weights)) in
            back(&ids)?.to_vec2::<u32>()?.iter().zip(back(&weights)?.to_vec2::<f32>()?).enumerate()
        {
            let mut sum = Tensor::zeros((1, hidden), DType::F32, CPU)?;
            for (&e, w) in ids.iter().zip(weights) {
                let h = x32.narrow(0, t, 1)?.matmul(&up.get(e as usize)?.t()?)?;
                let h = (h.narrow(1, 0, width)?.silu()? * h.narrow(1, width, width)?)?;
                let h = h.to_dtype(dtype)?.to_dtype(DType::F32)?;
                sum = (sum + (h.matmul(&down.get(e as usize)?.t()?)? * w as f64)?)?;
            }
            rows.push(sum);
        }
        let want = Tensor::cat(&rows, 0)?;
        assert_close(&out, &want);
        assert_eq!(difference(&on(&x)?.apply_op3_no_bwd(&on(&w13)?, &on(&w2)?, &op)?, &out)?, 0.0);
    }
    Ok(())
}

#[test]
fn sampling() -> Result<()> {
    let logits = (noise(&[3, 2, 500], 1) * 5.0)?;
    let best = logits.argmax(D::Minus1)?.to_vec2::<u32>()?;
    let lent = on(&logits)?;
    assert_eq!(back(&Sampler::greedy().forward(&lent)?)?.to_vec2::<u32>()?, best);
    assert_eq!(back(&lent.apply_op1_no_bwd(&Sampler::new(5).top_k(1))?)?.to_vec2::<u32>()?, best);
    assert_eq!(back(&Sampler::new(5).top_p(1e-6).forward(&lent)?)?.to_vec2::<u32>()?, best);
    // More tokens than there are is all of them; none is an error.
    let all = back(&Sampler::new(5).forward(&lent)?)?.to_vec2::<u32>()?;
    for k in [500, 501, u32::MAX] {
        assert_eq!(back(&Sampler::new(5).top_k(k).forward(&lent)?)?.to_vec2::<u32>()?, all);
    }
    assert!(Sampler::new(5).top_k(0).forward(&lent).is_err());
    // Only tokens that may be drawn, the same for the same seed and offset, and all of them sooner or later.
    let row = logits.narrow(0, 0, 1)?.narrow(1, 0, 1)?.flatten_to(1)?.bf16_exact()?;
    let allowed = row.sort_last_dim(false)?.1.narrow(1, 0, 4)?.flatten_all()?.to_vec1::<u32>()?;
    let mut sampler = Sampler::new(9).top_k(4).temperature(4.0);
    let (row, mut drawn) = (on(&row)?, vec![]);
    for offset in 0..64 {
        sampler.set_offset(4 * offset);
        let draw = || back(&sampler.forward(&row)?)?.to_vec1::<u32>();
        let token = draw()?[0];
        assert_eq!(draw()?, [token]);
        assert!(allowed.contains(&token));
        drawn.push(token);
    }
    assert!(allowed.iter().all(|t| drawn.contains(t)), "{drawn:?} of {allowed:?}");
    Ok(())
}

/// Rounds through bf16, so that a test of the order sees what the kernel sees in any type.
trait Exact {
    fn bf16_exact(&self) -> Result<Tensor>;
}
impl Exact for Tensor {
    fn bf16_exact(&self) -> Result<Tensor> {
        self.to_dtype(DType::BF16)?.to_dtype(DType::F32)
    }
}

#[test]
fn paged_decode() -> Result<()> {
    let (heads, kv_heads, dim, block, blocks) = (4, 2, 16, 8, 7);
    let lengths = [11usize, 3];
    let table = [[5u32, 2], [0, 6]];
    for dtype in [DType::F32, DType::BF16] {
        let query = noise(&[2, heads, dim], 1).to_dtype(dtype)?;
        let key = noise(&[blocks, block, kv_heads, dim], 2).to_dtype(dtype)?;
        let value = noise(&[blocks, block, kv_heads, dim], 3).to_dtype(dtype)?;
        let lens = on(&Tensor::new(&lengths.map(|n| n as u32), CPU)?)?;
        let mut op = PagedDecode::new(&on(&Tensor::new(&table, CPU)?)?, &lens);
        let (q, k, v) = (on(&query)?, on(&key)?, on(&value)?);
        let out = op.forward(&q, &k, &v)?;
        let mut want = vec![];
        for (b, &n) in lengths.iter().enumerate() {
            let pages = Tensor::new(&table[b], CPU)?;
            let gather = |cache: &Tensor| -> Result<Tensor> {
                // [heads, keys, dim], each KV head for as many query heads.
                let keys = cache.to_dtype(DType::F32)?.index_select(&pages, 0)?.flatten_to(1)?.narrow(0, 0, n)?;
                let shared = keys.unsqueeze(2)?.expand((n, kv_heads, heads / kv_heads, dim))?;
                shared.reshape((n, heads, dim))?.transpose(0, 1)?.contiguous()
            };
            let q = query.get(b)?.to_dtype(DType::F32)?.unsqueeze(1)?;
            let scores = (q.matmul(&gather(&key)?.t()?.contiguous()?)? * (dim as f64).powf(-0.5))?;
            want.push(softmax(&scores)?.matmul(&gather(&value)?)?.squeeze(1)?);
        }
        let want = Tensor::stack(&want, 0)?;
        assert_close(&out, &want);
        assert_eq!(difference(&q.apply_op3_no_bwd(&k, &v, &op)?, &out)?, 0.0);
        // The other layout, and pages in another order.
        let swap = |t: &Tensor| on(&t.transpose(1, 2)?.contiguous()?);
        let hnd = PagedDecode::new(&on(&Tensor::new(&table, CPU)?)?, &lens).layout(CacheLayout::Hnd);
        assert_close(&hnd.forward(&q, &swap(&key)?, &swap(&value)?)?, &want);
        op.route(&on(&Tensor::new(&[[0u32, 6], [5, 2]], CPU)?)?, &on(&Tensor::new(&[3u32, 11], CPU)?)?);
        let flip = Tensor::new(&[1u32, 0], CPU)?;
        let flipped = back(&op.forward(&on(&query.index_select(&flip, 0)?)?, &k, &v)?)?;
        assert_eq!(difference(&flipped.index_select(&flip, 0)?, &out)?, 0.0);
    }
    Ok(())
}

/// Errors are warploom's, and name operation and argument.
#[test]
fn misuse_is_an_error() -> Result<()> {
    let noise = |shape: &[usize], seed| on(&noise(shape, seed)).unwrap();
    let (x, weight) = (noise(&[2, 8], 1), noise(&[8], 2));
    let says = |result: Result<Tensor>, what: &str| {
        let error = result.map(drop).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    let norm = RmsNorm::new(1e-6);
    says(norm.forward(&x, &noise(&[7], 2)), "rms_norm: `weight` must have shape [8]");
    says(norm.forward(&x.t()?, &noise(&[2], 2)), "rms_norm: `x` must be dense in its last dimension");
    says(norm.forward(&x, &weight.to_dtype(DType::BF16)?), "rms_norm: a tensor must be f32, but is BF16");
    says(norm.forward(&x.to_dtype(DType::F64)?, &weight), "rms_norm: F64 is not supported");
    says(norm.forward(&x.to_dtype(DType::U32)?, &weight), "must be f32, f16 or bf16, but is U32");
    says(SiluAndMul.forward(&noise(&[2, 7], 1)), "silu_and_mul: `x` must have shape");
    says(Sampler::new(0).temperature(-1.0).forward(&x), "temperature");
    // Sizes beyond any memory.
    says(
        Gate::new(1 << 62, Scoring::Softmax).forward(&x).map(|(weights, _)| weights),
        "moe::gate: `top_k` must be 1 to 8",
    );
    says(norm.forward(&x.narrow(0, 0, 1)?.broadcast_as((1usize << 62, 8))?, &weight), "rms_norm: an output of shape");
    // More than any process has addresses for.
    let expanded = x.narrow(0, 0, 1)?.broadcast_as((1usize << 44, 8))?;
    if !expanded.device().is_cuda() {
        says(norm.forward(&expanded, &weight), "rms_norm: no memory for");
    }
    let ids = on(&Tensor::zeros((2, 1), DType::U32, CPU)?)?;
    let moe = FusedMoe::new(&ids, &noise(&[2, 1], 1));
    says(moe.forward(&x, &noise(&[2049, 2, 8], 1), &noise(&[2049, 8, 1], 1)), "at most 2048 experts");
    says(moe.forward(&x, &noise(&[3, 8, 8], 1), &noise(&[4, 8, 4], 1)), "`w13` must have shape");
    Ok(())
}
