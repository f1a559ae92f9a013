//! How the tensor axis splits dims, and with them parameters and activations.
//!
//! Heads, the feed-forward width and the vocabulary are split (Megatron-LM, arXiv 1909.08053,
//! section 3); everything else is replicated, or with sequence parallelism split along the sequence
//! outside the split matrices (arXiv 2205.05198, section 4.2.2).

use serde::{Deserialize, Serialize};

use crate::graph::{Block, Dim, DimName, Extents, Operator, OperatorKind, Tensor};
use crate::model::{LayerFeedForward, ModelSpec, layer_runs};
use crate::strategy::Strategy;

/// Multiple to which Megatron pads vocabulary rows for each tensor rank (`--make-vocab-size-divisible-by`).
pub const VOCABULARY_MULTIPLE: u64 = 128;

/// In how many parts the tensor axis splits each dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TensorSplit {
    /// Degree of the tensor axis.
    pub tensor_parallel: u64,
    /// Parts of the key-value heads; fewer than the degree if there are fewer heads.
    pub key_value_ways: u64,
    /// Vocabulary rows with those added so that the degree divides them.
    pub padded_rows: u64,
    /// Whether replicated activations are split along the sequence.
    pub sequence_parallel: bool,
    /// Ranks of the context axis, which split every sequence.
    pub context_parallel: u64,
    /// Ranks over which routed experts are spread.
    pub expert_parallel: u64,
    /// Ranks that share each expert's matrices: the tensor axis's degree, or 1 where experts are whole.
    pub expert_tensor_parallel: u64,
}

/// Why a tensor degree cannot split a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum SplitError {
    /// The degree does not divide the query heads.
    Heads,
    /// The key-value heads and the degree do not divide one another.
    KeyValueHeads,
    /// The degree does not divide a feed-forward width.
    Intermediate,
}

/// A parameter as one rank holds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParameterShard {
    /// Name in the block.
    pub name: String,
    /// Dims and extents of the whole parameter, rows added for the tensor axis included.
    pub shape: Vec<(DimName, u64)>,
    /// Dims that the tensor axis splits, with the number of parts.
    pub split: Vec<(DimName, u64)>,
    /// Whether the weights are the token embedding's.
    #[serde(default)]
    pub tied: bool,
}

/// How a tensor degree splits a model.
///
/// # Errors
/// The first dim that cannot be split evenly.
pub fn tensor_split(
    model: &ModelSpec,
    tensor_parallel: u64,
    sequence_parallel: bool,
) -> Result<TensorSplit, SplitError> {
    split_with(model, tensor_parallel, sequence_parallel, tensor_parallel)
}

fn split_with(
    model: &ModelSpec,
    tensor_parallel: u64,
    sequence_parallel: bool,
    expert_tensor_parallel: u64,
) -> Result<TensorSplit, SplitError> {
    let heads = model.attention.num_attention_heads();
    let key_value_heads = model.attention.num_key_value_heads();
    if !heads.is_multiple_of(tensor_parallel) {
        return Err(SplitError::Heads);
    }
    let key_value_ways = tensor_parallel.min(key_value_heads);
    if !key_value_heads.is_multiple_of(key_value_ways) || !tensor_parallel.is_multiple_of(key_value_ways) {
        return Err(SplitError::KeyValueHeads);
    }
    let even = layer_runs(model).iter().all(|run| match run.feed_forward {
        LayerFeedForward::Gelu { intermediate_size } | LayerFeedForward::SwiGlu { intermediate_size } => {
            intermediate_size.is_multiple_of(tensor_parallel)
        }
        LayerFeedForward::Experts { intermediate_size, num_shared_experts, .. } => {
            let shared = num_shared_experts * intermediate_size;
            intermediate_size.is_multiple_of(expert_tensor_parallel) && shared.is_multiple_of(tensor_parallel)
        }
    });
    if !even {
        return Err(SplitError::Intermediate);
    }
    let rows = model.vocabulary.rows();
    let padded_rows = match rows.is_multiple_of(tensor_parallel) {
        true => rows,
        false => rows.next_multiple_of(VOCABULARY_MULTIPLE * tensor_parallel),
    };
    Ok(TensorSplit {
        tensor_parallel,
        key_value_ways,
        padded_rows,
        sequence_parallel,
        context_parallel: 1,
        expert_parallel: 1,
        expert_tensor_parallel,
    })
}

/// How a strategy's tensor, context and expert axes split a model.
///
/// # Errors
/// The first dim that the tensor axis cannot split evenly.
pub fn split_of(model: &ModelSpec, strategy: &Strategy) -> Result<TensorSplit, SplitError> {
    let Strategy { tensor_parallel, sequence_parallel, .. } = *strategy;
    let split = split_with(model, tensor_parallel, sequence_parallel, strategy.expert_tensor_parallel())?;
    Ok(TensorSplit { context_parallel: strategy.context_parallel, expert_parallel: strategy.expert_parallel, ..split })
}

impl TensorSplit {
    /// Parts of a dim; 1 if the tensor axis does not split it.
    pub fn ways(&self, name: DimName) -> u64 {
        match name {
            DimName::KeyValueHeads => self.key_value_ways,
            DimName::QueriesPerKeyValue => self.tensor_parallel / self.key_value_ways,
            DimName::Intermediate | DimName::Vocabulary => self.tensor_parallel,
            DimName::ExpertIntermediate => self.expert_tensor_parallel,
            DimName::Expert => self.expert_parallel,
            DimName::MicroBatch
            | DimName::Sequence
            | DimName::KeySequence
            | DimName::Hidden
            | DimName::HeadDim
            | DimName::ValueDim
            | DimName::RopeDim
            | DimName::QueryRank
            | DimName::KeyValueRank
            | DimName::ScoredExpert
            | DimName::Choice
            | DimName::Position => 1,
        }
    }

    /// Whether the tensor axis splits one of a tensor's dims.
    pub fn splits(&self, tensor: &Tensor) -> bool {
        tensor.shape.iter().any(|dim| dim.name != DimName::Expert && self.ways(dim.name) > 1)
    }

    /// A dim's extent on one rank, before sequence parallelism; of queries the context axis's part.
    pub fn local_extent(&self, dim: Dim, extents: Extents) -> u64 {
        let whole = match dim.name {
            DimName::Vocabulary => self.padded_rows,
            DimName::Sequence => dim.extent.value(extents).div_ceil(self.context_parallel),
            _ => dim.extent.value(extents),
        };
        whole / self.ways(dim.name)
    }

    /// Elements of an activation on one rank; of keys and values those at rest, the context axis's part.
    pub fn local_activation(&self, tensor: &Tensor, extents: Extents) -> f64 {
        let mut elements: f64 = tensor.shape.iter().map(|dim| self.local_extent(*dim, extents) as f64).product();
        if tensor.extent(DimName::KeySequence).is_some() && tensor.extent(DimName::Sequence).is_none() {
            elements /= self.context_parallel as f64;
        }
        let along_sequence =
            self.sequence_parallel && !self.splits(tensor) && tensor.extent(DimName::Sequence).is_some();
        if along_sequence { elements / self.tensor_parallel as f64 } else { elements }
    }

    /// Elements of a parameter on one rank.
    pub fn local_parameter(&self, tensor: &Tensor) -> u64 {
        let none = Extents { micro_batch: 0, sequence_length: 0 };
        tensor.shape.iter().map(|dim| self.local_extent(*dim, none)).product()
    }

    /// Parameter elements of one repetition of a block on one rank; a tied copy counts where it is held.
    pub fn local_block_parameters(&self, block: &Block) -> u64 {
        block.parameters().map(|operator| self.local_parameter(&operator.output)).sum()
    }

    /// The part of [`TensorSplit::local_block_parameters`] that are routed experts.
    pub fn local_expert_parameters(&self, block: &Block) -> u64 {
        let experts = block.parameters().filter(|operator| operator.output.extent(DimName::Expert).is_some());
        experts.map(|operator| self.local_parameter(&operator.output)).sum()
    }

    /// The part of [`TensorSplit::local_block_parameters`] that is a second use of the token embedding.
    pub fn local_tied_parameters(&self, block: &Block) -> u64 {
        let tied = block.parameters().filter(|operator| operator.kind == OperatorKind::Parameter { tied: true });
        tied.map(|operator| self.local_parameter(&operator.output)).sum()
    }

    /// A parameter as one rank holds it.
    pub fn shard(&self, parameter: &Operator) -> ParameterShard {
        let none = Extents { micro_batch: 0, sequence_length: 0 };
        let shape = &parameter.output.shape;
        let whole = |dim: &Dim| (dim.name, self.local_extent(*dim, none) * self.ways(dim.name));
        let split = shape.iter().map(|dim| (dim.name, self.ways(dim.name))).filter(|(_, ways)| *ways > 1);
        ParameterShard {
            name: parameter.name.to_owned(),
            shape: shape.iter().map(whole).collect(),
            split: split.collect(),
            tied: parameter.kind == OperatorKind::Parameter { tied: true },
        }
    }

    /// Parameters that padding the vocabulary adds to the model, over all ranks.
    pub fn added_parameters(&self, model: &ModelSpec) -> u64 {
        let tables = if model.tied_embedding { 1 } else { 2 };
        (self.padded_rows - model.vocabulary.rows()) * model.hidden_size * tables
    }
}

impl ParameterShard {
    /// Elements that one rank holds.
    pub fn local_elements(&self) -> u64 {
        let whole: u64 = self.shape.iter().map(|(_, extent)| extent).product();
        whole / self.split.iter().map(|(_, ways)| ways).product::<u64>()
    }
}
