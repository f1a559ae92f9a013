//! The device mesh: which rank sits where, and which ranks form a group along an axis.
//!
//! Ranks are numbered with the last axis of the order running fastest. That is the tensor axis, so that a tensor group
//! is a run of neighbouring ranks and fits inside a node; which axis is outermost is a choice.

use serde::{Deserialize, Serialize};

use crate::strategy::Strategy;

/// An axis of the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Axis {
    /// Stages.
    Pipeline,
    /// Replicas.
    Data,
    /// Parts of a sequence.
    Context,
    /// Parts of a matrix.
    Tensor,
}

/// The order of a mesh's axes, which says whose neighbours share a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum MeshOrder {
    /// Pipeline, data, context, tensor: replicas of a stage are neighbours.
    #[default]
    PipelineOutermost,
    /// Data, pipeline, context, tensor: stages of a replica are neighbours (Megatron-LM, `--use-tp-pp-dp-mapping`).
    DataOutermost,
}

/// A rank's number in the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Rank(pub u64);

/// A pipeline stage's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StageId(pub u64);

/// The mesh: axes outermost first, each with its degree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mesh {
    /// Axes and degrees; the last axis runs fastest.
    pub axes: Vec<(Axis, u64)>,
}

/// All groups along one axis: `count` groups of `size` ranks, `stride` apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupFamily {
    /// The axis along which the ranks of a group differ.
    pub axis: Axis,
    /// Ranks of a group.
    pub size: u64,
    /// Distance between neighbours of a group.
    pub stride: u64,
    /// Groups of the family.
    pub count: u64,
}

impl MeshOrder {
    /// All orders, the usual one first.
    pub const ALL: [MeshOrder; 2] = [MeshOrder::PipelineOutermost, MeshOrder::DataOutermost];

    /// The axes, outermost first.
    pub fn axes(self) -> [Axis; 4] {
        match self {
            MeshOrder::PipelineOutermost => [Axis::Pipeline, Axis::Data, Axis::Context, Axis::Tensor],
            MeshOrder::DataOutermost => [Axis::Data, Axis::Pipeline, Axis::Context, Axis::Tensor],
        }
    }

    /// The word used in flags.
    pub fn name(self) -> &'static str {
        match self {
            MeshOrder::PipelineOutermost => "pipeline-outermost",
            MeshOrder::DataOutermost => "data-outermost",
        }
    }

    /// Whether this is the usual order, which plan files leave out.
    pub fn is_usual(&self) -> bool {
        *self == MeshOrder::default()
    }
}

impl Axis {
    /// The word used in files and tables.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Pipeline => "pipeline",
            Axis::Data => "data",
            Axis::Context => "context",
            Axis::Tensor => "tensor",
        }
    }
}

impl Mesh {
    /// Number of ranks.
    pub fn world_size(&self) -> u64 {
        self.axes.iter().map(|(_, degree)| degree).product()
    }

    /// Degree of an axis; 1 if the mesh lacks it.
    pub fn degree(&self, axis: Axis) -> u64 {
        self.axes.iter().find(|(name, _)| *name == axis).map_or(1, |(_, degree)| *degree)
    }

    /// A rank's coordinate on each axis, in the mesh's order.
    pub fn coordinate(&self, rank: Rank) -> Vec<(Axis, u64)> {
        let mut rest = rank.0;
        let mut coordinate: Vec<(Axis, u64)> = Vec::with_capacity(self.axes.len());
        for (axis, degree) in self.axes.iter().rev() {
            coordinate.push((*axis, rest % degree));
            rest /= degree;
        }
        coordinate.reverse();
        coordinate
    }

    /// The groups along an axis.
    pub fn groups(&self, axis: Axis) -> GroupFamily {
        let inner = self.axes.iter().rev().take_while(|(name, _)| *name != axis);
        let stride = inner.map(|(_, degree)| degree).product();
        let size = self.degree(axis);
        GroupFamily { axis, size, stride, count: self.world_size() / size }
    }
}

impl GroupFamily {
    /// The ranks of the group that holds `rank`.
    pub fn members(&self, rank: Rank) -> Vec<Rank> {
        let position = rank.0 / self.stride % self.size;
        let first = rank.0 - position * self.stride;
        (0..self.size).map(|index| Rank(first + index * self.stride)).collect()
    }
}

/// The mesh of a strategy.
pub fn build_mesh(strategy: &Strategy) -> Mesh {
    let degree = |axis| match axis {
        Axis::Pipeline => strategy.pipeline_parallel,
        Axis::Data => strategy.data_parallel,
        Axis::Context => strategy.context_parallel,
        Axis::Tensor => strategy.tensor_parallel,
    };
    Mesh { axes: strategy.mesh_order.axes().map(|axis| (axis, degree(axis))).to_vec() }
}

/// First rank of a stage and one past the last; where data is outermost, of the first replica's.
pub fn stage_ranks(strategy: &Strategy, stage: u64) -> (u64, u64) {
    let neighbours = match strategy.mesh_order {
        MeshOrder::PipelineOutermost => strategy.data_parallel,
        MeshOrder::DataOutermost => 1,
    };
    let ranks = neighbours * strategy.context_parallel * strategy.tensor_parallel;
    (stage * ranks, (stage + 1) * ranks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::Strategy;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn each_rank_is_at_one_place_and_in_one_group_of_each_axis(
            degrees in [1u64..5, 1u64..5, 1u64..4, 1u64..5], order in prop::sample::select(MeshOrder::ALL.to_vec())
        ) {
            let mesh = Mesh { axes: order.axes().into_iter().zip(degrees).collect() };
            let places: BTreeSet<_> = (0..mesh.world_size()).map(|rank| mesh.coordinate(Rank(rank))).collect();
            prop_assert_eq!(places.len() as u64, mesh.world_size());
            for axis in order.axes() {
                let family = mesh.groups(axis);
                let groups: BTreeSet<_> = (0..mesh.world_size()).map(|rank| family.members(Rank(rank))).collect();
                prop_assert_eq!(groups.len() as u64, family.count);
                let ranks: BTreeSet<_> = groups.iter().flatten().collect();
                prop_assert_eq!(ranks.len() as u64, mesh.world_size());
            }
        }
    }

    #[test]
    fn tensor_groups_are_neighbours() {
        let mesh = Mesh { axes: vec![(Axis::Pipeline, 12), (Axis::Data, 8), (Axis::Context, 1), (Axis::Tensor, 4)] };
        assert_eq!(mesh.groups(Axis::Tensor).members(Rank(117)), [116, 117, 118, 119].map(Rank));
        assert_eq!(mesh.groups(Axis::Data).stride, 4);
        assert_eq!(mesh.coordinate(Rank(117))[0], (Axis::Pipeline, 3));
    }

    #[test]
    fn ranks_of_a_stage_are_at_its_place_on_the_pipeline_axis() {
        let plain = Strategy::plain([2, 3, 4], 12);
        for mesh_order in MeshOrder::ALL {
            let strategy = Strategy { mesh_order, ..plain.clone() };
            let mesh = build_mesh(&strategy);
            for stage in 0..3 {
                let (first, end) = stage_ranks(&strategy, stage);
                let on_stage = |rank| mesh.coordinate(Rank(rank)).contains(&(Axis::Pipeline, stage));
                assert!((first..end).all(on_stage), "{mesh_order:?}, stage {stage}");
            }
        }
    }
}
