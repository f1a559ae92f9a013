//! Scale, causal mask, linear bias and softmax of attention scores in one pass, and their gradient.

use cubecl::prelude::*;

use crate::queue::{expect_all, send};
use crate::sums::{largest_lane, largest_of_cube, sum_of_cube, sum_of_lanes};
use crate::{Buffer, Element, Queue};

/// Elements that a unit holds if rows allow it.
const HELD: usize = 16;
/// The most units of a cube.
const MOST_UNITS: usize = 512;

/// Rows of attention scores `[sequences, heads, positions, keys]`; a position sees the keys up to its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scores {
    /// Heads of a sequence.
    pub heads: usize,
    /// Positions of a head.
    pub positions: usize,
    /// Keys of a position.
    pub keys: usize,
}

/// How a cube holds a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Layout {
    /// Vectors of a row.
    columns: usize,
    /// Vectors of a unit.
    held: usize,
    units: u32,
    planes: bool,
    /// Whether a position sees the keys up to its own only.
    masked: bool,
}

impl Scores {
    fn layout(&self, queue: &Queue, width: usize, masked: bool) -> Layout {
        let columns = self.keys / width;
        let units = queue.units_for(columns.div_ceil((HELD / width).max(1)), MOST_UNITS);
        Layout { columns, held: columns.div_ceil(units), units: units as u32, planes: queue.has_planes(), masked }
    }

    fn rows(&self, scores: &Buffer) -> u32 {
        assert!(scores.length.is_multiple_of(self.heads * self.positions * self.keys), "sequences are whole");
        (scores.length / self.keys) as u32
    }
}

/// y = softmax(x · scale + slope · key) over the keys that a position sees, zero for the others; `slopes` has one
/// fp32 number for each head, zeros without linear biases (ALiBi, arXiv 2108.12409).
///
/// Reads e bytes per score that is seen, writes e per score.
pub fn masked_softmax(queue: &Queue, scores: &Scores, scale: f64, operands: [&Buffer; 2], y: &Buffer) {
    send_softmax(queue, scores, scale, operands, y, true);
}

/// y = softmax(x) over all keys.
///
/// Moves 2e bytes per score.
pub fn softmax(queue: &Queue, scores: &Scores, x: &Buffer, y: &Buffer) {
    let slopes = queue.numbers(&vec![0.0; scores.heads]);
    send_softmax(queue, scores, 1.0, [x, &slopes], y, false);
}

fn send_softmax(queue: &Queue, scores: &Scores, scale: f64, [x, slopes]: [&Buffer; 2], y: &Buffer, masked: bool) {
    let (element, width) = (x.element, x.element.width(scores.keys));
    y.expect(x.length, element);
    slopes.expect(scores.heads, Element::Single);
    let (layout, rows) = (scores.layout(queue, width, masked), scores.rows(x));
    send!(
        queue,
        masked_softmax_kernel,
        CubeCount::Static(scores.positions as u32, rows / scores.positions as u32, 1),
        layout.units,
        width,
        x.argument(width),
        slopes.argument(1),
        y.result(width, &[x]),
        scale as f32,
        layout,
        element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn masked_softmax_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    slopes: &[f32],
    y: &mut [Vector<F, N>],
    scale: f32,
    #[comptime] layout: Layout,
    #[define(F)] _element: ElemType,
) {
    let start = (CUBE_POS_Y as usize * CUBE_COUNT_X as usize + CUBE_POS_X as usize) * layout.columns;
    let slope = slopes[CUBE_POS_Y as usize % slopes.len()];
    let mut row = Array::<Vector<f32, N>>::new(layout.held);
    let mut most = Vector::<f32, N>::new(f32::MIN);
    #[unroll]
    for part in 0..layout.held {
        let column = UNIT_POS as usize + part * layout.units as usize;
        row[part] = Vector::new(f32::MIN);
        if column < layout.columns && column * N::value() <= last_key::<N>(layout) as usize {
            let scores = Vector::<f32, N>::cast_from(x[start + column]) * Vector::new(scale);
            row[part] = seen::<N>(scores, column, slope, f32::MIN, layout);
            most = most.max(row[part]);
        }
    }
    let most = largest_of_cube(largest_lane::<N>(most), layout.units, layout.planes);
    let mut sum = Vector::<f32, N>::new(0.0);
    #[unroll]
    for part in 0..layout.held {
        row[part] = (row[part] - Vector::new(most)).exp();
        sum += row[part];
    }
    let share = 1.0 / sum_of_cube(sum_of_lanes::<N>(sum), layout.units, layout.planes);
    #[unroll]
    for part in 0..layout.held {
        let column = UNIT_POS as usize + part * layout.units as usize;
        if column < layout.columns {
            y[start + column] = Vector::cast_from(row[part] * Vector::new(share));
        }
    }
}

/// Numbers of the keys that the cube's position sees plus slope · key; `unseen` for the others.
#[cube]
fn seen<N: Size>(
    numbers: Vector<f32, N>,
    column: usize,
    slope: f32,
    #[comptime] unseen: f32,
    #[comptime] layout: Layout,
) -> Vector<f32, N> {
    let last = last_key::<N>(layout);
    let mut seen = numbers;
    #[unroll]
    for lane in 0..N::value() {
        let key = (column * N::value() + lane) as u32;
        let number = numbers.extract(lane) + slope * key as f32;
        seen.insert(lane, select(key <= last, number, unseen));
    }
    seen
}

/// The gradient of [`masked_softmax`]'s scores from its result `y` and `dy`: scale · y · (dy − Σ y dy).
///
/// Reads 2e bytes per score that is seen, writes e per score.
pub fn masked_softmax_gradient(queue: &Queue, scores: &Scores, scale: f64, operands: [&Buffer; 2], dx: &Buffer) {
    send_gradient(queue, scores, scale, operands, dx, true);
}

/// The gradient of [`softmax`]'s operand from its result `y` and `dy`: y · (dy − Σ y dy).
///
/// Moves 3e bytes per score.
pub fn softmax_gradient(queue: &Queue, scores: &Scores, operands: [&Buffer; 2], dx: &Buffer) {
    send_gradient(queue, scores, 1.0, operands, dx, false);
}

fn send_gradient(queue: &Queue, scores: &Scores, scale: f64, [y, dy]: [&Buffer; 2], dx: &Buffer, masked: bool) {
    let (element, width) = (y.element, y.element.width(scores.keys));
    expect_all([dy, dx], y.length, element);
    let (layout, rows) = (scores.layout(queue, width, masked), scores.rows(y));
    send!(
        queue,
        masked_softmax_gradient_kernel,
        CubeCount::Static(scores.positions as u32, rows / scores.positions as u32, 1),
        layout.units,
        width,
        y.argument(width),
        dy.argument(width),
        dx.result(width, &[y, dy]),
        scale as f32,
        layout,
        element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn masked_softmax_gradient_kernel<F: Float, N: Size>(
    y: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    dx: &mut [Vector<F, N>],
    scale: f32,
    #[comptime] layout: Layout,
    #[define(F)] _element: ElemType,
) {
    let start = (CUBE_POS_Y as usize * CUBE_COUNT_X as usize + CUBE_POS_X as usize) * layout.columns;
    let mut row = Array::<Vector<f32, N>>::new(layout.held);
    let mut gradient = Array::<Vector<f32, N>>::new(layout.held);
    let mut sum = Vector::<f32, N>::new(0.0);
    #[unroll]
    for part in 0..layout.held {
        let column = UNIT_POS as usize + part * layout.units as usize;
        row[part] = Vector::new(0.0);
        gradient[part] = Vector::new(0.0);
        if column < layout.columns && column * N::value() <= last_key::<N>(layout) as usize {
            row[part] = seen::<N>(Vector::cast_from(y[start + column]), column, 0.0, 0.0, layout);
            gradient[part] = seen::<N>(Vector::cast_from(dy[start + column]), column, 0.0, 0.0, layout);
            sum += row[part] * gradient[part];
        }
    }
    let along = sum_of_cube(sum_of_lanes::<N>(sum), layout.units, layout.planes);
    #[unroll]
    for part in 0..layout.held {
        let column = UNIT_POS as usize + part * layout.units as usize;
        if column < layout.columns {
            let own = row[part] * (gradient[part] - Vector::new(along)) * Vector::new(scale);
            dx[start + column] = Vector::cast_from(own);
        }
    }
}

/// The last key that the cube's position sees.
#[cube]
fn last_key<N: Size>(#[comptime] layout: Layout) -> u32 {
    let mut last = CUBE_POS_X;
    if comptime!(!layout.masked) {
        last = layout.columns as u32 * N::value() as u32;
    }
    last
}
