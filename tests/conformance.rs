//! Every function of the device library does the same on every device: what the kernels of `kernels::conformance` write
//! on the SIMT device in order is what they must write elsewhere, bit for bit. What it is, the tests of `cuda_std` and
//! the facts below say.

use cuda_std::integer::Divisor;
use warploom::device::{Swizzle, TensorMapDescription};
use warploom::kernels::conformance as kernels;
use warploom::{DType, Device, Element, Entry, Geometry, KernelArgs, Stream, Tensor};
use warploom_tests::{devices, skipped_without_hopper};

/// Compares with the results of the SIMT device in order, `per_thread` words a thread.
fn same(name: &str, per_thread: usize, expected: &mut Option<Vec<u32>>, got: Vec<u32>) {
    let Some(expected) = expected else {
        *expected = Some(got);
        return;
    };
    let different: Vec<usize> = (0..got.len()).filter(|&i| got[i] != expected[i]).collect();
    for &i in different.iter().take(20) {
        let (thread, word) = (i / per_thread, i % per_thread);
        eprintln!("{name}: thread {thread}, word {word}: {:#010x} instead of {:#010x}", got[i], expected[i]);
    }
    assert!(different.is_empty(), "{name}: {} of {} words differ", different.len(), got.len());
}

/// Whether the device has the instructions of an entry.
fn supports<A: 'static>(device: &Device, entry: &Entry<A>) -> bool {
    entry.arch == warploom::Arch::Sm80 || !skipped_without_hopper(device)
}

/// Runs a kernel of every device with `per_thread` words of results, and compares. `args` makes the arguments on a device for
/// results at an address, and whatever must live as long.
fn check<A: KernelArgs, Keep>(
    entry: Entry<A>,
    geometry: Geometry,
    per_thread: usize,
    args: impl Fn(&Device, *mut u32) -> (A, Keep),
) -> Vec<u32> {
    check_supported(entry, geometry, per_thread, args).expect("a device")
}

/// [`check`] on the devices that have the kernel's instructions, if there is one.
fn check_supported<A: KernelArgs, Keep>(
    entry: Entry<A>,
    geometry: Geometry,
    per_thread: usize,
    args: impl Fn(&Device, *mut u32) -> (A, Keep),
) -> Option<Vec<u32>> {
    let [threads, blocks] = [geometry.block, geometry.grid].map(|d| d.iter().product::<u32>() as usize);
    let mut expected = None;
    for (name, device) in devices() {
        if !supports(&device, &entry) {
            continue;
        }
        let name = format!("{} on {name}", entry.name);
        let stream = Stream::new(&device).unwrap();
        let mut out = Tensor::<u32>::zeros(&device, &[blocks * threads * per_thread]).unwrap();
        let (args, _keep) = args(&device, out.as_mut_ptr());
        // SAFETY: the kernel writes `per_thread` words for each thread, and what its arguments point to is kept.
        unsafe { stream.launch(&entry, &geometry, &args) }.unwrap_or_else(|e| panic!("{name}: {e}"));
        stream.synchronize().unwrap_or_else(|e| panic!("{name}: {e}"));
        same(&name, per_thread, &mut expected, out.to_vec().unwrap());
    }
    expected
}

/// A tensor with these values.
fn upload<T: Element>(device: &Device, data: &[T]) -> Tensor<T> {
    Tensor::from_slice(device, data, &[data.len()]).unwrap()
}

/// Numbers of every magnitude and sign, and the corners.
fn numbers(n: usize) -> Vec<f32> {
    let corners = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        1.5,
        2.5,
        -2.5,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MIN_POSITIVE,
        f32::from_bits(1),
        -f32::from_bits(1),
        f32::from_bits(0x007f_ffff),
        f32::MAX,
        f32::MIN,
        88.72,
        88.73,
        -103.97,
        -104.0,
        127.5,
        128.0,
        -149.5,
        -151.0,
        448.0,
        464.0,
        480.0,
        57344.0,
        61440.0,
        65504.0,
        65520.0,
        1e10,
        -1e20,
        65536.0,
        65535.9,
        1e5,
        127.5,
        -128.5,
        255.5,
        2147483648.0,
        -2147483904.0,
        0.015625,
        0.001953125,
        0.0009765625,
        6.1035156e-5,
        1.5258789e-5,
        7.629_394_5e-6,
        0.999_999_94,
        1.000_000_1,
        0.92,
        0.58,
        3.95,
        9.1,
    ];
    let mut state = 1u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state
    };
    let mut all = corners.to_vec();
    while all.len() < n {
        let bits = random() ^ random() >> 16;
        // Half of them of ordinary size.
        all.push(if all.len().is_multiple_of(2) {
            f32::from_bits(bits)
        } else {
            bits as i32 as f32 / (1 << 27) as f32
        });
    }
    all
}

#[test]
fn threads() {
    use kernels::thread::{Args, BLOCKS, SHARED_BYTES, THREADS, WORDS, conformance_thread};
    let geometry = Geometry::new([BLOCKS as u32, 1, 1], [16, 2, 2]).shared_bytes(SHARED_BYTES as u32);
    let out = check(conformance_thread::ENTRY, geometry, WORDS, |_, out| (Args { out }, ()));
    // Thread (3, 1, 1) of block 1.
    let t = &out[(THREADS + 51) * WORDS..][..WORDS];
    assert_eq!(t[..6], [0x010103, 0x020210, 0x010102, 16 + 3, 51, (63 - 51) * (63 - 51)]);
    assert_eq!(t[6..16], [22, 0b01, 0b01, 51 - 32 + 1, 0b01, 1, 1, 2, 32, 12]);
    assert_eq!(t[16..], [50 * 3, 0.75f32.to_bits(), 1]);
}

#[test]
fn clusters() {
    use kernels::cluster::{Args, SHARED_BYTES, THREADS, WORDS};
    let data: Vec<f32> = (0..128).map(|i| i as f32 + 0.5).collect();
    for (entry, size) in Args::ENTRIES.iter().zip([1u32, 2, 4]) {
        let geometry = Geometry::linear(8, THREADS as u32).shared_bytes(SHARED_BYTES as u32).cluster(size);
        let out = check_supported(*entry, geometry, WORDS, |device, out| {
            let input = upload(device, &data);
            let description = TensorMapDescription {
                base: input.as_ptr() as u64,
                dtype: DType::F32,
                rank: 1,
                dims: [128, 1, 1, 1, 1],
                strides: [0; 4],
                box_dims: [128 / size, 1, 1, 1, 1],
                swizzle: Swizzle::None,
            };
            let map = device.tensor_map(&description).unwrap();
            (Args { map, out }, input)
        });
        let Some(out) = out else { continue };
        // Thread 9 of block 5.
        let t = &out[(5 * 64 + 9) * WORDS..][..WORDS];
        let (rank, base) = (5 % size, 5 / size * size);
        let before = (rank + size - 1) % size;
        assert_eq!(t[..4], [rank | size << 8, 100 * (base + (rank + 1) % size) + 8, 7 * 10 + before, 4]);
        assert_eq!(t[4..], [23.5f32.to_bits(), 1, 11 * 11 + before]);
    }
}

#[test]
fn warps() {
    use kernels::warp::{Args, THREADS, WORDS, conformance_warp};
    let out = check(conformance_warp::ENTRY, Geometry::linear(1, THREADS as u32), WORDS, |_, out| (Args { out }, ()));
    let t = &out[35 * WORDS..][..WORDS];
    // Lane 3 of warp 1: its number, a shuffle within 8 lanes, and one from 3 lanes below in its segment of 16.
    assert_eq!(t[..4], [0x103, 32 << 1 | 1, 41 << 1 | 1, 32 << 1 | 1]);
}

#[test]
fn integers() {
    use kernels::integer::{Args, THREADS, WORDS, conformance_integer};
    let data: Vec<u32> = (0..=THREADS as u32).map(|i| (i + 1).wrapping_mul(0x9e37_79b9) ^ i << 3).collect();
    let out = check(conformance_integer::ENTRY, Geometry::linear(1, THREADS as u32), WORDS, |device, out| {
        let input = upload(device, &data);
        let (divisor, divisor1) = (Divisor::new(641), Divisor::new(u32::MAX - 1));
        (Args { data: input.as_ptr(), divisor, divisor1, out }, input)
    });
    for t in 0..THREADS {
        let (a, b) = (data[t] as u64, data[t + 1] as u64);
        assert_eq!(out[t * WORDS], ((a * b) >> 32) as u32);
        assert_eq!(out[t * WORDS + 12..][..2], [data[t] / 641, data[t] % 641]);
    }
}

#[test]
fn floats() {
    use kernels::float::{Args, THREADS, WORDS, conformance_float};
    let n = 16 * THREADS;
    let data = numbers(n + 1);
    let out = check(
        conformance_float::ENTRY,
        Geometry::linear((n / THREADS) as u32, THREADS as u32),
        WORDS,
        |device, out| {
            let input = upload(device, &data);
            (Args { data: input.as_ptr().cast(), out }, input)
        },
    );
    // The approximations are as good as documented.
    for t in 0..n {
        assert_eq!(out[t * WORDS + 33..][..5], [3, 3, 7, 3, 7], "of {:e}", data[t]);
    }
}

#[test]
fn conversions() {
    use kernels::convert::{Args, THREADS, WORDS, conformance_convert};
    let n = 8 * THREADS;
    let data = numbers(n + 3);
    check(conformance_convert::ENTRY, Geometry::linear((n / THREADS) as u32, THREADS as u32), WORDS, |device, out| {
        let input = upload(device, &data);
        (Args { data: input.as_ptr().cast(), out }, input)
    });
}

#[test]
fn atomics() {
    use kernels::atomic::{Args, SCRATCH, SHARED_BYTES, THREADS, WORDS, conformance_atomic};
    let geometry = Geometry::linear(1, THREADS as u32).shared_bytes(SHARED_BYTES as u32);
    let out = check(conformance_atomic::ENTRY, geometry, WORDS, |device, out| {
        let mut scratch = upload(device, &[0u32; SCRATCH]);
        (Args { scratch: scratch.as_mut_ptr(), out }, scratch)
    });
    let word = |i: usize| out[i * WORDS + 1];
    let sum = 63u32 * 64 / 2;
    assert_eq!(
        [word(0), word(1), word(3), word(4), word(5)],
        [sum, sum.wrapping_neg(), 128, 64u32.wrapping_neg(), u32::MAX]
    );
    assert_eq!(f32::from_bits(word(6)), 16.0);
    assert_eq!((word(9) as u64) << 32 | word(8) as u64, 8f64.to_bits());
    assert_eq!([word(10), word(11), word(13)], [63, 5, 63 << 8]);
    assert_eq!([word(14), word(15)].map(f32::from_bits), [28.5, -3.0]);
    assert_eq!([word(16), word(17) as i32 as u32, word(18), word(19)], [3, (20i32 - 63) as u32, !0x7f, !0x1f]);
    assert_eq!([word(50), word(51), word(52), word(55)].map(f32::from_bits), [32.0, 64.0, 16.0, 128.0]);
    assert!((0..THREADS).all(|t| out[t * WORDS] == 4711 + 9 + 2));
}

#[test]
fn memory() {
    use kernels::memory::{Args, SCRATCH, SHARED_BYTES, THREADS, WORDS, conformance_memory};
    let data: Vec<u32> = (0..4 * THREADS as u32).map(|i| i.wrapping_mul(0x0101_0107) + 1).collect();
    let geometry = Geometry::linear(1, THREADS as u32).shared_bytes(SHARED_BYTES as u32);
    check(conformance_memory::ENTRY, geometry, WORDS, |device, out| {
        let (input, mut scratch) = (upload(device, &data), upload(device, &[0u32; SCRATCH]));
        (Args { data: input.as_ptr(), scratch: scratch.as_mut_ptr(), out }, (input, scratch))
    });
}

#[test]
fn tensor_cores() {
    use kernels::tensor_core::{
        Args, SHARED_BYTES, THREADS, WORDS, WORDS_FLOAT8, conformance_tensor_core, conformance_tensor_core_float8,
    };
    let geometry = Geometry::linear(1, THREADS as u32).shared_bytes(SHARED_BYTES as u32);
    let out = check(conformance_tensor_core::ENTRY, geometry, WORDS, |_, out| (Args { out }, ()));
    // Row 1, column 2 of the product of bf16 numbers, in lane 5.
    let small = |i: i32| (i * 7 % 11 - 5) as f32;
    let want: f32 = 1.0 + (0..16).map(|k| small(16 + k) * small(2 * 16 + k + 3)).sum::<f32>();
    assert_eq!(f32::from_bits(out[5 * WORDS + 8]), want);
    check_supported(conformance_tensor_core_float8::ENTRY, geometry, WORDS_FLOAT8, |_, out| (Args { out }, ()));
}

#[test]
fn copy_engine() {
    use kernels::hopper::{Args, BOX, DIMS, SCRATCH, SHARED_BYTES, THREADS, WORDS, conformance_hopper};
    let count: usize = DIMS.iter().product();
    let data: Vec<f32> = (0..count).map(|i| i as f32 + 1.0).collect();
    let geometry = Geometry::linear(1, THREADS as u32).shared_bytes(SHARED_BYTES as u32);
    let stores = std::cell::RefCell::new(Vec::new());
    let out = check_supported(conformance_hopper::ENTRY, geometry, WORDS, |device, out| {
        let (input, mut scratch) = (upload(device, &data), upload(device, &[0f32; SCRATCH]));
        let describe = |base: *const f32, dims: &[usize], box_dims: &[usize], swizzle| {
            let rank = dims.len();
            let mut d = TensorMapDescription {
                base: base as u64,
                dtype: DType::F32,
                rank: rank as u32,
                dims: [1; 5],
                strides: [0; 4],
                box_dims: [1; 5],
                swizzle,
            };
            for i in 0..rank {
                d.dims[i] = dims[i] as u64;
                d.box_dims[i] = box_dims[i] as u32;
                if i > 0 {
                    d.strides[i - 1] = 4 * dims[..i].iter().product::<usize>() as u64;
                }
            }
            device.tensor_map(&d).unwrap()
        };
        let map = describe(input.as_ptr(), &DIMS, &BOX, Swizzle::B128);
        let line_map = describe(input.as_ptr(), &[count], &[64], Swizzle::None);
        let store_map = describe(scratch.as_ptr(), &[64, 16], &[32, 8], Swizzle::None);
        let args =
            Args { data: input.as_ptr().cast(), map, scratch: scratch.as_mut_ptr().cast(), line_map, store_map, out };
        stores.borrow_mut().push(scratch.clone());
        (args, (input, scratch))
    });
    let Some(out) = out else { return };
    // Thread 9: bytes, then the box at (0, 0, 0), whose element (18, 0, 0) it reads first.
    let t = &out[9 * WORDS..][..WORDS];
    assert_eq!([t[0], t[1], t[4]].map(f32::from_bits), [9.0, 73.0, 19.0]);
    // The box at (16, 7, 4): column 34, row 7, plane 4.
    assert_eq!(f32::from_bits(t[8]), (4 * 480 + 7 * 40 + 34) as f32 + 1.0);
    // The box at (-8, -3, -1): its first plane is outside.
    assert_eq!(t[12], 0);
    assert_eq!(f32::from_bits(t[16]), 76.0 + 9.0 + 1.0);
    for scratch in stores.into_inner() {
        let scratch = scratch.to_vec().unwrap();
        let mut want = vec![0.0f32; SCRATCH];
        (0..32).for_each(|i| want[i] = i as f32);
        (0..THREADS).for_each(|i| want[64 + i] = (3 * i) as f32);
        for (row, column) in (0..8).flat_map(|r| (0..32).map(move |c| (r, c))) {
            want[(4 + row) * 64 + 32 + column] = (row * 32 + column) as f32;
        }
        (0..16).for_each(|i| want[16 + i] += i as f32);
        for (row, column) in (0..4).flat_map(|r| (0..24).map(move |c| (r, c))) {
            want[(12 + row) * 64 + 40 + column] += (row * 32 + column) as f32;
        }
        assert_eq!(scratch, want);
    }
}

/// Element (`i`, `k`) of the operands of [`kernels::warpgroup`].
fn small(i: usize, k: usize) -> f32 {
    ((i * 5 + k * 3) % 7) as f32 - 3.0
}

#[test]
fn warpgroup_products() {
    use kernels::warpgroup::*;
    let geometry = Geometry::linear(1, THREADS as u32).shared_bytes(SHARED_BYTES as u32);
    let sum = |i: usize, j: usize, depth: usize| (0..depth).map(|k| small(i, k) * small(j + 2, k + 1)).sum::<f32>();
    for entry in Args::ENTRIES {
        let transposed = entry.name.contains("transposed");
        let words = if transposed { WORDS_TRANSPOSED } else { WORDS };
        let Some(out) = check_supported(*entry, geometry, words, |_, out| (Args { out }, ())) else { continue };
        let depth = if ["_e4m3", "_e5m2", "_i8"].iter().any(|t| entry.name.ends_with(t)) { 128 } else { 64 };
        for (thread, row, column) in [(0, 0, 0), (37, 17, 2), (127, 55, 6)] {
            let got = f32::from_bits(out[thread * words + 1]);
            assert_eq!(got, sum(row, column, depth), "{}, ({row}, {column})", entry.name);
        }
        if transposed {
            // However B lies.
            for t in out.chunks(words) {
                assert_eq!(t[3..5], [t[0]; 2], "{}", entry.name);
            }
        } else {
            // Accumulator 3 is 8 rows below and a column to the right.
            assert_eq!(f32::from_bits(out[37 * words + 2]), sum(25, 3, depth), "{}", entry.name);
        }
    }
}
