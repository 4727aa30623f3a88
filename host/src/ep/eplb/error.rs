//! What the load balancer refuses.

/// Why a plan was refused. Nothing is planned in part.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EplbError {
    /// A count is zero, or there are no loads.
    #[error("eplb: {argument} must be at least 1, but is 0")]
    Zero {
        /// The argument.
        argument: &'static str,
    },
    /// A count is not a multiple of another.
    #[error("eplb: {argument} must be a multiple of {divisor} = {divisor_value}, but is {value}")]
    NotDivisible {
        /// The argument.
        argument: &'static str,
        /// Its value.
        value: usize,
        /// What must divide it.
        divisor: &'static str,
        /// The divisor's value.
        divisor_value: usize,
    },
    /// There are fewer slots than experts, so that some expert would have none.
    #[error("eplb: num_replicas must be at least the number of experts, {num_experts}, but is {num_replicas}")]
    TooFewReplicas {
        /// Slots.
        num_replicas: usize,
        /// Logical experts.
        num_experts: usize,
    },
    /// A load is negative, infinite or NaN, or too large for `f32`.
    #[error("eplb: loads must be finite in f32 and not negative, but layer {layer}, expert {expert} has {value}")]
    Load {
        /// The layer.
        layer: usize,
        /// The logical expert.
        expert: usize,
        /// Its load as given.
        value: f64,
    },
    /// The loads of a layer add up to more than `f32` can hold with a margin for rounding.
    #[error("eplb: the loads of layer {layer} add up to {total:e}, more than {:e}", f32::MAX / 2.0)]
    LoadOverflow {
        /// The layer.
        layer: usize,
        /// The sum.
        total: f64,
    },
    /// Layers have different numbers of experts.
    #[error("eplb: every layer must have {expected} loads, as layer 0 has, but layer {layer} has {got}")]
    Ragged {
        /// The layer that differs.
        layer: usize,
        /// The length of layer 0.
        expected: usize,
        /// Its length.
        got: usize,
    },
    /// A table has the wrong length, or a placement belongs to other loads or another cluster.
    #[error("eplb: {argument} must be {expected}, but is {got}")]
    Mismatch {
        /// The argument.
        argument: &'static str,
        /// What it needs.
        expected: usize,
        /// What it got.
        got: usize,
    },
    /// A placement names an expert that does not exist.
    #[error("eplb: layer {layer}, slot {slot} holds expert {expert}, but there are {num_experts}")]
    NoSuchExpert {
        /// The layer.
        layer: usize,
        /// The slot (physical expert).
        slot: usize,
        /// The expert named there.
        expert: usize,
        /// Logical experts.
        num_experts: usize,
    },
    /// A placement holds an expert nowhere.
    #[error("eplb: layer {layer} holds expert {expert} in no slot")]
    MissingExpert {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: usize,
    },
    /// An option is out of range.
    #[error("eplb: {option} must be {expected}, but is {got}")]
    Option {
        /// The option.
        option: &'static str,
        /// What it needs.
        expected: &'static str,
        /// What it got.
        got: f64,
    },
    /// The tables of the plan do not fit in memory or in the address space.
    #[error("eplb: {table} is too large: {dimensions:?} entries")]
    TooLarge {
        /// The table.
        table: &'static str,
        /// Its dimensions.
        dimensions: [usize; 3],
    },
}

pub(super) fn nonzero(argument: &'static str, value: usize) -> Result<(), EplbError> {
    if value == 0 { Err(EplbError::Zero { argument }) } else { Ok(()) }
}

/// Refuses a `value` that is not a multiple of `divisor_value`, which is not zero.
pub(super) fn divides(
    argument: &'static str,
    value: usize,
    divisor: &'static str,
    divisor_value: usize,
) -> Result<(), EplbError> {
    if value.is_multiple_of(divisor_value) {
        Ok(())
    } else {
        Err(EplbError::NotDivisible { argument, value, divisor, divisor_value })
    }
}

pub(super) fn same(argument: &'static str, expected: usize, got: usize) -> Result<(), EplbError> {
    if expected == got { Ok(()) } else { Err(EplbError::Mismatch { argument, expected, got }) }
}

/// A table of `dimensions` filled with `value`, or an error if there is no room for it.
pub(super) fn table<T: Copy>(name: &'static str, dimensions: [usize; 3], value: T) -> Result<Vec<T>, EplbError> {
    let too_large = || EplbError::TooLarge { table: name, dimensions };
    let len = dimensions.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).ok_or_else(too_large)?;
    let mut table = Vec::new();
    table.try_reserve_exact(len).map_err(|_| too_large())?;
    table.resize(len, value);
    Ok(table)
}
