//! Plans of small models, compared whole. `BLESS=1 cargo test` writes them anew.

mod support;

use std::fs;
use std::path::PathBuf;

use ir::graph::build_graph;
use ir::model::{Attention, FeedForward, ModelSpec, Vocabulary};
use ir::plan::{Plan, read_plan, write_plan};
use ir::strategy::Recompute;
use ir::units::BatchSize;
use ir::verify::verify;
use planner::explain::explain;
use planner::lower::{lower, search_report};
use planner::request::FixedChoices;
use planner::search::search;
use planner::watch::Watch;
use support::{example, machine, request};

fn small_plan(model: &str, cluster: &str, stack: &str, gpus: u64, fixed: FixedChoices) -> Plan {
    plan_of(example(model), cluster, stack, gpus, fixed)
}

fn plan_of(model: ModelSpec, cluster: &str, stack: &str, gpus: u64, fixed: FixedChoices) -> Plan {
    let request = request(model, machine(cluster, stack, gpus.min(8)), gpus, fixed);
    let graph = build_graph(&request.model);
    let outcome = search(&request, &graph);
    let winner = outcome.best.first().expect("a layout fits");
    let report = search_report(&request, &outcome, Vec::new(), explain(&request, &graph, winner, &Watch::default()));
    lower(&request, &graph, winner, report)
}

fn check(name: &str, plan: &Plan) {
    let path = PathBuf::from(format!("{}/../tests/golden/{name}.plan.ron", env!("CARGO_MANIFEST_DIR")));
    let found = write_plan(plan);
    assert_eq!(read_plan(&found, name).as_ref(), Ok(plan), "reading gives back what was written");
    assert_eq!(verify(plan, name), [], "{name}");
    if std::env::var_os("BLESS").is_some() {
        fs::write(&path, &found).expect("the golden folder is writable");
        return;
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    for (number, (found, expected)) in found.lines().zip(expected.lines()).enumerate() {
        assert_eq!(found, expected, "{name}, line {}; `BLESS=1 cargo test` accepts the change", number + 1);
    }
    assert_eq!(found.lines().count(), expected.lines().count(), "{name}; `BLESS=1 cargo test` accepts the change");
}

#[test]
fn tiny_on_eight_cpu_ranks() {
    let fixed = FixedChoices { tensor_parallel: Some(2), pipeline_parallel: Some(2), ..FixedChoices::default() };
    check("tiny-tp2-pp2-dp2", &small_plan("tiny", "cpu-host", "planwright", 8, fixed));
}

#[test]
fn gpt2_on_one_node() {
    check("gpt2-8", &small_plan("gpt2-124m", "dgx-h100", "megatron-core-2025", 8, FixedChoices::default()));
}

/// GPT-2 of a size, its vocabulary padded to whole tiles, with few sequences in a step.
fn gpt2(name: &str, [layers, width, heads]: [u64; 3]) -> ModelSpec {
    let attention = Attention::MultiHead { num_attention_heads: heads, num_key_value_heads: None, head_dim: None };
    ModelSpec {
        name: name.to_owned(),
        num_layers: layers,
        hidden_size: width,
        attention,
        feed_forward: FeedForward::Gelu { intermediate_size: 4 * width },
        vocabulary: Vocabulary { size: 50_257, padded: Some(50_304) },
        global_batch: Some(BatchSize::Sequences(32)),
        published_parameters: None,
        ..example("gpt2-124m")
    }
}

/// The plans that `execute-plan gpu-check` carries: GPT-2 on one card, and small ones on one rank and on four.
#[test]
fn steps_of_gpu_check() {
    let one = |micro_batch| FixedChoices {
        micro_batch: Some(micro_batch),
        recompute: Some(Recompute::None),
        ..FixedChoices::default()
    };
    for (name, shape, micro_batch) in
        [("gpt2-124m", [12, 768, 12], 16), ("gpt2-774m", [36, 1280, 20], 8), ("gpt2-1.5b", [48, 1600, 25], 8)]
    {
        let plan = plan_of(gpt2(name, shape), "dgx-h200", "planwright", 1, one(micro_batch));
        check(&format!("{name}-1"), &plan);
    }
    check("tiny-1", &small_plan("tiny", "cpu-host", "planwright", 1, FixedChoices::default()));
    let four = FixedChoices { tensor_parallel: Some(2), pipeline_parallel: Some(2), ..FixedChoices::default() };
    check("tiny-tp2-pp2", &small_plan("tiny", "cpu-host", "planwright", 4, four));
}
