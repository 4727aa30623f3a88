mod embedding;
mod linear;
