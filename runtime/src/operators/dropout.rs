//! Dropout whose masks are drawn again wherever they are needed: functions of counters, kept by nobody.

use std::ops::Range;

use ir::graph::{DimName, DropoutSite};

use super::{Operand, Place, ResultShape, change_rows};
use crate::random::{Region, Span, Stream, drop_elements};
use crate::tensor::{Dims, Tensor};

/// What a pass drops: with an element's index in the whole global batch it says which elements are left, in
/// forward, recomputation and backward, on every rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropping {
    /// Probability at sites of the residual stream.
    pub hidden: f64,
    /// Probability of attention weights.
    pub attention: f64,
    /// Seed of the run.
    pub seed: u64,
    /// Step, counted over the run.
    pub step: u64,
    /// Layer, counted over the model.
    pub layer: u64,
    /// First sequence of the micro-batch, counted over the global batch.
    pub first_sequence: u64,
}

/// A rank's part of the mask of one site.
pub struct Mask {
    stream: Stream,
    region: Region,
    probability: f64,
}

impl Mask {
    /// The mask of a tensor with local dims, or none if nothing is dropped.
    pub fn of(site: DropoutSite, dims: &Dims, place: &Place) -> Option<Mask> {
        let dropping = place.dropping?;
        let probability = match site {
            DropoutSite::Attention => dropping.attention,
            DropoutSite::Embedding | DropoutSite::AttentionOutput | DropoutSite::FeedForwardOutput => dropping.hidden,
        };
        if probability <= 0.0 {
            return None;
        }
        let stream = Stream::dropout(dropping.seed, dropping.step, dropping.layer, site);
        let part = |(start, whole): (usize, usize), length| Span { whole: whole as u64, start: start as u64, length };
        let first = dropping.first_sequence;
        let span = |&(name, length): &(DimName, usize)| match (name, length as u64) {
            // The outermost dim: how many sequences follow is of no account.
            (DimName::MicroBatch, length) => Span { whole: first + length, start: first, length },
            (DimName::Sequence, length) => part(place.positions, length),
            (DimName::KeyValueHeads, length) => part(place.heads, length),
            (DimName::QueriesPerKeyValue, length) => part(place.queries, length),
            // The typing rules keep all others whole.
            (_, length) => Span::whole(length),
        };
        Some(Mask { stream, region: Region { spans: dims.iter().map(span).collect() }, probability })
    }

    /// The mask of a tensor `[micro_batch, sequence, …]` as kernels draw it.
    #[cfg(feature = "kernels")]
    pub fn for_kernel(&self, place: &Place) -> kernels::dropout::Mask {
        kernels::dropout::Mask {
            key: self.stream.key,
            counter_high: self.stream.counter_high,
            probability: self.probability,
            first_sequence: self.region.spans.first().map_or(0, |sequences| sequences.start as u32),
            positions: (place.positions.0 as u32, place.positions.1 as u32),
        }
    }

    /// Drops among local elements `start`, `start` + 1, …, row-major.
    pub fn apply(&self, start: usize, elements: &mut [f32]) {
        let range = Range { start: start as u64, end: (start + elements.len()) as u64 };
        drop_elements(self.stream, &self.region, range, self.probability, elements);
    }
}

/// What dropout leaves of the operand; the operand itself where nothing is dropped.
pub fn dropout(operand: Operand, site: DropoutSite, result: &ResultShape) -> Tensor {
    let Some(mask) = Mask::of(site, result.dims, &result.place) else {
        return operand.into_shared().renamed(result.dims);
    };
    let width = result.dims.last().map_or(1, |(_, extent)| *extent);
    change_rows(operand, width, result, |row, elements| mask.apply(row * width, elements))
}
