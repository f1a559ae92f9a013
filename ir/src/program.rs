//! Programs: what every rank executes in a step, operator by operator.
//!
//! A body is the forward and backward computation of one block on one rank; layers share bodies. A stage
//! program calls bodies for its layers and micro-batches, exchanges activations with its neighbours, and
//! ends with the update of its parameters. Counts may depend on the number of micro-batches `m`, so that
//! one program serves every batch size.

use serde::{Deserialize, Serialize};

use crate::distribution::{Distribution, SplitAxis};
use crate::graph::{Dim, DimName, DropoutSite, Element};
use crate::kernel::Kernel;
use crate::mesh::StageId;
use crate::model::NormKind;
use crate::rotary::RotaryScaling;
use crate::units::Bytes;

/// The programs of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Program {
    /// How the attention core is computed.
    pub attention: AttentionKernel,
    /// Embedding, one for each run of layers, head.
    pub bodies: Vec<Body>,
    /// Stages, first to last.
    pub stages: Vec<StageProgram>,
}

/// Forward and backward of one block.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Body {
    /// `embedding`, `layers 0`, …, `head`.
    pub name: String,
    /// Parameters that the body reads; gradients are accumulated under the same numbers.
    pub parameters: Vec<Parameter>,
    /// Values of both passes; instructions name them by position.
    pub values: Vec<Value>,
    /// Forward pass. Values that it does not free are kept for backward.
    pub forward: Vec<Instruction>,
    /// Backward pass, which frees all that is left.
    pub backward: Vec<Instruction>,
    /// Runs of instructions that one kernel may compute together.
    pub kernels: Vec<Kernel>,
    /// The activation that enters, absent in the embedding.
    pub input: Option<ValueId>,
    /// The activation that leaves; in the head the sum of the micro-batch's losses.
    pub output: ValueId,
    /// The gradient of `output`, absent in the head, where backward starts from a constant.
    pub output_gradient: Option<ValueId>,
    /// The gradient of `input`, absent in the embedding.
    pub input_gradient: Option<ValueId>,
}

/// A parameter of a body.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parameter {
    /// Name in the block.
    pub name: String,
    /// Dims with whole extents, rows added for the tensor axis included.
    pub shape: Vec<(DimName, u64)>,
    /// How it is stored between steps.
    pub stored: Distribution,
    /// Type of its accumulated gradient.
    pub gradient: Distribution,
    /// Whether it is the token embedding, used by the head.
    pub tied: bool,
}

/// A value's name, shape and type.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Value {
    /// Name for readers.
    pub name: String,
    /// Dims with whole extents.
    pub shape: Vec<Dim>,
    /// Number format.
    pub element: Element,
    /// What a rank holds of it.
    pub distribution: Distribution,
}

/// Position of a value in its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ValueId(pub u32);

/// One instruction of a body.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Instruction {
    /// Token ids, targets or positions of the micro-batch.
    Input(InputKind, ValueId),
    /// A parameter as it is stored.
    Load(u32, ValueId),
    /// An operator on operands, giving a value.
    Compute(Op, Vec<ValueId>, ValueId),
    /// A conversion between distributions over the ranks that differ along the axes.
    Convert(Conversion, Vec<SplitAxis>, ValueId, ValueId),
    /// Starts a conversion whose result exists from the matching `Wait` on; its operand must live until then.
    Start(Conversion, Vec<SplitAxis>, ValueId, ValueId),
    /// Ends a started conversion of the first value into the second.
    Wait(ValueId, ValueId),
    /// Adds a value to a parameter's accumulated gradient.
    Accumulate(u32, ValueId),
    /// Ends a value's life.
    Free(ValueId),
}

/// Index data of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum InputKind {
    /// Token ids.
    Tokens,
    /// Ids of the next tokens.
    Targets,
    /// 0, 1, 2, …
    Positions,
}

/// A conversion between distributions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Conversion {
    /// Sum of summands, whole on every rank.
    AllReduceSum,
    /// Maximum of candidates, whole on every rank.
    AllReduceMax,
    /// Parts along a dim joined on every rank.
    AllGather(DimName),
    /// Sum of summands, a part along a dim on each rank.
    ReduceScatter(DimName),
    /// A part along a dim of what is whole; no communication.
    Slice(DimName),
    /// Parts of the elements in order joined on every rank.
    AllGatherFlat,
    /// Sum of summands, a part of the elements in order on each rank.
    ReduceScatterFlat,
}

/// A primitive operator. Dims are matched by name; what a contraction or sum does not keep it sums over.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Op {
    /// Rows of operand 1 selected by operand 0.
    Lookup,
    /// Rows of a zero table increased by operand 1 where operand 0 says.
    LookupGradient,
    /// Sum of products over dims that the result lacks.
    Contraction,
    /// Operands: input, weight, and for LayerNorm bias.
    Norm {
        /// What is divided by.
        kind: NormKind,
        /// Added to the variance or the mean square before its root.
        epsilon: f64,
    },
    /// Operands: input, weight, gradient of the result.
    NormInputGradient {
        /// What is divided by.
        kind: NormKind,
        /// Added to the variance or the mean square before its root.
        epsilon: f64,
    },
    /// Operands: input, gradient of the result.
    NormWeightGradient {
        /// What is divided by.
        kind: NormKind,
        /// Added to the variance or the mean square before its root.
        epsilon: f64,
    },
    /// Elementwise sum; missing dims are broadcast.
    Add,
    /// Elementwise product.
    Multiply,
    /// Elementwise difference.
    Subtract,
    /// Elementwise quotient.
    Divide,
    /// Product with a constant.
    Scale(f64),
    /// Elements set to 0 at random, the others scaled so that the mean stays; the gradient is the same operator.
    ///
    /// How likely is a matter of the run, not of the program: without dropout the operand passes unchanged. Every
    /// element's fate is a function of the run's seed, the step, the layer, the site and the element's place in the
    /// global batch, so that forward, recomputation and backward agree on all ranks and no mask is kept.
    Dropout(DropoutSite),
    /// The gradient that backward starts from: one over the tokens of the global batch.
    Seed,
    /// Scores scaled by the constant, plus slope · key position if `alibi`, minus infinity above the diagonal.
    ScaleMask {
        /// The scale.
        scale: f64,
        /// Whether a bias linear in the key position is added.
        alibi: bool,
    },
    /// Gradient of the scores.
    ScaleMaskGradient {
        /// The scale.
        scale: f64,
    },
    /// Attention core in one kernel that keeps no scores; drops weights where [`DropoutSite::Attention`] says.
    /// Operands: query, keys, values.
    FlashAttention {
        /// Scale of the scores.
        scale: f64,
        /// Whether a bias linear in the key position is added.
        alibi: bool,
    },
    /// Gradient of one operand of the attention core. Operands: query, keys, values, gradient of the result.
    FlashAttentionGradient {
        /// Which operand.
        of: AttentionOperand,
        /// Scale of the scores.
        scale: f64,
        /// Whether a bias linear in the key position is added.
        alibi: bool,
    },
    /// Softmax over the key positions.
    Softmax,
    /// Operands: result, gradient of the result.
    SoftmaxGradient,
    /// GeLU, tanh form.
    Gelu,
    /// Operands: input, gradient of the result.
    GeluGradient,
    /// x · sigmoid(x).
    Silu,
    /// Operands: input, gradient of the result.
    SiluGradient,
    /// Rotary position embedding: pair (i, i + width/2) of a head turns by position · frequency i
    /// ([`rotary_frequencies`](crate::rotary::rotary_frequencies)).
    Rotary {
        /// Base of the frequencies.
        base: f64,
        /// How they are scaled.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        scaling: Option<RotaryScaling>,
    },
    /// Its transpose.
    RotaryGradient {
        /// Base of the frequencies.
        base: f64,
        /// How they are scaled.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        scaling: Option<RotaryScaling>,
    },
    /// The same numbers under other dim names.
    Rename,
    /// Conversion of number format.
    Cast,
    /// Conversion to fp32; columns from the given one on, which padding added, become minus infinity.
    MaskColumns(u64),
    /// Sum over dims that the result lacks.
    ReduceSum,
    /// Maximum over dims that the result lacks.
    ReduceMax,
    /// Elementwise exponential.
    Exp,
    /// Elementwise natural logarithm.
    Log,
    /// The element along the vocabulary that operand 1 names.
    Pick,
    /// Zeros with operand 1 where operand 0 names an element along the vocabulary.
    PickGradient,
    /// Sum over everything.
    SumTokens,
}

/// An operand of the attention core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AttentionOperand {
    /// Query.
    Query,
    /// Keys.
    Keys,
    /// Values.
    Values,
}

/// How programs compute the attention core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AttentionKernel {
    /// Scores, mask, softmax and weighted sum as operators of their own.
    Primitive,
    /// One operator that keeps no scores (arXiv 2205.14135).
    Flash,
}

/// What the ranks of one stage execute.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageProgram {
    /// The stage.
    pub stage: StageId,
    /// Passes of a training step, in order.
    pub schedule: Vec<StageInstruction>,
    /// Passes of an evaluation, forward only: what a pass keeps for backward ends with it.
    pub evaluation: Vec<StageInstruction>,
    /// Norm and optimizer, after the reductions that the schedule started.
    pub update: Vec<UpdateInstruction>,
    /// What a rank's memory holds at its fullest.
    pub memory: ProgramMemory,
}

/// Bytes of a rank at the fullest point of its program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProgramMemory {
    /// Parameters as stored.
    pub weights: Bytes,
    /// Accumulated gradients, reduced in place.
    pub gradients: Bytes,
    /// Master weights and moments of the owned parts.
    pub optimizer: Bytes,
    /// Most bytes of values alive at once: all micro-batches in flight, and the pass that is executed.
    pub values: Bytes,
}

/// One instruction of a schedule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum StageInstruction {
    /// Executes the instructions `count` times; the index counts from 0.
    Repeat(Count, Vec<StageInstruction>),
    /// Takes a micro-batch's activation from the stage before, or its gradient from the one behind.
    Receive(Direction, Index),
    /// Hands a micro-batch's activation to the stage behind, or its gradient to the one before.
    Send(Direction, Index),
    /// Forward pass of a body for a layer and a micro-batch.
    Forward(u32, Index, Index),
    /// Backward pass of a body for a layer and a micro-batch.
    Backward(u32, Index, Index),
    /// Starts the sum over replicas of a layer's gradients: body, layer, first parameter and one past the last.
    StartReduction(u32, Index, (u32, u32), Conversion),
}

/// What flows between stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Direction {
    /// Activations, towards the last stage.
    Activation,
    /// Gradients, towards the first stage.
    Gradient,
}

/// A number that may depend on the number of micro-batches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Count {
    /// A constant.
    Fixed(u64),
    /// The number of micro-batches.
    MicroBatches,
    /// The smaller of a constant and the number of micro-batches.
    AtMost(u64),
    /// The number of micro-batches beyond a constant, or 0.
    Beyond(u64),
    /// One less than the smaller of a constant and the number of micro-batches.
    LessThan(u64),
}

/// A layer or micro-batch: a start, moved by the index of an enclosing loop.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Index {
    /// Value in the first round.
    pub start: Count,
    /// The loop whose index is added: 0 is the innermost; none for a constant.
    pub loop_depth: Option<u32>,
    /// Whether the loop's index is subtracted instead.
    pub backwards: bool,
}

/// One instruction of an update.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum UpdateInstruction {
    /// Sums gradients' summands over tensor ranks (norms under sequence parallelism).
    ReduceOverTensor(ParameterRange, Vec<SplitAxis>),
    /// Sums the two copies of the tied embedding's gradient over the first and the last stage.
    ReduceOverTied(ParameterRange),
    /// Ends the started sum of gradients over replicas.
    WaitReduction(ParameterRange),
    /// Adds gradients' squares to the sum of the listed class; the axes are those they are sharded along.
    AddSquares(ParameterRange, Vec<SplitAxis>),
    /// Sums every class over its axes, then everything over the stages: the squared global norm.
    FinishNorm,
    /// AdamW on the part of the parameters that the rank owns, with gradients clipped by the norm.
    AdamW(ParameterRange),
    /// Joins the owned parts of parameters on every replica.
    GatherOverData(ParameterRange),
}

/// Consecutive parameters of consecutive layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParameterRange {
    /// Body.
    pub body: u32,
    /// First layer and one past the last, counted over the model; (0, 1) for embedding and head.
    pub layers: (u64, u64),
    /// First parameter of the body and one past the last.
    pub parameters: (u32, u32),
}

/// A parameter of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ParameterRef {
    /// Body.
    pub body: u32,
    /// Layer, counted over the model; 0 for embedding and head.
    pub layer: u64,
    /// Parameter of the body.
    pub parameter: u32,
}

impl Op {
    /// Operands whose memory the result may take, if it is the operand's last use and both have one size.
    pub fn operands_in_place(&self) -> &'static [usize] {
        match self {
            Op::Add | Op::Multiply => &[0, 1],
            Op::GeluGradient | Op::SiluGradient | Op::SoftmaxGradient => &[1],
            Op::NormInputGradient { .. } => &[2],
            Op::Norm { .. }
            | Op::Subtract
            | Op::Divide
            | Op::Scale(_)
            | Op::Dropout(_)
            | Op::ScaleMask { .. }
            | Op::ScaleMaskGradient { .. }
            | Op::Softmax
            | Op::Gelu
            | Op::Silu
            | Op::Rotary { .. }
            | Op::RotaryGradient { .. }
            | Op::Rename
            | Op::Cast
            | Op::MaskColumns(_)
            | Op::Exp
            | Op::Log => &[0],
            Op::Lookup
            | Op::LookupGradient
            | Op::Contraction
            | Op::NormWeightGradient { .. }
            | Op::Seed
            | Op::FlashAttention { .. }
            | Op::FlashAttentionGradient { .. }
            | Op::ReduceSum
            | Op::ReduceMax
            | Op::Pick
            | Op::PickGradient
            | Op::SumTokens => &[],
        }
    }
}

impl ProgramMemory {
    /// All of it.
    pub fn total(self) -> Bytes {
        self.weights + self.gradients + self.optimizer + self.values
    }
}

impl ParameterRange {
    /// Each parameter of each layer.
    pub fn each(self) -> impl Iterator<Item = ParameterRef> {
        let ParameterRange { body, layers, parameters } = self;
        let of_layer = move |layer| (parameters.0..parameters.1).map(move |parameter| (layer, parameter));
        (layers.0..layers.1).flat_map(of_layer).map(move |(layer, parameter)| ParameterRef { body, layer, parameter })
    }

    /// How many parameters there are, layers apart.
    pub fn len(self) -> u64 {
        let layers = self.layers.1.saturating_sub(self.layers.0);
        layers.saturating_mul(u64::from(self.parameters.1.saturating_sub(self.parameters.0)))
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Whether the other range goes on with the next parameter of the same layers.
    pub fn is_followed_by(self, next: ParameterRange) -> bool {
        (self.body, self.layers, self.parameters.1) == (next.body, next.layers, next.parameters.0)
    }
}

impl UpdateInstruction {
    /// The parameters that the instruction concerns; none for the norm.
    pub fn parameters(&self) -> Option<ParameterRange> {
        match self {
            UpdateInstruction::ReduceOverTensor(range, _)
            | UpdateInstruction::ReduceOverTied(range)
            | UpdateInstruction::WaitReduction(range)
            | UpdateInstruction::AddSquares(range, _)
            | UpdateInstruction::AdamW(range)
            | UpdateInstruction::GatherOverData(range) => Some(*range),
            UpdateInstruction::FinishNorm => None,
        }
    }
}

impl Instruction {
    /// Values that the instruction reads; a free counts as the last reading.
    pub fn reads(&self) -> Vec<ValueId> {
        match self {
            Instruction::Compute(_, operands, _) => operands.clone(),
            Instruction::Convert(_, _, from, _) | Instruction::Start(_, _, from, _) | Instruction::Wait(from, _) => {
                vec![*from]
            }
            Instruction::Accumulate(_, value) | Instruction::Free(value) => vec![*value],
            Instruction::Input(..) | Instruction::Load(..) => Vec::new(),
        }
    }

    /// The value that exists from the instruction on.
    pub fn writes(&self) -> Option<ValueId> {
        match self {
            Instruction::Input(_, value) | Instruction::Load(_, value) | Instruction::Compute(_, _, value) => {
                Some(*value)
            }
            Instruction::Convert(_, _, _, to) | Instruction::Wait(_, to) => Some(*to),
            Instruction::Start(..) | Instruction::Accumulate(..) | Instruction::Free(_) => None,
        }
    }
}

impl Value {
    /// Names of the dims.
    pub fn dim_names(&self) -> Vec<DimName> {
        self.shape.iter().map(|dim| dim.name).collect()
    }
}

impl Count {
    /// The number for `m` micro-batches.
    pub fn value(&self, micro_batches: u64) -> u64 {
        match self {
            Count::Fixed(number) => *number,
            Count::MicroBatches => micro_batches,
            Count::AtMost(limit) => micro_batches.min(*limit),
            Count::Beyond(start) => micro_batches.saturating_sub(*start),
            Count::LessThan(limit) => micro_batches.min(*limit).saturating_sub(1),
        }
    }
}

impl Index {
    /// The index in a nest of loops whose indices are given outermost first.
    pub fn value(&self, micro_batches: u64, loops: &[u64]) -> Option<u64> {
        let start = self.start.value(micro_batches);
        let Some(depth) = self.loop_depth else { return Some(start) };
        let position = loops.len().checked_sub(1 + depth as usize)?;
        if self.backwards { start.checked_sub(loops[position]) } else { start.checked_add(loops[position]) }
    }
}
