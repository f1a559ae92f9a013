//! The single-rank reference of a training step: plain f64 loops over a `ModelSpec`.
//!
//! It is the oracle of every test that compiles, interprets or executes a program, and therefore
//! shares no code with any of that: it reads nothing but the model's types, knows no shards, no
//! micro-batches and no graph, and keeps every activation. Clarity goes before speed: models of a
//! few thousand parameters take milliseconds.
//!
//! Deliberately absent: latent attention and experts (it panics), number formats other than f64.

mod adamw;
mod attention;
mod feed_forward;
mod operators;
mod parameters;

pub use adamw::{AdamState, AdamW, adamw_step};
pub use parameters::{Parameters, initial_parameters};

use attention::{AttentionForward, attention, attention_backward};
use feed_forward::{FeedForwardForward, feed_forward, feed_forward_backward};
use operators::{
    Matrix, accumulate, add, gradient_of, multiply, norm, norm_backward, parameter_matrix, softmax, transpose,
};
use parameters::{Sizes, parameter_shapes, sizes, unit_hash};

use crate::model::{ModelSpec, Position};

/// Token ids of a step and the id that should follow each of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// [sequences, sequence_length], row-major.
    pub tokens: Vec<usize>,
    /// [sequences, sequence_length], row-major.
    pub targets: Vec<usize>,
}

/// Made-up tokens and targets below the vocabulary's size, a pure function of seed and index.
pub fn random_batch(model: &ModelSpec, sequences: usize, sequence_length: usize, seed: u64) -> Batch {
    let size = model.vocabulary.size as usize;
    let draw = |key: &str| {
        let id = |index| (unit_hash(seed, key, index) * size as f64) as usize;
        (0..sequences * sequence_length).map(id).collect()
    };
    Batch { tokens: draw("tokens"), targets: draw("targets") }
}

/// Mean cross-entropy over all tokens; the softmax is over all rows of the vocabulary, padded ones too.
///
/// # Panics
/// If parameters or batch do not fit the model, or the model has latent attention, experts or deviations.
pub fn loss(model: &ModelSpec, parameters: &Parameters, batch: &Batch, sequence_length: usize) -> f64 {
    forward(&network(model, parameters, batch, sequence_length), batch).loss
}

/// Logits of every token, [tokens, vocabulary rows], row-major; the batch's targets are not used.
///
/// # Panics
/// As [`loss`].
pub fn logits(model: &ModelSpec, parameters: &Parameters, batch: &Batch, sequence_length: usize) -> Vec<f64> {
    let network = network(model, parameters, batch, sequence_length);
    let normed = forward(&network, batch).normed;
    multiply(&normed, &transpose(&head_weight(&network))).values
}

/// The loss, and its gradient with respect to each parameter.
///
/// # Panics
/// As [`loss`].
pub fn loss_and_gradients(
    model: &ModelSpec,
    parameters: &Parameters,
    batch: &Batch,
    sequence_length: usize,
) -> (f64, Parameters) {
    let network = network(model, parameters, batch, sequence_length);
    let forward = forward(&network, batch);
    let mut gradients = parameters.iter().map(|(key, values)| (key.clone(), vec![0.0; values.len()])).collect();
    let mut stream_gradient = head_backward(&network, &mut gradients, &forward, batch);
    for (index, layer) in forward.layers.iter().enumerate().rev() {
        stream_gradient = layer_backward(&network, &mut gradients, index, layer, stream_gradient);
    }
    embedding_backward(&network, &mut gradients, &forward, batch, stream_gradient);
    (forward.loss, gradients)
}

/// A model with its parameters.
struct Network<'a> {
    model: &'a ModelSpec,
    sizes: Sizes,
    parameters: &'a Parameters,
    sequence_length: usize,
    alibi_slopes: Vec<f64>,
}

/// Activations of a step; all matrices are [tokens, hidden] unless said otherwise.
struct Forward {
    /// Sum of token and position vectors, before the embedding norm.
    embedded: Matrix,
    layers: Vec<LayerForward>,
    /// Residual stream after the last layer.
    stream: Matrix,
    /// After the final norm.
    normed: Matrix,
    /// [tokens, vocabulary rows].
    probabilities: Matrix,
    loss: f64,
}

/// Activations of a layer; all matrices are [tokens, hidden].
struct LayerForward {
    input: Matrix,
    attention_input: Matrix,
    attention: AttentionForward,
    /// Residual stream between attention and feed-forward.
    middle: Matrix,
    feed_forward_input: Matrix,
    feed_forward: FeedForwardForward,
}

/// Checks that the arguments belong together.
fn network<'a>(model: &'a ModelSpec, parameters: &'a Parameters, batch: &Batch, sequence_length: usize) -> Network<'a> {
    let expected = parameter_shapes(model).into_iter().map(|(key, shape)| (key, shape.iter().product()));
    let actual = parameters.iter().map(|(key, values)| (key.clone(), values.len()));
    assert!(actual.eq(expected), "the parameters are not those of {}", model.name);
    assert!(model.deviations.is_empty(), "{} deviates by {:?}", model.name, model.deviations);
    assert_eq!(batch.tokens.len(), batch.targets.len(), "tokens and targets");
    assert!(!batch.tokens.is_empty() && batch.tokens.len().is_multiple_of(sequence_length), "whole sequences");
    let longest = model.max_sequence_length.tokens() as usize;
    assert!(model.position != Position::Learned || sequence_length <= longest, "{longest} learned positions");
    let alibi_slopes = attention::alibi_slopes(model.attention.num_attention_heads() as usize);
    Network { model, sizes: sizes(model), parameters, sequence_length, alibi_slopes }
}

fn forward(network: &Network, batch: &Batch) -> Forward {
    let Network { model, parameters, .. } = *network;
    let embedded = embed(network, batch);
    let mut stream = embedded.clone();
    if model.embedding_norm {
        stream = norm(parameters, model, "embedding/embedding.norm", &stream);
    }
    let mut layers = Vec::new();
    for index in 0..network.sizes.num_layers {
        let (layer, output) = layer_forward(network, index, stream);
        layers.push(layer);
        stream = output;
    }
    let normed = norm(parameters, model, "head/final_norm", &stream);
    let logits = multiply(&normed, &transpose(&head_weight(network)));
    let (loss, probabilities) = cross_entropy(&logits, &batch.targets);
    Forward { embedded, layers, stream, normed, probabilities, loss }
}

/// Token vectors, plus position vectors where they are learned.
fn embed(network: &Network, batch: &Batch) -> Matrix {
    let Sizes { hidden, vocabulary_rows, .. } = network.sizes;
    let table = parameter_matrix(network.parameters, "embedding/embedding.token", vocabulary_rows);
    let mut embedded = Matrix::zeros(batch.tokens.len(), hidden);
    for (row, token) in batch.tokens.iter().enumerate() {
        accumulate(embedded.row_mut(row), table.row(*token));
    }
    if network.model.position == Position::Learned {
        let positions = &network.parameters["embedding/embedding.position"];
        for row in 0..embedded.rows() {
            let start = row % network.sequence_length * hidden;
            accumulate(embedded.row_mut(row), &positions[start..start + hidden]);
        }
    }
    embedded
}

fn embedding_backward(
    network: &Network,
    gradients: &mut Parameters,
    forward: &Forward,
    batch: &Batch,
    stream_gradient: Matrix,
) {
    let Network { model, parameters, .. } = *network;
    let mut gradient = stream_gradient;
    if model.embedding_norm {
        let name = "embedding/embedding.norm";
        gradient = norm_backward(parameters, gradients, model, name, &forward.embedded, &gradient);
    }
    let hidden = network.sizes.hidden;
    let mut add_row = |key: &str, table_row: usize, values: &[f64]| {
        let start = table_row * hidden;
        accumulate(&mut gradient_of(gradients, key)[start..start + hidden], values);
    };
    for (row, token) in batch.tokens.iter().enumerate() {
        add_row("embedding/embedding.token", *token, gradient.row(row));
        if model.position == Position::Learned {
            add_row("embedding/embedding.position", row % network.sequence_length, gradient.row(row));
        }
    }
}

/// x + attention(norm(x)), then y + feed_forward(norm(y)); returns the activations and the output.
fn layer_forward(network: &Network, index: usize, input: Matrix) -> (LayerForward, Matrix) {
    let normalise = |part: &str, stream: &Matrix| {
        norm(network.parameters, network.model, &format!("layer {index}/{part}.norm"), stream)
    };
    let attention_input = normalise("attention", &input);
    let attention = attention(network, index, &attention_input);
    let middle = add(&input, &attention.output);
    let feed_forward_input = normalise("feed_forward", &middle);
    let feed_forward = feed_forward(network, index, &feed_forward_input);
    let output = add(&middle, &feed_forward.output);
    (LayerForward { input, attention_input, attention, middle, feed_forward_input, feed_forward }, output)
}

/// Gradient of the layer's input.
fn layer_backward(
    network: &Network,
    gradients: &mut Parameters,
    index: usize,
    layer: &LayerForward,
    output_gradient: Matrix,
) -> Matrix {
    let Network { model, parameters, .. } = *network;
    let normed = &layer.feed_forward_input;
    let gradient = feed_forward_backward(network, gradients, index, normed, &layer.feed_forward, &output_gradient);
    let name = format!("layer {index}/feed_forward.norm");
    let gradient = norm_backward(parameters, gradients, model, &name, &layer.middle, &gradient);
    let middle_gradient = add(&output_gradient, &gradient);

    let normed = &layer.attention_input;
    let gradient = attention_backward(network, gradients, index, normed, &layer.attention, &middle_gradient);
    let name = format!("layer {index}/attention.norm");
    let gradient = norm_backward(parameters, gradients, model, &name, &layer.input, &gradient);
    add(&middle_gradient, &gradient)
}

fn head_key(model: &ModelSpec) -> &'static str {
    if model.tied_embedding { "embedding/embedding.token" } else { "head/head.weight" }
}

/// [vocabulary rows, hidden].
fn head_weight(network: &Network) -> Matrix {
    parameter_matrix(network.parameters, head_key(network.model), network.sizes.vocabulary_rows)
}

/// Mean over tokens of log(Σ exp(logit)) − logit of the target, and the softmax of each row.
fn cross_entropy(logits: &Matrix, targets: &[usize]) -> (f64, Matrix) {
    let mut probabilities = Matrix::zeros(logits.rows(), logits.columns);
    let mut sum = 0.0;
    for (row, target) in targets.iter().enumerate() {
        let logits = logits.row(row);
        let maximum = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let log_sum = maximum + logits.iter().map(|logit| (logit - maximum).exp()).sum::<f64>().ln();
        sum += log_sum - logits[*target];
        probabilities.row_mut(row).copy_from_slice(&softmax(logits));
    }
    (sum / targets.len() as f64, probabilities)
}

/// Gradient of the stream after the last layer; a logit's is (probability − 1 at the target) / tokens.
fn head_backward(network: &Network, gradients: &mut Parameters, forward: &Forward, batch: &Batch) -> Matrix {
    let Network { model, parameters, .. } = *network;
    let mut logits_gradient = forward.probabilities.clone();
    for (row, target) in batch.targets.iter().enumerate() {
        logits_gradient.row_mut(row)[*target] -= 1.0;
    }
    logits_gradient.values.iter_mut().for_each(|value| *value /= batch.targets.len() as f64);
    let weight_gradient = multiply(&transpose(&logits_gradient), &forward.normed);
    accumulate(gradient_of(gradients, head_key(model)), &weight_gradient.values);
    let normed_gradient = multiply(&logits_gradient, &head_weight(network));
    norm_backward(parameters, gradients, model, "head/final_norm", &forward.stream, &normed_gradient)
}

#[cfg(test)]
mod tests;
