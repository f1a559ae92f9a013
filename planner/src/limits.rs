//! What binds a layout: for each resource, the share of the step that goes away without its limit.
//!
//! Each share is a prediction of the same layout on a machine whose resource costs nothing; the shares are alternatives
//! and do not add up. Memory has no such machine: its share is what a search finds with twice of it.

use cost_models::machine::Machine;
use ir::graph::ModelGraph;
use ir::plan::{Binding, Limit, StopReason, TimeTerm};
use ir::units::{BytesPerSecond, Seconds};

use crate::request::Request;
use crate::search::{Costs, Scored, score_layout, search_within};
use crate::watch::Watch;

/// Speed-up after which what is left of a resource's time is no longer seen.
const FREE: f64 = 1e6;
/// Shares of limits below this are not mentioned.
const SEEN: f64 = 0.005;

/// The words used in sentences; `stage` is the fullest.
fn describe(limit: Limit, stage: u64) -> String {
    match limit {
        Limit::Memory => format!("memory of stage {stage}"),
        Limit::Network => "the network cards (NIC)".to_owned(),
        Limit::FastLinks => "the links inside nodes (NVLink or alike)".to_owned(),
        Limit::Bubble => "the pipeline's bubble".to_owned(),
        Limit::MatmulShape => "shapes of matrix products (GEMM)".to_owned(),
        Limit::Host => "the host".to_owned(),
        Limit::MemoryBandwidth => "memory bandwidth".to_owned(),
    }
}

/// Limits in words with their shares, those that are too small to matter apart; none if all are. `stage` is the fullest.
pub fn in_words(limits: &[Binding], stage: u64) -> Option<String> {
    let seen = limits.iter().filter(|binding| binding.gain >= SEEN);
    let shares: Vec<String> = seen
        .map(|binding| {
            let name = describe(binding.limit, stage);
            let percent = binding.gain * 100.0;
            match binding.limit {
                Limit::Memory => format!("{name} (twice of it would save {percent:.1} %)"),
                _ => format!("{name} ({percent:.1} %)"),
            }
        })
        .collect();
    let (first, others) = shares.split_first()?;
    Some(if others.is_empty() { first.clone() } else { format!("{first}, then {}", others.join(", ")) })
}

/// All limits of a layout, the heaviest first, and the best layout with twice the memory; `costs` are of the request.
pub fn limits(
    request: &Request,
    graph: &ModelGraph,
    winner: &Scored,
    watch: &Watch,
    costs: &mut Costs,
) -> (Vec<Binding>, Option<Scored>) {
    let step = winner.prediction.step;
    let gain = |other: Seconds| (1.0 - other.0 / step.0).max(0.0);
    let without = |free: fn(&mut Machine)| {
        let scored = score_layout(&on_machine(request, free), graph, &winner.strategy);
        scored.map_or(0.0, |scored| gain(scored.prediction.step))
    };
    let roomier = with_twice_the_memory(request, graph, watch, costs, step);
    let bubble = winner.prediction.terms.get(&TimeTerm::Bubble).copied().unwrap_or_default();
    let mut bindings: Vec<Binding> = [
        (Limit::Memory, roomier.as_ref().map_or(0.0, |scored| gain(scored.prediction.step))),
        (Limit::Network, without(free_network)),
        (Limit::FastLinks, without(free_links)),
        (Limit::Bubble, bubble.0 / step.0),
        (Limit::MatmulShape, without(full_products)),
        (Limit::Host, without(free_host)),
        (Limit::MemoryBandwidth, without(free_memory_traffic)),
    ]
    .map(|(limit, gain)| Binding { limit, gain })
    .to_vec();
    bindings.sort_by(|a, b| b.gain.total_cmp(&a.gain).then(a.limit.cmp(&b.limit)));
    (bindings, roomier)
}

/// The same request on a changed machine.
pub fn on_machine(request: &Request, change: impl FnOnce(&mut Machine)) -> Request {
    let mut changed = request.clone();
    change(&mut changed.machine);
    changed
}

/// The best layout with twice the memory, of those that take no longer than the present one does.
fn with_twice_the_memory(
    request: &Request,
    graph: &ModelGraph,
    watch: &Watch,
    costs: &mut Costs,
    step: Seconds,
) -> Option<Scored> {
    let roomy = on_machine(request, |machine| machine.device.memory.value = machine.device.memory.value * 2);
    let outcome = search_within(&Request { top: 1, ..roomy }, graph, &watch.of_a_step(), costs, step);
    outcome.best.into_iter().next().filter(|_| outcome.stop_reason == StopReason::Optimal)
}

fn free_network(machine: &mut Machine) {
    let network = &mut machine.cluster.inter;
    network.bandwidth_per_nic_per_direction.value = faster(network.bandwidth_per_nic_per_direction.value);
    network.hop_latency.value = Seconds(0.0);
}

fn free_links(machine: &mut Machine) {
    let links = &mut machine.cluster.intra;
    links.bandwidth_per_gpu_per_direction.value = faster(links.bandwidth_per_gpu_per_direction.value);
    links.base_latency.value = Seconds(0.0);
    links.hop_latency.value = Seconds(0.0);
}

fn full_products(machine: &mut Machine) {
    let products = &mut machine.device.matmul;
    products.half_depth.value = 0.0;
    products.multiprocessors.value = 1;
    products.misaligned = None;
    if let Some(edges) = &mut products.edges {
        (edges.rows.value, edges.columns.value) = (0.0, 0.0);
    }
}

fn free_host(machine: &mut Machine) {
    let stack = &mut machine.stack;
    stack.kernels.launch_floor.value = Seconds(0.0);
    stack.kernels.host_launch = None;
    stack.overhead.micro_batch.value = Seconds(0.0);
    stack.overhead.step.value = Seconds(0.0);
}

fn free_memory_traffic(machine: &mut Machine) {
    machine.device.memory_bandwidth.value = faster(machine.device.memory_bandwidth.value);
    machine.device.operators.clear();
}

fn faster(bandwidth: BytesPerSecond) -> BytesPerSecond {
    bandwidth * FREE
}
