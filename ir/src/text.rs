//! The text form of every file: RON with the same options everywhere, and errors with line and column.

use ron::Options;
use ron::error::Position;
use ron::extensions::Extensions;
use ron::ser::PrettyConfig;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use crate::error::{Error, Problem};

/// Deepest nesting of brackets accepted in a file.
const NESTING_LIMIT: usize = 64;
/// Most bytes of a word that an error repeats.
const WORD_LIMIT: usize = 40;

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
        let word = word_at(text, at);
        Error::Syntax(Problem::new(
            what_is_wrong(&error.code, word),
            format!("{origin}, line {}, column {}", at.line, at.col),
            help_for(&error.code, word),
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
    byte_hash(write_ron(value, 0).as_bytes())
}

/// SHA-256 of bytes, as 16 hexadecimal digits.
pub fn byte_hash(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

fn options() -> Options {
    Options::default().with_default_extension(Extensions::IMPLICIT_SOME).with_recursion_limit(NESTING_LIMIT)
}

/// The word or number at or after a place, or the one character there; at most `WORD_LIMIT` bytes long.
fn word_at(text: &str, at: Position) -> &str {
    let line = text.lines().nth(at.line.saturating_sub(1)).unwrap_or_default();
    let column = line.char_indices().nth(at.col.saturating_sub(1)).map_or(line.len(), |(place, _)| place);
    let place = line.len() - line[column..].trim_start().len();
    let in_word = |c: char| c.is_alphanumeric() || "_.+-".contains(c);
    let start = line[..place].trim_end_matches(in_word).len();
    let end = line.len() - line[place..].trim_start_matches(in_word).len();
    let word =
        if start < end { &line[start..end] } else { line[place..].split_inclusive(|_| true).next().unwrap_or("") };
    &word[..word.floor_char_boundary(WORD_LIMIT)]
}

/// The problem in the words of a model file, where the parser's own are those of Rust.
fn what_is_wrong(error: &ron::Error, word: &str) -> String {
    use ron::Error as E;
    match error {
        E::SuggestRawIdentifier(_) | E::ExpectedIdentifier => format!("expected a name or a unit, found `{word}`"),
        E::ExpectedString | E::ExpectedInteger | E::ExpectedFloat | E::ExpectedBoolean => {
            format!("{error}, found `{word}`")
        }
        E::ExpectedComma if is_number(word) => format!("`{word}` is no whole number"),
        E::IntegerOutOfBounds => format!("the number `{word}` is out of bounds"),
        E::MissingStructField { field, .. } => format!("the field `{field}` is missing"),
        E::DuplicateStructField { field, .. } => format!("the field `{field}` is given twice"),
        E::Eof => "the text ends too early".to_owned(),
        E::TrailingCharacters => "there is text after the end".to_owned(),
        E::ExceededRecursionLimit => format!("brackets are nested more than {NESTING_LIMIT} deep"),
        _ => error.to_string(),
    }
}

fn is_number(word: &str) -> bool {
    word.parse::<f64>().is_ok()
}

fn help_for(error: &ron::Error, word: &str) -> &'static str {
    use ron::Error as E;
    match error {
        E::NoSuchStructField { .. } => "remove the field or mend its spelling",
        E::NoSuchEnumVariant { .. } => "use one of the names listed",
        E::MissingStructField { .. } => "add the field; the files in examples/ and hardware-profiles/ show all of them",
        E::DuplicateStructField { .. } => "keep one of the two",
        E::ExpectedIdentifier | E::SuggestRawIdentifier(_) => {
            "a quantity carries its unit, as in GiB(80), Micros(10), Tokens(2048) or Sequences(2048)"
        }
        E::ExpectedNamedStructLike(_) | E::ExpectedStructLike | E::ExpectedDifferentStructName { .. } => {
            "write brackets, as in (size: 50257) or GiB(80); the files in examples/ show the format"
        }
        E::ExpectedDifferentLength { .. } => "a number carries its source, as in Datasheet(GiB(80), \"data sheet\")",
        E::ExpectedString => "put the text in double quotes",
        E::ExpectedInteger | E::ExpectedFloat => "give a number, without quotes",
        E::ExpectedBoolean => "give true or false",
        E::ExpectedComma if is_number(word) => "sizes are whole numbers without a fraction",
        E::ExpectedComma => "end each field with a comma, and put text in double quotes",
        E::Eof => "the file is cut short, or a bracket is not closed",
        E::TrailingCharacters => "remove what follows the last bracket",
        E::Message(_) => "give a number inside the stated limits",
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
