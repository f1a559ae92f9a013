//! Primitive operators on one rank's arrays.

use super::array::{Array, for_each_index};
use crate::graph::DimName;
use crate::model::NormKind;
use crate::program::{AttentionOperand, Op};
use crate::rotary::{RotaryScaling, rotary_frequencies};

/// What an operator knows of its result beside the operands.
#[derive(Clone, Debug)]
pub struct Result<'a> {
    /// Local dims.
    pub dims: &'a [(DimName, usize)],
    /// First vocabulary row or column that the rank holds.
    pub vocabulary_start: usize,
    /// First key-value head that the rank holds, and all of them.
    pub heads: (usize, usize),
    /// First query of a key-value head that the rank holds, and all of them.
    pub queries: (usize, usize),
    /// One over the tokens of the global batch.
    pub seed: f64,
}

/// Applies an operator.
pub fn apply(op: &Op, operands: &[&Array], result: &Result) -> Array {
    let elementwise = |f: &dyn Fn(&[f64]) -> f64| map(operands, result.dims, f);
    match op {
        Op::Lookup => lookup(operands[0], operands[1], result),
        Op::LookupGradient => lookup_gradient(operands[0], operands[1], result),
        Op::Contraction => sum_of_products(operands, result.dims),
        Op::Norm { kind, epsilon } => norm(*kind, *epsilon, operands),
        Op::NormInputGradient { kind, epsilon } => norm_input_gradient(*kind, *epsilon, operands),
        Op::NormWeightGradient { kind, epsilon } => norm_weight_gradient(*kind, *epsilon, operands, result),
        Op::Add => elementwise(&|x| x.iter().sum()),
        Op::Multiply => elementwise(&|x| x[0] * x[1]),
        Op::Subtract => elementwise(&|x| x[0] - x[1]),
        Op::Divide => elementwise(&|x| x[0] / x[1]),
        Op::Scale(factor) => elementwise(&|x| x[0] * factor),
        Op::Seed => Array { dims: Vec::new(), data: vec![result.seed] },
        Op::ScaleMask { scale, alibi } => scale_mask(operands[0], *scale, *alibi, result),
        Op::ScaleMaskGradient { scale } => scale_mask_gradient(operands[0], *scale),
        Op::FlashAttention { scale, alibi } => {
            let weights = attention_weights(operands, *scale, *alibi, result);
            sum_of_products(&[&weights, operands[2]], result.dims)
        }
        Op::FlashAttentionGradient { of, scale, alibi } => attention_gradient(*of, operands, *scale, *alibi, result),
        Op::Softmax => softmax(operands[0]),
        Op::SoftmaxGradient => softmax_gradient(operands[0], operands[1]),
        Op::Gelu => elementwise(&|x| gelu(x[0])),
        Op::GeluGradient => elementwise(&|x| gelu_slope(x[0]) * x[1]),
        Op::Silu => elementwise(&|x| x[0] * sigmoid(x[0])),
        Op::SiluGradient => elementwise(&|x| {
            let s = sigmoid(x[0]);
            s * (1.0 + x[0] * (1.0 - s)) * x[1]
        }),
        Op::Rotary { base, scaling } => rotary(operands[0], *base, *scaling, 1.0),
        Op::RotaryGradient { base, scaling } => rotary(operands[0], *base, *scaling, -1.0),
        Op::Rename => Array { dims: result.dims.to_vec(), data: operands[0].data.clone() },
        // The interpreter has no random numbers: it runs programs without dropout.
        Op::Cast | Op::Dropout(_) => operands[0].clone(),
        Op::MaskColumns(columns) => mask_columns(operands[0], *columns as usize, result),
        Op::ReduceSum | Op::SumTokens => sum_of_products(operands, result.dims),
        Op::ReduceMax => reduce_max(operands[0], result.dims),
        Op::Exp => elementwise(&|x| x[0].exp()),
        Op::Log => elementwise(&|x| x[0].ln()),
        Op::Pick => pick(operands[0], operands[1], result),
        Op::PickGradient => pick_gradient(operands[0], operands[1], result),
    }
}

/// An elementwise function with broadcasting of missing dims.
fn map(operands: &[&Array], dims: &[(DimName, usize)], f: &dyn Fn(&[f64]) -> f64) -> Array {
    let mut result = Array::zeros(dims.to_vec());
    let strides: Vec<Vec<usize>> = operands.iter().map(|operand| operand.strides(dims)).collect();
    let strides: Vec<&[usize]> = strides.iter().map(Vec::as_slice).collect();
    let mut arguments = vec![0.0; operands.len()];
    for_each_index(dims, &strides, |position, offsets| {
        for (argument, (operand, offset)) in arguments.iter_mut().zip(operands.iter().zip(offsets)) {
            *argument = operand.data[*offset];
        }
        result.data[position] = f(&arguments);
    });
    result
}

/// Dims of the result followed by those of the operands that it lacks.
fn all_dims(operands: &[&Array], dims: &[(DimName, usize)]) -> Vec<(DimName, usize)> {
    let mut all = dims.to_vec();
    for dim in operands.iter().flat_map(|operand| &operand.dims) {
        if !all.iter().any(|(name, _)| *name == dim.0) {
            all.push(*dim);
        }
    }
    all
}

fn sum_of_products(operands: &[&Array], dims: &[(DimName, usize)]) -> Array {
    let mut result = Array::zeros(dims.to_vec());
    let all = all_dims(operands, dims);
    let mut strides: Vec<Vec<usize>> = operands.iter().map(|operand| operand.strides(&all)).collect();
    strides.push(result.strides(&all));
    let strides: Vec<&[usize]> = strides.iter().map(Vec::as_slice).collect();
    for_each_index(&all, &strides, |_, offsets| {
        let product: f64 = operands.iter().zip(offsets).map(|(operand, offset)| operand.data[*offset]).product();
        result.data[offsets[operands.len()]] += product;
    });
    result
}

fn reduce_max(operand: &Array, dims: &[(DimName, usize)]) -> Array {
    let mut result = Array::zeros(dims.to_vec());
    result.data.fill(f64::NEG_INFINITY);
    let strides = result.strides(&operand.dims);
    for_each_index(&operand.dims, &[&strides], |position, offsets| {
        let best = &mut result.data[offsets[0]];
        *best = best.max(operand.data[position]);
    });
    result
}

fn lookup(ids: &Array, table: &Array, result: &Result) -> Array {
    let width = table.extent(DimName::Hidden);
    let rows = table.data.len() / width;
    let mut found = Array::zeros(result.dims.to_vec());
    let start = row_start(table, result);
    for (token, id) in ids.data.iter().enumerate() {
        let row = (*id as usize).wrapping_sub(start);
        if row < rows {
            found.data[token * width..(token + 1) * width].copy_from_slice(&table.data[row * width..(row + 1) * width]);
        }
    }
    found
}

fn lookup_gradient(ids: &Array, gradient: &Array, result: &Result) -> Array {
    let width = gradient.extent(DimName::Hidden);
    let mut table = Array::zeros(result.dims.to_vec());
    let rows = table.data.len() / width;
    let start = row_start(&table, result);
    for (token, id) in ids.data.iter().enumerate() {
        let row = (*id as usize).wrapping_sub(start);
        if row < rows {
            for column in 0..width {
                table.data[row * width + column] += gradient.data[token * width + column];
            }
        }
    }
    table
}

/// First row that a rank holds: tables of positions are whole.
fn row_start(table: &Array, result: &Result) -> usize {
    let vocabulary = table.dims.iter().any(|(name, _)| *name == DimName::Vocabulary);
    if vocabulary { result.vocabulary_start } else { 0 }
}

/// Mean to subtract and reciprocal deviation of a row.
fn moments(kind: NormKind, epsilon: f64, row: &[f64]) -> (f64, f64) {
    let n = row.len() as f64;
    let mean = match kind {
        NormKind::LayerNorm => row.iter().sum::<f64>() / n,
        NormKind::RmsNorm => 0.0,
    };
    let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
    (mean, 1.0 / (variance + epsilon).sqrt())
}

fn norm(kind: NormKind, epsilon: f64, operands: &[&Array]) -> Array {
    let (input, weight) = (operands[0], operands[1]);
    let width = weight.data.len();
    let mut result = input.clone();
    for row in result.data.chunks_mut(width) {
        let (mean, scale) = moments(kind, epsilon, row);
        for (column, x) in row.iter_mut().enumerate() {
            *x = (*x - mean) * scale * weight.data[column] + operands.get(2).map_or(0.0, |bias| bias.data[column]);
        }
    }
    result
}

fn norm_input_gradient(kind: NormKind, epsilon: f64, operands: &[&Array]) -> Array {
    let (input, weight, gradient) = (operands[0], operands[1], operands[2]);
    let width = weight.data.len();
    let n = width as f64;
    let mut result = input.clone();
    for (row, dy) in result.data.chunks_mut(width).zip(gradient.data.chunks(width)) {
        let (mean, scale) = moments(kind, epsilon, row);
        let unit: Vec<f64> = row.iter().map(|x| (x - mean) * scale).collect();
        let inner: Vec<f64> = dy.iter().zip(&weight.data).map(|(dy, w)| dy * w).collect();
        let along: f64 = inner.iter().zip(&unit).map(|(g, u)| g * u).sum::<f64>() / n;
        let level = match kind {
            NormKind::LayerNorm => inner.iter().sum::<f64>() / n,
            NormKind::RmsNorm => 0.0,
        };
        for (column, x) in row.iter_mut().enumerate() {
            *x = scale * (inner[column] - level - unit[column] * along);
        }
    }
    result
}

fn norm_weight_gradient(kind: NormKind, epsilon: f64, operands: &[&Array], result: &Result) -> Array {
    let (input, gradient) = (operands[0], operands[1]);
    let mut sum = Array::zeros(result.dims.to_vec());
    let width = sum.data.len();
    for (row, dy) in input.data.chunks(width).zip(gradient.data.chunks(width)) {
        let (mean, scale) = moments(kind, epsilon, row);
        for column in 0..width {
            sum.data[column] += (row[column] - mean) * scale * dy[column];
        }
    }
    sum
}

/// Scores are `[micro_batch, key_value_heads, queries, sequence, key_sequence]`.
fn scale_mask(scores: &Array, scale: f64, alibi: bool, result: &Result) -> Array {
    let mut masked = scores.clone();
    let strides = [DimName::KeyValueHeads, DimName::QueriesPerKeyValue, DimName::Sequence, DimName::KeySequence]
        .map(|name| unit_along(scores, name));
    let strides: Vec<&[usize]> = strides.iter().map(Vec::as_slice).collect();
    let (head_start, _) = result.heads;
    let (query_start, queries) = result.queries;
    let all_heads = result.heads.1 * queries;
    for_each_index(&scores.dims, &strides, |position, at| {
        let [head, query, row, column] = [at[0], at[1], at[2], at[3]];
        let bias = match alibi {
            true => slope((head_start + head) * queries + query_start + query, all_heads) * column as f64,
            false => 0.0,
        };
        let x = &mut masked.data[position];
        *x = if column > row { f64::NEG_INFINITY } else { *x * scale + bias };
    });
    masked
}

/// Strides that give the index along one dim.
fn unit_along(array: &Array, name: DimName) -> Vec<usize> {
    array.dims.iter().map(|(dim, _)| usize::from(*dim == name)).collect()
}

/// Slope of an attention head (ALiBi, arXiv 2108.12409, section 3, and its published code for counts that
/// are no power of two).
fn slope(head: usize, heads: usize) -> f64 {
    let power = heads.next_power_of_two() / if heads.is_power_of_two() { 1 } else { 2 };
    let of = |index: usize, count: usize| 2f64.powf(-8.0 * (index + 1) as f64 / count as f64);
    if head < power { of(head, power) } else { of(2 * (head - power), 2 * power) }
}

/// Softmax of the masked scores of query and keys.
fn attention_weights(operands: &[&Array], scale: f64, alibi: bool, result: &Result) -> Array {
    let scores = sum_of_products(&operands[..2], &score_dims(operands));
    softmax(&scale_mask(&scores, scale, alibi, result))
}

/// `[micro_batch, key_value_heads, queries, sequence, key_sequence]`, as far as query and keys have them.
fn score_dims(operands: &[&Array]) -> Vec<(DimName, usize)> {
    let order = [
        DimName::MicroBatch,
        DimName::KeyValueHeads,
        DimName::QueriesPerKeyValue,
        DimName::Sequence,
        DimName::KeySequence,
    ];
    order.map(|name| (name, operands[0].extent(name).max(operands[1].extent(name)))).to_vec()
}

/// Operands: query, keys, values, gradient of the context.
fn attention_gradient(of: AttentionOperand, operands: &[&Array], scale: f64, alibi: bool, result: &Result) -> Array {
    let weights = attention_weights(operands, scale, alibi, result);
    let gradient = operands[3];
    if of == AttentionOperand::Values {
        return sum_of_products(&[&weights, gradient], result.dims);
    }
    let weight_gradient = sum_of_products(&[gradient, operands[2]], &weights.dims);
    let score_gradient = scale_mask_gradient(&softmax_gradient(&weights, &weight_gradient), scale);
    let other = if of == AttentionOperand::Query { operands[1] } else { operands[0] };
    sum_of_products(&[&score_gradient, other], result.dims)
}

fn scale_mask_gradient(gradient: &Array, scale: f64) -> Array {
    let mut result = gradient.clone();
    let strides = [unit_along(gradient, DimName::Sequence), unit_along(gradient, DimName::KeySequence)];
    for_each_index(&gradient.dims, &[&strides[0], &strides[1]], |position, at| {
        let x = &mut result.data[position];
        *x = if at[1] > at[0] { 0.0 } else { *x * scale };
    });
    result
}

fn softmax(input: &Array) -> Array {
    let mut result = input.clone();
    let width = input.extent(DimName::KeySequence);
    for row in result.data.chunks_mut(width) {
        let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        row.iter_mut().for_each(|x| *x = (*x - most).exp());
        let sum: f64 = row.iter().sum();
        row.iter_mut().for_each(|x| *x /= sum);
    }
    result
}

fn softmax_gradient(output: &Array, gradient: &Array) -> Array {
    let mut result = output.clone();
    let width = output.extent(DimName::KeySequence);
    for (row, dy) in result.data.chunks_mut(width).zip(gradient.data.chunks(width)) {
        let inner: f64 = row.iter().zip(dy).map(|(y, dy)| y * dy).sum();
        row.iter_mut().zip(dy).for_each(|(y, dy)| *y *= dy - inner);
    }
    result
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Tanh form of GeLU (arXiv 1606.08415, section 2).
fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + gelu_argument(x).tanh())
}

fn gelu_argument(x: f64) -> f64 {
    std::f64::consts::FRAC_2_PI.sqrt() * (x + 0.044715 * x * x * x)
}

fn gelu_slope(x: f64) -> f64 {
    let t = gelu_argument(x).tanh();
    let inner = std::f64::consts::FRAC_2_PI.sqrt() * (1.0 + 3.0 * 0.044715 * x * x);
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
}

/// Rotates the pairs (i, i + width/2) of each head by position · frequency; `direction` −1 turns back.
fn rotary(input: &Array, base: f64, scaling: Option<RotaryScaling>, direction: f64) -> Array {
    let width = input.extent(DimName::HeadDim);
    let frequencies = rotary_frequencies(base, scaling, width);
    let half = width / 2;
    let mut result = input.clone();
    let position_of = |array: &Array| {
        let sequence = if array.dims.iter().any(|(name, _)| *name == DimName::Sequence) {
            DimName::Sequence
        } else {
            DimName::KeySequence
        };
        unit_along(array, sequence)
    };
    let strides = position_of(input);
    let rows = input.dims[..input.dims.len() - 1].to_vec();
    for_each_index(&rows, &[&strides[..rows.len()]], |row, at| {
        for (pair, frequency) in frequencies.iter().enumerate() {
            let (sin, cos) = (direction * at[0] as f64 * frequency).sin_cos();
            let (a, b) = (input.data[row * width + pair], input.data[row * width + pair + half]);
            result.data[row * width + pair] = a * cos - b * sin;
            result.data[row * width + pair + half] = b * cos + a * sin;
        }
    });
    result
}

fn mask_columns(input: &Array, columns: usize, result: &Result) -> Array {
    let mut masked = input.clone();
    let width = input.extent(DimName::Vocabulary);
    for row in masked.data.chunks_mut(width) {
        let columns = row.iter_mut().enumerate().filter(|(column, _)| result.vocabulary_start + column >= columns);
        columns.for_each(|(_, x)| *x = f64::NEG_INFINITY);
    }
    masked
}

fn pick(values: &Array, ids: &Array, result: &Result) -> Array {
    let width = values.extent(DimName::Vocabulary);
    let mut picked = Array::zeros(result.dims.to_vec());
    for (token, id) in ids.data.iter().enumerate() {
        let column = (*id as usize).wrapping_sub(result.vocabulary_start);
        if column < width {
            picked.data[token] = values.data[token * width + column];
        }
    }
    picked
}

fn pick_gradient(ids: &Array, gradient: &Array, result: &Result) -> Array {
    let mut spread = Array::zeros(result.dims.to_vec());
    let width = spread.extent(DimName::Vocabulary);
    for (token, id) in ids.data.iter().enumerate() {
        let column = (*id as usize).wrapping_sub(result.vocabulary_start);
        if column < width {
            let at = if gradient.data.len() == 1 { 0 } else { token };
            spread.data[token * width + column] = gradient.data[at];
        }
    }
    spread
}
