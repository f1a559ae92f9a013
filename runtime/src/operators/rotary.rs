//! Rotary position embedding (RoFormer, arXiv 2104.09864): pairs (i, i + width/2) of a head are turned.

use ir::graph::DimName;
use ir::rotary::{RotaryScaling, rotary_frequencies};

use super::{Operand, ResultShape, change_rows};
use crate::tensor::Tensor;
use crate::tensor::size_of;

/// Turns each head's pairs by position · frequency; `direction` −1 turns back.
pub fn rotary(
    input: Operand,
    direction: f64,
    base: f64,
    scaling: Option<RotaryScaling>,
    result: &ResultShape,
) -> Tensor {
    let width = input.tensor().extent(DimName::HeadDim);
    // Rows are heads: all dims but the last.
    let (positions, rows_between) = positions_of(&input.tensor().dims, width);
    let frequencies = rotary_frequencies(base, scaling, width);
    let turns = turns(positions, direction, &frequencies);
    change_rows(input, width, result, |row, head| {
        let position = row / rows_between % positions;
        let turns = &turns[position * width..(position + 1) * width];
        let ((cosines, sines), (first, second)) = (turns.split_at(width / 2), head.split_at_mut(width / 2));
        for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    })
}

/// Positions of a sequence in a tensor of heads, and the heads from one position to the next.
pub(crate) fn positions_of(dims: &[(DimName, usize)], width: usize) -> (usize, usize) {
    let is_position = |name: DimName| name == DimName::Sequence || name == DimName::KeySequence;
    let place = dims.iter().position(|(name, _)| is_position(*name));
    place.map_or((1, 1), |place| (dims[place].1, size_of(&dims[place + 1..]) / width))
}

/// For each position the cosines of its pairs' angles, then the sines.
pub(crate) fn turns(positions: usize, direction: f64, frequencies: &[f64]) -> Vec<f32> {
    let width = 2 * frequencies.len();
    let mut turns = Vec::with_capacity(positions * width);
    for position in 0..positions {
        let angles = frequencies.iter().map(|frequency| direction * position as f64 * frequency);
        turns.extend(angles.clone().map(|angle| angle.cos() as f32));
        turns.extend(angles.map(|angle| angle.sin() as f32));
        turns.resize((position + 1) * width, 0.0);
    }
    turns
}
