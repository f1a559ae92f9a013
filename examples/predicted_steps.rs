//! Predicted against measured step times on this machine's processor: profiles are measured on one layout each for
//! 1 and 2 ranks, and other micro-batches, recomputations and layouts are predicted with them and run.
//!
//! ```text
//! cargo build --release
//! cargo run --release -p runtime --example predicted_steps -- target/release [ROUNDS]
//! ```
//!
//! Each round measures the profiles anew, predicts all layouts with them and runs each once, so that a change of the
//! machine's speed meets profiles and runs alike; medians over the rounds are compared. A run beside which other
//! processes were busy is repeated. Prints a table; fails if a prediction is off by more than 10 %, or two layouts that
//! differ by more than that in prediction are measured in the other order.

#![allow(clippy::print_stdout, reason = "this is a program that prints")]

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

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
/// Steps of a run, also of one that measures a profile: steps become a little faster one after another.
const STEPS: &str = "12";
/// First steps of a run that do not count, in a profile neither: memory not touched before makes them slow.
const WARM_UP_STEPS: usize = 1;
/// Predictions closer than this are a tie, and no prediction may be off by more.
const TOLERANCE: f64 = 0.1;
/// Share of the processors' time that other processes may take during a run.
const FOREIGN: f64 = 0.05;
/// Times that a run beside busy processes is repeated at most.
const REPETITIONS: usize = 5;
/// Clock ticks of `/proc` in a second (Linux, proc(5): USER_HZ).
const TICKS: f64 = 100.0;

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
            "--data-parallel 2 --zero-stage 3 --micro-batch 1 --recompute full",
            "--data-parallel 2 --zero-stage 3 --micro-batch 4 --recompute none",
            "--tensor-parallel 2 --sequence-parallel off --micro-batch 1 --recompute none",
            "--tensor-parallel 2 --sequence-parallel off --micro-batch 4 --recompute full",
            "--tensor-parallel 2 --sequence-parallel on --micro-batch 2 --recompute none",
            "--tensor-parallel 2 --sequence-parallel on --micro-batch 8 --recompute full",
            "--pipeline-parallel 2 --micro-batch 1 --recompute none",
            "--pipeline-parallel 2 --micro-batch 1 --recompute full",
            "--pipeline-parallel 2 --micro-batch 2 --recompute none --schedule gpipe",
        ],
    ),
];

/// A layout with what was predicted for it and what its runs took, by round.
struct Case {
    ranks: u64,
    flags: &'static str,
    predicted: Vec<f64>,
    measured: Vec<f64>,
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let programs = PathBuf::from(arguments.next().ok_or("name the folder with plan and execute-plan")?);
    let rounds = arguments.next().map_or(Ok(ROUNDS), |text| text.parse())?;
    let folder = tempfile::tempdir()?;
    println!("load before: {}", load());
    let case = |ranks, flags| Case { ranks, flags, predicted: Vec::new(), measured: Vec::new() };
    let mut cases: Vec<Case> = Vec::new();
    for (ranks, _, predicted) in LAYOUTS {
        cases.extend(predicted.iter().map(|flags| case(ranks, flags)));
    }
    for _ in 0..rounds {
        for (ranks, measured, _) in LAYOUTS {
            let profile = measure(&programs, folder.path(), ranks, measured)?;
            for case in cases.iter_mut().filter(|case| case.ranks == ranks) {
                let path = folder.path().join("case.plan.ron");
                case.predicted.push(plan(&programs, ranks, case.flags, &profile, &path)?.estimate.step.0);
                case.measured.push(step_seconds(&programs, &path)?);
            }
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
    command.arg(&path).args(["--synthetic", "--steps", STEPS, "--profile"]).arg(&profile);
    run_undisturbed(&mut command)?;
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

/// The median step of a run without its first ones.
fn step_seconds(programs: &Path, plan: &Path) -> Result<f64, Box<dyn Error>> {
    let log = plan.with_extension("log");
    let mut command = Command::new(programs.join("execute-plan"));
    run_undisturbed(command.arg(plan).args(["--synthetic", "--force", "--steps", STEPS, "--log"]).arg(&log))?;
    let mut seconds = Vec::new();
    for line in fs::read_to_string(&log)?.lines().skip(WARM_UP_STEPS) {
        seconds.push(serde_json::from_str::<StepRecord>(line)?.seconds);
    }
    Ok(median(&seconds))
}

fn run(command: &mut Command) -> Result<(), Box<dyn Error>> {
    let output = command.output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr)).into()),
    }
}

/// Runs a command until other processes leave it the processors.
fn run_undisturbed(command: &mut Command) -> Result<(), Box<dyn Error>> {
    for _ in 0..REPETITIONS {
        let (before, start) = (foreign_seconds()?, Instant::now());
        run(command)?;
        let whole = start.elapsed().as_secs_f64() * std::thread::available_parallelism()?.get() as f64;
        if foreign_seconds()? - before < FOREIGN * whole {
            return Ok(());
        }
    }
    println!("other processes were busy beside each of {REPETITIONS} runs: the last one counts");
    Ok(())
}

/// Time that processors have spent on other processes than this one and its children that have ended.
fn foreign_seconds() -> Result<f64, Box<dyn Error>> {
    let ticks = |text: &str, from: usize, count: usize| -> f64 {
        text.split_whitespace().skip(from).take(count).filter_map(|number| number.parse::<f64>().ok()).sum()
    };
    // User and nice time, then system time; interrupts belong to nobody.
    let all = ticks(fs::read_to_string("/proc/stat")?.lines().next().unwrap_or_default(), 1, 3);
    // After the name in brackets: user and system time of the process, then of its children.
    let own = fs::read_to_string("/proc/self/stat")?;
    let own = ticks(own.rsplit(')').next().unwrap_or_default(), 11, 4);
    Ok((all - own) / TICKS)
}

/// Prints the table; whether all predictions and their order hold.
fn report(cases: &[Case]) -> bool {
    let mut good = true;
    println!("ranks  predicted   measured     off  (fastest and slowest round)  layout");
    for case in cases {
        let (predicted, measured) = (median(&case.predicted), median(&case.measured));
        let off = predicted / measured - 1.0;
        good &= off.abs() <= TOLERANCE;
        let fastest = case.measured.iter().copied().fold(f64::INFINITY, f64::min);
        let slowest = case.measured.iter().copied().fold(0.0, f64::max);
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
            let predicted = median(&first.predicted) / median(&second.predicted);
            let measured = median(&first.measured) / median(&second.measured);
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
