//! `execute-plan`: runs one rank of a plan, and prepares its data.

#![allow(clippy::print_stdout, reason = "this is the program that prints")]

mod arguments;
mod prepare;
mod run;

use std::process::ExitCode;

use clap::Parser;
use runtime::Error;

use arguments::{Arguments, Command};

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = match arguments.command {
        None => run::run(&arguments.run),
        Some(Command::Prepare(options)) => prepare::run(options),
    };
    let (problems, code) = match done {
        Ok(()) => return ExitCode::SUCCESS,
        Err(Error::BadInput(problems)) => (problems, 2),
        Err(Error::Verification(problems)) => (problems, 3),
    };
    problems.iter().for_each(|problem| eprintln!("{problem}"));
    ExitCode::from(code)
}
