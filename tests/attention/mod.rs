mod decode;
mod merge;
