//! Exact solver: the least stage time for which filling stages from the back succeeds.
//!
//! The slowest stage's time is one of finitely many sums. For a given limit, giving each stage from the
//! last to the first as many layers as time and memory allow succeeds if anything does: both grow with
//! every layer, and what a stage takes only relieves the stages before it. Filling from the back also
//! leaves early stages, which hold the most micro-batches, the fewest layers among equally fast splits.

use super::{LayerCounts, PartitionProblem};

/// Relative tolerance of time and memory comparisons: sums in another order differ in the last bits.
const TOLERANCE: f64 = 1e-9;

/// The split whose slowest stage is fastest, or `None` if no split fits into memory.
///
/// Complexity: O(L log L + stages · L) for L layers, L² in place of L for two runs.
pub fn solve_by_threshold(problem: &PartitionProblem) -> Option<Vec<LayerCounts>> {
    let whole = fill(problem, f64::INFINITY)?;
    let limits = stage_times(problem, problem.slowest(&whole));
    let feasible = |limit: &f64| fill(problem, *limit).is_none();
    let least = limits.partition_point(feasible);
    match limits.get(least) {
        Some(limit) => fill(problem, *limit),
        None => Some(whole),
    }
}

/// The split with equal numbers of layers, if there is one.
pub fn split_evenly(layers: LayerCounts, stages: u64) -> Option<Vec<LayerCounts>> {
    let all: u64 = layers.iter().sum();
    let each = all / stages;
    let counts = |stage: u64| counts_between(layers, stage * each, (stage + 1) * each);
    (each > 0 && all.is_multiple_of(stages)).then(|| (0..stages).map(counts).collect())
}

/// The split with equal numbers of layers, if there is one and it fits into memory.
pub fn solve_evenly(problem: &PartitionProblem) -> Option<Vec<LayerCounts>> {
    let split = split_evenly(problem.layers, problem.stages.len() as u64)?;
    let fits = |(stage, counts): (usize, &LayerCounts)| fits(problem, stage, *counts);
    split.iter().enumerate().all(fits).then_some(split)
}

/// The split whose fullest stage has the least memory; `None` if there are fewer layers than stages.
pub fn split_for_least_memory(problem: &PartitionProblem) -> Option<Vec<LayerCounts>> {
    let bounded = |capacity| fill(&PartitionProblem { capacity, ..problem.clone() }, f64::INFINITY);
    let mut best = bounded(f64::INFINITY)?;
    let fullest = |split: &[LayerCounts]| {
        split.iter().enumerate().map(|(stage, counts)| problem.memory(stage, *counts)).fold(0.0, f64::max)
    };
    // Each success lowers the bound by more than the tolerance, so the loop ends.
    while let Some(split) = bounded(fullest(&best) * (1.0 - 4.0 * TOLERANCE)) {
        best = split;
    }
    Some(best)
}

/// All times that a stage can take, sorted, from the mean stage's to `most`.
fn stage_times(problem: &PartitionProblem, most: f64) -> Vec<f64> {
    let fixed: f64 = problem.stages.iter().map(|stage| stage.fixed_time).sum();
    let mean = (fixed + super::dot(problem.layers, problem.layer_time)) / problem.stages.len() as f64;
    let mut fixed_times: Vec<f64> = problem.stages.iter().map(|stage| stage.fixed_time).collect();
    fixed_times.sort_by(f64::total_cmp);
    fixed_times.dedup();
    let mut times = Vec::new();
    for first in 0..=problem.layers[0] {
        for second in 0..=problem.layers[1] {
            let layers = super::dot([first, second], problem.layer_time);
            let all = fixed_times.iter().map(|fixed| fixed + layers);
            times.extend(all.filter(|time| *time >= mean * (1.0 - TOLERANCE) && *time <= most * (1.0 + TOLERANCE)));
        }
    }
    times.sort_by(f64::total_cmp);
    times.dedup();
    times
}

/// Fills stages from the back under a time limit.
fn fill(problem: &PartitionProblem, limit: f64) -> Option<Vec<LayerCounts>> {
    let mut split = vec![LayerCounts::default(); problem.stages.len()];
    let mut end: u64 = problem.layers.iter().sum();
    for stage in (0..problem.stages.len()).rev() {
        let allowed = |start: u64| {
            let counts = counts_between(problem.layers, start, end);
            problem.time(stage, counts) <= limit * (1.0 + TOLERANCE) && fits(problem, stage, counts)
        };
        let least = stage as u64;
        let most = end.checked_sub(1)?;
        if most < least || !allowed(most) {
            return None;
        }
        let start = first_allowed(least, most, allowed);
        split[stage] = counts_between(problem.layers, start, end);
        end = start;
    }
    (end == 0).then_some(split)
}

/// The smallest value in `low..=high` that is allowed, where `high` is and all above an allowed one are.
fn first_allowed(mut low: u64, mut high: u64, allowed: impl Fn(u64) -> bool) -> u64 {
    while low < high {
        let middle = low + (high - low) / 2;
        if allowed(middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    high
}

fn fits(problem: &PartitionProblem, stage: usize, counts: LayerCounts) -> bool {
    problem.memory(stage, counts) <= problem.capacity * (1.0 + TOLERANCE)
}

/// Layers of each run among the layers `start..end` of the model.
fn counts_between(layers: LayerCounts, start: u64, end: u64) -> LayerCounts {
    let first = layers[0];
    let leading = end.min(first) - start.min(first);
    [leading, end - start - leading]
}
