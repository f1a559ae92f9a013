//! What a stage's parts put on each of its ranks.

use ir::model::MAX_LAYER_RUNS;
use ir::pipeline::{HeldState, Pipeline, held_states};
use ir::strategy::{Recompute, Strategy, ZeroStage};
use ir::units::Bytes;

use super::data::HeldParameters;
use super::{CostedBlock, PerBlock, Scenario, StageContent};
use crate::block::BlockCost;
use crate::machine::Machine;
use crate::memory::{Shards, StageLoad, StageMemory, stage_memory, state_bytes};
use crate::offload::host_memory;

/// Memory of each rank of a stage that holds `parts`.
pub fn stage_memory_of(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    strategy: &Strategy,
    parts: &[StageContent],
    stage: u64,
) -> StageMemory {
    stage_memory_holding(scenario, blocks, strategy, parts, held_states(Pipeline::of(strategy), stage))
}

/// Memory of each rank of a stage that holds `parts`, at its fullest in one of these states.
pub fn stage_memory_holding(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    strategy: &Strategy,
    parts: &[StageContent],
    states: [HeldState; 3],
) -> StageMemory {
    let mut load = load_holding(blocks, strategy, parts, states);
    let kept = kept_whole(strategy, scenario.machine);
    (load.keeps_weights, load.keeps_gradients) = (kept.weights, kept.gradients);
    stage_memory(load, strategy.zero_stage, shards_of(strategy), scenario.model.dtype, scenario.machine)
}

/// Ranks over which ZeRO shards: a shard group and its contexts; of routed experts those that hold the same ones.
pub(super) fn shards_of(strategy: &Strategy) -> Shards {
    if strategy.zero_stage == ZeroStage::None {
        return Shards { dense: 1, expert: 1 };
    }
    let dense = strategy.shard_group * strategy.context_parallel;
    let experts = strategy.expert_parallel;
    let ranks = dense * (strategy.tensor_parallel / strategy.expert_tensor_parallel());
    Shards { dense, expert: if ranks.is_multiple_of(experts) { ranks / experts } else { 1 } }
}

/// What ZeRO-3 keeps whole over a step's micro-batches, instead of gathering or reducing it in each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct KeptWhole {
    pub(super) weights: bool,
    pub(super) gradients: bool,
}

pub(super) fn kept_whole(strategy: &Strategy, machine: &Machine) -> KeptWhole {
    let state = machine.stack.overlap.sharded_state;
    let stages = strategy.pipeline_parallel;
    let sharded = strategy.zero_stage == ZeroStage::Parameters;
    // The gradients of a single micro-batch are reduced block by block either way.
    let accumulates = strategy.num_micro_batches() > 1;
    KeptWhole {
        weights: sharded && state.keeps_weights(stages),
        gradients: sharded && accumulates && state.keeps_gradients(stages),
    }
}

/// Bytes that ranks of a stage hold in the host memory of a node.
pub fn host_memory_of(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    strategy: &Strategy,
    parts: &[StageContent],
) -> Bytes {
    if !strategy.offload_optimizer {
        return Bytes(0);
    }
    let load = stage_load(blocks, strategy, parts, 0);
    let held = HeldParameters { all: load.parameters, experts: load.expert_parameters };
    let owned = held.owned(shards_of(strategy)).all;
    host_memory(scenario.machine, state_bytes(scenario.machine, scenario.model.dtype), owned)
}

/// What a stage that holds `parts` puts on each of its ranks.
pub fn stage_load(
    blocks: &PerBlock<CostedBlock>,
    strategy: &Strategy,
    parts: &[StageContent],
    stage: u64,
) -> StageLoad {
    load_holding(blocks, strategy, parts, held_states(Pipeline::of(strategy), stage))
}

/// Bytes that every layout needs for one micro-batch of one layer, of the run that needs least: what backward reads of
/// it is kept, or there once it is computed again, beside the largest set of temporary tensors.
pub fn least_layer_memory(blocks: &PerBlock<CostedBlock>, layers: [u64; MAX_LAYER_RUNS]) -> Bytes {
    let used = blocks.layers.iter().zip(layers).filter(|(_, count)| *count > 0);
    used.map(|(block, _)| block.cost.kept + block.cost.workspace).min().unwrap_or_default()
}

/// Bytes that the fullest of a layout's stages uses at least, however layers are split: the mean of what their weights,
/// gradients and optimizer state take, which is linear in them.
pub fn least_state_memory(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    layers: [u64; MAX_LAYER_RUNS],
    strategy: &Strategy,
) -> Bytes {
    let of_stage = |parameters: fn(&CostedBlock) -> u64| {
        let all: u64 = blocks.layers.iter().zip(layers).map(|(block, count)| count * parameters(block)).sum();
        all / strategy.pipeline_parallel
    };
    let expert_parameters = of_stage(|block| block.expert_parameters);
    let load = StageLoad {
        parameters: of_stage(|block| block.parameters - block.expert_parameters) + expert_parameters,
        expert_parameters,
        offloads_optimizer: strategy.offload_optimizer,
        ..StageLoad::default()
    };
    let Scenario { model, machine, .. } = scenario;
    stage_memory(load, strategy.zero_stage, shards_of(strategy), model.dtype, machine).least_use()
}

fn load_holding(
    blocks: &PerBlock<CostedBlock>,
    strategy: &Strategy,
    parts: &[StageContent],
    states: [HeldState; 3],
) -> StageLoad {
    let mut load = StageLoad { offloads_optimizer: strategy.offload_optimizer, ..StageLoad::default() };
    let mut held = [Bytes(0); 3];
    for (content, part) in parts.iter().zip(0..) {
        let of_one = add_part(&mut load, blocks, strategy.recompute, content);
        for (bytes, state) in held.iter_mut().zip(states) {
            let count = state.of_part(part);
            *bytes += of_one.activations * count.activations + of_one.weight_inputs * count.weight_inputs;
        }
    }
    load.activations = held.into_iter().max().unwrap_or_default();
    if parts.iter().any(|part| part.embedding) && parts.iter().any(|part| part.head) {
        load.parameters -= blocks.head.tied_parameters;
    }
    load
}

/// Bytes that a part of the model holds for one micro-batch.
#[derive(Clone, Copy, Debug, Default)]
struct HeldBytes {
    /// Between the forward and the backward pass.
    activations: Bytes,
    /// Between the backward pass and the gradients of weights.
    weight_inputs: Bytes,
}

/// Adds a part's parameters and temporary tensors, and gives what it holds.
fn add_part(
    load: &mut StageLoad,
    blocks: &PerBlock<CostedBlock>,
    recompute: Recompute,
    content: &StageContent,
) -> HeldBytes {
    let mut held = HeldBytes::default();
    for run in (0..MAX_LAYER_RUNS).filter(|run| content.layers[*run] > 0) {
        let block = blocks.layers[run];
        load.largest_layer = load.largest_layer.max(block.parameters - block.expert_parameters);
        let again = content.recomputed[run];
        let others = if recompute == Recompute::Partial { Recompute::None } else { recompute };
        for (count, recompute) in [(content.layers[run] - again, others), (again, Recompute::Full)] {
            if count > 0 {
                let (kept, temporary) = kept_and_temporary(&block.cost, recompute);
                add_block(load, block, count, temporary);
                held.activations += kept * count;
                held.weight_inputs += block.cost.weight_inputs * count;
            }
        }
    }
    for (here, block) in [(content.embedding, blocks.embedding), (content.head, blocks.head)] {
        if here {
            add_block(load, block, 1, block.cost.workspace);
            held.activations += block.cost.kept;
        }
    }
    held
}

fn add_block(load: &mut StageLoad, block: CostedBlock, count: u64, temporary: Bytes) {
    load.parameters += block.parameters * count;
    load.expert_parameters += block.expert_parameters * count;
    load.largest_block = load.largest_block.max(block.parameters);
    load.workspace = load.workspace.max(temporary);
}

/// Bytes kept from forward, and alive for a moment in backward, by recomputation.
fn kept_and_temporary(cost: &BlockCost, recompute: Recompute) -> (Bytes, Bytes) {
    match recompute {
        Recompute::None => (cost.kept, cost.workspace),
        Recompute::Selective => (cost.kept_selected, cost.workspace + (cost.kept - cost.kept_selected)),
        Recompute::Full | Recompute::Partial => (cost.input, cost.workspace + cost.kept),
    }
}
