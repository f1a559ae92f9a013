//! Time of a training step: blocks, stages, pipeline, data axis and optimizer put together.

mod bound;
mod data;
mod load;
mod order;
mod provenance;
mod tail;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use hardware_profiles::device::MatmulFormat;
use ir::graph::{Block, BlockRole, Extents, ModelGraph};
use ir::mesh::{Axis, GroupFamily, MeshOrder, build_mesh};
use ir::model::{MAX_LAYER_RUNS, ModelSpec, Workload};
use ir::pipeline::Pipeline;
use ir::plan::TimeTerm;
use ir::sharding::TensorSplit;
use ir::strategy::{Recompute, ScheduleKind, Strategy, ZeroStage};
use ir::units::{Bytes, Seconds};

use crate::block::{BlockCase, BlockCost, BlockStructure, block_cost, block_structure};
use crate::collective::{CollectiveKind, Placement, collective_time, place, send_time};
use crate::machine::Machine;
use crate::memory::state_bytes;
use crate::pipeline::{StageTime, pipeline_time, stage_totals};
pub use bound::{passes_lower_bound, pipeline_lower_bound_of, split_lower_bound, step_lower_bound, tail_lower_bound};
use data::{HeldParameters, exposed, state_groups};
pub use load::{
    host_memory_of, least_layer_memory, least_state_memory, stage_load, stage_memory_holding, stage_memory_of,
};
use load::{kept_whole, shards_of};
use tail::longest_tail;

pub use order::gains_from_order;
pub use provenance::with_provenance;

/// Collectives of the tensor axis in one pass of a layer.
const TENSOR_COLLECTIVES: u64 = 2;

/// A model on a machine, ready to be costed.
#[derive(Clone, Copy, Debug)]
pub struct Scenario<'a> {
    /// The model.
    pub model: &'a ModelSpec,
    /// Its graph.
    pub graph: &'a ModelGraph,
    /// What a step processes.
    pub workload: Workload,
    /// The machine.
    pub machine: &'a Machine,
}

/// A block's cost for one micro-batch, with its parameters on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CostedBlock {
    /// Times and bytes.
    pub cost: BlockCost,
    /// Parameter elements of a rank.
    pub parameters: u64,
    /// The part of `parameters` that are routed experts, which fewer ranks hold copies of.
    pub expert_parameters: u64,
    /// The part of `parameters` that is a second use of the token embedding.
    pub tied_parameters: u64,
    /// Tensors that the parameters are.
    pub tensors: u64,
}

/// Values for the embedding, each run of layers, and the head.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PerBlock<T> {
    /// The embedding's.
    pub embedding: T,
    /// One layer's of each run; runs that the model lacks keep the default.
    pub layers: [T; MAX_LAYER_RUNS],
    /// The same of layers that partial recomputation computes again.
    pub recomputed: [T; MAX_LAYER_RUNS],
    /// The head's.
    pub head: T,
}

/// What one part of the model holds: a stage has one, or one for each virtual stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageContent {
    /// The embedding.
    pub embedding: bool,
    /// Layers of each run.
    pub layers: [u64; MAX_LAYER_RUNS],
    /// Those of `layers` that partial recomputation computes again.
    pub recomputed: [u64; MAX_LAYER_RUNS],
    /// Final norm, head and loss.
    pub head: bool,
}

/// Time of one micro-batch on one block, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BlockTime {
    /// Forward and backward computation.
    pub compute: Seconds,
    /// Repeated forward computation.
    pub recomputation: Seconds,
    /// Tensor-axis collectives.
    pub tensor: Seconds,
    /// Exchanges of the expert and the context axis.
    pub exchange: Seconds,
    /// Data-axis collectives that computation does not cover.
    pub data: Seconds,
    /// Forward and backward pass with everything above.
    pub pass: StageTime,
}

/// A predicted step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepPrediction {
    /// Total: the sum of the terms.
    pub step: Seconds,
    /// By cause, along the slowest stage.
    pub terms: BTreeMap<TimeTerm, Seconds>,
    /// A micro-batch on each stage.
    pub stages: Vec<StageTime>,
}

impl<T: Copy> PerBlock<T> {
    /// Blocks of a stage with their counts; absent blocks are left out.
    pub fn parts(&self, content: &StageContent) -> impl Iterator<Item = (u64, T)> {
        let ends = [(u64::from(content.embedding), self.embedding), (u64::from(content.head), self.head)];
        let kept = std::array::from_fn(|run| (content.layers[run] - content.recomputed[run], self.layers[run]));
        let kept: [(u64, T); MAX_LAYER_RUNS] = kept;
        let recomputed = content.recomputed.into_iter().zip(self.recomputed);
        kept.into_iter().chain(recomputed).chain(ends).filter(|(count, _)| *count > 0)
    }
}

/// Costs all blocks of a model for a split and a micro-batch.
pub fn costed_blocks(scenario: Scenario, split: TensorSplit, micro_batch: u64) -> PerBlock<CostedBlock> {
    let costed = |block: &Block| {
        let structure = block_structure(block, scenario.machine);
        costed_block(scenario, block, &structure, split, micro_batch)
    };
    costed_blocks_by(scenario.graph, costed)
}

/// The blocks of a model as `costed` gives them.
pub fn costed_blocks_by(graph: &ModelGraph, mut costed: impl FnMut(&Block) -> CostedBlock) -> PerBlock<CostedBlock> {
    let mut blocks = PerBlock::default();
    for block in &graph.blocks {
        match block.role {
            BlockRole::Embedding => blocks.embedding = costed(block),
            BlockRole::Layers(run) => blocks.layers[run] = costed(block),
            BlockRole::Head => blocks.head = costed(block),
        }
    }
    blocks.recomputed = blocks.layers;
    blocks
}

/// Costs one block, whose structure is known, for a split and a micro-batch.
pub fn costed_block(
    scenario: Scenario,
    block: &Block,
    structure: &BlockStructure,
    split: TensorSplit,
    micro_batch: u64,
) -> CostedBlock {
    let Scenario { model, workload, machine, .. } = scenario;
    let dtype = model.dtype;
    let degree = split.tensor_parallel;
    let per_domain = machine.fast_domain_gpus().min(degree);
    let tensor_group = Placement { size: degree, per_domain, domains: degree.div_ceil(per_domain) };
    let extents = Extents { micro_batch, sequence_length: workload.sequence_length };
    let at = |axis, size, stride| place(&GroupFamily { axis, size, stride, count: 1 }, machine.fast_domain_gpus());
    let context_group = at(Axis::Context, split.context_parallel, degree);
    let expert_group = at(Axis::Data, split.expert_parallel, split.expert_tensor_parallel);
    let case = BlockCase { split, tensor_group, context_group, expert_group, extents, dtype, machine, structure };
    CostedBlock {
        cost: block_cost(block, case),
        parameters: split.local_block_parameters(block),
        expert_parameters: split.local_expert_parameters(block),
        tied_parameters: split.local_tied_parameters(block),
        tensors: block.parameters().count() as u64,
    }
}

/// Time of a micro-batch on each block under a strategy (whose stage split is not looked at).
pub fn block_times(scenario: Scenario, blocks: &PerBlock<CostedBlock>, strategy: &Strategy) -> PerBlock<BlockTime> {
    let (kept, recomputed) = match strategy.recompute {
        Recompute::Partial => (Recompute::None, Recompute::Full),
        all => (all, all),
    };
    let bytes = gathered_bytes(scenario);
    let layers = |recompute| blocks.layers.map(|block| block_time(scenario, block, strategy, recompute, bytes.layers));
    let ends = |block: CostedBlock| {
        let mut time = block_time(scenario, block, strategy, Recompute::None, bytes.ends);
        // Logits' gradients are too large to be held: the head's weights are not left for later.
        time.pass.weights = Seconds(0.0);
        time
    };
    let of_kept = layers(kept);
    PerBlock {
        embedding: ends(blocks.embedding),
        layers: of_kept,
        recomputed: if kept == recomputed { of_kept } else { layers(recomputed) },
        head: ends(blocks.head),
    }
}

/// Bytes of a weight as ZeRO-3 gathers it.
#[derive(Clone, Copy)]
struct GatheredBytes {
    layers: u64,
    /// Of the embedding and the head, whose products are in the model's format.
    ends: u64,
}

fn gathered_bytes(scenario: Scenario) -> GatheredBytes {
    let machine = scenario.machine;
    let whole = state_bytes(machine, scenario.model.dtype).weight;
    let low = machine.stack.kernels.low_precision.as_ref().filter(|_| machine.matmul_format != MatmulFormat::Model);
    GatheredBytes { layers: if low.is_some_and(|low| low.gathers_converted) { 1 } else { whole }, ends: whole }
}

fn block_time(
    scenario: Scenario,
    block: CostedBlock,
    strategy: &Strategy,
    recompute: Recompute,
    gathered: u64,
) -> BlockTime {
    let cost = block.cost;
    let (recomputation, repeated_communication) = match recompute {
        Recompute::None => (Seconds(0.0), Seconds(0.0)),
        Recompute::Selective => (cost.selected, Seconds(0.0)),
        Recompute::Full | Recompute::Partial => (cost.repeated, cost.repeated_communication),
    };
    let repetitions = match recompute {
        Recompute::None | Recompute::Selective => 0.0,
        Recompute::Full | Recompute::Partial => 1.0,
    };
    let accumulation = gradient_accumulation_time(scenario, block.parameters, strategy);
    let hidden = cost.expert_exchange * hidden_exchange(scenario.machine, strategy);
    let exchange = cost.exchange - hidden;
    let exchange_backward = cost.exchange_backward - hidden + exchange * repetitions;
    let forward = cost.forward + cost.forward_communication + exchange;
    let backward = cost.backward
        + accumulation
        + cost.backward_communication
        + recomputation
        + repeated_communication
        + exchange_backward;
    let [waits, waits_back] = host_waits(scenario, &cost, strategy, recompute, [forward, backward]);
    let (forward, backward) = (forward + waits, backward + waits_back);
    let [data_forward, data_backward] = sharded_state_time(scenario, block, strategy, [forward, backward], gathered);
    BlockTime {
        compute: cost.forward + cost.backward + accumulation + waits + waits_back,
        recomputation,
        tensor: cost.forward_communication + cost.backward_communication + repeated_communication,
        exchange: exchange + exchange_backward,
        data: data_forward + data_backward,
        pass: StageTime {
            forward: forward + data_forward,
            backward: backward + data_backward,
            weights: cost.weight_gradients + accumulation,
        },
    }
}

/// Share of the expert exchange that interleaved stages hide (NVIDIA/Megatron-LM, overlap_moe_expert_parallel_comm).
fn hidden_exchange(machine: &Machine, strategy: &Strategy) -> f64 {
    let experts = machine.stack.kernels.experts.as_ref().filter(|_| strategy.virtual_stages > 1);
    experts.map_or(0.0, |experts| experts.exchange_hidden.value)
}

/// Time by which the host delays a block: it issues the kernels one by one, and runs ahead in some parts of the block
/// and behind in others, so that the longer of both times is rounded: a norm of order four.
fn host_waits(
    scenario: Scenario,
    cost: &BlockCost,
    strategy: &Strategy,
    recompute: Recompute,
    passes: [Seconds; 2],
) -> [Seconds; 2] {
    let Some(each) = &scenario.machine.stack.kernels.host_launch else { return [Seconds(0.0); 2] };
    let collectives = u64::from(strategy.tensor_parallel > 1) * TENSOR_COLLECTIVES;
    let forward = cost.forward_kernels + collectives;
    let again = if recompute == Recompute::Full { forward } else { 0 };
    let backward = cost.backward_kernels + collectives + again;
    let wait = |kernels: u64, pass: Seconds| {
        let issue = each.value.0 * kernels as f64;
        let fourth = |time: f64| (time * time) * (time * time);
        Seconds((fourth(issue) + fourth(pass.0)).sqrt().sqrt() - pass.0)
    };
    [wait(forward, passes[0]), wait(backward, passes[1])]
}

/// Time to add a micro-batch's weight gradients to the accumulated ones.
///
/// A fused kernel reads and writes the accumulator; otherwise the gradient is written and read once more
/// in the model's format. One micro-batch needs no addition.
fn gradient_accumulation_time(scenario: Scenario, parameters: u64, strategy: &Strategy) -> Seconds {
    if strategy.num_micro_batches() <= 1 {
        return Seconds(0.0);
    }
    let machine = scenario.machine;
    let bytes = state_bytes(machine, scenario.model.dtype);
    let extra = if machine.stack.kernels.fused_gradient_accumulation { 0 } else { 2 * bytes.weight };
    Bytes(parameters * (2 * bytes.gradient + extra)) / machine.streaming_bandwidth()
}

/// Data-axis collectives of every micro-batch that computation does not cover, forward and backward.
///
/// ZeRO-3 gathers a block's weights before each pass and reduce-scatters its gradients after; ZeRO-2
/// reduce-scatters only (arXiv 1910.02054, section 7). What software does once a step belongs to the tail.
fn sharded_state_time(
    scenario: Scenario,
    block: CostedBlock,
    strategy: &Strategy,
    passes: [Seconds; 2],
    gathered: u64,
) -> [Seconds; 2] {
    if strategy.zero_stage < ZeroStage::Gradients || shards_of(strategy).dense == 1 || block.parameters == 0 {
        return [Seconds(0.0); 2];
    }
    let machine = scenario.machine;
    let kept = kept_whole(strategy, machine);
    let bytes = state_bytes(machine, scenario.model.dtype);
    let held = HeldParameters { all: block.parameters, experts: block.expert_parameters };
    let groups = state_groups(strategy, machine).shards;
    let time = |kind, per_parameter| held.collective_time(kind, per_parameter, groups, machine);
    let [_, waiting] = machine.waiting();
    let (scatter, scatters) = match kept.gradients {
        true => (Seconds(0.0), 0.0),
        false => (time(CollectiveKind::ReduceScatter, bytes.gradient), 1.0),
    };
    let (gather, gathers) = match strategy.zero_stage {
        ZeroStage::Parameters if !kept.weights => (time(CollectiveKind::AllGather, gathered), 1.0),
        _ => (Seconds(0.0), 0.0),
    };
    let covered = machine.stack.overlap.parameter_gather.value;
    let exposed = |communication: Seconds, pass: Seconds| exposed(communication, pass * covered, machine);
    // Each tensor has a collective of its own, from or into a buffer of which the rank's part is copied.
    let ranks = shards_of(strategy).dense;
    let part = |bytes: u64| machine.copy_time(Bytes(block.parameters * bytes / ranks));
    let each = |bytes: u64| waiting + machine.further(block.tensors) + part(bytes);
    let copied = |bytes: u64| match machine.stack.overlap.copies_gathered {
        true => Bytes(block.parameters * bytes) / machine.streaming_bandwidth(),
        false => Seconds(0.0),
    };
    let gathering = (each(bytes.weight) + copied(2 * gathered)) * gathers;
    let scattering = (each(bytes.gradient) + copied(bytes.weight + bytes.gradient)) * scatters;
    [exposed(gather, passes[0]) + gathering, exposed(gather + scatter, passes[1]) + gathering + scattering]
}

/// Time of a transfer of activations between neighbouring stages.
///
/// With sequence parallelism, or a stack that sends slices, each tensor rank sends its part; slices of a
/// replicated activation are gathered on arrival.
pub fn transfer_time(scenario: Scenario, strategy: &Strategy, blocks: &PerBlock<CostedBlock>) -> Seconds {
    if strategy.pipeline_parallel == 1 {
        return Seconds(0.0);
    }
    let machine = scenario.machine;
    let tensor = strategy.tensor_parallel;
    let whole = blocks.layers[0].cost.input;
    let inside = stages_share_domain(strategy, machine);
    let sliced = machine.stack.overlap.sliced_sends && tensor > 1 && !strategy.sequence_parallel;
    let [waiting, _] = machine.waiting();
    if !sliced {
        return waiting + send_time(whole, inside, machine);
    }
    let group = place(&build_mesh(strategy).groups(Axis::Tensor), machine.fast_domain_gpus());
    let gather = collective_time(CollectiveKind::AllGather, whole, group, machine);
    waiting + send_time(whole.scale(1.0 / tensor as f64), inside, machine) + gather
}

/// Whether neighbouring stages have ranks in one fast domain.
///
/// With data outermost only where a domain holds whole replicas: else some stages send across its border, and the others
/// wait for them.
pub(super) fn stages_share_domain(strategy: &Strategy, machine: &Machine) -> bool {
    let domain = machine.fast_domain_gpus();
    match strategy.mesh_order {
        MeshOrder::PipelineOutermost => strategy.world_size() / strategy.pipeline_parallel < domain,
        MeshOrder::DataOutermost => {
            strategy.world_size() <= domain || domain.is_multiple_of(strategy.world_size() / strategy.data_parallel)
        }
    }
}

/// Time of a micro-batch on a part of the model, transfers that block it included.
pub fn stage_time(
    content: &StageContent,
    times: &PerBlock<BlockTime>,
    position: StagePosition,
    transfer: Seconds,
    strategy: &Strategy,
    machine: &Machine,
) -> StageTime {
    let blocking = blocking(transfer, strategy, machine);
    let overhead = machine.stack.overhead.micro_batch.value * (1.0 / strategy.virtual_stages as f64);
    let mut stage = StageTime { forward: overhead, ..StageTime::default() };
    for (count, block) in times.parts(content) {
        stage.forward += block.pass.forward * count as f64;
        stage.backward += block.pass.backward * count as f64;
        stage.weights += block.pass.weights * count as f64;
    }
    if !position.first {
        stage.forward += blocking;
    }
    if !position.last {
        stage.backward += blocking;
    }
    stage
}

/// The part of a transfer during which a stage waits. Interleaved parts send while the stage computes another
/// (Megatron-LM, `overlap_p2p_comm`, which needs interleaving).
fn blocking(transfer: Seconds, strategy: &Strategy, machine: &Machine) -> Seconds {
    let beside = machine.stack.overlap.pipeline_sends || strategy.schedule == ScheduleKind::Interleaved;
    if beside { Seconds(0.0) } else { transfer }
}

/// Whether a part of the model has no neighbour on another stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagePosition {
    /// It receives no activations.
    pub first: bool,
    /// It receives no gradients.
    pub last: bool,
}

impl StagePosition {
    /// That of a stage's part.
    pub fn of(pipeline: Pipeline, stage: u64, part: u64) -> StagePosition {
        let position = pipeline.position(stage, part);
        let here = |neighbour: u64| pipeline.stage_and_part(neighbour).0 == stage;
        let end = pipeline.num_parts() - 1;
        StagePosition { first: position == 0 || here(position - 1), last: position == end || here(position + 1) }
    }
}

/// Times of a micro-batch on each part of the model.
fn part_times(
    scenario: Scenario,
    times: &PerBlock<BlockTime>,
    strategy: &Strategy,
    contents: &[StageContent],
    transfer: Seconds,
) -> Vec<StageTime> {
    let shape = Pipeline::of(strategy);
    // Most parts are like the one before.
    let mut before = None;
    let at = |(content, index): (&StageContent, u64)| {
        let position = StagePosition::of(shape, index / shape.virtual_stages, index % shape.virtual_stages);
        let time = match before {
            Some((other, there, time)) if (other, there) == (*content, position) => time,
            _ => stage_time(content, times, position, transfer, strategy, scenario.machine),
        };
        before = Some((*content, position, time));
        time
    };
    contents.iter().zip(0..).map(at).collect()
}

/// Predicts a step for a strategy whose stages hold `contents`: parts of the model, those of the first stage first.
pub fn predict_step(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    times: &PerBlock<BlockTime>,
    strategy: &Strategy,
    contents: &[StageContent],
) -> StepPrediction {
    predict_step_by(scenario, blocks, times, strategy, contents, pipeline_time)
}

/// [`predict_step`] with the times of pipelines as `pipeline_time` gives them: those of that function, which may be
/// remembered.
pub fn predict_step_by(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    times: &PerBlock<BlockTime>,
    strategy: &Strategy,
    contents: &[StageContent],
    pipeline_time: impl FnOnce(Pipeline, &[StageTime], Seconds) -> Seconds,
) -> StepPrediction {
    let machine = scenario.machine;
    let shape = Pipeline::of(strategy);
    let transfer = transfer_time(scenario, strategy, blocks);
    let position = |index: usize| {
        let (stage, part) = (index as u64 / shape.virtual_stages, index as u64 % shape.virtual_stages);
        StagePosition::of(shape, stage, part)
    };
    let parts = part_times(scenario, times, strategy, contents, transfer);
    let stages = stage_totals(shape, &parts);
    let micro_batches = shape.micro_batches;
    let blocked = blocking(transfer, strategy, machine);
    let pipeline = pipeline_time(shape, &parts, transfer - blocked);
    let on_stage = |stage: usize| &contents[stage * shape.virtual_stages as usize..][..shape.virtual_stages as usize];
    let tail = longest_tail(scenario, strategy, blocks, contents, &stages);

    let slowest = (0..stages.len()).max_by(|a, b| stages[*a].total().0.total_cmp(&stages[*b].total().0)).unwrap_or(0);
    let per_step = |part: fn(BlockTime) -> Seconds| -> Seconds {
        let blocks = on_stage(slowest).iter().flat_map(|content| times.parts(content));
        blocks.map(|(layers, block)| part(block) * (layers * micro_batches) as f64).sum()
    };
    let busy = stages[slowest].total() * micro_batches as f64;
    let overhead = machine.stack.overhead.micro_batch.value * micro_batches as f64;
    let data = per_step(|block| block.data);
    let received = |index: usize| u64::from(!position(index).first) + u64::from(!position(index).last);
    let first_part = slowest * shape.virtual_stages as usize;
    let transfers: u64 = (first_part..first_part + shape.virtual_stages as usize).map(received).sum();
    let blocked = blocked * (transfers * micro_batches) as f64;
    let mut terms = BTreeMap::from([
        (TimeTerm::Compute, per_step(|block| block.compute)),
        (TimeTerm::Recomputation, per_step(|block| block.recomputation)),
        (TimeTerm::TensorCommunication, per_step(|block| block.tensor)),
        (TimeTerm::PipelineCommunication, blocked),
        (TimeTerm::Bubble, Seconds((pipeline - busy).0.max(0.0))),
        (TimeTerm::DataCommunication, data + tail.data),
        (TimeTerm::Optimizer, tail.optimizer),
        (TimeTerm::Overhead, overhead + machine.stack.overhead.step.value),
    ]);
    if strategy.context_parallel > 1 || strategy.expert_parallel > 1 {
        terms.insert(TimeTerm::Exchange, per_step(|block| block.exchange));
    }
    StepPrediction { step: terms.values().copied().sum(), terms, stages }
}
