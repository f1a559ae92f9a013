//! Values added to accumulated gradients.

use ir::program::Op;

use crate::operators::{Accumulation, Operand, ResultShape, accumulate_contraction, apply};
use crate::tensor::{Tensor, Values};

use super::parameters::Held;
use super::steps::LocalValue;

/// Adds an operator's result to a parameter's gradient.
pub fn accumulate_operator(held: &mut Held, op: &Op, operands: Vec<Operand>, value: &LocalValue, shape: &ResultShape) {
    match op {
        Op::Contraction => {
            let how = next_accumulation(held);
            let into = held.gradient.as_mut().expect("no reduction of it has started");
            accumulate_contraction(into, operands[0].tensor(), operands[1].tensor(), shape.memory, how);
        }
        Op::LookupGradient => {
            let how = next_accumulation(held);
            let into = held.gradient.as_mut().expect("no reduction of it has started");
            let whole_table = !value.dims.iter().any(|(name, _)| *name == ir::graph::DimName::Vocabulary);
            let start = if whole_table { 0 } else { shape.place.vocabulary_start };
            accumulate_rows(into, operands[0].tensor().ids(), operands[1].tensor(), start, how);
        }
        other => accumulate(held, &apply(other, operands, shape)),
    }
}

/// Adds a value to a parameter's gradient.
pub fn accumulate(held: &mut Held, value: &Tensor) {
    let how = next_accumulation(held);
    let into = held.gradient.as_mut().expect("no reduction of it has started").singles_mut();
    match (value.values(), how) {
        (Values::Single(from), Accumulation::Set) => into.copy_from_slice(from),
        (Values::Single(from), Accumulation::Add) => into.iter_mut().zip(from).for_each(|(sum, x)| *sum += x),
        (Values::Brain(from), Accumulation::Set) => into.iter_mut().zip(from).for_each(|(sum, x)| *sum = x.to_f32()),
        (Values::Brain(from), Accumulation::Add) => into.iter_mut().zip(from).for_each(|(sum, x)| *sum += x.to_f32()),
        (Values::Index(_), _) => unreachable!("ids have no gradient"),
    }
}

/// The first gradient of a step replaces that of the last one.
fn next_accumulation(held: &mut Held) -> Accumulation {
    match std::mem::replace(&mut held.accumulated, true) {
        true => Accumulation::Add,
        false => Accumulation::Set,
    }
}

/// Adds rows of a gradient to the rows of a table that the ids name; ids of other ranks' rows are passed over.
fn accumulate_rows(table: &mut Tensor, ids: &[u32], gradient: &Tensor, start: usize, how: Accumulation) {
    let width = gradient.len() / ids.len().max(1);
    let table = table.singles_mut();
    if how == Accumulation::Set {
        table.fill(0.0);
    }
    let rows = table.len() / width.max(1);
    for (token, id) in ids.iter().enumerate() {
        let row = (*id as usize).wrapping_sub(start);
        if row >= rows {
            continue;
        }
        let sums = &mut table[row * width..(row + 1) * width];
        let range = token * width..(token + 1) * width;
        match gradient.values() {
            Values::Single(from) => sums.iter_mut().zip(&from[range]).for_each(|(sum, x)| *sum += x),
            Values::Brain(from) => sums.iter_mut().zip(&from[range]).for_each(|(sum, x)| *sum += x.to_f32()),
            Values::Index(_) => unreachable!("ids have no gradient"),
        }
    }
}
