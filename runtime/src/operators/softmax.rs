//! Scale, causal mask, linear bias and softmax of attention scores as operators of their own.

use ir::graph::DimName;
use multiversion::multiversion;

use super::{Operand, Place, ResultShape, change_rows, vector};
use crate::tensor::{Dims, Tensor, size_of};

/// Scores `[…, key_sequence]` scaled, plus slope · key position if `alibi`, minus infinity above the diagonal.
pub fn scale_mask(scores: Operand, scale: f64, alibi: bool, result: &ResultShape) -> Tensor {
    let rows = Rows::new(&scores.tensor().dims);
    let (place, scale) = (result.place, scale as f32);
    change_rows(scores, rows.width, result, |row, numbers| {
        let slope = if alibi { rows.slope(row, &place) } else { 0.0 };
        mask(numbers, rows.open(row), scale, slope);
    })
}

/// The gradient of the scores.
pub fn scale_mask_gradient(gradient: Operand, scale: f64, result: &ResultShape) -> Tensor {
    let rows = Rows::new(&gradient.tensor().dims);
    let scale = scale as f32;
    change_rows(gradient, rows.width, result, |row, numbers| {
        let (open, closed) = numbers.split_at_mut(rows.open(row));
        vector::scale(open, scale);
        closed.fill(0.0);
    })
}

/// Softmax over the last dim, the key positions.
pub fn softmax(input: Operand, result: &ResultShape) -> Tensor {
    let width = input.tensor().extent(DimName::KeySequence);
    change_rows(input, width, result, |_, numbers| normalize(numbers))
}

/// The gradient of softmax's input: y · (dy − Σ y dy).
pub fn softmax_gradient(output: &Tensor, gradient: Operand, result: &ResultShape) -> Tensor {
    let width = output.extent(DimName::KeySequence);
    let output = output.values();
    change_rows(gradient, width, result, |row, dy| {
        let mut scratch = Vec::new();
        let y = output.read(row * width..(row + 1) * width, &mut scratch);
        differentiate(dy, y);
    })
}

/// Turns a row of the result's gradient into that of softmax's input.
pub fn differentiate(dy: &mut [f32], y: &[f32]) {
    let along = vector::dot(y, dy);
    vector::zip(dy, y, |dy, y| y * (dy - along));
}

/// Scale, bias and mask of a row: the first `open` columns can be seen.
#[multiversion(targets = "simd")]
pub fn mask(row: &mut [f32], open: usize, scale: f32, slope: f32) {
    let (open, closed) = row.split_at_mut(open);
    open.iter_mut().enumerate().for_each(|(column, x)| *x = *x * scale + slope * column as f32);
    closed.fill(f32::NEG_INFINITY);
}

/// Softmax of a row.
pub fn normalize(row: &mut [f32]) {
    let most = vector::maximum(row);
    let sum = vector::exponentials(row, most);
    vector::scale(row, 1.0 / sum);
}

/// Slope of an attention head (ALiBi, arXiv 2108.12409, section 3, and its published code for counts that
/// are no power of two).
pub fn slope(head: usize, heads: usize) -> f32 {
    let power = if heads.is_power_of_two() { heads } else { heads.next_power_of_two() / 2 };
    let of = |index: usize, count: usize| 2f64.powf(-8.0 * (index + 1) as f64 / count as f64) as f32;
    if head < power { of(head, power) } else { of(2 * (head - power), 2 * power) }
}

impl Place {
    /// Slope of the local key-value head's local query.
    pub(crate) fn slope(&self, head: usize, query: usize) -> f32 {
        let ((head_start, heads), (query_start, queries)) = (self.heads, self.queries);
        slope((head_start + head) * queries + query_start + query, heads * queries)
    }
}

/// Rows of scores, whose last dim is the key positions.
pub struct Rows {
    width: usize,
    /// Rows between neighbours along a dim, and its extent: positions, heads, queries of a head.
    positions: (usize, usize),
    heads: (usize, usize),
    queries: (usize, usize),
}

impl Rows {
    pub fn new(dims: &Dims) -> Rows {
        let width = dims.last().map_or(1, |(_, extent)| *extent);
        let of = |name| match dims.iter().position(|(dim, _)| *dim == name) {
            Some(place) => (size_of(&dims[place + 1..]) / width, dims[place].1),
            None => (1, 1),
        };
        let (positions, heads) = (of(DimName::Sequence), of(DimName::KeyValueHeads));
        Rows { width, positions, heads, queries: of(DimName::QueriesPerKeyValue) }
    }

    /// How many columns a row sees.
    pub fn open(&self, row: usize) -> usize {
        (row / self.positions.0 % self.positions.1 + 1).min(self.width)
    }

    pub fn slope(&self, row: usize, place: &Place) -> f32 {
        place.slope(row / self.heads.0 % self.heads.1, row / self.queries.0 % self.queries.1)
    }
}
