//! What depends on software rather than hardware: fused kernels, overlap, number formats, choices offered.

use ir::graph::Fusion;
use ir::mesh::MeshOrder;
use ir::model::DType;
use ir::strategy::{Recompute, ScheduleKind, ZeroStage};
use ir::units::{Bytes, BytesPerSecond, Seconds};
use serde::{Deserialize, Serialize};

use crate::sourced::Sourced;

/// A training framework of a certain time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackProfile {
    /// Name, as given to `--stack`.
    pub name: String,
    /// What the software is and where its behaviour was read.
    pub source: String,
    /// Choices that the software offers; the search proposes no others.
    pub offers: Offers,
    /// Kernels.
    pub kernels: Kernels,
    /// Which communication hides behind computation.
    pub overlap: Overlap,
    /// Times that no formula of shapes gives.
    pub overhead: Overhead,
    /// Bytes that no formula of shapes gives.
    pub memory: MemoryBehaviour,
    /// Half width of the 90 % interval of a predicted step, relative to the prediction, for runs like those compared.
    pub relative_error_90: Sourced<f64>,
    /// Runs that predictions were compared with; the error is stated for any run where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compared: Option<ComparedRuns>,
}

/// What runs had that predictions were compared with: a prediction of anything else is less sure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ComparedRuns {
    /// Devices.
    pub devices: Vec<String>,
    /// Software, as tables of runs name it.
    pub frameworks: Vec<String>,
    /// Number formats of matrix products, as tables of runs name them.
    pub formats: Vec<String>,
    /// Most GPUs.
    pub most_gpus: u64,
}

/// Choices that the software offers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Offers {
    /// Tensor parallelism.
    pub tensor_parallel: bool,
    /// Pipeline parallelism.
    pub pipeline_parallel: bool,
    /// Sequence parallelism beside tensor parallelism.
    pub sequence_parallel: bool,
    /// Stages with unequal numbers of layers.
    pub uneven_stages: bool,
    /// ZeRO stages.
    pub zero_stages: Vec<ZeroStage>,
    /// ZeRO stages that work together with pipeline stages.
    pub pipeline_zero_stages: Vec<ZeroStage>,
    /// Recomputation.
    pub recompute: Vec<Recompute>,
    /// Pipeline schedules.
    pub schedules: Vec<ScheduleKind>,
    /// Whether published runs that do not state parts of the model on a stage may interleave them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub interleaves_unstated: bool,
    /// Whether partial recomputation computes the same number of layers again on each stage.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub same_recompute_on_stages: bool,
    /// ZeRO stages with which the optimizer state can live in host memory; with none where empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub offload_zero_stages: Vec<ZeroStage>,
    /// Where context parallelism is documented; the software has none where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_parallel: Option<String>,
    /// Where expert parallelism is documented; the software has none where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_parallel: Option<String>,
    /// Where experts that are whole on tensor ranks are documented; the software has none where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole_experts: Option<String>,
    /// Where ZeRO over a part of the replicas (hybrid sharding) is documented; the software has none where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard_groups: Option<String>,
    /// Orders of the mesh's axes, without contexts and experts where data is outermost.
    #[serde(default = "usual_orders", skip_serializing_if = "are_usual")]
    pub mesh_orders: Vec<MeshOrder>,
    /// Those of the choices above that are planned only where they are asked for, because the software does not execute
    /// them yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_request: Vec<RequestedChoice>,
}

/// A choice that must be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RequestedChoice {
    /// A schedule.
    Schedule(ScheduleKind),
    /// A way of recomputation.
    Recompute(Recompute),
    /// More than one context rank.
    ContextParallel,
    /// Experts that are whole on tensor ranks.
    WholeExperts,
    /// Optimizer state in host memory.
    OffloadOptimizer,
    /// An order of the mesh's axes.
    MeshOrder(MeshOrder),
}

fn usual_orders() -> Vec<MeshOrder> {
    vec![MeshOrder::default()]
}

fn are_usual(orders: &[MeshOrder]) -> bool {
    orders == [MeshOrder::default()]
}

impl Offers {
    /// Schedules that are searched without being asked for.
    pub fn searched_schedules(&self) -> Vec<ScheduleKind> {
        let searched = |schedule: &ScheduleKind| !self.on_request.contains(&RequestedChoice::Schedule(*schedule));
        self.schedules.iter().copied().filter(searched).collect()
    }

    /// Recomputation that is searched without being asked for.
    pub fn searched_recompute(&self) -> Vec<Recompute> {
        let searched = |recompute: &Recompute| !self.on_request.contains(&RequestedChoice::Recompute(*recompute));
        self.recompute.iter().copied().filter(searched).collect()
    }

    /// Orders of the mesh's axes that are searched without being asked for.
    pub fn searched_mesh_orders(&self) -> Vec<MeshOrder> {
        let searched = |order: &MeshOrder| !self.on_request.contains(&RequestedChoice::MeshOrder(*order));
        self.mesh_orders.iter().copied().filter(searched).collect()
    }

    /// Whether context degrees above 1 are searched without being asked for.
    pub fn searches_context_parallel(&self) -> bool {
        self.context_parallel.is_some() && !self.on_request.contains(&RequestedChoice::ContextParallel)
    }

    /// Whether experts that are whole on tensor ranks are searched without being asked for.
    pub fn searches_whole_experts(&self) -> bool {
        self.whole_experts.is_some() && !self.on_request.contains(&RequestedChoice::WholeExperts)
    }

    /// Whether optimizer state in host memory is searched without being asked for.
    pub fn searches_offload(&self) -> bool {
        !self.offload_zero_stages.is_empty() && !self.on_request.contains(&RequestedChoice::OffloadOptimizer)
    }
}

/// Kernels of the software.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kernels {
    /// Attention core in one kernel that stores no scores.
    pub flash_attention: bool,
    /// Whether that kernel is FlashAttention-2's, which some devices run slower than kernels made for them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub flash_attention_2: bool,
    /// Whether attention weights are dropped in training, by a kernel of its own where no flash kernel does it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub attention_dropout: bool,
    /// Elementwise neighbours computed by one kernel.
    pub fused: Vec<Fusion>,
    /// Whether a kernel of fused neighbours keeps what enters it for backward and computes the rest again there,
    /// and converts formats itself.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fused_keep_inputs: bool,
    /// Projections of one input (query, key, value; gate, up) computed as one product.
    pub joint_projections: bool,
    /// Whether a weight's gradient is added to the accumulator by the matrix kernel itself.
    pub fused_gradient_accumulation: bool,
    /// Whether full recomputation repeats only what backward reads: the end of a block, whose result the next block
    /// has, is not computed again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub repeats_needed_only: bool,
    /// What selective recomputation repeats.
    #[serde(default)]
    pub selective_recompute: SelectiveRecompute,
    /// In-situ speed of matrix kernels relative to the same kernels alone.
    pub matmul_speed: Sourced<f64>,
    /// Least time between the starts of two kernels.
    pub launch_floor: Sourced<Seconds>,
    /// Time in which the host issues a kernel, framework included; a block takes no less than its kernels' sum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_launch: Option<Sourced<Seconds>>,
    /// Speed of flash-attention kernels relative to the device's efficiency; 1 where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention_speed: Option<Sourced<f64>>,
    /// Routed experts; the products of other layers where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertKernels>,
    /// Bandwidth of memory-bound kernels relative to the device's streaming bandwidth; 1 where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub streaming_speed: Option<Sourced<f64>>,
    /// Matrix products in formats below the model's; absent where the software has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low_precision: Option<LowPrecision>,
}

/// Matrix products with operands converted to fp8 or less.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LowPrecision {
    /// In-situ speed of fp8 products against their peak, relative to `matmul_speed`.
    pub speed: Sourced<f64>,
    /// The same of 4-bit products; that of fp8 where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp4_speed: Option<Sourced<f64>>,
    /// Bytes moved to convert one element of an operand, transposed copy and scales included.
    pub conversion_bytes: Sourced<f64>,
    /// Whether ZeRO-3 converts layers' weights before it gathers them, to a byte each.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gathers_converted: bool,
}

/// Kernels of routed experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertKernels {
    /// In-situ speed of grouped products relative to `matmul_speed`.
    pub grouped_speed: Sourced<f64>,
    /// Time of routing in one pass of a layer, whatever the number of tokens: counts, sorting, host synchronisation.
    pub routing: Sourced<Seconds>,
    /// Whether a token crosses the network once for each domain, and the fast links once for each rank, that holds some
    /// of its experts, instead of once for each of them (deepseek-ai/DeepEP, README, "normal kernels").
    #[serde(default)]
    pub one_copy_per_domain: bool,
    /// Share of the exchange of tokens that computation hides.
    pub exchange_hidden: Sourced<f64>,
}

/// What selective recomputation computes again in backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SelectiveRecompute {
    /// Scores, softmax and context of attention, which a flash kernel repeats anyway (arXiv 2205.05198, section 5).
    #[default]
    AttentionCore,
    /// Every second matrix product, and all operators that are neither products nor attention (pytorch/torchtitan,
    /// selective activation checkpointing by operator).
    EverySecondProduct,
}

/// How the context axis exchanges keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ContextExchange {
    /// Keys and values go round a ring beside the computation (arXiv 2310.01889).
    #[default]
    Ring,
    /// Heads are exchanged for positions before and after attention (arXiv 2309.14509).
    AllToAll,
}

/// Which communication hides behind computation, as a share of the computation that can cover it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overlap {
    /// Share of the last backward pass that can cover gradient reduction.
    pub gradient_reduction: Sourced<f64>,
    /// Share of a layer's computation that can cover ZeRO-3 gathers and scatters.
    pub parameter_gather: Sourced<f64>,
    /// Share of the tensor axis's collectives that products beside them hide; none where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor: Option<Sourced<f64>>,
    /// Time that a collective takes the processor from the computation beside it, over its time alone: little on GPUs,
    /// all of it or more where one core does both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub occupancy: Option<Sourced<f64>>,
    /// How the context axis exchanges keys and values.
    #[serde(default)]
    pub context: ContextExchange,
    /// What ranks wait for one another at a collective beyond its messages; nothing where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<Waiting>,
    /// How fast a rank copies a tensor into the order in which a collective needs it, or out of it, by size, smallest
    /// first; nothing is copied where empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<CopyRate>,
    /// Whether ZeRO-1 all_reduces gradients and then uses its part, instead of reduce_scatter.
    pub zero_one_all_reduces: bool,
    /// Whether ZeRO-1 and 2 gather updated weights beside the next step's first forward pass.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gathers_beside_forward: bool,
    /// When ZeRO-3 gathers weights and reduces gradients.
    #[serde(default, skip_serializing_if = "ShardedState::is_usual")]
    pub sharded_state: ShardedState,
    /// Whether weights that ZeRO-3 gathered are copied out of the collective's buffer, and gradients into one of their
    /// format.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub copies_gathered: bool,
    /// Whether sends between stages run beside computation.
    pub pipeline_sends: bool,
    /// Whether each tensor rank sends its slice of a replicated activation, which is then gathered.
    pub sliced_sends: bool,
}

/// When ZeRO-3 gathers weights and reduces gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ShardedState {
    /// Both in every micro-batch, whose memory is that of a block.
    #[default]
    EachMicroBatch,
    /// The same without pipeline stages; with them each once a step, and what is gathered and summed stays whole
    /// (pytorch/torchtitan, docs/fsdp.md and models/llama3/parallelize.py, reshard_after_forward: not with pipelines;
    /// pytorch/pytorch, distributed/pipelining/stage.py, backward_maybe_with_nosync).
    OncePerStepInPipelines,
    /// That, and gradients reduced once a step without pipeline stages too (NVIDIA-NeMo/Automodel, defer_fsdp_grad_sync).
    ReducedOncePerStep,
}

impl ShardedState {
    fn is_usual(&self) -> bool {
        *self == ShardedState::EachMicroBatch
    }

    /// Whether weights stay gathered over a step's micro-batches.
    pub fn keeps_weights(self, pipeline_parallel: u64) -> bool {
        self != ShardedState::EachMicroBatch && pipeline_parallel > 1
    }

    /// Whether gradients stay whole over a step's micro-batches.
    pub fn keeps_gradients(self, pipeline_parallel: u64) -> bool {
        self == ShardedState::ReducedOncePerStep || self.keeps_weights(pipeline_parallel)
    }
}

/// Time that a collective takes beyond its messages where ranks are threads of a busy host: they reach it one after
/// another, and the thread that communicates waits for its turn on a processor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Waiting {
    /// A collective that the computation stops for.
    pub blocking: Sourced<Seconds>,
    /// One that was started before and is waited for.
    pub started: Sourced<Seconds>,
    /// Each further one that was started with it: parameters have a collective each.
    pub further: Sourced<Seconds>,
}

/// Bytes a second of a tensor that is copied.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyRate {
    /// The tensor's bytes.
    pub size: Bytes,
    /// Bytes a second, each read and written once.
    pub rate: Sourced<BytesPerSecond>,
}

/// Times that no formula of shapes gives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overhead {
    /// Each micro-batch on each stage: schedule, loss scale, host work.
    pub micro_batch: Sourced<Seconds>,
    /// Each step: data, logging, optimizer launch.
    pub step: Sourced<Seconds>,
}

/// Bytes that no formula of shapes gives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryBehaviour {
    /// Bytes of a parameter's gradient, by the model's number format.
    pub gradient_bytes: ByFormat,
    /// Bytes of a parameter's optimizer state with its master copy, by the model's number format.
    pub optimizer_bytes: ByFormat,
    /// Whether sharded weights are held as the optimizer's master copy only, and converted when they are gathered.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub weights_are_master: bool,
    /// Whether an empty tensor is held for each shape of a layer's weights, as the gradient that kernels have already
    /// added to the accumulated one (NVIDIA/TransformerEngine, pytorch/module/base.py, get_dummy_wgrad).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gradient_placeholders: bool,
    /// Share that the allocator holds above the live tensors while there is room.
    pub allocator_slack: Sourced<f64>,
    /// The share that stays when memory runs short, since the allocator gives cached blocks back before it fails
    /// (pytorch/pytorch, c10/cuda/CUDACachingAllocator.cpp, release_cached_blocks); `allocator_slack` where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub least_slack: Option<Sourced<f64>>,
    /// Buffers of communicators and fused reductions.
    pub communication_buffers: Sourced<Bytes>,
    /// Share of the device's memory that a plan leaves free.
    pub safety_margin: Sourced<f64>,
}

/// A number of bytes for each number format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ByFormat {
    /// bf16 models.
    pub bf16: Sourced<u64>,
    /// fp16 models.
    pub fp16: Sourced<u64>,
    /// fp32 models.
    pub fp32: Sourced<u64>,
}

impl ByFormat {
    /// The entry of a number format.
    pub fn of(&self, dtype: DType) -> u64 {
        match dtype {
            DType::BF16 => self.bf16.value,
            DType::FP16 => self.fp16.value,
            DType::FP32 => self.fp32.value,
        }
    }
}
