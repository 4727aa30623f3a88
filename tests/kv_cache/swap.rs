//! Blocks go to the host and come back, by copies of runs and by a kernel; with blocks far from each other, and while sequences are forked.

use super::{all_bits, bits, gapped_layers, rows_of};
use proptest::prelude::*;
use warploom::kv_cache::ReshapeAndCacheOptions;
use warploom::kv_cache::swap::{Args, MAX_PAIRS, Pairs, Run, SwapPath, launch, runs};
use warploom::kv_cache::{BlockAllocator, Sequence};
use warploom::kv_cache::{CacheElement, CacheLayers, CacheLayout, CacheShape, HostCache, PageStrides};
use warploom::{Device, Error, Event, Graph, Pinned, Stream, Tensor, bf16, kv_cache};
use warploom_tests::{on_every_device, property};

const SHAPE: CacheShape = CacheShape::new(6, 8, 2, 16);

/// By the bytes that lie together, and always one or the other.
const PATHS: [Option<SwapPath>; 3] = [None, Some(SwapPath::CopyEngine), Some(SwapPath::Kernel)];

/// Two layers with all slots written.
fn filled(device: &Device, stream: &Stream, layout: CacheLayout, shape: CacheShape) -> CacheLayers<bf16> {
    let mut caches = CacheLayers::<bf16>::zeros(device, 2, layout, shape).unwrap();
    let (n, heads, dim) = (shape.slots(), shape.heads, shape.head_dim);
    let slots: Vec<i64> = (0..n as i64).collect();
    let slots = Tensor::from_slice(device, &slots, &[n]).unwrap();
    for l in 0..2 {
        let (key, _) = rows_of::<bf16>(device, n, heads, dim, 0, 10 + l as u64);
        let (value, _) = rows_of::<bf16>(device, n, heads, dim, 0, 20 + l as u64);
        let mut layer = caches.layer_mut(l).unwrap();
        kv_cache::reshape_and_cache(stream, &mut layer, None, &key, &value, &slots, &ReshapeAndCacheOptions::default())
            .unwrap();
    }
    caches
}

fn block(caches: &CacheLayers<bf16>, layer: usize, block: usize) -> (Vec<u32>, Vec<u32>) {
    let cache = &caches.layers()[layer];
    let of = |t: &Tensor<bf16>| t.narrow(0, block, 1).unwrap().to_vec().unwrap().into_iter().map(bits).collect();
    (of(cache.key()), of(cache.value()))
}

#[test]
fn out_and_in_again() {
    on_every_device(|device, stream| {
        for (layout, path) in [CacheLayout::XSplit, CacheLayout::Nhd].into_iter().zip([PATHS[1], PATHS[2]]) {
            let mut caches = filled(device, stream, layout, SHAPE);
            let mut host = HostCache::zeros(&caches, 5).unwrap();
            host.set_path(path);
            let before: Vec<_> = (0..6).map(|b| [block(&caches, 0, b), block(&caches, 1, b)]).collect();
            kv_cache::swap_out(stream, &mut host, &caches, &[(4, 2), (1, 0), (5, 3)]).unwrap();
            for (device_block, host_block) in [(4, 2), (1, 0), (5, 3)] {
                for (layer, want) in before[device_block].iter().enumerate() {
                    let (k, v) = host.block(layer, host_block).unwrap();
                    let got = (k.iter().copied().map(bits).collect(), v.iter().copied().map(bits).collect());
                    assert_eq!(got, *want);
                }
            }
            assert!(host.block(0, 1).unwrap().0.iter().all(|v| v.to_bits() == 0));
            kv_cache::swap_in(stream, &mut caches, &host, &[(2, 0), (0, 4)]).unwrap();
            stream.synchronize().unwrap();
            let from = [4, 1, 2, 3, 1, 5];
            for (b, (layer, from)) in (0..6).flat_map(|b| (0..2).map(move |l| (b, (l, from[b])))) {
                assert_eq!(block(&caches, layer, b), before[from][layer], "block {b}");
            }
        }
    });
}

/// Blocks of the device and of the host in the property.
const BLOCKS: (usize, usize) = (7, 5);

/// What is done with pairs of blocks.
#[derive(Clone, Copy, Debug)]
enum What {
    Out,
    In,
    Copy,
}

/// Steps, each with pairs of blocks: any to different ones, in no order; from even to odd ones where they are copied within the device.
fn steps() -> impl Strategy<Value = Vec<(What, Vec<(usize, usize)>)>> {
    let pairs = |from: usize, to: usize| {
        let to = prop::sample::subsequence((0..to).collect::<Vec<_>>(), 0..=to).prop_shuffle();
        (to, prop::collection::vec(0..from, 8)).prop_map(|(to, from)| from.into_iter().zip(to).collect::<Vec<_>>())
    };
    let within = || {
        let odd = |(from, to): (usize, usize)| (2 * from, 2 * to + 1);
        pairs(BLOCKS.0.div_ceil(2), BLOCKS.0 / 2).prop_map(move |p| p.into_iter().map(odd).collect::<Vec<_>>())
    };
    let step = prop_oneof![
        pairs(BLOCKS.0, BLOCKS.1).prop_map(|p| (What::Out, p)),
        pairs(BLOCKS.1, BLOCKS.0).prop_map(|p| (What::In, p)),
        within().prop_map(|p| (What::Copy, p)),
    ];
    prop::collection::vec(step, 1..7)
}

fn check_steps<S: CacheElement>(cases: u32) {
    let layouts = prop::sample::select(vec![CacheLayout::XSplit, CacheLayout::Nhd, CacheLayout::Hnd]);
    let places = (prop::sample::select(vec![0usize, 3, 16]), 0usize..2, prop::sample::select(vec![1usize, 4, 5]));
    let paths = prop::sample::select(PATHS.to_vec());
    property(
        cases,
        (layouts, places, 1usize..4, paths, steps()),
        |device, stream, (layout, places, layers, path, steps)| {
            let (gap, offset, block_size) = places;
            let shape = CacheShape::new(BLOCKS.0, block_size, 2, 16);
            let (mut caches, memory) = gapped_layers::<S>(device, layers, layout, shape, gap, offset);
            let mut host = HostCache::zeros(&caches, BLOCKS.1).unwrap();
            host.set_path(path);
            // The memory of the device with what lies between the blocks, and that of the host.
            let (len, stride) = (shape.block_len(), shape.block_len() + gap);
            let mut on_device = all_bits(&memory);
            let mut on_host = vec![vec![0u32; BLOCKS.1 * len]; 2 * layers];
            for (what, pairs) in &steps {
                match what {
                    What::Out => kv_cache::swap_out(stream, &mut host, &caches, pairs).unwrap(),
                    What::In => kv_cache::swap_in(stream, &mut caches, &host, pairs).unwrap(),
                    What::Copy => {
                        let flat: Vec<i64> = pairs.iter().flat_map(|&(from, to)| [from as i64, to as i64]).collect();
                        let flat = Tensor::from_slice(device, &flat, &[pairs.len(), 2]).unwrap();
                        kv_cache::copy_blocks(stream, &mut caches, None, &flat).unwrap();
                    }
                }
                for (device, host) in on_device.iter_mut().zip(&mut on_host) {
                    for &(from, to) in pairs {
                        match what {
                            What::Out => {
                                host[to * len..][..len].copy_from_slice(&device[offset + from * stride..][..len])
                            }
                            What::In => {
                                device[offset + to * stride..][..len].copy_from_slice(&host[from * len..][..len])
                            }
                            What::Copy => device.copy_within(
                                offset + from * stride..offset + from * stride + len,
                                offset + to * stride,
                            ),
                        }
                    }
                }
            }
            prop_assert_eq!(all_bits(&memory), on_device);
            for (i, want) in on_host.iter().enumerate() {
                for (b, want) in want.chunks(len).enumerate() {
                    let (keys, values) = host.block(i / 2, b).unwrap();
                    let got: Vec<u32> = [keys, values][i % 2].iter().copied().map(bits).collect();
                    prop_assert_eq!(&got[..], want, "tensor {}, block {}", i, b);
                }
            }
            Ok(())
        },
    );
}

#[test]
fn any_steps_in_any_layout_with_anything_between_the_blocks() {
    check_steps::<bf16>(24);
    check_steps::<i8>(12);
    check_steps::<f32>(12);
}

/// As many as two launches have the pairs of, and a few more; blocks of one piece and a part, and of less than a vector for each thread.
#[test]
fn more_pairs_than_a_launch_has() {
    on_every_device(|device, stream| {
        for (shape, pairs) in [
            (CacheShape::new(3 * MAX_PAIRS, 1, 1, 16), 2 * MAX_PAIRS + 7),
            (CacheShape::new(MAX_PAIRS, 1, 1, 24), MAX_PAIRS),
            (CacheShape::new(9, 16, 5, 128), 5),
        ] {
            let mut caches = filled(device, stream, CacheLayout::Nhd, shape);
            let mut host = HostCache::zeros(&caches, shape.blocks).unwrap();
            host.set_path(Some(SwapPath::Kernel));
            // No two neighbours stay together.
            let there: Vec<_> =
                (0..pairs).map(|i| (i, (2 * i + i / shape.blocks.div_ceil(2)) % shape.blocks)).collect();
            let keys = |caches: &CacheLayers<bf16>| -> Vec<u32> {
                caches.layers()[1].key().to_vec().unwrap().into_iter().map(bits).collect()
            };
            let (before, len) = (keys(&caches), shape.block_len());
            kv_cache::swap_out(stream, &mut host, &caches, &there).unwrap();
            for &(from, to) in &there {
                let (keys, _) = host.block(1, to).unwrap();
                assert!(
                    keys.iter().map(|&v| bits(v)).eq(before[from * len..][..len].iter().copied()),
                    "{from} to {to}"
                );
            }
            // Back, one block further on.
            let back: Vec<_> = there.iter().map(|&(from, to)| (to, (from + 1) % shape.blocks)).collect();
            kv_cache::swap_in(stream, &mut caches, &host, &back).unwrap();
            let after = keys(&caches);
            for block in 0..shape.blocks {
                let before_it = (block + shape.blocks - 1) % shape.blocks;
                let from = if before_it < pairs { before_it } else { block };
                assert_eq!(after[block * len..][..len], before[from * len..][..len], "block {block}");
            }
        }
        assert!(Pairs::new(&[(0, 0); MAX_PAIRS + 1]).is_none());
    });
}

/// On raw pointers, in a graph that is replayed after its input has changed.
#[test]
fn captured_and_replayed() {
    on_every_device(|device, stream| {
        let mut memory = Pinned::<f32>::zeros(device, 4 * 8).unwrap();
        let from = Tensor::from_slice(device, &(0..3 * 8).map(|i| i as f32).collect::<Vec<_>>(), &[3, 8]).unwrap();
        let table = |address: u64| Tensor::from_slice(device, &[address], &[1]).unwrap();
        let (on_device, on_host) = (table(from.as_ptr() as u64), table(memory.as_mut_ptr() as u64));
        let args = Args {
            from: on_device.as_ptr(),
            to: on_host.as_ptr(),
            tensors: 1,
            block_bytes: 32,
            from_stride: 32,
            to_stride: 32,
            pairs: Pairs::new(&[(2, 0), (0, 3)]).unwrap(),
        };
        // SAFETY: both live until the graph is dropped, and have the blocks.
        let graph = Graph::capture(stream, |s| unsafe { launch(s, &args) }).unwrap();
        for round in 0..2 {
            graph.launch(stream).unwrap();
            stream.synchronize().unwrap();
            let block =
                |b: usize| -> Vec<f32> { (8 * b..8 * b + 8).map(|i| i as f32 + 100.0 * round as f32).collect() };
            assert_eq!(memory[..8], block(2));
            assert_eq!(memory[24..], block(0));
            assert!(memory[8..24].iter().all(|v| *v == 0.0));
            let next: Vec<f32> = (0..3 * 8).map(|i| i as f32 + 100.0).collect();
            from.clone().copy_from_slice(&next).unwrap();
        }
    });
}

/// Layers, heads, elements of a head, tokens of a block: of the caches of forked sequences.
const FORKED: (usize, usize, usize, usize) = (2, 1, 16, 4);

/// Writes keys and values that tell their token and layer apart to the slots of a sequence.
fn write(stream: &Stream, caches: &mut CacheLayers<f32>, sequence: &Sequence, positions: std::ops::Range<usize>) {
    let (layers, heads, dim, _) = FORKED;
    let slots = sequence.slots(positions.clone()).unwrap();
    let slots = Tensor::from_slice(stream.device(), &slots, &[slots.len()]).unwrap();
    for layer in 0..layers {
        let rows = |sign: f32| {
            let tokens = &sequence.tokens()[positions.clone()];
            let row = |t: &u32| vec![sign * (*t as f32 + 1000.0 * layer as f32); heads * dim];
            let rows: Vec<f32> = tokens.iter().flat_map(row).collect();
            Tensor::from_slice(stream.device(), &rows, &[tokens.len(), heads, dim]).unwrap()
        };
        let (mut cache, options) = (caches.layer_mut(layer).unwrap(), ReshapeAndCacheOptions::default());
        kv_cache::reshape_and_cache(stream, &mut cache, None, &rows(1.0), &rows(-1.0), &slots, &options).unwrap();
    }
}

/// Asserts that the blocks of a sequence hold what [`write`] wrote for all of its tokens; `block` gives keys and values of one.
#[track_caller]
fn assert_holds(sequence: &Sequence, strides: [PageStrides; 2], block: impl Fn(usize, usize) -> (Vec<f32>, Vec<f32>)) {
    let (layers, _, dim, size) = FORKED;
    for (layer, (i, token)) in (0..layers).flat_map(|l| sequence.tokens().iter().enumerate().map(move |t| (l, t))) {
        let (keys, values) = block(layer, sequence.blocks()[i / size] as usize);
        let want = *token as f32 + 1000.0 * layer as f32;
        for d in 0..dim {
            let at = strides.map(|s| s.index(0, 0, i % size, d));
            let got = (keys[at[0]], values[at[1]]);
            assert_eq!(got, (want, -want), "layer {layer}, position {i}, element {d}");
        }
    }
}

/// What is submitted to `stream` from now on comes after what was submitted to `to`.
fn follow(stream: &Stream, to: &Stream) {
    let event = Event::new(to.device()).unwrap();
    to.record_event(&event).unwrap();
    stream.wait_event(&event).unwrap();
}

/// The allocator's swap and fork with the copies that they ask for: the fork goes on while its origin is being copied out by another stream, before its
/// writes or after them, since nothing orders the two.
#[test]
fn a_fork_during_a_swap() {
    on_every_device(|device, stream| {
        let copies = Stream::new(device).unwrap();
        let (layers, heads, dim, size) = FORKED;
        for (layout, late) in
            [CacheLayout::XSplit, CacheLayout::Nhd, CacheLayout::Hnd].map(|l| [(l, false), (l, true)]).concat()
        {
            let shape = CacheShape::new(8, size, heads, dim);
            let mut caches = CacheLayers::<f32>::zeros(device, layers, layout, shape).unwrap();
            let mut memory = HostCache::zeros(&caches, 4).unwrap();
            memory.set_path(Some(if late { SwapPath::Kernel } else { SwapPath::CopyEngine }));
            let strides = [caches.layers()[0].key_strides(), caches.layers()[0].value_strides()];
            let on_device = |caches: &CacheLayers<f32>, layer: usize, block: usize| {
                let of = |t: &Tensor<f32>| t.narrow(0, block, 1).unwrap().to_vec().unwrap();
                (of(caches.layers()[layer].key()), of(caches.layers()[layer].value()))
            };
            let (mut blocks, mut host) = (BlockAllocator::new(8, size).unwrap(), BlockAllocator::new(4, size).unwrap());
            let copy = |caches: &mut CacheLayers<f32>, pairs: Vec<(usize, usize)>| {
                let flat: Vec<i64> = pairs.iter().flat_map(|&(from, to)| [from as i64, to as i64]).collect();
                let flat = Tensor::from_slice(device, &flat, &[pairs.len(), 2]).unwrap();
                kv_cache::copy_blocks(stream, caches, None, &flat).unwrap();
            };

            // A block and a half, forked, and on its way out.
            let mut origin = blocks.start(&[1, 2, 3, 4, 5, 6], 0).unwrap();
            write(stream, &mut caches, &origin, 0..6);
            blocks.mark_computed(&mut origin, 6).unwrap();
            let mut stays = blocks.fork(&origin).unwrap();
            let swap = blocks.swap(&mut origin, &mut host).unwrap();
            assert_eq!(swap.pairs().len(), 2);
            follow(&copies, stream);
            if !late {
                kv_cache::swap_out(&copies, &mut memory, &caches, swap.pairs()).unwrap();
            }
            // The fork takes its last token back, and has others in its place: in a copy of the block, which it alone refers to otherwise.
            blocks.truncate(&mut stays, 5).unwrap();
            blocks.append(&mut stays, &[17, 18, 19, 20]).unwrap();
            copy(&mut caches, blocks.take_copies());
            write(stream, &mut caches, &stays, 5..9);
            blocks.mark_computed(&mut stays, 9).unwrap();
            if late {
                follow(&copies, stream);
                kv_cache::swap_out(&copies, &mut memory, &caches, swap.pairs()).unwrap();
            }
            // And what is on its way is forked as well.
            let mut goes = host.fork(&origin).unwrap();
            memory.wait().unwrap();
            blocks.finish(&mut host, swap).map_err(|(_, e)| e).unwrap();

            // Whatever is free on the device now is used by others.
            let others: Vec<u32> = (0..(size * blocks.available()) as u32).map(|t| 100 + t).collect();
            let mut others = blocks.start(&others, 0).unwrap();
            let all = 0..others.len();
            write(stream, &mut caches, &others, all.clone());
            blocks.mark_computed(&mut others, all.end).unwrap();
            assert_eq!(stays.tokens(), [1, 2, 3, 4, 5, 17, 18, 19, 20]);
            for sequence in [&stays, &others] {
                assert_holds(sequence, strides, |l, b| on_device(&caches, l, b));
            }
            let on_host = |memory: &HostCache<f32>, layer: usize, block: usize| {
                let (keys, values) = memory.block(layer, block).unwrap();
                (keys.to_vec(), values.to_vec())
            };
            assert_eq!(origin.tokens(), [1, 2, 3, 4, 5, 6]);
            for sequence in [&origin, &goes] {
                assert_holds(sequence, strides, |l, b| on_host(&memory, l, b));
            }

            // The other fork comes back, to blocks that were those of others, and goes on; the origin stays where it is.
            blocks.free(others).unwrap();
            let swap = host.swap(&mut goes, &mut blocks).unwrap();
            follow(&copies, stream);
            kv_cache::swap_in(&copies, &mut caches, &memory, swap.pairs()).unwrap();
            follow(stream, &copies);
            host.finish(&mut blocks, swap).map_err(|(_, e)| e).unwrap();
            blocks.append(&mut goes, &[31, 32, 33]).unwrap();
            copy(&mut caches, blocks.take_copies());
            write(stream, &mut caches, &goes, 6..9);
            for sequence in [&stays, &goes] {
                assert_holds(sequence, strides, |l, b| on_device(&caches, l, b));
            }
            assert_holds(&origin, strides, |l, b| on_host(&memory, l, b));
            host.free(origin).unwrap();
            for sequence in [stays, goes] {
                blocks.free(sequence).unwrap();
            }
            assert_eq!((blocks.available(), host.available()), (8, 4));
        }
    });
}

#[test]
fn dropping_the_host_cache_waits() {
    on_every_device(|device, stream| {
        let caches = filled(device, stream, CacheLayout::Nhd, SHAPE);
        for _ in 0..20 {
            let mut host = HostCache::zeros(&caches, 6).unwrap();
            let all: Vec<_> = (0..6).map(|b| (b, b)).collect();
            kv_cache::swap_out(stream, &mut host, &caches, &all).unwrap();
        }
    });
}

#[test]
fn refuses_what_it_cannot_do() {
    on_every_device(|device, stream| {
        let caches = filled(device, stream, CacheLayout::Nhd, SHAPE);
        let mut host = HostCache::zeros(&caches, 3).unwrap();
        let mut out = |pairs: &[(usize, usize)]| kv_cache::swap_out(stream, &mut host, &caches, pairs);
        assert!(matches!(out(&[(6, 0)]), Err(Error::Value { op: "swap_out", arg: "pairs", .. })));
        assert!(matches!(out(&[(5, 3)]), Err(Error::Value { arg: "pairs", .. })));
        assert!(matches!(out(&[(5, 1), (4, 1)]), Err(Error::Value { arg: "pairs", .. })));
        assert!(out(&[]).is_ok());
        let e = Graph::capture(stream, |s| kv_cache::swap_out(s, &mut host, &caches, &[(0, 0)]));
        assert!(matches!(e, Err(Error::Capture(_))));
        // A stream that cannot be waited for now is waited for later, and until then nothing is shown.
        kv_cache::swap_out(stream, &mut host, &caches, &[(0, 0)]).unwrap();
        let captured = Graph::capture(stream, |_| {
            for _ in 0..2 {
                assert!(matches!(host.wait(), Err(Error::Capture(_))));
                assert!(matches!(host.block(0, 0), Err(Error::Capture(_))));
            }
            Ok(())
        });
        captured.unwrap();
        host.block(0, 0).unwrap();
        let one = CacheLayers::<bf16>::zeros(device, 1, CacheLayout::Nhd, SHAPE).unwrap();
        let e = kv_cache::swap_out(stream, &mut host, &one, &[(0, 0)]);
        assert!(matches!(e, Err(Error::Value { arg: "host", .. })));
        let mut other = CacheLayers::<bf16>::zeros(device, 2, CacheLayout::Hnd, SHAPE).unwrap();
        let e = kv_cache::swap_in(stream, &mut other, &host, &[(0, 0)]);
        assert!(matches!(e, Err(Error::Value { arg: "host", .. })));
        assert!(matches!(host.block(0, 3), Err(Error::Value { .. })));
        // As many blocks as make nothing of 64 bits, and as many as make little.
        for blocks in [1usize << 63, usize::MAX / caches.shape().block_len() + 2, usize::MAX] {
            let e = HostCache::zeros(&caches, blocks).map(drop);
            assert!(matches!(e, Err(Error::Value { arg: "blocks", .. })), "{blocks}: {e:?}");
        }
        let elsewhere = CacheLayers::<bf16>::zeros(&Device::simt(), 2, CacheLayout::Nhd, SHAPE).unwrap();
        let e = kv_cache::swap_out(stream, &mut host, &elsewhere, &[(0, 0)]);
        assert!(matches!(e, Err(Error::WrongDevice { .. })));
        // The kernel reads where the host's blocks are on the device that they were made for; copy engines go anywhere.
        let mut host = HostCache::zeros(&elsewhere, 3).unwrap();
        host.set_path(Some(SwapPath::Kernel));
        let e = kv_cache::swap_out(stream, &mut host, &caches, &[(0, 0), (2, 1)]);
        assert!(matches!(e, Err(Error::WrongDevice { arg: "host", .. })), "{e:?}");
        host.set_path(None);
        kv_cache::swap_out(stream, &mut host, &caches, &[(0, 0), (2, 1)]).unwrap();
        stream.synchronize().unwrap();
        let block = |b: usize| caches.layers()[0].key().narrow(0, b, 1).unwrap().to_vec().unwrap();
        assert_eq!((host.block(0, 0).unwrap().0, host.block(0, 1).unwrap().0), (&block(0)[..], &block(2)[..]));
    });
}

proptest! {
    #[test]
    fn runs_are_the_pairs(pairs in proptest::collection::btree_map(0usize..30, 0usize..1000, 0..20), shift in 0usize..5) {
        // Some neighbours, some not, in no order.
        let pairs: Vec<(usize, usize)> =
            pairs.into_iter().map(|(f, t)| (f, if t % 3 == 0 { 2000 + 31 * t } else { f + shift })).rev().collect();
        let made = runs(&pairs);
        let mut covered: Vec<_> = made.iter().flat_map(|r| (0..r.len).map(|i| (r.from + i, r.to + i))).collect();
        covered.sort_unstable();
        let mut sorted = pairs.clone();
        sorted.sort_unstable();
        prop_assert_eq!(covered, sorted);
        // No two that would be one.
        let joins = |w: &[Run]| w[0].from + w[0].len == w[1].from && w[0].to + w[0].len == w[1].to;
        prop_assert!(!made.windows(2).any(joins));
    }
}
