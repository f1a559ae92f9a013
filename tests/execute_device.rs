//! The real `execute-plan` with `--device wgpu`, on whatever Vulkan driver there is: what it logs, reads and writes is
//! what processor cores do, and what a device cannot do is said.

#[path = "support/programs.rs"]
mod programs;
mod support;

use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use ir::model::{DType, ModelSpec, read_model};
use programs::{close, command, degrees, plan, run, steps, succeed, timeless, write};
use runtime::launch::local::reserve_port;
use support::small::{Family, SEQUENCE, Shape, small_model};
use tempfile::TempDir;

/// Sequences of a step.
const BATCH: u64 = 4;
/// Relative difference of losses and norms from those on processor cores.
const TOLERANCE: f64 = 1e-5;

const GPT2: Shape = Shape { family: Family::Gpt2, tied: true, heads: 4, key_value_heads: 4, layers: 2, vocabulary: 19 };

fn scratch() -> TempDir {
    TempDir::new().expect("a scratch folder")
}

#[test]
fn logs_are_those_of_processor_cores() {
    let folder = scratch();
    let path = folder.path();
    fs::write(path.join("train"), "(evaluation: Some((interval: 2, steps: 1)))").expect("writable");
    for (name, layout) in [("one", degrees(1, 1, 1)), ("four", degrees(2, 2, 1))] {
        write(path, name, &plan(&small_model(GPT2), SEQUENCE as u64, BATCH, layout));
        let arguments = |device: &str| {
            format!("{name} --synthetic --train train --steps 3 --device {device} --log {name}-{device}")
        };
        succeed(path, &arguments("cpu"));
        let output = run(path, &arguments("wgpu"));
        let [said, report] = [output.stderr, output.stdout].map(|text| String::from_utf8(text).expect("UTF-8"));
        assert_eq!(output.status.code(), Some(0), "{name}: {said}");
        assert_eq!(said.matches("4 ranks of this host share 1 device").count(), usize::from(name == "four"), "{said}");
        for part in ["predicted against measured", "step ", "tensors, fullest rank"] {
            assert!(report.contains(part), "{name}: {part} in {report}");
        }
        let [found, expected] = ["wgpu", "cpu"].map(|device| timeless(path, &format!("{name}-{device}")));
        assert_eq!(found.len(), 3, "{name}");
        for (found, expected) in found.iter().zip(&expected) {
            assert!(found.keys().eq(expected.keys()), "{name}: {found:?}, on cores {expected:?}");
        }
        let [found, expected] = ["wgpu", "cpu"].map(|device| steps(path, &format!("{name}-{device}")));
        for (found, expected) in found.iter().zip(&expected) {
            let pairs = [(found.loss, expected.loss), (found.grad_norm, expected.grad_norm)];
            let evaluated = found.evaluation_loss.zip(expected.evaluation_loss);
            for (found, expected) in pairs.into_iter().chain(evaluated) {
                assert!(close(found, expected, TOLERANCE), "{name}: {found}, on cores {expected}");
            }
            assert_eq!((found.tokens, found.bytes_sent), (expected.tokens, expected.bytes_sent), "{name}");
            assert_eq!(found.learning_rate, expected.learning_rate, "{name}");
            assert!(found.peak_tensor_bytes > 0 && found.seconds > 0.0, "{name}");
        }
    }
}

fn evaluate(folder: &Path, arguments: &str) -> f64 {
    let output = run(folder, &format!("{arguments} --synthetic --evaluate --steps 1"));
    let report = String::from_utf8_lossy(&output.stdout).into_owned();
    let number = report.strip_prefix("loss ").and_then(|rest| rest.strip_suffix(" over 1 batches\n"));
    let said = String::from_utf8_lossy(&output.stderr);
    number.unwrap_or_else(|| panic!("{arguments}: {report}{said}")).parse().expect("a number")
}

#[test]
fn weights_go_in_and_out() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    let text = fs::read_to_string(fixtures.join("llama.ron")).expect("the fixture exists");
    let model = read_model(&text, "llama").expect("the fixture is sound");
    let folder = scratch();
    let path = folder.path();
    write(path, "plan", &plan(&model, 16, BATCH, degrees(1, 1, 1)));
    let fixture = fixtures.join("llama").display().to_string();
    let before = ["cpu", "wgpu"].map(|device| evaluate(path, &format!("plan --weights {fixture} --device {device}")));
    assert!(close(before[1], before[0], TOLERANCE), "{before:?}");
    succeed(path, &format!("plan --synthetic --weights {fixture} --steps 2 --device wgpu --export out"));
    let after = ["cpu", "wgpu"].map(|device| evaluate(path, &format!("plan --weights out --device {device}")));
    assert!(close(after[1], after[0], TOLERANCE), "{after:?}");
    assert!(!close(after[0], before[0], 1e-4), "two steps change the loss: {before:?}, {after:?}");
}

#[test]
fn what_a_device_cannot_do_is_said() {
    let folder = scratch();
    let path = folder.path();
    fs::write(path.join("wild"), "(optimizer: (learning_rate: 1e38, clip: None))").expect("writable");
    fs::write(path.join("dropping"), "(dropout: (attention: 0.1))").expect("writable");
    let model = small_model(GPT2);
    write(path, "plan", &plan(&model, SEQUENCE as u64, BATCH, degrees(1, 1, 1)));
    let half = ModelSpec { dtype: DType::BF16, ..model };
    write(path, "bf16", &plan(&half, SEQUENCE as u64, BATCH, degrees(1, 1, 1)));
    let device = runtime::device::Device::wgpu().unwrap_or_else(|problem| panic!("{problem}"));
    let rows: [(&str, i32, &[&str]); 4] = [
        ("plan --train wild --steps 9", 5, &["error: the ", "--> step "]),
        ("plan --train dropping", 2, &["attention weights cannot be dropped", "--> dropout.attention", "help: "]),
        ("plan --profile profile", 2, &["--> --profile", "execute-plan gpu-check"]),
        ("bf16", 2, &["does not compute in bf16", "--> model.dtype", "dtype fp32", "leave --device out"]),
    ];
    for (arguments, code, parts) in rows {
        if arguments == "bf16" && device.has(runtime::tensor::Format::Brain) {
            continue;
        }
        let output = run(path, &format!("{arguments} --synthetic --device wgpu"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments}: {said}");
        for part in parts {
            assert!(said.contains(part), "{arguments}: {part} in {said}");
        }
        assert!(!said.contains("panicked"), "{arguments}: {said}");
    }
}

/// A rank as a launcher starts it.
fn start(folder: &Path, port: u16, rank: u64) -> Child {
    let mut command = command(folder, "plan --synthetic --steps 1000000 --timeout 30 --device wgpu --log log");
    for (name, value) in [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_WORLD_SIZE", 2)] {
        command.env(name, value.to_string());
    }
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().expect("the program starts")
}

#[test]
fn a_killed_rank_ends_the_others() {
    let folder = scratch();
    write(folder.path(), "plan", &plan(&small_model(GPT2), SEQUENCE as u64, BATCH, degrees(1, 1, 2)));
    let reserved = reserve_port().expect("a port is free");
    let [first, mut second] = [0, 1].map(|rank| start(folder.path(), reserved.port, rank));
    let deadline = Instant::now() + Duration::from_secs(120);
    let has_begun = || fs::read_to_string(folder.path().join("log")).is_ok_and(|text| text.lines().count() > 1);
    while !has_begun() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(50));
    }
    second.kill().expect("it runs");
    second.wait().expect("it ends");
    let output = first.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("error: rank 1 was lost"), "{said}");
}
