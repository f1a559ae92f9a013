//! `plan execute`: hands over to `execute-plan`, beside this program or on PATH.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use ir::error::Problem;
use planner::error::Error;

use crate::arguments::ExecuteOptions;

/// Name of the runtime's program.
const PROGRAM: &str = "execute-plan";

/// Runs `execute-plan` with the given arguments and ends as it ends.
pub fn run(options: &ExecuteOptions) -> Result<ExitCode, Error> {
    let name = format!("{PROGRAM}{}", std::env::consts::EXE_SUFFIX);
    let beside = std::env::current_exe().ok().and_then(|path| Some(path.parent()?.join(&name)));
    let program = beside.filter(|path| path.is_file()).unwrap_or_else(|| PathBuf::from(name));
    match Command::new(&program).args(&options.arguments).status() {
        Ok(status) => Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))),
        Err(error) => Err(Problem::new(
            format!("cannot start {}: {error}", program.display()),
            "plan execute",
            "build it with `cargo build --release -p runtime`, or put it on PATH",
        )
        .into()),
    }
}
