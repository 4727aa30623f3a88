mod cache;
mod rotary;
