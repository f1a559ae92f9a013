//! Collectives of the data axis, and what of them computation covers.

use ir::mesh::{Axis, GroupFamily};
use ir::strategy::Strategy;
use ir::units::{Bytes, Seconds};

use crate::collective::{CollectiveKind, Placement, collective_time, place};
use crate::machine::Machine;

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
    /// Time of a collective of the data axis over bytes of each parameter: those of routed experts have fewer copies.
    pub(super) fn collective_time(
        self,
        kind: CollectiveKind,
        per_parameter: u64,
        strategy: &Strategy,
        machine: &Machine,
    ) -> Seconds {
        let parts = [self.all - self.experts, self.experts].into_iter().zip(gradient_placements(strategy, machine));
        let held = parts.filter(|(parameters, _)| *parameters > 0);
        held.map(|(parameters, group)| collective_time(kind, Bytes(parameters * per_parameter), group, machine)).sum()
    }
}

/// Where the ranks lie that sum the gradients of parameters outside experts, and those of routed experts.
pub(super) fn gradient_placements(strategy: &Strategy, machine: &Machine) -> [Placement; 2] {
    let replicas = strategy.data_parallel * strategy.context_parallel;
    let tensor = strategy.tensor_parallel;
    let at = |size, stride| {
        let family = GroupFamily { axis: Axis::Data, size, stride, count: 1 };
        place(&family, machine.fast_domain_gpus())
    };
    let experts = strategy.expert_parallel;
    [at(replicas, tensor), at((replicas / experts).max(1), tensor * experts)]
}
