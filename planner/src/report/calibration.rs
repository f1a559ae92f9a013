//! What a user's runs said about a cluster, as text for people and as JSON.

use serde_json::{Value, json};

use super::{paragraph, table};
use crate::calibrate::{Calibration, Compared, Residual};
use crate::validate::summary::{Errors, errors};

/// Fewest runs from which constants beyond a general speed can be told.
const FEW_RUNS: usize = 3;

/// A kind of measurement in a residual.
type Measurement = fn(&Residual) -> Option<Compared>;

/// The report as text. `old` and `stack` name the profiles that were calibrated; `written` says what became of the file.
pub fn text(found: &Calibration, [old, stack]: [&str; 2], written: &str) -> String {
    let count = found.constants.len();
    let mut text = paragraph(&format!(
        "{} of {} runs used; {count} constants of cluster {old} and stack {stack} fitted",
        found.runs.len(),
        found.runs.len() + found.unused.len(),
    ));
    text += &warnings(found).iter().map(|warning| paragraph(&format!("warning: {warning}"))).collect::<String>();
    let memory = found.memory_count.map_or("memory", |count| count.name());
    for (name, unit, of) in [("step", "s", step as Measurement), (memory, "GiB", peak as Measurement)] {
        if found.runs.iter().any(|run| of(run).is_some()) {
            text += &residual_table(found, name, unit, of);
        }
    }
    if count > 0 {
        let rows = found.constants.iter().map(|constant| {
            vec![
                constant.name.to_owned(),
                constant.old_shown.clone(),
                constant.new_shown.clone(),
                constant.runs.to_string(),
            ]
        });
        text += &format!("\n{}", table(&["constant", "old", "new", "runs"], rows));
    }
    let lines =
        found.unused.iter().map(|(id, reason)| paragraph(&format!("not used: {id}: {}", reason.replace('\n', " "))));
    text += &lines.collect::<String>();
    text + &format!("{written}\n")
}

fn step(run: &Residual) -> Option<Compared> {
    run.step
}

fn peak(run: &Residual) -> Option<Compared> {
    run.memory
}

fn residual_table(found: &Calibration, name: &str, unit: &str, of: Measurement) -> String {
    let percent = |error: f64| format!("{:+.1} %", error * 100.0);
    let rows = found.runs.iter().filter_map(|run| Some((run, of(run)?))).map(|(run, pair)| {
        let error = |predicted: f64| percent(pair.error(predicted));
        vec![
            format!("{:.4}", pair.measured),
            error(pair.before),
            error(pair.after),
            pair.left_out.map_or("-".to_owned(), error),
            run.id.clone(),
        ]
    });
    let header = [&*format!("{name} {unit}"), "before", "after", "left out", "run"];
    let [before, after, left_out] = summaries(found, of).map(|found| match found {
        Some(errors) => format!("{:.1} %", errors.mean_absolute * 100.0),
        None => "-".to_owned(),
    });
    let mean =
        format!("mean error of the {name}: {before} before, {after} after, {left_out} of runs left out of the fit");
    format!("\n{}{}", table(&header, rows), paragraph(&mean))
}

/// Errors by the old constants, by the new ones, and of runs that were left out.
fn summaries(found: &Calibration, of: Measurement) -> [Option<Errors>; 3] {
    let all = || found.runs.iter().filter_map(of);
    [
        errors(all().map(|pair| pair.error(pair.before))),
        errors(all().map(|pair| pair.error(pair.after))),
        errors(all().filter_map(|pair| Some(pair.error(pair.left_out?)))),
    ]
}

/// What makes the result weaker than it looks.
fn warnings(found: &Calibration) -> Vec<String> {
    let timed = found.runs.iter().filter(|run| run.step.is_some()).count();
    let mut warnings = Vec::new();
    match timed {
        0 => warnings.push("no run has a step time: only memory is calibrated".to_owned()),
        1 => warnings
            .push("one run tells one constant, and nothing says how well: log 3 to 5 of different layouts".to_owned()),
        _ if timed < FEW_RUNS => warnings.push(format!("{timed} runs tell little: log 3 to 5 of different layouts")),
        _ => {}
    }
    if found.constants.is_empty() {
        warnings.push("the runs tell no constant: all stay as they were".to_owned());
    }
    warnings
}

/// The report as JSON.
pub fn value(found: &Calibration, [old, stack]: [&str; 2], out: &str) -> Value {
    let pair = |pair: Compared| {
        json!({
            "measured": pair.measured,
            "before": pair.before,
            "after": pair.after,
            "left_out": pair.left_out,
            "error_before": pair.error(pair.before),
            "error_after": pair.error(pair.after),
            "error_left_out": pair.left_out.map(|predicted| pair.error(predicted)),
        })
    };
    let runs = found
        .runs
        .iter()
        .map(|run| json!({"id": run.id, "step_s": run.step.map(pair), "peak_mem_gib": run.memory.map(pair)}));
    let constants = found.constants.iter().map(|constant| {
        json!({
            "name": constant.name, "old": constant.old, "new": constant.new, "runs": constant.runs,
            "provenance": "fitted",
        })
    });
    let unused = found.unused.iter().map(|(id, reason)| json!({"id": id, "reason": reason}));
    let summary = |of: Measurement| {
        let [before, after, left_out] = summaries(found, of).map(|errors| errors.map(|errors| errors.mean_absolute));
        json!({"mape_before": before, "mape_after": after, "mape_left_out": left_out})
    };
    json!({
        "cluster": old,
        "stack": stack,
        "runs": runs.collect::<Vec<_>>(),
        "unused": unused.collect::<Vec<_>>(),
        "constants": constants.collect::<Vec<_>>(),
        "time": summary(step),
        "memory": summary(peak),
        "memory_counts": found.memory_count.map(|count| count.name()),
        "warnings": warnings(found),
        "out": out,
    })
}
