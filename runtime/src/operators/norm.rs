//! LayerNorm (arXiv 1607.06450) and RMSNorm (arXiv 1910.07467) over the last dim, and their gradients.
//!
//! Statistics are computed again in backward: a row is read anyway.

use ir::model::NormKind;
use multiversion::multiversion;

use super::parallel::{PIECE, map};
use super::vector::{self, sum_of, sum_of_pairs};
use super::{Operand, ResultShape, change_rows, in_format};
use crate::tensor::{Format, Tensor};

/// Mean to subtract, and reciprocal deviation.
#[derive(Clone, Copy, Debug)]
pub struct Moments {
    /// The mean; 0 for RMSNorm.
    pub mean: f32,
    /// One over the root of the variance.
    pub scale: f32,
}

/// The moments of a row.
#[inline(always)]
pub fn moments(kind: NormKind, row: &[f32], epsilon: f32) -> Moments {
    let count = row.len() as f32;
    let mean = match kind {
        NormKind::LayerNorm => sum_of(row, |x| x) / count,
        NormKind::RmsNorm => 0.0,
    };
    let variance = sum_of(row, |x| (x - mean) * (x - mean)) / count;
    Moments { mean, scale: 1.0 / (variance + epsilon).sqrt() }
}

/// (x − mean) · scale · weight + bias, in place.
#[multiversion(targets = "simd")]
pub fn normalize(kind: NormKind, row: &mut [f32], weight: &[f32], bias: Option<&[f32]>, epsilon: f32) {
    let Moments { mean, scale } = moments(kind, row, epsilon);
    match bias {
        Some(bias) => {
            for ((x, weight), bias) in row.iter_mut().zip(weight).zip(bias) {
                *x = (*x - mean) * scale * weight + bias;
            }
        }
        None => row.iter_mut().zip(weight).for_each(|(x, weight)| *x = (*x - mean) * scale * weight),
    }
}

/// The norm of each row.
pub fn norm(
    (kind, epsilon): (NormKind, f64),
    input: Operand,
    weight: &Tensor,
    bias: Option<&Tensor>,
    result: &ResultShape,
) -> Tensor {
    let epsilon = epsilon as f32;
    let (mut scratch, mut bias_scratch) = (Vec::new(), Vec::new());
    let width = weight.len();
    let weight = weight.values().read(0..width, &mut scratch);
    let bias = bias.map(|bias| bias.values().read(0..width, &mut bias_scratch));
    change_rows(input, width, result, |_, row| normalize(kind, row, weight, bias, epsilon))
}

/// The gradient of the input: scale · (g − mean g − u · mean(g u)), with u the normalized input and g the
/// gradient times the weight; RMSNorm subtracts no mean.
pub fn input_gradient(
    (kind, epsilon): (NormKind, f64),
    input: &Tensor,
    weight: &Tensor,
    gradient: Operand,
    result: &ResultShape,
) -> Tensor {
    let epsilon = epsilon as f32;
    let mut scratch = Vec::new();
    let width = weight.len();
    let weight = weight.values().read(0..width, &mut scratch);
    let input = input.values();
    change_rows(gradient, width, result, |at, row| {
        let mut scratch = Vec::new();
        let x = input.read(at * width..(at + 1) * width, &mut scratch);
        differentiate(kind, x, weight, row, epsilon);
    })
}

/// Turns a row of the result's gradient into that of the input.
#[multiversion(targets = "simd")]
pub fn differentiate(kind: NormKind, x: &[f32], weight: &[f32], row: &mut [f32], epsilon: f32) {
    let count = row.len() as f32;
    let Moments { mean, scale } = moments(kind, x, epsilon);
    row.iter_mut().zip(weight).for_each(|(g, weight)| *g *= weight);
    let level = if kind == NormKind::LayerNorm { sum_of(row, |g| g) / count } else { 0.0 };
    let along = sum_of_pairs(row, x, |g, x| g * (x - mean)) * scale * scale / count;
    row.iter_mut().zip(x).for_each(|(g, x)| *g = scale * (*g - level - (x - mean) * along));
}

/// The gradient of the weight: the sum over rows of normalized input times gradient.
pub fn weight_gradient(
    (kind, epsilon): (NormKind, f64),
    input: &Tensor,
    gradient: &Tensor,
    result: &ResultShape,
) -> Tensor {
    let epsilon = epsilon as f32;
    let (width, rows) = (result.len(), gradient.len() / result.len());
    let (input, gradient) = (input.values(), gradient.values());
    sum_rows(width, rows, result, |at, sums| {
        let (mut scratch, mut gradient_scratch) = (Vec::new(), Vec::new());
        let x = input.read(at * width..(at + 1) * width, &mut scratch);
        let dy = gradient.read(at * width..(at + 1) * width, &mut gradient_scratch);
        add_product(kind, sums, x, dy, epsilon);
    })
}

/// Adds normalized input times gradient.
#[multiversion(targets = "simd")]
pub fn add_product(kind: NormKind, sums: &mut [f32], x: &[f32], dy: &[f32], epsilon: f32) {
    let Moments { mean, scale } = moments(kind, x, epsilon);
    for ((sum, x), dy) in sums.iter_mut().zip(x).zip(dy) {
        *sum += (x - mean) * scale * dy;
    }
}

/// The sum over rows of what `add` adds for each: blocks of rows first, then the blocks in order.
pub fn sum_rows(width: usize, rows: usize, result: &ResultShape, add: impl Fn(usize, &mut [f32]) + Sync) -> Tensor {
    let block = (PIECE / width).max(1);
    let blocks = map(rows.div_ceil(block), rows * width, |index| {
        let mut sums = vec![0.0; width];
        (index * block..rows.min((index + 1) * block)).for_each(|row| add(row, &mut sums));
        sums
    });
    let mut total = Tensor::zeros(result.memory, result.dims, Format::Single);
    for sums in blocks {
        vector::add(total.singles_mut(), &sums);
    }
    in_format(total, result)
}
