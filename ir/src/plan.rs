//! The plan file: what was chosen, who does what, what it should cost, and how the choice was made.
//!
//! Plain data, self-contained: nothing outside the file is needed to understand or check it. It holds
//! no time, path, host or search duration, so that equal inputs give equal bytes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Problem};
use crate::mesh::{GroupFamily, Mesh, StageId};
use crate::model::{ModelSpec, Workload};
use crate::program::Program;
use crate::provenance::Provenance;
use crate::sharding::ParameterShard;
use crate::strategy::Strategy;
use crate::text::{read_ron, write_ron};
use crate::units::{Bytes, Flops, Seconds};

/// Name of the stack whose software is this project's own: its memory is that of a plan's program.
pub const OWN_STACK: &str = "planwright";

/// Version of the plan format that this crate reads and writes.
pub const FORMAT_VERSION: u32 = 1;

/// Depth of brackets that are written one field a line.
const WRITTEN_DEPTH: usize = 5;
/// What to do about a text that is no plan.
const NO_PLAN: &str = "this is no plan file, or it was cut short or changed by hand: write it again with `plan`";

/// A plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Version of the format.
    pub format_version: u32,
    /// Version of the program that wrote the plan.
    pub planwright_version: String,
    /// Where the numbers come from.
    pub inputs: Inputs,
    /// The model, whole.
    pub model: ModelSpec,
    /// Parameters of the model, each logical one once.
    pub parameters: u64,
    /// Parameters added so that the tensor axis divides the vocabulary.
    pub added_parameters: u64,
    /// What a step processes.
    pub workload: Workload,
    /// The choices.
    pub strategy: Strategy,
    /// Whether the plan holds programs that can be run.
    pub executable: Executable,
    /// Ranks and axes.
    pub mesh: Mesh,
    /// Communication groups along each axis of more than one rank.
    pub groups: Vec<GroupFamily>,
    /// Parameters of each block as a rank holds them, blocks once.
    pub parameter_shards: Vec<BlockShards>,
    /// Stages, first to last.
    pub stages: Vec<Stage>,
    /// What a step should cost.
    pub estimate: Estimate,
    /// How the choice was made.
    pub search: SearchReport,
    /// What every rank executes; present if the strategy is executable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<Program>,
}

/// Names and hashes of what the plan was made from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inputs {
    /// Hash of the model.
    pub model_hash: String,
    /// Name of the cluster profile.
    pub cluster: String,
    /// Hash of the cluster profile.
    pub cluster_hash: String,
    /// Name of the device profile.
    pub device: String,
    /// Hash of the device profile.
    pub device_hash: String,
    /// Name of the stack profile.
    pub stack: String,
    /// Hash of the stack profile.
    pub stack_hash: String,
    /// Ranks of a node.
    pub node_gpus: u64,
    /// Ranks that reach one another by the fast links.
    pub fast_domain_gpus: u64,
    /// Memory of a device that a plan may use.
    pub usable_memory: Bytes,
}

/// Whether a plan can be run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Executable {
    /// The plan holds a verified program for each stage.
    Yes,
    /// It does not, for this reason.
    No(String),
}

/// Parameters of one block.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockShards {
    /// Name of the block: `embedding`, `layers 0`, …, `head`.
    pub block: String,
    /// Layers that have these parameters; 1 for embedding and head.
    pub count: u64,
    /// Parameters.
    pub parameters: Vec<ParameterShard>,
}

/// One pipeline stage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// Number.
    pub stage: StageId,
    /// First rank of the stage and one past the last; where data is outermost, of the first replica's.
    pub ranks: (u64, u64),
    /// Whether the stage holds the embedding.
    pub embedding: bool,
    /// First layer and one past the last, counted over the whole model; those of the first part where there are more.
    pub layers: (u64, u64),
    /// The same of each further part of the model on the stage.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub further_layers: Vec<(u64, u64)>,
    /// Whether the stage holds the final norm, the head and the loss.
    pub head: bool,
    /// Parameter elements that a rank of the stage holds for computation.
    pub parameters_per_rank: u64,
    /// Micro-batches whose activations are alive at once, each counted for every part of the model on the stage.
    pub in_flight: u64,
    /// Time of a micro-batch's forward pass.
    pub forward: Seconds,
    /// Time of a micro-batch's backward pass with recomputation.
    pub backward: Seconds,
    /// Memory of a rank by term; sums to the device use.
    pub memory: BTreeMap<MemoryTerm, Bytes>,
}

/// Uses of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum MemoryTerm {
    /// Parameters in the model's format.
    Weights,
    /// Gradients in the accumulation format.
    Gradients,
    /// Master weights and moments.
    OptimizerState,
    /// Tensors kept for backward, all micro-batches in flight.
    Activations,
    /// Largest set of temporary tensors of one layer's forward or backward.
    Workspace,
    /// Parameters gathered for use (ZeRO-3), and gradients before they are reduced to their owners (from ZeRO-2).
    GatheredParameters,
    /// Buffers of communicators.
    CommunicationBuffers,
    /// What the allocator holds above live tensors.
    AllocatorSlack,
    /// The driver's context.
    Context,
}

/// Parts of a step's time, along the slowest stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum TimeTerm {
    /// Forward and backward computation.
    Compute,
    /// Forward computation repeated in backward.
    Recomputation,
    /// Collectives of the tensor axis.
    TensorCommunication,
    /// Tokens sent to their experts and back, keys and values exchanged between parts of a sequence.
    Exchange,
    /// Sends between stages that nothing hides.
    PipelineCommunication,
    /// Filling and draining the pipeline.
    Bubble,
    /// Gradient reduction and parameter gathers of the data axis that nothing hides.
    DataCommunication,
    /// The optimizer step.
    Optimizer,
    /// Host work, launches and logging.
    Overhead,
}

/// One part of a step's time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Term {
    /// How long.
    pub time: Seconds,
    /// The weakest origin of the numbers behind it.
    pub provenance: Provenance,
}

/// What a step should cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Estimate {
    /// Time of a step: the sum of the terms.
    pub step: Seconds,
    /// 90 % interval of the step's time.
    pub interval: (Seconds, Seconds),
    /// Parts of the step's time.
    pub terms: BTreeMap<TimeTerm, Term>,
    /// Tokens of a step over seconds and GPUs.
    pub tokens_per_second_per_gpu: f64,
    /// FLOPs of a step without recomputation, over all ranks.
    pub model_flops: Flops,
    /// FLOPs of a step with recomputation, over all ranks.
    pub hardware_flops: Flops,
    /// Model FLOPs over step time, GPUs and dense peak.
    pub mfu: f64,
    /// How `mfu` is computed, in words.
    pub mfu_formula: String,
    /// Memory of the fullest rank as the driver counts it.
    pub device_memory: Bytes,
    /// Memory of the fullest rank as the framework's allocator counts it.
    pub allocator_peak: Bytes,
    /// Stage with the fullest rank.
    pub fullest_stage: StageId,
    /// Size of a full checkpoint: weights and optimizer state.
    pub checkpoint: Bytes,
    /// Limits of the estimate that the reader should know.
    pub remarks: Vec<String>,
}

/// How the choice was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SearchReport {
    /// Candidates of the stated space.
    pub enumerated: u64,
    /// Candidates that were estimated and fit.
    pub feasible: u64,
    /// Candidates that could not win, by rule.
    pub pruned: BTreeMap<String, u64>,
    /// Candidates that cannot run, by reason.
    pub rejected: BTreeMap<String, u64>,
    /// Choices that the user fixed, as flags.
    pub fixed: Vec<String>,
    /// Why the search stopped.
    pub stop_reason: StopReason,
    /// What binds the layout, the heaviest first; none where nobody has asked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<Binding>,
    /// Why the winner's neighbours lost, in words.
    pub explanations: Vec<String>,
}

/// Something that a layout waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Limit {
    /// Memory of the fullest stage.
    Memory,
    /// Network cards between nodes or fast domains.
    Network,
    /// Links inside a node or fast domain.
    FastLinks,
    /// Filling and draining the pipeline.
    Bubble,
    /// Matrix products whose extents fill no whole waves of tiles, are shallow, or are misaligned.
    MatmulShape,
    /// What the host does: launches, micro-batches, steps.
    Host,
    /// Bandwidth of the devices' memory, mostly in operators that are no matrix products.
    MemoryBandwidth,
}

/// A limit with its weight.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Binding {
    /// What binds.
    pub limit: Limit,
    /// The share of the step that goes away without it; for memory, with twice of it.
    pub gain: f64,
}

impl Limit {
    /// The name used in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Limit::Memory => "memory",
            Limit::Network => "network",
            Limit::FastLinks => "fast_links",
            Limit::Bubble => "bubble",
            Limit::MatmulShape => "matmul_shape",
            Limit::Host => "host",
            Limit::MemoryBandwidth => "memory_bandwidth",
        }
    }
}

/// Why a search stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopReason {
    /// Every candidate was estimated or could not win.
    Optimal,
    /// The user ended it: what was found by then is not proven to be the best.
    Interrupted,
}

impl StopReason {
    /// The word used in JSON.
    pub fn name(self) -> &'static str {
        match self {
            StopReason::Optimal => "optimal",
            StopReason::Interrupted => "interrupted",
        }
    }
}

impl MemoryTerm {
    /// The words used in tables.
    pub fn name(self) -> &'static str {
        match self {
            MemoryTerm::Weights => "weights",
            MemoryTerm::Gradients => "gradients",
            MemoryTerm::OptimizerState => "optimizer state",
            MemoryTerm::Activations => "activations",
            MemoryTerm::Workspace => "workspace",
            MemoryTerm::GatheredParameters => "gathered parameters",
            MemoryTerm::CommunicationBuffers => "communication buffers",
            MemoryTerm::AllocatorSlack => "allocator slack",
            MemoryTerm::Context => "context",
        }
    }
}

impl TimeTerm {
    /// The name used in JSON.
    pub fn name(self) -> &'static str {
        match self {
            TimeTerm::Compute => "compute",
            TimeTerm::Recomputation => "recomputation",
            TimeTerm::TensorCommunication => "tensor_communication",
            TimeTerm::Exchange => "exchange",
            TimeTerm::PipelineCommunication => "pipeline_communication",
            TimeTerm::Bubble => "bubble",
            TimeTerm::DataCommunication => "data_communication",
            TimeTerm::Optimizer => "optimizer",
            TimeTerm::Overhead => "overhead",
        }
    }
}

impl Stage {
    /// Layers of each part of the model on the stage.
    pub fn parts(&self) -> impl Iterator<Item = (u64, u64)> {
        std::iter::once(self.layers).chain(self.further_layers.iter().copied())
    }

    /// Memory of a rank as the driver counts it.
    pub fn device_memory(&self) -> Bytes {
        self.memory.values().copied().sum()
    }

    /// Memory of a rank as the framework's allocator counts it.
    pub fn allocator_peak(&self) -> Bytes {
        let outside = [MemoryTerm::CommunicationBuffers, MemoryTerm::AllocatorSlack, MemoryTerm::Context];
        self.memory.iter().filter(|(term, _)| !outside.contains(term)).map(|(_, bytes)| *bytes).sum()
    }
}

/// Reads a plan; `origin` names the text in errors. The caller verifies it before use.
///
/// # Errors
/// `Error::Syntax` with line and column. Plans are not written by hand, so the help is to write it again.
pub fn read_plan(text: &str, origin: &str) -> Result<Plan, Error> {
    read_ron(text, origin).map_err(|error| match error {
        Error::Syntax(problem) => Error::Syntax(Problem { help: NO_PLAN.to_owned(), ..problem }),
        Error::Invalid(problems) => Error::Invalid(problems),
    })
}

/// The text of a plan, equal for equal plans.
pub fn write_plan(plan: &Plan) -> String {
    write_ron(plan, WRITTEN_DEPTH)
}
