//! Launch configurations of other programs, read as a model, a workload and a layout.
//!
//! A reader takes what the other program would do with the configuration: its defaults, its rules, its names. What the
//! prediction does not depend on, what it does not follow and what nobody knows are listed apart; nothing is ignored in
//! silence. A configuration that the other program would refuse is an error that names the legal values.

pub mod deepspeed;
pub mod flags;
pub mod megatron;
mod others;
mod rules;
pub mod torchtitan;
mod tree;

use hardware_profiles::device::MatmulFormat;
use ir::error::Problem;
use ir::model::{ModelSpec, Workload};
use ir::strategy::{Recompute, Strategy};

use crate::error::Error;
use crate::request::GPU_LIMIT;

/// How many near names are listed beside an unknown one.
const SUGGESTIONS: usize = 2;
/// Letters of a name for which one may differ in a name that is listed as near.
const LETTERS_A_CHANGE: usize = 4;

/// The program that a configuration is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Flags of Megatron-LM or a Megatron-DeepSpeed fork.
    Megatron,
    /// DeepSpeed's JSON file.
    DeepSpeed,
    /// torchtitan's TOML file.
    Torchtitan,
}

/// What a configuration does not say: the ranks that it is launched on, and what the command line adds.
#[derive(Clone, Debug)]
pub struct Launcher {
    /// Ranks of the world.
    pub gpus: u64,
    /// A model file's model, where one was given.
    pub model: Option<ModelSpec>,
    /// Sequences of a step, where the command line says so.
    pub global_batch: Option<u64>,
    /// Tokens of a sequence, where the command line says so.
    pub sequence_length: Option<u64>,
    /// What backward computes again, where the command line says so: not every configuration does.
    pub recompute: Option<Recompute>,
}

/// A configuration as it was read.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The program that it is for.
    pub format: Format,
    /// The model.
    pub model: ModelSpec,
    /// What a step processes.
    pub workload: Workload,
    /// The layout without its stage split.
    pub layout: Strategy,
    /// Layers of each part of the model in the model's order, `pipeline_parallel * virtual_stages` of them; empty where
    /// the configuration leaves it to the program.
    pub layers: Vec<u64>,
    /// Layers of each part that backward computes again, where `layout.recompute` is `Partial`; fewer of parts with fewer.
    pub recomputed: u64,
    /// The stack that fits best where the user names none.
    pub stack: &'static str,
    /// Switches of the software that a stack profile has too.
    pub switches: Switches,
    /// What became of each setting.
    pub settings: Settings,
    /// What neither the configuration nor the user said and a default decided.
    pub defaults: Vec<&'static str>,
}

/// Switches of the software that a stack profile has too; `None` where the configuration does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Switches {
    /// Attention core in one kernel.
    pub flash_attention: Option<bool>,
    /// Whether gradients are reduced beside the last backward pass.
    pub overlap_gradient_reduction: Option<bool>,
    /// Whether parameters are gathered beside computation.
    pub overlap_parameter_gather: Option<bool>,
    /// Whether the context axis exchanges heads for positions instead of passing keys and values round a ring.
    pub context_all_to_all: Option<bool>,
    /// Number format of the layers' matrix products.
    pub matmul_format: MatmulFormat,
}

/// What became of each setting of a configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Settings that the prediction does not depend on.
    pub no_effect: Vec<String>,
    /// Settings that the prediction does not follow, each with what is assumed instead.
    pub assumed: Vec<(String, String)>,
    /// Settings that nobody knows, each with near names.
    pub unknown: Vec<(String, Vec<String>)>,
    /// What the reader should know of settings that were read.
    pub warnings: Vec<String>,
}

impl Format {
    /// The name used in reports.
    pub fn name(self) -> &'static str {
        match self {
            Format::Megatron => "megatron",
            Format::DeepSpeed => "deepspeed",
            Format::Torchtitan => "torchtitan",
        }
    }
}

/// One rank with nothing sharded, split or computed again: readers change what they read.
fn plain_layout() -> Strategy {
    Strategy::plain([1; 3], 1)
}

/// Known names near an unknown one, nearest first.
fn near<'a>(known: impl Iterator<Item = &'a str>, name: &str) -> Vec<String> {
    let most = name.len() / LETTERS_A_CHANGE + 1;
    let measured = known.map(|known| (strsim::damerau_levenshtein(known, name), known));
    let mut near: Vec<(usize, &str)> = measured.filter(|(distance, _)| *distance <= most).collect();
    near.sort();
    near.dedup();
    near.into_iter().take(SUGGESTIONS).map(|(_, known)| known.to_owned()).collect()
}

/// Refuses a number of ranks that is no world.
fn check_world(launcher: &Launcher) -> Result<(), Problem> {
    let gpus = launcher.gpus;
    if (1..=GPU_LIMIT).contains(&gpus) {
        return Ok(());
    }
    Err(Problem::new(format!("gpus is {gpus}"), "--gpus", format!("give 1 to {GPU_LIMIT} GPUs")))
}

fn refuse(problems: Vec<Problem>) -> Result<(), Error> {
    if problems.is_empty() { Ok(()) } else { Err(Error::BadInput(problems)) }
}

/// Numbers for a message: `1, 2, 4`.
fn list(numbers: &[u64]) -> String {
    numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
}
