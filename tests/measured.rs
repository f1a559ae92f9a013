//! A run's profile of the machine is a cluster file that planning accepts, and its predictions make sense.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cost_models::machine::Machine;
use hardware_profiles::device::{MatmulFormat, OperatorClass};
use hardware_profiles::{ClusterFile, read_cluster_file};
use ir::graph::build_graph;
use ir::plan::{Plan, TimeTerm, write_plan};
use ir::provenance::Provenance;
use ir::strategy::Recompute;
use planner::lower::{lower, search_report};
use planner::request::FixedChoices;
use planner::search::search;
use support::{example, machine, request};

/// Names of the table's rows.
const ROWS: [&str; 8] = [
    "compute",
    "recomputation",
    "tensor communication",
    "pipeline and bubble",
    "data communication",
    "optimizer",
    "overhead",
    "step",
];

fn planned(machine: Machine, gpus: u64, fixed: FixedChoices) -> Plan {
    let request = request(example("tiny"), machine, gpus, fixed);
    let graph = build_graph(&request.model);
    let outcome = search(&request, &graph);
    let winner = outcome.best.first().expect("a layout fits");
    lower(&request, &graph, winner, search_report(&request, &outcome, Vec::new()))
}

fn fixed(layout: (u64, u64, u64), micro_batch: u64, recompute: Recompute) -> FixedChoices {
    let (tensor, pipeline, data) = layout;
    FixedChoices {
        tensor_parallel: Some(tensor),
        pipeline_parallel: Some(pipeline),
        data_parallel: Some(data),
        micro_batch: Some(micro_batch),
        recompute: Some(recompute),
        ..FixedChoices::default()
    }
}

/// Runs a plan with local ranks; gives its report.
fn execute(folder: &Path, plan: &Plan, more: &[&str]) -> String {
    let path = folder.join("plan.ron");
    fs::write(&path, write_plan(plan)).expect("the folder can be written to");
    let mut command = Command::new(env!("CARGO_BIN_EXE_execute-plan"));
    command.current_dir(folder).arg(&path).args(["--synthetic", "--steps", "4"]).args(more);
    let output = command.output().expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// Measures a profile on one layout and reads it as `plan --cluster` does.
fn measured(folder: &Path, layout: (u64, u64, u64)) -> ClusterFile {
    let gpus = layout.0 * layout.1 * layout.2;
    let plan = planned(machine("dgx-h100", "planwright", gpus), gpus, fixed(layout, 2, Recompute::None));
    let report = execute(folder, &plan, &["--profile", "here.ron"]);
    for row in ROWS {
        assert!(report.contains(row), "{row} in {report}");
    }
    let path: PathBuf = folder.join("here.ron");
    let text = fs::read_to_string(&path).expect("the run has written it");
    read_cluster_file(&text, "here.ron").unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn check(layout: (u64, u64, u64)) {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let gpus = layout.0 * layout.1 * layout.2;
    let ClusterFile { cluster, device, stack } = measured(folder.path(), layout);
    let (device, stack) = (device.expect("it is measured"), stack.expect("it is measured"));
    assert_eq!((cluster.name.as_str(), cluster.node_gpus), ("here", gpus));
    assert_eq!(device.peak.fp32.as_ref().map(|peak| peak.provenance), Some(Provenance::Measured));
    assert_eq!(stack.kernels.matmul_speed.provenance, Provenance::Measured);
    for class in OperatorClass::ALL {
        assert!(device.operator_rate(class).is_some(), "{class:?}");
    }
    let links = if gpus > 1 { Provenance::Measured } else { Provenance::Assumed };
    assert_eq!(cluster.intra.bandwidth_per_gpu_per_direction.provenance, links);

    let machine = Machine { device, cluster, stack, node_gpus: gpus, matmul_format: MatmulFormat::Model };
    let predict = |layout, micro_batch, recompute| {
        let plan = planned(machine.clone(), gpus, fixed(layout, micro_batch, recompute));
        for (term, time) in &plan.estimate.terms {
            assert!(time.time.0.is_finite() && time.time.0 >= 0.0, "{term:?} {time:?}");
        }
        plan
    };
    for layout in [(gpus, 1, 1), (1, gpus, 1), (1, 1, gpus)] {
        for micro_batch in [1, 2, 4] {
            let none = predict(layout, micro_batch, Recompute::None);
            let full = predict(layout, micro_batch, Recompute::Full);
            assert!(full.estimate.step.0 > none.estimate.step.0, "{layout:?} {micro_batch}: recomputation takes time");
            assert!(none.estimate.step.0 < 60.0, "{layout:?}: {}", none.estimate.step);
        }
        let small = predict(layout, 1, Recompute::None).estimate.terms[&TimeTerm::Overhead].time.0;
        let large = predict(layout, 4, Recompute::None).estimate.terms[&TimeTerm::Overhead].time.0;
        assert!(small >= large, "{layout:?}: more micro-batches, more overhead: {small} {large}");
    }
    let report = execute(folder.path(), &predict(layout, 4, Recompute::Full), &[]);
    assert!(report.contains("predicted against measured"), "{report}");
}

#[test]
fn a_profile_of_one_rank_plans_one_rank() {
    check((1, 1, 1));
}

#[test]
fn a_profile_of_two_ranks_plans_two_ranks() {
    check((1, 1, 2));
}
