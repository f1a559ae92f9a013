//! Answers beside the plan, through the real program: sweeps over numbers of GPUs, objectives, and whole trainings.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

const GPT2: &str = include_str!("../examples/gpt2-124m.ron");
const BLOOM: &str = include_str!("../examples/bloom.ron");
/// A cluster file of its own: half of the fields are what the rows need.
const CLUSTER: &str = include_str!("../hardware-profiles/clusters/dgx-h100.ron");

const OBJECTIVES: [&str; 4] = ["step", "tokens-per-gpu-hour", "cost", "energy"];

fn folder() -> TempDir {
    let folder = TempDir::new().expect("a scratch folder");
    for (name, text) in [("gpt2.ron", GPT2), ("bloom.ron", BLOOM), ("cluster.ron", CLUSTER)] {
        fs::write(folder.path().join(name), text).expect("writable");
    }
    folder
}

fn run(folder: &Path, arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plan"));
    command.current_dir(folder).args(arguments.split_whitespace()).output().expect("the program starts")
}

/// The JSON of a run that ends with `code`.
fn json(folder: &Path, arguments: &str, code: i32) -> Value {
    let output = run(folder, &format!("{arguments} --json"));
    let stdout = String::from_utf8(output.stdout).expect("UTF-8");
    assert_eq!(output.status.code(), Some(code), "{arguments}: {stdout}");
    serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{arguments}: {error}: {stdout}"))
}

fn points(value: &Value) -> &[Value] {
    value["points"].as_array().expect("points").as_slice()
}

fn number(value: &Value, path: &str) -> f64 {
    value.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path} of {value}"))
}

fn near(what: &str, found: f64, expected: f64) {
    assert!((found / expected - 1.0).abs() < 1e-9, "{what}: {found}, expected {expected}");
}

#[test]
fn a_sweep_takes_every_multiple_of_the_node_in_the_range() {
    let folder = folder();
    let rows: [(&str, &[u64]); 5] = [
        ("--gpus 8..32 --node-gpus 8", &[8, 16, 24, 32]),
        ("--gpus 8..8 --node-gpus 8", &[8]),
        ("--gpus 9..33 --node-gpus 8", &[16, 24, 32]),
        ("--gpus 1..7 --node-gpus 3", &[3, 6]),
        ("--gpus 2..4 --node-gpus 1", &[2, 3, 4]),
    ];
    for (options, expected) in rows {
        let value = json(folder.path(), &format!("--model gpt2.ron {options}"), 0);
        let found: Vec<u64> = points(&value).iter().filter_map(|point| point["gpus"].as_u64()).collect();
        assert_eq!(found, expected, "{options}");
    }
    assert_eq!(fs::read_dir(folder.path()).expect("readable").count(), 3, "a sweep wrote a file");
}

#[test]
fn a_point_is_what_a_search_of_its_own_finds() {
    let folder = folder();
    for options in ["", "--recompute full --micro-batch 4", "--cluster cluster.ron --tokens 10B"] {
        let sweep = json(folder.path(), &format!("--model gpt2.ron --node-gpus 8 --gpus 8..32 {options}"), 0);
        for point in points(&sweep) {
            let one = format!("--model gpt2.ron --node-gpus 8 --gpus {} --dry-run {options}", point["gpus"]);
            let alone = json(folder.path(), &one, 0);
            for field in ["strategy", "estimate"] {
                assert_eq!(point[field], alone[field], "{one}: {field}");
            }
            assert_eq!(point.get("training").unwrap_or(&Value::Null), &alone["training"], "{one}");
        }
    }
}

#[test]
fn points_without_a_plan_say_why() {
    let folder = folder();
    let rows = [
        ("--model bloom.ron --gpus 16..64 --node-gpus 16", &[true, true, false, false][..], "fits into the 74.6 GiB"),
        (
            "--model bloom.ron --gpus 64..80 --node-gpus 8 --data-parallel 8 --tensor-parallel 8",
            &[false, true, true],
            "80",
        ),
        (
            "--model gpt2.ron --gpus 8..24 --node-gpus 8 --tensor-parallel 1 --pipeline-parallel 1",
            &[false, false, true],
            "batch not divisible 480",
        ),
    ];
    for (arguments, missing, piece) in rows {
        let value = json(folder.path(), arguments, 0);
        for (point, missing) in points(&value).iter().zip(missing) {
            assert_eq!(point["strategy"].is_null(), *missing, "{arguments}: {point}");
            assert_eq!(point["estimate"].is_null(), *missing, "{arguments}: {point}");
            assert_eq!(point.get("reason").is_some(), *missing, "{arguments}: {point}");
        }
        let reasons: Vec<&str> = points(&value).iter().filter_map(|point| point["reason"].as_str()).collect();
        assert!(reasons.iter().any(|reason| reason.contains(piece)), "{arguments}: `{piece}` in {reasons:?}");
    }
}

#[test]
fn a_sweep_without_any_plan_ends_with_one_and_still_lists_its_points() {
    let folder = folder();
    let arguments = "--model bloom.ron --gpus 8..16 --node-gpus 8";
    let value = json(folder.path(), arguments, 1);
    assert_eq!(points(&value).len(), 2);
    assert!(value["error"]["what"].as_str().is_some_and(|what| what.contains("no number of GPUs")), "{value}");
    let output = run(folder.path(), arguments);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{stderr}");
    assert!(stderr.contains("no number of GPUs") && stderr.contains("--> --gpus 8..16"), "{stderr}");
}

/// Time, GPU-hours and memory left of a point, from its JSON alone.
fn sides(point: &Value) -> [f64; 3] {
    let gpus = number(point, "/gpus");
    let time = match point.pointer("/training/days") {
        Some(days) => days.as_f64().expect("days") * 86_400.0,
        None => number(point, "/estimate/step_seconds"),
    };
    [time, time * gpus / 3600.0, number(point, "/memory_margin_gib")]
}

#[test]
fn the_front_holds_the_points_that_no_other_dominates() {
    let folder = folder();
    for options in ["", "--tokens 366B"] {
        let value = json(folder.path(), &format!("--model bloom.ron --gpus 64..160 --node-gpus 8 {options}"), 0);
        let mut seen = [0, 0];
        for point in points(&value) {
            let [time, hours, left] = sides(point);
            let dominated = points(&value).iter().any(|other| {
                let [other_time, other_hours, other_left] = sides(other);
                let no_worse = other_time <= time && other_hours <= hours && other_left >= left;
                no_worse && (other_time < time || other_hours < hours || other_left > left)
            });
            assert_eq!(point["pareto"].as_bool(), Some(!dominated), "{point}");
            seen[usize::from(dominated)] += 1;
        }
        assert!(seen.iter().all(|count| *count > 0), "both kinds are there: {seen:?}");
    }
}

#[test]
fn each_objective_recommends_its_own_best_point() {
    let folder = folder();
    let mut chosen = Vec::new();
    for objective in OBJECTIVES {
        let options = format!("--model bloom.ron --gpus 64..160 --node-gpus 8 --tokens 100B --objective {objective}");
        let value = json(folder.path(), &options, 0);
        let worth = |point: &Value| match objective {
            "step" => number(point, "/training/days"),
            "tokens-per-gpu-hour" => number(point, "/training/gpu_hours"),
            "cost" => number(point, "/training/cost_usd"),
            _ => number(point, "/training/energy_mwh"),
        };
        let least = points(&value).iter().min_by(|a, b| worth(a).total_cmp(&worth(b))).expect("points");
        let named: Vec<&Value> = points(&value).iter().filter(|point| point["recommended"] == true).collect();
        assert_eq!(named, [least], "{objective}");
        chosen.push(least["gpus"].as_u64());
    }
    assert_eq!(chosen[0], Some(160), "the most GPUs are the fastest");
    assert!(chosen[2] < chosen[0], "fewer GPUs cost less: {chosen:?}");
}

#[test]
fn an_objective_changes_no_plan_for_one_number_of_gpus() {
    let folder = folder();
    let pick = |objective: &str| {
        let options = format!("--model gpt2.ron --gpus 16 --node-gpus 8 --dry-run --objective {objective}");
        let value = json(folder.path(), &options, 0);
        assert_eq!(value["objective"], objective);
        value["strategy"].clone()
    };
    assert!(OBJECTIVES.iter().all(|objective| pick(objective) == pick("step")));
}

#[test]
fn a_training_adds_up() {
    let folder = folder();
    let options = "--model bloom.ron --gpus 384 --node-gpus 8 --dry-run --tokens 366B";
    let value = json(folder.path(), options, 0);
    let training = &value["training"];
    let step = number(&value, "/estimate/step_seconds");
    assert_eq!(training["tokens"].as_u64(), Some(366_000_000_000));
    assert_eq!(training["steps"].as_u64(), Some(87_262), "366e9 over 2048 x 2048, rounded up");
    let of = |field: &str| number(training, &format!("/{field}"));
    near("undisturbed", of("days_without_failures"), 87_262.0 * step / 86_400.0);
    near("with failures", of("days"), of("days_without_failures") / of("goodput"));
    near("GPU-hours", of("gpu_hours"), of("days") * 24.0 * 384.0);
    near(
        "cost",
        of("cost_usd") / of("gpu_hours"),
        number(&value, "/estimate/cost_usd_per_step") / number(&value, "/estimate/gpu_hours_per_step"),
    );
    near("energy", of("energy_mwh"), of("gpu_hours") * 400.0 / 1e6);
    near("failures", of("failures"), of("days") * 24.0 / of("mean_time_between_failures_hours"));
    near("checkpoint", of("checkpoint_gib"), number(&value, "/estimate/checkpoint_gib"));
    near("interval", of("checkpoint_interval_seconds"), of("checkpoint_interval_steps") * step);
    let young = (2.0 * of("checkpoint_seconds") * of("mean_time_between_failures_hours") * 3600.0).sqrt();
    assert!((of("checkpoint_interval_seconds") / young - 1.0).abs() < 0.05, "{training}, Young's interval {young}");
    assert!((0.9..1.0).contains(&of("goodput")), "{training}");
}

#[test]
fn what_a_profile_does_not_tell_is_null() {
    let folder = folder();
    let search = "--model gpt2.ron --gpus 8 --node-gpus 8 --dry-run --tokens 1B --cluster cpu-host";
    let value = json(folder.path(), search, 0);
    for path in
        ["/estimate/cost_usd_per_step", "/estimate/energy_joules_per_step", "/training/cost_usd", "/training/goodput"]
    {
        assert_eq!(value.pointer(path), Some(&Value::Null), "{path}");
    }
    near("days", number(&value, "/training/days"), number(&value, "/training/days_without_failures"));
    let without = json(folder.path(), "--model gpt2.ron --gpus 8 --node-gpus 8 --dry-run", 0);
    assert_eq!(without["training"], Value::Null);
}

#[test]
fn text_names_what_json_holds() {
    let folder = folder();
    let rows: [(&str, &[&str]); 3] = [
        (
            "--model bloom.ron --gpus 384 --node-gpus 8 --dry-run --tokens 366B",
            &[
                "366000000000 tokens in 87262 steps: ",
                " GPU-hours, ",
                " USD",
                " MWh",
                "of the time is progress [assumed]",
            ],
        ),
        ("--model gpt2.ron --gpus 8 --node-gpus 8 --dry-run --tokens 1B --cluster cpu-host", &["no field reliability"]),
        (
            "--model bloom.ron --gpus 16..64 --node-gpus 16 --objective energy",
            &["16 to 64 GPUs of dgx-a100-80gb", "16 GPUs: none of ", "objective energy: ", "front"],
        ),
    ];
    for (arguments, pieces) in rows {
        let output = run(folder.path(), arguments);
        let text = String::from_utf8(output.stdout).expect("UTF-8").replace("\n  ", " ");
        assert!(output.status.success(), "{arguments}");
        for piece in pieces {
            assert!(text.contains(piece), "{arguments}: `{piece}` is not in\n{text}");
        }
    }
}
