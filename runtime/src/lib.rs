//! Reads and verifies a plan for execution.
//!
//! Plans of this version hold no operator programs, so reading one ends with the reason it cannot run.

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
}

/// Reads a plan that can be run.
///
/// # Errors
/// `Error::BadInput` if the file is no plan or its strategy cannot be executed, `Error::Verification` if
/// it breaks a rule.
pub fn load(path: &Path) -> Result<Plan, Error> {
    let origin = path.display().to_string();
    let text = read_text(path, PLAN_LIMIT).map_err(|problem| Error::BadInput(vec![problem]))?;
    let plan = read_plan(&text, &origin).map_err(|error| Error::BadInput(error.problems().to_vec()))?;
    let problems = verify(&plan, &origin);
    if !problems.is_empty() {
        return Err(Error::Verification(problems));
    }
    match &plan.executable {
        Executable::Yes => Ok(plan),
        Executable::No(reason) => Err(Error::BadInput(vec![Problem::new(
            format!("the plan cannot be run: {reason}"),
            format!("{origin}, executable"),
            "`plan inspect` shows it; plan again with a version that writes programs",
        )])),
    }
}
