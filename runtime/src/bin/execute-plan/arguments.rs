//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Runs a plan.
#[derive(Debug, Parser)]
#[command(name = "execute-plan", version, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Arguments {
    /// The subcommand; none runs a plan.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Options of a run.
    #[command(flatten)]
    pub run: RunOptions,
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Tokenise text into the .bin and .idx files that --data reads
    Prepare(PrepareOptions),
    /// Check and measure the kernels on this host's GPU
    GpuCheck(GpuCheckOptions),
}

/// Options of a run.
#[derive(Debug, Args)]
pub struct RunOptions {
    /// Plan file
    #[arg(required = true)]
    pub plan: Option<PathBuf>,
    /// Training file: optimizer, learning rates, evaluation
    #[arg(long, value_name = "FILE")]
    pub train: Option<PathBuf>,
    /// Train on PREFIX.bin and PREFIX.idx
    #[arg(long, value_name = "PREFIX", conflicts_with = "synthetic")]
    pub data: Option<PathBuf>,
    /// Train on random tokens
    #[arg(long)]
    pub synthetic: bool,
    /// Steps, or batches of an evaluation
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    pub steps: u64,
    /// Seed, in place of the training file's
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,
    /// Start from a Hugging Face checkpoint
    #[arg(long, value_name = "DIR")]
    pub weights: Option<PathBuf>,
    /// Write the last weights as a Hugging Face checkpoint
    #[arg(long, value_name = "DIR")]
    pub export: Option<PathBuf>,
    /// Where operators run
    #[arg(long, default_value = "cpu")]
    pub device: Device,
    /// How ranks communicate
    #[arg(long, default_value = "local")]
    pub communicator: Communicator,
    /// Seconds that ranks wait for one another
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout: u64,
    /// Write a line of JSON for each step
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
    /// Replace the --log file of an earlier run
    #[arg(long, requires = "log")]
    pub force: bool,
    /// Write what the run says of this machine as a cluster file for `plan --cluster`
    #[arg(long, value_name = "FILE", conflicts_with = "evaluate")]
    pub profile: Option<PathBuf>,
    /// Only evaluate, on --steps batches
    #[arg(long)]
    pub evaluate: bool,
}

/// Where operators run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// Processor cores
    Cpu,
    /// An NVIDIA GPU for each rank, in a program built with the feature `cuda`; ranks share GPUs where there are fewer
    Cuda,
    /// A Vulkan driver, in a program built with the feature `wgpu`: to try programs for GPUs without one
    Wgpu,
}

/// How ranks communicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Communicator {
    /// Shared memory on a host, TCP between hosts
    Local,
    /// The host's MPI, in a program built with the feature `mpi`
    Mpi,
    /// NCCL
    Nccl,
}

/// Options of `execute-plan prepare`.
#[derive(Debug, Args)]
pub struct PrepareOptions {
    /// Text: a .jsonl file with a document in the field `text` of each line; any other file is one document
    #[arg(required = true)]
    pub text: Vec<PathBuf>,
    /// Tokenizer file (tokenizer.json)
    #[arg(long, value_name = "FILE")]
    pub tokenizer: PathBuf,
    /// What the files are called, without .bin and .idx
    #[arg(long, value_name = "PREFIX")]
    pub out: PathBuf,
    /// Replace files that exist
    #[arg(long)]
    pub force: bool,
}

/// Options of `execute-plan gpu-check`.
#[derive(Debug, Args)]
#[cfg_attr(
    not(feature = "kernels"),
    allow(dead_code, reason = "a program without kernels refuses whatever was chosen")
)]
pub struct GpuCheckOptions {
    /// Measure more sizes
    #[arg(long)]
    pub full: bool,
    /// Write report.md, report.json and profile.ron, a cluster file for `plan --cluster`, into DIR
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Print the report as JSON
    #[arg(long)]
    pub json: bool,
    /// What runs the kernels
    #[arg(long, default_value = "cuda")]
    pub driver: Driver,
}

/// What runs kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Driver {
    /// NVIDIA's driver
    Cuda,
    /// Any Vulkan driver, to check the kernels' numbers where there is no NVIDIA GPU
    Wgpu,
}
