//! Causal multi-head attention of the reference, forward and backward, one score at a time.

use std::ops::{Range, RangeInclusive};

use super::Network;
use super::operators::{Matrix, add, linear, linear_backward, softmax};
use super::parameters::{Parameters, Sizes};
use crate::model::Position;
use crate::rotary::rotary_frequencies;

/// What the backward pass needs of attention's forward pass.
pub(super) struct AttentionForward {
    /// [tokens, heads · head_dim], after rotary embedding; head = key-value head · group + query.
    query: Matrix,
    /// [tokens, key-value heads · head_dim], after rotary embedding.
    key: Matrix,
    /// [tokens, key-value heads · head_dim].
    value: Matrix,
    /// Softmax weights of each query, in the order of `query_places`; one for each key that it sees.
    weights: Vec<Vec<f64>>,
    /// [tokens, heads · head_dim], before the output projection.
    context: Matrix,
    /// [tokens, hidden], the part's result.
    pub output: Matrix,
}

/// Query, key and value projections, scores, softmax, weighted values, output projection.
pub(super) fn attention(network: &Network, layer: usize, input: &Matrix) -> AttentionForward {
    let project = |part: &str| linear(network.parameters, &format!("layer {layer}/attention.{part}"), input);
    let (mut query, mut key, value) = (project("query"), project("key"), project("value"));
    if network.model.position == Position::Rotary {
        query = rotate(network, &query, 1.0);
        key = rotate(network, &key, 1.0);
    }
    let mut context = Matrix::zeros(query.rows(), query.columns);
    let mut weights = Vec::new();
    for place in query_places(network, input.rows()) {
        let scores: Vec<f64> = place.keys().map(|token| score(network, &place, &query, &key, token)).collect();
        let row = softmax(&scores);
        for (token, weight) in place.keys().zip(&row) {
            add_scaled(place.query_part_mut(&mut context), *weight, place.key_part(&value, token));
        }
        weights.push(row);
    }
    let output = linear(network.parameters, &format!("layer {layer}/attention.output"), &context);
    AttentionForward { query, key, value, weights, context, output }
}

/// With w the softmax weights and g the gradient of the context:
/// dv = w · g, dw = g · v, ds = w · (dw − Σ w · dw), dq = ds · k / √d, dk = ds · q / √d.
pub(super) fn attention_backward(
    network: &Network,
    gradients: &mut Parameters,
    layer: usize,
    input: &Matrix,
    forward: &AttentionForward,
    output_gradient: &Matrix,
) -> Matrix {
    let name = |part: &str| format!("layer {layer}/attention.{part}");
    let context_gradient =
        linear_backward(network.parameters, gradients, &name("output"), &forward.context, output_gradient);
    let AttentionForward { query, key, value, .. } = forward;
    let mut query_gradient = Matrix::zeros(query.rows(), query.columns);
    let mut key_gradient = Matrix::zeros(key.rows(), key.columns);
    let mut value_gradient = Matrix::zeros(value.rows(), value.columns);
    let scale = 1.0 / (network.sizes.head_dim as f64).sqrt();
    for (place, weights) in query_places(network, input.rows()).iter().zip(&forward.weights) {
        let upstream = place.query_part(&context_gradient);
        let weight_gradient = |token: usize| dot(upstream, place.key_part(value, token));
        let mean: f64 = place.keys().zip(weights).map(|(token, weight)| weight * weight_gradient(token)).sum();
        for (token, weight) in place.keys().zip(weights) {
            let scaled = weight * (weight_gradient(token) - mean) * scale;
            add_scaled(place.key_part_mut(&mut value_gradient, token), *weight, upstream);
            add_scaled(place.query_part_mut(&mut query_gradient), scaled, place.key_part(key, token));
            add_scaled(place.key_part_mut(&mut key_gradient, token), scaled, place.query_part(query));
        }
    }
    if network.model.position == Position::Rotary {
        query_gradient = rotate(network, &query_gradient, -1.0);
        key_gradient = rotate(network, &key_gradient, -1.0);
    }
    let mut project = |part, gradient| linear_backward(network.parameters, gradients, &name(part), input, gradient);
    let from_query = project("query", &query_gradient);
    let from_key = project("key", &key_gradient);
    let from_value = project("value", &value_gradient);
    add(&add(&from_query, &from_key), &from_value)
}

/// One query: a token seen by one head.
struct QueryPlace {
    /// Row of the query.
    token: usize,
    /// Row of the first token of its sequence.
    sequence_start: usize,
    /// Query head.
    head: usize,
    /// Columns of the head in queries and contexts.
    query_columns: Range<usize>,
    /// Columns of the head's key-value head in keys and values.
    key_columns: Range<usize>,
}

impl QueryPlace {
    /// Rows of the keys that the query sees: its sequence up to itself.
    fn keys(&self) -> RangeInclusive<usize> {
        self.sequence_start..=self.token
    }

    fn query_part<'a>(&self, queries: &'a Matrix) -> &'a [f64] {
        &queries.row(self.token)[self.query_columns.clone()]
    }

    fn query_part_mut<'a>(&self, queries: &'a mut Matrix) -> &'a mut [f64] {
        &mut queries.row_mut(self.token)[self.query_columns.clone()]
    }

    fn key_part<'a>(&self, keys: &'a Matrix, token: usize) -> &'a [f64] {
        &keys.row(token)[self.key_columns.clone()]
    }

    fn key_part_mut<'a>(&self, keys: &'a mut Matrix, token: usize) -> &'a mut [f64] {
        &mut keys.row_mut(token)[self.key_columns.clone()]
    }
}

/// Every query of a batch.
fn query_places(network: &Network, num_tokens: usize) -> Vec<QueryPlace> {
    let Sizes { key_value_heads, queries_per_key_value: group, head_dim, .. } = network.sizes;
    let columns = |head: usize| head * head_dim..(head + 1) * head_dim;
    let mut places = Vec::new();
    for token in 0..num_tokens {
        let sequence_start = token - token % network.sequence_length;
        for head in 0..key_value_heads * group {
            let (query_columns, key_columns) = (columns(head), columns(head / group));
            places.push(QueryPlace { token, sequence_start, head, query_columns, key_columns });
        }
    }
    places
}

/// q · k / √head_dim, plus ALiBi's slope · key position.
fn score(network: &Network, place: &QueryPlace, query: &Matrix, key: &Matrix, token: usize) -> f64 {
    let product = dot(place.query_part(query), place.key_part(key, token));
    let scaled = product / (network.sizes.head_dim as f64).sqrt();
    match network.model.position {
        Position::Alibi => scaled + network.alibi_slopes[place.head] * (token - place.sequence_start) as f64,
        Position::Learned | Position::Rotary => scaled,
    }
}

/// Slopes of ALiBi's linear bias, one for each head.
///
/// n = 2^k heads: 2^(−8(i+1)/n). Other n: the slopes of the next lower power of two, then every
/// second slope of the next higher one.
///
/// Source: Press et al., arXiv 2108.12409, section 3, and for other n the authors' published code.
pub(super) fn alibi_slopes(num_heads: usize) -> Vec<f64> {
    let of_power = |heads: usize| (1..=heads).map(move |i| (-8.0 * i as f64 / heads as f64).exp2());
    let lower = 1 << num_heads.ilog2();
    of_power(lower).chain(of_power(2 * lower).step_by(2)).take(num_heads).collect()
}

/// Rotary embedding of every head: the pair (i, i + head_dim/2) turns by position · frequency i.
///
/// The gradient turns back: `direction` is 1 forward and −1 backward.
fn rotate(network: &Network, input: &Matrix, direction: f64) -> Matrix {
    let head_dim = network.sizes.head_dim;
    assert!(head_dim.is_multiple_of(2), "rotary embedding needs an even head_dim, not {head_dim}");
    let frequencies = rotary_frequencies(network.model.rotary_base, network.model.rotary_scaling, head_dim);
    let mut output = Matrix::zeros(input.rows(), input.columns);
    for token in 0..input.rows() {
        let position = (token % network.sequence_length) as f64;
        for head_start in (0..input.columns).step_by(head_dim) {
            for (i, frequency) in frequencies.iter().enumerate() {
                let (first, second) = (head_start + i, head_start + i + head_dim / 2);
                let angle = direction * position * frequency;
                let (x, y) = (input.row(token)[first], input.row(token)[second]);
                output.row_mut(token)[first] = x * angle.cos() - y * angle.sin();
                output.row_mut(token)[second] = y * angle.cos() + x * angle.sin();
            }
        }
    }
    output
}

/// target += factor · values.
fn add_scaled(target: &mut [f64], factor: f64, values: &[f64]) {
    target.iter_mut().zip(values).for_each(|(target, value)| *target += factor * value);
}

fn dot(left: &[f64], right: &[f64]) -> f64 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_follow_the_paper() {
        let check = |num_heads: usize, index: usize, exponent: f64| {
            let slopes = alibi_slopes(num_heads);
            assert_eq!(slopes.len(), num_heads);
            let expected = exponent.exp2();
            assert!((slopes[index] / expected - 1.0).abs() < 1e-14, "slope {index} of {num_heads}: {}", slopes[index]);
        };
        check(8, 0, -1.0);
        check(8, 7, -8.0);
        check(1, 0, -8.0);
        check(6, 3, -8.0);
        check(6, 4, -1.0);
        check(6, 5, -3.0);
        check(112, 0, -1.0 / 8.0);
        check(112, 63, -8.0);
        check(112, 64, -1.0 / 16.0);
        check(112, 65, -3.0 / 16.0);
        check(112, 111, -95.0 / 16.0);
    }
}
