//! Exchanges of the context axis: what of them attention does not cover.

use hardware_profiles::stack::ContextExchange;
use ir::graph::{Block, OperatorKind};
use ir::units::{Bytes, Seconds};

use super::BlockCase;
use crate::collective::{CollectiveKind, collective_time, exchange_time};

/// Tensors that go round a ring in backward for each that does in forward: keys and values, and their gradients.
const RING_BACKWARD_TENSORS: f64 = 2.0;

/// Times of the context axis's exchange, forward and backward, that attention of the same pass does not cover.
///
/// A ring sends each rank's keys and values to all others beside the computation, and in backward their gradients with
/// them, which each rank adds to (NVIDIA/TransformerEngine, pytorch/attention context parallelism, AttnFuncWithCPAndKVP2P);
/// an all_to_all exchanges queries, keys, values and contexts, or the gradients of these, before and after it.
pub(super) fn context_exchange_times(block: &Block, case: BlockCase, attention: [Seconds; 2]) -> [Seconds; 2] {
    let ranks = case.split.context_parallel;
    if ranks == 1 {
        return [Seconds(0.0); 2];
    }
    let keys = block.graph.node_indices().filter(|node| block.graph[*node].kind == OperatorKind::AsKeys);
    let keys_and_values: f64 = keys.map(|node| case.bytes(block, node)).sum();
    let group = case.context_group;
    match case.machine.stack.overlap.context {
        ContextExchange::Ring => {
            let ring = |tensors: f64| {
                let whole = Bytes((tensors * keys_and_values * ranks as f64) as u64);
                collective_time(CollectiveKind::AllGather, whole, group, case.machine)
            };
            let [forward, backward] = attention;
            [ring(1.0) - forward, ring(RING_BACKWARD_TENSORS) - backward].map(|shown| shown.max(Seconds(0.0)))
        }
        ContextExchange::AllToAll => {
            let context = block.graph.node_indices().find(|node| block.graph[*node].name == "context");
            let queries = context.map_or(0.0, |node| case.bytes(block, node));
            let bytes = Bytes((2.0 * queries + keys_and_values) as u64);
            [exchange_time(bytes, group.shares(), group, case.machine); 2]
        }
    }
}

#[cfg(test)]
mod tests {
    use hardware_profiles::device::MatmulFormat;
    use hardware_profiles::{find_cluster, find_device, find_stack};
    use ir::graph::{Extents, build_graph};
    use ir::model::{DType, read_model};
    use ir::sharding::{TensorSplit, tensor_split};

    use super::*;
    use crate::block::block_structure;
    use crate::collective::Placement;
    use crate::machine::Machine;

    fn machine(exchange: ContextExchange) -> Machine {
        let cluster = find_cluster("dgx-a100-80gb", "test").expect("it is built in");
        let device = find_device(&cluster.device, "test").expect("it is built in");
        let mut stack = find_stack("megatron-core-2024", "test").expect("it is built in");
        stack.overlap.context = exchange;
        Machine { node_gpus: 8, matmul_format: MatmulFormat::Model, device, cluster, stack }
    }

    #[test]
    fn a_ring_carries_gradients_back_and_an_exchange_of_heads_is_the_same_both_ways() {
        let model = include_str!("../../../examples/gpt2-124m.ron");
        let model = read_model(model, "gpt2").expect("it is an example");
        let graph = build_graph(&model);
        let split = tensor_split(&model, 1, false).expect("one rank splits nothing");
        let group = Placement { size: 4, per_domain: 1, domains: 4 };
        for (exchange, backward_over_forward) in [(ContextExchange::Ring, 2.0), (ContextExchange::AllToAll, 1.0)] {
            let machine = machine(exchange);
            let case = BlockCase {
                split: TensorSplit { context_parallel: 4, ..split },
                tensor_group: Placement { size: 1, per_domain: 1, domains: 1 },
                context_group: group,
                expert_group: group,
                extents: Extents { micro_batch: 512, sequence_length: 1024 },
                dtype: DType::BF16,
                machine: &machine,
                structure: &block_structure(&graph.blocks[1], &machine),
            };
            let [forward, backward] = context_exchange_times(&graph.blocks[1], case, [Seconds(0.0); 2]);
            assert!((backward.0 / forward.0 / backward_over_forward - 1.0).abs() < 0.01, "{exchange:?}");
            let covered = [forward * 0.5, backward * 2.0];
            let [half, none] = context_exchange_times(&graph.blocks[1], case, covered);
            let expected =
                if exchange == ContextExchange::Ring { [forward * 0.5, Seconds(0.0)] } else { [forward, backward] };
            assert_eq!([half, none], expected, "attention of each pass covers a ring's exchange");
        }
    }
}
