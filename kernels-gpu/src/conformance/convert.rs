//! Conversions between number formats. On sm_80 and sm_90a the 8-bit formats are different code.

use super::Words;
use cuda_std::vec::{B32, B64, B128};
use cuda_std::{E4M3, E5M2, Global, bf16, convert, entries, f16, thread, vec};

/// Threads of a block.
pub const THREADS: usize = 128;
/// Words of a thread.
pub const WORDS: usize = 88;

/// The same NaN for all.
#[inline(always)]
fn bits(v: f32) -> u32 {
    if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() }
}

/// `data`: `[n + 3]`; `out`: `[n, WORDS]`, with `n` a multiple of `THREADS`. Grid: `n / THREADS`.
#[inline(always)]
pub unsafe fn conformance(data: *const f32, out: *mut u32) {
    let i = thread::index_1d();
    let data = Global::new(data);
    let v = [data.get(i), data.get(i + 1), data.get(i + 2), data.get(i + 3)];
    let mut words = Words::new(out, WORDS);
    words.put(convert::f32_to_bf16(v[0]).to_bits() as u32 | (convert::f32_to_f16(v[0]).to_bits() as u32) << 16);
    words.put(convert::pack_bf16x2(v[0], v[1]));
    words.put(convert::pack_f16x2(v[0], v[1]));
    words.put(convert::f32_to_tf32(v[0]));
    words.put(bits(convert::bf16_to_f32(bf16::from_bits(i as u16 * 61))));
    words.put(bits(convert::f16_to_f32(f16::from_bits(i as u16 * 61))));
    let (word, other) = (0x1234_5678 + i * 977, i << 8 | 0x7c);
    words.put_all_f32(convert::unpack_bf16x2(word));
    words.put_all_f32(convert::unpack_f16x2(word));
    words.put_all_f32(convert::unpack_bf16x2(other));
    words.put_all_f32(convert::unpack_f16x2(other));
    // Numbers, and every bit pattern.
    let (first, second) = (convert::pack_bf16x2(v[0], v[1]), convert::pack_bf16x2(v[2], v[3]));
    words.put_all_f32(convert::unpack_bf16x2(convert::max_bf16x2(first, second)));
    words.put_all_f32(convert::unpack_bf16x2(convert::max_bf16x2(word, other)));
    let magnitudes = |a, b| convert::unpack_bf16x2(convert::max_magnitude_bf16x2(a, b) & 0x7fff_7fff);
    words.put_all_f32(magnitudes(first, second));
    words.put_all_f32(magnitudes(word, other));
    words.put_all_f32(convert::unpack_bf16x2(convert::add_bf16x2(first, second)));
    words.put_all_f32(convert::unpack_bf16x2(convert::add_bf16x2(word, other)));
    words.put(convert::join_halves(i as u16, (i * 7) as u16));
    let (first, second) = (convert::pack_f16x2(v[0], v[1]), convert::pack_f16x2(v[2], v[3]));
    words.put_all_f32(convert::unpack_f16x2(convert::max_f16x2(first, second)));
    words.put_all_f32(convert::unpack_f16x2(convert::max_f16x2(word, other)));
    words.put_all_f32(convert::unpack_f16x2(convert::add_f16x2(first, second)));
    words.put_all_f32(convert::unpack_f16x2(convert::add_f16x2(word, other)));

    words.put(convert::f32_to_i32(v[0]) as u32);
    words.put(convert::f32_to_u32(v[0]));
    words.put(convert::f32_to_i8(v[0]) as u8 as u32 | (convert::f32_to_u8(v[0]) as u32) << 8);
    words.put(convert::pack_i8x4(v));
    let four = i.wrapping_mul(0x0103_0709);
    words.put_all_f32(convert::unpack_i8x4(four));
    let [low, high] = convert::i8x4_to_f16x2(four);
    words.put_all_f32(convert::unpack_f16x2(low));
    words.put_all_f32(convert::unpack_f16x2(high));

    words.put(convert::f32_to_e4m3(v[0]).0 as u32 | (convert::f32_to_e5m2(v[0]).0 as u32) << 8);
    words.put(convert::pack_e4m3x2(v[0], v[1]) as u32 | (convert::pack_e5m2x2(v[0], v[1]) as u32) << 16);
    words.put(convert::pack_e4m3x4(v));
    words.put(convert::pack_e5m2x4(v));
    // Every code is there, as `i` goes through all bytes.
    let pair = (i & 0xff | (i * 7) << 8) as u16;
    words.put(bits(convert::e4m3_to_f32(E4M3(i as u8))));
    words.put(bits(convert::e5m2_to_f32(E5M2(i as u8))));
    words.put_all_f32(convert::unpack_e4m3x2(pair));
    words.put_all_f32(convert::unpack_e5m2x2(pair));
    words.put_all_f32(convert::unpack_e4m3x4(four));
    words.put_all_f32(convert::unpack_e5m2x4(four));
    words.put_all_f32(convert::unpack_f16x2(convert::e4m3x2_to_f16x2(pair)));
    words.put_all_f32(convert::unpack_f16x2(convert::e5m2x2_to_f16x2(pair)));
    for [low, high] in [convert::e4m3x4_to_f16x2(four), convert::e5m2x4_to_f16x2(four)] {
        words.put_all_f32(convert::unpack_f16x2(low));
        words.put_all_f32(convert::unpack_f16x2(high));
    }

    // Whole vectors by pairs, and an odd number of values.
    let B32(h) = B32::<bf16, 2>::from_f32([v[0], v[1]]);
    words.put(h[0].to_bits() as u32 | (h[1].to_bits() as u32) << 16);
    let B64(h) = B64::<f16, 4>::from_f32(v);
    words.put(h[2].to_bits() as u32 | (h[3].to_bits() as u32) << 16);
    let B128(h) = B128::<bf16, 8>::from_f32([v[0], v[1], v[2], v[3], v[3], v[2], v[1], v[0]]);
    words.put(h[4].to_bits() as u32 | (h[7].to_bits() as u32) << 16);
    let B32(h) = B32::<E4M3, 4>::from_f32(v);
    words.put(u32::from_le_bytes([h[0].0, h[1].0, h[2].0, h[3].0]));
    words.put_all_f32(B32::<E5M2, 4>::splat(E5M2(i as u8)).to_f32());
    let odd: [bf16; 3] = vec::from_f32([v[0], v[1], v[2]]);
    words.put(odd[2].to_bits() as u32);
    let odd: [f32; 3] = vec::to_f32(odd);
    words.put(bits(odd[2]));
    words.put(bits(f16::from_f32(v[1]).to_f32()));
    words.done();
}

entries! {
    pub struct Args(data: *const f32, out: *mut u32);
    conformance_convert {} [128] => conformance;
}
