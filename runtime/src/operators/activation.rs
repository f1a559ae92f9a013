//! GeLU and SiLU, and their slopes.

use super::exponential::sigmoid;

/// √(2/π).
const ROOT: f32 = 0.797_884_6;
/// Weight of the cube in GeLU's argument.
const CUBE: f32 = 0.044715;

/// Tanh form of GeLU (arXiv 1606.08415, section 2): ½ x (1 + tanh u) = x · sigmoid(2u), u = √(2/π)(x + 0.044715 x³).
#[inline(always)]
pub fn gelu(x: f32) -> f32 {
    x * sigmoid(2.0 * ROOT * (x + CUBE * x * x * x))
}

/// Derivative of [`gelu`]: s + 2 x s (1 − s) du/dx with s = sigmoid(2u).
#[inline(always)]
fn gelu_slope(x: f32) -> f32 {
    let s = sigmoid(2.0 * ROOT * (x + CUBE * x * x * x));
    s + 2.0 * x * s * (1.0 - s) * (ROOT * (1.0 + 3.0 * CUBE * x * x))
}

/// Gradient of [`gelu`]'s argument from that of its value.
#[inline(always)]
pub fn gelu_gradient(dy: f32, x: f32) -> f32 {
    gelu_slope(x) * dy
}

/// x · sigmoid(x).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// Derivative of [`silu`].
#[inline(always)]
fn silu_slope(x: f32) -> f32 {
    let s = sigmoid(x);
    s * (1.0 + x * (1.0 - s))
}

/// Gradient of [`silu`]'s argument from that of its value.
#[inline(always)]
pub fn silu_gradient(dy: f32, x: f32) -> f32 {
    silu_slope(x) * dy
}
