//! What kernels are compared with: operators on processor cores, or those of the interpreter in fp64.

use ir::graph::DimName;
use ir::interpreter::{Array, OperatorResult, apply_operator};
use ir::program::Op;

use crate::operators::{Operand, Place, ResultShape, apply};
use crate::random::Stream;
use crate::tensor::{Format, Memory, Tensor};

/// Dims and extents.
pub type Dims = Vec<(DimName, usize)>;

/// What computes the expected numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reference {
    /// The operators of programs, on processor cores in fp32.
    Operators,
    /// The interpreter of programs, in fp64.
    Interpreter,
}

/// An operand or result of a reference.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    array: Array,
    is_ids: bool,
}

impl Value {
    /// A tensor of numbers.
    pub fn new(dims: &Dims, numbers: &[f32]) -> Value {
        let data = numbers.iter().map(|number| f64::from(*number)).collect();
        Value { array: Array { dims: dims.clone(), data }, is_ids: false }
    }

    /// A tensor of ids.
    pub fn ids(dims: &Dims, ids: &[u32]) -> Value {
        let data = ids.iter().map(|id| f64::from(*id)).collect();
        Value { array: Array { dims: dims.clone(), data }, is_ids: true }
    }

    /// Its numbers, row-major.
    pub fn numbers(&self) -> &[f64] {
        &self.array.data
    }

    /// Its numbers in fp32.
    pub fn singles(&self) -> Vec<f32> {
        self.array.data.iter().map(|number| *number as f32).collect()
    }

    fn tensor(&self, memory: &Memory) -> Tensor {
        match self.is_ids {
            true => Tensor::from_ids(
                memory,
                &self.array.dims,
                &self.array.data.iter().map(|id| *id as u32).collect::<Vec<_>>(),
            ),
            false => Tensor::from_numbers(memory, &self.array.dims, Format::Single, &self.singles()),
        }
    }
}

impl Reference {
    /// Applies an operator.
    pub fn apply(self, op: &Op, operands: &[&Value], dims: &Dims, place: Place) -> Value {
        match self {
            Reference::Operators => {
                let memory = Memory::default();
                let tensors: Vec<Tensor> = operands.iter().map(|operand| operand.tensor(&memory)).collect();
                let result = ResultShape { memory: &memory, dims, format: Format::Single, place };
                let result = apply(op, tensors.iter().map(Operand::Borrowed).collect(), &result);
                Value::new(dims, &result.to_numbers())
            }
            Reference::Interpreter => {
                let Place { vocabulary_start, heads, queries, seed, .. } = place;
                let result = OperatorResult { dims, vocabulary_start, heads, queries, seed };
                let arrays: Vec<&Array> = operands.iter().map(|operand| &operand.array).collect();
                Value { array: apply_operator(op, &arrays, &result), is_ids: false }
            }
        }
    }

    /// Difference that is allowed where the operators on processor cores round as kernels do: none, or in fp64 that
    /// of one rounding to fp32.
    pub fn one_rounding(self) -> f64 {
        match self {
            Reference::Operators => 0.0,
            Reference::Interpreter => f64::from(f32::EPSILON) / 2.0,
        }
    }
}

/// Numbers of ±`bound` that depend on the place and a seed only.
pub fn numbers(count: usize, seed: u64, bound: f32) -> Vec<f32> {
    let stream = Stream::new(seed, "numbers of a check");
    (0..count as u64).map(|place| (2.0 * stream.uniform(place) - 1.0) * bound).collect()
}

/// Ids below a limit.
pub fn ids(count: usize, limit: usize, seed: u64) -> Vec<u32> {
    let stream = Stream::new(seed, "ids of a check");
    (0..count as u64).map(|place| stream.below(place, limit as u32)).collect()
}
