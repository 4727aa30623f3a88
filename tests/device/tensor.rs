//! Tensors: shapes, views, copies.

use proptest::prelude::*;
use warploom::{Error, Pinned, Tensor};
use warploom_tests::{on_every_device, property};

fn counted(device: &warploom::Device, shape: &[usize]) -> Tensor<u32> {
    let n: usize = shape.iter().product();
    Tensor::from_slice(device, &(0..n as u32).collect::<Vec<_>>(), shape).unwrap()
}

#[test]
fn a_tensor_is_row_major() {
    on_every_device(|device, _| {
        let mut x = counted(device, &[2, 3, 4]);
        assert_eq!((x.shape(), x.strides(), x.len()), (&[2, 3, 4][..], &[12, 4, 1][..], 24));
        assert_eq!((x.dim(1), x.dim(7)), (3, 1));
        assert!(x.is_contiguous() && !x.is_empty());
        assert_eq!(x.device(), device);
        assert!(x.to_vec().unwrap().into_iter().eq(0..24));
        assert_eq!(format!("{x:?}"), format!("Tensor<u32>[2, 3, 4] on {}", device.name()));
        x.copy_from_slice(&[7; 24]).unwrap();
        assert_eq!(x.to_vec().unwrap(), [7; 24]);
        let scalar = Tensor::from_slice(device, &[5u32], &[]).unwrap();
        assert_eq!(scalar.to_vec().unwrap(), [5]);
        assert!(Tensor::<f32>::zeros(device, &[100]).unwrap().to_vec().unwrap().iter().all(|v| v.to_bits() == 0));
    });
}

#[test]
fn views_share_memory() {
    on_every_device(|device, stream| {
        let x = counted(device, &[4, 6]);
        let mut rows = x.narrow(0, 1, 2).unwrap();
        stream.fill_bytes(&mut rows, 0).unwrap();
        let flat = x.reshape(&[24]).unwrap();
        let expected: Vec<u32> = (0..24).map(|i| if (6..18).contains(&i) { 0 } else { i }).collect();
        assert_eq!(flat.to_vec().unwrap(), expected);
        drop(x);
        assert_eq!(flat.to_vec().unwrap(), expected);
    });
}

#[test]
fn strided_views_are_read_as_seen() {
    property(
        16,
        (1usize..5, 1usize..5, 1usize..9, 0usize..4, 0usize..4),
        |device, _, (planes, rows, columns, skip, extra)| {
            let x = counted(device, &[planes, rows, columns + skip + extra]);
            let view = x.narrow(2, skip, columns).unwrap();
            let at = |p, r, c| ((p * rows + r) * (columns + skip + extra) + skip + c) as u32;
            let expected: Vec<u32> =
                (0..planes).flat_map(|p| (0..rows).flat_map(move |r| (0..columns).map(move |c| at(p, r, c)))).collect();
            prop_assert_eq!(view.to_vec().unwrap(), expected);
            // Columns as rows.
            let turned = x.as_strided(&[columns, rows], &[1, columns + skip + extra], skip).unwrap();
            let expected: Vec<u32> = (0..columns).flat_map(|c| (0..rows).map(move |r| at(0, r, c))).collect();
            prop_assert_eq!(turned.to_vec().unwrap(), expected);
            Ok(())
        },
    );
}

/// Strides with which a shape has elements so far from the first, one after the other, if there are any.
fn strides_of(offsets: &[u32], shape: &[usize]) -> Option<Vec<usize>> {
    let mut strides = vec![];
    for (d, &extent) in shape.iter().enumerate() {
        let behind: usize = shape[d + 1..].iter().product();
        strides.push(if extent > 1 { offsets[behind] as usize } else { 0 });
    }
    let place = |mut i: usize| {
        let mut sum = 0;
        for (&extent, &stride) in shape.iter().zip(&strides).rev() {
            sum += i % extent * stride;
            i /= extent;
        }
        sum
    };
    (0..offsets.len()).all(|i| place(i) == offsets[i] as usize).then_some(strides)
}

#[test]
fn a_shape_that_has_strides_is_a_view() {
    let few = || proptest::sample::select(vec![1usize, 1, 2, 3, 4, 6]);
    let shapes = (proptest::collection::vec(few(), 0..4), proptest::collection::vec(few(), 0..5));
    property(300, (shapes, proptest::array::uniform3(0usize..3), any::<u8>()), |device, _, ((own, to), gaps, way)| {
        let x = Tensor::from_slice(device, &(0..4096).collect::<Vec<u32>>(), &[4096]).unwrap();
        // With gaps between rows, dimensions turned, or the same elements again and again.
        let mut strides = vec![0; own.len()];
        let mut next = 1 + way as usize % 2;
        for (d, &extent) in own.iter().enumerate().rev() {
            strides[d] = next;
            next = next * extent + gaps[d] / 2;
        }
        match way / 2 % 4 {
            0 => strides.reverse(),
            1 if !strides.is_empty() => strides[gaps[0] % own.len()] = 0,
            _ => {}
        }
        let view = x.as_strided(&own, &strides, 0).unwrap();
        let offsets = view.to_vec().unwrap();
        for shape in
            [to.clone(), vec![offsets.len()], [&own[..], &[1]].concat(), own.iter().flat_map(|&n| [n / 2, 2]).collect()]
        {
            let fits = shape.iter().product::<usize>() == offsets.len() && shape.len() < 7;
            let exist = fits && strides_of(&offsets, &shape).is_some();
            match view.reshape(&shape) {
                Ok(reshaped) => {
                    prop_assert!(exist, "{own:?} {strides:?} as {shape:?}: {reshaped:?}");
                    prop_assert_eq!(reshaped.shape(), &shape[..]);
                    prop_assert_eq!(reshaped.to_vec().unwrap(), offsets.clone());
                    if view.is_contiguous() {
                        prop_assert!(reshaped.is_contiguous());
                    }
                }
                Err(error) => prop_assert!(!exist, "{own:?} {strides:?}: {error}"),
            }
        }
        Ok(())
    });
}

#[test]
fn shapes_that_do_not_fit() {
    on_every_device(|device, _| {
        let tensor_error = |result: warploom::Result<Tensor<u32>>| {
            let error = result.map(|_| ()).unwrap_err();
            assert!(matches!(error, Error::Tensor(_)), "{error}");
        };
        let x = counted(device, &[4, 6]);
        tensor_error(Tensor::from_slice(device, &[1, 2, 3], &[2, 2]));
        tensor_error(Tensor::uninit(device, &[1; 7]));
        tensor_error(Tensor::uninit(device, &[usize::MAX, 2]));
        tensor_error(Tensor::uninit(device, &[isize::MAX as usize]));
        tensor_error(x.reshape(&[5, 5]));
        tensor_error(x.narrow(1, 1, 5).unwrap().reshape(&[20]));
        tensor_error(x.narrow(0, 3, 2));
        tensor_error(x.narrow(0, usize::MAX, 2));
        tensor_error(x.narrow(2, 0, 1));
        tensor_error(x.as_strided(&[4, 6], &[6, 1], 1));
        tensor_error(x.as_strided(&[2], &[usize::MAX], 1));
        tensor_error(x.as_strided(&[2, 2], &[1], 0));
        // The product is 0 in 64 bits.
        let empty = x.narrow(0, 0, 0).unwrap();
        for wraps in [&[1 << 32, 1 << 32][..], &[1 << 62, 4], &[1 << 63, 2], &[2, 1 << 31, 1 << 32]] {
            tensor_error(empty.reshape(wraps));
            tensor_error(x.reshape(wraps));
            tensor_error(Tensor::uninit(device, wraps));
            tensor_error(x.as_strided(wraps, &vec![0; wraps.len()], 0));
        }
        tensor_error(empty.reshape(&[0, usize::MAX, 2]));
        tensor_error(Tensor::uninit(device, &[0, usize::MAX, 2]));
        tensor_error(x.as_strided(&[0, usize::MAX, 2], &[0; 3], 0));
        tensor_error(x.as_strided(&[0, 2], &[1, usize::MAX], 0));
        tensor_error(x.as_strided(&[1], &[usize::MAX], 0));
        let mut x = x;
        assert!(matches!(x.copy_from_slice(&[0; 23]), Err(Error::Tensor(_))));
        assert!(matches!(x.narrow(1, 0, 3).unwrap().copy_from_slice(&[0; 12]), Err(Error::Tensor(_))));
    });
}

#[test]
fn empty_tensors() {
    on_every_device(|device, _| {
        for shape in [&[0][..], &[3, 0], &[0, 5, 2]] {
            let x = Tensor::<f32>::zeros(device, shape).unwrap();
            assert!(x.is_empty() && x.is_contiguous());
            assert!(x.to_vec().unwrap().is_empty());
            assert_eq!(x.shape(), shape);
        }
        let x = counted(device, &[4, 6]);
        let end = x.narrow(0, 4, 0).unwrap();
        assert_eq!(end.shape(), [0, 6]);
        assert!(end.to_vec().unwrap().is_empty());
        let nowhere = x.as_strided(&[0, 9], &[100, 100], 7).unwrap();
        assert!(nowhere.to_vec().unwrap().is_empty());
        // Neither does an empty part of it lie anywhere.
        let part = nowhere.narrow(1, 8, 1).unwrap();
        assert_eq!(part.shape(), [0, 1]);
        assert!((part.as_ptr() as usize).is_multiple_of(1024));
        assert!(part.to_vec().unwrap().is_empty());
    });
}

/// Fresh memory of the SIMT device is NaN in every floating-point type.
#[test]
fn fresh_memory_is_poisoned() {
    let device = warploom::Device::simt();
    assert!(Tensor::<f32>::uninit(&device, &[9]).unwrap().to_vec().unwrap().iter().all(|v| v.is_nan()));
    assert!(Tensor::<warploom::f16>::uninit(&device, &[9]).unwrap().to_vec().unwrap().iter().all(|v| v.is_nan()));
}

#[test]
fn more_memory_than_there_is() {
    on_every_device(|device, _| {
        for bytes in [1 << 50, isize::MAX as usize] {
            let error = Tensor::<u8>::uninit(device, &[bytes]).map(|_| ()).unwrap_err();
            assert!(matches!(error, Error::OutOfMemory { bytes: b, .. } if b == bytes), "{error}");
            assert!(error.to_string().contains(&device.name()), "{error}");
            // Nothing is wrong with the device after that.
            assert_eq!(Tensor::from_slice(device, &[1u8, 2], &[2]).unwrap().to_vec().unwrap(), [1, 2]);
            let error = Pinned::<u8>::zeros(device, bytes).map(|_| ()).unwrap_err();
            assert!(matches!(error, Error::OutOfMemory { .. } | Error::Driver { .. }), "{error}");
        }
        let error = Pinned::<u32>::zeros(device, usize::MAX).map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    });
}
