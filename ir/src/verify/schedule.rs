//! Rules on schedules: every pass once, in order, every message received, no deadlock.
//!
//! Ranks of a stage execute the same passes and their collectives in the same order, so the ranks of a
//! stage are folded into one: the happens-before graph over all ranks is acyclic if and only if the one
//! over stages is. Sends are buffered: they never wait. Receives wait for the neighbour's send.

use std::collections::{BTreeMap, BTreeSet};

use super::{Check, EDITED};
use crate::plan::{Plan, Stage};
use crate::program::{Direction, Program};
use crate::schedule::{Pass, unroll};
use crate::strategy::ScheduleKind;

/// A block of a stage: body and layer.
type Call = (u32, u64);

/// Micro-batch counts beyond which a schedule is not unrolled: its steady state repeats.
const MOST_MICRO_BATCHES: u64 = 4096;

/// Checks all schedules for several numbers of micro-batches.
pub fn check_schedules(plan: &Plan, program: &Program, check: &mut Check) {
    let stages = plan.strategy.pipeline_parallel;
    let planned = plan.strategy.num_micro_batches().min(MOST_MICRO_BATCHES);
    let counts: BTreeSet<u64> = [1, stages - 1, stages, stages + 1, planned].into_iter().filter(|m| *m > 0).collect();
    for micro_batches in counts {
        let before = check.problems.len();
        run(plan, program, micro_batches, Kind::Training, check);
        run(plan, program, micro_batches, Kind::Evaluation, check);
        if check.problems.len() > before {
            return;
        }
    }
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

/// How far a stage has come.
#[derive(Default)]
struct Progress {
    next: usize,
    /// Blocks passed forward, and still to be passed backward, by each micro-batch.
    forward: BTreeMap<u64, usize>,
    backward: BTreeMap<u64, usize>,
    /// Activations and gradients at hand.
    streams: BTreeSet<(Direction, u64)>,
    in_flight: u64,
}

fn run(plan: &Plan, program: &Program, micro_batches: u64, kind: Kind, check: &mut Check) {
    let mut passes = Vec::new();
    let mut chains = Vec::new();
    for (stage, code) in plan.stages.iter().zip(&program.stages) {
        let place = format!("program.stages[{}].{}", stage.stage.0, kind.name());
        let schedule = match kind {
            Kind::Training => &code.schedule,
            Kind::Evaluation => &code.evaluation,
        };
        let chain = chain(plan, program, stage);
        let limit = (2 * chain.len() + 4) * micro_batches as usize * 2 + 64;
        match unroll(schedule, micro_batches, limit) {
            Ok(unrolled) => passes.push(unrolled),
            Err(what) => return check.report(format!("{what} (for {micro_batches} micro-batches)"), &place, EDITED),
        }
        chains.push(chain);
    }
    let mut stages: Vec<Progress> = passes.iter().map(|_| Progress::default()).collect();
    let mut mail = BTreeSet::new();
    loop {
        let mut progress = false;
        for index in 0..stages.len() {
            while let Some(pass) = passes[index].get(stages[index].next).copied() {
                match step(plan, kind, index, pass, &mut stages[index], &chains[index], &mut mail) {
                    Ok(false) => break,
                    Ok(true) => stages[index].next += 1,
                    Err(what) => {
                        let place = format!("program.stages[{index}].{}, pass {}", kind.name(), stages[index].next);
                        return check.report(format!("{what} (for {micro_batches} micro-batches)"), &place, EDITED);
                    }
                }
                progress = true;
            }
        }
        if !progress {
            break;
        }
    }
    finish(micro_batches, kind, &passes, &stages, &chains, &mail, check);
}

/// Takes one pass; `false` if it waits.
fn step(
    plan: &Plan,
    kind: Kind,
    index: usize,
    pass: Pass,
    stage: &mut Progress,
    chain: &[Call],
    mail: &mut BTreeSet<(usize, Direction, u64)>,
) -> Result<bool, String> {
    let count = plan.stages.len();
    match pass {
        Pass::Receive(direction, batch) => {
            let sender = match direction {
                Direction::Activation => index.checked_sub(1),
                Direction::Gradient => Some(index + 1).filter(|sender| *sender < count),
            };
            let sender = sender.ok_or_else(|| format!("{direction:?} is received from outside the pipeline"))?;
            if !mail.remove(&(sender, direction, batch)) {
                return Ok(false);
            }
            insert(&mut stage.streams, direction, batch)?;
        }
        Pass::Send(direction, batch) => {
            let inside = match direction {
                Direction::Activation => index + 1 < count && stage.forward.get(&batch) == Some(&chain.len()),
                Direction::Gradient => index > 0 && stage.backward.get(&batch) == Some(&0),
            };
            if !inside || !stage.streams.remove(&(direction, batch)) {
                return Err(format!("{direction:?} of micro-batch {batch} is sent but not at hand"));
            }
            mail.insert((index, direction, batch));
        }
        Pass::Forward(body, layer, batch) => {
            let done = stage.forward.entry(batch).or_insert(0);
            if chain.get(*done) != Some(&(body, layer)) {
                return Err(format!("body {body} of layer {layer} is out of order forward for micro-batch {batch}"));
            }
            *done += 1;
            let first = *done == 1;
            let last = *done == chain.len();
            let enters = !(first && index == 0);
            if enters && !stage.streams.remove(&(Direction::Activation, batch)) {
                return Err(format!("the activation of micro-batch {batch} is not at hand"));
            }
            if first {
                stage.in_flight += 1;
                let behind = (count - index) as u64;
                let most = match (kind, plan.strategy.schedule) {
                    (Kind::Evaluation, _) | (_, ScheduleKind::GPipe) => u64::MAX,
                    (Kind::Training, ScheduleKind::OneForwardOneBackward) => behind,
                };
                if stage.in_flight > most {
                    return Err(format!("{} micro-batches are in flight", stage.in_flight));
                }
            }
            let ends_in_loss = last && index + 1 == count;
            if !ends_in_loss {
                insert(&mut stage.streams, Direction::Activation, batch)?;
            }
        }
        Pass::Backward(..) if kind == Kind::Evaluation => return Err("an evaluation goes backward".to_owned()),
        Pass::Backward(body, layer, batch) => {
            if stage.forward.get(&batch) != Some(&chain.len()) {
                return Err(format!("micro-batch {batch} goes backward before it has gone forward"));
            }
            let left = stage.backward.entry(batch).or_insert(chain.len());
            if left.checked_sub(1).and_then(|position| chain.get(position)) != Some(&(body, layer)) {
                return Err(format!("body {body} of layer {layer} is out of order backward for micro-batch {batch}"));
            }
            let starts_at_loss = *left == chain.len() && index + 1 == count;
            *left -= 1;
            let ends = *left == 0;
            if !starts_at_loss && !stage.streams.remove(&(Direction::Gradient, batch)) {
                return Err(format!("the gradient of micro-batch {batch} is not at hand"));
            }
            if ends {
                stage.in_flight -= 1;
            }
            if !(ends && index == 0) {
                insert(&mut stage.streams, Direction::Gradient, batch)?;
            }
        }
    }
    Ok(true)
}

fn insert(streams: &mut BTreeSet<(Direction, u64)>, direction: Direction, batch: u64) -> Result<(), String> {
    match streams.insert((direction, batch)) {
        true => Ok(()),
        false => Err(format!("two {direction:?}s of micro-batch {batch} are at hand")),
    }
}

fn finish(
    micro_batches: u64,
    kind: Kind,
    passes: &[Vec<Pass>],
    stages: &[Progress],
    chains: &[Vec<Call>],
    mail: &BTreeSet<(usize, Direction, u64)>,
    check: &mut Check,
) {
    for (index, stage) in stages.iter().enumerate() {
        let place = format!("program.stages[{index}].{}", kind.name());
        if stage.next < passes[index].len() {
            let what =
                format!("deadlock: {:?} waits for ever with {micro_batches} micro-batches", passes[index][stage.next]);
            check.report(what, &place, EDITED);
        }
        let all = (0..micro_batches).all(|batch| {
            let back = kind == Kind::Evaluation || stage.backward.get(&batch) == Some(&0);
            stage.forward.get(&batch) == Some(&chains[index].len()) && back
        });
        if !all || stage.forward.len() as u64 != micro_batches || !stage.streams.is_empty() {
            let what = format!("not every micro-batch of {micro_batches} goes forward and backward once");
            check.report(what, &place, EDITED);
        }
    }
    if let Some((stage, direction, batch)) = mail.first() {
        let what = format!("{direction:?} of micro-batch {batch} is never received");
        check.report(what, &format!("program.stages[{stage}].{}", kind.name()), EDITED);
    }
}
