//! Tensors that a block keeps for its backward pass, and those that live for a moment beside them.

use hardware_profiles::stack::SelectiveRecompute;
use ir::graph::{Block, OperatorKind};
use ir::units::Bytes;
use petgraph::Direction;
use petgraph::graph::NodeIndex;

use super::{
    BlockCase, BlockCost, dropped_weights, fused_groups, is_repeated_product, repeated_nodes, whole_activation,
};
use crate::machine::Machine;

/// What of a block depends on its graph and the software alone, whatever the split and the micro-batch.
#[derive(Clone, Debug)]
pub struct BlockStructure {
    /// Kernels with their operators.
    pub(super) kernels: Vec<KernelOperators>,
    /// Producers of each operator's operands, in operand order.
    pub(super) operands: Vec<Vec<NodeIndex>>,
    /// Whether full recomputation computes each operator again.
    pub(super) repeated: Vec<bool>,
    /// Tensors that backward reads.
    kept: Vec<NodeIndex>,
    /// Those that remain where backward computes again what the stack selects.
    selected: Vec<NodeIndex>,
    /// Tensors whose gradients are alive together, for each operator or kernel.
    alive: Vec<Vec<NodeIndex>>,
}

/// Operators that one kernel computes.
#[derive(Clone, Debug)]
pub(super) struct KernelOperators {
    /// All of them.
    pub(super) members: Vec<NodeIndex>,
    /// Those whose results leave the kernel.
    pub(super) outputs: Vec<NodeIndex>,
    /// Producers of what enters it.
    pub(super) inputs: Vec<NodeIndex>,
}

/// The structure of a block under a machine's software.
pub fn block_structure(block: &Block, machine: &Machine) -> BlockStructure {
    let flash = machine.stack.kernels.flash_attention;
    let kernels: Vec<Vec<NodeIndex>> = fused_groups(block, machine).into_values().collect();
    let mut kept: Vec<NodeIndex> = kernels.iter().flat_map(|members| kept_by(block, members, machine)).collect();
    kept.sort_unstable();
    kept.dedup();
    let inside_core = |node: &NodeIndex| block.graph[*node].attention_core && block.graph[*node].name != "context";
    kept.retain(|node| !(flash && inside_core(node)));
    let selected = match machine.stack.kernels.selective_recompute {
        SelectiveRecompute::AttentionCore => kept.iter().copied().filter(|node| !inside_core(node)).collect(),
        SelectiveRecompute::EverySecondProduct => saved_products(block),
    };
    let alive = kernels.iter().flat_map(|members| alive_together(block, members, machine)).collect();
    let operators = |members: Vec<NodeIndex>| KernelOperators {
        outputs: members.iter().copied().filter(|node| leaves(block, *node, &members)).collect(),
        inputs: inputs(block, &members),
        members,
    };
    BlockStructure {
        kernels: kernels.into_iter().map(operators).collect(),
        operands: block.graph.node_indices().map(|node| block.operands(node)).collect(),
        repeated: repeated_nodes(block, machine),
        kept,
        selected,
        alive,
    }
}

/// Tensors that backward reads: kept from forward unless they are recomputed.
pub(super) fn add_kept(block: &Block, case: BlockCase, cost: &mut BlockCost) {
    let kernels = &case.machine.stack.kernels;
    let bytes = |nodes: &[NodeIndex]| nodes.iter().map(|node| Bytes(case.bytes(block, *node) as u64)).sum();
    cost.kept = bytes(&case.structure.kept);
    cost.kept_selected = bytes(&case.structure.selected);
    if kernels.selective_recompute == SelectiveRecompute::EverySecondProduct {
        cost.kept_selected += cost.input;
    }
    if let Some((_, weights, mask)) = dropped_weights(block, case).filter(|_| !kernels.flash_attention) {
        cost.kept += Bytes((weights + mask) as u64);
    }
    let gradients = |tensors: &Vec<NodeIndex>| {
        Bytes(tensors.iter().map(|node| whole_activation(block, *node, case)).sum::<f64>() as u64)
    };
    cost.workspace = case.structure.alive.iter().map(gradients).max().unwrap_or_default();
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
fn kept_by(block: &Block, members: &[NodeIndex], machine: &Machine) -> Vec<NodeIndex> {
    let mut kept = match is_one_kernel(members, machine) {
        true => kept_by_kernel(block, members),
        false => members.iter().flat_map(|node| kept_by_operator(block, *node)).collect(),
    };
    kept.retain(|node| !block.graph[*node].is_parameter());
    kept
}

/// Whether operators share a kernel that computes in backward again what lies between its inputs and outputs.
fn is_one_kernel(members: &[NodeIndex], machine: &Machine) -> bool {
    members.len() > 1 && machine.stack.kernels.fused_keep_inputs
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
fn leaves(block: &Block, node: NodeIndex, members: &[NodeIndex]) -> bool {
    let mut readers = block.graph.neighbors_directed(node, Direction::Outgoing);
    node == block.output || readers.any(|reader| !members.contains(&reader))
}

/// Operands from outside a kernel.
fn inputs(block: &Block, members: &[NodeIndex]) -> Vec<NodeIndex> {
    let operands = members.iter().flat_map(|node| block.operands(*node));
    let mut inputs: Vec<NodeIndex> = operands.filter(|operand| !members.contains(operand)).collect();
    inputs.sort_unstable();
    inputs.dedup();
    inputs
}

/// Results and operands of a kernel, or of each of its operators, whose gradients are alive together in its backward;
/// none where a flash kernel computes them.
fn alive_together(block: &Block, members: &[NodeIndex], machine: &Machine) -> Vec<Vec<NodeIndex>> {
    let activations = |mut tensors: Vec<NodeIndex>| {
        tensors.retain(|node| !block.graph[*node].is_parameter());
        tensors
    };
    if is_one_kernel(members, machine) {
        let outputs = members.iter().filter(|node| leaves(block, **node, members)).copied();
        let tensors = outputs.chain(inputs(block, members)).collect();
        let has_gradients = has_gradients(block, members, machine);
        return has_gradients.then(|| activations(tensors)).into_iter().collect();
    }
    let with_gradients = members.iter().filter(|node| has_gradients(block, &[**node], machine));
    with_gradients.map(|node| activations(block.operands(*node).into_iter().chain([*node]).collect())).collect()
}

/// Whether operators have gradients as tensors.
fn has_gradients(block: &Block, members: &[NodeIndex], machine: &Machine) -> bool {
    let source =
        |node: &NodeIndex| matches!(block.graph[*node].kind, OperatorKind::Input | OperatorKind::Parameter { .. });
    let flash = machine.stack.kernels.flash_attention;
    let inside_flash = flash && members.iter().all(|node| block.graph[*node].attention_core);
    !(members.iter().all(source) || inside_flash)
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
