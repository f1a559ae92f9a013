//! Libraries of NVIDIA's names for hosts without a card, made with the C compiler that links these tests.

use std::path::Path;
use std::process::Command;

/// Makes a shared library of a source text in a folder.
pub fn make_library(folder: &Path, name: &str, source: &str) {
    let text = folder.join("library.c");
    std::fs::write(&text, source).expect("the folder can be written to");
    let made = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&folder.join(name), &text]).status();
    assert!(made.expect("a C compiler links Rust").success(), "{source}");
}
