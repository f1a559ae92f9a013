//! Every example model on small and large clusters, through the real program.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

const GPU_COUNTS: [u64; 4] = [8, 64, 1024, 16384];

fn plan(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plan"));
    command.current_dir(folder).args(arguments).output().expect("the program starts")
}

fn examples() -> Vec<String> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples");
    let entries = std::fs::read_dir(folder).expect("the folder exists").map(|entry| entry.expect("readable").path());
    let mut files: Vec<String> = entries
        .filter(|path| path.extension().is_some_and(|extension| extension == "ron"))
        .map(|path| path.display().to_string())
        .collect();
    files.sort();
    assert!(files.len() >= 13, "{files:?}");
    files
}

#[test]
fn every_example_is_planned_or_told_why_not() {
    let folder = TempDir::new().expect("a scratch folder");
    for model in examples() {
        for gpus in GPU_COUNTS.map(|gpus| gpus.to_string()) {
            check_example(folder.path(), &model, &gpus);
        }
    }
}

fn check_example(folder: &Path, model: &str, gpus: &str) {
    let case = format!("{model} on {gpus}");
    let arguments = ["--model", model, "--gpus", gpus, "--node-gpus", "8", "--out", "a.plan.ron", "--force"];
    let output = plan(folder, &arguments);
    let stderr = String::from_utf8_lossy(&output.stderr);
    match output.status.code() {
        Some(0) => {}
        Some(1) => {
            assert!(stderr.contains("nearest candidate") || stderr.contains("no layout can run"), "{case}: {stderr}");
            assert!(stderr.contains("help: "), "{case}: {stderr}");
            return;
        }
        code => panic!("{case}: exit {code:?}, {stderr}"),
    }
    let first = std::fs::read(folder.join("a.plan.ron")).expect("a plan was written");
    let again = plan(folder, &["--model", model, "--gpus", gpus, "--node-gpus", "8", "--out", "b.plan.ron", "--force"]);
    assert_eq!(again.status.code(), Some(0), "{case}");
    let second = std::fs::read(folder.join("b.plan.ron")).expect("a plan was written");
    assert!(first == second, "{case}: two runs differ");
    assert!(first.len() < 1_000_000, "{case}: {} bytes", first.len());
    let checked = plan(folder, &["check", "a.plan.ron"]);
    assert_eq!(checked.status.code(), Some(0), "{case}: {}", String::from_utf8_lossy(&checked.stderr));
    for arguments in [
        vec!["inspect", "a.plan.ron"],
        vec!["inspect", "a.plan.ron", "--stage", "0"],
        vec!["inspect", "a.plan.ron", "--rank", "7"],
    ] {
        let shown = plan(folder, &arguments);
        assert_eq!(shown.status.code(), Some(0), "{case}: {arguments:?}");
        assert!(shown.stdout.len() > 200, "{case}: {arguments:?}");
    }
}

#[test]
fn json_has_the_names_of_the_contract() {
    let folder = TempDir::new().expect("a scratch folder");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/bloom.ron");
    let output = plan(folder.path(), &["--model", model, "--gpus", "384", "--node-gpus", "8", "--json"]);
    let value: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let names = [
        ("/", "model parameters gpus cluster stack strategy estimate search alternatives"),
        (
            "/strategy",
            "tensor_parallel pipeline_parallel data_parallel context_parallel expert_parallel expert_tensor_parallel \
             zero_stage shard_group micro_batch global_batch virtual_stages schedule recompute recomputed_layers_per_stage sequence_parallel \
             offload_optimizer layers_per_stage mesh_order executable reason",
        ),
        (
            "/estimate",
            "step_seconds interval_seconds tokens_per_second_per_gpu model_tflops_per_gpu hardware_tflops_per_gpu mfu \
             mfu_formula device_memory_gib allocator_peak_gib checkpoint_gib terms",
        ),
        ("/search", "enumerated feasible pruned rejected seconds stop_reason"),
    ];
    for (place, names) in names {
        let object = if place == "/" { &value } else { value.pointer(place).expect("the object exists") };
        for name in names.split_whitespace() {
            assert!(object.get(name).is_some(), "{place} lacks {name}");
        }
    }
    assert_eq!(value["parameters"], 176_247_271_424u64);
    assert_eq!(value["alternatives"].as_array().map(Vec::len), Some(10));
    let sum = |name: &str| -> u64 {
        let counts = value["search"][name].as_object().expect("counts by name");
        counts.values().map(|count| count.as_u64().expect("a count")).sum()
    };
    let search = &value["search"];
    assert_eq!(search["enumerated"].as_u64(), search["feasible"].as_u64().map(|n| n + sum("pruned") + sum("rejected")));
    let terms = value["estimate"]["terms"].as_object().expect("terms by name");
    let total: f64 = terms.values().map(|term| term.as_f64().expect("seconds")).sum();
    let step = value["estimate"]["step_seconds"].as_f64().expect("seconds");
    assert!((total / step - 1.0).abs() < 1e-9);
    let written = std::fs::metadata(folder.path().join("bloom-176b-384.plan.ron")).expect("--json writes the plan too");
    assert!(written.len() < 200_000, "BLOOM's plan has {} bytes", written.len());
}

#[test]
fn dry_run_reports_the_same_and_writes_nothing() {
    let folder = TempDir::new().expect("a scratch folder");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/gpt2-124m.ron");
    let arguments = ["--model", model, "--gpus", "8", "--node-gpus", "8"];
    let dry = plan(folder.path(), &[&arguments[..], &["--dry-run"]].concat());
    assert_eq!(std::fs::read_dir(folder.path()).expect("readable").count(), 0);
    let wet = plan(folder.path(), &arguments);
    let body = |output: &Output| {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.rsplit_once('\n').and_then(|(text, _)| text.rsplit_once('\n')).map(|(body, _)| body.to_owned())
    };
    assert_eq!(body(&dry), body(&wet));
}

#[test]
fn a_tensor_degree_across_nodes_is_explained() {
    let folder = TempDir::new().expect("a scratch folder");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/bloom.ron");
    let output = plan(folder.path(), &["--model", model, "--gpus", "384", "--node-gpus", "8", "--dry-run"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("would cross nodes of 8"), "{text}");
}
