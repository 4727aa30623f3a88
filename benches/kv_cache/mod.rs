mod advance;
mod allocator;
mod copy_blocks;
mod gather_cache;
mod reshape_and_cache;
mod swap;

use warploom::kv_cache::CacheShape;
use warploom::{Device, Result, Tensor};
use warploom_benches::Harness;

/// Key/value heads, elements of a head, tokens of a block.
const SHAPE: (usize, usize, usize) = (8, 128, 16);

pub fn benches(harness: &mut Harness) {
    reshape_and_cache::benches(harness);
    gather_cache::benches(harness);
    copy_blocks::benches(harness);
    swap::benches(harness);
    advance::benches(harness);
    allocator::benches(harness);
}

/// Slots of a prompt: one after another in each block, the blocks in no order.
pub fn slots(device: &Device, tokens: usize, shape: CacheShape) -> Result<Tensor<i64>> {
    let slot = |t: usize| (block(t / shape.block_size, shape.blocks) * shape.block_size + t % shape.block_size) as i64;
    let slots: Vec<i64> = (0..tokens).map(slot).collect();
    Tensor::from_slice(device, &slots, &[tokens])
}

/// The `i`-th of `blocks` blocks in an order that jumps about.
fn block(i: usize, blocks: usize) -> usize {
    // 7919 is a prime that divides no number of blocks used here.
    i * 7919 % blocks
}
