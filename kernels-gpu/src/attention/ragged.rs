//! Tiles of queries of a ragged batch: which block computes what, from lengths that live on the device.
//!
//! A tile is up to [`Batch::tile_tokens`] query tokens of one sequence with all query heads of one KV head.
//!
//! Pairs of sequence and KV head, KV heads running fastest, are cut into *sections* of so many that their keys and values fit
//! into the L2 cache ([`Schedule::new`]): a section's tiles come before those of the next one, so that what they share is
//! read from memory once. Within a section tiles come level by level: the last tile of every pair, then the last but one
//! of every pair that has one, and so on. So with causal attention the long ones come first, and those that run at one
//! time read the same keys at about the same time.
//!
//! The grid is fixed. Blocks draw tiles from a counter ([`draw`]), so that lengths known only on the device balance
//! themselves, and find them by walking along the order, in which they only go forward. Which block computes a tile
//! makes no difference to it.

use cuda_std::{Global, atomic, float, thread, warp};

/// The query chunks of a launch.
#[derive(Clone, Copy)]
pub struct Batch {
    /// `[sequences + 1]`: where each sequence's query tokens begin.
    pub starts: Global<i32>,
    /// `[sequences]`: keys of each sequence, its query tokens' own among them.
    pub lens: Global<i32>,
    /// Sequences there are.
    pub sequences: u32,
    /// Query tokens there are: larger starts count as this.
    pub tokens: u32,
    /// Keys that a sequence can have: larger lengths count as this.
    pub max_len: u32,
    /// Query tokens of a tile.
    pub tile_tokens: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Keys that a query token sees, 0 for all.
    pub window: u32,
    /// Whether a token sees no later keys.
    pub causal: bool,
}

/// A tile.
#[derive(Clone, Copy)]
pub struct Tile {
    /// Whose tokens they are.
    pub sequence: u32,
    /// Whose query heads.
    pub kv_head: u32,
    /// Its first token, in the whole launch.
    pub first: u32,
    /// How many.
    pub tokens: u32,
    /// Keys of the sequence.
    pub len: u32,
    /// The first token's position: that of the last key it sees, if attention is causal. May be negative.
    pub position: i32,
}

impl Batch {
    /// First query token and number of query tokens of a sequence.
    #[inline(always)]
    unsafe fn chunk(&self, sequence: u32) -> (u32, u32) {
        let inside = |v: i32| (v.max(0) as u32).min(self.tokens);
        let start = inside(self.starts.get(sequence));
        (start, inside(self.starts.get(sequence + 1)).saturating_sub(start))
    }

    /// Keys of a sequence.
    #[inline(always)]
    unsafe fn len(&self, sequence: u32) -> u32 {
        (self.lens.get(sequence).max(0) as u32).min(self.max_len)
    }

    /// Keys that the token at this position sees end here.
    #[inline(always)]
    pub fn end(&self, tile: &Tile, token: u32) -> u32 {
        if self.causal { ((tile.position + token as i32 + 1).max(0) as u32).min(tile.len) } else { tile.len }
    }

    /// Where the keys begin that a token sees whose keys end at `end`.
    #[inline(always)]
    pub fn start(&self, end: u32) -> u32 {
        if self.window == 0 { 0 } else { end.saturating_sub(self.window) }
    }
}

/// The tiles of a launch in their order.
pub struct Schedule {
    /// Pairs of sequence and KV head in a section.
    section: u32,
    /// First pair of the section.
    start: u32,
    level: u32,
    /// First of the 32 pairs that the lanes look at, in the section.
    base: u32,
    /// Tiles before those.
    before: u32,
    /// Whether the level has had any.
    any: bool,
}

impl Schedule {
    /// Before the first tile, with sections of about `section_keys` keys. For whole warps.
    #[inline(always)]
    pub unsafe fn new(batch: &Batch, section_keys: u32) -> Self {
        let mut keys = 0f32;
        let mut sequence = warp::lane_id();
        while sequence < batch.sequences {
            keys += batch.len(sequence) as f32;
            sequence += 32;
        }
        let average = float::max(warp::reduce_sum(keys), 1.0);
        let section = float::fast::div(section_keys as f32 * batch.sequences as f32, average);
        Self { section: (section as u32).max(1), start: 0, level: 0, base: 0, before: 0, any: false }
    }

    /// The tile of this number, which is above that of the call before. For whole warps.
    #[inline(always)]
    pub unsafe fn find(&mut self, batch: &Batch, index: u32) -> Option<Tile> {
        core::hint::assert_unchecked(batch.tile_tokens != 0 && batch.kv_heads != 0);
        let lane = warp::lane_id();
        let pairs = batch.sequences * batch.kv_heads;
        while self.start < pairs {
            let end = if pairs - self.start < self.section { pairs } else { self.start + self.section };
            let pair = self.start + self.base + lane;
            let sequence = pair / batch.kv_heads;
            let (first, tokens) = if pair < end { batch.chunk(sequence) } else { (0, 0) };
            let tiles = tokens.div_ceil(batch.tile_tokens);
            let whole = end - self.start <= 32;
            loop {
                let there = warp::warp_vote_ballot(warp::FULL, tiles > self.level);
                let (count, nth) = (there.count_ones(), index - self.before);
                if nth < count {
                    // The lane with so many others of the level before it.
                    let mine = tiles > self.level && (there & ((1 << lane) - 1)).count_ones() == nth;
                    let owner = warp::warp_vote_ballot(warp::FULL, mine).trailing_zeros();
                    let (first, tokens) = (warp::shfl_idx(first, owner), warp::shfl_idx(tokens, owner));
                    let (tiles, pair) = (warp::shfl_idx(tiles, owner), warp::shfl_idx(pair, owner));
                    let before = (tiles - 1 - self.level) * batch.tile_tokens;
                    let sequence = pair / batch.kv_heads;
                    let len = batch.len(sequence);
                    return Some(Tile {
                        sequence,
                        kv_head: pair % batch.kv_heads,
                        first: first + before,
                        tokens: (tokens - before).min(batch.tile_tokens),
                        len,
                        position: len as i32 - tokens as i32 + before as i32,
                    });
                }
                if !whole || count == 0 {
                    self.any |= count != 0;
                    self.before += count;
                    break;
                }
                // All pairs are in view: skip levels as long as the same pairs have them.
                let left = if tiles > self.level { tiles - self.level } else { u32::MAX };
                let skip = warp::warp_reduce_min_u32(warp::FULL, left).min(nth / count);
                self.level += skip;
                self.before += skip * count;
            }
            self.base += 32;
            if self.start + self.base >= end {
                self.base = 0;
                self.level += 1;
                if !self.any {
                    self.start = end;
                    self.level = 0;
                }
                self.any = false;
            }
        }
        None
    }
}

/// Draws the number of a block's next tile; the first is the block's own. By one thread.
#[inline(always)]
pub unsafe fn draw(tickets: *mut u32) -> u32 {
    thread::grid_dim_x() + atomic::fetch_add(tickets, 1, atomic::Device, atomic::Relaxed)
}

/// Says that a block draws no more; the last block leaves the tickets as the next launch wants them. By the thread that
/// drew.
#[inline(always)]
pub unsafe fn finish(tickets: *mut u32) {
    let done = tickets.wrapping_add(1);
    if atomic::fetch_add(done, 1, atomic::Device, atomic::AcqRel) + 1 == thread::grid_dim_x() {
        atomic::exchange_u32(tickets, 0);
        atomic::exchange_u32(done, 0);
    }
}
