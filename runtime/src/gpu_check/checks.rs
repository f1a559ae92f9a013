//! Comparisons of what kernels leave in a device's memory with what is expected.

use ir::program::Op;
use kernels::{Buffer, Element};
use serde::Serialize;

use super::device::Device;
use super::reference::{Dims, Reference, Value, numbers};
use crate::operators::Place;
use crate::tensor::bf16;

/// A result of a kernel beside what was expected.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// The kernel, its sizes, and which of its results.
    pub kernel: String,
    /// Number format of the result.
    pub format: &'static str,
    /// Largest difference over the largest expected number.
    pub largest_error: f64,
    /// Difference that is allowed, over the largest expected number; in bf16 one rounding of each number comes on top.
    pub tolerance: f64,
    /// The first number that differs by more.
    pub wrong: Option<String>,
}

/// Comparisons on a device, one after the other.
pub struct Checks<'a> {
    /// The device.
    pub device: &'a Device,
    /// What computes the expected numbers.
    pub reference: Reference,
    /// What was found.
    pub found: Vec<Comparison>,
}

impl<'a> Checks<'a> {
    /// No comparisons yet.
    pub fn new(device: &'a Device, reference: Reference) -> Checks<'a> {
        Checks { device, reference, found: Vec::new() }
    }

    /// An operator of the reference on a rank that holds everything.
    pub fn of(&self, op: &Op, operands: &[&Value], dims: &Dims) -> Value {
        self.reference.apply(op, operands, dims, Place::WHOLE)
    }

    /// Compares what is in memory with what is expected: to `tolerance` times the largest number, and in bf16 to one
    /// rounding besides.
    pub fn compare(&mut self, kernel: String, buffer: &Buffer, expected: &[f64], tolerance: f64) {
        self.compare_beside(kernel, buffer, expected, tolerance, 0.0);
    }

    /// The same where terms as large as `beside` may cancel: the largest number counts as at least that.
    pub fn compare_beside(&mut self, kernel: String, buffer: &Buffer, expected: &[f64], tolerance: f64, beside: f64) {
        let format = name(buffer.element);
        let mut comparison = Comparison { kernel, format, largest_error: 0.0, tolerance, wrong: None };
        match self.device.read(buffer) {
            Err(failure) => comparison.wrong = Some(failure),
            Ok(found) => comparison.judge(&found, expected, buffer.element, beside),
        }
        self.found.push(comparison);
    }
}

impl Comparison {
    fn judge(&mut self, found: &[f32], expected: &[f64], element: Element, beside: f64) {
        assert_eq!(found.len(), expected.len(), "{}", self.kernel);
        let largest = largest(expected).max(beside);
        for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
            let difference = (f64::from(*found) - expected).abs();
            // Infinite numbers have no difference, and numbers that are none differ.
            if f64::from(*found) == *expected {
                continue;
            }
            let rounding = if element == Element::Brain { expected.abs() / 256.0 } else { 0.0 };
            let is_right = difference <= self.tolerance * largest + rounding;
            if !is_right && self.wrong.is_none() {
                self.wrong = Some(format!("element {at} is {found}, expected {expected}, largest {largest}"));
            }
            if difference.is_finite() && largest > 0.0 {
                self.largest_error = self.largest_error.max(difference / largest);
            }
        }
    }
}

/// The largest finite number.
pub fn largest(numbers: &[f64]) -> f64 {
    numbers.iter().filter(|x| x.is_finite()).map(|x| x.abs()).fold(0.0, f64::max)
}

/// How a number format is written.
pub fn name(element: Element) -> &'static str {
    match element {
        Element::Single => "fp32",
        Element::Brain => "bf16",
        Element::Index => "u32",
    }
}

/// Random numbers of ±`bound` as a buffer of the format holds them.
pub fn held(count: usize, seed: u64, bound: f32, element: Element) -> Vec<f32> {
    rounded(numbers(count, seed, bound), element)
}

/// Numbers as a buffer of the format holds them.
pub fn rounded(numbers: Vec<f32>, element: Element) -> Vec<f32> {
    match element {
        Element::Brain => numbers.into_iter().map(|number| bf16::from_f32(number).to_f32()).collect(),
        Element::Single | Element::Index => numbers,
    }
}
