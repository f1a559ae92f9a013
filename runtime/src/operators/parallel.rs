//! Loops over pieces of a result: shared among threads where that pays, and compiled for the processor's
//! vector instructions.
//!
//! What a piece holds depends on shapes only, and sums are taken in an order that does too, so that results
//! are the same bits for any number of threads.

use rayon::prelude::*;

use crate::tensor::ValuesMut;

/// Elements of a piece: small enough for the second-level cache together with the operands' pieces.
pub const PIECE: usize = 1 << 14;

/// Calls `f` for each index below `count`, on all threads if `elements`, the work of all, is large.
pub fn for_each(count: usize, elements: usize, f: impl Fn(usize) + Sync) {
    if elements < 2 * PIECE || count < 2 || rayon::current_num_threads() == 1 {
        vectorized(|| (0..count).for_each(&f));
    } else {
        (0..count).into_par_iter().for_each(|index| vectorized(|| f(index)));
    }
}

/// Calls `f` for each piece of the values with its first element's place. Pieces hold whole rows of `width`.
pub fn for_each_piece(values: ValuesMut, width: usize, f: impl Fn(usize, ValuesMut) + Sync) {
    let elements = values.len();
    let size = (PIECE / width).max(1) * width;
    let pieces = values.pieces(size).into_iter().enumerate();
    if elements < 2 * PIECE || rayon::current_num_threads() == 1 {
        vectorized(|| pieces.for_each(|(index, piece)| f(index * size, piece)));
    } else {
        let pieces: Vec<_> = pieces.collect();
        pieces.into_par_iter().for_each(|(index, piece)| vectorized(|| f(index * size, piece)));
    }
}

/// Gives what `f` gives for each index below `count`, in order.
pub fn map<T: Send>(count: usize, elements: usize, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
    if elements < 2 * PIECE || count < 2 || rayon::current_num_threads() == 1 {
        vectorized(|| (0..count).map(&f).collect())
    } else {
        (0..count).into_par_iter().map(|index| vectorized(|| f(index))).collect()
    }
}

/// Runs code that is compiled for the widest vector instructions of the processor.
#[inline(always)]
pub fn vectorized<T>(f: impl FnOnce() -> T) -> T {
    struct Code<F>(F);
    impl<T, F: FnOnce() -> T> pulp::WithSimd for Code<F> {
        type Output = T;
        #[inline(always)]
        fn with_simd<S: pulp::Simd>(self, _: S) -> T {
            (self.0)()
        }
    }
    pulp::Arch::new().dispatch(Code(f))
}

/// Sum of numbers, in sixteen interleaved partial sums.
#[inline(always)]
pub fn sum(numbers: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut partial = [0.0f32; LANES];
    let chunks = numbers.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            partial[lane] += f(chunk[lane]);
        }
    }
    for (partial, number) in partial.iter_mut().zip(rest) {
        *partial += f(*number);
    }
    add_lanes(partial)
}

/// Sum of products of two rows.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    sum_pairs(a, b, |a, b| a * b)
}

/// Sum over pairs of two rows, in sixteen interleaved partial sums.
#[inline(always)]
pub fn sum_pairs(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut partial = [0.0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_chunks.remainder().iter().zip(b_chunks.remainder());
    for (a, b) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            partial[lane] += f(a[lane], b[lane]);
        }
    }
    partial.iter_mut().zip(rest).for_each(|(partial, (a, b))| *partial += f(*a, *b));
    add_lanes(partial)
}

/// Largest number; minus infinity of none. A number that is none (NaN) is passed over.
#[inline(always)]
pub fn maximum(numbers: &[f32]) -> f32 {
    let mut best = [f32::NEG_INFINITY; LANES];
    let chunks = numbers.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            best[lane] = if chunk[lane] > best[lane] { chunk[lane] } else { best[lane] };
        }
    }
    let rest = rest.iter().fold(f32::NEG_INFINITY, |best, number| best.max(*number));
    best.iter().fold(rest, |best, number| best.max(*number))
}

const LANES: usize = 16;

#[inline(always)]
fn add_lanes(mut partial: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            partial[lane] += partial[lane + width];
        }
        width /= 2;
    }
    partial[0]
}
