//! Whether the order of a mesh's axes makes a transfer faster.

use ir::mesh::MeshOrder;
use ir::strategy::Strategy;
use ir::units::{Bytes, Seconds};

use super::data::state_groups;
use super::stages_share_domain;
use super::tail::end_stages;
use crate::collective::{CollectiveKind, Placement, collective_time, send_time};
use crate::machine::Machine;

/// The times of all transfers are affine in their bytes: one that is no shorter without payload and with this much never
/// is.
const ENDS: [Bytes; 2] = [Bytes(0), Bytes(1 << 60)];

/// Whether a layout with its order of the mesh can be faster than with the usual one.
///
/// An order places stages and replicas; it changes neither memory nor what a rank computes, and no step becomes longer
/// when a transfer does not. So a layout without any shorter transfer is no faster.
pub fn gains_from_order(strategy: &Strategy, machine: &Machine) -> bool {
    let usual = Strategy { mesh_order: MeshOrder::default(), ..strategy.clone() };
    let near = [strategy, &usual].map(|strategy| stages_share_domain(strategy, machine));
    let groups = [strategy, &usual].map(|strategy| {
        let groups = state_groups(strategy, machine);
        let families = [groups.whole, groups.shards, groups.copies].into_iter().flatten();
        families.chain([end_stages(strategy, machine)])
    });
    let [own, usual] = groups;
    let sooner = |own: Placement, usual: Placement| {
        CollectiveKind::ALL.into_iter().any(|kind| {
            let time = |size, group| collective_time(kind, size, group, machine);
            is_shorter(|size| time(size, own), |size| time(size, usual))
        })
    };
    is_shorter(|size| send_time(size, near[0], machine), |size| send_time(size, near[1], machine))
        || own.zip(usual).any(|(own, usual)| sooner(own, usual))
}

fn is_shorter(own: impl Fn(Bytes) -> Seconds, usual: impl Fn(Bytes) -> Seconds) -> bool {
    ENDS.into_iter().any(|size| own(size).0 < usual(size).0)
}
