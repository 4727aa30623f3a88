//! Who runs when, with a device that only counts: the token after `t` at position `p` is a function of all tokens so far.
//!
//! The counting device keeps keys and values as a paged cache does, by slot, and derives each token from what it finds
//! there through the block table: a block that was freed too early, shared wrongly or written twice changes the text.

use super::runtime::engine::{Engine, Event, Finish, Id, Request};
use super::runtime::executor::{Chunk, Executor, Row, Sizes};
use super::runtime::problem::{Problem, Result};
use proptest::prelude::*;
use std::collections::{HashMap, VecDeque};

/// The token after a sequence, by its running hash.
fn mix(hash: u64, token: u32) -> u64 {
    (hash ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17)
}

const VOCAB: u64 = 50;

/// What a correct runtime must generate.
fn expected(request: &Request, max_len: usize) -> (Vec<u32>, Finish) {
    let mut hash = request.prompt.iter().fold(1, |h, &t| mix(h, t));
    let mut tokens = vec![];
    loop {
        if tokens.len() == request.tokens {
            return (tokens, Finish::Length);
        }
        if request.prompt.len() + tokens.len() == max_len {
            return (tokens, Finish::Context);
        }
        let token = (hash % VOCAB) as u32;
        tokens.push(token);
        hash = mix(hash, token);
        if request.eos == Some(token) {
            return (tokens, Finish::Eos);
        }
    }
}

struct Counting {
    sizes: Sizes,
    /// Token by slot.
    cache: HashMap<usize, u32>,
    rows: Vec<(u32, usize)>,
    tables: Vec<Vec<i64>>,
    flying: VecDeque<Vec<u32>>,
    most_tokens: usize,
}

impl Counting {
    fn new(sizes: Sizes) -> Self {
        let rows = vec![(0, 0); sizes.rows];
        let tables = vec![vec![-1; sizes.max_len.div_ceil(sizes.block_size)]; sizes.rows];
        Self { sizes, cache: HashMap::new(), rows, tables, flying: VecDeque::new(), most_tokens: 0 }
    }

    fn store(&mut self, blocks: &[i64], position: usize, token: u32) {
        let block = blocks.get(position / self.sizes.block_size).copied().unwrap_or(-1);
        if block >= 0 {
            self.cache.insert(block as usize * self.sizes.block_size + position % self.sizes.block_size, token);
        }
    }

    fn next(&self, blocks: &[i64], len: usize) -> u32 {
        let at = |p: usize| {
            let slot = blocks[p / self.sizes.block_size] * self.sizes.block_size as i64;
            self.cache.get(&(slot as usize + p % self.sizes.block_size)).copied().unwrap_or(u32::MAX)
        };
        ((0..len).fold(1, |h, p| mix(h, at(p))) % VOCAB) as u32
    }
}

impl Executor for Counting {
    fn sizes(&self) -> Sizes {
        self.sizes
    }

    fn prefill(&mut self, chunks: &[Chunk<'_>]) -> Result<Vec<u32>> {
        let tokens: usize = chunks.iter().map(|c| c.tokens.len()).sum();
        assert!(tokens > 0 && tokens <= self.sizes.chunk && chunks.len() <= self.sizes.rows);
        self.most_tokens = self.most_tokens.max(tokens);
        let mut sampled = vec![];
        for chunk in chunks {
            let blocks: Vec<i64> = chunk.blocks.iter().map(|&b| i64::from(b)).collect();
            for (i, &token) in chunk.tokens.iter().enumerate() {
                self.store(&blocks, chunk.start + i, token);
            }
            if chunk.sample {
                sampled.push(self.next(&blocks, chunk.start + chunk.tokens.len()));
            }
        }
        Ok(sampled)
    }

    fn set_rows(&mut self, rows: &[Option<Row<'_>>]) -> Result<()> {
        assert!(self.flying.is_empty());
        for (i, row) in rows.iter().enumerate() {
            self.tables[i].fill(-1);
            self.rows[i] = (0, 0);
            if let Some(row) = row {
                self.rows[i] = (row.token, row.len);
                for (to, &block) in self.tables[i].iter_mut().zip(row.blocks) {
                    *to = i64::from(block);
                }
            }
        }
        Ok(())
    }

    fn add_block(&mut self, row: usize, index: usize, block: u32) {
        self.tables[row][index] = i64::from(block);
    }

    fn launch(&mut self) -> Result<()> {
        let mut tokens = vec![u32::MAX; self.sizes.rows];
        for (i, sampled) in tokens.iter_mut().enumerate().take(self.rows.len()) {
            let (token, len) = self.rows[i];
            let table = self.tables[i].clone();
            // As `advance`: no sequence, or one that fills the context, stays as it is.
            if len > 0 && len / self.sizes.block_size < table.len() {
                self.store(&table, len, token);
                // Beyond its end a sequence has no blocks; whatever comes then is thrown away.
                *sampled = if table[len / self.sizes.block_size] < 0 { 0 } else { self.next(&table, len + 1) };
                self.rows[i] = (*sampled, len + 1);
            }
        }
        self.flying.push_back(tokens);
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.flying.len()
    }

    fn read(&mut self) -> Result<Vec<u32>> {
        Ok(self.flying.pop_front().unwrap())
    }
}

/// Generated tokens and ends, by request.
fn collect(events: &[Event], n: usize) -> Vec<(Vec<u32>, Option<Finish>)> {
    let mut all = vec![(vec![], None); n];
    for event in events {
        match *event {
            Event::Prefilled(_) => {}
            Event::Token(id, token) => {
                assert_eq!(all[id].1, None, "a token after the end of {id}");
                all[id].0.push(token);
            }
            Event::Finished(id, finish) => {
                assert_eq!(all[id].1, None, "{id} ends twice");
                all[id].1 = Some(finish);
            }
        }
    }
    all
}

#[test]
fn everybody_gets_the_tokens_of_a_run_alone() {
    let request = (1usize..40, 0usize..30, any::<u64>(), any::<bool>());
    let input = (proptest::collection::vec(request, 0..20), 1usize..6, 1usize..20, 1usize..9, (12usize..60, 0usize..3));
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let outcome = runner.run(&input, |(requests, rows, chunk, block_size, (blocks, spread))| {
        let sizes = Sizes { rows, chunk, blocks, block_size, max_len: 48 };
        let mut engine = Engine::new(Counting::new(sizes)).unwrap();
        let room = sizes.max_len.min(blocks * block_size);
        let mut submitted = vec![];
        let mut events = vec![];
        for (prompt, tokens, seed, ends) in requests {
            // Few different tokens, so that prompts share beginnings.
            let prompt = (0..prompt).map(|i| ((seed >> (i % 3 * 8)) % 2) as u32).collect();
            let request = Request { prompt, tokens, eos: ends.then_some((seed % VOCAB) as u32) };
            match engine.submit(request.clone()) {
                Ok(_) => submitted.push(request),
                Err(e) => {
                    prop_assert!(request.prompt.len() >= room && matches!(e, Problem::Input(_)), "{e}");
                    continue;
                }
            }
            for _ in 0..spread {
                events.extend(engine.step().unwrap());
            }
        }
        events.extend(engine.run().unwrap());
        for (id, (got, request)) in collect(&events, submitted.len()).into_iter().zip(&submitted).enumerate() {
            let (tokens, finish) = expected(request, room);
            prop_assert_eq!(&got.0, &tokens, "request {}", id);
            let finish = if finish == Finish::Context && room < sizes.max_len { Finish::Cache } else { finish };
            prop_assert_eq!(got.1, Some(finish), "request {}", id);
        }
        prop_assert_eq!(engine.free_blocks(), blocks);
        Ok(())
    });
    outcome.unwrap();
}

#[test]
fn few_blocks_preempt_and_nobody_notices() {
    let sizes = Sizes { rows: 4, chunk: 8, blocks: 8, block_size: 4, max_len: 32 };
    let mut engine = Engine::new(Counting::new(sizes)).unwrap();
    let requests: Vec<Request> =
        (0..6).map(|i| Request { prompt: vec![i, 1, 2, 3, i], tokens: 20, eos: None }).collect();
    for r in &requests {
        engine.submit(r.clone()).unwrap();
    }
    let events = engine.run().unwrap();
    assert!(engine.counts().preempted > 0, "{:?}", engine.counts());
    for (got, request) in collect(&events, 6).into_iter().zip(&requests) {
        assert_eq!((got.0, got.1.unwrap()), expected(request, 32));
    }
    assert_eq!(engine.free_blocks(), 8);
}

#[test]
fn preempted_at_any_step_it_goes_on_as_before() {
    let sizes = Sizes { rows: 3, chunk: 8, blocks: 40, block_size: 4, max_len: 64 };
    let request = Request { prompt: vec![4, 5, 6], tokens: 12, eos: None };
    for at in 0..14 {
        let mut engine = Engine::new(Counting::new(sizes)).unwrap();
        engine.submit(request.clone()).unwrap();
        let mut events = vec![];
        for _ in 0..at {
            events.extend(engine.step().unwrap());
        }
        events.extend(engine.preempt().unwrap());
        events.extend(engine.run().unwrap());
        assert_eq!(collect(&events, 1)[0].0, expected(&request, 64).0, "preempted after {at} steps");
        assert_eq!(engine.free_blocks(), 40);
    }
}

/// Ten thousand short sequences with random lengths, arrivals and cancellations, in a cache that is often too small.
#[test]
fn soak() {
    const REQUESTS: usize = 10_000;
    let sizes = Sizes { rows: 16, chunk: 32, blocks: 48, block_size: 4, max_len: 64 };
    let mut engine = Engine::new(Counting::new(sizes)).unwrap();
    let mut state = 1u64;
    let mut random = |n: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) % n
    };
    let (mut requests, mut events, mut cancelled): (Vec<Request>, Vec<Event>, Vec<Id>) = (vec![], vec![], vec![]);
    while requests.len() < REQUESTS || !engine.is_idle() {
        for _ in 0..random(4) {
            if requests.len() < REQUESTS {
                let prompt = (0..1 + random(24)).map(|_| random(2) as u32).collect();
                let request = Request { prompt, tokens: random(16) as usize, eos: (random(2) == 0).then_some(7) };
                engine.submit(request.clone()).unwrap();
                requests.push(request);
            }
        }
        if random(3) == 0 && !requests.is_empty() {
            // Somebody recent, who may be waiting, in the middle of a prompt, decoding, or done.
            let id = requests.len() - 1 - random(requests.len().min(40) as u64) as usize;
            if let Some(event) = engine.cancel(id).unwrap() {
                events.push(event);
                cancelled.push(id);
            }
        }
        events.extend(engine.step().unwrap());
    }
    let counts = engine.counts();
    assert_eq!(engine.free_blocks(), sizes.blocks, "{counts:?}");
    assert!(cancelled.len() > 1000 && counts.preempted > 100 && counts.shared > 1000, "{} {counts:?}", cancelled.len());
    for (id, (got, request)) in collect(&events, REQUESTS).into_iter().zip(&requests).enumerate() {
        let (tokens, finish) = expected(request, sizes.max_len);
        match got.1.unwrap_or_else(|| panic!("{id} never ended")) {
            Finish::Cancelled => assert!(tokens.starts_with(&got.0) && cancelled.contains(&id), "{id}"),
            how => assert_eq!((got.0, how), (tokens, finish), "{id}"),
        }
    }
}

#[test]
fn bad_requests() {
    let sizes = Sizes { rows: 2, chunk: 8, blocks: 40, block_size: 4, max_len: 16 };
    let mut engine = Engine::new(Counting::new(sizes)).unwrap();
    let submit = |engine: &mut Engine<Counting>, n: usize| {
        engine.submit(Request { prompt: vec![1; n], tokens: 100, eos: None }).map_err(|e| e.exit_code())
    };
    assert_eq!(submit(&mut engine, 0), Err(2));
    assert_eq!(submit(&mut engine, 16), Err(2));
    assert!(submit(&mut engine, 15).is_ok());
    let all = collect(&engine.run().unwrap(), 1);
    assert_eq!((all[0].0.len(), all[0].1), (1, Some(Finish::Context)));
    assert!(Engine::new(Counting::new(Sizes { blocks: 0, ..sizes })).is_err());
}
