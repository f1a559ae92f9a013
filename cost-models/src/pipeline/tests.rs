//! Textbook bubbles, a second simulator, extrapolation and bounds.

use std::collections::BTreeSet;

use ir::pipeline::Pipeline;
use ir::strategy::ScheduleKind;
use ir::units::Seconds;
use proptest::prelude::*;

use super::*;

fn stage(forward: f64, backward: f64, weights: f64) -> StageTime {
    StageTime { forward: Seconds(forward), backward: Seconds(backward + weights), weights: Seconds(weights) }
}

fn pipeline(schedule: ScheduleKind, num_stages: u64, virtual_stages: u64, micro_batches: u64) -> Pipeline {
    Pipeline { schedule, num_stages, virtual_stages, micro_batches }
}

/// Time of equal stages whose forward, input-gradient and weight-gradient passes take `times`.
fn equal(pipeline: Pipeline, times: [f64; 3]) -> f64 {
    let [forward, backward, weights] = times.map(|time| time / pipeline.virtual_stages as f64);
    let parts = vec![stage(forward, backward, weights); pipeline.num_parts() as usize];
    pipeline_time(pipeline, &parts, Seconds(0.0)).0
}

fn check(found: f64, expected: f64, case: impl std::fmt::Debug) {
    assert!((found / expected - 1.0).abs() < 1e-9, "{case:?}: {found}, expected {expected}");
}

#[test]
fn equal_stages_give_the_textbook_bubble() {
    // (m + p − 1)(f + b): arXiv 2104.04473, section 2.2.1.
    for schedule in [ScheduleKind::GPipe, ScheduleKind::OneForwardOneBackward] {
        for (stages, batches) in [(1, 1), (4, 1), (4, 3), (4, 8), (12, 128), (2, 500)] {
            let pipeline = pipeline(schedule, stages, 1, batches);
            check(equal(pipeline, [1.0, 1.2, 0.8]), 3.0 * (batches + stages - 1) as f64, pipeline);
        }
    }
}

#[test]
fn interleaved_parts_divide_the_bubble() {
    // m (f + b) + (p − 1)(f + b) / v: arXiv 2104.04473, section 2.2.2.
    for (stages, parts, batches) in [(1, 2, 3), (4, 2, 4), (4, 2, 8), (4, 3, 64), (8, 4, 8), (16, 2, 512)] {
        let pipeline = pipeline(ScheduleKind::Interleaved, stages, parts, batches);
        let expected = 3.0 * batches as f64 + 3.0 * (stages - 1) as f64 / parts as f64;
        check(equal(pipeline, [1.0, 1.2, 0.8]), expected, pipeline);
    }
}

#[test]
fn zero_bubble_h1_hides_weight_gradients() {
    // m (f + b + w) + (p − 1)(f + b − w): arXiv 2401.10241, table 2; for w ≤ f and m ≥ p.
    for (stages, batches) in [(1, 1), (4, 4), (4, 9), (12, 128), (2, 500)] {
        for times in [[1.0, 1.0, 1.0], [1.1, 1.3, 0.7], [1.0, 2.0, 0.0]] {
            let [forward, backward, weights] = times;
            let pipeline = pipeline(ScheduleKind::ZeroBubbleH1, stages, 1, batches);
            let steady = (forward + backward + weights) * batches as f64;
            let expected = steady + (forward + backward - weights) * (stages - 1) as f64;
            check(equal(pipeline, times), expected, (pipeline, times));
        }
    }
}

#[test]
fn zero_bubble_v_leaves_the_start_of_later_stages_only() {
    // With f = b = w no stage idles between its first and its last pass (arXiv 2401.10241, section 6), and the last
    // begins p − 1 parts' forward passes after the first.
    for (stages, batches) in [(1, 1), (2, 3), (4, 7), (4, 8), (8, 64), (12, 300)] {
        let pipeline = pipeline(ScheduleKind::ZeroBubbleV, stages, 2, batches);
        check(equal(pipeline, [1.0; 3]), 3.0 * batches as f64 + 0.5 * (stages - 1) as f64, pipeline);
    }
}

/// Kind, place in model order and micro-batch of a pass.
type PassKey = (usize, u64, u64);

/// A second simulator: a clock that ticks, and stages that begin their next pass when what it needs is done.
fn ticking(pipeline: Pipeline, times: &[[u64; 3]]) -> u64 {
    let orders: Vec<Vec<StagePass>> = (0..pipeline.num_stages).map(|stage| pass_order(pipeline, stage)).collect();
    let mut done: BTreeSet<PassKey> = BTreeSet::new();
    let mut running: Vec<Option<(u64, PassKey)>> = vec![None; orders.len()];
    let mut next = vec![0; orders.len()];
    let last = pipeline.num_parts() - 1;
    for clock in 0.. {
        for now in &mut running {
            if let Some((_, pass)) = now.filter(|(end, _)| *end == clock) {
                done.insert(pass);
                *now = None;
            }
        }
        for (stage, order) in orders.iter().enumerate() {
            // Passes without duration end at once, so that another may begin.
            while let (None, Some(pass)) = (running[stage], order.get(next[stage])) {
                let position = pipeline.position(stage as u64, pass.part);
                let needed = match pass.kind {
                    PassKind::Forward => position.checked_sub(1).map(|before| (0, before, pass.micro_batch)),
                    PassKind::Backward if position == last => Some((0, position, pass.micro_batch)),
                    PassKind::Backward => Some((1, position + 1, pass.micro_batch)),
                    PassKind::Weights => Some((1, position, pass.micro_batch)),
                };
                if needed.is_some_and(|needed| !done.contains(&needed)) {
                    break;
                }
                let time = times[stage * pipeline.virtual_stages as usize + pass.part as usize][pass.kind as usize];
                running[stage] = Some((clock + time, (pass.kind as usize, position, pass.micro_batch)));
                next[stage] += 1;
            }
        }
        if running.iter().all(Option::is_none) && next.iter().zip(&orders).all(|(next, order)| *next == order.len()) {
            return clock;
        }
    }
    0
}

/// A pipeline of a schedule with numbers that it allows, near the given ones.
pub(super) fn allowed(schedule: ScheduleKind, stages: u64, parts: u64, batches: u64) -> Pipeline {
    let virtual_stages = match schedule {
        ScheduleKind::Interleaved => parts,
        ScheduleKind::ZeroBubbleV => 2,
        _ => 1,
    };
    let whole = schedule.allows_micro_batches(batches, stages);
    pipeline(schedule, stages, virtual_stages, if whole { batches } else { batches * stages })
}

prop_compose! {
    /// A schedule that its numbers of stages, parts and micro-batches allow, and whole times of its parts.
    fn cases(most_batches: u64)(
        kind in 0usize..5, stages in 1u64..7, parts in 2u64..4, batches in 1..most_batches,
        times in prop::collection::vec((1u64..9, 1u64..9, 1u64..9), 18),
    ) -> (Pipeline, Vec<[u64; 3]>) {
        let schedule = ScheduleKind::ALL[kind];
        let pipeline = allowed(schedule, stages, parts, batches);
        // Without passes of their own, gradients of weights are part of the backward pass.
        let time = |(forward, backward, weights): (u64, u64, u64)| match schedule.splits_backward() {
            true => [forward, backward, weights],
            false => [forward, backward, 0],
        };
        (pipeline, times.into_iter().take(pipeline.num_parts() as usize).map(time).collect())
    }
}

fn as_parts(times: &[[u64; 3]]) -> Vec<StageTime> {
    times.iter().map(|[f, b, w]| stage(*f as f64, *b as f64, *w as f64)).collect()
}

/// Parts that repeat themselves after several rounds only.
#[test]
fn extrapolation_knows_rounds_that_differ() {
    let times = [[1, 2, 0], [8, 2, 0], [4, 4, 0], [1, 3, 0], [1, 1, 0], [4, 6, 0]];
    let pipeline =
        Pipeline { schedule: ScheduleKind::Interleaved, num_stages: 3, virtual_stages: 2, micro_batches: 273 };
    let whole = simulate(pipeline, &as_parts(&times), Seconds(0.0)).end.0;
    let short = pipeline_time(pipeline, &as_parts(&times), Seconds(0.0)).0;
    assert!((whole / short - 1.0).abs() < 0.01, "{whole} {short}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn event_times_are_those_of_a_ticking_clock((pipeline, times) in cases(12)) {
        let events = simulate(pipeline, &as_parts(&times), Seconds(0.0)).end.0;
        prop_assert!((events - ticking(pipeline, &times) as f64).abs() < 1e-9, "{events} for {pipeline:?}");
    }

    #[test]
    fn extrapolation_equals_full_simulation((pipeline, times) in cases(200), transfer in 0.0f64..0.5) {
        let parts = as_parts(&times);
        let transfer = if pipeline.schedule == ScheduleKind::Interleaved { 0.0 } else { transfer };
        let whole = simulate(pipeline, &parts, Seconds(transfer)).end.0;
        let short = pipeline_time(pipeline, &parts, Seconds(transfer)).0;
        prop_assert!((whole / short - 1.0).abs() < 0.01, "{whole} {short} {pipeline:?}");
    }

    #[test]
    fn rounds_are_exact_until_they_are_extrapolated((pipeline, times) in cases(32), transfer in 0.0f64..0.5) {
        let parts = as_parts(&times);
        let whole = simulate(pipeline, &parts, Seconds(transfer)).end.0;
        let rounds = pipeline_time(pipeline, &parts, Seconds(transfer)).0;
        let exact = matches!(pipeline.schedule, ScheduleKind::GPipe | ScheduleKind::OneForwardOneBackward | ScheduleKind::ZeroBubbleH1);
        prop_assert!(!exact || (whole / rounds - 1.0).abs() < 1e-9, "{whole} {rounds} {pipeline:?}");
    }

    #[test]
    fn the_bound_holds((pipeline, times) in cases(60), transfer in 0.0f64..0.5) {
        let parts = as_parts(&times);
        let time = pipeline_time(pipeline, &parts, Seconds(transfer));
        let bound = pipeline_lower_bound(pipeline, &parts, Seconds(transfer));
        prop_assert!(bound.0 <= time.0 * (1.0 + 1e-12), "{bound:?} {time:?} {pipeline:?}");
    }
}
