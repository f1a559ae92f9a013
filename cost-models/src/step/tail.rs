//! Time after the last backward pass: gradient reduction, optimizer, parameter gather.

use ir::mesh::MeshOrder;
use ir::strategy::{ScheduleKind, Strategy, ZeroStage};
use ir::units::{Bytes, Seconds};

use super::data::{HeldParameters, exposed, state_groups};
use super::load::{kept_whole, shards_of};
use super::{CostedBlock, PerBlock, Scenario, StageContent, stage_load, stages_share_domain};
use crate::collective::{CollectiveKind, Placement, collective_time};
use crate::machine::Machine;
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
    let mut tail = tail_of(scenario, strategy, held, tensors, [pass.forward, pass.backward]);
    tail.data += tied_reduction_time(scenario, strategy, blocks, parts);
    tail
}

/// Tail of a stage whose ranks hold these parameters in so many tensors, with a micro-batch's forward and backward
/// `passes` beside it: the last one's backward, and the next step's first forward.
///
/// Gradients are summed within shard groups, and what each rank then owns over its copies in other groups: once a
/// step, while ZeRO-2 and 3 have summed within groups after every micro-batch, unless they keep what they sum.
pub(super) fn tail_of(
    scenario: Scenario,
    strategy: &Strategy,
    held: HeldParameters,
    tensors: u64,
    passes: [Seconds; 2],
) -> Tail {
    let machine = scenario.machine;
    let bytes = state_bytes(machine, scenario.model.dtype);
    let groups = state_groups(strategy, machine);
    let owned = held.owned(shards_of(strategy));
    let time = |kind, bytes, groups| held.collective_time(kind, bytes, groups, machine);
    let overlap = &machine.stack.overlap;
    let shares = [overlap.parameter_gather.value, overlap.gradient_reduction.value];
    let [beside, covered] = [0, 1].map(|pass| passes[pass] * (shares[pass] * passes_beside(strategy)));
    let waiting = match strategy.data_parallel * strategy.context_parallel > 1 {
        true => machine.waiting().map(|waiting| waiting + machine.further(tensors)),
        false => [Seconds(0.0); 2],
    };
    let hidden = |gather: Seconds| exposed(gather, beside, machine);
    let exposed = |reduction: Seconds| waiting[1] + exposed(reduction, covered, machine);
    let gathering = || time(CollectiveKind::AllGather, bytes.weight, groups.shards);
    let gather = || waiting[0] + if overlap.gathers_beside_forward { hidden(gathering()) } else { gathering() };
    let kept = kept_whole(strategy, machine);
    let over_copies = || owned.collective_time(CollectiveKind::AllReduce, bytes.gradient, groups.copies, machine);
    let copied = groups.copies.iter().any(|group| group.size > 1);
    let sum_of_copies = || if copied { exposed(over_copies()) } else { Seconds(0.0) };
    let data = match strategy.zero_stage {
        ZeroStage::None => exposed(time(CollectiveKind::AllReduce, bytes.gradient, groups.whole)),
        ZeroStage::OptimizerState if overlap.zero_one_all_reduces => {
            exposed(time(CollectiveKind::AllReduce, bytes.gradient, groups.whole)) + gather()
        }
        ZeroStage::OptimizerState => {
            let scatter = time(CollectiveKind::ReduceScatter, bytes.gradient, groups.shards);
            exposed(scatter + over_copies()) + gather()
        }
        ZeroStage::Gradients => sum_of_copies() + gather(),
        ZeroStage::Parameters => {
            let gathered = if kept.weights { hidden(gathering()) } else { Seconds(0.0) };
            match kept.gradients {
                true => {
                    exposed(time(CollectiveKind::ReduceScatter, bytes.gradient, groups.shards) + over_copies())
                        + gathered
                }
                false => sum_of_copies() + gathered,
            }
        }
    };
    let optimizer = match (strategy.offload_optimizer, &machine.cluster.host) {
        (false, _) => optimizer_time(scenario, owned.all),
        (true, Some(host)) => offloaded_update_time(host, machine.cluster.node_gpus, bytes, owned.all, covered),
        // No way to a host is known.
        (true, None) => Seconds(f64::INFINITY),
    };
    Tail { data, optimizer }
}

/// Passes of a stage during which its gradients are reduced, or its weights gathered: the last one, or the first. With
/// several parts of the model on a stage a group of as many micro-batches as there are stages passes through one part
/// after another, and all but one part is done with before the last group (NVIDIA/Megatron-LM, core/pipeline_parallel/
/// schedules.py, is_last_microbatch_for_model_chunk).
fn passes_beside(strategy: &Strategy) -> f64 {
    if strategy.schedule != ScheduleKind::Interleaved {
        return 1.0;
    }
    let group = strategy.num_micro_batches().min(strategy.pipeline_parallel) as f64;
    let parts = strategy.virtual_stages as f64;
    1.0 + (group - 1.0) * (parts - 1.0) / parts
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
    collective_time(CollectiveKind::AllReduce, Bytes(bytes), end_stages(strategy, machine), machine)
}

/// Where a rank of the first stage and its peer on the last are.
pub(super) fn end_stages(strategy: &Strategy, machine: &Machine) -> Placement {
    let inside = match strategy.mesh_order {
        MeshOrder::PipelineOutermost => {
            strategy.world_size() - strategy.world_size() / strategy.pipeline_parallel < machine.fast_domain_gpus()
        }
        MeshOrder::DataOutermost => stages_share_domain(strategy, machine),
    };
    Placement { size: 2, per_domain: if inside { 2 } else { 1 }, domains: if inside { 1 } else { 2 } }
}

/// Time of the optimizer over the parameters that a rank owns: state read and written, gradient read for
/// the norm and for the update, weight written; bound by memory bandwidth.
fn optimizer_time(scenario: Scenario, owned: u64) -> Seconds {
    let bytes = state_bytes(scenario.machine, scenario.model.dtype);
    let per_parameter = 2 * bytes.optimizer + 2 * bytes.gradient + bytes.weight;
    Bytes(owned * per_parameter) / scenario.machine.streaming_bandwidth()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_stage_are_done_with_one_after_another() {
        let of = |schedule, virtual_stages, micro_batches: u64| {
            let plain = Strategy::plain([1, 4, 2], 2 * micro_batches);
            passes_beside(&Strategy { micro_batch: 1, schedule, virtual_stages, ..plain })
        };
        assert_eq!(of(ScheduleKind::OneForwardOneBackward, 1, 8), 1.0);
        // Of groups of 4 passes through 2 parts, one part is done 3 passes of half a stage before the end.
        assert_eq!(of(ScheduleKind::Interleaved, 2, 8), 2.5);
        assert_eq!(of(ScheduleKind::Interleaved, 2, 2), 1.5);
    }
}
