//! Architectures of Hugging Face checkpoints: where each of our parameters is, as data.

use ir::error::Problem;
use ir::graph::DimName;
use ir::model::{Attention, Bias, FeedForward, ModelSpec, NormKind, Position};

/// A model class of the library transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// `BloomForCausalLM`.
    Bloom,
    /// `GPT2LMHeadModel`.
    Gpt2,
    /// `LlamaForCausalLM`; Mistral's checkpoints have the same tensors.
    Llama,
    /// `Qwen2ForCausalLM`.
    Qwen2,
}

/// One of our parameters in terms of a tensor.
#[derive(Debug)]
pub(super) struct Row {
    /// Our name in its block.
    pub ours: &'static str,
    /// The tensor's name without the prefix; `{}` stands for the layer.
    pub theirs: &'static str,
    /// The tensor's dims, outermost first, each as the dims of ours that it folds, outermost first.
    pub dims: &'static [&'static [Factor]],
}

/// What a dim of a tensor is folded from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Factor {
    /// A dim of our parameter.
    Dim(DimName),
    /// One of three parts that lie side by side: query, key, value.
    Third(u64),
}

/// Name of the output projection where it is not tied; it never has the prefix.
pub(super) const HEAD: &str = "lm_head.weight";

const V: Factor = Factor::Dim(DimName::Vocabulary);
const P: Factor = Factor::Dim(DimName::Position);
const H: Factor = Factor::Dim(DimName::Hidden);
const K: Factor = Factor::Dim(DimName::KeyValueHeads);
const Q: Factor = Factor::Dim(DimName::QueriesPerKeyValue);
const D: Factor = Factor::Dim(DimName::HeadDim);
const E: Factor = Factor::Dim(DimName::ValueDim);
const I: Factor = Factor::Dim(DimName::Intermediate);
const QUERY: Factor = Factor::Third(0);
const KEY: Factor = Factor::Third(1);
const VALUE: Factor = Factor::Third(2);

const fn row(ours: &'static str, theirs: &'static str, dims: &'static [&'static [Factor]]) -> Row {
    Row { ours, theirs, dims }
}

/// Query, key and value of a head lie side by side; linear weights are [output, input].
const BLOOM: &[Row] = &[
    row("embedding.token", "word_embeddings.weight", &[&[V], &[H]]),
    row("embedding.norm.weight", "word_embeddings_layernorm.weight", &[&[H]]),
    row("embedding.norm.bias", "word_embeddings_layernorm.bias", &[&[H]]),
    row("attention.norm.weight", "h.{}.input_layernorm.weight", &[&[H]]),
    row("attention.norm.bias", "h.{}.input_layernorm.bias", &[&[H]]),
    row("attention.query.weight", "h.{}.self_attention.query_key_value.weight", &[&[K, QUERY, Q, D], &[H]]),
    row("attention.query.bias", "h.{}.self_attention.query_key_value.bias", &[&[K, QUERY, Q, D]]),
    row("attention.key.weight", "h.{}.self_attention.query_key_value.weight", &[&[K, KEY, D], &[H]]),
    row("attention.key.bias", "h.{}.self_attention.query_key_value.bias", &[&[K, KEY, D]]),
    row("attention.value.weight", "h.{}.self_attention.query_key_value.weight", &[&[K, VALUE, E], &[H]]),
    row("attention.value.bias", "h.{}.self_attention.query_key_value.bias", &[&[K, VALUE, E]]),
    row("attention.output.weight", "h.{}.self_attention.dense.weight", &[&[H], &[K, Q, E]]),
    row("attention.output.bias", "h.{}.self_attention.dense.bias", &[&[H]]),
    row("feed_forward.norm.weight", "h.{}.post_attention_layernorm.weight", &[&[H]]),
    row("feed_forward.norm.bias", "h.{}.post_attention_layernorm.bias", &[&[H]]),
    row("feed_forward.up.weight", "h.{}.mlp.dense_h_to_4h.weight", &[&[I], &[H]]),
    row("feed_forward.up.bias", "h.{}.mlp.dense_h_to_4h.bias", &[&[I]]),
    row("feed_forward.down.weight", "h.{}.mlp.dense_4h_to_h.weight", &[&[H], &[I]]),
    row("feed_forward.down.bias", "h.{}.mlp.dense_4h_to_h.bias", &[&[H]]),
    row("final_norm.weight", "ln_f.weight", &[&[H]]),
    row("final_norm.bias", "ln_f.bias", &[&[H]]),
    row("head.weight", HEAD, &[&[V], &[H]]),
];

/// All queries, then all keys, then all values; linear weights (`Conv1D`) are [input, output].
const GPT2: &[Row] = &[
    row("embedding.token", "wte.weight", &[&[V], &[H]]),
    row("embedding.position", "wpe.weight", &[&[P], &[H]]),
    row("attention.norm.weight", "h.{}.ln_1.weight", &[&[H]]),
    row("attention.norm.bias", "h.{}.ln_1.bias", &[&[H]]),
    row("attention.query.weight", "h.{}.attn.c_attn.weight", &[&[H], &[QUERY, K, Q, D]]),
    row("attention.query.bias", "h.{}.attn.c_attn.bias", &[&[QUERY, K, Q, D]]),
    row("attention.key.weight", "h.{}.attn.c_attn.weight", &[&[H], &[KEY, K, D]]),
    row("attention.key.bias", "h.{}.attn.c_attn.bias", &[&[KEY, K, D]]),
    row("attention.value.weight", "h.{}.attn.c_attn.weight", &[&[H], &[VALUE, K, E]]),
    row("attention.value.bias", "h.{}.attn.c_attn.bias", &[&[VALUE, K, E]]),
    row("attention.output.weight", "h.{}.attn.c_proj.weight", &[&[K, Q, E], &[H]]),
    row("attention.output.bias", "h.{}.attn.c_proj.bias", &[&[H]]),
    row("feed_forward.norm.weight", "h.{}.ln_2.weight", &[&[H]]),
    row("feed_forward.norm.bias", "h.{}.ln_2.bias", &[&[H]]),
    row("feed_forward.up.weight", "h.{}.mlp.c_fc.weight", &[&[H], &[I]]),
    row("feed_forward.up.bias", "h.{}.mlp.c_fc.bias", &[&[I]]),
    row("feed_forward.down.weight", "h.{}.mlp.c_proj.weight", &[&[I], &[H]]),
    row("feed_forward.down.bias", "h.{}.mlp.c_proj.bias", &[&[H]]),
    row("final_norm.weight", "ln_f.weight", &[&[H]]),
    row("final_norm.bias", "ln_f.bias", &[&[H]]),
    row("head.weight", HEAD, &[&[V], &[H]]),
];

/// A tensor of its own for each projection; linear weights are [output, input].
const LLAMA: &[Row] = &[
    row("embedding.token", "embed_tokens.weight", &[&[V], &[H]]),
    row("attention.norm.weight", "layers.{}.input_layernorm.weight", &[&[H]]),
    row("attention.query.weight", "layers.{}.self_attn.q_proj.weight", &[&[K, Q, D], &[H]]),
    row("attention.query.bias", "layers.{}.self_attn.q_proj.bias", &[&[K, Q, D]]),
    row("attention.key.weight", "layers.{}.self_attn.k_proj.weight", &[&[K, D], &[H]]),
    row("attention.key.bias", "layers.{}.self_attn.k_proj.bias", &[&[K, D]]),
    row("attention.value.weight", "layers.{}.self_attn.v_proj.weight", &[&[K, E], &[H]]),
    row("attention.value.bias", "layers.{}.self_attn.v_proj.bias", &[&[K, E]]),
    row("attention.output.weight", "layers.{}.self_attn.o_proj.weight", &[&[H], &[K, Q, E]]),
    row("attention.output.bias", "layers.{}.self_attn.o_proj.bias", &[&[H]]),
    row("feed_forward.norm.weight", "layers.{}.post_attention_layernorm.weight", &[&[H]]),
    row("feed_forward.gate.weight", "layers.{}.mlp.gate_proj.weight", &[&[I], &[H]]),
    row("feed_forward.gate.bias", "layers.{}.mlp.gate_proj.bias", &[&[I]]),
    row("feed_forward.up.weight", "layers.{}.mlp.up_proj.weight", &[&[I], &[H]]),
    row("feed_forward.up.bias", "layers.{}.mlp.up_proj.bias", &[&[I]]),
    row("feed_forward.down.weight", "layers.{}.mlp.down_proj.weight", &[&[H], &[I]]),
    row("feed_forward.down.bias", "layers.{}.mlp.down_proj.bias", &[&[H]]),
    row("final_norm.weight", "norm.weight", &[&[H]]),
    row("head.weight", HEAD, &[&[V], &[H]]),
];

impl Architecture {
    /// Our parameters in terms of the architecture's tensors.
    pub(super) fn rows(self) -> &'static [Row] {
        match self {
            Architecture::Bloom => BLOOM,
            Architecture::Gpt2 => GPT2,
            Architecture::Llama | Architecture::Qwen2 => LLAMA,
        }
    }

    /// What the names of all tensors but [`HEAD`] start with; checkpoints of the model without its head lack it.
    pub(super) fn prefix(self) -> &'static str {
        match self {
            Architecture::Bloom | Architecture::Gpt2 => "transformer.",
            Architecture::Llama | Architecture::Qwen2 => "model.",
        }
    }

    /// Endings of tensors that older versions of transformers saved and that are no parameters.
    pub(super) fn buffers(self) -> &'static [&'static str] {
        match self {
            Architecture::Bloom => &[],
            Architecture::Gpt2 => &[".attn.bias", ".attn.masked_bias"],
            Architecture::Llama | Architecture::Qwen2 => &[".rotary_emb.inv_freq"],
        }
    }
}

/// The architecture whose checkpoints hold a model's parameters.
///
/// # Errors
/// What of the model no architecture has.
pub fn architecture(model: &ModelSpec) -> Result<Architecture, Problem> {
    let (architecture, wrong) = match model.position {
        Position::Alibi => (Architecture::Bloom, gelu_model(model, true)),
        Position::Learned => (Architecture::Gpt2, gelu_model(model, false)),
        Position::Rotary if model.bias == Bias::QueryKeyValue => (Architecture::Qwen2, rotary_model(model)),
        Position::Rotary => (Architecture::Llama, rotary_model(model)),
    };
    let deviation = model.deviations.first().map(|deviation| deviation.reason());
    match wrong.or(deviation) {
        None => Ok(architecture),
        Some(wrong) => Err(Problem::new(
            format!("{} cannot be held by a Hugging Face checkpoint: {wrong}", model.name),
            format!("model {}", model.name),
            "weights are read and written for models that are BLOOM, GPT-2, Llama or Qwen2 in all but sizes",
        )),
    }
}

/// What keeps a model from being BLOOM (with a norm on the embedding) or GPT-2.
fn gelu_model(model: &ModelSpec, bloom: bool) -> Option<&'static str> {
    let Attention::MultiHead { num_attention_heads: heads, head_dim, .. } = model.attention else {
        return Some("attention is latent");
    };
    let FeedForward::Gelu { intermediate_size } = model.feed_forward else {
        return Some("positions are not rotary, but the feed-forward part is not GeLU");
    };
    let hidden = model.hidden_size;
    let rules = [
        (model.norm == NormKind::LayerNorm, "positions are not rotary, but norms are not LayerNorm"),
        (model.bias == Bias::All, "positions are not rotary, but not every linear operator has a bias"),
        (model.attention.num_key_value_heads() == heads, "positions are not rotary, but heads share keys and values"),
        (head_dim.is_none_or(|width| width * heads == hidden), "the heads' widths do not add up to the hidden size"),
        (model.embedding_norm == bloom, "a norm on the embedding comes with ALiBi, and only with it"),
        (!bloom || intermediate_size == 4 * hidden, "BLOOM's feed-forward part is four times the hidden size wide"),
    ];
    rules.into_iter().find(|(holds, _)| !holds).map(|(_, wrong)| wrong)
}

/// What keeps a model from being Llama or Qwen2.
fn rotary_model(model: &ModelSpec) -> Option<&'static str> {
    let rules = [
        (matches!(model.attention, Attention::MultiHead { .. }), "attention is latent"),
        (matches!(model.feed_forward, FeedForward::SwiGlu { .. }), "the feed-forward part is not one SwiGLU"),
        (model.norm == NormKind::RmsNorm, "positions are rotary, but norms are not RMSNorm"),
        (!model.embedding_norm, "positions are rotary, but there is a norm on the embedding"),
    ];
    rules.into_iter().find(|(holds, _)| !holds).map(|(_, wrong)| wrong)
}
