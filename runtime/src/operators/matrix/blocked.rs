//! A matrix product in blocks that fit the caches, packed in the order in which the tile reads them.
//!
//! Loops and blocks are those of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication"
//! (ACM TOMS 34(3), 2008). What is summed is cut by its length alone, so that the result's bits depend
//! neither on threads nor on which part of the result is computed where.

use std::arch::x86_64::{
    __m512, _mm_storeu_ps, _mm256_loadu_si256, _mm512_castsi512_ps, _mm512_cvtepu16_epi32, _mm512_extractf32x4_ps,
    _mm512_loadu_ps, _mm512_shuffle_ps, _mm512_slli_epi32, _mm512_unpackhi_ps, _mm512_unpacklo_ps,
};
use std::cell::RefCell;

use super::kernel::{COLUMNS, ROWS, tile};
use super::{Elements, Extents, Matrix, MatrixMut};
use crate::tensor::{bf16, widened};

/// The most that is summed in one go: a column of tiles of both operands then fits the second-level cache.
const DEPTH: usize = 384;
/// Rows of the first operand that are packed at once, for the second-level cache.
const PACKED_ROWS: usize = 12 * ROWS;
/// Columns of the second operand that are packed at once, for the third-level cache.
const PACKED_COLUMNS: usize = 64 * COLUMNS;

/// Columns that are turned into rows at once: what they are written to then stays in the first-level cache.
const CHUNK: usize = 64;

/// Numbers of a vector.
const LANES: usize = 16;

/// A matrix to be packed.
#[derive(Clone, Copy)]
struct Unpacked<'a, E> {
    values: &'a [E],
    row: usize,
    column: usize,
}

/// An element that is fp32 once it is packed. The methods give the same numbers one by one, by whole arrays and by
/// vectors.
trait Element: Copy {
    fn single(self) -> f32;

    fn widen<const COUNT: usize>(from: &[Self; COUNT], into: &mut [f32; COUNT]);

    /// # Safety
    /// The processor has AVX-512F, and `LANES` elements can be read.
    #[allow(unsafe_code)]
    unsafe fn load(from: *const Self) -> __m512;
}

impl Element for f32 {
    #[inline(always)]
    fn single(self) -> f32 {
        self
    }

    #[inline(always)]
    fn widen<const COUNT: usize>(from: &[f32; COUNT], into: &mut [f32; COUNT]) {
        *into = *from;
    }

    #[allow(unsafe_code)]
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: as the caller grants.
        unsafe { _mm512_loadu_ps(from) }
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn single(self) -> f32 {
        widened(self)
    }

    #[inline(always)]
    fn widen<const COUNT: usize>(from: &[bf16; COUNT], into: &mut [f32; COUNT]) {
        into.iter_mut().zip(from).for_each(|(into, from)| *into = from.single());
    }

    #[allow(unsafe_code)]
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(from: *const bf16) -> __m512 {
        // SAFETY: as the caller grants; bf16 are 16 bits and the upper half of fp32.
        let bits = unsafe { _mm256_loadu_si256(from.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
    }
}

/// A cache line of packed numbers.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LANES]);

thread_local! {
    static PACKED: RefCell<[Vec<Line>; 3]> = const { RefCell::new([Vec::new(), Vec::new(), Vec::new()]) };
}

/// Whether the processor has the instructions that the tile needs.
pub fn is_supported() -> bool {
    is_x86_feature_detected!("avx512f")
}

/// `into` = `a` · `b`, or that added to `into`, whose columns are neighbours; on this thread.
///
/// # Panics
/// If the processor is not supported.
#[allow(unsafe_code)]
pub fn multiply(extents: Extents, a: Matrix, b: Matrix, into: MatrixMut, add: bool) {
    assert!(is_supported(), "the caller asked for the processor");
    // SAFETY: the processor has AVX-512F.
    PACKED.with_borrow_mut(|packed| unsafe { multiply_with(packed, extents, a, b, into, add) });
}

/// `into` = `a` · `b`, summed in fp32 and rounded once; as [`multiply`].
///
/// # Panics
/// If the processor is not supported.
#[allow(unsafe_code)]
pub fn multiply_rounded(extents: Extents, a: Matrix, b: Matrix, into: MatrixMut<bf16>) {
    assert!(is_supported(), "the caller asked for the processor");
    // SAFETY: the processor has AVX-512F.
    PACKED.with_borrow_mut(|packed| unsafe { multiply_rounded_with(packed, extents, a, b, into) });
}

/// What is summed in one go, so that the parts are about equal.
fn depth_of(summed: usize) -> usize {
    summed.div_ceil(summed.div_ceil(DEPTH)).next_multiple_of(LANES).min(summed)
}

#[target_feature(enable = "avx512f")]
fn multiply_with(packed: &mut [Vec<Line>; 3], extents: Extents, a: Matrix, b: Matrix, into: MatrixMut, add: bool) {
    let [packed_a, packed_b, _] = packed;
    let depth = depth_of(extents.summed);
    let columns = PACKED_COLUMNS.min(extents.columns);
    reserve(packed_a, PACKED_ROWS.min(extents.rows.next_multiple_of(ROWS)) * depth);
    reserve(packed_b, columns.next_multiple_of(COLUMNS) * depth);
    for column in (0..extents.columns).step_by(PACKED_COLUMNS) {
        let columns = PACKED_COLUMNS.min(extents.columns - column);
        for from in (0..extents.summed).step_by(depth) {
            let depth = depth.min(extents.summed - from);
            let packed_b = pack::<COLUMNS>(b.part(from, column).transposed(), columns, depth, packed_b);
            for row in (0..extents.rows).step_by(PACKED_ROWS) {
                let rows = PACKED_ROWS.min(extents.rows - row);
                let packed_a = pack::<ROWS>(a.part(row, from), rows, depth, packed_a);
                let into = into.at(row * into.row + column);
                multiply_packed(Extents { rows, columns, summed: depth }, packed_a, packed_b, into, add || from > 0);
            }
        }
    }
}

/// As [`multiply_with`], but rows get all that is summed one after the other, so that only a block is in fp32 at a
/// time. As many columns are packed as find room with all that is summed.
#[target_feature(enable = "avx512f")]
fn multiply_rounded_with(packed: &mut [Vec<Line>; 3], extents: Extents, a: Matrix, b: Matrix, into: MatrixMut<bf16>) {
    let [packed_a, packed_b, sums] = packed;
    let depth = depth_of(extents.summed);
    let whole = extents.summed.next_multiple_of(depth);
    let width = (DEPTH * PACKED_COLUMNS / whole / COLUMNS * COLUMNS).clamp(COLUMNS, PACKED_COLUMNS);
    let width = width.min(extents.columns.next_multiple_of(COLUMNS));
    reserve(packed_a, PACKED_ROWS.min(extents.rows.next_multiple_of(ROWS)) * depth);
    reserve(packed_b, width * whole);
    reserve(sums, PACKED_ROWS.min(extents.rows) * width);
    for column in (0..extents.columns).step_by(width) {
        let columns = width.min(extents.columns - column);
        for from in (0..extents.summed).step_by(depth) {
            let lines = &mut packed_b[width * from / LANES..];
            pack::<COLUMNS>(b.part(from, column).transposed(), columns, depth.min(extents.summed - from), lines);
        }
        for row in (0..extents.rows).step_by(PACKED_ROWS) {
            let rows = PACKED_ROWS.min(extents.rows - row);
            let sums = numbers(sums);
            for from in (0..extents.summed).step_by(depth) {
                let depth = depth.min(extents.summed - from);
                let packed_a = pack::<ROWS>(a.part(row, from), rows, depth, packed_a);
                let extents = Extents { rows, columns, summed: depth };
                let into = MatrixMut::new(sums, width, 1);
                multiply_packed(extents, packed_a, &numbers(packed_b)[width * from..], into, from > 0);
            }
            let into = into.at(row * into.row + column);
            sums.chunks(width)
                .take(rows)
                .enumerate()
                .for_each(|(row, sums)| into.put_rounded_row(row, &sums[..columns]));
        }
    }
}

fn reserve(lines: &mut Vec<Line>, numbers: usize) {
    let count = numbers.div_ceil(LANES);
    if lines.len() < count {
        lines.resize(count, Line([0.0; LANES]));
    }
}

#[allow(unsafe_code)]
fn numbers(lines: &mut [Line]) -> &mut [f32] {
    // SAFETY: a line is `LANES` numbers and nothing else.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), lines.len() * LANES) }
}

/// Packs `rows` rows of `depth` numbers in panels of `WIDTH` rows, column after column; missing rows are 0.
#[target_feature(enable = "avx512f")]
fn pack<'p, const WIDTH: usize>(matrix: Matrix, rows: usize, depth: usize, into: &'p mut [Line]) -> &'p [f32] {
    let (into, Matrix { elements, row, column }) = (numbers(into), matrix);
    match elements {
        Elements::Single(values) => pack_elements::<f32, WIDTH>(Unpacked { values, row, column }, rows, depth, into),
        Elements::Brain(values) => pack_elements::<bf16, WIDTH>(Unpacked { values, row, column }, rows, depth, into),
    }
    into
}

#[target_feature(enable = "avx512f")]
fn pack_elements<E: Element, const WIDTH: usize>(matrix: Unpacked<E>, rows: usize, depth: usize, into: &mut [f32]) {
    for (panel, packed) in into.chunks_exact_mut(WIDTH * depth).enumerate().take(rows.div_ceil(WIDTH)) {
        let first = panel * WIDTH;
        let count = WIDTH.min(rows - first);
        if count < WIDTH {
            packed.fill(0.0);
        }
        let panel = Unpacked { values: &matrix.values[first * matrix.row..], ..matrix };
        if matrix.row == 1 {
            pack_columns::<E, WIDTH>(panel, count, packed);
        } else if matrix.column == 1 {
            pack_rows::<E, WIDTH>(panel, count, depth, packed);
        } else {
            for (at, packed) in packed.chunks_exact_mut(WIDTH).enumerate() {
                for (place, number) in packed[..count].iter_mut().enumerate() {
                    *number = panel.values[place * matrix.row + at * matrix.column].single();
                }
            }
        }
    }
}

/// Packs columns whose numbers are neighbours.
#[target_feature(enable = "avx512f")]
fn pack_columns<E: Element, const WIDTH: usize>(panel: Unpacked<E>, count: usize, packed: &mut [f32]) {
    for (at, packed) in packed.chunks_exact_mut(WIDTH).enumerate() {
        let numbers = &panel.values[at * panel.column..];
        // A whole column has a length known here, so that it is copied by vectors without a call.
        match (count == WIDTH, packed.first_chunk_mut::<WIDTH>(), numbers.first_chunk::<WIDTH>()) {
            (true, Some(packed), Some(numbers)) => E::widen(numbers, packed),
            _ => packed.iter_mut().zip(&numbers[..count]).for_each(|(packed, number)| *packed = number.single()),
        }
    }
}

/// Packs rows whose numbers are neighbours, four rows and sixteen columns at a time.
#[allow(unsafe_code)]
#[target_feature(enable = "avx512f")]
fn pack_rows<E: Element, const WIDTH: usize>(panel: Unpacked<E>, count: usize, depth: usize, packed: &mut [f32]) {
    assert!(0 < count && count <= WIDTH && packed.len() >= WIDTH * depth, "the panel holds the rows");
    assert!((count - 1) * panel.row + depth <= panel.values.len(), "the rows lie inside the matrix");
    let (rows, columns) = (count - count % 4, depth - depth % LANES);
    for chunk in (0..columns).step_by(CHUNK) {
        let length = CHUNK.min(columns - chunk);
        for row in (0..rows).step_by(4) {
            let from = panel.values[row * panel.row + chunk..].as_ptr();
            let into = packed[chunk * WIDTH + row..].as_mut_ptr();
            // SAFETY: four rows from `row` and `length` columns from `chunk` lie inside both, as asserted.
            unsafe { turn(from, panel.row, length, into, WIDTH) };
        }
    }
    for row in 0..count {
        let from = if row < rows { columns } else { 0 };
        let numbers = &panel.values[row * panel.row..][..depth];
        for column in from..depth {
            packed[column * WIDTH + row] = numbers[column].single();
        }
    }
}

/// Writes four rows of `length` numbers, a multiple of sixteen, as columns.
///
/// # Safety
/// `length` numbers can be read from each of four places `from_stride` apart, and four written to each of
/// `length` places `into_stride` apart.
#[allow(unsafe_code)]
#[target_feature(enable = "avx512f")]
unsafe fn turn<E: Element>(from: *const E, from_stride: usize, length: usize, into: *mut f32, into_stride: usize) {
    for column in (0..length).step_by(LANES) {
        // SAFETY: as the caller grants.
        unsafe {
            let row = |row: usize| E::load(from.add(row * from_stride + column));
            let (low_ab, high_ab) = (_mm512_unpacklo_ps(row(0), row(1)), _mm512_unpackhi_ps(row(0), row(1)));
            let (low_cd, high_cd) = (_mm512_unpacklo_ps(row(2), row(3)), _mm512_unpackhi_ps(row(2), row(3)));
            // The quarter q of `turned[i]` is column 4 q + i.
            let turned = [
                _mm512_shuffle_ps::<0x44>(low_ab, low_cd),
                _mm512_shuffle_ps::<0xee>(low_ab, low_cd),
                _mm512_shuffle_ps::<0x44>(high_ab, high_cd),
                _mm512_shuffle_ps::<0xee>(high_ab, high_cd),
            ];
            for (next, numbers) in turned.into_iter().enumerate() {
                let place = |quarter: usize| into.add((column + 4 * quarter + next) * into_stride);
                _mm_storeu_ps(place(0), _mm512_extractf32x4_ps::<0>(numbers));
                _mm_storeu_ps(place(1), _mm512_extractf32x4_ps::<1>(numbers));
                _mm_storeu_ps(place(2), _mm512_extractf32x4_ps::<2>(numbers));
                _mm_storeu_ps(place(3), _mm512_extractf32x4_ps::<3>(numbers));
            }
        }
    }
}

#[allow(unsafe_code)]
#[target_feature(enable = "avx512f")]
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
