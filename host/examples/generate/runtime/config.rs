//! `config.json`: the extents of a model, and that it is one this runtime knows.

use super::problem::{Result, input};
use serde::Deserialize;
use std::path::Path;

/// The extents of a model, named as in its file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "the names are those of the file")]
pub struct Config {
    architecture: String,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub rope_theta: f64,
    rotary: String,
    pub rms_norm_eps: f32,
    pub max_position_embeddings: usize,
    pub num_experts: usize,
    pub num_expert_groups: usize,
    pub topk_groups: usize,
    pub experts_per_token: usize,
    pub moe_intermediate_size: usize,
    pub num_shared_experts: usize,
    pub shared_intermediate_size: usize,
    scoring: String,
    pub renormalize: bool,
    pub routed_scaling_factor: f32,
    activation: String,
    tie_word_embeddings: bool,
    dtype: String,
    pub eos_token: String,
}

impl Config {
    /// Reads and checks the file.
    ///
    /// # Errors
    /// [`Problem::Input`](super::problem::Problem::Input) for a file that is not there or no configuration of a model that
    /// this runtime runs.
    pub fn read(path: &Path) -> Result<Self> {
        let shown = path.display();
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) => return input(format!("cannot read {shown}: {e}")),
        };
        let config: Self = match serde_json::from_str(&text) {
            Ok(config) => config,
            Err(e) => return input(format!("{shown} is no configuration that this example knows: {e}")),
        };
        match config.complaint() {
            None => Ok(config),
            Some(complaint) => input(format!("{shown}: {complaint}")),
        }
    }

    /// What this runtime cannot do about the model, if anything.
    fn complaint(&self) -> Option<String> {
        let words = [
            ("architecture", &self.architecture, "grouped-sigmoid-moe"),
            ("rotary", &self.rotary, "neox"),
            ("scoring", &self.scoring, "sigmoid+correction_bias"),
            ("activation", &self.activation, "silu_and_mul"),
            ("dtype", &self.dtype, "bfloat16"),
        ];
        if let Some((key, got, known)) = words.iter().find(|(_, got, known)| got.as_str() != *known) {
            return Some(format!("`{key}` is \"{got}\", but this example only knows \"{known}\""));
        }
        if !self.tie_word_embeddings {
            return Some("`tie_word_embeddings` is false, but this example only knows tied embeddings".into());
        }
        let positive = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_layers", self.num_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_position_embeddings),
            ("num_experts", self.num_experts),
            ("num_expert_groups", self.num_expert_groups),
            ("topk_groups", self.topk_groups),
            ("experts_per_token", self.experts_per_token),
            ("moe_intermediate_size", self.moe_intermediate_size),
        ];
        if let Some((key, got)) = positive.iter().find(|(_, n)| *n == 0 || *n > 1 << 24) {
            return Some(format!("`{key}` is {got}, which is out of range"));
        }
        let rules = [
            (
                self.num_attention_heads.is_multiple_of(self.num_key_value_heads),
                "`num_attention_heads` must be a multiple of `num_key_value_heads`",
            ),
            (self.head_dim.is_multiple_of(2) && self.head_dim <= 256, "`head_dim` must be even and at most 256"),
            (
                self.num_experts.is_multiple_of(self.num_expert_groups),
                "`num_experts` must be a multiple of `num_expert_groups`",
            ),
            (self.topk_groups <= self.num_expert_groups, "`topk_groups` must not exceed `num_expert_groups`"),
            (
                self.experts_per_token <= self.num_experts / self.num_expert_groups * self.topk_groups,
                "`experts_per_token` must not exceed the experts of `topk_groups` groups",
            ),
            (self.num_experts <= 1024, "`num_experts` must be at most 1024"),
            (self.experts_per_token <= 32, "`experts_per_token` must be at most 32"),
            (
                self.shared_intermediate_size == self.num_shared_experts * self.moe_intermediate_size,
                "`shared_intermediate_size` must be `num_shared_experts` times `moe_intermediate_size`",
            ),
            (self.num_shared_experts <= 1, "`num_shared_experts` must be 0 or 1"),
            (self.rope_theta > 1.0 && self.rope_theta.is_finite(), "`rope_theta` must be above 1"),
            (self.rms_norm_eps >= 0.0 && self.rms_norm_eps.is_finite(), "`rms_norm_eps` must not be negative"),
            (
                self.routed_scaling_factor > 0.0 && self.routed_scaling_factor.is_finite(),
                "`routed_scaling_factor` must be positive",
            ),
        ];
        rules.iter().find(|(ok, _)| !ok).map(|(_, rule)| (*rule).into())
    }

    /// Heads of queries, keys and values together.
    pub fn qkv_heads(&self) -> usize {
        self.num_attention_heads + 2 * self.num_key_value_heads
    }

    /// Experts that a token goes to, the shared one included.
    pub fn slots(&self) -> usize {
        self.experts_per_token + self.num_shared_experts
    }
}
