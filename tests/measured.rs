//! A run's profile of the machine is a cluster file that planning accepts, and its predictions make sense.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cost_models::machine::Machine;
use hardware_profiles::device::{MatmulFormat, OperatorClass};
use hardware_profiles::stack::Waiting;
use hardware_profiles::{ClusterFile, Sourced, read_cluster_file};
use ir::distribution::SplitAxis;
use ir::graph::build_graph;
use ir::plan::{Plan, TimeTerm, write_plan};
use ir::program::{Body, Conversion, Instruction};
use ir::provenance::Provenance;
use ir::strategy::{Recompute, ZeroStage};
use ir::units::Seconds;
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
    lower(&request, &graph, winner, search_report(&request, &outcome, Vec::new(), Vec::new()))
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
    assert!(stack.kernels.repeats_needed_only);
    assert_eq!(stack.overlap.waiting.is_some(), gpus > 1);
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

/// A machine whose ranks wait for a time at every collective, and for another at each that is started with one.
fn waiting_machine(each: f64, further: f64) -> Machine {
    let mut machine = machine("cpu-host", "planwright", 2);
    machine.stack.kernels.repeats_needed_only = true;
    let seconds =
        |value| Sourced { value: Seconds(value), provenance: Provenance::Assumed, source: "a test".to_owned() };
    let waiting = Waiting { blocking: seconds(each), started: seconds(each), further: seconds(further) };
    machine.stack.overlap.waiting = Some(waiting);
    machine
}

/// Seconds that a second at every collective, or at every further one, adds to a step.
fn waits(fixed: FixedChoices, each: f64, further: f64) -> f64 {
    let step = |each, further| planned(waiting_machine(each, further), 2, fixed).estimate.step.0;
    step(each, further) - step(0.0, 0.0)
}

/// Collectives of the tensor axis in a step, counted in the program.
fn tensor_collectives(plan: &Plan) -> f64 {
    let program = plan.program.as_ref().expect("the plan is executable");
    let moves = |instruction: &Instruction| match instruction {
        Instruction::Convert(Conversion::Slice(_), ..) => false,
        Instruction::Convert(_, axes, ..) => axes.contains(&SplitAxis::Tensor),
        _ => false,
    };
    let in_body = |body: &Body| body.forward.iter().chain(&body.backward).filter(|one| moves(one)).count() as f64;
    let [embedding, layer, head] = &program.bodies[..] else { panic!("a tiny model has one kind of layer") };
    let layers = plan.model.num_layers as f64;
    (in_body(embedding) + in_body(layer) * layers + in_body(head)) * plan.strategy.num_micro_batches() as f64
}

#[test]
fn tensor_ranks_wait_at_the_collectives_of_the_program() {
    for (sequence_parallel, recompute) in
        [(false, Recompute::None), (false, Recompute::Full), (true, Recompute::None), (true, Recompute::Full)]
    {
        let fixed = FixedChoices { sequence_parallel: Some(sequence_parallel), ..fixed((2, 1, 1), 4, recompute) };
        let expected = tensor_collectives(&planned(waiting_machine(0.0, 0.0), 2, fixed));
        let found = waits(fixed, 1.0, 0.0);
        assert!((found - expected).abs() < 1e-6, "{sequence_parallel} {recompute:?}: {found} {expected}");
    }
}

#[test]
fn replicas_wait_for_what_each_block_starts() {
    // Embedding, four layers and head, two micro-batches a replica.
    let rows = [
        (ZeroStage::None, 1.0),
        (ZeroStage::OptimizerState, 2.0),
        (ZeroStage::Gradients, 6.0 * 2.0 + 1.0),
        (ZeroStage::Parameters, 6.0 * 2.0 * 3.0),
    ];
    for (zero_stage, expected) in rows {
        let fixed = FixedChoices { zero_stage: Some(zero_stage), ..fixed((1, 1, 2), 4, Recompute::None) };
        let found = waits(fixed, 1.0, 0.0);
        assert!((found - expected).abs() < 1e-6, "{zero_stage:?}: {found} {expected}");
    }
}

#[test]
fn each_tensor_has_a_collective_of_its_own() {
    // Of blocks with several tensors all but the first: in two micro-batches, or once a step for all blocks together.
    for (zero_stage, together) in [(ZeroStage::None, 1.0), (ZeroStage::Gradients, 6.0 * 2.0 + 1.0)] {
        let fixed = FixedChoices { zero_stage: Some(zero_stage), ..fixed((1, 1, 2), 4, Recompute::None) };
        let plan = planned(waiting_machine(0.0, 0.0), 2, fixed);
        let program = plan.program.as_ref().expect("the plan is executable");
        let [embedding, layer, head] = [0, 1, 2].map(|body| program.bodies[body].parameters.len() as f64);
        let tensors = embedding + 4.0 * layer + head;
        // ZeRO-2 scatters gradients of each micro-batch and gathers weights at the end.
        let times = if zero_stage == ZeroStage::Gradients { 3.0 } else { 1.0 };
        let expected = times * tensors - together;
        let found = waits(fixed, 0.0, 1.0);
        assert!((found - expected).abs() < 1e-6, "{zero_stage:?}: {found} {expected}");
    }
}

#[test]
fn the_end_of_a_block_is_not_repeated() {
    let mut machine = machine("cpu-host", "planwright", 1);
    let mut repeated = [false, true].map(|needed_only| {
        machine.stack.kernels.repeats_needed_only = needed_only;
        let plan = planned(machine.clone(), 1, fixed((1, 1, 1), 4, Recompute::Full));
        plan.estimate.terms[&TimeTerm::Recomputation].time.0
    });
    repeated.reverse();
    // Of 12 h x h of products and the attention core, the last 4 h x h are left out.
    assert!(repeated[0] < repeated[1] * 0.8 && repeated[0] > repeated[1] * 0.5, "{repeated:?}");
}
