//! A run computed row by row.

use ir::program::{Op, ValueId};
use rayon::prelude::*;

use super::{LocalShape, Run, Source, Step};
use crate::operators::dropout::Mask;
use crate::operators::elementwise::{Reading, Row};
use crate::operators::rows::own_row;
use crate::operators::{Dropping, Operand, Place, activation, exponential, norm, parallel, softmax, vector};
use crate::tensor::{Format, Memory, Tensor, ValuesMut, size_of};

/// The width of the rows in which a run can be computed, if it can.
///
/// Rows lie along the last dim of the largest result. Every result holds all rows, or one number for each;
/// every operand of a row operator is such a value or the same for several rows.
pub fn width(steps: &[Step], outside: &[LocalShape]) -> Option<usize> {
    let largest = steps.iter().max_by_key(|step| size_of(&step.shape.dims))?;
    let dims = &largest.shape.dims;
    let (&(last, width), rows) = dims.split_last()?;
    let whole = |shape: &LocalShape| shape.dims == *dims;
    let fits = |shape: &LocalShape| whole(shape) || shape.dims == rows;
    // An operand has the last dim at its end, or not at all.
    let readable = |shape: &LocalShape| {
        let place = shape.dims.iter().position(|(name, _)| *name == last);
        place.is_none_or(|place| place + 1 == shape.dims.len() && shape.dims[place].1 == width)
    };
    let of = |source: &Source| match source {
        Source::Outside(operand) => &outside[*operand],
        Source::Step(earlier) => &steps[*earlier].shape,
    };
    let computable = |step: &Step| match step.op {
        Op::Add | Op::Subtract | Op::Multiply | Op::Divide => true,
        Op::Gelu | Op::Silu | Op::Exp | Op::Cast | Op::Scale(_) | Op::Dropout(_) => {
            whole(of(&step.operands[0])) == whole(&step.shape)
        }
        Op::Norm { .. } | Op::Softmax => whole(of(&step.operands[0])),
        Op::ScaleMask { .. } | Op::ScaleMaskGradient { .. } => whole(of(&step.operands[0])),
        Op::SoftmaxGradient => step.operands.iter().all(|source| whole(of(source))),
        Op::ReduceSum => whole(of(&step.operands[0])) && step.shape.dims == rows,
        Op::PickGradient => matches!(step.operands[0], Source::Outside(_)) && of(&step.operands[0]).dims == rows,
        _ => false,
    };
    let sound = steps.iter().all(|step| fits(&step.shape) && computable(step)) && outside.iter().all(readable);
    sound.then_some(width)
}

/// What all rows of a run share.
struct Shared<'a> {
    run: &'a Run,
    operands: Vec<(&'a Tensor, Reading<'a>)>,
    /// Of each step that drops something.
    masks: Vec<Option<Mask>>,
    dims: Vec<(ir::graph::DimName, usize)>,
    width: usize,
}

/// Rows of one thread: a buffer for each step, and for each operand of a step.
struct Buffers {
    steps: Vec<Vec<f32>>,
    operands: Vec<Vec<f32>>,
}

/// Computes a run in rows.
pub fn apply(
    run: &Run,
    width: usize,
    operands: &[Operand],
    memory: &Memory,
    dropping: Option<Dropping>,
) -> Vec<(ValueId, Tensor)> {
    let largest = run.steps.iter().max_by_key(|step| size_of(&step.shape.dims)).expect("a run has steps");
    let dims = largest.shape.dims.clone();
    let rows = size_of(&dims) / width;
    let tensors = operands.iter().map(Operand::tensor);
    let readings = tensors.map(|tensor| (tensor, Reading::new(tensor, dims.len() - 1, &dims))).collect();
    let mask = |step: &Step| match step.op {
        Op::Dropout(site) => Mask::of(site, &step.shape.dims, &Place { dropping, ..step.place }),
        _ => None,
    };
    let shared = Shared { run, operands: readings, masks: run.steps.iter().map(mask).collect(), dims, width };
    let kept: Vec<usize> = (0..run.steps.len()).filter(|step| run.steps[*step].kept).collect();
    let stale = |step: &usize| {
        let LocalShape { dims, format } = &run.steps[*step].shape;
        Tensor::stale(memory, dims, *format)
    };
    let mut targets: Vec<Tensor> = kept.iter().map(stale).collect();
    let block = (parallel::PIECE / width).max(1);
    let mut blocks: Vec<(usize, Vec<ValuesMut>)> = (0..rows.div_ceil(block)).map(|at| (at * block, vec![])).collect();
    for target in &mut targets {
        let row = target.len() / rows;
        blocks.iter_mut().zip(target.values_mut().pieces(block * row)).for_each(|((_, parts), part)| parts.push(part));
    }
    let work = |(start, parts): (usize, Vec<ValuesMut>)| shared.compute(start, rows.min(start + block), &kept, parts);
    match parallel::is_shared(rows * width) {
        true => blocks.into_par_iter().for_each(work),
        false => blocks.into_iter().for_each(work),
    }
    kept.into_iter().zip(targets).map(|(step, target)| (run.steps[step].value, target)).collect()
}

impl Shared<'_> {
    fn compute(&self, start: usize, end: usize, kept: &[usize], mut parts: Vec<ValuesMut>) {
        let length = |step: &Step| if step.shape.dims.len() == self.dims.len() { self.width } else { 1 };
        let steps = self.run.steps.iter().map(|step| vec![0.0; length(step)]).collect();
        let mut buffers = Buffers { steps, operands: vec![Vec::new(); 3] };
        let mut scratch = Vec::new();
        for row in start..end {
            for at in (0..self.run.steps.len()).filter(|at| !self.passes_on(*at)) {
                self.step(row, at, &mut buffers);
            }
            for (at, part) in kept.iter().zip(&mut parts) {
                let found = &buffers.steps[*at];
                let place = (row - start) * found.len();
                part.write(place..place + found.len(), &mut scratch, |numbers| numbers.copy_from_slice(found));
            }
        }
    }

    /// Whether a step is a dropout that drops nothing: what reads it reads its operand.
    fn passes_on(&self, step: usize) -> bool {
        let Step { op, kept, .. } = &self.run.steps[step];
        matches!(op, Op::Dropout(_)) && self.masks[step].is_none() && !kept
    }

    /// Where the numbers of a source come from.
    fn origin(&self, source: Source) -> Source {
        match source {
            Source::Step(step) if self.passes_on(step) => self.origin(self.run.steps[step].operands[0]),
            other => other,
        }
    }

    /// Computes a row of a step's result into its buffer.
    fn step(&self, row: usize, at: usize, buffers: &mut Buffers) {
        let step = &self.run.steps[at];
        let (earlier, later) = buffers.steps.split_at_mut(at);
        let into = later[0].as_mut_slice();
        let mut scratch = buffers.operands.iter_mut();
        let mut rows: [Option<Row>; 3] = [None; 3];
        for (place, source) in step.operands.iter().enumerate() {
            let scratch = scratch.next().expect("an operand's buffer");
            rows[place] = match self.origin(*source) {
                Source::Step(earlier_step) => Some(row_of(&earlier[earlier_step], self.width)),
                Source::Outside(operand) if self.operands[operand].0.format() != Format::Index => {
                    Some(self.operands[operand].1.row(row, 0, self.width, &self.dims, scratch))
                }
                Source::Outside(_) => None,
            };
        }
        let first = rows[0];
        if let (Some(first), false) = (first, matches!(step.op, Op::ReduceSum | Op::PickGradient | Op::SoftmaxGradient))
        {
            copy(first, into);
        }
        match (step.op, rows[1], rows[2]) {
            (Op::Add, Some(other), _) => combine(into, other, |a, b| a + b),
            (Op::Subtract, Some(other), _) => combine(into, other, |a, b| a - b),
            (Op::Multiply, Some(other), _) => combine(into, other, |a, b| a * b),
            (Op::Divide, Some(other), _) => combine(into, other, |a, b| a / b),
            (Op::Gelu, ..) => vector::map(into, activation::gelu),
            (Op::Silu, ..) => vector::map(into, activation::silu),
            (Op::Exp, ..) => vector::map(into, exponential::exp),
            (Op::Scale(factor), ..) => vector::scale(into, factor as f32),
            (Op::Dropout(_), ..) => {
                if let Some(mask) = &self.masks[at] {
                    mask.apply(row * self.width, into);
                }
            }
            (Op::Norm { kind, epsilon }, Some(Row::Numbers(weight)), bias) => {
                let bias = bias.map(numbers);
                norm::normalize(kind, into, weight, bias, epsilon as f32);
            }
            (Op::ScaleMask { scale, alibi }, ..) => {
                let rows = softmax::Rows::new(&step.shape.dims);
                let slope = if alibi { rows.slope(row, &step.place) } else { 0.0 };
                softmax::mask(into, rows.open(row), scale as f32, slope);
            }
            (Op::ScaleMaskGradient { scale }, ..) => {
                let (open, closed) = into.split_at_mut(softmax::Rows::new(&step.shape.dims).open(row));
                vector::scale(open, scale as f32);
                closed.fill(0.0);
            }
            (Op::Softmax, ..) => softmax::normalize(into),
            (Op::SoftmaxGradient, Some(gradient), _) => {
                copy(gradient, into);
                softmax::differentiate(into, first.map_or(&[], numbers));
            }
            (Op::ReduceSum, ..) => into[0] = vector::sum(first.map_or(&[], numbers)),
            (Op::PickGradient, Some(gradient), _) => {
                into.fill(0.0);
                let Source::Outside(ids) = step.operands[0] else { unreachable!("the run was planned so") };
                let id = self.operands[ids].0.ids()[row];
                if let Some(column) = own_row(id, step.place.vocabulary_start, self.width) {
                    into[column] = match gradient {
                        Row::Constant(gradient) => gradient,
                        Row::Numbers(gradient) => gradient[column],
                    };
                }
            }
            _ => {}
        }
    }
}

fn row_of(numbers: &[f32], width: usize) -> Row<'_> {
    if numbers.len() == width { Row::Numbers(numbers) } else { Row::Constant(numbers[0]) }
}

fn numbers(row: Row<'_>) -> &[f32] {
    match row {
        Row::Numbers(numbers) => numbers,
        Row::Constant(_) => unreachable!("the run was planned so"),
    }
}

fn copy(row: Row, into: &mut [f32]) {
    match row {
        Row::Numbers(numbers) => into.copy_from_slice(&numbers[..into.len()]),
        Row::Constant(number) => into.fill(number),
    }
}

fn combine(into: &mut [f32], other: Row, f: impl Fn(f32, f32) -> f32) {
    match other {
        Row::Numbers(other) => vector::zip(into, other, f),
        Row::Constant(other) => vector::map(into, |number| f(number, other)),
    }
}
