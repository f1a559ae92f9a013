//! Values added to accumulated gradients.

use ir::program::Op;

use super::parameters::Held;
use crate::operators::{
    Accumulation, Operand, ResultShape, accumulate, accumulate_contraction, accumulate_lookup, apply,
};
use crate::tensor::Tensor;

/// Adds an operator's result to a parameter's gradient, without a tensor between where the operator allows it.
pub fn add_operator(held: &mut Held, op: &Op, operands: Vec<Operand>, shape: &ResultShape) {
    match op {
        Op::Contraction => {
            let (into, how) = target(held);
            accumulate_contraction(into, operands[0].tensor(), operands[1].tensor(), shape.memory, how);
        }
        Op::LookupGradient => {
            let (into, how) = target(held);
            accumulate_lookup(into, operands[0].tensor(), operands[1].tensor(), shape, how);
        }
        other => add_value(held, &apply(other, operands, shape)),
    }
}

/// Adds a value to a parameter's gradient.
pub fn add_value(held: &mut Held, value: &Tensor) {
    let (into, how) = target(held);
    accumulate(into, value, how);
}

/// The accumulator; the first gradient of a step replaces that of the last one.
fn target(held: &mut Held) -> (&mut Tensor, Accumulation) {
    let how = match std::mem::replace(&mut held.accumulated, true) {
        true => Accumulation::Add,
        false => Accumulation::Set,
    };
    (held.gradient.as_mut().expect("no sum of it over replicas has started"), how)
}
