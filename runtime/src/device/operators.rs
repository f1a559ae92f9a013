//! Operators of programs as kernels: one arm for each, fused ones where an operator is what a kernel computes.

mod attention;
mod run;

use ir::graph::DimName;
use ir::model::NormKind;
use ir::program::Op;
use ir::rotary::{RotaryScaling, rotary_frequencies};
use kernels::elementwise::{Binary, Unary, binary, fill, unary};
use kernels::norm::{Norm, norm, norm_gradient};
use kernels::reduce::{Fold, reduce};
use kernels::rotary::{Heads, Turns, rotary};
use kernels::softmax::{Scores, softmax, softmax_gradient};
use kernels::strided::{Axis, Loops};
use kernels::{Buffer, Element, Queue, dropout, embedding, mask};

use super::product::contract;
use super::{Constant, Device};
use crate::operators::{Accumulation, Mask, Operand, Place, ResultShape, positions_of, turns};
use crate::tensor::{Dims, Tensor, size_of, strides};

pub use attention::attention_gradients;
pub use run::{apply_two, are_one_kernel};

/// A tensor of a device as kernels see it.
#[derive(Clone, Debug)]
struct View {
    dims: Vec<(DimName, usize)>,
    buffer: Buffer,
}

impl View {
    fn of(tensor: &Tensor) -> View {
        View { dims: tensor.dims.clone(), buffer: tensor.buffer() }
    }

    fn extent(&self, name: DimName) -> usize {
        self.dims.iter().find(|(dim, _)| *dim == name).map_or(1, |(_, extent)| *extent)
    }

    fn dims_and_buffer(&self) -> (&Dims, &Buffer) {
        (&self.dims, &self.buffer)
    }
}

/// Applies an operator to tensors of a device.
pub fn apply(device: &Device, op: &Op, operands: Vec<Operand>, result: &ResultShape) -> Tensor {
    if is_unchanged(op, &operands, result) {
        let same = operands.into_iter().next().expect("the verifier counts operands");
        return same.into_shared().renamed(result.dims);
    }
    let views = views_of(device, &operands);
    // Operands live until the result has its memory.
    let mut operands: Vec<Option<Operand>> = operands.into_iter().map(Some).collect();
    let target = target(op, &mut operands, result);
    if let Some(views) = views {
        launch(device, op, &views, &View::of(&target), &result.place);
    }
    target
}

/// Operands as kernels see them; none in a first pass, in which they have no memory.
fn views_of(device: &Device, operands: &[Operand]) -> Option<Vec<View>> {
    (!device.is_tracing()).then(|| operands.iter().map(|operand| View::of(operand.tensor())).collect())
}

/// Whether the result is the operand under other dims.
fn is_unchanged(op: &Op, operands: &[Operand], result: &ResultShape) -> bool {
    match op {
        Op::Rename => true,
        Op::Cast => operands.iter().all(|operand| operand.tensor().format() == result.format),
        Op::Dropout(site) => Mask::of(*site, result.dims, &result.place).is_none(),
        _ => false,
    }
}

/// Memory for the result: that of an operand which ends here where the operator allows it.
fn target(op: &Op, operands: &mut [Option<Operand>], result: &ResultShape) -> Tensor {
    for index in op.operands_in_place() {
        let Some(operand) = operands.get_mut(*index) else { continue };
        match operand.take().map(|operand| operand.reusable(result)) {
            Some(Ok(target)) => return target,
            Some(Err(other)) => *operand = Some(other),
            None => {}
        }
    }
    Tensor::stale(result.memory, result.dims, result.format)
}

/// Sends the kernels of an operator.
fn launch(device: &Device, op: &Op, operands: &[View], y: &View, place: &Place) {
    let queue = &device.queue();
    let [x, other] = [0, 1].map(|index| operands.get(index).or(operands.first()).unwrap_or(y));
    let of_one = |f: Unary, factor: f32| unary(queue, f, factor, &x.buffer, &y.buffer, false);
    let of_two = |f: Binary| binary(queue, f, &elementwise_loops(x, other, y), [&x.buffer, &other.buffer], &y.buffer);
    let scores = || scores_of(x);
    match op {
        Op::Lookup => {
            let columns = other.extent(DimName::Hidden);
            embedding::lookup(queue, &other.buffer, columns, &x.buffer, row_start(&other.dims, place), &y.buffer);
        }
        Op::LookupGradient => in_single(queue, &y.buffer, |table| {
            fill(queue, 0.0, table);
            embedding::lookup_gradient(queue, &x.buffer, &other.buffer, row_start(&y.dims, place), table);
        }),
        Op::Contraction => {
            contract(device, [x.dims_and_buffer(), other.dims_and_buffer()], y.dims_and_buffer(), false);
        }
        Op::Norm { kind, epsilon } => {
            let bias = operands.get(2).map(|bias| &bias.buffer);
            norm(queue, &norm_of(x, *kind, *epsilon), &x.buffer, None, &other.buffer, bias, &y.buffer);
        }
        Op::NormInputGradient { kind, epsilon } => {
            let settings = norm_of(x, *kind, *epsilon);
            let unwanted = queue.buffer(settings.columns, Element::Single);
            let operands = [&x.buffer, &other.buffer, &operands[2].buffer];
            norm_gradient(queue, &settings, operands, None, &y.buffer, (&unwanted, None), false);
        }
        Op::NormWeightGradient { kind, epsilon } => {
            let settings = norm_of(x, *kind, *epsilon);
            // The weight counts for the gradient of the input only.
            let weight = queue.buffer(settings.columns, x.buffer.element);
            let unwanted = queue.buffer(x.buffer.length, x.buffer.element);
            let operands = [&x.buffer, &weight, &other.buffer];
            in_single(queue, &y.buffer, |total| {
                norm_gradient(queue, &settings, operands, None, &unwanted, (total, None), false);
            });
        }
        Op::Add => of_two(Binary::Add),
        Op::Multiply => of_two(Binary::Multiply),
        Op::Subtract => of_two(Binary::Subtract),
        Op::Divide => of_two(Binary::Divide),
        Op::Scale(factor) => of_one(Unary::Scale, *factor as f32),
        Op::Dropout(site) => {
            let mask = Mask::of(*site, &y.dims, place).expect("what drops nothing is no kernel");
            let [sequences, positions] = [DimName::MicroBatch, DimName::Sequence].map(|name| y.extent(name));
            let shape = [sequences, positions, size_of(&y.dims) / sequences / positions];
            dropout::dropout(queue, &mask.for_kernel(place), shape, &x.buffer, None, &y.buffer);
        }
        Op::Seed => fill(queue, place.seed as f32, &y.buffer),
        Op::ScaleMask { scale, alibi } => {
            let slopes = slopes(device, x, place, *alibi);
            mask::scale_mask(queue, &scores(), *scale, f32::MIN, [&x.buffer, &slopes], &y.buffer);
        }
        Op::ScaleMaskGradient { scale } => {
            let slopes = slopes(device, x, place, false);
            mask::scale_mask(queue, &scores(), *scale, 0.0, [&x.buffer, &slopes], &y.buffer);
        }
        Op::Softmax => softmax(queue, &scores(), &x.buffer, &y.buffer),
        Op::SoftmaxGradient => softmax_gradient(queue, &scores(), [&x.buffer, &other.buffer], &y.buffer),
        Op::FlashAttention { scale, alibi } => attention::attention(device, *scale, *alibi, operands, y, place),
        Op::FlashAttentionGradient { of, scale, alibi } => {
            let wanted = [0, 1, 2].map(|part| (part == *of as usize).then_some(y));
            attention::gradients(device, *scale, *alibi, operands, wanted, place);
        }
        Op::Gelu => of_one(Unary::Gelu, 1.0),
        Op::GeluGradient => of_two(Binary::GeluGradient),
        Op::Silu => of_one(Unary::Silu, 1.0),
        Op::SiluGradient => of_two(Binary::SiluGradient),
        Op::Rotary { base, scaling } => turn(device, (*base, *scaling), false, x, y),
        Op::RotaryGradient { base, scaling } => turn(device, (*base, *scaling), true, x, y),
        Op::Rename => unreachable!("a renaming is no kernel"),
        Op::Cast => of_one(Unary::Copy, 1.0),
        Op::MaskColumns(columns) => {
            let width = x.extent(DimName::Vocabulary);
            let kept = (*columns as usize).saturating_sub(place.vocabulary_start).min(width);
            mask::mask_columns(queue, width, kept, &x.buffer, &y.buffer);
        }
        Op::ReduceSum | Op::SumTokens => fold(queue, Fold::Sum, x, y),
        Op::ReduceMax => fold(queue, Fold::Maximum, x, y),
        Op::Exp => of_one(Unary::Exp, 1.0),
        Op::Log => of_one(Unary::Log, 1.0),
        Op::Pick => {
            let (columns, start) = (x.extent(DimName::Vocabulary), place.vocabulary_start as u32);
            mask::pick(queue, columns, [&x.buffer, &other.buffer], start, &y.buffer);
        }
        Op::PickGradient => {
            let (columns, start) = (y.extent(DimName::Vocabulary), place.vocabulary_start as u32);
            mask::pick_gradient(queue, columns, [&x.buffer, &other.buffer], start, &y.buffer);
        }
    }
}

/// Puts or adds a value's numbers into fp32 numbers of the same size.
pub fn accumulate(device: &Device, into: &Tensor, value: &Tensor, how: Accumulation) {
    if !device.is_tracing() {
        let adds = how == Accumulation::Add;
        unary(&device.queue(), Unary::Copy, 1.0, &value.buffer(), &into.buffer(), adds);
    }
}

/// Puts or adds a contraction into fp32 numbers.
pub fn accumulate_contraction(device: &Device, into: &Tensor, a: &Tensor, b: &Tensor, how: Accumulation) {
    if !device.is_tracing() {
        let [a, b, into] = [a, b, into].map(View::of);
        let operands = [a.dims_and_buffer(), b.dims_and_buffer()];
        contract(device, operands, into.dims_and_buffer(), how == Accumulation::Add);
    }
}

/// Puts or adds rows of a gradient into those of an fp32 table that ids name.
pub fn accumulate_lookup(
    device: &Device,
    into: &Tensor,
    [ids, gradient]: [&Tensor; 2],
    place: &Place,
    how: Accumulation,
) {
    if !device.is_tracing() {
        let queue = device.queue();
        if how == Accumulation::Set {
            fill(&queue, 0.0, &into.buffer());
        }
        let start = row_start(&into.dims, place);
        embedding::lookup_gradient(&queue, &ids.buffer(), &gradient.buffer(), start, &into.buffer());
    }
}

fn norm_of(x: &View, kind: NormKind, epsilon: f64) -> Norm {
    Norm { centered: kind == NormKind::LayerNorm, epsilon, columns: x.dims.last().map_or(1, |(_, extent)| *extent) }
}

fn scores_of(x: &View) -> Scores {
    let [heads, queries] = [DimName::KeyValueHeads, DimName::QueriesPerKeyValue].map(|name| x.extent(name));
    Scores { heads: heads * queries, positions: x.extent(DimName::Sequence), keys: x.extent(DimName::KeySequence) }
}

/// Slopes of the heads of a query or of scores; zeros without linear biases.
fn slopes(device: &Device, x: &View, place: &Place, alibi: bool) -> Buffer {
    let [heads, queries] = [DimName::KeyValueHeads, DimName::QueriesPerKeyValue].map(|name| x.extent(name));
    if !alibi {
        return device.constant(Constant::NoSlopes(heads * queries), || vec![0.0; heads * queries]);
    }
    let which = [place.heads.0, place.heads.1, place.queries.0, place.queries.1, heads, queries];
    device.constant(Constant::Slopes(which), || {
        (0..heads * queries).map(|head| place.slope(head / queries, head % queries)).collect()
    })
}

fn turn(device: &Device, (base, scaling): (f64, Option<RotaryScaling>), back: bool, x: &View, y: &View) {
    let width = x.extent(DimName::HeadDim);
    let (positions, between) = positions_of(&x.dims, width);
    let frequencies = rotary_frequencies(base, scaling, width);
    let bits = frequencies.iter().map(|frequency| frequency.to_bits()).collect();
    let table = device.constant(Constant::Turns(positions, bits), || turns(positions, 1.0, &frequencies));
    let turns = Turns::of(table, positions, width);
    rotary(&device.queue(), &turns, Heads { between, back }, &x.buffer, &y.buffer);
}

/// Loops over the elements of `y`, with the strides of both operands.
fn elementwise_loops(a: &View, b: &View, y: &View) -> Loops {
    let strides = [a, b, y].map(|view| strides(&view.dims, &y.dims));
    let axis = |at: usize| Axis { extent: y.dims[at].1, strides: [strides[0][at], strides[1][at], strides[2][at]] };
    Loops::new(&(0..y.dims.len()).map(axis).collect::<Vec<_>>())
}

/// Folds the dims that `y` lacks.
fn fold(queue: &Queue, how: Fold, x: &View, y: &View) {
    let own = strides(&x.dims, &y.dims);
    let into = strides(&y.dims, &y.dims);
    let kept = (0..y.dims.len()).map(|at| Axis { extent: y.dims[at].1, strides: [own[at], into[at], 0] });
    let lacks = |(name, _): &&(DimName, usize)| !y.dims.iter().any(|(other, _)| other == name);
    let folded: Vec<(DimName, usize)> = x.dims.iter().filter(lacks).copied().collect();
    let own = strides(&x.dims, &folded);
    let folded = folded.iter().zip(own).map(|((_, extent), stride)| Axis { extent: *extent, strides: [stride, 0, 0] });
    let loops = [Loops::new(&kept.collect::<Vec<_>>()), Loops::new(&folded.collect::<Vec<_>>())];
    reduce(queue, how, [&loops[0], &loops[1]], &x.buffer, &y.buffer, false);
}

/// Lets `send` write fp32 numbers, which become those of `y`.
fn in_single(queue: &Queue, y: &Buffer, send: impl FnOnce(&Buffer)) {
    if y.element == Element::Single {
        return send(y);
    }
    let single = queue.buffer(y.length, Element::Single);
    send(&single);
    unary(queue, Unary::Copy, 1.0, &single, y, false);
}

/// First row that the rank holds: tables of positions are whole.
fn row_start(table: &Dims, place: &Place) -> u32 {
    let vocabulary = table.iter().any(|(name, _)| *name == DimName::Vocabulary);
    if vocabulary { place.vocabulary_start as u32 } else { 0 }
}
