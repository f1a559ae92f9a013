//! `plan execute` becomes `execute-plan`: the one beside it, else the one on PATH, with all arguments.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

/// A stand-in for the runtime's program that says where it lies and what it was given.
const SCRIPT: &str = "#!/bin/sh\necho \"$0\"\nfor argument; do echo \"<$argument>\"; done\n";

fn write_script(folder: &Path, last: &str) {
    let path = folder.join("execute-plan");
    fs::write(&path, format!("{SCRIPT}{last}\n")).expect("the scratch folder is writable");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("the script is ours");
}

fn execute(folder: &Path, search: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(folder.join("plan"));
    command.current_dir(folder).env("PATH", search).arg("execute").args(arguments);
    command.output().expect("the program starts")
}

#[test]
fn execute_plan_is_found_and_given_everything() {
    // Beside the program itself, so that a link will do.
    let folder = || TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a scratch folder");
    let (home, path) = (folder(), folder());
    let program = home.path().join("plan");
    fs::hard_link(env!("CARGO_BIN_EXE_plan"), &program).expect("both are in the target folder");
    let run = |arguments: &[&str]| execute(home.path(), path.path(), arguments);

    let missing = run(&["x.plan.ron"]);
    let text = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert_eq!(missing.status.code(), Some(2), "{text}");
    for piece in ["error: cannot start execute-plan: No such file", "--> plan execute", "help: put execute-plan"] {
        assert!(text.contains(piece), "`{piece}` is not in\n{text}");
    }

    // Options of either program, words that look like several, and a mark that ends options.
    let rows: [&[&str]; 5] =
        [&[], &["x.plan.ron", "--steps", "5"], &["--json"], &["--help"], &["a b", "", "--", "--force", "-h"]];
    for place in [path.path(), home.path()] {
        write_script(place, "exit 5");
        for arguments in rows {
            let output = run(arguments);
            let given: String = arguments.iter().map(|argument| format!("<{argument}>\n")).collect();
            let expected = format!("{}\n{given}", place.join("execute-plan").display());
            assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{arguments:?}");
            assert_eq!(output.status.code(), Some(5), "{arguments:?}");
            assert!(output.stderr.is_empty(), "{arguments:?}");
        }
    }

    write_script(home.path(), "kill -9 $$");
    assert_eq!(run(&["x.plan.ron"]).status.signal(), Some(9), "the program itself has become the other");
}
