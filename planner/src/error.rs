//! Why there is no plan, and which exit code says so.

use ir::error::Problem;
use thiserror::Error;

/// Exit code of a search that Ctrl-C ended: as shells show it, 128 and the signal's number.
pub const INTERRUPTED: u8 = 130;

/// A request that ends without a plan.
#[derive(Clone, Debug, Error)]
pub enum Error {
    /// The input cannot be used.
    #[error("{}", list(.0))]
    BadInput(Vec<Problem>),
    /// The input is sound, but no layout fits.
    #[error("{0}")]
    NoPlan(Problem),
    /// A plan breaks a rule.
    #[error("{}", list(.0))]
    Verification(Vec<Problem>),
    /// The user ended the search before it had found a layout that fits.
    #[error("{0}")]
    Interrupted(Problem),
}

impl Error {
    /// All problems, at least one.
    pub fn problems(&self) -> &[Problem] {
        match self {
            Error::NoPlan(problem) | Error::Interrupted(problem) => std::slice::from_ref(problem),
            Error::BadInput(problems) | Error::Verification(problems) => problems,
        }
    }

    /// The process's exit code: 1 no plan fits, 2 bad input, 3 verification failed, 130 interrupted.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::NoPlan(_) => 1,
            Error::BadInput(_) => 2,
            Error::Verification(_) => 3,
            Error::Interrupted(_) => INTERRUPTED,
        }
    }
}

impl From<Problem> for Error {
    fn from(problem: Problem) -> Error {
        Error::BadInput(vec![problem])
    }
}

impl From<ir::error::Error> for Error {
    fn from(error: ir::error::Error) -> Error {
        Error::BadInput(error.problems().to_vec())
    }
}

impl From<hardware_profiles::Error> for Error {
    fn from(error: hardware_profiles::Error) -> Error {
        Error::BadInput(error.problems().to_vec())
    }
}

fn list(problems: &[Problem]) -> String {
    problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("\n")
}
