//! Speed of matrix products by shape: many are timed, and the constants of the profile's form are fitted.

use std::time::Instant;

use ir::graph::DimName::{Hidden, Intermediate, Sequence};
use ir::program::Op;

use crate::executor::ProductShape;
use crate::operators::{Operand, Place, ResultShape, apply};
use crate::tensor::{Dims, Format, Memory, Tensor};

/// Extents of the products that are timed.
const EXTENTS: [usize; 4] = [48, 128, 384, 1024];
/// Most multiply-adds of a product that is timed.
const MOST: usize = 512 << 20;
/// Times that each is computed; the shortest counts.
const REPETITIONS: usize = 4;
/// Rounds in which each constant is fitted with the others fixed.
const ROUNDS: usize = 6;
/// Ratio between the halves that are tried.
const RATIO: f64 = 1.1;
/// Halves that are tried, from 0.25 on.
const TRIED: i32 = 90;

/// Constants of `rate · m/(m + rows) · n/(n + columns) · k/(k + depth)`, the rate of a product in FLOPs a second:
/// the form of the profile's matmul entry with edges.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProductRates {
    /// Rate of large products.
    pub rate: f64,
    /// Rows, columns and depth at which half of it is lost.
    pub halves: [f64; 3],
    /// Mean error of the form over the products that were timed.
    pub error: f64,
}

impl ProductRates {
    /// Time of a product.
    pub fn seconds(&self, shape: &ProductShape) -> f64 {
        2.0 * shape.batch * shape.m * shape.n * shape.k * per_flop(self.halves, shape) / self.rate
    }
}

/// Times products as they occur in forward and backward passes.
pub fn measure_products() -> ProductRates {
    let mut samples = Vec::new();
    let memory = Memory::default();
    for tokens in EXTENTS {
        for wide in EXTENTS {
            for narrow in EXTENTS.into_iter().filter(|narrow| tokens * wide * narrow <= MOST) {
                let input = [(Sequence, tokens), (Hidden, wide)];
                let weight = [(Hidden, wide), (Intermediate, narrow)];
                let output = [(Sequence, tokens), (Intermediate, narrow)];
                let shape =
                    |m: usize, n: usize, k: usize| ProductShape { batch: 1.0, m: m as f64, n: n as f64, k: k as f64 };
                for (a, b, result, shape) in [
                    (&input, &weight, &output, shape(tokens, narrow, wide)),
                    (&output, &weight, &input, shape(tokens, wide, narrow)),
                    (&input, &output, &weight, shape(wide, narrow, tokens)),
                ] {
                    samples.push((shape, shortest(a, b, result, &memory)));
                }
            }
        }
    }
    fit(&samples)
}

fn shortest(a: &Dims, b: &Dims, result: &Dims, memory: &Memory) -> f64 {
    let [a, b] = [a, b].map(|dims| {
        let numbers: Vec<f32> = (0..crate::tensor::size_of(dims)).map(|index| (index % 7) as f32).collect();
        Tensor::from_numbers(memory, dims, Format::Single, &numbers)
    });
    let shape = ResultShape { memory, dims: result, format: Format::Single, place: Place::WHOLE };
    let time = |_| {
        let start = Instant::now();
        let product = apply(&Op::Contraction, vec![Operand::Borrowed(&a), Operand::Borrowed(&b)], &shape);
        let seconds = start.elapsed().as_secs_f64();
        drop(product);
        seconds
    };
    (0..REPETITIONS).map(time).fold(f64::INFINITY, f64::min)
}

/// Fits the constants to shapes and seconds, by the least squares of relative errors: one constant after the other.
fn fit(samples: &[(ProductShape, f64)]) -> ProductRates {
    let mut halves = [8.0; 3];
    for _ in 0..ROUNDS {
        for constant in 0..halves.len() {
            let tried = (0..TRIED).map(|power| 0.25 * RATIO.powi(power));
            let error = |half: f64| {
                let mut tried = halves;
                tried[constant] = half;
                spread(tried, samples).1
            };
            halves[constant] = tried.min_by(|a, b| error(*a).total_cmp(&error(*b))).unwrap_or(halves[constant]);
        }
    }
    let (mean, squares) = spread(halves, samples);
    ProductRates { rate: mean.exp(), halves, error: (squares / samples.len() as f64).sqrt() }
}

/// Mean of the logarithms of the rates of large products that the samples speak for, and their squared distances.
fn spread(halves: [f64; 3], samples: &[(ProductShape, f64)]) -> (f64, f64) {
    let rate = |(shape, seconds): &(ProductShape, f64)| {
        (2.0 * shape.batch * shape.m * shape.n * shape.k * per_flop(halves, shape) / seconds).ln()
    };
    let rates: Vec<f64> = samples.iter().map(rate).collect();
    let mean = rates.iter().sum::<f64>() / rates.len() as f64;
    (mean, rates.iter().map(|rate| (rate - mean).powi(2)).sum())
}

/// Time for each FLOP over that of a large product.
fn per_flop([rows, columns, depth]: [f64; 3], shape: &ProductShape) -> f64 {
    (1.0 + rows / shape.m) * (1.0 + columns / shape.n) * (1.0 + depth / shape.k)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fit_finds_the_constants_again() {
        for (rate, halves) in [(5e10, [4.0, 20.0, 60.0]), (1e12, [30.0, 3.0, 12.0])] {
            let truth = ProductRates { rate, halves, error: 0.0 };
            let extents = [32.0, 128.0, 512.0];
            let mut samples = Vec::new();
            for m in extents {
                for (n, k) in extents.into_iter().flat_map(|n| extents.map(|k| (n, k))) {
                    let shape = ProductShape { batch: 1.0, m, n, k };
                    samples.push((shape, truth.seconds(&shape)));
                }
            }
            let found = fit(&samples);
            assert!((found.rate / rate - 1.0).abs() < 0.05, "{found:?}");
            assert!(found.error < 0.02, "{found:?}");
            for (shape, seconds) in samples {
                assert!((found.seconds(&shape) / seconds - 1.0).abs() < 0.06, "{shape:?} {found:?}");
            }
        }
    }
}
