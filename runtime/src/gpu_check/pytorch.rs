//! The same operators in PyTorch, where this host has it.

use std::io::Write;
use std::process::{Command, Stdio};
use std::thread;

use serde::{Deserialize, Serialize};

use super::device::{Device, Driver};

/// The program that measures.
const SCRIPT: &str = include_str!("pytorch.py");
/// Seconds that it may take.
const SECONDS: u64 = 150;

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
    let mut python = Command::new("python3");
    let python = python.args(["-c", SCRIPT]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = python.spawn().map_err(|error| format!("skipped: python3 cannot be started: {error}"))?;
    let request = serde_json::json!({ "device": device, "operators": operators, "seconds": SECONDS });
    let mut input = child.stdin.take().expect("it was asked for");
    // A program that ends early reads none of it; what it says then is what counts.
    let writer = thread::spawn(move || input.write_all(request.to_string().as_bytes()).ok());
    let output = child.wait_with_output().map_err(|error| format!("skipped: python3: {error}"))?;
    writer.join().ok();
    let text = String::from_utf8_lossy(&output.stdout);
    let rows: Vec<Row> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    match rows.is_empty() {
        false => Ok(rows),
        true => {
            let said = String::from_utf8_lossy(&output.stderr);
            let last = said.lines().last().unwrap_or("it says nothing");
            Err(format!("skipped: PyTorch gives no times: {last}"))
        }
    }
}
