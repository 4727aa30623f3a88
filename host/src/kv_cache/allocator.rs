//! Hands out the blocks of a paged cache: reference counts, copy-on-write forks, prefix sharing, swapping.
//!
//! All on the host and free of any device. A serving loop holds one [`BlockAllocator`] for the blocks of the GPU (all
//! layers use the same block numbers) and perhaps one for those of a [`HostCache`](super::HostCache), and a [`Sequence`]
//! for each request:
//!
//! 1. [`start`](BlockAllocator::start) a sequence with its prompt: blocks that hold its beginning already are shared,
//!    the others reserved. [`append`](BlockAllocator::append) tokens later on.
//! 2. Run [`take_copies`](BlockAllocator::take_copies) through [`copy_blocks`](super::copy_blocks()), then the model on the
//!    tokens from [`Sequence::computed`] on, which writes their keys and values to [`Sequence::slots`].
//! 3. Say so with [`mark_computed`](BlockAllocator::mark_computed): full blocks can be shared from then on.
//! 4. [`fork`](BlockAllocator::fork) for beams or several samples, [`truncate`](BlockAllocator::truncate) what speculation
//!    got wrong, [`swap`](BlockAllocator::swap) under pressure, [`free`](BlockAllocator::free) at the end.
//!
//! # Sharing
//! A full block is known by its content: the hash of its tokens and of the hash of the block before, so of everything
//! before (128 bits, keyed at random in each process, so that no prompt can be made to collide; tokens are compared as
//! well). A block that nobody refers to stays known until its memory is needed: the least recently used one goes first,
//! and of one sequence the last block first. After vLLM's PagedAttention (Kwon et al., *Efficient memory management for
//! large language model serving with PagedAttention*, 2023) and its automatic prefix caching.
//!
//! # Copy on write
//! A block that several refer to is never written: whoever appends to it gets a copy. Swaps in progress count among
//! those, so a fork may go on generating while its origin is being copied out.

use std::collections::hash_map::RandomState;
use std::collections::{BTreeSet, HashMap};
use std::hash::BuildHasher;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// What an allocator refuses. It and the sequence are as they were before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocatorError {
    /// Not enough blocks are free or could be evicted.
    #[error("{needed} blocks needed, {available} available; free a sequence, or swap one out")]
    OutOfBlocks {
        /// Blocks needed.
        needed: usize,
        /// Blocks that are free or hold what nobody refers to.
        available: usize,
    },
    /// A shared block would have to be copied before all of its keys and values were written: see
    /// [`BlockAllocator::mark_computed`].
    #[error(
        "a shared block must be copied, but of {len} tokens only {computed} are computed; compute the others, and mark them, first"
    )]
    NotComputed {
        /// Tokens of the sequence.
        len: usize,
        /// Of these, with keys and values.
        computed: usize,
    },
    /// The block is being copied to by a swap that is not finished.
    #[error("block {block} is being swapped; finish the swap first")]
    InFlight {
        /// The block.
        block: usize,
    },
    /// Copies wait for [`BlockAllocator::take_copies`].
    #[error("copies are pending; take them before swapping")]
    PendingCopies,
    /// The sequence, or swap, is another allocator's.
    #[error("the sequence belongs to another allocator; give it to the one that started it")]
    Foreign,
    /// More tokens than the sequence has.
    #[error("{given} tokens named of a sequence of {len}; name no more than it has")]
    BeyondEnd {
        /// Tokens named.
        given: usize,
        /// Tokens there are.
        len: usize,
    },
    /// An allocator of no blocks, or of empty ones, or one for blocks of another size.
    #[error(
        "{blocks} blocks of {block_size} tokens; there are 1 to 2^31 - 1 blocks of at least a token, of one size on both sides of a swap"
    )]
    BadSize {
        /// Blocks.
        blocks: usize,
        /// Tokens of a block.
        block_size: usize,
    },
    /// The host has no memory for what an allocator keeps of its blocks.
    #[error("the host has no memory for {blocks} blocks' records; ask for fewer")]
    OutOfMemory {
        /// Blocks asked for.
        blocks: usize,
    },
}

/// Short for results of this module.
pub type Result<T> = std::result::Result<T, AllocatorError>;

/// What a full block holds.
#[derive(Clone)]
struct Content {
    hash: u128,
    /// Of the block before.
    parent: u128,
    tokens: Box<[u32]>,
}

#[derive(Default)]
struct Block {
    references: u32,
    /// When it was last let go, while nobody refers to it.
    stamp: u64,
    /// Unfinished swaps that write it.
    incoming: u32,
    /// References that are pending copies: these run before anything is written, so they keep nobody from writing.
    copying: u32,
    /// Set while the block is in the index.
    content: Option<Content>,
}

/// For `?`, where what was refused is not needed any more.
impl<T> From<(T, AllocatorError)> for AllocatorError {
    fn from((_, error): (T, AllocatorError)) -> Self {
        error
    }
}

/// The same in functions of other operations.
impl<T> From<(T, AllocatorError)> for crate::Error {
    fn from((_, error): (T, AllocatorError)) -> Self {
        error.into()
    }
}

/// The blocks and tokens of a request. Give it back with [`BlockAllocator::free`]; dropping it leaks its blocks.
#[derive(Debug)]
#[must_use]
pub struct Sequence {
    allocator: u64,
    block_size: usize,
    blocks: Vec<u32>,
    tokens: Vec<u32>,
    computed: usize,
    /// Hash of what comes before each full block that was looked at, and one more.
    prefixes: Vec<u128>,
}

impl Sequence {
    /// Numbers of the blocks, in order: a row of a block table.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// The tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// How many tokens, from the first on, have their keys and values in the cache.
    pub fn computed(&self) -> usize {
        self.computed
    }

    /// Slots of the tokens at these positions; `None` if there are not that many.
    pub fn slots(&self, positions: Range<usize>) -> Option<Vec<i64>> {
        if positions.end > self.len() {
            return None;
        }
        let slot =
            |p: usize| self.blocks[p / self.block_size] as i64 * self.block_size as i64 + (p % self.block_size) as i64;
        Some(positions.map(slot).collect())
    }
}

/// Copies between the blocks of two allocators that are under way. Holds what they read and write; give it to
/// [`BlockAllocator::finish`] when they are done.
#[derive(Debug)]
#[must_use]
pub struct Swap {
    from: u64,
    to: u64,
    sources: Vec<u32>,
    pairs: Vec<(usize, usize)>,
}

impl Swap {
    /// Blocks to copy, `(from, to)`: for [`swap_out`](super::swap_out) or [`swap_in`](super::swap_in). Fewer than the
    /// sequence has if the other side had some already.
    pub fn pairs(&self) -> &[(usize, usize)] {
        &self.pairs
    }
}

/// See the [module](self).
///
/// ```
/// use warploom::kv_cache::BlockAllocator;
///
/// let mut blocks = BlockAllocator::new(8, 4)?;
/// let mut a = blocks.start(&[1, 2, 3, 4, 5, 6], 0)?;
/// assert_eq!((a.blocks().len(), a.computed()), (2, 0));
/// blocks.mark_computed(&mut a, 6)?;
///
/// // The same beginning: its first block is shared.
/// let b = blocks.start(&[1, 2, 3, 4, 9], 0)?;
/// assert_eq!((b.blocks()[0], b.computed()), (a.blocks()[0], 4));
///
/// // A fork shares everything, until it appends to a block that is not full.
/// let mut c = blocks.fork(&a)?;
/// blocks.append(&mut c, &[7])?;
/// assert_eq!(blocks.take_copies(), [(a.blocks()[1] as usize, c.blocks()[1] as usize)]);
/// assert_eq!(c.slots(6..7).unwrap(), [c.blocks()[1] as i64 * 4 + 2]);
/// for sequence in [a, b, c] {
///     blocks.free(sequence)?;
/// }
/// assert_eq!(blocks.available(), 8);
/// # Ok::<(), warploom::kv_cache::AllocatorError>(())
/// ```
pub struct BlockAllocator {
    id: u64,
    block_size: usize,
    blocks: Vec<Block>,
    /// Without content, referred to by nobody.
    free: Vec<u32>,
    /// With content, referred to by nobody, the least recently used first.
    idle: BTreeSet<(u64, u32)>,
    index: HashMap<u128, u32>,
    /// Copies to run before anything is written; sources and targets are held.
    copies: Vec<(u32, u32)>,
    clock: u64,
}

impl BlockAllocator {
    /// An allocator of blocks `0 .. blocks` of `block_size` tokens each.
    ///
    /// # Errors
    /// [`AllocatorError::BadSize`] if either is 0, there are more than 2^31 - 1 blocks, or a slot would not fit an `i64`;
    /// [`AllocatorError::OutOfMemory`] if the host has no room for some hundred bytes of each.
    pub fn new(blocks: usize, block_size: usize) -> Result<Self> {
        let fit = blocks <= i32::MAX as usize && blocks.saturating_mul(block_size) <= i64::MAX as usize;
        if blocks == 0 || block_size == 0 || !fit {
            return Err(AllocatorError::BadSize { blocks, block_size });
        }
        let (mut free, mut records) = (Vec::new(), Vec::new());
        let room = free.try_reserve_exact(blocks).and_then(|()| records.try_reserve_exact(blocks));
        room.map_err(|_| AllocatorError::OutOfMemory { blocks })?;
        free.extend((0..blocks as u32).rev());
        records.extend(std::iter::repeat_with(Block::default).take(blocks));
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Ok(Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            block_size,
            free,
            blocks: records,
            idle: BTreeSet::new(),
            index: HashMap::new(),
            copies: vec![],
            clock: 0,
        })
    }

    /// Tokens of a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks in all.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that nobody refers to, with known content or without.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Blocks that nobody refers to but whose content is known.
    pub fn idle(&self) -> usize {
        self.idle.len()
    }

    /// How many sequences, swaps and pending copies refer to a block; 0 if there is no such block.
    pub fn references(&self, block: usize) -> usize {
        self.blocks.get(block).map_or(0, |b| b.references as usize)
    }

    /// How many tokens of a prompt are in known blocks: what [`start`](Self::start) would share.
    pub fn cached(&self, prompt: &[u32], salt: u64) -> usize {
        self.find(prompt, salt).0.len() * self.block_size
    }

    /// A sequence with these tokens. Its first blocks are shared with whoever has the same; the others are reserved. At
    /// least the last token is left to compute, since its logits are wanted.
    ///
    /// `salt` tells apart what tokens do not: sequences share only with those of the same one (adapters, images, users).
    ///
    /// # Errors
    /// [`AllocatorError::OutOfBlocks`].
    pub fn start(&mut self, prompt: &[u32], salt: u64) -> Result<Sequence> {
        let (shared, prefixes) = self.find(prompt, salt);
        let needed = prompt.len().div_ceil(self.block_size) - shared.len();
        // Sharing an idle block takes it from the available ones.
        let taken = shared.iter().filter(|b| self.blocks[**b as usize].references == 0).count();
        self.require(needed, taken)?;
        for &block in &shared {
            self.retain(block);
        }
        let computed = shared.len() * self.block_size;
        let mut blocks = shared;
        blocks.extend((0..needed).map(|_| self.allocate()));
        Ok(Sequence {
            allocator: self.id,
            block_size: self.block_size,
            blocks,
            tokens: prompt.to_vec(),
            computed,
            prefixes,
        })
    }

    /// Adds tokens to a sequence, and the blocks that they need. If they go into a block that others refer to, it is
    /// copied first: see [`take_copies`](Self::take_copies).
    ///
    /// # Errors
    /// [`OutOfBlocks`](AllocatorError::OutOfBlocks), [`InFlight`](AllocatorError::InFlight) if the last block is still
    /// being swapped, [`NotComputed`](AllocatorError::NotComputed) if it must be copied too early,
    /// [`Foreign`](AllocatorError::Foreign).
    pub fn append(&mut self, sequence: &mut Sequence, tokens: &[u32]) -> Result<()> {
        self.check(sequence)?;
        if tokens.is_empty() {
            return Ok(());
        }
        let len = sequence.len();
        let partial = if len.is_multiple_of(self.block_size) { None } else { sequence.blocks.last().copied() };
        let mut copied = None;
        if let Some(block) = partial {
            let meta = &self.blocks[block as usize];
            if meta.incoming > 0 {
                return Err(AllocatorError::InFlight { block: block as usize });
            }
            if meta.references - meta.copying > 1 {
                if sequence.computed < len {
                    return Err(AllocatorError::NotComputed { len, computed: sequence.computed });
                }
                copied = Some(block);
            }
        }
        let blocks = (len + tokens.len()).div_ceil(self.block_size) - sequence.blocks.len();
        self.require(blocks + copied.is_some() as usize, 0)?;
        if let Some(block) = copied {
            let new = self.allocate();
            // Nothing was written to a block that waits for its own copy, so what it waits for will do: copies never
            // depend on each other.
            let from = self.copies.iter().find(|c| c.1 == block).map_or(block, |c| c.0);
            self.copies.push((from, new));
            for held in [from, new] {
                self.retain(held);
                self.blocks[held as usize].copying += 1;
            }
            self.release(block);
            *sequence.blocks.last_mut().expect("a partial block") = new;
        } else if let Some(block) = partial {
            // After a truncation its known content will be overwritten.
            self.forget(block);
        }
        sequence.blocks.extend((0..blocks).map(|_| self.allocate()));
        sequence.tokens.extend_from_slice(tokens);
        Ok(())
    }

    /// Copies `(from, to)` that appending made necessary since the last call: run them, in one
    /// [`copy_blocks`](super::copy_blocks()), before anything that writes keys and values, in the same stream. They do not
    /// depend on each other.
    pub fn take_copies(&mut self) -> Vec<(usize, usize)> {
        let copies = std::mem::take(&mut self.copies);
        for held in copies.iter().flat_map(|&(from, to)| [from, to]) {
            self.blocks[held as usize].copying -= 1;
            self.release(held);
        }
        copies.into_iter().map(|(from, to)| (from as usize, to as usize)).collect()
    }

    /// What the next [`take_copies`](Self::take_copies) will return.
    pub fn pending_copies(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.copies.iter().map(|&(from, to)| (from as usize, to as usize))
    }

    /// Says that the first `len` tokens of a sequence have their keys and values in the cache, or will have once the work
    /// submitted so far is done. Full blocks among them become known, and can be shared. That the copies of
    /// [`take_copies`](Self::take_copies) were submitted before is not checked: without them a forked sequence's last block is wrong.
    ///
    /// # Errors
    /// [`BeyondEnd`](AllocatorError::BeyondEnd), [`InFlight`](AllocatorError::InFlight) if the sequence is still being
    /// swapped (and so must not be run), [`Foreign`](AllocatorError::Foreign).
    pub fn mark_computed(&mut self, sequence: &mut Sequence, len: usize) -> Result<()> {
        self.check(sequence)?;
        if let Some(block) = self.in_flight(sequence) {
            return Err(AllocatorError::InFlight { block });
        }
        if len > sequence.len() {
            return Err(AllocatorError::BeyondEnd { given: len, len: sequence.len() });
        }
        sequence.computed = sequence.computed.max(len);
        for i in sequence.prefixes.len() - 1..sequence.computed / self.block_size {
            let tokens = &sequence.tokens[i * self.block_size..][..self.block_size];
            let parent = sequence.prefixes[i];
            let hash = chain(parent, tokens);
            sequence.prefixes.push(hash);
            self.publish(sequence.blocks[i], || Content { hash, parent, tokens: tokens.into() });
        }
        Ok(())
    }

    /// Another sequence with the same tokens, in the same blocks. Tokens that are not computed yet lie in blocks of both: compute them for one of the two,
    /// and [`mark_computed`](Self::mark_computed) both.
    ///
    /// # Errors
    /// [`Foreign`](AllocatorError::Foreign).
    pub fn fork(&mut self, sequence: &Sequence) -> Result<Sequence> {
        self.check(sequence)?;
        sequence.blocks.iter().for_each(|&b| self.retain(b));
        Ok(Sequence {
            allocator: self.id,
            block_size: self.block_size,
            blocks: sequence.blocks.clone(),
            tokens: sequence.tokens.clone(),
            computed: sequence.computed,
            prefixes: sequence.prefixes.clone(),
        })
    }

    /// Drops all but the first `len` tokens.
    ///
    /// # Errors
    /// [`BeyondEnd`](AllocatorError::BeyondEnd), [`Foreign`](AllocatorError::Foreign).
    pub fn truncate(&mut self, sequence: &mut Sequence, len: usize) -> Result<()> {
        self.check(sequence)?;
        if len > sequence.len() {
            return Err(AllocatorError::BeyondEnd { given: len, len: sequence.len() });
        }
        for block in sequence.blocks.split_off(len.div_ceil(self.block_size)).into_iter().rev() {
            self.release(block);
        }
        sequence.tokens.truncate(len);
        sequence.prefixes.truncate(len / self.block_size + 1);
        sequence.computed = sequence.computed.min(len);
        Ok(())
    }

    /// Gives a sequence's blocks back.
    ///
    /// # Errors
    /// [`Foreign`](AllocatorError::Foreign), with the sequence, which keeps its blocks.
    pub fn free(&mut self, sequence: Sequence) -> std::result::Result<(), (Sequence, AllocatorError)> {
        if let Err(foreign) = self.check(&sequence) {
            return Err((sequence, foreign));
        }
        // The last first, so that the beginnings, which more prompts have in common, stay longest.
        for block in sequence.blocks.into_iter().rev() {
            self.release(block);
        }
        Ok(())
    }

    /// Moves a sequence of this allocator to the blocks of another one, such as those of a
    /// [`HostCache`](super::HostCache), or back.
    ///
    /// Known blocks that the other has are shared instead of copied. The sequence belongs to the other allocator from
    /// now on, and may be forked, truncated and freed there, but not appended to in a block that is still being copied.
    /// The blocks it came from are held: forks of it go on here, and change nothing that is computed and being copied.
    ///
    /// # Errors
    /// [`OutOfBlocks`](AllocatorError::OutOfBlocks) of the other, [`PendingCopies`](AllocatorError::PendingCopies),
    /// [`InFlight`](AllocatorError::InFlight) if the sequence has not arrived here yet,
    /// [`Foreign`](AllocatorError::Foreign), [`BadSize`](AllocatorError::BadSize) if the other's blocks are of another
    /// size.
    pub fn swap(&mut self, sequence: &mut Sequence, to: &mut BlockAllocator) -> Result<Swap> {
        self.check(sequence)?;
        if to.block_size != self.block_size {
            return Err(AllocatorError::BadSize { blocks: to.blocks(), block_size: to.block_size });
        }
        if !self.copies.is_empty() {
            return Err(AllocatorError::PendingCopies);
        }
        if let Some(block) = self.in_flight(sequence) {
            return Err(AllocatorError::InFlight { block });
        }
        let known = |b: &u32| {
            let content = self.blocks[*b as usize].content.as_ref()?;
            to.lookup(content.hash, content.parent, &content.tokens)
        };
        let there: Vec<Option<u32>> = sequence.blocks.iter().map(known).collect();
        let needed = there.iter().filter(|b| b.is_none()).count();
        let taken = there.iter().flatten().filter(|b| to.blocks[**b as usize].references == 0).count();
        to.require(needed, taken)?;
        there.iter().flatten().for_each(|&b| to.retain(b));

        let sources = std::mem::take(&mut sequence.blocks);
        let mut pairs = vec![];
        for (&source, shared) in sources.iter().zip(there) {
            let target = shared.unwrap_or_else(|| {
                let target = to.allocate();
                // One reference is the sequence's, one the swap's.
                to.retain(target);
                to.blocks[target as usize].incoming += 1;
                if let Some(content) = &self.blocks[source as usize].content {
                    to.publish(target, || content.clone());
                }
                pairs.push((source as usize, target as usize));
                target
            });
            sequence.blocks.push(target);
        }
        sequence.allocator = to.id;
        Ok(Swap { from: self.id, to: to.id, sources, pairs })
    }

    /// The first block of a sequence of this allocator that an unfinished swap is still copying to, if there is one. Such
    /// a sequence must not be run.
    pub fn in_flight(&self, sequence: &Sequence) -> Option<usize> {
        let incoming = |b: &u32| self.blocks.get(*b as usize).is_some_and(|b| b.incoming > 0);
        sequence.blocks.iter().copied().find(incoming).map(|b| b as usize)
    }

    /// Lets go of what a swap from this allocator to `to` held. Call it once its copies are done, or once all that is
    /// submitted later waits for them.
    ///
    /// # Errors
    /// [`Foreign`](AllocatorError::Foreign) with the swap still in force if it was between others: it comes back.
    pub fn finish(&mut self, to: &mut BlockAllocator, swap: Swap) -> std::result::Result<(), (Swap, AllocatorError)> {
        if swap.from != self.id || swap.to != to.id {
            return Err((swap, AllocatorError::Foreign));
        }
        for &source in swap.sources.iter().rev() {
            self.release(source);
        }
        for &(_, target) in swap.pairs.iter().rev() {
            to.blocks[target].incoming -= 1;
            to.release(target as u32);
        }
        Ok(())
    }

    /// Forgets the content of all blocks that nobody refers to; those that are in use stay known.
    pub fn clear_idle(&mut self) {
        while let Some((_, block)) = self.idle.pop_first() {
            self.forget(block);
            self.free.push(block);
        }
    }

    fn check(&self, sequence: &Sequence) -> Result<()> {
        if sequence.allocator == self.id { Ok(()) } else { Err(AllocatorError::Foreign) }
    }

    /// Whether `needed` blocks can be allocated when `taken` of the available ones get other uses.
    fn require(&self, needed: usize, taken: usize) -> Result<()> {
        let available = self.available() - taken;
        if needed > available { Err(AllocatorError::OutOfBlocks { needed, available }) } else { Ok(()) }
    }

    /// The known blocks that a prompt begins with, and the hashes before them and after.
    fn find(&self, prompt: &[u32], salt: u64) -> (Vec<u32>, Vec<u128>) {
        let mut prefixes = vec![chain(salt as u128, &[])];
        let mut found = vec![];
        let sharable = prompt.len().saturating_sub(1) / self.block_size;
        for tokens in prompt.chunks(self.block_size).take(sharable) {
            let parent = prefixes[found.len()];
            let hash = chain(parent, tokens);
            let Some(block) = self.lookup(hash, parent, tokens) else {
                break;
            };
            prefixes.push(hash);
            found.push(block);
        }
        (found, prefixes)
    }

    /// The block with this content, if its memory holds it already.
    fn lookup(&self, hash: u128, parent: u128, tokens: &[u32]) -> Option<u32> {
        let block = *self.index.get(&hash)?;
        let meta = &self.blocks[block as usize];
        let content = meta.content.as_ref()?;
        (meta.incoming == 0 && content.parent == parent && *content.tokens == *tokens).then_some(block)
    }

    /// A block with one reference; the caller has checked that there is one.
    fn allocate(&mut self) -> u32 {
        let block = self.free.pop().unwrap_or_else(|| {
            let (_, block) = self.idle.pop_first().expect("require() found a block");
            self.forget(block);
            block
        });
        self.blocks[block as usize].references = 1;
        block
    }

    fn retain(&mut self, block: u32) {
        let meta = &mut self.blocks[block as usize];
        if meta.references == 0 {
            self.idle.remove(&(meta.stamp, block));
        }
        meta.references += 1;
    }

    fn release(&mut self, block: u32) {
        let meta = &mut self.blocks[block as usize];
        meta.references -= 1;
        if meta.references > 0 {
            return;
        }
        if meta.content.is_some() {
            self.clock += 1;
            meta.stamp = self.clock;
            self.idle.insert((meta.stamp, block));
        } else {
            self.free.push(block);
        }
    }

    /// Makes the content of a block known, unless another block with it is.
    fn publish(&mut self, block: u32, content: impl FnOnce() -> Content) {
        let meta = &mut self.blocks[block as usize];
        if meta.content.is_some() {
            return;
        }
        let content = content();
        if let std::collections::hash_map::Entry::Vacant(entry) = self.index.entry(content.hash) {
            entry.insert(block);
            meta.content = Some(content);
        }
    }

    /// Makes the content of a block unknown.
    fn forget(&mut self, block: u32) {
        if let Some(content) = self.blocks[block as usize].content.take() {
            self.index.remove(&content.hash);
        }
    }
}

impl std::fmt::Debug for BlockAllocator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (n, size, free, idle) = (self.blocks(), self.block_size, self.free.len(), self.idle());
        write!(f, "BlockAllocator of {n} blocks of {size} tokens, {free} free, {idle} idle")
    }
}

/// Hash of a block after a prefix with the hash `parent`.
fn chain(parent: u128, tokens: &[u32]) -> u128 {
    // SipHash with keys of this process; the same in all allocators, so that they can share.
    static KEYS: OnceLock<[RandomState; 2]> = OnceLock::new();
    let [a, b] = KEYS.get_or_init(|| [RandomState::new(), RandomState::new()]);
    (a.hash_one((parent, tokens)) as u128) << 64 | b.hash_one((parent, tokens)) as u128
}
