//! A rank's place: its stage, its coordinates on the axes of a stage, and the ranks it meets there.

use ir::distribution::{Distribution, Place, SplitAxis};
use ir::graph::DimName;
use ir::mesh::Rank;
use ir::plan::Plan;
use ir::sharding::TensorSplit;

use crate::initial::{AxisPlace, StagePlace};

/// A rank's place in a plan's mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankPlace {
    /// The rank.
    pub rank: Rank,
    /// Number of its stage.
    pub stage: usize,
    /// Stages of the pipeline.
    pub stages: usize,
    /// Place among the stage's ranks.
    pub place: StagePlace,
}

impl RankPlace {
    /// The place of a rank: the tensor axis is innermost, and its ranks that share key-value heads are neighbours.
    pub fn of(plan: &Plan, split: TensorSplit, rank: Rank) -> RankPlace {
        let strategy = &plan.strategy;
        let query = split.tensor_parallel / split.key_value_ways;
        let (tensor, data) = (split.tensor_parallel, strategy.data_parallel);
        let axis = |number: u64, degree: u64| AxisPlace { index: number % degree, degree };
        RankPlace {
            rank,
            stage: (rank.0 / (tensor * data)) as usize,
            stages: strategy.pipeline_parallel as usize,
            place: StagePlace {
                data: axis(rank.0 / tensor, data),
                tensor: axis(rank.0 % tensor / query, split.key_value_ways),
                query: axis(rank.0, query),
            },
        }
    }

    /// Ranks of a stage.
    pub fn stage_ranks(&self) -> u64 {
        SplitAxis::ALL.into_iter().map(|axis| self.place.on(axis).degree).product()
    }

    /// The rank at the same place of another stage.
    pub fn at_stage(&self, stage: usize) -> Rank {
        Rank(self.rank.0 % self.stage_ranks() + stage as u64 * self.stage_ranks())
    }

    /// Ranks of the stage that differ from this one along the axes only, itself included, in order.
    pub fn peers(&self, axes: &[SplitAxis]) -> Vec<Rank> {
        let choices = |axis: SplitAxis| {
            let AxisPlace { index, degree } = self.place.on(axis);
            if axes.contains(&axis) { 0..degree } else { index..index + 1 }
        };
        let (tensor, query) = (self.place.tensor.degree, self.place.query.degree);
        let first = self.stage as u64 * self.stage_ranks();
        let mut peers = Vec::new();
        for d in choices(SplitAxis::Data) {
            for t in choices(SplitAxis::Tensor) {
                peers.extend(choices(SplitAxis::Query).map(|q| Rank(first + (d * tensor + t) * query + q)));
            }
        }
        peers
    }

    /// In how many parts a dim is split, and which one this rank holds.
    pub fn part_of(&self, dim: DimName, distribution: Distribution) -> (usize, usize) {
        let split = SplitAxis::ALL.into_iter().filter(|axis| distribution.on(*axis) == Place::Sharded(dim));
        split.fold((1, 0), |(ways, index), axis| {
            let place = self.place.on(axis);
            (ways * place.degree as usize, index * place.degree as usize + place.index as usize)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_of_a_rank() {
        // Rank 13 of 2 stages × 2 replicas × (2 × 2) tensor ranks: stage 1, replica 1, tensor 0, query 1.
        let axis = |index, degree| AxisPlace { index, degree };
        let place = StagePlace { data: axis(1, 2), tensor: axis(0, 2), query: axis(1, 2) };
        let rank = RankPlace { rank: Rank(13), stage: 1, stages: 2, place };
        let rows: [(&[SplitAxis], &[u64]); 4] = [
            (&[SplitAxis::Data], &[9, 13]),
            (&[SplitAxis::Tensor], &[13, 15]),
            (&[SplitAxis::Query], &[12, 13]),
            (&[SplitAxis::Tensor, SplitAxis::Query], &[12, 13, 14, 15]),
        ];
        for (axes, expected) in rows {
            let found: Vec<u64> = rank.peers(axes).into_iter().map(|rank| rank.0).collect();
            assert_eq!(found, expected, "{axes:?}");
        }
        assert_eq!(rank.at_stage(0), Rank(5));
    }
}
