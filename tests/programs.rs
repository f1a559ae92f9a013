//! Compiled programs of all ranks, interpreted, against the single-rank reference.
//!
//! `PROGRAMS=all cargo test --release --test programs` runs the whole matrix; otherwise a sample of it.

mod support;

use std::collections::BTreeMap;

use ir::graph::build_graph;
use ir::interpreter::{Degrees, Optimizer, Sizes, StepInput, World, degrees};
use ir::model::ModelSpec;
use ir::program::AttentionKernel;
use ir::reference::{
    AdamState, AdamW, Batch, Parameters, adamw_step, initial_parameters, loss, loss_and_gradients, random_batch,
};
use ir::strategy::{Recompute, ScheduleKind, Strategy, ZeroStage};
use planner::compile::{compile, not_executable};
use support::layout;
use support::small::{Family, SEQUENCE, Shape, small_model};

const OPTIMIZER: Optimizer =
    Optimizer { learning_rate: 1e-2, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, clip: 0.02 };

/// A layout of the matrix.
#[derive(Clone, Copy, Debug)]
struct Case {
    family: Family,
    tied: bool,
    heads: u64,
    key_value_heads: u64,
    layers: u64,
    vocabulary: u64,
    tensor: u64,
    pipeline: u64,
    data: u64,
    zero: ZeroStage,
    sequence_parallel: bool,
    recompute: Recompute,
    schedule: ScheduleKind,
    micro_batches: u64,
    attention: AttentionKernel,
}

fn model(case: &Case) -> ModelSpec {
    let Case { family, tied, heads, key_value_heads, layers, vocabulary, .. } = *case;
    small_model(Shape { family, tied, heads, key_value_heads, layers, vocabulary })
}

fn strategy(case: &Case) -> Strategy {
    let base = case.layers / case.pipeline;
    let more = case.layers % case.pipeline;
    Strategy {
        zero_stage: case.zero,
        schedule: case.schedule,
        recompute: case.recompute,
        sequence_parallel: case.sequence_parallel,
        layers_per_stage: (0..case.pipeline).map(|stage| base + u64::from(stage < more)).collect(),
        ..layout(case.tensor, case.pipeline, case.data, case.data * case.micro_batches)
    }
}

/// Largest |a − b| over a tensor, relative to the larger of its own and a thousandth of all gradients' size.
fn compare(found: &Parameters, expected: &Parameters, tolerance: f64, floor: f64, skip: &str) {
    for (key, expected) in expected.iter().filter(|(key, _)| skip.is_empty() || !key.contains(skip)) {
        let found = found.get(key).unwrap_or_else(|| panic!("{key} is missing"));
        // Rows that padding added come last and are zero in gradients.
        let scale = expected.iter().fold(0.0f64, |most, x| most.max(x.abs())).max(floor);
        let error = found.iter().zip(expected).fold(0.0f64, |most, (a, b)| most.max((a - b).abs()));
        assert!(error <= tolerance * scale, "{key}: {error:e} of {scale:e}");
    }
}

fn check(case: Case) {
    let model = model(&case);
    let strategy = strategy(&case);
    assert_eq!(not_executable(&model, &strategy), None);
    let program = compile(&model, &build_graph(&model), &strategy, case.attention);
    let degrees: Degrees = degrees(&model, case.data, case.tensor).expect("the degree splits the model");
    let sizes = Sizes { micro_batch: 1, sequence: SEQUENCE, degrees };
    let mut parameters = initial_parameters(&model, 7);
    let mut world = World::new(&program, sizes, &parameters).expect("the parameters fit");
    let mut state = AdamState::default();
    let reference = AdamW {
        learning_rate: OPTIMIZER.learning_rate,
        beta1: OPTIMIZER.beta1,
        beta2: OPTIMIZER.beta2,
        epsilon: OPTIMIZER.epsilon,
        weight_decay: OPTIMIZER.weight_decay,
        clip: OPTIMIZER.clip,
    };
    for micro_batches in [1, case.pipeline, case.pipeline + 1] {
        // One program serves every number of micro-batches, for training and for evaluation.
        let batch = random_batch(&model, (case.data * micro_batches) as usize, SEQUENCE, 11);
        let input = StepInput { tokens: &batch.tokens, targets: &batch.targets, micro_batches };
        let expected = loss(&model, &parameters, &batch, SEQUENCE);
        let found = world.evaluate(&input).unwrap_or_else(|error| panic!("{error}"));
        assert!((found / expected - 1.0).abs() < 1e-12, "evaluation {found} instead of {expected}");
        let mut other = World::new(&program, sizes, &parameters).expect("the parameters fit");
        let trained = other.step(&input, &OPTIMIZER).unwrap_or_else(|error| panic!("{error}"));
        assert!((trained.loss / expected - 1.0).abs() < 1e-12, "loss {} instead of {expected}", trained.loss);
    }
    for step in 0..3 {
        let sequences = (case.data * case.micro_batches) as usize;
        let batch: Batch = random_batch(&model, sequences, SEQUENCE, 100 + step);
        let (expected, gradients) = loss_and_gradients(&model, &parameters, &batch, SEQUENCE);
        let input = StepInput { tokens: &batch.tokens, targets: &batch.targets, micro_batches: case.micro_batches };
        let found = world.step(&input, &OPTIMIZER).unwrap_or_else(|error| panic!("{error}"));
        assert!((found.loss / expected - 1.0).abs() < 1e-12, "loss {} instead of {expected}", found.loss);
        let largest = gradients.values().flatten().fold(0.0f64, |most, x| most.max(x.abs()));
        if step == 0 {
            compare(&found.gradients, &gradients, 1e-12, 1e-3 * largest, "");
        }
        let norm = adamw_step(&reference, &mut state, &mut parameters, &gradients);
        assert!(norm > OPTIMIZER.clip, "clipping is active");
        assert!((found.gradient_norm / norm - 1.0).abs() < 1e-11, "norm {} instead of {norm}", found.gradient_norm);
    }
    let found: BTreeMap<String, Vec<f64>> = world.parameters().unwrap_or_else(|error| panic!("{error}"));
    // A key bias has no gradient but rounding, which AdamW turns into steps of full size.
    compare(&found, &parameters, 1e-10, 1e-10, "key.bias");
}

/// Share of the matrix that runs without `PROGRAMS=all`: one case in this many.
const SAMPLE: usize = 29;

/// The whole matrix. Micro-batch counts cycle through 1, p − 1, p, p + 1 and 2p.
fn matrix() -> Vec<Case> {
    let mut cases = Vec::new();
    for family in [Family::Gpt2, Family::Bloom, Family::Llama] {
        for tied in [true, false] {
            for (tensor, pipeline, data) in degrees_of_matrix() {
                for zero in ZeroStage::ALL {
                    for sequence_parallel in [false, true] {
                        for recompute in Recompute::ALL {
                            for schedule in [ScheduleKind::GPipe, ScheduleKind::OneForwardOneBackward] {
                                let counts =
                                    [1, pipeline.saturating_sub(1).max(1), pipeline, pipeline + 1, 2 * pipeline];
                                let number = cases.len();
                                cases.push(Case {
                                    family,
                                    tied,
                                    heads: if tensor == 4 { 12 } else { 6 },
                                    // Llama has fewer key-value heads than 4 tensor ranks.
                                    key_value_heads: match (family, tensor) {
                                        (Family::Llama, _) => 2,
                                        (_, 4) => 12,
                                        _ => 6,
                                    },
                                    layers: pipeline + (number / 7 % 2) as u64,
                                    vocabulary: if number.is_multiple_of(3) { 19 } else { 20 },
                                    tensor,
                                    pipeline,
                                    data,
                                    zero,
                                    sequence_parallel,
                                    recompute,
                                    schedule,
                                    micro_batches: counts[number % counts.len()],
                                    attention: match number % 11 {
                                        0..5 => AttentionKernel::Flash,
                                        _ => AttentionKernel::Primitive,
                                    },
                                });
                            }
                        }
                    }
                }
            }
        }
    }
    cases
}

fn degrees_of_matrix() -> Vec<(u64, u64, u64)> {
    let tensor_pipeline = [1, 2, 4].into_iter().flat_map(|t| (1..=4).map(move |p| (t, p)));
    tensor_pipeline.flat_map(|(t, p)| [1, 2, 4].map(|d| (t, p, d))).collect()
}

/// Checks cases on all cores; gives what failed.
fn failures_of(cases: &[Case]) -> Vec<String> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let check_share = |share: usize| -> Vec<String> {
        let cases = cases.iter().skip(share).step_by(threads);
        let failed = |case: &Case| {
            let error = std::panic::catch_unwind(|| check(*case)).err()?;
            Some(format!("{case:?}: {}", error.downcast_ref::<String>().map_or("panicked", String::as_str)))
        };
        cases.filter_map(failed).collect()
    };
    std::thread::scope(|scope| {
        let shares: Vec<_> = (0..threads).map(|share| scope.spawn(move || check_share(share))).collect();
        shares.into_iter().flat_map(|share| share.join().expect("failures are caught")).collect()
    })
}

#[test]
fn every_layout_equals_the_single_rank() {
    let all = std::env::var("PROGRAMS").is_ok_and(|value| value == "all");
    let cases = matrix();
    let step = if all { 1 } else { SAMPLE };
    let chosen: Vec<Case> = cases.iter().step_by(step).copied().collect();
    let failures = failures_of(&chosen);
    println!("{} of {} layouts", chosen.len(), cases.len());
    assert!(
        failures.is_empty(),
        "{} failures, first:\n{}",
        failures.len(),
        failures[..failures.len().min(3)].join("\n")
    );
}
