//! Loops over rows of numbers, compiled for the vector instructions of several processors and chosen when
//! the program runs. Sums are taken in sixteen interleaved parts, whatever the processor's vectors hold.

use multiversion::multiversion;

use super::exponential::exp;

const LANES: usize = 16;

/// Each number changed by `f`, which must be an `#[inline(always)]` function to be compiled along.
#[multiversion(targets = "simd")]
pub fn map<F: Fn(f32) -> f32>(numbers: &mut [f32], f: F) {
    numbers.iter_mut().for_each(|number| *number = f(*number));
}

/// Each number changed by `f` of it and the other row's.
#[multiversion(targets = "simd")]
pub fn zip<F: Fn(f32, f32) -> f32>(numbers: &mut [f32], other: &[f32], f: F) {
    numbers.iter_mut().zip(other).for_each(|(number, other)| *number = f(*number, *other));
}

/// Each number times a factor.
#[multiversion(targets = "simd")]
pub fn scale(numbers: &mut [f32], factor: f32) {
    numbers.iter_mut().for_each(|number| *number *= factor);
}

/// Each number increased by the other row's.
#[multiversion(targets = "simd")]
pub fn add(numbers: &mut [f32], other: &[f32]) {
    numbers.iter_mut().zip(other).for_each(|(number, other)| *number += other);
}

/// Sum of a row.
#[multiversion(targets = "simd")]
pub fn sum(numbers: &[f32]) -> f32 {
    sum_of(numbers, |x| x)
}

/// Sum of products of two rows.
#[multiversion(targets = "simd")]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    sum_of_pairs(a, b, |a, b| a * b)
}

/// Largest number; minus infinity of none. What is no number (NaN) is passed over.
#[multiversion(targets = "simd")]
pub fn maximum(numbers: &[f32]) -> f32 {
    let mut best = [f32::NEG_INFINITY; LANES];
    let chunks = numbers.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            best[lane] = if chunk[lane] > best[lane] { chunk[lane] } else { best[lane] };
        }
    }
    best.iter().chain(rest).fold(f32::NEG_INFINITY, |best, number| best.max(*number))
}

/// Replaces each number by exp(number − `most`) and gives their sum.
#[multiversion(targets = "simd")]
pub fn exponentials(numbers: &mut [f32], most: f32) -> f32 {
    numbers.iter_mut().for_each(|x| *x = exp(*x - most));
    sum_of(numbers, |x| x)
}

/// Sum of `f` of each number.
#[inline(always)]
pub fn sum_of(numbers: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut partial = [0.0f32; LANES];
    let chunks = numbers.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            partial[lane] += f(chunk[lane]);
        }
    }
    partial.iter_mut().zip(rest).for_each(|(partial, number)| *partial += f(*number));
    add_lanes(partial)
}

/// Sum of `f` of each pair of numbers.
#[inline(always)]
pub fn sum_of_pairs(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
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
