//! Exact solver: the least stage time for which filling stages from the back succeeds.
//!
//! For a given limit, giving each stage from the last to the first as many layers as time and memory allow succeeds if
//! anything does: time and memory grow with every layer, also where layers are computed again to fit, and what a stage
//! takes only relieves the stages before it. Filling from the back also leaves early stages, which hold the most
//! micro-batches, the fewest layers among equally fast splits.

use super::balance::split_into_parts;
use super::bound::{has_room, slowest_lower_bound};
use super::{LayerCounts, PartitionProblem, Repeats, StageShare};

/// Relative tolerance of time and memory comparisons: sums in another order differ in the last bits.
pub(super) const TOLERANCE: f64 = 1e-9;

/// The split whose slowest stage is fastest, or `None` if no split fits into memory; with several parts a stage the one
/// of [`split_into_parts`].
pub fn solve_by_threshold(problem: &PartitionProblem) -> Option<Vec<StageShare>> {
    match problem.repeats {
        _ if problem.has_parts() => split_into_parts(problem),
        Repeats::SameOnEachStage => same_on_each_stage(problem),
        Repeats::Never | Repeats::First(_) | Repeats::PerStage => least_limit(problem),
    }
}

/// Halves the interval of possible limits; a success lowers its upper end to the time of the slowest stage found, a
/// failure raises its lower end to the least time that would have let any stage take one layer more. The ends meet at
/// the slowest stage's exact time. Complexity: O(stages · log L) for each limit, of which there are a few tens at most.
fn least_limit(problem: &PartitionProblem) -> Option<Vec<StageShare>> {
    let mut low = slowest_lower_bound(problem, f64::INFINITY)?;
    // Stages are rarely slower than they must be by more than a layer.
    let layers = problem.layer_time.iter().zip(problem.repeat_time).map(|(layer, again)| layer + again);
    let near = low + layers.fold(0.0, f64::max);
    let mut best = fill(problem, near).or_else(|_| fill(problem, f64::INFINITY)).ok()?;
    let mut high = problem.slowest(&best);
    while low < high * (1.0 - TOLERANCE) {
        let middle = low + (high - low) / 2.0;
        match fill(problem, middle) {
            Ok(split) => {
                high = problem.slowest(&split).min(middle);
                best = split;
            }
            Err(next) => low = next,
        }
    }
    Some(best)
}

/// The number of layers that each stage computes again is tried from the least that fits on; only a number under
/// which stages could be faster is solved for, and none beyond what the slowest stage can hold makes a difference.
fn same_on_each_stage(problem: &PartitionProblem) -> Option<Vec<StageShare>> {
    let with = |first| PartitionProblem { repeats: Repeats::First(first), ..problem.clone() };
    let all: u64 = problem.layers.iter().sum();
    let can_fill =
        |first: u64, limit: f64| has_room(problem, Repeats::First(first), limit) && fill(&with(first), limit).is_ok();
    let fits = |first: u64| can_fill(first, f64::INFINITY);
    // From one layer on, each more needs less memory; the first needs room to be computed again in.
    let least = if fits(0) { 0 } else { first_allowed(1, all, fits) };
    let mut best = least_limit(&with(least))?;
    let most_layers = |split: &[StageShare]| -> u64 {
        let slowest = problem.slowest(split);
        (0..=all).take_while(|count| problem.fastest_of(*count) <= slowest).last().unwrap_or(0)
    };
    let (mut first, mut most) = (least + 1, most_layers(&best));
    while first <= most {
        let faster = problem.slowest(&best) * (1.0 - 4.0 * TOLERANCE);
        if can_fill(first, faster) {
            best = least_limit(&with(first))?;
            most = most_layers(&best);
        }
        first += 1;
    }
    Some(best)
}

/// The split with equal numbers of layers, if there is one.
pub fn split_evenly(layers: LayerCounts, stages: u64) -> Option<Vec<LayerCounts>> {
    let all: u64 = layers.iter().sum();
    let each = all / stages;
    let counts = |stage: u64| counts_between(layers, stage * each, (stage + 1) * each);
    (each > 0 && all.is_multiple_of(stages)).then(|| (0..stages).map(counts).collect())
}

/// The split with equal numbers of layers, if there is one and it fits into memory.
pub fn solve_evenly(problem: &PartitionProblem) -> Option<Vec<StageShare>> {
    let split = split_evenly(problem.layers, problem.stages.len() as u64)?;
    let with = |repeats: Repeats| -> Option<Vec<StageShare>> {
        let problem = PartitionProblem { repeats, ..problem.clone() };
        split.iter().enumerate().map(|(stage, counts)| problem.share(stage, *counts)).collect()
    };
    match problem.repeats {
        Repeats::SameOnEachStage => (0..=problem.layers.iter().sum()).find_map(|first| with(Repeats::First(first))),
        repeats => with(repeats),
    }
}

/// The split whose fullest stage has the least memory; `None` if there are fewer layers than stages.
pub fn split_for_least_memory(problem: &PartitionProblem) -> Option<Vec<StageShare>> {
    let bounded = |capacity| any_split(&PartitionProblem { capacity, ..problem.clone() });
    let mut best = bounded(f64::INFINITY)?;
    // Each success lowers the bound by more than the tolerance, so the loop ends.
    while let Some(split) = bounded(problem.fullest(&best) * (1.0 - 4.0 * TOLERANCE)) {
        best = split;
    }
    Some(best)
}

/// Whether some split fits into memory. Complexity: O(stages · log L).
pub fn can_split(problem: &PartitionProblem) -> bool {
    any_split(problem).is_some()
}

/// A split that fits.
fn any_split(problem: &PartitionProblem) -> Option<Vec<StageShare>> {
    if !has_room(problem, problem.repeats, f64::INFINITY) {
        return None;
    }
    match problem.repeats {
        Repeats::SameOnEachStage => {
            let with = |first| PartitionProblem { repeats: Repeats::First(first), ..problem.clone() };
            let all = problem.layers.iter().sum();
            [0, all].into_iter().find_map(|first| fill(&with(first), f64::INFINITY).ok())
        }
        Repeats::Never | Repeats::First(_) | Repeats::PerStage => fill(problem, f64::INFINITY).ok(),
    }
}

/// Fills stages from the back under a time limit.
///
/// # Errors
/// The least time above the limit that would let a stage take one layer more: under all limits below it stages are
/// filled alike.
fn fill(problem: &PartitionProblem, limit: f64) -> Result<Vec<StageShare>, f64> {
    let mut split = vec![StageShare::default(); problem.stages.len()];
    let mut end: u64 = problem.layers.iter().sum();
    let mut before: u64 = problem.stages.iter().map(|stage| stage.least_layers).sum();
    let mut next = f64::INFINITY;
    // Most stages take as many layers as the one after them.
    let mut usual = end / problem.stages.len() as u64;
    for stage in (0..problem.stages.len()).rev() {
        let own = problem.stages[stage].least_layers;
        before -= own;
        let share = |start: u64| problem.share(stage, counts_between(problem.layers, start, end));
        let allowed = |start: u64| {
            share(start).filter(|share| problem.time(stage, *share) <= limit * (1.0 + TOLERANCE)).is_some()
        };
        let needed = |start: u64| share(start).map_or(f64::INFINITY, |share| problem.time(stage, share));
        let Some(most) = end.checked_sub(own).filter(|most| *most >= before) else { return Err(next) };
        if !allowed(most) {
            return Err(next.min(needed(most)));
        }
        let start = first_allowed_near(before, most, end.saturating_sub(usual), allowed);
        usual = end - start;
        if start > before {
            next = next.min(needed(start - 1));
        }
        split[stage] = share(start).unwrap_or_default();
        end = start;
    }
    if end == 0 { Ok(split) } else { Err(next) }
}

/// [`first_allowed`], looked for in growing steps from a guess on.
fn first_allowed_near(mut low: u64, mut high: u64, guess: u64, allowed: impl Fn(u64) -> bool) -> u64 {
    let mut step = 1;
    let mut next = guess.clamp(low, high);
    if allowed(next) {
        high = next;
        while low < high {
            next = high.saturating_sub(step).max(low);
            if !allowed(next) {
                low = next + 1;
                break;
            }
            (high, step) = (next, step * 2);
        }
    } else {
        low = next + 1;
        while low < high {
            next = (low + step - 1).min(high);
            if allowed(next) {
                high = next;
                break;
            }
            (low, step) = (next + 1, step * 2);
        }
    }
    first_allowed(low, high, allowed)
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

/// Layers of each run among the layers `start..end` of the model.
fn counts_between(layers: LayerCounts, start: u64, end: u64) -> LayerCounts {
    let first = layers[0];
    let leading = end.min(first) - start.min(first);
    [leading, end - start - leading]
}
