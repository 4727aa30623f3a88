//! Tiles of an x-split cache of 16-bit elements: how a warp moves 16 tokens between it and rows of tokens, in whole lines on both sides.
//!
//! A page holds a head as pieces of 16 bytes: 8 elements of a token (keys), or one element of 8 tokens (values). Rows have all elements of a token side by
//! side. Who copies a piece straight from one to the other touches 16 rows with each access of a warp, 32 bytes of each, or single elements. So a warp takes a
//! tile, 16 tokens by 16 chunks of 16 bytes of one head, and changes the order in shared memory, without a barrier of the block:
//!
//! | | a piece of a page | is piece of the tile |
//! | --- | --- | --- |
//! | keys | token `t`, chunk `c` | `17 c + t` |
//! | values | element `8 c + e` of tokens `8 h` to `8 h + 7` | `17 c + 2 e + h` |
//!
//! * On the side of the page lane `l` has pieces `17 (l / 16 + 2 m) + l % 16` of the tile, for `m` from 0 to 7. In the page each `m` is 512 bytes in a row, if blocks
//!   have 16 tokens.
//! * On the side of the rows lane `l` has chunk `l % 16` of tokens `8 (l / 16)` and on, each 256 bytes of two rows. Of values those are 8 elements of 8 tokens,
//!   which become chunks of 8 tokens by 32 byte permutations ([`transposed`]).
//!
//! With 17 for 16 the eight lanes that shared memory serves at a time find their pieces in different banks, on both sides.
//!
//! # Tokens
//! A page's pieces should have tokens of one tile, so tiles are not just 16 tokens of the launch. They begin where *parts* of pages do, 16 tokens (or 8, where
//! blocks are no multiple of 16): what of the first tokens of each 16 goes on with a part that began before belongs to the tile before. Each lane knows the place of one token
//! ([`Places`]), the 16 of the tile and the next 16, so neighbouring tiles agree without asking each other. Tokens of one part go together; where sequences meet, a tile has
//! several parts.

use crate::kv_cache::layout::{PageLayout, XSplitKey, XSplitValue};
use cuda_std::vec::B128;
use cuda_std::{Element, Global, GlobalMut, Shared, integer, unroll, warp};

/// Tokens of a tile, if they are all of one part of a page.
pub const TOKENS: u32 = 16;
/// Elements of a chunk.
pub const N: u32 = 8;
/// Chunks of a head in a tile.
pub const CHUNKS: u32 = 16;
/// Pieces from one chunk of a tile to the next.
pub const PITCH: u32 = 17;
/// Pieces of a tile.
pub const PIECES: u32 = CHUNKS * PITCH;
/// Bytes of shared memory of a tile.
pub const BYTES: u32 = 16 * PIECES;
/// Pieces of a tile that a lane has.
pub const OF_LANE: usize = 8;

/// Tiles of a head: more than one, if it has more than [`CHUNKS`] chunks.
pub const fn panels(head_dim: u32) -> u32 {
    head_dim.div_ceil(CHUNKS * N)
}

/// Chunks of panel `panel` of a head.
#[inline(always)]
pub const fn chunks(head_dim: u32, panel: u32) -> u32 {
    let rest = head_dim / N - panel * CHUNKS;
    if rest < CHUNKS { rest } else { CHUNKS }
}

/// Tokens of a part that are worth the way through shared memory.
const MANY: u32 = 8;

/// The block of a token that is not in the cache.
pub const NOWHERE: u32 = u32::MAX;

/// Where the tokens of a tile and the 16 behind them are in the cache: one for each lane of the warp.
#[derive(Clone, Copy)]
pub struct Places {
    block: u32,
    at: u32,
    /// Tokens of a part.
    part: u32,
    lane: u32,
}

/// Tokens that are neighbours in one part of a page; or just some of a tile.
#[derive(Clone, Copy)]
pub struct Part {
    /// The block of the cache, of a part.
    pub block: usize,
    /// Where in the block the part begins.
    pub base: u32,
    /// How many tokens it has.
    pub size: u32,
    /// The lanes that have the places of these tokens.
    pub lanes: u32,
    /// Which tokens of the part they are: bit `t` for token `base + t`.
    pub tokens: u32,
    /// The lane that has the place of the part's first token, or would have it: a token that is not wanted may even be before the first lane.
    first: u32,
    /// Whether it is a part; otherwise `tokens` are counted from the lane `first` on, and each one has a place of its own.
    pub is_part: bool,
}

impl Part {
    /// Whether the first lane has the place of the part's first token.
    #[inline(always)]
    pub fn begins_here(self) -> bool {
        self.first == 0
    }

    /// The row of token `t` of the part, where `row` is that of the first lane's token.
    #[inline(always)]
    pub fn row(self, row: u32, t: u32) -> usize {
        (row as usize + t as usize).wrapping_add_signed(self.first as i32 as isize)
    }

    /// The lane that has the place of token `t`, if that is wanted; else any lane.
    #[inline(always)]
    pub fn lane(self, t: u32) -> u32 {
        self.first.wrapping_add(t) % warp::WARP_SIZE
    }
}

impl Places {
    /// The calling lane's token is token `at` of a block. `block_size` is a multiple of 8.
    #[inline(always)]
    pub fn new(lane: u32, block: u32, at: u32, block_size: u32) -> Self {
        let part = if block_size.is_multiple_of(TOKENS) { TOKENS } else { TOKENS / 2 };
        Self { block, at, part, lane }
    }

    /// The lanes whose tokens are those of the tile. `first`: it is the first one of the launch. For the whole warp.
    #[inline(always)]
    #[track_caller]
    pub fn own(self, first: bool) -> u32 {
        // Whether a token goes on with the part of the first of its 16, which began before.
        let head = self.lane & TOKENS;
        let (block, at) = (warp::shfl_idx(self.block, head), warp::shfl_idx(self.at, head));
        let goes_on = self.block == block
            && block != NOWHERE
            && at & (self.part - 1) != 0
            && self.at.wrapping_sub(at) == self.lane - head
            && self.at.wrapping_sub(at & !(self.part - 1)) < self.part;
        let goes_on = warp::warp_vote_ballot(warp::FULL, goes_on);
        let begin = if first { 0 } else { (goes_on & 0xffff).trailing_ones() };
        let end = TOKENS + (goes_on >> TOKENS).trailing_ones();
        (1 << end) - (1 << begin)
    }

    /// Those of the lanes `rest`, of which there is one, that are in the same part as the first of them. For the whole warp.
    #[inline(always)]
    #[track_caller]
    pub fn part(self, rest: u32) -> Part {
        let lead = rest.trailing_zeros();
        let (block, at) = (warp::shfl_idx(self.block, lead), warp::shfl_idx(self.at, lead));
        let before = at & (self.part - 1);
        let base = at - before;
        let first = lead.wrapping_sub(before);
        let same = rest >> self.lane & 1 != 0
            && self.block == block
            && self.at.wrapping_sub(base) < self.part
            && self.at.wrapping_sub(base) == self.lane.wrapping_sub(first);
        let lanes = warp::warp_vote_ballot(warp::FULL, same);
        Part {
            block: block as usize,
            base,
            size: self.part,
            lanes,
            tokens: (lanes >> lead) << before,
            first,
            is_part: true,
        }
    }

    /// As [`part`](Self::part), but if those are few: the first of the lanes `rest` and those of the next 15 that are in `rest`, wherever their tokens are. For the whole
    /// warp.
    #[inline(always)]
    #[track_caller]
    pub fn part_or_few(self, rest: u32) -> Part {
        let part = self.part(rest);
        if part.lanes.count_ones() >= MANY {
            return part;
        }
        let first = rest.trailing_zeros();
        let tokens = rest >> first & 0xffff;
        Part { lanes: tokens << first, tokens, first, is_part: false, ..part }
    }

    /// Block and place of the token of a lane, each lane asking for one. For the whole warp.
    #[inline(always)]
    #[track_caller]
    pub fn of(self, lane: u32) -> (usize, u32) {
        (warp::shfl_idx(self.block, lane) as usize, warp::shfl_idx(self.at, lane))
    }
}

/// The calling lane's first piece of a part of a page, as an element of the page, and the tokens of the part that it has elements of. The lane's other pieces
/// follow [`next_piece`] elements apart. Lanes for whose tokens the part is too small have pieces of others.
#[inline(always)]
pub fn first_piece(is_key: bool, lane: u32, panel: u32, part: Part, block_size: u32) -> (usize, u32) {
    let (low, high) = (lane % 16, lane / 16);
    if is_key {
        let layout = XSplitKey::<{ N as usize }>::new(0, 0, 0, block_size);
        (layout.within(part.base + (low & (part.size - 1)), (panel * CHUNKS + high) * N), 1 << low)
    } else {
        let (element, token) = (lane / 2, lane % 2 * N);
        let layout = XSplitValue::new(0, 0, 0, block_size);
        (layout.within(part.base + (token & (part.size - 1)), panel * CHUNKS * N + element), 0xff << token)
    }
}

/// Elements of a page from a lane's piece to its next one: two chunks.
#[inline(always)]
pub const fn next_piece(block_size: u32) -> usize {
    2 * N as usize * block_size as usize
}

/// Eight elements of eight tokens, as pairs of tokens of each element, become pairs of elements of each token. The other way round it is the same.
#[inline(always)]
pub fn transposed(elements: [[u32; 4]; 8]) -> [[u32; 4]; 8] {
    let mut tokens = [[0; 4]; 8];
    unroll::<4>(|t| {
        unroll::<4>(|e| {
            let (a, b) = (elements[2 * e][t], elements[2 * e + 1][t]);
            tokens[2 * t][e] = integer::permute(a, b, 0x5410);
            tokens[2 * t + 1][e] = integer::permute(a, b, 0x7632);
        });
    });
    tokens
}

/// The chunk of a head that a lane has on the side of the rows; the first of the panel for those that have none.
#[inline(always)]
pub const fn chunk_of(lane: u32, panel: u32, head_dim: u32) -> u32 {
    panel * CHUNKS + if lane % 16 < chunks(head_dim, panel) { lane % 16 } else { 0 }
}

/// What a lane has of the rows, the chunk from element `dim` on of tokens `8 (l / 16)` and on: of those of the tokens that are `wanted`, from row `row` on, and of others
/// that of row `there`. `x` is the first element of the head.
///
/// # Safety
/// Rows of wanted tokens, and `there`, may be read, in chunks of 16 bytes.
#[inline(always)]
#[track_caller]
pub unsafe fn load_rows<T: Element>(
    x: Global<T>,
    token_stride: usize,
    lane: u32,
    dim: u32,
    row: usize,
    wanted: u32,
    there: u32,
) -> [[u32; 4]; 8] {
    let first = lane / 16 * N;
    let x = x.offset(dim);
    let there = x.ptr(there as usize * token_stride);
    let mut from = x.ptr(row.wrapping_add(first as usize).wrapping_mul(token_stride));
    let mut rows = [[0; 4]; 8];
    unroll::<8>(|t| {
        let of = if wanted >> (first + t as u32) & 1 != 0 { from } else { there };
        let B128([a, b, c, d]) = Global::new(of).get_as::<B128<u32, 4>>(0u32);
        rows[t] = [a, b, c, d];
        from = from.wrapping_add(token_stride);
    });
    rows
}

/// Writes what [`load_rows`] loaded to the tile, in the order of pages.
///
/// # Safety
/// The tile is the warp's, and has been read.
#[inline(always)]
#[track_caller]
pub unsafe fn put_rows(pieces: Shared<B128<u32, 4>>, is_key: bool, lane: u32, rows: [[u32; 4]; 8]) {
    let (low, high) = (lane % 16, lane / 16);
    if is_key {
        let to = pieces.offset(low * PITCH + high * N);
        unroll::<8>(|t| to.set(t, B128(rows[t])));
    } else {
        let to = pieces.offset(low * PITCH + high);
        let elements = transposed(rows);
        unroll::<8>(|e| to.set(2 * e, B128(elements[e])));
    }
}

/// Stores the tile to its part of a page: whole pieces, and single elements of values of which not all tokens are wanted.
///
/// # Safety
/// The tile has been written by the warp; nobody else accesses these elements of the page unordered.
#[inline(always)]
#[track_caller]
pub unsafe fn store_pieces<T: Element>(
    page: GlobalMut<T>,
    is_key: bool,
    part: Part,
    block_size: u32,
    head_dim: u32,
    lane: u32,
    panel: u32,
    pieces: Shared<B128<u32, 4>>,
) {
    let (low, high, chunks) = (lane % 16, lane / 16, chunks(head_dim, panel));
    let (first, has) = first_piece(is_key, lane, panel, part, block_size);
    let mut to = page.ptr(first);
    let pieces = pieces.offset(high * PITCH + low);
    let left = chunks.saturating_sub(high);
    // Not kept in registers, eight times, from one part to the next.
    let next = next_piece(integer::opaque(block_size));
    if part.tokens & has == has {
        unroll::<OF_LANE>(|m| {
            if 2 * (m as u32) < left {
                GlobalMut::new(to).set_as(0u32, pieces.get(m as u32 * (2 * PITCH)));
            }
            to = to.wrapping_add(next);
        });
    } else if !is_key {
        let mut m = 0;
        while 2 * m < left {
            let B128(words) = pieces.get(m * (2 * PITCH));
            let out = GlobalMut::new(to);
            unroll::<8>(|t| {
                if part.tokens & has & 0x0101 << t != 0 {
                    out.set_as(t, (words[t / 2] >> (16 * (t % 2))) as u16);
                }
            });
            to = to.wrapping_add(next);
            m += 1;
        }
    }
}

/// Stores the chunk from element `dim` on of one token, `at` in its block, to a page: past the tile.
///
/// # Safety
/// Nobody else accesses these elements unordered.
#[inline(always)]
#[track_caller]
pub unsafe fn store_chunk<T: Element>(
    page: GlobalMut<T>,
    is_key: bool,
    block_size: u32,
    at: u32,
    dim: u32,
    chunk: [u32; 4],
) {
    if is_key {
        page.set_as(XSplitKey::<{ N as usize }>::new(0, 0, 0, block_size).within(at, dim), B128(chunk));
    } else {
        let layout = XSplitValue::new(0, 0, 0, block_size);
        unroll::<8>(|e| {
            page.set_as(layout.within(at, dim + e as u32), (chunk[e / 2] >> (16 * (e % 2))) as u16);
        });
    }
}
