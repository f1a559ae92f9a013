//! Models small enough to be interpreted.

use ir::model::{Attention, Bias, DType, FeedForward, ModelSpec, NormKind, Position, Vocabulary};
use ir::units::SequenceLength;

/// Tokens of a sequence.
pub const SEQUENCE: usize = 8;

/// Architectures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Learned positions, LayerNorm, GeLU, biases.
    Gpt2,
    /// ALiBi and a norm on the embedding.
    Bloom,
    /// Rotary positions, RMSNorm, SwiGLU, no biases.
    Llama,
}

/// What varies between small models.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub family: Family,
    pub tied: bool,
    pub heads: u64,
    pub key_value_heads: u64,
    pub layers: u64,
    pub vocabulary: u64,
}

/// A model with heads of width 4.
pub fn small_model(shape: Shape) -> ModelSpec {
    let llama = shape.family == Family::Llama;
    ModelSpec {
        name: "small".to_owned(),
        source: "test".to_owned(),
        num_layers: shape.layers,
        hidden_size: shape.heads * 4,
        attention: Attention::MultiHead {
            num_attention_heads: shape.heads,
            num_key_value_heads: Some(shape.key_value_heads),
            head_dim: None,
        },
        feed_forward: match llama {
            true => FeedForward::SwiGlu { intermediate_size: 24 },
            false => FeedForward::Gelu { intermediate_size: 24 },
        },
        norm: if llama { NormKind::RmsNorm } else { NormKind::LayerNorm },
        norm_epsilon: if llama { 1e-6 } else { 1e-5 },
        bias: if llama { Bias::None } else { Bias::All },
        position: match shape.family {
            Family::Gpt2 => Position::Learned,
            Family::Bloom => Position::Alibi,
            Family::Llama => Position::Rotary,
        },
        rotary_base: if llama { 500_000.0 } else { 10_000.0 },
        rotary_scaling: None,
        vocabulary: Vocabulary { size: shape.vocabulary, padded: None },
        embedding_norm: shape.family == Family::Bloom,
        tied_embedding: shape.tied,
        max_sequence_length: SequenceLength::Tokens(SEQUENCE as u64),
        sequence_length: None,
        global_batch: None,
        dtype: DType::FP32,
        published_parameters: None,
        deviations: Vec::new(),
    }
}
