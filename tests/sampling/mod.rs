mod philox;
mod top_k_top_p;
mod weights;
