//! The same operators in PyTorch, where this host has it.

use std::io::Write;
use std::process::{Command, Stdio};
use std::thread;

use ir::model::Attention;
use ir::plan::Plan;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::device::{Device, Driver};

/// The program that measures operators.
const SCRIPT: &str = include_str!("pytorch.py");
/// Seconds that it may take.
const SECONDS: u64 = 120;
/// The program that measures steps of GPT-2.
const STEPS: &str = include_str!("pytorch_gpt2.py");
/// Seconds after which it starts nothing more.
const SECONDS_OF_STEPS: u64 = 60;

/// An operator of PyTorch and its times.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The kernel that it stands beside.
    pub kernel: String,
    /// Its sizes.
    pub sizes: Vec<usize>,
    /// Number format.
    pub format: String,
    /// `eager` or `compiled`.
    pub mode: String,
    /// Seconds of the forward pass.
    #[serde(default)]
    pub forward: Option<f64>,
    /// Seconds of the backward pass.
    #[serde(default)]
    pub backward: Option<f64>,
    /// Why there are no times.
    #[serde(default)]
    pub failed: Option<String>,
}

/// An operator to measure: kernel, sizes, number format.
pub type Operator = (&'static str, Vec<usize>, &'static str);

/// Times in PyTorch, or why there are none.
///
/// # Errors
/// If PyTorch is not installed, finds no GPU, or there is no GPU to compare.
pub fn measure_pytorch(device: &Device, operators: &[Operator]) -> Result<Vec<Row>, String> {
    match device.driver {
        Driver::Cuda => run("cuda", operators),
        Driver::Wgpu => Err("skipped: PyTorch is compared on NVIDIA GPUs only".to_owned()),
    }
}

/// Runs the program on a device of PyTorch.
///
/// # Errors
/// What it says if it gives no times at all.
pub fn run(device: &str, operators: &[Operator]) -> Result<Vec<Row>, String> {
    ask(SCRIPT, &json!({ "device": device, "operators": operators, "seconds": SECONDS }))
}

/// A training step of GPT-2 in PyTorch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRow {
    /// The model.
    #[serde(default)]
    pub model: String,
    /// `eager` or `compiled`.
    pub mode: String,
    /// Seconds of a step.
    #[serde(default)]
    pub seconds: Option<f64>,
    /// Why there is no time.
    #[serde(default)]
    pub failed: Option<String>,
}

/// Steps of a GPT-2 of the plan's size on a device of PyTorch, as many micro-batches and tokens as the plan's.
///
/// # Errors
/// What the program says if it gives no times at all.
pub fn run_steps(device: &str, plan: &Plan) -> Result<Vec<StepRow>, String> {
    let model = &plan.model;
    let Attention::MultiHead { num_attention_heads, .. } = model.attention else {
        return Err("skipped: the program has multi-head attention only".to_owned());
    };
    let request = json!({
        "device": device, "seconds": SECONDS_OF_STEPS, "layers": model.num_layers, "heads": num_attention_heads,
        "width": model.hidden_size, "vocabulary": model.vocabulary.rows(), "length": plan.workload.sequence_length,
        "micro_batch": plan.strategy.micro_batch, "micro_batches": plan.strategy.num_micro_batches(),
    });
    let rows: Vec<StepRow> = ask(STEPS, &request)?;
    Ok(rows.into_iter().map(|row| StepRow { model: model.name.clone(), ..row }).collect())
}

/// What a program of PyTorch answers: a value of each line that is one.
fn ask<R: DeserializeOwned>(script: &str, request: &Value) -> Result<Vec<R>, String> {
    let mut python = Command::new("python3");
    let python = python.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = python.spawn().map_err(|error| format!("skipped: python3 cannot be started: {error}"))?;
    let request = request.to_string();
    let mut input = child.stdin.take().expect("it was asked for");
    // A program that ends early reads none of it; what it says then is what counts.
    let writer = thread::spawn(move || input.write_all(request.as_bytes()).ok());
    let output = child.wait_with_output().map_err(|error| format!("skipped: python3: {error}"))?;
    writer.join().ok();
    let text = String::from_utf8_lossy(&output.stdout);
    let rows: Vec<R> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    match rows.is_empty() {
        false => Ok(rows),
        true => {
            let said = String::from_utf8_lossy(&output.stderr);
            let last = said.lines().last().unwrap_or("it says nothing");
            Err(format!("skipped: PyTorch gives no times: {last}"))
        }
    }
}
