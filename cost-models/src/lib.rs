//! Pure functions from a model, a machine and a strategy to bytes and seconds.
//!
//! Each formula stands here once and names its source. Nothing is read, written or searched here.

pub mod block;
pub mod collective;
pub mod flops;
pub mod goodput;
pub mod machine;
pub mod matmul;
pub mod memory;
pub mod offload;
pub mod pipeline;
pub mod step;
