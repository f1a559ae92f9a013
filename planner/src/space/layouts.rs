//! Layouts of one mesh as a product of independent choices.

use ir::strategy::{Recompute, Strategy, ZeroStage};

use super::choices::{Choices, Degrees, Passes, Sharding, open_parts};
use crate::request::{Request, divisors};

/// Values of each choice: every combination is a layout.
#[derive(Clone, Debug)]
pub struct Layouts {
    /// Sequence parallelism.
    pub sequence_parallel: Vec<bool>,
    /// ZeRO stages, on the device and in host memory, with their shard groups, the largest last.
    pub sharding: Vec<Sharding>,
    /// Micro-batches with schedules.
    pub passes: Vec<Passes>,
    /// Recomputation.
    pub recompute: Vec<Recompute>,
}

impl Layouts {
    /// All layouts of a mesh.
    pub fn of(request: &Request, choices: &Choices, degrees: Degrees) -> Layouts {
        let groups = request.machine.stack.offers.shard_groups.is_some();
        let shard_groups = |zero_stage: ZeroStage| match groups && zero_stage > ZeroStage::None {
            true => divisors(degrees.data),
            false => vec![degrees.data],
        };
        let mut sharding = Vec::new();
        for &zero_stage in &choices.zero_stages {
            for &offload_optimizer in &choices.offload_optimizer {
                let of_group = |shard_group| Sharding { zero_stage, shard_group, offload_optimizer };
                sharding.extend(shard_groups(zero_stage).into_iter().map(of_group));
            }
        }
        let parts = open_parts(request, choices, degrees.pipeline);
        let passes = choices.micro_batches.iter().flat_map(|&micro_batch| {
            let pass = move |&(schedule, virtual_stages)| Passes { micro_batch, schedule, virtual_stages };
            parts.iter().map(pass)
        });
        Layouts {
            sequence_parallel: choices.sequence_parallel.clone(),
            sharding,
            passes: passes.collect(),
            recompute: choices.recompute.clone(),
        }
    }

    /// How many they are.
    pub fn count(&self) -> u64 {
        let choices = [self.sequence_parallel.len(), self.sharding.len(), self.passes.len(), self.recompute.len()];
        choices.into_iter().map(|values| values as u64).product()
    }
}

impl Degrees {
    /// A layout on this mesh with nothing else chosen: plain data parallelism, 1F1B, no recomputation.
    pub fn plain(self, global_batch: u64) -> Strategy {
        Strategy {
            context_parallel: self.context,
            expert_parallel: self.expert,
            mesh_order: self.order,
            whole_experts: self.whole_experts,
            ..Strategy::plain([self.tensor, self.pipeline, self.data], global_batch)
        }
    }
}

impl Sharding {
    /// Whether nothing but the shard group differs.
    pub fn is_alike(&self, other: &Sharding) -> bool {
        self.zero_stage == other.zero_stage && self.offload_optimizer == other.offload_optimizer
    }

    /// A layout with this choice.
    pub fn on(self, strategy: &Strategy) -> Strategy {
        let Sharding { zero_stage, shard_group, offload_optimizer } = self;
        Strategy { zero_stage, shard_group, offload_optimizer, ..strategy.clone() }
    }
}

impl Passes {
    /// A layout with this choice.
    pub fn on(self, strategy: &Strategy) -> Strategy {
        let Passes { micro_batch, schedule, virtual_stages } = self;
        Strategy { micro_batch, schedule, virtual_stages, ..strategy.clone() }
    }
}
