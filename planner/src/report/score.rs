//! A scored configuration, as text for people and as JSON.

use ir::graph::count_parameters;
use ir::plan::{Estimate, TimeTerm};
use ir::units::Seconds;
use serde_json::{Value, json};

use super::comparison::{side_value, term_values, time_table};
use super::json::{costed_estimate_value, strategy_value};
use super::{list_paragraph, paragraph};
use crate::compare::{Sides, time_terms};
use crate::explain::{describe, runs};
use crate::foreign::{Launch, Settings};
use crate::lower::executable;
use crate::request::Request;
use crate::score::{Predicted, Score};

/// Most layers of stages that are printed one by one.
const LISTED: usize = 60;

/// The report as text.
pub fn text(request: &Request, launch: &Launch, score: &Score, defaults: &[&str]) -> String {
    let mut text = header(request, launch, defaults);
    text += &layout_text("configuration", &score.configuration);
    text += &paragraph(&verdict(request, score));
    match &score.best {
        Ok(best) => {
            text += &layout_text("best plan", best);
            text += &paragraph(&gain_sentence(score, best));
            text += "\n";
            let (terms, total) = sides(&score.configuration.estimate, &best.estimate);
            text += &time_table("seconds of a step", ["configuration", "best plan"], &terms, total);
            text += "\n";
        }
        Err(problem) => text += &paragraph(&format!("best plan: {}; {}", problem.what, problem.help)),
    }
    score.hints.iter().for_each(|hint| text += &paragraph(&format!("- {hint}")));
    text + &settings_text(&launch.settings)
}

fn header(request: &Request, launch: &Launch, defaults: &[&str]) -> String {
    let machine = &request.machine;
    let defaults = match defaults {
        [] => String::new(),
        names => format!(" (defaults: {})", names.join(", ")),
    };
    paragraph(&format!(
        "{} configuration: {}, {:.1} B parameters, {} GPUs of {} in nodes of {}, stack {}, sequence {}, batch {}{defaults}",
        launch.format.name(),
        request.model.name,
        count_parameters(&request.model) as f64 / 1e9,
        request.gpus,
        machine.cluster.name,
        machine.node_gpus,
        machine.stack.name,
        request.workload.sequence_length,
        request.workload.global_batch,
    ))
}

fn layout_text(name: &str, predicted: &Predicted) -> String {
    let strategy = &predicted.scored.strategy;
    let estimate = &predicted.estimate;
    let mut text = paragraph(&format!("{name}: {}", describe(strategy)));
    if strategy.pipeline_parallel > 1 {
        let layers = runs(&strategy.layers_per_stage);
        let layers =
            layers.char_indices().nth(LISTED).map_or(layers.clone(), |(end, _)| format!("{}…", &layers[..end]));
        text += &format!("  layers per stage: {layers}\n");
    }
    text + &format!("  {}", paragraph(&rates(estimate)))
}

fn rates(estimate: &Estimate) -> String {
    format!(
        "step {} ({} to {}), {:.0} tokens/s/GPU, MFU {:.1} %, memory {} on stage {}",
        estimate.step,
        estimate.interval.0,
        estimate.interval.1,
        estimate.tokens_per_second_per_gpu,
        estimate.mfu * 100.0,
        estimate.device_memory,
        estimate.fullest_stage.0,
    )
}

fn verdict(request: &Request, score: &Score) -> String {
    let (stage, used) = score.configuration.scored.fullest_stage();
    let usable = request.machine.usable_memory();
    match score.fits {
        true => format!("it fits: stage {stage} uses {used} of {usable} usable"),
        false => format!("it does not fit: stage {stage} needs {used} of {usable} usable"),
    }
}

fn gain_sentence(score: &Score, best: &Predicted) -> String {
    let (configuration, best) = (&score.configuration.estimate, &best.estimate);
    let percent = (best.step.0 / configuration.step.0 - 1.0) * 100.0;
    let gain = Seconds((configuration.step.0 - best.step.0).abs());
    if best.step == configuration.step {
        return "the best plan takes as long: the configuration is optimal".to_owned();
    }
    if best.step > configuration.step {
        return match score.fits {
            true => format!(
                "the configuration is faster by {gain} a step than the best plan ({percent:+.1} %): it makes a choice that \
                 the search does not have"
            ),
            false => format!("with enough memory the configuration would be faster by {gain} a step ({percent:+.1} %)"),
        };
    }
    let (terms, _) = sides(configuration, best);
    let most = terms.iter().min_by(|a, b| a.1.more().total_cmp(&b.1.more()));
    let most = most.map_or(String::new(), |(term, time)| {
        format!("; most of it is {} less {}", Seconds(-time.more()), term.name().replace('_', " "))
    });
    let ratio = configuration.step.0 / best.step.0;
    format!("the best plan gains {gain} a step ({percent:+.1} %), {ratio:.2} times the tokens in the same time{most}")
}

fn sides(a: &Estimate, b: &Estimate) -> (Vec<(TimeTerm, Sides<Seconds>)>, Sides<Seconds>) {
    (time_terms(a, b), Sides { a: a.step, b: b.step })
}

fn settings_text(settings: &Settings) -> String {
    let mut text = String::new();
    settings.warnings.iter().for_each(|warning| text += &list_paragraph(&format!("warning: {warning}")));
    for (name, near) in &settings.unknown {
        let near = match near.as_slice() {
            [] => String::new(),
            names => format!("; near names: {}", names.join(", ")),
        };
        text += &list_paragraph(&format!("unknown, not read: {name}{near}"));
    }
    for (reason, names) in grouped(&settings.assumed) {
        text += &list_paragraph(&format!("not followed: {} ({reason})", names.join(", ")));
    }
    if !settings.no_effect.is_empty() {
        text += &list_paragraph(&format!("no effect on the prediction: {}", settings.no_effect.join(", ")));
    }
    text
}

/// Names by reason, in the order of the first of each.
fn grouped(assumed: &[(String, String)]) -> Vec<(&str, Vec<&str>)> {
    let mut groups: Vec<(&str, Vec<&str>)> = Vec::new();
    for (name, reason) in assumed {
        match groups.iter_mut().find(|(known, _)| known == reason) {
            Some((_, names)) => names.push(name),
            None => groups.push((reason, vec![name])),
        }
    }
    groups
}

/// The report as JSON.
pub fn value(request: &Request, launch: &Launch, score: &Score, defaults: &[&str]) -> Value {
    let settings = &launch.settings;
    let predicted = |predicted: &Predicted| {
        let strategy = &predicted.scored.strategy;
        json!({
            "strategy": strategy_value(strategy, &executable(&request.model, strategy)),
            "estimate": costed_estimate_value(request, strategy, &predicted.estimate),
        })
    };
    let mut value = predicted(&score.configuration);
    let facts = json!({
        "format": launch.format.name(),
        "model": request.model.name,
        "model_shape": request.model,
        "parameters": count_parameters(&request.model),
        "gpus": request.gpus,
        "node_gpus": request.machine.node_gpus,
        "cluster": request.machine.cluster.name,
        "stack": request.machine.stack.name,
        "sequence_length": request.workload.sequence_length,
        "global_batch": request.workload.global_batch,
        "defaults": defaults,
        "fits": score.fits,
        "usable_memory_gib": request.machine.usable_memory().gib(),
        "hints": score.hints,
        "settings": {
            "no_effect": settings.no_effect,
            "not_followed": settings.assumed.iter().map(|(name, reason)| json!({"name": name, "assumed": reason}))
                .collect::<Vec<_>>(),
            "unknown": settings.unknown.iter().map(|(name, near)| json!({"name": name, "near": near}))
                .collect::<Vec<_>>(),
            "warnings": settings.warnings,
        },
    });
    if let (Value::Object(value), Value::Object(facts)) = (&mut value, facts) {
        value.extend(facts);
    }
    match &score.best {
        Ok(best) => {
            let (terms, total) = sides(&score.configuration.estimate, &best.estimate);
            value["best"] = predicted(best);
            value["gain"] = json!({
                "seconds": -total.more(),
                "fraction": -total.more() / total.a.0,
                "terms": term_values(&terms),
                "total": side_value(total),
            });
        }
        Err(problem) => {
            value["best"] = Value::Null;
            value["gain"] = Value::Null;
            value["reason"] = json!(format!("{}; {}", problem.what, problem.help));
        }
    }
    value
}
