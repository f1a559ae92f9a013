//! The groups that a rank's program uses, made once in an order that all ranks share.

use std::collections::BTreeMap;

use ir::distribution::SplitAxis;
use ir::mesh::Rank;

use crate::communicator::{Group, World};
use crate::place::RankPlace;

/// A rank's groups.
pub struct Links {
    /// By the axes over which the members differ; axes of one rank are left out, and so are groups of one rank.
    by_axes: BTreeMap<Vec<SplitAxis>, Group>,
    /// The ranks at this place of every stage, for scalars.
    pub stages: Option<Group>,
    /// The ranks at this place of the first and the last stage, on these two.
    pub ends: Option<Group>,
    /// This place of the stage before.
    pub previous: Option<Rank>,
    /// This place of the stage behind.
    pub next: Option<Rank>,
}

impl Links {
    /// Makes the groups of a rank.
    pub fn new(world: &World, place: &RankPlace) -> Links {
        let mut by_axes = BTreeMap::new();
        for choice in 1..1usize << SplitAxis::ALL.len() {
            let chosen = SplitAxis::ALL.into_iter().enumerate().filter(|(bit, _)| choice >> bit & 1 == 1);
            let axes: Vec<SplitAxis> = chosen.map(|(_, axis)| axis).collect();
            if axes.iter().all(|axis| place.place.on(*axis).degree > 1) {
                let group = world.group(&place.peers(&axes));
                by_axes.insert(axes, group);
            }
        }
        let last = place.stages - 1;
        let all: Vec<Rank> = (0..=last).map(|stage| place.at_stage(stage)).collect();
        let stages = (last > 0).then(|| world.group(&all));
        let at_end = place.stage == 0 || place.stage == last;
        let ends = (last > 0 && at_end).then(|| world.group(&[all[0], all[last]]));
        Links {
            by_axes,
            stages,
            ends,
            previous: place.stage.checked_sub(1).map(|stage| place.at_stage(stage)),
            next: (place.stage < last).then(|| place.at_stage(place.stage + 1)),
        }
    }

    /// The group of ranks that differ along the axes; none if this is the only one.
    pub fn over(&self, axes: &[SplitAxis]) -> Option<&Group> {
        if let Some(group) = self.by_axes.get(axes) {
            return Some(group);
        }
        let several = |axis: &SplitAxis| self.by_axes.contains_key(&vec![*axis]);
        let axes: Vec<SplitAxis> = axes.iter().copied().filter(several).collect();
        self.by_axes.get(&axes)
    }
}
