//! Sums and maxima over dims, in a fixed order.

use cubecl::prelude::*;

use crate::queue::{BUSY, send};
use crate::strided::{Axis, Loops, place_of};
use crate::sums::{add_strips, largest_lane, largest_of_cube, strips, sum_of_cube, sum_of_lanes};
use crate::{Buffer, Element, Queue};

/// The most units of a cube.
const MOST_UNITS: usize = 256;
/// The most cubes along one axis that every device takes.
const MOST_CUBES: usize = 65_535;

/// What becomes of numbers along the dims that a result lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fold {
    /// Their sum.
    Sum,
    /// The largest.
    Maximum,
}

/// y = fold of `x` over the loops `folded`, for each round of `kept`; strides are those of `x` and of `y`. With
/// `accumulate`, a sum is added to what `y` holds.
///
/// Moves e bytes per element of `x`.
pub fn reduce(queue: &Queue, fold: Fold, [kept, folded]: [&Loops; 2], x: &Buffer, y: &Buffer, accumulate: bool) {
    let reach = kept.reach(0) + folded.reach(0) - 1;
    assert!(reach <= x.length && kept.reach(1) <= y.length, "loops stay inside their tensors");
    let columns = kept.innermost();
    let are_rows = fold == Fold::Sum
        && y.element == Element::Single
        && kept.rounds() == columns.extent
        && folded.rounds() * columns.extent == x.length
        && folded.innermost() == Axis { extent: folded.rounds(), strides: [columns.extent, 0, 0] }
        && columns.strides == [1, 1, 0];
    if are_rows && folded.rounds() > 1 && columns.extent > 1 {
        return sum_rows(queue, x, columns.extent, y, accumulate);
    }
    let (width, kept, folded) = in_vectors(x, kept, folded);
    let units = queue.units_for(folded.rounds(), MOST_UNITS);
    send!(
        queue,
        reduce_kernel,
        CubeCount::Static(kept.rounds().min(MOST_CUBES) as u32, 1, 1),
        units as u32,
        width,
        x.argument(width),
        y.argument(1),
        kept.rounds() as u32,
        folded.rounds() as u32,
        fold,
        kept,
        folded,
        units as u32,
        queue.has_planes(),
        accumulate,
        x.element.kind(),
        y.element.kind()
    );
}

/// Loops that read `x` in vectors, and how many elements these have: one where what is folded last does not lie in
/// rows.
fn in_vectors(x: &Buffer, kept: &Loops, folded: &Loops) -> (usize, Loops, Loops) {
    let Axis { extent, strides } = folded.innermost();
    let most = if strides[0] == 1 { x.element.width(extent).min(x.element.width(x.length)) } else { 1 };
    let found = [8, 4, 2].into_iter().filter(|width| *width <= most).find_map(|width| {
        let folded = folded.in_vectors(width, [true, false, false])?;
        Some((width, kept.over_vectors(width, 0)?, folded))
    });
    found.unwrap_or((1, *kept, *folded))
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn reduce_kernel<F: Float, G: Float, N: Size>(
    x: &[Vector<F, N>],
    y: &mut [G],
    results: u32,
    rounds: u32,
    #[comptime] fold: Fold,
    #[comptime] kept: Loops,
    #[comptime] folded: Loops,
    #[comptime] units: u32,
    #[comptime] planes: bool,
    #[comptime] accumulate: bool,
    #[define(F)] _from: ElemType,
    #[define(G)] _to: ElemType,
) {
    let mut result = CUBE_POS as u32;
    while result < results {
        let start = place_of(result as usize, kept, 0usize);
        let mut own = Vector::<f32, N>::new(0.0);
        if comptime!(fold == Fold::Maximum) {
            own = Vector::new(f32::MIN);
        }
        let mut round = UNIT_POS;
        while round < rounds {
            let numbers = Vector::<f32, N>::cast_from(x[start + place_of(round as usize, folded, 0usize)]);
            if comptime!(fold == Fold::Sum) {
                own += numbers;
            } else {
                own = own.max(numbers);
            }
            round += units;
        }
        let mut all = if comptime!(fold == Fold::Sum) {
            sum_of_cube(sum_of_lanes::<N>(own), units, planes)
        } else {
            largest_of_cube(largest_lane::<N>(own), units, planes)
        };
        if UNIT_POS == 0 {
            let at = place_of(result as usize, kept, 1usize);
            if comptime!(accumulate) {
                all += f32::cast_from(y[at]);
            }
            y[at] = G::cast_from(all);
        }
        result += CUBE_COUNT as u32;
    }
}

/// The sum of rows `[rows, columns]`: strips of them by cubes of columns, then the strips.
fn sum_rows(queue: &Queue, x: &Buffer, columns: usize, y: &Buffer, accumulate: bool) {
    let width = x.element.width(columns);
    let blocks = (columns / width).div_ceil(MOST_UNITS);
    let strips = strips(x.length / columns, BUSY / blocks);
    let partial = queue.buffer(strips * columns, Element::Single);
    send!(
        queue,
        sum_rows_kernel,
        CubeCount::Static(blocks as u32, strips as u32, 1),
        MOST_UNITS as u32,
        width,
        x.argument(width),
        partial.argument(width),
        (columns / width) as u32,
        x.element.kind()
    );
    add_strips(queue, &partial, y, accumulate);
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn sum_rows_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    partial: &mut [Vector<f32, N>],
    columns: u32,
    #[define(F)] _element: ElemType,
) {
    let column = CUBE_POS_X * CUBE_DIM + UNIT_POS;
    if column < columns {
        let rows = x.len() as u32 / columns;
        let mut sum = Vector::<f32, N>::new(0.0);
        let mut row = CUBE_POS_Y;
        while row < rows {
            sum += Vector::<f32, N>::cast_from(x[(row * columns + column) as usize]);
            row += CUBE_COUNT_Y;
        }
        partial[(CUBE_POS_Y * columns + column) as usize] = sum;
    }
}
