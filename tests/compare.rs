//! `plan compare` through the real program: what differs is listed, differences of terms add up, and files that are no
//! sound plans end with their exit codes.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

const ON_A100: &str = "--gpus 64 --node-gpus 8";

fn plan(folder: &Path, arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plan"));
    command.current_dir(folder).args(arguments.split_whitespace()).output().expect("the program starts")
}

/// Writes the plan of an example model.
fn write(folder: &Path, name: &str, model: &str, options: &str) {
    let model = format!("{}/../examples/{model}.ron", env!("CARGO_MANIFEST_DIR"));
    let output = plan(folder, &format!("--model {model} {options} --out {name}"));
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
}

fn value(folder: &Path, arguments: &str) -> Value {
    let output = plan(folder, arguments);
    assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// Asserts that the differences of all terms add up to that of the total, and the total to the plans' own times.
fn check_sums(name: &str, compared: &Value) {
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{name}: {value} is no number"));
    let terms = compared["terms"].as_object().expect("terms by name");
    for side in ["a", "b", "difference"] {
        let sum: f64 = terms.values().map(|term| number(&term[side])).sum();
        let total = number(&compared["total"][side]);
        let scale = number(&compared["total"]["a"]).max(number(&compared["total"]["b"]));
        assert!((sum - total).abs() < 1e-9 * scale, "{name}: {side}: terms make {sum}, the total is {total}");
    }
    let step = number(&compared["a"]["estimate"]["step_seconds"]);
    let batch = number(&compared["a"]["global_batch"]) * number(&compared["a"]["sequence_length"]);
    let expected = if compared["unit"] == "seconds_per_step" { step } else { step / batch * 1e6 };
    assert!((number(&compared["total"]["a"]) / expected - 1.0).abs() < 1e-9, "{name}: {compared:#}");
}

struct Case {
    name: &'static str,
    a: (&'static str, &'static str),
    b: (&'static str, &'static str),
    unit: &'static str,
    /// Names that must be among the differences, and no others of their subjects.
    differs: &'static [&'static str],
    same: &'static [&'static str],
    remarks: &'static [&'static str],
}

#[test]
fn differences_are_named_and_add_up() {
    let llama = ("llama-2-7b", ON_A100);
    let cases = [
        Case {
            name: "the same plan",
            a: llama,
            b: llama,
            unit: "seconds_per_step",
            differs: &[],
            same: &["tensor_parallel", "gpus", "stack", "num_layers"],
            remarks: &[],
        },
        Case {
            name: "another layout",
            a: llama,
            b: ("llama-2-7b", "--gpus 64 --node-gpus 8 --tensor-parallel 8 --recompute full"),
            unit: "seconds_per_step",
            differs: &["tensor_parallel", "recompute", "recomputed_layers_per_stage"],
            same: &["gpus", "stack", "cluster", "num_layers", "sequence_length"],
            remarks: &[],
        },
        Case {
            name: "more GPUs of another cluster",
            a: llama,
            b: ("llama-2-7b", "--gpus 128 --node-gpus 8 --cluster dgx-h100"),
            unit: "seconds_per_step",
            differs: &["gpus", "cluster", "device"],
            same: &["stack", "num_layers", "cluster_hash"],
            remarks: &["the clusters differ"],
        },
        Case {
            name: "another batch",
            a: llama,
            b: ("llama-2-7b", "--gpus 64 --node-gpus 8 --global-batch 512"),
            unit: "seconds_per_million_tokens",
            differs: &["global_batch"],
            same: &["gpus", "stack", "num_layers"],
            remarks: &["different numbers of tokens"],
        },
        Case {
            name: "another model and stack",
            a: llama,
            b: ("llama-3.1-8b", "--gpus 64 --node-gpus 8 --stack megatron-core-2025 --sequence-length 4096"),
            unit: "seconds_per_step",
            differs: &["vocabulary.size", "stack", "name"],
            same: &["gpus", "cluster", "hidden_size", "stack_hash", "source"],
            remarks: &["the models differ", "the stacks differ"],
        },
    ];
    for case in cases {
        let folder = TempDir::new().expect("a scratch folder");
        write(folder.path(), "a", case.a.0, case.a.1);
        write(folder.path(), "b", case.b.0, case.b.1);
        check(folder.path(), &case);
    }
}

fn check(folder: &Path, case: &Case) {
    let name = case.name;
    let compared = value(folder, "compare a b --json");
    check_sums(name, &compared);
    let listed = |list: &str, key: &str| -> Vec<String> {
        let items = compared[list].as_array().expect("a list").iter();
        items.map(|item| if key.is_empty() { item } else { &item[key] }.as_str().expect("a text").to_owned()).collect()
    };
    let found = listed("differences", "name");
    for expected in case.differs {
        assert!(found.iter().any(|found| found == expected), "{name}: {expected} is not in {found:?}");
    }
    for expected in case.same {
        assert!(!found.iter().any(|found| found == expected), "{name}: {expected} is in {found:?}");
    }
    assert_eq!(found.is_empty(), case.differs.is_empty(), "{name}: {found:?}");
    assert_eq!(compared["unit"], case.unit, "{name}");
    let remarks = listed("remarks", "").join("; ");
    for remark in case.remarks {
        assert!(remarks.contains(remark), "{name}: `{remark}` is not in {remarks}");
    }
    if case.remarks.is_empty() {
        assert_eq!(remarks, "", "{name}");
    }
    // The other way round everything is reversed.
    let reversed = value(folder, "compare b a --json");
    let [there, back] = [&compared, &reversed].map(|value| value["total"]["difference"].as_f64().expect("a number"));
    assert!((there + back).abs() <= 1e-9 * there.abs(), "{name}: {there} and {back}");
    let text = String::from_utf8(plan(folder, "compare a b").stdout).expect("UTF-8");
    let bound = text.matches("is bound by").count();
    assert_eq!(bound, 2, "{name}: the limit of either plan is named\n{text}");
    let verdict = if there == 0.0 { "both take" } else { ["B is slower", "B is faster"][usize::from(there < 0.0)] };
    assert!(text.contains(verdict), "{name}: `{verdict}` is not in\n{text}");
}

#[test]
fn files_that_are_no_plans_end_with_their_codes() {
    let folder = TempDir::new().expect("a scratch folder");
    write(folder.path(), "sound", "tiny", "--gpus 8 --node-gpus 8 --cluster cpu-host");
    let text = fs::read_to_string(folder.path().join("sound")).expect("readable");
    let (head, tail) = text.split_once("step: ").expect("the plan has a step");
    let changed = format!("{head}step: Seconds(1000), was: {tail}");
    let unsound = text.replacen("micro_batch: ", "micro_batch: 3", 1);
    fs::write(folder.path().join("malformed"), changed).expect("writable");
    fs::write(folder.path().join("unsound"), unsound).expect("writable");
    let rows = [
        ("missing sound", 2, "cannot read the file"),
        ("sound missing", 2, "cannot read the file"),
        ("sound malformed", 2, "this is no plan file"),
        ("unsound sound", 3, "unsound"),
        ("sound unsound", 3, "unsound"),
        ("sound", 2, "required"),
    ];
    for (files, code, piece) in rows {
        let output = plan(folder.path(), &format!("compare {files}"));
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{files}: {stderr}");
        assert!(stderr.contains(piece), "{files}: `{piece}` is not in {stderr}");
        let output = plan(folder.path(), &format!("compare {files} --json"));
        assert_eq!(output.status.code(), Some(code), "{files} --json");
        let value: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        assert!(value["error"]["help"].is_string(), "{files}: {value}");
    }
}
