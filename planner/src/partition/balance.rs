//! The split into several parts a stage: parts as equal as layers allow, then stages.

use super::threshold::TOLERANCE;
use super::{LayerCounts, PartitionProblem, StageShare};

/// The split with the most equal parts, or `None` if layers are too few.
///
/// One layer after another goes to the part that is fastest with it, all layers taken as long as their mean; of equally
/// fast parts to the one on the stage with least work. Then layers move from the slowest stage's largest part to the
/// fastest stage's smallest one as long as that makes the slowest stage faster and no part slower than the slowest. Parts
/// without embedding and head keep the whole layers that fall to each of all parts.
/// Complexity: O(layers · parts), of equally fast parts at once O(parts) for each layer.
pub fn split_into_parts(problem: &PartitionProblem) -> Option<Vec<StageShare>> {
    let sizes = equal_sizes(problem)?;
    Some(balance_stages(problem, shares(problem.layers, &sizes)))
}

fn equal_sizes(problem: &PartitionProblem) -> Option<Vec<u64>> {
    let layers: u64 = problem.layers.iter().sum();
    let mean = super::dot(problem.layers, problem.layer_time) / layers as f64;
    let mut sizes: Vec<u64> = problem.stages.iter().map(|part| part.least_layers).collect();
    let left = layers.checked_sub(sizes.iter().sum())?;
    let time = |place: usize, size: u64| problem.stages[place].fixed_time + size as f64 * mean;
    let mut work = vec![0.0; num_stages(problem)];
    for (place, size) in sizes.iter().enumerate() {
        work[problem.stage_of[place]] += time(place, *size);
    }
    let mut left = left;
    while left > 0 {
        let after: Vec<f64> = sizes.iter().enumerate().map(|(place, size)| time(place, size + 1)).collect();
        let least = after.iter().copied().fold(f64::INFINITY, f64::min);
        let mut fastest: Vec<usize> =
            (0..sizes.len()).filter(|place| after[*place] <= least * (1.0 + TOLERANCE)).collect();
        while left > 0 && !fastest.is_empty() {
            let least_work = |a: &usize, b: &usize| {
                work[problem.stage_of[fastest[*a]]].total_cmp(&work[problem.stage_of[fastest[*b]]])
            };
            let place = fastest.remove((0..fastest.len()).min_by(least_work)?);
            sizes[place] += 1;
            work[problem.stage_of[place]] += mean;
            left -= 1;
        }
    }
    Some(sizes)
}

fn num_stages(problem: &PartitionProblem) -> usize {
    problem.stage_of.iter().max().map_or(0, |last| last + 1)
}

fn balance_stages(problem: &PartitionProblem, split: Vec<StageShare>) -> Vec<StageShare> {
    let slowest_part = problem.slowest(&split) * (1.0 + TOLERANCE);
    let each = problem.layers.iter().sum::<u64>() / problem.stages.len() as u64;
    let slowest = |times: &[f64]| times.iter().copied().fold(0.0, f64::max);
    let mut times = stage_times(problem, &split);
    let mut best = split;
    loop {
        let by_time = |a: &usize, b: &usize| times[*a].total_cmp(&times[*b]);
        let (Some(slow), Some(fast)) = ((0..times.len()).max_by(by_time), (0..times.len()).min_by(by_time)) else {
            return best;
        };
        let size = |place: &usize| best[*place].layers.iter().sum::<u64>();
        let on = |stage: usize| (0..best.len()).filter(move |place| problem.stage_of[*place] == stage);
        let spare = |place: &usize| size(place) > each.max(problem.stages[*place].least_layers);
        let (Some(from), Some(to)) = (on(slow).filter(spare).max_by_key(size), on(fast).min_by_key(size)) else {
            return best;
        };
        let mut sizes: Vec<u64> = (0..best.len()).map(|place| size(&place)).collect();
        sizes[from] -= 1;
        sizes[to] += 1;
        let moved = shares(problem.layers, &sizes);
        let moved_times = stage_times(problem, &moved);
        let faster = slowest(&moved_times) < slowest(&times) * (1.0 - TOLERANCE);
        if !faster || problem.slowest(&moved) > slowest_part {
            return best;
        }
        (best, times) = (moved, moved_times);
    }
}

/// Seconds of each stage.
fn stage_times(problem: &PartitionProblem, split: &[StageShare]) -> Vec<f64> {
    let mut times = vec![0.0; num_stages(problem)];
    for (place, share) in split.iter().enumerate() {
        times[problem.stage_of[place]] += problem.time(place, *share);
    }
    times
}

/// The model's layers in order, so many on each part.
fn shares(layers: LayerCounts, sizes: &[u64]) -> Vec<StageShare> {
    let mut left = layers;
    let share = |size: &u64| {
        let first = left[0].min(*size);
        let second = size - first;
        left = [left[0] - first, left[1] - second];
        StageShare::from([first, second])
    };
    sizes.iter().map(share).collect()
}
