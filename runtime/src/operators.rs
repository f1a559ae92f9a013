//! Operators of programs on one rank's tensors: one function of plain data for each, forward and backward.
//!
//! Values are fp32 or bf16; a bf16 result is rounded once, what happens inside is fp32. No operator knows
//! of other ranks: what depends on the rank's place comes in the [`ResultShape`]. Results are the same bits
//! for any number of threads.

mod accumulate;
mod activation;
mod attention;
pub(crate) mod contraction;
mod dropout;
mod elementwise;
mod exponential;
mod loss;
mod matrix;
mod norm;
mod parallel;
mod reduction;
mod rotary;
mod rows;
pub mod run;
mod softmax;
mod vector;

use ir::program::Op;

use crate::tensor::{Dims, Format, Memory, Tensor, ValuesMut, size_of};

pub use accumulate::{Accumulation, accumulate, accumulate_contraction, accumulate_lookup};
pub use attention::{AttentionGradients, attention_gradients};
pub use dropout::Dropping;
#[cfg(feature = "kernels")]
pub(crate) use dropout::Mask;
#[cfg(feature = "kernels")]
pub(crate) use rotary::{positions_of, turns};

/// An operand of an operator.
#[derive(Debug)]
pub enum Operand<'a> {
    /// It is read again later.
    Borrowed(&'a Tensor),
    /// This is its last use: its memory may hold the result.
    Owned(Tensor),
}

/// What an operator knows of its result beside the operands.
#[derive(Clone, Copy, Debug)]
pub struct ResultShape<'a> {
    /// Memory for the result.
    pub memory: &'a Memory,
    /// Local dims.
    pub dims: &'a Dims,
    /// Number format.
    pub format: Format,
    /// Where the rank's parts begin.
    pub place: Place,
}

/// Where the parts begin that a rank holds of the operator's operands and result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    /// First vocabulary row or column.
    pub vocabulary_start: usize,
    /// First key-value head, and the number of all.
    pub heads: (usize, usize),
    /// First query of a key-value head, and the number of all.
    pub queries: (usize, usize),
    /// First position of a sequence, and the number of all.
    pub positions: (usize, usize),
    /// One over the tokens of the global batch.
    pub seed: f64,
    /// What the pass drops; nothing without it.
    pub dropping: Option<Dropping>,
}

/// Applies an operator.
///
/// Operands are in the order that [`Op`] says. A [`Operand::Owned`] operand of the result's size and format
/// gives the result its memory where the operator allows it.
///
/// # Panics
/// On operands whose dims do not fit the operator: the verifier of plans excludes them.
pub fn apply(op: &Op, operands: Vec<Operand>, result: &ResultShape) -> Tensor {
    #[cfg(feature = "kernels")]
    if let Some(device) = result.memory.device() {
        return crate::device::apply(device, op, operands, result);
    }
    let mut operands = operands.into_iter();
    let mut next = || operands.next().expect("the verifier counts operands");
    match op {
        Op::Lookup => rows::lookup(next().tensor(), next().tensor(), result),
        Op::LookupGradient => rows::lookup_gradient(next().tensor(), next().tensor(), result),
        Op::Contraction => contraction::contraction(next().tensor(), next().tensor(), result),
        Op::Norm { kind, epsilon } => {
            let (input, weight, bias) = (next(), next(), operands.next());
            norm::norm((*kind, *epsilon), input, weight.tensor(), bias.as_ref().map(Operand::tensor), result)
        }
        Op::NormInputGradient { kind, epsilon } => {
            let (input, weight, gradient) = (next(), next(), next());
            norm::input_gradient((*kind, *epsilon), input.tensor(), weight.tensor(), gradient, result)
        }
        Op::NormWeightGradient { kind, epsilon } => {
            norm::weight_gradient((*kind, *epsilon), next().tensor(), next().tensor(), result)
        }
        Op::Add => elementwise::zip_either(next(), next(), result, |a, b| a + b),
        Op::Multiply => elementwise::zip_either(next(), next(), result, |a, b| a * b),
        Op::Subtract => elementwise::zip(next(), next().tensor(), result, |a, b| a - b),
        Op::Divide => elementwise::zip(next(), next().tensor(), result, |a, b| a / b),
        Op::Scale(factor) => {
            let factor = *factor as f32;
            elementwise::map(next(), result, move |x| x * factor)
        }
        Op::Dropout(site) => dropout::dropout(next(), *site, result),
        Op::Seed => {
            let seed = [result.place.seed as f32];
            Tensor::from_numbers(result.memory, result.dims, result.format, &seed)
        }
        Op::ScaleMask { scale, alibi } => softmax::scale_mask(next(), *scale, *alibi, result),
        Op::ScaleMaskGradient { scale } => softmax::scale_mask_gradient(next(), *scale, result),
        Op::FlashAttention { scale, alibi } => {
            let (query, keys, values) = (next(), next(), next());
            attention::attention([query.tensor(), keys.tensor(), values.tensor()], *scale, *alibi, result)
        }
        Op::FlashAttentionGradient { of, scale, alibi } => {
            let (query, keys, values, gradient) = (next(), next(), next(), next());
            let operands = [query.tensor(), keys.tensor(), values.tensor(), gradient.tensor()];
            attention::attention_gradient(*of, operands, *scale, *alibi, result)
        }
        Op::Softmax => softmax::softmax(next(), result),
        Op::SoftmaxGradient => softmax::softmax_gradient(next().tensor(), next(), result),
        Op::Gelu => elementwise::map(next(), result, activation::gelu),
        Op::GeluGradient => {
            let input = next();
            elementwise::zip(next(), input.tensor(), result, activation::gelu_gradient)
        }
        Op::Silu => elementwise::map(next(), result, activation::silu),
        Op::SiluGradient => {
            let input = next();
            elementwise::zip(next(), input.tensor(), result, activation::silu_gradient)
        }
        Op::Rotary { base, scaling } => rotary::rotary(next(), 1.0, *base, *scaling, result),
        Op::RotaryGradient { base, scaling } => rotary::rotary(next(), -1.0, *base, *scaling, result),
        Op::Rename => next().into_shared().renamed(result.dims),
        Op::Cast => match next() {
            same if same.tensor().format() == result.format => same.into_shared(),
            other => elementwise::map(other, result, |x| x),
        },
        Op::MaskColumns(columns) => rows::mask_columns(next(), *columns as usize, result),
        Op::ReduceSum | Op::SumTokens => reduction::sum(next().tensor(), result),
        Op::ReduceMax => reduction::maximum(next().tensor(), result),
        Op::Exp => elementwise::map(next(), result, exponential::exp),
        Op::Log => elementwise::map(next(), result, f32::ln),
        Op::Pick => loss::pick(next().tensor(), next().tensor(), result),
        Op::PickGradient => loss::pick_gradient(next().tensor(), next().tensor(), result),
    }
}

impl Operand<'_> {
    /// The tensor.
    pub fn tensor(&self) -> &Tensor {
        match self {
            Operand::Borrowed(tensor) => tensor,
            Operand::Owned(tensor) => tensor,
        }
    }

    /// The tensor itself if it is owned, a second holder of its storage if not.
    pub fn into_shared(self) -> Tensor {
        match self {
            Operand::Borrowed(tensor) => tensor.clone(),
            Operand::Owned(tensor) => tensor,
        }
    }

    /// Whether the memory may hold the result.
    fn is_reusable(&mut self, result: &ResultShape) -> bool {
        match self {
            Operand::Borrowed(_) => false,
            Operand::Owned(tensor) => {
                tensor.format() == result.format && tensor.len() == result.len() && tensor.is_unshared()
            }
        }
    }

    /// The tensor under the result's dims, still holding its numbers, if its memory may hold the result.
    ///
    /// # Errors
    /// The operand as it was.
    pub(crate) fn reusable(mut self, result: &ResultShape) -> Result<Tensor, Self> {
        match (self.is_reusable(result), self) {
            (true, Operand::Owned(tensor)) => Ok(tensor.renamed(result.dims)),
            (_, other) => Err(other),
        }
    }
}

impl ResultShape<'_> {
    /// Number of elements.
    fn len(&self) -> usize {
        size_of(self.dims)
    }

    /// A tensor of this shape with arbitrary elements.
    fn stale(&self) -> Tensor {
        Tensor::stale(self.memory, self.dims, self.format)
    }
}

impl Place {
    /// A rank that holds everything.
    pub const WHOLE: Place =
        Place { vocabulary_start: 0, heads: (0, 1), queries: (0, 1), positions: (0, 1), seed: 1.0, dropping: None };
}

/// A tensor of the result's shape, each row of which `f` writes.
fn fill_rows(width: usize, result: &ResultShape, f: impl Fn(usize, &mut [f32]) + Sync) -> Tensor {
    let mut target = result.stale();
    parallel::for_each_piece(target.values_mut(), width, |start, mut values: ValuesMut| {
        let mut scratch = Vec::new();
        for row in 0..values.len() / width {
            values.write(row * width..(row + 1) * width, &mut scratch, |numbers| f(start / width + row, numbers));
        }
    });
    target
}

/// The operand's numbers with each row changed by `f`, in place where that is allowed.
fn change_rows(operand: Operand, width: usize, result: &ResultShape, f: impl Fn(usize, &mut [f32]) + Sync) -> Tensor {
    match operand.reusable(result) {
        Ok(mut target) => {
            parallel::for_each_piece(target.values_mut(), width, |start, mut values: ValuesMut| {
                let mut scratch = Vec::new();
                for row in 0..values.len() / width {
                    let range = row * width..(row + 1) * width;
                    values.update(range, &mut scratch, |numbers| f(start / width + row, numbers));
                }
            });
            target
        }
        Err(operand) => {
            let values = operand.tensor().values();
            fill_rows(width, result, |row, numbers| {
                values.copy_to(row * width, numbers);
                f(row, numbers);
            })
        }
    }
}

/// An fp32 tensor in the result's format.
fn in_format(single: Tensor, result: &ResultShape) -> Tensor {
    match result.format {
        Format::Single => single,
        Format::Brain | Format::Index => elementwise::map(Operand::Owned(single), result, |x| x),
    }
}

/// A tensor in fp32.
fn in_single(tensor: &Tensor, memory: &Memory) -> Tensor {
    if tensor.format() == Format::Single {
        return tensor.clone();
    }
    let mut wide = Tensor::stale(memory, &tensor.dims, Format::Single);
    let values = tensor.values();
    parallel::for_each_piece(wide.values_mut(), 1, |start, mut piece| {
        let all = 0..piece.len();
        piece.write(all, &mut Vec::new(), |numbers| values.copy_to(start, numbers));
    });
    wide
}
