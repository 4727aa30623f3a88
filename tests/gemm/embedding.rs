use cuda_std::Float;
use warploom::gemm::embedding;
use warploom::{Device, Error, Graph, Stream, Tensor, bf16, f16, reference};
use warploom_tests::{noise_of, on_every_device, property, widen};

fn check<T: Float>(d: &Device, s: &Stream, ids: &[i32], rows: usize, width: usize, pad: usize) {
    let stride = width + pad;
    let flat = noise_of::<T>(rows * stride + pad, 1);
    // The table starts `pad` elements into its memory: misaligned wherever that is not a multiple of 16 bytes.
    let table = Tensor::from_slice(d, &flat, &[flat.len()]).unwrap();
    let table = table.as_strided(&[rows, width], &[stride, 1], pad).unwrap();
    let dense: Vec<f64> = widen(&table.to_vec().unwrap());
    let device_ids = Tensor::from_slice(d, ids, &[ids.len()]).unwrap();
    let mut out = Tensor::<T>::uninit(d, &[ids.len(), width]).unwrap();
    s.fill_bytes(&mut out, 0xff).unwrap();
    embedding(s, &mut out, &table, &device_ids).unwrap();
    assert_eq!(widen(&out.to_vec().unwrap()), reference::gemm::embedding(&dense, ids, rows, width));
}

#[test]
fn matches_the_reference() {
    let shape = (proptest::collection::vec(-2i32..12, 0..20), 1usize..10, 0usize..300, 0usize..4);
    property(8, shape, |d, s, (ids, rows, width, pad)| {
        check::<f32>(d, s, &ids, rows, width, 4 * pad);
        check::<bf16>(d, s, &ids, rows, width & !7, 8 * pad);
        check::<f16>(d, s, &ids, rows, width, pad);
        Ok(())
    });
}

#[test]
fn ids_outside_give_zeros() {
    on_every_device(|d, s| {
        let table = Tensor::from_slice(d, &[1f32; 8], &[2, 4]).unwrap();
        let ids = Tensor::from_slice(d, &[2, i32::MIN, 1, i32::MAX], &[4]).unwrap();
        let mut out = Tensor::uninit(d, &[4, 4]).unwrap();
        embedding(s, &mut out, &table, &ids).unwrap();
        let out = out.to_vec().unwrap();
        assert!(out[..8].iter().chain(&out[12..]).all(|&v| v == 0.0) && out[8..12].iter().all(|&v| v == 1.0));
    });
}

#[test]
fn captured_and_replayed() {
    on_every_device(|d, s| {
        let table = Tensor::from_slice(d, &noise_of::<bf16>(80, 1), &[5, 16]).unwrap();
        let mut ids = Tensor::from_slice(d, &[0, 1], &[2]).unwrap();
        let mut out = Tensor::zeros(d, &[2, 16]).unwrap();
        d.preload(&["gemm"]).unwrap();
        let graph = Graph::capture(s, |s| embedding(s, &mut out, &table, &ids)).unwrap();
        ids.copy_from_slice(&[4, 3]).unwrap();
        graph.launch(s).unwrap();
        let all = table.to_vec().unwrap();
        assert_eq!(out.to_vec().unwrap(), [&all[64..], &all[48..64]].concat());
    });
}

#[test]
fn bad_input() {
    on_every_device(|d, s| {
        let t = |shape: &[usize]| Tensor::<f32>::zeros(d, shape).unwrap();
        let ids = Tensor::<i32>::zeros(d, &[3]).unwrap();
        let table = t(&[5, 4]);
        assert!(matches!(embedding(s, &mut t(&[3, 5]), &table, &ids), Err(Error::Shape { arg: "out", .. })));
        assert!(matches!(embedding(s, &mut t(&[3, 4]), &t(&[20]), &ids), Err(Error::Shape { arg: "table", .. })));
        let square = Tensor::<i32>::zeros(d, &[3, 1]).unwrap();
        assert!(matches!(embedding(s, &mut t(&[3, 4]), &table, &square), Err(Error::Shape { arg: "ids", .. })));
        let across = table.as_strided(&[5, 2], &[4, 2], 0).unwrap();
        assert!(matches!(embedding(s, &mut t(&[3, 2]), &across, &ids), Err(Error::Stride { arg: "table", .. })));
        let mut inside = table.narrow(0, 1, 3).unwrap();
        assert!(matches!(embedding(s, &mut inside, &table, &ids), Err(Error::Overlap { .. })));
        let foreign = Tensor::<i32>::zeros(&Device::simt(), &[3]).unwrap();
        assert!(matches!(embedding(s, &mut t(&[3, 4]), &table, &foreign), Err(Error::WrongDevice { arg: "ids", .. })));
        let (wide, none) = (t(&[0, 4 * 128 * 65536]), Tensor::<i32>::zeros(d, &[0]).unwrap());
        assert!(matches!(embedding(s, &mut wide.clone(), &wide, &none), Err(Error::Value { arg: "table", .. })));
        let mut bytes = Tensor::<cuda_std::E4M3>::zeros(d, &[3, 4]).unwrap();
        let e = embedding(s, &mut bytes, &Tensor::zeros(d, &[5, 4]).unwrap(), &ids);
        assert!(matches!(e, Err(Error::DType { arg: "table", .. })));
    });
}
