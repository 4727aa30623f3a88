//! Attention over a paged cache.

use crate::lend::{Kept, Kernel, Lent, Operation, apply_one, custom_op};
use candle_core::{DType, Error, Layout, Result, Shape, Tensor};
use warploom::Stream;
use warploom::attention::{
    DecodeOptions, DecodeShape, DecodeWorkspace, PrefillOptions, PrefillWorkspace, decode, prefill,
};
use warploom::kv_cache::{CacheLayout, KvCache};

/// Attention of each sequence's last tokens over its pages of a cache; a `CustomOp3` of `query`, key cache and value cache.
///
/// Keep the value from layer to layer and step to step: it keeps the workspace.
#[derive(Debug)]
pub struct PagedDecode {
    block_table: Tensor,
    lengths: Tensor,
    layout: CacheLayout,
    scale: Option<f32>,
    soft_cap: f32,
    window: usize,
    workspace: Kept<(DecodeShape, DecodeWorkspace)>,
}

impl PagedDecode {
    /// `block_table` is `[batch, max_blocks]`, the pages of each sequence in order, `lengths` `[batch]`, the keys of each; both of
    /// `u32` or `i32`, contiguous.
    pub fn new(block_table: &Tensor, lengths: &Tensor) -> Self {
        Self {
            block_table: block_table.clone(),
            lengths: lengths.clone(),
            layout: CacheLayout::Nhd,
            scale: None,
            soft_cap: 0.0,
            window: 0,
            workspace: Kept::default(),
        }
    }

    /// With this layout of the caches; `[blocks, block_size, heads, dim]` without it.
    pub fn layout(mut self, layout: CacheLayout) -> Self {
        self.layout = layout;
        self
    }

    /// With this factor for the scores; `1 / sqrt(dim)` without it.
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Scores become `cap · tanh(score / cap)`.
    pub fn soft_cap(mut self, cap: f32) -> Self {
        self.soft_cap = cap;
        self
    }

    /// Sees the latest `window` keys only.
    pub fn window(mut self, window: usize) -> Self {
        self.window = window;
        self
    }

    /// For other pages and lengths, with the same workspace.
    pub fn route(&mut self, block_table: &Tensor, lengths: &Tensor) {
        (self.block_table, self.lengths) = (block_table.clone(), lengths.clone());
    }

    /// `query` is `[batch, heads, dim]`, or `[batch, tokens, heads, dim]` for up to 16 tokens a sequence; the caches are of its type.
    ///
    /// # Errors
    /// As for [`RmsNorm::forward`](crate::RmsNorm::forward).
    pub fn forward(&self, query: &Tensor, key_cache: &Tensor, value_cache: &Tensor) -> Result<Tensor> {
        apply_one(self, &[query, key_cache, value_cache])
    }
}

impl Operation for PagedDecode {
    const NAME: &'static str = "paged_decode";

    fn extra(&self) -> Vec<&Tensor> {
        vec![&self.block_table, &self.lengths]
    }

    fn outputs(&self, inputs: &[&Layout], dtype: DType) -> Result<Vec<(DType, Shape)>> {
        Ok(vec![(dtype, inputs[0].shape().clone())])
    }

    fn run<T: Kernel>(&self, stream: &Stream, outputs: &mut [Lent], inputs: &[Lent]) -> Result<()> {
        let query = inputs[0].get::<T>()?;
        let (key, value) = (inputs[1].get::<T>()?.clone(), inputs[2].get::<T>()?.clone());
        let cache = KvCache::from_tensors(self.layout, key, value).map_err(Error::wrap)?;
        let (table, lengths) = (inputs[3].indices()?, inputs[4].indices()?);
        let out = outputs[0].get_mut::<T>()?;
        let mut options = DecodeOptions::default().soft_cap(self.soft_cap).window(self.window);
        if let Some(scale) = self.scale {
            options = options.scale(scale);
        }
        let shape = cache.shape();
        let (q_len, q_heads) = match *query.shape() {
            [_, q_len, heads, _] => (q_len, heads),
            [_, heads, _] => (1, heads),
            _ => (0, 0),
        };
        let max_len = table.dim(1).saturating_mul(shape.block_size);
        let sizes = DecodeShape::new(query.dim(0), q_heads, shape.heads, shape.head_dim, max_len).q_len(q_len);
        self.workspace.with(
            stream,
            |(made_for, _)| *made_for == sizes,
            || Ok((sizes, DecodeWorkspace::new(stream.device(), sizes)?)),
            |(_, w)| decode(stream, out, None, query, &cache, &table, &lengths, &options, w),
        )
    }
}
custom_op!(PagedDecode: CustomOp3(s1 l1, s2 l2, s3 l3));

/// Attention of chunks of prompts over their sequences' pages of a cache, which has the chunks' own keys and values
/// ([`ReshapeAndCache`](crate::ReshapeAndCache)); a `CustomOp3` of `query`, key cache and value cache.
///
/// Keep the value from layer to layer: it keeps the workspace.
#[derive(Debug)]
pub struct PagedPrefill {
    block_table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    layout: CacheLayout,
    scale: Option<f32>,
    soft_cap: f32,
    window: usize,
    splitting: bool,
    workspace: Kept<PrefillWorkspace>,
}

impl PagedPrefill {
    /// `block_table` is `[sequences, max_blocks]`, the pages of each sequence in order, `starts` `[sequences + 1]`, the first query token of each and
    /// the end of the last, `lengths` `[sequences]`, the keys of each, whose last ones are those of its query tokens; all of `u32` or `i32`, contiguous.
    pub fn new(block_table: &Tensor, starts: &Tensor, lengths: &Tensor) -> Self {
        Self {
            block_table: block_table.clone(),
            starts: starts.clone(),
            lengths: lengths.clone(),
            layout: CacheLayout::Nhd,
            scale: None,
            soft_cap: 0.0,
            window: 0,
            splitting: false,
            workspace: Kept::default(),
        }
    }

    /// With this layout of the caches; `[blocks, block_size, heads, dim]` without it.
    pub fn layout(mut self, layout: CacheLayout) -> Self {
        self.layout = layout;
        self
    }

    /// With this factor for the scores; `1 / sqrt(dim)` without it.
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Scores become `cap · tanh(score / cap)`.
    pub fn soft_cap(mut self, cap: f32) -> Self {
        self.soft_cap = cap;
        self
    }

    /// Each query token sees the latest `window` keys up to its own only.
    pub fn window(mut self, window: usize) -> Self {
        self.window = window;
        self
    }

    /// Divides the keys of few query tokens among the GPU's blocks: short chunks of long sequences take a fraction of the time, and results differ in their last bits with
    /// what else is in the batch. Takes a workspace of 18 MB on an H200.
    pub fn splitting(mut self) -> Self {
        (self.splitting, self.workspace) = (true, Kept::default());
        self
    }

    /// For other pages, chunks and lengths, with the same workspace.
    pub fn route(&mut self, block_table: &Tensor, starts: &Tensor, lengths: &Tensor) {
        (self.block_table, self.starts, self.lengths) = (block_table.clone(), starts.clone(), lengths.clone());
    }

    /// `query` is `[tokens, heads, dim]`, the chunks one after another; the caches are of its type. Tokens of no sequence get zeros.
    ///
    /// # Errors
    /// As for [`RmsNorm::forward`](crate::RmsNorm::forward).
    pub fn forward(&self, query: &Tensor, key_cache: &Tensor, value_cache: &Tensor) -> Result<Tensor> {
        apply_one(self, &[query, key_cache, value_cache])
    }
}

impl Operation for PagedPrefill {
    const NAME: &'static str = "paged_prefill";
    // Not tokens that are of no sequence.
    #[cfg(feature = "cuda")]
    const WRITES_ALL: bool = false;

    fn extra(&self) -> Vec<&Tensor> {
        vec![&self.block_table, &self.starts, &self.lengths]
    }

    fn outputs(&self, inputs: &[&Layout], dtype: DType) -> Result<Vec<(DType, Shape)>> {
        Ok(vec![(dtype, inputs[0].shape().clone())])
    }

    fn run<T: Kernel>(&self, stream: &Stream, outputs: &mut [Lent], inputs: &[Lent]) -> Result<()> {
        let query = inputs[0].get::<T>()?;
        let (key, value) = (inputs[1].get::<T>()?.clone(), inputs[2].get::<T>()?.clone());
        let cache = KvCache::from_tensors(self.layout, key, value).map_err(Error::wrap)?;
        let (table, starts, lengths) = (inputs[3].indices()?, inputs[4].indices()?, inputs[5].indices()?);
        let out = outputs[0].get_mut::<T>()?;
        let mut options = PrefillOptions::default().soft_cap(self.soft_cap).window(self.window);
        if let Some(scale) = self.scale {
            options = options.scale(scale);
        }
        let make = if self.splitting { PrefillWorkspace::splitting } else { PrefillWorkspace::new };
        self.workspace.with(
            stream,
            |_| true,
            || make(stream.device()),
            |w| prefill(stream, out, None, query, &cache, &table, &starts, &lengths, &options, w),
        )
    }
}
custom_op!(PagedPrefill: CustomOp3(s1 l1, s2 l2, s3 l3));
