//! Collectives of the data axis, and what of them computation covers.

use ir::mesh::{Axis, GroupFamily, MeshOrder};
use ir::strategy::Strategy;
use ir::units::{Bytes, Seconds};

use super::load::shards_of;
use crate::collective::{CollectiveKind, Placement, collective_time, place};
use crate::machine::Machine;
use crate::memory::Shards;

/// What remains of communication that computation can cover for a time: the rest, and at least the part that
/// takes the processor from the computation.
pub(super) fn exposed(communication: Seconds, covered: Seconds, machine: &Machine) -> Seconds {
    let occupied = machine.stack.overlap.occupancy.as_ref().map_or(0.0, |share| share.value);
    Seconds((communication.0 - covered.0).max(communication.0 * occupied))
}

/// Parameter elements that a rank holds.
#[derive(Clone, Copy)]
pub(super) struct HeldParameters {
    pub(super) all: u64,
    pub(super) experts: u64,
}

impl HeldParameters {
    /// Time of a collective over bytes of each parameter: in the first group for those outside experts, in the second
    /// for those of routed experts.
    pub(super) fn collective_time(
        self,
        kind: CollectiveKind,
        per_parameter: u64,
        groups: [Placement; 2],
        machine: &Machine,
    ) -> Seconds {
        let parts = [self.all - self.experts, self.experts].into_iter().zip(groups);
        let held = parts.filter(|(parameters, _)| *parameters > 0);
        held.map(|(parameters, group)| collective_time(kind, Bytes(parameters * per_parameter), group, machine)).sum()
    }

    /// What a rank owns of them.
    pub(super) fn owned(self, shards: Shards) -> HeldParameters {
        let experts = self.experts.div_ceil(shards.expert);
        HeldParameters { all: (self.all - self.experts).div_ceil(shards.dense) + experts, experts }
    }
}

/// Groups of ranks that hold the same parameters: of those outside experts first, then of routed experts.
#[derive(Clone, Copy)]
pub(super) struct StateGroups {
    /// All that hold them.
    pub(super) whole: [Placement; 2],
    /// Those over which ZeRO shards them: neighbours.
    pub(super) shards: [Placement; 2],
    /// Those that own the same shard.
    pub(super) copies: [Placement; 2],
}

pub(super) fn state_groups(strategy: &Strategy, machine: &Machine) -> StateGroups {
    let replicas = strategy.data_parallel * strategy.context_parallel;
    let experts = strategy.expert_parallel;
    let copies_of_experts = strategy.expert_ranks() / experts;
    let neighbour = match strategy.mesh_order {
        MeshOrder::PipelineOutermost => strategy.tensor_parallel,
        // Only without contexts and experts.
        MeshOrder::DataOutermost => strategy.tensor_parallel * strategy.pipeline_parallel,
    };
    let strides = [neighbour, neighbour / strategy.tensor_parallel * strategy.expert_tensor_parallel() * experts];
    let counts = [replicas, copies_of_experts.max(1)];
    let Shards { dense, expert } = shards_of(strategy);
    let sizes = [dense, expert];
    let at = |size, stride| {
        let family = GroupFamily { axis: Axis::Data, size, stride, count: 1 };
        place(&family, machine.fast_domain_gpus())
    };
    StateGroups {
        whole: [0, 1].map(|of| at(counts[of], strides[of])),
        shards: [0, 1].map(|of| at(sizes[of], strides[of])),
        copies: [0, 1].map(|of| at((counts[of] / sizes[of]).max(1), strides[of] * sizes[of])),
    }
}
