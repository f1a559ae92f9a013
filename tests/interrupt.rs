//! Ctrl-C during a search or a sweep, through the real program: the best so far is printed and marked as not proven, nothing is
//! written, and the exit code says so. A bar shows on a terminal only.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

const BLOOM: &str = include_str!("../examples/bloom.ron");
/// A search that takes long: many layers, many divisors, and with so many layouts to report no bound ends it early.
const LONG: &str = "--model model.ron --gpus 5040 --node-gpus 8 --global-batch 720720 --top 100000000 --recompute full \
                    --sequence-parallel off --zero-stage 1";
/// A sweep of 131,072 searches.
const WIDE: &str = "--model bloom.ron --gpus 8..1048576 --node-gpus 8";
/// Hundredths of a second of computing after which the program is in its search, and short against the search.
const SOON: u64 = 150;
const INTERRUPTED: i32 = 130;

/// Files that a folder of [`folder`] holds.
const FILES: usize = 2;

/// A folder with BLOOM and with a narrow model of 2048 layers.
fn folder() -> TempDir {
    let changes = [
        ("num_layers: 70", "num_layers: 2048"),
        ("hidden_size: 14336", "hidden_size: 1024"),
        ("intermediate_size: 57344", "intermediate_size: 4096"),
        ("num_attention_heads: 112", "num_attention_heads: 16"),
        ("  published_parameters: 176247271424,\n", ""),
    ];
    let model = changes.iter().fold(BLOOM.to_owned(), |text, (from, to)| {
        assert!(text.contains(from), "the example no longer holds `{from}`");
        text.replacen(from, to, 1)
    });
    let folder = TempDir::new().expect("a scratch folder");
    for (name, text) in [("bloom.ron", BLOOM), ("model.ron", &model)] {
        fs::write(folder.path().join(name), text).expect("writable");
    }
    folder
}

fn start(folder: &Path, arguments: &str) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plan"));
    command.current_dir(folder).args(arguments.split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("the program starts")
}

/// Runs the arguments and interrupts them once they have computed for a while.
fn interrupt(folder: &Path, arguments: &str) -> Output {
    let child = start(folder, arguments);
    while computed(child.id()) < SOON {
        thread::sleep(Duration::from_millis(20));
    }
    let id = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process has a number");
    kill_process(id, Signal::INT).expect("the program still runs");
    child.wait_with_output().expect("the program ends")
}

/// Hundredths of a second that a process has computed (proc(5), `stat`, fields 14 and 15).
fn computed(process: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).expect("the program runs");
    let after_name = text.rsplit(") ").next().expect("a state follows the name");
    let fields: Vec<&str> = after_name.split(' ').collect();
    assert_ne!(fields[0], "Z", "the program ended before it was interrupted");
    fields[11..13].iter().map(|ticks| ticks.parse::<u64>().expect("a number")).sum()
}

fn check(output: &Output, folder: &Path) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(INTERRUPTED), "{stderr}");
    assert!(stderr.is_empty(), "a bar or a message where stderr is no terminal: {stderr}");
    assert_eq!(fs::read_dir(folder).expect("readable").count(), FILES, "a file was written");
}

#[test]
fn an_interrupted_search_gives_the_best_so_far() {
    let folder = folder();
    let output = interrupt(folder.path(), LONG);
    check(&output, folder.path());
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    // Paragraphs break where they are full.
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for piece in ["not proven to be the best tensor ", "stopped because interrupted", "nothing written (interrupted)"] {
        assert!(words.contains(piece), "`{piece}` is not in\n{text}");
    }
}

#[test]
fn an_interrupted_search_says_so_in_json() {
    let folder = folder();
    let output = interrupt(folder.path(), &format!("{LONG} --json"));
    check(&output, folder.path());
    let value: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let search = &value["search"];
    assert_eq!(search["stop_reason"], "interrupted");
    assert!(value["plan_file"].is_null() && value["estimate"]["step_seconds"].is_f64());
    let sum = |counts: &Value| counts.as_object().expect("counts").values().filter_map(Value::as_u64).sum::<u64>();
    let counted = search["feasible"].as_u64().unwrap_or(0) + sum(&search["pruned"]) + sum(&search["rejected"]);
    assert!(search["pruned"]["interrupted"].as_u64().is_some_and(|rest| rest > 0), "{search}");
    assert_eq!(search["enumerated"].as_u64(), Some(counted), "every candidate is counted once: {search}");
}

#[test]
fn an_interrupted_sweep_keeps_what_it_has() {
    let folder = folder();
    let output = interrupt(folder.path(), &format!("{WIDE} --json"));
    check(&output, folder.path());
    let value: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let points = value["points"].as_array().expect("points");
    assert_eq!(points.len(), 1_048_576 / 8, "every number of GPUs is listed");
    assert!(points.iter().any(|point| point["strategy"].is_object()), "some were searched");
    let interrupted = |point: &&Value| point["reason"].as_str().is_some_and(|why| why.starts_with("interrupted"));
    assert!(points.iter().filter(interrupted).count() > 0, "the others say why not");
}
