mod gated;
mod plain;
mod silu_and_mul_quant;
