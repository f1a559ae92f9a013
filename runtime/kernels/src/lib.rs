//! Fused operators for GPUs: cubecl kernels, each the second implementation of operators of the crate `runtime`.
//!
//! A kernel is generic over the number format of its tensors, fp32 or bf16; inside, all is fp32. Shapes that decide
//! how much a unit holds, the number of units of a cube and whether plane instructions may be used are known when a
//! kernel is compiled. Sums are taken in a fixed order, so that results are the same bits in every run.
//!
//! Each function here sends its kernels into a [`Queue`]: that of a device, or a list whose kernels are compiled
//! where there is no device. The bytes that a kernel must move are stated at its function, for elements of e bytes.
//!
//! Without the feature `cubecl` the crate is empty.
#![cfg(feature = "cubecl")]
// Launching a kernel is unsafe: it reads and writes what its indices reach.
#![allow(unsafe_code)]
// The arguments of a kernel are its buffers and its numbers, each by itself.
#![allow(clippy::too_many_arguments)]

pub mod activation;
pub mod attention;
pub mod copy;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod loss;
pub mod mask;
pub mod norm;
pub mod optimizer;
pub mod product;
#[cfg(feature = "ptx")]
pub mod ptx;
mod queue;
pub mod reduce;
pub mod rotary;
pub mod softmax;
pub mod strided;
mod sums;
pub mod traffic;

pub use queue::{Buffer, Element, KernelList, ListedKernel, Queue};
