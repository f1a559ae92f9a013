//! The search against a brute force that shares only the estimate: same winner, same count.

mod support;

use cost_models::machine::Machine;
use ir::graph::build_graph;
use ir::model::{Attention, ModelSpec};
use ir::strategy::{Recompute, Strategy, ZeroStage};
use ir::units::{BatchSize, Bytes, SequenceLength};
use planner::request::{FixedChoices, Request};
use planner::search::{Scored, score_layout, search};
use proptest::prelude::*;
use support::{example, layout, machine, request};

/// Every layout of the space as plain nested loops, with its own statement of the rules.
fn brute_force(request: &Request) -> (Option<Scored>, u64) {
    let graph = build_graph(&request.model);
    let offers = &request.machine.stack.offers;
    let (gpus, batch) = (request.gpus, request.workload.global_batch);
    let mut best: Option<Scored> = None;
    let mut count = 0;
    for tensor in (1..=gpus).filter(|t| gpus % t == 0) {
        for pipeline in (1..=gpus / tensor).filter(|p| (gpus / tensor) % p == 0) {
            let data = gpus / tensor / pipeline;
            for micro_batch in (1..=batch).filter(|size| batch % size == 0) {
                for zero in 0..=3u8 {
                    for recompute in Recompute::ALL {
                        for sequence_parallel in [false, true] {
                            let zero_stage = ZeroStage::try_from(zero).expect("0 to 3 are stages");
                            let offered = offers.zero_stages.contains(&zero_stage)
                                && offers.recompute.contains(&recompute)
                                && (offers.sequence_parallel || !sequence_parallel)
                                && (offers.tensor_parallel || tensor == 1)
                                && (offers.pipeline_parallel || pipeline == 1);
                            if !offered {
                                continue;
                            }
                            count += 1;
                            let strategy = Strategy {
                                zero_stage,
                                micro_batch,
                                recompute,
                                sequence_parallel,
                                ..layout(tensor, pipeline, data, batch)
                            };
                            let whole = batch % (micro_batch * data) == 0
                                && (!sequence_parallel || request.workload.sequence_length.is_multiple_of(tensor))
                                && (pipeline == 1 || offers.pipeline_zero_stages.contains(&zero_stage))
                                && (offers.uneven_stages || request.model.num_layers.is_multiple_of(pipeline));
                            if !whole {
                                continue;
                            }
                            let Some(scored) = score_layout(request, &graph, &strategy) else { continue };
                            let fits = scored.fullest_stage().1 <= request.machine.usable_memory();
                            if fits && best.as_ref().is_none_or(|best| before(&scored, best)) {
                                best = Some(scored);
                            }
                        }
                    }
                }
            }
        }
    }
    (best, count)
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

/// A machine with less memory, so that memory decides too.
fn tight_machine(stack: &str, gib: u64) -> Machine {
    let mut machine = machine("dgx-a100-80gb", stack, 8);
    machine.device.memory.value = Bytes(gib << 30);
    machine
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn the_search_finds_what_brute_force_finds(
        layers in 1u64..20,
        heads in prop::sample::select(vec![4u64, 6, 8, 12]),
        batch in prop::sample::select(vec![8u64, 12, 32, 48, 60]),
        width in prop::sample::select(vec![64u64, 128]),
        nodes in 1u64..4,
        gib in 6u64..30,
        stack in prop::sample::select(vec!["planwright", "megatron-deepspeed-2022", "fsdp-2023", "megatron-2021"]),
    ) {
        let mut model = small_model(layers, heads, batch, width);
        if stack == "megatron-deepspeed-2022" {
            model.dtype = ir::model::DType::FP16;
        }
        let request = request(model, tight_machine(stack, gib), nodes * 8, FixedChoices::default());
        let outcome = search(&request, &build_graph(&request.model));
        let (best, count) = brute_force(&request);
        prop_assert_eq!(outcome.enumerated, count);
        let counted: u64 = outcome.pruned.values().chain(outcome.rejected.values()).sum();
        prop_assert_eq!(outcome.enumerated, outcome.feasible + counted);
        let found = outcome.best.first();
        prop_assert_eq!(found.is_some(), best.is_some());
        if let (Some(found), Some(best)) = (found, &best) {
            prop_assert_eq!(found.prediction.step.0, best.prediction.step.0, "{:?} {:?}", found.strategy, best.strategy);
            prop_assert_eq!(&found.strategy, &best.strategy);
        }
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

#[test]
fn more_memory_and_faster_links_never_slow_the_optimum() {
    let base = machine("jean-zay-a100-80gb", "planwright", 8);
    let optimum = |machine: &Machine| {
        let request = request(example("bloom"), machine.clone(), 384, FixedChoices::default());
        search(&request, &build_graph(&request.model)).best.first().map(|best| best.prediction.step.0)
    };
    let mut bigger = base.clone();
    bigger.device.memory.value = Bytes(160 << 30);
    let mut faster = base.clone();
    faster.cluster.inter.bandwidth_per_nic_per_direction.value =
        faster.cluster.inter.bandwidth_per_nic_per_direction.value * 4.0;
    let [base, bigger, faster] = [base, bigger, faster].map(|machine| optimum(&machine).expect("a layout fits"));
    assert!(bigger <= base && faster <= base, "{base} {bigger} {faster}");
}
