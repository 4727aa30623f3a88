//! Linear layers in bf16, with weights that take turns so that they come from memory.

use warploom::gemm::{Epilogue, LinearOptions, LinearPath, linear_with};
use warploom::norm::rms_norm::rms_norm;
use warploom::{Tensor, bf16};
use warploom_benches::{Cost, Harness, noise};

pub fn benches(harness: &mut Harness) {
    let shapes = harness.pick(&[(4096, 14336), (4096, 4096), (4096, 128_256)][..], &[(256, 512)]);
    let tokens = harness.pick(&[1, 8, 64, 128, 512, 4096][..], &[1, 16]);
    for &(k, n) in shapes {
        for &m in tokens {
            case(harness, m, k, n, LinearPath::Auto);
        }
    }
    if !harness.device().is_simt() {
        case(harness, 8192, 8192, 8192, LinearPath::Auto);
        for m in [2, 4, 16, 32, 1024, 2048] {
            case(harness, m, 4096, 14336, LinearPath::Auto);
        }
        case(harness, 1024, 4096, 4096, LinearPath::Auto);
        for n in [4096, 14336] {
            for m in [96, 130, 192, 256, 320] {
                case(harness, m, 4096, n, LinearPath::Auto);
            }
        }
        for (m, k, n) in [(160, 3584, 18944), (200, 3072, 24576), (448, 8192, 8192)] {
            case(harness, m, k, n, LinearPath::Auto);
        }
        // Few outputs beside K: keys and values, DeepSeek-V3's way into its latents, parts of larger models.
        for (m, k, n) in [
            (128, 8192, 1280),
            (512, 2880, 1408),
            (512, 4096, 1024),
            (512, 7168, 576),
            (512, 7168, 1536),
            (512, 7168, 2112),
            (640, 8192, 1024),
            (1024, 7168, 576),
        ] {
            case(harness, m, k, n, LinearPath::Auto);
        }
        for epilogue in [Epilogue::None, Epilogue::Silu, Epilogue::Gelu, Epilogue::GeluTanh, Epilogue::Relu2] {
            biased(harness, 4096, 4096, 14336, epilogue);
        }
        for (m, k, n) in
            [(1, 1024, 3072), (1, 2048, 6144), (1, 4096, 4096), (8, 4096, 4096), (64, 4096, 4096), (1, 4096, 14336)]
        {
            after_norm(harness, m, k, n);
        }
        harness.overhead("gemm/linear/overhead/128x4096x4096", |device, stream| {
            let x = noise::<bf16>(device, stream, &[128, 4096], 1)?;
            let w = noise::<bf16>(device, stream, &[4096, 4096], 2)?;
            let mut y = Tensor::<bf16>::uninit(device, &[128, 4096])?;
            Ok(move |s: &_| linear_with(s, &mut y, &x, &w, None, &LinearOptions::default()))
        });
    }
}

/// Behind the norm of its tokens, as in a layer of a model.
fn after_norm(harness: &mut Harness, m: usize, k: usize, n: usize) {
    let cost = Cost::bytes((m * k + n * k) * 2, m * n * 2).flops(2 * m * n * k);
    harness.case(&format!("gemm/linear/after_norm/bf16/{m}x{k}x{n}"), cost, |device, stream, set| {
        let x = noise::<bf16>(device, stream, &[m, k], set)?;
        let w = noise::<bf16>(device, stream, &[n, k], set + 100)?;
        let mut normed = Tensor::<bf16>::uninit(device, &[m, k])?;
        let mut y = Tensor::<bf16>::uninit(device, &[m, n])?;
        let options = LinearOptions::default();
        Ok(move |s: &_| {
            rms_norm(s, &mut normed, &x, None, 1e-5)?;
            linear_with(s, &mut y, &normed, &w, None, &options)
        })
    });
}

/// With a bias and an epilogue.
fn biased(harness: &mut Harness, m: usize, k: usize, n: usize, epilogue: Epilogue) {
    let cost = Cost::bytes((m * k + n * k + n) * 2, m * n * 2).flops(2 * m * n * k);
    let name = format!("gemm/linear/bias_{epilogue:?}/bf16/{m}x{k}x{n}").to_lowercase();
    harness.case(&name, cost, |device, stream, set| {
        let x = noise::<bf16>(device, stream, &[m, k], set)?;
        let w = noise::<bf16>(device, stream, &[n, k], set + 100)?;
        let bias = noise::<bf16>(device, stream, &[n], set + 200)?;
        let mut y = Tensor::<bf16>::uninit(device, &[m, n])?;
        let options = LinearOptions::default().epilogue(epilogue);
        Ok(move |s: &_| linear_with(s, &mut y, &x, &w, Some(&bias), &options))
    });
}

fn case(harness: &mut Harness, m: usize, k: usize, n: usize, path: LinearPath) {
    let cost = Cost::bytes((m * k + n * k) * 2, m * n * 2).flops(2 * m * n * k);
    harness.case(&format!("gemm/linear/{path:?}/bf16/{m}x{k}x{n}").to_lowercase(), cost, |device, stream, set| {
        let x = noise::<bf16>(device, stream, &[m, k], set)?;
        let w = noise::<bf16>(device, stream, &[n, k], set + 100)?;
        let mut y = Tensor::<bf16>::uninit(device, &[m, n])?;
        let options = LinearOptions::default().path(path);
        Ok(move |s: &_| linear_with(s, &mut y, &x, &w, None, &options))
    });
}
