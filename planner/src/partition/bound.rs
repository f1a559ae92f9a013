//! A time that the slowest stage of any split takes at least, from each stage's own room alone.

use super::{PartitionProblem, Repeats, StageTerms};

/// Relative distance to the least time at which the search for it ends.
const CLOSE: f64 = 1e-3;
/// The first step of the search above the mean, as a share of it.
const FIRST_STEP: f64 = 1.0 / 16.0;
/// Relative error of sums in another order, which makes no room and no time too little.
const TOLERANCE: f64 = 4e-9;

/// Seconds that the slowest stage takes at least, endless ones where these are above `limit`; none if all stages together
/// have no room.
///
/// Of each run alone, every stage holds as many layers as its time and memory allow, in any fraction of which layers are
/// computed again; the time at which these make up all layers of the run is halved from above and below.
/// Complexity: O(stages) for each of about eight times.
pub fn slowest_lower_bound(problem: &PartitionProblem, limit: f64) -> Option<f64> {
    used_runs(problem).try_fold(problem.mean_time(), |bound, run| Some(bound.max(bound_of_run(problem, run, limit)?)))
}

/// Whether stages could hold each run alone within a time, if layers could be divided. Complexity: O(stages).
pub(super) fn has_room(problem: &PartitionProblem, repeats: Repeats, limit: f64) -> bool {
    used_runs(problem).all(|run| holds_run(problem, repeats, run, limit))
}

fn used_runs(problem: &PartitionProblem) -> impl Iterator<Item = usize> {
    (0..problem.layers.len()).filter(|run| problem.layers[*run] > 0)
}

fn holds_run(problem: &PartitionProblem, repeats: Repeats, run: usize, limit: f64) -> bool {
    let most = problem.stages.iter().map(|stage| most_layers(problem, repeats, stage, run, limit));
    most.sum::<f64>() >= problem.layers[run] as f64
}

fn bound_of_run(problem: &PartitionProblem, run: usize, limit: f64) -> Option<f64> {
    let enough = |time: f64| holds_run(problem, problem.repeats, run, time);
    let mut low = problem.mean_time();
    if enough(low) {
        return Some(low);
    }
    if !enough(f64::INFINITY) {
        return None;
    }
    if low >= limit || !enough(limit) {
        return Some(f64::INFINITY);
    }
    // The mean is rarely far below: from there on in steps that grow.
    let mut step = low * FIRST_STEP;
    let mut high = limit.min(low + step);
    while high < limit && !enough(high) {
        (low, step) = (high, step * 2.0);
        high = limit.min(low + step);
    }
    while low < high * (1.0 - CLOSE) {
        let middle = f64::midpoint(low, high);
        if enough(middle) { high = middle } else { low = middle }
    }
    Some(low)
}

/// The most layers n of a run that a stage can hold in this time.
///
/// With r of them computed again, n t + r u <= T and n a - r s <= M. Where r is open it is any fraction up to n.
fn most_layers(problem: &PartitionProblem, repeats: Repeats, stage: &StageTerms, run: usize, limit: f64) -> f64 {
    let time = limit * (1.0 + TOLERANCE) - stage.fixed_time;
    let room = problem.capacity * (1.0 + TOLERANCE) - stage.fixed_memory;
    let (layer, again) = (problem.layer_time[run], problem.repeat_time[run]);
    let (memory, saved) = (stage.layer_memory[run], stage.saved_memory[run]);
    let in_room = |room: f64, each: f64| if each > 0.0 { room / each } else { f64::INFINITY };
    let none_again = (time / layer).min(in_room(room, memory));
    let all_again = (time / (layer + again)).min(in_room(room, memory - saved));
    let most = match repeats {
        Repeats::Never => none_again,
        Repeats::First(count) if all_again <= count as f64 => all_again,
        Repeats::First(count) => {
            let count = count as f64;
            ((time - count * again) / layer).min(in_room(room + count * saved, memory)).max(count)
        }
        Repeats::SameOnEachStage | Repeats::PerStage if saved > 0.0 => {
            let mixed = (time + again * room / saved) / (layer + again * memory / saved);
            mixed.min(in_room(room, memory - saved)).min(time / layer).max(none_again)
        }
        Repeats::SameOnEachStage | Repeats::PerStage => none_again,
    };
    // Truncated to whole layers.
    (most.max(0.0) * (1.0 + TOLERANCE)) as u64 as f64
}
