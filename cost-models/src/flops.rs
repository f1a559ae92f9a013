//! Floating-point operations of a step, in the two conventions that papers use.

use ir::graph::{BlockRole, Extents, operator_flops};
use ir::graph::{ModelGraph, block_flops};
use ir::model::Workload;
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
pub fn step_flops(graph: &ModelGraph, workload: Workload, recompute: Recompute) -> StepFlops {
    let extents = Extents { micro_batch: workload.global_batch, sequence_length: workload.sequence_length };
    let mut model = 0.0;
    let mut repeated = 0.0;
    for block in &graph.blocks {
        let forward = block_flops(block, extents);
        model += block.count as f64 * forward * (1.0 + BACKWARD_PER_FORWARD);
        let again = match (recompute, block.role) {
            (Recompute::None, _) | (_, BlockRole::Embedding | BlockRole::Head) => 0.0,
            (Recompute::Full, BlockRole::Layers(_)) => forward,
            (Recompute::Selective, BlockRole::Layers(_)) => block
                .graph
                .node_indices()
                .filter(|node| block.graph[*node].attention_core)
                .map(|node| operator_flops(block, node, extents))
                .sum(),
        };
        repeated += block.count as f64 * again;
    }
    StepFlops { model: Flops(model), hardware: Flops(model + repeated) }
}
