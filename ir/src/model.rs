//! The description of a transformer: what a model file holds, checked.

mod check;

use serde::{Deserialize, Serialize};

pub use check::check_model;

use crate::error::{Error, Problem};
use crate::rotary::RotaryScaling;
use crate::text::read_ron;
use crate::units::{BatchSize, SequenceLength};
use check::Problems;

/// Epsilon of norms in files without one (transformers, `layer_norm_epsilon` of GPT-2 and BLOOM).
pub const DEFAULT_NORM_EPSILON: f64 = 1e-5;
/// Base of rotary frequencies in files without one (RoFormer, arXiv 2104.09864, section 3.2.2).
pub const DEFAULT_ROTARY_BASE: f64 = 10_000.0;
/// Longest sequence assumed for a model file that names only a maximum.
const DEFAULT_SEQUENCE_LIMIT: u64 = 8192;
/// Tokens in a global batch where neither the model file nor the command line names a batch.
const DEFAULT_BATCH_TOKENS: u64 = 4 << 20;
/// Largest accepted width, vocabulary, sequence length and batch.
pub const SIZE_LIMIT: u64 = 1 << 28;

/// A transformer, as its model file describes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Short name; the default plan file is called after it.
    pub name: String,
    /// Where the shape was read.
    pub source: String,
    /// Number of transformer layers, embedding and head apart.
    pub num_layers: u64,
    /// Width of the residual stream.
    pub hidden_size: u64,
    /// Attention of every layer.
    pub attention: Attention,
    /// Feed-forward part of every layer.
    pub feed_forward: FeedForward,
    /// Normalisation before attention and feed-forward, and after the last layer.
    pub norm: NormKind,
    /// Added to the variance or the mean square before its root.
    #[serde(default = "default_norm_epsilon")]
    pub norm_epsilon: f64,
    /// Which linear operators carry a bias.
    pub bias: Bias,
    /// How positions enter.
    pub position: Position,
    /// Base of the rotary frequencies; given for rotary positions only.
    #[serde(default = "default_rotary_base", skip_serializing_if = "is_default_rotary_base")]
    pub rotary_base: f64,
    /// How rotary frequencies are lowered; as they are where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rotary_scaling: Option<RotaryScaling>,
    /// Token embedding.
    pub vocabulary: Vocabulary,
    /// A norm directly after the token embedding (BLOOM).
    #[serde(default)]
    pub embedding_norm: bool,
    /// The head uses the token embedding's weights.
    pub tied_embedding: bool,
    /// Longest sequence that the model is built for.
    pub max_sequence_length: SequenceLength,
    /// Sequence length in training; `min(max_sequence_length, 8192)` where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence_length: Option<SequenceLength>,
    /// Global batch in training; 4 Mi tokens where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub global_batch: Option<BatchSize>,
    /// Number format of weights and activations.
    pub dtype: DType,
    /// Parameter count that the source publishes, exactly; checked when the file is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published_parameters: Option<u64>,
    /// What the published model computes otherwise than programs do; such a model is planned, but not executed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deviations: Vec<Deviation>,
}

/// Something that a published model computes otherwise than the operators of programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Deviation {
    /// Rotary frequencies are scaled otherwise than [`RotaryScaling`] says.
    RotaryScaling,
    /// Rotary embedding of a part of each head.
    PartialRotary,
    /// Queries see the last positions only, fewer than the longest sequence has.
    SlidingWindow,
    /// GeLU by the error function instead of its tanh form.
    ErrorFunctionGelu,
    /// Attention scores are scaled by something else than one over the root of the head's width.
    ScoreScale,
}

/// Attention of a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Attention {
    /// Multi-head attention; grouped-query where there are fewer key-value heads.
    MultiHead {
        /// Query heads.
        num_attention_heads: u64,
        /// Key and value heads; as many as query heads where absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        num_key_value_heads: Option<u64>,
        /// Width of a head; `hidden_size / num_attention_heads` where absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        head_dim: Option<u64>,
    },
    /// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).
    MultiLatent {
        /// Heads of query, key and value alike.
        num_attention_heads: u64,
        /// Width of the compressed query.
        query_rank: u64,
        /// Width of the compressed key and value.
        key_value_rank: u64,
        /// Width of a head's part without position.
        nope_head_dim: u64,
        /// Width of a head's rotary part; the key's is shared by all heads.
        rope_head_dim: u64,
        /// Width of a value head.
        value_head_dim: u64,
    },
}

/// Feed-forward part of a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum FeedForward {
    /// Two matrices with GeLU between them.
    Gelu {
        /// Width between the matrices.
        intermediate_size: u64,
    },
    /// Gate and up matrices, SiLU(gate) · up, and a down matrix.
    SwiGlu {
        /// Width between the matrices.
        intermediate_size: u64,
    },
    /// Routed SwiGLU experts, in all layers but the first `first_dense_layers`.
    MixtureOfExperts {
        /// Routed experts.
        num_experts: u64,
        /// Routed experts that see a token.
        experts_per_token: u64,
        /// Width of one expert.
        intermediate_size: u64,
        /// Experts that see every token.
        #[serde(default)]
        num_shared_experts: u64,
        /// Layers at the start that have one dense SwiGLU instead.
        #[serde(default)]
        first_dense_layers: u64,
        /// Width of the dense layers' SwiGLU; needed if there are such layers.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        dense_intermediate_size: Option<u64>,
    },
}

impl FeedForward {
    /// Routed experts that ranks can share out; a dense layer counts as one.
    pub fn num_experts(&self) -> u64 {
        match self {
            FeedForward::Gelu { .. } | FeedForward::SwiGlu { .. } => 1,
            FeedForward::MixtureOfExperts { num_experts, .. } => *num_experts,
        }
    }
}

/// Kind of normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NormKind {
    /// Mean and variance, with weight and bias.
    LayerNorm,
    /// Root mean square, with weight.
    RmsNorm,
}

/// Which linear operators carry a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Bias {
    /// None.
    #[serde(rename = "Nothing", alias = "None")]
    None,
    /// Only query, key and value (Qwen2).
    QueryKeyValue,
    /// All.
    All,
}

/// How positions enter the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Position {
    /// A learned vector for each position, added to the token embedding.
    Learned,
    /// Rotary embedding of query and key (RoPE).
    Rotary,
    /// A linear bias on attention scores (ALiBi).
    Alibi,
}

/// Rows of the token embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vocabulary {
    /// Tokens of the tokenizer.
    pub size: u64,
    /// Rows of the embedding, where the model fixes them; at least `size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padded: Option<u64>,
}

/// Number format of weights and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DType {
    /// bfloat16, with an fp32 master copy in the optimizer.
    BF16,
    /// IEEE half, with an fp32 master copy in the optimizer and loss scaling.
    FP16,
    /// IEEE single throughout.
    FP32,
}

/// What one training step processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// Tokens of a sequence.
    pub sequence_length: u64,
    /// Sequences of a step over all ranks.
    pub global_batch: u64,
}

/// A run of identical layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerRun {
    /// Feed-forward of each of them.
    pub feed_forward: LayerFeedForward,
    /// How many layers.
    pub count: u64,
}

/// Most runs of identical layers that a model can have: leading dense layers, then experts.
pub const MAX_LAYER_RUNS: usize = 2;

/// Feed-forward of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerFeedForward {
    /// Two matrices and GeLU.
    Gelu {
        /// Width between the matrices.
        intermediate_size: u64,
    },
    /// Gate, up and down matrices.
    SwiGlu {
        /// Width between the matrices.
        intermediate_size: u64,
    },
    /// Routed and shared SwiGLU experts.
    Experts {
        /// Routed experts.
        num_experts: u64,
        /// Routed experts that see a token.
        experts_per_token: u64,
        /// Width of one expert.
        intermediate_size: u64,
        /// Experts that see every token.
        num_shared_experts: u64,
    },
}

impl Deviation {
    /// Why a model with it is not executed.
    pub fn reason(self) -> &'static str {
        match self {
            Deviation::RotaryScaling => {
                "scaled rotary frequencies are compiled by Llama 3's rule and by one factor only"
            }
            Deviation::PartialRotary => "rotary embedding of a part of each head is not compiled yet",
            Deviation::SlidingWindow => "sliding attention windows are not compiled yet",
            Deviation::ErrorFunctionGelu => "GeLU by the error function is not compiled yet, only its tanh form",
            Deviation::ScoreScale => "only scores scaled by the root of the head's width are compiled yet",
        }
    }
}

impl DType {
    /// Size of one number.
    pub fn bytes(self) -> u64 {
        match self {
            DType::BF16 | DType::FP16 => 2,
            DType::FP32 => 4,
        }
    }
}

impl Vocabulary {
    /// Rows of the embedding before rows are added for tensor parallelism.
    pub fn rows(&self) -> u64 {
        self.padded.unwrap_or(self.size)
    }
}

impl Attention {
    /// Query heads.
    pub fn num_attention_heads(&self) -> u64 {
        match *self {
            Attention::MultiHead { num_attention_heads, .. } | Attention::MultiLatent { num_attention_heads, .. } => {
                num_attention_heads
            }
        }
    }

    /// Key and value heads.
    pub fn num_key_value_heads(&self) -> u64 {
        match *self {
            Attention::MultiHead { num_attention_heads, num_key_value_heads, .. } => {
                num_key_value_heads.unwrap_or(num_attention_heads)
            }
            Attention::MultiLatent { num_attention_heads, .. } => num_attention_heads,
        }
    }
}

/// Reads and checks a model file; `origin` names the file in errors.
///
/// # Errors
/// `Error::Syntax` at the first malformed place, `Error::Invalid` with every contradictory field.
pub fn read_model(text: &str, origin: &str) -> Result<ModelSpec, Error> {
    let model: ModelSpec = read_ron(text, origin)?;
    check_model(&model, origin)?;
    Ok(model)
}

/// Runs of identical layers, first to last.
pub fn layer_runs(model: &ModelSpec) -> Vec<LayerRun> {
    let run = |feed_forward, count| LayerRun { feed_forward, count };
    match model.feed_forward {
        FeedForward::Gelu { intermediate_size } => {
            vec![run(LayerFeedForward::Gelu { intermediate_size }, model.num_layers)]
        }
        FeedForward::SwiGlu { intermediate_size } => {
            vec![run(LayerFeedForward::SwiGlu { intermediate_size }, model.num_layers)]
        }
        FeedForward::MixtureOfExperts {
            num_experts,
            experts_per_token,
            intermediate_size,
            num_shared_experts,
            first_dense_layers,
            dense_intermediate_size,
        } => {
            let dense = LayerFeedForward::SwiGlu { intermediate_size: dense_intermediate_size.unwrap_or(0) };
            let experts =
                LayerFeedForward::Experts { num_experts, experts_per_token, intermediate_size, num_shared_experts };
            [run(dense, first_dense_layers), run(experts, model.num_layers - first_dense_layers)]
                .into_iter()
                .filter(|run| run.count > 0)
                .collect()
        }
    }
}

/// Sequence length and global batch of a step: the flags where given, else the model file, else the
/// documented defaults (`min(maximum, 8192)` tokens; 4 Mi tokens a batch).
///
/// # Errors
/// `Error::Invalid` if a length exceeds the model's maximum or a batch in tokens is not whole sequences.
pub fn workload(
    model: &ModelSpec,
    origin: &str,
    sequence_length: Option<u64>,
    global_batch: Option<u64>,
) -> Result<Workload, Error> {
    let maximum = model.max_sequence_length.tokens();
    let tokens = sequence_length
        .or(model.sequence_length.map(SequenceLength::tokens))
        .unwrap_or(maximum.min(DEFAULT_SEQUENCE_LIMIT));
    let mut problems = Problems { origin, list: Vec::new() };
    if tokens == 0 || tokens > SIZE_LIMIT {
        // The file's own length is in range, as check_model has seen.
        problems.list.push(Problem::new(
            format!("sequence length {tokens} is out of range"),
            "--sequence-length",
            format!("give a number of tokens from 1 to {SIZE_LIMIT}"),
        ));
    }
    if model.position == Position::Learned && tokens > maximum {
        problems.add(
            format!("sequence length {tokens} exceeds the {maximum} learned positions"),
            "max_sequence_length",
            format!("train with at most {maximum} tokens, or raise max_sequence_length"),
        );
    }
    if !problems.list.is_empty() {
        return Err(Error::Invalid(problems.list));
    }
    let batch = match (global_batch, model.global_batch) {
        (Some(sequences), _) | (None, Some(BatchSize::Sequences(sequences))) => sequences,
        (None, Some(BatchSize::Tokens(batch_tokens))) if batch_tokens.is_multiple_of(tokens) => batch_tokens / tokens,
        (None, Some(BatchSize::Tokens(batch_tokens))) => {
            problems.add(
                format!("a global batch of {batch_tokens} tokens is not whole sequences of {tokens}"),
                "global_batch",
                format!("use a multiple of {tokens} tokens, or Sequences(n)"),
            );
            return Err(Error::Invalid(problems.list));
        }
        (None, None) => (DEFAULT_BATCH_TOKENS / tokens).max(1),
    };
    if batch == 0 || batch > SIZE_LIMIT {
        let place = global_batch.map_or(format!("{origin}, field global_batch"), |_| "--global-batch".to_owned());
        let help = format!("give a number of sequences from 1 to {SIZE_LIMIT}");
        return Err(Error::Invalid(vec![Problem::new(format!("global batch {batch} is out of range"), place, help)]));
    }
    Ok(Workload { sequence_length: tokens, global_batch: batch })
}

fn default_norm_epsilon() -> f64 {
    DEFAULT_NORM_EPSILON
}

fn default_rotary_base() -> f64 {
    DEFAULT_ROTARY_BASE
}

fn is_default_rotary_base(base: &f64) -> bool {
    *base == DEFAULT_ROTARY_BASE
}
