//! What the allocator costs a serving loop: a decoding step of many sequences, and a prompt whose beginning is known.

use criterion::Criterion;
use warploom::kv_cache::BlockAllocator;
use warploom_benches::Harness;

pub fn benches(harness: &mut Harness) {
    harness.host("kv_cache/allocator", |criterion: &mut Criterion| {
        let mut group = criterion.benchmark_group("kv_cache/allocator");
        group.bench_function("step_of_256_sequences", |b| {
            let mut blocks = BlockAllocator::new(1 << 20, 16).expect("an allocator");
            let mut sequences: Vec<_> = (0..256)
                .map(|i| {
                    let prompt: Vec<u32> = (0..500).map(|t| t * 31 + i).collect();
                    blocks.start(&prompt, 0).expect("blocks")
                })
                .collect();
            b.iter(|| {
                for sequence in &mut sequences {
                    if sequence.len() > 4000 {
                        blocks.truncate(sequence, 500).expect("fewer tokens");
                    }
                    blocks.append(sequence, &[7]).expect("blocks");
                    let len = sequence.len();
                    blocks.mark_computed(sequence, len).expect("computed");
                }
                blocks.take_copies()
            });
        });
        group.bench_function("start_of_a_known_prompt_of_4096", |b| {
            let mut blocks = BlockAllocator::new(1 << 16, 16).expect("an allocator");
            let prompt: Vec<u32> = (0..4096).collect();
            let mut first = blocks.start(&prompt, 0).expect("blocks");
            blocks.mark_computed(&mut first, 4096).expect("computed");
            b.iter(|| {
                let again = blocks.start(&prompt, 0).expect("blocks");
                blocks.free(again).expect("its own");
            });
        });
        group.finish();
    });
}
