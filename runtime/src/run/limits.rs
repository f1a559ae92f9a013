//! What of a run a device cannot do, found before ranks meet.

use ir::error::Problem;
use ir::model::DType;
use ir::plan::Plan;

use super::Request;
use crate::Error;
use crate::tensor::Format;

/// Checks that a rank's device can do what is asked for; processor cores can.
///
/// # Errors
/// `Error::BadInput` with all that it cannot.
pub fn check_device(plan: &Plan, request: &Request) -> Result<(), Error> {
    let mut problems = Vec::new();
    let format = if plan.model.dtype == DType::FP32 { Format::Single } else { Format::Brain };
    if !request.memory.has(format) {
        problems.push(Problem::new(
            "the device does not compute in bf16",
            "model.dtype of the plan",
            "plan with dtype fp32 in the model file, or leave --device out; NVIDIA's GPUs have bf16 from compute \
             capability 8.0 on",
        ));
    }
    if request.profile.is_some() && request.memory.is_on_device() {
        problems.push(Problem::new(
            "a run does not measure the profile of a device",
            "--profile",
            "`execute-plan gpu-check --out DIR` measures one and writes it to DIR/profile.ron",
        ));
    }
    if problems.is_empty() { Ok(()) } else { Err(Error::BadInput(problems)) }
}
