//! Copying blocks.

/// `tensor[to] = tensor[from]` for each pair in turn, in blocks of `block_len` elements, `block_stride` apart. Pairs out of
/// range are skipped.
pub fn copy_blocks<T: Copy>(
    tensor: &mut [T],
    pairs: &[(i64, i64)],
    blocks: usize,
    block_len: usize,
    block_stride: usize,
) {
    let known = |b: i64| (0..blocks as i64).contains(&b);
    for &(from, to) in pairs.iter().filter(|(from, to)| known(*from) && known(*to)) {
        let from = from as usize * block_stride;
        tensor.copy_within(from..from + block_len, to as usize * block_stride);
    }
}
