//! Whole parameters from the shards of all ranks, one at a time, for files that hold them whole.

use std::ops::Range;
use std::path::Path;

use ir::mesh::Rank;
use ir::plan::Plan;
use ir::program::{Parameter, ParameterRef, Program};
use ir::sharding::tensor_split;
use ir::verify::stage_chain;

use crate::Error;
use crate::communicator::{Group, World};
use crate::executor::Executor;
use crate::initial::{flat_range, local_region, logical_name};
use crate::place::RankPlace;
use crate::random::Region;
use crate::weights::{export, export_order};

/// What one rank contributes to a whole parameter.
struct Share {
    rank: Rank,
    region: Region,
    /// Elements of the region in order.
    range: Range<u64>,
}

/// Writes the weights of all ranks as a Hugging Face checkpoint. Rank 0 writes; it holds one tensor at a time.
///
/// # Errors
/// A model that no architecture has, a failed write, or a lost rank.
pub fn export_weights(plan: &Plan, executor: &Executor, world: &World, directory: &Path) -> Result<(), Error> {
    let program = plan.program.as_ref().expect("an executor has a program");
    let me = world.rank();
    let links: Vec<Option<Group>> = (0..world.size())
        .map(|rank| (rank > 0 && (me.0 == 0 || me.0 == rank)).then(|| world.group(&[Rank(0), Rank(rank)])))
        .collect();
    if me.0 == 0 {
        return export(directory, &plan.model, |name| whole(plan, program, executor, &links, name));
    }
    let link = links[me.0 as usize].as_ref().expect("made above");
    for name in export_order(&plan.model)? {
        for share in shares(plan, program, &name).iter().filter(|share| share.rank == me) {
            link.start_send(0, own_numbers(executor, &name, share)?).wait()?;
        }
    }
    Ok(())
}

fn whole(
    plan: &Plan,
    program: &Program,
    executor: &Executor,
    links: &[Option<Group>],
    name: &str,
) -> Result<Vec<f32>, Error> {
    let (_, parameter) = find(program, plan, name).expect("the architecture's parameters are the model's");
    let size: u64 = parameter.shape.iter().map(|(_, extent)| extent).product();
    let mut numbers = vec![0.0; size as usize];
    for share in shares(plan, program, name) {
        let part = match &links[share.rank.0 as usize] {
            None => own_numbers(executor, name, &share)?,
            Some(link) => {
                let mut part = vec![0.0f32; (share.range.end - share.range.start) as usize];
                link.recv(1, &mut part)?;
                part
            }
        };
        let mut at = 0;
        share.region.for_each_run(share.range, |start, length| {
            let (start, length) = (start as usize, length as usize);
            numbers[start..start + length].copy_from_slice(&part[at..at + length]);
            at += length;
        });
    }
    Ok(numbers)
}

/// The ranks that between them hold a parameter once.
fn shares(plan: &Plan, program: &Program, name: &str) -> Vec<Share> {
    let Some((reference, parameter)) = find(program, plan, name) else { return Vec::new() };
    let strategy = &plan.strategy;
    let split = tensor_split(&plan.model, strategy.tensor_parallel, strategy.sequence_parallel)
        .expect("the verifier checks the split");
    let holds =
        |stage: usize| stage_chain(plan, program, &plan.stages[stage]).contains(&(reference.body, reference.layer));
    let stage = (0..plan.stages.len()).find(|stage| holds(*stage)).unwrap_or(0);
    let mut shares: Vec<Share> = Vec::new();
    for rank in 0..strategy.world_size() {
        let place = RankPlace::of(plan, split, Rank(rank));
        if place.stage != stage {
            continue;
        }
        let region = local_region(&parameter.shape, parameter.stored, &place.place);
        let range = match parameter.stored.data {
            ir::distribution::Place::Flat => flat_range(region.elements(), place.place.data),
            _ => 0..region.elements(),
        };
        let known = shares.iter().any(|share| share.region == region && share.range == range);
        if !known && !range.is_empty() {
            shares.push(Share { rank: Rank(rank), region, range });
        }
    }
    shares
}

/// The parameter of a logical name, not that of a tied head.
fn find<'p>(program: &'p Program, plan: &Plan, name: &str) -> Option<(ParameterRef, &'p Parameter)> {
    let chains = plan.stages.iter().flat_map(|stage| stage_chain(plan, program, stage));
    chains.into_iter().find_map(|(body, layer)| {
        let parameters = &program.bodies[body as usize].parameters;
        let named = |number: &u32| {
            let reference = ParameterRef { body, layer, parameter: *number };
            !parameters[*number as usize].tied && logical_name(program, reference) == name
        };
        let number = (0..parameters.len() as u32).find(named)?;
        Some((ParameterRef { body, layer, parameter: number }, &parameters[number as usize]))
    })
}

/// This rank's share; master weights where it has them would differ between replicas, so the weights are given.
fn own_numbers(executor: &Executor, name: &str, share: &Share) -> Result<Vec<f32>, Error> {
    let held = executor.parameters.values().find(|held| held.name == name && held.region == share.region);
    held.expect("a rank shares what it holds").weight.numbers()
}
