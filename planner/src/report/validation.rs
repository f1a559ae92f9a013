//! Predictions of measured runs, as a table for people and as JSON.

use serde_json::{Value, json};

use super::{paragraph, table};
use crate::validate::Validated;
use crate::validate::summary::{Errors, Summary};

/// Sweeps that the text lists.
const LISTED_SWEEPS: usize = 12;
/// Reasons for unsupported rows that the text lists.
const LISTED_REASONS: usize = 10;

/// The report as text.
pub fn text(rows: &[Validated], summary: &Summary) -> String {
    let mut text = paragraph(&format!(
        "{} of {} runs predicted from their layouts; {:.0} % of the measured steps lie in their 90 % intervals",
        summary.predicted,
        summary.rows,
        summary.covered * 100.0
    ));
    let groups = [("source", &summary.by_source), ("GPU", &summary.by_gpu), ("stack", &summary.by_stack)];
    for (title, group) in groups {
        text += &format!("\nStep time by {title}\n");
        text += &error_table(title, group.iter().map(|(name, errors)| (name.as_str(), errors)));
    }
    if let Some(all) = &summary.time {
        text += &error_table("", std::iter::once(("all", all)));
    }
    if !summary.memory_by_source.is_empty() {
        text += "\nPeak memory by source\n";
        text += &error_table("source", summary.memory_by_source.iter().map(|(name, errors)| (name.as_str(), errors)));
    }
    text += &sweep_text(summary);
    let (ran_out, missed) = summary.out_of_memory;
    text += &format!("\nOut of memory: {ran_out} runs, of which {missed} are predicted to fit\n");
    text + &unsupported_text(rows)
}

fn error_table<'a>(title: &str, groups: impl Iterator<Item = (&'a str, &'a Errors)>) -> String {
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    let rows = groups.map(|(name, errors)| {
        vec![
            errors.count.to_string(),
            percent(errors.mean_absolute),
            percent(errors.median_absolute),
            percent(errors.ninetieth_percentile),
            format!("{:+.1} %", errors.bias * 100.0),
            name.to_owned(),
        ]
    });
    table(&["runs", "mean error", "median", "90th percentile", "bias", title], rows)
}

fn sweep_text(summary: &Summary) -> String {
    if summary.sweeps.is_empty() {
        return String::new();
    }
    let count = summary.sweeps.len() as f64;
    let mean = summary.sweeps.iter().map(|sweep| sweep.regret).sum::<f64>() / count;
    let tau = summary.sweeps.iter().map(|sweep| sweep.tau).sum::<f64>() / count;
    let mut largest: Vec<_> = summary.sweeps.iter().collect();
    largest.sort_by(|a, b| b.count.cmp(&a.count).then_with(|| a.name.cmp(&b.name)));
    let rows = largest.iter().take(LISTED_SWEEPS).map(|sweep| {
        let regret = format!("{:.1} %", sweep.regret * 100.0);
        vec![sweep.count.to_string(), format!("{:.2}", sweep.tau), regret, sweep.name.clone()]
    });
    let title = format!(
        "\nSweeps: {} with a mean regret of the pick of {:.1} % and a mean Kendall tau of {tau:.2}; the largest:\n",
        summary.sweeps.len(),
        mean * 100.0
    );
    title + &table(&["runs", "tau", "regret", "sweep"], rows)
}

fn unsupported_text(rows: &[Validated]) -> String {
    let mut reasons: Vec<(&String, usize, &str)> = Vec::new();
    for row in rows {
        let Err(reason) = &row.prediction else { continue };
        match reasons.iter_mut().find(|(known, ..)| *known == reason) {
            Some((_, count, _)) => *count += 1,
            None => reasons.push((reason, 1, &row.row.id)),
        }
    }
    let lines = reasons.iter().take(LISTED_REASONS).map(|(reason, count, first)| {
        paragraph(&format!("{count} not supported, first {first}: {}", reason.replace('\n', " ")))
    });
    lines.collect()
}

/// The report as JSON.
pub fn value(rows: &[Validated], summary: &Summary) -> Value {
    json!({"rows": rows.iter().map(row_value).collect::<Vec<_>>(), "summary": summary_value(summary)})
}

fn row_value(row: &Validated) -> Value {
    let measured = &row.row.measured;
    let mut value = json!({
        "id": row.row.id,
        "status": if row.prediction.is_ok() { "predicted" } else { "unsupported" },
        "reason": row.prediction.as_ref().err(),
        "measured_step_s": measured.step_seconds,
        "measured_peak_mem_gib": measured.peak_memory_gib,
        "error": row.error(),
    });
    let prediction = row.prediction.as_ref().ok();
    value["predicted_step_s"] = json!(prediction.map(|found| found.step.0));
    value["interval_s"] = json!(prediction.map(|found| [found.interval.0.0, found.interval.1.0]));
    value["predicted_device_memory_gib"] = json!(prediction.map(|found| found.device_memory.gib()));
    value["predicted_allocator_peak_gib"] = json!(prediction.map(|found| found.allocator_peak.gib()));
    value["fits"] = json!(prediction.map(|found| found.fits));
    if let Some(found) = prediction {
        value["stack"] = json!(found.stack);
        value["recompute"] = json!(found.strategy.recompute.name());
        value["terms"] = found.terms.iter().map(|(term, time)| (term.name().to_owned(), json!(time.0))).collect();
    }
    value
}

fn summary_value(summary: &Summary) -> Value {
    let errors = |errors: &Errors| {
        json!({
            "runs": errors.count,
            "mape": errors.mean_absolute,
            "median": errors.median_absolute,
            "bias": errors.bias,
            "p90": errors.ninetieth_percentile,
        })
    };
    let group = |group: &std::collections::BTreeMap<String, Errors>| -> Value {
        group.iter().map(|(name, found)| (name.clone(), errors(found))).collect()
    };
    let sweeps = summary.sweeps.iter().map(
        |sweep| json!({"name": sweep.name, "runs": sweep.count, "kendall_tau": sweep.tau, "regret": sweep.regret}),
    );
    json!({
        "rows": summary.rows,
        "predicted": summary.predicted,
        "time": summary.time.as_ref().map(errors),
        "by_source": group(&summary.by_source),
        "by_gpu": group(&summary.by_gpu),
        "by_stack": group(&summary.by_stack),
        "interval_coverage": summary.covered,
        "sweeps": sweeps.collect::<Vec<_>>(),
        "memory_by_source": group(&summary.memory_by_source),
        "out_of_memory": {"runs": summary.out_of_memory.0, "predicted_to_fit": summary.out_of_memory.1},
    })
}
