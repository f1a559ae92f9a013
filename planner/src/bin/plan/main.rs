//! `plan`: finds, shows and checks layouts for training a transformer.

#![allow(clippy::print_stdout, reason = "this is the program that prints")]

mod arguments;
mod calibrate;
mod check;
mod compare;
mod execute;
mod export;
mod import;
mod inspect;
mod library;
mod output;
mod progress;
mod score;
mod search;
mod validate;

use std::process::ExitCode;

use clap::Parser;
use planner::error::Error;

use arguments::{Arguments, Command};

/// What a command prints to stdout.
type Printed = Result<String, Error>;

fn main() -> ExitCode {
    let json = std::env::args().skip(1).any(|argument| argument == "--json");
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return output::usage(&error, json),
    };
    let printed = match arguments.command {
        None => return output::finish_with_code(search::run(&arguments.search), json),
        Some(Command::Inspect(options)) => inspect::run(&options),
        Some(Command::Check(options)) => check::run(&options),
        Some(Command::Compare(options)) => compare::run(&options),
        Some(Command::Score(options)) => score::run(&options),
        Some(Command::Export(options)) => export::run(&options),
        Some(Command::Validate(options)) => validate::run(&options),
        Some(Command::Calibrate(options)) => calibrate::run(&options),
        Some(Command::Models(options)) => library::models(options.json),
        Some(Command::Clusters(options)) => library::clusters(options.json),
        Some(Command::Stacks(options)) => library::stacks(options.json),
        Some(Command::Import(options)) => import::run(&options),
        Some(Command::Execute(options)) => execute::run(&options),
    };
    output::finish(printed, json)
}
