//! Time of a pipeline schedule with unequal stages, by exact event times.

mod events;
mod order;
mod rounds;

use ir::pipeline::Pipeline;
use ir::strategy::ScheduleKind;
use ir::units::Seconds;

use events::simulate;
pub use order::{PassKind, StagePass, pass_order};
use rounds::time_by_rounds;

/// Rounds of the pipeline's length, of interleaved parts and of a V, that are simulated.
const SIMULATED_ROUNDS: u64 = 8;
/// Micro-batches of these that are always simulated, in whole rounds.
const LEAST_SIMULATED: u64 = 64;

/// Time of one micro-batch on one stage, or on one of its parts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageTime {
    /// Forward pass.
    pub forward: Seconds,
    /// Backward pass with recomputation.
    pub backward: Seconds,
    /// The part of `backward` that may wait: gradients of weights.
    pub weights: Seconds,
}

impl StageTime {
    /// Forward and backward.
    pub fn total(self) -> Seconds {
        self.forward + self.backward
    }

    /// Backward without what may wait.
    pub fn input_backward(self) -> Seconds {
        self.backward - self.weights
    }
}

impl std::ops::AddAssign for StageTime {
    fn add_assign(&mut self, other: StageTime) {
        self.forward += other.forward;
        self.backward += other.backward;
        self.weights += other.weights;
    }
}

/// A stage's parts together.
pub fn stage_totals(pipeline: Pipeline, parts: &[StageTime]) -> Vec<StageTime> {
    let together = |parts: &[StageTime]| {
        let mut sum = StageTime::default();
        parts.iter().for_each(|part| sum += *part);
        sum
    };
    parts.chunks(pipeline.virtual_stages as usize).map(together).collect()
}

/// A time that no execution of these parts under the schedule can beat; `parts` are stage-major.
///
/// Stage i works m (f + b), and starts after the forward passes of the parts before its first one. With one part a
/// stage, the passes of stage i that others wait for are preceded and followed by those of all stages before it; with
/// interleaved parts all passes of stage i are, by those of their first parts.
pub fn pipeline_lower_bound(pipeline: Pipeline, parts: &[StageTime], transfer: Seconds) -> Seconds {
    let micro_batches = pipeline.micro_batches as f64;
    let splits = pipeline.schedule.splits_backward();
    let interleaved = pipeline.schedule == ScheduleKind::Interleaved;
    let (mut forward, mut chain, mut bound) = (Seconds(0.0), Seconds(0.0), Seconds(0.0));
    for (stage, time) in stage_totals(pipeline, parts).into_iter().enumerate() {
        bound = bound.max(forward + time.total() * micro_batches);
        let first = parts[stage * pipeline.virtual_stages as usize];
        forward += first.forward;
        if pipeline.virtual_stages == 1 {
            let needed = time.forward + if splits { time.input_backward() } else { time.backward };
            bound = bound.max(chain + needed * micro_batches);
            chain += needed + transfer * 2.0;
        } else if interleaved {
            bound = bound.max(chain + time.total() * micro_batches);
            chain += first.total();
        }
    }
    if interleaved { bound + way_and_back(pipeline, transfer) } else { bound }
}

/// Transfers through all stages once and back.
fn way_and_back(pipeline: Pipeline, transfer: Seconds) -> Seconds {
    transfer * (2 * (pipeline.num_stages - 1)) as f64
}

/// Time from the first pass to the last, with `transfer` between neighbouring stages; `parts` are stage-major.
///
/// 1F1B and ZB-H1 as in [`time_by_rounds`]. GPipe is two flow shops of equal jobs, each Σ t + (m − 1) max t. The
/// others are simulated for [`SIMULATED_ROUNDS`] times as many micro-batches as stages or a few more; beyond, each adds the
/// period of the steady state, which is the slowest stage's time unless the order of unequal parts makes it wait.
pub fn pipeline_time(pipeline: Pipeline, parts: &[StageTime], transfer: Seconds) -> Seconds {
    let Pipeline { schedule, num_stages, micro_batches, .. } = pipeline;
    match schedule {
        ScheduleKind::GPipe => {
            let pass = |time: fn(&StageTime) -> Seconds| {
                let longest = parts.iter().map(time).fold(Seconds(0.0), Seconds::max);
                let all: Seconds = parts.iter().map(time).sum();
                all + transfer * (num_stages - 1) as f64 + longest * (micro_batches - 1) as f64
            };
            pass(|stage| stage.forward) + pass(|stage| stage.backward)
        }
        ScheduleKind::OneForwardOneBackward | ScheduleKind::ZeroBubbleH1 if micro_batches >= num_stages => {
            time_by_rounds(pipeline, parts, transfer)
        }
        ScheduleKind::OneForwardOneBackward
        | ScheduleKind::ZeroBubbleH1
        | ScheduleKind::Interleaved
        | ScheduleKind::ZeroBubbleV => {
            // Beside one part's transfer the stage computes others, also while the pipeline fills: on measured runs only
            // the way through all stages once and back shows.
            let hidden = schedule == ScheduleKind::Interleaved;
            let [shown, latency] = if hidden { [transfer, Seconds(0.0)] } else { [Seconds(0.0), transfer] };
            let rounds = SIMULATED_ROUNDS.max(LEAST_SIMULATED.div_ceil(num_stages));
            let simulated = micro_batches.min(rounds * num_stages);
            let start = simulate(Pipeline { micro_batches: simulated, ..pipeline }, parts, latency);
            let slowest = stage_totals(pipeline, parts).iter().map(|s| s.total()).fold(Seconds(0.0), Seconds::max);
            let through = way_and_back(pipeline, shown);
            start.end + start.period.max(slowest) * (micro_batches - simulated) as f64 + through
        }
    }
}

#[cfg(test)]
mod tests;
