//! Layers L0 and L1 take any number: sizes that no launch has make geometries that none takes, not smaller ones.

use std::ptr::{null, null_mut};
use warploom::kv_cache::{self, CacheLayout, copy_blocks, gather_cache, reshape_and_cache, swap};
use warploom::rope::qk_norm_rotary::Heads;
use warploom::rope::{Pairing, qk_norm_rotary, rotary, rotary_and_cache};
use warploom::{DType, Device, Error, Stream, norm};

const MOST: u32 = u32::MAX;
const BF16: DType = DType::Bf16;

fn rotary_and_cache_args(query_heads: u32, kv_heads: u32, head_dim: u32, tokens: u32) -> rotary_and_cache::Args {
    rotary_and_cache::Args {
        query: null_mut(),
        key: null(),
        value: null(),
        key_cache: null_mut(),
        value_cache: null_mut(),
        positions: null(),
        angles: null(),
        slots: null(),
        key_scale: null(),
        value_scale: null(),
        status: null_mut(),
        query_token_stride: 0,
        query_head_stride: 0,
        key_token_stride: 0,
        key_head_stride: 0,
        value_token_stride: 0,
        value_head_stride: 0,
        key_page_block_stride: 0,
        key_page_head_stride: 0,
        key_page_token_stride: 0,
        value_page_block_stride: 0,
        value_page_head_stride: 0,
        value_page_token_stride: 0,
        max_positions: 0,
        slot_count: 0,
        block_size: 1,
        tokens,
        query_heads,
        kv_heads,
        head_dim,
        offset: 0,
        rot_dim: 64,
        flags: 0,
    }
}

fn qk_norm_rotary_args(heads: u32, head_dim: u32, rot_dim: u32) -> qk_norm_rotary::Args {
    qk_norm_rotary::Args {
        query: null_mut(),
        key: null_mut(),
        query_weight: null(),
        key_weight: null(),
        positions: null(),
        angles: null(),
        status: null_mut(),
        query_token_stride: 0,
        query_head_stride: 0,
        key_token_stride: 0,
        key_head_stride: 0,
        max_positions: 0,
        query_heads: heads,
        key_heads: heads,
        head_dim,
        offset: 0,
        rot_dim,
        flags: 0,
        eps: 0.0,
        weight_offset: 0.0,
    }
}

#[test]
fn geometries() {
    let largest = |grid: [u32; 3]| *grid.iter().max().unwrap();
    for layout in [CacheLayout::XSplit, CacheLayout::Nhd] {
        for (tokens, heads, dim) in [(MOST, MOST, MOST), (1 << 22, 1 << 22, 1 << 31)] {
            assert!(largest(reshape_and_cache::geometry(BF16, layout, tokens, heads, dim).grid) > 65535);
            assert!(largest(gather_cache::geometry(BF16, layout, tokens, heads, dim).grid) > 65535);
        }
        for args in [rotary_and_cache_args(MOST, MOST, MOST, MOST), rotary_and_cache_args(1, 1 << 30, 128, 1)] {
            assert!(rotary_and_cache::geometry(BF16, layout, 1, &args).grid[0] > 1 << 20);
            assert!(rotary_and_cache::heads_of_a_thread(BF16, BF16, layout, &args) > 0);
        }
        // Heads that are narrower than what turns of them, and threads without any.
        let narrow = rotary_and_cache_args(2, 2, 32, 5);
        assert!(rotary_and_cache::heads_of_a_thread(BF16, BF16, layout, &narrow) > 0);
        for (heads, args) in [(0, &narrow), (1, &narrow), (2, &narrow), (0, &rotary_and_cache_args(2, 2, 64, 5))] {
            let geometry = rotary_and_cache::geometry(BF16, layout, heads, args);
            assert!(geometry.grid.iter().all(|n| *n > 0), "{heads}: {geometry:?}");
        }
    }
    assert_eq!(reshape_and_cache::tiles_geometry(16, 1 << 31, 128).grid[0], MOST);
    assert_eq!(copy_blocks::geometry(1, 2, 1 << 46).grid[2], MOST);
    assert_eq!(copy_blocks::geometry(1, 2, (1 << 46) + (1 << 14)).grid[2], MOST);
    assert_eq!(swap::geometry(480, MOST, 1 << 50).grid, swap::geometry(MOST, MOST, usize::MAX).grid);
    for (heads, dim, rot) in [(MOST, 128, 128), (1, MOST, 128), (1, 1024, 128), (1, 64, 128)] {
        let geometry = qk_norm_rotary::geometry(BF16, Heads::Wide, 1, &qk_norm_rotary_args(heads, dim, rot));
        assert!(geometry.block[0] <= 32 && geometry.grid[1] > 0, "{heads} {dim} {rot}: {geometry:?}");
    }
    let _ = kv_cache::advance::geometry(MOST);
}

#[test]
fn launches() {
    let device = Device::simt();
    let stream = Stream::new(&device).unwrap();
    let refused = |what: &str, result: warploom::Result<()>| {
        assert!(matches!(result, Err(Error::Unsupported { .. } | Error::Launch(_))), "{what}: {result:?}");
    };
    // SAFETY: nothing runs.
    unsafe {
        let args = copy_blocks::Args {
            tensors: null(),
            pairs: null(),
            status: null_mut(),
            block_bytes: 1 << 46,
            block_stride: 1 << 46,
            blocks: 2,
        };
        refused("copy_blocks", copy_blocks::launch(&stream, 1, 2, &args));
        let args = rotary::Args {
            query: null_mut(),
            key: null_mut(),
            positions: null(),
            angles: null(),
            status: null_mut(),
            query_token_stride: 0,
            query_head_stride: 0,
            key_token_stride: 0,
            key_head_stride: 0,
            max_positions: 0,
            tokens: 1,
            query_heads: 1 << 31,
            key_heads: 1 << 31,
            offset: 0,
            rot_dim: 16,
            flags: 0,
        };
        refused("rotary", rotary::launch(&stream, BF16, Pairing::Neox, &args));
        for (heads, dim) in [(1 << 31, 128), (1, 1024)] {
            let args = qk_norm_rotary_args(heads, dim, 128);
            refused("qk_norm_rotary", qk_norm_rotary::launch(&stream, BF16, Pairing::Neox, 1, &args));
            let args = norm::qk_norm::Args {
                q: null_mut(),
                k: null_mut(),
                q_weight: null(),
                k_weight: null(),
                q_heads: heads,
                k_heads: heads,
                n: dim,
                q_stride: 0,
                q_head_stride: 0,
                k_stride: 0,
                k_head_stride: 0,
                weight_offset: 0.0,
                eps: 0.0,
            };
            refused("qk_norm", norm::qk_norm::launch(&stream, BF16, 1, &args));
        }
    }
}
