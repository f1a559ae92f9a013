//! Time after the last backward pass: gradient reduction, optimizer, parameter gather.

use ir::mesh::MeshOrder;
use ir::strategy::{Strategy, ZeroStage};
use ir::units::{Bytes, Seconds};

use super::data::{HeldParameters, exposed, state_groups};
use super::load::shards_of;
use super::{CostedBlock, PerBlock, Scenario, StageContent, stage_load, stages_share_domain};
use crate::collective::{CollectiveKind, Placement, collective_time};
use crate::memory::state_bytes;
use crate::offload::offloaded_update_time;
use crate::pipeline::StageTime;

/// Time after the last backward pass: gradient reduction, optimizer, parameter gather.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Tail {
    pub(super) data: Seconds,
    pub(super) optimizer: Seconds,
}

impl Tail {
    pub(super) fn total(self) -> Seconds {
        self.data + self.optimizer
    }
}

/// The tail of the stage where it takes longest; `stages` are the times of their passes.
pub(super) fn longest_tail(
    scenario: Scenario,
    strategy: &Strategy,
    blocks: &PerBlock<CostedBlock>,
    contents: &[StageContent],
    stages: &[StageTime],
) -> Tail {
    let of_stages = contents.chunks(strategy.virtual_stages as usize).zip(stages);
    let tails = of_stages.map(|(parts, pass)| stage_tail(scenario, strategy, blocks, parts, *pass));
    tails.max_by(|a, b| a.total().0.total_cmp(&b.total().0)).unwrap_or_default()
}

fn stage_tail(
    scenario: Scenario,
    strategy: &Strategy,
    blocks: &PerBlock<CostedBlock>,
    parts: &[StageContent],
    pass: StageTime,
) -> Tail {
    let load = stage_load(blocks, strategy, parts, 0);
    let held = HeldParameters { all: load.parameters, experts: load.expert_parameters };
    let tensors = parts.iter().flat_map(|part| blocks.parts(part)).map(|(count, block)| count * block.tensors).sum();
    let mut tail = tail_of(scenario, strategy, held, tensors, pass.backward);
    tail.data += tied_reduction_time(scenario, strategy, blocks, parts);
    tail
}

/// Tail of a stage whose ranks hold these parameters in so many tensors, with the last micro-batch's backward pass
/// beside it.
///
/// Gradients are summed within shard groups, and what each rank then owns over its copies in other groups: once a
/// step, while ZeRO-2 and 3 have summed within groups after every micro-batch.
pub(super) fn tail_of(
    scenario: Scenario,
    strategy: &Strategy,
    held: HeldParameters,
    tensors: u64,
    backward: Seconds,
) -> Tail {
    let machine = scenario.machine;
    let bytes = state_bytes(machine, scenario.model.dtype);
    let groups = state_groups(strategy, machine);
    let owned = held.owned(shards_of(strategy));
    let time = |kind, bytes, groups| held.collective_time(kind, bytes, groups, machine);
    let covered = backward * machine.stack.overlap.gradient_reduction.value;
    let waiting = match strategy.data_parallel * strategy.context_parallel > 1 {
        true => machine.waiting().map(|waiting| waiting + machine.further(tensors)),
        false => [Seconds(0.0); 2],
    };
    let exposed = |reduction: Seconds| waiting[1] + exposed(reduction, covered, machine);
    let gather = || waiting[0] + time(CollectiveKind::AllGather, bytes.weight, groups.shards);
    let over_copies = || owned.collective_time(CollectiveKind::AllReduce, bytes.gradient, groups.copies, machine);
    let copied = groups.copies.iter().any(|group| group.size > 1);
    let sum_of_copies = || if copied { exposed(over_copies()) } else { Seconds(0.0) };
    let data = match strategy.zero_stage {
        ZeroStage::None => exposed(time(CollectiveKind::AllReduce, bytes.gradient, groups.whole)),
        ZeroStage::OptimizerState if machine.stack.overlap.zero_one_all_reduces => {
            exposed(time(CollectiveKind::AllReduce, bytes.gradient, groups.whole)) + gather()
        }
        ZeroStage::OptimizerState => {
            let scatter = time(CollectiveKind::ReduceScatter, bytes.gradient, groups.shards);
            exposed(scatter + over_copies()) + gather()
        }
        ZeroStage::Gradients => sum_of_copies() + gather(),
        ZeroStage::Parameters => sum_of_copies(),
    };
    let optimizer = match (strategy.offload_optimizer, &machine.cluster.host) {
        (false, _) => optimizer_time(scenario, owned.all),
        (true, Some(host)) => offloaded_update_time(host, machine.cluster.node_gpus, bytes, owned.all, covered),
        // No way to a host is known.
        (true, None) => Seconds(f64::INFINITY),
    };
    Tail { data, optimizer }
}

/// Time to sum the two copies of a tied embedding over the first and the last stage.
fn tied_reduction_time(
    scenario: Scenario,
    strategy: &Strategy,
    blocks: &PerBlock<CostedBlock>,
    parts: &[StageContent],
) -> Seconds {
    let ends = parts.iter().any(|part| part.embedding) != parts.iter().any(|part| part.head);
    if !ends || blocks.head.tied_parameters == 0 {
        return Seconds(0.0);
    }
    let machine = scenario.machine;
    let bytes = state_bytes(machine, scenario.model.dtype).gradient * blocks.head.tied_parameters;
    let inside = match strategy.mesh_order {
        MeshOrder::PipelineOutermost => {
            strategy.world_size() - strategy.world_size() / strategy.pipeline_parallel < machine.fast_domain_gpus()
        }
        MeshOrder::DataOutermost => stages_share_domain(strategy, machine),
    };
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
