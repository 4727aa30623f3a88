//! Who runs when: continuous batching over a paged cache.
//!
//! Requests wait in order. One is admitted when there is a free row and when the cache has room for its tokens; its
//! prompt, less what the cache knows from other prompts, is computed in chunks between decode steps, and then it
//! decodes with the others, one token a step, until it has enough, its end comes, or it is cancelled. Whoever leaves makes room
//! between two steps.
//!
//! Blocks are allocated when a sequence grows into them. If none is left, the youngest sequence is *preempted*: it gives
//! its blocks back and waits, first in line, to compute its tokens once more. What a sequence draws depends on its own
//! tokens and positions, so it goes on as if nothing had happened.
//!
//! The engine only counts and allocates. It launches a step before it reads the one before, so a device never waits for it;
//! what a sequence gets beyond its end in that one step is thrown away.

use super::executor::{Chunk, Executor, IN_FLIGHT, Row};
use super::problem::{Result, input};
use serde::Serialize;
use std::collections::VecDeque;
use warploom::kv_cache::{AllocatorError, BlockAllocator, Sequence};

/// Number of a request: how many came before.
pub type Id = usize;

/// Tokens to begin with, and how many to add.
#[derive(Clone, Debug)]
pub struct Request {
    /// At least one.
    pub prompt: Vec<u32>,
    /// How many tokens to generate at most.
    pub tokens: usize,
    /// The token that ends the sequence.
    pub eos: Option<u32>,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// It has as many tokens as were asked for.
    Length,
    /// It came to its end.
    Eos,
    /// It fills the context.
    Context,
    /// It fills all blocks of the cache.
    Cache,
    /// It was cancelled.
    Cancelled,
}

/// What happened in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// All tokens of a sequence so far have been computed: its prompt's, or after a preemption everything.
    Prefilled(Id),
    /// A sequence has a new token.
    Token(Id, u32),
    /// A sequence is done.
    Finished(Id, Finish),
}

/// A request that is not done.
struct Running {
    id: Id,
    /// Prompt and what was generated.
    tokens: Vec<u32>,
    /// Length at which it is done, and why it is then.
    end: usize,
    full: Finish,
    eos: Option<u32>,
}

/// An admitted one. Its blocks hold keys and values of `computed` tokens.
struct Admitted {
    request: Running,
    blocks: Sequence,
    computed: usize,
    row: usize,
    /// Tokens of steps in flight.
    ahead: usize,
    /// Whether its row is the device's.
    decoding: bool,
}

/// What the engine did, for statistics.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Decode steps.
    pub steps: usize,
    /// Prefill steps.
    pub prefills: usize,
    /// Tokens computed in prefill steps.
    pub prefilled: usize,
    /// Tokens of prompts that the cache knew.
    pub shared: usize,
    /// Sequences preempted.
    pub preempted: usize,
    /// The most sequences in a step.
    pub most: usize,
}

/// Continuous batching on an executor.
pub struct Engine<E> {
    executor: E,
    blocks: BlockAllocator,
    waiting: VecDeque<Running>,
    /// The oldest first.
    running: Vec<Admitted>,
    next: Id,
    /// Whether the device's rows are not those of `running`.
    stale: bool,
    counts: Counts,
}

impl<E: Executor> Engine<E> {
    /// An engine without requests.
    ///
    /// # Errors
    /// If the executor's cache has no blocks.
    pub fn new(executor: E) -> Result<Self> {
        let sizes = executor.sizes();
        let blocks = BlockAllocator::new(sizes.blocks, sizes.block_size)?;
        let counts = Counts::default();
        Ok(Self { executor, blocks, waiting: VecDeque::new(), running: vec![], next: 0, stale: false, counts })
    }

    /// Takes a request.
    ///
    /// # Errors
    /// [`Problem::Input`](super::problem::Problem::Input) if the prompt is empty or leaves no room in the context or the
    /// cache.
    pub fn submit(&mut self, request: Request) -> Result<Id> {
        let sizes = self.executor.sizes();
        let room = sizes.max_len.min(sizes.blocks * sizes.block_size);
        let prompt = request.prompt.len();
        if prompt == 0 {
            return input("a prompt has no tokens");
        }
        if prompt >= room {
            let what = if room < sizes.max_len { "cache" } else { "context" };
            return input(format!(
                "the prompt has {prompt} tokens, but the {what} holds {room} with at least one to come"
            ));
        }
        let id = self.next;
        self.next += 1;
        let wanted = prompt.saturating_add(request.tokens);
        let full = match room {
            _ if wanted <= room => Finish::Length,
            _ if room < sizes.max_len => Finish::Cache,
            _ => Finish::Context,
        };
        self.waiting.push_back(Running { id, tokens: request.prompt, end: room.min(wanted), full, eos: request.eos });
        Ok(id)
    }

    /// Whether there is nothing left to do.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.executor.in_flight() == 0
    }

    /// Blocks that no sequence holds.
    pub fn free_blocks(&self) -> usize {
        self.blocks.available()
    }

    /// What was done so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The executor.
    pub fn executor(&mut self) -> &mut E {
        &mut self.executor
    }

    /// Ends a request, if it is not done yet.
    ///
    /// # Errors
    /// None but those of a broken allocator.
    pub fn cancel(&mut self, id: Id) -> Result<Option<Event>> {
        if let Some(i) = self.waiting.iter().position(|r| r.id == id) {
            self.waiting.remove(i);
        } else if let Some(i) = self.running.iter().position(|r| r.request.id == id) {
            self.leave(i)?;
        } else {
            return Ok(None);
        }
        Ok(Some(Event::Finished(id, Finish::Cancelled)))
    }

    /// Preempts the youngest sequence, as the engine does itself when blocks run out. Returns what steps in flight brought.
    ///
    /// # Errors
    /// Those of the device.
    pub fn preempt(&mut self) -> Result<Vec<Event>> {
        let events = self.drain()?;
        if let Some(last) = self.running.len().checked_sub(1) {
            self.preempt_at(last)?;
        }
        Ok(events)
    }

    /// One step: admits, computes a chunk of prompts if there are any, and decodes.
    ///
    /// # Errors
    /// Those of the device.
    pub fn step(&mut self) -> Result<Vec<Event>> {
        let mut events = vec![];
        self.admit()?;
        self.prefill(&mut events)?;
        if self.stale {
            events.extend(self.drain()?);
            // A drained step may have ended sequences, whose rows are free now.
            self.admit()?;
        }
        self.decode(&mut events)?;
        Ok(events)
    }

    /// All steps until nothing is left.
    ///
    /// # Errors
    /// Those of the device.
    pub fn run(&mut self) -> Result<Vec<Event>> {
        let mut events = vec![];
        while !self.is_idle() {
            events.extend(self.step()?);
        }
        Ok(events)
    }

    /// Admits whoever there is room for, in order.
    fn admit(&mut self) -> Result<()> {
        while let Some(first) = self.waiting.front() {
            let rows = self.executor.sizes().rows;
            let Some(row) = (0..rows).find(|row| self.running.iter().all(|r| r.row != *row)) else {
                return Ok(());
            };
            let blocks = match self.blocks.start(&first.tokens, 0) {
                Ok(blocks) => blocks,
                Err(AllocatorError::OutOfBlocks { .. }) if !self.running.is_empty() => return Ok(()),
                Err(e) => return Err(e.into()),
            };
            let request = self.waiting.pop_front().expect("the first one");
            let computed = blocks.computed();
            self.counts.shared += computed;
            self.running.push(Admitted { request, blocks, computed, row, ahead: 0, decoding: false });
        }
        Ok(())
    }

    /// Computes up to a chunk of tokens of sequences that do not decode yet.
    fn prefill(&mut self, events: &mut Vec<Event>) -> Result<()> {
        let mut left = self.executor.sizes().chunk;
        let (mut chunks, mut who) = (vec![], vec![]);
        for (i, r) in self.running.iter().enumerate().filter(|(_, r)| !r.decoding) {
            let end = r.request.tokens.len().min(r.computed + left);
            if end == r.computed {
                break;
            }
            left -= end - r.computed;
            let sample = end == r.request.tokens.len();
            let tokens = &r.request.tokens[r.computed..end];
            chunks.push(Chunk { tokens, start: r.computed, blocks: r.blocks.blocks(), sample });
            who.push((i, end, sample));
        }
        if chunks.is_empty() {
            return Ok(());
        }
        let mut sampled = self.executor.prefill(&chunks)?.into_iter();
        self.counts.prefills += 1;
        self.counts.prefilled += chunks.iter().map(|c| c.tokens.len()).sum::<usize>();
        let mut done = vec![];
        for (i, end, sample) in who {
            let r = &mut self.running[i];
            r.computed = end;
            self.blocks.mark_computed(&mut r.blocks, end)?;
            if sample {
                r.decoding = true;
                self.stale = true;
                events.push(Event::Prefilled(r.request.id));
                let token = sampled.next().expect("a token for each chunk that asks");
                if let Some(finish) = self.take(i, token, events) {
                    done.push((self.running[i].request.id, finish));
                }
            }
        }
        for (id, finish) in done {
            let i = self.running.iter().position(|r| r.request.id == id).expect("still there");
            self.leave(i)?;
            events.push(Event::Finished(id, finish));
        }
        Ok(())
    }

    /// Gives a sequence a token; why it is done now, if it is.
    fn take(&mut self, i: usize, token: u32, events: &mut Vec<Event>) -> Option<Finish> {
        let r = &mut self.running[i].request;
        // No tokens at all were asked for.
        if r.tokens.len() >= r.end {
            return Some(Finish::Length);
        }
        r.tokens.push(token);
        events.push(Event::Token(r.id, token));
        if r.eos == Some(token) { Some(Finish::Eos) } else { (r.tokens.len() >= r.end).then_some(r.full) }
    }

    /// Submits a decode step if anybody can use one, and reads those that are due.
    fn decode(&mut self, events: &mut Vec<Event>) -> Result<()> {
        self.grow(events)?;
        // All that a sequence may still get is in flight already, for each of them.
        let wanted = |r: &Admitted| r.decoding && r.request.tokens.len() + r.ahead < r.request.end;
        if !self.running.iter().any(wanted) {
            events.extend(self.drain()?);
            return Ok(());
        }
        if self.stale {
            let mut rows = vec![None; self.executor.sizes().rows];
            for r in self.running.iter().filter(|r| r.decoding) {
                let (&token, before) = r.request.tokens.split_last().expect("prompts are not empty");
                rows[r.row] = Some(Row { token, len: before.len(), blocks: r.blocks.blocks() });
            }
            self.executor.set_rows(&rows)?;
            self.stale = false;
        }
        self.executor.launch()?;
        let mut together = 0;
        for r in self.running.iter_mut().filter(|r| r.decoding) {
            r.ahead += 1;
            together += 1;
        }
        self.counts.steps += 1;
        self.counts.most = self.counts.most.max(together);
        while self.executor.in_flight() >= IN_FLIGHT {
            self.read(events)?;
        }
        Ok(())
    }

    /// Blocks for the token that the next step computes, of every sequence; preempts if there are none left.
    fn grow(&mut self, events: &mut Vec<Event>) -> Result<()> {
        let mut i = 0;
        while i < self.running.len() {
            let r = &mut self.running[i];
            // Keys and values of this many tokens have a place after the next step.
            let needed = (r.request.tokens.len() + r.ahead).min(r.request.end);
            if !r.decoding || r.blocks.len() >= needed {
                i += 1;
                continue;
            }
            let had = r.blocks.blocks().len();
            // What they are is not known yet; only lengths matter, as these blocks are not shared.
            let unknown = vec![0; needed - r.blocks.len()];
            match self.blocks.append(&mut r.blocks, &unknown) {
                Ok(()) => {
                    for (at, &block) in r.blocks.blocks().iter().enumerate().skip(had) {
                        self.executor.add_block(r.row, at, block);
                    }
                    i += 1;
                }
                Err(AllocatorError::OutOfBlocks { .. }) => {
                    // What is in flight may end somebody, or be what the one to be preempted goes on from.
                    if self.executor.in_flight() > 0 {
                        events.extend(self.drain()?);
                    } else {
                        self.preempt_at(self.running.len() - 1)?;
                    }
                    i = 0;
                }
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// Reads all steps in flight.
    fn drain(&mut self) -> Result<Vec<Event>> {
        let mut events = vec![];
        while self.executor.in_flight() > 0 {
            self.read(&mut events)?;
        }
        Ok(events)
    }

    fn read(&mut self, events: &mut Vec<Event>) -> Result<()> {
        let tokens = self.executor.read()?;
        let mut done = vec![];
        for i in 0..self.running.len() {
            let r = &mut self.running[i];
            if r.ahead == 0 {
                continue;
            }
            r.ahead -= 1;
            let token = tokens[r.row];
            if let Some(finish) = self.take(i, token, events) {
                done.push((self.running[i].request.id, finish));
            }
        }
        for (id, finish) in done {
            let i = self.running.iter().position(|r| r.request.id == id).expect("still there");
            self.leave(i)?;
            events.push(Event::Finished(id, finish));
        }
        Ok(())
    }

    /// Takes a sequence out and gives its blocks back. Steps in flight may still write to them, but before anything that a
    /// later owner submits.
    fn leave(&mut self, i: usize) -> Result<Running> {
        let r = self.running.remove(i);
        self.stale |= r.decoding;
        self.blocks.free(r.blocks).map_err(|(_, e)| e)?;
        Ok(r.request)
    }

    fn preempt_at(&mut self, i: usize) -> Result<()> {
        let request = self.leave(i)?;
        self.counts.preempted += 1;
        self.waiting.push_front(request);
        Ok(())
    }
}
