//! Runs batches of sequences on a device.
//!
//! A decode step has a *row* for each sequence. Last token, length and block table of every row live on the device; a step
//! grows the lengths ([`advance`]), runs the network and samples, and what it samples is what the next step reads. It is
//! captured once for each *bucket*, a power of two of rows, and launched as a graph. The first step of a bucket runs as it is:
//! it loads kernels, which a capture cannot. Rows without a sequence have length 0. The host only writes block tables, when a
//! sequence needs another block, and all of the state when sequences join or leave.
//!
//! Tokens come back through pinned memory: [`Executor::launch`] submits a step, [`Executor::read`] waits for the oldest
//! one that was not read yet.

use super::config::Config;
use super::model::{Batch, Model, Nobody, Observer, Real, Scratch, Span, span};
use super::problem::Result;
use std::collections::{HashMap, VecDeque};
use warploom::gemm::embedding;
use warploom::kv_cache::{CacheLayout, CacheShape, KvCache, advance};
use warploom::sampling::{self, top_k_top_p};
use warploom::{Device, Event, Graph, Pinned, Stream, Tensor};

/// Steps that may be submitted and not read.
pub const IN_FLIGHT: usize = 2;

/// How tokens are drawn. The default is greedy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 is off.
    pub top_k: usize,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    /// Key of the random numbers; a token's position says which number it takes, whatever sequences run beside it.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }
}

/// Sizes of an executor.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// The most sequences of a decode step.
    pub rows: usize,
    /// The most tokens of a prefill step.
    pub chunk: usize,
    /// Blocks of the cache.
    pub blocks: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// The most tokens of a sequence.
    pub max_len: usize,
}

/// Tokens of a sequence whose keys and values are to be computed.
#[derive(Clone, Debug)]
pub struct Chunk<'a> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// Position of the first.
    pub start: usize,
    /// The sequence's blocks.
    pub blocks: &'a [u32],
    /// Whether the token after the last one is wanted.
    pub sample: bool,
}

/// The sequence of a row.
#[derive(Clone, Debug)]
pub struct Row<'a> {
    /// Its last token, whose keys and values are not computed yet.
    pub token: u32,
    /// Tokens before that.
    pub len: usize,
    /// Its blocks.
    pub blocks: &'a [u32],
}

/// What the [engine](super::engine) needs of a device. Tests have one that only counts.
pub trait Executor {
    /// Sizes.
    fn sizes(&self) -> Sizes;

    /// Computes chunks, of [`Sizes::chunk`] tokens at most together and of no more sequences than rows, and samples where a chunk asks for it: the tokens in
    /// order of those chunks. Waits for them.
    ///
    /// # Errors
    /// Those of the device.
    fn prefill(&mut self, chunks: &[Chunk<'_>]) -> Result<Vec<u32>>;

    /// Replaces all rows. No step is in flight.
    ///
    /// # Errors
    /// Those of the device.
    fn set_rows(&mut self, rows: &[Option<Row<'_>>]) -> Result<()>;

    /// Gives a row one more block, the `index`-th.
    fn add_block(&mut self, row: usize, index: usize, block: u32);

    /// Submits a decode step.
    ///
    /// # Errors
    /// Those of the device.
    fn launch(&mut self) -> Result<()>;

    /// Steps submitted and not read.
    fn in_flight(&self) -> usize;

    /// Waits for the oldest step in flight; its tokens, one a row.
    ///
    /// # Errors
    /// Those of the device.
    fn read(&mut self) -> Result<Vec<u32>>;
}

/// State of all rows, on the device.
struct Rows {
    tokens: Tensor<i32>,
    lens: Tensor<i32>,
    positions: Tensor<i32>,
    slots: Tensor<i64>,
    /// Positions once more, as offsets of random numbers.
    counters: Tensor<u64>,
    /// `[rows, blocks of the longest sequence]`.
    block_table: Tensor<i32>,
}

/// A step in flight.
struct Step {
    tokens: Pinned<i32>,
    done: Event,
}

/// An executor of a model.
pub struct ModelExecutor<T> {
    model: Model<T>,
    device: Device,
    stream: Stream,
    sizes: Sizes,
    sampling: Sampling,
    caches: Vec<KvCache<T>>,
    decode: Scratch<T>,
    prefill: Scratch<T>,
    logits: Tensor<T>,
    /// Last tokens of prefilled sequences.
    last: Tensor<T>,
    workspace: sampling::SamplingWorkspace,
    rows: Rows,
    /// The block table as it shall be, copies that steps in flight read, and whether the device has the latest.
    table: Vec<i32>,
    tables: VecDeque<Pinned<i32>>,
    table_changed: bool,
    bucket: usize,
    graphs: HashMap<usize, Graph>,
    flying: VecDeque<Step>,
    spare: Vec<Step>,
    /// Logits of the last tokens of the prompts that were prefilled, if asked for, in order.
    pub kept_logits: Option<Vec<Vec<f32>>>,
}

impl<T: Real> ModelExecutor<T> {
    /// An executor on a stream of its own.
    ///
    /// # Errors
    /// If the device has no memory left.
    pub fn new(device: &Device, model: Model<T>, sizes: Sizes, sampling: Sampling) -> Result<Self> {
        let c = model.config.clone();
        let Sizes { rows, chunk, blocks, block_size, max_len } = sizes;
        let row_blocks = max_len.div_ceil(block_size);
        let shape = CacheShape::new(blocks, block_size, c.num_key_value_heads, c.head_dim);
        let caches: warploom::Result<_> =
            (0..c.num_layers).map(|_| KvCache::zeros(device, CacheLayout::Nhd, shape)).collect();
        let pinned = |n| Pinned::<i32>::zeros(device, n);
        let step = |_| -> Result<Step> { Ok(Step { tokens: pinned(rows)?, done: Event::new(device)? }) };
        Ok(Self {
            device: device.clone(),
            stream: Stream::new(device)?,
            sizes,
            sampling,
            caches: caches?,
            decode: Scratch::new(device, &c, rows, 1, row_blocks * block_size)?,
            prefill: Scratch::new(device, &c, chunk, span(&c), row_blocks * block_size)?,
            logits: Tensor::zeros(device, &[rows, c.vocab_size])?,
            last: Tensor::zeros(device, &[rows, c.hidden_size])?,
            workspace: sampling::SamplingWorkspace::new(device, rows, c.vocab_size)?,
            rows: Rows {
                tokens: Tensor::zeros(device, &[rows])?,
                lens: Tensor::zeros(device, &[rows])?,
                positions: Tensor::zeros(device, &[rows])?,
                slots: Tensor::zeros(device, &[rows])?,
                counters: Tensor::zeros(device, &[rows])?,
                block_table: Tensor::zeros(device, &[rows, row_blocks])?,
            },
            table: vec![-1; rows * row_blocks],
            tables: (0..=IN_FLIGHT).map(|_| pinned(rows * row_blocks)).collect::<warploom::Result<_>>()?,
            table_changed: false,
            bucket: 0,
            graphs: HashMap::new(),
            flying: VecDeque::new(),
            spare: (0..IN_FLIGHT).map(step).collect::<Result<_>>()?,
            kept_logits: None,
            model,
        })
    }

    /// The model's extents.
    pub fn config(&self) -> &Config {
        &self.model.config
    }

    /// Bytes of weights, and of the cache.
    pub fn memory(&self) -> (usize, usize) {
        let cache = |c: &KvCache<T>| (c.key().len() + c.value().len()) * size_of::<T>();
        (self.model.bytes(), self.caches.iter().map(cache).sum())
    }

    fn row_blocks(&self) -> usize {
        self.rows.block_table.dim(1)
    }

    /// Logits and routing of the whole of a sequence, for comparisons: in order of layers, ids and weights of each token.
    ///
    /// # Errors
    /// Those of the device.
    pub fn prefill_observed(&mut self, chunks: &[Chunk<'_>], observer: &mut dyn Observer) -> Result<Vec<u32>> {
        let c = self.config().clone();
        let Sizes { block_size, .. } = self.sizes;
        let q = span(&c);
        let n: usize = chunks.iter().map(|c| c.tokens.len()).sum();
        let (mut ids, mut positions, mut slots, mut last) = (vec![], vec![], vec![], vec![]);
        let mut spans = vec![];
        for chunk in chunks {
            let first = ids.len();
            ids.extend(chunk.tokens.iter().map(|&t| t as i32));
            for p in chunk.start..chunk.start + chunk.tokens.len() {
                positions.push(p as i32);
                slots.push(chunk.blocks[p / block_size] as i64 * block_size as i64 + (p % block_size) as i64);
            }
            if chunk.sample {
                last.push(ids.len() as i32 - 1);
            }
            // Whole pieces in one call, the rest in another.
            let (whole, rest) = (chunk.tokens.len() / q, chunk.tokens.len() % q);
            for (skip, sequences, q_len) in [(0, whole, q), (whole * q, 1, rest)] {
                if sequences * q_len > 0 {
                    spans.push(self.span(first + skip, chunk.start + skip, sequences, q_len, chunk.blocks)?);
                }
            }
        }
        let d = &self.device;
        let ids = Tensor::from_slice(d, &ids, &[n])?;
        let slots = Tensor::from_slice(d, &slots, &[n])?;
        let positions_there = Tensor::from_slice(d, &positions, &[n])?;
        let batch = Batch { ids: &ids, positions: &positions_there, slots: &slots, spans: &spans };
        let x = self.model.forward(&self.stream, &batch, &mut self.caches, &mut self.prefill, observer)?;
        if last.is_empty() {
            // The batch's tensors must outlive the work.
            self.stream.synchronize()?;
            return Ok(vec![]);
        }
        let k = last.len();
        let counters: Vec<u64> = last.iter().map(|&t| positions[t as usize] as u64).collect();
        let counters = Tensor::from_slice(d, &counters, &[k])?;
        let last = Tensor::from_slice(d, &last, &[k])?;
        let mut rows = self.last.narrow(0, 0, k)?;
        embedding(&self.stream, &mut rows, &x, &last)?;
        let mut logits = self.logits.narrow(0, 0, k)?;
        self.model.logits(&self.stream, &mut logits, &rows, observer)?;
        let mut tokens = Tensor::<i32>::zeros(d, &[k])?;
        sample(&self.stream, &mut tokens, &logits, &counters, &mut self.workspace, &self.sampling)?;
        if let Some(kept) = &mut self.kept_logits {
            let all: Vec<f32> = logits.to_vec()?.into_iter().map(T::to_f32).collect();
            kept.extend(all.chunks(c.vocab_size).map(<[f32]>::to_vec));
        }
        Ok(tokens.to_vec()?.into_iter().map(|t| t as u32).collect())
    }

    fn span(&self, first: usize, start: usize, sequences: usize, q_len: usize, blocks: &[u32]) -> Result<Span> {
        let width = self.row_blocks();
        let row = blocks.iter().map(|&b| b as i32).chain(std::iter::repeat(-1)).take(width);
        let table: Vec<i32> = row.collect::<Vec<_>>().repeat(sequences);
        let lens: Vec<i32> = (1..=sequences).map(|i| (start + i * q_len) as i32).collect();
        Ok(Span {
            first,
            sequences,
            q_len,
            keys: lens.iter().sum::<i32>() as usize,
            block_table: Tensor::from_slice(&self.device, &table, &[sequences, width])?,
            lens: Tensor::from_slice(&self.device, &lens, &[sequences])?,
        })
    }

    /// One decode step of `bucket` rows, not captured; `keys` is for statistics.
    ///
    /// # Errors
    /// Those of the device.
    pub fn decode_observed(&mut self, bucket: usize, keys: usize, observer: &mut dyn Observer) -> Result<()> {
        let stream = self.stream.clone();
        decode_step(self, &stream, bucket, keys, observer)
    }

    /// Launches the graph of the present rows again and again; it was launched before.
    ///
    /// # Errors
    /// Those of the device.
    pub fn replay(&self, steps: usize) -> Result<()> {
        let graph = &self.graphs[&self.bucket];
        Ok((0..steps).try_for_each(|_| graph.launch(&self.stream))?)
    }

    /// Rows of the steps that are launched now.
    pub fn bucket(&self) -> usize {
        self.bucket
    }

    /// The stream of everything.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }
}

/// What is captured.
fn decode_step<T: Real>(
    e: &mut ModelExecutor<T>,
    stream: &Stream,
    bucket: usize,
    keys: usize,
    observer: &mut dyn Observer,
) -> Result<()> {
    let rows = &e.rows;
    let part = |t: &Tensor<i32>| t.narrow(0, 0, bucket);
    let (mut tokens, mut lens, mut positions) = (part(&rows.tokens)?, part(&rows.lens)?, part(&rows.positions)?);
    let (mut slots, mut counters) = (rows.slots.narrow(0, 0, bucket)?, rows.counters.narrow(0, 0, bucket)?);
    let block_table = part(&rows.block_table)?;
    let shape = e.caches[0].shape();
    advance(stream, &mut lens, &mut positions, &mut slots, Some(&mut counters), None, &block_table, shape)?;
    observer.launched(stream, "kv_cache::advance", Default::default())?;
    let span = Span { first: 0, sequences: bucket, q_len: 1, block_table, lens, keys };
    let batch = Batch { ids: &tokens, positions: &positions, slots: &slots, spans: std::slice::from_ref(&span) };
    let x = e.model.forward(stream, &batch, &mut e.caches, &mut e.decode, observer)?;
    let mut logits = e.logits.narrow(0, 0, bucket)?;
    e.model.logits(stream, &mut logits, &x, observer)?;
    sample(stream, &mut tokens, &logits, &counters, &mut e.workspace, &e.sampling)?;
    let cost = super::model::Cost { bytes: logits.len() * size_of::<T>(), flops: 0 };
    observer.launched(stream, "sampling", cost)
}

fn sample<T: Real>(
    stream: &Stream,
    tokens: &mut Tensor<i32>,
    logits: &Tensor<T>,
    counters: &Tensor<u64>,
    workspace: &mut sampling::SamplingWorkspace,
    s: &Sampling,
) -> Result<()> {
    let mut options = sampling::SamplingOptions::default()
        .temperature(s.temperature)
        .top_p(s.top_p)
        .min_p(s.min_p)
        .seed(s.seed)
        .subsequence(0)
        .offset(counters);
    if s.top_k > 0 {
        options = options.top_k(s.top_k.min(logits.dim(1)) as i32);
    }
    Ok(top_k_top_p(stream, tokens, None, logits, &options, workspace)?)
}

impl<T: Real> Executor for ModelExecutor<T> {
    fn sizes(&self) -> Sizes {
        self.sizes
    }

    fn prefill(&mut self, chunks: &[Chunk<'_>]) -> Result<Vec<u32>> {
        self.prefill_observed(chunks, &mut Nobody)
    }

    fn set_rows(&mut self, rows: &[Option<Row<'_>>]) -> Result<()> {
        assert!(self.flying.is_empty(), "rows are replaced between steps");
        let (n, width) = (self.sizes.rows, self.row_blocks());
        let (mut tokens, mut lens) = (vec![0; n], vec![0; n]);
        self.table.fill(-1);
        for (r, row) in rows.iter().enumerate() {
            if let Some(row) = row {
                (tokens[r], lens[r]) = (row.token as i32, row.len as i32);
                for (to, &block) in self.table[r * width..].iter_mut().zip(row.blocks) {
                    *to = block as i32;
                }
            }
        }
        self.rows.tokens.copy_from_slice(&tokens)?;
        self.rows.lens.copy_from_slice(&lens)?;
        self.rows.block_table.copy_from_slice(&self.table)?;
        self.table_changed = false;
        let used = rows.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        self.bucket = if used == 0 { 0 } else { used.next_power_of_two().min(n) };
        Ok(())
    }

    fn add_block(&mut self, row: usize, index: usize, block: u32) {
        let width = self.row_blocks();
        self.table[row * width + index] = block as i32;
        self.table_changed = true;
    }

    fn launch(&mut self) -> Result<()> {
        let bucket = self.bucket;
        let mut step = self.spare.pop().expect("no more steps in flight than there is room for");
        if self.table_changed {
            let mut pinned = self.tables.pop_front().expect("a table more than steps in flight");
            pinned.copy_from_slice(&self.table);
            // SAFETY: a table is written again only when this one has come round, which is after the step was read.
            unsafe { self.stream.upload(&mut self.rows.block_table, &pinned)? };
            self.tables.push_back(pinned);
            self.table_changed = false;
        }
        if let Some(graph) = self.graphs.get(&bucket) {
            graph.launch(&self.stream)?;
        } else {
            let stream = self.stream.clone();
            decode_step(self, &stream, bucket, 0, &mut Nobody)?;
            let mut outcome = Ok(());
            let graph = Graph::capture(&stream, |s| {
                outcome = decode_step(self, s, bucket, 0, &mut Nobody);
                Ok(())
            })?;
            outcome?;
            self.graphs.insert(bucket, graph);
        }
        // SAFETY: the step owns the memory, and is not touched before its event has happened.
        unsafe { self.stream.download(&mut step.tokens, &self.rows.tokens)? };
        self.stream.record_event(&step.done)?;
        self.flying.push_back(step);
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.flying.len()
    }

    fn read(&mut self) -> Result<Vec<u32>> {
        let step = self.flying.pop_front().expect("a step in flight");
        step.done.synchronize()?;
        let tokens = step.tokens.iter().map(|&t| t as u32).collect();
        self.spare.push(step);
        Ok(tokens)
    }
}

impl<T> Drop for ModelExecutor<T> {
    fn drop(&mut self) {
        // Steps in flight write to memory that goes away now.
        let _ = self.stream.synchronize();
    }
}
