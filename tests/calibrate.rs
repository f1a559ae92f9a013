//! `plan calibrate`: a few logged runs bring predictions of other layouts nearer to what is measured.

#![allow(clippy::print_stdout, reason = "the figures that were reached are shown")]

use std::fs;
use std::path::Path;
use std::process::Command;

use hardware_profiles::{find_cluster, find_device, find_stack};
use ir::strategy::ZeroStage;
use ir::units::{Bytes, Seconds};
use planner::calibrate::{Calibration, MOST_CONSTANTS, Subject, calibrate};
use planner::validate::case::{assemble, prepare_on};
use planner::validate::table::{Row, Run, read_table};
use planner::validate::{Prediction, predict};
use serde_json::Value;
use tempfile::TempDir;

/// Relative deviations of synthetic measurements from the truth, in turn.
const NOISE: [f64; 4] = [0.02, -0.015, 0.01, -0.02];
/// Rows of a source that are logged, and draws of them.
const LOGGED: usize = 4;
const DRAWS: usize = 4;

fn subject(cluster: &str, stack: &str) -> Subject {
    let cluster = find_cluster(cluster, "test").expect("it is built in");
    let device = find_device(&cluster.device, "test").expect("it is built in");
    Subject { device, cluster, stack: find_stack(stack, "test").expect("it is built in") }
}

fn prediction(run: &Run, Subject { cluster, device, stack }: Subject) -> Prediction {
    let machine = assemble(run, cluster, device, stack).expect("the device has the format");
    predict(&prepare_on(run, machine).expect("the run is sound")).expect("the run can be predicted")
}

fn calibrated(found: &Calibration) -> Subject {
    let file = found.file.clone();
    let part = "a calibrated file is whole";
    Subject { cluster: file.cluster, device: file.device.expect(part), stack: file.stack.expect(part) }
}

/// Mean error of step times.
fn mean_error<'a>(rows: impl Iterator<Item = &'a Row>, subject: &Subject) -> f64 {
    let error = |row: &Row| {
        let measured = row.measured.step_seconds.expect("chosen rows have times");
        (prediction(&row.run, subject.clone()).step.0 / measured - 1.0).abs()
    };
    let errors: Vec<f64> = rows.map(error).collect();
    errors.iter().sum::<f64>() / errors.len() as f64
}

/// A GPT of 39 B parameters on 64 GPUs in many layouts, as if it had been measured on a machine.
fn synthetic_rows(truth: &Subject) -> Vec<Row> {
    let base = Run {
        layers: Some(48),
        hidden: Some(8192),
        heads: Some(64),
        vocab: Some(51_200),
        seq_len: Some(2048),
        gpus: Some(64),
        global_batch: Some(64),
        zero_stage: Some(ZeroStage::OptimizerState),
        recompute: Some(ir::strategy::Recompute::Full),
        cp: Some(1),
        ..Run::default()
    };
    let layouts = [(8, 1), (2, 4), (4, 2), (4, 8), (1, 8), (2, 8), (8, 2), (4, 4), (8, 4), (1, 16), (2, 16), (8, 8)];
    let mut rows = Vec::new();
    for (index, (tensor, pipeline)) in layouts.into_iter().enumerate() {
        let data = 64 / (tensor * pipeline);
        let micro_batch = Some([1, 2, 4][index % 3]);
        let run = Run { tp: Some(tensor), pp: Some(pipeline), dp: Some(data), micro_batch, ..base.clone() };
        let found = prediction(&run, truth.clone());
        let noise = 1.0 + NOISE[index % NOISE.len()];
        let measured = planner::validate::table::Measured {
            step_seconds: Some(found.step.0 * noise),
            peak_memory_gib: Some(found.device_memory.gib() * noise),
            ..Default::default()
        };
        rows.push(Row { id: format!("run-{index}"), source: "synthetic".to_owned(), run, measured });
    }
    rows
}

#[test]
fn four_runs_find_a_machine_that_differs() {
    let base = subject("dgx-a100-80gb", "megatron-core-2024");
    type Change = (&'static str, fn(&mut Subject));
    let changes: [Change; 5] = [
        ("slow products", |s| s.stack.kernels.matmul_speed.value *= 0.75),
        ("slow network", |s| s.cluster.inter.efficiency.value *= 0.35),
        ("slow host and products", |s| {
            s.stack.kernels.matmul_speed.value *= 0.85;
            s.stack.overhead.micro_batch.value = Seconds(0.03);
        }),
        ("half the links, large buffers", |s| {
            s.cluster.intra.efficiency.value *= 0.5;
            s.stack.memory.communication_buffers.value = Bytes(6 << 30);
        }),
        ("half the network, large buffers", |s| {
            s.cluster.inter.efficiency.value *= 0.5;
            s.stack.memory.communication_buffers.value = Bytes(6 << 30);
        }),
    ];
    for (name, change) in changes {
        let mut truth = base.clone();
        change(&mut truth);
        let rows = synthetic_rows(&truth);
        let (logged, others) = rows.split_at(LOGGED);
        let found = calibrate(logged.to_vec(), "runs.csv", &base, "mine").expect("the runs are sound");
        let [before, after] = [&base, &calibrated(&found)].map(|subject| mean_error(others.iter(), subject));
        println!("{name}: {:.1} % -> {:.1} % on {} other layouts", before * 100.0, after * 100.0, others.len());
        for constant in &found.constants {
            println!("  {}: {} -> {}", constant.name, constant.old_shown, constant.new_shown);
        }
        assert!(found.constants.len() <= MOST_CONSTANTS, "{name}");
        assert!(after < before && after < 0.025, "{name}: {before} -> {after}");
    }
}

#[test]
fn what_no_run_tells_stays() {
    let base = subject("dgx-a100-80gb", "megatron-core-2024");
    let mut truth = base.clone();
    truth.stack.kernels.matmul_speed.value *= 0.8;
    let mut rows = synthetic_rows(&truth);
    // One node: the network between nodes does not matter, nor does anything of experts.
    for row in &mut rows {
        (row.run.gpus, row.run.layers, row.run.dp, row.run.tp, row.run.pp) =
            (Some(8), Some(8), Some(1), Some(8), Some(1));
        row.measured.step_seconds = Some(prediction(&row.run, truth.clone()).step.0);
    }
    let found = calibrate(rows[..LOGGED].to_vec(), "runs.csv", &base, "mine").expect("the runs are sound");
    let after = calibrated(&found);
    assert_eq!(after.cluster.inter, base.cluster.inter);
    assert_eq!(after.stack.kernels.experts, base.stack.kernels.experts);
    assert!(found.constants.iter().any(|constant| constant.name == "stack kernels.matmul_speed"));
    let single = calibrate(rows[..1].to_vec(), "runs.csv", &base, "mine").expect("the run is sound");
    let timed = single.constants.iter().filter(|constant| !constant.name.contains("memory")).count();
    assert_eq!(timed, 1, "one run tells one constant: {:?}", single.constants);
}

/// Rows of published runs on one machine, and the profiles that a user would name.
struct Published {
    source: &'static str,
    gpu: &'static str,
    cluster: &'static str,
    stack: &'static str,
}

#[test]
fn four_published_runs_help_with_the_rest_of_their_source() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/published/runs.csv");
    let text = fs::read_to_string(path).expect("the table is part of the repository");
    let rows = read_table(&text, "runs.csv").expect("the table is well-formed");
    let of = |source, gpu, cluster, stack| Published { source, gpu, cluster, stack };
    let cases = [
        of("VIA-Research/vTrain (multi-node)", "A100-SXM", "dgx-a100-80gb", "planwright"),
        of("VIA-Research/vTrain (multi-node)", "A100-SXM", "dgx-a100-80gb", "megatron-deepspeed-2022"),
        of("bigscience-workshop/bigscience (tr11)", "A100-SXM", "dgx-a100-80gb", "megatron-2021"),
        of("bigscience-workshop/bigscience (tr11)", "A100-SXM", "jean-zay-a100-80gb", "megatron-deepspeed-2022"),
        of("MooreThreads/SimuMax (B200 real runs)", "B200-SXM", "dgx-b200", "megatron-core-2025"),
        of("mosaicml/llm-foundry", "H100-SXM", "dgx-h100", "fsdp-2023"),
        of("NVIDIA/dgxc-benchmarking", "H100-SXM", "dgx-h100", "megatron-core-2024"),
    ];
    for Published { source, gpu, cluster, stack } in cases {
        let base = subject(cluster, stack);
        let usable = |row: &&Row| {
            let machine = || assemble(&row.run, base.cluster.clone(), base.device.clone(), base.stack.clone());
            let sound = || machine().and_then(|machine| predict(&prepare_on(&row.run, machine)?)).is_ok();
            row.source == source && row.run.gpu == gpu && row.measured.step_seconds.is_some() && sound()
        };
        let rows: Vec<Row> = rows.iter().filter(usable).cloned().collect();
        let mut sums = [0.0; 2];
        for draw in 0..DRAWS {
            let stride = rows.len() / LOGGED;
            let drawn = |index: usize| index % stride == draw * stride / DRAWS && index / stride < LOGGED;
            let picked = |keep: bool| rows.iter().enumerate().filter(move |(index, _)| drawn(*index) == keep);
            let logged: Vec<Row> = picked(true).map(|(_, row)| row.clone()).collect();
            assert_eq!(logged.len(), LOGGED);
            let found = calibrate(logged, "runs.csv", &base, "mine").expect("the runs are sound");
            let subjects = [base.clone(), calibrated(&found)];
            for (sum, subject) in sums.iter_mut().zip(&subjects) {
                *sum += mean_error(picked(false).map(|(_, row)| row), subject) / DRAWS as f64;
            }
        }
        let [before, after] = sums.map(|error| error * 100.0);
        println!("{source} as {cluster}, {stack}: {before:.1} % -> {after:.1} % on the other {}", rows.len() - LOGGED);
        assert!(after < before * 1.05 + 0.2, "{source}, {stack}: {before} -> {after}");
    }
}

fn plan(folder: &Path, line: &str) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plan"));
    let output = command.current_dir(folder).args(line.split(' ')).output().expect("the program starts");
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).expect("text"))
}

const LOG: &str = "\
layers,hidden,heads,seq_len,vocab,gpus,tp,pp,micro_batch,global_batch,measured_step_s,measured_peak_mem_gib
12,768,12,1024,50257,8,1,1,4,64,0.25,
12,768,12,1024,50257,8,2,1,4,64,0.31,9.5
12,768,12,1024,50257,8,1,2,2,64,0.36,
12,768,12,1024,50257,8,5,2,2,64,0.36,
";

#[test]
fn the_written_file_is_a_cluster_for_plan() {
    let folder = TempDir::new().expect("a scratch folder");
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).expect("writable");
    write("log.csv", LOG);
    write("model.ron", include_str!("../examples/gpt2-124m.ron"));
    let line = "calibrate log.csv --cluster dgx-a100-80gb --out my-cluster.ron";
    let (code, text) = plan(folder.path(), line);
    assert_eq!(code, Some(0), "{text}");
    for piece in ["3 of 4 runs used", "not used: run 4", "tp 5", "before", "left out", "my-cluster.ron"] {
        assert!(text.contains(piece), "{piece} in {text}");
    }
    let file = fs::read_to_string(folder.path().join("my-cluster.ron")).expect("it was written");
    assert!(file.contains("Fitted(") && file.contains("least error of 3 runs of log.csv"), "{file}");
    let (code, text) = plan(folder.path(), &format!("{line} --json"));
    assert_eq!(code, Some(0), "equal bytes are success: {text}");
    let value: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(value["runs"].as_array().map(Vec::len), Some(3));
    assert!(value["constants"].as_array().is_some_and(|all| !all.is_empty() && all.len() <= MOST_CONSTANTS));
    assert!(value["time"]["mape_after"].as_f64() <= value["time"]["mape_before"].as_f64(), "{text}");

    let search = "--model model.ron --gpus 8 --node-gpus 8 --tensor-parallel 1 --dry-run --cluster my-cluster.ron";
    let (code, text) = plan(folder.path(), search);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("8 GPUs of my-cluster") && text.contains("[fitted]"), "{text}");

    let single: String = LOG.lines().take(2).map(|line| format!("{line}\n")).collect();
    write("log.csv", &single);
    let (code, text) = plan(folder.path(), &format!("{line} --force"));
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("warning: one run tells one constant"), "{text}");
}
