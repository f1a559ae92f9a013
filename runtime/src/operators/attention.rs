//! The attention core without a matrix of all scores (FlashAttention, arXiv 2205.14135; its backward pass as
//! in FlashAttention-2, arXiv 2307.08691, without kept statistics).
//!
//! A task is one key-value head of one sequence. It goes through blocks of queries, and for each through
//! strips of the keys that the block may see; scores exist for one block and one strip. Backward needs each
//! query's maximum and sum of exponentials first; where one strip holds all keys its scores serve again.

use ir::graph::{DimName, DropoutSite};
use ir::program::AttentionOperand;
use multiversion::multiversion;

use super::dropout::Mask;
use super::exponential::exp;
use super::matrix::{Extents, Matrix, MatrixMut, multiply, readable};
use super::{ResultShape, in_format, parallel, vector};
use crate::tensor::{Dims, Format, Tensor, Values, strides};

/// Queries of a block: whole tiles of the matrix product, and few, so that little above the diagonal is
/// computed.
const BLOCK: usize = 48;
/// Keys of a strip.
const STRIP: usize = 1024;
/// Distances between rows and columns of what products write here: the columns are neighbours.
const LAYOUT: [usize; 2] = [STRIP, 1];

/// Gradients of the attention core's operands that were asked for.
#[derive(Debug, Default)]
pub struct AttentionGradients {
    /// Of the query.
    pub query: Option<Tensor>,
    /// Of the keys.
    pub keys: Option<Tensor>,
    /// Of the values.
    pub values: Option<Tensor>,
}

/// A query-like or key-like tensor as matrices `[position, width]`, one for each sequence and head.
#[derive(Clone, Copy)]
struct Heads {
    /// Distances between sequences, key-value heads, queries of a head, positions, and along the head.
    strides: [usize; 5],
    positions: usize,
    width: usize,
}

/// What all tasks of an attention core share.
struct Core<'a> {
    query: (Values<'a>, Heads),
    keys: (Values<'a>, Heads),
    values: (Values<'a>, Heads),
    /// Key-value heads on this rank, and queries of each.
    heads: usize,
    queries: usize,
    scale: f32,
    alibi: bool,
    /// Of the weights, `[sequences, heads, queries, positions, keys]`; none if none are dropped.
    mask: Option<Mask>,
    result: &'a ResultShape<'a>,
}

/// A block of queries of one head.
#[derive(Clone, Copy)]
struct Block {
    sequence: usize,
    head: usize,
    query: usize,
    /// First position and number of positions.
    start: usize,
    rows: usize,
}

/// Softmax statistics of a block's rows so far.
struct Statistics {
    most: Vec<f32>,
    sum: Vec<f32>,
    /// Sum of weight times gradient of the weight.
    along: Vec<f32>,
}

/// dropout(softmax(scale · query · keysᵀ, masked)) · values. Operands: query, keys, values.
pub fn attention(operands: [&Tensor; 3], scale: f64, alibi: bool, result: &ResultShape) -> Tensor {
    let [query, keys, values] = operands.map(|operand| readable(operand, LAYOUT, result.memory));
    let core = Core::new([&query, &keys, &values], scale, alibi, result);
    let mut context = Tensor::stale(result.memory, result.dims, Format::Single);
    let heads = Heads::new(result.dims, DimName::Sequence, DimName::ValueDim);
    let target = MatrixMut::new(context.singles_mut(), heads.strides[3], heads.strides[4]);
    core.for_each_head(|sequence, head| {
        let mut scores = vec![0.0; BLOCK * STRIP.min(core.keys.1.positions)];
        for block in core.blocks(sequence, head) {
            core.attend(block, &mut scores, target.at(heads.start(block) + block.start * heads.strides[3]));
        }
    });
    in_format(context, result)
}

/// One gradient of [`attention`]. Operands: query, keys, values, gradient of the result.
pub fn attention_gradient(
    of: AttentionOperand,
    operands: [&Tensor; 4],
    scale: f64,
    alibi: bool,
    result: &ResultShape,
) -> Tensor {
    let wanted = [AttentionOperand::Query, AttentionOperand::Keys, AttentionOperand::Values].map(|each| each == of);
    let gradients = attention_gradients(wanted, operands, scale, alibi, result);
    let AttentionGradients { query, keys, values } = gradients;
    query.or(keys).or(values).expect("one gradient was asked for")
}

/// The wanted gradients of query, keys and values together: scores are computed once for all.
///
/// Operands: query, keys, values, gradient of the result. Gradients have their operands' dims and the
/// result's format.
pub fn attention_gradients(
    wanted: [bool; 3],
    operands: [&Tensor; 4],
    scale: f64,
    alibi: bool,
    result: &ResultShape,
) -> AttentionGradients {
    #[cfg(feature = "kernels")]
    if let Some(device) = result.memory.device() {
        return crate::device::attention_gradients(device, wanted, operands, (scale, alibi), result);
    }
    let [query, keys, values, gradient] = operands.map(|operand| readable(operand, LAYOUT, result.memory));
    let core = Core::new([&query, &keys, &values], scale, alibi, result);
    let gradient_heads = Heads::new(&gradient.dims, DimName::Sequence, DimName::ValueDim);
    let gradient = (gradient.values(), gradient_heads);
    let mut targets =
        [&query, &keys, &values].map(|operand| Tensor::zeros(result.memory, &operand.dims, Format::Single));
    {
        let mut parts = targets.iter_mut().zip([core.query.1, core.keys.1, core.values.1]);
        let targets = [(); 3].map(|()| {
            let (target, heads) = parts.next().expect("three operands");
            MatrixMut::new(target.singles_mut(), heads.strides[3], heads.strides[4])
        });
        core.for_each_head(|sequence, head| {
            let size = BLOCK * STRIP.min(core.keys.1.positions);
            let kept = if core.mask.is_some() { size } else { 0 };
            let mut buffers = [size, size, kept].map(|size| vec![0.0; size]);
            for block in core.blocks(sequence, head) {
                core.differentiate(block, gradient, wanted, targets, &mut buffers);
            }
        });
    }
    let mut finished = targets.into_iter().zip(wanted).map(|(target, wanted)| {
        let dims = target.dims.clone();
        wanted.then(|| in_format(target, &ResultShape { dims: &dims, ..*result }))
    });
    let mut next = || finished.next().flatten();
    AttentionGradients { query: next(), keys: next(), values: next() }
}

impl<'a> Core<'a> {
    fn new(operands: [&'a Tensor; 3], scale: f64, alibi: bool, result: &'a ResultShape) -> Core<'a> {
        let [query, keys, values] = operands;
        let heads =
            |operand: &'a Tensor, position, width| (operand.values(), Heads::new(&operand.dims, position, width));
        let [sequences, positions] = [DimName::MicroBatch, DimName::Sequence].map(|name| (name, query.extent(name)));
        let [groups, queries] =
            [DimName::KeyValueHeads, DimName::QueriesPerKeyValue].map(|name| (name, query.extent(name)));
        let seen = (DimName::KeySequence, keys.extent(DimName::KeySequence));
        let weights = [sequences, groups, queries, positions, seen];
        Core {
            query: heads(query, DimName::Sequence, DimName::HeadDim),
            keys: heads(keys, DimName::KeySequence, DimName::HeadDim),
            values: heads(values, DimName::KeySequence, DimName::ValueDim),
            heads: groups.1,
            queries: queries.1,
            scale: scale as f32,
            alibi,
            mask: Mask::of(DropoutSite::Attention, &weights, &result.place),
            result,
        }
    }

    fn for_each_head(&self, f: impl Fn(usize, usize) + Sync) {
        let (positions, width) = (self.query.1.positions, self.query.1.width);
        let tasks = self.query.0.len() / (positions * width * self.queries).max(1);
        let work = tasks * self.queries * positions * self.keys.1.positions;
        parallel::for_each(tasks, work, |task| f(task / self.heads, task % self.heads));
    }

    fn blocks(&self, sequence: usize, head: usize) -> impl Iterator<Item = Block> {
        let positions = self.query.1.positions;
        (0..self.queries).flat_map(move |query| {
            (0..positions).step_by(BLOCK).map(move |start| Block {
                sequence,
                head,
                query,
                start,
                rows: BLOCK.min(positions - start),
            })
        })
    }

    /// Strips of the keys that a block sees: start and length.
    fn strips(&self, block: Block) -> impl DoubleEndedIterator<Item = (usize, usize)> {
        let seen = (block.start + block.rows).min(self.keys.1.positions);
        (0..seen).step_by(STRIP).map(move |start| (start, STRIP.min(seen - start)))
    }

    fn attend(&self, block: Block, scores: &mut [f32], target: MatrixMut) {
        let (mut statistics, width) = (Statistics::new(), self.values.1.width);
        let mut context = vec![0.0; block.rows * width];
        for (start, length) in self.strips(block) {
            self.score(block, (start, length), scores);
            for (row, scores) in scores.chunks_mut(length).take(block.rows).enumerate() {
                let open = &mut scores[..block.open(row, start, length)];
                let shrunk = statistics.extend(row, open, None);
                self.drop_weights(block, row, start, open);
                vector::scale(&mut context[row * width..(row + 1) * width], shrunk);
            }
            let extents = Extents { rows: block.rows, columns: width, summed: length };
            let values = matrix(self.values, block, start);
            let into = MatrixMut::new(&mut context, width, 1);
            multiply(extents, Matrix::new(scores, length, 1), values, into, start > 0, false);
        }
        for (row, numbers) in context.chunks_mut(width).enumerate() {
            vector::scale(numbers, 1.0 / statistics.sum[row]);
            target.put_row(row, numbers, false);
        }
    }

    /// Scores of a block and a strip, row after row; 0 where a query does not see a key.
    fn score(&self, block: Block, (start, length): (usize, usize), scores: &mut [f32]) {
        let extents = Extents { rows: block.rows, columns: length, summed: self.query.1.width };
        let query = matrix(self.query, block, block.start);
        let keys = matrix(self.keys, block, start).transposed();
        multiply(extents, query, keys, MatrixMut::new(scores, length, 1), false, false);
        let slope = if self.alibi { self.result.place.slope(block.head, block.query) } else { 0.0 };
        for (row, scores) in scores.chunks_mut(length).take(block.rows).enumerate() {
            let (open, closed) = scores.split_at_mut(block.open(row, start, length));
            weigh_row(open, self.scale, slope, start);
            closed.fill(0.0);
        }
    }

    /// Drops among the weights of a row and the keys from `start` on.
    fn drop_weights(&self, block: Block, row: usize, start: usize, weights: &mut [f32]) {
        let Some(mask) = &self.mask else { return };
        let head = (block.sequence * self.heads + block.head) * self.queries + block.query;
        let row = head * self.query.1.positions + block.start + row;
        mask.apply(row * self.keys.1.positions + start, weights);
    }

    /// Adds a block's part of the gradients to the targets of query, keys and values.
    fn differentiate(
        &self,
        block: Block,
        gradient: (Values, Heads),
        wanted: [bool; 3],
        targets: [MatrixMut; 3],
        [scores, products, kept]: &mut [Vec<f32>; 3],
    ) {
        let mut statistics = Statistics::new();
        for strip in self.strips(block) {
            self.score(block, strip, scores);
            self.weigh(block, gradient, strip, [products, kept]);
            let rows = scores.chunks_mut(strip.1).zip(products.chunks(strip.1)).take(block.rows);
            for (row, (scores, products)) in rows.enumerate() {
                let open = block.open(row, strip.0, strip.1);
                statistics.extend(row, &mut scores[..open], Some(&products[..open]));
            }
        }
        let again = self.strips(block).count() > 1;
        for strip in self.strips(block) {
            if again {
                self.score(block, strip, scores);
                self.weigh(block, gradient, strip, [products, kept]);
            }
            let rows = scores.chunks_mut(strip.1).zip(products.chunks_mut(strip.1)).take(block.rows);
            for (row, (weights, products)) in rows.enumerate() {
                let (most, scale) = (statistics.most[row], 1.0 / statistics.sum[row]);
                let (weights, _) = weights.split_at_mut(block.open(row, strip.0, strip.1));
                let (products, closed) = products.split_at_mut(weights.len());
                closed.fill(0.0);
                if again {
                    vector::exponentials(weights, most);
                }
                let along = statistics.along[row] * scale;
                vector::scale(weights, scale);
                vector::zip(products, weights, |product, weight| weight * (product - along) * self.scale);
                if self.mask.is_some() {
                    vector::zip(weights, &kept[row * strip.1..], |weight, kept| weight * kept);
                }
            }
            self.add_products(block, gradient, wanted, targets, strip, [scores, products]);
        }
    }

    /// Gradients of a block's weights along a strip, row after row, and with dropout what it makes of ones.
    fn weigh(
        &self,
        block: Block,
        gradient: (Values, Heads),
        (start, length): (usize, usize),
        [into, kept]: [&mut [f32]; 2],
    ) {
        let extents = Extents { rows: block.rows, columns: length, summed: self.values.1.width };
        let values = matrix(self.values, block, start).transposed();
        multiply(extents, matrix(gradient, block, block.start), values, MatrixMut::new(into, length, 1), false, false);
        if self.mask.is_none() {
            return;
        }
        for (row, (products, kept)) in into.chunks_mut(length).zip(kept.chunks_mut(length)).take(block.rows).enumerate()
        {
            let kept = &mut kept[..block.open(row, start, length)];
            kept.fill(1.0);
            self.drop_weights(block, row, start, kept);
            vector::zip(products, kept, |product, kept| product * kept);
        }
    }

    fn add_products(
        &self,
        block: Block,
        gradient: (Values, Heads),
        wanted: [bool; 3],
        [query, keys, values]: [MatrixMut; 3],
        (start, length): (usize, usize),
        [weights, scores]: [&[f32]; 2],
    ) {
        let (weights, scores) = (Matrix::new(weights, length, 1), Matrix::new(scores, length, 1));
        let place = |heads: Heads, position: usize| heads.start(block) + position * heads.strides[3];
        let (rows, width, value_width) = (block.rows, self.query.1.width, self.values.1.width);
        if wanted[0] {
            let extents = Extents { rows, columns: width, summed: length };
            let into = query.at(place(self.query.1, block.start));
            multiply(extents, scores, matrix(self.keys, block, start), into, true, false);
        }
        if wanted[1] {
            let extents = Extents { rows: length, columns: width, summed: rows };
            let into = keys.at(place(self.keys.1, start));
            multiply(extents, scores.transposed(), matrix(self.query, block, block.start), into, true, false);
        }
        if wanted[2] {
            let extents = Extents { rows: length, columns: value_width, summed: rows };
            let into = values.at(place(self.values.1, start));
            multiply(extents, weights.transposed(), matrix(gradient, block, block.start), into, true, false);
        }
    }
}

/// The block's head from a position on.
fn matrix<'a>((numbers, heads): (Values<'a>, Heads), block: Block, position: usize) -> Matrix<'a> {
    let start = heads.start(block) + position * heads.strides[3];
    Matrix::of(numbers, start, heads.strides[3], heads.strides[4])
}

/// Scale and bias of a row of scores whose first key is at a position.
#[multiversion(targets = "simd")]
fn weigh_row(scores: &mut [f32], scale: f32, slope: f32, position: usize) {
    for (column, x) in scores.iter_mut().enumerate() {
        *x = *x * scale + slope * (position + column) as u32 as f32;
    }
}

impl Block {
    /// How many keys of a strip the block's row sees.
    fn open(&self, row: usize, start: usize, length: usize) -> usize {
        (self.start + row + 1).saturating_sub(start).min(length)
    }
}

impl Heads {
    fn new(dims: &Dims, position: DimName, width: DimName) -> Heads {
        let names = [DimName::MicroBatch, DimName::KeyValueHeads, DimName::QueriesPerKeyValue, position, width];
        let named = names.map(|name| (name, 1));
        let found = strides(dims, &named);
        let extent = |name| dims.iter().find(|(dim, _)| *dim == name).map_or(1, |(_, extent)| *extent);
        let strides = [found[0], found[1], found[2], found[3], found[4]];
        Heads { strides, positions: extent(position), width: extent(width) }
    }

    fn start(&self, block: Block) -> usize {
        block.sequence * self.strides[0] + block.head * self.strides[1] + block.query * self.strides[2]
    }
}

impl Statistics {
    fn new() -> Statistics {
        let of = |number: f32| vec![number; BLOCK];
        Statistics { most: of(f32::NEG_INFINITY), sum: of(0.0), along: of(0.0) }
    }

    /// Takes a row's next scores in, which become exp(score − maximum so far); gives the factor by which
    /// what was computed from earlier strips shrinks. Every query sees the first key, so that the first
    /// strip's maximum is a number.
    fn extend(&mut self, row: usize, scores: &mut [f32], products: Option<&[f32]>) -> f32 {
        let most = self.most[row].max(vector::maximum(scores));
        let shrunk = exp(self.most[row] - most);
        self.most[row] = most;
        self.sum[row] = self.sum[row] * shrunk + vector::exponentials(scores, most);
        if let Some(products) = products {
            self.along[row] = self.along[row] * shrunk + vector::dot(scores, products);
        }
        shrunk
    }
}
