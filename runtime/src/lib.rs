//! Reads, verifies and runs one rank's program of a plan.
//!
//! | Step | Function | Module |
//! |---|---|---|
//! | read and verify the plan | [`load`] | here |
//! | open training file, data, weights | `prepare_run` | `run` |
//! | find the other ranks | `read_launch`, `World::connect` | `launch`, `communicator` |
//! | place weights | `Executor::new` | `executor`, `initial`, `weights` |
//! | step: passes, messages, update | `Executor::step` | `executor`, `operators` |
//! | say what happened | `progress_line`, `Log` | `log` |
//! | say where time went | `comparison`, `measure_profile` | `measure` |

#[cfg(feature = "cuda")]
pub mod cards;
pub mod communicator;
#[cfg(feature = "cublaslt")]
pub mod cublaslt;
pub mod data;
#[cfg(feature = "kernels")]
pub mod device;
pub mod executor;
pub mod gather;
#[cfg(feature = "kernels")]
pub mod gpu_check;
pub mod initial;
pub mod launch;
#[cfg(any(feature = "nccl", feature = "cublaslt"))]
mod library;
pub mod log;
pub mod measure;
pub mod operators;
pub mod optimizer;
pub mod place;
pub mod prepare;
pub mod random;
pub mod run;
pub mod tensor;
pub mod train;
pub mod weights;

use std::path::Path;

use hardware_profiles::files::{PLAN_LIMIT, read_text};
use ir::error::Problem;
use ir::model::DType;
use ir::plan::{Executable, Plan, read_plan};
use ir::verify::verify;

/// Why a plan cannot be run.
#[derive(Clone, Debug)]
pub enum Error {
    /// The file is no plan, or not one that can be run.
    BadInput(Vec<Problem>),
    /// The plan breaks a rule.
    Verification(Vec<Problem>),
    /// A rank or link was lost.
    Lost(communicator::Loss),
    /// Loss or gradient norm are no numbers.
    Numerical(Problem),
    /// A device failed.
    Device(Problem),
}

impl Error {
    /// The exit code of a program that ends with it.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::BadInput(_) => 2,
            Error::Verification(_) => 3,
            Error::Lost(_) | Error::Device(_) => 4,
            Error::Numerical(_) => 5,
        }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::BadInput(problems) | Error::Verification(problems) => {
                let texts: Vec<String> = problems.iter().map(Problem::to_string).collect();
                f.write_str(texts.join("\n").trim_end())
            }
            Error::Lost(loss) => write!(f, "error: {loss}"),
            Error::Numerical(problem) | Error::Device(problem) => f.write_str(problem.to_string().trim_end()),
        }
    }
}

impl From<communicator::Error> for Error {
    fn from(error: communicator::Error) -> Error {
        match error {
            communicator::Error::BadInput(problems) => Error::BadInput(problems),
            communicator::Error::Lost(loss) => Error::Lost(loss),
        }
    }
}

impl From<Problem> for Error {
    fn from(problem: Problem) -> Error {
        Error::BadInput(vec![problem])
    }
}

/// Reads and verifies a plan that can be run.
///
/// # Errors
/// `Error::BadInput` if the file is no plan or its strategy is not executable, `Error::Verification` if it
/// breaks a rule.
pub fn load(path: &Path) -> Result<Plan, Error> {
    let origin = path.display().to_string();
    let text = read_text(path, PLAN_LIMIT)?;
    let plan = read_plan(&text, &origin).map_err(|error| Error::BadInput(error.problems().to_vec()))?;
    let problems = verify(&plan, &origin);
    if !problems.is_empty() {
        return Err(Error::Verification(problems));
    }
    if let Executable::No(reason) = &plan.executable {
        let what = format!("the plan is not executable: {reason}");
        return Err(Problem::new(what, origin, "`plan --executable` proposes only layouts that are").into());
    }
    if plan.model.dtype == DType::FP16 {
        let what = "fp16 with loss scaling is not executed".to_owned();
        return Err(Problem::new(what, format!("{origin}, model.dtype"), "use bf16 or fp32").into());
    }
    Ok(plan)
}
