//! A matrix product in blocks that fit the caches, packed in the order in which the tile reads them.
//!
//! Loops and blocks are those of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication"
//! (ACM TOMS 34(3), 2008). What is summed is cut by its length alone, so that the result's bits depend
//! neither on threads nor on which part of the result is computed where.

use std::arch::x86_64::{_MM_TRANSPOSE4_PS, _mm_loadu_ps, _mm_storeu_ps};
use std::cell::RefCell;

use super::kernel::{COLUMNS, ROWS, tile};
use super::{Extents, Matrix, MatrixMut};

/// The most that is summed in one go: a column of tiles of both operands then fits the second-level cache.
const DEPTH: usize = 384;
/// Rows of the first operand that are packed at once, for the second-level cache.
const PACKED_ROWS: usize = 12 * ROWS;
/// Columns of the second operand that are packed at once, for the third-level cache.
const PACKED_COLUMNS: usize = 64 * COLUMNS;

/// Columns that are turned into rows at once: what they are written to then stays in the first-level cache.
const CHUNK: usize = 64;

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
        if count < WIDTH {
            packed.fill(0.0);
        }
        let panel = matrix.part(first, 0);
        if matrix.row == 1 {
            pack_columns::<WIDTH>(panel, count, packed);
        } else if matrix.column == 1 {
            pack_rows::<WIDTH>(panel, count, depth, packed);
        } else {
            for (at, packed) in packed.chunks_exact_mut(WIDTH).enumerate() {
                for (place, number) in packed[..count].iter_mut().enumerate() {
                    *number = panel.values[place * matrix.row + at * matrix.column];
                }
            }
        }
    }
    into
}

/// Packs columns whose numbers are neighbours.
fn pack_columns<const WIDTH: usize>(panel: Matrix, count: usize, packed: &mut [f32]) {
    for (at, packed) in packed.chunks_exact_mut(WIDTH).enumerate() {
        let numbers = &panel.values[at * panel.column..];
        // A whole column has a length known here, so that it is copied by vectors without a call.
        match (count == WIDTH, packed.first_chunk_mut::<WIDTH>(), numbers.first_chunk::<WIDTH>()) {
            (true, Some(packed), Some(numbers)) => *packed = *numbers,
            _ => packed[..count].copy_from_slice(&numbers[..count]),
        }
    }
}

/// Packs rows whose numbers are neighbours: four rows and four columns at a time, a square on its diagonal.
#[allow(unsafe_code)]
fn pack_rows<const WIDTH: usize>(panel: Matrix, count: usize, depth: usize, packed: &mut [f32]) {
    assert!(0 < count && count <= WIDTH && packed.len() >= WIDTH * depth, "the panel holds the rows");
    assert!((count - 1) * panel.row + depth <= panel.values.len(), "the rows lie inside the matrix");
    let (rows, columns) = (count - count % 4, depth - depth % 4);
    for chunk in (0..columns).step_by(CHUNK) {
        for row in (0..rows).step_by(4) {
            for column in (chunk..columns.min(chunk + CHUNK)).step_by(4) {
                let from = panel.values[row * panel.row + column..].as_ptr();
                let into = packed[column * WIDTH + row..].as_mut_ptr();
                // SAFETY: four rows from `row` and four columns from `column` lie inside both, as asserted.
                unsafe { turn_square(from, panel.row, into, WIDTH) };
            }
        }
    }
    for row in 0..count {
        let from = if row < rows { columns } else { 0 };
        let numbers = &panel.values[row * panel.row..][..depth];
        for column in from..depth {
            packed[column * WIDTH + row] = numbers[column];
        }
    }
}

/// Writes four rows of four numbers as columns.
///
/// # Safety
/// Four numbers can be read at each of four places `from_stride` apart, and written `into_stride` apart.
#[allow(unsafe_code)]
#[inline(always)]
unsafe fn turn_square(from: *const f32, from_stride: usize, into: *mut f32, into_stride: usize) {
    // SAFETY: as the caller grants; every x86-64 processor has SSE.
    unsafe {
        let (mut a, mut b) = (_mm_loadu_ps(from), _mm_loadu_ps(from.add(from_stride)));
        let (mut c, mut d) = (_mm_loadu_ps(from.add(2 * from_stride)), _mm_loadu_ps(from.add(3 * from_stride)));
        _MM_TRANSPOSE4_PS(&mut a, &mut b, &mut c, &mut d);
        _mm_storeu_ps(into, a);
        _mm_storeu_ps(into.add(into_stride), b);
        _mm_storeu_ps(into.add(2 * into_stride), c);
        _mm_storeu_ps(into.add(3 * into_stride), d);
    }
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
