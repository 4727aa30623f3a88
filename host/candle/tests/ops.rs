//! Every operation against the same thing put together from candle's own, which runs on the CPU. With the feature `cuda` the
//! operations run on the first GPU (candle's build needs nvcc for that), otherwise on the SIMT device; without either there is nothing to test.
#![cfg(any(feature = "simt", feature = "cuda"))]

use candle_core::{D, DType, Device, Result, Tensor};
use warploom_candle::{
    CacheLayout, Epilogue, FusedAddRmsNorm, FusedMoe, Gate, Linear, PagedDecode, PagedPrefill, Pairing,
    ReshapeAndCache, RmsNorm, Rotary, Sampler, Scoring, SiluAndMul,
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
fn linear() -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let (x, w) = (noise(&[2, 3, 40], 1).to_dtype(dtype)?, noise(&[24, 40], 2).to_dtype(dtype)?);
        let bias = noise(&[24], 3).to_dtype(dtype)?;
        let wide = |t: &Tensor| t.to_dtype(DType::F32);
        let product = wide(&x)?.broadcast_matmul(&wide(&w)?.t()?)?;
        let (lent, weights) = (on(&x)?, on(&w)?);
        assert_close(&Linear::new().forward(&lent, &weights)?, &product);
        let op = Linear::new().bias(&on(&bias)?).epilogue(Epilogue::Silu);
        let want = product.broadcast_add(&wide(&bias)?)?.silu()?;
        assert_close(&op.forward(&lent, &weights)?, &want);
        assert_close(&lent.apply_op2_no_bwd(&weights, &op)?, &want);
        // Columns of a fused tensor and rows of weights.
        let part = Linear::new().forward(&lent.narrow(2, 8, 32)?, &weights.narrow(0, 4, 8)?.narrow(1, 8, 32)?)?;
        let of = |t: &Tensor, dim| wide(&t.narrow(dim, 8, 32)?);
        assert_close(&part, &of(&x, 2)?.broadcast_matmul(&of(&w.narrow(0, 4, 8)?, 1)?.t()?)?);
    }
    Ok(())
}

#[test]
fn reshape_and_cache() -> Result<()> {
    let (blocks, block, heads, dim) = (3, 4, 2, 16);
    let slots = [5i64, -1, 0, 11, 6];
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let rows = |seed| noise(&[slots.len(), heads, dim], seed).to_dtype(dtype);
        let (key, value) = (rows(1)?, rows(2)?);
        // Both caches in one tensor, as vLLM has them.
        let old = noise(&[2, blocks, block, heads, dim], 3).to_dtype(dtype)?;
        let mut want = old.flatten(1, 2)?.to_dtype(DType::F32)?;
        for (half, rows) in [&key, &value].into_iter().enumerate() {
            for (t, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
                let row = rows.to_dtype(DType::F32)?.narrow(0, t, 1)?.unsqueeze(0)?;
                let at = slot as usize;
                want = want.slice_assign(&[half..half + 1, at..at + 1, 0..heads, 0..dim], &row)?;
            }
        }
        let want = want.reshape(old.shape())?;
        let (key, value) = (on(&key)?, on(&value)?);
        let op = ReshapeAndCache::new();
        for slots in [Tensor::new(&slots, CPU)?, Tensor::new(&slots.map(|s| s as i32), CPU)?] {
            let slots = on(&slots)?;
            let one = on(&old.copy()?)?;
            op.forward(&key, &value, &one.get(0)?, &one.get(1)?, &slots)?;
            assert_eq!(difference(&one, &want)?, 0.0);
            let two = [on(&old.get(0)?.copy()?)?, on(&old.get(1)?.copy()?)?];
            op.forward(&key, &value, &two[0], &two[1], &slots)?;
            assert_eq!(difference(&Tensor::stack(&two, 0)?, &want)?, 0.0);
            // A block's keys before its values, as FlashInfer has them.
            let by_blocks = on(&old.transpose(0, 1)?.contiguous()?.copy()?)?;
            let halves = [0, 1].map(|half| by_blocks.narrow(1, half, 1).unwrap().squeeze(1).unwrap());
            op.forward(&key, &value, &halves[0], &halves[1], &slots)?;
            assert_eq!(difference(&by_blocks.transpose(0, 1)?.contiguous()?, &want)?, 0.0);
            // The other layout, written by heads.
            let hnd = on(&old.transpose(2, 3)?.contiguous()?.copy()?)?;
            let by_heads = op.layout(CacheLayout::Hnd);
            by_heads.forward(&key, &value, &hnd.get(0)?, &hnd.get(1)?, &slots)?;
            assert_eq!(difference(&hnd.transpose(2, 3)?.contiguous()?, &want)?, 0.0);
            // What is read must not be written to.
            let own = one.get(0)?.flatten_to(1)?.narrow(0, 0, 5)?;
            let error = op.forward(&own, &value, &one.get(0)?, &two[1], &slots).unwrap_err().to_string();
            assert!(error.contains("must not share its storage"), "{error}");
            // Nor one tensor twice.
            let error = op.forward(&key, &value, &two[0], &two[0], &slots).unwrap_err().to_string();
            assert!(error.contains("overlap"), "{error}");
        }
    }
    Ok(())
}

/// Whichever cache comes first: neither holds one and waits for the other's.
#[test]
fn two_calls_write_to_the_same_caches() -> Result<()> {
    let rows = on(&noise(&[1, 1, 16], 1))?;
    let caches = [on(&Tensor::zeros((1, 4, 1, 16), DType::F32, CPU)?)?, on(&noise(&[1, 4, 1, 16], 2))?];
    std::thread::scope(|threads| {
        for thread in 0..2 {
            let (rows, caches) = (&rows, &caches);
            threads.spawn(move || {
                let slot = on(&Tensor::new(&[thread as i64], CPU).unwrap()).unwrap();
                for _ in 0..50 {
                    let (a, b) = (&caches[thread], &caches[1 - thread]);
                    ReshapeAndCache::new().forward(rows, rows, a, b, &slot).unwrap();
                }
            });
        }
    });
    for cache in &caches {
        let written = cache.flatten_to(2)?.narrow(0, 0, 2)?;
        assert_eq!(difference(&written, &back(&rows)?.flatten_to(1)?.broadcast_as((2, 16))?)?, 0.0);
    }
    Ok(())
}

/// Threads that read the caches while others write to them, whichever comes first in memory, and of halves of one tensor: all come to an end.
#[test]
fn caches_are_read_while_they_are_written() -> Result<()> {
    let (rows, query) = (on(&noise(&[1, 1, 16], 1))?, on(&noise(&[1, 2, 16], 2))?);
    let cache = |seed| on(&noise(&[1, 4, 1, 16], seed));
    let both = on(&noise(&[2, 1, 4, 1, 16], 3))?;
    let (a, b) = (cache(4)?, cache(5)?);
    let pairs = [[a.clone(), b.clone()], [b, a], [both.get(0)?, both.get(1)?]];
    let (table, lengths) = (on(&Tensor::new(&[[0u32]], CPU)?)?, on(&Tensor::new(&[3u32], CPU)?)?);
    std::thread::scope(|threads| {
        for [key, value] in &pairs {
            let (rows, query, table, lengths) = (&rows, &query, &table, &lengths);
            threads.spawn(move || {
                let slot = on(&Tensor::new(&[1i64], CPU).unwrap()).unwrap();
                for _ in 0..200 {
                    ReshapeAndCache::new().forward(rows, rows, key, value, &slot).unwrap();
                }
            });
            threads.spawn(move || {
                let op = PagedDecode::new(table, lengths);
                for _ in 0..200 {
                    op.forward(query, key, value).unwrap();
                }
            });
        }
    });
    let written = both.flatten_from(3)?.narrow(2, 1, 1)?.flatten_all()?;
    assert_eq!(difference(&written, &back(&rows)?.flatten_to(1)?.broadcast_as((2, 16))?.flatten_all()?)?, 0.0);
    Ok(())
}

#[test]
fn paged_prefill() -> Result<()> {
    let (heads, kv_heads, dim, block, blocks) = (4, 2, 16, 8, 7);
    // Chunks of 5 and 2 tokens, of sequences of 11 and 2 keys, and a token of no sequence.
    let (starts, lengths) = ([0u32, 5, 7], [11usize, 2]);
    let table = [[5u32, 2], [0, 6]];
    for dtype in [DType::F32, DType::BF16] {
        let query = noise(&[8, heads, dim], 1).to_dtype(dtype)?;
        let key = noise(&[blocks, block, kv_heads, dim], 2).to_dtype(dtype)?;
        let value = noise(&[blocks, block, kv_heads, dim], 3).to_dtype(dtype)?;
        let mut want = vec![];
        for (sequence, &n) in lengths.iter().enumerate() {
            let pages = Tensor::new(&table[sequence], CPU)?;
            let gather = |cache: &Tensor| -> Result<Tensor> {
                let keys = cache.to_dtype(DType::F32)?.index_select(&pages, 0)?.flatten_to(1)?;
                keys.unsqueeze(2)?.expand((2 * block, kv_heads, heads / kv_heads, dim))?.reshape((
                    2 * block,
                    heads,
                    dim,
                ))
            };
            let (key, value) = (gather(&key)?.transpose(0, 1)?, gather(&value)?.transpose(0, 1)?);
            let chunk = starts[sequence] as usize..starts[sequence + 1] as usize;
            for token in chunk.clone() {
                let seen = n - (chunk.end - 1 - token);
                let q = query.get(token)?.to_dtype(DType::F32)?.unsqueeze(1)?;
                let keys = key.narrow(1, 0, seen)?.contiguous()?;
                let scores = (q.matmul(&keys.t()?.contiguous()?)? * (dim as f64).powf(-0.5))?;
                want.push(softmax(&scores)?.matmul(&value.narrow(1, 0, seen)?.contiguous()?)?.squeeze(1)?);
            }
        }
        want.push(Tensor::zeros((heads, dim), DType::F32, CPU)?);
        let want = Tensor::stack(&want, 0)?;
        let ints = |n: &[u32]| on(&Tensor::new(n, CPU)?);
        let (table, starts) = (on(&Tensor::new(&table, CPU)?)?, ints(&starts)?);
        let lens = ints(&lengths.map(|n| n as u32))?;
        let op = PagedPrefill::new(&table, &starts, &lens);
        let (q, k, v) = (on(&query)?, on(&key)?, on(&value)?);
        let out = op.forward(&q, &k, &v)?;
        assert_close(&out, &want);
        assert_eq!(difference(&q.apply_op3_no_bwd(&k, &v, &op)?, &out)?, 0.0);
        assert_close(&PagedPrefill::new(&table, &starts, &lens).splitting().forward(&q, &k, &v)?, &want);
        // The last token of each chunk is what a decode step has.
        let last = on(&query.index_select(&Tensor::new(&[4u32, 6], CPU)?, 0)?)?;
        let step = PagedDecode::new(&table, &lens).forward(&last, &k, &v)?;
        assert_close(&step, &want.index_select(&Tensor::new(&[4u32, 6], CPU)?, 0)?);
    }
    Ok(())
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
    says(Linear::new().forward(&x, &noise(&[3, 7], 2)), "linear: `x` must have shape [.., 7]");
    says(Linear::new().forward(&x, &noise(&[8], 2)), "linear: `w` must have shape");
    says(Linear::new().bias(&noise(&[4], 1)).forward(&x, &noise(&[3, 8], 2)), "linear: `bias` must have shape [3]");
    let ids = on(&Tensor::zeros((2, 1), DType::U32, CPU)?)?;
    let moe = FusedMoe::new(&ids, &noise(&[2, 1], 1));
    says(moe.forward(&x, &noise(&[2049, 2, 8], 1), &noise(&[2049, 8, 1], 1)), "at most 2048 experts");
    says(moe.forward(&x, &noise(&[3, 8, 8], 1), &noise(&[4, 8, 4], 1)), "`w13` must have shape");
    Ok(())
}
