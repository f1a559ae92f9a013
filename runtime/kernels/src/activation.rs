//! GeLU with a bias, and SwiGLU, forward and backward.

use cubecl::prelude::*;

use crate::queue::{BUSY, cubes_for, expect_all, send};
use crate::sums::{add_strips, strips};
use crate::{Buffer, Element, Queue};

/// √(2/π).
const ROOT: f32 = 0.797_884_6;
/// Weight of the cube in GeLU's argument.
const CUBE: f32 = 0.044715;
/// Units of a cube.
const UNITS: u32 = 256;

/// y = gelu(x + bias), for `x` and `y` of `[rows, columns]`, `bias` of `[columns]`.
///
/// Moves 2e bytes per element of `x`.
pub fn bias_gelu(queue: &Queue, x: &Buffer, bias: &Buffer, y: &Buffer) {
    let (element, width) = (x.element, x.element.width(bias.length));
    assert!(x.length.is_multiple_of(bias.length), "rows are as long as the bias");
    let [x, bias, y] = [x, bias.expect(bias.length, element), y.expect(x.length, element)];
    let cubes = cubes_for(x.length / width, UNITS);
    send!(
        queue,
        bias_gelu_kernel,
        cubes,
        UNITS,
        width,
        x.argument(width),
        bias.argument(width),
        y.argument(width),
        element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn bias_gelu_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    bias: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    #[define(F)] _element: ElemType,
) {
    let mut at = ABSOLUTE_POS;
    while at < y.len() {
        let sum = Vector::<f32, N>::cast_from(x[at]) + Vector::<f32, N>::cast_from(bias[at % bias.len()]);
        y[at] = Vector::cast_from(gelu::<N>(sum));
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Gradients of [`bias_gelu`]: `dx` of its argument from `dy`, and what that adds to the fp32 gradient `dbias`,
/// which is replaced unless `accumulate`.
///
/// Moves 3e bytes per element of `x`.
pub fn bias_gelu_gradient(queue: &Queue, [x, bias, dy]: [&Buffer; 3], dx: &Buffer, dbias: &Buffer, accumulate: bool) {
    let (element, width) = (x.element, x.element.width(bias.length));
    assert!(x.length.is_multiple_of(bias.length), "rows are as long as the bias");
    let (rows, columns) = (x.length / bias.length, bias.length / width);
    bias.expect(bias.length, element);
    expect_all([dy, dx], x.length, element);
    let blocks = columns.div_ceil(UNITS as usize);
    let strips = strips(rows, BUSY / blocks);
    let partial = queue.buffer(strips * bias.length, Element::Single);
    send!(
        queue,
        bias_gelu_gradient_kernel,
        CubeCount::Static(blocks as u32, strips as u32, 1),
        UNITS,
        width,
        x.argument(width),
        bias.argument(width),
        dy.argument(width),
        dx.argument(width),
        partial.argument(width),
        element.kind()
    );
    add_strips(queue, &partial, dbias, accumulate);
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn bias_gelu_gradient_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    bias: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    dx: &mut [Vector<F, N>],
    partial: &mut [Vector<f32, N>],
    #[define(F)] _element: ElemType,
) {
    let columns = bias.len();
    let rows = dx.len() / columns;
    let column = (CUBE_POS_X * CUBE_DIM + UNIT_POS) as usize;
    if column < columns {
        let own = Vector::<f32, N>::cast_from(bias[column]);
        let mut sum = Vector::<f32, N>::new(0.0);
        let mut row = CUBE_POS_Y as usize;
        while row < rows {
            let at = row * columns + column;
            let slope = gelu_slope::<N>(Vector::<f32, N>::cast_from(x[at]) + own);
            let gradient = slope * Vector::<f32, N>::cast_from(dy[at]);
            dx[at] = Vector::cast_from(gradient);
            sum += gradient;
            row += CUBE_COUNT_Y as usize;
        }
        partial[CUBE_POS_Y as usize * columns + column] = sum;
    }
}

/// y = silu(gate) · up.
///
/// Moves 3e bytes per element of `y`.
pub fn swiglu(queue: &Queue, [gate, up]: [&Buffer; 2], y: &Buffer) {
    let (element, width) = (gate.element, gate.element.width(gate.length));
    expect_all([up, y], gate.length, element);
    let cubes = cubes_for(gate.length / width, UNITS);
    send!(
        queue,
        swiglu_kernel,
        cubes,
        UNITS,
        width,
        gate.argument(width),
        up.argument(width),
        y.result(width, &[gate, up]),
        element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn swiglu_kernel<F: Float, N: Size>(
    gate: &[Vector<F, N>],
    up: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    #[define(F)] _element: ElemType,
) {
    let mut at = ABSOLUTE_POS;
    while at < y.len() {
        let own = Vector::<f32, N>::cast_from(gate[at]);
        y[at] = Vector::cast_from(own * sigmoid::<N>(own) * Vector::<f32, N>::cast_from(up[at]));
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Gradients of [`swiglu`]'s operands from `dy`.
///
/// Moves 5e bytes per element of `dy`.
pub fn swiglu_gradient(queue: &Queue, [gate, up, dy]: [&Buffer; 3], [dgate, dup]: [&Buffer; 2]) {
    let (element, width) = (gate.element, gate.element.width(gate.length));
    expect_all([up, dy, dgate, dup], gate.length, element);
    let cubes = cubes_for(gate.length / width, UNITS);
    send!(
        queue,
        swiglu_gradient_kernel,
        cubes,
        UNITS,
        width,
        gate.argument(width),
        up.argument(width),
        dy.argument(width),
        dgate.argument(width),
        dup.argument(width),
        element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn swiglu_gradient_kernel<F: Float, N: Size>(
    gate: &[Vector<F, N>],
    up: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    dgate: &mut [Vector<F, N>],
    dup: &mut [Vector<F, N>],
    #[define(F)] _element: ElemType,
) {
    let mut at = ABSOLUTE_POS;
    while at < dgate.len() {
        let own = Vector::<f32, N>::cast_from(gate[at]);
        let gradient = Vector::<f32, N>::cast_from(dy[at]);
        let s = sigmoid::<N>(own);
        let slope = s * (Vector::new(1.0) + own * (Vector::new(1.0) - s));
        dgate[at] = Vector::cast_from(gradient * Vector::<f32, N>::cast_from(up[at]) * slope);
        dup[at] = Vector::cast_from(gradient * own * s);
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}

#[cube]
pub(crate) fn sigmoid<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    Vector::new(1.0) / (Vector::new(1.0) + (-x).exp())
}

/// Tanh form of GeLU (arXiv 1606.08415, section 2) as x · sigmoid(2u), u = √(2/π)(x + 0.044715 x³).
#[cube]
pub(crate) fn gelu<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    x * sigmoid::<N>(Vector::new(2.0 * ROOT) * (x + Vector::new(CUBE) * x * x * x))
}

/// Derivative of [`gelu`]: s + 2 x s (1 − s) du/dx with s = sigmoid(2u).
#[cube]
pub(crate) fn gelu_slope<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let s = sigmoid::<N>(Vector::new(2.0 * ROOT) * (x + Vector::new(CUBE) * x * x * x));
    let turn = Vector::new(ROOT) * (Vector::new(1.0) + Vector::new(3.0 * CUBE) * x * x);
    s + Vector::new(2.0) * x * s * (Vector::new(1.0) - s) * turn
}
