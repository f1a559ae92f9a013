//! The text that `plan` prints after a search.

use ir::plan::{Estimate, Plan};
use ir::strategy::Strategy;

use super::{paragraph, table};
use crate::explain::{describe, runs};

/// Widest list of stage sizes that is printed.
const LIST_WIDTH: usize = 60;

/// The first line: what was planned for which machine, with every default named.
pub fn header(plan: &Plan, defaults: &[&str]) -> String {
    let model = &plan.model;
    let defaults = match defaults {
        [] => String::new(),
        names => format!(" (defaults: {})", names.join(", ")),
    };
    paragraph(&format!(
        "{}, {:.1} B parameters, {} GPUs of {} in nodes of {}, stack {}, sequence {}, batch {}{defaults}",
        model.name,
        plan.parameters as f64 / 1e9,
        plan.mesh.world_size(),
        plan.inputs.cluster,
        plan.inputs.node_gpus,
        plan.inputs.stack,
        plan.workload.sequence_length,
        plan.workload.global_batch,
    ))
}

/// The chosen layout, what it should cost, the runners-up, the counts and the reasons.
pub fn body(plan: &Plan, alternatives: &[(Strategy, Estimate)]) -> String {
    let mut text = String::new();
    let estimate = &plan.estimate;
    text += &format!("{}\n", describe(&plan.strategy));
    if plan.strategy.pipeline_parallel > 1 {
        text += &format!("layers per stage: {}\n", shortened(&runs(&plan.strategy.layers_per_stage)));
    }
    text += &estimate_lines(plan, estimate);
    text += &table(
        &[
            "",
            "tensor",
            "pipeline",
            "data",
            "ZeRO",
            "micro-batch",
            "recompute",
            "sequence parallel",
            "step s",
            "MFU %",
            "GiB",
        ],
        alternatives.iter().enumerate().map(|(index, (strategy, estimate))| alternative_row(index, strategy, estimate)),
    );
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

fn alternative_row(index: usize, strategy: &Strategy, estimate: &Estimate) -> Vec<String> {
    vec![
        format!("{}", index + 1),
        strategy.tensor_parallel.to_string(),
        strategy.pipeline_parallel.to_string(),
        strategy.data_parallel.to_string(),
        u8::from(strategy.zero_stage).to_string(),
        strategy.micro_batch.to_string(),
        strategy.recompute.name().to_owned(),
        if strategy.sequence_parallel { "on" } else { "off" }.to_owned(),
        format!("{:.2}", estimate.step.0),
        format!("{:.1}", estimate.mfu * 100.0),
        format!("{:.1}", estimate.device_memory.gib()),
    ]
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
