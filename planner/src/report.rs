//! What the user sees: summary, tables of a plan, and the same facts as JSON.

pub mod inspect;
pub mod json;
pub mod summary;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};

/// A plain table: a header line, then rows; all columns but the first are right-aligned.
pub fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_preset(NOTHING).set_header(header.to_vec());
    rows.into_iter().for_each(|row| {
        table.add_row(row);
    });
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}
