mod decode;
mod extremes;
mod merge;
mod prefill;
