//! The README's commands run and print what it shows. `BLESS=1 cargo test --test readme` writes it anew.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Output of a command line that starts with `plan`, run where `examples/` exists.
fn run(folder: &Path, line: &str) -> String {
    let mut words = line.split_whitespace();
    assert_eq!(words.next(), Some("plan"), "only `plan` is shown in console blocks: {line}");
    let output = Command::new(env!("CARGO_BIN_EXE_plan")).current_dir(folder).args(words).output().expect("starts");
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// The README with the output of each console block as it is now. A line `…` ends what is shown of an output.
fn renewed(text: &str) -> String {
    let folder = TempDir::new().expect("a scratch folder");
    copy_examples(folder.path());
    let mut renewed = String::new();
    let mut lines = text.lines().peekable();
    let mut inside = false;
    while let Some(line) = lines.next() {
        renewed += line;
        renewed += "\n";
        inside = if line.starts_with("```") { line == "```console" } else { inside };
        let Some(command) = line.strip_prefix("$ ").filter(|_| inside) else { continue };
        let mut shown = Vec::new();
        while lines.peek().is_some_and(|line| !line.starts_with("```") && !line.starts_with("$ ")) {
            shown.extend(lines.next());
        }
        let output = run(folder.path(), command);
        let shortened = shown.last() == Some(&"…");
        let most = if shortened { shown.len() - 1 } else { usize::MAX };
        output.lines().take(most).for_each(|line| renewed += &format!("{line}\n"));
        if shortened {
            renewed += "…\n";
        }
    }
    renewed
}

fn copy_examples(folder: &Path) {
    let target = folder.join("examples");
    fs::create_dir(&target).expect("writable");
    for entry in fs::read_dir(root().join("examples")).expect("readable") {
        let path = entry.expect("readable").path();
        fs::copy(&path, target.join(path.file_name().expect("a file"))).expect("copied");
    }
}

#[test]
fn readme_shows_what_the_program_prints() {
    let path = root().join("README.md");
    let text = fs::read_to_string(&path).expect("the README exists");
    let found = renewed(&text);
    if std::env::var_os("BLESS").is_some() {
        fs::write(&path, found).expect("writable");
        return;
    }
    for (number, (found, shown)) in found.lines().zip(text.lines()).enumerate() {
        assert_eq!(found, shown, "README.md, line {}; `BLESS=1 cargo test --test readme` renews it", number + 1);
    }
    let command = text.lines().position(|line| line.starts_with("$ plan --model examples/bloom.ron"));
    assert!(command.is_some_and(|line| line < 19), "the main command stands in the first 20 lines");
}

#[test]
fn the_test_command_is_what_ci_runs() {
    let readme = fs::read_to_string(root().join("README.md")).expect("the README exists");
    let ci = fs::read_to_string(root().join(".ci/run")).expect("the script exists");
    let command = "cargo test --locked --workspace";
    assert!(readme.contains(command) && ci.contains(command));
}
