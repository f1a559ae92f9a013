//! How parameters and activations lie on the ranks of a stage: the types from which all others follow.

use crate::distribution::{Distribution, Place, SplitAxis};
use crate::graph::DimName;
use crate::sharding::TensorSplit;
use crate::strategy::{Strategy, ZeroStage};

/// A strategy as the types of its programs depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Placement<'a> {
    /// How the tensor axis splits dims.
    pub split: TensorSplit,
    /// The strategy.
    pub strategy: &'a Strategy,
}

impl Placement<'_> {
    /// Ranks along an axis.
    pub fn degree(&self, axis: SplitAxis) -> u64 {
        match axis {
            SplitAxis::Data => self.strategy.data_parallel,
            SplitAxis::Tensor => self.split.key_value_ways,
            SplitAxis::Query => self.split.tensor_parallel / self.split.key_value_ways,
        }
    }

    /// The axes of the tensor degree that have several ranks.
    pub fn tensor_axes(&self) -> Vec<SplitAxis> {
        [SplitAxis::Tensor, SplitAxis::Query].into_iter().filter(|axis| self.degree(*axis) > 1).collect()
    }

    /// A distribution without places on axes of one rank.
    pub fn normal(&self, distribution: Distribution) -> Distribution {
        let single = SplitAxis::ALL.into_iter().filter(|axis| self.degree(*axis) == 1);
        single.fold(distribution, |normal, axis| normal.with(axis, Place::Replicated))
    }

    /// In how many parts a distribution splits a dim.
    pub fn ways(&self, dim: DimName, distribution: Distribution) -> u64 {
        let split = SplitAxis::ALL.into_iter().filter(|axis| distribution.on(*axis) == Place::Sharded(dim));
        split.map(|axis| self.degree(axis)).product()
    }

    /// How a parameter with these dims is stored between steps.
    pub fn stored(&self, dims: impl IntoIterator<Item = DimName>) -> Distribution {
        let mut stored = Distribution::REPLICATED;
        for dim in dims {
            match dim {
                DimName::KeyValueHeads => stored.tensor = Place::Sharded(dim),
                DimName::QueriesPerKeyValue => stored.query = Place::Sharded(dim),
                DimName::Intermediate | DimName::ExpertIntermediate | DimName::Vocabulary => {
                    stored.tensor = Place::Sharded(dim);
                    stored.query = Place::Sharded(dim);
                }
                _ => {}
            }
        }
        if self.strategy.zero_stage == ZeroStage::Parameters {
            stored.data = Place::Flat;
        }
        self.normal(stored)
    }

    /// How index data and activations between blocks lie.
    pub fn stream(&self, dims: &[DimName]) -> Distribution {
        let mut stream = Distribution::REPLICATED;
        if dims.contains(&DimName::MicroBatch) {
            stream.data = Place::Sharded(DimName::MicroBatch);
        }
        if self.splits_sequence(dims) {
            stream.tensor = Place::Sharded(DimName::Sequence);
            stream.query = Place::Sharded(DimName::Sequence);
        }
        self.normal(stream)
    }

    /// Whether sequence parallelism splits an activation of the residual stream.
    pub fn splits_sequence(&self, dims: &[DimName]) -> bool {
        self.split.sequence_parallel && dims.contains(&DimName::Sequence) && dims.contains(&DimName::Hidden)
    }
}
