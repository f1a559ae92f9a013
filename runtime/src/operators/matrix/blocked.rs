//! A matrix product in blocks that fit the caches, packed in the order in which the tile reads them.
//!
//! Loops and blocks are those of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication"
//! (ACM TOMS 34(3), 2008). What is summed is cut by its length alone, so that the result's bits depend
//! neither on threads nor on which part of the result is computed where.

use std::cell::RefCell;

use super::kernel::{COLUMNS, ROWS, tile};
use super::{Extents, Matrix, MatrixMut};

/// The most that is summed in one go: a column of tiles of both operands then fits the second-level cache.
const DEPTH: usize = 384;
/// Rows of the first operand that are packed at once, for the second-level cache.
const PACKED_ROWS: usize = 12 * ROWS;
/// Columns of the second operand that are packed at once, for the third-level cache.
const PACKED_COLUMNS: usize = 64 * COLUMNS;

/// A cache line of packed numbers.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

thread_local! {
    static PACKED: RefCell<[Vec<Line>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// Whether the processor has the instructions that the tile needs.
pub fn is_supported() -> bool {
    is_x86_feature_detected!("avx512f")
}

/// `into` = `a` · `b`, or that added to `into`, whose columns are neighbours; on this thread.
///
/// The processor must be supported and the matrices lie inside their numbers.
pub fn multiply(extents: Extents, a: Matrix, b: Matrix, into: MatrixMut, add: bool) {
    PACKED.with_borrow_mut(|[packed_a, packed_b]| {
        let depth = extents.summed.div_ceil(extents.summed.div_ceil(DEPTH).max(1));
        let columns = PACKED_COLUMNS.min(extents.columns);
        reserve(packed_a, PACKED_ROWS.min(extents.rows.next_multiple_of(ROWS)) * depth);
        reserve(packed_b, columns.next_multiple_of(COLUMNS) * depth);
        for column in (0..extents.columns).step_by(PACKED_COLUMNS) {
            let columns = PACKED_COLUMNS.min(extents.columns - column);
            for from in (0..extents.summed).step_by(depth) {
                let depth = depth.min(extents.summed - from);
                let b = b.part(from, column).transposed();
                let packed_b = pack::<COLUMNS>(b, columns, depth, packed_b);
                for row in (0..extents.rows).step_by(PACKED_ROWS) {
                    let rows = PACKED_ROWS.min(extents.rows - row);
                    let packed_a = pack::<ROWS>(a.part(row, from), rows, depth, packed_a);
                    let into = into.at(row * into.row + column);
                    multiply_packed(
                        Extents { rows, columns, summed: depth },
                        packed_a,
                        packed_b,
                        into,
                        add || from > 0,
                    );
                }
            }
        }
    });
}

fn reserve(lines: &mut Vec<Line>, numbers: usize) {
    let count = numbers.div_ceil(16);
    if lines.len() < count {
        lines.resize(count, Line([0.0; 16]));
    }
}

#[allow(unsafe_code)]
fn numbers(lines: &mut [Line]) -> &mut [f32] {
    // SAFETY: a line is sixteen numbers and nothing else.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), lines.len() * 16) }
}

/// Packs `rows` rows of `depth` numbers in panels of `WIDTH` rows, column after column; missing rows are 0.
fn pack<'p, const WIDTH: usize>(matrix: Matrix, rows: usize, depth: usize, into: &'p mut [Line]) -> &'p [f32] {
    let into = numbers(into);
    for (panel, packed) in into.chunks_exact_mut(WIDTH * depth).enumerate().take(rows.div_ceil(WIDTH)) {
        let first = panel * WIDTH;
        let count = WIDTH.min(rows - first);
        let (row, column) = (matrix.row, matrix.column);
        if count < WIDTH {
            packed.fill(0.0);
        }
        if row == 1 {
            for (at, packed) in packed.chunks_exact_mut(WIDTH).enumerate() {
                let from = first + at * column;
                packed[..count].copy_from_slice(&matrix.values[from..from + count]);
            }
        } else {
            for place in 0..count {
                let start = (first + place) * row;
                for (at, packed) in packed.chunks_exact_mut(WIDTH).enumerate() {
                    packed[place] = matrix.values[start + at * column];
                }
            }
        }
    }
    into
}

#[allow(unsafe_code)]
fn multiply_packed(extents: Extents, a: &[f32], b: &[f32], into: MatrixMut, add: bool) {
    let Extents { rows, columns, summed } = extents;
    for column in (0..columns).step_by(COLUMNS) {
        let b = &b[column * summed..][..COLUMNS * summed];
        for row in (0..rows).step_by(ROWS) {
            let a = &a[row * summed..][..ROWS * summed];
            let place = into.start.wrapping_add(row * into.row + column);
            if row + ROWS <= rows && column + COLUMNS <= columns {
                // SAFETY: the processor is supported, the panels hold `summed` steps, and the whole tile lies
                // inside the result, which is borrowed exclusively.
                unsafe { tile(summed, a.as_ptr(), b.as_ptr(), place, into.row, add) };
            } else {
                let mut whole = [0.0; ROWS * COLUMNS];
                // SAFETY: as above, with a tile of our own.
                unsafe { tile(summed, a.as_ptr(), b.as_ptr(), whole.as_mut_ptr(), COLUMNS, false) };
                let part = into.at(row * into.row + column);
                for (row, numbers) in whole.chunks_exact(COLUMNS).enumerate().take(rows - row) {
                    part.put_row(row, &numbers[..COLUMNS.min(columns - column)], add);
                }
            }
        }
    }
}
