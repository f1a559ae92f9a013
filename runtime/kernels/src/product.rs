//! Sums of products as strided matrix products, fp32 inside, without matrix instructions: where dims lie in memory is
//! free.

use cubecl::prelude::*;

use crate::queue::send;
use crate::strided::{Axis, Loops, place_of};
use crate::{Buffer, Queue};

/// Rows and columns of the part of a result that a cube computes.
const TILE: usize = 64;
/// Numbers that are summed at a time.
const DEPTH: usize = 16;
/// Units along each side of a tile.
const SIDE: usize = 16;
/// Rows and columns of the part that a unit computes.
const PART: usize = TILE / SIDE;
/// Numbers from a tile's row to the next: one more, so that rows begin in different banks.
const STRIDE: usize = TILE + 1;
/// The most products along one axis of cubes.
const MOST_CUBES: usize = 65_535;

/// Products c = Σ a · b of matrices, the strides of each axis being those of `a`, `b` and `c`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Products {
    /// Rows of `a` and `c`.
    pub rows: Axis,
    /// Columns of `b` and `c`.
    pub columns: Axis,
    /// What is summed over.
    pub summed: Axis,
    /// Products that write different elements.
    pub outer: Loops,
    /// Products that add to the same elements.
    pub inner: Loops,
}

/// How a kernel goes through its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Layout {
    outer: Loops,
    inner: Loops,
    /// Whether neighbours along the sum, and not along rows or columns, are neighbours in memory.
    a_along_sum: bool,
    b_along_sum: bool,
    accumulate: bool,
}

/// Puts the products into `c`, or with `accumulate` adds them to it.
///
/// Moves a tile of 64 rows of an operand for each 64 rows of the other. 2 · rows · columns · summed operations.
pub fn products(queue: &Queue, products: &Products, [a, b]: [&Buffer; 2], c: &Buffer, accumulate: bool) {
    let Products { rows, columns, summed, outer, inner } = *products;
    let reach = |of: usize, axes: [Axis; 2]| {
        let own: usize = axes.iter().map(|axis| (axis.extent - 1) * axis.strides[of]).sum();
        own + outer.reach(of) + inner.reach(of) - 1
    };
    let fits = reach(0, [rows, summed]) <= a.length && reach(1, [summed, columns]) <= b.length;
    assert!(fits && reach(2, [rows, columns]) <= c.length, "products stay inside their tensors");
    let layout =
        Layout { outer, inner, a_along_sum: summed.strides[0] == 1, b_along_sum: summed.strides[1] == 1, accumulate };
    let cubes = |extent: usize| extent.div_ceil(TILE) as u32;
    send!(
        queue,
        product_kernel,
        CubeCount::Static(cubes(columns.extent), cubes(rows.extent), outer.rounds().min(MOST_CUBES) as u32),
        (SIDE * SIDE) as u32,
        a.argument(1),
        b.argument(1),
        c.argument(1),
        rows.extent as u32,
        columns.extent as u32,
        summed.extent as u32,
        rows.strides[0] as u32,
        summed.strides[0] as u32,
        summed.strides[1] as u32,
        columns.strides[1] as u32,
        rows.strides[2] as u32,
        columns.strides[2] as u32,
        outer.rounds() as u32,
        inner.rounds() as u32,
        layout,
        a.element.kind(),
        b.element.kind(),
        c.element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn product_kernel<A: Float, B: Float, C: Float>(
    a: &[A],
    b: &[B],
    c: &mut [C],
    rows: u32,
    columns: u32,
    summed: u32,
    a_row: u32,
    a_sum: u32,
    b_sum: u32,
    b_column: u32,
    c_row: u32,
    c_column: u32,
    products: u32,
    sums: u32,
    #[comptime] layout: Layout,
    #[define(A)] _first: ElemType,
    #[define(B)] _second: ElemType,
    #[define(C)] _result: ElemType,
) {
    let mut a_tile = Shared::<[f32]>::new_slice(comptime!(DEPTH * STRIDE));
    let mut b_tile = Shared::<[f32]>::new_slice(comptime!(DEPTH * STRIDE));
    let (x, y) = (UNIT_POS % comptime!(SIDE as u32), UNIT_POS / comptime!(SIDE as u32));
    let (first_row, first_column) = (CUBE_POS_Y * comptime!(TILE as u32), CUBE_POS_X * comptime!(TILE as u32));
    let mut product = CUBE_POS_Z;
    while product < products {
        let mut own = Array::<f32>::new(comptime!(PART * PART));
        #[unroll]
        for at in 0..comptime!(PART * PART) {
            own[at] = 0.0;
        }
        let mut sum = 0u32;
        while sum < sums {
            let a_start =
                place_of(product as usize, layout.outer, 0usize) + place_of(sum as usize, layout.inner, 0usize);
            let b_start =
                place_of(product as usize, layout.outer, 1usize) + place_of(sum as usize, layout.inner, 1usize);
            let mut depth = 0u32;
            while depth < summed {
                let (left, right) = (rows - first_row, columns - first_column);
                let a_at = a_start + (first_row * a_row + depth * a_sum) as usize;
                let b_at = b_start + (first_column * b_column + depth * b_sum) as usize;
                load::<A>(a, &mut a_tile, a_at, a_row, a_sum, left, summed - depth, layout.a_along_sum);
                load::<B>(b, &mut b_tile, b_at, b_column, b_sum, right, summed - depth, layout.b_along_sum);
                sync_cube();
                multiply(&a_tile, &b_tile, &mut own, x, y);
                sync_cube();
                depth += comptime!(DEPTH as u32);
            }
            sum += 1;
        }
        let start = place_of(product as usize, layout.outer, 2usize);
        #[unroll]
        for i in 0..PART {
            #[unroll]
            for j in 0..PART {
                let row = first_row + y + comptime!((i * SIDE) as u32);
                let column = first_column + x + comptime!((j * SIDE) as u32);
                if row < rows && column < columns {
                    let at = start + (row * c_row + column * c_column) as usize;
                    let mut number = own[comptime!(i * PART + j)];
                    if comptime!(layout.accumulate) {
                        number += f32::cast_from(c[at]);
                    }
                    c[at] = C::cast_from(number);
                }
            }
        }
        product += CUBE_COUNT_Z;
    }
}

/// Fills a tile `[depth, tile]` with the matrix from `start` on, zeros beyond its `rows` and `depth`.
#[cube]
fn load<F: Float>(
    source: &[F],
    tile: &mut Shared<[f32]>,
    start: usize,
    row_stride: u32,
    sum_stride: u32,
    rows: u32,
    depth: u32,
    #[comptime] along_sum: bool,
) {
    #[unroll]
    for part in 0..comptime!(TILE * DEPTH / (SIDE * SIDE)) {
        let at = UNIT_POS + comptime!((part * SIDE * SIDE) as u32);
        // Neighbouring units read neighbours in memory.
        let row = if comptime!(along_sum) { at / comptime!(DEPTH as u32) } else { at % comptime!(TILE as u32) };
        let place = if comptime!(along_sum) { at % comptime!(DEPTH as u32) } else { at / comptime!(TILE as u32) };
        let mut number = 0.0f32;
        if row < rows && place < depth {
            number = f32::cast_from(source[start + (row * row_stride + place * sum_stride) as usize]);
        }
        tile[(place * comptime!(STRIDE as u32) + row) as usize] = number;
    }
}

/// Adds the product of two tiles to a unit's part.
#[cube]
fn multiply(a: &Shared<[f32]>, b: &Shared<[f32]>, own: &mut Array<f32>, x: u32, y: u32) {
    for depth in 0..comptime!(DEPTH as u32) {
        let start = (depth * comptime!(STRIDE as u32)) as usize;
        let mut left = Array::<f32>::new(PART);
        let mut right = Array::<f32>::new(PART);
        #[unroll]
        for part in 0..PART {
            left[part] = a[start + y as usize + comptime!(part * SIDE)];
            right[part] = b[start + x as usize + comptime!(part * SIDE)];
        }
        #[unroll]
        for i in 0..PART {
            #[unroll]
            for j in 0..PART {
                own[comptime!(i * PART + j)] += left[i] * right[j];
            }
        }
    }
}
