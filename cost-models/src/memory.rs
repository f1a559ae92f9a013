//! Memory of a rank: model state by ZeRO stage, kept activations, workspace, and what software adds.

use std::collections::BTreeMap;

use ir::model::DType;
use ir::plan::MemoryTerm;
use ir::strategy::ZeroStage;
use ir::units::Bytes;

use crate::machine::Machine;

/// Blocks whose gathered parameters are alive at once under ZeRO-3: the one in use and the next.
const GATHERED_BLOCKS: u64 = 2;
/// Blocks whose gradients are whole at once before they are reduced to their owners, from ZeRO-2 on.
const UNREDUCED_BLOCKS: u64 = 1;

/// Bytes of each parameter's weight, gradient and optimizer state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateBytes {
    /// Weight in the model's format.
    pub weight: u64,
    /// Weight where ZeRO-3 shards it: none where what is gathered is converted from the master copy.
    pub sharded_weight: u64,
    /// Gradient in the accumulation format.
    pub gradient: u64,
    /// A micro-batch's gradient beside the accumulated one, where kernels do not add to it directly.
    pub fresh_gradient: u64,
    /// Master weight and moments.
    pub optimizer: u64,
}

/// Model state of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelState {
    /// Weights.
    pub weights: Bytes,
    /// Gradients.
    pub gradients: Bytes,
    /// Optimizer state.
    pub optimizer: Bytes,
}

/// Ranks over which ZeRO shards parameters outside experts, and those of routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shards {
    /// Outside experts.
    pub dense: u64,
    /// Routed experts.
    pub expert: u64,
}

/// What a stage puts on each of its ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageLoad {
    /// Parameter elements of a rank.
    pub parameters: u64,
    /// The part of `parameters` that are routed experts.
    pub expert_parameters: u64,
    /// Parameter elements of the largest block.
    pub largest_block: u64,
    /// Parameter elements of the largest layer, outside routed experts.
    pub largest_layer: u64,
    /// Tensors kept for backward, of all micro-batches in flight.
    pub activations: Bytes,
    /// Largest set of temporary tensors.
    pub workspace: Bytes,
    /// Whether the optimizer state lives in host memory.
    pub offloads_optimizer: bool,
    /// Whether ZeRO-3 keeps gathered weights whole.
    pub keeps_weights: bool,
    /// Whether ZeRO-3 keeps accumulated gradients whole.
    pub keeps_gradients: bool,
}

/// Memory of a rank by term.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageMemory {
    /// Weights, gradients, optimizer state.
    pub state: ModelState,
    /// Kept tensors of all micro-batches in flight.
    pub activations: Bytes,
    /// Temporary tensors.
    pub workspace: Bytes,
    /// Parameters gathered for use, gradients before they are reduced to their owners, and tensors that stand for
    /// gradients.
    pub gathered: Bytes,
    /// Communicators' buffers, which no framework's allocator sees.
    pub buffers: Bytes,
    /// Held by the allocator above live tensors: what it gives back when memory runs short is not counted where there
    /// is no room for it.
    pub slack: Bytes,
    /// The part of `slack` that it cannot give back.
    pub least_slack: Bytes,
    /// The driver's context.
    pub context: Bytes,
}

/// Bytes of each parameter's state under a stack.
pub fn state_bytes(machine: &Machine, dtype: DType) -> StateBytes {
    let memory = &machine.stack.memory;
    let gradient = memory.gradient_bytes.of(dtype);
    let separate = !machine.stack.kernels.fused_gradient_accumulation && gradient > dtype.bytes();
    StateBytes {
        weight: dtype.bytes(),
        sharded_weight: if memory.weights_are_master { 0 } else { dtype.bytes() },
        gradient,
        fresh_gradient: if separate { dtype.bytes() } else { 0 },
        optimizer: memory.optimizer_bytes.of(dtype),
    }
}

/// Model state of one of `shard_group` ranks that hold `parameters` elements together.
///
/// Stage 1 divides the optimizer state, stage 2 the gradients too, stage 3 the weights too; a part is
/// rounded up to whole elements. Source: ZeRO, arXiv 1910.02054, figure 1 and table 1.
pub fn model_state(parameters: u64, bytes: StateBytes, zero_stage: ZeroStage, shard_group: u64) -> ModelState {
    let held = |from: ZeroStage| match zero_stage >= from {
        true => parameters.div_ceil(shard_group),
        false => parameters,
    };
    let weight = if zero_stage == ZeroStage::Parameters { bytes.sharded_weight } else { bytes.weight };
    // Where gradients are sharded, fresh ones are whole for a block only.
    let fresh_gradient = if zero_stage >= ZeroStage::Gradients { 0 } else { bytes.fresh_gradient };
    ModelState {
        weights: Bytes(held(ZeroStage::Parameters) * weight),
        gradients: Bytes(held(ZeroStage::Gradients) * (bytes.gradient + fresh_gradient)),
        optimizer: Bytes(held(ZeroStage::OptimizerState) * bytes.optimizer),
    }
}

/// Memory of each rank of a stage.
pub fn stage_memory(
    load: StageLoad,
    zero_stage: ZeroStage,
    shards: Shards,
    dtype: DType,
    machine: &Machine,
) -> StageMemory {
    let profile = &machine.stack.memory;
    let bytes = state_bytes(machine, dtype);
    let dense = model_state(load.parameters - load.expert_parameters, bytes, zero_stage, shards.dense);
    let expert = model_state(load.expert_parameters, bytes, zero_stage, shards.expert);
    let state = ModelState {
        weights: dense.weights + expert.weights,
        gradients: dense.gradients + expert.gradients,
        optimizer: if load.offloads_optimizer { Bytes(0) } else { dense.optimizer + expert.optimizer },
    };
    let (gathered, unreduced) = match zero_stage {
        _ if shards.dense == 1 => (0, 0),
        ZeroStage::None | ZeroStage::OptimizerState => (0, 0),
        ZeroStage::Gradients => (0, UNREDUCED_BLOCKS),
        ZeroStage::Parameters => (GATHERED_BLOCKS, UNREDUCED_BLOCKS),
    };
    // Kernels that add to accumulated gradients give single ones in the same format.
    let fused = machine.stack.kernels.fused_gradient_accumulation;
    let gradient = if fused { bytes.gradient } else { dtype.bytes() };
    let largest = load.largest_block.min(load.parameters);
    let placeholders = if profile.gradient_placeholders { load.largest_layer * dtype.bytes() } else { 0 };
    let weights = if load.keeps_weights { load.parameters } else { largest * gathered } * dtype.bytes();
    let unreduced = match load.keeps_gradients {
        true => load.parameters * bytes.gradient,
        false => largest * unreduced * gradient,
    };
    let gathered = Bytes(weights + unreduced + placeholders);
    let mut memory = StageMemory {
        state,
        activations: load.activations,
        workspace: load.workspace,
        gathered,
        buffers: profile.communication_buffers.value,
        slack: Bytes(0),
        least_slack: Bytes(0),
        context: machine.device.context_memory.value,
    };
    let room = machine.usable_memory().0.saturating_sub(memory.least_use().0);
    let most = profile.allocator_slack.value;
    let least = profile.least_slack.as_ref().map_or(most, |least| least.value.min(most));
    let [least, most] = [least, most].map(|share| memory.allocator_peak().scale(share));
    memory.least_slack = least;
    memory.slack = Bytes(room).max(least).min(most);
    memory
}

/// Weights and optimizer state of a whole model: what a full checkpoint holds.
pub fn checkpoint_bytes(parameters: u64, bytes: StateBytes) -> Bytes {
    Bytes(parameters) * (bytes.weight + bytes.optimizer)
}

impl StageMemory {
    /// As the framework's allocator counts it.
    pub fn allocator_peak(&self) -> Bytes {
        let ModelState { weights, gradients, optimizer } = self.state;
        weights + gradients + optimizer + self.activations + self.workspace + self.gathered
    }

    /// As the driver counts it.
    pub fn device_use(&self) -> Bytes {
        self.allocator_peak() + self.slack + self.buffers + self.context
    }

    /// The least with which a rank does not fail: `device_use` is within the usable memory where this is. Linear in
    /// the tensors, which `device_use` is not.
    pub fn least_use(&self) -> Bytes {
        self.allocator_peak() + self.least_slack + self.buffers + self.context
    }

    /// By term, for the plan file.
    pub fn terms(&self) -> BTreeMap<MemoryTerm, Bytes> {
        BTreeMap::from([
            (MemoryTerm::Weights, self.state.weights),
            (MemoryTerm::Gradients, self.state.gradients),
            (MemoryTerm::OptimizerState, self.state.optimizer),
            (MemoryTerm::Activations, self.activations),
            (MemoryTerm::Workspace, self.workspace),
            (MemoryTerm::GatheredParameters, self.gathered),
            (MemoryTerm::CommunicationBuffers, self.buffers),
            (MemoryTerm::AllocatorSlack, self.slack),
            (MemoryTerm::Context, self.context),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIXED: StateBytes =
        StateBytes { weight: 2, sharded_weight: 2, gradient: 2, fresh_gradient: 0, optimizer: 12 };

    fn gigabytes(parameters: u64, stage: ZeroStage, ranks: u64) -> f64 {
        let state = model_state(parameters, MIXED, stage, ranks);
        (state.weights + state.gradients + state.optimizer).0 as f64 / 1e9
    }

    #[test]
    fn zero_paper_table_is_reproduced() {
        // arXiv 1910.02054, figure 1: 7.5 B parameters on 64 ranks.
        let expected = [120.0, 31.4, 16.6, 1.9];
        for (stage, expected) in ZeroStage::ALL.into_iter().zip(expected) {
            let found = gigabytes(7_500_000_000, stage, 64);
            assert!((found - expected).abs() < 0.05, "{stage:?}: {found} GB, the paper says {expected}");
        }
    }

    #[test]
    fn a_billion_parameters_have_twelve_gigabytes_of_adam_state() {
        let whole = model_state(1_000_000_000, MIXED, ZeroStage::None, 4).optimizer;
        let shard = model_state(1_000_000_000, MIXED, ZeroStage::OptimizerState, 4).optimizer;
        assert_eq!((whole, shard), (Bytes(12_000_000_000), Bytes(3_000_000_000)));
    }

    #[test]
    fn cached_blocks_are_given_back_before_memory_runs_out() {
        let cluster = hardware_profiles::find_cluster("jean-zay-a100-80gb", "test").expect("it is built in");
        let device = hardware_profiles::find_device(&cluster.device, "test").expect("it is built in");
        let stack = hardware_profiles::find_stack("megatron-deepspeed-2022", "test").expect("it is built in");
        let format = hardware_profiles::device::MatmulFormat::Model;
        let mut machine = Machine { node_gpus: 8, matmul_format: format, device, cluster, stack };
        let used = |gib: u64, machine: &Machine| {
            let load = StageLoad { activations: Bytes(gib << 30), ..StageLoad::default() };
            stage_memory(load, ZeroStage::None, Shards { dense: 1, expert: 1 }, DType::FP16, machine)
        };
        let usable = machine.usable_memory();
        for gib in [10, 60, 65, 67, 71, 76, 90] {
            let memory = used(gib, &machine);
            let slack = Bytes(gib << 30).scale(machine.stack.memory.allocator_slack.value);
            let rest = memory.device_use() - memory.slack;
            assert_eq!(memory.device_use() <= usable, memory.least_use() <= usable, "{gib} GiB");
            assert_eq!(memory.slack == slack, rest + slack <= usable, "{gib} GiB");
        }
        assert!(used(67, &machine).device_use() <= usable && used(71, &machine).device_use() > usable);
        machine.stack.memory.least_slack = None;
        assert!(used(65, &machine).device_use() > usable, "without it all of the slack is needed");
    }

    #[test]
    fn memory_never_rises_with_the_zero_stage() {
        for ranks in [1, 2, 7, 64] {
            for pair in ZeroStage::ALL.windows(2) {
                assert!(gigabytes(1_000_003, pair[1], ranks) <= gigabytes(1_000_003, pair[0], ranks));
            }
        }
    }
}
