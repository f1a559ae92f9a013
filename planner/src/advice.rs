//! What to change: the limits of the chosen layout, the changes that would relieve them, what more GPUs need, better
//! shapes of the model, and what fixed choices cost. Every gain is a prediction with the change made.

use ir::graph::ModelGraph;
use ir::model::{SIZE_LIMIT, Workload};
use ir::plan::{Binding, Limit, StopReason};
use ir::strategy::Strategy;
use ir::units::Seconds;

use crate::explain::describe;
use crate::limits::{in_words, limits, on_machine};
use crate::request::{FixedChoices, Request, check_request};
use crate::search::{Costs, Scored, score_layout, search_best};
use crate::shapes::{ShapeAdvice, shape_advice};
use crate::watch::Watch;

/// Gain from which a change is worth mentioning.
const WORTH: f64 = 0.01;
/// Batches that are named for more GPUs.
const BATCHES: u64 = 2;

/// What a user could change.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// The fullest stage.
    pub fullest_stage: usize,
    /// What binds, the heaviest first.
    pub limits: Vec<Binding>,
    /// Changes that would gain something, in the order of the limits that they relieve, then of their gain.
    pub changes: Vec<Change>,
    /// One more replica.
    pub more_gpus: Option<MoreGpus>,
    /// Sizes of the model that would run better.
    pub shapes: Vec<ShapeAdvice>,
    /// What the fixed choices cost, if there are any.
    pub constraint: Option<Constraint>,
}

/// A change of machine, batch or model.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The limit that it relieves.
    pub relieves: Limit,
    /// What to change.
    pub what: String,
    /// The layout, where another one than the chosen would be best.
    pub layout: Option<Strategy>,
    /// Time for the tokens of the present step.
    pub time: Seconds,
    /// The share of the present time that goes away.
    pub gain: f64,
}

/// One more replica, or as many more as whole nodes need.
#[derive(Clone, Debug, PartialEq)]
pub struct MoreGpus {
    /// GPUs more.
    pub gpus: u64,
    /// Replicas then.
    pub data_parallel: u64,
    /// Nearest global batches that are whole micro-batches on each replica; the present one alone if it is.
    pub global_batches: Vec<u64>,
    /// Step with the first of them.
    pub step: Seconds,
    /// Tokens per second then, over those now.
    pub speed_up: f64,
}

/// The fixed choices against the free optimum.
#[derive(Clone, Debug, PartialEq)]
pub struct Constraint {
    /// The choices as flags.
    pub flags: Vec<String>,
    /// The free optimum.
    pub free: Strategy,
    /// Its step.
    pub free_step: Seconds,
    /// Time that the fixed choices add to a step.
    pub more: Seconds,
    /// `more` over the free step.
    pub ratio: f64,
}

/// Works out what to change; `None` once the watch is stopped. `costs` are of the request.
pub fn advise(
    request: &Request,
    graph: &ModelGraph,
    winner: &Scored,
    watch: &Watch,
    costs: &mut Costs,
) -> Option<Advice> {
    let (limits, roomier) = limits(request, graph, winner, watch, costs);
    let shapes = shape_advice(request, graph, winner, watch);
    let constraint = constraint(request, graph, winner, watch);
    let advice = Advice {
        fullest_stage: winner.fullest_stage().0,
        changes: changes(request, graph, winner, &limits, roomier.as_ref(), shapes.first()),
        limits,
        more_gpus: more_gpus(request, graph, winner),
        shapes,
        constraint,
    };
    (!watch.stopped()).then_some(advice)
}

fn changes(
    request: &Request,
    graph: &ModelGraph,
    winner: &Scored,
    limits: &[Binding],
    roomier: Option<&Scored>,
    shape: Option<&ShapeAdvice>,
) -> Vec<Change> {
    let mut changes = vec![twice_the_network(request, graph, winner), twice_the_links(request, graph, winner)];
    changes.push(twice_the_batch(request, graph, winner));
    changes.push(roomier.map(|roomier| twice_the_memory(request, winner, roomier)));
    changes.push(shape.map(|shape| better_shape(winner, shape)));
    let mut changes: Vec<Change> = changes.into_iter().flatten().filter(|change| change.gain > WORTH).collect();
    let weight = |limit: Limit| limits.iter().position(|binding| binding.limit == limit);
    changes.sort_by(|a, b| weight(a.relieves).cmp(&weight(b.relieves)).then(b.gain.total_cmp(&a.gain)));
    changes
}

fn change(relieves: Limit, what: String, winner: &Scored, time: Seconds) -> Change {
    let gain = 1.0 - time.0 / winner.prediction.step.0;
    Change { relieves, what, layout: None, time, gain }
}

fn twice_the_network(request: &Request, graph: &ModelGraph, winner: &Scored) -> Option<Change> {
    let faster = on_machine(request, |machine| {
        let card = &mut machine.cluster.inter.bandwidth_per_nic_per_direction.value;
        *card = *card * 2.0;
    });
    let scored = score_layout(&faster, graph, &winner.strategy)?;
    Some(change(Limit::Network, "network cards twice as fast".to_owned(), winner, scored.prediction.step))
}

fn twice_the_links(request: &Request, graph: &ModelGraph, winner: &Scored) -> Option<Change> {
    let faster = on_machine(request, |machine| {
        let links = &mut machine.cluster.intra.bandwidth_per_gpu_per_direction.value;
        *links = *links * 2.0;
    });
    let scored = score_layout(&faster, graph, &winner.strategy)?;
    Some(change(Limit::FastLinks, "links inside nodes twice as fast".to_owned(), winner, scored.prediction.step))
}

/// A batch of twice the sequences fills the pipeline better and spreads what each step costs once.
fn twice_the_batch(request: &Request, graph: &ModelGraph, winner: &Scored) -> Option<Change> {
    let global_batch = request.workload.global_batch * 2;
    let scored = score_batch(request, graph, Strategy { global_batch, ..winner.strategy.clone() })?;
    let what = format!("a global batch of {global_batch}");
    Some(change(Limit::Bubble, what, winner, scored.prediction.step * 0.5))
}

fn twice_the_memory(request: &Request, winner: &Scored, roomier: &Scored) -> Change {
    let memory = request.machine.device.memory.value;
    let what = format!("GPUs with {} instead of {memory}", memory * 2);
    let layout = Some(roomier.strategy.clone());
    Change { layout, ..change(Limit::Memory, what, winner, roomier.prediction.step) }
}

fn better_shape(winner: &Scored, shape: &ShapeAdvice) -> Change {
    let what = format!("{} {} instead of {}", shape.field, shape.to, shape.from);
    change(Limit::MatmulShape, what, winner, winner.prediction.step * (1.0 - shape.gain))
}

/// Predicts a layout with its own global batch; `None` if the batch is beyond what a request may have.
fn score_batch(request: &Request, graph: &ModelGraph, strategy: Strategy) -> Option<Scored> {
    let global_batch = strategy.global_batch;
    let workload = Workload { global_batch, ..request.workload };
    let gpus = strategy.world_size();
    let larger = Request { workload, gpus, fixed: FixedChoices::default(), ..request.clone() };
    (global_batch <= SIZE_LIMIT && check_request(&larger).is_ok()).then_some(())?;
    score_layout(&larger, graph, &strategy)
}

/// The same layout with more replicas, as few as make whole nodes.
fn more_gpus(request: &Request, graph: &ModelGraph, winner: &Scored) -> Option<MoreGpus> {
    let now = &winner.strategy;
    let each = now.world_size() / now.data_parallel;
    let added = (1..=request.machine.node_gpus).find(|more| (more * each).is_multiple_of(request.machine.node_gpus))?;
    let data_parallel = now.data_parallel + added;
    let unit = data_parallel.checked_mul(now.micro_batch)?;
    let first = request.workload.global_batch.checked_next_multiple_of(unit)?;
    let count = if first == request.workload.global_batch { 1 } else { BATCHES };
    let shard_group = if now.shard_group == now.data_parallel { data_parallel } else { now.shard_group };
    data_parallel.is_multiple_of(shard_group).then_some(())?;
    let larger = Strategy { data_parallel, shard_group, global_batch: first, ..now.clone() };
    let step = score_batch(request, graph, larger)?.prediction.step;
    let batches = first as f64 / request.workload.global_batch as f64;
    Some(MoreGpus {
        gpus: added * each,
        data_parallel,
        global_batches: (0..count).map(|index| first + index * unit).collect(),
        step,
        speed_up: batches * winner.prediction.step.0 / step.0,
    })
}

fn constraint(request: &Request, graph: &ModelGraph, winner: &Scored, watch: &Watch) -> Option<Constraint> {
    let flags = request.fixed.flags();
    if flags.is_empty() {
        return None;
    }
    let free = Request { fixed: FixedChoices::default(), top: 1, ..request.clone() };
    let outcome = search_best(&free, graph, &watch.of_a_step());
    let best = outcome.best.into_iter().next().filter(|_| outcome.stop_reason == StopReason::Optimal)?;
    let free_step = best.prediction.step;
    let more = winner.prediction.step - free_step;
    Some(Constraint { flags, free: best.strategy, free_step, more, ratio: more.0 / free_step.0 })
}

/// The advice in sentences.
pub fn sentences(advice: &Advice) -> Vec<String> {
    let mut sentences = vec![binding_sentence(advice)];
    sentences.extend(advice.changes.first().map(change_sentence));
    sentences.extend(advice.more_gpus.as_ref().map(more_gpus_sentence));
    sentences.extend(advice.shapes.iter().map(shape_sentence));
    sentences.extend(advice.constraint.as_ref().map(constraint_sentence));
    sentences
}

fn binding_sentence(advice: &Advice) -> String {
    match in_words(&advice.limits, advice.fullest_stage as u64) {
        None => "nothing but the speed of matrix products binds".to_owned(),
        Some(words) => format!("what binds, by the share of the step that goes without it: {words}"),
    }
}

fn change_sentence(change: &Change) -> String {
    let layout = change.layout.as_ref().map(|layout| format!(" with {}", describe(layout))).unwrap_or_default();
    format!(
        "the first change that would help: {}: {} for the same tokens, {:+.1} %{layout}",
        change.what,
        change.time,
        -change.gain * 100.0
    )
}

fn more_gpus_sentence(more: &MoreGpus) -> String {
    let batches: Vec<String> = more.global_batches.iter().map(u64::to_string).collect();
    format!(
        "{} more GPUs (data {}) need a global batch of {}: a step of {} then, {:+.1} % tokens a second",
        more.gpus,
        more.data_parallel,
        batches.join(" or "),
        more.step,
        (more.speed_up - 1.0) * 100.0
    )
}

fn shape_sentence(shape: &ShapeAdvice) -> String {
    format!(
        "{} {} instead of {} ({}): {:+.1} % time for the same work",
        shape.field,
        shape.to,
        shape.from,
        shape.reason,
        -shape.gain * 100.0
    )
}

fn constraint_sentence(constraint: &Constraint) -> String {
    let Constraint { flags, free, free_step, more, ratio } = constraint;
    if *ratio <= 0.0 {
        return format!("{} cost nothing: the free optimum takes {free_step} too", flags.join(" "));
    }
    format!(
        "{} cost {more} a step, {:+.1} %, against the free optimum ({}: {free_step})",
        flags.join(" "),
        ratio * 100.0,
        describe(free)
    )
}
