//! Products of strided matrices, computed in fp32.
//!
//! On processors with AVX-512 they are computed by the tile of [`kernel`], which reaches 88 % of the peak of
//! multiply-adds where gemm 0.19 reached 42 % on the same core; on others by gemm. The tile reads packed numbers, and
//! bf16 is widened while it is packed and results are rounded block by block; gemm has fp32 only.

#[cfg(target_arch = "x86_64")]
mod blocked;
#[cfg(target_arch = "x86_64")]
mod kernel;

use super::{in_single, parallel};
use crate::tensor::{Memory, Tensor, Values, bf16};

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
    elements: Elements<'a>,
    row: usize,
    column: usize,
}

/// Elements of an operand.
#[derive(Clone, Copy, Debug)]
enum Elements<'a> {
    Single(&'a [f32]),
    Brain(&'a [bf16]),
}

/// A matrix to be written. Copies of it may be written by several threads at different places.
#[derive(Clone, Copy, Debug)]
pub struct MatrixMut<'a, E = f32> {
    start: *mut E,
    len: usize,
    row: usize,
    column: usize,
    borrow: std::marker::PhantomData<&'a mut [E]>,
}

// SAFETY: a `MatrixMut` stands for an exclusive borrow of plain numbers; those who copy it to several
// threads promise in `multiply` that each writes other elements.
#[allow(unsafe_code)]
unsafe impl<E: Send> Send for MatrixMut<'_, E> {}
// SAFETY: as above; nothing is read or written through a shared reference alone.
#[allow(unsafe_code)]
unsafe impl<E: Sync> Sync for MatrixMut<'_, E> {}

/// An element of a result that blocks are computed for.
#[cfg(target_arch = "x86_64")]
trait Computed: Copy + Send + Sync {
    /// Whether products of few rows or columns are left to gemm, which is faster.
    const IS_LEFT_TO_GEMM: bool;

    fn multiply(extents: Extents, a: Matrix, b: Matrix, into: MatrixMut<Self>, add: bool);
}

#[cfg(target_arch = "x86_64")]
impl Computed for f32 {
    const IS_LEFT_TO_GEMM: bool = true;

    fn multiply(extents: Extents, a: Matrix, b: Matrix, into: MatrixMut, add: bool) {
        blocked::multiply(extents, a, b, into, add);
    }
}

#[cfg(target_arch = "x86_64")]
impl Computed for bf16 {
    const IS_LEFT_TO_GEMM: bool = false;

    fn multiply(extents: Extents, a: Matrix, b: Matrix, into: MatrixMut<bf16>, add: bool) {
        assert!(!add, "sums are rounded once");
        blocked::multiply_rounded(extents, a, b, into);
    }
}

impl<'a> Matrix<'a> {
    pub fn new(values: &'a [f32], row: usize, column: usize) -> Matrix<'a> {
        Matrix { elements: Elements::Single(values), row, column }
    }

    /// A matrix of a tensor's elements whose first is at `start`; bf16 only if it is [`readable`].
    pub fn of(values: Values<'a>, start: usize, row: usize, column: usize) -> Matrix<'a> {
        let elements = match values {
            Values::Single(values) => Elements::Single(&values[start..]),
            Values::Brain(values) => Elements::Brain(&values[start..]),
            Values::Index(_) => unreachable!("ids are not computed with"),
        };
        Matrix { elements, row, column }
    }

    /// The matrix from a row and a column on.
    fn part(self, row: usize, column: usize) -> Matrix<'a> {
        let start = row * self.row + column * self.column;
        let elements = match self.elements {
            Elements::Single(values) => Elements::Single(&values[start..]),
            Elements::Brain(values) => Elements::Brain(&values[start..]),
        };
        Matrix { elements, ..self }
    }

    /// Rows for columns.
    pub fn transposed(self) -> Matrix<'a> {
        Matrix { elements: self.elements, row: self.column, column: self.row }
    }

    fn len(&self) -> usize {
        match self.elements {
            Elements::Single(values) => values.len(),
            Elements::Brain(values) => values.len(),
        }
    }

    fn is_single(&self) -> bool {
        matches!(self.elements, Elements::Single(_))
    }

    fn singles(&self) -> &'a [f32] {
        match self.elements {
            Elements::Single(values) => values,
            Elements::Brain(_) => unreachable!("products of bf16 are computed in blocks"),
        }
    }
}

impl<'a, E> MatrixMut<'a, E> {
    pub fn new(values: &'a mut [E], row: usize, column: usize) -> MatrixMut<'a, E> {
        let (start, len) = (values.as_mut_ptr(), values.len());
        MatrixMut { start, len, row, column, borrow: std::marker::PhantomData }
    }

    /// The matrix that starts at another element.
    pub fn at(self, place: usize) -> MatrixMut<'a, E> {
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

#[cfg(target_arch = "x86_64")]
impl MatrixMut<'_, bf16> {
    /// Writes a row whose columns are neighbours. Threads must write different rows.
    #[allow(unsafe_code)]
    #[inline(always)]
    fn put_rounded_row(self, row: usize, numbers: &[f32]) {
        assert!(self.column == 1 && row * self.row + numbers.len() <= self.len, "the row fits");
        // SAFETY: the row lies inside the exclusive borrow that the matrix stands for, and no other thread
        // touches it by this function's contract.
        let target = unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.row), numbers.len()) };
        target.iter_mut().zip(numbers).for_each(|(target, number)| *target = crate::tensor::rounded(*number));
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

/// Whether products are computed in blocks whose results have these distances between rows and between columns.
pub fn is_in_blocks([row, column]: [usize; 2]) -> bool {
    is_supported() && (row == 1 || column == 1)
}

/// A tensor as products read it whose results have such distances: itself, or widened for gemm.
pub fn readable(tensor: &Tensor, layout: [usize; 2], memory: &Memory) -> Tensor {
    match is_in_blocks(layout) {
        true => tensor.clone(),
        false => in_single(tensor, memory),
    }
}

/// `into` = `a` · `b`, or that added to `into`.
///
/// Threads that share `into` must write other elements at the same time.
///
/// # Panics
/// If a matrix reaches beyond its numbers.
pub fn multiply(extents: Extents, a: Matrix, b: Matrix, into: MatrixMut, add: bool, threads: bool) {
    check(extents, a, b, into);
    if extents.summed == 0 || !multiply_in_blocks(extents, a, b, into, add, threads) {
        multiply_by_gemm(extents, a, b, into, add, threads);
    }
}

/// `into` = `a` · `b`, summed in fp32 and rounded once; as [`multiply`].
///
/// # Panics
/// If a matrix reaches beyond its numbers, or the result is not [`is_in_blocks`].
pub fn multiply_rounded(extents: Extents, a: Matrix, b: Matrix, into: MatrixMut<bf16>, threads: bool) {
    check(extents, a, b, into);
    assert!(multiply_in_blocks(extents, a, b, into, false, threads), "the caller asked for the result's layout");
}

fn check<E>(extents: Extents, a: Matrix, b: Matrix, into: MatrixMut<E>) {
    let Extents { rows, columns, summed } = extents;
    if rows == 0 || columns == 0 {
        return;
    }
    let last = |first: usize, row: usize, second: usize, column: usize| (first - 1) * row + (second - 1) * column;
    assert!(last(rows, into.row, columns, into.column) < into.len, "the result fits");
    if summed > 0 {
        assert!(last(rows, a.row, summed, a.column) < a.len(), "the first operand fits");
        assert!(last(summed, b.row, columns, b.column) < b.len(), "the second operand fits");
    }
}

/// Computes the product in blocks, if the processor and the result's strides allow it.
#[cfg(target_arch = "x86_64")]
fn multiply_in_blocks<E: Computed>(
    extents: Extents,
    a: Matrix,
    b: Matrix,
    into: MatrixMut<E>,
    add: bool,
    threads: bool,
) -> bool {
    let Extents { rows, columns, summed } = extents;
    let narrow = rows.min(columns) < 4 && a.is_single() && b.is_single();
    if !is_supported() || narrow && E::IS_LEFT_TO_GEMM {
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
            E::multiply(extents, a.part(first, 0), b, into.at(first * into.row), add);
        });
    } else {
        let size = columns.div_ceil(parts).next_multiple_of(kernel::COLUMNS);
        parallel::for_each(columns.div_ceil(size), rows * columns, |part| {
            let first = part * size;
            let extents = Extents { columns: size.min(columns - first), ..extents };
            E::multiply(extents, a, b.part(0, first), into.at(first), add);
        });
    }
    true
}

#[cfg(target_arch = "x86_64")]
fn is_supported() -> bool {
    blocked::is_supported()
}

#[cfg(not(target_arch = "x86_64"))]
fn is_supported() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn multiply_in_blocks<E>(_: Extents, _: Matrix, _: Matrix, _: MatrixMut<E>, _: bool, _: bool) -> bool {
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
            a.singles().as_ptr(),
            a.column as isize,
            a.row as isize,
            b.singles().as_ptr(),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Extents around and within tiles and blocks.
    const EXTENTS: [[usize; 3]; 7] =
        [[1, 1, 1], [1, 40, 17], [3, 2, 50], [12, 32, 16], [25, 70, 33], [160, 33, 400], [5, 2100, 19]];

    fn numbers(count: usize, seed: usize) -> Vec<bf16> {
        (0..count).map(|place| bf16::from_f32(((place * 7919 + seed) % 2003) as f32 * 0.01 - 10.0)).collect()
    }

    #[test]
    fn products_of_bf16_are_those_of_the_same_numbers_in_fp32() {
        if !is_supported() {
            return println!("skipped: this processor has no AVX-512");
        }
        // Distances between rows and columns of a matrix with `rows` rows and `columns` columns.
        type Strides = fn(usize, usize) -> (usize, usize);
        let layouts: [Strides; 3] = [|_, columns| (columns, 1), |rows, _| (1, rows), |_, columns| (3 * columns, 3)];
        for [rows, columns, summed] in EXTENTS {
            for (left, right) in layouts.iter().flat_map(|left| layouts.iter().map(move |right| (left, right))) {
                let (a_strides, b_strides) = (left(rows, summed), right(summed, columns));
                let (a, b) = (numbers(3 * rows * summed, 1), numbers(3 * summed * columns, 2));
                let wide = [&a, &b].map(|values| values.iter().map(|value| value.to_f32()).collect::<Vec<f32>>());
                let product = |a: Values, b: Values| {
                    let mut into = vec![0.5; rows * columns];
                    let extents = Extents { rows, columns, summed };
                    let a = Matrix::of(a, 0, a_strides.0, a_strides.1);
                    let b = Matrix::of(b, 0, b_strides.0, b_strides.1);
                    multiply(extents, a, b, MatrixMut::new(&mut into, columns, 1), true, false);
                    into
                };
                let expected = product(Values::Single(&wide[0]), Values::Single(&wide[1]));
                for found in [
                    product(Values::Brain(&a), Values::Brain(&b)),
                    product(Values::Single(&wide[0]), Values::Brain(&b)),
                    product(Values::Brain(&a), Values::Single(&wide[1])),
                ] {
                    let name = format!("{rows} x {columns} x {summed}, {a_strides:?}, {b_strides:?}");
                    // Narrow products of fp32 are computed by gemm, in another order.
                    match rows.min(columns) < 4 {
                        true => assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-2), "{name}"),
                        false => assert_eq!(found, expected, "{name}"),
                    }
                }
                let extents = Extents { rows, columns, summed };
                let a = Matrix::of(Values::Brain(&a), 0, a_strides.0, a_strides.1);
                let b = Matrix::of(Values::Brain(&b), 0, b_strides.0, b_strides.1);
                let (mut sums, mut rounded) = (vec![0.0; rows * columns], vec![bf16::ZERO; rows * columns]);
                multiply(extents, a, b, MatrixMut::new(&mut sums, 1, rows), false, false);
                multiply_rounded(extents, a, b, MatrixMut::new(&mut rounded, 1, rows), false);
                let expected: Vec<bf16> = sums.iter().map(|sum| bf16::from_f32(*sum)).collect();
                assert_eq!(rounded, expected, "{rows} x {columns} x {summed}, {a_strides:?}, {b_strides:?}");
            }
        }
    }
}
