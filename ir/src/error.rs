//! What can be wrong with a text given to this crate: what, where, and how to mend it.

use std::fmt;

use thiserror::Error;

/// One thing that is wrong in the user's input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// What is wrong, with the numbers that show it.
    pub what: String,
    /// The file and field, line or flag where it is.
    pub location: String,
    /// How to mend it.
    pub help: String,
}

/// An input that cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Error {
    /// The text is not well-formed, or not of the expected shape.
    #[error("{0}")]
    Syntax(Problem),
    /// The text was read, but its values contradict themselves or one another.
    #[error("{}", list(.0))]
    Invalid(Vec<Problem>),
}

impl Problem {
    /// A problem from its three parts.
    pub fn new(what: impl Into<String>, location: impl Into<String>, help: impl Into<String>) -> Problem {
        Problem { what: what.into(), location: location.into(), help: help.into() }
    }
}

impl Error {
    /// All problems, at least one.
    pub fn problems(&self) -> &[Problem] {
        match self {
            Error::Syntax(problem) => std::slice::from_ref(problem),
            Error::Invalid(problems) => problems,
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}\n  --> {}\n  help: {}", self.what, self.location, self.help)
    }
}

fn list(problems: &[Problem]) -> String {
    problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("\n")
}
