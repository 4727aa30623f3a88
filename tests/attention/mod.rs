mod decode;
mod prefill;
mod merge;
