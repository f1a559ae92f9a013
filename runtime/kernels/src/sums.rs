//! Sums in a fixed order: over a cube's units, and over strips of rows.

use cubecl::prelude::*;

use crate::queue::{cubes_for, send};
use crate::{Buffer, Element, Queue};

/// Units of a plane where planes are used.
const PLANE: u32 = 32;
/// Units of a cube that adds strips.
const UNITS: u32 = 128;

/// Into how many strips rows are dealt, row r to strip r modulo their number.
pub(crate) fn strips(rows: usize, wanted: usize) -> usize {
    wanted.clamp(1, rows.max(1))
}

/// Puts, or adds if `accumulate`, the sum of strips of fp32 sums into `total`, strip by strip.
///
/// Moves 4 bytes per element of the strips.
pub(crate) fn add_strips(queue: &Queue, partial: &Buffer, total: &Buffer, accumulate: bool) {
    total.expect(total.length, Element::Single);
    assert!(partial.length.is_multiple_of(total.length), "strips are as long as the total");
    let width = Element::Single.width(total.length);
    let cubes = cubes_for(total.length / width, UNITS);
    send!(queue, add_strips_kernel, cubes, UNITS, width, partial.argument(width), total.argument(width), accumulate);
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn add_strips_kernel<N: Size>(partial: &[Vector<f32, N>], total: &mut [Vector<f32, N>], #[comptime] accumulate: bool) {
    let columns = total.len();
    let strips = partial.len() / columns;
    let mut column = ABSOLUTE_POS;
    while column < columns {
        let mut sum = Vector::<f32, N>::new(0.0);
        for strip in 0..strips {
            sum += partial[strip * columns + column];
        }
        if comptime!(accumulate) {
            sum += total[column];
        }
        total[column] = sum;
        column += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// The sum of a vector's lanes.
#[cube]
pub(crate) fn sum_of_lanes<N: Size>(vector: Vector<f32, N>) -> f32 {
    let mut sum = vector.extract(0usize);
    #[unroll]
    for lane in 1..N::value() {
        sum += vector.extract(lane);
    }
    sum
}

/// The largest of a vector's lanes.
#[cube]
pub(crate) fn largest_lane<N: Size>(vector: Vector<f32, N>) -> f32 {
    let mut most = vector.extract(0usize);
    #[unroll]
    for lane in 1..N::value() {
        most = max(most, vector.extract(lane));
    }
    most
}

/// The sum over a cube's units, known to each; `planes` says that units exchange numbers by plane instructions.
#[cube]
pub(crate) fn sum_of_cube(value: f32, #[comptime] units: u32, #[comptime] planes: bool) -> f32 {
    fold_of_cube(value, units, planes, Fold::Sum)
}

/// The largest number of a cube's units, known to each.
#[cube]
pub(crate) fn largest_of_cube(value: f32, #[comptime] units: u32, #[comptime] planes: bool) -> f32 {
    fold_of_cube(value, units, planes, Fold::Maximum)
}

/// How two numbers become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Fold {
    Sum,
    Maximum,
}

#[cube]
fn fold(a: f32, b: f32, #[comptime] how: Fold) -> f32 {
    if comptime!(how == Fold::Sum) { a + b } else { max(a, b) }
}

#[cube]
fn fold_of_cube(value: f32, #[comptime] units: u32, #[comptime] planes: bool, #[comptime] how: Fold) -> f32 {
    if comptime!(planes) {
        let mut total = if comptime!(how == Fold::Sum) { plane_sum(value) } else { plane_max(value) };
        if comptime!(units > PLANE) {
            let mut parts = Shared::<[f32]>::new_slice(comptime!((units / PLANE) as usize));
            if UNIT_POS_PLANE == 0 {
                parts[PLANE_POS as usize] = total;
            }
            sync_cube();
            total = parts[0];
            #[unroll]
            for plane in 1..comptime!((units / PLANE) as usize) {
                total = fold(total, parts[plane], how);
            }
            sync_cube();
        }
        total
    } else {
        let mut parts = Shared::<[f32]>::new_slice(comptime!(units as usize));
        let place = UNIT_POS as usize;
        parts[place] = value;
        sync_cube();
        let mut half = comptime!(units as usize / 2).runtime();
        while half > 0 {
            if place < half {
                parts[place] = fold(parts[place], parts[place + half], how);
            }
            sync_cube();
            half /= 2;
        }
        let total = parts[0];
        sync_cube();
        total
    }
}
