//! `plan --cluster FILE` where the file brings its device and stack.

use std::fs;
use std::path::Path;
use std::process::Command;

use hardware_profiles::{ClusterFile, find_cluster, find_device, find_stack, write_cluster_file};
use tempfile::TempDir;

const GPT2: &str = include_str!("../examples/gpt2-124m.ron");

/// Exit code, and what was printed on either stream.
fn plan(folder: &Path, more: &[&str]) -> (Option<i32>, String) {
    let line = "--model model.ron --gpus 8 --node-gpus 8 --tensor-parallel 1 --dry-run --cluster ./mine.ron";
    let mut command = Command::new(env!("CARGO_BIN_EXE_plan"));
    let output = command.current_dir(folder).args(line.split(' ')).args(more).output().expect("the program starts");
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).expect("text"))
}

fn file(memory_bandwidth: f64, stack: Option<&str>) -> ClusterFile {
    let mut cluster = find_cluster("dgx-a100-80gb", "test").expect("it is built in");
    let mut device = find_device(&cluster.device, "test").expect("it is built in");
    (cluster.name, cluster.device, device.name) = ("mine".to_owned(), "my gpu".to_owned(), "my gpu".to_owned());
    device.memory_bandwidth.value.0 *= memory_bandwidth;
    let stack = stack.map(|name| find_stack(name, "test").expect("it is built in"));
    ClusterFile { cluster, device: Some(device), stack }
}

#[test]
fn the_file_brings_device_and_stack() {
    let rows: [(Option<&str>, &[&str], &str); 5] = [
        (None, &[], "(defaults: stack"),
        (Some("fsdp-2023"), &[], "stack fsdp-2023"),
        (Some("fsdp-2023"), &["--stack", "deepspeed-zero"], "stack deepspeed-zero"),
        (Some("fsdp-2023"), &["--stack", "deepspeed-zero", "--zero-stage", "1"], "stack deepspeed-zero"),
        (None, &["--stack", "fsdp-2023"], "stack fsdp-2023"),
    ];
    let folder = TempDir::new().expect("a scratch folder");
    fs::write(folder.path().join("model.ron"), GPT2).expect("the folder can be written to");
    for (stack, more, expected) in rows {
        fs::write(folder.path().join("mine.ron"), write_cluster_file(&file(1.0, stack))).expect("as above");
        let (code, text) = plan(folder.path(), more);
        assert_eq!(code, Some(0), "{text}");
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains(expected) && text.contains("8 GPUs of mine"), "{expected} in {text}");
        assert_eq!(text.contains("(defaults: stack"), expected.starts_with('('), "{text}");
    }
}

#[test]
fn the_files_device_decides() {
    let folder = TempDir::new().expect("a scratch folder");
    fs::write(folder.path().join("model.ron"), GPT2).expect("the folder can be written to");
    let mut steps = Vec::new();
    for bandwidth in [1.0, 0.1] {
        fs::write(folder.path().join("mine.ron"), write_cluster_file(&file(bandwidth, None))).expect("as above");
        let (code, text) = plan(folder.path(), &["--json"]);
        assert_eq!(code, Some(0), "{text}");
        let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        steps.push(json["estimate"]["step_seconds"].as_f64().expect("a number"));
    }
    assert!(steps[1] > steps[0], "{steps:?}");
}

#[test]
fn senseless_numbers_are_refused() {
    let folder = TempDir::new().expect("a scratch folder");
    fs::write(folder.path().join("model.ron"), GPT2).expect("the folder can be written to");
    fs::write(folder.path().join("mine.ron"), write_cluster_file(&file(0.0, None))).expect("as above");
    let (code, text) = plan(folder.path(), &[]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("./mine.ron, device, field memory_bandwidth"), "{text}");
}
