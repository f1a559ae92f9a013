//! Sums and maxima over the dims that the result lacks.

use super::norm::sum_rows;
use super::{ResultShape, in_format, parallel, vector};
use crate::tensor::{Dims, Format, Tensor, strides};

/// Which dims of an operand a reduction keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    /// The last ones, in order.
    Last,
    /// The first ones, in order.
    First,
    /// Others.
    Scattered,
}

/// Sum over the dims that the result lacks; over everything in fp64.
pub fn sum(operand: &Tensor, result: &ResultShape) -> Tensor {
    let (values, width) = (operand.values(), result.len());
    match kept(&operand.dims, result.dims) {
        _ if width == 1 => {
            let mut scratch = Vec::new();
            let total: f64 = values.read(0..operand.len(), &mut scratch).iter().map(|x| f64::from(*x)).sum();
            Tensor::from_numbers(result.memory, result.dims, result.format, &[total as f32])
        }
        Kept::Last if width >= parallel::PIECE => sum_few(operand, result),
        Kept::Last => sum_rows(width, operand.len() / width, result, |row, sums| {
            let mut scratch = Vec::new();
            let numbers = values.read(row * width..(row + 1) * width, &mut scratch);
            vector::add(sums, numbers);
        }),
        Kept::First => along_rows(operand, result, vector::sum),
        Kept::Scattered => scattered(operand, result, 0.0, |sum, x| *sum += x),
    }
}

/// Maximum over the dims that the result lacks.
pub fn maximum(operand: &Tensor, result: &ResultShape) -> Tensor {
    match kept(&operand.dims, result.dims) {
        Kept::First => along_rows(operand, result, vector::maximum),
        _ => scattered(operand, result, f32::NEG_INFINITY, |best, x| *best = best.max(x)),
    }
}

/// A sum of a few long rows.
fn sum_few(operand: &Tensor, result: &ResultShape) -> Tensor {
    let (values, width) = (operand.values(), result.len());
    let mut target = result.stale();
    parallel::for_each_piece(target.values_mut(), 1, |start, mut piece| {
        let all = 0..piece.len();
        piece.update(all.clone(), &mut Vec::new(), |sums| {
            let mut scratch = Vec::new();
            values.copy_to(start, sums);
            for row in 1..operand.len() / width {
                let from = row * width + start;
                let numbers = values.read(from..from + sums.len(), &mut scratch);
                vector::add(sums, numbers);
            }
        });
    });
    target
}

fn along_rows(operand: &Tensor, result: &ResultShape, f: impl Fn(&[f32]) -> f32 + Sync) -> Tensor {
    let width = operand.len() / result.len();
    let values = operand.values();
    let mut target = result.stale();
    let block = (parallel::PIECE / width).max(1);
    let rows = parallel::map(result.len().div_ceil(block), operand.len(), |index| {
        let mut scratch = Vec::new();
        let rows = index * block..result.len().min((index + 1) * block);
        rows.map(|row| f(values.read(row * width..(row + 1) * width, &mut scratch))).collect::<Vec<f32>>()
    });
    let mut rows = rows.into_iter().flatten();
    let all = 0..target.len();
    target.values_mut().update(all, &mut Vec::new(), |numbers| {
        numbers.iter_mut().zip(&mut rows).for_each(|(number, row)| *number = row);
    });
    target
}

fn scattered(operand: &Tensor, result: &ResultShape, start: f32, f: impl Fn(&mut f32, f32)) -> Tensor {
    let mut total = Tensor::stale(result.memory, result.dims, Format::Single);
    total.singles_mut().fill(start);
    let to = strides(result.dims, &operand.dims);
    let (values, numbers) = (operand.values(), total.singles_mut());
    for place in 0..operand.len() {
        let (mut rest, mut at) = (place, 0);
        for (stride, (_, extent)) in to.iter().zip(&operand.dims).rev() {
            at += rest % extent * stride;
            rest /= extent;
        }
        f(&mut numbers[at], values.at(place));
    }
    in_format(total, result)
}

fn kept(operand: &Dims, result: &Dims) -> Kept {
    let of = |dims: &Dims| -> Vec<_> { dims.iter().copied().filter(|(_, extent)| *extent != 1).collect() };
    let (operand, result) = (of(operand), of(result));
    if operand.ends_with(&result) {
        Kept::Last
    } else if operand.starts_with(&result) {
        Kept::First
    } else {
        Kept::Scattered
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::size_of;
    use ir::graph::DimName::{Hidden, MicroBatch, Sequence};

    #[test]
    fn kept_dims_are_found_whatever_dims_of_one_say() {
        let operand = [(MicroBatch, 1), (Sequence, 4), (Hidden, 5)];
        let rows: [(&Dims, Kept); 5] = [
            (&[(Hidden, 5)], Kept::Last),
            (&[(Sequence, 4)], Kept::First),
            (&[(MicroBatch, 1), (Sequence, 4)], Kept::First),
            (&[(MicroBatch, 1)], Kept::Last),
            (&[(Hidden, 5), (Sequence, 4)], Kept::Scattered),
        ];
        for (result, expected) in rows {
            assert_eq!(kept(&operand, result), expected, "{result:?}");
            assert_eq!(size_of(&operand) % size_of(result), 0);
        }
    }
}
