//! What becomes of a node of the tree: the nodes below it, or an estimate.

use cost_models::step::{Scenario, passes_lower_bound, predict_step_by, split_lower_bound};
use ir::strategy::{Recompute, Strategy, ZeroStage};
use ir::units::Seconds;

use super::Found;
use super::costs::Costs;
use super::score::{fastest_split, fits, fits_hosts, scored, split_in_time};
use super::tree::{Case, Item, Leaf, Node, Split, SplitIndex, Tree};
use crate::partition::{
    LayerCounts, can_split, recompute_to_fit, slowest_lower_bound, solve_evenly, stage_contents, state_problem,
};
use crate::space::{Pruning, Rejection, Sharding, repeats_another};

/// Searches a node: replaces it by those below it, or estimates its layout.
pub(super) fn search_node(scenario: Scenario, node: Node, tree: &mut Tree, costs: &mut Costs, found: &mut Found) {
    if node.bound > found.limit(node.executable) {
        found.prune(Pruning::SlowerThanReported, node.count);
        return;
    }
    match node.item {
        Item::Family(family) => {
            let [slower, full] = tree.push_cases(family, costs, found.limit(true));
            found.prune(Pruning::SlowerThanReported, slower);
            found.reject(Rejection::OutOfMemory, full);
        }
        Item::Case(case) => {
            let slowest = slowest_stage_of_case(scenario, case, tree, costs, found.limit(true));
            let [slower, full] = tree.push_passes(case, costs, slowest, |executable| found.limit(executable));
            found.prune(Pruning::SlowerThanReported, slower);
            found.reject(Rejection::OutOfMemory, full);
        }
        Item::Passes(case, passes) => expand(scenario, case, passes, tree, costs, found),
        Item::Layout(leaf) => estimate(scenario, node, leaf, tree, costs, found),
    }
}

/// Seconds of a micro-batch that the slowest stage of a case takes at least, whatever its passes and sharding; none if
/// its layers do not fit into the memory of all stages. Where steps take longer than `limit` it is endless.
///
/// The room is that of 1F1B with the sharding that leaves most: [`ScheduleKind::holds_least`] says beside which orders
/// that counts. Only layers of the longest run are looked at: a stage may hold none of the others, whose temporary
/// tensors are then not there either.
fn slowest_stage_of_case(scenario: Scenario, case: Case, tree: &Tree, costs: &mut Costs, limit: f64) -> Option<f64> {
    let layouts = &tree.meshes[case.mesh].layouts;
    let plain = tree.plain(case);
    let parts = layouts.passes.iter().map(|passes| passes.virtual_stages).max().unwrap_or(1);
    // Blocks of stages with several parts take no longer than those of one, and sharding makes no pass faster.
    let times = costs.times(case.costs, &Strategy { virtual_stages: parts, ..plain.clone() });
    let blocks = costs.blocks(case.costs);
    let host = scenario.machine.stack.overhead.micro_batch.value;
    let run = (0..tree.layers.len()).max_by_key(|run| tree.layers[*run]).unwrap_or(0);
    let mut layers = LayerCounts::default();
    layers[run] = tree.layers[run];
    let limit = (limit - tree.step_overhead().0) / plain.num_micro_batches() as f64;
    let bound = |sharding: &Sharding| {
        let mut problem = state_problem(scenario, blocks, &times, &sharding.on(&plain), layers);
        problem.stages.iter_mut().for_each(|stage| stage.fixed_time = host.0);
        slowest_lower_bound(&problem, limit)
    };
    leanest(&layouts.sharding).filter_map(bound).min_by(f64::total_cmp)
}

/// Sharding beside which no other leaves more room: of what shards neither gradients nor parameters one, of the others
/// the first and the last of those that differ in the shard group only.
pub(super) fn leanest(all: &[Sharding]) -> impl Iterator<Item = &Sharding> {
    let (whole, sharded): (Vec<&Sharding>, Vec<&Sharding>) =
        all.iter().partition(|sharding| sharding.zero_stage < ZeroStage::Gradients);
    let key = |sharding: &&Sharding| (sharding.offload_optimizer, sharding.zero_stage, sharding.shard_group);
    let groups = sharded.chunk_by(|a, b| a.is_alike(b)).flat_map(|group| [group[0], group[group.len() - 1]]);
    whole.into_iter().max_by_key(key).into_iter().chain(groups.collect::<Vec<_>>())
}

/// Replaces passes by their layouts: those out of memory and those that cannot win are done with.
fn expand(scenario: Scenario, case: Case, passes: usize, tree: &mut Tree, costs: &mut Costs, found: &mut Found) {
    let mesh = &tree.meshes[case.mesh];
    let unsharded = tree.unsharded(case, passes);
    let times = costs.times(case.costs, &unsharded);
    let least = tree.pipeline_bound(costs, &times, case, &unsharded);
    let parts = (unsharded.virtual_stages > 1).then(|| split_parts(scenario, case, &unsharded, tree, costs));
    let mut start = 0;
    for group in mesh.layouts.sharding.chunk_by(Sharding::is_alike) {
        let [first, last] = [start, start + group.len() - 1];
        start += group.len();
        // ZeRO changes the times of passes from stage 2 on, and with them the split into parts.
        let same_times = group[0].zero_stage < ZeroStage::Gradients;
        let split = parts.filter(|_| same_times).flatten().map_or(Split::Unknown, |(split, _)| Split::Parts(split));
        let leaf = |sharding| Leaf { case, passes, sharding, split };
        let of_last = match parts {
            Some(parts) if same_times => {
                parts.and_then(|parts| bound_of_parts(scenario, leaf(last), parts, tree, costs))
            }
            Some(_) => Some(least),
            None => bound_of_stages(scenario, leaf(last), tree, costs, found.limit(true)),
        };
        let alike = parts.is_none() || same_times;
        for sharding in first..=last {
            // Any layout of the group that shards is at least as full as the last one, which shards over the most ranks.
            let shards = mesh.layouts.sharding[sharding].shard_group * mesh.degrees.context > 1;
            let at_least = match of_last {
                Some(bound) if alike => bound.max(least),
                None if alike && (shards || sharding == last) => {
                    found.reject(Rejection::OutOfMemory, 1);
                    continue;
                }
                Some(_) | None => least,
            };
            if !tree.push_layout(costs, leaf(sharding), at_least, |executable| found.limit(executable)) {
                found.prune(Pruning::SlowerThanReported, 1);
            }
        }
    }
}

/// The fastest split into parts, and a time that its passes take at least with nothing computed again to fit.
fn split_parts(
    scenario: Scenario,
    case: Case,
    strategy: &Strategy,
    tree: &mut Tree,
    costs: &mut Costs,
) -> Option<(SplitIndex, Seconds)> {
    let times = costs.times(case.costs, strategy);
    let blocks = costs.blocks(case.costs);
    let split = fastest_split(scenario, &state_problem(scenario, blocks, &times, strategy, tree.layers))?;
    let contents = stage_contents(strategy, &split);
    let bound = passes_lower_bound(scenario, blocks, &times, strategy, &contents) + tree.step_overhead();
    Some((tree.keep(contents), bound))
}

/// A time that passes of a layout with this split into parts take at least; none if it does not fit into memory.
fn bound_of_parts(
    scenario: Scenario,
    leaf: Leaf,
    (split, bound): (SplitIndex, Seconds),
    tree: &Tree,
    costs: &mut Costs,
) -> Option<Seconds> {
    let strategy = tree.strategy(leaf);
    let times = costs.times(leaf.case.costs, &strategy);
    let blocks = costs.blocks(leaf.case.costs);
    if strategy.recompute != Recompute::Partial {
        return fits(scenario, blocks, &strategy, tree.split(split)).then_some(bound);
    }
    let mut contents = tree.split(split).to_vec();
    recompute_to_fit(scenario, blocks, &strategy, &mut contents);
    fits(scenario, blocks, &strategy, &contents).then_some(())?;
    Some(passes_lower_bound(scenario, blocks, &times, &strategy, &contents) + tree.step_overhead())
}

/// A time that passes of a layout with one part a stage take at least; none if no split fits into memory.
///
/// Where it is above `limit` it is endless.
fn bound_of_stages(scenario: Scenario, leaf: Leaf, tree: &Tree, costs: &mut Costs, limit: f64) -> Option<Seconds> {
    let strategy = tree.strategy(leaf);
    let times = costs.times(leaf.case.costs, &strategy);
    let problem = state_problem(scenario, costs.blocks(leaf.case.costs), &times, &strategy, tree.layers);
    let can_fit = match scenario.machine.stack.offers.uneven_stages {
        true => can_split(&problem),
        false => solve_evenly(&problem).is_some(),
    };
    can_fit.then_some(())?;
    let same_times = strategy.zero_stage < ZeroStage::Gradients;
    let micro_batches = strategy.num_micro_batches() as f64;
    let limit = (limit - tree.step_overhead().0) / micro_batches;
    let slowest = if same_times { slowest_lower_bound(&problem, limit)? } else { 0.0 };
    Some(Seconds(slowest) * micro_batches + tree.step_overhead())
}

/// Estimates a layout, or puts it back with its split and the bound that this gives.
fn estimate(scenario: Scenario, node: Node, leaf: Leaf, tree: &mut Tree, costs: &mut Costs, found: &mut Found) {
    let Split::Whole(split) = leaf.split else { return find_split(scenario, node, leaf, tree, costs, found) };
    let strategy = tree.strategy(leaf);
    let times = costs.times(leaf.case.costs, &strategy);
    let contents = tree.split(split).to_vec();
    let (blocks, pipelines) = costs.blocks_and_pipelines(leaf.case.costs);
    let pipeline_time = |pipeline, parts: &_, transfer| pipelines.time(pipeline, parts, transfer);
    let prediction = predict_step_by(scenario, blocks, &times, &strategy, &contents, pipeline_time);
    found.add(scored(scenario, blocks, &strategy, contents, prediction), node.executable);
}

fn find_split(scenario: Scenario, node: Node, leaf: Leaf, tree: &mut Tree, costs: &mut Costs, found: &mut Found) {
    let strategy = tree.strategy(leaf);
    let times = costs.times(leaf.case.costs, &strategy);
    let blocks = costs.blocks(leaf.case.costs);
    let split = match leaf.split {
        Split::Parts(split) | Split::Whole(split) if strategy.recompute != Recompute::Partial => Some(split),
        Split::Parts(split) | Split::Whole(split) => {
            let mut contents = tree.split(split).to_vec();
            recompute_to_fit(scenario, blocks, &strategy, &mut contents);
            Some(tree.keep(contents))
        }
        Split::Unknown => {
            let contents = split_in_time(scenario, blocks, &times, &strategy, tree.layers);
            contents.map(|contents| tree.keep(contents))
        }
    };
    let split = split.filter(|split| fits(scenario, blocks, &strategy, tree.split(*split)));
    let Some(split) = split else { return found.reject(Rejection::OutOfMemory, 1) };
    let contents = tree.split(split);
    if !fits_hosts(scenario, blocks, &strategy, contents) {
        return found.reject(Rejection::OutOfHostMemory, 1);
    }
    let again = contents.iter().flat_map(|part| part.recomputed).sum();
    let layouts = &tree.meshes[leaf.case.mesh].layouts;
    if let Some(rule) = repeats_another(layouts, strategy.recompute, again, tree.layers.iter().sum()) {
        return found.prune(rule, 1);
    }
    let bound = split_lower_bound(scenario, blocks, &times, &strategy, contents);
    let leaf = Leaf { split: Split::Whole(split), ..leaf };
    if !tree.push_bounded(leaf, bound, node.executable, |executable| found.limit(executable)) {
        found.prune(Pruning::SlowerThanReported, 1);
    }
}
