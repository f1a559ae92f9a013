//! The graph of a model: a petgraph DAG of primitive operators for each block, repeated layers once.
//!
//! A node is an operator and owns the one tensor that it produces; an edge carries that tensor to a
//! consumer and says which operand it is there. Blocks follow one another: the output of each is the
//! `Input` of the next. Shapes name their dims, so that a contraction, a shard and a shape check are
//! statements about names rather than positions.
//!
//! Deliberately absent: backward operators (the compiler appends them) and anything about ranks.

mod build;

use petgraph::Direction;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::EdgeRef;
use serde::{Deserialize, Serialize};

pub use build::build_graph;
pub use petgraph::graph::NodeIndex as OperatorId;

use crate::model::{DType, ModelSpec, NormKind};

/// All blocks of a model, in execution order.
#[derive(Clone, Debug)]
pub struct ModelGraph {
    /// Embedding, one block for each run of identical layers, head.
    pub blocks: Vec<Block>,
}

/// A subgraph that is executed `count` times in a row.
#[derive(Clone, Debug)]
pub struct Block {
    /// What the block is.
    pub role: BlockRole,
    /// Repetitions.
    pub count: u64,
    /// Operators and the tensors between them.
    pub graph: DiGraph<Operator, Operand>,
    /// The operator whose tensor the next block reads.
    pub output: NodeIndex,
}

/// What a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BlockRole {
    /// Token (and position) embedding.
    Embedding,
    /// The layers of one run; runs are numbered from 0.
    Layers(usize),
    /// Final norm, projection to the vocabulary, loss.
    Head,
}

/// A primitive operator and the tensor that it produces.
#[derive(Clone, Debug)]
pub struct Operator {
    /// Name, unique in the block.
    pub name: &'static str,
    /// What it computes.
    pub kind: OperatorKind,
    /// Its result.
    pub output: Tensor,
    /// Elementwise neighbours that one kernel may compute together.
    pub fusion: Option<Fusion>,
    /// Member of the attention core: what selective recomputation repeats and flash attention fuses.
    pub attention_core: bool,
    /// Where training may drop elements of the result; readers get what is left.
    pub dropout: Option<DropoutSite>,
}

/// Where training may set activations to 0 at random: the places of GPT-2, BLOOM and Megatron-LM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DropoutSite {
    /// What leaves the embedding.
    Embedding,
    /// Attention weights, after softmax.
    Attention,
    /// What attention adds to the residual stream.
    AttentionOutput,
    /// What the feed-forward network adds to the residual stream.
    FeedForwardOutput,
}

/// Position of a tensor among a consumer's operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand(pub usize);

/// What an operator computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OperatorKind {
    /// The tensor that enters the block, or token ids and targets.
    Input,
    /// A trained parameter; `tied` if the token embedding's weights are used again.
    Parameter {
        /// Whether this is a second use of the token embedding.
        tied: bool,
    },
    /// Rows of operand 1 selected by the ids in operand 0.
    Lookup,
    /// Sum of products over the named dims; all other dims are kept.
    Contraction {
        /// Dims that are summed over.
        over: Vec<DimName>,
    },
    /// A contraction whose weight is chosen for each token by the router.
    GroupedContraction {
        /// Dims that are summed over.
        over: Vec<DimName>,
    },
    /// Normalisation over the hidden dim; operands: input, weight, and for LayerNorm bias.
    Norm(NormKind),
    /// Elementwise sum with broadcasting.
    Add,
    /// Elementwise product with broadcasting.
    Multiply,
    /// Elementwise difference with broadcasting.
    Subtract,
    /// Scaling of attention scores, causal mask, and the linear bias if `alibi`.
    ScaleMask {
        /// Whether a bias linear in the key position is added.
        alibi: bool,
    },
    /// Softmax over the last dim.
    Softmax,
    /// Gaussian error linear unit.
    Gelu,
    /// x · sigmoid(x).
    Silu,
    /// Rotary position embedding of the last dim.
    Rotary,
    /// The same numbers with positions named as those of keys; no work.
    AsKeys,
    /// Join along the last dim, broadcasting over heads.
    Concatenate,
    /// Weights of the chosen experts of each token.
    TopK,
    /// Copies each token once for each chosen expert, grouped by expert.
    Dispatch,
    /// Weighted sum of the experts' outputs of each token.
    Combine,
    /// Conversion to another number format.
    Cast,
    /// Maximum over a dim.
    ReduceMax(DimName),
    /// Sum over a dim.
    ReduceSum(DimName),
    /// Elementwise exponential.
    Exp,
    /// Elementwise natural logarithm.
    Log,
    /// The element of the last dim that the ids in operand 1 name.
    Pick,
    /// Sum over all tokens.
    SumTokens,
}

/// Elementwise neighbours that one kernel may compute together; a stack profile lists which it fuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Fusion {
    /// Bias of a projection, added in the matrix kernel's epilogue.
    BiasEpilogue,
    /// Bias and activation, or SiLU(gate) · up.
    BiasActivation,
    /// Bias of the row-parallel projection and the residual sum.
    BiasResidual,
    /// Scale, mask and softmax of the attention scores.
    ScaleMaskSoftmax,
    /// All steps of softmax cross-entropy after the cast.
    CrossEntropy,
}

/// A tensor: named dims and number format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Dims, outermost first.
    pub shape: Vec<Dim>,
    /// Number format.
    pub element: Element,
}

/// Number format of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Element {
    /// The model's own format.
    Model,
    /// fp32, whatever the model's format.
    Single,
    /// 32-bit integer.
    Index,
}

/// A named dim and its extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dim {
    /// Name.
    pub name: DimName,
    /// Extent.
    pub extent: Extent,
}

/// Names of dims.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DimName {
    /// Sequences of a micro-batch.
    MicroBatch,
    /// Positions of a sequence (queries).
    Sequence,
    /// Positions of a sequence (keys and values).
    KeySequence,
    /// Residual stream.
    Hidden,
    /// Key-value heads.
    KeyValueHeads,
    /// Query heads that share a key-value head.
    QueriesPerKeyValue,
    /// Width of a query or key head.
    HeadDim,
    /// Width of a value head.
    ValueDim,
    /// Width of the rotary key shared by all heads.
    RopeDim,
    /// Compressed query.
    QueryRank,
    /// Compressed key and value.
    KeyValueRank,
    /// Between the feed-forward matrices.
    Intermediate,
    /// The same of a routed expert.
    ExpertIntermediate,
    /// Routed experts.
    Expert,
    /// Routed experts as the router scores them, on every rank.
    ScoredExpert,
    /// Experts chosen for a token.
    Choice,
    /// Tokens of the vocabulary.
    Vocabulary,
    /// Learned positions.
    Position,
}

/// Extent of a dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Extent {
    /// The micro-batch size.
    MicroBatch,
    /// The sequence length.
    Sequence,
    /// A number that the model fixes.
    Fixed(u64),
}

/// Values that make symbolic extents numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extents {
    /// Sequences of a micro-batch.
    pub micro_batch: u64,
    /// Tokens of a sequence.
    pub sequence_length: u64,
}

impl Extent {
    /// The extent as a number.
    pub fn value(self, extents: Extents) -> u64 {
        match self {
            Extent::MicroBatch => extents.micro_batch,
            Extent::Sequence => extents.sequence_length,
            Extent::Fixed(size) => size,
        }
    }
}

impl Tensor {
    /// Names of the dims.
    pub fn dim_names(&self) -> Vec<DimName> {
        self.shape.iter().map(|dim| dim.name).collect()
    }

    /// The extent of a dim, if the tensor has it.
    pub fn extent(&self, name: DimName) -> Option<Extent> {
        self.shape.iter().find(|dim| dim.name == name).map(|dim| dim.extent)
    }
}

impl Element {
    /// Size of one element.
    pub fn bytes(self, dtype: DType) -> u64 {
        match self {
            Element::Model => dtype.bytes(),
            Element::Single | Element::Index => 4,
        }
    }
}

impl Block {
    /// Producers of an operator's operands, in operand order.
    pub fn operands(&self, node: NodeIndex) -> Vec<NodeIndex> {
        let mut operands: Vec<(usize, NodeIndex)> =
            self.graph.edges_directed(node, Direction::Incoming).map(|edge| (edge.weight().0, edge.source())).collect();
        operands.sort_unstable();
        operands.into_iter().map(|(_, source)| source).collect()
    }

    /// Parameters with their shapes, in the order of first use.
    pub fn parameters(&self) -> impl Iterator<Item = &Operator> {
        self.graph.node_weights().filter(|operator| matches!(operator.kind, OperatorKind::Parameter { .. }))
    }
}

impl Operator {
    /// Whether the operator is a trained parameter.
    pub fn is_parameter(&self) -> bool {
        matches!(self.kind, OperatorKind::Parameter { .. })
    }
}

/// Trained parameters of a model, each logical parameter once; saturates, so that a count can be refused.
pub fn count_parameters(model: &ModelSpec) -> u64 {
    let graph = build_graph(model);
    let counts = graph.blocks.iter().map(|block| block_parameters(block).saturating_mul(block.count));
    counts.fold(0, u64::saturating_add)
}

/// Trained parameters of one repetition of a block; tied ones belong to the embedding.
pub fn block_parameters(block: &Block) -> u64 {
    block
        .parameters()
        .filter(|operator| operator.kind != OperatorKind::Parameter { tied: true })
        .map(|operator| parameter_elements(&operator.output))
        .fold(0, u64::saturating_add)
}

/// Elements of a parameter tensor, whose extents are all fixed by the model.
pub fn parameter_elements(tensor: &Tensor) -> u64 {
    let none = Extents { micro_batch: 0, sequence_length: 0 };
    tensor.shape.iter().map(|dim| dim.extent.value(none)).fold(1, u64::saturating_mul)
}

/// Multiply-adds counted twice of one execution of an operator, forward, over all ranks.
///
/// Contractions: 2 · product of all dims of the operands, the experts' dim apart (a token meets only
/// the experts chosen for it). Attention is counted in full, also above the causal diagonal
/// (Megatron-LM, arXiv 2104.04473, appendix; PaLM, arXiv 2204.02311, appendix B). Other operators
/// count zero by the same convention.
pub fn operator_flops(block: &Block, node: NodeIndex, extents: Extents) -> f64 {
    let skip_experts = match block.graph[node].kind {
        OperatorKind::Contraction { .. } => false,
        OperatorKind::GroupedContraction { .. } => true,
        _ => return 0.0,
    };
    let mut dims: Vec<Dim> = Vec::new();
    for operand in block.operands(node) {
        for dim in &block.graph[operand].output.shape {
            let skipped = skip_experts && dim.name == DimName::Expert;
            if !skipped && !dims.iter().any(|seen| seen.name == dim.name) {
                dims.push(*dim);
            }
        }
    }
    2.0 * dims.iter().map(|dim| dim.extent.value(extents) as f64).product::<f64>()
}

/// Forward FLOPs of one execution of a block over all ranks; see [`operator_flops`].
pub fn block_flops(block: &Block, extents: Extents) -> f64 {
    block.graph.node_indices().map(|node| operator_flops(block, node, extents)).sum()
}
