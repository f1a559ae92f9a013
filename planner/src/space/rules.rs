//! The rules under which layouts are out, in the order in which they count.

use std::collections::BTreeMap;

use cost_models::step::gains_from_order;
use hardware_profiles::stack::ContextExchange;
use ir::mesh::MeshOrder;
use ir::sharding::{SplitError, split_of};
use ir::strategy::{Recompute, Strategy, ZeroStage};

use super::choices::{Choices, Degrees, Sharding, open_orders};
use super::layouts::Layouts;
use super::{Pruning, Rejection};
use crate::compile::not_executable;
use crate::request::Request;

/// Rules on the degrees alone.
pub fn reject_mesh(request: &Request, degrees: Degrees) -> Option<Rejection> {
    let layers = request.model.num_layers;
    let stack = &request.machine.stack;
    match split_of(&request.model, &degrees.plain(request.workload.global_batch)) {
        Err(SplitError::Heads) => Some(Rejection::HeadsNotDivisible),
        Err(SplitError::KeyValueHeads) => Some(Rejection::KeyValueHeadsNotDivisible),
        Err(SplitError::Intermediate) => Some(Rejection::IntermediateNotDivisible),
        Ok(_) if degrees.pipeline > layers => Some(Rejection::MoreStagesThanLayers),
        Ok(_) if !stack.offers.uneven_stages && !layers.is_multiple_of(degrees.pipeline) => {
            Some(Rejection::UnevenStagesNotOffered)
        }
        Ok(_) if !splits_context(request, degrees) => Some(Rejection::SequenceNotDivisible),
        Ok(_) if !exchanges_whole_heads(request, degrees) => Some(Rejection::ContextHeadsNotDivisible),
        Ok(_) if !degrees.order.is_usual() && (degrees.context * degrees.expert > 1 || degrees.whole_experts) => {
            Some(Rejection::MeshOrderNotOfferedWithContextsOrExperts)
        }
        Ok(_) => None,
    }
}

/// Each context rank takes a part from the front and one from the back of a sequence, so that causal attention is as
/// much work on all (Megatron-LM, core/utils.py, get_batch_on_this_cp_rank).
fn splits_context(request: &Request, degrees: Degrees) -> bool {
    degrees.context == 1 || request.workload.sequence_length.is_multiple_of(2 * degrees.context)
}

fn exchanges_whole_heads(request: &Request, degrees: Degrees) -> bool {
    let heads = request.model.attention.num_key_value_heads().max(degrees.tensor);
    degrees.context == 1
        || request.machine.stack.overlap.context == ContextExchange::Ring
        || heads.is_multiple_of(degrees.tensor * degrees.context)
}

/// Takes out what cannot run.
pub fn reject_layouts(
    request: &Request,
    degrees: Degrees,
    layouts: &mut Layouts,
    rejected: &mut BTreeMap<Rejection, u64>,
) {
    let workload = &request.workload;
    let Degrees { tensor, pipeline, data, context, .. } = degrees;
    let offers = &request.machine.stack.offers;
    let whole_batch = |micro_batch: u64| workload.global_batch.is_multiple_of(micro_batch * data);
    take_out(rejected, Rejection::BatchNotDivisible, layouts, |layouts| {
        layouts.passes.retain(|passes| whole_batch(passes.micro_batch));
    });
    take_out(rejected, Rejection::SequenceNotDivisible, layouts, |layouts| {
        let splits = (workload.sequence_length / context).is_multiple_of(tensor);
        layouts.sequence_parallel.retain(|along_sequence| !along_sequence || splits);
    });
    take_out(rejected, Rejection::WholeExpertsNeedSequenceParallel, layouts, |layouts| {
        layouts.sequence_parallel.retain(|along_sequence| *along_sequence || !degrees.whole_experts);
    });
    take_out(rejected, Rejection::ZeroStageNotOfferedWithPipeline, layouts, |layouts| {
        layouts.sharding.retain(|sharding| pipeline == 1 || offers.pipeline_zero_stages.contains(&sharding.zero_stage));
    });
    take_out(rejected, Rejection::OffloadNotOfferedWithZeroStage, layouts, |layouts| {
        let with_stage = |sharding: &Sharding| offers.offload_zero_stages.contains(&sharding.zero_stage);
        layouts.sharding.retain(|sharding| !sharding.offload_optimizer || with_stage(sharding));
    });
    take_out(rejected, Rejection::MicroBatchesNotGrouped, layouts, |layouts| {
        let micro_batches = |size: u64| workload.global_batch / (size * data);
        layouts
            .passes
            .retain(|passes| passes.schedule.allows_micro_batches(micro_batches(passes.micro_batch), pipeline));
    });
    if request.executable_only {
        take_out(rejected, Rejection::NotExecutable, layouts, |layouts| keep_executable(request, degrees, layouts));
    }
}

/// What the compiler objects to is in one choice each.
fn keep_executable(request: &Request, degrees: Degrees, layouts: &mut Layouts) {
    let plain = degrees.plain(request.workload.global_batch);
    let executable = |strategy: &Strategy| not_executable(&request.model, strategy).is_none();
    if !executable(&plain) {
        layouts.passes.clear();
    }
    layouts.passes.retain(|passes| executable(&passes.on(&plain)));
    layouts.sharding.retain(|sharding| executable(&sharding.on(&plain)));
    layouts.recompute.retain(|recompute| executable(&Strategy { recompute: *recompute, ..plain.clone() }));
}

/// Whether a mesh is another one of the same space in another order: with one stage or one replica orders are the same.
pub fn repeats_mesh(request: &Request, degrees: Degrees) -> bool {
    reorders_mesh(request, degrees) && degrees.pipeline.min(degrees.data) == 1
}

/// Whether a mesh is there in the usual order too.
fn reorders_mesh(request: &Request, degrees: Degrees) -> bool {
    !degrees.order.is_usual() && open_orders(request).contains(&MeshOrder::default())
}

/// Takes out what has an equal or better layout in the same space.
pub fn prune_layouts(
    request: &Request,
    choices: &Choices,
    degrees: Degrees,
    layouts: &mut Layouts,
    pruned: &mut BTreeMap<Pruning, u64>,
) {
    let flash = request.machine.stack.kernels.flash_attention;
    take_out(pruned, Pruning::ZeroStageWithoutReplicas, layouts, |layouts| {
        let lowest = [false, true].map(|offloads| {
            let alike = layouts.sharding.iter().filter(|sharding| sharding.offload_optimizer == offloads);
            alike.map(|sharding| sharding.zero_stage).min()
        });
        // Under ZeRO-0 nothing is sharded whatever the group; a higher stage is left out only beside such a layout.
        let alone = degrees.data * degrees.context == 1;
        // Whole experts over fewer ranks than a tensor group's are copied in it, and sharded over the copies.
        let copied = degrees.whole_experts && degrees.tensor > degrees.expert;
        layouts.sharding.retain(|sharding| {
            let lowest = lowest[usize::from(sharding.offload_optimizer)].filter(|stage| *stage < sharding.zero_stage);
            let has_plain = lowest.is_some_and(|lowest| lowest == ZeroStage::None || alone);
            !(has_plain && sharding.shard_group * degrees.context == 1 && !copied)
        });
    });
    take_out(pruned, Pruning::MeshOrderNoFaster, layouts, |layouts| {
        let plain = degrees.plain(request.workload.global_batch);
        let gains = |sharding: &Sharding| gains_from_order(&sharding.on(&plain), &request.machine);
        layouts.sharding.retain(|sharding| !reorders_mesh(request, degrees) || gains(sharding));
    });
    take_out(pruned, Pruning::SequenceParallelWithoutTensorParallel, layouts, |layouts| {
        let both = choices.sequence_parallel.contains(&false);
        layouts.sequence_parallel.retain(|along_sequence| !(*along_sequence && both && degrees.tensor == 1));
    });
    take_out(pruned, Pruning::SelectiveEqualsNone, layouts, |layouts| {
        let both = flash && choices.recompute.contains(&Recompute::None);
        layouts.recompute.retain(|recompute| !(both && *recompute == Recompute::Selective));
    });
    take_out(pruned, Pruning::ScheduleWithoutStages, layouts, |layouts| {
        let preferred = choices.schedules.first().copied();
        layouts.passes.retain(|passes| degrees.pipeline > 1 || Some(passes.schedule) == preferred);
    });
}

/// Whether a layout of which so many of all layers are computed again is another open one of its mesh, and under which
/// rule.
pub fn repeats_another(layouts: &Layouts, recompute: Recompute, again: u64, layers: u64) -> Option<Pruning> {
    let open = |other: Recompute| layouts.recompute.contains(&other);
    match recompute {
        Recompute::None | Recompute::Selective | Recompute::Full => None,
        Recompute::Partial if again == 0 => open(Recompute::None).then_some(Pruning::PartialEqualsNone),
        Recompute::Partial if again == layers => open(Recompute::Full).then_some(Pruning::PartialEqualsFull),
        Recompute::Partial => None,
    }
}

/// Takes values out of a choice under a rule and counts the layouts that go with them.
fn take_out<Rule: Ord>(
    counts: &mut BTreeMap<Rule, u64>,
    rule: Rule,
    layouts: &mut Layouts,
    filter: impl FnOnce(&mut Layouts),
) {
    let before = layouts.count();
    filter(layouts);
    let gone = before - layouts.count();
    if gone > 0 {
        *counts.entry(rule).or_default() += gone;
    }
}
