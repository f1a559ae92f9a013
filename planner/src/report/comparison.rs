//! Two plans side by side, as tables for people and as JSON.

use ir::plan::{Estimate, Plan, Stage, TimeTerm};
use ir::units::{Bytes, Seconds};
use serde_json::{Map, Value, json};

use super::advice::binding_values;
use super::json::plan_value;
use super::{paragraph, table};
use crate::compare::{Comparison, Limit, Sides, Unit};
use crate::explain::{describe, runs};

/// Widest value that a table shows.
const VALUE_WIDTH: usize = 40;
/// What stands where a plan has no such thing.
const NOTHING: &str = "-";

/// The comparison as text.
pub fn text(plans: Sides<&Plan>, comparison: &Comparison) -> String {
    let mut text = String::new();
    for (name, plan) in [("A", plans.a), ("B", plans.b)] {
        text += &paragraph(&format!(
            "{name}: {}, {} GPUs of {}, stack {}, {}",
            plan.model.name,
            plan.mesh.world_size(),
            plan.inputs.cluster,
            plan.inputs.stack,
            describe(&plan.strategy)
        ));
    }
    text += "\n";
    text += &difference_table(comparison);
    text += "\n";
    text += &time_table(unit_title(comparison.unit), ["A", "B"], &comparison.terms, comparison.total);
    text += &rate_table(plans, comparison);
    text += "\n";
    text += &memory_table(comparison);
    text += &stage_table(plans);
    text += "\n";
    text += &paragraph(&verdict(comparison));
    text += &paragraph(&format!("A is bound by {}", comparison.limits.a.sentence));
    text += &paragraph(&format!("B is bound by {}", comparison.limits.b.sentence));
    comparison.remarks.iter().for_each(|remark| text += &paragraph(&format!("- {remark}")));
    text
}

fn unit_title(unit: Unit) -> &'static str {
    match unit {
        Unit::Step => "seconds of a step",
        Unit::MillionTokens => "seconds of a million tokens",
    }
}

fn difference_table(comparison: &Comparison) -> String {
    if comparison.differences.is_empty() {
        return "model, workload, cluster, stack and strategy are the same\n".to_owned();
    }
    let rows = comparison.differences.iter().map(|difference| {
        let (subject, name) = (difference.subject.name(), difference.name.replace('_', " "));
        let name = if name.starts_with(subject) { name } else { format!("{subject} {name}") };
        vec![name, shown(&difference.values.a), shown(&difference.values.b)]
    });
    table(&["what differs", "A", "B"], rows)
}

/// A value in a table: lists of counts folded, long texts cut.
fn shown(value: &Value) -> String {
    let text = match value {
        Value::Null => NOTHING.to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(items) => match items.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>() {
            Some(counts) => runs(&counts),
            None => items.iter().map(shown).collect::<Vec<_>>().join(" "),
        },
        other => other.to_string(),
    };
    match text.char_indices().nth(VALUE_WIDTH) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Times of two sides by cause, their differences, and the sums of all three.
pub fn time_table(
    title: &str,
    names: [&str; 2],
    terms: &[(TimeTerm, Sides<Seconds>)],
    total: Sides<Seconds>,
) -> String {
    let row = |name: String, time: Sides<Seconds>| {
        let share = time.more() / total.a.0 * 100.0;
        vec![
            name,
            format!("{:.3}", time.a.0),
            format!("{:.3}", time.b.0),
            format!("{:+.3}", time.more()),
            format!("{share:+.1} %"),
        ]
    };
    let used = terms.iter().filter(|(_, time)| time.a.0 > 0.0 || time.b.0 > 0.0);
    let rows = used.map(|(term, time)| row(term.name().replace('_', " "), *time));
    let whole = format!("of {}", names[0]);
    let difference = format!("{} - {}", names[1], names[0]);
    table(&[title, names[0], names[1], &difference, &whole], rows.chain([row("total".to_owned(), total)]))
}

fn rate_table(plans: Sides<&Plan>, comparison: &Comparison) -> String {
    let rates = |estimate: &Estimate, hours: f64| {
        format!(
            "step {}, {:.0} tokens/s/GPU, MFU {:.1} %, {hours:.1} GPU-hours a billion tokens",
            estimate.step,
            estimate.tokens_per_second_per_gpu,
            estimate.mfu * 100.0
        )
    };
    let line = |name, plan: &Plan, hours| paragraph(&format!("{name}: {}", rates(&plan.estimate, hours)));
    line("A", plans.a, comparison.gpu_hours.a) + &line("B", plans.b, comparison.gpu_hours.b)
}

fn memory_table(comparison: &Comparison) -> String {
    let row = |name: String, a: f64, b: f64| vec![name, format!("{a:.2}"), format!("{b:.2}"), format!("{:+.2}", b - a)];
    let held = comparison.memory.iter().filter(|(_, bytes)| bytes.a.0 > 0 || bytes.b.0 > 0);
    let rows = held.map(|(term, bytes)| row(term.name().to_owned(), bytes.a.gib(), bytes.b.gib()));
    let sum = |side: fn(&Sides<Bytes>) -> Bytes| -> f64 {
        comparison.memory.iter().map(|(_, bytes)| side(bytes)).sum::<Bytes>().gib()
    };
    let total = row("device use".to_owned(), sum(|bytes| bytes.a), sum(|bytes| bytes.b));
    let [a, b] = [&comparison.limits.a, &comparison.limits.b].map(|limit| limit.stage.0);
    let columns = [&format!("GiB on the fullest stage, {a} of A and {b} of B"), "A", "B", "B - A"];
    table(&columns.map(|column: &str| column), rows.chain([total]))
}

/// Device use of each stage, runs of equal stages in one line; nothing where neither plan has stages.
fn stage_table(plans: Sides<&Plan>) -> String {
    let count = plans.a.stages.len().max(plans.b.stages.len());
    if count == 1 {
        return String::new();
    }
    let side = |plan: &Plan, stage: usize| match plan.stages.get(stage) {
        Some(stage) => [layers(stage).to_string(), format!("{:.1}", stage.device_memory().gib())],
        None => [NOTHING.to_owned(), NOTHING.to_owned()],
    };
    let rows: Vec<[[String; 2]; 2]> = (0..count).map(|stage| [side(plans.a, stage), side(plans.b, stage)]).collect();
    let mut first = 0;
    let mut lines = Vec::new();
    for run in rows.chunk_by(|one, next| one == next) {
        let last = first + run.len() - 1;
        let stages = if last > first { format!("{first}-{last}") } else { first.to_string() };
        lines.push([vec![stages], run[0].concat()].concat());
        first = last + 1;
    }
    table(&["stage", "A layers", "A GiB", "B layers", "B GiB"], lines)
}

fn layers(stage: &Stage) -> u64 {
    stage.layers.1 - stage.layers.0
}

fn verdict(comparison: &Comparison) -> String {
    let Sides { a, b } = comparison.total;
    let unit = match comparison.unit {
        Unit::Step => "a step",
        Unit::MillionTokens => "a million tokens",
    };
    let percent = (b.0 / a.0 - 1.0) * 100.0;
    let by = Seconds((b.0 - a.0).abs());
    let mut sentence = match b.0.total_cmp(&a.0) {
        std::cmp::Ordering::Equal => return format!("both take {a} for {unit}"),
        std::cmp::Ordering::Less => format!("B is faster by {by} for {unit} ({percent:+.1} %)"),
        std::cmp::Ordering::Greater => format!("B is slower by {by} for {unit} ({percent:+.1} %)"),
    };
    let largest = comparison.terms.iter().max_by(|x, y| x.1.more().abs().total_cmp(&y.1.more().abs()));
    if let Some((term, time)) = largest {
        let sign = if time.more() < 0.0 { "-" } else { "+" };
        sentence += &format!("; most of it is {}: {sign}{}", term.name().replace('_', " "), Seconds(time.more().abs()));
    }
    sentence
}

/// The comparison as JSON.
pub fn value(plans: Sides<&Plan>, comparison: &Comparison) -> Value {
    let differences = comparison.differences.iter().map(|difference| {
        json!({
            "subject": difference.subject.name(), "name": difference.name,
            "a": difference.values.a, "b": difference.values.b,
        })
    });
    let limit = |limit: &Limit| {
        json!({
            "stage": limit.stage.0,
            "memory_share": limit.memory_share,
            "limits": binding_values(&limit.bindings),
            "sentence": limit.sentence,
        })
    };
    let memory = comparison.memory.iter().map(|(term, bytes)| {
        let [a, b] = [bytes.a.gib(), bytes.b.gib()];
        (term.name().replace(' ', "_"), json!({"a": a, "b": b, "difference": b - a}))
    });
    json!({
        "a": plan_value(plans.a),
        "b": plan_value(plans.b),
        "differences": differences.collect::<Vec<_>>(),
        "unit": match comparison.unit {
            Unit::Step => "seconds_per_step",
            Unit::MillionTokens => "seconds_per_million_tokens",
        },
        "terms": term_values(&comparison.terms),
        "total": side_value(comparison.total),
        "gpu_hours_per_billion_tokens": {"a": comparison.gpu_hours.a, "b": comparison.gpu_hours.b},
        "memory_gib": memory.collect::<Map<_, _>>(),
        "limits": {"a": limit(&comparison.limits.a), "b": limit(&comparison.limits.b)},
        "verdict": verdict(comparison),
        "remarks": comparison.remarks,
    })
}

/// Times of two sides by cause.
pub fn term_values(terms: &[(TimeTerm, Sides<Seconds>)]) -> Value {
    terms.iter().map(|(term, time)| (term.name().to_owned(), side_value(*time))).collect::<Map<_, _>>().into()
}

/// Both times and how much more the second is.
pub fn side_value(time: Sides<Seconds>) -> Value {
    json!({"a": time.a.0, "b": time.b.0, "difference": time.more()})
}
