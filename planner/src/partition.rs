//! The split of layers into pipeline stages: the problem, and two independent solvers of it.
//!
//! [`solve_by_threshold`] is exact and what the search uses; [`solve_by_integer_program`] states the
//! same problem to a MILP solver and is the check on it.

mod integer_program;
mod threshold;

use cost_models::step::{
    BlockTime, CostedBlock, PerBlock, Scenario, StageContent, StagePosition, stage_memory_of, stage_time, transfer_time,
};
use ir::model::MAX_LAYER_RUNS;
use ir::strategy::Strategy;

pub use integer_program::solve_by_integer_program;
pub use threshold::{solve_by_threshold, solve_evenly, split_for_least_memory};

/// Layers of each run on one stage.
pub type LayerCounts = [u64; MAX_LAYER_RUNS];

/// Place the runs' layers in order on stages so that the slowest stage is as fast as possible and each
/// stage stays within memory. Every stage holds at least one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct PartitionProblem {
    /// Layers of each run, in model order.
    pub layers: LayerCounts,
    /// Seconds of a layer of each run for one micro-batch.
    pub layer_time: [f64; MAX_LAYER_RUNS],
    /// Stages, first to last.
    pub stages: Vec<StageTerms>,
    /// Bytes that a rank may use.
    pub capacity: f64,
}

/// What a stage costs beside its layers, and what a layer costs there.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageTerms {
    /// Seconds without any layer.
    pub fixed_time: f64,
    /// Bytes without any layer.
    pub fixed_memory: f64,
    /// Bytes of a layer of each run; more on early stages, which hold more micro-batches.
    pub layer_memory: [f64; MAX_LAYER_RUNS],
}

impl PartitionProblem {
    /// Seconds of a stage that holds `counts`.
    pub fn time(&self, stage: usize, counts: LayerCounts) -> f64 {
        self.stages[stage].fixed_time + dot(counts, self.layer_time)
    }

    /// Bytes of a stage that holds `counts`.
    pub fn memory(&self, stage: usize, counts: LayerCounts) -> f64 {
        self.stages[stage].fixed_memory + dot(counts, self.stages[stage].layer_memory)
    }

    /// Seconds of the slowest stage.
    pub fn slowest(&self, split: &[LayerCounts]) -> f64 {
        split.iter().enumerate().map(|(stage, counts)| self.time(stage, *counts)).fold(0.0, f64::max)
    }
}

fn dot(counts: LayerCounts, each: [f64; MAX_LAYER_RUNS]) -> f64 {
    counts.into_iter().zip(each).map(|(count, value)| count as f64 * value).sum()
}

/// States the problem for a strategy.
///
/// A stage's memory is linear in its layers but for the largest temporary, which is taken over all
/// layers of the model; the coefficients are differences of the cost model's own formula.
pub fn state_problem(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    times: &PerBlock<BlockTime>,
    strategy: &Strategy,
    layers: LayerCounts,
) -> PartitionProblem {
    let count = strategy.pipeline_parallel;
    let transfer = transfer_time(scenario, strategy, blocks);
    let one_of_each = layers.map(|layers| layers.min(1));
    let stages = (0..count).map(|stage| {
        let content = |layers| StageContent { embedding: stage == 0, layers, head: stage + 1 == count };
        let bytes = |layers| stage_memory_of(scenario, blocks, strategy, &content(layers), stage).device_use().0 as f64;
        let base = bytes(one_of_each);
        let mut terms = StageTerms { fixed_memory: base, ..StageTerms::default() };
        for run in (0..MAX_LAYER_RUNS).filter(|run| one_of_each[*run] > 0) {
            let mut more = one_of_each;
            more[run] += 1;
            terms.layer_memory[run] = bytes(more) - base;
            terms.fixed_memory -= terms.layer_memory[run];
        }
        let position = StagePosition::of(stage, count);
        let empty = content([0; MAX_LAYER_RUNS]);
        terms.fixed_time = stage_time(&empty, times, position, transfer, scenario.machine).total().0;
        terms
    });
    PartitionProblem {
        layers,
        layer_time: times.layers.map(|block| block.pass.total().0),
        stages: stages.collect(),
        capacity: scenario.machine.usable_memory().0 as f64,
    }
}
