//! Launch configurations of plans for other programs.
//!
//! What the other program cannot say or do is told in a remark, which the text carries as a comment where its format
//! has comments.

mod files;
mod megatron;

use std::path::Path;

use ir::plan::Plan;

/// The program that a configuration is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Flags of Megatron-LM, or of Megatron-DeepSpeed where only it has the model's positions.
    Megatron,
    /// DeepSpeed's JSON file.
    DeepSpeed,
    /// torchtitan's TOML file.
    Torchtitan,
    /// NeMo's YAML file.
    Nemo,
    /// A batch script that starts `execute-plan`, or Megatron where the plan is not executable.
    Slurm,
}

/// A launch configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// The configuration.
    pub text: String,
    /// What it does not say.
    pub remarks: Vec<String>,
}

/// The launch configuration of a verified plan; `path` is where the plan lies.
pub fn export(plan: &Plan, path: &Path, target: Target) -> Export {
    match target {
        Target::Megatron => megatron::export(plan),
        Target::DeepSpeed => files::deepspeed(plan),
        Target::Torchtitan => files::torchtitan(plan),
        Target::Nemo => files::nemo(plan),
        Target::Slurm => files::slurm(plan, path),
    }
}

/// Remarks as comments in front of a text.
fn commented(remarks: &[String], text: &str) -> String {
    let comments: String = remarks.iter().map(|remark| format!("# {remark}\n")).collect();
    comments + text
}
