use cuda_std::{Element, Float};
use proptest::prelude::*;
use warploom::gemm::{
    Epilogue, LinearQuantOptions, LinearQuantPath, LinearQuantTile, Quantised, linear_quant, linear_quant_few,
};
use warploom::{DType, Device, E4M3, Error, Graph, Stream, Tensor, bf16, f16, reference};
use warploom_tests::{
    assert_close, devices, is_hopper, noise, on_every_device, on_every_order, property, sanitizing,
    skipped_without_hopper, widen,
};

const EPILOGUES: [Epilogue; 6] =
    [Epilogue::None, Epilogue::Silu, Epilogue::Gelu, Epilogue::GeluTanh, Epilogue::Relu, Epilogue::Relu2];

/// An element type of operands, for tests.
trait Byte: Element {
    fn of(v: f32) -> Self;
    fn number(self) -> f64;
}
impl Byte for E4M3 {
    fn of(v: f32) -> Self {
        E4M3::from_f32(v)
    }
    fn number(self) -> f64 {
        self.to_f32() as f64
    }
}
impl Byte for i8 {
    fn of(v: f32) -> Self {
        (v * 127.0) as i8
    }
    fn number(self) -> f64 {
        self as f64
    }
}

/// Rows of an operand, perhaps further apart than they are long, with scales, and what they stand for.
struct Operand<Q> {
    values: Tensor<Q>,
    scales: Tensor<f32>,
    meaning: Vec<f64>,
}

impl<Q: Byte> Operand<Q> {
    /// `block`: rows that share a scale for 128 columns; none: scales of rows.
    fn new(d: &Device, [rows, k]: [usize; 2], pad: usize, block: Option<usize>, transposed: bool, seed: u64) -> Self {
        let stride = k + pad;
        let all: Vec<Q> = noise(rows * stride, seed).into_iter().map(Q::of).collect();
        let values = Tensor::from_slice(d, &all, &[rows, stride]).unwrap().narrow(1, 0, k).unwrap();
        let plain: Vec<f64> = (0..rows * k).map(|i| all[i / k * stride + i % k].number()).collect();
        let shape = match block {
            Some(block) => vec![rows.div_ceil(block), k.div_ceil(128)],
            None => vec![rows],
        };
        let count = shape.iter().product::<usize>();
        let scales: Vec<f32> = noise(count, seed + 1).into_iter().map(|s| 0.01 + 0.01 * s.abs()).collect();
        let wide: Vec<f64> = scales.iter().map(|s| *s as f64).collect();
        let meaning = match block {
            Some(block) => reference::gemm::dequantise(&plain, &wide, k, block, 128),
            None => reference::gemm::dequantise(&plain, &wide, k, 1, k.max(1)),
        };
        let scales = if transposed && block.is_some() {
            let (r, g) = (shape[0], shape[1]);
            let turned: Vec<f32> = (0..count).map(|i| scales[i % r * g + i / r]).collect();
            Tensor::from_slice(d, &turned, &[count]).unwrap().as_strided(&[r, g], &[1, r], 0).unwrap()
        } else {
            Tensor::from_slice(d, &scales, &shape).unwrap()
        };
        Self { values, scales, meaning }
    }

    fn get(&self) -> Quantised<'_, Q> {
        Quantised::new(&self.values, &self.scales)
    }
}

/// How a case is laid out.
#[derive(Clone, Copy, Debug)]
struct Case {
    size: [usize; 3],
    pads: [usize; 3],
    blocks: bool,
    transposed: bool,
    biased: bool,
    kind: Epilogue,
}

/// Runs a case twice on a poisoned output, and compares all of it, or so many samples, with the dequantised product in f64.
fn check<Q: Byte, Y: Float>(d: &Device, s: &Stream, case: Case, options: LinearQuantOptions, samples: usize) {
    let Case { size: [m, n, k], pads, blocks, transposed, biased, kind } = case;
    let x = Operand::<Q>::new(d, [m, k], pads[0], blocks.then_some(1), transposed, 1);
    let w = Operand::<Q>::new(d, [n, k], pads[1], blocks.then_some(128), false, 11);
    let b: Vec<Y> = noise(n, 3).into_iter().map(|v| Y::from_f32(v / 16.0)).collect();
    let bias = Tensor::from_slice(d, &b, &[n]).unwrap();
    let y_row = n + pads[2];
    let run = || {
        let mut whole = Tensor::<Y>::uninit(d, &[m + 1, y_row]).unwrap();
        s.fill_bytes(&mut whole, 0xff).unwrap();
        let mut y = whole.narrow(0, 0, m).unwrap().narrow(1, 0, n).unwrap();
        let options = options.epilogue(kind);
        linear_quant(s, &mut y, x.get(), w.get(), biased.then_some(&bias), &options).unwrap();
        whole.to_vec().unwrap()
    };
    let got = run();
    let bits = |v: &[Y]| v.iter().map(|v| v.to_f32().to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&got), bits(&run()), "two runs");
    let outside = |i: usize| i / y_row == m || i % y_row >= n;
    assert!((0..got.len()).all(|i| !outside(i) || got[i].to_f32().is_nan()), "something outside was written");
    // Shown if something below fails.
    println!("{options:?} {case:?}");
    let check = |r: usize, c: usize| {
        let (a, b_row) = (&x.meaning[r * k..][..k], &w.meaning[c * k..][..k]);
        let bias = widen(&b[c..=c]);
        let want = reference::gemm::linear(a, b_row, biased.then_some(&bias), 1, 1, k, kind);
        let magnitude = a.iter().zip(b_row).map(|(a, b)| (a * b).abs()).sum::<f64>() + bias[0].abs();
        // f32 sums; Hopper's tensor cores drop bits of e4m3 sums.
        let hardware = !d.is_simt() && is_hopper(d) && Q::DTYPE == DType::E4m3 && options.path != LinearQuantPath::Tile;
        let arithmetic = if hardware { 2f64.powi(-12) } else { (k + 8) as f64 * 2f64.powi(-24) };
        let steepest = if kind == Epilogue::Relu2 { 2.0 * magnitude.max(1.0) } else { 1.2 };
        assert_close(&got[r * y_row + c..][..1], &want, arithmetic, magnitude * steepest + 2f64.powi(-20));
    };
    if samples == 0 {
        (0..m * n).for_each(|i| check(i / n, i % n));
    } else {
        // Corners, then all over.
        [(0, 0), (m - 1, 0), (0, n - 1), (m - 1, n - 1)].into_iter().for_each(|(r, c)| check(r, c));
        (0..samples).for_each(|i| check(i * 7919 % m, i * 104_729 % n));
    }
}

fn kinds() -> impl Strategy<Value = (bool, bool, bool, usize)> {
    (any::<bool>(), any::<bool>(), any::<bool>(), 0usize..6)
}

#[test]
fn tile_matches_the_reference() {
    let shape = (1usize..150, 1usize..150, prop_oneof![0usize..20, 100usize..300], any::<[bool; 3]>());
    property(3, (shape, kinds()), |d, s, ((m, n, k, pads), (blocks, transposed, biased, kind))| {
        // Odd distances, and rows that begin at multiples of 16 bytes.
        let pads = if pads[0] {
            [pads[1] as usize, 3, 1]
        } else {
            [k.next_multiple_of(16) - k, k.next_multiple_of(16) - k, 0]
        };
        let case = Case { size: [m, n, k], pads, blocks, transposed, biased, kind: EPILOGUES[kind] };
        let tile = LinearQuantOptions::default().path(LinearQuantPath::Tile);
        check::<E4M3, bf16>(d, s, case, tile, 0);
        check::<E4M3, f32>(d, s, case, tile, 0);
        check::<i8, f16>(d, s, case, tile, 0);
        check::<i8, f32>(d, s, case, LinearQuantOptions::default(), 0);
        Ok(())
    });
}

#[test]
fn wgmma_matches_the_reference() {
    let shape = (1usize..150, (1usize..25).prop_map(|n| 8 * n), 1usize..400);
    let how = (0..LinearQuantTile::ALL.len(), any::<[bool; 3]>());
    property(3, (shape, how, kinds()), |d, s, ((m, n, k), (tile, pads), (blocks, transposed, biased, kind))| {
        if skipped_without_hopper(d) {
            return Ok(());
        }
        let tile = LinearQuantTile::ALL[tile];
        let has = |blocks| tile.entry(DType::E4m3, DType::Bf16, blocks).is_some();
        let blocks = if blocks { has(true) } else { !has(false) };
        let pad = |pad: bool| k.next_multiple_of(16) - k + 16 * pad as usize;
        let pads = [pad(pads[0]), pad(pads[1]), 8 * pads[2] as usize];
        let case = Case { size: [m, n, k], pads, blocks, transposed, biased, kind: EPILOGUES[kind] };
        check::<E4M3, f16>(d, s, case, LinearQuantOptions::default().tile(tile), 0);
        check::<E4M3, bf16>(d, s, case, LinearQuantOptions::default().tile(tile), 0);
        if !blocks {
            check::<i8, bf16>(d, s, case, LinearQuantOptions::default().tile(tile), 0);
        }
        Ok(())
    });
}

#[test]
fn few_matches_the_reference() {
    // Widths whose tiles of rows lie in two blocks of scales; fewer steps along K than parts, more than a chunk of scales and than two.
    let shape = prop_oneof![(1usize..=64, 1usize..60, 1usize..700), (1usize..=20, 1usize..12, 4000usize..9000)];
    property(6, (shape, any::<[bool; 3]>(), kinds()), |d, s, ((m, n, k), pads, (blocks, transposed, biased, kind))| {
        if skipped_without_hopper(d) {
            return Ok(());
        }
        let n = 8 * n;
        let pad = |pad: bool| k.next_multiple_of(16) - k + 16 * pad as usize;
        let pads = [pad(pads[0]), pad(pads[1]), 8 * pads[2] as usize];
        let case = Case { size: [m, n, k], pads, blocks, transposed, biased, kind: EPILOGUES[kind] };
        let few = LinearQuantOptions::default().path(LinearQuantPath::Few);
        // Squares of sums over some thousand products are beyond f16.
        let narrow = k < 1000 || case.kind != Epilogue::Relu2;
        check::<E4M3, bf16>(d, s, case, few, 200);
        if narrow {
            check::<E4M3, f16>(d, s, case, few, 200);
        }
        if !blocks {
            check::<i8, bf16>(d, s, case, few, 200);
        }
        if !blocks && narrow {
            check::<i8, f16>(d, s, case, few, 200);
        }
        Ok(())
    });
}

/// As many outputs as make one block for nearly each multiprocessor; K in one part: widths with more than one block for each multiprocessor, fewer rows of weights than a block has room for, and the last block
/// with only some of them.
#[test]
fn few_with_many_outputs() {
    on_every_order(|d, s| {
        if !skipped_without_hopper(d) {
            let depth = if d.is_simt() { 272 } else { 1424 };
            for (i, (size, blocks)) in [
                ([3, 8464, 144], false),
                ([7, 8464, depth], true),
                ([13, 8456, depth], true),
                ([25, 8600, 144], false),
                ([25, 8600, depth], true),
                ([50, 2568, depth], false),
                ([50, 4240, depth], false),
                ([41, 13_840, 144], false),
                ([64, 14_336, depth], true),
            ]
            .into_iter()
            .enumerate()
            {
                let (biased, kind) = (i % 2 == 0, EPILOGUES[i % 6]);
                let case = Case { size, pads: [0; 3], blocks, transposed: false, biased, kind };
                let few = LinearQuantOptions::default().path(LinearQuantPath::Few);
                check::<E4M3, bf16>(d, s, case, few, 500);
                if size[1] == 2568 {
                    check::<i8, f16>(d, s, case, few, 500);
                }
            }
        }
    });
}

/// What was the fastest, or within the noise of it, where all were measured on an H200.
#[test]
fn few_is_chosen_as_measured() {
    for (blocks, m, n, name) in [
        (false, 1, 4096, "rows_t8_split2"),
        (false, 1, 6144, "rows_t8_split2"),
        (false, 16, 14_336, "rows_t16"),
        (false, 32, 28_672, "rows_t32"),
        (false, 64, 1408, "rows_t64_split2"),
        (false, 64, 4096, "rows_t64_pair"),
        (false, 64, 6144, "rows_t64"),
        (false, 64, 14_336, "rows_t64_r6"),
        (true, 8, 4096, "blocks_t8_split2"),
        (true, 1, 14_336, "blocks_t8"),
        (true, 64, 8192, "blocks_t64_split2"),
        (true, 64, 14_336, "blocks_t64"),
    ] {
        let entry = linear_quant_few::entry(DType::E4m3, DType::Bf16, blocks, m, n).unwrap();
        assert_eq!(entry.name, format!("linear_quant_few_{name}_bf16"), "{m} x {n}");
    }
    assert!(linear_quant_few::entry(DType::I8, DType::F16, false, 65, 4096).is_none());
    assert!(linear_quant_few::entry(DType::I8, DType::F16, true, 1, 4096).is_none());
}

/// Tokens get the same bits however many there are of them, and as of the tiles with K in two parts.
#[test]
fn few_tokens_or_many() {
    on_every_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        for blocks in [false, true] {
            let (n, k) = (200, 1000);
            let x = Operand::<E4M3>::new(d, [64, k], 8, blocks.then_some(1), false, 1);
            let w = Operand::<E4M3>::new(d, [n, k], 8, blocks.then_some(128), false, 11);
            let run = |m: usize, options: LinearQuantOptions| {
                let (values, scales) = (x.values.narrow(0, 0, m).unwrap(), x.scales.narrow(0, 0, m).unwrap());
                let mut y = Tensor::<bf16>::uninit(d, &[m, n]).unwrap();
                s.fill_bytes(&mut y, 0xff).unwrap();
                linear_quant(s, &mut y, Quantised::new(&values, &scales), w.get(), None, &options).unwrap();
                y.to_vec().unwrap()
            };
            let few = LinearQuantOptions::default().path(LinearQuantPath::Few);
            let all = run(64, few);
            assert_eq!(all, run(64, few.tile(LinearQuantTile::N64Split2)));
            for m in [1, 8, 9, 16, 17, 32, 33] {
                assert_eq!(all[..m * n], run(m, few), "{m} tokens");
            }
        }
    });
}

#[test]
fn every_tile() {
    on_every_order(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        for (i, tile) in LinearQuantTile::ALL.iter().copied().enumerate() {
            // Fewer tiles than blocks of threads, and more; more steps along K than a ring has, and fewer than parts.
            for blocks in [false, true] {
                if tile.entry(DType::E4m3, DType::Bf16, blocks).is_some() {
                    let size = [[300, 136, 640], [200, 40, 512], [65, 264, 48]][i % 3];
                    let (biased, kind) = (i % 2 == 0, EPILOGUES[i % 6]);
                    let case = Case { size, pads: [0, 0, 0], blocks, transposed: false, biased, kind };
                    check::<E4M3, bf16>(d, s, case, LinearQuantOptions::default().tile(tile), 400);
                    if !blocks {
                        check::<i8, f16>(d, s, case, LinearQuantOptions::default().tile(tile), 400);
                    }
                }
            }
        }
    });
}

#[test]
fn at_model_sizes() {
    let Some(d) = warploom_tests::gpu() else { return };
    let hopper = !skipped_without_hopper(&d);
    let tiles = if hopper { LinearQuantTile::ALL } else { &[] };
    let s = Stream::new(&d).unwrap();
    for blocks in [false, true] {
        // Under a sanitizer several tiles, several times round the ring.
        let sizes: &[[usize; 3]] = if sanitizing() {
            &[[300, 520, 768]]
        } else {
            &[[1, 4096, 4096], [64, 1408, 2880], [40, 3000, 4368], [513, 2880, 1408], [4097, 4096, 7168]]
        };
        for &size in sizes {
            let case = Case { size, pads: [0; 3], blocks, transposed: true, biased: false, kind: Epilogue::None };
            for tile in tiles.iter().copied().filter(|t| t.entry(DType::E4m3, DType::Bf16, blocks).is_some()) {
                check::<E4M3, bf16>(&d, &s, case, LinearQuantOptions::default().tile(tile), 300);
            }
            check::<E4M3, bf16>(&d, &s, case, LinearQuantOptions::default(), 300);
            if hopper && size[0] <= linear_quant_few::TOKENS as usize {
                check::<E4M3, bf16>(&d, &s, case, LinearQuantOptions::default().path(LinearQuantPath::Few), 300);
                check::<i8, bf16>(
                    &d,
                    &s,
                    Case { blocks: false, ..case },
                    LinearQuantOptions::default().path(LinearQuantPath::Few),
                    300,
                );
            }
            check::<E4M3, f32>(&d, &s, case, LinearQuantOptions::default().path(LinearQuantPath::Tile), 300);
            check::<i8, bf16>(&d, &s, case, LinearQuantOptions::default(), 300);
        }
    }
}

/// What was the fastest, or within the noise of it, where all were measured on an H200.
#[test]
fn tiles_are_chosen_as_measured() {
    use LinearQuantTile::*;
    for ([m, k, n], rows, blocks) in [
        ([1, 4096, 4096], N64Split2, N64Split2),
        ([128, 4096, 4096], N64Split2, N64Split2),
        ([512, 4096, 4096], N128, N128),
        ([1024, 4096, 4096], N256Weights2, N128Tokens256),
        ([4096, 4096, 4096], N256Weights2, N128Tokens256),
        ([1, 4096, 14336], N128, N128),
        ([64, 4096, 14336], N128, N128),
        ([512, 4096, 14336], N256Weights2, N128Tokens256),
        ([4096, 4096, 14336], N256Weights2, N128Tokens256),
        ([64, 7168, 4096], N64Split2, N64Split2),
        ([4096, 7168, 2112], N192, N192),
        ([1, 14336, 4096], N64Split2, N64Split2),
        ([8192, 8192, 8192], N256Weights2, N192),
    ] {
        assert_eq!(LinearQuantTile::choose(m, n, k, false, 132), rows, "{m} x {k} x {n}, rows");
        assert_eq!(LinearQuantTile::choose(m, n, k, true, 132), blocks, "{m} x {k} x {n}, blocks");
    }
}

#[test]
fn one_scale_for_a_tensor() {
    on_every_device(|d, s| {
        let (m, n, k) = (5, 24, 48);
        let (x, w) =
            (Operand::<E4M3>::new(d, [m, k], 0, None, false, 1), Operand::<E4M3>::new(d, [n, k], 0, None, false, 2));
        let one = |v: f32| Tensor::from_slice(d, &[v], &[1]).unwrap();
        let full = |v: f32, rows: usize| Tensor::from_slice(d, &vec![v; rows], &[rows]).unwrap();
        for path in [LinearQuantPath::Tile, LinearQuantPath::Auto] {
            let run = |a: &Tensor<f32>, b: &Tensor<f32>| {
                let mut y = Tensor::<bf16>::uninit(d, &[m, n]).unwrap();
                s.fill_bytes(&mut y, 0xff).unwrap();
                let (x, w) = (Quantised::new(&x.values, a), Quantised::new(&w.values, b));
                linear_quant(s, &mut y, x, w, None, &LinearQuantOptions::default().path(path)).unwrap();
                y.to_vec().unwrap()
            };
            let want = run(&full(0.25, m), &full(3.0, n));
            assert_eq!(run(&one(0.25), &one(3.0)), want);
            assert_eq!(run(&full(0.25, m), &one(3.0)), want);
            assert!(want.iter().any(|v| v.to_f32() != 0.0));
        }
    });
}

#[test]
fn int8_sums_are_exact() {
    on_every_device(|d, s| {
        // The largest products, of one sign and then of both.
        let (m, n, k) = (2, 3, 4096);
        let x = Tensor::from_slice(d, &vec![-127i8; m * k], &[m, k]).unwrap();
        let w: Vec<i8> = (0..n * k).map(|i| if i / k == 0 || i % 2 == 0 { 127 } else { -126 }).collect();
        let w = Tensor::from_slice(d, &w, &[n, k]).unwrap();
        let one = Tensor::from_slice(d, &[1.0f32], &[1]).unwrap();
        let mut y = Tensor::<f32>::uninit(d, &[m, n]).unwrap();
        let options = LinearQuantOptions::default();
        linear_quant(s, &mut y, Quantised::new(&x, &one), Quantised::new(&w, &one), None, &options).unwrap();
        let few = -127.0 * 2048.0;
        let all = -127.0 * 127.0 * 4096.0;
        assert_eq!(y.to_vec().unwrap(), [all, few, few, all, few, few]);
    });
}

/// Parts of K whose sums have more digits than f32 has, and nearly cancel: they are added up before anything is rounded.
#[test]
fn int8_sums_are_exact_where_k_is_split() {
    on_every_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        let options = LinearQuantOptions::default();
        let tiles = [LinearQuantTile::N64Split2, LinearQuantTile::N64Split4].map(|tile| (5, 16, options.tile(tile)));
        let few = [(1, 16), (33, 16)].map(|(m, n)| (m, n, options.path(LinearQuantPath::Few)));
        // Two blocks that each have half of K and all tokens.
        let pair = [(33, 2304, options)].into_iter().filter(|_| !d.is_simt());
        for (m, n, options) in tiles.into_iter().chain(few).chain(pair) {
            let k = 4096;
            let x = Tensor::from_slice(d, &vec![127i8; m * k], &[m, k]).unwrap();
            let w = (0..n * k).map(|i| if i % k == 0 { 126 } else { [127, -127][i % k / (k / 2)] });
            let w = Tensor::from_slice(d, &w.collect::<Vec<i8>>(), &[n, k]).unwrap();
            let one = Tensor::from_slice(d, &[1.0f32], &[1]).unwrap();
            let mut y = Tensor::<bf16>::zeros(d, &[m, n]).unwrap();
            linear_quant(s, &mut y, Quantised::new(&x, &one), Quantised::new(&w, &one), None, &options).unwrap();
            assert!(y.to_vec().unwrap().iter().all(|v| v.to_f32() == -127.0), "{m} {n} {options:?}");
        }
    });
}

/// Of one step of K, too, which leaves other parts of K with none.
#[test]
fn not_a_number_and_infinity_stay_where_they_are() {
    on_every_order(|d, s| {
        let hopper = !skipped_without_hopper(d);
        let paths: &[_] = if hopper { &[LinearQuantPath::Few, LinearQuantPath::Wgmma] } else { &[] };
        let options = |path: &_| LinearQuantOptions::default().path(*path);
        let paths = [LinearQuantPath::Auto, LinearQuantPath::Tile].iter().chain(paths).map(options);
        let tiles = if hopper { LinearQuantTile::ALL } else { &[] };
        let options: Vec<_> = paths.chain(tiles.iter().map(|&tile| LinearQuantOptions::default().tile(tile))).collect();
        for (k, blocks) in [(256usize, true), (112, true), (256, false), (112, false)] {
            let (m, n, groups) = (4, 16, if blocks { k.div_ceil(128) } else { 1 });
            let mut x: Vec<E4M3> = vec![E4M3::from_f32(1.0); m * k];
            x[k + k - 2] = E4M3(0x7f);
            let x = Tensor::from_slice(d, &x, &[m, k]).unwrap();
            let w = Tensor::from_slice(d, &vec![E4M3::from_f32(0.5); n * k], &[n, k]).unwrap();
            // All scales are finite; the product of those of one row is not.
            let mut of_x = vec![2f32.powi(-30); m * groups];
            of_x[2 * groups..3 * groups].fill(2f32.powi(100));
            let of_w = vec![2f32.powi(30); if blocks { groups } else { n }];
            let (x_shape, w_shape): (&[_], &[_]) = if blocks { (&[m, groups], &[1, groups]) } else { (&[m], &[n]) };
            let xs = Tensor::from_slice(d, &of_x, x_shape).unwrap();
            let ws = Tensor::from_slice(d, &of_w, w_shape).unwrap();
            for options in
                options.iter().filter(|o| o.tile.is_none_or(|t| t.entry(DType::E4m3, DType::Bf16, blocks).is_some()))
            {
                for kind in EPILOGUES {
                    let mut y = Tensor::<bf16>::uninit(d, &[m, n]).unwrap();
                    s.fill_bytes(&mut y, 0xff).unwrap();
                    let options = options.epilogue(kind);
                    linear_quant(s, &mut y, Quantised::new(&x, &xs), Quantised::new(&w, &ws), None, &options).unwrap();
                    for (i, v) in y.to_vec().unwrap().iter().enumerate() {
                        let right = match i / n {
                            1 => v.is_nan(),
                            2 => *v == bf16::INFINITY,
                            _ if kind == Epilogue::None => v.to_f32() == k as f32 / 2.0,
                            _ => v.is_finite(),
                        };
                        assert!(right, "{options:?}, k {k}, blocks {blocks}, element {i}: {v}");
                    }
                }
            }
        }
    });
}

/// Replays of other tokens.
fn captured<Q: Byte>(d: &Device, s: &Stream, path: LinearQuantPath, blocks: bool) {
    let (m, n, k) = (20, 48, 256);
    let mut x = Operand::<Q>::new(d, [m, k], 0, blocks.then_some(1), false, 1);
    let w = Operand::<Q>::new(d, [n, k], 0, blocks.then_some(128), false, 2);
    let (mut y, mut z) = (Tensor::<bf16>::zeros(d, &[m, n]).unwrap(), Tensor::<bf16>::zeros(d, &[m, n]).unwrap());
    let options = LinearQuantOptions::default().path(path);
    let graph = Graph::capture(s, |s| linear_quant(s, &mut y, x.get(), w.get(), None, &options)).unwrap();
    for seed in 5..7 {
        let values: Vec<Q> = noise(m * k, seed).into_iter().map(Q::of).collect();
        x.values.copy_from_slice(&values).unwrap();
        graph.launch(s).unwrap();
        linear_quant(s, &mut z, x.get(), w.get(), None, &options).unwrap();
        assert_eq!(y.to_vec().unwrap(), z.to_vec().unwrap(), "{} {path:?}, blocks {blocks}", Q::DTYPE);
    }
}

#[test]
fn captured_and_replayed() {
    on_every_device(|d, s| {
        d.preload(&["gemm"]).unwrap();
        for blocks in [false, true] {
            for path in [LinearQuantPath::Auto, LinearQuantPath::Tile] {
                captured::<E4M3>(d, s, path, blocks);
                captured::<i8>(d, s, path, blocks);
            }
            if !skipped_without_hopper(d) {
                for path in [LinearQuantPath::Few, LinearQuantPath::Wgmma] {
                    captured::<E4M3>(d, s, path, blocks);
                    if !blocks {
                        captured::<i8>(d, s, path, blocks);
                    }
                }
            }
        }
    });
}

/// The path that `Auto` comes to by addresses alone: nothing behind these is read.
#[test]
fn auto_is_one_of_the_paths() {
    use warploom::kernels::gemm::linear_quant_tile::Args;
    on_every_device(|d, _| {
        let args = |x: usize, m: u32, k: u32| Args {
            y: 0x1000 as *mut _,
            x: x as *const _,
            w: 0x3000 as *const _,
            bias: std::ptr::null(),
            x_scales: std::ptr::null(),
            x_scale_row: 1,
            x_scale_group: 0,
            w_scales: std::ptr::null(),
            w_scale_row: 1,
            w_scale_group: 0,
            m,
            n: 16,
            k,
            y_row: 16,
            x_row: k as usize,
            w_row: k as usize,
            kind: 0,
            blocks: 0,
            aligned: 0,
        };
        let path = |path, args: &Args| warploom::gemm::linear_quant::path_of(d, DType::E4m3, DType::Bf16, path, args);
        let auto = |args: Args| path(LinearQuantPath::Auto, &args).unwrap();
        let hopper = is_hopper(d);
        for (m, best) in [(1, LinearQuantPath::Few), (64, LinearQuantPath::Few), (65, LinearQuantPath::Wgmma)] {
            assert_eq!(auto(args(0x2000, m, 32)), if hopper { best } else { LinearQuantPath::Tile });
            for plain in [args(0x2001, m, 32), args(0x2000, m.max(2), 24), args(0x2000, m, 0)] {
                assert_eq!(auto(plain), LinearQuantPath::Tile);
                let e = path(best, &plain);
                assert!(matches!(e, Err(Error::Alignment { arg: "x", .. } | Error::Unsupported { .. })), "{e:?}");
            }
        }
    });
}

/// As many columns as sums of int8 have room for, of the least number; and one more. In order only on the SIMT device: it is about the sum.
#[test]
fn deepest_int8_sums() {
    for (_, d) in devices().iter().filter(|(name, _)| matches!(*name, "simt, in order" | "cuda")) {
        let s = Stream::new(d).unwrap();
        // (Memory goes on behind the last column: memcheck takes what `cp.async` leaves out of 16 bytes for read.)
        let numbers = Tensor::from_slice(d, &vec![i8::MIN; 1 << 17], &[1, 1 << 17]).unwrap();
        let deep = |k: usize| {
            let x = numbers.narrow(1, 0, k).unwrap();
            let mut y = Tensor::<f32>::zeros(d, &[1, 1]).unwrap();
            let (one, auto) = (Tensor::from_slice(d, &[1.0], &[1]).unwrap(), LinearQuantOptions::default());
            let result = linear_quant(&s, &mut y, Quantised::new(&x, &one), Quantised::new(&x, &one), None, &auto);
            result.map(|()| y.to_vec().unwrap()[0])
        };
        let most = (1usize << 17) - 1;
        assert_eq!(deep(most).unwrap(), (most << 14) as f32);
        assert!(matches!(deep(most + 1), Err(Error::Value { arg: "w", .. })));
    }
}

#[test]
fn bad_input() {
    on_every_device(|d, s| {
        let q = |shape: &[usize]| Tensor::<E4M3>::zeros(d, shape).unwrap();
        let f = |shape: &[usize]| Tensor::<f32>::zeros(d, shape).unwrap();
        let run = |y: &[usize], x: &[usize], xs: &[usize], w: &[usize], ws: &[usize], options: LinearQuantOptions| {
            let mut y = Tensor::<bf16>::zeros(d, y).unwrap();
            let (x, xs, w, ws) = (q(x), f(xs), q(w), f(ws));
            linear_quant(s, &mut y, Quantised::new(&x, &xs), Quantised::new(&w, &ws), None, &options)
        };
        let auto = LinearQuantOptions::default();
        assert!(run(&[2, 8], &[2, 16], &[2], &[8, 16], &[8], auto).is_ok());
        assert!(run(&[2, 8], &[2, 0], &[2], &[8, 0], &[8], auto).is_ok());
        assert!(run(&[0, 8], &[0, 16], &[0], &[8, 16], &[8], auto).is_ok());
        for (arg, e) in [
            ("out", run(&[2, 7], &[2, 16], &[2], &[8, 16], &[8], auto)),
            ("x", run(&[2, 8], &[2, 15], &[2], &[8, 16], &[8], auto)),
            ("w", run(&[2, 8], &[2, 16], &[2], &[8], &[8], auto)),
            ("x.scales", run(&[2, 8], &[2, 16], &[3], &[8, 16], &[8], auto)),
            ("w.scales", run(&[2, 8], &[2, 16], &[2], &[8, 16], &[1, 1], auto)),
            ("w.scales", run(&[2, 8], &[2, 16], &[2, 1], &[8, 16], &[8], auto)),
            ("x.scales", run(&[2, 8], &[2, 16], &[2, 2], &[8, 16], &[1, 1], auto)),
        ] {
            assert!(matches!(&e, Err(Error::Shape { arg: a, .. }) if *a == arg), "{arg}: {e:?}");
        }
        let wgmma = auto.path(LinearQuantPath::Wgmma);
        let e = run(&[2, 7], &[2, 16], &[2], &[7, 16], &[7], wgmma);
        assert!(matches!(e, Err(Error::Alignment { arg: "out", .. } | Error::Unsupported { .. })), "{e:?}");
        let e = run(&[2, 8], &[2, 24], &[2], &[8, 24], &[8], wgmma);
        assert!(matches!(e, Err(Error::Alignment { arg: "x", .. } | Error::Unsupported { .. })), "{e:?}");
        let e = run(&[2, 8], &[2, 0], &[2], &[8, 0], &[8], wgmma);
        assert!(matches!(e, Err(Error::Unsupported { .. })), "{e:?}");
        let few = auto.path(LinearQuantPath::Few);
        let e = run(&[65, 8], &[65, 16], &[65], &[8, 16], &[8], few);
        assert!(matches!(e, Err(Error::Unsupported { .. })), "{e:?}");
        let e = run(&[2, 7], &[2, 16], &[2], &[7, 16], &[7], few);
        assert!(matches!(e, Err(Error::Alignment { arg: "out", .. } | Error::Unsupported { .. })), "{e:?}");
        let e = run(&[2, 8], &[2, 16], &[2, 1], &[8, 16], &[1, 1], auto.tile(LinearQuantTile::N256));
        assert!(matches!(e, Err(Error::Unsupported { .. })), "{e:?}");
        // int8 in blocks is `Tile`'s.
        let (x, w, one) =
            (Tensor::<i8>::zeros(d, &[2, 16]).unwrap(), Tensor::<i8>::zeros(d, &[8, 16]).unwrap(), f(&[1]));
        let (xs, ws) = (f(&[2, 1]), f(&[1, 1]));
        let mut y = Tensor::<bf16>::zeros(d, &[2, 8]).unwrap();
        let e = linear_quant(s, &mut y, Quantised::new(&x, &xs), Quantised::new(&w, &ws), None, &wgmma);
        assert!(matches!(e, Err(Error::Unsupported { .. })), "{e:?}");
        let e = linear_quant(s, &mut y, Quantised::new(&one, &one), Quantised::new(&one, &one), None, &auto);
        assert!(matches!(e, Err(Error::DType { arg: "x", .. })), "{e:?}");
        let foreign = Tensor::<i8>::zeros(&Device::simt(), &[2, 16]).unwrap();
        let e = linear_quant(s, &mut y, Quantised::new(&foreign, &one), Quantised::new(&w, &one), None, &auto);
        assert!(matches!(e, Err(Error::WrongDevice { arg: "x", .. })), "{e:?}");
    });
}
