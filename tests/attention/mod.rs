mod decode;
mod prefill;
