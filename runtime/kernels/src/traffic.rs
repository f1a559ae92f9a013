//! The bytes that each kernel must move: what a memory-bound kernel's time is measured against.

use crate::Element;

/// A kernel by the function that sends it, with the sizes that its traffic depends on. Elements are those of its
/// largest tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "sizes are called as at the functions that send the kernels")]
pub enum Traffic {
    /// Reads each element once and writes it once.
    Copy { elements: usize },
    /// Reads `x`, writes `y`; the bias is small.
    BiasGelu { elements: usize },
    /// Reads `x` and `dy`, writes `dx`.
    BiasGeluGradient { elements: usize },
    /// Reads gate and up, writes `y`.
    Swiglu { elements: usize },
    /// Reads gate, up and `dy`, writes two gradients.
    SwigluGradient { elements: usize },
    /// Reads `x` and the residual, writes `y`.
    Dropout { elements: usize },
    /// Reads `x` and the residual, writes their sum and `y`.
    Norm { elements: usize },
    /// Reads `x`, `dy` and the upstream gradient, writes `dx`.
    NormGradient { elements: usize },
    /// Reads the scores that are seen, writes all.
    MaskedSoftmax { rows: usize, positions: usize },
    /// Reads `y` and `dy` where scores are seen, writes all.
    MaskedSoftmaxGradient { rows: usize, positions: usize },
    /// Reads `x`, writes `y`, and reads an fp32 table of an angle's cosine and sine for each pair of a position.
    Rotary { elements: usize, positions: usize, head_width: usize },
    /// Reads the logits.
    LossStatistics { logits: usize },
    /// Reads the logits and writes their gradients in their place.
    LossGradient { logits: usize },
    /// Reads a row of the table for each token, writes it.
    Lookup { elements: usize },
    /// Reads `dy`; reads and writes the fp32 gradients of the rows that are named.
    LookupGradient { elements: usize, named: usize },
    /// Reads gradient, number and two moments, writes all but the gradient, in fp32; writes the rounded number if the
    /// format is bf16.
    Adamw { elements: usize },
    /// Reads each element.
    SumOfSquares { elements: usize },
}

impl Traffic {
    /// Bytes with tensors of a number format.
    pub fn bytes(self, element: Element) -> usize {
        let (e, wide) = (element.bytes(), Element::Single.bytes());
        // Position p of a sequence sees p + 1 keys.
        let seen = |rows: usize, positions: usize| rows * (positions + 1) / 2;
        match self {
            Traffic::LossStatistics { logits } => e * logits,
            Traffic::SumOfSquares { elements } => e * elements,
            Traffic::Copy { elements } | Traffic::BiasGelu { elements } | Traffic::Lookup { elements } => {
                2 * e * elements
            }
            Traffic::LossGradient { logits } => 2 * e * logits,
            Traffic::BiasGeluGradient { elements } | Traffic::Swiglu { elements } | Traffic::Dropout { elements } => {
                3 * e * elements
            }
            Traffic::Norm { elements } | Traffic::NormGradient { elements } => 4 * e * elements,
            Traffic::SwigluGradient { elements } => 5 * e * elements,
            Traffic::MaskedSoftmax { rows, positions } => e * (seen(rows, positions) + rows * positions),
            Traffic::MaskedSoftmaxGradient { rows, positions } => e * (2 * seen(rows, positions) + rows * positions),
            Traffic::Rotary { elements, positions, head_width } => 2 * e * elements + wide * positions * head_width,
            Traffic::LookupGradient { elements, named } => e * elements + 2 * wide * named,
            Traffic::Adamw { elements } => {
                let rounded = if element == Element::Brain { element.bytes() } else { 0 };
                (7 * wide + rounded) * elements
            }
        }
    }
}
