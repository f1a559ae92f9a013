//! A sweep over numbers of GPUs: its table, the point that is recommended, and the same facts as JSON.

use std::ops::RangeInclusive;

use ir::error::Problem;
use ir::plan::StopReason;
use serde_json::{Value, json};

use super::json::{costed_estimate_value, strategy_value, training_value};
use super::layout::layout_columns;
use super::summary::duration;
use super::{MEGAWATT_HOUR, amount, paragraph, table};
use crate::error::Error;
use crate::explain::describe;
use crate::lower::executable;
use crate::objective::Objective;
use crate::request::Request;
use crate::sweep::{Best, Point, Sweep};

/// `plan --gpus A..B --json`.
pub fn sweep_value(request: &Request, sweep: &Sweep) -> Value {
    let points = sweep.points.iter().enumerate();
    let points: Vec<Value> =
        points.map(|(index, point)| point_value(request, point, sweep.recommended == Some(index))).collect();
    json!({ "points": points })
}

fn point_value(request: &Request, point: &Point, recommended: bool) -> Value {
    let best = match &point.best {
        Ok(best) => best,
        Err(reason) => {
            return json!({
                "gpus": point.gpus, "strategy": null, "estimate": null, "pareto": false, "recommended": false,
                "reason": reason,
            });
        }
    };
    let mut value = json!({
        "gpus": point.gpus,
        "strategy": strategy_value(&best.strategy, &executable(&request.model, &best.strategy)),
        "estimate": costed_estimate_value(request, &best.strategy, &best.estimate),
        "pareto": best.pareto,
        "recommended": recommended,
        "memory_margin_gib": best.margin.gib(),
    });
    if let Some(training) = &best.training {
        value["training"] = training_value(training);
    }
    value
}

/// The error for a sweep in which no number of GPUs has a plan.
pub fn none_fits(request: &Request, range: &RangeInclusive<u64>, sweep: &Sweep) -> Option<Error> {
    let searched = sweep.stop_reason == StopReason::Optimal;
    if !searched || sweep.points.iter().any(|point| point.best.is_ok()) {
        return None;
    }
    let last = sweep.points.last()?;
    let reason = last.best.as_ref().err()?;
    let what = format!("no number of GPUs in the range has a plan; with {}, {reason}", last.gpus);
    let location = format!("--gpus {}..{}", range.start(), range.end());
    let help = match request.fixed.flags().is_empty() {
        true => "give more GPUs, or GPUs with more memory",
        false => "free a fixed choice, or give more GPUs, or GPUs with more memory",
    };
    Some(Error::NoPlan(Problem::new(what, location, help)))
}

/// The table, its front, and the recommended point.
pub fn sweep_text(request: &Request, sweep: &Sweep, objective: Objective) -> String {
    let found: Vec<(u64, &Best)> =
        sweep.points.iter().filter_map(|point| Some((point.gpus, point.best.as_ref().ok()?))).collect();
    let (titles, layouts) = layout_columns(&found.iter().map(|(_, best)| &best.strategy).collect::<Vec<_>>());
    let mut header = [vec!["GPUs"], titles, vec!["step s", "MFU %", "GPU-hours", "GiB left"]].concat();
    let with_training = sweep.points.iter().any(|point| point.best.as_ref().is_ok_and(|best| best.training.is_some()));
    if with_training {
        header.extend(["days", "goodput %"]);
    }
    header.extend(["USD", "MWh", "front"]);
    let rows = found.iter().zip(layouts).map(|((gpus, best), layout)| row(*gpus, layout, best));
    let mut text = table(&header, rows);
    text += &without_plan(sweep);
    text += &paragraph(&format!(
        "GPU-hours, USD and MWh of {}; front: no other number is at least as good in time, GPU-hours and memory left",
        if with_training { "the training" } else { "a step" }
    ));
    if sweep.stop_reason == StopReason::Interrupted {
        text += "interrupted: numbers that are not listed may be better\n";
    }
    if let Some(index) = sweep.recommended
        && let Ok(best) = &sweep.points[index].best
    {
        text += &paragraph(&format!(
            "objective {}: {} GPUs, {}{}",
            objective.name(),
            sweep.points[index].gpus,
            describe(&best.strategy),
            best.training.as_ref().map(|training| format!(": {}", duration(training.expense.time))).unwrap_or_default()
        ));
    }
    text + &paragraph(&fixed(request))
}

fn row(gpus: u64, layout: Vec<String>, best: &Best) -> Vec<String> {
    let mut row = vec![gpus.to_string()];
    row.extend(layout);
    row.extend([
        format!("{:.2}", best.estimate.step.0),
        format!("{:.1}", best.estimate.mfu * 100.0),
        amount(best.expense.gpu_hours),
        format!("{:.1}", best.margin.gib()),
    ]);
    if let Some(training) = &best.training {
        row.push(format!("{:.1}", training.expense.time.0 / super::DAY));
        row.push(
            training.failures.as_ref().map_or("-".to_owned(), |failures| format!("{:.1}", failures.goodput * 100.0)),
        );
    }
    let known = |value: Option<f64>| value.map_or("-".to_owned(), amount);
    row.push(known(best.expense.cost.map(|cost| cost.0)));
    row.push(known(best.expense.energy.map(|energy| energy.0 / MEGAWATT_HOUR)));
    row.push(if best.pareto { "yes" } else { "" }.to_owned());
    row
}

/// Numbers of GPUs without a plan, those with one reason together.
fn without_plan(sweep: &Sweep) -> String {
    let failed = sweep.points.iter().filter_map(|point| Some((point.gpus, point.best.as_ref().err()?)));
    let failed: Vec<(u64, &String)> = failed.collect();
    let groups = failed.chunk_by(|one, next| one.1 == next.1).map(|group| {
        let numbers: Vec<String> = group.iter().map(|(gpus, _)| gpus.to_string()).collect();
        paragraph(&format!("{} GPUs: {}", numbers.join(", "), group[0].1))
    });
    groups.collect()
}

fn fixed(request: &Request) -> String {
    match request.fixed.flags().as_slice() {
        [] => "nothing written: a sweep compares, give one number of GPUs for a plan".to_owned(),
        flags => format!("fixed by flags: {}; nothing written: a sweep compares", flags.join(" ")),
    }
}
