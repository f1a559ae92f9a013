//! Every GPU kernel against the operators of the CPU, on whatever Vulkan driver there is: odd sizes included, results
//! written over NaN.
//!
//! WGSL knows no bf16: there the kernels run in fp32, and in both formats on devices that say they have both.

#[path = "kernels/attention.rs"]
mod attention;
#[path = "kernels/device.rs"]
mod device;
#[path = "kernels/elementwise.rs"]
mod elementwise;
#[path = "support/random.rs"]
mod random;
#[path = "kernels/rows.rs"]
mod rows;
#[path = "kernels/update.rs"]
mod update;
#[path = "kernels/vocabulary.rs"]
mod vocabulary;
