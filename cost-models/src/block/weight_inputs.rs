//! What gradients of weights need of a block once its input's gradient is computed.

use ir::graph::{Block, OperatorKind};
use ir::units::Bytes;
use petgraph::graph::NodeIndex;

use super::BlockCase;

/// Bytes that products for gradients of weights read: each input once, and each result's gradient
/// (arXiv 2401.10241, table 1, W: 32 s b h for a GPT layer).
pub fn weight_inputs(block: &Block, case: BlockCase) -> Bytes {
    let mut held: Vec<NodeIndex> = Vec::new();
    let mut gradients = 0.0;
    for node in block.graph.node_indices() {
        let kind = &block.graph[node].kind;
        let product = matches!(kind, OperatorKind::Contraction { .. } | OperatorKind::GroupedContraction { .. });
        let operands = case.operands(node);
        if product && block.graph[operands[1]].is_parameter() {
            held.push(operands[0]);
            gradients += case.bytes(block, node);
        }
    }
    held.sort_unstable();
    held.dedup();
    let inputs: f64 = held.into_iter().map(|node| case.bytes(block, node)).sum();
    Bytes((inputs + gradients) as u64)
}
