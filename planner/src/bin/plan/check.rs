//! `plan check`: verify a plan file.

use serde_json::json;

use crate::Printed;
use crate::arguments::CheckOptions;
use crate::inspect::read_verified;

/// Verifies a plan file.
pub fn run(options: &CheckOptions) -> Printed {
    let plan = read_verified(&options.plan)?;
    let (model, ranks, stages) = (&plan.model.name, plan.mesh.world_size(), plan.stages.len());
    if options.json {
        return Ok(format!("{:#}\n", json!({"ok": true, "model": model, "gpus": ranks, "stages": stages})));
    }
    Ok(format!("ok: {model} on {ranks} GPUs in {stages} stages obeys every rule\n"))
}
