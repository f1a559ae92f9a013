//! Printing results and errors, exit codes, and writing plan files whole or not at all.

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::process::ExitCode;

use ir::error::Problem;
use planner::error::Error;
use planner::report::json::error_value;

use crate::Printed;

/// Exit code of bad input.
const BAD_INPUT: u8 = 2;

/// Prints a command's result and gives its exit code.
pub fn finish(printed: Printed, json: bool) -> ExitCode {
    match printed {
        Ok(text) => {
            print(&text);
            ExitCode::SUCCESS
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
    let asked_for = !error.use_stderr();
    if json && !asked_for {
        let text = error.to_string();
        let what = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
        let problem = Problem::new(what, "command line", "`plan --help` shows all options");
        print(&format!("{:#}\n", error_value(&[problem])));
        return ExitCode::from(BAD_INPUT);
    }
    match error.print() {
        Ok(()) if asked_for => ExitCode::SUCCESS,
        Ok(()) | Err(_) => ExitCode::from(BAD_INPUT),
    }
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

/// Writes a plan so that the file is either as before or complete. A file with equal bytes is success;
/// one with other bytes is kept unless `force`.
pub fn write_plan_file(path: &Path, text: &str, force: bool) -> Result<(), Error> {
    let shown = path.display().to_string();
    let failed = |error: std::io::Error| {
        Problem::new(format!("cannot write the plan: {error}"), shown.clone(), "choose another place with --out")
    };
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
