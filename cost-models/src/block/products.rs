//! Matrix products of a block: their shapes on one rank and their times.

use hardware_profiles::device::MatmulFormat;
use ir::graph::{Block, BlockRole, Dim, DimName, OperatorKind};
use ir::sharding::TensorSplit;
use ir::units::Seconds;
use petgraph::graph::NodeIndex;

use super::BlockCase;
use crate::matmul::{MatmulShape, matmul_time};

/// Bytes moved to convert an element of a grouped product's operand, which no kernel before it does: read in the model's
/// format, written, and read and written once more for the transposed copy (NVIDIA/TransformerEngine,
/// pytorch/module/grouped_linear.py).
const UNFUSED_CONVERSION_BYTES: f64 = 5.0;

/// Times of a product, and of the products for the gradients of its left and its right operand.
pub fn product_times(product: &Product, case: BlockCase) -> [Seconds; 3] {
    let time = |shape| matmul_time(shape, product.format, case.dtype, case.machine);
    let shape = product.shape;
    let experts = case.machine.stack.kernels.experts.as_ref().filter(|_| product.grouped);
    let slower = experts.map_or(1.0, |experts| 1.0 / experts.grouped_speed.value);
    let times = [shape, shape.left_gradient(), shape.right_gradient()].map(|shape| time(shape) * slower);
    let low = case.machine.stack.kernels.low_precision.as_ref().filter(|_| product.format != MatmulFormat::Model);
    let Some(low) = low else { return times };
    // Weights are converted once a step, but where every use gathers them.
    let alone = if experts.is_some() { UNFUSED_CONVERSION_BYTES } else { 0.0 };
    let conversion =
        |elements: f64, bytes: f64| Seconds(shape.batch * elements * bytes / case.machine.streaming_bandwidth().0);
    let each = low.conversion_bytes.value;
    let [forward, left, right] = times;
    let converted = conversion(shape.m * shape.k, each + alone) + conversion(shape.k * shape.n, each);
    [forward + converted, left + conversion(shape.m * shape.n, each + alone), right]
}

/// Kernels that convert one operand to a format with one scale: its largest element, the scale, and the conversion
/// (NVIDIA/TransformerEngine, pytorch/csrc/quantizer.cpp, Float8CurrentScalingQuantizer).
const CONVERSIONS_OF_ONE_SCALE: u64 = 3;
/// Kernels that convert one operand to a format whose blocks have scales of their own.
const CONVERSIONS_OF_BLOCK_SCALES: u64 = 1;

/// Kernels that the host issues for a product in forward, and for both gradients in backward.
///
/// A grouped one is a product of each expert (NVIDIA/TransformerEngine, pytorch/cpp_extensions/gemm.py,
/// general_grouped_gemm, over several cuBLAS streams), whose tokens, and in backward their gradients, are converted
/// expert by expert too where products are in a format below the model's (NVIDIA/TransformerEngine, pull request 1525).
/// Devices that multiply 4-bit floats take scales of blocks; others need one for each operand.
pub fn launches(product: &Product, case: BlockCase) -> [u64; 2] {
    let grouped = product.grouped && case.machine.stack.kernels.experts.is_some();
    if !grouped {
        return [1, 2];
    }
    let conversions = match (product.format, &case.machine.device.peak.fp4) {
        (MatmulFormat::Model, _) => 0,
        (_, Some(_)) => CONVERSIONS_OF_BLOCK_SCALES,
        (_, None) => CONVERSIONS_OF_ONE_SCALE,
    };
    [1, 2].map(|products| product.shape.batch as u64 * (products + conversions))
}

/// A matrix product, or several of one input that are computed as one.
pub struct Product {
    /// The first of those that are joined.
    pub node: NodeIndex,
    /// Its shape on one rank.
    pub shape: MatmulShape,
    format: MatmulFormat,
    grouped: bool,
    /// Whether the right operand is a parameter.
    pub weights: bool,
    /// Whether it belongs to the attention core.
    pub attention_core: bool,
}

/// Matrix products of a block; projections of one input are joined where the stack joins them.
pub fn products(block: &Block, case: BlockCase) -> Vec<Product> {
    let joint = case.machine.stack.kernels.joint_projections;
    // Projections of one input whose results the tensor axis can split, whether or not it does.
    let divided = TensorSplit { tensor_parallel: 2, key_value_ways: 2, expert_tensor_parallel: 2, ..case.split };
    let mut products: Vec<(Option<NodeIndex>, Product)> = Vec::new();
    for node in block.graph.node_indices() {
        let Some(shape) = product_shape(block, node, case) else { continue };
        let operator = &block.graph[node];
        let operands = case.operands(node);
        let joinable = joint && divided.splits(&operator.output) && block.graph[operands[1]].is_parameter();
        let input = joinable.then_some(operands[0]);
        match products.iter_mut().find(|(seen, _)| seen.is_some() && *seen == input) {
            Some((_, product)) => product.shape.n += shape.n,
            None => {
                let weights = block.graph[operands[1]].is_parameter();
                let in_layer = weights && matches!(block.role, BlockRole::Layers(_));
                let format = if in_layer { case.machine.matmul_format } else { MatmulFormat::Model };
                let grouped = matches!(operator.kind, OperatorKind::GroupedContraction { .. });
                let attention_core = operator.attention_core;
                products.push((input, Product { node, shape, format, grouped, weights, attention_core }));
            }
        }
    }
    products.into_iter().map(|(_, product)| product).collect()
}

/// The matrix product that an operator is on one rank, or `None` if it is no contraction.
fn product_shape(block: &Block, node: NodeIndex, case: BlockCase) -> Option<MatmulShape> {
    let (over, grouped) = match &block.graph[node].kind {
        OperatorKind::Contraction { over } => (over, false),
        OperatorKind::GroupedContraction { over } => (over, true),
        _ => return None,
    };
    let operands = case.operands(node);
    let [left, right] = [&block.graph[operands[0]].output, &block.graph[operands[1]].output];
    let has = |dims: &[Dim], name: DimName| dims.iter().any(|dim| dim.name == name);
    let size = |dims: &mut dyn Iterator<Item = &Dim>| -> f64 {
        dims.map(|dim| case.split.local_extent(*dim, case.extents) as f64).product()
    };
    let mut shape = MatmulShape {
        batch: size(&mut left.shape.iter().filter(|d| has(&right.shape, d.name) && !over.contains(&d.name))),
        m: size(&mut left.shape.iter().filter(|d| !has(&right.shape, d.name))),
        n: size(&mut right.shape.iter().filter(|d| !has(&left.shape, d.name) && d.name != DimName::Expert)),
        k: size(&mut left.shape.iter().filter(|d| over.contains(&d.name))),
    };
    if grouped {
        let expert = right.shape.iter().find(|dim| dim.name == DimName::Expert);
        let experts = expert.map_or(1.0, |dim| case.split.local_extent(*dim, case.extents) as f64);
        shape.batch = experts;
        shape.m /= experts;
    }
    let whole = !case.split.splits(left) && !case.split.splits(right);
    if case.split.sequence_parallel && whole {
        shape.m /= case.split.tensor_parallel as f64;
    }
    Some(shape)
}

#[cfg(test)]
mod tests {
    use hardware_profiles::{find_cluster, find_device, find_stack};
    use ir::graph::{Extents, build_graph};
    use ir::model::{DType, read_model};
    use ir::sharding::tensor_split;

    use super::*;
    use crate::block::{block_cost, block_structure};
    use crate::collective::Placement;
    use crate::machine::Machine;

    /// Kernels of both passes of a layer of Mixtral.
    fn kernels(cluster: &str, matmul_format: MatmulFormat) -> [u64; 2] {
        let model =
            read_model(include_str!("../../../examples/mixtral-8x7b.ron"), "mixtral").expect("it is an example");
        let graph = build_graph(&model);
        let cluster = find_cluster(cluster, "test").expect("it is built in");
        let device = find_device(&cluster.device, "test").expect("it is built in");
        let stack = find_stack("megatron-core-2025", "test").expect("it is built in");
        let machine = Machine { node_gpus: 8, matmul_format, device, cluster, stack };
        let alone = Placement { size: 1, per_domain: 1, domains: 1 };
        let case = BlockCase {
            split: tensor_split(&model, 1, false).expect("one rank splits nothing"),
            tensor_group: alone,
            context_group: alone,
            expert_group: alone,
            extents: Extents { micro_batch: 1, sequence_length: 4096 },
            dtype: DType::BF16,
            machine: &machine,
            structure: &block_structure(&graph.blocks[1], &machine),
        };
        let cost = block_cost(&graph.blocks[1], case);
        [cost.forward_kernels, cost.backward_kernels]
    }

    #[test]
    fn tokens_of_each_expert_are_converted_apart() {
        let added = |cluster| {
            let [plain, converted] = [MatmulFormat::Model, MatmulFormat::Fp8].map(|format| kernels(cluster, format));
            [0, 1].map(|pass| converted[pass] - plain[pass])
        };
        // Two grouped products, of which that for gate and up is one, over 8 experts.
        assert_eq!(added("dgx-h100"), [2 * 8 * 3; 2]);
        assert_eq!(added("dgx-b200"), [2 * 8; 2]);
    }
}
