//! Positions, slots and lengths of the next tokens.

use crate::kv_cache::CacheShape;

/// For each sequence: position and slot of its next token (-1 for none), and its length afterwards. `block_table` is
/// `[lens, max_blocks]`.
pub fn advance(lens: &[i32], block_table: &[i32], max_blocks: usize, shape: CacheShape) -> Vec<(i32, i64, i32)> {
    let one = |(i, &len): (usize, &i32)| {
        let block = len.max(0) as usize / shape.block_size;
        if len < 1 || block >= max_blocks {
            return (-1, -1, len);
        }
        let page = i64::from(block_table[i * max_blocks + block]);
        let slot = page * shape.block_size as i64 + i64::from(len) % shape.block_size as i64;
        (len, if (0..shape.blocks as i64).contains(&page) { slot } else { -1 }, len + 1)
    };
    lens.iter().enumerate().map(one).collect()
}
