//! Rules on schedules: every pass once, in order, every message received, no deadlock, and gradients summed
//! over replicas only when they are complete.
//!
//! Ranks of a stage execute the same passes and their collectives in the same order, so the ranks of a
//! stage are folded into one: the happens-before graph over all ranks is acyclic if and only if the one
//! over stages is. Sends are buffered: they never wait. Receives wait for the neighbour's send.

use std::collections::{BTreeMap, BTreeSet};

use super::{Check, EDITED};
use crate::pipeline::{Pipeline, in_flight};
use crate::plan::{Plan, Stage};
use crate::program::{Conversion, Direction, ParameterRef, Program};
use crate::schedule::{Pass, unroll};

/// A block of a stage: body and layer.
type Call = (u32, u64);

/// Micro-batch counts beyond which a schedule is not unrolled: its steady state repeats.
const MOST_MICRO_BATCHES: u64 = 4096;

/// Sums over replicas that a stage's schedule starts.
pub type Reductions = BTreeMap<ParameterRef, Conversion>;

/// Checks all schedules for several numbers of micro-batches, and gives the sums that each stage starts.
pub fn check_schedules(plan: &Plan, program: &Program, check: &mut Check) -> Vec<Reductions> {
    let stages = plan.strategy.pipeline_parallel;
    let planned = plan.strategy.num_micro_batches().min(MOST_MICRO_BATCHES);
    let counts: BTreeSet<u64> = [1, stages - 1, stages, stages + 1, planned].into_iter().filter(|m| *m > 0).collect();
    let mut started: Option<Vec<Reductions>> = None;
    for micro_batches in counts {
        let before = check.problems.len();
        let reductions = run(plan, program, micro_batches, Kind::Training, check);
        run(plan, program, micro_batches, Kind::Evaluation, check);
        if started.as_ref().is_some_and(|others| *others != reductions) {
            let what = "which gradients are summed over replicas depends on the number of micro-batches";
            check.report(what, "program.stages", EDITED);
        }
        started = Some(reductions);
        if check.problems.len() > before {
            break;
        }
    }
    started.unwrap_or_default()
}

/// Which of a stage's schedules is followed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Training,
    Evaluation,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Training => "schedule",
            Kind::Evaluation => "evaluation",
        }
    }
}

/// The blocks of a stage in model order.
pub fn chain(plan: &Plan, program: &Program, stage: &Stage) -> Vec<Call> {
    let last = program.bodies.len() as u32 - 1;
    let runs = crate::model::layer_runs(&plan.model);
    let mut chain = Vec::new();
    if stage.embedding {
        chain.push((0, 0));
    }
    for layer in stage.layers.0..stage.layers.1 {
        let mut end = 0;
        let run = runs.iter().position(|run| {
            end += run.count;
            layer < end
        });
        chain.push((run.map_or(last, |run| run as u32 + 1), layer));
    }
    if stage.head {
        chain.push((last, 0));
    }
    chain
}

/// Messages on their way: sender, what, micro-batch.
type Mail = BTreeSet<(usize, Direction, u64)>;

/// One stage on its way through its schedule.
struct Walker {
    index: usize,
    /// Whether it is the last stage.
    last: bool,
    kind: Kind,
    micro_batches: u64,
    most_in_flight: u64,
    chain: Vec<Call>,
    /// Parameters of each body.
    parameters: Vec<u32>,
    passes: Vec<Pass>,
    next: usize,
    /// Blocks that each micro-batch has passed forward.
    forward: BTreeMap<u64, usize>,
    /// Blocks that each micro-batch still has to pass backward.
    backward: BTreeMap<u64, usize>,
    /// Activations and gradients at hand.
    streams: BTreeSet<(Direction, u64)>,
    in_flight: u64,
    started: Reductions,
}

fn run(plan: &Plan, program: &Program, micro_batches: u64, kind: Kind, check: &mut Check) -> Vec<Reductions> {
    let for_count = |what: String| format!("{what} (for {micro_batches} micro-batches)");
    let mut walkers = Vec::new();
    for index in 0..plan.stages.len() {
        match walker(plan, program, index, micro_batches, kind) {
            Ok(walker) => walkers.push(walker),
            Err(what) => {
                let place = format!("program.stages[{index}].{}", kind.name());
                check.report(for_count(what), &place, EDITED);
                return Vec::new();
            }
        }
    }
    let mut mail = Mail::new();
    loop {
        let mut progress = false;
        for walker in &mut walkers {
            match walker.walk(&mut mail) {
                Ok(moved) => progress |= moved,
                Err(what) => {
                    let place = format!("program.stages[{}].{}, pass {}", walker.index, kind.name(), walker.next);
                    check.report(for_count(what), &place, EDITED);
                    return Vec::new();
                }
            }
        }
        if !progress {
            break;
        }
    }
    walkers.iter().for_each(|walker| walker.check_end(micro_batches, check));
    if let Some((stage, direction, batch)) = mail.first() {
        let what = format!("{direction:?} of micro-batch {batch} is never received");
        check.report(what, &format!("program.stages[{stage}].{}", kind.name()), EDITED);
    }
    walkers.into_iter().map(|walker| walker.started).collect()
}

fn walker(plan: &Plan, program: &Program, index: usize, micro_batches: u64, kind: Kind) -> Result<Walker, String> {
    let code = &program.stages[index];
    let schedule = match kind {
        Kind::Training => &code.schedule,
        Kind::Evaluation => &code.evaluation,
    };
    let chain = chain(plan, program, &plan.stages[index]);
    let parameters: Vec<u32> = program.bodies.iter().map(|body| body.parameters.len() as u32).collect();
    let most_parameters = parameters.iter().copied().max().unwrap_or(0) as usize;
    let limit = (2 * chain.len() + 4) * micro_batches as usize * 2 + chain.len() * most_parameters + 64;
    let behind = (plan.stages.len() - index) as u64;
    let most_in_flight = match kind {
        Kind::Evaluation => u64::MAX,
        Kind::Training => in_flight(Pipeline { micro_batches, ..Pipeline::of(&plan.strategy) }, index as u64),
    };
    Ok(Walker {
        index,
        last: behind == 1,
        kind,
        micro_batches,
        most_in_flight,
        chain,
        parameters,
        passes: unroll(schedule, micro_batches, limit)?,
        next: 0,
        forward: BTreeMap::new(),
        backward: BTreeMap::new(),
        streams: BTreeSet::new(),
        in_flight: 0,
        started: Reductions::new(),
    })
}

impl Walker {
    /// Goes on until a message is missing or the schedule ends; whether it moved at all.
    fn walk(&mut self, mail: &mut Mail) -> Result<bool, String> {
        let start = self.next;
        while let Some(pass) = self.passes.get(self.next).copied() {
            match pass {
                Pass::Receive(direction, batch) => {
                    if !self.receive(mail, direction, batch)? {
                        break;
                    }
                }
                Pass::Send(direction, batch) => self.send(mail, direction, batch)?,
                Pass::Forward(body, layer, batch) => self.pass_forward((body, layer), batch)?,
                Pass::Backward(body, layer, batch) => self.pass_backward((body, layer), batch)?,
                Pass::StartReduction(body, layer, parameters, conversion) => {
                    self.start_reduction((body, layer), parameters, conversion)?;
                }
            }
            self.next += 1;
        }
        Ok(self.next > start)
    }

    /// `false` if the message is not there yet.
    fn receive(&mut self, mail: &mut Mail, direction: Direction, batch: u64) -> Result<bool, String> {
        let sender = match direction {
            Direction::Activation => self.index.checked_sub(1),
            Direction::Gradient => (!self.last).then_some(self.index + 1),
        };
        let sender = sender.ok_or_else(|| format!("{direction:?} is received from outside the pipeline"))?;
        let arrived = mail.remove(&(sender, direction, batch));
        if arrived {
            self.put(direction, batch)?;
        }
        Ok(arrived)
    }

    fn send(&mut self, mail: &mut Mail, direction: Direction, batch: u64) -> Result<(), String> {
        let ready = match direction {
            Direction::Activation => !self.last && self.forward.get(&batch) == Some(&self.chain.len()),
            Direction::Gradient => self.index > 0 && self.backward.get(&batch) == Some(&0),
        };
        if !ready {
            return Err(format!("{direction:?} of micro-batch {batch} is sent before it is ready"));
        }
        self.take(direction, batch)?;
        mail.insert((self.index, direction, batch));
        Ok(())
    }

    fn pass_forward(&mut self, call: Call, batch: u64) -> Result<(), String> {
        let done = self.forward.get(&batch).copied().unwrap_or(0);
        if self.chain.get(done) != Some(&call) {
            return Err(format!("body {} of layer {} is out of order forward for micro-batch {batch}", call.0, call.1));
        }
        self.forward.insert(batch, done + 1);
        if done == 0 {
            self.in_flight += 1;
            if self.in_flight > self.most_in_flight {
                return Err(format!("{} micro-batches are in flight", self.in_flight));
            }
        }
        if !(done == 0 && self.index == 0) {
            self.take(Direction::Activation, batch)?;
        }
        let ends_in_loss = self.last && done + 1 == self.chain.len();
        if ends_in_loss { Ok(()) } else { self.put(Direction::Activation, batch) }
    }

    fn pass_backward(&mut self, call: Call, batch: u64) -> Result<(), String> {
        if self.kind == Kind::Evaluation {
            return Err("an evaluation goes backward".to_owned());
        }
        let all = self.chain.len();
        if self.forward.get(&batch) != Some(&all) {
            return Err(format!("micro-batch {batch} goes backward before it has gone forward"));
        }
        let left = self.backward.get(&batch).copied().unwrap_or(all);
        if left.checked_sub(1).and_then(|position| self.chain.get(position)) != Some(&call) {
            return Err(format!(
                "body {} of layer {} is out of order backward for micro-batch {batch}",
                call.0, call.1
            ));
        }
        self.backward.insert(batch, left - 1);
        let starts_at_loss = self.last && left == all;
        if !starts_at_loss {
            self.take(Direction::Gradient, batch)?;
        }
        if left == 1 {
            self.in_flight -= 1;
        }
        if left == 1 && self.index == 0 { Ok(()) } else { self.put(Direction::Gradient, batch) }
    }

    /// Every micro-batch must have added to the gradients, and nothing adds to them later: each goes backward once.
    fn start_reduction(&mut self, call: Call, parameters: (u32, u32), conversion: Conversion) -> Result<(), String> {
        let (body, layer) = call;
        let position = self.chain.iter().position(|other| *other == call);
        let known = self.parameters.get(body as usize).is_some_and(|count| parameters.1 <= *count);
        let (Some(position), true, true) = (position, known, parameters.0 < parameters.1) else {
            return Err(format!("body {body} of layer {layer} has no parameters {parameters:?} on this stage"));
        };
        let complete = self.backward.values().filter(|left| **left <= position).count() as u64;
        if complete != self.micro_batches {
            return Err(format!("gradients of body {body}, layer {layer} are summed before they are complete"));
        }
        for parameter in parameters.0..parameters.1 {
            if self.started.insert(ParameterRef { body, layer, parameter }, conversion).is_some() {
                return Err(format!("parameter {parameter} of body {body}, layer {layer} is summed twice"));
            }
        }
        Ok(())
    }

    fn put(&mut self, direction: Direction, batch: u64) -> Result<(), String> {
        match self.streams.insert((direction, batch)) {
            true => Ok(()),
            false => Err(format!("two {direction:?}s of micro-batch {batch} are at hand")),
        }
    }

    fn take(&mut self, direction: Direction, batch: u64) -> Result<(), String> {
        match self.streams.remove(&(direction, batch)) {
            true => Ok(()),
            false => Err(format!("{direction:?} of micro-batch {batch} is not at hand")),
        }
    }

    /// Whether the stage came to the end with every micro-batch.
    fn check_end(&self, micro_batches: u64, check: &mut Check) {
        let place = format!("program.stages[{}].{}", self.index, self.kind.name());
        if let Some(pass) = self.passes.get(self.next) {
            let what = format!("deadlock: {pass:?} waits for ever with {micro_batches} micro-batches");
            check.report(what, &place, EDITED);
        }
        let all = (0..micro_batches).all(|batch| {
            let back = self.kind == Kind::Evaluation || self.backward.get(&batch) == Some(&0);
            self.forward.get(&batch) == Some(&self.chain.len()) && back
        });
        if !all || self.forward.len() as u64 != micro_batches || !self.streams.is_empty() {
            let what = format!("not every micro-batch of {micro_batches} goes all its ways once");
            check.report(what, &place, EDITED);
        }
    }
}
