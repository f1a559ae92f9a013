//! Which numbers stand behind each term of a predicted step, by their weakest origin.

use std::collections::BTreeMap;

use ir::plan::{Term, TimeTerm};
use ir::provenance::Provenance;
use ir::strategy::Strategy;
use ir::units::Seconds;

use super::{Scenario, stages_share_domain, state_groups};

/// Attaches to each term the weakest origin of the numbers behind it.
pub fn with_provenance(
    scenario: Scenario,
    strategy: &Strategy,
    terms: &BTreeMap<TimeTerm, Seconds>,
) -> BTreeMap<TimeTerm, Term> {
    let machine = scenario.machine;
    let compute = machine.compute_provenance(scenario.model.dtype);
    let link = |inside: bool| if inside { machine.intra_provenance() } else { machine.inter_provenance() };
    let domain = machine.fast_domain_gpus();
    let stage_ranks = strategy.world_size() / strategy.pipeline_parallel;
    let memory = machine.device.memory_bandwidth.provenance.min(machine.device.memory_efficiency.provenance);
    let overhead = machine.stack.overhead.micro_batch.provenance.min(machine.stack.overhead.step.provenance);
    let origin = |term: TimeTerm| -> Provenance {
        match term {
            TimeTerm::Compute | TimeTerm::Recomputation | TimeTerm::Bubble => compute.min(memory),
            TimeTerm::TensorCommunication => link(strategy.tensor_parallel <= domain),
            TimeTerm::Exchange => link(stage_ranks <= domain),
            TimeTerm::PipelineCommunication => link(stages_share_domain(strategy, machine)),
            TimeTerm::DataCommunication => link(state_groups(strategy, machine).whole[0].inside_domain()),
            TimeTerm::Optimizer if strategy.offload_optimizer => machine.host_provenance(),
            TimeTerm::Optimizer => memory,
            TimeTerm::Overhead => overhead,
        }
    };
    terms.iter().map(|(term, time)| (*term, Term { time: *time, provenance: origin(*term) })).collect()
}
