//! Event times of every pass, for schedules whose stages hold several parts of the model.

use ir::pipeline::Pipeline;
use ir::units::Seconds;

use super::StageTime;
use super::order::{PassKind, StagePass, pass_order};

/// Rounds over which the period is taken: unequal parts may repeat themselves after two or three only.
const PERIOD_ROUNDS: usize = 4;

/// What a simulation shows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Simulated {
    /// When the last stage ends.
    pub end: Seconds,
    /// Mean time between micro-batches at the start of the model, over the last rounds of as many as there are stages:
    /// the period of the steady state, if it was reached.
    pub period: Seconds,
}

/// Each stage executes its passes in the schedule's order, each as soon as the stage is free and its input has arrived.
///
/// `parts` are stage-major. Complexity: O(stages · parts · micro-batches).
pub fn simulate(pipeline: Pipeline, parts: &[StageTime], transfer: Seconds) -> Simulated {
    let orders: Vec<Vec<StagePass>> = (0..pipeline.num_stages).map(|stage| pass_order(pipeline, stage)).collect();
    let mut events = Events::new(pipeline, parts, transfer);
    let mut next = vec![0usize; orders.len()];
    let mut remaining: usize = orders.iter().map(Vec::len).sum();
    while remaining > 0 {
        let before = remaining;
        for stage in (0..orders.len()).chain((0..orders.len()).rev()) {
            while let Some(pass) = orders[stage].get(next[stage]) {
                if !events.execute(stage, *pass) {
                    break;
                }
                next[stage] += 1;
                remaining -= 1;
            }
        }
        assert!(remaining < before, "all schedules are free of deadlock");
    }
    let begun = &events.forward_end[..pipeline.micro_batches as usize];
    let before = begun.len().saturating_sub(1 + PERIOD_ROUNDS * orders.len());
    let span = begun.last().map_or(0.0, |last| last - begun[before]);
    let period = Seconds(span / (begun.len() - 1 - before).max(1) as f64);
    Simulated { end: Seconds(events.free.into_iter().fold(0.0, f64::max)), period }
}

/// When passes ended: not a number before they do.
struct Events<'a> {
    pipeline: Pipeline,
    parts: &'a [StageTime],
    transfer: f64,
    forward_end: Vec<f64>,
    backward_end: Vec<f64>,
    free: Vec<f64>,
}

impl<'a> Events<'a> {
    fn new(pipeline: Pipeline, parts: &'a [StageTime], transfer: Seconds) -> Events<'a> {
        let passes = (pipeline.num_parts() * pipeline.micro_batches) as usize;
        Events {
            pipeline,
            parts,
            transfer: transfer.0,
            forward_end: vec![f64::NAN; passes],
            backward_end: vec![f64::NAN; passes],
            free: vec![0.0; pipeline.num_stages as usize],
        }
    }

    /// Executes a pass; `false` if its input is not there yet.
    fn execute(&mut self, stage: usize, pass: StagePass) -> bool {
        let pipeline = self.pipeline;
        let position = pipeline.position(stage as u64, pass.part);
        let at = |position: u64| (position * pipeline.micro_batches + pass.micro_batch) as usize;
        let sent = |position: u64| {
            if pipeline.stage_and_part(position).0 == stage as u64 { 0.0 } else { self.transfer }
        };
        let last = pipeline.num_parts() - 1;
        let arrival = match pass.kind {
            PassKind::Forward if position == 0 => 0.0,
            PassKind::Forward => self.forward_end[at(position - 1)] + sent(position - 1),
            PassKind::Backward if position == last => self.forward_end[at(position)],
            PassKind::Backward => self.backward_end[at(position + 1)] + sent(position + 1),
            PassKind::Weights => self.backward_end[at(position)],
        };
        if arrival.is_nan() {
            return false;
        }
        let part = self.parts[stage * pipeline.virtual_stages as usize + pass.part as usize];
        let time = match pass.kind {
            PassKind::Forward => part.forward,
            PassKind::Backward if pipeline.schedule.splits_backward() => part.input_backward(),
            PassKind::Backward => part.backward,
            PassKind::Weights => part.weights,
        };
        let end = self.free[stage].max(arrival) + time.0;
        self.free[stage] = end;
        match pass.kind {
            PassKind::Forward => self.forward_end[at(position)] = end,
            PassKind::Backward => self.backward_end[at(position)] = end,
            PassKind::Weights => {}
        }
        true
    }
}
