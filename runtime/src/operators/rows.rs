//! Rows of tables that ids select, and columns that padding added.

use ir::graph::DimName;

use super::{Operand, ResultShape, change_rows, fill_rows, in_format, vector};
use crate::tensor::{Dims, Format, Tensor};

/// Rows of a table `[rows, hidden]`; a row that another rank holds is zero.
pub fn lookup(ids: &Tensor, table: &Tensor, result: &ResultShape) -> Tensor {
    let width = table.extent(DimName::Hidden);
    let (rows, start) = (table.len() / width, row_start(&table.dims, result));
    let (ids, values) = (ids.ids(), table.values());
    fill_rows(width, result, |token, numbers| match own_row(ids[token], start, rows) {
        Some(row) => values.copy_to(row * width, numbers),
        None => numbers.fill(0.0),
    })
}

/// A zero table increased by rows of the gradient.
pub fn lookup_gradient(ids: &Tensor, gradient: &Tensor, result: &ResultShape) -> Tensor {
    let mut table = Tensor::zeros(result.memory, result.dims, Format::Single);
    add_rows(ids, gradient, &mut table, result);
    in_format(table, result)
}

/// Adds rows of a gradient to those of an fp32 table that the ids name, in the order of tokens.
pub fn add_rows(ids: &Tensor, gradient: &Tensor, table: &mut Tensor, result: &ResultShape) {
    let width = gradient.extent(DimName::Hidden);
    let (rows, start) = (table.len() / width, row_start(&table.dims, result));
    let values = gradient.values();
    let table = table.singles_mut();
    let mut scratch = Vec::new();
    for (token, id) in ids.ids().iter().enumerate() {
        if let Some(row) = own_row(*id, start, rows) {
            let numbers = values.read(token * width..(token + 1) * width, &mut scratch);
            vector::add(&mut table[row * width..(row + 1) * width], numbers);
        }
    }
}

/// The same numbers with minus infinity in the vocabulary's columns from the given one on.
pub fn mask_columns(input: Operand, columns: usize, result: &ResultShape) -> Tensor {
    let width = input.tensor().extent(DimName::Vocabulary);
    let kept = columns.saturating_sub(result.place.vocabulary_start).min(width);
    change_rows(input, width, result, |_, numbers| numbers[kept..].fill(f32::NEG_INFINITY))
}

/// The rank's row of an id.
pub fn own_row(id: u32, start: usize, rows: usize) -> Option<usize> {
    (id as usize).checked_sub(start).filter(|row| *row < rows)
}

/// First row that the rank holds: tables of positions are whole.
fn row_start(table: &Dims, result: &ResultShape) -> usize {
    let vocabulary = table.iter().any(|(name, _)| *name == DimName::Vocabulary);
    if vocabulary { result.place.vocabulary_start } else { 0 }
}
