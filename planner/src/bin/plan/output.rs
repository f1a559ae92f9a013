//! Printing results and errors, exit codes, and writing plan files whole or not at all.

use std::error::Error as _;
use std::fs;
use std::io::{ErrorKind, Write};
use std::num::ParseIntError;
use std::path::Path;
use std::process::ExitCode;

use clap::error::ContextKind;
use ir::error::Problem;
use planner::error::Error;
use planner::report::json::error_value;

use crate::Printed;

/// Exit code of bad input.
const BAD_INPUT: u8 = 2;

/// What a command prints to stdout, and its exit code.
pub struct Report {
    /// The text.
    pub text: String,
    /// 0, unless the text says what is missing.
    pub code: u8,
}

/// Prints a command's result and gives its exit code.
pub fn finish(printed: Printed, json: bool) -> ExitCode {
    finish_with_code(printed.map(|text| Report { text, code: 0 }), json)
}

/// Prints a report, whose exit code may say more than that it is there.
pub fn finish_with_code(report: Result<Report, Error>, json: bool) -> ExitCode {
    match report {
        Ok(Report { text, code }) => {
            print(&text);
            ExitCode::from(code)
        }
        Err(error) => {
            if json {
                print(&format!("{:#}\n", error_value(error.problems())));
            } else {
                eprintln!("{error}");
            }
            ExitCode::from(error.exit_code())
        }
    }
}

/// Prints a mistake in the command line, or the help that was asked for.
pub fn usage(error: &clap::Error, json: bool) -> ExitCode {
    if error.use_stderr() {
        return finish(Err(usage_problem(error).into()), json);
    }
    match error.print() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::from(BAD_INPUT),
    }
}

/// What the argument parser found, without the usage lines that it appends.
fn usage_problem(error: &clap::Error) -> Problem {
    let text = error.to_string();
    let lines: Vec<&str> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    let mut what = lines.join(" ").trim_start_matches("error: ").to_owned();
    let named = |kinds: [ContextKind; 2]| kinds.into_iter().find_map(|kind| error.get(kind)).map(ToString::to_string);
    let location = named([ContextKind::InvalidArg, ContextKind::InvalidSubcommand]);
    let similar = named([ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand]);
    let mut help = "`plan --help` shows all options".to_owned();
    if let Some(similar) = similar {
        help = format!("did you mean {similar}? {help}");
    }
    if let Some(cause) = error.source().filter(|cause| cause.is::<ParseIntError>()) {
        what = what.trim_end_matches(&format!(": {cause}")).to_owned();
        help = format!("give a whole number from 0 to {}; {help}", u64::MAX);
    }
    Problem::new(what, location.unwrap_or_else(|| "command line".to_owned()), help)
}

/// Writes to stdout; a reader that has gone away is no error.
fn print(text: &str) {
    let written = std::io::stdout().lock().write_all(text.as_bytes());
    if let Err(error) = written
        && error.kind() != ErrorKind::BrokenPipe
    {
        eprintln!("error: cannot write to stdout: {error}");
    }
}

/// Writes a file so that the file is either as before or complete. A file with equal bytes is success;
/// one with other bytes is kept unless `force`.
pub fn write_whole(path: &Path, text: &str, force: bool) -> Result<(), Error> {
    let shown = path.display().to_string();
    let failed = |error: std::io::Error| {
        let help = match error.kind() {
            ErrorKind::NotFound => "create the folder first, or choose another place with --out",
            _ => "choose another place with --out",
        };
        Problem::new(format!("cannot write the file: {error}"), shown.clone(), help)
    };
    if path.exists() && !path.is_file() {
        return Err(Problem::new("this is a directory or a device", shown, "name a file with --out").into());
    }
    match fs::read(path) {
        Ok(bytes) if bytes == text.as_bytes() => return Ok(()),
        Ok(_) if !force => {
            let help = "give --force to replace it, or --out for another file";
            return Err(Problem::new("the file exists and holds something else", shown, help).into());
        }
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error).into()),
    }
    let name = path.file_name().ok_or_else(|| failed(ErrorKind::InvalidInput.into()))?;
    let mut partial = name.to_owned();
    partial.push(format!(".{}.partial", std::process::id()));
    let partial = path.with_file_name(partial);
    let written = fs::write(&partial, text).and_then(|()| fs::rename(&partial, path));
    written.map_err(|error| {
        // Nothing is left to do if the partial file cannot be removed either.
        let _ = fs::remove_file(&partial);
        failed(error).into()
    })
}
