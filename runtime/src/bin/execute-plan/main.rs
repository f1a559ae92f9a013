//! `execute-plan`: runs one rank of a plan, and prepares its data.

#![allow(clippy::print_stdout, reason = "this is the program that prints")]

mod arguments;
mod prepare;
mod run;

use std::process::ExitCode;

use clap::Parser;

use arguments::{Arguments, Command};

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = match arguments.command {
        None => run::run(&arguments.run),
        Some(Command::Prepare(options)) => prepare::run(options).map(|()| ExitCode::SUCCESS),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(error.exit_code())
        }
    }
}
