//! `model.safetensors`: memory-mapped, checked tensor by tensor, and brought to the device.

use super::problem::{Problem, Result, input};
use cuda_std::Float;
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use std::path::{Path, PathBuf};
use warploom::{Device, Tensor, bf16};

/// A mapped file of weights.
pub struct Weights {
    path: PathBuf,
    map: Mmap,
}

impl Weights {
    /// Maps the file and checks its header.
    ///
    /// # Errors
    /// [`Problem::Input`] for a file that is not there, too short, or no safetensors file.
    pub fn open(path: &Path) -> Result<Self> {
        let shown = path.display();
        let file = std::fs::File::open(path).or_else(|e| input(format!("cannot read {shown}: {e}")))?;
        // SAFETY: the map is only read; the file is not supposed to change while the program starts.
        let map = unsafe { Mmap::map(&file) }.or_else(|e| input(format!("cannot map {shown}: {e}")))?;
        let this = Self { path: path.into(), map };
        this.tensors()?;
        Ok(this)
    }

    fn tensors(&self) -> Result<SafeTensors<'_>> {
        SafeTensors::deserialize(&self.map).or_else(|e| {
            let shown = self.path.display();
            input(format!("{shown} is truncated or no safetensors file: {e}"))
        })
    }

    /// Names of all tensors.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn names(&self) -> Result<Vec<String>> {
        Ok(self.tensors()?.names().into_iter().map(String::from).collect())
    }

    /// The tensor `name`, which must have `shape`: bf16 in the file, rounded or widened to `T`.
    ///
    /// # Errors
    /// [`Problem::Input`] if it is missing or of another shape or type.
    pub fn matrix<T: Float>(&self, name: &str, shape: &[usize]) -> Result<Vec<T>> {
        let bytes = self.bytes(name, shape, Dtype::BF16)?;
        Ok(bytes.chunks_exact(2).map(|b| T::from_f32(bf16::from_le_bytes([b[0], b[1]]).to_f32())).collect())
    }

    /// The tensor `name` of f32.
    ///
    /// # Errors
    /// As for [`matrix`](Self::matrix).
    pub fn vector_f32(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let bytes = self.bytes(name, shape, Dtype::F32)?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    fn bytes(&self, name: &str, shape: &[usize], dtype: Dtype) -> Result<Vec<u8>> {
        let (shown, tensors) = (self.path.display(), self.tensors()?);
        let Ok(tensor) = tensors.tensor(name) else {
            return input(format!("{shown} has no tensor `{name}`, which config.json asks for"));
        };
        if tensor.shape() != shape || tensor.dtype() != dtype {
            return input(format!(
                "{shown}: tensor `{name}` is {:?} {:?}, but config.json asks for {dtype:?} {shape:?}",
                tensor.dtype(),
                tensor.shape()
            ));
        }
        Ok(tensor.data().to_vec())
    }

    /// [`matrix`](Self::matrix), on the device.
    ///
    /// # Errors
    /// As for [`matrix`](Self::matrix), and [`Problem::Failure`] if the device has no memory left.
    pub fn load<T: Float>(&self, device: &Device, name: &str, shape: &[usize]) -> Result<Tensor<T>> {
        Ok(Tensor::from_slice(device, &self.matrix::<T>(name, shape)?, shape)?)
    }

    /// [`vector_f32`](Self::vector_f32), on the device.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn load_f32(&self, device: &Device, name: &str, shape: &[usize]) -> Result<Tensor<f32>> {
        Ok(Tensor::from_slice(device, &self.vector_f32(name, shape)?, shape)?)
    }

    /// The file, for messages.
    pub fn complain<T>(&self, what: &str) -> Result<T> {
        Err(Problem::Input(format!("{}: {what}", self.path.display())))
    }
}
