//! What software does once a step, and what of it a pipeline covers.

use hardware_profiles::device::MatmulFormat;
use hardware_profiles::stack::ShardedState;
use hardware_profiles::{find_cluster, find_device, find_stack};
use ir::graph::build_graph;
use ir::model::read_model;
use ir::sharding::split_of;

use super::*;

const LAYERS: u64 = 32;

fn machine(stack: &str, format: MatmulFormat) -> Machine {
    let cluster = find_cluster("dgx-h100", "test").expect("it is built in");
    let device = find_device(&cluster.device, "test").expect("it is built in");
    let stack = find_stack(stack, "test").expect("it is built in");
    Machine { node_gpus: 8, matmul_format: format, device, cluster, stack }
}

/// The data axis's time and the memory of gathered tensors, of Llama 3 8B on these stages.
fn data_time_and_gathered(machine: &Machine, strategy: &Strategy) -> (Seconds, Bytes) {
    let model = read_model(include_str!("../../../examples/llama-3.1-8b.ron"), "llama").expect("it is an example");
    let graph = build_graph(&model);
    let workload = Workload { sequence_length: 4096, global_batch: strategy.global_batch };
    let scenario = Scenario { model: &model, graph: &graph, workload, machine };
    let split = split_of(&model, strategy).expect("it splits");
    let blocks = costed_blocks(scenario, split, strategy.micro_batch);
    let times = block_times(scenario, &blocks, strategy);
    let parts = strategy.pipeline_parallel * strategy.virtual_stages;
    let part = |index: u64| {
        let mut content = StageContent { embedding: index == 0, head: index == parts - 1, ..StageContent::default() };
        content.layers[0] = LAYERS / parts;
        content
    };
    // Parts of a stage follow one another.
    let [stages, virtual_stages] = [strategy.pipeline_parallel, strategy.virtual_stages];
    let contents: Vec<StageContent> =
        (0..stages).flat_map(|stage| (0..virtual_stages).map(move |of| of * stages + stage)).map(part).collect();
    let predicted = predict_step(scenario, &blocks, &times, strategy, &contents);
    let memory = stage_memory_of(scenario, &blocks, strategy, &contents[..virtual_stages as usize], 0);
    (predicted.terms[&TimeTerm::DataCommunication], memory.gathered)
}

fn sharded(pipeline: u64) -> Strategy {
    Strategy { zero_stage: ZeroStage::Parameters, micro_batch: 1, ..Strategy::plain([1, pipeline, 16], 16 * 16) }
}

#[test]
fn shards_that_stay_whole_are_gathered_once_and_held() {
    let mut machine = machine("fsdp-compile-2024", MatmulFormat::Model);
    let of = |state, pipeline, machine: &mut Machine| {
        machine.stack.overlap.sharded_state = state;
        data_time_and_gathered(machine, &sharded(pipeline))
    };
    let each = of(ShardedState::EachMicroBatch, 2, &mut machine);
    let once = of(ShardedState::OncePerStepInPipelines, 2, &mut machine);
    assert!(once.0.0 < each.0.0 / 4.0 && once.0.0 > 0.0, "{once:?} {each:?}");
    // About 4 billion parameters on a stage, 2 bytes as weights and 4 as gradients.
    assert!(once.1.0 > 20_000_000_000 && each.1.0 < 10_000_000_000, "{once:?} {each:?}");
    let alone = of(ShardedState::EachMicroBatch, 1, &mut machine);
    assert_eq!(alone, of(ShardedState::OncePerStepInPipelines, 1, &mut machine), "without stages nothing changes");
    let deferred = of(ShardedState::ReducedOncePerStep, 1, &mut machine);
    assert!(deferred.0 < alone.0 && deferred.1 > alone.1, "gradients wait for the last micro-batch");
}

#[test]
fn converted_weights_are_gathered_in_half_the_time() {
    let time = |converted: bool| {
        let mut machine = machine("fsdp-compile-2024", MatmulFormat::Fp8);
        let stack = &mut machine.stack;
        stack.kernels.low_precision.as_mut().expect("it has fp8 products").gathers_converted = converted;
        stack.overlap.parameter_gather.value = 0.0;
        stack.overlap.copies_gathered = false;
        data_time_and_gathered(&machine, &sharded(1)).0
    };
    // Of two gathers and a scatter of twice their bytes, half of the gathers are saved: a quarter.
    assert!((time(true).0 / time(false).0 - 0.75).abs() < 0.06, "{:?} {:?}", time(true), time(false));
}

#[test]
fn updated_weights_are_gathered_beside_the_next_forward_pass() {
    let strategy = Strategy {
        zero_stage: ZeroStage::OptimizerState,
        micro_batch: 1,
        virtual_stages: 4,
        schedule: ScheduleKind::Interleaved,
        ..Strategy::plain([1, 4, 16], 16 * 16)
    };
    let time = |beside: bool| {
        let mut machine = machine("megatron-core-2024", MatmulFormat::Model);
        machine.stack.overlap.gathers_beside_forward = beside;
        data_time_and_gathered(&machine, &strategy).0
    };
    assert!(time(true) < time(false));
}
