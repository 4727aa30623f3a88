mod embedding;
mod linear;
mod linear_quant;
mod quantise;
