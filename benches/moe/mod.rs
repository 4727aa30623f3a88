mod capacity;
mod fused;
mod fused_quant;
mod gate;
mod permute;
mod shuffle;
mod sort;
mod statistics;

use warploom_benches::{Harness, Model};

pub fn benches(harness: &mut Harness) {
    gate::benches(harness);
    sort::benches(harness);
    permute::benches(harness);
    capacity::benches(harness);
    shuffle::benches(harness);
    statistics::benches(harness);
    fused::benches(harness);
    fused_quant::benches(harness);
}

/// What the fused block is timed for: models and numbers of tokens, by the command line or those of targets.md.
fn models(harness: &Harness) -> (Vec<Model>, Vec<usize>) {
    let recorded = || {
        let gpu = [
            ("mixtral", [8, 2, 4096, 14336]),
            ("qwen3-30b", [128, 8, 2048, 768]),
            ("deepseek-v3", [256, 8, 7168, 2048]),
        ];
        let models = harness.pick(&gpu[..], &[("tiny", [16, 4, 256, 64])]);
        models.iter().map(|&(name, sizes)| Model::new(name, sizes)).collect()
    };
    (harness.models(recorded), harness.tokens(harness.pick(&[1, 8, 64, 512, 4096], &[1, 16])))
}
