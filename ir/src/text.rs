//! The text form of every file: RON with the same options everywhere, and errors with line and column.

use ron::Options;
use ron::extensions::Extensions;
use ron::ser::PrettyConfig;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use crate::error::{Error, Problem};

/// Deepest nesting of brackets accepted in a file.
const NESTING_LIMIT: usize = 64;

/// Reads a value from RON text; `origin` names the text in errors (a file name).
///
/// # Errors
/// `Error::Syntax` with the line and column of the first problem.
pub fn read_ron<T: DeserializeOwned>(text: &str, origin: &str) -> Result<T, Error> {
    if text.trim().is_empty() {
        return Err(Error::Syntax(Problem::new(
            "the file is empty",
            origin,
            "start from one of the files in examples/ or hardware-profiles/",
        )));
    }
    options().from_str(text).map_err(|error| {
        let at = error.span.start;
        Error::Syntax(Problem::new(
            error.code.to_string(),
            format!("{origin}, line {}, column {}", at.line, at.col),
            help_for(&error.code),
        ))
    })
}

/// Writes a value as RON text, one field a line down to `depth` levels; ends with a newline.
pub fn write_ron<T: Serialize>(value: &T, depth: usize) -> String {
    let pretty = PrettyConfig::new().depth_limit(depth).indentor("  ").struct_names(false);
    let mut text =
        options().to_string_pretty(value, pretty).expect("plain data with string keys always has a RON form");
    text.push('\n');
    text
}

/// SHA-256 of a value's canonical text, as 16 hexadecimal digits: equal values, equal hash.
pub fn content_hash<T: Serialize>(value: &T) -> String {
    let digest = Sha256::digest(write_ron(value, 0).as_bytes());
    digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

fn options() -> Options {
    Options::default().with_default_extension(Extensions::IMPLICIT_SOME).with_recursion_limit(NESTING_LIMIT)
}

fn help_for(error: &ron::Error) -> &'static str {
    use ron::Error as E;
    match error {
        E::NoSuchStructField { .. } => "remove the field or mend its spelling",
        E::NoSuchEnumVariant { .. } => "use one of the names listed",
        E::MissingStructField { .. } => "add the field; the files in examples/ and hardware-profiles/ show all of them",
        E::DuplicateStructField { .. } => "keep one of the two",
        E::ExpectedIdentifier
        | E::ExpectedNamedStructLike(_)
        | E::ExpectedStructLike
        | E::ExpectedDifferentStructName { .. } => {
            "a quantity carries its unit, as in GiB(80), Micros(10), Tokens(2048) or Sequences(2048)"
        }
        E::IntegerOutOfBounds => "sizes are whole numbers from 1 to 2^63",
        E::ExceededRecursionLimit => "nest brackets less deeply",
        E::InvalidValueForType { .. } => "sizes are whole numbers without a sign or a fraction",
        _ => "mend the text at this place; the files in examples/ show the format",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_line_and_column() {
        let error = read_ron::<Vec<u32>>("[1,\n 2, x]", "a.ron").expect_err("x is no number");
        assert_eq!(error.problems()[0].location, "a.ron, line 2, column 5");
    }

    #[test]
    fn deep_nesting_is_an_error() {
        let text = "[".repeat(100_000);
        assert!(read_ron::<ron::Value>(&text, "deep.ron").is_err());
    }

    #[test]
    fn hashes_depend_on_the_value_only() {
        assert_eq!(content_hash(&vec![1, 2]), content_hash(&[1, 2].to_vec()));
        assert_ne!(content_hash(&vec![1, 2]), content_hash(&vec![2, 1]));
    }
}
