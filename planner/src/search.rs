//! Exact search: estimate open layouts in the order of their lower bounds until no bound can win.

use std::collections::BTreeMap;

use cost_models::memory::StageMemory;
use cost_models::step::{
    BlockTime, CostedBlock, PerBlock, Scenario, StageContent, StepPrediction, block_times, costed_blocks, predict_step,
    stage_memory_of, step_lower_bound,
};
use ir::graph::ModelGraph;
use ir::model::{MAX_LAYER_RUNS, layer_runs};
use ir::pipeline::Pipeline;
use ir::plan::StopReason;
use ir::sharding::split_of;
use ir::strategy::{Recompute, Strategy};
use ir::units::{Bytes, Seconds};

use crate::partition::{
    LayerCounts, PartitionProblem, StageShare, recompute_to_fit, solve_by_threshold, solve_evenly, split_evenly,
    split_for_least_memory, stage_contents, state_problem,
};
use crate::request::Request;
use crate::space::{Pruning, Rejection, Space, enumerate};
use crate::watch::Watch;

/// A layout with its stage split and what it should cost.
#[derive(Clone, Debug)]
pub struct Scored {
    /// The layout.
    pub strategy: Strategy,
    /// What each part of the model holds, those of the first stage first.
    pub contents: Vec<StageContent>,
    /// Predicted step.
    pub prediction: StepPrediction,
    /// Memory of each stage's ranks.
    pub memory: Vec<StageMemory>,
}

/// What a search found.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Layouts that fit, best first; at most as many as asked for.
    pub best: Vec<Scored>,
    /// Candidates of the stated space.
    pub enumerated: u64,
    /// Candidates that were estimated and fit.
    pub feasible: u64,
    /// Candidates left out, by rule.
    pub pruned: BTreeMap<Pruning, u64>,
    /// Candidates out, by reason.
    pub rejected: BTreeMap<Rejection, u64>,
    /// Why the search stopped.
    pub stop_reason: StopReason,
}

/// Costs of blocks by tensor degree, sequence parallelism and micro-batch.
type BlockTable = BTreeMap<(u64, bool, u64), PerBlock<CostedBlock>>;

/// An open layout with its bound.
struct Bounded {
    strategy: Strategy,
    times: PerBlock<BlockTime>,
    bound: Seconds,
}

impl Scored {
    /// The fullest stage and its ranks' device use.
    pub fn fullest_stage(&self) -> (usize, Bytes) {
        let uses = self.memory.iter().map(StageMemory::device_use).enumerate();
        uses.max_by(|a, b| a.1.cmp(&b.1).then(b.0.cmp(&a.0))).unwrap_or((0, Bytes(0)))
    }

    /// Order of preference: time, then memory, then the lexicographically smallest strategy.
    fn precedes(&self, other: &Scored) -> std::cmp::Ordering {
        let time = self.prediction.step.0.total_cmp(&other.prediction.step.0);
        let memory = || self.fullest_stage().1.cmp(&other.fullest_stage().1);
        time.then_with(memory).then_with(|| self.strategy.cmp(&other.strategy))
    }
}

/// The scenario of a request.
pub fn scenario<'a>(request: &'a Request, graph: &'a ModelGraph) -> Scenario<'a> {
    Scenario { model: &request.model, graph, workload: request.workload, machine: &request.machine }
}

/// Layers of each run of a model.
pub fn run_lengths(request: &Request) -> LayerCounts {
    let mut lengths = [0; MAX_LAYER_RUNS];
    for (length, run) in lengths.iter_mut().zip(layer_runs(&request.model)) {
        *length = run.count;
    }
    lengths
}

/// Searches the stated space of a checked request.
///
/// The result is the optimum: a layout is left out only under a rule of [`Pruning`], the last of which
/// compares a true lower bound with the worst of the `top` layouts reported.
pub fn search(request: &Request, graph: &ModelGraph) -> Outcome {
    search_watched(request, graph, &Watch::default())
}

/// [`search`], which ends with what it has once the watch says so: the rest is then not proven to be worse.
pub fn search_watched(request: &Request, graph: &ModelGraph, watch: &Watch) -> Outcome {
    let scenario = scenario(request, graph);
    let space = enumerate(request);
    let table = block_table(scenario, &space);
    let candidates = bound_candidates(scenario, &space, &table, run_lengths(request));
    let mut outcome = Outcome {
        best: Vec::new(),
        enumerated: space.enumerated,
        feasible: 0,
        pruned: space.pruned,
        rejected: space.rejected,
        stop_reason: StopReason::Optimal,
    };
    watch.begin(candidates.len() as u64);
    for (index, candidate) in candidates.iter().enumerate() {
        let worst = outcome.best.get(request.top.max(1) - 1);
        let slower = worst.is_some_and(|worst| candidate.bound.0 > worst.prediction.step.0);
        if slower || watch.stopped() {
            let rule = if slower { Pruning::SlowerThanReported } else { Pruning::Interrupted };
            outcome.pruned.insert(rule, (candidates.len() - index) as u64);
            outcome.stop_reason = if slower { StopReason::Optimal } else { StopReason::Interrupted };
            break;
        }
        watch.advance();
        match score(request, scenario, blocks_of(&table, &candidate.strategy), candidate) {
            Some(scored) => {
                outcome.feasible += 1;
                insert(&mut outcome.best, scored, request.top.max(1));
            }
            None => *outcome.rejected.entry(Rejection::OutOfMemory).or_default() += 1,
        }
    }
    outcome
}

fn insert(best: &mut Vec<Scored>, scored: Scored, most: usize) {
    let place = best.partition_point(|other| other.precedes(&scored).is_lt());
    if place < most {
        best.insert(place, scored);
        best.truncate(most);
    }
}

fn block_table(scenario: Scenario, space: &Space) -> BlockTable {
    let mut table = BlockTable::new();
    for strategy in &space.open {
        let key = (strategy.tensor_parallel, strategy.sequence_parallel, strategy.micro_batch);
        table.entry(key).or_insert_with(|| costed_blocks(scenario, space.splits[&(key.0, key.1)], key.2));
    }
    table
}

fn blocks_of<'a>(table: &'a BlockTable, strategy: &Strategy) -> &'a PerBlock<CostedBlock> {
    &table[&(strategy.tensor_parallel, strategy.sequence_parallel, strategy.micro_batch)]
}

/// Open layouts with their bounds, lowest first; equal bounds in the order of strategies.
fn bound_candidates(scenario: Scenario, space: &Space, table: &BlockTable, layers: LayerCounts) -> Vec<Bounded> {
    let bounded = space.open.iter().map(|strategy| {
        let times = block_times(scenario, blocks_of(table, strategy), strategy);
        let bound = step_lower_bound(scenario, &times, layers, strategy);
        Bounded { strategy: strategy.clone(), times, bound }
    });
    let mut candidates: Vec<Bounded> = bounded.collect();
    candidates.sort_by(|a, b| a.bound.0.total_cmp(&b.bound.0).then_with(|| a.strategy.cmp(&b.strategy)));
    candidates
}

/// The fastest split that fits, of those that the stack offers.
fn fastest_split(scenario: Scenario, problem: &PartitionProblem) -> Option<Vec<StageShare>> {
    match scenario.machine.stack.offers.uneven_stages {
        true => solve_by_threshold(problem),
        false => solve_evenly(problem),
    }
}

/// Splits a layout into stages and predicts it; `None` if it does not fit into memory.
fn score(request: &Request, scenario: Scenario, blocks: &PerBlock<CostedBlock>, candidate: &Bounded) -> Option<Scored> {
    let strategy = &candidate.strategy;
    let problem = state_problem(scenario, blocks, &candidate.times, strategy, run_lengths(request));
    let split = fastest_split(scenario, &problem)?;
    let scored = score_split(scenario, blocks, &candidate.times, strategy, &split);
    (scored.fullest_stage().1 <= scenario.machine.usable_memory()).then_some(scored)
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
    Some(score_split(scenario, &blocks, &times, strategy, split))
}

/// The stage-partition problem of a layout; `None` if the tensor degree cannot split the model.
pub fn partition_of(request: &Request, graph: &ModelGraph, strategy: &Strategy) -> Option<PartitionProblem> {
    let scenario = scenario(request, graph);
    let (blocks, times) = costs_of(request, scenario, strategy)?;
    Some(state_problem(scenario, &blocks, &times, strategy, run_lengths(request)))
}

fn costs_of(
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
fn score_split(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    times: &PerBlock<BlockTime>,
    strategy: &Strategy,
    split: &[StageShare],
) -> Scored {
    let mut contents = stage_contents(strategy, split);
    if strategy.virtual_stages > 1 {
        recompute_to_fit(scenario, blocks, strategy, &mut contents);
    }
    let parts = contents.chunks(strategy.virtual_stages as usize);
    let memory = |(parts, stage): (&[StageContent], u64)| stage_memory_of(scenario, blocks, strategy, parts, stage);
    Scored {
        strategy: Strategy {
            layers_per_stage: contents.iter().map(|content| content.layers.iter().sum()).collect(),
            recomputed_layers: match strategy.recompute {
                Recompute::Partial => contents.iter().map(|content| content.recomputed.iter().sum()).collect(),
                Recompute::None | Recompute::Selective | Recompute::Full => Vec::new(),
            },
            ..strategy.clone()
        },
        prediction: predict_step(scenario, blocks, times, strategy, &contents),
        memory: parts.zip(0..).map(memory).collect(),
        contents,
    }
}

/// The layout that comes nearest to fitting where none does: the one whose fullest stage is least full.
///
/// Layouts are compared with their fastest split; the winner is then split for the least memory. `None` if
/// no layout of the space can run whatever the memory.
pub fn nearest_miss(request: &Request, graph: &ModelGraph) -> Option<Scored> {
    let scenario = scenario(request, graph);
    let space = enumerate(request);
    let table = &block_table(scenario, &space);
    let candidates = bound_candidates(scenario, &space, table, run_lengths(request));
    let problem_of = |candidate: &Bounded| {
        let blocks = blocks_of(table, &candidate.strategy);
        state_problem(scenario, blocks, &candidate.times, &candidate.strategy, run_lengths(request))
    };
    let predicted = |candidate: &Bounded, split: Option<Vec<StageShare>>| {
        let blocks = blocks_of(table, &candidate.strategy);
        Some(score_split(scenario, blocks, &candidate.times, &candidate.strategy, &split?))
    };
    let unlimited = |candidate: &Bounded| PartitionProblem { capacity: f64::INFINITY, ..problem_of(candidate) };
    let fastest = |candidate: &Bounded| predicted(candidate, fastest_split(scenario, &unlimited(candidate)));
    let all = candidates.iter().filter_map(|candidate| Some((candidate, fastest(candidate)?)));
    let by_memory = |a: &Scored, b: &Scored| a.fullest_stage().1.cmp(&b.fullest_stage().1).then_with(|| a.precedes(b));
    let (candidate, scored) = all.min_by(|a, b| by_memory(&a.1, &b.1))?;
    match scenario.machine.stack.offers.uneven_stages {
        true => predicted(candidate, split_for_least_memory(&unlimited(candidate))),
        false => Some(scored),
    }
}
