//! What the tests of rotary embedding share.

use cuda_std::Element;
use warploom::Tensor;

mod cache;
mod qk_norm_rotary;
mod rotary;
mod rotary_and_cache;

/// Where heads of several tensors (queries, keys, values) lie in one buffer.
struct Rows {
    head_dim: usize,
    tokens: usize,
    /// Elements of the buffer.
    len: usize,
    /// Of each tensor: its heads, where they begin, and elements from token to token.
    parts: Vec<[usize; 3]>,
}

impl Rows {
    /// Parts of a token's row, as a fused projection makes them, with `pad` elements before and after; or, `apart`, one tensor after the other, whose rows
    /// have different lengths.
    fn new(tokens: usize, heads: &[usize], head_dim: usize, pad: usize, apart: bool) -> Self {
        let width = heads.iter().sum::<usize>() * head_dim + 2 * pad;
        let (mut len, mut before) = (if apart { 0 } else { tokens * width }, pad);
        let parts = heads.iter().enumerate().map(|(i, &n)| {
            if apart {
                let (start, stride) = (len.next_multiple_of(16) + pad, n * head_dim + pad + 8 * i);
                len = start + tokens * stride;
                [n, start, stride]
            } else {
                before += n * head_dim;
                [n, before - n * head_dim, width]
            }
        });
        let parts = parts.collect();
        Self { head_dim, tokens, len, parts }
    }

    fn view<T: Element>(&self, all: &Tensor<T>, part: usize) -> Tensor<T> {
        let [heads, start, stride] = self.parts[part];
        all.as_strided(&[self.tokens, heads, self.head_dim], &[stride, self.head_dim, 1], start).unwrap()
    }

    /// Where a head begins.
    fn at(&self, token: usize, part: usize, head: usize) -> usize {
        let [_, start, stride] = self.parts[part];
        start + token * stride + head * self.head_dim
    }
}
