//! Time of a pipeline schedule with unequal stages, by exact event times.

use ir::strategy::ScheduleKind;
use ir::units::Seconds;

/// Micro-batches simulated for each stage before the steady state is taken to be reached.
const WARM_UP_ROUNDS: u64 = 3;
/// Micro-batches always simulated.
const LEAST_SIMULATED: u64 = 32;

/// Time of one micro-batch on one stage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageTime {
    /// Forward pass.
    pub forward: Seconds,
    /// Backward pass with recomputation.
    pub backward: Seconds,
}

impl StageTime {
    /// Forward and backward.
    pub fn total(self) -> Seconds {
        self.forward + self.backward
    }
}

/// Micro-batches whose activations a stage holds at once.
///
/// 1F1B: min(p − r, m) (arXiv 2104.04473, section 2.2); GPipe: m (arXiv 1811.06965).
pub fn in_flight(schedule: ScheduleKind, stage: u64, num_stages: u64, micro_batches: u64) -> u64 {
    match schedule {
        ScheduleKind::GPipe => micro_batches,
        ScheduleKind::OneForwardOneBackward => micro_batches.min(num_stages - stage),
    }
}

/// Micro-batches' worth of activations that a stage keeps at once with `virtual_stages` parts of the model.
///
/// Interleaved 1F1B: stage r runs 2(p − r − 1) + (v − 1) p + 1 parts ahead, each of 1/v of its layers
/// (Megatron-LM, arXiv 2104.04473, section 2.2.2, and arXiv 2205.05198, section 4.2.3).
pub fn kept_micro_batches(
    schedule: ScheduleKind,
    stage: u64,
    num_stages: u64,
    virtual_stages: u64,
    micro_batches: u64,
) -> f64 {
    if virtual_stages == 1 {
        return in_flight(schedule, stage, num_stages, micro_batches) as f64;
    }
    let ahead = 2 * (num_stages - stage - 1) + (virtual_stages - 1) * num_stages + 1;
    ahead.min(micro_batches * virtual_stages) as f64 / virtual_stages as f64
}

/// Time of interleaved 1F1B with `virtual_stages` parts of the model on each stage.
///
/// What 1F1B waits beyond the slowest stage's own work is divided by the parts (arXiv 2104.04473, section
/// 2.2.2); each further part adds its transfers to the start and the end.
pub fn interleaved_time(stages: &[StageTime], micro_batches: u64, virtual_stages: u64, transfer: Seconds) -> Seconds {
    let slowest = stages.iter().map(|stage| stage.total()).fold(Seconds(0.0), Seconds::max) * micro_batches as f64;
    let plain = pipeline_time(ScheduleKind::OneForwardOneBackward, stages, micro_batches, Seconds(0.0));
    let waiting = (plain - slowest) * (1.0 / virtual_stages as f64);
    slowest + waiting + transfer * (2 * (stages.len() as u64 - 1)) as f64
}

/// A time that no schedule of these stages can beat.
///
/// Stage i works m (f + b), starts after the forward passes of the stages before it, and their backward
/// passes follow its last one.
pub fn pipeline_lower_bound(stages: &[StageTime], micro_batches: u64) -> Seconds {
    let mut before = Seconds(0.0);
    let mut bound = Seconds(0.0);
    for stage in stages {
        bound = bound.max(before + stage.total() * micro_batches as f64);
        before += stage.total();
    }
    bound
}

/// Time from the first forward to the last backward pass, with `transfer` between neighbouring stages.
///
/// Event times are exact up to `LEAST_SIMULATED` or three rounds of the pipeline, whichever is more;
/// beyond it each micro-batch adds the slowest stage's time, the period of the steady state. Complexity:
/// O(stages · simulated micro-batches).
pub fn pipeline_time(schedule: ScheduleKind, stages: &[StageTime], micro_batches: u64, transfer: Seconds) -> Seconds {
    let simulated = micro_batches.min((WARM_UP_ROUNDS * stages.len() as u64).max(LEAST_SIMULATED));
    let slowest = stages.iter().map(|stage| stage.total()).fold(Seconds(0.0), Seconds::max);
    simulate(schedule, stages, simulated as usize, transfer) + slowest * (micro_batches - simulated) as f64
}

/// Event simulation: each stage executes its passes in the schedule's order, each as soon as the stage is
/// free and its input has arrived.
fn simulate(schedule: ScheduleKind, stages: &[StageTime], micro_batches: usize, transfer: Seconds) -> Seconds {
    let count = stages.len();
    let mut forward_end = vec![f64::NAN; count * micro_batches];
    let mut backward_end = vec![f64::NAN; count * micro_batches];
    let mut free = vec![0.0f64; count];
    let mut done = vec![0usize; count];
    let mut remaining = 2 * count * micro_batches;
    while remaining > 0 {
        let mut progress = false;
        for stage in (0..count).chain((0..count).rev()) {
            while done[stage] < 2 * micro_batches {
                let (is_forward, batch) = pass_at(schedule, stage, count, micro_batches, done[stage]);
                let arrival = match (is_forward, stage) {
                    (true, 0) => 0.0,
                    (true, _) => forward_end[(stage - 1) * micro_batches + batch] + transfer.0,
                    (false, last) if last + 1 == count => 0.0,
                    (false, _) => backward_end[(stage + 1) * micro_batches + batch] + transfer.0,
                };
                if arrival.is_nan() {
                    break;
                }
                let time = if is_forward { stages[stage].forward.0 } else { stages[stage].backward.0 };
                let end = free[stage].max(arrival) + time;
                let ends = if is_forward { &mut forward_end } else { &mut backward_end };
                ends[stage * micro_batches + batch] = end;
                free[stage] = end;
                done[stage] += 1;
                remaining -= 1;
                progress = true;
            }
        }
        assert!(progress, "both schedules are free of deadlock");
    }
    Seconds(free.into_iter().fold(0.0, f64::max))
}

/// The `index`-th pass of a stage: whether it is a forward pass, and of which micro-batch.
fn pass_at(schedule: ScheduleKind, stage: usize, count: usize, micro_batches: usize, index: usize) -> (bool, usize) {
    let warm_up = match schedule {
        ScheduleKind::GPipe => micro_batches,
        ScheduleKind::OneForwardOneBackward => micro_batches.min(count - stage - 1),
    };
    if index < warm_up {
        return (true, index);
    }
    let steady = index - warm_up;
    let pairs = micro_batches - warm_up;
    if steady < 2 * pairs {
        let is_forward = steady.is_multiple_of(2);
        (is_forward, steady / 2 + if is_forward { warm_up } else { 0 })
    } else {
        (false, index - micro_batches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stage(forward: f64, backward: f64) -> StageTime {
        StageTime { forward: Seconds(forward), backward: Seconds(backward) }
    }

    #[test]
    fn equal_stages_give_the_textbook_bubble() {
        // (m + p − 1)(f + b): arXiv 2104.04473, section 2.2.1.
        for schedule in [ScheduleKind::GPipe, ScheduleKind::OneForwardOneBackward] {
            for (count, batches) in [(1, 1), (4, 1), (4, 3), (4, 8), (12, 128), (2, 500)] {
                let time = pipeline_time(schedule, &vec![stage(1.0, 2.0); count], batches, Seconds(0.0));
                let expected = 3.0 * (batches + count as u64 - 1) as f64;
                assert!((time.0 - expected).abs() < 1e-9, "{schedule:?} {count} {batches}: {time:?}");
            }
        }
    }

    proptest! {
        #[test]
        fn extrapolation_equals_full_simulation(
            times in prop::collection::vec((0.5f64..2.0, 0.5f64..3.0), 1..7),
            batches in 1u64..200,
        ) {
            let stages: Vec<StageTime> = times.iter().map(|(f, b)| stage(*f, *b)).collect();
            let schedule = ScheduleKind::OneForwardOneBackward;
            let whole = simulate(schedule, &stages, batches as usize, Seconds(0.01));
            let short = pipeline_time(schedule, &stages, batches, Seconds(0.01));
            prop_assert!((whole.0 / short.0 - 1.0).abs() < 0.01, "{} {}", whole.0, short.0);
        }

        #[test]
        fn the_bound_holds(
            times in prop::collection::vec((0.1f64..2.0, 0.1f64..3.0), 1..9),
            batches in 1u64..60,
        ) {
            let stages: Vec<StageTime> = times.iter().map(|(f, b)| stage(*f, *b)).collect();
            for schedule in [ScheduleKind::GPipe, ScheduleKind::OneForwardOneBackward] {
                let time = pipeline_time(schedule, &stages, batches, Seconds(0.0));
                prop_assert!(pipeline_lower_bound(&stages, batches).0 <= time.0 * (1.0 + 1e-12));
            }
        }
    }
}
