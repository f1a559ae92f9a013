//! Dense feed-forward of the reference, forward and backward.

use std::f64::consts::PI;

use super::Network;
use super::operators::{Matrix, add, combine, linear, linear_backward};
use super::parameters::Parameters;
use crate::model::FeedForward;

/// Coefficient of the cube in GeLU's tanh approximation (Hendrycks and Gimpel, arXiv 1606.08415, section 2).
const GELU_CUBE: f64 = 0.044715;

/// What the backward pass needs of the feed-forward's forward pass; all [tokens, intermediate].
pub(super) struct FeedForwardForward {
    /// The gate's projection, for SwiGLU.
    gate: Option<Matrix>,
    /// The up projection.
    up: Matrix,
    /// What enters the down projection.
    active: Matrix,
    /// [tokens, hidden], the part's result.
    pub output: Matrix,
}

/// down(gelu(up(x))), or down(silu(gate(x)) · up(x)).
pub(super) fn feed_forward(network: &Network, layer: usize, input: &Matrix) -> FeedForwardForward {
    let project = |part: &str, input| linear(network.parameters, &format!("layer {layer}/feed_forward.{part}"), input);
    let up = project("up", input);
    let gate = matches!(network.model.feed_forward, FeedForward::SwiGlu { .. }).then(|| project("gate", input));
    let active = match &gate {
        None => Matrix { columns: up.columns, values: up.values.iter().map(|x| gelu(*x)).collect() },
        Some(gate) => combine(gate, &up, |gate, up| silu(gate) * up),
    };
    let output = project("down", &active);
    FeedForwardForward { gate, up, active, output }
}

/// Gradient of the part's input.
pub(super) fn feed_forward_backward(
    network: &Network,
    gradients: &mut Parameters,
    layer: usize,
    input: &Matrix,
    forward: &FeedForwardForward,
    output_gradient: &Matrix,
) -> Matrix {
    let mut project = |part: &str, input: &Matrix, gradient: &Matrix| {
        let name = format!("layer {layer}/feed_forward.{part}");
        linear_backward(network.parameters, gradients, &name, input, gradient)
    };
    let active_gradient = project("down", &forward.active, output_gradient);
    let up = &forward.up;
    match &forward.gate {
        None => project("up", input, &combine(&active_gradient, up, |gradient, up| gradient * gelu_slope(up))),
        Some(gate) => {
            let slopes = combine(gate, up, |gate, up| silu_slope(gate) * up);
            let gate_gradient = combine(&active_gradient, &slopes, |gradient, slope| gradient * slope);
            let up_gradient = combine(&active_gradient, gate, |gradient, gate| gradient * silu(gate));
            add(&project("gate", input, &gate_gradient), &project("up", input, &up_gradient))
        }
    }
}

/// x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))).
fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + gelu_argument(x).tanh())
}

/// With t the tanh: (1 + t)/2 + x/2 · (1 − t²) · √(2/π) · (1 + 3 · 0.044715 x²).
fn gelu_slope(x: f64) -> f64 {
    let tanh = gelu_argument(x).tanh();
    let argument_slope = (2.0 / PI).sqrt() * (1.0 + 3.0 * GELU_CUBE * x * x);
    0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * argument_slope
}

fn gelu_argument(x: f64) -> f64 {
    (2.0 / PI).sqrt() * (x + GELU_CUBE * x * x * x)
}

/// x · sigmoid(x).
fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// σ · (1 + x · (1 − σ)).
fn silu_slope(x: f64) -> f64 {
    sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x)))
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
