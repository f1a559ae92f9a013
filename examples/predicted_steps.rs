//! Predicted against measured step times on this machine's processor: profiles are measured on one layout each for
//! 1 and 2 ranks, and other micro-batches, recomputations and layouts are predicted with them and run.
//!
//! ```text
//! cargo build --release
//! cargo run --release -p runtime --example predicted_steps -- target/release [ROUNDS]
//! ```
//!
//! Runs are interleaved, so that a change of the machine's load meets all of them; the median of the rounds counts.
//! Prints a table; fails if a prediction is off by more than 10 %, or two layouts that differ by more than that in
//! prediction are measured in the other order.

#![allow(clippy::print_stdout, reason = "this is a program that prints")]

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use ir::plan::{Plan, read_plan};
use runtime::log::StepRecord;

/// GPT-2's architecture at a size whose steps take a fraction of a second.
const MODEL: &str = r#"(
  name: "bench", source: "no published model", num_layers: 4, hidden_size: 256,
  attention: MultiHead(num_attention_heads: 4), feed_forward: Gelu(intermediate_size: 1024), norm: LayerNorm,
  norm_epsilon: 1e-5, bias: All, position: Learned, vocabulary: (size: 4096), embedding_norm: false,
  tied_embedding: true, max_sequence_length: Tokens(256), sequence_length: Tokens(256), global_batch: Sequences(8),
  dtype: FP32,
)"#;
/// Rounds where none are given.
const ROUNDS: usize = 7;
/// Steps of a run; the first does not count.
const STEPS: &str = "4";
/// Steps of a run that measures a profile.
const PROFILE_STEPS: &str = "12";
/// Predictions closer than this are a tie, and no prediction may be off by more.
const TOLERANCE: f64 = 0.1;

/// By ranks: the layout that the profile is measured on, and those that are predicted.
const LAYOUTS: [(u64, &str, &[&str]); 2] = [
    (
        1,
        "--micro-batch 2 --recompute none",
        &[
            "--micro-batch 1 --recompute none",
            "--micro-batch 1 --recompute full",
            "--micro-batch 2 --recompute full",
            "--micro-batch 4 --recompute none",
            "--micro-batch 4 --recompute full",
            "--micro-batch 8 --recompute none",
            "--micro-batch 8 --recompute full",
        ],
    ),
    (
        2,
        "--data-parallel 2 --zero-stage 0 --micro-batch 2 --recompute none",
        &[
            "--data-parallel 2 --zero-stage 0 --micro-batch 1 --recompute none",
            "--data-parallel 2 --zero-stage 1 --micro-batch 4 --recompute full",
            "--data-parallel 2 --zero-stage 2 --micro-batch 2 --recompute none",
            "--tensor-parallel 2 --sequence-parallel off --micro-batch 1 --recompute none",
            "--tensor-parallel 2 --sequence-parallel off --micro-batch 4 --recompute full",
            "--tensor-parallel 2 --sequence-parallel on --micro-batch 2 --recompute none",
            "--pipeline-parallel 2 --micro-batch 1 --recompute none",
            "--pipeline-parallel 2 --micro-batch 1 --recompute full",
            "--pipeline-parallel 2 --micro-batch 2 --recompute none --schedule gpipe",
        ],
    ),
];

/// A layout with its plan and what its runs took.
struct Case {
    ranks: u64,
    flags: &'static str,
    path: PathBuf,
    plan: Plan,
    seconds: Vec<f64>,
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let programs = PathBuf::from(arguments.next().ok_or("name the folder with plan and execute-plan")?);
    let rounds = arguments.next().map_or(Ok(ROUNDS), |text| text.parse())?;
    let folder = tempfile::tempdir()?;
    println!("load before: {}", load());
    let mut cases = Vec::new();
    for (ranks, measured, predicted) in LAYOUTS {
        let profile = measure(&programs, folder.path(), ranks, measured)?;
        for flags in predicted {
            let path = folder.path().join(format!("case{}.plan.ron", cases.len()));
            let plan = plan(&programs, ranks, flags, &profile, &path)?;
            cases.push(Case { ranks, flags, path, plan, seconds: Vec::new() });
        }
    }
    for _ in 0..rounds {
        for case in &mut cases {
            case.seconds.push(step_seconds(&programs, &case.path)?);
        }
    }
    println!("load after: {}", load());
    Ok(if report(&cases) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Measures a profile on one layout, planned with what is assumed about hosts.
fn measure(programs: &Path, folder: &Path, ranks: u64, flags: &str) -> Result<PathBuf, Box<dyn Error>> {
    let mut host = hardware_profiles::find_cluster("cpu-host", "built-in").map_err(|error| error.to_string())?;
    host.node_gpus = ranks;
    let assumed = folder.join("host.ron");
    fs::write(&assumed, ir::text::write_ron(&host, 3))?;
    let path = folder.join("measured.plan.ron");
    plan(programs, ranks, flags, &assumed, &path)?;
    let profile = folder.join(format!("ranks{ranks}.ron"));
    let mut command = Command::new(programs.join("execute-plan"));
    command.arg(&path).args(["--synthetic", "--steps", PROFILE_STEPS, "--profile"]).arg(&profile);
    print!("{}", run(&mut command)?);
    Ok(profile)
}

/// Plans a layout.
fn plan(programs: &Path, ranks: u64, flags: &str, cluster: &Path, out: &Path) -> Result<Plan, Box<dyn Error>> {
    let model = out.with_extension("model");
    fs::write(&model, MODEL)?;
    let number = ranks.to_string();
    let mut command = Command::new(programs.join("plan"));
    command.arg("--model").arg(&model).args(["--gpus", &number, "--node-gpus", &number, "--force"]);
    command.arg("--cluster").arg(cluster).arg("--out").arg(out).args(flags.split_whitespace());
    run(&mut command)?;
    Ok(read_plan(&fs::read_to_string(out)?, flags)?)
}

/// The median step of a run without its first.
fn step_seconds(programs: &Path, plan: &Path) -> Result<f64, Box<dyn Error>> {
    let log = plan.with_extension("log");
    fs::remove_file(&log).ok();
    let mut command = Command::new(programs.join("execute-plan"));
    run(command.arg(plan).args(["--synthetic", "--steps", STEPS, "--log"]).arg(&log))?;
    let mut seconds = Vec::new();
    for line in fs::read_to_string(&log)?.lines().skip(1) {
        seconds.push(serde_json::from_str::<StepRecord>(line)?.seconds);
    }
    Ok(median(&seconds))
}

fn run(command: &mut Command) -> Result<String, Box<dyn Error>> {
    let output = command.output()?;
    match output.status.success() {
        true => Ok(String::from_utf8(output.stdout)?),
        false => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr)).into()),
    }
}

/// Prints the table; whether all predictions and their order hold.
fn report(cases: &[Case]) -> bool {
    let mut good = true;
    println!("ranks  predicted   measured     off  (fastest and slowest round)  layout");
    for case in cases {
        let (predicted, measured) = (case.plan.estimate.step.0, median(&case.seconds));
        let off = predicted / measured - 1.0;
        good &= off.abs() <= TOLERANCE;
        let fastest = case.seconds.iter().copied().fold(f64::INFINITY, f64::min);
        let slowest = case.seconds.iter().copied().fold(0.0, f64::max);
        let times = [predicted, measured].map(|seconds| format!("{:>7.1} ms", seconds * 1e3)).join(" ");
        let range = format!("({:.1} to {:.1})", fastest * 1e3, slowest * 1e3);
        println!("{:>5} {times}  {:+5.1} %  {range:<28} {}", case.ranks, off * 100.0, case.flags);
    }
    let (ordered, pairs) = order(cases);
    println!("order: {ordered} of {pairs} pairs of layouts of equally many ranks that are no ties");
    good && ordered == pairs
}

/// Pairs of layouts whose predictions differ by more than the tolerance: those measured in that order, and all.
fn order(cases: &[Case]) -> (usize, usize) {
    let (mut ordered, mut pairs) = (0, 0);
    for (place, first) in cases.iter().enumerate() {
        for second in cases[..place].iter().filter(|second| second.ranks == first.ranks) {
            let predicted = first.plan.estimate.step.0 / second.plan.estimate.step.0;
            let measured = median(&first.seconds) / median(&second.seconds);
            if predicted.max(1.0 / predicted) > 1.0 + TOLERANCE {
                pairs += 1;
                ordered += usize::from((predicted > 1.0) == (measured > 1.0));
            }
        }
    }
    (ordered, pairs)
}

fn median(numbers: &[f64]) -> f64 {
    let mut numbers = numbers.to_vec();
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Processes that wait for a processor, averaged over 1, 5 and 15 minutes.
fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().take(3).collect::<Vec<_>>().join(" ")
}
