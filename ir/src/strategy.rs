//! The choices that a plan makes: degrees, ZeRO stage, micro-batch, recomputation, schedule, stage split.

use serde::{Deserialize, Serialize};

/// Every choice of a plan; two equal strategies on equal inputs give equal programs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Strategy {
    /// Ranks that share each layer's matrices.
    pub tensor_parallel: u64,
    /// Pipeline stages.
    pub pipeline_parallel: u64,
    /// Replicas that split the batch.
    pub data_parallel: u64,
    /// Ranks that split a sequence.
    pub context_parallel: u64,
    /// Ranks that split the experts; re-uses ranks of data × context.
    pub expert_parallel: u64,
    /// What data-parallel ranks shard.
    pub zero_stage: ZeroStage,
    /// Data-parallel ranks over which ZeRO shards.
    pub shard_group: u64,
    /// Sequences of a forward pass.
    pub micro_batch: u64,
    /// Sequences of a step.
    pub global_batch: u64,
    /// Model parts on each stage.
    pub virtual_stages: u64,
    /// Order of micro-batches on a stage.
    pub schedule: ScheduleKind,
    /// What backward computes again.
    pub recompute: Recompute,
    /// Whether norms and residuals are split along the sequence over the tensor ranks.
    pub sequence_parallel: bool,
    /// Whether the optimizer state lives in host memory.
    pub offload_optimizer: bool,
    /// Layers of each stage, first to last.
    pub layers_per_stage: Vec<u64>,
}

/// What data-parallel ranks shard (ZeRO, arXiv 1910.02054); written as 0 to 3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum ZeroStage {
    /// Nothing: plain data parallelism.
    None,
    /// Optimizer state.
    OptimizerState,
    /// Optimizer state and gradients.
    Gradients,
    /// Optimizer state, gradients and parameters.
    Parameters,
}

/// What backward computes again instead of keeping it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Recompute {
    /// Nothing.
    #[serde(rename = "Nothing", alias = "None")]
    None,
    /// The attention core (Korthikanti et al., arXiv 2205.05198, section 5).
    Selective,
    /// Each layer from its input.
    Full,
}

/// Order of micro-batches on a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ScheduleKind {
    /// All forward passes, then all backward passes.
    GPipe,
    /// One forward, one backward (PipeDream-flush, arXiv 2104.04473, figure 4 top).
    OneForwardOneBackward,
}

impl Strategy {
    /// Ranks of the mesh.
    pub fn world_size(&self) -> u64 {
        self.tensor_parallel * self.pipeline_parallel * self.data_parallel * self.context_parallel
    }

    /// Micro-batches of a step on each replica.
    pub fn num_micro_batches(&self) -> u64 {
        self.global_batch / (self.micro_batch * self.data_parallel)
    }

    /// Layers of each stage that backward computes again.
    pub fn recomputed_layers_per_stage(&self) -> Vec<u64> {
        match self.recompute {
            Recompute::Full => self.layers_per_stage.clone(),
            Recompute::None | Recompute::Selective => vec![0; self.layers_per_stage.len()],
        }
    }
}

impl ZeroStage {
    /// All stages, 0 to 3.
    pub const ALL: [ZeroStage; 4] =
        [ZeroStage::None, ZeroStage::OptimizerState, ZeroStage::Gradients, ZeroStage::Parameters];
}

impl Recompute {
    /// All settings, cheapest in time first.
    pub const ALL: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];

    /// The word used in flags and files.
    pub fn name(self) -> &'static str {
        match self {
            Recompute::None => "none",
            Recompute::Selective => "selective",
            Recompute::Full => "full",
        }
    }
}

impl ScheduleKind {
    /// The word used in flags and files.
    pub fn name(self) -> &'static str {
        match self {
            ScheduleKind::GPipe => "gpipe",
            ScheduleKind::OneForwardOneBackward => "1f1b",
        }
    }
}

impl TryFrom<u8> for ZeroStage {
    type Error = String;
    fn try_from(stage: u8) -> Result<ZeroStage, String> {
        ZeroStage::ALL.get(usize::from(stage)).copied().ok_or(format!("ZeRO stage {stage} is not 0, 1, 2 or 3"))
    }
}

impl From<ZeroStage> for u8 {
    fn from(stage: ZeroStage) -> u8 {
        match stage {
            ZeroStage::None => 0,
            ZeroStage::OptimizerState => 1,
            ZeroStage::Gradients => 2,
            ZeroStage::Parameters => 3,
        }
    }
}
