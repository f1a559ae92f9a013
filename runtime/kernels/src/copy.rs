//! Copies of whole buffers and of parts, whatever their numbers mean.

use cubecl::prelude::*;

use crate::queue::{cubes_for, send};
use crate::{Buffer, Queue};

/// Units of a cube.
const UNITS: u32 = 256;

/// y = x.
///
/// Moves 2e bytes per element.
pub fn copy(queue: &Queue, x: &Buffer, y: &Buffer) {
    let width = x.element.width(x.length);
    y.expect(x.length, x.element);
    let cubes = cubes_for(x.length / width, UNITS);
    send!(queue, copy_kernel, cubes, UNITS, width, x.argument(width), y.argument(width), x.element.kind());
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn copy_kernel<F: Numeric, N: Size>(x: &[Vector<F, N>], y: &mut [Vector<F, N>], #[define(F)] _element: ElemType) {
    let mut at = ABSOLUTE_POS;
    while at < y.len() {
        y[at] = x[at];
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Copies neighbouring elements from a place in `x` to a place in `y`, of one format.
///
/// Moves 2e bytes per element.
pub fn copy_part(queue: &Queue, length: usize, (x, from): (&Buffer, usize), (y, to): (&Buffer, usize)) {
    assert!(from + length <= x.length && to + length <= y.length, "parts lie inside their buffers");
    y.expect(y.length, x.element);
    let widths = [length, from, to, x.length, y.length].map(|count| x.element.width(count));
    let width = widths.into_iter().min().unwrap_or(1);
    send!(
        queue,
        copy_part_kernel,
        cubes_for(length / width, UNITS),
        UNITS,
        width,
        x.argument(width),
        y.argument(width),
        (length / width) as u32,
        (from / width) as u32,
        (to / width) as u32,
        x.element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn copy_part_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    length: u32,
    from: u32,
    to: u32,
    #[define(F)] _element: ElemType,
) {
    let mut at = ABSOLUTE_POS;
    while at < length as usize {
        y[at + to as usize] = x[at + from as usize];
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}
