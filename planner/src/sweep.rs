//! The best layout for each of several numbers of GPUs, and which of them to choose.

use std::ops::RangeInclusive;

use ir::error::Problem;
use ir::graph::ModelGraph;
use ir::plan::{Estimate, StopReason};
use ir::strategy::Strategy;
use ir::units::Bytes;

use crate::error::Error;
use crate::lower::estimate;
use crate::objective::{Expense, Objective, expense};
use crate::request::{GPU_LIMIT, Request, check_request};
use crate::search::{Outcome, search_best};
use crate::space::Rejection;
use crate::training::{Training, training};
use crate::watch::Watch;

/// One number of GPUs.
#[derive(Clone, Debug)]
pub struct Point {
    /// GPUs.
    pub gpus: u64,
    /// The best layout, or why there is none.
    pub best: Result<Best, String>,
}

/// The best layout for a number of GPUs.
#[derive(Clone, Debug)]
pub struct Best {
    /// The layout.
    pub strategy: Strategy,
    /// What a step costs.
    pub estimate: Estimate,
    /// The training, where a number of tokens was given.
    pub training: Option<Training>,
    /// What the training takes, or a step without one.
    pub expense: Expense,
    /// Memory that the fullest rank leaves.
    pub margin: Bytes,
    /// Whether no other number of GPUs is at least as good in time, GPU-hours and memory margin and better in one.
    pub pareto: bool,
}

/// Points of a sweep and the one to choose.
#[derive(Clone, Debug)]
pub struct Sweep {
    /// By rising number of GPUs.
    pub points: Vec<Point>,
    /// Index of the point that the objective prefers.
    pub recommended: Option<usize>,
    /// Whether all points were searched.
    pub stop_reason: StopReason,
}

/// The multiples of `node_gpus` in a range, rising.
///
/// # Errors
/// A problem if the range is reversed, holds none of them, or goes beyond what a request may have.
pub fn counts(range: &RangeInclusive<u64>, node_gpus: u64) -> Result<Vec<u64>, Problem> {
    let (first, last) = (*range.start(), *range.end());
    let shown = format!("--gpus {first}..{last}");
    if first > last {
        let what = format!("the range {first}..{last} is reversed");
        return Err(Problem::new(what, shown, format!("give {last}..{first}")));
    }
    if first == 0 || last > GPU_LIMIT {
        let what = format!("the range {first}..{last} is not within 1..{GPU_LIMIT}");
        return Err(Problem::new(what, shown, format!("give 1 to {GPU_LIMIT} GPUs")));
    }
    // A request refuses nodes of no GPUs by itself.
    let node_gpus = node_gpus.max(1);
    let counts: Vec<u64> = (first.div_ceil(node_gpus)..=last / node_gpus).map(|nodes| nodes * node_gpus).collect();
    if counts.is_empty() {
        let below = (first / node_gpus * node_gpus).max(node_gpus);
        let what = format!("the range {first}..{last} holds no multiple of node-gpus {node_gpus}");
        return Err(Problem::new(what, shown, format!("give {below}..{}", last.next_multiple_of(node_gpus))));
    }
    Ok(counts)
}

/// Searches each number of GPUs; the request's own is not looked at.
///
/// # Errors
/// `Error::BadInput` if the request cannot be used with any of them.
pub fn sweep(
    request: &Request,
    graph: &ModelGraph,
    counts: &[u64],
    tokens: Option<u64>,
    objective: Objective,
    watch: &Watch,
) -> Result<Sweep, Error> {
    let at = |gpus: &u64| Request { gpus: *gpus, top: 1, ..request.clone() };
    if counts.iter().all(|gpus| check_request(&at(gpus)).is_err())
        && let Some(first) = counts.first()
    {
        check_request(&at(first))?;
    }
    watch.begin(counts.len() as u64);
    let search = |gpus: &u64| {
        let point = Point { gpus: *gpus, best: best(&at(gpus), graph, tokens, watch) };
        watch.advance();
        point
    };
    let mut points: Vec<Point> = counts.iter().map(search).collect();
    mark_pareto(&mut points);
    let recommended = recommended(&points, objective);
    let stop_reason = if watch.stopped() { StopReason::Interrupted } else { StopReason::Optimal };
    Ok(Sweep { points, recommended, stop_reason })
}

fn best(request: &Request, graph: &ModelGraph, tokens: Option<u64>, watch: &Watch) -> Result<Best, String> {
    if watch.stopped() {
        return Err("interrupted before this number of GPUs was searched".to_owned());
    }
    check_request(request).map_err(|error| in_words(&error))?;
    let outcome = search_best(request, graph, &watch.of_a_step());
    if outcome.stop_reason == StopReason::Interrupted {
        return Err("interrupted while this number of GPUs was searched".to_owned());
    }
    let Some(scored) = outcome.best.first() else { return Err(why_none(request, &outcome)) };
    let estimate = estimate(request, graph, scored);
    let training = tokens.map(|tokens| training(request, tokens, estimate.step, estimate.checkpoint));
    let step = || expense(&request.machine, request.gpus, estimate.step);
    let expense = training.as_ref().map_or_else(step, |training| training.expense);
    let margin = request.machine.usable_memory() - estimate.device_memory;
    Ok(Best { strategy: scored.strategy.clone(), estimate, training, expense, margin, pareto: false })
}

fn in_words(error: &Error) -> String {
    let problems = error.problems().iter().map(|problem| format!("{}: {}", problem.what, problem.help));
    problems.collect::<Vec<_>>().join("; ")
}

/// Why a search found nothing, from its counts.
fn why_none(request: &Request, outcome: &Outcome) -> String {
    let full = outcome.rejected.get(&Rejection::OutOfMemory);
    if let Some(full) = full {
        let usable = request.machine.usable_memory();
        return format!("none of {full} layouts that could run fits into the {usable} a GPU that are usable");
    }
    let named = |(reason, count): (&Rejection, &u64)| format!("{} {count}", reason.name().replace('_', " "));
    let reasons: Vec<String> = outcome.rejected.iter().map(named).collect();
    format!("none of {} layouts can run: {}", outcome.enumerated, reasons.join(", "))
}

/// Marks the points that no other point dominates. Quadratic in their number.
fn mark_pareto(points: &mut [Point]) {
    let all: Vec<[f64; 3]> = points.iter().filter_map(|point| point.best.as_ref().ok()).map(sides).collect();
    for best in points.iter_mut().filter_map(|point| point.best.as_mut().ok()) {
        let own = sides(best);
        best.pareto = !all.iter().any(|other| dominates(other, &own));
    }
}

/// Time, GPU-hours and memory margin, each the better the smaller.
fn sides(best: &Best) -> [f64; 3] {
    [best.expense.time.0, best.expense.gpu_hours, -(best.margin.0 as f64)]
}

fn dominates(one: &[f64; 3], other: &[f64; 3]) -> bool {
    one != other && one.iter().zip(other).all(|(one, other)| one <= other)
}

/// The point with the least value; of equal ones that with the fewest GPUs.
fn recommended(points: &[Point], objective: Objective) -> Option<usize> {
    let value = |(index, point): (usize, &Point)| Some((index, objective.of(&point.best.as_ref().ok()?.expense)?));
    let values = points.iter().enumerate().filter_map(value);
    values.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(index, _)| index)
}
