//! Plans of small models, compared whole. `BLESS=1 cargo test` writes them anew.

mod support;

use std::fs;
use std::path::PathBuf;

use ir::graph::build_graph;
use ir::plan::{Plan, read_plan, write_plan};
use ir::verify::verify;
use planner::explain::explain;
use planner::lower::{lower, search_report};
use planner::request::FixedChoices;
use planner::search::search;
use planner::watch::Watch;
use support::{example, machine, request};

fn small_plan(model: &str, cluster: &str, stack: &str, gpus: u64, fixed: FixedChoices) -> Plan {
    let request = request(example(model), machine(cluster, stack, 8), gpus, fixed);
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
