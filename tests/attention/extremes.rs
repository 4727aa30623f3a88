//! Numbers and sizes at the ends of what there is, by every path.

use cuda_std::{E4M3, Float};
use warploom::attention::{self, DecodeOptions, DecodePath, DecodeShape, DecodeWorkspace, decode};
use warploom::attention::{PrefillOptions, PrefillPath, PrefillWorkspace, prefill};
use warploom::kv_cache::{CacheElement, CacheLayout, CacheShape, KvCache, PageStrides, Scales};
use warploom::{DType, Device, Error, Stream, Tensor, bf16, f16};
use warploom_tests::{on_every_device, skipped_without_hopper};

/// One query over a few keys, a head.
struct Case {
    query: f32,
    /// Key `i` has one element, this one; its value is `i + 1` everywhere, so an output is the mean of the keys' numbers by weight.
    keys: Vec<f32>,
    dim: usize,
    scale: Option<f32>,
    key_scale: f32,
}

impl Case {
    /// The path, an element of the output, and the logarithm of the sum of exponentials, by every path that the device has.
    fn by_every_path<T: Float + CacheElement, S: CacheElement>(
        &self,
        d: &Device,
        s: &Stream,
    ) -> Vec<(String, f32, f32)> {
        let (dim, pages) = (self.dim, self.keys.len().div_ceil(16));
        let mut k = vec![S::round(0.0); pages * 16 * dim];
        let mut v = k.clone();
        for (i, &x) in self.keys.iter().enumerate() {
            k[i * dim] = S::round(x);
            v[i * dim..][..dim].fill(S::round(i as f32 + 1.0));
        }
        let of = |v: &[S]| Tensor::from_slice(d, v, &[pages, 16, 1, dim]).unwrap();
        let cache = KvCache::from_tensors(CacheLayout::Nhd, of(&k), of(&v)).unwrap();
        let ints = |v: &[i32], shape: &[usize]| Tensor::from_slice(d, v, shape).unwrap();
        let table = ints(&(0..pages as i32).collect::<Vec<_>>(), &[1, pages]);
        let (lens, starts) = (ints(&[self.keys.len() as i32], &[1]), ints(&[0, 1], &[2]));
        let mut q = vec![T::from_f32(0.0); dim];
        q[0] = T::from_f32(self.query);
        let q = Tensor::from_slice(d, &q, &[1, 1, dim]).unwrap();
        let [key, value] = [self.key_scale, 1.0].map(|x| Tensor::from_slice(d, &[x], &[1]).unwrap());
        let scales = (T::DTYPE != S::DTYPE).then_some(Scales::new(&key, &value));
        let mut out = Tensor::<T>::zeros(d, &[1, 1, dim]).unwrap();
        let mut lse = Tensor::<f32>::zeros(d, &[1, 1]).unwrap();
        let mut all = Vec::new();
        let hopper = !skipped_without_hopper(d);
        for path in [DecodePath::Plain, DecodePath::Split, DecodePath::Tma] {
            // The copy engine's kernels are for heads of 128.
            if path == DecodePath::Tma && (!hopper || dim != 128) {
                continue;
            }
            let mut options = DecodeOptions::default().path(path);
            (options.scale, options.scales) = (self.scale, scales);
            let mut w = DecodeWorkspace::new(d, DecodeShape::new(1, 1, 1, dim, pages * 16)).unwrap();
            decode(s, &mut out, Some(&mut lse), &q, &cache, &table, &lens, &options, &mut w).unwrap();
            all.push((format!("decode {path:?}"), out.to_vec().unwrap()[0].to_f32(), lse.to_vec().unwrap()[0]));
        }
        for path in [PrefillPath::Plain, PrefillPath::Mma, PrefillPath::Wgmma] {
            if path == PrefillPath::Wgmma && !hopper {
                continue;
            }
            let mut options = PrefillOptions::default().path(path);
            (options.scale, options.scales) = (self.scale, scales);
            let mut w = PrefillWorkspace::new(d).unwrap();
            prefill(s, &mut out, Some(&mut lse), &q, &cache, &table, &starts, &lens, &options, &mut w).unwrap();
            all.push((format!("prefill {path:?}"), out.to_vec().unwrap()[0].to_f32(), lse.to_vec().unwrap()[0]));
        }
        all
    }
}

/// Of scores far apart one has all the weight, however large they are.
#[test]
fn huge_scores() {
    on_every_device(|d, s| {
        let check = |what: String, got: Vec<(String, f32, f32)>, want: Option<f32>| {
            for (path, out, lse) in got {
                let right = want.map_or(lse.is_finite(), |want| (lse - want).abs() <= want * 1e-6);
                assert!(out == 1.0 && right, "{what}, {path}: {out} {lse}");
            }
        };
        let case = |query, keys: &[f32], dim, scale, key_scale| {
            let keys = keys.to_vec();
            Case { query, keys, dim, scale, key_scale }
        };
        for x in [2e4f32, 3e4, 6e4, 65000.0] {
            let got = case(x, &[x, -x, x * 0.5, x * 0.9], 64, Some(1.0), 1.0).by_every_path::<f16, f16>(d, s);
            check(format!("f16 {x}"), got, Some(f16::from_f32(x).to_f32().powi(2)));
        }
        for x in [1e6f32, 1e7, 3e9, 1.7e12, 1e15, 1.234e18] {
            let got = case(x, &[x, -x, x * 0.5, x * 0.9], 128, None, 1.0).by_every_path::<bf16, bf16>(d, s);
            check(format!("bf16 {x}"), got, None);
            let got = case(x, &[-x, -2.0 * x], 128, None, 1.0).by_every_path::<bf16, bf16>(d, s);
            check(format!("bf16 -{x}"), got, None);
        }
        for key_scale in [1e8f32, 1e11, 3.3e25] {
            let got = case(1.1, &[3.0, 2.0, -1.0], 128, None, key_scale).by_every_path::<bf16, E4M3>(d, s);
            check(format!("keys times {key_scale}"), got, None);
        }
    });
}

/// Over 8-bit caches queries of bf16 are brought into the range of f16, from wherever they are.
#[test]
fn large_queries_over_8_bit_caches() {
    on_every_device(|d, s| {
        for e in [-100, 0, 100, 102, 103, 104, 115, 126] {
            let (query, scale) = (2f32.powi(e), Some(2f32.powi(-e)));
            let case = Case { query, keys: vec![1.0, 0.5, 0.25], dim: 128, scale, key_scale: 1.0 };
            for (path, out, lse) in case.by_every_path::<bf16, E4M3>(d, s) {
                assert!((out - 1.75).abs() < 0.01 && (lse - 1.73184).abs() < 1e-4, "2^{e}, {path}: {out} {lse}");
            }
        }
    });
}

/// Errors blame what is wrong.
#[test]
fn whose_fault_it_is() {
    let d = &Device::simt();
    let s = &Stream::new(d).unwrap();
    let ints = |v: &[i32], shape: &[usize]| Tensor::from_slice(d, v, shape).unwrap();
    let (table, lens, starts) = (ints(&[0], &[1, 1]), ints(&[3], &[1]), ints(&[0, 1], &[2]));
    let (decodes, prefills) = (DecodeOptions::default(), PrefillOptions::default());
    let mut w = DecodeWorkspace::new(d, DecodeShape::new(1, 200, 1, 128, 64)).unwrap();
    let mut pw = PrefillWorkspace::new(d).unwrap();

    let cache = KvCache::<bf16>::zeros(d, CacheLayout::Nhd, CacheShape::new(1, 16, 1, 128)).unwrap();
    let q = Tensor::<f32>::zeros(d, &[1, 1, 128]).unwrap();
    let mut out = Tensor::<f32>::zeros(d, &[1, 1, 128]).unwrap();
    let e = decode(s, &mut out, None, &q, &cache, &table, &lens, &decodes, &mut w);
    assert!(matches!(e, Err(Error::DType { arg: "cache", .. })), "{e:?}");
    let e = prefill(s, &mut out, None, &q, &cache, &table, &starts, &lens, &prefills, &mut pw);
    assert!(matches!(e, Err(Error::DType { arg: "cache", .. })), "{e:?}");

    let q = Tensor::<bf16>::zeros(d, &[1, 200, 128]).unwrap();
    let mut out = Tensor::<bf16>::zeros(d, &[1, 200, 128]).unwrap();
    for path in [PrefillPath::Wgmma, PrefillPath::Mma] {
        let options = PrefillOptions::default().path(path);
        let e = prefill(s, &mut out, None, &q, &cache, &table, &starts, &lens, &options, &mut pw).unwrap_err();
        assert!(e.to_string().contains("does not take 200 query heads a KV head"), "{e}");
    }
    let (q, mut out) = (q.narrow(1, 0, 4).unwrap(), out.narrow(1, 0, 4).unwrap());
    let all_the_same = q.as_strided(&[1, 4, 128], &[512, 0, 1], 0).unwrap();
    for (q, scale, what) in [(&q, -1.0, "a scale of -1"), (&all_the_same, 1.0, "[512, 0] elements apart")] {
        let options = PrefillOptions::default().path(PrefillPath::Wgmma).scale(scale);
        let e = prefill(s, &mut out, None, q, &cache, &table, &starts, &lens, &options, &mut pw).unwrap_err();
        assert!(e.to_string().contains(what), "{e}");
    }
    let none = KvCache::<bf16>::zeros(d, CacheLayout::Nhd, CacheShape::new(0, 16, 1, 128)).unwrap();
    let options = DecodeOptions::default().path(DecodePath::Tma);
    let e = decode(s, &mut out, None, &q, &none, &table, &lens, &options, &mut w).unwrap_err();
    assert!(e.to_string().contains("a cache of no blocks"), "{e}");
}

/// Layer L0 takes any number: what is absurd makes launches and maps that none takes.
#[test]
fn absurd_sizes_at_layer_0() {
    use attention::{decode as decodes, prefill as prefills};
    const MOST: usize = usize::MAX;
    assert!(prefills::section_keys(DType::Bf16, 0) > 0);
    assert_eq!(prefills::section_keys(DType::Bf16, MOST), 0);
    for dim in [0, 257, MOST] {
        assert!(decodes::split_entry(DType::Bf16, DType::Bf16, CacheLayout::Nhd, dim, 8, MOST).is_none());
    }
    let split = decodes::split_entry(DType::Bf16, DType::Bf16, CacheLayout::Nhd, 128, MOST, 0).unwrap().1;
    let tma = decodes::tma_entry(DType::Bf16, DType::Bf16, 128, 1).unwrap().1;
    let mma = prefills::mma_entry(DType::Bf16, DType::Bf16, CacheLayout::Nhd, 128, false).unwrap().1;
    let wgmma = prefills::wgmma_entry(DType::Bf16, DType::Bf16, 128, false, false).unwrap().1;
    for geometry in [
        decodes::split_geometry(split, u32::MAX),
        decodes::tma_geometry(tma, u32::MAX),
        prefills::mma_geometry(mma, u32::MAX),
    ] {
        assert_eq!(geometry.grid[0], u32::MAX);
    }
    // Steps are not cut into several chunks, whatever was asked for.
    for (rows, dim, cache) in
        [(1, 64, DType::Bf16), (4, 128, DType::Bf16), (16, 128, DType::Bf16), (8, 128, DType::E4m3)]
    {
        let tile = decodes::tma_entry(DType::Bf16, cache, dim, rows).unwrap().1;
        let shape = DecodeShape::new(1, rows, 1, dim, 4096);
        for chunk in [0, 1, 8, 64, 128, 1024, MOST] {
            let (hint, shift) = (tile.hint(&shape.chunk(chunk)), shape.chunk(chunk).chunk_shift());
            assert_eq!(hint, if chunk == 0 { tile.hint(&shape) } else { shift.max(tile.keys.ilog2()) }, "{chunk}");
            assert!(chunk == 0 || (6..=10).contains(&shift), "{chunk}");
        }
        assert!([0, warploom::kernels::attention::decode_tma::SHORT].contains(&tile.hint(&shape)));
    }
    let d = &Device::simt();
    for (heads, stride) in [(0, MOST), (1, MOST), (2, MOST / 2)] {
        let shape = CacheShape::new(1, 16, heads, 128);
        let mut strides = PageStrides::values(CacheLayout::Nhd, shape);
        (strides.block, strides.head, strides.token) = (stride, stride, stride);
        assert!(decodes::tma_cache_map(d, 1 << 20, DType::Bf16, shape, strides, tma).is_err(), "{heads} {stride}");
        assert!(prefills::wgmma_cache_map(d, 1 << 20, DType::Bf16, wgmma, shape, strides).is_err(), "{heads} {stride}");
    }
    assert!(prefills::wgmma_query_map(d, 1 << 20, DType::Bf16, wgmma, [2, 2, 128], (MOST, MOST), 1).is_err());
    assert!(prefills::wgmma_output_map(d, 1 << 20, DType::Bf16, wgmma, [2, 2, 128], (MOST, MOST), 1).is_err());
}
