//! Reading text files that a user names, with limits and errors that say what to do.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use ir::error::Problem;

/// Largest model or profile file.
pub const INPUT_LIMIT: u64 = 1 << 20;
/// Largest plan file.
pub const PLAN_LIMIT: u64 = 64 << 20;

/// What some editors put before the first character of a UTF-8 file.
const BYTE_ORDER_MARK: char = '\u{feff}';

/// Reads a UTF-8 file of at most `limit` bytes, without a byte order mark.
///
/// # Errors
/// A problem naming the path: not found, a directory, too large, not UTF-8, or unreadable.
pub fn read_text(path: &Path, limit: u64) -> Result<String, Problem> {
    let shown = path.display().to_string();
    let unreadable = |error: std::io::Error| {
        let help = match error.kind() {
            std::io::ErrorKind::NotFound => "check the path, or start from a file in examples/",
            std::io::ErrorKind::PermissionDenied => "allow reading it, or run as its owner",
            _ => "check the path and the disk",
        };
        Problem::new(format!("cannot read the file: {error}"), shown.clone(), help)
    };
    if fs::metadata(path).map_err(&unreadable)?.is_dir() {
        return Err(Problem::new("this is a directory", shown, "name a file in it"));
    }
    let mut bytes = Vec::new();
    File::open(path).map_err(&unreadable)?.take(limit + 1).read_to_end(&mut bytes).map_err(&unreadable)?;
    if bytes.len() as u64 > limit {
        let what = format!("the file is larger than {} KiB", limit >> 10);
        return Err(Problem::new(what, shown, "name a text file of the expected kind, not weights or data"));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Problem::new("the file is not UTF-8 text", format!("{shown}, byte {at}"), "save it as UTF-8")
    })?;
    Ok(text.strip_prefix(BYTE_ORDER_MARK).map(str::to_owned).unwrap_or(text))
}
