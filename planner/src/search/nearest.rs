//! The layout that comes nearest to fitting where none does.

use ir::graph::ModelGraph;
use ir::strategy::Strategy;

use super::costs::Costs;
use super::score::{costs_of, score_split};
use super::{Scored, run_lengths, scenario};
use crate::partition::{PartitionProblem, StageShare, can_split, solve_evenly, split_for_least_memory, state_problem};
use crate::request::Request;
use crate::space::{OpenMesh, Sharding, enumerate};

/// The layout whose fullest stage is least full, split for that.
///
/// Of each mesh those with the smallest micro-batch, one part a stage and the largest shard groups are compared, which
/// hold the least. `None` if no such layout can run whatever the memory.
pub fn nearest_miss(request: &Request, graph: &ModelGraph) -> Option<Scored> {
    let scenario = scenario(request, graph);
    let space = enumerate(request);
    let mut costs = Costs::new(scenario);
    let mut nearest: Option<(f64, Strategy, Vec<StageShare>)> = None;
    for strategy in space.meshes.iter().flat_map(|mesh| leanest(request, mesh)) {
        let index = costs.index(&strategy);
        let times = costs.times(index, &strategy);
        let problem = state_problem(scenario, costs.blocks(index), &times, &strategy, run_lengths(request));
        let capacity = nearest.as_ref().map_or(f64::INFINITY, |(fullest, ..)| *fullest * (1.0 - NOTICED));
        let problem = PartitionProblem { capacity, ..problem };
        let even = !scenario.machine.stack.offers.uneven_stages;
        let split = match even {
            true => solve_evenly(&problem),
            false => can_split(&problem).then(|| split_for_least_memory(&problem)).flatten(),
        };
        if let Some(split) = split {
            nearest = Some((problem.fullest(&split), strategy, split));
        }
    }
    let (_, strategy, split) = nearest?;
    let (blocks, times) = costs_of(request, scenario, &strategy)?;
    Some(score_split(scenario, &blocks, &times, &strategy, &split))
}

/// Least relative difference of memory by which another layout is nearer.
const NOTICED: f64 = 1e-6;

fn leanest<'a>(request: &'a Request, mesh: &'a OpenMesh) -> impl Iterator<Item = Strategy> + 'a {
    let OpenMesh { degrees, layouts } = mesh;
    let plain = degrees.plain(request.workload.global_batch);
    let single = layouts.passes.iter().filter(|passes| passes.virtual_stages == 1);
    let smallest = single.clone().map(|passes| passes.micro_batch).min();
    let passes = single.filter(move |passes| Some(passes.micro_batch) == smallest);
    let groups = layouts.sharding.chunk_by(Sharding::is_alike);
    let largest: Vec<_> = groups.filter_map(|group| group.last()).collect();
    passes.flat_map(move |passes| {
        let plain = passes.on(&plain);
        let mut strategies = Vec::new();
        for sharding in &largest {
            for &recompute in &layouts.recompute {
                for &sequence_parallel in &layouts.sequence_parallel {
                    strategies.push(Strategy { recompute, sequence_parallel, ..sharding.on(&plain) });
                }
            }
        }
        strategies
    })
}
