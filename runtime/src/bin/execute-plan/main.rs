//! `execute-plan`: runs one rank of a plan, prepares its data, and checks a GPU.

#![allow(clippy::print_stdout, reason = "this is the program that prints")]

mod arguments;
mod device;
mod gpu_check;
mod prepare;
mod run;

use std::process::ExitCode;

use clap::Parser;
use ir::error::Problem;
use runtime::Error;

use arguments::{Arguments, Command};

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return usage(&error),
    };
    let done = match arguments.command {
        None => run::run(&arguments.run),
        Some(Command::Prepare(options)) => prepare::run(options).map(|()| ExitCode::SUCCESS),
        Some(Command::GpuCheck(options)) => gpu_check::run(&options),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(error.exit_code())
        }
    }
}

/// Prints a mistake in the command line without the lines that the parser appends, or the help that was asked for.
fn usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        // A reader that has gone away is no error.
        error.print().ok();
        return ExitCode::SUCCESS;
    }
    let text = error.to_string();
    let lines: Vec<&str> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    let what = lines.join(" ").trim_start_matches("error: ").to_owned();
    let problem = Error::from(Problem::new(what, "the command line", "`execute-plan --help` shows all options"));
    eprintln!("{problem}");
    ExitCode::from(problem.exit_code())
}
