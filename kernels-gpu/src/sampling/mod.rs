//! Token sampling.
//!
//! | file | what |
//! | --- | --- |
//! | `top_k_top_p` | kernels `batched` and `split_k`: small k, candidates in shared memory |
//! | `radix` | any k or none: a radix search over the keys of the logits |
//! | `radix_cluster`, `radix_cluster_short`, `radix_cluster_long` | the same search in one launch, by a cluster of blocks for each row |
//! | `adjust` | allowed tokens, bias and penalties, before either |
//! | `row_sum` | largest logit and sum of weights of a row, for `radix` |
//! | `log_probs` | log-probabilities before the filters, after `top_k_top_p` |
//! | `job`, `logit`, `weights`, `top_k`, `part`, `counters`, `totals`, [`philox`] | what they share |
pub use crate::philox;

pub mod adjust;
pub mod counters;
pub mod job;
pub mod log_probs;
pub mod logit;
pub mod part;
pub mod radix;
pub mod radix_cluster;
pub mod radix_cluster_long;
pub mod radix_cluster_short;
pub mod row_sum;
pub mod top_k;
pub mod top_k_top_p;
pub mod totals;
pub mod weights;
