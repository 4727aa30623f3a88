//! The network: a transformer with grouped-query attention and a mixture of experts in every layer.
//!
//! `tiny-moe/train.py` defines it. A layer is nine calls: queries, keys and values in one product, rotation while keys and
//! values go to the paged cache, attention over it, its output product, residual and norm in one, the router's product
//! and gate, and the experts, of which the shared one is just another that every token goes to. The residual stream is in
//! `T` and rounded after each addition, as in the definition; router logits are in f32 from f32 weights.
//!
//! Every call only launches kernels, so a forward pass can be captured into a graph.

use super::config::Config;
use super::problem::Result;
use super::weights::Weights;
use cuda_std::Float;
use warploom::attention::{DecodeOptions, DecodeShape, DecodeWorkspace, decode};
use warploom::gemm::linear::STREAM_TOKENS;
use warploom::gemm::{LinearOptions, LinearPath, embedding, linear_with};
use warploom::kernels::moe::fused_stream::DIRECT_PAIRS;
use warploom::kv_cache::{CacheElement, KvCache, StoreAs};
use warploom::moe::{FusedOptions, FusedPath, FusedShape, GateOptions, fused, gate};
use warploom::norm::{fused_add_rms_norm, rms_norm};
use warploom::rope::{self, Scaling, rotary_and_cache};
use warploom::{Device, Stream, Tensor};

/// The types that a model may compute in: bf16, f16, f32.
pub trait Real: Float + CacheElement + StoreAs<Self> {}
impl<T: Float + CacheElement + StoreAs<T>> Real for T {}

/// Weights of a layer.
struct Layer<T> {
    input_norm: Tensor<T>,
    post_norm: Tensor<T>,
    qkv: Tensor<T>,
    o: Tensor<T>,
    gate: Tensor<f32>,
    bias: Tensor<f32>,
    /// The shared expert's are last.
    w13: Tensor<T>,
    w2: Tensor<T>,
}

/// All weights.
pub struct Model<T> {
    /// Extents.
    pub config: Config,
    embedding: Tensor<T>,
    norm: Tensor<T>,
    angles: Tensor<f32>,
    layers: Vec<Layer<T>>,
}

/// Tokens of a product at a time.
///
/// Fewer launches could do more tokens, but of kernels that add in another order. With this, [`span`] and the path of
/// the experts, prefill, decode and any batch use the same kernels, so that a sequence's tokens do not depend on how it
/// was computed.
pub const PRODUCT: usize = STREAM_TOKENS as usize;

/// Query tokens of a piece of a sequence that attention takes at once: so many that with the query heads that share a KV
/// head they are the eight rows of a product. See [`PRODUCT`].
pub fn span(config: &Config) -> usize {
    (8 / (config.num_attention_heads / config.num_key_value_heads)).max(1)
}

/// The path of the experts, by the same rule: these two add in the same order, which `Auto` does not for all numbers of pairs of tokens
/// and experts.
fn experts_path<T: Real>(stream: &Stream, c: &Config, pairs: usize) -> FusedPath {
    let on_host = stream.device().simt_options().is_some_and(|o| o.host_products);
    let whole = c.hidden_size.is_multiple_of(8) && c.moe_intermediate_size.is_multiple_of(8);
    match size_of::<T>() == 2 && !on_host && whole {
        true if pairs <= DIRECT_PAIRS => FusedPath::Direct,
        true => FusedPath::Stream16,
        false => FusedPath::Auto,
    }
}

/// `y = x · wᵀ`, [`PRODUCT`] tokens at a time, and by one kernel however many they are.
fn product<T: Real>(stream: &Stream, y: &mut Tensor<T>, x: &Tensor<T>, w: &Tensor<T>) -> Result<()> {
    let n = x.dim(0);
    let on_host = stream.device().simt_options().is_some_and(|o| o.host_products);
    let streams = size_of::<T>() == 2 && !on_host && x.dim(1).is_multiple_of(8);
    let options = LinearOptions::default().path(if streams { LinearPath::Stream } else { LinearPath::Auto });
    for first in (0..n).step_by(PRODUCT) {
        let part = |t: &Tensor<T>| t.narrow(0, first, PRODUCT.min(n - first));
        linear_with(stream, &mut part(y)?, &part(x)?, w, None, &options)?;
    }
    Ok(())
}

/// Consecutive tokens of a batch that are `sequences` pieces of `q_len` tokens, each the last ones of its sequence.
pub struct Span {
    /// The first token.
    pub first: usize,
    /// Pieces.
    pub sequences: usize,
    /// Tokens of each.
    pub q_len: usize,
    /// `[sequences, blocks]`.
    pub block_table: Tensor<i32>,
    /// `[sequences]`: keys, the piece's own included.
    pub lens: Tensor<i32>,
    /// Keys of all pieces, as far as the host knows; for statistics.
    pub keys: usize,
}

/// A batch of tokens, on the device.
pub struct Batch<'a> {
    /// `[n]`.
    pub ids: &'a Tensor<i32>,
    /// `[n]`: places in their sequences.
    pub positions: &'a Tensor<i32>,
    /// `[n]`: places in the cache.
    pub slots: &'a Tensor<i64>,
    /// All tokens, once each.
    pub spans: &'a [Span],
}

/// Bytes and multiply-adds (times two) of a launch.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// Read and written, each operand once.
    pub bytes: usize,
    /// Floating-point operations of its products.
    pub flops: usize,
}

/// Is told of everything that a forward pass does.
pub trait Observer {
    /// Something was launched.
    ///
    /// # Errors
    /// Ends the pass.
    fn launched(&mut self, stream: &Stream, what: &'static str, cost: Cost) -> Result<()>;

    /// A layer has chosen experts: ids and weights `[tokens, slots]`.
    ///
    /// # Errors
    /// Ends the pass.
    fn routed(&mut self, ids: &Tensor<i32>, weights: &Tensor<f32>) -> Result<()>;
}

/// Does not look.
pub struct Nobody;
impl Observer for Nobody {
    fn launched(&mut self, _: &Stream, _: &'static str, _: Cost) -> Result<()> {
        Ok(())
    }
    fn routed(&mut self, _: &Tensor<i32>, _: &Tensor<f32>) -> Result<()> {
        Ok(())
    }
}

/// What a forward pass works in, for up to so many tokens.
pub struct Scratch<T> {
    residual: Tensor<T>,
    /// Before and after each half of a layer.
    x: Tensor<T>,
    y: Tensor<T>,
    qkv: Tensor<T>,
    attended: Tensor<T>,
    router: Tensor<f32>,
    weights: Tensor<f32>,
    ids: Tensor<i32>,
    attention: DecodeWorkspace,
    experts: Tensor<u8>,
}

impl<T: Real> Scratch<T> {
    /// For up to `tokens` tokens in pieces of up to `q_len`, of sequences whose block table holds `max_len` tokens.
    ///
    /// # Errors
    /// If the device has no memory left.
    pub fn new(device: &Device, c: &Config, tokens: usize, q_len: usize, max_len: usize) -> Result<Self> {
        let (heads, kv_heads, dim) = (c.num_attention_heads, c.num_key_value_heads, c.head_dim);
        // The shared expert counts as a routed one that every token goes to.
        let all = c.num_experts + c.num_shared_experts;
        let experts = FusedShape::new(tokens, c.slots(), all, c.hidden_size, c.moe_intermediate_size);
        Ok(Self {
            residual: Tensor::zeros(device, &[tokens, c.hidden_size])?,
            x: Tensor::zeros(device, &[tokens, c.hidden_size])?,
            y: Tensor::zeros(device, &[tokens, c.hidden_size])?,
            qkv: Tensor::zeros(device, &[tokens, c.qkv_heads() * dim])?,
            attended: Tensor::zeros(device, &[tokens, heads * dim])?,
            router: Tensor::zeros(device, &[tokens, c.num_experts])?,
            weights: Tensor::zeros(device, &[tokens, c.slots()])?,
            ids: Tensor::zeros(device, &[tokens, c.slots()])?,
            experts: Tensor::zeros(device, &[experts.workspace_bytes(T::DTYPE)])?,
            // Pieces that are shorter than `q_len` may be as many as there are tokens, but take one call each.
            attention: DecodeWorkspace::new(
                device,
                DecodeShape::new(tokens.div_ceil(q_len), heads, kv_heads, dim, max_len).q_len(q_len),
            )?,
        })
    }
}

impl<T: Real> Model<T> {
    /// Brings a model to the device.
    ///
    /// # Errors
    /// [`Problem::Input`](super::problem::Problem::Input) if the file does not hold what the configuration asks for.
    pub fn load(device: &Device, config: &Config, file: &Weights) -> Result<Self> {
        let c = config;
        let (hidden, dim) = (c.hidden_size, c.head_dim);
        let (experts, inter, shared) = (c.num_experts, c.moe_intermediate_size, c.num_shared_experts);
        let mut known = vec!["emb".to_string(), "norm".into()];
        let mut layers = vec![];
        for l in 0..c.num_layers {
            let mut name = |part: &str| {
                known.push(format!("layers.{l}.{part}"));
                format!("layers.{l}.{part}")
            };
            let mut experts_of = |routed: &str, shared_name: &str, rows: usize, columns: usize| -> Result<Tensor<T>> {
                let mut all = file.matrix::<T>(&name(routed), &[experts, rows, columns])?;
                if shared > 0 {
                    all.extend(file.matrix::<T>(&name(shared_name), &[rows, columns])?);
                }
                Ok(Tensor::from_slice(device, &all, &[experts + shared, rows, columns])?)
            };
            let (w13, w2) = (experts_of("w13", "s13", 2 * inter, hidden)?, experts_of("w2", "s2", hidden, inter)?);
            layers.push(Layer {
                input_norm: file.load(device, &name("input_norm"), &[hidden])?,
                post_norm: file.load(device, &name("post_norm"), &[hidden])?,
                qkv: file.load(device, &name("qkv"), &[c.qkv_heads() * dim, hidden])?,
                o: file.load(device, &name("o"), &[hidden, c.num_attention_heads * dim])?,
                gate: file.load_f32(device, &name("gate"), &[experts, hidden])?,
                bias: file.load_f32(device, &name("bias"), &[experts])?,
                w13,
                w2,
            });
        }
        if let Some(name) = file.names()?.iter().find(|name| !known.contains(name)) {
            return file.complain(&format!("tensor `{name}` belongs to no model that config.json describes"));
        }
        Ok(Self {
            embedding: file.load(device, "emb", &[c.vocab_size, hidden])?,
            norm: file.load(device, "norm", &[hidden])?,
            angles: rope::cache(device, c.max_position_embeddings, dim, c.rope_theta, Scaling::None)?,
            layers,
            config: config.clone(),
        })
    }

    /// Bytes of all weights.
    pub fn bytes(&self) -> usize {
        let layer = |l: &Layer<T>| {
            let of_t = l.input_norm.len() + l.post_norm.len() + l.qkv.len() + l.o.len() + l.w13.len() + l.w2.len();
            of_t * size_of::<T>() + (l.gate.len() + l.bias.len()) * 4
        };
        let ends = (self.embedding.len() + self.norm.len()) * size_of::<T>();
        ends + self.layers.iter().map(layer).sum::<usize>()
    }

    /// All layers and the last norm: the result is `[n, hidden]`, in `scratch`.
    ///
    /// # Errors
    /// Those of the kernels' functions.
    pub fn forward(
        &self,
        stream: &Stream,
        batch: &Batch<'_>,
        caches: &mut [KvCache<T>],
        scratch: &mut Scratch<T>,
        observer: &mut dyn Observer,
    ) -> Result<Tensor<T>> {
        let c = &self.config;
        let n = batch.ids.len();
        let (heads, kv_heads, dim) = (c.num_attention_heads, c.num_key_value_heads, c.head_dim);
        let size = size_of::<T>();
        let rows = |of: &Tensor<T>| of.narrow(0, 0, n);
        let (mut x, mut y) = (rows(&scratch.x)?, rows(&scratch.y)?);
        let (mut residual, mut qkv) = (rows(&scratch.residual)?, rows(&scratch.qkv)?);
        let attended = rows(&scratch.attended)?;
        let (mut router, mut weights) = (scratch.router.narrow(0, 0, n)?, scratch.weights.narrow(0, 0, n)?);
        let mut ids = scratch.ids.narrow(0, 0, n)?;
        let width = qkv.dim(1);
        let head_view = |first: usize, count: usize| qkv.as_strided(&[n, count, dim], &[width, dim, 1], first * dim);
        let (mut q, k, v) = (head_view(0, heads)?, head_view(heads, kv_heads)?, head_view(heads + kv_heads, kv_heads)?);
        let cost_of =
            |w: &Tensor<T>| Cost { bytes: (w.len() + n * (w.dim(0) + w.dim(1))) * size, flops: 2 * n * w.len() };
        let angles = &self.angles;
        let moved = |elements: usize| Cost { bytes: elements * size, flops: 0 };

        embedding(stream, &mut residual, &self.embedding, batch.ids)?;
        observer.launched(stream, "embedding", moved(2 * residual.len()))?;
        rms_norm(stream, &mut x, &residual, self.layers.first().map(|l| &l.input_norm), c.rms_norm_eps)?;
        observer.launched(stream, "rms_norm", moved(2 * x.len()))?;
        for (l, layer) in self.layers.iter().enumerate() {
            product(stream, &mut qkv, &x, &layer.qkv)?;
            observer.launched(stream, "linear qkv", cost_of(&layer.qkv))?;
            let (positions, slots, cache) = (batch.positions, batch.slots, &mut caches[l]);
            rotary_and_cache(stream, &mut q, cache, None, &k, &v, positions, angles, slots, &Default::default())?;
            observer.launched(stream, "rotary_and_cache", moved(2 * n * c.qkv_heads() * dim))?;
            for span in batch.spans {
                let shape = [span.sequences, span.q_len, heads, dim];
                let (at, to) = (span.first * width, span.first * heads * dim);
                let q = qkv.as_strided(&shape, &[span.q_len * width, width, dim, 1], at)?;
                let strides = [span.q_len * heads * dim, heads * dim, dim, 1];
                let mut out = attended.as_strided(&shape, &strides, to)?;
                let workspace = &mut scratch.attention;
                let (table, lens) = (&span.block_table, &span.lens);
                decode(stream, &mut out, None, &q, &caches[l], table, lens, &DecodeOptions::default(), workspace)?;
                let (queries, pairs) = (span.sequences * span.q_len, span.keys * span.q_len);
                let bytes = (2 * queries * heads + 2 * span.keys * kv_heads) * dim * size;
                observer.launched(stream, "attention", Cost { bytes, flops: 4 * pairs * heads * dim })?;
            }
            product(stream, &mut x, &attended, &layer.o)?;
            observer.launched(stream, "linear o", cost_of(&layer.o))?;
            fused_add_rms_norm(stream, &mut x, &mut residual, Some(&layer.post_norm), c.rms_norm_eps)?;
            observer.launched(stream, "fused_add_rms_norm", moved(4 * x.len()))?;
            linear_with(stream, &mut router, &x, &layer.gate, None, &LinearOptions::default())?;
            let flops = 2 * n * layer.gate.len();
            observer.launched(stream, "linear router", Cost { bytes: layer.gate.len() * 4 + x.len() * size, flops })?;
            let options = GateOptions::default()
                .bias(&layer.bias)
                .groups(c.num_expert_groups, c.topk_groups)
                .renormalize(c.renormalize)
                .routed_scaling_factor(c.routed_scaling_factor)
                .scale_output(true)
                .shared_experts(c.num_shared_experts);
            gate(stream, &mut ids, &mut weights, None, &router, c.experts_per_token, &options)?;
            observer.launched(stream, "moe::gate", Cost { bytes: router.len() * 4 + ids.len() * 8, flops: 0 })?;
            observer.routed(&ids, &weights)?;
            let (w13, w2) = (&layer.w13, &layer.w2);
            let options = FusedOptions::default().path(experts_path::<T>(stream, c, n * c.slots()));
            fused(stream, &mut y, &x, w13, w2, &ids, &weights, &options, &mut scratch.experts)?;
            let expert = 3 * c.moe_intermediate_size * c.hidden_size;
            let used = c.num_experts.min(n * c.experts_per_token) + c.num_shared_experts;
            let cost = Cost { bytes: (used * expert + 2 * x.len()) * size, flops: 2 * n * c.slots() * expert };
            observer.launched(stream, "moe::fused", cost)?;
            std::mem::swap(&mut x, &mut y);
            let next = self.layers.get(l + 1).map_or(&self.norm, |next| &next.input_norm);
            fused_add_rms_norm(stream, &mut x, &mut residual, Some(next), c.rms_norm_eps)?;
            observer.launched(stream, "fused_add_rms_norm", moved(4 * x.len()))?;
        }
        Ok(x)
    }

    /// `logits[r] = x[r] · embeddingᵀ`.
    ///
    /// # Errors
    /// Those of [`linear`].
    pub fn logits(
        &self,
        stream: &Stream,
        logits: &mut Tensor<T>,
        x: &Tensor<T>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        product(stream, logits, x, &self.embedding)?;
        let (w, n) = (self.embedding.len(), x.dim(0));
        let bytes = (w + x.len() + logits.len()) * size_of::<T>();
        observer.launched(stream, "linear logits", Cost { bytes, flops: 2 * n * w })
    }
}
