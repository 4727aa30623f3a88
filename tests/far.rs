//! Rows that lie so far apart that 32-bit numbers do not count the elements between them: what kernels and the host compute of addresses,
//! without the memory.
//!
//! On the SIMT device what lies between the rows is mapped and never touched, and the last row is beyond what an unsigned 32-bit number counts. On a
//! GPU it is allocated, and the last row is beyond a signed one.

use cuda_std::Element;
use warploom::{Device, Stream, Tensor};
use warploom_tests::{devices, large_gpu};

/// How far rows are apart, and how many of them there are.
#[derive(Clone, Copy)]
pub struct Apart {
    /// From row to row, in elements.
    pub stride: usize,
    /// On the SIMT device.
    simt: usize,
    /// On a GPU.
    gpu: usize,
}

/// Each row is beyond a signed 32-bit number from the one before.
pub const FAR: Apart = Apart { stride: (1 << 31) + 8, simt: 3, gpu: 2 };

impl Apart {
    /// Runs `test` on every device, with a number of rows; on a GPU that has so many GB of memory.
    pub fn on_every_device(self, gigabytes: u64, test: impl Fn(&Device, &Stream, usize)) {
        let run = |name: &str, device: &Device, rows| {
            eprintln!("rows far apart, on the device: {name}");
            test(device, &Stream::new(device).unwrap(), rows);
        };
        for (name, device) in devices().into_iter().filter(|(_, device)| device.is_simt()) {
            run(name, &device, self.simt);
        }
        if let Some((gpu, _turn)) = large_gpu(gigabytes) {
            run("cuda", &gpu, self.gpu);
        }
    }

    /// Memory for `rows` rows of `n` elements: zeros on the SIMT device, anything on a GPU.
    pub fn memory<T: Element>(self, device: &Device, rows: usize, n: usize) -> Tensor<T> {
        let len = (rows - 1) * self.stride + n;
        if !device.is_simt() {
            return Tensor::uninit(device, &[len]).unwrap();
        }
        let mut map = memmap2::MmapOptions::new();
        // More than there may be, of which next to nothing is touched.
        let mut map = map.len(len * size_of::<T>()).no_reserve_swap().map_anon().expect("addresses");
        let data = map.as_mut_ptr().cast::<T>();
        // SAFETY: the map is as long, holds zeros, which are elements of every type, and is used through the tensor alone, which owns it.
        unsafe { Tensor::from_raw(device, data, &[len], None, map) }.unwrap()
    }

    /// [`memory`](Self::memory) that holds these rows of `n`.
    pub fn rows<T: Element>(self, device: &Device, data: &[T], n: usize) -> Tensor<T> {
        let all = self.memory(device, data.len() / n, n);
        for (i, row) in data.chunks(n).enumerate() {
            all.narrow(0, i * self.stride, n).unwrap().copy_from_slice(row).unwrap();
        }
        all
    }

    /// All rows of such memory as `[rows, n]`.
    pub fn view<T: Element>(self, all: &Tensor<T>, n: usize) -> Tensor<T> {
        all.as_strided(&[all.len() / self.stride + 1, n], &[self.stride, 1], 0).unwrap()
    }

    /// What the rows of `n` hold. Not by a view of them, which would be read with all that is between.
    pub fn read<T: Element>(self, all: &Tensor<T>, n: usize) -> Vec<T> {
        let row = |i| all.narrow(0, i * self.stride, n).unwrap().to_vec().unwrap();
        (0..=all.len() / self.stride).flat_map(row).collect()
    }
}
