//! Reads and verifies a plan for execution.
//!
//! The operators that execute a program are not part of this version: reading a plan ends with the reason
//! why it is not run.

pub mod communicator;
pub mod data;
pub mod executor;
pub mod initial;
pub mod launch;
pub mod log;
pub mod operators;
pub mod place;
pub mod prepare;
pub mod random;
pub mod tensor;
pub mod train;
pub mod weights;

use std::path::Path;

use hardware_profiles::files::{PLAN_LIMIT, read_text};
use ir::error::Problem;
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
}

impl From<communicator::Error> for Error {
    fn from(error: communicator::Error) -> Error {
        match error {
            communicator::Error::BadInput(problems) => Error::BadInput(problems),
            communicator::Error::Lost(loss) => Error::Lost(loss),
        }
    }
}

/// Reads and verifies a plan, and says why it is not run.
///
/// # Errors
/// `Error::BadInput` if the file is no plan or its strategy is not executable, `Error::Verification` if it
/// breaks a rule; and always, in this version, `Error::BadInput` for want of operators.
pub fn load(path: &Path) -> Result<Plan, Error> {
    let origin = path.display().to_string();
    let text = read_text(path, PLAN_LIMIT).map_err(|problem| Error::BadInput(vec![problem]))?;
    let plan = read_plan(&text, &origin).map_err(|error| Error::BadInput(error.problems().to_vec()))?;
    let problems = verify(&plan, &origin);
    if !problems.is_empty() {
        return Err(Error::Verification(problems));
    }
    let (what, help) = match &plan.executable {
        Executable::No(reason) => {
            (format!("the plan is not executable: {reason}"), "`plan --executable` proposes only layouts that are")
        }
        Executable::Yes => (
            "the plan is sound, but this version executes no programs".to_owned(),
            "`plan inspect --stage 0` shows the program",
        ),
    };
    Err(Error::BadInput(vec![Problem::new(what, format!("{origin}, program"), help)]))
}
