//! Weights in and out: Hugging Face checkpoints of BLOOM, GPT-2, Llama and Qwen2 as safetensors.
//!
//! One table for each architecture says which tensor holds each of our parameters, and how the tensor's dims
//! fold out of ours; reading and writing use the same table. Reading gives any part of a parameter straight
//! from a memory map, so that a rank never holds more than its shard; writing asks for whole parameters, one
//! tensor's at a time.
//!
//! Deliberately absent: pickled checkpoints (`pytorch_model.bin`), experts, latent attention, tokenizers.

mod architecture;
mod checkpoint;
mod config;
mod export;
mod layout;
mod strided;

pub use architecture::{Architecture, architecture};
pub use checkpoint::{Checkpoint, DimRange};
pub use export::{export, export_order};
