mod decode;
mod merge;
mod prefill;
