//! Plans for small models on a given layout.

use ir::graph::build_graph;
use ir::model::{ModelSpec, Workload};
use ir::plan::Plan;
use ir::verify::verify;
use planner::lower::{lower, search_report};
use planner::request::{FixedChoices, Request, check_request};
use planner::search::search;

use super::machine;

/// The plan of a model whose degrees are all fixed.
pub fn fixed_plan(model: ModelSpec, workload: Workload, flash: bool, fixed: FixedChoices) -> Plan {
    let degree = |choice: Option<u64>| choice.unwrap_or(1);
    let gpus = degree(fixed.tensor_parallel) * degree(fixed.pipeline_parallel) * degree(fixed.data_parallel);
    let mut machine = machine("dgx-h100", "planwright", gpus);
    machine.stack.kernels.flash_attention = flash;
    let request =
        Request { model, origin: "small".to_owned(), workload, machine, gpus, fixed, top: 1, executable_only: false };
    check_request(&request).expect("the request is sound");
    let graph = build_graph(&request.model);
    let outcome = search(&request, &graph);
    let winner = outcome.best.first().expect("a layout fits");
    let plan = lower(&request, &graph, winner, search_report(&request, &outcome, Vec::new(), Vec::new()));
    assert_eq!(verify(&plan, "plan"), []);
    plan
}
