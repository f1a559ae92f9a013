//! The choices that a plan makes: degrees, ZeRO stage, micro-batch, recomputation, schedule, stage split.

use serde::{Deserialize, Serialize};

use crate::mesh::MeshOrder;

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
    /// Ranks that split the experts; re-uses ranks of data × context, and of tensor where experts are whole.
    pub expert_parallel: u64,
    /// What data-parallel ranks shard.
    pub zero_stage: ZeroStage,
    /// Data-parallel ranks over which ZeRO shards.
    pub shard_group: u64,
    /// Sequences of a forward pass.
    pub micro_batch: u64,
    /// Sequences of a step.
    pub global_batch: u64,
    /// Parts of the model on each stage.
    pub virtual_stages: u64,
    /// Order of micro-batches on a stage.
    pub schedule: ScheduleKind,
    /// What backward computes again.
    pub recompute: Recompute,
    /// Whether norms and residuals are split along the sequence over the tensor ranks.
    pub sequence_parallel: bool,
    /// Whether the optimizer state lives in host memory.
    pub offload_optimizer: bool,
    /// Layers of each part of the model: stages first to last, and on each stage its parts in model order.
    pub layers_per_stage: Vec<u64>,
    /// How many of these backward computes again, where `recompute` is `Partial`; empty otherwise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recomputed_layers: Vec<u64>,
    /// Which axis of the mesh is outermost.
    #[serde(default, skip_serializing_if = "MeshOrder::is_usual")]
    pub mesh_order: MeshOrder,
    /// Whether each routed expert is whole on a rank, each of which routes its part of the sequence; otherwise tensor
    /// ranks share it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub whole_experts: bool,
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
    /// So many layers of each stage from their inputs, nothing of the others (Megatron-LM,
    /// `--recompute-method block --recompute-num-layers`).
    Partial,
}

/// Order of micro-batches on a stage; of equally good ones the first is preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ScheduleKind {
    /// One forward, one backward (PipeDream-flush, arXiv 2104.04473, figure 4 top).
    OneForwardOneBackward,
    /// The same with several parts of the model on each stage (arXiv 2104.04473, figure 4 bottom).
    Interleaved,
    /// 1F1B whose weight gradients wait for what would be idle time, with its memory (ZB-H1, arXiv 2401.10241,
    /// section 2.1).
    ZeroBubbleH1,
    /// The same with two parts a stage, down the stages and back (ZB-V, arXiv 2401.10241, section 6, and
    /// arXiv 2405.15362).
    ZeroBubbleV,
    /// All forward passes, then all backward passes.
    GPipe,
}

impl Strategy {
    /// A layout of these tensor, pipeline and data degrees with nothing else chosen: ZeRO-0, micro-batches of one
    /// sequence, 1F1B, no recomputation, no sequence parallelism, no stage split yet.
    pub fn plain(degrees: [u64; 3], global_batch: u64) -> Strategy {
        let [tensor_parallel, pipeline_parallel, data_parallel] = degrees;
        Strategy {
            tensor_parallel,
            pipeline_parallel,
            data_parallel,
            context_parallel: 1,
            expert_parallel: 1,
            zero_stage: ZeroStage::None,
            shard_group: data_parallel,
            micro_batch: 1,
            global_batch,
            virtual_stages: 1,
            schedule: ScheduleKind::OneForwardOneBackward,
            recompute: Recompute::None,
            sequence_parallel: false,
            offload_optimizer: false,
            layers_per_stage: Vec::new(),
            recomputed_layers: Vec::new(),
            mesh_order: MeshOrder::default(),
            whole_experts: false,
        }
    }

    /// Ranks of the mesh.
    pub fn world_size(&self) -> u64 {
        self.tensor_parallel * self.pipeline_parallel * self.data_parallel * self.context_parallel
    }

    /// Ranks that share each routed expert's matrices (Megatron-LM, `--expert-tensor-parallel-size`).
    pub fn expert_tensor_parallel(&self) -> u64 {
        if self.whole_experts { 1 } else { self.tensor_parallel }
    }

    /// Ranks of a stage over which experts can be spread.
    pub fn expert_ranks(&self) -> u64 {
        self.data_parallel * self.context_parallel * (self.tensor_parallel / self.expert_tensor_parallel())
    }

    /// Micro-batches of a step on each replica.
    pub fn num_micro_batches(&self) -> u64 {
        self.global_batch / (self.micro_batch * self.data_parallel)
    }

    /// Layers of each stage that backward computes again.
    pub fn recomputed_layers_per_stage(&self) -> Vec<u64> {
        match self.recompute {
            Recompute::Full => self.layers_per_stage.clone(),
            Recompute::Partial => self.recomputed_layers.clone(),
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
    /// What is the same for all layers, cheapest in time first.
    pub const ALL: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];

    /// The word used in flags and files.
    pub fn name(self) -> &'static str {
        match self {
            Recompute::None => "none",
            Recompute::Selective => "selective",
            Recompute::Full => "full",
            Recompute::Partial => "partial",
        }
    }
}

impl ScheduleKind {
    /// All schedules, the simplest first.
    pub const ALL: [ScheduleKind; 5] = [
        ScheduleKind::GPipe,
        ScheduleKind::OneForwardOneBackward,
        ScheduleKind::Interleaved,
        ScheduleKind::ZeroBubbleH1,
        ScheduleKind::ZeroBubbleV,
    ];

    /// The word used in flags and files.
    pub fn name(self) -> &'static str {
        match self {
            ScheduleKind::GPipe => "gpipe",
            ScheduleKind::OneForwardOneBackward => "1f1b",
            ScheduleKind::Interleaved => "interleaved",
            ScheduleKind::ZeroBubbleH1 => "zb-h1",
            ScheduleKind::ZeroBubbleV => "zb-v",
        }
    }

    /// Whether weight gradients are passes of their own.
    pub fn splits_backward(self) -> bool {
        match self {
            ScheduleKind::GPipe | ScheduleKind::OneForwardOneBackward | ScheduleKind::Interleaved => false,
            ScheduleKind::ZeroBubbleH1 | ScheduleKind::ZeroBubbleV => true,
        }
    }

    /// Whether every part on a stage has at least as many micro-batches in flight as the stage has in 1F1B.
    ///
    /// GPipe has all. Stage r of p with parts interleaved has 2 (p − r) − 1 of the last part, or a whole group, when it
    /// is fullest, and more of the others. The second parts of a V have fewer.
    pub fn holds_least(self) -> bool {
        self != ScheduleKind::ZeroBubbleV
    }

    /// Whether a stage can have so many parts of the model.
    pub fn allows_virtual_stages(self, virtual_stages: u64) -> bool {
        match self {
            ScheduleKind::GPipe | ScheduleKind::OneForwardOneBackward | ScheduleKind::ZeroBubbleH1 => {
                virtual_stages == 1
            }
            ScheduleKind::Interleaved => virtual_stages >= 2,
            ScheduleKind::ZeroBubbleV => virtual_stages == 2,
        }
    }

    /// Whether a step can have so many micro-batches: interleaved parts take them in groups of one a stage
    /// (Megatron-LM, core/pipeline_parallel/schedules.py), or fewer in one group.
    pub fn allows_micro_batches(self, micro_batches: u64, num_stages: u64) -> bool {
        self != ScheduleKind::Interleaved || micro_batches < num_stages || micro_batches.is_multiple_of(num_stages)
    }
}

/// Why programs of a strategy are not compiled, executed or checked yet, or `None` if they are.
pub fn not_programmed(strategy: &Strategy) -> Option<&'static str> {
    if strategy.context_parallel > 1 || strategy.expert_parallel > 1 || strategy.whole_experts {
        return Some("context and expert parallelism are not compiled yet");
    }
    if strategy.shard_group != strategy.data_parallel {
        return Some("ZeRO over a part of the replicas is not compiled yet");
    }
    match strategy.mesh_order {
        MeshOrder::PipelineOutermost => {}
        MeshOrder::DataOutermost => return Some("ranks with data outermost are not executed yet"),
    }
    match strategy.schedule {
        ScheduleKind::GPipe | ScheduleKind::OneForwardOneBackward => {}
        ScheduleKind::Interleaved => return Some("interleaved schedules are not compiled yet"),
        ScheduleKind::ZeroBubbleH1 | ScheduleKind::ZeroBubbleV => {
            return Some("zero-bubble schedules are not compiled yet");
        }
    }
    match strategy.recompute {
        Recompute::None | Recompute::Selective | Recompute::Full => {}
        Recompute::Partial => return Some("recomputation of some layers only is not compiled yet"),
    }
    strategy.offload_optimizer.then_some("offload is not compiled yet")
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
