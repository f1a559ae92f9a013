//! Floating-point operations of a step, in the two conventions that papers use.

use ir::graph::{Block, BlockRole, Extents, ModelGraph, block_flops, operator_flops};
use ir::model::{MAX_LAYER_RUNS, Workload};
use ir::strategy::Recompute;
use ir::units::Flops;

/// How `mfu` is computed, in words; printed beside it.
pub const MFU_FORMULA: &str = "3 x forward contraction FLOPs (2 per multiply-add, attention in full, head included, \
                               recomputation excluded) / (step seconds x GPUs x dense peak of the number format)";

/// Backward costs two products for each forward product.
const BACKWARD_PER_FORWARD: f64 = 2.0;

/// Model and hardware FLOPs of a step over all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepFlops {
    /// Forward and backward, without recomputation.
    pub model: Flops,
    /// With recomputation.
    pub hardware: Flops,
}

/// FLOPs of a step.
///
/// Equals the formula of arXiv 2104.04473, section 3: 96 B s l h² (1 + s/6h + V/16lh) for a GPT with
/// full recomputation counted, 72 in place of 96 without.
///
/// `recomputed` has the layers of each run that partial recomputation computes again.
pub fn step_flops(
    graph: &ModelGraph,
    workload: Workload,
    recompute: Recompute,
    recomputed: [u64; MAX_LAYER_RUNS],
) -> StepFlops {
    let extents = Extents { micro_batch: workload.global_batch, sequence_length: workload.sequence_length };
    let mut model = 0.0;
    let mut repeated = 0.0;
    for block in &graph.blocks {
        let forward = block_flops(block, extents);
        model += block.count as f64 * forward * (1.0 + BACKWARD_PER_FORWARD);
        let (count, again) = match (recompute, block.role) {
            (Recompute::None, _) | (_, BlockRole::Embedding | BlockRole::Head) => (0, 0.0),
            (Recompute::Full, BlockRole::Layers(_)) => (block.count, forward),
            (Recompute::Partial, BlockRole::Layers(run)) => (recomputed[run], forward),
            (Recompute::Selective, BlockRole::Layers(_)) => (block.count, core_flops(block, extents)),
        };
        repeated += count as f64 * again;
    }
    StepFlops { model: Flops(model), hardware: Flops(model + repeated) }
}

/// FLOPs of the attention core's forward pass.
fn core_flops(block: &Block, extents: Extents) -> f64 {
    let core = block.graph.node_indices().filter(|node| block.graph[*node].attention_core);
    core.map(|node| operator_flops(block, node, extents)).sum()
}
