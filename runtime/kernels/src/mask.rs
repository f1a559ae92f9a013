//! Columns that are seen or left out, and single ones that ids name: of logits and of attention scores.

use cubecl::prelude::*;

use crate::queue::{cubes_for, send};
use crate::softmax::Scores;
use crate::{Buffer, Element, Queue};

/// Units of a cube.
const UNITS: u32 = 256;

/// y = x, `[rows, columns]`, with the least number in the columns from `kept` on: WGSL has no infinity.
///
/// Moves 2e bytes per element.
pub fn mask_columns(queue: &Queue, columns: usize, kept: usize, x: &Buffer, y: &Buffer) {
    let width = x.element.width(columns).min(y.element.width(columns));
    y.expect(x.length, y.element);
    send!(
        queue,
        mask_columns_kernel,
        cubes_for(x.length / width, UNITS),
        UNITS,
        width,
        x.argument(width),
        y.result(width, &[x]),
        (columns / width) as u32,
        kept as u32,
        x.element.kind(),
        y.element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn mask_columns_kernel<F: Float, G: Float, N: Size>(
    x: &[Vector<F, N>],
    y: &mut [Vector<G, N>],
    columns: u32,
    kept: u32,
    #[define(F)] _from: ElemType,
    #[define(G)] _to: ElemType,
) {
    let mut at = ABSOLUTE_POS;
    while at < y.len() {
        let mut own = Vector::<f32, N>::cast_from(x[at]);
        let column = (at as u32 % columns) * N::value() as u32;
        #[unroll]
        for lane in 0..N::value() {
            own.insert(lane, select(column + (lane as u32) < kept, own.extract(lane), f32::MIN));
        }
        y[at] = Vector::cast_from(own);
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// y = x · scale + slope · key for the keys that a position sees, `unseen` for the others; `slopes` has one fp32
/// number for each head.
///
/// Moves 2e bytes per score.
pub fn scale_mask(queue: &Queue, scores: &Scores, scale: f64, unseen: f32, [x, slopes]: [&Buffer; 2], y: &Buffer) {
    let width = x.element.width(scores.keys);
    y.expect(x.length, x.element);
    slopes.expect(scores.heads, Element::Single);
    send!(
        queue,
        scale_mask_kernel,
        cubes_for(x.length / width, UNITS),
        UNITS,
        width,
        x.argument(width),
        slopes.argument(1),
        y.result(width, &[x]),
        (scores.keys / width) as u32,
        scores.positions as u32,
        scale as f32,
        unseen,
        x.element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn scale_mask_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    slopes: &[f32],
    y: &mut [Vector<F, N>],
    columns: u32,
    positions: u32,
    scale: f32,
    unseen: f32,
    #[define(F)] _element: ElemType,
) {
    let mut at = ABSOLUTE_POS;
    while at < y.len() {
        let row = at as u32 / columns;
        let first = at as u32 % columns * N::value() as u32;
        let slope = slopes[(row / positions) as usize % slopes.len()];
        let mut own = Vector::<f32, N>::cast_from(x[at]);
        #[unroll]
        for lane in 0..N::value() {
            let key = first + lane as u32;
            let number = own.extract(lane) * scale + slope * f32::cast_from(key);
            own.insert(lane, select(key <= row % positions, number, unseen));
        }
        y[at] = Vector::cast_from(own);
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// y = the element of each row of `x`, `[rows, columns]`, that ids name; `start` is the first column's id, and zero the
/// element of an id that is not among them.
///
/// Moves 3 numbers per row.
pub fn pick(queue: &Queue, columns: usize, [x, ids]: [&Buffer; 2], start: u32, y: &Buffer) {
    x.expect(ids.length * columns, x.element);
    y.expect(ids.expect(ids.length, Element::Index).length, y.element);
    send!(
        queue,
        pick_kernel,
        cubes_for(ids.length, UNITS),
        UNITS,
        x.argument(1),
        ids.argument(1),
        y.argument(1),
        start,
        columns as u32,
        x.element.kind(),
        y.element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn pick_kernel<F: Float, G: Float>(
    x: &[F],
    ids: &[u32],
    y: &mut [G],
    start: u32,
    columns: u32,
    #[define(F)] _from: ElemType,
    #[define(G)] _to: ElemType,
) {
    let mut row = ABSOLUTE_POS;
    while row < y.len() {
        let column = ids[row] - start;
        let mut own = 0.0f32;
        if column < columns {
            own = f32::cast_from(x[row * columns as usize + column as usize]);
        }
        y[row] = G::cast_from(own);
        row += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// The gradient of [`pick`]'s operand: zeros, and where ids say a row's `dy`, or the one `dy` that serves all rows.
///
/// Moves e bytes per element of `dx`.
pub fn pick_gradient(queue: &Queue, columns: usize, [ids, dy]: [&Buffer; 2], start: u32, dx: &Buffer) {
    dx.expect(ids.length * columns, dx.element);
    assert!(dy.length == 1 || dy.length == ids.length, "one gradient for all rows, or one for each");
    let width = dx.element.width(columns);
    send!(
        queue,
        pick_gradient_kernel,
        cubes_for(dx.length / width, UNITS),
        UNITS,
        width,
        ids.argument(1),
        dy.argument(1),
        dx.argument(width),
        start,
        (columns / width) as u32,
        dy.element.kind(),
        dx.element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn pick_gradient_kernel<F: Float, G: Float, N: Size>(
    ids: &[u32],
    dy: &[F],
    dx: &mut [Vector<G, N>],
    start: u32,
    columns: u32,
    #[define(F)] _from: ElemType,
    #[define(G)] _to: ElemType,
) {
    let mut at = ABSOLUTE_POS;
    while at < dx.len() {
        let row = at as u32 / columns;
        let first = at as u32 % columns * N::value() as u32;
        let column = ids[row as usize] - start;
        let gradient = f32::cast_from(dy[row as usize % dy.len()]);
        let mut own = Vector::<f32, N>::new(0.0);
        #[unroll]
        for lane in 0..N::value() {
            own.insert(lane, select(first + lane as u32 == column, gradient, 0.0f32));
        }
        dx[at] = Vector::cast_from(own);
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}
