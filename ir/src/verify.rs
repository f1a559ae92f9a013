//! The verifier of plans. Rules, each checked on every plan written and read:
//!
//! 1. the format version is the one that this program reads;
//! 2. the model is sound, and its hash and parameter counts are those of the file;
//! 3. the mesh has the strategy's degrees, and every rank lies on exactly one stage;
//! 4. the groups along each axis partition the ranks;
//! 5. the batch is whole micro-batches on each replica, as many as the schedule can take; shard groups are whole
//!    parts of the replicas, and each rank holds whole experts;
//! 6. every layer is on exactly one stage, in the order of the schedule's parts, the embedding beside the first and
//!    the head beside the last;
//! 7. parameters and their shards are those of the model under the tensor split, and the parts make up
//!    the whole;
//! 8. every stage's parameters are those of its blocks, and its micro-batches in flight those of the schedule;
//! 9. the terms of the estimate add up to the step, and its tokens per second follow from it;
//! 10. no stage uses more than the usable memory, and the summary names the fullest;
//! 11. the search's counts add up;
//!
//! and of a plan with programs:
//!
//! 12. bodies hold the blocks' parameters, stored as the strategy says;
//! 13. without its conversions a body is exactly its block, and the block's derivative with the declared
//!     recomputation: every operator once, with its operands;
//! 14. every operator is well typed, and every conversion leads from one type to another over a whole group;
//! 15. every gradient is accumulated once, in a type that its update can reduce;
//!     kernels are runs of operators that no collective interrupts;
//! 16. every value is written before it is read, and freed once, after it is last read;
//! 17. with 1, p − 1, p, p + 1 and the planned number of micro-batches, every layer sees every micro-batch
//!     forward and backward once and in order, every message is received, no stage waits for ever, and no
//!     more micro-batches are in flight than the schedule allows;
//! 18. every gradient ends in the type of its parameter's optimizer state, is counted once in the norm, and
//!     every parameter is stepped once and whole again where it is stored whole; sums over replicas start
//!     when the last micro-batch has added to the gradient, and each is waited for once;
//! 19. each stage's memory is what the lives of its program's values make it, and weights and kept
//!     activations fit into the terms of the estimate if its stack is the project's own.
//!
//! All violations are reported at once, each with its place in the file.

mod body;
mod program;
mod schedule;
mod update;

use program::check_program;
pub use schedule::chain as stage_chain;

use std::collections::BTreeMap;

use crate::error::Problem;
use crate::graph::{BlockRole, ModelGraph, build_graph, count_parameters};
use crate::mesh::{Rank, StageId, build_mesh, stage_ranks};
use crate::model::{LayerRun, check_model, layer_runs};
use crate::pipeline::{Pipeline, in_flight};
use crate::plan::{FORMAT_VERSION, Plan, Stage};
use crate::sharding::{TensorSplit, split_of};
use crate::text::content_hash;
use crate::units::Seconds;

/// Largest relative difference between a number and what the rest of the plan makes it.
const SUM_TOLERANCE: f64 = 1e-9;
/// Largest world whose groups are listed rank by rank; beyond it the family's shape is compared.
const LISTED_RANKS: u64 = 4096;

/// Checks every rule; an empty list means that the plan is sound. `origin` names the file.
pub fn verify(plan: &Plan, origin: &str) -> Vec<Problem> {
    let mut check = Check { origin, problems: Vec::new() };
    if plan.format_version != FORMAT_VERSION {
        let what = format!("plan format {} instead of {FORMAT_VERSION}", plan.format_version);
        check.report(what, "format_version", "write the plan again with this version of `plan`");
        return check.problems;
    }
    check_inputs(plan, &mut check);
    if !check.problems.is_empty() {
        return check.problems;
    }
    let Some(split) = check_split(plan, &mut check) else { return check.problems };
    let graph = build_graph(&plan.model);
    check_mesh(plan, &mut check);
    check_batch(plan, &mut check);
    check_experts(plan, &mut check);
    let before = check.problems.len();
    check_layers(plan, &mut check);
    check_stages(plan, &graph, split, &mut check);
    let stages_are_sound = check.problems.len() == before;
    check_shards(plan, &graph, split, &mut check);
    check_estimate(plan, &mut check);
    check_memory(plan, &mut check);
    check_search(plan, &mut check);
    check_program(plan, &graph, split, stages_are_sound, &mut check);
    check.problems
}

pub(crate) struct Check<'a> {
    origin: &'a str,
    pub(crate) problems: Vec<Problem>,
}

impl Check<'_> {
    pub(crate) fn report(&mut self, what: impl Into<String>, place: &str, help: &str) {
        self.problems.push(Problem::new(what, format!("{}, {place}", self.origin), help));
    }

    pub(crate) fn expect<T: PartialEq + std::fmt::Debug>(&mut self, found: T, expected: T, place: &str, rule: &str) {
        if found != expected {
            self.report(format!("{rule}: found {found:?}, expected {expected:?}"), place, EDITED);
        }
    }
}

/// What to do about a plan that contradicts itself.
pub(crate) const EDITED: &str = "the file was changed by hand or damaged: write it again with `plan`";

fn check_inputs(plan: &Plan, check: &mut Check) {
    if let Err(error) = check_model(&plan.model, check.origin) {
        let problems = error.problems().iter().cloned();
        check.problems.extend(problems.map(|problem| Problem { help: EDITED.to_owned(), ..problem }));
        return;
    }
    check.expect(plan.inputs.model_hash.clone(), content_hash(&plan.model), "inputs.model_hash", "hash of the model");
    check.expect(plan.parameters, count_parameters(&plan.model), "parameters", "parameters of the model");
    let strategy = &plan.strategy;
    let sizes = [
        ("tensor_parallel", strategy.tensor_parallel),
        ("pipeline_parallel", strategy.pipeline_parallel),
        ("data_parallel", strategy.data_parallel),
        ("context_parallel", strategy.context_parallel),
        ("expert_parallel", strategy.expert_parallel),
        ("shard_group", strategy.shard_group),
        ("micro_batch", strategy.micro_batch),
        ("global_batch", strategy.global_batch),
        ("virtual_stages", strategy.virtual_stages),
    ];
    for (name, size) in sizes {
        if size == 0 || size > 1 << 28 {
            check.report(format!("{name} is {size}"), &format!("strategy.{name}"), EDITED);
        }
    }
    let degrees =
        [strategy.tensor_parallel, strategy.pipeline_parallel, strategy.data_parallel, strategy.context_parallel];
    let schedule = strategy.schedule;
    if !schedule.allows_virtual_stages(strategy.virtual_stages) || strategy.virtual_stages > plan.model.num_layers {
        let what = format!("{} virtual stages with schedule {}", strategy.virtual_stages, schedule.name());
        check.report(what, "strategy.virtual_stages", EDITED);
    }
    if degrees.iter().map(|degree| *degree as f64).product::<f64>() > (1u64 << 28) as f64 {
        check.report("the mesh has more than 2^28 ranks", "strategy", EDITED);
    }
}

fn check_split(plan: &Plan, check: &mut Check) -> Option<TensorSplit> {
    let strategy = &plan.strategy;
    match split_of(&plan.model, strategy) {
        Ok(split) => {
            let added = split.added_parameters(&plan.model);
            check.expect(plan.added_parameters, added, "added_parameters", "parameters added by padding");
            Some(split)
        }
        Err(error) => {
            let what = format!("tensor degree {} cannot split the model ({error:?})", strategy.tensor_parallel);
            check.report(what, "strategy.tensor_parallel", EDITED);
            None
        }
    }
}

fn check_mesh(plan: &Plan, check: &mut Check) {
    let mesh = build_mesh(&plan.strategy);
    if plan.mesh != mesh {
        check.report(format!("the mesh {:?} is not the strategy's {:?}", plan.mesh.axes, mesh.axes), "mesh", EDITED);
        return;
    }
    let order = plan.strategy.mesh_order.axes();
    let expected: Vec<_> = order.into_iter().filter(|axis| mesh.degree(*axis) > 1).collect();
    let found: Vec<_> = plan.groups.iter().map(|family| family.axis).collect();
    check.expect(found, expected, "groups", "axes with groups");
    for (index, family) in plan.groups.iter().enumerate() {
        let place = format!("groups[{index}]");
        let expected = mesh.groups(family.axis);
        check.expect(*family, expected, &place, "groups of the axis");
        if *family != expected || mesh.world_size() > LISTED_RANKS {
            continue;
        }
        let mut seen = vec![0u32; mesh.world_size() as usize];
        let leaders = (0..mesh.world_size()).filter(|rank| rank / family.stride % family.size == 0);
        for rank in leaders.flat_map(|rank| family.members(Rank(rank))) {
            match seen.get_mut(rank.0 as usize) {
                Some(count) => *count += 1,
                None => check.report(format!("rank {} is outside the world", rank.0), &place, EDITED),
            }
        }
        if seen.iter().any(|count| *count != 1) {
            check.report("the groups do not hold each rank exactly once", &place, EDITED);
        }
    }
}

fn check_batch(plan: &Plan, check: &mut Check) {
    let strategy = &plan.strategy;
    check.expect(strategy.global_batch, plan.workload.global_batch, "strategy.global_batch", "the workload's batch");
    let per_replica = strategy.micro_batch * strategy.data_parallel;
    if !strategy.global_batch.is_multiple_of(per_replica) {
        let what = format!("batch {} is not whole micro-batches of {per_replica}", strategy.global_batch);
        check.report(what, "strategy.micro_batch", EDITED);
    } else if !strategy.schedule.allows_micro_batches(strategy.num_micro_batches(), strategy.pipeline_parallel) {
        let what = format!("{} micro-batches are not whole groups for the schedule", strategy.num_micro_batches());
        check.report(what, "strategy.schedule", EDITED);
    }
    if plan.workload.sequence_length == 0 {
        check.report("the sequence length is 0", "workload.sequence_length", EDITED);
    }
    if !strategy.data_parallel.is_multiple_of(strategy.shard_group) {
        let what = format!("shard group {} does not divide {} replicas", strategy.shard_group, strategy.data_parallel);
        check.report(what, "strategy.shard_group", EDITED);
    }
}

/// The expert degree divides the ranks that it re-uses and the experts.
fn check_experts(plan: &Plan, check: &mut Check) {
    let strategy = &plan.strategy;
    let degree = strategy.expert_parallel;
    let experts = plan.model.feed_forward.num_experts();
    let ranks = strategy.expert_ranks();
    if !ranks.is_multiple_of(degree) || !experts.is_multiple_of(degree) {
        let what = format!("expert degree {degree} does not divide the {ranks} ranks to spread {experts} experts over");
        check.report(what, "strategy.expert_parallel", EDITED);
    }
    if strategy.whole_experts && !(strategy.tensor_parallel > 1 && strategy.sequence_parallel) {
        let what = "experts are whole without tensor ranks that split the sequence";
        check.report(what, "strategy.whole_experts", EDITED);
    }
}

fn check_layers(plan: &Plan, check: &mut Check) {
    let strategy = &plan.strategy;
    let count = strategy.pipeline_parallel;
    check.expect(plan.stages.len() as u64, count, "stages", "number of stages");
    let pipeline = Pipeline::of(strategy);
    let (ends, _) = pipeline.stage_and_part(pipeline.num_parts() - 1);
    for (index, stage) in plan.stages.iter().enumerate() {
        let number = index as u64;
        let place = format!("stages[{index}]");
        check.expect(stage.stage, StageId(number), &place, "number of the stage");
        check.expect(stage.ranks, stage_ranks(strategy, number), &place, "ranks of the stage");
        check.expect(stage.embedding, number == 0, &place, "embedding on the first stage only");
        check.expect(stage.head, number == ends, &place, "head beside the last layers only");
        check.expect(stage.parts().count() as u64, strategy.virtual_stages, &place, "parts of the model");
    }
    check_part_order(plan, check);
    let counts = plan.stages.iter().flat_map(Stage::parts).map(|part| part.1.saturating_sub(part.0));
    let counts: Vec<u64> = counts.collect();
    check.expect(strategy.layers_per_stage.clone(), counts, "strategy.layers_per_stage", "layers of each stage");
    let recomputed = strategy.recomputed_layers_per_stage();
    let fits = |(recomputed, layers): (&u64, &u64)| recomputed <= layers;
    if recomputed.len() != strategy.layers_per_stage.len()
        || !recomputed.iter().zip(&strategy.layers_per_stage).all(fits)
    {
        let what = format!("{recomputed:?} layers are recomputed of {:?}", strategy.layers_per_stage);
        check.report(what, "strategy.recomputed_layers", EDITED);
    }
}

/// Parts follow one another in model order, and hold all layers.
fn check_part_order(plan: &Plan, check: &mut Check) {
    let pipeline = Pipeline::of(&plan.strategy);
    let parts: BTreeMap<u64, (usize, (u64, u64))> = plan
        .stages
        .iter()
        .enumerate()
        .flat_map(|(index, stage)| {
            let position = move |part| pipeline.position(index as u64, part);
            stage.parts().zip(0..).map(move |(layers, part)| (position(part), (index, layers)))
        })
        .collect();
    let mut next_layer = 0;
    let last_part = pipeline.num_parts() - 1;
    for (position, (index, (first, last))) in parts {
        let place = format!("stages[{index}]");
        check.expect(first, next_layer, &place, "layers follow the stage before");
        let alone = pipeline.virtual_stages > 1 && (position == 0 || position == last_part);
        if last < first || last == first && !alone {
            check.report("the stage holds no layer", &place, EDITED);
        }
        next_layer = last;
    }
    check.expect(next_layer, plan.model.num_layers, "stages", "layers on all stages");
}

fn check_shards(plan: &Plan, graph: &ModelGraph, split: TensorSplit, check: &mut Check) {
    check.expect(plan.parameter_shards.len(), graph.blocks.len(), "parameter_shards", "number of blocks");
    for (index, (found, block)) in plan.parameter_shards.iter().zip(&graph.blocks).enumerate() {
        let place = format!("parameter_shards[{index}]");
        check.expect(found.count, block.count, &place, "repetitions of the block");
        let expected: Vec<_> = block.parameters().map(|parameter| split.shard(parameter)).collect();
        check.expect(found.parameters.len(), expected.len(), &place, "number of parameters");
        for (shard, expected) in found.parameters.iter().zip(&expected) {
            check.expect(shard, expected, &format!("{place}, {}", expected.name), "shard of the parameter");
        }
    }
}

fn check_stages(plan: &Plan, graph: &ModelGraph, split: TensorSplit, check: &mut Check) {
    let runs = layer_runs(&plan.model);
    for (index, stage) in plan.stages.iter().enumerate() {
        let place = format!("stages[{index}]");
        let expected = stage_parameters(graph, split, &runs, stage);
        check.expect(stage.parameters_per_rank, expected, &place, "parameters of a rank");
        let in_flight = in_flight(Pipeline::of(&plan.strategy), index as u64);
        check.expect(stage.in_flight, in_flight, &place, "micro-batches in flight");
    }
}

/// Parameters that a rank of a stage holds; a tied embedding is held once if both uses are on the stage.
fn stage_parameters(graph: &ModelGraph, split: TensorSplit, runs: &[LayerRun], stage: &Stage) -> u64 {
    let mut total = 0;
    let both_ends = stage.embedding && stage.head;
    for block in &graph.blocks {
        let count = match block.role {
            BlockRole::Embedding => u64::from(stage.embedding),
            BlockRole::Head => u64::from(stage.head),
            BlockRole::Layers(run) => {
                let start: u64 = runs[..run].iter().map(|run| run.count).sum();
                let end = start + runs[run].count;
                stage.parts().map(|(first, last)| last.min(end).saturating_sub(first.max(start))).sum()
            }
        };
        let tied = if both_ends { split.local_tied_parameters(block) } else { 0 };
        total += count * (split.local_block_parameters(block) - tied);
    }
    total
}

fn check_estimate(plan: &Plan, check: &mut Check) {
    let estimate = &plan.estimate;
    let sum: Seconds = estimate.terms.values().map(|term| term.time).sum();
    if !is_close(sum.0, estimate.step.0) || estimate.step.0 <= 0.0 {
        check.report(
            format!("terms add up to {} s, the step is {} s", sum.0, estimate.step.0),
            "estimate.terms",
            EDITED,
        );
    }
    let tokens = plan.workload.global_batch as f64 * plan.workload.sequence_length as f64;
    let rate = tokens / (estimate.step.0 * plan.strategy.world_size() as f64);
    if !is_close(estimate.tokens_per_second_per_gpu, rate) {
        check.report(
            format!("{} tokens/s/GPU, the batch and the step give {rate}", estimate.tokens_per_second_per_gpu),
            "estimate.tokens_per_second_per_gpu",
            EDITED,
        );
    }
    let (low, high) = estimate.interval;
    if !(low <= estimate.step && estimate.step <= high) {
        check.report("the interval does not hold the step", "estimate.interval", EDITED);
    }
}

fn is_close(found: f64, expected: f64) -> bool {
    (found - expected).abs() <= SUM_TOLERANCE * expected
}

fn check_memory(plan: &Plan, check: &mut Check) {
    let usable = plan.inputs.usable_memory;
    for (index, stage) in plan.stages.iter().enumerate() {
        let used = stage.device_memory();
        if used > usable {
            let what = format!("stage {index} uses {used} of {usable} usable memory");
            check.report(
                what,
                &format!("stages[{index}].memory"),
                "plan for devices with more memory, or search again",
            );
        }
    }
    let fullest = plan.stages.iter().map(Stage::device_memory).max().unwrap_or_default();
    check.expect(plan.estimate.device_memory, fullest, "estimate.device_memory", "memory of the fullest stage");
    let number = plan.stages.iter().position(|stage| stage.device_memory() == fullest).unwrap_or(0);
    check.expect(plan.estimate.fullest_stage, StageId(number as u64), "estimate.fullest_stage", "the fullest stage");
    let peak = plan.stages.iter().map(Stage::allocator_peak).max().unwrap_or_default();
    check.expect(plan.estimate.allocator_peak, peak, "estimate.allocator_peak", "allocator peak of the fullest stage");
}

fn check_search(plan: &Plan, check: &mut Check) {
    let search = &plan.search;
    let counted =
        search.pruned.values().chain(search.rejected.values()).fold(search.feasible, |a, b| a.saturating_add(*b));
    check.expect(search.enumerated, counted, "search.enumerated", "sum of the search's counts");
}
