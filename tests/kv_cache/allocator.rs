//! The allocator against a model that knows what every slot of two memories would hold.

use proptest::prelude::*;
use std::collections::{HashMap, HashSet};
use warploom::kv_cache::{AllocatorError, BlockAllocator, Sequence, Swap};

const BLOCK: usize = 4;
const SALT: u64 = 3;

#[derive(Clone, Debug)]
enum Step {
    /// A prompt out of a small alphabet, so that beginnings coincide.
    Start(Vec<u32>),
    Append(usize, Vec<u32>),
    Fork(usize),
    Truncate(usize, usize),
    Free(usize),
    /// Runs pending copies and computes all tokens of these sequences that are not.
    Run(u16),
    /// Starts to move a sequence to the other memory.
    Swap(usize),
    Finish(usize),
    ClearIdle(bool),
}

fn step() -> impl Strategy<Value = Step> {
    let tokens = |n| proptest::collection::vec(0u32..2, n);
    prop_oneof![
        4 => tokens(0..18).prop_map(Step::Start),
        6 => (any::<usize>(), tokens(0..7)).prop_map(|(s, t)| Step::Append(s, t)),
        3 => any::<usize>().prop_map(Step::Fork),
        2 => any::<[usize; 2]>().prop_map(|[s, n]| Step::Truncate(s, n)),
        3 => any::<usize>().prop_map(Step::Free),
        6 => any::<u16>().prop_map(Step::Run),
        3 => any::<usize>().prop_map(Step::Swap),
        3 => any::<usize>().prop_map(Step::Finish),
        1 => any::<bool>().prop_map(Step::ClearIdle),
    ]
}

/// What a slot holds: the tokens up to there, which is what keys and values depend on.
type Slot = Option<Vec<u32>>;

struct Model {
    allocators: [BlockAllocator; 2],
    memory: [Vec<Slot>; 2],
    /// Live sequences, and the memory that each is in.
    sequences: Vec<(usize, Sequence)>,
    /// Unfinished swaps, by where they come from.
    swaps: Vec<(usize, Swap)>,
}

impl Model {
    fn new(device: usize, host: usize) -> Self {
        Self {
            allocators: [BlockAllocator::new(device, BLOCK).unwrap(), BlockAllocator::new(host, BLOCK).unwrap()],
            memory: [vec![None; device * BLOCK], vec![None; host * BLOCK]],
            sequences: vec![],
            swaps: vec![],
        }
    }

    fn pick(&self, i: usize) -> Option<usize> {
        (!self.sequences.is_empty()).then(|| i % self.sequences.len())
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Start(prompt) => self.start(&prompt),
            Step::Append(i, tokens) => {
                if let Some(i) = self.pick(i) {
                    self.append(i, &tokens);
                }
            }
            Step::Fork(i) => {
                if let Some(i) = self.pick(i) {
                    let (at, origin) = &self.sequences[i];
                    let fork = self.allocators[*at].fork(origin).unwrap();
                    assert_eq!((fork.blocks(), fork.tokens()), (origin.blocks(), origin.tokens()));
                    self.sequences.push((*at, fork));
                }
            }
            Step::Truncate(i, len) => {
                if let Some(i) = self.pick(i) {
                    let (at, sequence) = &mut self.sequences[i];
                    let len = len % (sequence.len() + 2);
                    let outcome = self.allocators[*at].truncate(sequence, len);
                    assert_eq!(outcome.is_err(), len > sequence.len());
                }
            }
            Step::Free(i) => {
                if let Some(i) = self.pick(i) {
                    let (at, sequence) = self.sequences.swap_remove(i);
                    self.allocators[at].free(sequence).unwrap();
                }
            }
            Step::Run(which) => self.run(which),
            Step::Swap(i) => {
                if let Some(i) = self.pick(i) {
                    self.swap(i);
                }
            }
            Step::Finish(i) => {
                if !self.swaps.is_empty() {
                    self.finish(i % self.swaps.len());
                }
            }
            Step::ClearIdle(which) => {
                let allocator = &mut self.allocators[which as usize];
                let available = allocator.available();
                allocator.clear_idle();
                assert_eq!((allocator.idle(), allocator.available()), (0, available));
            }
        }
        self.check();
    }

    fn start(&mut self, prompt: &[u32]) {
        let allocator = &mut self.allocators[0];
        let cached = allocator.cached(prompt, SALT);
        assert!(cached.is_multiple_of(BLOCK) && (cached < prompt.len() || prompt.is_empty()));
        let available = allocator.available();
        match allocator.start(prompt, SALT) {
            Ok(sequence) => {
                assert_eq!((sequence.computed(), sequence.tokens()), (cached, prompt));
                self.sequences.push((0, sequence));
            }
            Err(AllocatorError::OutOfBlocks { needed, available: left }) => {
                assert_eq!(needed, prompt.len().div_ceil(BLOCK) - cached / BLOCK);
                assert!(needed > left && left <= available);
                assert_eq!(allocator.available(), available);
            }
            Err(e) => panic!("{e}"),
        }
    }

    fn append(&mut self, i: usize, tokens: &[u32]) {
        let (at, sequence) = &mut self.sequences[i];
        let allocator = &mut self.allocators[*at];
        let (len, available) = (sequence.len(), allocator.available());
        let before: (Vec<u32>, Vec<u32>) = (sequence.blocks().to_vec(), sequence.tokens().to_vec());
        match allocator.append(sequence, tokens) {
            Ok(()) => {
                assert_eq!(sequence.tokens(), [&before.1[..], tokens].concat());
                assert_eq!(sequence.blocks().len(), (len + tokens.len()).div_ceil(BLOCK));
            }
            Err(e) => {
                assert_eq!((sequence.blocks(), sequence.tokens()), (&before.0[..], &before.1[..]));
                assert_eq!(allocator.available(), available);
                match e {
                    AllocatorError::OutOfBlocks { needed, available: left } => {
                        assert!(needed > left && left == available)
                    }
                    AllocatorError::NotComputed { .. } => assert!(sequence.computed() < len),
                    AllocatorError::InFlight { block } => {
                        assert!(self.swaps.iter().any(|(from, s)| from != at && s.pairs().iter().any(|p| p.1 == block)))
                    }
                    e => panic!("{e}"),
                }
            }
        }
    }

    fn run(&mut self, which: u16) {
        for at in 0..2 {
            let copies = self.allocators[at].take_copies();
            // All at once: none reads what another one writes.
            let written: HashSet<usize> = copies.iter().map(|c| c.1).collect();
            assert!(written.len() == copies.len() && copies.iter().all(|c| !written.contains(&c.0)));
            for (from, to) in copies {
                let block = self.memory[at][from * BLOCK..][..BLOCK].to_vec();
                self.memory[at][to * BLOCK..][..BLOCK].clone_from_slice(&block);
            }
        }
        for (i, (at, sequence)) in self.sequences.iter_mut().enumerate() {
            if let Some(block) = self.allocators[*at].in_flight(sequence) {
                let len = sequence.len();
                assert_eq!(self.allocators[*at].mark_computed(sequence, len), Err(AllocatorError::InFlight { block }));
            } else if *at == 0 && which >> (i % 16) & 1 == 1 {
                let slots = sequence.slots(sequence.computed()..sequence.len()).unwrap();
                for (p, slot) in (sequence.computed()..).zip(slots) {
                    self.memory[0][slot as usize] = Some(sequence.tokens()[..=p].to_vec());
                }
                let len = sequence.len();
                self.allocators[0].mark_computed(sequence, len).unwrap();
            }
        }
    }

    fn swap(&mut self, i: usize) {
        let (at, sequence) = &mut self.sequences[i];
        let from = *at;
        let [device, host] = &mut self.allocators;
        let (a, b) = if from == 0 { (device, host) } else { (host, device) };
        let (blocks, left) = (sequence.blocks().to_vec(), b.available());
        match a.swap(sequence, b) {
            Ok(swap) => {
                assert_eq!(sequence.blocks().len(), blocks.len());
                *at = 1 - from;
                self.swaps.push((from, swap));
            }
            Err(e) => {
                assert_eq!((sequence.blocks(), b.available()), (&blocks[..], left));
                match e {
                    AllocatorError::OutOfBlocks { needed, available } => assert!(needed > available),
                    AllocatorError::PendingCopies => assert!(a.pending_copies().next().is_some()),
                    AllocatorError::InFlight { block } => assert!(blocks.contains(&(block as u32))),
                    e => panic!("{e}"),
                }
            }
        }
    }

    /// The copies happen as late as they may.
    fn finish(&mut self, i: usize) {
        let (from, swap) = self.swaps.swap_remove(i);
        for &(source, target) in swap.pairs() {
            let block = self.memory[from][source * BLOCK..][..BLOCK].to_vec();
            self.memory[1 - from][target * BLOCK..][..BLOCK].clone_from_slice(&block);
        }
        let [device, host] = &mut self.allocators;
        let (a, b) = if from == 0 { (device, host) } else { (host, device) };
        let (_, foreign) = b.finish(a, swap).map_err(|(swap, e)| (a.finish(b, swap).unwrap(), e)).unwrap_err();
        assert_eq!(foreign, AllocatorError::Foreign);
    }

    fn check(&self) {
        for at in 0..2 {
            let allocator = &self.allocators[at];
            let mut references: HashMap<usize, usize> = HashMap::new();
            for (_, sequence) in self.sequences.iter().filter(|(a, _)| *a == at) {
                let own: HashSet<_> = sequence.blocks().iter().collect();
                assert_eq!(own.len(), sequence.blocks().len());
                assert!(sequence.computed() <= sequence.len());
                sequence.blocks().iter().for_each(|b| *references.entry(*b as usize).or_default() += 1);
            }
            let held = |b: usize| allocator.references(b) > references.get(&b).copied().unwrap_or(0);
            let unreferenced = (0..allocator.blocks()).filter(|b| allocator.references(*b) == 0).count();
            assert_eq!(allocator.available(), unreferenced);
            for (&b, &n) in &references {
                assert!(allocator.references(b) >= n);
            }
            let swapping = |b| {
                let target = |(from, s): &(usize, Swap)| *from != at && s.pairs().iter().any(|p| p.1 == b);
                let source = |(from, _): &(usize, Swap)| *from == at;
                self.swaps.iter().any(|s| target(s) || source(s))
            };
            if (0..allocator.blocks()).any(|b| held(b) && !swapping(b)) {
                assert!(allocator.pending_copies().next().is_some(), "a block is held by nobody");
            }
        }
        // What is computed is there, unless it is on its way.
        for (at, sequence) in &self.sequences {
            for (p, slot) in sequence.slots(0..sequence.computed()).unwrap().into_iter().enumerate() {
                let block = slot as usize / BLOCK;
                let coming = |(from, s): &(usize, Swap)| from != at && s.pairs().iter().any(|c| c.1 == block);
                let copied = self.allocators[*at].pending_copies().any(|c| c.1 == block);
                if !copied && !self.swaps.iter().any(coming) {
                    let held = self.memory[*at][slot as usize].as_deref();
                    assert_eq!(held, Some(&sequence.tokens()[..=p]), "slot {slot} of memory {at}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 800, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn agrees_with_the_model(
        (device, host) in (1usize..16, 1usize..10),
        steps in proptest::collection::vec(step(), 0..120),
    ) {
        let mut model = Model::new(device, host);
        for step in steps {
            model.step(step);
        }
        // Everything comes back.
        while !model.swaps.is_empty() {
            model.finish(0);
        }
        for (at, sequence) in std::mem::take(&mut model.sequences) {
            model.allocators[at].free(sequence).unwrap();
        }
        for allocator in &mut model.allocators {
            allocator.take_copies();
            prop_assert_eq!(allocator.available(), allocator.blocks());
        }
    }
}

fn filled(allocator: &mut BlockAllocator, tokens: &[u32]) -> Sequence {
    let mut sequence = allocator.start(tokens, 0).unwrap();
    allocator.mark_computed(&mut sequence, tokens.len()).unwrap();
    sequence
}

/// What is refused comes back, or is dropped by `?` in functions of either error.
#[test]
fn refusals_are_errors_of_operations() {
    fn free(allocator: &mut BlockAllocator, sequence: Sequence) -> warploom::Result<()> {
        allocator.free(sequence)?;
        Ok(())
    }
    let [mut ours, mut theirs] = [(); 2].map(|()| BlockAllocator::new(4, 2).unwrap());
    let sequence = filled(&mut theirs, &[1, 2]);
    assert!(matches!(free(&mut ours, sequence), Err(warploom::Error::Allocator(AllocatorError::Foreign))));
}

#[test]
fn the_least_recently_used_block_is_evicted_first_and_tails_before_heads() {
    let mut allocator = BlockAllocator::new(4, 2).unwrap();
    let (a, b) = (filled(&mut allocator, &[1, 2, 3, 4]), filled(&mut allocator, &[5, 6, 7, 8]));
    allocator.free(a).unwrap();
    allocator.free(b).unwrap();
    assert_eq!((allocator.available(), allocator.idle()), (4, 4));
    let cached = |a: &BlockAllocator, t: [u32; 2], u: [u32; 3]| a.cached(&[&t[..], &u[..]].concat(), 0);
    assert_eq!((cached(&allocator, [1, 2], [3, 4, 0]), cached(&allocator, [5, 6], [7, 8, 0])), (4, 4));
    let c = allocator.start(&[9], 0).unwrap();
    assert_eq!((cached(&allocator, [1, 2], [3, 4, 0]), cached(&allocator, [5, 6], [7, 8, 0])), (2, 4));
    let d = allocator.start(&[9], 0).unwrap();
    assert_eq!((cached(&allocator, [1, 2], [3, 4, 0]), cached(&allocator, [5, 6], [7, 8, 0])), (0, 4));
    // Using a block again makes it the last to go.
    let e = allocator.start(&[5, 6, 0], 0).unwrap();
    assert_eq!((e.computed(), cached(&allocator, [5, 6], [7, 8, 0])), (2, 2));
    for sequence in [c, d, e] {
        allocator.free(sequence).unwrap();
    }
}

#[test]
fn salts_share_nothing() {
    let mut allocator = BlockAllocator::new(8, 2).unwrap();
    let a = filled(&mut allocator, &[1, 2, 3]);
    assert_eq!((allocator.cached(&[1, 2, 3], 0), allocator.cached(&[1, 2, 3], 1)), (2, 0));
    allocator.free(a).unwrap();
}

#[test]
fn a_fork_during_a_swap_writes_nothing_that_is_being_copied() {
    let (mut device, mut host) = (BlockAllocator::new(8, 4).unwrap(), BlockAllocator::new(4, 4).unwrap());
    let mut origin = filled(&mut device, &[1, 2, 3, 4, 5, 6]);
    let mut stays = device.fork(&origin).unwrap();
    let blocks = origin.blocks().to_vec();
    let swap = device.swap(&mut origin, &mut host).unwrap();
    assert_eq!(swap.pairs().iter().map(|p| p.0 as u32).collect::<Vec<_>>(), blocks);
    // The one that stays gets a copy of the block that is being read, though it alone refers to it otherwise.
    device.append(&mut stays, &[7]).unwrap();
    assert_ne!(stays.blocks()[1], blocks[1]);
    assert_eq!(device.take_copies(), [(blocks[1] as usize, stays.blocks()[1] as usize)]);
    // The one that goes may be forked, but neither is written before it has arrived.
    let mut goes = host.fork(&origin).unwrap();
    for sequence in [&mut origin, &mut goes] {
        let block = sequence.blocks()[1] as usize;
        assert_eq!(host.append(sequence, &[8]), Err(AllocatorError::InFlight { block }));
        assert_eq!(
            host.swap(sequence, &mut device).unwrap_err(),
            AllocatorError::InFlight { block: sequence.blocks()[0] as usize }
        );
    }
    // Giving the origin up keeps what is being copied.
    host.free(origin).unwrap();
    device.free(stays).unwrap();
    assert!(blocks.iter().all(|b| device.references(*b as usize) == 1));
    device.finish(&mut host, swap).map_err(|(_, e)| e).unwrap();
    assert!(blocks.iter().all(|b| device.references(*b as usize) == 0));
    host.append(&mut goes, &[8]).unwrap();
    assert_eq!((goes.tokens(), host.pending_copies().count()), (&[1, 2, 3, 4, 5, 6, 8][..], 0));
    host.free(goes).unwrap();
    assert_eq!((device.available(), host.available()), (8, 4));
}

#[test]
fn what_the_other_side_has_is_not_copied_again() {
    let (mut device, mut host) = (BlockAllocator::new(8, 4).unwrap(), BlockAllocator::new(8, 4).unwrap());
    let mut a = filled(&mut device, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
    let mut b = device.fork(&a).unwrap();
    let swap = device.swap(&mut a, &mut host).unwrap();
    assert_eq!(swap.pairs().len(), 3);
    device.finish(&mut host, swap).map_err(|(_, e)| e).unwrap();
    // Two full blocks are known there; the third is not full.
    let swap = device.swap(&mut b, &mut host).unwrap();
    assert_eq!((swap.pairs().len(), &b.blocks()[..2]), (1, &a.blocks()[..2]));
    device.finish(&mut host, swap).map_err(|(_, e)| e).unwrap();
    // On the way back the device still knows the full ones.
    let swap = host.swap(&mut a, &mut device).unwrap();
    assert_eq!(swap.pairs().len(), 1);
    host.finish(&mut device, swap).map_err(|(_, e)| e).unwrap();
    device.free(a).unwrap();
    host.free(b).unwrap();
}

#[test]
fn refuses_what_it_cannot_do() {
    assert!(matches!(BlockAllocator::new(0, 4), Err(AllocatorError::BadSize { .. })));
    assert!(matches!(BlockAllocator::new(4, 0), Err(AllocatorError::BadSize { .. })));
    assert!(matches!(BlockAllocator::new(1 << 31, 1), Err(AllocatorError::BadSize { .. })));
    assert!(matches!(BlockAllocator::new(4, 1 << 62), Err(AllocatorError::BadSize { .. })));
    let (mut a, mut b) = (BlockAllocator::new(3, 4).unwrap(), BlockAllocator::new(3, 4).unwrap());
    let mut x = a.start(&[1, 2, 3, 4, 5], 0).unwrap();
    assert_eq!(x.slots(0..6), None);
    assert_eq!(b.append(&mut x, &[1]), Err(AllocatorError::Foreign));
    assert_eq!(b.fork(&x).unwrap_err(), AllocatorError::Foreign);
    assert_eq!(b.swap(&mut x, &mut a).unwrap_err(), AllocatorError::Foreign);
    assert_eq!(a.mark_computed(&mut x, 6), Err(AllocatorError::BeyondEnd { given: 6, len: 5 }));
    assert_eq!(a.truncate(&mut x, 6), Err(AllocatorError::BeyondEnd { given: 6, len: 5 }));
    assert_eq!(a.append(&mut x, &[0; 8]), Err(AllocatorError::OutOfBlocks { needed: 2, available: 1 }));
    let mut y = a.fork(&x).unwrap();
    assert_eq!(a.append(&mut y, &[0]), Err(AllocatorError::NotComputed { len: 5, computed: 0 }));
    a.mark_computed(&mut x, 5).unwrap();
    a.mark_computed(&mut y, 5).unwrap();
    a.append(&mut y, &[0]).unwrap();
    assert_eq!(a.swap(&mut x, &mut b).unwrap_err(), AllocatorError::PendingCopies);
    // The origin needs no copy of its own: the pending one comes before its write.
    a.append(&mut x, &[9]).unwrap();
    assert_eq!(a.take_copies().len(), 1);
    let mut other = BlockAllocator::new(3, 8).unwrap();
    assert!(matches!(a.swap(&mut x, &mut other), Err(AllocatorError::BadSize { block_size: 8, .. })));
    // What another allocator refuses comes back, with its blocks.
    let (x, e) = other.free(x).unwrap_err();
    assert_eq!((e, a.available()), (AllocatorError::Foreign, 0));
    a.free(x).unwrap();
    a.free(y).unwrap();
    assert_eq!(a.available(), a.blocks());
}

#[test]
fn blocks_on_their_way_are_not_shared_yet() {
    let (mut device, mut host) = (BlockAllocator::new(4, 2).unwrap(), BlockAllocator::new(4, 2).unwrap());
    let mut a = filled(&mut device, &[1, 2, 3]);
    let swap = device.swap(&mut a, &mut host).unwrap();
    assert_eq!((device.cached(&[1, 2, 3], 0), host.cached(&[1, 2, 3], 0)), (2, 0));
    device.finish(&mut host, swap).map_err(|(_, e)| e).unwrap();
    assert_eq!(host.cached(&[1, 2, 3], 0), 2);
    host.free(a).unwrap();
}

#[test]
fn a_copy_of_a_block_that_waits_for_its_copy_is_of_the_first_block() {
    let mut blocks = BlockAllocator::new(4, 4).unwrap();
    let a = filled(&mut blocks, &[1, 2]);
    let mut b = blocks.fork(&a).unwrap();
    blocks.append(&mut b, &[3]).unwrap();
    blocks.truncate(&mut b, 2).unwrap();
    let mut c = blocks.fork(&b).unwrap();
    blocks.append(&mut c, &[4]).unwrap();
    let of = |s: &Sequence| s.blocks()[0] as usize;
    assert_eq!(blocks.take_copies(), [(of(&a), of(&b)), (of(&a), of(&c))]);
    for sequence in [a, b, c] {
        blocks.free(sequence).unwrap();
    }
    assert_eq!(blocks.available(), 4);
}
