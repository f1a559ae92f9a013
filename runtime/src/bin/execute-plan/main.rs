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
    keep_freed_memory();
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

/// Has the allocator keep what is freed: tensors of the same sizes come back in every step, while what is mapped anew
/// for each is zeroed page by page.
fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: sets two numbers of the allocator (mallopt(3)), before there are other threads.
    #[allow(unsafe_code)]
    unsafe {
        libc::mallopt(libc::M_MMAP_MAX, 0);
        libc::mallopt(libc::M_TRIM_THRESHOLD, -1);
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
