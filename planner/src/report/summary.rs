//! The text that `plan` prints after a search.

use std::ops::RangeInclusive;

use ir::graph::count_parameters;
use ir::model::{ModelSpec, Workload};
use ir::plan::{Estimate, Plan, StopReason};
use ir::provenance::Provenance;
use ir::strategy::Strategy;
use ir::units::Seconds;

use super::layout::layout_columns;
use super::{DAY, HOUR, KILOWATT_HOUR, MEGAWATT_HOUR, MINUTE, amount, paragraph, table};
use crate::explain::{describe, runs};
use crate::objective::{Expense, expense, expense_provenance};
use crate::request::Request;
use crate::training::Training;

/// Widest list of stage sizes that is printed.
const LIST_WIDTH: usize = 60;

/// What was planned for which machine.
#[derive(Clone, Debug)]
pub struct Heading<'a> {
    /// The model.
    pub model: &'a ModelSpec,
    /// What a step processes.
    pub workload: Workload,
    /// A number of GPUs or a range.
    pub gpus: String,
    /// The cluster's name.
    pub cluster: &'a str,
    /// Ranks of a node.
    pub node_gpus: u64,
    /// The stack's name.
    pub stack: &'a str,
}

impl Heading<'_> {
    /// Of a plan.
    pub fn of_plan(plan: &Plan) -> Heading<'_> {
        Heading {
            model: &plan.model,
            workload: plan.workload,
            gpus: plan.mesh.world_size().to_string(),
            cluster: &plan.inputs.cluster,
            node_gpus: plan.inputs.node_gpus,
            stack: &plan.inputs.stack,
        }
    }

    /// Of a request for a range of numbers of GPUs.
    pub fn of_range<'a>(request: &'a Request, range: &RangeInclusive<u64>) -> Heading<'a> {
        let Request { model, workload, machine, .. } = request;
        Heading {
            model,
            workload: *workload,
            gpus: format!("{} to {}", range.start(), range.end()),
            cluster: &machine.cluster.name,
            node_gpus: machine.node_gpus,
            stack: &machine.stack.name,
        }
    }
}

/// The first line of output, with every default named.
pub fn header(heading: &Heading, defaults: &[&str]) -> String {
    let Heading { model, workload, gpus, cluster, node_gpus, stack } = heading;
    let defaults = match defaults {
        [] => String::new(),
        names => format!(" (defaults: {})", names.join(", ")),
    };
    paragraph(&format!(
        "{}, {:.1} B parameters, {gpus} GPUs of {cluster} in nodes of {node_gpus}, stack {stack}, sequence {}, batch \
         {}{defaults}",
        model.name,
        count_parameters(model) as f64 / 1e9,
        workload.sequence_length,
        workload.global_batch,
    ))
}

/// The chosen layout, what it should cost, the runners-up, the counts and the reasons.
pub fn body(
    request: &Request,
    plan: &Plan,
    alternatives: &[(Strategy, Estimate)],
    training: Option<&Training>,
) -> String {
    let mut text = String::new();
    let estimate = &plan.estimate;
    if plan.search.stop_reason == StopReason::Interrupted {
        text += "interrupted: the best so far, not proven to be the best\n";
    }
    text += &format!("{}\n", describe(&plan.strategy));
    if plan.strategy.pipeline_parallel > 1 {
        text += &format!("layers per stage: {}\n", shortened(&runs(&plan.strategy.layers_per_stage)));
    }
    text += &estimate_lines(plan, estimate);
    text += &expense_line(request, estimate);
    text += &training.map(training_lines).unwrap_or_default();
    text += &alternatives_table(alternatives);
    text += &counts(plan);
    for sentence in plan.search.explanations.iter().chain(&estimate.remarks) {
        text += &paragraph(&format!("- {sentence}"));
    }
    text
}

/// Step time, rates and memory, then the terms of the step.
pub fn estimate_lines(plan: &Plan, estimate: &Estimate) -> String {
    let gpu_seconds = estimate.step.0 * plan.mesh.world_size() as f64;
    let mut text = paragraph(&format!(
        "step {} ({} to {}), {:.0} tokens/s/GPU, {:.1} model and {:.1} hardware TFLOPs/GPU, MFU {:.1} %",
        estimate.step,
        estimate.interval.0,
        estimate.interval.1,
        estimate.tokens_per_second_per_gpu,
        estimate.model_flops.0 / gpu_seconds / 1e12,
        estimate.hardware_flops.0 / gpu_seconds / 1e12,
        estimate.mfu * 100.0,
    ));
    text += &format!(
        "memory {} of {} usable on the fullest rank (stage {}), checkpoint {}\n",
        estimate.device_memory, plan.inputs.usable_memory, estimate.fullest_stage.0, estimate.checkpoint,
    );
    let terms = estimate.terms.iter().filter(|(_, term)| term.time.0 > 0.0);
    let terms: Vec<String> = terms
        .map(|(term, value)| {
            let name = term.name().replace('_', " ");
            format!("{name} {} [{}]", value.time, value.provenance.name())
        })
        .collect();
    text + &paragraph(&terms.join(" + "))
}

/// What a step and a million tokens take.
fn expense_line(request: &Request, estimate: &Estimate) -> String {
    let tokens = (request.workload.global_batch * request.workload.sequence_length) as f64;
    let step = expense(&request.machine, request.gpus, estimate.step);
    let [price, power] = expense_provenance(&request.machine).map(|origin| origin.map_or("", Provenance::name));
    let million = |value: f64| amount(value / tokens * 1e6);
    let cost =
        step.cost.map(|cost| format!(", {} USD ({} a million tokens) [{price}]", amount(cost.0), million(cost.0)));
    let energy = step.energy.map(|energy| {
        let hours = energy.0 / KILOWATT_HOUR;
        format!(", {} kWh of the GPUs ({} a million tokens) [{power}]", amount(hours), million(hours))
    });
    let [cost, energy] = [cost, energy].map(Option::unwrap_or_default);
    paragraph(&format!("a step takes {} GPU-hours{cost}{energy}", amount(step.gpu_hours)))
}

/// A training: how long, what it takes, and what failures cost.
fn training_lines(training: &Training) -> String {
    let Expense { time, gpu_hours, cost, energy } = training.expense;
    let cost = cost.map(|cost| format!(", {} USD", amount(cost.0))).unwrap_or_default();
    let energy = energy.map(|energy| format!(", {} MWh", amount(energy.0 / MEGAWATT_HOUR))).unwrap_or_default();
    let text = paragraph(&format!(
        "{} tokens in {} steps: {}, {} GPU-hours{cost}{energy}",
        training.tokens,
        training.steps,
        duration(time),
        amount(gpu_hours)
    ));
    let failures = match &training.failures {
        None => "failures are not in it: the cluster has no field reliability".to_owned(),
        Some(failures) => format!(
            "a failure every {} ({} in all) and a restart of {}; a checkpoint of {} takes {}, best every {} steps \
             ({}): {:.1} % of the time is progress [{}]",
            duration(failures.interruptions.mean_time_between_failures),
            amount(failures.count),
            duration(failures.interruptions.restart),
            failures.checkpoint,
            failures.interruptions.checkpoint,
            failures.interval_steps,
            duration(failures.interval),
            failures.goodput * 100.0,
            failures.provenance.name(),
        ),
    };
    text + &paragraph(&failures)
}

/// A long time in the unit that people would use.
pub(super) fn duration(time: Seconds) -> String {
    match time.0 {
        s if !s.is_finite() => "without end".to_owned(),
        s if s >= 2.0 * DAY => format!("{:.1} days", s / DAY),
        s if s >= 2.0 * HOUR => format!("{:.1} hours", s / HOUR),
        s if s >= 2.0 * MINUTE => format!("{:.1} minutes", s / MINUTE),
        _ => time.to_string(),
    }
}

fn alternatives_table(alternatives: &[(Strategy, Estimate)]) -> String {
    let (titles, rows) = layout_columns(&alternatives.iter().map(|(strategy, _)| strategy).collect::<Vec<_>>());
    let header: Vec<&str> = [""].into_iter().chain(titles).chain(["step s", "MFU %", "GiB"]).collect();
    let row = |(index, (layout, (_, estimate))): (usize, (Vec<String>, &(Strategy, Estimate)))| {
        let numbers = [estimate.step.0, estimate.mfu * 100.0, estimate.device_memory.gib()];
        let decimals = [2, 1, 1].into_iter().zip(numbers).map(|(decimals, number)| format!("{number:.decimals$}"));
        [format!("{}", index + 1)].into_iter().chain(layout).chain(decimals).collect()
    };
    table(&header, rows.into_iter().zip(alternatives).enumerate().map(row))
}

fn counts(plan: &Plan) -> String {
    let list = |counts: &std::collections::BTreeMap<String, u64>| {
        let mut sorted: Vec<_> = counts.iter().collect();
        sorted.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
        sorted
            .into_iter()
            .map(|(name, count)| format!("{} {count}", name.replace('_', " ")))
            .collect::<Vec<_>>()
            .join(", ")
    };
    let search = &plan.search;
    let mut text = paragraph(&format!(
        "{} candidates: {} estimated and fit; pruned: {}; rejected: {}; stopped because {}",
        search.enumerated,
        search.feasible,
        list(&search.pruned),
        list(&search.rejected),
        search.stop_reason.name(),
    ));
    if !search.fixed.is_empty() {
        text += &paragraph(&format!("fixed by flags: {}", search.fixed.join(" ")));
    }
    text
}

fn shortened(text: &str) -> String {
    if text.len() <= LIST_WIDTH { text.to_owned() } else { format!("{}…", &text[..LIST_WIDTH]) }
}
