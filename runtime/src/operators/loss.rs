//! The target's element along the vocabulary.

use ir::graph::DimName;

use super::rows::own_row;
use super::{ResultShape, fill_rows};
use crate::tensor::Tensor;

/// The element of each row that the ids name; zero if another rank holds it.
pub fn pick(values: &Tensor, ids: &Tensor, result: &ResultShape) -> Tensor {
    let width = values.extent(DimName::Vocabulary);
    let (values, ids) = (values.values(), ids.ids());
    fill_rows(1, result, |token, picked| {
        let column = own_row(ids[token], result.place.vocabulary_start, width);
        picked[0] = column.map_or(0.0, |column| values.at(token * width + column));
    })
}

/// Zeros with the gradient where the ids say; one gradient may serve all rows.
pub fn pick_gradient(ids: &Tensor, gradient: &Tensor, result: &ResultShape) -> Tensor {
    let width = result.dims.last().map_or(1, |(_, extent)| *extent);
    let step = usize::from(gradient.len() > 1);
    let (gradient, ids) = (gradient.values(), ids.ids());
    fill_rows(width, result, |token, numbers| {
        numbers.fill(0.0);
        if let Some(column) = own_row(ids[token], result.place.vocabulary_start, width) {
            numbers[column] = gradient.at(token * step);
        }
    })
}
