//! Linear layers of 8-bit numbers, with weights that take turns so that they come from memory, and the quantisers of their tokens and weights.

use warploom::gemm::{
    LinearQuantOptions, LinearQuantPath, Quantised, linear_quant, quantise_blocks, quantise_groups, quantise_rows,
};
use warploom::{E4M3, Stream, Tensor, bf16};
use warploom_benches::{Cost, Harness, noise};

pub fn benches(harness: &mut Harness) {
    let shapes = harness.pick(&[(4096, 14336), (4096, 4096), (7168, 4096)][..], &[(256, 512)]);
    let tokens = harness.pick(&[1, 8, 64, 128, 512, 4096][..], &[1, 16]);
    for &(k, n) in shapes {
        for &m in tokens {
            case(harness, m, k, n, false, LinearQuantPath::Auto);
            case(harness, m, k, n, true, LinearQuantPath::Auto);
        }
    }
    if !harness.device().is_simt() {
        for blocks in [false, true] {
            case(harness, 8192, 8192, 8192, blocks, LinearQuantPath::Auto);
            case(harness, 4096, 4096, 4096, blocks, LinearQuantPath::Tile);
        }
        int8(harness, 4096, 4096, 4096);
    }
    let rows =
        [(1, 7168), (128, 7168), (4096, 7168), (1, 28672), (16, 28672), (1024, 28672), (4096, 28672), (4096, 5125)];
    for &(m, n) in harness.pick(&rows[..], &[(4, 256)]) {
        quantiser(harness, m, n);
    }
    for &(n, k) in harness.pick(&[(4096, 4096), (14336, 4096)][..], &[(256, 256)]) {
        let cost = Cost::bytes(n * k * 2, n * k + n.div_ceil(128) * k.div_ceil(128) * 4);
        harness.case(&format!("gemm/quantise_blocks/e4m3/bf16/{n}x{k}"), cost, |device, stream, set| {
            let w = noise::<bf16>(device, stream, &[n, k], set)?;
            let mut q = Tensor::<E4M3>::uninit(device, &[n, k])?;
            let mut scales = Tensor::uninit(device, &[n.div_ceil(128), k.div_ceil(128)])?;
            Ok(move |s: &Stream| quantise_blocks(s, &mut q, &mut scales, &w))
        });
    }
}

fn case(harness: &mut Harness, m: usize, k: usize, n: usize, blocks: bool, path: LinearQuantPath) {
    let cost = Cost::bytes(m * k + n * k, m * n * 2).flops(2 * m * n * k).fp8();
    let kind = if blocks { "blocks" } else { "rows" };
    let name = format!("gemm/linear_quant/{path:?}/e4m3/{kind}/{m}x{k}x{n}").to_lowercase();
    harness.case(&name, cost, |device, stream, set| {
        let groups = k.div_ceil(128);
        let shape = |rows: usize, each: usize| if blocks { vec![rows.div_ceil(each), groups] } else { vec![rows] };
        let (x, w) = (noise::<E4M3>(device, stream, &[m, k], set)?, noise::<E4M3>(device, stream, &[n, k], set + 100)?);
        let xs = noise::<f32>(device, stream, &shape(m, 1), set + 200)?;
        let ws = noise::<f32>(device, stream, &shape(n, 128), set + 300)?;
        let mut y = Tensor::<bf16>::uninit(device, &[m, n])?;
        let options = LinearQuantOptions::default().path(path);
        Ok(move |s: &Stream| linear_quant(s, &mut y, Quantised::new(&x, &xs), Quantised::new(&w, &ws), None, &options))
    });
}

fn int8(harness: &mut Harness, m: usize, k: usize, n: usize) {
    let cost = Cost::bytes(m * k + n * k, m * n * 2).flops(2 * m * n * k).fp8();
    harness.case(&format!("gemm/linear_quant/auto/int8/rows/{m}x{k}x{n}"), cost, |device, stream, set| {
        let quantised = |rows: usize, seed: usize| {
            let from = noise::<bf16>(device, stream, &[rows, k], seed)?;
            let (mut q, mut scales) = (Tensor::<i8>::uninit(device, &[rows, k])?, Tensor::uninit(device, &[rows])?);
            quantise_rows(stream, &mut q, &mut scales, &from, None)?;
            Ok::<_, warploom::Error>((q, scales))
        };
        let ((x, xs), (w, ws)) = (quantised(m, set)?, quantised(n, set + 100)?);
        let mut y = Tensor::<bf16>::uninit(device, &[m, n])?;
        let options = LinearQuantOptions::default();
        Ok(move |s: &Stream| linear_quant(s, &mut y, Quantised::new(&x, &xs), Quantised::new(&w, &ws), None, &options))
    });
}

fn quantiser(harness: &mut Harness, m: usize, n: usize) {
    let cost = Cost::bytes(m * n * 2, m * n + m * n / 32);
    harness.case(&format!("gemm/quantise_groups/e4m3/bf16/{m}x{n}"), cost, |device, stream, set| {
        let x = noise::<bf16>(device, stream, &[m, n], set)?;
        let (mut q, mut scales) =
            (Tensor::<E4M3>::uninit(device, &[m, n])?, Tensor::uninit(device, &[m, n.div_ceil(128)])?);
        Ok(move |s: &Stream| quantise_groups(s, &mut q, &mut scales, &x))
    });
    harness.case(&format!("gemm/quantise_rows/e4m3/bf16/{m}x{n}"), cost, |device, stream, set| {
        let x = noise::<bf16>(device, stream, &[m, n], set)?;
        let (mut q, mut scales) = (Tensor::<E4M3>::uninit(device, &[m, n])?, Tensor::uninit(device, &[m])?);
        Ok(move |s: &Stream| quantise_rows(s, &mut q, &mut scales, &x, None))
    });
}
