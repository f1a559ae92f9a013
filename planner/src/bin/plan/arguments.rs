//! The command line.

use std::ffi::OsString;
use std::num::ParseIntError;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use ir::mesh::MeshOrder;
use ir::strategy::{Recompute, ScheduleKind, ZeroStage};
use planner::objective::Objective;
use planner::request::FixedChoices;
use planner::training::read_tokens;

/// Finds the fastest way to split the training of a transformer over a cluster, and writes it as a plan.
#[derive(Debug, Parser)]
#[command(name = "plan", version, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Arguments {
    /// The subcommand; none searches.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Options of the search.
    #[command(flatten)]
    pub search: SearchOptions,
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show a plan: the whole, one stage, or one rank
    Inspect(InspectOptions),
    /// Verify a plan file
    Check(CheckOptions),
    /// Compare two plans term by term: what differs, what it costs, which limit binds
    Compare(CompareOptions),
    /// Predict a launch configuration of Megatron, DeepSpeed or torchtitan, and what the best plan would gain
    Score(ScoreOptions),
    /// Print a plan as a launch configuration of another program
    Export(ExportOptions),
    /// Predict every row of a table of measured runs
    Validate(ValidateOptions),
    /// Fit a cluster's constants to a user's own logged runs
    Calibrate(CalibrateOptions),
    /// List the example models that are built in
    Models(ListOptions),
    /// List the built-in clusters with their devices and sources
    Clusters(ListOptions),
    /// List the built-in software stacks with their sources
    Stacks(ListOptions),
    /// Print a Hugging Face config.json as a model file
    Import(ImportOptions),
    /// Run a plan: hands over to execute-plan
    #[command(disable_help_flag = true)]
    Execute(ExecuteOptions),
}

/// Options of the search.
#[derive(Debug, Args)]
pub struct SearchOptions {
    /// Model file (RON), or a Hugging Face config.json
    #[arg(long, value_name = "FILE", required = true)]
    pub model: Option<PathBuf>,
    /// Number of GPUs; or a range of which every multiple of --node-gpus is searched and compared
    #[arg(long, value_name = "N|A..B", required = true, allow_negative_numbers = true, value_parser = one_or_range)]
    pub gpus: Option<Gpus>,
    /// GPUs of a node
    #[arg(long, value_name = "M", required = true, allow_negative_numbers = true)]
    pub node_gpus: Option<u64>,
    /// Built-in cluster, or a cluster file, such as `execute-plan --profile` writes
    #[arg(long, value_name = "NAME|FILE", default_value = DEFAULT_CLUSTER)]
    pub cluster: String,
    /// Built-in software stack, or a stack file [default: that of the cluster file, or planwright]
    #[arg(long, value_name = "NAME|FILE")]
    pub stack: Option<String>,
    /// Sequences of a step
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub global_batch: Option<u64>,
    /// Tokens of a sequence
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub sequence_length: Option<u64>,
    /// What is to be best; with one number of GPUs the fastest step is best in all
    #[arg(long, value_name = "NAME", default_value = "step")]
    pub objective: ObjectiveOption,
    /// Tokens to train on, with suffix K, M, B or T: adds days, GPU-hours, cost, energy and what failures cost
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = read_tokens)]
    pub tokens: Option<u64>,
    /// Leave out layouts that cannot be executed yet
    #[arg(long)]
    pub executable: bool,
    /// Number of layouts reported
    #[arg(long, value_name = "K", default_value_t = 10)]
    pub top: usize,
    /// Plan file [default: <model name>-<gpus>.plan.ron]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Replace a plan file that differs
    #[arg(long)]
    pub force: bool,
    /// Search and report, write nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Choices that are fixed; the rest is searched.
    #[command(flatten)]
    pub fixed: FixedOptions,
}

/// One number of GPUs, or a range with both ends.
#[derive(Clone, Debug)]
pub enum Gpus {
    /// `N`.
    One(u64),
    /// `A..B`.
    Range(RangeInclusive<u64>),
}

/// What is to be best.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum ObjectiveOption {
    /// The time of a step, or of the training with --tokens
    Step,
    /// Tokens for each GPU-hour
    TokensPerGpuHour,
    /// Money, at the cluster's price_per_gpu_hour
    Cost,
    /// Energy of the GPUs, at the device's board_power
    Energy,
}

impl ObjectiveOption {
    /// The objective.
    pub fn objective(self) -> Objective {
        match self {
            ObjectiveOption::Step => Objective::Step,
            ObjectiveOption::TokensPerGpuHour => Objective::TokensPerGpuHour,
            ObjectiveOption::Cost => Objective::Cost,
            ObjectiveOption::Energy => Objective::Energy,
        }
    }
}

fn one_or_range(text: &str) -> Result<Gpus, ParseIntError> {
    match text.split_once("..") {
        None => Ok(Gpus::One(text.parse()?)),
        Some((first, last)) => Ok(Gpus::Range(first.parse()?..=last.parse()?)),
    }
}

/// The cluster where none is named.
pub const DEFAULT_CLUSTER: &str = "dgx-a100-80gb";
/// The stack where none is named.
pub const DEFAULT_STACK: &str = "planwright";

/// Choices that the user can fix.
#[derive(Debug, Args)]
#[command(next_help_heading = "Fix a choice (the rest is searched)")]
pub struct FixedOptions {
    /// Ranks that share each matrix
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    tensor_parallel: Option<u64>,
    /// Pipeline stages
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pipeline_parallel: Option<u64>,
    /// Replicas
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    data_parallel: Option<u64>,
    /// Ranks that split a sequence
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    context_parallel: Option<u64>,
    /// Ranks that split the experts, some of those of data and context, and of tensor where experts are whole
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    expert_parallel: Option<u64>,
    /// Ranks that share each expert's matrices: 1, or all tensor ranks
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    expert_tensor_parallel: Option<u64>,
    /// What replicas shard: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters
    #[arg(long, value_name = "0..3", value_parser = clap::value_parser!(u8).range(0..=3))]
    zero_stage: Option<u8>,
    /// Sequences of a forward pass
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    micro_batch: Option<u64>,
    /// What backward computes again
    #[arg(long)]
    recompute: Option<RecomputeOption>,
    /// Parts of the model on each stage
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    virtual_stages: Option<u64>,
    /// Order of micro-batches
    #[arg(long)]
    schedule: Option<ScheduleOption>,
    /// Split norms and residuals along the sequence
    #[arg(long, value_name = "on|off", action = ArgAction::Set, value_parser = on_or_off)]
    sequence_parallel: Option<bool>,
    /// Keep the optimizer state in host memory and update it there
    #[arg(long, value_name = "on|off", action = ArgAction::Set, value_parser = on_or_off)]
    offload_optimizer: Option<bool>,
    /// Whose ranks are neighbours: replicas of a stage, or stages of a replica
    #[arg(long)]
    mesh_order: Option<MeshOrderOption>,
}

/// Which axis of the mesh is outermost.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum MeshOrderOption {
    /// Replicas of a stage are neighbours
    PipelineOutermost,
    /// Stages of a replica are neighbours
    DataOutermost,
}

/// What backward computes again.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum RecomputeOption {
    /// Nothing
    None,
    /// The attention core
    Selective,
    /// Each layer
    Full,
    /// As many layers of each stage as its memory asks for
    Partial,
}

impl RecomputeOption {
    /// The choice.
    pub fn choice(self) -> Recompute {
        match self {
            RecomputeOption::None => Recompute::None,
            RecomputeOption::Selective => Recompute::Selective,
            RecomputeOption::Full => Recompute::Full,
            RecomputeOption::Partial => Recompute::Partial,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ScheduleOption {
    Gpipe,
    #[value(name = "1f1b")]
    OneForwardOneBackward,
    Interleaved,
    #[value(name = "zb-h1")]
    ZeroBubbleH1,
    #[value(name = "zb-v")]
    ZeroBubbleV,
}

impl FixedOptions {
    /// The choices that were given.
    pub fn choices(&self) -> FixedChoices {
        FixedChoices {
            tensor_parallel: self.tensor_parallel,
            pipeline_parallel: self.pipeline_parallel,
            data_parallel: self.data_parallel,
            context_parallel: self.context_parallel,
            expert_parallel: self.expert_parallel,
            expert_tensor_parallel: self.expert_tensor_parallel,
            virtual_stages: self.virtual_stages,
            zero_stage: self.zero_stage.and_then(|stage| ZeroStage::try_from(stage).ok()),
            micro_batch: self.micro_batch,
            recompute: self.recompute.map(RecomputeOption::choice),
            schedule: self.schedule.map(|choice| match choice {
                ScheduleOption::Gpipe => ScheduleKind::GPipe,
                ScheduleOption::OneForwardOneBackward => ScheduleKind::OneForwardOneBackward,
                ScheduleOption::Interleaved => ScheduleKind::Interleaved,
                ScheduleOption::ZeroBubbleH1 => ScheduleKind::ZeroBubbleH1,
                ScheduleOption::ZeroBubbleV => ScheduleKind::ZeroBubbleV,
            }),
            sequence_parallel: self.sequence_parallel,
            offload_optimizer: self.offload_optimizer,
            mesh_order: self.mesh_order.map(|choice| match choice {
                MeshOrderOption::PipelineOutermost => MeshOrder::PipelineOutermost,
                MeshOrderOption::DataOutermost => MeshOrder::DataOutermost,
            }),
        }
    }
}

fn on_or_off(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("give `on` or `off`".to_owned()),
    }
}

/// Options of `plan inspect`.
#[derive(Debug, Args)]
pub struct InspectOptions {
    /// Plan file
    pub plan: PathBuf,
    /// Show one stage
    #[arg(long, value_name = "S", conflicts_with = "rank")]
    pub stage: Option<u64>,
    /// Show one rank
    #[arg(long, value_name = "R")]
    pub rank: Option<u64>,
    /// Print the whole plan as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Options of `plan check`.
#[derive(Debug, Args)]
pub struct CheckOptions {
    /// Plan file
    pub plan: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Options of `plan compare`.
#[derive(Debug, Args)]
pub struct CompareOptions {
    /// Plan file
    pub a: PathBuf,
    /// Plan file to compare with it
    pub b: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Options of `plan score`.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("configuration").required(true)))]
pub struct ScoreOptions {
    /// Flags of Megatron-LM or Megatron-DeepSpeed as one argument, or @FILE that holds them
    #[arg(long, value_name = "FLAGS|@FILE", group = "configuration", allow_hyphen_values = true)]
    pub from_megatron: Option<String>,
    /// DeepSpeed's JSON file; needs --model
    #[arg(long, value_name = "FILE", group = "configuration")]
    pub from_deepspeed: Option<PathBuf>,
    /// torchtitan's TOML file
    #[arg(long, value_name = "FILE", group = "configuration")]
    pub from_torchtitan: Option<PathBuf>,
    /// Number of GPUs
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub gpus: u64,
    /// GPUs of a node
    #[arg(long, value_name = "M", allow_negative_numbers = true)]
    pub node_gpus: u64,
    /// Built-in cluster, or a cluster file
    #[arg(long, value_name = "NAME|FILE", default_value = DEFAULT_CLUSTER)]
    pub cluster: String,
    /// Built-in software stack, or a stack file [default: the one that the configuration is for]
    #[arg(long, value_name = "NAME|FILE")]
    pub stack: Option<String>,
    /// Model file (RON), or a Hugging Face config.json, where the configuration does not hold the model
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Sequences of a step, where the configuration does not say
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub global_batch: Option<u64>,
    /// Tokens of a sequence, where the configuration does not say
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub sequence_length: Option<u64>,
    /// What backward computes again, where the configuration does not say
    #[arg(long)]
    pub recompute: Option<RecomputeOption>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Options of `plan export`.
#[derive(Debug, Args)]
pub struct ExportOptions {
    /// Plan file
    pub plan: PathBuf,
    /// The program that the configuration is for
    #[arg(long)]
    pub to: ExportTarget,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Programs that plans are exported to.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum ExportTarget {
    /// Flags of Megatron-LM
    Megatron,
    /// DeepSpeed's JSON file
    Deepspeed,
    /// torchtitan's TOML file
    Torchtitan,
    /// NeMo's YAML file
    Nemo,
    /// A batch script that runs the plan
    Slurm,
}

/// Options of `plan validate`.
#[derive(Debug, Args)]
pub struct ValidateOptions {
    /// Table of runs (CSV, columns as in tests/published/runs.csv)
    pub runs: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Options of `plan calibrate`.
#[derive(Debug, Args)]
pub struct CalibrateOptions {
    /// Table of runs (CSV, columns as in tests/published/runs.csv; those that nobody logged may be left out)
    pub runs: PathBuf,
    /// Built-in cluster, or a cluster file, on which the runs took place
    #[arg(long, value_name = "NAME|FILE")]
    pub cluster: String,
    /// Built-in software stack, or a stack file [default: that of the cluster file, or planwright]
    #[arg(long, value_name = "NAME|FILE")]
    pub stack: Option<String>,
    /// Cluster file to write, for `plan --cluster`
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Replace a file that differs
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Options of the lists.
#[derive(Debug, Args)]
pub struct ListOptions {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Options of `plan import`.
#[derive(Debug, Args)]
pub struct ImportOptions {
    /// Hugging Face config.json
    pub config: PathBuf,
}

/// Options of `plan execute`.
#[derive(Debug, Args)]
pub struct ExecuteOptions {
    /// Plan file and options of execute-plan
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    pub arguments: Vec<OsString>,
}
