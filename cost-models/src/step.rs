//! Time of a training step: blocks, stages, pipeline, data axis and optimizer put together.

use std::collections::BTreeMap;

use ir::graph::{Block, BlockRole, Extents, ModelGraph};
use ir::mesh::{Axis, GroupFamily, build_mesh};
use ir::model::{MAX_LAYER_RUNS, ModelSpec, Workload};
use ir::plan::{Term, TimeTerm};
use ir::provenance::Provenance;
use ir::sharding::TensorSplit;
use ir::strategy::{Recompute, Strategy, ZeroStage};
use ir::units::{Bytes, Seconds};

use crate::block::{BlockCase, BlockCost, block_cost};
use crate::collective::{CollectiveKind, Placement, collective_time, place, send_time};
use crate::machine::Machine;
use crate::memory::{Shards, StageLoad, StageMemory, stage_memory, state_bytes};
use crate::pipeline::{StageTime, interleaved_time, kept_micro_batches, pipeline_time};

/// Order of the norm that stands for the longer of the host's and the kernels' time.
const SHARPNESS: f64 = 4.0;
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
    /// The head's.
    pub head: T,
}

/// What a stage holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageContent {
    /// The embedding.
    pub embedding: bool,
    /// Layers of each run.
    pub layers: [u64; MAX_LAYER_RUNS],
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
        content.layers.into_iter().zip(self.layers).chain(ends).filter(|(count, _)| *count > 0)
    }
}

/// Costs all blocks of a model for a split and a micro-batch.
pub fn costed_blocks(scenario: Scenario, split: TensorSplit, micro_batch: u64) -> PerBlock<CostedBlock> {
    let Scenario { model, graph, workload, machine } = scenario;
    let degree = split.tensor_parallel;
    let per_domain = machine.fast_domain_gpus().min(degree);
    let tensor_group = Placement { size: degree, per_domain, domains: degree.div_ceil(per_domain) };
    let extents = Extents { micro_batch, sequence_length: workload.sequence_length };
    let family = |axis, size| GroupFamily { axis, size, stride: degree, count: 1 };
    let at = |axis, size| place(&family(axis, size), machine.fast_domain_gpus());
    let context_group = at(Axis::Context, split.context_parallel);
    let expert_group = at(Axis::Data, split.expert_parallel);
    let case = BlockCase { split, tensor_group, context_group, expert_group, extents, dtype: model.dtype, machine };
    let costed = |block: &Block| CostedBlock {
        cost: block_cost(block, case),
        parameters: split.local_block_parameters(block),
        expert_parameters: split.local_expert_parameters(block),
        tied_parameters: split.local_tied_parameters(block),
        tensors: block.parameters().count() as u64,
    };
    let mut blocks = PerBlock::default();
    for block in &graph.blocks {
        match block.role {
            BlockRole::Embedding => blocks.embedding = costed(block),
            BlockRole::Layers(run) => blocks.layers[run] = costed(block),
            BlockRole::Head => blocks.head = costed(block),
        }
    }
    blocks
}

/// Time of a micro-batch on each block under a strategy (whose stage split is not looked at).
pub fn block_times(scenario: Scenario, blocks: &PerBlock<CostedBlock>, strategy: &Strategy) -> PerBlock<BlockTime> {
    let layer = |block: CostedBlock| block_time(scenario, block, strategy, strategy.recompute);
    let ends = |block: CostedBlock| block_time(scenario, block, strategy, Recompute::None);
    PerBlock { embedding: ends(blocks.embedding), layers: blocks.layers.map(layer), head: ends(blocks.head) }
}

fn block_time(scenario: Scenario, block: CostedBlock, strategy: &Strategy, recompute: Recompute) -> BlockTime {
    let cost = block.cost;
    let (recomputation, repeated_communication) = match recompute {
        Recompute::None => (Seconds(0.0), Seconds(0.0)),
        Recompute::Selective if scenario.machine.stack.kernels.flash_attention => (Seconds(0.0), Seconds(0.0)),
        Recompute::Selective => (cost.attention_core, Seconds(0.0)),
        Recompute::Full => (cost.repeated, cost.repeated_communication),
    };
    let exchanges = match recompute {
        Recompute::None | Recompute::Selective => 2.0,
        Recompute::Full => 3.0,
    };
    let accumulation = gradient_accumulation_time(scenario, block.parameters, strategy);
    let forward = cost.forward + cost.forward_communication + cost.exchange;
    let backward = cost.backward
        + accumulation
        + cost.backward_communication
        + recomputation
        + repeated_communication
        + cost.exchange * (exchanges - 1.0);
    let [waits, waits_back] = host_waits(scenario, &cost, strategy, recompute, [forward, backward]);
    let (forward, backward) = (forward + waits, backward + waits_back);
    let [data_forward, data_backward] = sharded_state_time(scenario, block, strategy, [forward, backward]);
    BlockTime {
        compute: cost.forward + cost.backward + accumulation + waits + waits_back,
        recomputation,
        tensor: cost.forward_communication + cost.backward_communication + repeated_communication,
        exchange: cost.exchange * exchanges,
        data: data_forward + data_backward,
        pass: StageTime { forward: forward + data_forward, backward: backward + data_backward },
    }
}

/// Time by which the host delays a block: it issues the kernels one by one, and runs ahead in some parts of the block
/// and behind in others, so that the longer of both times is rounded (a norm of order [`SHARPNESS`]).
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
        Seconds((issue.powf(SHARPNESS) + pass.0.powf(SHARPNESS)).powf(1.0 / SHARPNESS) - pass.0)
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
/// reduce-scatters only (arXiv 1910.02054, section 7).
fn sharded_state_time(
    scenario: Scenario,
    block: CostedBlock,
    strategy: &Strategy,
    passes: [Seconds; 2],
) -> [Seconds; 2] {
    let ranks = strategy.data_parallel * strategy.context_parallel;
    if strategy.zero_stage < ZeroStage::Gradients || ranks == 1 || block.parameters == 0 {
        return [Seconds(0.0); 2];
    }
    let machine = scenario.machine;
    let bytes = state_bytes(machine, scenario.model.dtype);
    let held = HeldParameters { all: block.parameters, experts: block.expert_parameters };
    let time = |kind, per_parameter| held.collective_time(kind, per_parameter, strategy, machine);
    let [_, waiting] = machine.waiting();
    let scatter = time(CollectiveKind::ReduceScatter, bytes.gradient);
    let (gather, gathers) = match strategy.zero_stage {
        ZeroStage::Parameters => (time(CollectiveKind::AllGather, bytes.weight), 1.0),
        ZeroStage::None | ZeroStage::OptimizerState | ZeroStage::Gradients => (Seconds(0.0), 0.0),
    };
    let covered = machine.stack.overlap.parameter_gather.value;
    let exposed = |communication: Seconds, pass: Seconds| exposed(communication, pass * covered, machine);
    // Each tensor has a collective of its own, from or into a buffer of which the rank's part is copied.
    let part = |bytes: u64| machine.copy_time(Bytes(block.parameters * bytes / ranks));
    let each = |bytes: u64| waiting + machine.further(block.tensors) + part(bytes);
    let [gathering, scattering] = [each(bytes.weight) * gathers, each(bytes.gradient)];
    [exposed(gather, passes[0]) + gathering, exposed(gather + scatter, passes[1]) + gathering + scattering]
}

/// What remains of communication that computation can cover for a time: the rest, and at least the part that
/// takes the processor from the computation.
fn exposed(communication: Seconds, covered: Seconds, machine: &Machine) -> Seconds {
    let occupied = machine.stack.overlap.occupancy.as_ref().map_or(0.0, |share| share.value);
    Seconds((communication.0 - covered.0).max(communication.0 * occupied))
}

/// Parameter elements that a rank holds.
#[derive(Clone, Copy)]
struct HeldParameters {
    all: u64,
    experts: u64,
}

impl HeldParameters {
    /// Time of a collective of the data axis over bytes of each parameter: those of routed experts have fewer copies.
    fn collective_time(
        self,
        kind: CollectiveKind,
        per_parameter: u64,
        strategy: &Strategy,
        machine: &Machine,
    ) -> Seconds {
        let parts = [self.all - self.experts, self.experts].into_iter().zip(gradient_placements(strategy, machine));
        let held = parts.filter(|(parameters, _)| *parameters > 0);
        held.map(|(parameters, group)| collective_time(kind, Bytes(parameters * per_parameter), group, machine)).sum()
    }
}

/// Where the ranks lie that sum the gradients of parameters outside experts, and those of routed experts.
fn gradient_placements(strategy: &Strategy, machine: &Machine) -> [Placement; 2] {
    let replicas = strategy.data_parallel * strategy.context_parallel;
    let tensor = strategy.tensor_parallel;
    let at = |size, stride| {
        let family = GroupFamily { axis: Axis::Data, size, stride, count: 1 };
        place(&family, machine.fast_domain_gpus())
    };
    let experts = strategy.expert_parallel;
    [at(replicas, tensor), at((replicas / experts).max(1), tensor * experts)]
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
    let stage_ranks = strategy.data_parallel * strategy.context_parallel * tensor;
    let sliced = machine.stack.overlap.sliced_sends && tensor > 1 && !strategy.sequence_parallel;
    let [waiting, _] = machine.waiting();
    if !sliced {
        return waiting + send_time(whole, stage_ranks, machine);
    }
    let group = place(&build_mesh(strategy).groups(Axis::Tensor), machine.fast_domain_gpus());
    let gather = collective_time(CollectiveKind::AllGather, whole, group, machine);
    waiting + send_time(whole.scale(1.0 / tensor as f64), stage_ranks, machine) + gather
}

/// Time of a micro-batch on a stage, transfers that block it included.
pub fn stage_time(
    content: &StageContent,
    times: &PerBlock<BlockTime>,
    position: StagePosition,
    transfer: Seconds,
    machine: &Machine,
) -> StageTime {
    let blocking = blocking(transfer, machine);
    let mut stage = StageTime { forward: machine.stack.overhead.micro_batch.value, backward: Seconds(0.0) };
    for (count, block) in times.parts(content) {
        stage.forward += block.pass.forward * count as f64;
        stage.backward += block.pass.backward * count as f64;
    }
    if !position.first {
        stage.forward += blocking;
    }
    if !position.last {
        stage.backward += blocking;
    }
    stage
}

/// The part of a transfer during which a stage waits.
fn blocking(transfer: Seconds, machine: &Machine) -> Seconds {
    if machine.stack.overlap.pipeline_sends { Seconds(0.0) } else { transfer }
}

/// Whether a stage is at an end of the pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagePosition {
    /// The first stage receives no activations.
    pub first: bool,
    /// The last stage receives no gradients.
    pub last: bool,
}

impl StagePosition {
    /// Position of stage `index` of `count`.
    pub fn of(index: u64, count: u64) -> StagePosition {
        StagePosition { first: index == 0, last: index + 1 == count }
    }
}

/// Memory of each rank of a stage.
pub fn stage_memory_of(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    strategy: &Strategy,
    content: &StageContent,
    stage: u64,
) -> StageMemory {
    let load = stage_load(blocks, strategy, content, stage);
    stage_memory(load, strategy.zero_stage, shards_of(strategy), scenario.model.dtype, scenario.machine)
}

/// Ranks over which ZeRO shards.
fn shards_of(strategy: &Strategy) -> Shards {
    let dense = strategy.shard_group * strategy.context_parallel;
    Shards { dense, expert: (dense / strategy.expert_parallel).max(1) }
}

/// What a stage puts on each of its ranks.
pub fn stage_load(
    blocks: &PerBlock<CostedBlock>,
    strategy: &Strategy,
    content: &StageContent,
    stage: u64,
) -> StageLoad {
    let num_stages = strategy.pipeline_parallel;
    let in_flight =
        kept_micro_batches(strategy.schedule, stage, num_stages, strategy.virtual_stages, strategy.num_micro_batches());
    let mut load = StageLoad { in_flight, ..StageLoad::default() };
    for (index, count) in content.layers.iter().enumerate().filter(|(_, count)| **count > 0) {
        let block = blocks.layers[index];
        let (kept, temporary) = kept_and_temporary(&block.cost, strategy.recompute);
        add_block(&mut load, block, *count, kept, temporary);
    }
    for (held, block) in [(content.embedding, blocks.embedding), (content.head, blocks.head)] {
        if held {
            add_block(&mut load, block, 1, block.cost.kept, block.cost.workspace);
        }
    }
    if content.embedding && content.head {
        load.parameters -= blocks.head.tied_parameters;
    }
    load
}

fn add_block(load: &mut StageLoad, block: CostedBlock, count: u64, kept: Bytes, temporary: Bytes) {
    load.parameters += block.parameters * count;
    load.expert_parameters += block.expert_parameters * count;
    load.largest_block = load.largest_block.max(block.parameters);
    load.kept += kept * count;
    load.workspace = load.workspace.max(temporary);
}

/// Bytes kept from forward, and alive for a moment in backward, by recomputation.
fn kept_and_temporary(cost: &BlockCost, recompute: Recompute) -> (Bytes, Bytes) {
    match recompute {
        Recompute::None => (cost.kept, cost.workspace),
        Recompute::Selective => (cost.kept - cost.kept_by_core, cost.workspace + cost.kept_by_core),
        Recompute::Full => (cost.input, cost.workspace + cost.kept),
    }
}

/// Time after the last backward pass: gradient reduction, optimizer, parameter gather.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Tail {
    data: Seconds,
    optimizer: Seconds,
}

impl Tail {
    fn total(self) -> Seconds {
        self.data + self.optimizer
    }
}

fn stage_tail(
    scenario: Scenario,
    strategy: &Strategy,
    blocks: &PerBlock<CostedBlock>,
    content: &StageContent,
    pass: StageTime,
) -> Tail {
    let machine = scenario.machine;
    let load = stage_load(blocks, strategy, content, 0);
    let bytes = state_bytes(machine, scenario.model.dtype);
    let held = HeldParameters { all: load.parameters, experts: load.expert_parameters };
    let time = |kind, per_parameter| held.collective_time(kind, per_parameter, strategy, machine);
    let covered = pass.backward * machine.stack.overlap.gradient_reduction.value;
    let further = machine.further(blocks.parts(content).map(|(count, block)| count * block.tensors).sum());
    let waiting = if strategy.data_parallel > 1 { machine.waiting().map(|t| t + further) } else { [Seconds(0.0); 2] };
    let exposed = |reduction: Seconds| waiting[1] + exposed(reduction, covered, machine);
    let gather = || waiting[0] + time(CollectiveKind::AllGather, bytes.weight);
    let all_reduce = machine.stack.overlap.zero_one_all_reduces;
    let mut data = match strategy.zero_stage {
        ZeroStage::None => exposed(time(CollectiveKind::AllReduce, bytes.gradient)),
        ZeroStage::OptimizerState => {
            let kind = if all_reduce { CollectiveKind::AllReduce } else { CollectiveKind::ReduceScatter };
            exposed(time(kind, bytes.gradient)) + gather()
        }
        ZeroStage::Gradients => gather(),
        ZeroStage::Parameters => Seconds(0.0),
    };
    data += tied_reduction_time(scenario, strategy, blocks, content);
    let owned = match strategy.zero_stage {
        ZeroStage::None => load.parameters,
        ZeroStage::OptimizerState | ZeroStage::Gradients | ZeroStage::Parameters => {
            let Shards { dense, expert } = shards_of(strategy);
            (load.parameters - load.expert_parameters).div_ceil(dense) + load.expert_parameters.div_ceil(expert)
        }
    };
    Tail { data, optimizer: optimizer_time(scenario, owned) }
}

/// Time to sum the two copies of a tied embedding over the first and the last stage.
fn tied_reduction_time(
    scenario: Scenario,
    strategy: &Strategy,
    blocks: &PerBlock<CostedBlock>,
    content: &StageContent,
) -> Seconds {
    let ends = content.embedding != content.head;
    if !ends || blocks.head.tied_parameters == 0 {
        return Seconds(0.0);
    }
    let machine = scenario.machine;
    let bytes = state_bytes(machine, scenario.model.dtype).gradient * blocks.head.tied_parameters;
    let distance = strategy.world_size() - strategy.world_size() / strategy.pipeline_parallel;
    let inside = distance < machine.fast_domain_gpus();
    let pair = Placement { size: 2, per_domain: if inside { 2 } else { 1 }, domains: if inside { 1 } else { 2 } };
    collective_time(CollectiveKind::AllReduce, Bytes(bytes), pair, machine)
}

/// Time of the optimizer over the parameters that a rank owns: state read and written, gradient read for
/// the norm and for the update, weight written; bound by memory bandwidth.
fn optimizer_time(scenario: Scenario, owned: u64) -> Seconds {
    let bytes = state_bytes(scenario.machine, scenario.model.dtype);
    let per_parameter = 2 * bytes.optimizer + 2 * bytes.gradient + bytes.weight;
    Bytes(owned * per_parameter) / scenario.machine.streaming_bandwidth()
}

/// A time that no stage split of the strategy can beat.
///
/// Let W be the work of one micro-batch over all stages and x the last stage's part. The last stage
/// waits for one pass over the others: T ≥ W + (m − 1) x. The slowest of the others has at least their
/// mean: T ≥ m (W − x) / (p − 1). The bound is the least that both allow for any x.
pub fn step_lower_bound(
    scenario: Scenario,
    times: &PerBlock<BlockTime>,
    layers: [u64; MAX_LAYER_RUNS],
    strategy: &Strategy,
) -> Seconds {
    let whole = StageContent { embedding: true, layers, head: true };
    let overhead = &scenario.machine.stack.overhead;
    let stages = strategy.pipeline_parallel as f64;
    let blocks: Seconds = times.parts(&whole).map(|(count, block)| block.pass.total() * count as f64).sum();
    let work = blocks + overhead.micro_batch.value * stages;
    let m = strategy.num_micro_batches() as f64;
    let pipeline = match strategy.pipeline_parallel {
        1 => work * m,
        _ => {
            let others = m / (stages - 1.0);
            let last = work * ((others - 1.0) / (m - 1.0 + others)).max(0.0);
            work + last * (m - 1.0)
        }
    };
    pipeline + overhead.step.value
}

/// Predicts a step for a strategy whose stages hold `contents`.
pub fn predict_step(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    times: &PerBlock<BlockTime>,
    strategy: &Strategy,
    contents: &[StageContent],
) -> StepPrediction {
    let machine = scenario.machine;
    let count = contents.len() as u64;
    let transfer = transfer_time(scenario, strategy, blocks);
    let position = |index: usize| StagePosition::of(index as u64, count);
    let at = |(index, content)| stage_time(content, times, position(index), transfer, machine);
    let stages: Vec<StageTime> = contents.iter().enumerate().map(at).collect();
    let micro_batches = strategy.num_micro_batches();
    let edge = transfer - blocking(transfer, machine);
    let pipeline = match strategy.virtual_stages {
        1 => pipeline_time(strategy.schedule, &stages, micro_batches, edge),
        parts => interleaved_time(&stages, micro_batches, parts, edge),
    };
    let tails =
        contents.iter().zip(&stages).map(|(content, pass)| stage_tail(scenario, strategy, blocks, content, *pass));
    let tail = tails.max_by(|a, b| a.total().0.total_cmp(&b.total().0)).unwrap_or_default();

    let slowest = (0..stages.len()).max_by(|a, b| stages[*a].total().0.total_cmp(&stages[*b].total().0)).unwrap_or(0);
    let per_step = |part: fn(BlockTime) -> Seconds| -> Seconds {
        let parts = times.parts(&contents[slowest]);
        parts.map(|(layers, block)| part(block) * (layers * micro_batches) as f64).sum()
    };
    let busy = stages[slowest].total() * micro_batches as f64;
    let overhead = machine.stack.overhead.micro_batch.value * micro_batches as f64;
    let data = per_step(|block| block.data);
    let StagePosition { first, last } = position(slowest);
    let transfers = u64::from(!first) + u64::from(!last);
    let blocked = blocking(transfer, machine) * (transfers * micro_batches) as f64;
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

/// Attaches to each term the weakest origin of the numbers behind it.
pub fn with_provenance(
    scenario: Scenario,
    strategy: &Strategy,
    terms: &BTreeMap<TimeTerm, Seconds>,
) -> BTreeMap<TimeTerm, Term> {
    let machine = scenario.machine;
    let compute = machine.compute_provenance(scenario.model.dtype);
    let link = |inside: bool| if inside { machine.intra_provenance() } else { machine.inter_provenance() };
    let domain = machine.fast_domain_gpus();
    let stage_ranks = strategy.world_size() / strategy.pipeline_parallel;
    let memory = machine.device.memory_bandwidth.provenance.min(machine.device.memory_efficiency.provenance);
    let overhead = machine.stack.overhead.micro_batch.provenance.min(machine.stack.overhead.step.provenance);
    let origin = |term: TimeTerm| -> Provenance {
        match term {
            TimeTerm::Compute | TimeTerm::Recomputation | TimeTerm::Bubble => compute.min(memory),
            TimeTerm::TensorCommunication => link(strategy.tensor_parallel <= domain),
            TimeTerm::Exchange => link(stage_ranks <= domain),
            TimeTerm::PipelineCommunication => link(stage_ranks < domain),
            TimeTerm::DataCommunication => link(gradient_placements(strategy, machine)[0].inside_domain()),
            TimeTerm::Optimizer => memory,
            TimeTerm::Overhead => overhead,
        }
    };
    terms.iter().map(|(term, time)| (*term, Term { time: *time, provenance: origin(*term) })).collect()
}
