//! Time, communication and kept tensors of one execution of a block on one rank.
//!
//! Everything follows from the graph: which operands backward needs says what is kept, which contracted
//! dims the tensor axis splits says what is reduced, and which neighbours one kernel computes together
//! says what passes through memory.

mod context;
mod kept;
mod products;
mod weight_inputs;

use std::collections::BTreeMap;

use hardware_profiles::device::{MatmulFormat, OperatorClass};
use hardware_profiles::stack::SelectiveRecompute;
use ir::graph::{Block, BlockRole, DimName, DropoutSite, Extents, Fusion, Operator, OperatorKind};
use ir::model::DType;
use ir::sharding::TensorSplit;
use ir::units::{Bytes, BytesPerSecond, Seconds};
use petgraph::graph::NodeIndex;
use petgraph::unionfind::UnionFind;
use petgraph::visit::EdgeRef;

use crate::collective::{CollectiveKind, Placement, collective_time, exchange_time};
use crate::machine::Machine;
use context::context_exchange_times;
pub use kept::{BlockStructure, block_structure};
use kept::{KernelOperators, add_kept, needs_inputs, needs_output};
use products::{Product, launches, product_times, products};
use weight_inputs::weight_inputs;

/// Flash attention's backward does 2.5 times the forward's FLOPs: five products to two (Dao,
/// arXiv 2307.08691, section 4.1).
const FLASH_BACKWARD_PER_FORWARD: f64 = 2.5;
/// Share of the score matrix that a causal kernel computes.
const CAUSAL_SHARE: f64 = 0.5;

/// Cost of one execution of a block for one micro-batch on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BlockCost {
    /// Computation of the forward pass.
    pub forward: Seconds,
    /// Computation of the backward pass, without recomputation.
    pub backward: Seconds,
    /// The part of `backward` that multiplies for gradients of weights, which nothing else waits for.
    pub weight_gradients: Seconds,
    /// The part of `forward` that is the attention core.
    pub attention_core: Seconds,
    /// The part of `backward` that is the attention core.
    pub attention_core_backward: Seconds,
    /// Tensor-axis collectives of the forward pass.
    pub forward_communication: Seconds,
    /// Tensor-axis collectives of the backward pass.
    pub backward_communication: Seconds,
    /// Kernels of the forward pass.
    pub forward_kernels: u64,
    /// Kernels of the backward pass.
    pub backward_kernels: u64,
    /// Exchanges of the context and the expert axis in the forward pass.
    pub exchange: Seconds,
    /// The same in the backward pass.
    pub exchange_backward: Seconds,
    /// The part of either that is the expert axis's, of which other micro-batches may hide some.
    pub expert_exchange: Seconds,
    /// The part of `forward` that full recomputation repeats.
    pub repeated: Seconds,
    /// The part of `forward` that selective recomputation repeats.
    pub selected: Seconds,
    /// The part of `forward_communication` that full recomputation repeats.
    pub repeated_communication: Seconds,
    /// Tensors kept for backward if nothing is recomputed.
    pub kept: Bytes,
    /// The part of `kept` that remains if backward computes again what the stack selects.
    pub kept_selected: Bytes,
    /// Operands of the products for gradients of weights: kept inputs and gradients of results.
    pub weight_inputs: Bytes,
    /// The tensor that enters the block.
    pub input: Bytes,
    /// Largest set of temporary tensors that one operator's backward needs beside those kept.
    pub workspace: Bytes,
}

/// What a block is costed for.
#[derive(Clone, Copy, Debug)]
pub struct BlockCase<'a> {
    /// How the tensor axis splits dims.
    pub split: TensorSplit,
    /// Where tensor groups lie.
    pub tensor_group: Placement,
    /// Where context groups lie.
    pub context_group: Placement,
    /// Where expert groups lie.
    pub expert_group: Placement,
    /// Micro-batch and sequence length.
    pub extents: Extents,
    /// Number format of the model.
    pub dtype: DType,
    /// The machine.
    pub machine: &'a Machine,
    /// What of the block depends on neither split nor extents.
    pub structure: &'a BlockStructure,
}

/// Costs one execution of a block.
pub fn block_cost(block: &Block, case: BlockCase) -> BlockCost {
    let mut cost = BlockCost { input: input_bytes(block, case), ..BlockCost::default() };
    add_computation(block, case, &mut cost);
    add_communication(block, case, &mut cost);
    cost.expert_exchange = expert_exchange_time(block, case);
    let [forward, backward] = context_exchange_times(block, case, [cost.attention_core, cost.attention_core_backward]);
    (cost.exchange, cost.exchange_backward) = (cost.expert_exchange + forward, cost.expert_exchange + backward);
    cost.weight_inputs = weight_inputs(block, case);
    add_kept(block, case, &mut cost);
    cost
}

impl<'a> BlockCase<'a> {
    /// Producers of an operator's operands, in operand order.
    fn operands(&self, node: NodeIndex) -> &'a [NodeIndex] {
        &self.structure.operands[node.index()]
    }

    /// Whether full recomputation computes an operator again.
    fn is_repeated(&self, node: NodeIndex) -> bool {
        self.structure.repeated[node.index()]
    }

    fn bytes(&self, block: &Block, node: NodeIndex) -> f64 {
        let tensor = &block.graph[node].output;
        let elements = match block.graph[node].is_parameter() {
            true => self.split.local_parameter(tensor) as f64,
            false => self.split.local_activation(tensor, self.extents),
        };
        elements * tensor.element.bytes(self.dtype) as f64
    }
}

fn input_bytes(block: &Block, case: BlockCase) -> Bytes {
    let inputs = block.graph.node_indices().filter(|node| block.graph[*node].kind == OperatorKind::Input);
    inputs.map(|node| Bytes(case.bytes(block, node) as u64)).sum()
}

/// Operators that full recomputation computes again: all, or those that lead to a tensor that backward reads.
fn repeated_nodes(block: &Block, machine: &Machine) -> Vec<bool> {
    if !machine.stack.kernels.repeats_needed_only {
        return vec![true; block.graph.node_count()];
    }
    let mut repeated = vec![false; block.graph.node_count()];
    let mut open: Vec<NodeIndex> = Vec::new();
    for node in block.graph.node_indices() {
        let kind = &block.graph[node].kind;
        open.extend(needs_inputs(kind).then(|| block.operands(node)).into_iter().flatten());
        open.extend(needs_output(kind).then_some(node));
    }
    while let Some(node) = open.pop() {
        if !std::mem::replace(&mut repeated[node.index()], true) {
            open.extend(block.operands(node));
        }
    }
    repeated
}

fn add_computation(block: &Block, case: BlockCase, cost: &mut BlockCost) {
    let flash = case.machine.stack.kernels.flash_attention;
    let every_second = case.machine.stack.kernels.selective_recompute == SelectiveRecompute::EverySecondProduct;
    let shown = |core: bool| !(flash && core);
    let products = products(block, case);
    for (index, product) in products.iter().filter(|p| shown(p.attention_core)).enumerate() {
        let [forward, input_gradient, weight_gradient] = product_times(product, case);
        if if every_second { is_repeated_product(index) } else { product.attention_core } {
            cost.selected += forward;
        }
        cost.forward += forward;
        cost.backward += input_gradient + weight_gradient;
        if product.weights {
            cost.weight_gradients += weight_gradient;
        }
        let [forward_kernels, backward_kernels] = launches(product, case);
        cost.forward_kernels += forward_kernels;
        cost.backward_kernels += backward_kernels;
        if product.attention_core {
            cost.attention_core += forward;
            cost.attention_core_backward += input_gradient + weight_gradient;
        }
        if case.is_repeated(product.node) {
            cost.repeated += forward;
        }
    }
    for kernel in elementwise_kernels(block, case).filter(|kernel| shown(kernel.attention_core)) {
        if every_second || kernel.attention_core {
            cost.selected += kernel.forward;
        }
        cost.forward += kernel.forward;
        cost.backward += kernel.backward;
        cost.forward_kernels += 1;
        cost.backward_kernels += u64::from(kernel.backward.0 > 0.0);
        if kernel.attention_core {
            cost.attention_core += kernel.forward;
            cost.attention_core_backward += kernel.backward;
        }
        if kernel.repeated {
            cost.repeated += kernel.forward;
        }
    }
    if let Some(experts) = &case.machine.stack.kernels.experts
        && block.graph.node_weights().any(|operator| operator.kind == OperatorKind::Dispatch)
    {
        cost.forward += experts.routing.value;
        cost.repeated += experts.routing.value;
        cost.backward += experts.routing.value;
    }
    if flash {
        let forward = flash_attention_time(&products, case);
        let launched = u64::from(forward.0 > 0.0);
        cost.forward_kernels += launched;
        cost.backward_kernels += launched;
        cost.forward += forward;
        let measured = case.machine.device.flash_attention_backward.as_ref();
        let backward = forward * measured.map_or(FLASH_BACKWARD_PER_FORWARD, |ratio| ratio.value);
        cost.backward += backward;
        cost.attention_core += forward;
        cost.attention_core_backward += backward;
        cost.repeated += forward;
    }
}

/// Whether selective recomputation of every second product repeats the product of this index.
fn is_repeated_product(index: usize) -> bool {
    index % 2 == 1
}

/// Forward time of a flash-attention kernel: half of the score matrix at the device's efficiency.
fn flash_attention_time(products: &[Product], case: BlockCase) -> Seconds {
    let flops: f64 = products.iter().filter(|p| p.attention_core).map(|p| p.shape.flops()).sum();
    if flops == 0.0 {
        return Seconds(0.0);
    }
    let Machine { device, stack, .. } = case.machine;
    let speed = stack.kernels.attention_speed.as_ref().map_or(1.0, |speed| speed.value);
    let second = device.flash_attention_2_efficiency.as_ref().filter(|_| stack.kernels.flash_attention_2);
    let efficiency = second.unwrap_or(&device.flash_attention_efficiency).value;
    let rate = case.machine.peak_rate(case.dtype).0 * efficiency * speed;
    Seconds(flops * CAUSAL_SHARE / rate).max(case.machine.stack.kernels.launch_floor.value)
}

struct Kernel {
    forward: Seconds,
    backward: Seconds,
    attention_core: bool,
    repeated: bool,
}

/// Memory-bound kernels of a block, neighbours joined where the stack fuses them.
fn elementwise_kernels<'a>(block: &'a Block, case: BlockCase<'a>) -> impl Iterator<Item = Kernel> + 'a {
    let fused = case.structure.kernels.iter().filter_map(move |group| elementwise_kernel(block, group, case));
    fused.chain(dropout_kernel(block, case))
}

/// The kernel that drops attention weights: it reads and writes them, and writes a mask of one byte for each that
/// backward reads. Elsewhere dropout is part of a fused kernel, whose mask is not counted.
fn dropout_kernel(block: &Block, case: BlockCase) -> Option<Kernel> {
    let (node, weights, mask) = dropped_weights(block, case)?;
    let time = Seconds((2.0 * weights + mask) / case.machine.streaming_bandwidth().0);
    let time = time.max(case.machine.stack.kernels.launch_floor.value);
    Some(Kernel { forward: time, backward: time, attention_core: true, repeated: case.is_repeated(node) })
}

/// Attention weights that training drops some of: bytes of the weights and of the mask.
fn dropped_weights(block: &Block, case: BlockCase) -> Option<(NodeIndex, f64, f64)> {
    let drops = case.machine.stack.kernels.attention_dropout;
    let mut nodes = block.graph.node_indices().filter(|_| drops);
    let node = nodes.find(|node| block.graph[*node].dropout == Some(DropoutSite::Attention))?;
    let weights = case.bytes(block, node);
    Some((node, weights, weights / block.graph[node].output.element.bytes(case.dtype) as f64))
}

/// Operators by the kernel that computes them. A kernel that keeps what enters it converts that itself.
fn fused_groups(block: &Block, machine: &Machine) -> BTreeMap<usize, Vec<NodeIndex>> {
    let fused = &machine.stack.kernels.fused;
    let mut sets = UnionFind::<usize>::new(block.graph.node_count());
    for edge in block.graph.edge_references() {
        let [from, to] = [&block.graph[edge.source()], &block.graph[edge.target()]];
        let same = from.fusion.is_some() && from.fusion == to.fusion;
        let joined = to.fusion.is_some_and(|fusion| fused.contains(&fusion));
        let converted = from.kind == OperatorKind::Cast && machine.stack.kernels.fused_keep_inputs;
        if joined && (same || converted) {
            sets.union(edge.source().index(), edge.target().index());
        }
    }
    let mut groups: BTreeMap<usize, Vec<NodeIndex>> = BTreeMap::new();
    for node in block.graph.node_indices() {
        groups.entry(sets.find(node.index())).or_default().push(node);
    }
    groups
}

/// Time of a kernel by the bytes that enter and leave it; backward reads the outputs' gradients and the
/// kept inputs and writes the inputs' gradients.
fn elementwise_kernel(block: &Block, group: &KernelOperators, case: BlockCase) -> Option<Kernel> {
    let members = &group.members;
    let first = &block.graph[members[0]];
    let matrix = matches!(first.kind, OperatorKind::Contraction { .. } | OperatorKind::GroupedContraction { .. });
    let source = matches!(first.kind, OperatorKind::Input | OperatorKind::Parameter { .. } | OperatorKind::AsKeys);
    let epilogue =
        first.fusion == Some(Fusion::BiasEpilogue) && case.machine.stack.kernels.fused.contains(&Fusion::BiasEpilogue);
    if matrix || source || epilogue {
        return None;
    }
    let outputs: f64 = group.outputs.iter().map(|node| case.bytes(block, *node)).sum();
    let read: f64 = group.inputs.iter().map(|node| traffic_of_input(block, *node, members, case)).sum();
    let kept: f64 =
        members.iter().filter(|node| needs_inputs(&block.graph[**node].kind)).map(|_| read).fold(0.0, f64::max);
    let floor = case.machine.stack.kernels.launch_floor.value;
    let time = |bytes: f64, bandwidth: BytesPerSecond| Seconds(bytes / bandwidth.0).max(floor);
    let attention_core = first.attention_core;
    let (forward, backward) = match case.machine.device.operator_rate(operator_class(block, &first.kind)) {
        Some(rate) => (time(read + outputs, rate.forward.value), time(read + outputs, rate.backward.value)),
        None => {
            let bandwidth = case.machine.streaming_bandwidth();
            (time(read + outputs, bandwidth), time(outputs + kept + read, bandwidth))
        }
    };
    let backward =
        if belongs_to_loss(first, case) && first.kind != OperatorKind::Exp { Seconds(0.0) } else { backward };
    let repeated = members.iter().any(|node| case.is_repeated(*node));
    Some(Kernel { forward, backward, attention_core, repeated })
}

/// Whether an operator is a kernel of its own in forward and part of the loss's one kernel in backward, which makes
/// the gradient of the kept exponentials.
fn belongs_to_loss(operator: &Operator, case: BlockCase) -> bool {
    let loss = Fusion::CrossEntropy;
    operator.fusion == Some(loss) && !case.machine.stack.kernels.fused.contains(&loss)
}

/// The class whose rates a device profile may give. In the head all but norm and product belongs to the loss.
pub fn operator_class(block: &Block, kind: &OperatorKind) -> OperatorClass {
    match kind {
        OperatorKind::Norm(_) => OperatorClass::Norm,
        OperatorKind::Gelu | OperatorKind::Silu => OperatorClass::Activation,
        OperatorKind::Lookup => OperatorClass::Embedding,
        _ if block.role == BlockRole::Head => OperatorClass::Loss,
        _ => OperatorClass::Arithmetic,
    }
}

/// Bytes that a kernel reads of an operand: of a looked-up table only the rows that are used.
fn traffic_of_input(block: &Block, input: NodeIndex, members: &[NodeIndex], case: BlockCase) -> f64 {
    let lookup = members.iter().find(|node| block.graph[**node].kind == OperatorKind::Lookup);
    match lookup {
        Some(node) if block.graph[input].is_parameter() => case.bytes(block, *node),
        _ => case.bytes(block, input),
    }
}

/// Collectives of the tensor axis, by the typing rules of a contraction and a lookup.
///
/// Copies of a token for its chosen experts are reduced after they are combined, which is linear: a
/// message has no `Choice` dim.
///
/// A sum over a split dim, or a lookup in a split table, leaves a partial sum: all_reduce in forward
/// (Megatron's g). An unsplit input of a product with a split weight has a partial gradient: all_reduce
/// in backward (Megatron's f), once for all products that read it. With sequence parallelism each
/// all_reduce is a reduce_scatter there and an all_gather on the other side, and the gathered input is
/// gathered once more in backward for the weight's gradient (arXiv 2205.05198, section 4.2.2).
fn add_communication(block: &Block, case: BlockCase, cost: &mut BlockCost) {
    if case.split.tensor_parallel == 1 {
        return;
    }
    let shown = 1.0 - case.machine.stack.overlap.tensor.as_ref().map_or(0.0, |hidden| hidden.value);
    let [waiting, _] = case.machine.waiting();
    let low = case.machine.matmul_format != MatmulFormat::Model && matches!(block.role, BlockRole::Layers(_));
    // Operands of products in a format below the model's are converted before they are gathered, to a byte or less
    // (NVIDIA/TransformerEngine, pytorch/distributed.py, gather_along_first_dim).
    let gathered = if low { 1.0 / case.dtype.bytes() as f64 } else { 1.0 };
    let time = |kind, bytes: f64| {
        let bytes = Bytes((if kind == CollectiveKind::AllGather { bytes * gathered } else { bytes }) as u64);
        let exposed = collective_time(kind, bytes, case.tensor_group, case.machine) * shown;
        waiting + exposed + reordering_time(kind, bytes, case)
    };
    let pair = |bytes| time(CollectiveKind::ReduceScatter, bytes) + time(CollectiveKind::AllGather, bytes);
    let mut split_inputs: Vec<NodeIndex> = Vec::new();
    for node in block.graph.node_indices() {
        let operands = case.operands(node);
        if is_partial(block, node, operands, case) {
            let whole_bytes = message_bytes(block, node, case);
            let scatters = case.split.sequence_parallel && block.graph[node].output.extent(DimName::Hidden).is_some();
            let kind = if scatters { CollectiveKind::ReduceScatter } else { CollectiveKind::AllReduce };
            let reduction = time(kind, whole_bytes);
            cost.forward_communication += reduction;
            if case.is_repeated(node) {
                cost.repeated_communication += reduction;
            }
            if scatters {
                cost.backward_communication += time(CollectiveKind::AllGather, whole_bytes);
            }
        } else if splits_its_input(block, node, operands, case) {
            split_inputs.push(before_dispatch(block, operands[0], case));
        }
    }
    split_inputs.sort_unstable();
    split_inputs.dedup();
    for input in split_inputs {
        let bytes = message_bytes(block, input, case);
        match case.split.sequence_parallel {
            true => {
                cost.forward_communication += time(CollectiveKind::AllGather, bytes);
                cost.backward_communication += pair(bytes);
                // What is gathered for the repeated product serves the weight's gradient, if nothing is done twice.
                if !case.machine.stack.kernels.repeats_needed_only {
                    cost.repeated_communication += time(CollectiveKind::AllGather, bytes);
                }
            }
            false => cost.backward_communication += time(CollectiveKind::AllReduce, bytes),
        }
    }
}

/// Time to copy a rank's part into a collective's buffer or out of it, and, where several sequences lie one after
/// another, to bring the parts of each together.
fn reordering_time(kind: CollectiveKind, whole: Bytes, case: BlockCase) -> Seconds {
    let machine = case.machine;
    match kind {
        CollectiveKind::AllReduce => Seconds(0.0),
        CollectiveKind::AllGather | CollectiveKind::ReduceScatter => {
            let part = machine.copy_time(whole.scale(1.0 / case.split.tensor_parallel as f64));
            if case.extents.micro_batch > 1 { part + machine.copy_time(whole) } else { part }
        }
    }
}

/// Time to send tokens to the ranks of their experts and back, in one pass.
fn expert_exchange_time(block: &Block, case: BlockCase) -> Seconds {
    if case.split.expert_parallel == 1 {
        return Seconds(0.0);
    }
    let routed = block.graph.node_indices().filter(|node| block.graph[*node].kind == OperatorKind::Dispatch);
    let experts = case.machine.stack.kernels.experts.as_ref();
    let time = |node| {
        // Tensor ranks send each their part of the tokens.
        let parted = TensorSplit { sequence_parallel: true, ..case.split };
        let bytes = BlockCase { split: parted, ..case }.bytes(block, node);
        let group = case.expert_group;
        let choices = block.graph[node].output.extent(DimName::Choice).map_or(1, |extent| extent.value(case.extents));
        let shares = match experts.is_some_and(|experts| experts.one_copy_per_domain) {
            true => group.shares_of_copies(choices),
            false => group.shares(),
        };
        exchange_time(Bytes(bytes as u64), shares, group, case.machine) * 2.0
    };
    routed.map(time).sum()
}

/// Bytes of an activation that is not split along the sequence; whole experts take each rank's part of it as it is.
fn whole_activation(block: &Block, node: NodeIndex, case: BlockCase) -> f64 {
    let routed = block.graph[node].output.extent(DimName::Choice).is_some();
    let parted = routed && case.split.expert_tensor_parallel < case.split.tensor_parallel;
    let gathered = TensorSplit { sequence_parallel: parted && case.split.sequence_parallel, ..case.split };
    BlockCase { split: gathered, ..case }.bytes(block, node)
}

/// Bytes of an activation as it is communicated.
fn message_bytes(block: &Block, node: NodeIndex, case: BlockCase) -> f64 {
    let choices = block.graph[node].output.extent(DimName::Choice).map_or(1, |extent| extent.value(case.extents));
    whole_activation(block, node, case) / choices as f64
}

/// The tensor that a dispatch copies, or the tensor itself.
fn before_dispatch(block: &Block, node: NodeIndex, case: BlockCase) -> NodeIndex {
    match block.graph[node].kind {
        OperatorKind::Dispatch => case.operands(node)[0],
        _ => node,
    }
}

/// Whether each rank has only a part of the sum that an operator computes.
fn is_partial(block: &Block, node: NodeIndex, operands: &[NodeIndex], case: BlockCase) -> bool {
    let split = |name: &DimName| case.split.ways(*name) > 1;
    match &block.graph[node].kind {
        OperatorKind::Contraction { over } | OperatorKind::GroupedContraction { over } => over.iter().any(split),
        OperatorKind::Lookup => case.split.splits(&block.graph[operands[1]].output),
        OperatorKind::ReduceMax(dim) | OperatorKind::ReduceSum(dim) => split(dim),
        OperatorKind::Pick => case.split.splits(&block.graph[operands[0]].output),
        _ => false,
    }
}

/// Whether an operator multiplies a replicated activation by a split parameter.
fn splits_its_input(block: &Block, node: NodeIndex, operands: &[NodeIndex], case: BlockCase) -> bool {
    let kind = &block.graph[node].kind;
    let product = matches!(kind, OperatorKind::Contraction { .. } | OperatorKind::GroupedContraction { .. });
    product
        && !case.split.splits(&block.graph[operands[0]].output)
        && case.split.splits(&block.graph[operands[1]].output)
}
