//! Products of strided fp32 matrices.
//!
//! On processors with AVX-512 they are computed by the tile of [`kernel`], which reaches 88 % of the peak of
//! multiply-adds where gemm 0.19 reached 42 % on the same core; on others by gemm.

#[cfg(target_arch = "x86_64")]
mod blocked;
#[cfg(target_arch = "x86_64")]
mod kernel;

use super::parallel;

/// Extents of a product: rows of the result, its columns, and what is summed over.
#[derive(Clone, Copy, Debug)]
pub struct Extents {
    pub rows: usize,
    pub columns: usize,
    pub summed: usize,
}

/// A matrix to be read: where its first element is, and the distances between rows and between columns.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    values: &'a [f32],
    row: usize,
    column: usize,
}

/// A matrix to be written. Copies of it may be written by several threads at different places.
#[derive(Clone, Copy, Debug)]
pub struct MatrixMut<'a> {
    start: *mut f32,
    len: usize,
    row: usize,
    column: usize,
    borrow: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: a `MatrixMut` stands for an exclusive borrow of plain numbers; those who copy it to several
// threads promise in `multiply` that each writes other elements.
#[allow(unsafe_code)]
unsafe impl Send for MatrixMut<'_> {}
// SAFETY: as above; nothing is read or written through a shared reference alone.
#[allow(unsafe_code)]
unsafe impl Sync for MatrixMut<'_> {}

impl<'a> Matrix<'a> {
    pub fn new(values: &'a [f32], row: usize, column: usize) -> Matrix<'a> {
        Matrix { values, row, column }
    }

    /// The matrix from a row and a column on.
    fn part(self, row: usize, column: usize) -> Matrix<'a> {
        Matrix { values: &self.values[row * self.row + column * self.column..], ..self }
    }

    /// Rows for columns.
    pub fn transposed(self) -> Matrix<'a> {
        Matrix { values: self.values, row: self.column, column: self.row }
    }
}

impl<'a> MatrixMut<'a> {
    pub fn new(values: &'a mut [f32], row: usize, column: usize) -> MatrixMut<'a> {
        let (start, len) = (values.as_mut_ptr(), values.len());
        MatrixMut { start, len, row, column, borrow: std::marker::PhantomData }
    }

    /// The matrix that starts at another element.
    pub fn at(self, place: usize) -> MatrixMut<'a> {
        assert!(place <= self.len, "a matrix starts inside the tensor");
        MatrixMut { start: self.start.wrapping_add(place), len: self.len - place, ..self }
    }
}

impl MatrixMut<'_> {
    /// Writes a row whose columns are neighbours, or adds to it. Threads must write different rows.
    #[allow(unsafe_code)]
    pub fn put_row(self, row: usize, numbers: &[f32], add: bool) {
        assert!(self.column == 1 && row * self.row + numbers.len() <= self.len, "the row fits");
        // SAFETY: the row lies inside the exclusive borrow that the matrix stands for, and no other thread
        // touches it by this function's contract.
        let target = unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.row), numbers.len()) };
        match add {
            true => target.iter_mut().zip(numbers).for_each(|(target, number)| *target += number),
            false => target.copy_from_slice(numbers),
        }
    }
}

/// Least work of a product, in multiply-adds, that is shared among threads.
const SHARED_FROM: usize = 1 << 21;

/// Runs `one` for each of several products: side by side if they are many and small, one after another on
/// all threads if they are large. It gets the product's number and whether to use all threads.
pub fn multiply_many(count: usize, extents: Extents, one: impl Fn(usize, bool) + Sync) {
    let work = extents.rows * extents.columns * extents.summed;
    if count > 1 && (work < SHARED_FROM || count >= 4 * rayon::current_num_threads()) {
        parallel::for_each(count, count * work, |index| one(index, false));
    } else {
        (0..count).for_each(|index| one(index, work >= SHARED_FROM && rayon::current_num_threads() > 1));
    }
}

/// `into` = `a` · `b`, or that added to `into`.
///
/// Threads that share `into` must write other elements at the same time.
///
/// # Panics
/// If a matrix reaches beyond its numbers.
pub fn multiply(extents: Extents, a: Matrix, b: Matrix, into: MatrixMut, add: bool, threads: bool) {
    let Extents { rows, columns, summed } = extents;
    if rows == 0 || columns == 0 {
        return;
    }
    let last = |first: usize, row: usize, second: usize, column: usize| (first - 1) * row + (second - 1) * column;
    assert!(last(rows, into.row, columns, into.column) < into.len, "the result fits");
    if summed > 0 {
        assert!(last(rows, a.row, summed, a.column) < a.values.len(), "the first operand fits");
        assert!(last(summed, b.row, columns, b.column) < b.values.len(), "the second operand fits");
    }
    if summed == 0 || !multiply_in_blocks(extents, a, b, into, add, threads) {
        multiply_by_gemm(extents, a, b, into, add, threads);
    }
}

/// Computes the product in blocks, if the processor and the result's strides allow it.
#[cfg(target_arch = "x86_64")]
fn multiply_in_blocks(extents: Extents, a: Matrix, b: Matrix, into: MatrixMut, add: bool, threads: bool) -> bool {
    let Extents { rows, columns, summed } = extents;
    if !blocked::is_supported() || rows.min(columns) < 4 {
        return false;
    }
    if into.column != 1 {
        let turned = MatrixMut { row: into.column, column: into.row, ..into };
        let extents = Extents { rows: columns, columns: rows, summed };
        return into.row == 1 && multiply_in_blocks(extents, b.transposed(), a.transposed(), turned, add, threads);
    }
    let parts = if threads { rayon::current_num_threads() } else { 1 };
    if rows >= columns {
        let size = rows.div_ceil(parts).next_multiple_of(kernel::ROWS);
        parallel::for_each(rows.div_ceil(size), rows * columns, |part| {
            let first = part * size;
            let extents = Extents { rows: size.min(rows - first), ..extents };
            blocked::multiply(extents, a.part(first, 0), b, into.at(first * into.row), add);
        });
    } else {
        let size = columns.div_ceil(parts).next_multiple_of(kernel::COLUMNS);
        parallel::for_each(columns.div_ceil(size), rows * columns, |part| {
            let first = part * size;
            let extents = Extents { columns: size.min(columns - first), ..extents };
            blocked::multiply(extents, a, b.part(0, first), into.at(first), add);
        });
    }
    true
}

#[cfg(not(target_arch = "x86_64"))]
fn multiply_in_blocks(_: Extents, _: Matrix, _: Matrix, _: MatrixMut, _: bool, _: bool) -> bool {
    false
}

#[allow(unsafe_code)]
fn multiply_by_gemm(extents: Extents, a: Matrix, b: Matrix, into: MatrixMut, add: bool, threads: bool) {
    let Extents { rows, columns, summed } = extents;
    let threads = if threads { gemm::Parallelism::Rayon(0) } else { gemm::Parallelism::None };
    // SAFETY: the extents and strides stay inside the slices, as `multiply` checked; `into` stands for an
    // exclusive borrow, whose elements no other thread touches by the contract of `multiply`.
    unsafe {
        gemm::gemm(
            rows,
            columns,
            summed,
            into.start,
            into.column as isize,
            into.row as isize,
            add,
            a.values.as_ptr(),
            a.column as isize,
            a.row as isize,
            b.values.as_ptr(),
            b.column as isize,
            b.row as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            threads,
        );
    }
}
