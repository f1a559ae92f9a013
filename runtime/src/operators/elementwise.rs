//! Elementwise operators with broadcasting by dim name, in place where the first operand may be reused.

use super::{Operand, ResultShape, parallel, vector};
use crate::tensor::{Dims, Tensor, Values, size_of, strides};

/// Part of an operand along a row of the result.
#[derive(Clone, Copy, Debug)]
pub enum Row<'a> {
    /// One number for each of the result's.
    Numbers(&'a [f32]),
    /// The same number everywhere.
    Constant(f32),
}

/// How an operand is read along the result's rows.
pub struct Reading<'a> {
    values: Values<'a>,
    /// Strides of the dims outside a row.
    outer: Vec<usize>,
    /// Whether the operand lacks all dims inside a row.
    constant: bool,
}

/// The most numbers that are computed at once.
const SEGMENT: usize = 1 << 12;

/// The result of `f`, which finds the numbers of the first operand and changes them; the others are handed in.
pub fn fold<const N: usize>(
    first: Operand,
    others: [&Tensor; N],
    result: &ResultShape,
    f: impl Fn(&mut [f32], [Row; N]) + Sync,
) -> Tensor {
    let (mut target, first) = match first.reusable(result) {
        Ok(target) => (target, None),
        Err(first) => (Tensor::stale(result.memory, result.dims, result.format), Some(first)),
    };
    let first = first.as_ref().map(Operand::tensor);
    let split = split(first.iter().copied().chain(others), result.dims);
    let width = size_of(&result.dims[split..]).max(1);
    let first = first.map(|first| Reading::new(first, split, result.dims));
    let others = others.map(|other| Reading::new(other, split, result.dims));
    let read = |start: usize, mut values: crate::tensor::ValuesMut| {
        let (mut own, mut scratch) = (Vec::new(), [const { Vec::new() }; N]);
        let mut copied = Vec::new();
        let mut place = 0;
        while place < values.len() {
            let (row, column) = ((start + place) / width, (start + place) % width);
            let length = SEGMENT.min(width - column).min(values.len() - place);
            let mut buffers = scratch.each_mut().into_iter();
            let rows = others.each_ref().map(|other| {
                let buffer = buffers.next().expect("as many buffers as operands");
                other.row(row, column, length, result.dims, buffer)
            });
            let before = first.as_ref().map(|first| first.row(row, column, length, result.dims, &mut copied));
            let range = place..place + length;
            match before {
                None => values.update(range, &mut own, |numbers| f(numbers, rows)),
                Some(before) => values.write(range, &mut own, |numbers| {
                    match before {
                        Row::Numbers(before) => numbers.copy_from_slice(before),
                        Row::Constant(before) => numbers.fill(before),
                    }
                    f(numbers, rows);
                }),
            }
            place += length;
        }
    };
    parallel::for_each_piece(target.values_mut(), 1, read);
    target
}

/// An elementwise function of one operand.
pub fn map(operand: Operand, result: &ResultShape, f: impl Fn(f32) -> f32 + Sync) -> Tensor {
    fold(operand, [], result, |numbers, []| vector::map(numbers, &f))
}

/// An elementwise function of two operands.
pub fn zip(first: Operand, second: &Tensor, result: &ResultShape, f: impl Fn(f32, f32) -> f32 + Sync) -> Tensor {
    fold(first, [second], result, |numbers, [other]| match other {
        Row::Numbers(other) => vector::zip(numbers, other, &f),
        Row::Constant(other) => vector::map(numbers, |number| f(number, other)),
    })
}

/// An elementwise function of two operands either of which may be reused.
pub fn zip_either(a: Operand, b: Operand, result: &ResultShape, f: impl Fn(f32, f32) -> f32 + Sync) -> Tensor {
    let (mut a, b) = (a, b);
    match a.is_reusable(result) || a.tensor().len() == result.len() && !matches!(b, Operand::Owned(_)) {
        true => zip(a, b.tensor(), result, f),
        false => zip(b, a.tensor(), result, |b, a| f(a, b)),
    }
}

impl<'a> Reading<'a> {
    pub fn new(operand: &'a Tensor, split: usize, dims: &Dims) -> Reading<'a> {
        let own = strides(&operand.dims, dims);
        let inner = own[split..].iter().zip(&dims[split..]);
        let constant = inner.clone().all(|(stride, (_, extent))| *stride == 0 || *extent == 1);
        Reading { values: operand.values(), outer: own[..split].to_vec(), constant }
    }

    #[inline(always)]
    pub fn row<'s>(&self, row: usize, column: usize, length: usize, dims: &Dims, scratch: &'s mut Vec<f32>) -> Row<'s>
    where
        'a: 's,
    {
        let start = self.start(row, dims);
        match self.constant {
            true => Row::Constant(self.values.at(start)),
            false => Row::Numbers(self.values.read(start + column..start + column + length, scratch)),
        }
    }

    #[inline(always)]
    fn start(&self, mut row: usize, dims: &Dims) -> usize {
        let mut start = 0;
        for (stride, (_, extent)) in self.outer.iter().zip(dims).rev() {
            start += row % extent * stride;
            row /= extent;
        }
        start
    }
}

/// The first of the dims that make up a row: along a row, each operand either has all dims, in order, or none.
fn split<'a>(operands: impl Iterator<Item = &'a Tensor>, dims: &Dims) -> usize {
    let longest = |operand: &Tensor| {
        let own = strides(&operand.dims, dims);
        let fits = |from: usize, absent: bool| {
            (from..dims.len()).all(|place| match absent {
                true => own[place] == 0 || dims[place].1 == 1,
                false => own[place] == size_of(&dims[place + 1..]) || dims[place].1 == 1,
            })
        };
        (0..=dims.len()).find(|from| fits(*from, true) || fits(*from, false)).unwrap_or(dims.len())
    };
    operands.map(longest).max().unwrap_or(0)
}
