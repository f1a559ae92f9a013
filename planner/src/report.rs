//! What the user sees: summary, tables of a plan, and the same facts as JSON.

pub mod advice;
pub mod calibration;
pub mod comparison;
pub mod inspect;
pub mod json;
mod layout;
pub mod program;
pub mod score;
pub mod summary;
pub mod sweep;
pub mod validation;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};

/// Seconds of a minute.
const MINUTE: f64 = 60.0;
/// Seconds of an hour.
const HOUR: f64 = 3_600.0;
/// Seconds of a day.
const DAY: f64 = 86_400.0;
/// Joules of a kilowatt-hour.
const KILOWATT_HOUR: f64 = 3.6e6;
/// Joules of a megawatt-hour.
const MEGAWATT_HOUR: f64 = 3.6e9;

/// Width of text; tables may be wider.
const WIDTH: usize = 112;

/// A number with three digits, or with all before its point.
fn amount(value: f64) -> String {
    let decimals = match value {
        value if value >= 100.0 || value == 0.0 => 0,
        value if value.is_normal() => (2.0 - value.abs().log10().floor()) as usize,
        _ => 0,
    };
    format!("{value:.decimals$}")
}

/// Lines of at most [`WIDTH`] characters, all but the first indented, each with its end.
fn paragraph(text: &str) -> String {
    textwrap::fill(text, textwrap::Options::new(WIDTH).subsequent_indent("  ")) + "\n"
}

/// The same for lists of names, which are not broken at their hyphens.
fn list_paragraph(text: &str) -> String {
    let options = textwrap::Options::new(WIDTH).subsequent_indent("  ");
    textwrap::fill(text, options.word_splitter(textwrap::WordSplitter::NoHyphenation)) + "\n"
}

/// A plain table: a header line, then rows. Columns of numbers are right-aligned, columns of words left.
pub fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let rows: Vec<Vec<String>> = rows.into_iter().collect();
    let number = |c: char| c.is_ascii_digit() || "+-".contains(c);
    let numeric = |column: usize| rows.iter().all(|row| row[column].starts_with(number));
    let numbers: Vec<bool> = (0..header.len()).map(numeric).collect();
    let mut table = Table::new();
    table.load_preset(NOTHING).set_header(header.to_vec());
    rows.into_iter().for_each(|row| {
        table.add_row(row);
    });
    for (column, numbers) in table.column_iter_mut().zip(numbers) {
        column.set_cell_alignment(if numbers { CellAlignment::Right } else { CellAlignment::Left });
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}
