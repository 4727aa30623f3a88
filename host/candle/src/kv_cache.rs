//! The paged cache of keys and values.

use crate::lend::{Kernel, Lent, Operation, apply_to, pair};
use candle_core::{DType, Error, Layout, Result, Shape, Tensor};
use warploom::kv_cache::{self, CacheLayout, KvCache, ReshapeAndCacheOptions};
use warploom::{Element, Stream};

/// Writes keys and values of tokens into their slots of a paged cache, in place.
#[derive(Clone, Copy, Debug)]
pub struct ReshapeAndCache {
    layout: CacheLayout,
}

impl ReshapeAndCache {
    /// Into caches of `[blocks, block_size, heads, dim]`.
    pub const fn new() -> Self {
        Self { layout: CacheLayout::Nhd }
    }

    /// With this layout of the caches.
    pub const fn layout(mut self, layout: CacheLayout) -> Self {
        self.layout = layout;
        self
    }

    /// `cache[slots[t]] = key[t], value[t]` for each token `t`.
    ///
    /// `key` and `value` are `[tokens, heads, dim]`, dense in their last dimension, `slots` is `[tokens]`, of `i64`, `i32` or `u32`, contiguous: `block · block_size +
    /// place`. Tokens of other slots, such as -1, are skipped. The caches are of the type of `key`; they may be parts of one tensor, but not of one that is read here.
    ///
    /// Other threads may use the caches meanwhile, by any operation's `forward`. candle's `apply_op3_no_bwd` locks them in the order of its arguments instead, and the two threads may then
    /// wait for each other.
    ///
    /// # Errors
    /// As for [`RmsNorm::forward`](crate::RmsNorm::forward).
    pub fn forward(
        &self,
        key: &Tensor,
        value: &Tensor,
        key_cache: &Tensor,
        value_cache: &Tensor,
        slots: &Tensor,
    ) -> Result<()> {
        apply_to(self, [key_cache, value_cache], &[key, value, slots])
    }

    fn write<T: Kernel, I: Element>(
        self,
        stream: &Stream,
        outputs: &mut [Lent],
        inputs: &[Lent],
        slots: &warploom::Tensor<I>,
    ) -> Result<()> {
        let (key_cache, value_cache) = pair(outputs)?;
        let (key_cache, value_cache) = (key_cache.get_mut::<T>()?.clone(), value_cache.get_mut::<T>()?.clone());
        let (key, value) = (inputs[0].get::<T>()?, inputs[1].get::<T>()?);
        let options = ReshapeAndCacheOptions::default();
        KvCache::from_tensors(self.layout, key_cache, value_cache)
            .and_then(|mut c| kv_cache::reshape_and_cache(stream, &mut c, None, key, value, slots, &options))
            .map_err(Error::wrap)
    }
}

impl Default for ReshapeAndCache {
    fn default() -> Self {
        Self::new()
    }
}

impl Operation for ReshapeAndCache {
    const NAME: &'static str = "reshape_and_cache";

    fn outputs(&self, _: &[&Layout], _: DType) -> Result<Vec<(DType, Shape)>> {
        Ok(vec![])
    }

    fn run<T: Kernel>(&self, stream: &Stream, outputs: &mut [Lent], inputs: &[Lent]) -> Result<()> {
        match inputs[2].get::<i64>() {
            Ok(slots) => self.write::<T, i64>(stream, outputs, inputs, slots),
            Err(_) => self.write::<T, i32>(stream, outputs, inputs, &inputs[2].indices()?),
        }
    }
}
