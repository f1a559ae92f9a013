//! Plans in files, and the real program that runs them.

#![allow(dead_code, reason = "each test uses a part")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use ir::model::{ModelSpec, Workload};
use ir::plan::{Plan, write_plan};
use ir::sharding::tensor_split;
use ir::strategy::ZeroStage;
use ir::traffic::step_traffic;
use planner::request::FixedChoices;
use runtime::log::StepRecord;
use serde_json::Value;

use crate::support::plans::fixed_plan;

/// The program.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_execute-plan");

/// Degrees of a layout; the rest is searched.
pub fn degrees(tensor_parallel: u64, pipeline_parallel: u64, data_parallel: u64) -> FixedChoices {
    FixedChoices {
        tensor_parallel: Some(tensor_parallel),
        pipeline_parallel: Some(pipeline_parallel),
        data_parallel: Some(data_parallel),
        micro_batch: Some(1),
        zero_stage: Some(ZeroStage::None),
        ..FixedChoices::default()
    }
}

/// The plan of a model for a fixed layout.
pub fn plan(model: &ModelSpec, sequence_length: u64, global_batch: u64, fixed: FixedChoices) -> Plan {
    fixed_plan(model.clone(), Workload { sequence_length, global_batch }, true, fixed)
}

/// Writes a plan into a folder.
pub fn write(folder: &Path, name: &str, plan: &Plan) {
    fs::write(folder.join(name), write_plan(plan)).expect("the scratch folder is writable");
}

/// The program in a folder, with arguments between spaces.
pub fn command(folder: &Path, arguments: &str) -> Command {
    let mut command = Command::new(PROGRAM);
    command.current_dir(folder).args(arguments.split_whitespace());
    command
}

/// Runs the program to its end.
pub fn run(folder: &Path, arguments: &str) -> Output {
    command(folder, arguments).output().expect("the program starts")
}

/// Runs the program, which must end well; what it says on stderr.
pub fn succeed(folder: &Path, arguments: &str) -> String {
    let output = run(folder, arguments);
    let text = String::from_utf8(output.stderr).expect("messages are UTF-8");
    assert_eq!(output.status.code(), Some(0), "{arguments}: {text}");
    text
}

/// The steps of a log.
pub fn steps(folder: &Path, log: &str) -> Vec<StepRecord> {
    let text = fs::read_to_string(folder.join(log)).expect("the log is there");
    text.lines().map(|line| serde_json::from_str(line).expect("each line is a step")).collect()
}

/// The lines of a log without what the clock decides.
pub fn timeless(folder: &Path, log: &str) -> Vec<BTreeMap<String, Value>> {
    let text = fs::read_to_string(folder.join(log)).expect("the log is there");
    let parse = |line| serde_json::from_str(line).expect("each line is an object");
    let mut lines: Vec<BTreeMap<String, Value>> = text.lines().map(parse).collect();
    lines.iter_mut().for_each(|line| line.retain(|field, _| field != "seconds" && field != "mfu"));
    lines
}

/// Bytes that all ranks send in a step of so many micro-batches, by the plan.
pub fn planned_bytes(plan: &Plan, micro_batches: u64) -> u64 {
    let program = plan.program.as_ref().expect("the plan is executable");
    let strategy = &plan.strategy;
    let split = tensor_split(&plan.model, strategy.tensor_parallel, strategy.sequence_parallel).expect("sound");
    let traffic = step_traffic(plan, program, split, micro_batches).expect("the schedule is sound");
    traffic.values().map(|bytes| bytes.0).sum()
}

/// Whether two numbers differ by at most a part of the second.
pub fn close(found: f64, expected: f64, tolerance: f64) -> bool {
    (found - expected).abs() <= tolerance * expected.abs()
}
