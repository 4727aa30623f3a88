//! Tiles of queries of a ragged batch: which block computes what, from lengths that live on the device.
//!
//! A tile is up to [`Batch::tile_tokens`] query tokens of one sequence with all query heads of one KV head.
//!
//! Pairs of sequence and KV head, KV heads running fastest, are cut into *sections* of so many that their keys and values fit
//! into the L2 cache ([`Schedule::new`]), and no more than 64: a section's tiles come before those of the next one, so that what
//! they share is read from memory once. Within a section tiles come level by level: the last tile of every pair, then the
//! last but one of every pair that has one, and so on. So with causal attention the long ones come first, and those that
//! run at one time read the same keys at about the same time.
//!
//! The grid is fixed. Blocks draw tiles from a counter ([`draw`]), so that lengths known only on the device balance
//! themselves. A warp finds a tile by its number: it knows how many tiles each pair of the section has, two pairs a lane, and goes
//! forward from the number before, all levels that the same pairs have in one step. Which block computes a tile makes no
//! difference to it.
//!
//! Where there are tiles for half of the blocks or fewer, kernels with room for partial results divide the keys of each into
//! [parts](Part), so that every block has one: numbers are those of parts then, the parts of a tile one after another.
//! Who is done with a part leaves its result and counts; the last of the tile adds up all of them in the order of keys.
//! No block waits for another. How many parts there are depends on the tiles of the launch, and so do last bits.

use cuda_std::{Global, atomic, float, thread, unroll, warp};

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

impl Tile {
    /// The position of a token. Rows may be of tokens that the tile does not have: they count as its last one, whose position
    /// is below the length of the sequence, while theirs may be beyond the largest number.
    #[inline(always)]
    pub fn position_of(&self, token: u32) -> i32 {
        self.position + token.min(self.tokens - 1) as i32
    }
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

    /// Keys that this token of the tile sees end here.
    #[inline(always)]
    pub fn end(&self, tile: &Tile, token: u32) -> u32 {
        if self.causal { (tile.position_of(token) + 1).max(0) as u32 } else { tile.len }
    }

    /// Where the keys begin that a token sees whose keys end at `end`.
    #[inline(always)]
    pub fn start(&self, end: u32) -> u32 {
        if self.window == 0 { 0 } else { end.saturating_sub(self.window) }
    }
}

/// Pairs that a lane knows of.
const OF_LANE: usize = 2;

/// The tiles of a launch in their order.
pub struct Schedule {
    /// Pairs of sequence and KV head in a section: as many as the lanes can know of, at most.
    section: u32,
    /// First pair of the section.
    start: u32,
    level: u32,
    /// Tiles before those of the level.
    before: u32,
    /// Tiles of the lane's pairs: of the section's 32 first ones, then of the next.
    tiles: [u32; OF_LANE],
}

impl Schedule {
    /// Before the first tile, with sections of about `section_keys` keys. For whole warps.
    #[inline(always)]
    pub unsafe fn new(batch: &Batch, section_keys: u32) -> Self {
        // Asked for together with the lengths.
        let tokens = Self::tokens(batch, 0);
        let mut keys = 0f32;
        let mut sequence = warp::lane_id();
        while sequence < batch.sequences {
            keys += batch.len(sequence) as f32;
            sequence += 32;
        }
        let average = float::max(warp::reduce_sum(keys), 1.0);
        let section = float::fast::div(section_keys as f32 * batch.sequences as f32, average);
        let section = (section as u32).clamp(1, 32 * OF_LANE as u32);
        let mut schedule = Self { section, start: 0, level: 0, before: 0, tiles: [0; OF_LANE] };
        schedule.know(batch, tokens);
        schedule
    }

    /// Query tokens of the lane's pairs, if a section starts at this one.
    #[inline(always)]
    unsafe fn tokens(batch: &Batch, start: u32) -> [u32; OF_LANE] {
        core::hint::assert_unchecked(batch.kv_heads != 0);
        let mut tokens = [0; OF_LANE];
        unroll::<OF_LANE>(|i| {
            let pair = start + 32 * i as u32 + warp::lane_id();
            if pair < batch.sequences * batch.kv_heads {
                tokens[i] = batch.chunk(pair / batch.kv_heads).1;
            }
        });
        tokens
    }

    /// Takes note of the section's tiles.
    #[inline(always)]
    unsafe fn know(&mut self, batch: &Batch, tokens: [u32; OF_LANE]) {
        core::hint::assert_unchecked(batch.tile_tokens != 0);
        unroll::<OF_LANE>(|i| {
            let inside = 32 * (i as u32) + warp::lane_id() < self.section;
            self.tiles[i] = if inside { tokens[i].div_ceil(batch.tile_tokens) } else { 0 };
        });
    }

    /// The tile of this number, which is above that of the call before. For whole warps.
    #[inline(always)]
    pub unsafe fn find(&mut self, batch: &Batch, index: u32) -> Option<Tile> {
        core::hint::assert_unchecked(batch.tile_tokens != 0 && batch.kv_heads != 0);
        let lane = warp::lane_id();
        let pairs = batch.sequences * batch.kv_heads;
        loop {
            loop {
                // Pairs that have this level, by 32.
                let mut there = [0; OF_LANE];
                unroll::<OF_LANE>(|i| there[i] = warp::warp_vote_ballot(warp::FULL, self.tiles[i] > self.level));
                let mut count = 0;
                unroll::<OF_LANE>(|i| count += there[i].count_ones());
                let mut nth = index - self.before;
                if nth < count {
                    let (mut tiles, mut among, mut pair) = (self.tiles[0], there[0], self.start);
                    unroll::<{ OF_LANE - 1 }>(|i| {
                        let others = there[i].count_ones();
                        if pair == self.start + 32 * i as u32 && nth >= others {
                            nth -= others;
                            (tiles, among, pair) = (self.tiles[i + 1], there[i + 1], pair + 32);
                        }
                    });
                    // The lane with so many others of the level before it.
                    let mine = among >> lane & 1 != 0 && (among & ((1 << lane) - 1)).count_ones() == nth;
                    let owner = warp::warp_vote_ballot(warp::FULL, mine).trailing_zeros();
                    let (tiles, pair) = (warp::shfl_idx(tiles, owner), pair + owner);
                    let before = (tiles - 1 - self.level) * batch.tile_tokens;
                    let sequence = pair / batch.kv_heads;
                    let (first, tokens) = batch.chunk(sequence);
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
                if count == 0 {
                    break;
                }
                // Levels that the same pairs have, in one step.
                let mut left = u32::MAX;
                unroll::<OF_LANE>(|i| {
                    let more = self.tiles[i].wrapping_sub(self.level);
                    left = left.min(if self.tiles[i] > self.level { more } else { u32::MAX });
                });
                let skip = warp::warp_reduce_min_u32(warp::FULL, left).min(nth / count);
                self.level += skip;
                self.before += skip * count;
            }
            if pairs - self.start <= self.section {
                break;
            }
            (self.start, self.level) = (self.start + self.section, 0);
            self.know(batch, Self::tokens(batch, self.start));
        }
        None
    }
}

/// Parts that the keys of a tile are divided into at most, ...
pub const MAX_PARTS: u32 = 16;
/// ... each of about so many keys at least.
pub const PART_KEYS: u32 = 256;

/// What of its keys a block computes of a tile.
#[derive(Clone, Copy)]
pub struct Part {
    /// The first block of keys.
    pub first: u32,
    /// Blocks of keys: one at least, even where there is nothing to see.
    pub blocks: u32,
    /// Which part it is ...
    pub number: u32,
    /// ... of how many.
    pub of: u32,
}

impl Batch {
    /// The part of this number of what a tile sees, in blocks of `keys` keys: of at most `most` parts, if it has so many.
    #[inline(always)]
    pub fn part(&self, tile: &Tile, keys: u32, number: u32, most: u32) -> Option<Part> {
        // What is before it nobody sees.
        let first = self.start(self.end(tile, 0)) / keys;
        let blocks = self.end(tile, tile.tokens - 1).div_ceil(keys).saturating_sub(first).max(1);
        let of = (blocks / (PART_KEYS / keys)).min(most).max(1);
        let begin = number * blocks / of;
        let part = Part { first: first + begin, blocks: (number + 1) * blocks / of - begin, number, of };
        if number < of { Some(part) } else { None }
    }

    /// Into how many parts the keys of each tile may be divided, so that every block has one part at most. For whole warps.
    #[inline(always)]
    pub unsafe fn most_parts(&self) -> u32 {
        core::hint::assert_unchecked(self.tile_tokens != 0);
        // More than there are blocks are not told apart.
        const MOST: u32 = 1 << 20;
        let mut tiles = 0;
        let mut sequence = warp::lane_id();
        while sequence < self.sequences {
            tiles = (tiles + self.chunk(sequence).1.div_ceil(self.tile_tokens).min(MOST)).min(MOST);
            sequence += 32;
        }
        let tiles = warp::warp_reduce_add_u32(warp::FULL, tiles).saturating_mul(self.kv_heads);
        (thread::grid_dim_x() / tiles.max(1)).clamp(1, MAX_PARTS)
    }
}

/// What the results of a part are multiplied with, whose maximum is `top` where that of all parts is `new`, as exponents of
/// 2 once they are multiplied with `fold`. What has seen nothing is 0 times anything finite.
#[inline(always)]
pub fn weight_of_part(top: f32, new: f32, fold: f32) -> f32 {
    if top == f32::NEG_INFINITY { 0.0 } else { float::fast::exp2((top - new) * fold) }
}

/// Counts that a part of a tile is done. Whether all `of` parts are, whose results are visible then; the counter is as it was then. By
/// one thread, behind a barrier of those that stored.
#[inline(always)]
pub unsafe fn last_of_parts(counter: *mut u32, of: u32) -> bool {
    let last = atomic::fetch_add(counter, 1, atomic::Device, atomic::AcqRel) + 1 == of;
    if last {
        atomic::exchange_u32(counter, 0);
    }
    last
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
