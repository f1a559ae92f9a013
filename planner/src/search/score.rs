//! One layout: its stage split, and what it should cost.

use cost_models::memory::StageMemory;
use cost_models::offload::usable_host_memory;
use cost_models::step::{
    BlockTime, CostedBlock, PerBlock, Scenario, StageContent, StepPrediction, block_times, costed_blocks,
    host_memory_of, predict_step, stage_memory_of,
};
use ir::graph::ModelGraph;
use ir::pipeline::Pipeline;
use ir::sharding::split_of;
use ir::strategy::{Recompute, Strategy};
use ir::units::Bytes;

use super::{Scored, run_lengths, scenario};
use crate::partition::{
    LayerCounts, PartitionProblem, StageShare, recompute_to_fit, solve_by_threshold, solve_evenly, split_evenly,
    stage_contents, state_problem,
};
use crate::request::Request;

/// The fastest split that fits, of those that the stack offers.
pub fn fastest_split(scenario: Scenario, problem: &PartitionProblem) -> Option<Vec<StageShare>> {
    match scenario.machine.stack.offers.uneven_stages {
        true => solve_by_threshold(problem),
        false => solve_evenly(problem),
    }
}

/// What the parts hold in the fastest split of a layout that fits into memory, of several parts a stage whatever memory
/// it needs.
pub fn split_in_time(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    times: &PerBlock<BlockTime>,
    strategy: &Strategy,
    layers: LayerCounts,
) -> Option<Vec<StageContent>> {
    let split = fastest_split(scenario, &state_problem(scenario, blocks, times, strategy, layers))?;
    Some(contents_of(scenario, blocks, strategy, &split))
}

/// What the parts of a split hold, with the layers that parts which share a stage compute again to fit.
fn contents_of(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    strategy: &Strategy,
    split: &[StageShare],
) -> Vec<StageContent> {
    let mut contents = stage_contents(strategy, split);
    if strategy.virtual_stages > 1 {
        recompute_to_fit(scenario, blocks, strategy, &mut contents);
    }
    contents
}

/// Memory of each stage's ranks.
fn memory_of<'a>(
    scenario: Scenario<'a>,
    blocks: &'a PerBlock<CostedBlock>,
    strategy: &'a Strategy,
    contents: &'a [StageContent],
) -> impl Iterator<Item = StageMemory> + 'a {
    let stages = on_stages(strategy, contents).zip(0..);
    stages.map(move |(parts, stage)| stage_memory_of(scenario, blocks, strategy, parts, stage))
}

/// The parts of each stage.
fn on_stages<'a>(strategy: &Strategy, contents: &'a [StageContent]) -> impl Iterator<Item = &'a [StageContent]> {
    contents.chunks(strategy.virtual_stages as usize)
}

/// Whether each stage fits into the device's memory.
pub fn fits(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    strategy: &Strategy,
    contents: &[StageContent],
) -> bool {
    let usable = scenario.machine.usable_memory();
    memory_of(scenario, blocks, strategy, contents).all(|memory| memory.device_use() <= usable)
}

/// Whether each stage's optimizer state fits into its hosts' memory.
pub fn fits_hosts(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    strategy: &Strategy,
    contents: &[StageContent],
) -> bool {
    let needed = host_memory(scenario, blocks, strategy, contents);
    usable_host_memory(scenario.machine).is_none_or(|usable| needed <= usable)
}

/// Host memory of a node with the ranks of the stage that needs the most.
fn host_memory(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    strategy: &Strategy,
    contents: &[StageContent],
) -> Bytes {
    let of_stages = on_stages(strategy, contents).map(|parts| host_memory_of(scenario, blocks, strategy, parts));
    of_stages.max().unwrap_or_default()
}

/// Predicts one layout, whether or not it fits: with the split that fits and is fastest, else the fastest.
///
/// `None` if the tensor degree cannot split the model, no stage split exists, or the schedule has no order for it.
pub fn score_layout(request: &Request, graph: &ModelGraph, strategy: &Strategy) -> Option<Scored> {
    let scenario = scenario(request, graph);
    let (blocks, times) = costs_of(request, scenario, strategy)?;
    let problem = state_problem(scenario, &blocks, &times, strategy, run_lengths(request));
    let unlimited = || fastest_split(scenario, &PartitionProblem { capacity: f64::INFINITY, ..problem.clone() });
    let split = fastest_split(scenario, &problem).or_else(unlimited)?;
    Some(score_split(scenario, &blocks, &times, strategy, &split))
}

/// Predicts a layout as people run it: with equal stages where the layers divide, else with the fastest split.
///
/// `None` if the tensor degree cannot split the model, no stage split exists, or the schedule has no order for it.
pub fn score_as_run(request: &Request, graph: &ModelGraph, strategy: &Strategy) -> Option<Scored> {
    let scenario = scenario(request, graph);
    let (blocks, times) = costs_of(request, scenario, strategy)?;
    let layers = run_lengths(request);
    let fastest = || {
        let problem = state_problem(scenario, &blocks, &times, strategy, layers);
        solve_by_threshold(&PartitionProblem { capacity: f64::INFINITY, ..problem })
    };
    let even = split_evenly(layers, Pipeline::of(strategy).num_parts());
    let split = even.map(|split| split.into_iter().map(StageShare::from).collect()).or_else(fastest)?;
    Some(score_split(scenario, &blocks, &times, strategy, &split))
}

/// Predicts one layout with a stage split given by the caller, whether or not it fits.
///
/// `None` if the tensor degree cannot split the model.
pub fn score_given_split(
    request: &Request,
    graph: &ModelGraph,
    strategy: &Strategy,
    split: &[StageShare],
) -> Option<Scored> {
    let scenario = scenario(request, graph);
    let (blocks, times) = costs_of(request, scenario, strategy)?;
    let contents = stage_contents(strategy, split);
    let prediction = predict_step(scenario, &blocks, &times, strategy, &contents);
    Some(scored(scenario, &blocks, strategy, contents, prediction))
}

/// The stage-partition problem of a layout; `None` if the tensor degree cannot split the model.
pub fn partition_of(request: &Request, graph: &ModelGraph, strategy: &Strategy) -> Option<PartitionProblem> {
    let scenario = scenario(request, graph);
    let (blocks, times) = costs_of(request, scenario, strategy)?;
    Some(state_problem(scenario, &blocks, &times, strategy, run_lengths(request)))
}

pub(super) fn costs_of(
    request: &Request,
    scenario: Scenario,
    strategy: &Strategy,
) -> Option<(PerBlock<CostedBlock>, PerBlock<BlockTime>)> {
    let pipeline = Pipeline::of(strategy);
    let ordered = pipeline.schedule.allows_virtual_stages(pipeline.virtual_stages)
        && pipeline.schedule.allows_micro_batches(pipeline.micro_batches, pipeline.num_stages);
    let split = split_of(&request.model, strategy).ok().filter(|_| ordered)?;
    let blocks = costed_blocks(scenario, split, strategy.micro_batch);
    Some((blocks, block_times(scenario, &blocks, strategy)))
}

/// Predicts a layout with a given stage split.
pub(super) fn score_split(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    times: &PerBlock<BlockTime>,
    strategy: &Strategy,
    split: &[StageShare],
) -> Scored {
    let contents = contents_of(scenario, blocks, strategy, split);
    let prediction = predict_step(scenario, blocks, times, strategy, &contents);
    scored(scenario, blocks, strategy, contents, prediction)
}

/// A layout with its prediction.
pub(super) fn scored(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    strategy: &Strategy,
    contents: Vec<StageContent>,
    prediction: StepPrediction,
) -> Scored {
    Scored {
        strategy: Strategy {
            layers_per_stage: contents.iter().map(|content| content.layers.iter().sum()).collect(),
            recomputed_layers: match strategy.recompute {
                Recompute::Partial => contents.iter().map(|content| content.recomputed.iter().sum()).collect(),
                Recompute::None | Recompute::Selective | Recompute::Full => Vec::new(),
            },
            ..strategy.clone()
        },
        prediction,
        memory: memory_of(scenario, blocks, strategy, &contents).collect(),
        host_memory: host_memory(scenario, blocks, strategy, &contents),
        contents,
    }
}
