//! `execute-plan`: runs one rank of a plan.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use runtime::{Error, load};

/// Runs a plan.
#[derive(Debug, Parser)]
#[command(name = "execute-plan", version)]
struct Arguments {
    /// Plan file
    plan: PathBuf,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let (problems, code) = match load(&arguments.plan) {
        Ok(_) => return ExitCode::SUCCESS,
        Err(Error::BadInput(problems)) => (problems, 2),
        Err(Error::Verification(problems)) => (problems, 3),
        Err(Error::Lost(loss)) => {
            eprintln!("error: {loss}");
            return ExitCode::from(4);
        }
        Err(Error::Numerical(problem)) => (vec![problem], 5),
    };
    problems.iter().for_each(|problem| eprintln!("{problem}"));
    ExitCode::from(code)
}
