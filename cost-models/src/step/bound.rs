//! Times that no stage split of a strategy can beat, cheap enough to be asked of every candidate.

use ir::model::MAX_LAYER_RUNS;
use ir::pipeline::Pipeline;
use ir::strategy::{Recompute, ScheduleKind, Strategy};
use ir::units::{Bytes, Seconds};

use super::data::{HeldParameters, state_groups};
use super::tail::{longest_tail, tail_of};
use super::{BlockTime, CostedBlock, PerBlock, Scenario, StageContent, blocking, part_times, transfer_time};
use crate::collective::{CollectiveKind, collective_time};
use crate::pipeline::{StageTime, pipeline_lower_bound, stage_totals};

/// A time that no stage split of the strategy can beat.
pub fn step_lower_bound(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    times: &PerBlock<BlockTime>,
    layers: [u64; MAX_LAYER_RUNS],
    strategy: &Strategy,
) -> Seconds {
    pipeline_lower_bound_of(scenario, blocks, times, layers, strategy)
        + tail_lower_bound(scenario, blocks, times, layers, strategy)
        + scenario.machine.stack.overhead.step.value
}

/// The part of [`step_lower_bound`] from the first to the last pass.
///
/// With m micro-batches on p stages, let W be the work of one micro-batch on all stages and x the last stage's part.
/// The slowest stage has at least the mean, W / p, and at least the layers of the fullest of equal stages. The last
/// stage starts after the forward passes of p - 1 parts before it and is followed by as many backward passes: with c
/// for both, T >= c + m x. The slowest of the others has at least their mean: T >= m (W - x) / (p - 1). The bound is
/// the least that both allow for any x. With one part a stage c is W - x, less what of it may wait in zero-bubble
/// schedules; with more it is p - 1 parts with the fewest layers that an even split leaves them.
pub fn pipeline_lower_bound_of(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    times: &PerBlock<BlockTime>,
    layers: [u64; MAX_LAYER_RUNS],
    strategy: &Strategy,
) -> Seconds {
    let machine = scenario.machine;
    let whole = whole(layers);
    let stages = strategy.pipeline_parallel as f64;
    let m = strategy.num_micro_batches() as f64;
    let host = machine.stack.overhead.micro_batch.value;
    let over_blocks = |time: fn(StageTime) -> Seconds| -> Seconds {
        times.parts(&whole).map(|(count, block)| time(block.pass) * count as f64).sum()
    };
    let passes = over_blocks(StageTime::total) + host * stages;
    if strategy.pipeline_parallel == 1 {
        return passes * m;
    }
    let transfer = transfer_time(scenario, strategy, blocks);
    let blocked = blocking(transfer, strategy, machine);
    // Both directions of the ways between stages: those that block are work, the others lengthen the chain.
    let ways = |time: Seconds| time * (2.0 * (stages - 1.0));
    let least_of = |time: fn(StageTime) -> Seconds| {
        let used = times.layers.iter().zip(layers).filter(|(_, count)| *count > 0);
        used.map(|(block, _)| time(block.pass).0).fold(f64::INFINITY, f64::min)
    };
    let least = least_of(|pass| pass.forward) + least_of(|pass| pass.backward);
    let count: u64 = layers.iter().sum();
    let fullest = Seconds(least * count.div_ceil(strategy.pipeline_parallel) as f64) + host;
    let others = m / (stages - 1.0);
    let of_last = |work: Seconds, chain: Seconds, share: f64| {
        // T >= chain + share x and T >= others (work - x).
        let x = ((work * others - chain).0 / (share + others)).max(0.0);
        chain + Seconds(x * share)
    };
    let bound = if strategy.virtual_stages > 1 {
        // Of the parts before the last stage's first one, those without the embedding have the whole layers that fall to
        // each of all parts.
        let parts = strategy.pipeline_parallel * strategy.virtual_stages;
        let before = (strategy.pipeline_parallel - 2) * (count / parts);
        let flows = strategy.schedule == ScheduleKind::Interleaved;
        let chain = if flows { Seconds(least * before as f64) + ways(transfer - blocked) } else { Seconds(0.0) };
        of_last(passes, chain, m)
    } else {
        let work = passes + ways(blocked);
        let needed = match strategy.schedule.splits_backward() {
            true => over_blocks(|pass| pass.forward + pass.input_backward()) + host * stages + ways(blocked),
            false => work,
        };
        let chain = needed + ways(transfer - blocked);
        of_last(needed, chain, m - 1.0).max(work * (m / stages))
    };
    bound.max(fullest * m)
}

/// The part of [`step_lower_bound`] after the last pass.
///
/// What follows is convex in a stage's parameters but for the latency of collectives that only stages with experts
/// have, so the slowest stage takes no less than one with the mean of all would, less that latency. Backward covers the
/// most where it computes all layers again that it may.
pub fn tail_lower_bound(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    times: &PerBlock<BlockTime>,
    layers: [u64; MAX_LAYER_RUNS],
    strategy: &Strategy,
) -> Seconds {
    let whole = whole(layers);
    let sum =
        |part: fn(CostedBlock) -> u64| -> u64 { blocks.parts(&whole).map(|(count, block)| part(block) * count).sum() };
    let stages = strategy.pipeline_parallel;
    let tied = if stages == 1 { blocks.head.tied_parameters } else { 0 };
    let experts = sum(|block| block.expert_parameters) / stages;
    let all = (sum(|block| block.parameters) - tied) / stages;
    let held = HeldParameters { all: all.max(experts), experts };
    let machine = scenario.machine;
    let again = if strategy.recompute == Recompute::Partial { layers } else { whole.recomputed };
    let longest = StageContent { recomputed: again, ..whole };
    let received = transfer_time(scenario, strategy, blocks) * strategy.virtual_stages as f64;
    let of_stage = |pass: fn(StageTime) -> Seconds| -> Seconds {
        let all: Seconds = times.parts(&longest).map(|(count, block)| pass(block.pass) * count as f64).sum();
        all * (1.0 / stages as f64) + received
    };
    let host = machine.stack.overhead.micro_batch.value;
    let passes = [of_stage(|pass| pass.forward) + host, of_stage(|pass| pass.backward)];
    let tensors = sum(|block| block.tensors) / stages;
    let tail = tail_of(scenario, strategy, held, tensors, passes);
    if experts == 0 || stages == 1 {
        return tail.total();
    }
    let groups = state_groups(strategy, machine);
    let latency = |kind| -> Seconds {
        let of = [groups.whole[1], groups.shards[1], groups.copies[1]];
        of.into_iter().map(|group| collective_time(kind, Bytes(0), group, machine)).sum()
    };
    let most = latency(CollectiveKind::AllReduce)
        + latency(CollectiveKind::ReduceScatter)
        + latency(CollectiveKind::AllGather);
    (tail.total() - most).max(Seconds(0.0))
}

/// A time that the strategy with stages that hold `contents` cannot beat.
pub fn split_lower_bound(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    times: &PerBlock<BlockTime>,
    strategy: &Strategy,
    contents: &[StageContent],
) -> Seconds {
    let transfer = transfer_time(scenario, strategy, blocks);
    let parts = part_times(scenario, times, strategy, contents, transfer);
    let stages = stage_totals(Pipeline::of(strategy), &parts);
    let tail = longest_tail(scenario, strategy, blocks, contents, &stages);
    passes_of_parts(scenario, strategy, &parts, transfer) + tail.total() + scenario.machine.stack.overhead.step.value
}

/// The part of [`split_lower_bound`] from the first to the last pass.
pub fn passes_lower_bound(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    times: &PerBlock<BlockTime>,
    strategy: &Strategy,
    contents: &[StageContent],
) -> Seconds {
    let transfer = transfer_time(scenario, strategy, blocks);
    let parts = part_times(scenario, times, strategy, contents, transfer);
    passes_of_parts(scenario, strategy, &parts, transfer)
}

fn passes_of_parts(scenario: Scenario, strategy: &Strategy, parts: &[StageTime], transfer: Seconds) -> Seconds {
    let blocked = blocking(transfer, strategy, scenario.machine);
    pipeline_lower_bound(Pipeline::of(strategy), parts, transfer - blocked)
}

fn whole(layers: [u64; MAX_LAYER_RUNS]) -> StageContent {
    StageContent { embedding: true, layers, head: true, ..StageContent::default() }
}
