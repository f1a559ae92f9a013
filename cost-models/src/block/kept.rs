//! Tensors that a block keeps for its backward pass, and those that live for a moment beside them.

use hardware_profiles::stack::SelectiveRecompute;
use ir::graph::{Block, OperatorKind};
use ir::units::Bytes;
use petgraph::Direction;
use petgraph::graph::NodeIndex;

use super::{BlockCase, BlockCost, dropped_weights, fused_groups, is_repeated_product, whole_activation};

/// Tensors that backward reads: kept from forward unless they are recomputed.
pub(super) fn add_kept(block: &Block, case: BlockCase, cost: &mut BlockCost) {
    let flash = case.machine.stack.kernels.flash_attention;
    let groups: Vec<Vec<NodeIndex>> = fused_groups(block, case).into_values().collect();
    let mut kept: Vec<NodeIndex> = groups.iter().flat_map(|members| kept_by(block, members, case)).collect();
    kept.sort_unstable();
    kept.dedup();
    let inside_core = |node: &NodeIndex| block.graph[*node].attention_core && block.graph[*node].name != "context";
    kept.retain(|node| !(flash && inside_core(node)));
    let bytes = |nodes: &[NodeIndex]| nodes.iter().map(|node| Bytes(case.bytes(block, *node) as u64)).sum();
    cost.kept = bytes(&kept);
    cost.kept_selected = match case.machine.stack.kernels.selective_recompute {
        SelectiveRecompute::AttentionCore => {
            kept.retain(|node| !inside_core(node));
            bytes(&kept)
        }
        SelectiveRecompute::EverySecondProduct => cost.input + bytes(&saved_products(block)),
    };
    if let Some((_, weights, mask)) = dropped_weights(block, case).filter(|_| !flash) {
        cost.kept += Bytes((weights + mask) as u64);
    }
    cost.workspace = groups.iter().map(|members| workspace_of(block, members, case)).max().unwrap_or_default();
}

/// What selective recomputation of every second product saves: results of the others, and of attention.
fn saved_products(block: &Block) -> Vec<NodeIndex> {
    let is_product = |node: &NodeIndex| {
        matches!(block.graph[*node].kind, OperatorKind::Contraction { .. } | OperatorKind::GroupedContraction { .. })
    };
    let (core, products): (Vec<NodeIndex>, Vec<NodeIndex>) =
        block.graph.node_indices().filter(is_product).partition(|node| block.graph[*node].attention_core);
    let saved = products.into_iter().enumerate().filter(|(index, _)| !is_repeated_product(*index));
    saved.map(|(_, node)| node).chain(core.into_iter().filter(|node| block.graph[*node].name == "context")).collect()
}

/// Activations that the backward pass of one kernel's operators reads.
fn kept_by(block: &Block, members: &[NodeIndex], case: BlockCase) -> Vec<NodeIndex> {
    let mut kept = match is_one_kernel(members, case) {
        true => kept_by_kernel(block, members),
        false => members.iter().flat_map(|node| kept_by_operator(block, *node)).collect(),
    };
    kept.retain(|node| !block.graph[*node].is_parameter());
    kept
}

/// Whether operators share a kernel that computes in backward again what lies between its inputs and outputs.
fn is_one_kernel(members: &[NodeIndex], case: BlockCase) -> bool {
    members.len() > 1 && case.machine.stack.kernels.fused_keep_inputs
}

fn kept_by_operator(block: &Block, node: NodeIndex) -> Vec<NodeIndex> {
    let kind = &block.graph[node].kind;
    let mut kept = if needs_inputs(kind) { block.operands(node) } else { Vec::new() };
    kept.extend(needs_output(kind).then_some(node));
    kept
}

/// What leaves a kernel if its backward reads that, else what enters it if its backward reads anything.
fn kept_by_kernel(block: &Block, members: &[NodeIndex]) -> Vec<NodeIndex> {
    let needed: Vec<NodeIndex> = members.iter().flat_map(|node| kept_by_operator(block, *node)).collect();
    let inside = |node: &NodeIndex| members.contains(node);
    let leaves = |node: &NodeIndex| inside(node) && leaves(block, *node, members);
    match needed.iter().all(|node| leaves(node) || block.graph[*node].is_parameter()) {
        true => needed,
        false => inputs(block, members),
    }
}

/// Whether a result is read outside its kernel.
pub(super) fn leaves(block: &Block, node: NodeIndex, members: &[NodeIndex]) -> bool {
    let mut readers = block.graph.neighbors_directed(node, Direction::Outgoing);
    node == block.output || readers.any(|reader| !members.contains(&reader))
}

/// Operands from outside a kernel.
pub(super) fn inputs(block: &Block, members: &[NodeIndex]) -> Vec<NodeIndex> {
    let operands = members.iter().flat_map(|node| block.operands(*node));
    let mut inputs: Vec<NodeIndex> = operands.filter(|operand| !members.contains(operand)).collect();
    inputs.sort_unstable();
    inputs.dedup();
    inputs
}

/// Gradients of a kernel's results and operands, alive together in its backward.
fn workspace_of(block: &Block, members: &[NodeIndex], case: BlockCase) -> Bytes {
    match is_one_kernel(members, case) {
        true => {
            let outputs = members.iter().filter(|node| leaves(block, **node, members)).copied();
            gradients(block, outputs.chain(inputs(block, members)).collect(), members, case)
        }
        false => {
            let each = |node: &NodeIndex| {
                let tensors = block.operands(*node).into_iter().chain([*node]).collect();
                gradients(block, tensors, &[*node], case)
            };
            members.iter().map(each).max().unwrap_or_default()
        }
    }
}

/// Bytes of the gradients of `tensors`, which surround operators; none where a flash kernel computes them.
fn gradients(block: &Block, tensors: Vec<NodeIndex>, members: &[NodeIndex], case: BlockCase) -> Bytes {
    let source =
        |node: &NodeIndex| matches!(block.graph[*node].kind, OperatorKind::Input | OperatorKind::Parameter { .. });
    let flash = case.machine.stack.kernels.flash_attention;
    if members.iter().all(source) || (flash && members.iter().all(|node| block.graph[*node].attention_core)) {
        return Bytes(0);
    }
    let activations = tensors.into_iter().filter(|node| !block.graph[*node].is_parameter());
    Bytes(activations.map(|node| whole_activation(block, node, case)).sum::<f64>() as u64)
}

/// Whether an operator's backward reads its operands.
pub(super) fn needs_inputs(kind: &OperatorKind) -> bool {
    match kind {
        OperatorKind::Contraction { .. }
        | OperatorKind::GroupedContraction { .. }
        | OperatorKind::Norm(_)
        | OperatorKind::Gelu
        | OperatorKind::Silu
        | OperatorKind::Multiply
        | OperatorKind::Combine
        | OperatorKind::Lookup
        | OperatorKind::Log => true,
        OperatorKind::Input
        | OperatorKind::Parameter { .. }
        | OperatorKind::Add
        | OperatorKind::Subtract
        | OperatorKind::ScaleMask { .. }
        | OperatorKind::Softmax
        | OperatorKind::Rotary
        | OperatorKind::AsKeys
        | OperatorKind::Concatenate
        | OperatorKind::TopK
        | OperatorKind::Dispatch
        | OperatorKind::Cast
        | OperatorKind::ReduceMax(_)
        | OperatorKind::ReduceSum(_)
        | OperatorKind::Exp
        | OperatorKind::Pick
        | OperatorKind::SumTokens => false,
    }
}

/// Whether an operator's backward reads its result.
pub(super) fn needs_output(kind: &OperatorKind) -> bool {
    matches!(kind, OperatorKind::Softmax | OperatorKind::Exp | OperatorKind::TopK)
}
