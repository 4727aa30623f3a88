use proptest::prelude::*;
use warploom::moe::sort::{
    Args, CountArgs, MAX_EXPERTS, block_geometry, blocks, capacity, geometry, split, workspace_bytes,
};
use warploom::moe::{Local, SortConvention, SortInput, SortOptions, SortOutput, sort, sort_and_zero};
use warploom::{Device, Error, Graph, Stream, Tensor, reference};
use warploom_tests::{gpu, noise, on_every_device, property, sanitizing};

/// Which experts are on the device.
#[derive(Clone, Debug)]
enum Where {
    All,
    Map(Vec<i32>, usize),
    Mask(Vec<i32>),
}

#[derive(Clone, Debug)]
struct Case {
    /// Present tokens; the tensor has room for more if `room` says so.
    tokens: usize,
    room: usize,
    top_k: usize,
    experts: usize,
    ids: Vec<i32>,
    local: Where,
    options: SortOptions,
    /// Elements beyond the capacity.
    spare: usize,
}

impl Case {
    fn new(tokens: usize, experts: usize, top_k: usize, block: usize, seed: u64) -> Self {
        let ids = noise(tokens * top_k, seed).iter().map(|x| ((x + 1.0) / 2.0 * experts as f32) as i32).collect();
        let options = SortOptions::default().block_size(block);
        Self { tokens, room: tokens, top_k, experts, ids, local: Where::All, options, spare: 0 }
    }
}

fn tensor(d: &Device, v: &[i32]) -> Tensor<i32> {
    Tensor::from_slice(d, v, &[v.len()]).unwrap()
}

/// Sorts on the device, with every output, and compares.
fn check(d: &Device, s: &Stream, case: &Case) {
    let Case { tokens, room, top_k, experts, ref ids, ref local, options, spare } = *case;
    let weights = noise(room * top_k, 3);
    let (map, labels): (Vec<i32>, Vec<Option<i32>>) = match local {
        Where::All => ((0..experts as i32).collect(), (0..experts as i32).map(Some).collect()),
        Where::Map(map, bins) => (map.clone(), (0..*bins as i32).map(Some).collect()),
        Where::Mask(mask) => {
            let map = mask.iter().enumerate().map(|(e, &m)| if m == 0 { -1 } else { e as i32 }).collect();
            let mut next = 0;
            let label = |&m: &i32| {
                let label = next;
                next += (m != 0) as i32;
                (m != 0).then_some(label)
            };
            (map, mask.iter().map(label).collect())
        }
    };
    let local_count = labels.iter().flatten().count() as i32;
    let shared = (0..options.shared_experts as i32).map(|i| Some(local_count + i));
    let labels: Vec<_> = labels.into_iter().chain(shared).collect();
    let bins = labels.len();
    let slots = top_k + if options.append_shared { options.shared_experts } else { 0 };
    let want = reference::moe::sort(ids, &weights, tokens, room, top_k, &map, &labels, &options);

    let length = capacity(room * slots, bins, options.block_size, options.keep_empty) + spare;
    let poisoned = |n: usize| {
        let mut t = Tensor::<i32>::uninit(d, &[n]).unwrap();
        s.fill_bytes(&mut t, 0xfe).unwrap();
        t
    };
    let packed = options.convention == SortConvention::Packed;
    let mut sorted = poisoned(length);
    let mut expert_ids = poisoned(length / options.block_size);
    let mut totals = poisoned(1 + packed as usize);
    let mut positions = poisoned(room * slots).reshape(&[room, slots]).unwrap();
    let (mut offsets, mut counts, mut invalid) = (poisoned(bins + 1), poisoned(bins), poisoned(1));
    let mut sorted_weights = Tensor::<f32>::uninit(d, &[length]).unwrap();
    s.fill_bytes(&mut sorted_weights, 0xff).unwrap();
    let mut zero = Tensor::<u8>::uninit(d, &[3001]).unwrap();
    s.fill_bytes(&mut zero, 0xff).unwrap();
    let mut zeroed = zero.narrow(0, 5, 2990).unwrap();
    let bytes = workspace_bytes(room * slots, bins);
    let mut workspace = Tensor::uninit(d, &[bytes]).unwrap();

    let ids = Tensor::from_slice(d, ids, &[room, top_k]).unwrap();
    let weights = Tensor::from_slice(d, &weights, &[room, top_k]).unwrap();
    let (present, where_) = (
        tensor(d, &[tokens as i32]),
        match local {
            Where::All => tensor(d, &[]),
            Where::Map(map, _) => tensor(d, map),
            Where::Mask(mask) => tensor(d, mask),
        },
    );
    let mut input = SortInput::new(&ids, experts).topk_weights(&weights);
    input.local = match local {
        Where::All => Local::All,
        Where::Map(_, bins) => Local::Map(&where_, *bins),
        Where::Mask(_) => Local::Mask(&where_),
    };
    if room != tokens {
        input.num_tokens = Some(&present);
    }
    let mut out = SortOutput::new(&mut sorted, &mut expert_ids, &mut totals)
        .sorted_weights(&mut sorted_weights)
        .positions(&mut positions)
        .offsets(&mut offsets)
        .expert_counts(&mut counts)
        .invalid(&mut invalid);
    sort_and_zero(s, &mut out, &mut zeroed, &input, &options, &mut workspace).unwrap();

    let n = want.sorted_ids.len();
    let totals = totals.to_vec().unwrap();
    assert_eq!(totals[0] as usize, n, "padded length");
    if packed {
        assert_eq!(totals[1] as usize, tokens, "tokens");
    }
    let sorted = sorted.to_vec().unwrap();
    assert_eq!(sorted[..n], want.sorted_ids, "sorted_ids");
    let sentinel = if packed { tokens as i32 | ((slots as u32) << 24) as i32 } else { (room * slots) as i32 };
    assert!(sorted[n..].iter().all(|&v| v == sentinel), "padding of sorted_ids");
    let expert_ids = expert_ids.to_vec().unwrap();
    let blocks = want.expert_ids.len();
    assert_eq!(expert_ids[..blocks], want.expert_ids, "expert_ids");
    assert!(expert_ids[blocks..].iter().all(|&v| v == -1), "padding of expert_ids");
    let sorted_weights = sorted_weights.to_vec().unwrap();
    assert_eq!(sorted_weights[..n], want.sorted_weights, "sorted_weights");
    assert!(sorted_weights[n..].iter().all(|&v| v == 0.0), "padding of sorted_weights");
    assert_eq!(positions.to_vec().unwrap(), want.positions, "positions");
    assert_eq!(offsets.to_vec().unwrap(), want.offsets, "offsets");
    assert_eq!(counts.to_vec().unwrap(), want.expert_counts, "expert_counts");
    assert_eq!(invalid.to_vec().unwrap(), [want.invalid], "invalid");
    let zero = zero.to_vec().unwrap();
    assert!(zero[..5].iter().chain(&zero[2995..]).all(|&v| v == 0xff), "bytes around the zeroed ones");
    assert!(zero[5..2995].iter().all(|&v| v == 0), "zeroed bytes");
}

/// CK Tile's fused-MoE example: 5 tokens, 6 experts, top 3, blocks of 4. (Its last expert is listed there as
/// `[0, 1, 2, 5]` with the sentinel 6; token 4 is meant, and the sentinel is the token count, 5.)
#[test]
fn ck_example() {
    on_every_device(|d, s| {
        let ids = [0, 3, 5, 2, 3, 5, 1, 3, 5, 1, 2, 3, 1, 3, 5];
        let weights: Vec<f32> = (0..15).map(|i| i as f32 + 1.0).collect();
        let ids = Tensor::from_slice(d, &ids, &[5, 3]).unwrap();
        let weights = Tensor::from_slice(d, &weights, &[5, 3]).unwrap();
        let options = SortOptions::default().block_size(4).convention(SortConvention::Packed).keep_empty(true);
        let length = capacity(15, 6, 4, true);
        assert!(length >= 28);
        let [mut sorted, mut experts, mut totals] =
            [length, length / 4, 2].map(|n| Tensor::<i32>::uninit(d, &[n]).unwrap());
        let mut sorted_weights = Tensor::uninit(d, &[length]).unwrap();
        let mut out = SortOutput::new(&mut sorted, &mut experts, &mut totals).sorted_weights(&mut sorted_weights);
        let input = SortInput::new(&ids, 6).topk_weights(&weights);
        sort(s, &mut out, &input, &options, &mut Tensor::zeros(d, &[0]).unwrap()).unwrap();
        let sorted = sorted.to_vec().unwrap();
        let (tokens, slots): (Vec<_>, Vec<_>) = sorted[..28].iter().map(|v| (v & 0xff_ffff, v >> 24)).unzip();
        let pad = 5;
        #[rustfmt::skip]
        assert_eq!(tokens, [
            0, pad, pad, pad,  2, 3, 4, pad,  1, 3, pad, pad,  0, 1, 2, 3,  4, pad, pad, pad,
            pad, pad, pad, pad,  0, 1, 2, 4,
        ]);
        #[rustfmt::skip]
        assert_eq!(slots, [
            0, 3, 3, 3,  0, 0, 0, 3,  0, 1, 3, 3,  1, 1, 1, 2,  1, 3, 3, 3,  3, 3, 3, 3,  2, 2, 2, 2,
        ]);
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o] = std::array::from_fn(|i| i as f32 + 1.0);
        let x = 0.0;
        #[rustfmt::skip]
        assert_eq!(sorted_weights.to_vec().unwrap()[..28], [
            a, x, x, x,  g, j, m, x,  d, k, x, x,  b, e, h, l,  n, x, x, x,  x, x, x, x,  c, f, i, o,
        ]);
        assert_eq!(experts.to_vec().unwrap()[..7], [0, 1, 2, 3, 3, 4, 5]);
        assert_eq!(totals.to_vec().unwrap(), [28, 5]);
    });
}

#[test]
fn shapes() {
    on_every_device(|d, s| {
        for (tokens, experts, top_k, block) in [
            (1, 1, 1, 16),
            (71, 11, 11, 32),
            (11, 256, 5, 64),
            (64, 455, 8, 128),
            (5, 60, 4, 256),
            (33, 257, 8, 8),
            (40, 8, 32, 1),
            (3, 2048, 9, 7),
            // The most experts and pairs of a cluster, with several blocks of the list for an expert; one expert more.
            (500, 512, 16, 2),
            (500, 513, 4, 2),
        ] {
            check(d, s, &Case::new(tokens, experts, top_k, block, 1));
        }
    });
}

/// What devices without clusters launch gives the same lists: a block with several pairs a lane, and two launches for more, here without positions.
#[test]
fn without_clusters() {
    use warploom::kernels::moe::sort::{moe_sort_block, moe_sort_count, moe_sort_scatter};
    on_every_device(|d, s| {
        for (tokens, top_k, experts, block) in
            [(20, 7, 9, 4), (64, 8, 256, 16), (100, 10, 512, 1), (64, 16, 3, 64), (150, 10, 64, 8), (12, 600, 7, 128)]
        {
            let Case { ids, .. } = Case::new(tokens, experts, top_k, block, 4);
            let (pairs, length) = (tokens * top_k, capacity(tokens * top_k, experts, block, false));
            let weights = noise(pairs, 5);
            let ids = Tensor::from_slice(d, &ids, &[tokens, top_k]).unwrap();
            let weights = Tensor::from_slice(d, &weights, &[tokens, top_k]).unwrap();
            let mut workspace = Tensor::<u8>::uninit(d, &[workspace_bytes(pairs, experts)]).unwrap();
            let lists = || {
                let [mut sorted, mut experts, mut totals] =
                    [length, length / block, 1].map(|n| Tensor::<i32>::uninit(d, &[n]).unwrap());
                let mut weights = Tensor::<f32>::uninit(d, &[length]).unwrap();
                for list in [&mut sorted, &mut experts, &mut totals] {
                    s.fill_bytes(list, 0xfe).unwrap();
                }
                s.fill_bytes(&mut weights, 0xfe).unwrap();
                (sorted, experts, totals, weights)
            };
            let mut want = lists();
            let mut out = SortOutput::new(&mut want.0, &mut want.1, &mut want.2).sorted_weights(&mut want.3);
            let input = SortInput::new(&ids, experts).topk_weights(&weights);
            sort(s, &mut out, &input, &SortOptions::default().block_size(block), &mut workspace).unwrap();

            let mut got = lists();
            let mut args = Args {
                sorted_ids: got.0.as_mut_ptr().cast(),
                expert_ids: got.1.as_mut_ptr().cast(),
                totals: got.2.as_mut_ptr().cast(),
                sorted_weights: got.3.as_mut_ptr().cast(),
                positions: std::ptr::null_mut(),
                offsets: std::ptr::null_mut(),
                expert_counts: std::ptr::null_mut(),
                invalid: std::ptr::null_mut(),
                zero: std::ptr::null_mut(),
                zero_bytes: 0,
                topk_ids: ids.as_ptr().cast(),
                topk_weights: weights.as_ptr().cast(),
                expert_map: std::ptr::null(),
                num_tokens: std::ptr::null(),
                table: std::ptr::null(),
                tokens: tokens as u32,
                top_k: top_k as u32,
                slots: top_k as u32,
                experts: experts as u32,
                local: experts as u32,
                shared_experts: 0,
                block: block as u32,
                items: pairs.div_ceil(256) as u32,
                chunks: 1,
                capacity: length as u32,
                flags: 0,
            };
            if let Some(blocks) = blocks(pairs, experts, false) {
                assert_eq!(blocks, 1);
                // SAFETY: the tensors are as large as the arguments say.
                unsafe { s.launch(&moe_sort_block::ENTRY, &block_geometry(1, 0), &args) }.unwrap();
            } else {
                let split = split(pairs, experts);
                (args.items, args.chunks) = (split.items, split.chunks);
                let launch = geometry(split, experts, 0);
                if split.chunks > 1 {
                    args.table = workspace.as_ptr().cast();
                    let count = CountArgs {
                        table: workspace.as_mut_ptr().cast(),
                        sorted_ids: args.sorted_ids,
                        sorted_weights: args.sorted_weights,
                        topk_ids: args.topk_ids,
                        expert_map: args.expert_map,
                        num_tokens: args.num_tokens,
                        tokens: args.tokens,
                        top_k: args.top_k,
                        slots: args.slots,
                        experts: args.experts,
                        local: args.local,
                        shared_experts: 0,
                        items: args.items,
                        capacity: args.capacity,
                        flags: 0,
                    };
                    // SAFETY: as above, and the workspace is as large as it says.
                    unsafe { s.launch(&moe_sort_count::ENTRY, &launch, &count) }.unwrap();
                }
                // SAFETY: as above.
                unsafe { s.launch(&moe_sort_scatter::ENTRY, &launch, &args) }.unwrap();
            }
            s.synchronize().unwrap();
            for (got, want) in [(&got.0, &want.0), (&got.1, &want.1), (&got.2, &want.2)] {
                assert_eq!(got.to_vec().unwrap(), want.to_vec().unwrap(), "{tokens} {top_k} {experts} {block}");
            }
            assert_eq!(got.3.to_vec().unwrap(), want.3.to_vec().unwrap(), "{tokens} {top_k} {experts} {block}");
        }
    });
}

#[test]
fn many_pairs() {
    // In one mode of the SIMT device only: a hundred thousand threads take their time.
    for d in (!sanitizing()).then(Device::simt).into_iter().chain(gpu()) {
        let s = Stream::new(&d).unwrap();
        for (tokens, experts, top_k, block) in [(777, 802, 99, 64), (4097, 906, 51, 128), (4096, 256, 8, 64)] {
            assert!(workspace_bytes(tokens * top_k, experts) > 0);
            let mut case = Case::new(tokens, experts, top_k, block, 2);
            case.options.convention = SortConvention::Packed;
            check(&d, &s, &case);
        }
    }
}

#[test]
fn all_on_one_expert_and_none() {
    on_every_device(|d, s| {
        for id in [0, 6, -1, 7, i32::MAX, i32::MIN] {
            let mut case = Case::new(37, 7, 3, 16, 1);
            case.ids.fill(id);
            check(d, s, &case);
            case.options.keep_empty = true;
            check(d, s, &case);
        }
        check(d, s, &Case::new(0, 7, 3, 16, 1));
        check(d, s, &Case::new(3, 7, 0, 16, 1));
        // A block each for experts without pairs takes more than any other routing: in one block, in a cluster, and in two launches.
        for (tokens, experts, block) in [(5, 8, 4), (1, 3, 1), (0, 3, 4), (150, 300, 4), (300, 600, 16)] {
            let mut case = Case::new(tokens, experts, 1, block, 1);
            case.ids.fill(experts as i32 - 1);
            case.options.keep_empty = true;
            check(d, s, &case);
        }
    });
}

/// The lists are as long as the longest that any routing gives, and no longer.
#[test]
fn capacities_are_exact() {
    for (pairs, bins, block) in (0..7).flat_map(|p| (1..5).flat_map(move |b| (1..5).map(move |s| (p, b, s)))) {
        for keep_empty in [false, true] {
            let least = keep_empty as usize;
            // Every number of pairs of each expert.
            let mut longest = 0;
            for code in 0..(pairs + 1usize).pow(bins as u32) {
                let counts: Vec<_> = (0..bins).map(|e| code / (pairs + 1).pow(e as u32) % (pairs + 1)).collect();
                if counts.iter().sum::<usize>() <= pairs {
                    longest = longest.max(counts.iter().map(|n| n.div_ceil(block).max(least) * block).sum());
                }
            }
            assert_eq!(capacity(pairs, bins, block, keep_empty), longest, "{pairs} {bins} {block} {keep_empty}");
        }
    }
}

prop_compose! {
    fn cases()(
        tokens in 0usize..70, spare_tokens in 0usize..3, top_k in 1usize..10, experts in 1usize..80, block in 1usize..40,
        seed in 1u64..1000, odd in 0u32..3, locality in 0u32..3, shared in 0usize..3, append in any::<bool>(),
        packed in any::<bool>(), keep_empty in any::<bool>(), spare in 0usize..50,
    ) -> Case {
        let room = tokens + spare_tokens;
        let mut case = Case::new(room, experts, top_k, block, seed);
        case.tokens = tokens;
        case.spare = spare;
        let extra = [-1, experts as i32, experts as i32 + 1, experts as i32 + 2, -2, i32::MAX];
        for (i, id) in case.ids.iter_mut().enumerate() {
            if odd > 0 && i % 5 == 0 {
                *id = extra[i / 5 % extra.len()];
            }
        }
        case.options = case.options.shared_experts(shared, append).keep_empty(keep_empty);
        if packed {
            case.options.convention = SortConvention::Packed;
        }
        let chosen = noise(experts, seed + 1);
        case.local = match locality {
            0 => Where::All,
            1 => {
                // The local experts in descending order, and one number that is too large.
                let mut map = vec![-1; experts];
                let locals: Vec<_> = (0..experts).filter(|&e| chosen[e] > 0.0).collect();
                for (i, &e) in locals.iter().rev().enumerate() {
                    map[e] = i as i32;
                }
                if odd > 1 {
                    map[0] = locals.len() as i32;
                }
                Where::Map(map, locals.len())
            }
            _ => Where::Mask(chosen.iter().map(|&c| (c > 0.0) as i32).collect()),
        };
        case
    }
}

#[test]
fn matches_the_reference() {
    property(24, cases(), |d, s, case| {
        check(d, s, &case);
        Ok(())
    });
}

/// So many tokens of 37 experts each.
fn with_tokens(mut case: Case, tokens: usize) -> Case {
    case.ids = Case::new(tokens, case.experts, 37, case.options.block_size, 9).ids;
    (case.tokens, case.room, case.top_k) = (tokens - 1, tokens, 37);
    case
}

#[test]
fn a_cluster_matches_the_reference() {
    property(6, (cases(), 31usize..200), |d, s, (case, tokens)| {
        assert_eq!(blocks(tokens * 37, case.experts, true), Some(8));
        check(d, s, &with_tokens(case, tokens));
        Ok(())
    });
}

#[test]
fn two_launches_match_the_reference() {
    property(2, (cases(), 260usize..300), |d, s, (case, tokens)| {
        assert_eq!(blocks(tokens * 37, case.experts, true), None);
        check(d, s, &with_tokens(case, tokens));
        Ok(())
    });
}

#[test]
fn captured_and_replayed() {
    on_every_device(|d, s| {
        let (tokens, experts, top_k, block) = (9, 12, 4, 8);
        let case = Case::new(tokens, experts, top_k, block, 1);
        let length = capacity(tokens * top_k, experts, block, false);
        let mut ids = Tensor::from_slice(d, &case.ids, &[tokens, top_k]).unwrap();
        let run = |s: &Stream, ids: &Tensor<i32>, out: &mut [Tensor<i32>; 3]| {
            let [a, b, c] = out;
            let mut workspace = Tensor::zeros(d, &[0]).unwrap();
            let options = SortOptions::default().block_size(block);
            sort(s, &mut SortOutput::new(a, b, c), &SortInput::new(ids, experts), &options, &mut workspace)
        };
        let lists = || [length, length / block, 1].map(|n| Tensor::zeros(d, &[n]).unwrap());
        let (mut replayed, mut direct) = (lists(), lists());
        d.preload(&["moe"]).unwrap();
        let graph = Graph::capture(s, |s| run(s, &ids, &mut replayed)).unwrap();
        for seed in 5..7 {
            ids.copy_from_slice(&Case::new(tokens, experts, top_k, block, seed).ids).unwrap();
            for _ in 0..2 {
                graph.launch(s).unwrap();
                run(s, &ids, &mut direct).unwrap();
                for (a, b) in replayed.iter().zip(&direct) {
                    assert_eq!(a.to_vec().unwrap(), b.to_vec().unwrap());
                }
            }
        }
    });
}

/// In one block, in a cluster, and in two launches, with all experts here and with some: ids that are out of range are errors wherever they are, and counted; those of nobody and of
/// experts elsewhere are not.
#[test]
fn checked_mode() {
    on_every_device(|d, s| {
        let experts = 5;
        for (tokens, top_k) in [(1, 2), (40, 37), (270, 37)] {
            let (pairs, block) = (tokens * top_k, 4);
            let map = tensor(d, &[1, -1, 0, -1, 2]);
            let mask = tensor(d, &[1, 0, 7, 0, 1]);
            for local in [Local::All, Local::Map(&map, 3), Local::Mask(&mask)] {
                let bins = if let Local::Map(_, bins) = local { bins } else { experts };
                let length = capacity(pairs, bins, block, false);
                let mut count = tensor(d, &[77]);
                let mut run = |s: &Stream, ids: &[i32], counted: bool| {
                    let [mut a, mut b, mut c] =
                        [length, length / block, 1].map(|n| Tensor::<i32>::zeros(d, &[n]).unwrap());
                    let ids = Tensor::from_slice(d, ids, &[tokens, top_k]).unwrap();
                    let options = SortOptions::default().block_size(block).checked(true);
                    let mut out = SortOutput::new(&mut a, &mut b, &mut c);
                    if counted {
                        out = out.invalid(&mut count);
                    }
                    let mut workspace = Tensor::zeros(d, &[workspace_bytes(pairs, bins)]).unwrap();
                    let result =
                        sort(s, &mut out, &SortInput::new(&ids, experts).local(local), &options, &mut workspace);
                    result.map_err(|e| (e, if counted { count.to_vec().unwrap()[0] } else { 0 }))
                };
                // Everybody's, from nobody's on.
                let good: Vec<i32> = (0..pairs).map(|i| i as i32 % 6 - 1).collect();
                assert!(run(s, &good, false).is_ok() && run(s, &good, true).is_ok(), "{local:?}");
                for at in [0, pairs / 2, pairs - 1] {
                    for bad in [5, -2, i32::MAX, i32::MIN] {
                        let mut ids = good.clone();
                        ids[at] = bad;
                        let e = run(s, &ids, false);
                        assert!(matches!(e, Err((Error::Value { arg: "topk_ids", .. }, _))), "{bad} at {at}: {e:?}");
                        ids[pairs - 1 - at] = -5;
                        let e = run(s, &ids, true);
                        let most = if at == pairs - 1 - at { 1 } else { 2 };
                        assert!(
                            matches!(e, Err((Error::Value { arg: "topk_ids", .. }, n)) if n == most),
                            "{bad} at {at}: {e:?}"
                        );
                        if tokens > 1 {
                            // One of them there is enough: each takes a launch of many threads.
                            break;
                        }
                    }
                }
                if tokens == 1 {
                    let e = Graph::capture(s, |s| run(s, &[1, 5], false).map_err(|(e, _)| e)).map(drop);
                    assert!(matches!(e, Err(Error::Capture(_))), "{e:?}");
                }
            }
        }
    });
}

/// Fewer tokens for the next replay, in one block, in a cluster, and in two launches.
#[test]
fn number_of_tokens_changes_between_replays() {
    on_every_device(|d, s| {
        let (experts, block) = (12, 8);
        for (room, top_k) in [(9, 4), (40, 37), (270, 37)] {
            let pairs = room * top_k;
            let length = capacity(pairs, experts, block, false);
            let case = Case::new(room, experts, top_k, block, 1);
            let ids = Tensor::from_slice(d, &case.ids, &[room, top_k]).unwrap();
            let mut count = tensor(d, &[0]);
            let [mut a, mut b, mut c] = [length, length / block, 1].map(|n| Tensor::<i32>::zeros(d, &[n]).unwrap());
            let mut workspace = Tensor::zeros(d, &[workspace_bytes(pairs, experts)]).unwrap();
            let options = SortOptions::default().block_size(block);
            d.preload(&["moe"]).unwrap();
            let graph = Graph::capture(s, |s| {
                let input = SortInput::new(&ids, experts).num_tokens(&count);
                sort(s, &mut SortOutput::new(&mut a, &mut b, &mut c), &input, &options, &mut workspace)
            })
            .unwrap();
            for tokens in [room, room / 2, 0, room - 1] {
                count.copy_from_slice(&[tokens as i32]).unwrap();
                graph.launch(s).unwrap();
                let (identity, labels): (Vec<_>, Vec<_>) = (0..experts as i32).map(|e| (e, Some(e))).unzip();
                let none = vec![0.0; pairs];
                let want = reference::moe::sort(&case.ids, &none, tokens, room, top_k, &identity, &labels, &options);
                let n = want.sorted_ids.len();
                let (list, blocks) = (a.to_vec().unwrap(), b.to_vec().unwrap());
                assert_eq!(c.to_vec().unwrap(), [n as i32], "{tokens} of {room}");
                assert_eq!(list[..n], want.sorted_ids, "{tokens} of {room}");
                assert!(list[n..].iter().all(|&v| v == pairs as i32), "{tokens} of {room}");
                assert_eq!(blocks[..n / block], want.expert_ids, "{tokens} of {room}");
                assert!(blocks[n / block..].iter().all(|&v| v == -1), "{tokens} of {room}");
            }
        }
    });
}

/// Numbers that no launch has count as the most that one may have.
#[test]
fn splits_of_too_many() {
    let most = split(i32::MAX as usize, MAX_EXPERTS);
    assert_eq!(split(usize::MAX, usize::MAX), most);
    assert!(most.chunks > 0 && most.warps > 0 && most.items > 0);
    assert_eq!(split(10, 5000), split(10, MAX_EXPERTS));
}

/// Blocks number the words of the table with 32 bits.
#[test]
fn the_longest_tables_are_numbered() {
    for bins in 1..=MAX_EXPERTS {
        let words = split(i32::MAX as usize, bins).chunks as usize * (warploom::kernels::moe::sort::columns(bins) / 2);
        assert!(words <= u32::MAX as usize, "{bins} experts: {words} words");
    }
}

#[test]
fn bad_input() {
    on_every_device(|d, s| {
        let ids = Tensor::<i32>::zeros(d, &[4, 2]).unwrap();
        let list = |n: usize| Tensor::<i32>::zeros(d, &[n]).unwrap();
        let run = |lists: [usize; 3], input: &SortInput<'_>, options: &SortOptions| {
            let [mut a, mut b, mut c] = lists.map(list);
            let mut out = SortOutput::new(&mut a, &mut b, &mut c);
            sort(s, &mut out, input, options, &mut Tensor::zeros(d, &[0]).unwrap())
        };
        let (input, options) = (SortInput::new(&ids, 3), SortOptions::default().block_size(4));
        let good = [16, 4, 1];
        assert!(run(good, &input, &options).is_ok());
        let e = run([15, 4, 1], &input, &options);
        assert!(matches!(e, Err(Error::Value { arg: "out.sorted_ids", .. })), "{e:?}");
        let e = run([16, 5, 1], &input, &options);
        assert!(matches!(e, Err(Error::Shape { arg: "out.expert_ids", .. })), "{e:?}");
        let e = run(good, &input, &options.convention(SortConvention::Packed));
        assert!(matches!(e, Err(Error::Shape { arg: "out.totals", .. })), "{e:?}");
        let e = run(good, &input, &options.block_size(0));
        assert!(matches!(e, Err(Error::Value { arg: "block_size", .. })), "{e:?}");
        let e = run(good, &SortInput::new(&ids, 2049), &options);
        assert!(matches!(e, Err(Error::Value { arg: "input.experts", .. })), "{e:?}");
        for append in [false, true] {
            let e = run(good, &input, &options.shared_experts(usize::MAX, append));
            assert!(matches!(e, Err(Error::Value { arg: "shared_experts", .. })), "{e:?}");
        }
        let map = list(3);
        for (local, arg) in [(usize::MAX, "input.local"), (2049, "input.local"), (2047, "shared_experts")] {
            let input = SortInput::new(&ids, 3).local(Local::Map(&map, local));
            let e = run(good, &input, &options.shared_experts(2, true)).unwrap_err();
            assert!(matches!(e, Error::Value { arg: of, .. } if of == arg), "{e:?}");
        }
        let short = list(2);
        let e = run(good, &SortInput::new(&ids, 3).local(Local::Mask(&short)), &options);
        assert!(matches!(e, Err(Error::Shape { arg: "input.local", .. })), "{e:?}");
        let e = run(good, &SortInput::new(&short, 3), &options);
        assert!(matches!(e, Err(Error::Shape { arg: "topk_ids", .. })), "{e:?}");
        let many = Tensor::<i32>::zeros(d, &[5000, 2]).unwrap();
        let e = run([10009, 10009 / 4, 1], &SortInput::new(&many, 3), &options);
        assert!(matches!(e, Err(Error::Value { arg: "workspace", .. })), "{e:?}");
        let mut sorted = list(16);
        let mut experts = sorted.narrow(0, 0, 4).unwrap();
        let mut total = list(1);
        let mut out = SortOutput::new(&mut sorted, &mut experts, &mut total);
        let e = sort(s, &mut out, &input, &options, &mut Tensor::zeros(d, &[0]).unwrap());
        assert!(matches!(e, Err(Error::Overlap { .. })), "{e:?}");
    });
}
