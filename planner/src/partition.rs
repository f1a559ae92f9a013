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
pub use threshold::{solve_by_threshold, solve_evenly, split_evenly, split_for_least_memory};

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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A chain like a transformer's: embedding work in front, head work behind, early stages heavier.
    fn problem(
        layers: LayerCounts,
        stages: usize,
        layer_time: [f64; 2],
        ends: [f64; 2],
        capacity: f64,
    ) -> PartitionProblem {
        let terms = |stage: usize| {
            let front = if stage == 0 { ends[0] } else { 0.0 };
            let back = if stage + 1 == stages { ends[1] } else { 0.0 };
            let in_flight = (stages - stage) as f64;
            StageTerms {
                fixed_time: front + back,
                fixed_memory: 1e9 * (1.0 + front),
                layer_memory: [2e9 + 0.2e9 * in_flight, 3e9 + 0.3e9 * in_flight],
            }
        };
        PartitionProblem { layers, layer_time, stages: (0..stages).map(terms).collect(), capacity }
    }

    fn check_split(problem: &PartitionProblem, split: &[LayerCounts]) {
        let placed = split.iter().fold([0, 0], |sum, counts| [sum[0] + counts[0], sum[1] + counts[1]]);
        assert_eq!(placed, problem.layers);
        for (stage, counts) in split.iter().enumerate() {
            assert!(counts.iter().sum::<u64>() >= 1, "stage {stage} is empty: {split:?}");
            assert!(problem.memory(stage, *counts) <= problem.capacity * (1.0 + 1e-6), "stage {stage}: {split:?}");
        }
        let second = split.iter().position(|counts| counts[1] > 0).unwrap_or(split.len());
        assert!(split.iter().skip(second + 1).all(|counts| counts[0] == 0), "runs are out of order: {split:?}");
    }

    fn compare(problem: &PartitionProblem) {
        let [exact, program] = [solve_by_threshold(problem), solve_by_integer_program(problem)];
        assert_eq!(exact.is_some(), program.is_some(), "{exact:?} against {program:?} for {problem:?}");
        let (Some(exact), Some(program)) = (exact, program) else { return };
        check_split(problem, &exact);
        check_split(problem, &program);
        let [a, b] = [problem.slowest(&exact), problem.slowest(&program)];
        assert!((a / b - 1.0).abs() < 1e-6, "{a} by {exact:?}, {b} by {program:?}");
    }

    #[test]
    fn bloom_gives_end_stages_one_layer_less() {
        let problem = problem([70, 0], 12, [1.0, 0.0], [0.9, 0.9], f64::INFINITY);
        let split = solve_by_threshold(&problem).expect("memory is unlimited");
        let counts: Vec<u64> = split.iter().map(|counts| counts[0]).collect();
        assert_eq!(counts, [5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5]);
    }

    #[test]
    fn more_stages_than_layers_have_no_split() {
        let problem = problem([3, 0], 4, [1.0, 0.0], [0.0, 0.0], f64::INFINITY);
        assert_eq!(solve_by_threshold(&problem), None);
        assert_eq!(split_for_least_memory(&problem), None);
    }

    #[test]
    fn least_memory_is_no_more_than_the_fastest_split_has() {
        let problem = problem([40, 0], 8, [1.0, 0.0], [0.5, 2.0], f64::INFINITY);
        let fullest = |split: &[LayerCounts]| {
            split.iter().enumerate().map(|(stage, counts)| problem.memory(stage, *counts)).fold(0.0, f64::max)
        };
        let [lean, fast] =
            [split_for_least_memory(&problem), solve_by_threshold(&problem)].map(|split| split.expect("fits"));
        assert!(fullest(&lean) < fullest(&fast));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn one_run_agrees_with_the_integer_program(
            layers in 1u64..60, stages in 1usize..9, front in 0.0f64..2.0, back in 0.0f64..3.0, memory in 10.0f64..120.0,
        ) {
            compare(&problem([layers, 0], stages, [1.0, 0.0], [front, back], memory * 1e9));
        }

        #[test]
        fn two_runs_agree_with_the_integer_program(
            dense in 1u64..4, experts in 1u64..16, stages in 1usize..5, ratio in 0.3f64..3.0, back in 0.0f64..3.0,
            memory in 10.0f64..80.0,
        ) {
            compare(&problem([dense, experts], stages, [1.0, ratio], [0.2, back], memory * 1e9));
        }
    }
}
