//! Token sampling.
//!
//! | file | what |
//! | --- | --- |
//! | `top_k_top_p` | kernels `batched` and `split_k`: small k, candidates in shared memory |
//! | `radix` | any k or none: a radix search over the keys of the logits |
//! | `adjust` | allowed tokens, bias and penalties, before either |
//! | `row_sum` | largest logit and sum of weights of a row, for `radix` and for log-probabilities |
//! | `job`, `logit`, `weights`, `top_k`, [`philox`] | what they share |
pub use crate::philox;

pub mod adjust;
pub mod job;
pub mod logit;
pub mod radix;
pub mod row_sum;
pub mod top_k;
pub mod top_k_top_p;
pub mod weights;
