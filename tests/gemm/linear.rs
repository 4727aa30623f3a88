use cuda_std::Float;
use proptest::prelude::*;
use warploom::device::{Swizzle, TensorMapDescription};
use warploom::gemm::{
    Epilogue, LinearOptions, LinearPath, LinearQuantTile, WgmmaTile, linear, linear_few, linear_with,
};
use warploom::kernels::gemm::{linear_few as few_kernels, linear_fma, linear_rounds};
use warploom::{DType, Device, Error, Geometry, Graph, SimtOptions, Stream, Tensor, bf16, f16, reference};
use warploom_tests::{
    PERIOD, assert_close, cyclic, large_gpu, noise_of, of_cycle, on_every_device, property, sanitizing,
    skipped_without_hopper, widen,
};

const EPILOGUES: [Epilogue; 6] =
    [Epilogue::None, Epilogue::Silu, Epilogue::Gelu, Epilogue::GeluTanh, Epilogue::Relu, Epilogue::Relu2];

/// What sums of `k` products of noise are off by, relative to the sum of their magnitudes: roundings are of either sign, so that they grow as the
/// root of their number; four more for tensor cores, which drop bits of several terms at once.
fn arithmetic(k: usize) -> f64 {
    ((k as f64).sqrt() + 4.0) * 2f64.powi(-23)
}

/// More than the sum of the magnitudes of `k` products of noise, each 1/4 on average, and of a bias.
fn magnitude(k: usize) -> f64 {
    (k + 4) as f64 / 2.0
}

/// Runs one product on a poisoned output and compares it with the reference.
#[allow(clippy::too_many_arguments)]
fn check<T: Float>(
    d: &Device,
    s: &Stream,
    m: usize,
    n: usize,
    k: usize,
    biased: bool,
    kind: Epilogue,
    path: LinearPath,
) {
    let (x, w, b) = (noise_of::<T>(m * k, 1), noise_of::<T>(n * k, 2), noise_of::<T>(n, 3));
    let dx = Tensor::from_slice(d, &x, &[m, k]).unwrap();
    let dw = Tensor::from_slice(d, &w, &[n, k]).unwrap();
    let db = Tensor::from_slice(d, &b, &[n]).unwrap();
    let mut y = Tensor::<T>::uninit(d, &[m, n]).unwrap();
    s.fill_bytes(&mut y, 0xff).unwrap();
    let options = LinearOptions::default().epilogue(kind).path(path);
    linear_with(s, &mut y, &dx, &dw, biased.then_some(&db), &options).unwrap();
    let b = widen(&b);
    let want = reference::gemm::linear(&widen(&x), &widen(&w), biased.then_some(&b), m, n, k, kind);
    // And the steepest that the epilogue is.
    let steepest = if kind == Epilogue::Relu2 { 2.0 * want.iter().fold(0.25f64, |a, &b| a.max(b)).sqrt() } else { 1.2 };
    assert_close(&y.to_vec().unwrap(), &want, arithmetic(k), magnitude(k) * steepest);
}

#[test]
fn not_a_number_and_infinity_stay_where_they_are() {
    on_every_device(|d, s| {
        let (m, n, k) = (4, 16, 128);
        let mut x = vec![bf16::from_f32(1.0); m * k];
        x[k + 2] = bf16::NAN;
        x[2 * k + 2] = bf16::INFINITY;
        let x = Tensor::from_slice(d, &x, &[m, k]).unwrap();
        let w = Tensor::from_slice(d, &vec![bf16::from_f32(0.5); n * k], &[n, k]).unwrap();
        use LinearPath::{Auto, Dot, Few, Fma, Stream, Tile, Wgmma};
        let hopper = !skipped_without_hopper(d);
        for path in
            [Auto, Fma, Dot, Stream, Tile, Few, Wgmma].into_iter().filter(|p| hopper || ![Few, Wgmma].contains(p))
        {
            for kind in EPILOGUES {
                let mut y = Tensor::from_slice(d, &vec![bf16::NAN; m * n], &[m, n]).unwrap();
                let options = LinearOptions::default().path(path).epilogue(kind);
                linear_with(s, &mut y, &x, &w, None, &options).unwrap();
                let got = y.to_vec().unwrap();
                for (i, v) in got.iter().enumerate() {
                    let right = match i / n {
                        1 => v.is_nan(),
                        2 => *v == bf16::INFINITY,
                        _ => v.is_finite(),
                    };
                    assert!(right, "{path:?} {kind:?}, element {i}: {v}");
                }
            }
        }
    });
}

#[test]
fn fma_matches_the_reference() {
    let shape = (0usize..80, 1usize..90, 0usize..70, any::<bool>(), 0usize..6);
    property(6, shape, |d, s, (m, n, k, biased, kind)| {
        check::<f32>(d, s, m, n, k, biased, EPILOGUES[kind], LinearPath::Fma);
        check::<f16>(d, s, m, n, k, biased, EPILOGUES[kind], LinearPath::Fma);
        check::<bf16>(d, s, m, n, k, biased, EPILOGUES[kind], LinearPath::Auto);
        Ok(())
    });
}

#[test]
fn stream_matches_the_reference() {
    let shape = (1usize..=64, 1usize..70, 1usize..80, any::<bool>(), 0usize..6);
    property(8, shape, |d, s, (m, n, k8, biased, kind)| {
        check::<f16>(d, s, m, n, 8 * k8, biased, EPILOGUES[kind], LinearPath::Stream);
        check::<bf16>(d, s, m, n, 8 * k8, biased, EPILOGUES[kind], LinearPath::Stream);
        Ok(())
    });
}

/// Runs one product by a tile, on rows further apart than they are long, twice, and compares all of it, or so many samples.
#[allow(clippy::too_many_arguments)]
fn check_tile<T: Float + PartialEq>(
    d: &Device,
    s: &Stream,
    [m, n, k]: [usize; 3],
    pads: [usize; 3],
    biased: bool,
    kind: Epilogue,
    options: LinearOptions,
    samples: usize,
) {
    let stride = |width: usize, pad: usize| width.next_multiple_of(8) + 8 * pad;
    let [x_row, w_row, y_row] = [stride(k, pads[0]), stride(k, pads[1]), stride(n, pads[2])];
    let (x, w, b) = (noise_of::<T>(m * x_row, 1), noise_of::<T>(n * w_row, 2), noise_of::<T>(n, 3));
    let dx = Tensor::from_slice(d, &x, &[m, x_row]).unwrap().narrow(1, 0, k).unwrap();
    let dw = Tensor::from_slice(d, &w, &[n, w_row]).unwrap().narrow(1, 0, k).unwrap();
    let db = Tensor::from_slice(d, &b, &[n]).unwrap();
    let options = options.epilogue(kind);
    let run = || {
        let mut whole = Tensor::<T>::uninit(d, &[m + 1, y_row]).unwrap();
        s.fill_bytes(&mut whole, 0xff).unwrap();
        let mut y = whole.narrow(0, 0, m).unwrap().narrow(1, 0, n).unwrap();
        linear_with(s, &mut y, &dx, &dw, biased.then_some(&db), &options).unwrap();
        whole.to_vec().unwrap()
    };
    let got = run();
    let bits = |v: &[T]| v.iter().map(|v| v.to_f32().to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&got), bits(&run()), "two runs");
    let outside = |i: usize| i / y_row == m || i % y_row >= n;
    assert!((0..got.len()).all(|i| !outside(i) || got[i].to_f32().is_nan()), "something outside was written");
    // Shown if something below fails.
    println!("{options:?}, {m} x {k} x {n}, {kind:?}, bias {biased}");
    let steepest = if kind == Epilogue::Relu2 { 4.0 * (k as f64).sqrt() } else { 1.2 };
    let check = |r: usize, c: usize| {
        let (a, b_row) = (widen(&x[r * x_row..][..k]), widen(&w[c * w_row..][..k]));
        let bias = widen(&b[c..=c]);
        let want = reference::gemm::linear(&a, &b_row, biased.then_some(&bias), 1, 1, k, kind);
        let one = &got[r * y_row + c..][..1];
        assert_close(one, &want, arithmetic(k), magnitude(k) * steepest);
    };
    if samples == 0 {
        (0..m * n).for_each(|i| check(i / n, i % n));
    } else {
        // Corners, then all over.
        [(0, 0), (m - 1, 0), (0, n - 1), (m - 1, n - 1)].into_iter().for_each(|(r, c)| check(r, c));
        (0..samples).for_each(|i| check(i * 7919 % m, i * 104_729 % n));
    }
}

#[test]
fn wgmma_matches_the_reference() {
    // Rows of the output are multiples of 16 bytes.
    let shape = (1usize..200, (1usize..38).prop_map(|n| 8 * n), 1usize..200);
    let how = (0..WgmmaTile::ALL.len(), any::<bool>(), 0usize..6, any::<[bool; 3]>());
    property(4, (shape, how), |d, s, ((m, n, k), (tile, biased, kind, pads))| {
        if skipped_without_hopper(d) {
            return Ok(());
        }
        let (tile, pads) = (LinearOptions::default().tile(WgmmaTile::ALL[tile]), pads.map(usize::from));
        check_tile::<f16>(d, s, [m, n, k], pads, biased, EPILOGUES[kind], tile, 0);
        check_tile::<bf16>(d, s, [m, n, k], pads, biased, EPILOGUES[kind], tile, 0);
        Ok(())
    });
}

#[test]
fn few_matches_the_reference() {
    let shape = (1usize..=64, (1usize..38).prop_map(|n| 8 * n), 1usize..700);
    let how = (any::<bool>(), 0usize..6, any::<[bool; 3]>());
    property(6, (shape, how), |d, s, ((m, n, k), (biased, kind, pads))| {
        if skipped_without_hopper(d) {
            return Ok(());
        }
        let (few, pads) = (LinearOptions::default().path(LinearPath::Few), pads.map(usize::from));
        check_tile::<f16>(d, s, [m, n, k], pads, biased, EPILOGUES[kind], few, 400);
        check_tile::<bf16>(d, s, [m, n, k], pads, biased, EPILOGUES[kind], few, 400);
        Ok(())
    });
}

#[test]
fn few_of_many_outputs_share_tokens() {
    on_every_device(|d, s| {
        if !skipped_without_hopper(d) {
            // A cluster whose last blocks have no rows; fewer steps than a ring has, and more.
            let few = LinearOptions::default().path(LinearPath::Few);
            check_tile::<bf16>(d, s, [41, 13_840, 72], [1, 0, 1], true, Epilogue::GeluTanh, few, 800);
            check_tile::<f16>(
                d,
                s,
                [64, 14_336, if d.is_simt() { 200 } else { 712 }],
                [0, 0, 0],
                false,
                Epilogue::None,
                few,
                800,
            );
        }
    });
}

/// One tile of tokens and several, of 64 and of 128 rows of weights, with K in one part and in two: the bits of tiles with as many.
#[test]
fn few_of_more_tokens() {
    on_every_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        for ([m, n, k], name, tile) in [
            ([65, 136, 72], "r128_t96", WgmmaTile::N64),
            ([120, 40, 8], "r128_t96", WgmmaTile::N64),
            ([71, 72, 1032], "t72", WgmmaTile::N64Split2),
            ([101, 72, 1032], "t72", WgmmaTile::N64Split2),
        ] {
            let entry = linear_few::entry(DType::Bf16, m as u32, n as u32, k as u32).unwrap();
            assert_eq!(entry.name, format!("linear_few_{name}_bf16"), "{m} x {n}");
            let few = LinearOptions::default().path(LinearPath::Few);
            check_tile::<bf16>(d, s, [m, n, k], [1, 0, 1], true, Epilogue::Gelu, few, 300);
            let x = Tensor::from_slice(d, &noise_of::<bf16>(m * k, 1), &[m, k]).unwrap();
            let w = Tensor::from_slice(d, &noise_of::<bf16>(n * k, 2), &[n, k]).unwrap();
            let run = |options| {
                let mut y = Tensor::from_slice(d, &vec![bf16::NAN; m * n], &[m, n]).unwrap();
                linear_with(s, &mut y, &x, &w, None, &options).unwrap();
                y.to_vec().unwrap()
            };
            assert_eq!(run(few), run(LinearOptions::default().tile(tile)), "{m} x {n}");
        }
    });
}

/// What a kernel of [`linear_few`] is given of an operand, in boxes of so many rows.
fn few_map(d: &Device, of: &Tensor<bf16>, [rows, k]: [usize; 2], lines: usize) -> warploom::device::TensorMap {
    let description = TensorMapDescription {
        base: of.as_ptr() as u64,
        dtype: DType::Bf16,
        rank: 2,
        dims: [k as u64, rows as u64, 1, 1, 1],
        strides: [2 * k as u64, 0, 0, 0],
        box_dims: [few_kernels::STEP as u32, lines as u32, 1, 1, 1],
        swizzle: Swizzle::B128,
    };
    d.tensor_map(&description).unwrap()
}

/// Three and four parts of K, which few shapes have: two tiles of tokens that have some in common, two of outputs, and the bits of a tile with as many parts.
#[test]
fn few_in_more_parts() {
    use few_kernels::{linear_few_r128_t128_split3_bf16, linear_few_r128_t128_split4_bf16};
    on_every_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        let [m, n, k] = [85usize, 136, 456];
        let x = Tensor::from_slice(d, &noise_of::<bf16>(m * k, 1), &[m, k]).unwrap();
        let w = Tensor::from_slice(d, &noise_of::<bf16>(n * k, 2), &[n, k]).unwrap();
        for (entry, parts, epilogue) in [
            (linear_few_r128_t128_split3_bf16::ENTRY, 3u32, Epilogue::None),
            (linear_few_r128_t128_split4_bf16::ENTRY, 4, Epilogue::None),
            (linear_few_r128_t128_split4_bf16::ENTRY, 4, Epilogue::Silu),
        ] {
            let (tiles, tokens) = (2u32, 48usize);
            let mut y = Tensor::from_slice(d, &vec![bf16::NAN; m * n], &[m, n]).unwrap();
            let args = few_kernels::Args {
                x: few_map(d, &x, [m, k], tokens),
                w: few_map(d, &w, [n, k], 128),
                y: y.as_mut_ptr().cast(),
                bias: std::ptr::null(),
                m: m as u32,
                n: n as u32,
                k: k as u32,
                y_row: n,
                rows: 128,
                tokens: tokens as u32,
                tiles,
                kind: epilogue.kind(),
                early: parts,
            };
            let shared = few_kernels::shared_bytes(2, 128, 5, parts, warploom::kernels::scales::NONE);
            let geometry = Geometry::linear(n.div_ceil(128) as u32 * tiles * parts, few_kernels::threads(2))
                .shared_bytes(shared as u32)
                .cluster(parts);
            // SAFETY: the arguments are tensors of the sizes that they say.
            unsafe { s.launch(&entry, &geometry, &args) }.unwrap();
            let got = y.to_vec().unwrap();
            let mut want = Tensor::from_slice(d, &vec![bf16::NAN; m * n], &[m, n]).unwrap();
            let tile = if parts == 4 { WgmmaTile::N64Split4 } else { WgmmaTile::N96Split3 };
            linear_with(s, &mut want, &x, &w, None, &LinearOptions::default().tile(tile).epilogue(epilogue)).unwrap();
            assert_eq!(got, want.to_vec().unwrap(), "{}", entry.name);
        }
    });
}

/// Sums that travel before the last weights come: a block without rows of its own and one with some, rings that go round and fewer steps than are the last, and the bits of a tile
/// with as many parts of K.
#[test]
fn few_in_pairs() {
    use warploom::kernels::gemm::linear_pair;
    on_every_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        let few = LinearOptions::default().path(LinearPath::Few);
        check_tile::<f16>(d, s, [33, 2568, 72], [1, 0, 1], true, Epilogue::GeluTanh, few, 300);
        let one = (few_kernels::linear_few_t64_pair_bf16::ENTRY, 1);
        let two = (few_kernels::linear_few_t128_pair_bf16::ENTRY, 2);
        for ([m, n, k], (entry, groups), epilogue) in [
            ([41, 72, 1288], one, Epilogue::None),
            ([64, 56, 200], one, Epilogue::Silu),
            ([107, 72, 264], two, Epilogue::None),
        ] {
            let x = Tensor::from_slice(d, &noise_of::<bf16>(m * k, 1), &[m, k]).unwrap();
            let w = Tensor::from_slice(d, &noise_of::<bf16>(n * k, 2), &[n, k]).unwrap();
            let tokens = m.next_multiple_of(8);
            let mut y = Tensor::from_slice(d, &vec![bf16::NAN; m * n], &[m, n]).unwrap();
            let args = few_kernels::Args {
                x: few_map(d, &x, [m, k], tokens),
                w: few_map(d, &w, [n, k], linear_pair::HALF),
                y: y.as_mut_ptr().cast(),
                bias: std::ptr::null(),
                m: m as u32,
                n: n as u32,
                k: k as u32,
                y_row: n,
                rows: linear_pair::HALF as u32,
                tokens: tokens as u32,
                tiles: 1,
                kind: epilogue.kind(),
                // More than there are.
                early: u32::MAX,
            };
            let geometry =
                Geometry::linear(2 * n.div_ceil(linear_pair::ROWS) as u32, few_kernels::threads(groups as u32))
                    .shared_bytes(linear_pair::shared_bytes(groups, 8) as u32)
                    .cluster(2);
            // SAFETY: the arguments are tensors of the sizes that they say.
            unsafe { s.launch(&entry, &geometry, &args) }.unwrap();
            let mut want = Tensor::from_slice(d, &vec![bf16::NAN; m * n], &[m, n]).unwrap();
            let tile = LinearOptions::default().tile(WgmmaTile::N64Split2).epilogue(epilogue);
            linear_with(s, &mut want, &x, &w, None, &tile).unwrap();
            assert_eq!(y.to_vec().unwrap(), want.to_vec().unwrap(), "{m} x {n} x {k}");
        }
    });
}

/// Fewer blocks than tiles, so that each takes several; two and three consumers; tokens in one product and in two, in one box and in two, in one tile and in
/// two that have some in common: the bits of other tiles.
#[test]
fn few_in_rounds() {
    use few_kernels::{
        linear_few_r128_t96_bf16, linear_few_r128_t304_bf16, linear_few_r192_t144_bf16, linear_few_r192_t208_bf16,
    };
    on_every_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        for (entry, [groups, room, stages], [m, tiles], [n, rows], k, epilogue) in [
            (linear_few_r128_t96_bf16::ENTRY, [2, 96, 8], [100, 2], [264, 104], 712, Epilogue::None),
            (linear_few_r128_t304_bf16::ENTRY, [2, 304, 4], [283, 1], [264, 128], 72, Epilogue::None),
            (linear_few_r192_t144_bf16::ENTRY, [3, 144, 5], [70, 1], [328, 144], 392, Epilogue::Gelu),
            (linear_few_r192_t208_bf16::ENTRY, [3, 208, 4], [205, 1], [200, 192], 72, Epilogue::Silu),
        ] {
            let x = Tensor::from_slice(d, &noise_of::<bf16>(m * k, 1), &[m, k]).unwrap();
            let w = Tensor::from_slice(d, &noise_of::<bf16>(n * k, 2), &[n, k]).unwrap();
            let bias = Tensor::from_slice(d, &noise_of::<bf16>(n, 3), &[n]).unwrap();
            let biased = epilogue != Epilogue::None;
            let unit = 8 * linear_rounds::boxes(room) as usize;
            let tokens = m.div_ceil(tiles * unit) * unit;
            let mut y = Tensor::from_slice(d, &vec![bf16::NAN; m * n], &[m, n]).unwrap();
            let args = few_kernels::Args {
                x: few_map(d, &x, [m, k], tokens / linear_rounds::boxes(room) as usize),
                w: few_map(d, &w, [n, k], rows),
                y: y.as_mut_ptr().cast(),
                bias: if biased { bias.as_ptr().cast() } else { std::ptr::null() },
                m: m as u32,
                n: n as u32,
                k: k as u32,
                y_row: n,
                rows: rows as u32,
                tokens: tokens as u32,
                tiles: tiles as u32,
                kind: epilogue.kind(),
                early: 0,
            };
            let shared = linear_rounds::shared_bytes(groups, room, stages);
            let geometry = Geometry::linear(2, linear_rounds::threads(groups as u32)).shared_bytes(shared as u32);
            // SAFETY: the arguments are tensors of the sizes that they say.
            unsafe { s.launch(&entry, &geometry, &args) }.unwrap();
            let mut want = Tensor::from_slice(d, &vec![bf16::NAN; m * n], &[m, n]).unwrap();
            let tile = LinearOptions::default().tile(WgmmaTile::N64).epilogue(epilogue);
            linear_with(s, &mut want, &x, &w, biased.then_some(&bias), &tile).unwrap();
            assert_eq!(y.to_vec().unwrap(), want.to_vec().unwrap(), "{}", entry.name);
        }
    });
}

/// Extents that no memory holds have a choice and a geometry all the same, and so have none.
#[test]
fn choices_for_the_largest_extents() {
    for (m, n, k) in [(0, 0, 0), (100, 0, 128), (0, 100, 128), (100, 100, 0)] {
        linear_few::suits(m, n, k);
        let _ = linear_few::geometry(m, n, k);
    }
    for m in [1, 33, 64, 65, 300, linear_few::TOKENS, linear_few::TOKENS + 1, 1 << 30, u32::MAX] {
        for n in [1 << 30, u32::MAX] {
            for k in [1, 1 << 30, u32::MAX] {
                linear_few::suits(m, n, k);
                assert_eq!(linear_few::entry(DType::Bf16, m, n, k).is_some(), m <= linear_few::TOKENS);
                assert!(linear_few::geometry(m, n, k).grid[0] > 0);
                assert!(WgmmaTile::choose(m, n, k, 132).geometry(m, n, 132).grid[0] > 0);
                let tile = linear::tile_size(m, n, 132);
                assert!(
                    linear::tile_geometry(m, n, tile).grid[0] > 0 && linear::tile_entry(DType::Bf16, tile).is_some()
                );
                for blocks in [false, true] {
                    LinearQuantTile::choose(m, n, k, blocks, u32::MAX);
                }
            }
        }
    }
}

#[test]
fn few_at_model_sizes() {
    let Some(d) = warploom_tests::gpu().filter(|d| !skipped_without_hopper(d)) else {
        return;
    };
    let s = Stream::new(&d).unwrap();
    let few = LinearOptions::default().path(LinearPath::Few);
    for (i, m) in [1, 7, 8, 9, 16, 31, 50, 64, 65, 91, 130, 190, 201, 300, 384, 450].into_iter().enumerate() {
        let (kind, biased) = (EPILOGUES[i % 6], i % 2 == 1);
        let (small, large) = ([[136, 712], [72, 8]], [[4096, 4096], [14336, 2880], [18944, 1032]]);
        for &[n, k] in if sanitizing() { &small[..] } else { &large[..] } {
            check_tile::<bf16>(&d, &s, [m, n, k], [1, 0, 1], biased, kind, few, 1000);
        }
    }
}

/// Launches that may overlap, each of which reads what the one before wrote.
#[test]
fn few_in_a_row() {
    on_every_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        let (m, k, steps) = (5, 256, if d.is_simt() { 3 } else { 200 });
        let small = |i| noise_of::<bf16>(k * k, i).iter().map(|v| bf16::from_f32(v.to_f32() / 8.0)).collect::<Vec<_>>();
        let w: Vec<_> = (5..8).map(|i| Tensor::from_slice(d, &small(i), &[k, k]).unwrap()).collect();
        let bias = Tensor::from_slice(d, &noise_of::<bf16>(k, 9), &[k]).unwrap();
        let x = Tensor::from_slice(d, &noise_of::<bf16>(m * k, 1), &[m, k]).unwrap();
        let run = |wait: bool| {
            let mut all = vec![x.clone()];
            for _ in 0..steps {
                let mut y = Tensor::<bf16>::uninit(d, &[m, k]).unwrap();
                s.fill_bytes(&mut y, 0xff).unwrap();
                all.push(y);
            }
            for i in 0..steps {
                let (before, after) = all.split_at_mut(i + 1);
                let few = LinearOptions::default().path(LinearPath::Few).epilogue(Epilogue::Silu);
                linear_with(s, &mut after[0], &before[i], &w[i % 3], Some(&bias), &few).unwrap();
                if wait {
                    s.synchronize().unwrap();
                }
            }
            all.iter().map(|t| t.to_vec().unwrap()).collect::<Vec<_>>()
        };
        let want = run(true);
        assert!(want.iter().flatten().all(|v| v.is_finite()));
        assert!(run(false) == want);
    });
}

#[test]
fn every_tile_and_epilogue() {
    on_every_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        for (i, tile) in WgmmaTile::ALL.iter().copied().enumerate() {
            // Fewer tiles than blocks, and more; and as many steps along K as a ring has, more, and fewer than parts.
            let (kind, [m, n, k]) = (EPILOGUES[i % 6], [[130, 264, 328], [300, 40, 64], [65, 520, 8]][i % 3]);
            let tile = LinearOptions::default().tile(tile);
            check_tile::<bf16>(d, s, [m, n, k], [0, 0, 0], i % 2 == 0, kind, tile, 400);
        }
    });
}

#[test]
fn tiles_agree_where_they_do_not_split() {
    on_every_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        let (m, n, k) = (133, 264, 392);
        let x = Tensor::from_slice(d, &noise_of::<bf16>(m * k, 1), &[m, k]).unwrap();
        let w = Tensor::from_slice(d, &noise_of::<bf16>(n * k, 2), &[n, k]).unwrap();
        let run = |tile: WgmmaTile| {
            // Filled, since compute-sanitizer's initcheck does not see what tensor copies write.
            let mut y = Tensor::from_slice(d, &vec![bf16::NAN; m * n], &[m, n]).unwrap();
            linear_with(s, &mut y, &x, &w, None, &LinearOptions::default().tile(tile)).unwrap();
            y.to_vec().unwrap()
        };
        let want = run(WgmmaTile::N256);
        for &tile in WgmmaTile::ALL.iter().filter(|t| t.split() == 1) {
            assert_eq!(run(tile), want, "{tile:?}");
        }
    });
}

#[test]
fn wgmma_at_model_sizes() {
    let Some(d) = warploom_tests::gpu().filter(|d| !skipped_without_hopper(d)) else {
        return;
    };
    let s = Stream::new(&d).unwrap();
    for (i, tile) in WgmmaTile::ALL.iter().copied().enumerate() {
        let (kind, biased) = (EPILOGUES[(i + 1) % 6], i % 2 == 1);
        let tile = LinearOptions::default().tile(tile);
        if sanitizing() {
            // Several tiles, several times round the ring.
            check_tile::<bf16>(&d, &s, [300, 520, 712], [1, 0, 1], biased, kind, tile, 50);
            continue;
        }
        for [m, n, k] in [[65, 1408, 2880], [128, 4096, 4096], [513, 2880, 1408], [200, 4096, 96]] {
            check_tile::<bf16>(&d, &s, [m, n, k], [0, 0, 0], false, Epilogue::None, tile, 500);
        }
        check_tile::<bf16>(&d, &s, [4097, 1408, 2880], [1, 0, 1], biased, kind, tile, 2000);
        check_tile::<f16>(&d, &s, [4097, 2880, 1408], [0, 1, 0], biased, kind, tile, 2000);
    }
}

/// What was the fastest, or within the noise of it, where all were measured on an H200.
#[test]
fn tiles_are_chosen_as_measured() {
    use WgmmaTile::*;
    for ([m, k, n], tile) in [
        ([128, 4096, 14336], N128),
        ([512, 4096, 14336], N224),
        ([1024, 4096, 14336], N176Turns),
        ([2048, 4096, 14336], N176Turns),
        ([4096, 4096, 14336], N176Turns),
        ([128, 4096, 4096], N64Split2),
        ([256, 4096, 4096], N128Split2),
        ([384, 4096, 4096], N96),
        ([512, 4096, 4096], N128),
        ([1024, 4096, 4096], N256),
        ([4096, 4096, 4096], N256Weights2),
        ([128, 4096, 128_256], N256),
        ([512, 4096, 128_256], N144Turns),
        ([4096, 4096, 128_256], N176Turns),
        ([8192, 8192, 8192], N256Weights2),
        ([128, 2880, 1408], N64Split4),
        ([2048, 2880, 1408], N176Turns),
        ([4096, 2880, 1408], N176Turns),
        ([4096, 7168, 2112], N176Turns),
        ([768, 2880, 2880], N144Turns),
        ([768, 4096, 6144], N144Tokens256),
        ([240, 3584, 18944], N144Tokens256),
        ([256, 7168, 18432], N144Tokens256),
        ([1024, 5120, 5120], N160Turns),
        ([2048, 5120, 5120], N160Turns),
        ([1024, 4096, 6144], N192),
        ([512, 2048, 2048], N64),
        ([128, 8192, 8192], N128Split2),
        ([128, 14336, 4096], N64Split2),
        ([512, 14336, 4096], N128),
        ([512, 7168, 2112], N144Split2),
        ([768, 7168, 1536], N144Split2),
        ([512, 4096, 2560], N160Split2),
        ([512, 7168, 1536], N96Split2),
        ([640, 4096, 1024], N96Split2),
        ([640, 8192, 1280], N128Split2),
        ([768, 7168, 576], N96Split3),
        ([1024, 7168, 512], N128Split3),
        ([512, 8192, 1280], N144Split3),
        ([1024, 7168, 576], N144Split3),
        ([512, 7168, 576], N96Split4),
        ([256, 8192, 1280], N96Split4),
    ] {
        assert_eq!(WgmmaTile::choose(m, n, k, 132), tile, "{m} x {k} x {n}");
    }
}

/// The same for tiles of [`LinearPath::Few`], and where they are not.
#[test]
fn few_is_chosen_as_measured() {
    for ([m, k, n], name) in [
        ([64, 4096, 4096], "t64_pair"),
        ([64, 7168, 2112], "t64"),
        ([64, 4096, 6144], "t64_r6"),
        ([64, 4096, 14336], "t64_x4"),
        ([65, 4096, 4096], "t72"),
        ([88, 4096, 4096], "t96"),
        ([89, 4096, 4096], "t128_pair"),
        ([128, 4096, 4096], "t128_pair"),
        ([112, 2880, 3072], "t128"),
        ([130, 4096, 4096], "t160"),
        ([192, 4096, 4096], "t192"),
        ([256, 4096, 4096], "r128_t128_split2"),
        ([300, 4096, 4096], "r128_t160_split2"),
        ([72, 4096, 6144], "r128_t72_split2"),
        ([96, 5120, 5120], "r128_t96_split2"),
        ([96, 4096, 14336], "r128_t96"),
        ([130, 4096, 14336], "r128_t160"),
        ([192, 4096, 14336], "r128_t192"),
        ([224, 4096, 14336], "r128_t224"),
        ([320, 2880, 5120], "r128_t112"),
        ([224, 7168, 2112], "t128"),
        ([96, 7168, 2112], "t96"),
        ([128, 4096, 14336], "r128_t128"),
        ([160, 3584, 18944], "r192_t160"),
        ([300, 6144, 6144], "r192_t80"),
        ([200, 3072, 24576], "r192_t208"),
        ([256, 3072, 24576], "r192_t256"),
        ([300, 4096, 14336], "r128_t304"),
        ([320, 4096, 28672], "r128_t320"),
        ([384, 4096, 4096], "r128_t96"),
        ([200, 8192, 8192], "r128_t208_split2"),
        ([416, 14336, 4096], "r128_t208_split2"),
        ([448, 8192, 8192], "r128_t224"),
        ([320, 8192, 1024], "r128_t128_split4"),
        ([384, 14336, 1024], "r128_t128_split4"),
        ([512, 8192, 1024], "r128_t128_split3"),
        ([208, 7168, 18432], "r192_t208"),
    ] {
        let entry = linear_few::entry(DType::Bf16, m, n, k).unwrap();
        assert_eq!(entry.name, format!("linear_few_{name}_bf16"), "{m} x {k} x {n}");
        assert!(linear_few::suits(m, n, k), "{m} x {k} x {n}");
    }
    for [m, k, n] in [
        [128, 4096, 128_256],
        [128, 12_288, 1536],
        [128, 8192, 1280],
        [256, 4096, 14336],
        [256, 3584, 18944],
        [320, 8192, 2560],
        [384, 4096, 1024],
        [512, 7168, 2112],
        [512, 4096, 14336],
        [512, 4096, 1024],
        [513, 4096, 4096],
    ] {
        assert!(!linear_few::suits(m, n, k), "{m} x {k} x {n}");
    }
    assert!(linear_few::entry(DType::F16, linear_few::TOKENS + 1, 4096, 4096).is_none());
}

#[test]
fn wgmma_is_chosen_for_many_tokens() {
    on_every_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        let (m, n, k) = (linear_few::TOKENS as usize + 1, 40, 72);
        let x = Tensor::from_slice(d, &noise_of::<bf16>(m * k, 1), &[m, k]).unwrap();
        let w = Tensor::from_slice(d, &noise_of::<bf16>(n * k, 2), &[n, k]).unwrap();
        let run = |path| {
            let mut y = Tensor::<bf16>::uninit(d, &[m, n]).unwrap();
            s.fill_bytes(&mut y, 0xff).unwrap();
            linear_with(s, &mut y, &x, &w, None, &LinearOptions::default().path(path)).unwrap();
            y.to_vec().unwrap()
        };
        assert_eq!(run(LinearPath::Auto), run(LinearPath::Wgmma));
        // Rows that the copy engine cannot follow go another way, and are refused where the path is asked for.
        let mut odd = Tensor::<bf16>::zeros(d, &[m, 41]).unwrap().narrow(1, 0, n).unwrap();
        linear(s, &mut odd, &x, &w).unwrap();
        assert_eq!(odd.to_vec().unwrap(), run(LinearPath::Tile));
        let e = linear_with(s, &mut odd, &x, &w, None, &LinearOptions::default().path(LinearPath::Wgmma));
        assert!(e.unwrap_err().to_string().contains("rows of `out`"));
        // So do rows that end within 16 bytes.
        let whole = Tensor::<bf16>::uninit(d, &[m, n]).unwrap();
        s.fill_bytes(&mut whole.clone(), 0xff).unwrap();
        let mut short = whole.narrow(1, 0, n - 3).unwrap();
        let few = w.narrow(0, 0, n - 3).unwrap();
        linear(s, &mut short, &x, &few).unwrap();
        let (got, want) = (whole.to_vec().unwrap(), run(LinearPath::Wgmma));
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            assert!(if i % n < n - 3 { *got == want } else { got.is_nan() }, "element {i}");
        }
        let e = linear_with(s, &mut short, &x, &few, None, &LinearOptions::default().path(LinearPath::Wgmma));
        assert!(e.unwrap_err().to_string().contains("rows of `out`"));
        let t = |shape: &[usize]| Tensor::<f32>::zeros(d, shape).unwrap();
        let wgmma = LinearOptions::default().path(LinearPath::Wgmma);
        let e = linear_with(s, &mut t(&[4, 4]), &t(&[4, 8]), &t(&[4, 8]), None, &wgmma);
        assert!(matches!(e, Err(Error::Unsupported { .. })), "{e:?}");
        let empty = Tensor::<bf16>::zeros(d, &[m, 0]).unwrap();
        let mut y = Tensor::<bf16>::zeros(d, &[m, n]).unwrap();
        let e = linear_with(s, &mut y, &empty, &Tensor::<bf16>::zeros(d, &[n, 0]).unwrap(), None, &wgmma);
        assert!(matches!(e, Err(Error::Unsupported { .. } | Error::Alignment { .. })), "{e:?}");
    });
}

#[test]
fn tile_matches_the_reference() {
    let shape = (1usize..200, 1usize..200, 1usize..40, any::<bool>(), 0usize..6);
    property(4, shape, |d, s, (m, n, k8, biased, kind)| {
        check::<f16>(d, s, m, n, 8 * k8, biased, EPILOGUES[kind], LinearPath::Tile);
        check::<bf16>(d, s, m, n, 8 * k8, biased, EPILOGUES[kind], LinearPath::Tile);
        Ok(())
    });
}

#[test]
fn dot_and_host_match_the_reference() {
    let shape = (0usize..20, 1usize..40, 0usize..300, any::<bool>(), 0usize..6);
    property(6, shape, |d, s, (m, n, k, biased, kind)| {
        let paths = [LinearPath::Dot, LinearPath::Host];
        for path in if d.is_simt() { &paths[..] } else { &paths[..1] } {
            check::<f32>(d, s, m, n, k, biased, EPILOGUES[kind], *path);
            check::<f16>(d, s, m, n, k, biased, EPILOGUES[kind], *path);
            check::<bf16>(d, s, m, n, k & !7, biased, EPILOGUES[kind], *path);
        }
        Ok(())
    });
}

#[test]
fn tokens_of_16_bits_times_weights_of_f32() {
    fn check<X: Float>(d: &Device, s: &Stream, [m, n, k]: [usize; 3], path: LinearPath) {
        let (x, w) = (noise_of::<X>(m * k, 1), noise_of::<f32>(n * k, 2));
        let dx = Tensor::from_slice(d, &x, &[m, k]).unwrap();
        let dw = Tensor::from_slice(d, &w, &[n, k]).unwrap();
        let mut y = Tensor::<f32>::uninit(d, &[m, n]).unwrap();
        s.fill_bytes(&mut y, 0xff).unwrap();
        linear_with(s, &mut y, &dx, &dw, None, &LinearOptions::default().path(path)).unwrap();
        let want = reference::gemm::linear(&widen(&x), &widen(&w), None, m, n, k, Epilogue::None);
        assert_close(&y.to_vec().unwrap(), &want, arithmetic(k), magnitude(k));
        let stream = linear_with(s, &mut y, &dx, &dw, None, &LinearOptions::default().path(LinearPath::Stream));
        assert!(matches!(stream, Err(Error::Unsupported { .. })), "{stream:?}");
    }
    on_every_device(|d, s| {
        for shape in [[1, 16, 256], [3, 5, 37], [2, 9, 264]] {
            check::<bf16>(d, s, shape, LinearPath::Auto);
            check::<f16>(d, s, shape, LinearPath::Dot);
            if d.is_simt() {
                check::<bf16>(d, s, shape, LinearPath::Host);
            }
        }
        let (x, w) = (Tensor::<f32>::zeros(d, &[1, 8]).unwrap(), Tensor::<bf16>::zeros(d, &[2, 8]).unwrap());
        let e = linear_with(s, &mut Tensor::<f32>::zeros(d, &[1, 2]).unwrap(), &x, &w, None, &LinearOptions::default());
        assert!(matches!(e, Err(Error::DType { arg: "w", .. })), "{e:?}");
        let one = w.narrow(0, 0, 1).unwrap();
        let e =
            linear_with(s, &mut Tensor::<f32>::zeros(d, &[1, 2]).unwrap(), &one, &w, None, &LinearOptions::default());
        assert!(matches!(e, Err(Error::DType { arg: "out", .. })), "{e:?}");
    });
}

/// More tokens than a grid has blocks in its height. In one mode of the SIMT device only: those are eight million threads.
#[test]
fn more_tokens_than_a_grid_is_high() {
    for d in (!sanitizing()).then(Device::simt).into_iter().chain(warploom_tests::gpu()) {
        let s = Stream::new(&d).unwrap();
        let m = 65535 + 7;
        let values: Vec<bf16> = (0..m).map(|t| bf16::from_f32((t % 251) as f32)).collect();
        let x = Tensor::from_slice(&d, &values, &[m, 1]).unwrap();
        let w = Tensor::from_slice(&d, &[2f32], &[1, 1]).unwrap();
        let mut y = Tensor::<f32>::uninit(&d, &[m, 1]).unwrap();
        linear_with(&s, &mut y, &x, &w, None, &LinearOptions::default()).unwrap();
        assert!(y.to_vec().unwrap().iter().enumerate().all(|(t, &y)| y == 2.0 * (t % 251) as f32));
    }
}

/// Weights, results or tokens of more than 2^31 elements, on a GPU: what their ends give.
#[test]
fn more_than_32_bits_number() {
    let Some((d, _turn)) = large_gpu(8) else { return };
    if sanitizing() {
        eprintln!("skipped under a sanitizer: products of billions of elements");
        return;
    }
    let s = Stream::new(&d).unwrap();
    let hopper = !skipped_without_hopper(&d);
    let (xs, ws) = (noise_of::<bf16>(PERIOD, 1), noise_of::<bf16>(PERIOD, 2));
    use LinearPath::{Auto, Dot, Few, Fma, Tile, Wgmma};
    let cases: [([usize; 3], &[LinearPath], &[LinearPath]); 5] = [
        ([3, 600_008, 4096], &[Auto, Fma, LinearPath::Stream, Dot], &[Few]),
        ([70, 600_008, 4096], &[Tile], &[Few, Wgmma]),
        ([700, 600_008, 4096], &[], &[Wgmma]),
        ([20_003, 131_080, 64], &[Auto, Fma, Tile], &[Wgmma]),
        ([600_003, 8, 4096], &[Auto, Fma, Tile, Dot], &[Wgmma]),
    ];
    for ([m, n, k], paths, hoppers) in cases {
        let (x, w) = (cyclic(&d, &s, &xs, &[m, k]), cyclic(&d, &s, &ws, &[n, k]));
        let mut y = Tensor::<bf16>::uninit(&d, &[m, n]).unwrap();
        for &path in paths.iter().chain(hoppers.iter().filter(|_| hopper)) {
            // Shown if something below fails.
            println!("{m} x {k} x {n}, {path:?}");
            s.fill_bytes(&mut y, 0xff).unwrap();
            linear_with(&s, &mut y, &x, &w, None, &LinearOptions::default().path(path)).unwrap();
            for row in [0, m / 2, m - 1] {
                let got = y.narrow(0, row, 1).unwrap().to_vec().unwrap();
                assert!(got.iter().all(|v| v.is_finite()), "{m} x {k} x {n}, {path:?}, row {row}");
                let a: Vec<f64> = of_cycle(&xs, row * k, k).map(|v| v.to_f32() as f64).collect();
                for column in (0..64).map(|i| i * 104_729 % n).chain([n / 2, n - 2, n - 1]) {
                    let b: Vec<f64> = of_cycle(&ws, column * k, k).map(|v| v.to_f32() as f64).collect();
                    let want = reference::gemm::linear(&a, &b, None, 1, 1, k, Epilogue::None);
                    let magnitude: f64 = a.iter().zip(&b).map(|(a, b)| (a * b).abs()).sum();
                    assert_close(&got[column..=column], &want, arithmetic(k), magnitude);
                }
            }
        }
    }
}

#[test]
fn host_products_are_for_the_simt_device() {
    let device = Device::simt_with(SimtOptions::default().host_products(true));
    let stream = Stream::new(&device).unwrap();
    // What Auto chooses here gives the bits of the path.
    let (m, n, k) = (3, 70, 300);
    let x = Tensor::from_slice(&device, &noise_of::<bf16>(m * k, 1), &[m, k]).unwrap();
    let w = Tensor::from_slice(&device, &noise_of::<bf16>(n * k, 2), &[n, k]).unwrap();
    let run = |path| {
        let mut y = Tensor::<bf16>::uninit(&device, &[m, n]).unwrap();
        let graph =
            Graph::capture(&stream, |s| linear_with(s, &mut y, &x, &w, None, &LinearOptions::default().path(path)));
        assert!(y.to_vec().unwrap().iter().all(|v| v.is_nan()), "captured, not run");
        graph.unwrap().launch(&stream).unwrap();
        y.to_vec().unwrap()
    };
    assert_eq!(run(LinearPath::Auto), run(LinearPath::Host));
    if let Some(gpu) = warploom_tests::gpu() {
        let t = |shape: &[usize]| Tensor::<bf16>::zeros(&gpu, shape).unwrap();
        let (stream, host) = (Stream::new(&gpu).unwrap(), LinearOptions::default().path(LinearPath::Host));
        let e = linear_with(&stream, &mut t(&[1, 3]), &t(&[1, 16]), &t(&[3, 16]), None, &host);
        assert!(matches!(e, Err(Error::Unsupported { .. })), "{e:?}");
    }
}

#[test]
fn a_row_does_not_depend_on_its_batch() {
    on_every_device(|d, s| {
        let (n, k) = (40, 264);
        let x = noise_of::<bf16>(64 * k, 1);
        let dw = Tensor::from_slice(d, &noise_of::<bf16>(n * k, 2), &[n, k]).unwrap();
        let run = |path, m: usize| {
            let dx = Tensor::from_slice(d, &x[..m * k], &[m, k]).unwrap();
            let mut y = Tensor::<bf16>::uninit(d, &[m, n]).unwrap();
            s.fill_bytes(&mut y, 0xff).unwrap();
            linear_with(s, &mut y, &dx, &dw, None, &LinearOptions::default().path(path)).unwrap();
            y.to_vec().unwrap()
        };
        let few = !skipped_without_hopper(d);
        for (path, most) in [
            (LinearPath::Dot, 64),
            (LinearPath::Stream, 64),
            (LinearPath::Few, if few { linear_few::ALWAYS as usize } else { 0 }),
        ] {
            let one = if most > 0 { run(path, 1) } else { continue };
            for m in [7, 9, 30, 64].into_iter().filter(|m| *m <= most) {
                assert_eq!(run(path, m)[..n], one, "{path:?}, {m} tokens");
            }
        }
    });
}

/// Nor on the size of tiles, of which few tokens have smaller ones.
#[test]
fn tiles_of_any_size_give_the_same_bits() {
    on_every_device(|d, s| {
        let (n, k, few) = (104, 264, 70);
        let multiprocessors = d.properties().multiprocessors;
        let many = 128 * multiprocessors as usize;
        let size = |m: usize| linear::tile_size(m as u32, n as u32, multiprocessors);
        assert_eq!([few, many].map(size), [64, 128]);
        let x = Tensor::from_slice(d, &noise_of::<bf16>(many * k, 1), &[many, k]).unwrap();
        let w = Tensor::from_slice(d, &noise_of::<bf16>(n * k, 2), &[n, k]).unwrap();
        let run = |m: usize| {
            let mut y = Tensor::<bf16>::uninit(d, &[m, n]).unwrap();
            s.fill_bytes(&mut y, 0xff).unwrap();
            let options = LinearOptions::default().path(LinearPath::Tile);
            linear_with(s, &mut y, &x.narrow(0, 0, m).unwrap(), &w, None, &options).unwrap();
            y.to_vec().unwrap()
        };
        assert_eq!(run(few), run(many)[..few * n]);
    });
}

/// Nor on how far apart rows are, or where they begin: a router's weights of f32 have one path, which takes all of them.
#[test]
fn a_row_does_not_depend_on_where_it_lies() {
    on_every_device(|d, s| {
        let (m, n, k, row) = (5, 8, 1004, 1008);
        let w = Tensor::from_slice(d, &noise_of::<f32>(n * k, 2), &[n, k]).unwrap();
        let run = |x: &Tensor<bf16>| {
            let mut y = Tensor::<f32>::uninit(d, &[x.dim(0), n]).unwrap();
            linear_with(s, &mut y, x, &w, None, &LinearOptions::default()).unwrap();
            y.to_vec().unwrap()
        };
        let flat = Tensor::from_slice(d, &noise_of::<bf16>(m * row + 1, 1), &[m * row + 1]).unwrap();
        for offset in [0, 1] {
            let x = flat.as_strided(&[m, k], &[row, 1], offset).unwrap();
            let all = run(&x);
            for (i, want) in all.chunks(n).enumerate() {
                let one = x.narrow(0, i, 1).unwrap();
                assert_eq!(run(&one), want, "row {i} from element {offset} on, alone");
                let copy = Tensor::from_slice(d, &one.to_vec().unwrap(), &[1, k]).unwrap();
                assert_eq!(run(&copy), want, "row {i} from element {offset} on, elsewhere");
            }
        }
    });
}

/// On the far negative side GELU is small, and as accurate as elsewhere: to the rounding of the type where sums are finished in f32 functions.
#[test]
fn the_tail_of_gelu() {
    fn check<T: Float>(d: &Device, s: &Stream, path: LinearPath, error: f64) {
        let x = [-0.5f32, -1.0, -2.0, -3.0, -4.0, -5.0, -5.5, -6.0, 1.0, 6.0];
        let first = |values: &[f32]| {
            let row = |&v: &f32| std::iter::once(v).chain([0.0; 7]).map(T::from_f32);
            Tensor::from_slice(d, &values.iter().flat_map(row).collect::<Vec<T>>(), &[values.len(), 8]).unwrap()
        };
        let mut y = Tensor::<T>::uninit(d, &[x.len(), 1]).unwrap();
        for kind in [Epilogue::Gelu, Epilogue::GeluTanh] {
            let options = LinearOptions::default().epilogue(kind).path(path);
            linear_with(s, &mut y, &first(&x), &first(&[1.0]), None, &options).unwrap();
            let want = reference::gemm::linear(&x.map(f64::from), &[1.0], None, x.len(), 1, 1, kind);
            for ((x, got), want) in x.iter().zip(y.to_vec().unwrap()).zip(want) {
                let got = f64::from(got.to_f32());
                assert!((got - want).abs() <= error * want.abs(), "{path:?} {kind:?} of {x}: {got:e} {want:e}");
            }
        }
    }
    on_every_device(|d, s| {
        for path in [LinearPath::Fma, LinearPath::Dot] {
            check::<f32>(d, s, path, 1e-5);
            check::<bf16>(d, s, path, 0.004);
        }
        check::<bf16>(d, s, LinearPath::Stream, 0.004);
        check::<bf16>(d, s, LinearPath::Tile, 0.004);
        if d.is_simt() {
            check::<f32>(d, s, LinearPath::Host, 1e-5);
        }
    });
}

#[test]
fn views_and_misaligned_tensors() {
    on_every_device(|d, s| {
        let (m, n, k) = (3, 5, 16);
        let flat = noise_of::<bf16>(400, 4);
        let base = Tensor::from_slice(d, &flat, &[400]).unwrap();
        for (offset, row) in [(0, 16), (0, 24), (1, 16), (0, 17), (8, 40)] {
            let x = base.as_strided(&[m, k], &[row, 1], offset).unwrap();
            let w = base.as_strided(&[n, k], &[row, 1], offset + 150).unwrap();
            let mut out = Tensor::<bf16>::zeros(d, &[m, 2 * n]).unwrap().narrow(1, n, n).unwrap();
            linear(s, &mut out, &x, &w).unwrap();
            let (x, w) = (widen(&x.to_vec().unwrap()), widen(&w.to_vec().unwrap()));
            let want = reference::gemm::linear(&x, &w, None, m, n, k, Epilogue::None);
            assert_close(&out.to_vec().unwrap(), &want, 1e-6, 4.0);
        }
    });
}

/// One product by the checked function and by a raw launch, and the path that both took.
fn raw_and_checked<T: Float>(d: &Device, s: &Stream, [m, n, k]: [usize; 3], offset: usize) -> LinearPath {
    let flat = Tensor::from_slice(d, &noise_of::<T>((m + n) * k + offset, 4), &[(m + n) * k + offset]).unwrap();
    let x = flat.as_strided(&[m, k], &[k, 1], offset).unwrap();
    let w = Tensor::from_slice(d, &noise_of::<T>(n * k, 5), &[n, k]).unwrap();
    let [mut raw, mut auto, mut named] = [0; 3].map(|_| Tensor::<T>::zeros(d, &[m, n]).unwrap());
    let args = linear_fma::Args {
        y: raw.as_mut_ptr().cast(),
        x: x.as_ptr().cast(),
        w: w.as_ptr().cast(),
        bias: std::ptr::null(),
        m: m as u32,
        n: n as u32,
        k: k as u32,
        y_row: n,
        x_row: k,
        w_row: k,
        kind: Epilogue::None.kind(),
    };
    let path = warploom::gemm::linear::path_of::<T, T, T>(d, LinearPath::Auto, &args).unwrap();
    // SAFETY: the pointers are those of tensors of these sizes, which live until the results were read.
    unsafe { warploom::gemm::linear::launch::<T, T, T>(s, LinearPath::Auto, &args).unwrap() };
    linear(s, &mut auto, &x, &w).unwrap();
    linear_with(s, &mut named, &x, &w, None, &LinearOptions::default().path(path)).unwrap();
    let [raw, auto, named] =
        [raw, auto, named].map(|y| y.to_vec().unwrap().into_iter().map(|v| v.to_f32().to_bits()).collect::<Vec<_>>());
    assert_eq!(raw, auto);
    assert_eq!(raw, named);
    // What is asked for by name and does not fit is refused, whoever asks.
    let tile = warploom::gemm::linear::path_of::<T, T, T>(d, LinearPath::Tile, &args);
    let fits = offset == 0 && k % 8 == 0;
    assert!(
        match &tile {
            Ok(path) => fits && *path == LinearPath::Tile,
            Err(Error::Alignment { arg: "x", .. }) => offset != 0,
            e => !fits && offset == 0 && matches!(e, Err(Error::Unsupported { .. })),
        } || T::DTYPE == DType::F32,
        "{tile:?}"
    );
    path
}

#[test]
fn raw_launches_choose_as_the_checked_function_does() {
    on_every_device(|d, s| {
        let tensor_cores = |path| {
            use LinearPath::*;
            matches!(path, Few | Wgmma | Stream | Tile)
        };
        for m in [1, 3, 70] {
            assert!(tensor_cores(raw_and_checked::<bf16>(d, s, [m, 16, 32], 0)), "{m}");
            assert_eq!(raw_and_checked::<f16>(d, s, [m, 16, 32], 1), LinearPath::Fma);
            assert_eq!(raw_and_checked::<bf16>(d, s, [m, 16, 33], 0), LinearPath::Fma);
            assert_eq!(raw_and_checked::<f32>(d, s, [m, 16, 32], 0), LinearPath::Fma);
        }
        // Results whose rows do not end at multiples of 16 bytes keep tensor cores, if older ones.
        assert_eq!(raw_and_checked::<bf16>(d, s, [3, 15, 32], 0), LinearPath::Stream);
        assert_eq!(raw_and_checked::<bf16>(d, s, [70, 15, 32], 0), LinearPath::Tile);
    });
}

#[test]
fn captured_and_replayed() {
    on_every_device(|d, s| {
        for m in [4, 130] {
            captured(d, s, m);
        }
    });
}

fn captured(d: &Device, s: &Stream, m: usize) {
    let (n, k) = (40, 64);
    let mut x = Tensor::from_slice(d, &noise_of::<bf16>(m * k, 1), &[m, k]).unwrap();
    let w = Tensor::from_slice(d, &noise_of::<bf16>(n * k, 2), &[n, k]).unwrap();
    let (mut y, mut z) = (Tensor::zeros(d, &[m, n]).unwrap(), Tensor::zeros(d, &[m, n]).unwrap());
    d.preload(&["gemm"]).unwrap();
    let graph = Graph::capture(s, |s| linear(s, &mut y, &x, &w)).unwrap();
    for seed in 5..7 {
        x.copy_from_slice(&noise_of::<bf16>(m * k, seed)).unwrap();
        graph.launch(s).unwrap();
        linear(s, &mut z, &x, &w).unwrap();
        assert_eq!(y.to_vec().unwrap(), z.to_vec().unwrap());
    }
}

/// Several dimensions of tokens, of which one has none: dense, as all empty tensors are.
#[test]
fn no_tokens_of_several_dimensions() {
    on_every_device(|d, s| {
        let w = Tensor::<f32>::zeros(d, &[5, 8]).unwrap();
        for tokens in [[3, 0], [0, 3], [1, 0], [0, 0]] {
            let x = Tensor::<f32>::zeros(d, &[tokens[0], tokens[1], 8]).unwrap();
            let mut y = Tensor::<f32>::zeros(d, &[tokens[0], tokens[1], 5]).unwrap();
            linear(s, &mut y, &x, &w).unwrap();
        }
    });
}

#[test]
fn bad_input() {
    on_every_device(|d, s| {
        let t = |shape: &[usize]| Tensor::<bf16>::zeros(d, shape).unwrap();
        let (x, w) = (t(&[2, 16]), t(&[3, 16]));
        assert!(matches!(linear(s, &mut t(&[2, 4]), &x, &w), Err(Error::Shape { arg: "out", .. })));
        assert!(matches!(linear(s, &mut t(&[2, 3]), &t(&[2, 15]), &w), Err(Error::Shape { arg: "x", .. })));
        assert!(matches!(linear(s, &mut t(&[2, 3]), &x, &t(&[3])), Err(Error::Shape { arg: "w", .. })));
        let bias = t(&[4]);
        let biased = linear_with(s, &mut t(&[2, 3]), &x, &w, Some(&bias), &LinearOptions::default());
        assert!(matches!(biased, Err(Error::Shape { arg: "bias", .. })));
        let mut whole = t(&[2, 16]);
        let part = whole.narrow(0, 0, 1).unwrap();
        let square = t(&[16, 16]);
        assert!(matches!(linear(s, &mut whole.narrow(0, 0, 1).unwrap(), &part, &square), Err(Error::Overlap { .. })));
        assert!(linear(s, &mut whole, &t(&[2, 16]), &square).is_ok());
        let streamed = LinearOptions::default().path(LinearPath::Stream);
        let many = linear_with(s, &mut t(&[65, 3]), &t(&[65, 16]), &w, None, &streamed);
        assert!(matches!(many, Err(Error::Unsupported { .. })), "{many:?}");
        let odd = linear_with(s, &mut t(&[2, 3]), &t(&[2, 12]), &t(&[3, 12]), None, &streamed);
        assert!(odd.unwrap_err().to_string().contains("rows of `x`"));
        // Without a depth no row lies wrong.
        for path in [LinearPath::Wgmma, LinearPath::Few] {
            let options = LinearOptions::default().path(path);
            let e = linear_with(s, &mut t(&[2, 8]), &t(&[2, 0]), &t(&[8, 0]), None, &options).unwrap_err();
            assert!(e.to_string().contains("0 deep"), "{e}");
        }
        let mut y = Tensor::<f32>::zeros(d, &[2, 3]).unwrap();
        let e =
            linear_with(s, &mut y, &Tensor::<f32>::zeros(d, &[2, 16]).unwrap(), &w, None, &LinearOptions::default());
        let e = e.unwrap_err().to_string();
        assert!(e.contains("`w` must be f32, but is bf16"), "{e}");
        let elsewhere = Device::simt();
        let foreign = Tensor::<bf16>::zeros(&elsewhere, &[2, 16]).unwrap();
        assert!(matches!(linear(s, &mut t(&[2, 3]), &foreign, &w), Err(Error::WrongDevice { arg: "x", .. })));
        let e = linear(
            s,
            &mut Tensor::<cuda_std::E4M3>::zeros(d, &[2, 3]).unwrap(),
            &Tensor::zeros(d, &[2, 16]).unwrap(),
            &Tensor::zeros(d, &[3, 16]).unwrap(),
        );
        assert!(matches!(e, Err(Error::DType { .. })));
    });
}
