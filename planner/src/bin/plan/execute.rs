//! `plan execute`: hands over to `execute-plan`, beside this program or on PATH.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use ir::error::Problem;
use planner::error::Error;

use crate::Printed;
use crate::arguments::ExecuteOptions;

/// Name of the runtime's program.
const PROGRAM: &str = "execute-plan";

/// Becomes `execute-plan` with the given arguments: signals and exit code are that program's own.
pub fn run(options: &ExecuteOptions) -> Printed {
    let beside = std::env::current_exe().ok().and_then(|path| Some(path.parent()?.join(PROGRAM)));
    let program = beside.filter(|path| path.is_file()).unwrap_or_else(|| PathBuf::from(PROGRAM));
    // It returns only if it fails.
    let error = Command::new(&program).args(&options.arguments).exec();
    Err(Error::from(Problem::new(
        format!("cannot start {}: {error}", program.display()),
        "plan execute",
        "put execute-plan beside `plan` or on PATH; `cargo build --release -p runtime` builds it",
    )))
}
