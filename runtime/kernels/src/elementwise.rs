//! Elementwise operators, of one operand and of two with broadcasting, for what no fused kernel takes.

use cubecl::prelude::*;

use crate::activation::{gelu, gelu_slope, sigmoid};
use crate::queue::{cubes_for, send};
use crate::strided::{Loops, place_of};
use crate::{Buffer, Queue};

/// Units of a cube.
const UNITS: u32 = 256;

/// An operator of one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unary {
    /// The same number, in another format or at another place.
    Copy,
    /// Product with a constant.
    Scale,
    /// Exponential.
    Exp,
    /// Natural logarithm.
    Log,
    /// GeLU, tanh form.
    Gelu,
    /// x · sigmoid(x).
    Silu,
}

/// An operator of two operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Binary {
    /// a + b.
    Add,
    /// a − b.
    Subtract,
    /// a · b.
    Multiply,
    /// a / b.
    Divide,
    /// b · gelu'(a).
    GeluGradient,
    /// b · silu'(a).
    SiluGradient,
}

/// y = f(x), or with `accumulate` y + f(x); `factor` is that of [`Unary::Scale`]. `x` and `y` may be one memory.
///
/// Moves an element of `x` and one of `y`, with `accumulate` two of `y`.
pub fn unary(queue: &Queue, f: Unary, factor: f32, x: &Buffer, y: &Buffer, accumulate: bool) {
    let width = x.element.width(x.length).min(y.element.width(x.length));
    y.expect(x.length, y.element);
    send!(
        queue,
        unary_kernel,
        cubes_for(x.length / width, UNITS),
        UNITS,
        width,
        x.argument(width),
        y.result(width, &[x]),
        factor,
        f,
        accumulate,
        x.element.kind(),
        y.element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn unary_kernel<F: Float, G: Float, N: Size>(
    x: &[Vector<F, N>],
    y: &mut [Vector<G, N>],
    factor: f32,
    #[comptime] f: Unary,
    #[comptime] accumulate: bool,
    #[define(F)] _from: ElemType,
    #[define(G)] _to: ElemType,
) {
    let mut at = ABSOLUTE_POS;
    while at < y.len() {
        let mut own = of_one::<N>(Vector::cast_from(x[at]), factor, f);
        if comptime!(accumulate) {
            own += Vector::<f32, N>::cast_from(y[at]);
        }
        y[at] = Vector::cast_from(own);
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}

#[cube]
fn of_one<N: Size>(x: Vector<f32, N>, factor: f32, #[comptime] f: Unary) -> Vector<f32, N> {
    match comptime!(f) {
        Unary::Copy => x,
        Unary::Scale => x * Vector::new(factor),
        Unary::Exp => x.exp(),
        Unary::Log => x.ln(),
        Unary::Gelu => gelu::<N>(x),
        Unary::Silu => x * sigmoid::<N>(x),
    }
}

/// Fills memory with a number.
///
/// Moves e bytes per element.
pub fn fill(queue: &Queue, number: f32, y: &Buffer) {
    let width = y.element.width(y.length);
    let cubes = cubes_for(y.length / width, UNITS);
    send!(queue, fill_kernel, cubes, UNITS, width, y.argument(width), number, y.element.kind());
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn fill_kernel<F: Float, N: Size>(y: &mut [Vector<F, N>], number: f32, #[define(F)] _element: ElemType) {
    let mut at = ABSOLUTE_POS;
    while at < y.len() {
        y[at] = Vector::new(F::cast_from(number));
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// y = f(a, b), the strides of `loops` being those of `a`, of `b` and of `y`, which is row-major. `y` may be the memory
/// of an operand that has all its elements.
///
/// Moves an element of `y` each, and of the operands what they have.
pub fn binary(queue: &Queue, f: Binary, loops: &Loops, [a, b]: [&Buffer; 2], y: &Buffer) {
    let reach = [0, 1, 2].map(|of| loops.reach(of));
    assert!(reach[0] <= a.length && reach[1] <= b.length && reach[2] <= y.length, "loops stay inside their tensors");
    let strides = loops.innermost().strides;
    let is_row = |of: usize| strides[of] == 1;
    let widths = [a, b, y].map(|buffer| buffer.element.width(loops.innermost().extent));
    let wanted = widths.into_iter().min().unwrap_or(1);
    let vectors = [0, 1, 2].map(is_row);
    let possible = vectors.iter().zip(strides).all(|(row, stride)| *row || stride == 0);
    let found = [16, 8, 4, 2].into_iter().filter(|width| possible && *width <= wanted).find_map(|width| {
        let fits = [a, b, y].into_iter().zip(vectors).all(|(buffer, row)| !row || buffer.length.is_multiple_of(width));
        loops.in_vectors(width, vectors).filter(|_| fits).map(|loops| (width, loops))
    });
    let (width, loops) = found.unwrap_or((1, *loops));
    let width_of = |row: bool| if row { width } else { 1 };
    send!(
        queue,
        binary_kernel,
        cubes_for(loops.rounds(), UNITS),
        UNITS,
        width_of(vectors[0]),
        width_of(vectors[1]),
        width,
        a.argument(width_of(vectors[0])),
        b.argument(width_of(vectors[1])),
        y.result(width, &[a, b]),
        loops.rounds() as u32,
        f,
        loops,
        [vectors[0], vectors[1]],
        a.element.kind(),
        b.element.kind(),
        y.element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn binary_kernel<A: Float, B: Float, F: Float, J: Size, K: Size, N: Size>(
    a: &[Vector<A, J>],
    b: &[Vector<B, K>],
    y: &mut [Vector<F, N>],
    rounds: u32,
    #[comptime] f: Binary,
    #[comptime] loops: Loops,
    #[comptime] rows: [bool; 2],
    #[define(A)] _first: ElemType,
    #[define(B)] _second: ElemType,
    #[define(F)] _element: ElemType,
) {
    let mut round = ABSOLUTE_POS;
    while round < rounds as usize {
        let left = wide::<A, J, N>(a[place_of(round, loops, 0usize)], comptime!(rows[0]));
        let right = wide::<B, K, N>(b[place_of(round, loops, 1usize)], comptime!(rows[1]));
        y[place_of(round, loops, 2usize)] = Vector::cast_from(of_two::<N>(left, right, f));
        round += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// A vector in fp32; a single number in every lane.
#[cube]
fn wide<F: Float, M: Size, N: Size>(numbers: Vector<F, M>, #[comptime] is_row: bool) -> Vector<f32, N> {
    if comptime!(is_row) { Vector::cast_from(numbers) } else { Vector::new(f32::cast_from(numbers.extract(0usize))) }
}

#[cube]
fn of_two<N: Size>(a: Vector<f32, N>, b: Vector<f32, N>, #[comptime] f: Binary) -> Vector<f32, N> {
    match comptime!(f) {
        Binary::Add => a + b,
        Binary::Subtract => a - b,
        Binary::Multiply => a * b,
        Binary::Divide => a / b,
        Binary::GeluGradient => gelu_slope::<N>(a) * b,
        Binary::SiluGradient => silu_slope::<N>(a) * b,
    }
}

/// Derivative of x · sigmoid(x).
#[cube]
fn silu_slope<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let s = sigmoid::<N>(x);
    s * (Vector::new(1.0) + x * (Vector::new(1.0) - s))
}
