//! A copy: what bandwidth a device reaches that only reads and writes.

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
fn copy_kernel<F: Float, N: Size>(x: &[Vector<F, N>], y: &mut [Vector<F, N>], #[define(F)] _element: ElemType) {
    let mut at = ABSOLUTE_POS;
    while at < y.len() {
        y[at] = x[at];
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}
