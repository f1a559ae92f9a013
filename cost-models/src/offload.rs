//! Optimizer state in host memory: what it takes there, and the time of a step that updates it there (ZeRO-Offload,
//! Ren et al., arXiv 2101.06840).

use hardware_profiles::cluster::Host;
use ir::units::{Bytes, Seconds};

use crate::machine::Machine;
use crate::memory::StateBytes;

/// Time of the update that nothing hides, for a rank that owns `owned` parameters.
///
/// Gradients go to the host while backward computes, and what `covered` does not hide of it waits. The host's Adam
/// reads and writes the state, reads the gradient and writes the weight, bound by the memory bandwidth that ranks of a
/// node share; weights go back to the device piece by piece behind it (arXiv 2101.06840, sections 4.1 and 5.1), so that
/// the longer of both counts. Without the paper's delayed update, which changes what is computed.
pub fn offloaded_update_time(
    host: &Host,
    ranks_of_node: u64,
    bytes: StateBytes,
    owned: u64,
    covered: Seconds,
) -> Seconds {
    let link = host.link_per_gpu_per_direction.value * host.link_efficiency.value;
    let memory = host.memory_bandwidth.value * (host.memory_efficiency.value / ranks_of_node as f64);
    let down = Bytes(owned * bytes.gradient) / link;
    let update = Bytes(owned * (2 * bytes.optimizer + bytes.gradient + bytes.weight)) / memory;
    let up = Bytes(owned * bytes.weight) / link;
    Seconds((down - covered).0.max(0.0)) + update.max(up)
}

/// Bytes that the ranks of a node hold in host memory if each owns `owned` parameters: the state, and the gradients
/// that it is updated with.
pub fn host_memory(machine: &Machine, bytes: StateBytes, owned: u64) -> Bytes {
    Bytes(owned * (bytes.optimizer + bytes.gradient)) * machine.node_gpus
}

/// Host memory of a node that ranks may fill, if the profile says; nodes of another size have their share.
pub fn usable_host_memory(machine: &Machine) -> Option<Bytes> {
    let host = machine.cluster.host.as_ref()?;
    let share = machine.node_gpus as f64 / machine.cluster.node_gpus as f64;
    Some(host.memory.value.scale(share * (1.0 - host.reserved.value)))
}

#[cfg(test)]
mod tests {
    use hardware_profiles::sourced::Sourced;
    use ir::provenance::Provenance;
    use ir::units::BytesPerSecond;

    use super::*;

    fn sourced<T: Clone>(value: T) -> Sourced<T> {
        Sourced { value, provenance: Provenance::Assumed, source: "test".to_owned() }
    }

    #[test]
    fn a_billion_parameters_are_updated_in_the_time_of_their_bytes() {
        let host = Host {
            memory: sourced(Bytes(1 << 40)),
            memory_bandwidth: sourced(BytesPerSecond(200e9)),
            memory_efficiency: sourced(0.5),
            link_per_gpu_per_direction: sourced(BytesPerSecond(16e9)),
            link_efficiency: sourced(0.5),
            reserved: sourced(0.1),
        };
        let bytes = StateBytes { weight: 2, sharded_weight: 2, gradient: 2, fresh_gradient: 0, optimizer: 12 };
        let time = |ranks, covered| offloaded_update_time(&host, ranks, bytes, 1_000_000_000, Seconds(covered)).0;
        // 2 GB down at 8 GB/s, 28 GB of state at 100 GB/s; 2 GB up in 0.25 s hide behind the update.
        assert!((time(1, 0.0) - 0.53).abs() < 1e-9);
        assert!((time(1, 0.25) - 0.28).abs() < 1e-9, "backward hides the gradients' way down");
        assert!((time(8, 0.25) - 8.0 * 0.28).abs() < 1e-9, "eight ranks share the host's memory");
        let slow = Host { link_per_gpu_per_direction: sourced(BytesPerSecond(8e9)), ..host };
        assert!((offloaded_update_time(&slow, 1, bytes, 1_000_000_000, Seconds(9.0)).0 - 0.5).abs() < 1e-9);
    }
}
