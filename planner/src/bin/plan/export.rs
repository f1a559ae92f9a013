//! `plan export`: a plan as a launch configuration of another program.

use planner::export::{Target, export};
use serde_json::json;

use crate::Printed;
use crate::arguments::{ExportOptions, ExportTarget};
use crate::inspect::read_verified;

/// Exports a plan.
pub fn run(options: &ExportOptions) -> Printed {
    let plan = read_verified(&options.plan)?;
    let target = match options.to {
        ExportTarget::Megatron => Target::Megatron,
        ExportTarget::Deepspeed => Target::DeepSpeed,
        ExportTarget::Torchtitan => Target::Torchtitan,
        ExportTarget::Nemo => Target::Nemo,
        ExportTarget::Slurm => Target::Slurm,
    };
    let exported = export(&plan, &options.plan, target);
    Ok(match options.json {
        true => format!("{:#}\n", json!({"text": exported.text, "remarks": exported.remarks})),
        false => exported.text,
    })
}
