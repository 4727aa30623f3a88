//! Tiles of queries of a ragged batch: which block computes what, from lengths that live on the device.
//!
//! A tile is up to [`Batch::tile_tokens`] query tokens of one sequence with all query heads of one KV head. Tiles are
//! numbered level by level: first the last tile of every sequence, then the last but one of every sequence that has
//! one, and so on, KV heads running fastest. So with causal attention the longest tiles come first (of sequences of one
//! length exactly), and neighbours in the order read the same keys at about the same time. [`Schedule`] deals them out
//! to a fixed grid in boustrophedon order, which evens out the falling costs; one graph serves every step.

use cuda_std::{Global, thread, warp};

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

/// The tiles of one block, longest first.
pub struct Schedule {
    round: u32,
    level: u32,
    /// First of the 32 sequences that the lanes look at.
    base: u32,
    /// Tiles before those.
    before: u32,
    /// Whether the level has had any.
    any: bool,
}

impl Schedule {
    /// Before the first tile.
    #[inline(always)]
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Self { round: 0, level: 0, base: 0, before: 0, any: false }
    }

    /// The block's next tile. For whole warps.
    #[inline(always)]
    pub unsafe fn next(&mut self, batch: &Batch) -> Option<Tile> {
        let (block, blocks, lane) = (thread::block_idx_x(), thread::grid_dim_x(), warp::lane_id());
        let index = self.round * blocks + if self.round % 2 == 0 { block } else { blocks - 1 - block };
        self.round += 1;
        core::hint::assert_unchecked(batch.tile_tokens != 0 && batch.kv_heads != 0);
        loop {
            let sequence = self.base + lane;
            let (start, tokens) = if sequence < batch.sequences { batch.chunk(sequence) } else { (0, 0) };
            let tiles = tokens.div_ceil(batch.tile_tokens);
            let there = warp::warp_vote_ballot(warp::FULL, tiles > self.level);
            let count = there.count_ones() * batch.kv_heads;
            if index - self.before < count {
                let within = index - self.before;
                // The lane with so many others of the level before it.
                let nth = within / batch.kv_heads;
                let mine = tiles > self.level && (there & ((1 << lane) - 1)).count_ones() == nth;
                let owner = warp::warp_vote_ballot(warp::FULL, mine).trailing_zeros();
                let start = warp::shfl_idx(start, owner);
                let chunk = warp::shfl_idx(tokens, owner);
                let tiles = warp::shfl_idx(tiles, owner);
                let sequence = self.base + owner;
                let first = (tiles - 1 - self.level) * batch.tile_tokens;
                let len = (batch.lens.get(sequence).max(0) as u32).min(batch.max_len);
                return Some(Tile {
                    sequence,
                    kv_head: within % batch.kv_heads,
                    first: start + first,
                    tokens: (chunk - first).min(batch.tile_tokens),
                    len,
                    position: len as i32 - chunk as i32 + first as i32,
                });
            }
            self.any |= there != 0;
            self.before += count;
            self.base += 32;
            if self.base >= batch.sequences {
                if !self.any {
                    return None;
                }
                self.any = false;
                self.base = 0;
                self.level += 1;
            }
        }
    }
}
