//! Event times of 1F1B and ZB-H1, round by round: in a round every stage goes forward and backward once.

use ir::pipeline::Pipeline;
use ir::units::Seconds;

use super::StageTime;

/// Rounds of the pipeline's length before the steady state is taken to be reached.
const WARM_UP_ROUNDS: u64 = 3;
/// Rounds always simulated.
const LEAST_ROUNDS: u64 = 32;
/// Relative difference below which all stages have moved on by the same time.
const STEADY: f64 = 1e-12;

/// Time from the first forward to the last pass; there are at least as many micro-batches as stages.
///
/// Once every event of a round comes the same time after that of the round before, all later rounds do, since their
/// times are maxima of sums of these. If that does not happen within three times the pipeline's length, each further
/// round is taken to add [`steady_period`]. Complexity: O(stages · simulated rounds).
pub fn time_by_rounds(pipeline: Pipeline, stages: &[StageTime], transfer: Seconds) -> Seconds {
    let Pipeline { num_stages, micro_batches, .. } = pipeline;
    let mut rounds = Rounds::after_warm_up(pipeline, stages, transfer.0);
    let full = micro_batches - num_stages + 1;
    let most = full.min((WARM_UP_ROUNDS * num_stages).max(LEAST_ROUNDS));
    let (mut done, mut period) = (0, None);
    while done < most && period.is_none() {
        let step = rounds.advance(done, |_| true);
        done += 1;
        // Before round p, stages of ZB-H1 have not all begun with weight gradients.
        period = step.filter(|_| done > num_stages);
    }
    if done < full {
        let period = period.unwrap_or_else(|| steady_period(rounds.splits, stages, transfer.0));
        rounds.shift(period * (full - done) as f64);
    }
    for round in full..micro_batches {
        rounds.advance(round, |stage| round + (num_stages - stage as u64 - 1) < micro_batches);
    }
    Seconds(rounds.end())
}

/// Time of a round in the steady state: the greatest mean of a cycle of passes that wait for one another.
///
/// Stage i works for a round. A micro-batch's way from stage i forward to stage j and back takes the passes of these
/// stages and 2 (j − i) transfers, and j − i + 1 rounds later the same way begins again, since so many more
/// micro-batches are in flight on stage i than beyond j. Weight gradients are waited for on stage i only.
/// Complexity: O(stages²).
fn steady_period(splits: bool, stages: &[StageTime], transfer: f64) -> f64 {
    let mut period = 0.0f64;
    for (first, stage) in stages.iter().enumerate() {
        let mut way = if splits { stage.weights.0 } else { 0.0 };
        for (further, stage) in stages[first..].iter().enumerate() {
            let backward = if splits { stage.input_backward() } else { stage.backward };
            way += stage.forward.0 + backward.0;
            period = period.max((way + 2.0 * transfer * further as f64) / (further + 1) as f64);
        }
    }
    period
}

/// When each stage's last passes ended.
struct Rounds<'a> {
    stages: &'a [StageTime],
    splits: bool,
    transfer: f64,
    forward: Vec<f64>,
    backward: Vec<f64>,
    free: Vec<f64>,
}

impl<'a> Rounds<'a> {
    /// Stage r of p has gone forward p − r − 1 times.
    fn after_warm_up(pipeline: Pipeline, stages: &'a [StageTime], transfer: f64) -> Rounds<'a> {
        let count = stages.len();
        let mut free = Vec::with_capacity(count);
        let mut arrivals = vec![0.0; count];
        for (stage, time) in stages.iter().enumerate() {
            let mut end = 0.0f64;
            for arrival in &mut arrivals[..count - stage - 1] {
                end = end.max(*arrival) + time.forward.0;
                *arrival = end + transfer;
            }
            free.push(end);
        }
        let splits = pipeline.schedule.splits_backward();
        Rounds { stages, splits, transfer, forward: free.clone(), backward: vec![0.0; count], free }
    }

    /// One round; gives the time by which all stages have moved on, if it is the same for all.
    ///
    /// From the last stage to the first: a forward pass waits for the stage before in the round before, a backward
    /// pass for the stage behind in this round.
    fn advance(&mut self, round: u64, goes_forward: impl Fn(usize) -> bool) -> Option<f64> {
        let (mut least, mut most) = (f64::INFINITY, 0.0f64);
        let mut arrival = 0.0;
        for stage in (0..self.stages.len()).rev() {
            let time = self.stages[stage];
            let before = [self.forward[stage], self.backward[stage], self.free[stage]];
            let mut free = self.free[stage];
            if goes_forward(stage) {
                let input = if stage == 0 { 0.0 } else { self.forward[stage - 1] + self.transfer };
                free = free.max(input) + time.forward.0;
                self.forward[stage] = free;
            }
            let backward = if self.splits { time.input_backward() } else { time.backward };
            free = free.max(arrival) + backward.0;
            self.backward[stage] = free;
            arrival = free + self.transfer;
            if self.splits && round >= stage as u64 {
                free += time.weights.0;
            }
            self.free[stage] = free;
            for (now, before) in [self.forward[stage], self.backward[stage], free].into_iter().zip(before) {
                least = least.min(now - before);
                most = most.max(now - before);
            }
        }
        (most - least <= STEADY * arrival).then_some(most)
    }

    fn shift(&mut self, time: f64) {
        for end in self.forward.iter_mut().chain(&mut self.backward).chain(&mut self.free) {
            *end += time;
        }
    }

    /// The end of the last stage; stage r of ZB-H1 still has r weight gradients to compute.
    fn end(self) -> f64 {
        let left = |stage: usize| if self.splits { self.stages[stage].weights.0 * stage as f64 } else { 0.0 };
        self.free.iter().enumerate().map(|(stage, free)| free + left(stage)).fold(0.0, f64::max)
    }
}
