mod sort;
mod gate;
