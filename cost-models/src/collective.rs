//! Time of collectives and sends, by message size and by which links the group crosses.
//!
//! Rings throughout: what NCCL uses for large messages. `S` is the whole tensor for all_gather and
//! reduce_scatter, the message of a rank for all_reduce, as in nccl-tests.

use ir::mesh::GroupFamily;
use ir::units::{Bytes, BytesPerSecond, Seconds};

use crate::machine::Machine;

/// How a family of groups lies on the cluster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Placement {
    /// Ranks of a group.
    pub size: u64,
    /// Ranks of a group in one fast domain.
    pub per_domain: u64,
    /// Fast domains that a group crosses.
    pub domains: u64,
}

/// A collective over a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectiveKind {
    /// Every rank ends with the sum.
    AllReduce,
    /// Every rank ends with all parts.
    AllGather,
    /// Every rank ends with its part of the sum.
    ReduceScatter,
}

impl CollectiveKind {
    /// All kinds.
    pub const ALL: [CollectiveKind; 3] =
        [CollectiveKind::AllReduce, CollectiveKind::AllGather, CollectiveKind::ReduceScatter];
}

/// Shares of what a rank exchanges with its group that pass the fast links and the network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExchangeShares {
    /// Over the links of a fast domain.
    pub near: f64,
    /// Over the network.
    pub far: f64,
}

/// Of `among` equal places those that hold at least one of `choices` experts, chosen at random: their number times the
/// chance that one does.
fn places_chosen(among: u64, choices: u64) -> f64 {
    let among = among as f64;
    among * (1.0 - (1.0 - 1.0 / among).powi(choices as i32))
}

impl Placement {
    /// Whether every group stays inside a fast domain.
    pub fn inside_domain(self) -> bool {
        self.domains == 1
    }

    /// Of an exchange of each rank with each other.
    pub fn shares(self) -> ExchangeShares {
        let size = self.size as f64;
        ExchangeShares { near: (self.per_domain - 1) as f64 / size, far: (self.size - self.per_domain) as f64 / size }
    }

    /// Of tokens with `choices` experts each, where one copy crosses the network for each domain that holds some of them,
    /// which passes on one for each rank that does (deepseek-ai/DeepEP, csrc/kernels/layout.cu, is_token_in_rank).
    pub fn shares_of_copies(self, choices: u64) -> ExchangeShares {
        let of = |places: u64, others: u64| places_chosen(places, choices) * (others - 1) as f64 / others as f64;
        let [near, far] = [of(self.size, self.per_domain), of(self.domains, self.domains)];
        ExchangeShares { near: near / choices as f64, far: far / choices as f64 }
    }
}

/// Lays a family of groups on fast domains of `domain_gpus` neighbouring ranks.
///
/// A group whose stride reaches beyond a domain has one rank in each domain. A group that is wider
/// than a domain but does not fill its last one is counted with the ranks of the full ones.
pub fn place(family: &GroupFamily, domain_gpus: u64) -> Placement {
    let per_domain = (domain_gpus / family.stride).clamp(1, family.size);
    Placement { size: family.size, per_domain, domains: family.size.div_ceil(per_domain) }
}

/// Bus bandwidth of one group's ring while all groups of the family are active.
///
/// Inside a domain: link bandwidth · efficiency. Across domains a ring crosses each domain border once,
/// so its bandwidth is what its ranks' share of the domain's network cards carries, at most that of
/// `nics_per_group` cards.
pub fn ring_bandwidth(placement: Placement, machine: &Machine) -> BytesPerSecond {
    let links = &machine.cluster.intra;
    let fast = links.bandwidth_per_gpu_per_direction.value * links.efficiency.value;
    if placement.inside_domain() {
        return fast;
    }
    let network = &machine.cluster.inter;
    let share = machine.cluster.nics_per_gpu() * placement.per_domain as f64;
    let cards = network.nics_per_group.as_ref().map_or(share, |limit| share.min(limit.value));
    let slow = network.bandwidth_per_nic_per_direction.value * network.efficiency.value * cards;
    BytesPerSecond(fast.0.min(slow.0))
}

/// Time of one collective of `size` bytes.
///
/// t = base + latency + (steps / n) · S / bus_bandwidth
///
/// steps: 2(n−1) for all_reduce, n−1 for all_gather and reduce_scatter. Source: NVIDIA nccl-tests,
/// doc/PERFORMANCE.md, for the bandwidth term. Zero when n = 1. Not valid for in-network reduction.
pub fn collective_time(kind: CollectiveKind, size: Bytes, placement: Placement, machine: &Machine) -> Seconds {
    if placement.size <= 1 {
        return Seconds(0.0);
    }
    let n = placement.size as f64;
    let steps = match kind {
        CollectiveKind::AllReduce => 2.0 * (n - 1.0),
        CollectiveKind::AllGather | CollectiveKind::ReduceScatter => n - 1.0,
    };
    let moving = size.scale(steps / n) / ring_bandwidth(placement, machine);
    machine.cluster.intra.base_latency.value + latency(kind, steps, placement, machine) + moving
}

/// Time of a collective's steps without payload.
///
/// A ring takes one hop for each step, as slow as its slowest link. An all_reduce across domains may use
/// a tree between them instead: up and down ceil(log2 domains) network hops beside the ring inside the
/// domain (NCCL's double binary trees, NVIDIA developer blog, "Massively Scale Your Deep Learning
/// Training with NCCL 2.4").
fn latency(kind: CollectiveKind, steps: f64, placement: Placement, machine: &Machine) -> Seconds {
    let fast = machine.cluster.intra.hop_latency.value;
    if placement.inside_domain() {
        return fast * steps;
    }
    let slow = machine.cluster.inter.hop_latency.value;
    let ring = slow * steps;
    let depth = (placement.domains as f64).log2().ceil();
    let tree = fast * (2.0 * (placement.per_domain - 1) as f64) + slow * (2.0 * depth);
    match kind {
        CollectiveKind::AllReduce => Seconds(ring.0.min(tree.0)),
        CollectiveKind::AllGather | CollectiveKind::ReduceScatter => ring,
    }
}

/// Time of an all_to_all in which each rank holds `size` bytes: what goes through the network and what passes the links
/// of the domain move beside each other, each rank with its own share of the network cards.
pub fn exchange_time(size: Bytes, shares: ExchangeShares, placement: Placement, machine: &Machine) -> Seconds {
    let links = &machine.cluster.intra;
    let [near, far] = [shares.near, shares.far].map(|share| size.scale(share));
    let fast = links.bandwidth_per_gpu_per_direction.value * links.efficiency.value;
    let network = &machine.cluster.inter;
    let cards = network.bandwidth_per_nic_per_direction.value * machine.cluster.nics_per_gpu();
    let slow = cards * network.efficiency.value;
    let hop = if placement.inside_domain() { links.hop_latency.value } else { network.hop_latency.value };
    links.base_latency.value + hop + (near / fast).max(far / slow)
}

/// Time of a send of `size` bytes by every rank of a stage to its peer in the next stage, inside a fast domain or not.
///
/// Where it leaves the domain, each rank has its share of the domain's network cards.
pub fn send_time(size: Bytes, inside: bool, machine: &Machine) -> Seconds {
    let links = &machine.cluster.intra;
    if inside {
        let bandwidth = links.bandwidth_per_gpu_per_direction.value * links.efficiency.value;
        return links.hop_latency.value + size / bandwidth;
    }
    let network = &machine.cluster.inter;
    let card = network.bandwidth_per_nic_per_direction.value * network.efficiency.value;
    let bandwidth = card * machine.cluster.nics_per_gpu().min(1.0);
    network.hop_latency.value + size / bandwidth
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_goes_to_a_place_once() {
        let domain = Placement { size: 8, per_domain: 8, domains: 1 };
        let near = domain.shares_of_copies(8).near;
        assert!((near - 0.574).abs() < 0.001, "5.25 of 8 ranks are chosen, 7 of 8 of them others: {near}");
        for placement in [domain, Placement { size: 32, per_domain: 8, domains: 4 }] {
            let [alone, each] = [placement.shares_of_copies(1), placement.shares()];
            assert!((alone.far - each.far).abs() < 1e-12 && alone.near >= each.near, "{alone:?} {each:?}");
            let many = placement.shares_of_copies(8);
            assert!(many.near < alone.near && (many.far < alone.far || many.far == 0.0), "{many:?}");
        }
    }
}
