//! The search against a brute force that shares only the estimate: same winner, same count.

mod support;

use std::process::Command;

use cost_models::machine::Machine;
use cost_models::offload::usable_host_memory;
use hardware_profiles::stack::{ContextExchange, RequestedChoice};
use ir::graph::build_graph;
use ir::mesh::MeshOrder;
use ir::model::{Attention, FeedForward, ModelSpec};
use ir::plan::TimeTerm;
use ir::strategy::{Recompute, ScheduleKind, Strategy, ZeroStage};
use ir::units::{BatchSize, Bytes, Seconds, SequenceLength};
use planner::request::{FixedChoices, Request, check_request};
use planner::search::{Outcome, Scored, score_layout, search, search_best};
use planner::watch::Watch;
use proptest::prelude::*;
use proptest::strategy::Strategy as Strategic;
use proptest::test_runner::{Config, TestRunner};
use support::{example, layout, machine, request};

/// Calls `each` with every layout of the stated space, as plain nested loops.
fn every_layout(request: &Request, mut each: impl FnMut(Strategy)) {
    let offers = &request.machine.stack.offers;
    let divide = |n: u64| (1..=n).filter(move |d| n.is_multiple_of(*d));
    let (gpus, batch, layers) = (request.gpus, request.workload.global_batch, request.model.num_layers);
    let experts = match request.model.feed_forward {
        FeedForward::MixtureOfExperts { num_experts, .. } if offers.expert_parallel.is_some() => num_experts,
        _ => 1,
    };
    let contexts = offers.context_parallel.is_some() && is_searched(request, RequestedChoice::ContextParallel);
    for tensor in divide(gpus).filter(|t| offers.tensor_parallel || *t == 1) {
        for pipeline in divide(gpus / tensor).filter(|p| offers.pipeline_parallel || *p == 1) {
            let parts = parts_of(request, pipeline, layers);
            for context in divide(gpus / tensor / pipeline).filter(|c| contexts || *c == 1) {
                let data = gpus / tensor / pipeline / context;
                let whole = experts > 1 && offers.searches_whole_experts();
                let spread = [false, true].into_iter().filter(|is_whole| !is_whole || whole && tensor > 1);
                let spread = spread.flat_map(|is_whole| {
                    let ranks = data * context * if is_whole { tensor } else { 1 };
                    divide(ranks).filter(|e| experts.is_multiple_of(*e)).map(move |expert| (is_whole, expert))
                });
                for (whole_experts, expert) in spread {
                    for &zero_stage in &offers.zero_stages {
                        let parted = offers.shard_groups.is_some() && zero_stage != ZeroStage::None;
                        for shard_group in divide(data).filter(|group| parted || *group == data) {
                            for micro_batch in divide(batch) {
                                for &(schedule, virtual_stages) in &parts {
                                    for (recompute, sequence_parallel, offload_optimizer, mesh_order) in
                                        switches(request)
                                    {
                                        each(Strategy {
                                            mesh_order,
                                            context_parallel: context,
                                            expert_parallel: expert,
                                            whole_experts,
                                            zero_stage,
                                            shard_group,
                                            micro_batch,
                                            schedule,
                                            virtual_stages,
                                            recompute,
                                            sequence_parallel,
                                            offload_optimizer,
                                            ..layout(tensor, pipeline, data, batch)
                                        });
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn is_searched(request: &Request, choice: RequestedChoice) -> bool {
    !request.machine.stack.offers.on_request.contains(&choice)
}

/// Recomputation, sequence parallelism, optimizer state in host memory and orders of the mesh, each with each.
fn switches(request: &Request) -> Vec<(Recompute, bool, bool, MeshOrder)> {
    let offers = &request.machine.stack.offers;
    let offloads = !offers.offload_zero_stages.is_empty()
        && request.machine.cluster.host.is_some()
        && is_searched(request, RequestedChoice::OffloadOptimizer);
    let mut all = Vec::new();
    for &recompute in &offers.recompute {
        for sequence_parallel in [false, true] {
            for offload_optimizer in [false, true] {
                for &mesh_order in &offers.mesh_orders {
                    if is_searched(request, RequestedChoice::Recompute(recompute))
                        && is_searched(request, RequestedChoice::MeshOrder(mesh_order))
                        && (!sequence_parallel || offers.sequence_parallel)
                        && (!offload_optimizer || offloads)
                    {
                        all.push((recompute, sequence_parallel, offload_optimizer, mesh_order));
                    }
                }
            }
        }
    }
    all
}

/// Schedules with parts a stage: one; interleaved as many as divide the layers of an equal stage; two for a V.
fn parts_of(request: &Request, pipeline: u64, layers: u64) -> Vec<(ScheduleKind, u64)> {
    let offers = &request.machine.stack.offers;
    let mut parts = Vec::new();
    for &schedule in offers.schedules.iter().filter(|kind| is_searched(request, RequestedChoice::Schedule(**kind))) {
        for count in 1..=layers {
            let filled = pipeline > 1
                && pipeline * count <= layers
                && (offers.uneven_stages || layers.is_multiple_of(pipeline * count));
            let open = match schedule {
                ScheduleKind::OneForwardOneBackward | ScheduleKind::GPipe | ScheduleKind::ZeroBubbleH1 => count == 1,
                ScheduleKind::Interleaved => count > 1 && filled && layers.div_ceil(pipeline).is_multiple_of(count),
                ScheduleKind::ZeroBubbleV => count == 2 && filled,
            };
            if open {
                parts.push((schedule, count));
            }
        }
    }
    parts
}

/// Whether a layout can run, memory and the tensor split apart.
fn can_run(request: &Request, strategy: &Strategy) -> bool {
    let offers = &request.machine.stack.offers;
    let Strategy { tensor_parallel, pipeline_parallel, data_parallel, context_parallel, .. } = *strategy;
    let per_round = strategy.micro_batch * data_parallel;
    let rounds = strategy.global_batch / per_round;
    let sequence = request.workload.sequence_length;
    // An all_to_all gives each context rank whole key-value heads, or copies of them where tensor ranks share them.
    let ring = request.machine.stack.overlap.context == ContextExchange::Ring;
    let heads = request.model.attention.num_key_value_heads().max(tensor_parallel);
    let groups = match strategy.schedule {
        ScheduleKind::Interleaved => pipeline_parallel,
        _ => 1,
    };
    strategy.global_batch.is_multiple_of(per_round)
        && (rounds < groups || rounds.is_multiple_of(groups))
        && (context_parallel == 1 || sequence.is_multiple_of(2 * context_parallel))
        && (context_parallel == 1 || ring || heads.is_multiple_of(tensor_parallel * context_parallel))
        && (!strategy.sequence_parallel || (sequence / context_parallel).is_multiple_of(tensor_parallel))
        && (pipeline_parallel == 1 || offers.pipeline_zero_stages.contains(&strategy.zero_stage))
        && (!strategy.whole_experts || strategy.sequence_parallel)
        && (!strategy.offload_optimizer || offers.offload_zero_stages.contains(&strategy.zero_stage))
        && (offers.uneven_stages || request.model.num_layers.is_multiple_of(pipeline_parallel))
        && pipeline_parallel <= request.model.num_layers
        && (strategy.mesh_order == MeshOrder::PipelineOutermost
            || context_parallel * strategy.expert_parallel == 1 && !strategy.whole_experts)
}

/// The best layout, the best that can be executed, and the number of all.
fn brute_force(request: &Request) -> (Option<Scored>, Option<Scored>, u64) {
    let graph = build_graph(&request.model);
    let (mut best, mut executable, mut count) = (None::<Scored>, None::<Scored>, 0);
    every_layout(request, |strategy| {
        count += 1;
        if !can_run(request, &strategy) {
            return;
        }
        let Some(scored) = score_layout(request, &graph, &strategy) else { return };
        let of_host = usable_host_memory(&request.machine);
        if scored.fullest_stage().1 > request.machine.usable_memory()
            || of_host.is_some_and(|usable| scored.host_memory > usable)
        {
            return;
        }
        let better = |other: &Option<Scored>| other.as_ref().is_none_or(|other| before(&scored, other));
        if planner::compile::not_executable(&request.model, &strategy).is_none() && better(&executable) {
            executable = Some(scored.clone());
        }
        if better(&best) {
            best = Some(scored);
        }
    });
    (best, executable, count)
}

fn before(a: &Scored, b: &Scored) -> bool {
    let key = |scored: &Scored| (scored.prediction.step.0, scored.fullest_stage().1);
    let (a_key, b_key) = (key(a), key(b));
    a_key.0 < b_key.0 || a_key.0 == b_key.0 && (a_key.1, &a.strategy) < (b_key.1, &b.strategy)
}

fn small_model(layers: u64, heads: u64, batch: u64, hidden_per_head: u64) -> ModelSpec {
    let mut model = example("llama-3.1-8b");
    model.name = "small".to_owned();
    model.published_parameters = None;
    model.num_layers = layers;
    model.hidden_size = heads * hidden_per_head;
    model.attention =
        Attention::MultiHead { num_attention_heads: heads, num_key_value_heads: Some(heads / 2), head_dim: None };
    model.sequence_length = Some(SequenceLength::Tokens(2048));
    model.global_batch = Some(BatchSize::Sequences(batch));
    model
}

/// The stack of the project with all that it plans on request.
const ALL_ON_REQUEST: &str = "planwright, all";

/// A machine with less memory, so that memory decides too, and as much in the hosts.
fn tight_machine(stack: &str, gib: u64, node_gpus: u64) -> Machine {
    let all = stack == ALL_ON_REQUEST;
    let mut machine = machine("dgx-a100-80gb", if all { "planwright" } else { stack }, node_gpus);
    machine.device.memory.value = Bytes(gib << 30);
    if let Some(host) = &mut machine.cluster.host {
        host.memory.value = Bytes(gib << 30);
    }
    if all {
        machine.stack.offers.on_request.clear();
    }
    machine
}

/// A mixture of experts with the same attention.
fn with_experts(mut model: ModelSpec, num_experts: u64) -> ModelSpec {
    model.feed_forward = FeedForward::MixtureOfExperts {
        num_experts,
        experts_per_token: 2,
        intermediate_size: model.hidden_size,
        num_shared_experts: 1,
        first_dense_layers: 1,
        dense_intermediate_size: Some(4 * model.hidden_size),
    };
    model
}

fn assert_counts(outcome: &Outcome, count: u64) -> Result<(), TestCaseError> {
    prop_assert_eq!(outcome.enumerated, count);
    let counted: u64 = outcome.pruned.values().chain(outcome.rejected.values()).sum();
    prop_assert_eq!(outcome.enumerated, outcome.feasible + counted);
    Ok(())
}

fn assert_equal_picks(request: &Request) -> Result<(), TestCaseError> {
    let outcome = search(request, &build_graph(&request.model));
    let (best, executable, count) = brute_force(request);
    assert_counts(&outcome, count)?;
    let key = |scored: &Scored| (scored.prediction.step.0, scored.fullest_stage().1, scored.strategy.clone());
    let found = outcome.best.first();
    prop_assert_eq!(found.map(key), best.as_ref().map(key));
    let found = outcome.executable.as_ref();
    let another = executable.filter(|scored| best.is_some_and(|best| best.strategy != scored.strategy));
    prop_assert_eq!(found.map(key), another.as_ref().map(key));
    Ok(())
}

/// Runs a property without a file of failures.
fn check<S: Strategic>(cases: u32, values: &S, property: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    TestRunner::new(config).run(values, property).expect("the property holds");
}

#[test]
fn the_search_finds_what_brute_force_finds() {
    let stacks = ["planwright", "megatron-deepspeed-2022", "fsdp-2023", "megatron-2021"];
    let heads = prop::sample::select(vec![4u64, 6, 8, 12]);
    let batch = prop::sample::select(vec![8u64, 12, 20]);
    let values = (1u64..14, heads, batch, 1u64..3, 4u64..24, prop::sample::select(stacks.to_vec()));
    check(140, &values, |(layers, heads, batch, nodes, gib, stack)| {
        let mut model = small_model(layers, heads, batch, 64);
        if stack == "megatron-deepspeed-2022" {
            model.dtype = ir::model::DType::FP16;
        }
        assert_equal_picks(&request(model, tight_machine(stack, gib, 8), nodes * 8, FixedChoices::default()))
    });
}

#[test]
fn so_it_does_with_contexts_experts_and_interleaved_stages() {
    let stacks = ["megatron-core-2025", "megatron-core-plain", "deepspeed-zero", "planwright", ALL_ON_REQUEST];
    let gpus = prop::sample::select(vec![2u64, 4, 6, 8]);
    let batch = prop::sample::select(vec![4u64, 6, 8]);
    let experts = prop::sample::select(vec![0u64, 0, 4, 6]);
    let values = (2u64..9, gpus, batch, experts, 3u64..16, prop::sample::select(stacks.to_vec()));
    check(120, &values, |(layers, gpus, batch, experts, gib, stack)| {
        let mut model = small_model(layers, 8, batch, 64);
        model.sequence_length = Some(SequenceLength::Tokens(4096));
        if experts > 0 {
            model = with_experts(model, experts);
        }
        assert_equal_picks(&request(model, tight_machine(stack, gib, 2), gpus, FixedChoices::default()))
    });
}

#[test]
fn counts_are_those_of_plain_loops() {
    let cases = [
        ("bloom", "dgx-a100-80gb", "planwright", 384),
        ("gpt3-175b", "dgx-h100", "megatron-core-2025", 96),
        ("mixtral-8x7b", "dgx-h100", "megatron-core-2025", 120),
        ("llama-2-7b", "dgx-a100-40gb", "fsdp-2023", 72),
    ];
    for (model, cluster, stack, gpus) in cases {
        let request = request(example(model), machine(cluster, stack, 8), gpus, FixedChoices::default());
        let mut count = 0;
        every_layout(&request, |_| count += 1);
        let outcome = search(&request, &build_graph(&request.model));
        assert_counts(&outcome, count).unwrap_or_else(|error| panic!("{model} on {gpus}: {error}"));
    }
}

#[test]
fn runners_up_are_sorted_and_distinct() {
    let request =
        request(example("llama-2-7b"), machine("dgx-a100-80gb", "planwright", 8), 64, FixedChoices::default());
    let outcome = search(&request, &build_graph(&request.model));
    assert_eq!(outcome.best.len(), 10);
    for pair in outcome.best.windows(2) {
        assert!(before(&pair[0], &pair[1]), "{:?} {:?}", pair[0].strategy, pair[1].strategy);
    }
}

#[test]
fn a_fixed_choice_is_never_faster_than_the_free_optimum() {
    let free = request(
        example("bloom"),
        machine("jean-zay-a100-80gb", "megatron-deepspeed-2022", 8),
        384,
        FixedChoices::default(),
    );
    let graph = build_graph(&free.model);
    let optimum = search(&free, &graph).best.remove(0);
    for tensor in [1, 2, 4, 8, 16] {
        let fixed = FixedChoices { tensor_parallel: Some(tensor), ..FixedChoices::default() };
        let case = Request { fixed, ..free.clone() };
        for scored in search(&case, &graph).best {
            assert_eq!(scored.strategy.tensor_parallel, tensor);
            assert!(scored.prediction.step.0 >= optimum.prediction.step.0);
        }
    }
}

/// The machine with half as much memory more, and with links twice and network cards four times as fast.
fn better_machines(machine: &Machine) -> [(&'static str, Machine); 3] {
    let better = |name, change: fn(&mut Machine)| {
        let mut better = machine.clone();
        change(&mut better);
        (name, better)
    };
    [
        better("memory", |machine| machine.device.memory.value = Bytes(machine.device.memory.value.0 * 3 / 2)),
        better("links", |machine| {
            let links = &mut machine.cluster.intra.bandwidth_per_gpu_per_direction.value;
            *links = *links * 2.0;
        }),
        better("cards", |machine| {
            let cards = &mut machine.cluster.inter.bandwidth_per_nic_per_direction.value;
            *cards = *cards * 4.0;
        }),
    ]
}

#[test]
fn more_memory_and_faster_links_never_slow_the_optimum() {
    let stacks = ["planwright", "megatron-core-2025", "megatron-2021", "fsdp-2023", "deepspeed-zero"];
    let heads = prop::sample::select(vec![4u64, 8, 12]);
    let experts = prop::sample::select(vec![0u64, 0, 4]);
    let values = (1u64..14, heads, 1u64..4, experts, 4u64..24, prop::sample::select(stacks.to_vec()));
    check(80, &values, |(layers, heads, nodes, experts, gib, stack)| {
        let model = small_model(layers, heads, 24, 64);
        let model = if experts > 0 { with_experts(model, experts) } else { model };
        let graph = build_graph(&model);
        let optimum = |machine: &Machine| {
            let request = request(model.clone(), machine.clone(), nodes * 4, FixedChoices::default());
            let outcome = search_best(&Request { top: 1, ..request }, &graph, &Watch::default());
            outcome.best.first().map(|best| best.prediction.step.0)
        };
        let machine = tight_machine(stack, gib, 4);
        let Some(step) = optimum(&machine) else { return Ok(()) };
        for (name, better) in better_machines(&machine) {
            let faster = optimum(&better).expect("what fitted still fits");
            prop_assert!(faster <= step * (1.0 + 1e-12), "more or faster {}: {} after {}", name, faster, step);
        }
        Ok(())
    });
}

#[test]
fn stages_as_neighbours_send_faster_and_replicas_sum_slower() {
    let machine = machine("dgx-h100", "megatron-core-2025", 8);
    let request = request(example("llama-3.1-8b"), machine, 64, FixedChoices::default());
    let graph = build_graph(&request.model);
    let seconds = |tensor: u64, mesh_order: MeshOrder| {
        let plain = layout(tensor, 4, 16 / tensor, request.workload.global_batch);
        let scored = score_layout(&request, &graph, &Strategy { mesh_order, ..plain }).expect("it can be split");
        let term = |term| scored.prediction.terms.get(&term).map_or(0.0, |time| time.0);
        [term(TimeTerm::PipelineCommunication) + term(TimeTerm::Bubble), term(TimeTerm::DataCommunication)]
    };
    let [usual, turned] = MeshOrder::ALL.map(|order| seconds(2, order));
    assert!(turned[0] < usual[0] && turned[1] > usual[1], "a replica fills a node: {usual:?} and {turned:?}");
    let [usual, turned] = MeshOrder::ALL.map(|order| seconds(4, order));
    assert!(turned[0] == usual[0] && turned[1] > usual[1], "a replica is wider than a node: {usual:?} and {turned:?}");
}

#[test]
fn whole_experts_are_as_much_as_shared_ones_on_as_many_ranks() {
    let machine = machine("dgx-h100", "megatron-core-2025", 8);
    let request = request(example("mixtral-8x7b"), machine, 64, FixedChoices::default());
    let graph = build_graph(&request.model);
    let score = |expert_parallel: u64, whole_experts: bool| {
        let plain = layout(2, 1, 32, request.workload.global_batch);
        let strategy = Strategy {
            expert_parallel,
            whole_experts,
            sequence_parallel: true,
            zero_stage: ZeroStage::OptimizerState,
            ..plain
        };
        score_layout(&request, &graph, &strategy).expect("it can be split")
    };
    // Two experts in halves, or one whole.
    let [shared, whole] = [score(4, false), score(8, true)];
    assert_eq!(shared.memory[0].state, whole.memory[0].state);
    assert!(shared.memory[0].activations >= whole.memory[0].activations);
    let term = |scored: &Scored, term| scored.prediction.terms.get(&term).map_or(0.0, |time: &Seconds| time.0);
    let [gathered, routed] = [&shared, &whole].map(|scored| term(scored, TimeTerm::TensorCommunication));
    assert!(routed < gathered, "no tokens are gathered for whole experts: {routed} against {gathered}");
}

#[test]
fn the_order_of_what_a_stack_offers_changes_nothing() {
    let model = with_experts(small_model(8, 8, 24, 64), 4);
    let straight = request(model, tight_machine("megatron-core-2025", 8, 8), 24, FixedChoices::default());
    let mut turned = straight.clone();
    let offers = &mut turned.machine.stack.offers;
    offers.zero_stages.reverse();
    offers.recompute.reverse();
    offers.schedules.reverse();
    offers.mesh_orders.reverse();
    let graph = build_graph(&straight.model);
    let [straight, turned] = [straight, turned].map(|request| search(&request, &graph));
    assert_eq!(straight.enumerated, turned.enumerated);
    let strategies = |outcome: &Outcome| -> Vec<Strategy> { outcome.best.iter().map(|s| s.strategy.clone()).collect() };
    assert_eq!(strategies(&straight), strategies(&turned));
}

/// Choices that fix a whole layout, drawn at random for BLOOM on 384 GPUs.
fn fixed_layouts() -> impl Strategic<Value = FixedChoices> {
    let tensor = prop::sample::select(vec![1u64, 2, 4, 8, 16]);
    let pipeline = prop::sample::select(vec![1u64, 2, 3, 4, 6, 8, 12, 24]);
    let context = prop::sample::select(vec![1u64, 1, 2, 4]);
    let zero = prop::sample::select(vec![ZeroStage::None, ZeroStage::OptimizerState]);
    let micro_batch = prop::sample::select(vec![1u64, 2, 4, 8]);
    let parts = prop::sample::select(vec![1u64, 1, 5, 7]);
    let values = (
        tensor,
        pipeline,
        context,
        zero,
        micro_batch,
        parts,
        prop::sample::select([Recompute::ALL.to_vec(), vec![Recompute::Partial]].concat()),
        any::<(bool, bool)>(),
        prop::sample::select(MeshOrder::ALL.to_vec()),
    );
    values.prop_map(
        |(tensor, pipeline, context, zero, micro_batch, parts, recompute, (along_sequence, offload), mesh_order)| {
            FixedChoices {
                tensor_parallel: Some(tensor),
                pipeline_parallel: Some(pipeline),
                data_parallel: Some(384 / (tensor * pipeline * context).min(384)),
                context_parallel: Some(context),
                expert_parallel: Some(1),
                expert_tensor_parallel: None,
                zero_stage: Some(zero),
                micro_batch: Some(micro_batch),
                recompute: Some(recompute),
                virtual_stages: Some(parts),
                schedule: Some(if parts == 1 {
                    ScheduleKind::OneForwardOneBackward
                } else {
                    ScheduleKind::Interleaved
                }),
                sequence_parallel: Some(along_sequence),
                offload_optimizer: Some(offload),
                mesh_order: Some(mesh_order),
            }
        },
    )
}

#[test]
fn no_fixed_layout_is_better_than_the_free_optimum() {
    let machine = machine("dgx-a100-80gb", "megatron-core-2025", 8);
    let free = Request { top: 1, ..request(example("bloom"), machine, 384, FixedChoices::default()) };
    let graph = build_graph(&free.model);
    let optimum = search(&free, &graph).best.remove(0).prediction.step.0;
    let shown = std::cell::Cell::new(0u64);
    check(1000, &fixed_layouts(), |fixed| {
        let case = Request { fixed, ..free.clone() };
        if check_request(&case).is_err() {
            return Ok(());
        }
        let found = search(&case, &graph);
        let step = found.best.first().map(|scored| scored.prediction.step.0);
        prop_assert!(step.is_none_or(|step| step >= optimum), "{fixed:?}: {step:?} is below {optimum}");
        if step.is_some() && shown.replace(shown.get() + 1).is_multiple_of(40) {
            prop_assert_eq!(step_by_command(&fixed), step);
        }
        Ok(())
    });
    assert!(shown.get() >= 40, "only {} layouts fit", shown.get());
}

/// The step that the command line predicts for a fixed layout of BLOOM.
fn step_by_command(fixed: &FixedChoices) -> Option<f64> {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/bloom.ron");
    let given = format!("--model {model} --gpus 384 --node-gpus 8 --stack megatron-core-2025 --dry-run --json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_plan"));
    command.args(given.split(' '));
    fixed.flags().iter().for_each(|flag| {
        command.args(flag.split(' '));
    });
    let output = command.output().expect("plan starts");
    // Read as text: numbers that serde_json reads may be off by their last bit.
    let text = String::from_utf8(output.stdout).expect("JSON is text");
    let (_, estimate) = text.split_once("\"estimate\"")?;
    let (_, number) = estimate.split_once("\"step_seconds\":")?;
    number.split([',', '}', '\n']).next()?.trim().parse().ok()
}

#[test]
fn what_is_planned_on_request_is_not_executable_and_says_why() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/tiny.ron");
    let rows = [
        ("--context-parallel 2", "/strategy/context_parallel", serde_json::json!(2)),
        ("--pipeline-parallel 2 --virtual-stages 2", "/strategy/virtual_stages", serde_json::json!(2)),
        ("--pipeline-parallel 2 --schedule zb-h1", "/strategy/schedule", serde_json::json!("zb-h1")),
        ("--recompute partial", "/strategy/recompute", serde_json::json!("partial")),
        ("--offload-optimizer on", "/strategy/offload_optimizer", serde_json::json!(true)),
    ];
    for (flags, field, expected) in rows {
        let given = format!("--model {model} --gpus 4 --node-gpus 4 --dry-run --json {flags}");
        let output = Command::new(env!("CARGO_BIN_EXE_plan")).args(given.split(' ')).output().expect("plan starts");
        assert!(output.status.success(), "{flags}: {}", String::from_utf8_lossy(&output.stdout));
        let value: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        assert_eq!(value.pointer(field), Some(&expected), "{flags}");
        assert_eq!(value.pointer("/strategy/executable"), Some(&serde_json::json!(false)), "{flags}");
        assert!(value.pointer("/strategy/reason").is_some_and(serde_json::Value::is_string), "{flags}");
        let output = Command::new(env!("CARGO_BIN_EXE_plan")).args(given.split(' ')).arg("--executable").output();
        assert_eq!(output.expect("plan starts").status.code(), Some(1), "{flags}: nothing executable is left");
    }
}
