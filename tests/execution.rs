//! Programs executed by ranks: every layout gives the single rank's numbers, sends the bytes that the plan says
//! and holds the memory that the plan says.
//!
//! A sample of the layouts runs by default; all of them with `LAYOUTS=all`.

#[path = "support/ranks.rs"]
mod ranks;
mod support;

use std::collections::BTreeMap;

use ir::model::{DType, FeedForward, ModelSpec, Workload};
use ir::plan::Plan;
use ir::strategy::{Recompute, ScheduleKind, ZeroStage};
use ir::units::SequenceLength;
use planner::request::FixedChoices;
use ranks::{OPTIMIZER, RankRun, Run, execute, interpret, joined, planned, sent};
use support::plans::fixed_plan;
use support::small::{Family, SEQUENCE, Shape, small_model};

/// Largest relative difference of a loss.
const LOSS_TOLERANCE: f64 = 1e-6;
/// Largest relative difference of a gradient norm.
const NORM_TOLERANCE: f64 = 1e-5;
/// Largest relative difference of a rank's most bytes of live tensors.
const MEMORY_TOLERANCE: f64 = 0.02;
/// Layouts of which one is run by default.
const SAMPLE: usize = 12;

const SHAPES: [Shape; 4] = [
    Shape { family: Family::Gpt2, tied: true, heads: 4, key_value_heads: 4, layers: 3, vocabulary: 19 },
    Shape { family: Family::Gpt2, tied: false, heads: 6, key_value_heads: 6, layers: 3, vocabulary: 20 },
    Shape { family: Family::Bloom, tied: true, heads: 6, key_value_heads: 6, layers: 3, vocabulary: 21 },
    Shape { family: Family::Llama, tied: false, heads: 4, key_value_heads: 2, layers: 4, vocabulary: 20 },
];

fn workload() -> Workload {
    Workload { sequence_length: SEQUENCE as u64, global_batch: 8 }
}

fn close(found: f64, expected: f64, tolerance: f64) -> bool {
    (found - expected).abs() <= tolerance * expected.abs()
}

/// Every layout of up to eight ranks, with a name.
fn layouts() -> Vec<(String, Shape, FixedChoices)> {
    let mut layouts = Vec::new();
    let meshes =
        [1, 2, 4].into_iter().flat_map(|t| [1, 2, 3].map(|p| (t, p))).flat_map(|(t, p)| [1, 2].map(|d| (t, p, d)));
    for (tensor, pipeline, data) in meshes.filter(|(t, p, d)| t * p * d <= 8) {
        for shape in SHAPES.into_iter().filter(|shape| shape.heads.is_multiple_of(tensor)) {
            for zero_stage in ZeroStage::ALL.into_iter().filter(|stage| data > 1 || *stage == ZeroStage::None) {
                for recompute in [Recompute::None, Recompute::Full] {
                    for schedule in [ScheduleKind::OneForwardOneBackward, ScheduleKind::GPipe] {
                        for sequence_parallel in [false, true].into_iter().filter(|on| tensor > 1 || !on) {
                            if pipeline == 1 && schedule == ScheduleKind::GPipe {
                                continue;
                            }
                            let fixed = FixedChoices {
                                tensor_parallel: Some(tensor),
                                pipeline_parallel: Some(pipeline),
                                data_parallel: Some(data),
                                zero_stage: Some(zero_stage),
                                micro_batch: Some(1 + layouts.len() as u64 % 2),
                                recompute: Some(recompute),
                                schedule: Some(schedule),
                                sequence_parallel: Some(sequence_parallel),
                                ..FixedChoices::default()
                            };
                            layouts.push((format!("{shape:?} {fixed:?}"), shape, fixed));
                        }
                    }
                }
            }
        }
    }
    layouts
}

fn check_bytes(name: &str, plan: &Plan, ranks: &[RankRun], steps: u64) {
    let expected: BTreeMap<_, u64> = planned(plan).into_iter().map(|(link, bytes)| (link, bytes * steps)).collect();
    let found: BTreeMap<_, u64> = sent(ranks).into_iter().filter(|(_, bytes)| *bytes > 0).collect();
    assert_eq!(found, expected, "{name}: bytes sent");
}

/// Losses and norms against those of one rank.
fn check_curve(name: &str, ranks: &[RankRun], single: &RankRun) {
    for rank in ranks {
        assert_eq!((&rank.losses, &rank.norms), (&ranks[0].losses, &ranks[0].norms), "{name}: all ranks say the same");
        for (step, (found, expected)) in rank.losses.iter().zip(&single.losses).enumerate() {
            assert!(close(*found, *expected, LOSS_TOLERANCE), "{name}: loss {found}, {expected}, step {step}");
        }
        for (step, (found, expected)) in rank.norms.iter().zip(&single.norms).enumerate() {
            assert!(close(*found, *expected, NORM_TOLERANCE), "{name}: norm {found}, {expected}, step {step}");
        }
        assert!(close(rank.evaluation, single.evaluation, LOSS_TOLERANCE), "{name}: evaluation {}", rank.evaluation);
    }
}

#[test]
fn layouts_give_the_single_ranks_curve() {
    let every = if std::env::var("LAYOUTS").is_ok_and(|choice| choice == "all") { 1 } else { SAMPLE };
    let mut singles: BTreeMap<String, RankRun> = BTreeMap::new();
    let all = layouts();
    let mut count = 0;
    for (number, (name, shape, fixed)) in all.iter().enumerate().filter(|(number, _)| number % every == 0) {
        let plan = |fixed| fixed_plan(small_model(*shape), workload(), number % 2 == 0, fixed);
        let single = singles.entry(format!("{shape:?}")).or_insert_with(|| {
            let alone = FixedChoices {
                tensor_parallel: Some(1),
                pipeline_parallel: Some(1),
                data_parallel: Some(1),
                sequence_parallel: Some(false),
                zero_stage: Some(ZeroStage::None),
                schedule: Some(ScheduleKind::OneForwardOneBackward),
                ..*fixed
            };
            let plan = plan(alone);
            execute(&plan, &Run::made_up(&plan, 20, 11, OPTIMIZER)).remove(0)
        });
        let plan = plan(*fixed);
        let run = Run::made_up(&plan, 20, 11, OPTIMIZER);
        let ranks = execute(&plan, &run);
        check_curve(name, &ranks, single);
        check_bytes(name, &plan, &ranks, 20);
        joined(&ranks, |run| &run.weights);
        count += 1;
    }
    println!("{count} of {} layouts", all.len());
}

#[test]
fn ranks_compute_what_the_interpreter_computes() {
    for (number, shape) in SHAPES.into_iter().enumerate() {
        for (tensor, pipeline, data) in [(1, 1, 1), (2, 2, 2)] {
            let fixed = FixedChoices {
                tensor_parallel: Some(tensor),
                pipeline_parallel: Some(pipeline),
                data_parallel: Some(data),
                zero_stage: Some(ZeroStage::ALL[number]),
                micro_batch: Some(2),
                recompute: Some(Recompute::None),
                schedule: Some(ScheduleKind::OneForwardOneBackward),
                sequence_parallel: Some(tensor > 1),
                ..FixedChoices::default()
            };
            let name = format!("{shape:?} {fixed:?}");
            let plan = fixed_plan(small_model(shape), workload(), number % 2 == 0, fixed);
            let run = Run::made_up(&plan, 3, 5, OPTIMIZER);
            let (losses, norms, weights) = interpret(&plan, &run);
            let ranks = execute(&plan, &run);
            for step in 0..3 {
                assert!(close(ranks[0].losses[step], losses[step], LOSS_TOLERANCE), "{name}: {:?}", ranks[0].losses);
                assert!(close(ranks[0].norms[step], norms[step], NORM_TOLERANCE), "{name}: {:?}", ranks[0].norms);
            }
            for (parameter, found) in joined(&ranks, |run| &run.weights) {
                let moved = run.weights.get(&parameter);
                let squares = |pairs: &mut dyn Iterator<Item = (f64, f64)>| {
                    pairs.map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt()
                };
                let expected = &weights[&parameter];
                let off = squares(&mut found.iter().copied().zip(expected.iter().copied()));
                let way = moved
                    .map_or(f64::INFINITY, |start| squares(&mut start.iter().copied().zip(expected.iter().copied())));
                // Key biases of models without rotary positions have no gradient but rounding errors.
                assert!(
                    off <= 1e-3 * way || parameter.ends_with("key.bias"),
                    "{name}: {parameter} off by {off} of {way}"
                );
            }
        }
    }
}

#[test]
fn two_runs_are_equal_bit_for_bit() {
    let fixed = FixedChoices {
        tensor_parallel: Some(2),
        pipeline_parallel: Some(2),
        data_parallel: Some(2),
        zero_stage: Some(ZeroStage::Gradients),
        micro_batch: Some(1),
        recompute: Some(Recompute::None),
        schedule: Some(ScheduleKind::OneForwardOneBackward),
        sequence_parallel: Some(true),
        ..FixedChoices::default()
    };
    let plan = fixed_plan(small_model(SHAPES[0]), workload(), true, fixed);
    let run = Run::made_up(&plan, 5, 7, OPTIMIZER);
    let runs = [(); 2].map(|()| execute(&plan, &run));
    for (first, second) in runs[0].iter().zip(&runs[1]) {
        assert_eq!((&first.losses, &first.norms, &first.weights), (&second.losses, &second.norms, &second.weights));
    }
}

#[test]
fn bf16_stays_near_fp32() {
    // bf16 has 8 bits: a relative error of 2⁻⁹ in each rounding. Losses agree to one in a hundred.
    for shape in SHAPES {
        let fixed = FixedChoices {
            tensor_parallel: Some(2),
            pipeline_parallel: Some(1),
            data_parallel: Some(2),
            zero_stage: Some(ZeroStage::OptimizerState),
            micro_batch: Some(2),
            recompute: Some(Recompute::None),
            schedule: Some(ScheduleKind::OneForwardOneBackward),
            sequence_parallel: Some(true),
            ..FixedChoices::default()
        };
        let curves = [DType::FP32, DType::BF16].map(|dtype| {
            let mut model = small_model(shape);
            model.dtype = dtype;
            let plan = fixed_plan(model, workload(), true, fixed);
            let ranks = execute(&plan, &Run::made_up(&plan, 5, 7, OPTIMIZER));
            check_bytes(&format!("{shape:?} {dtype:?}"), &plan, &ranks, 5);
            ranks[0].losses.clone()
        });
        for (single, brain) in curves[0].iter().zip(&curves[1]) {
            assert!(close(*brain, *single, 1e-2), "{shape:?}: {curves:?}");
        }
    }
}

#[test]
fn tensors_take_the_memory_that_the_plan_says() {
    let mut model = small_model(Shape { heads: 64, key_value_heads: 64, layers: 4, vocabulary: 8192, ..SHAPES[0] });
    model.feed_forward = FeedForward::Gelu { intermediate_size: 1024 };
    model.max_sequence_length = SequenceLength::Tokens(64);
    assert!(ir::graph::count_parameters(&model) >= 5_000_000);
    for dtype in [DType::FP32, DType::BF16] {
        model.dtype = dtype;
        println!("{dtype:?}: largest difference {:.4}", largest_difference_of_memory(&model));
    }
}

/// The largest relative difference of a rank's most bytes from the plan's, over layouts.
fn largest_difference_of_memory(model: &ModelSpec) -> f64 {
    let workload = Workload { sequence_length: 64, global_batch: 8 };
    let (mut worst, mut wrong) = (0.0_f64, Vec::<String>::new());
    for (number, (tensor, pipeline, data)) in
        [(1, 1, 1), (2, 2, 2), (1, 1, 4), (4, 2, 1), (1, 4, 1)].into_iter().enumerate()
    {
        for zero_stage in ZeroStage::ALL.into_iter().filter(|stage| data > 1 || *stage == ZeroStage::None) {
            let fixed = FixedChoices {
                tensor_parallel: Some(tensor),
                pipeline_parallel: Some(pipeline),
                data_parallel: Some(data),
                zero_stage: Some(zero_stage),
                micro_batch: Some(2),
                recompute: Some(if number % 2 == 0 { Recompute::None } else { Recompute::Full }),
                schedule: Some(ScheduleKind::OneForwardOneBackward),
                sequence_parallel: Some(tensor > 1),
                ..FixedChoices::default()
            };
            let plan = fixed_plan(model.clone(), workload, true, fixed);
            let ranks = execute(&plan, &Run::made_up(&plan, 2, 3, OPTIMIZER));
            let program = plan.program.as_ref().expect("the plan is executable");
            for (number, rank) in ranks.iter().enumerate() {
                let planned = program.stages[number * pipeline as usize / ranks.len()].memory;
                let part = rank.peak as f64 / planned.total().0 as f64 - 1.0;
                worst = worst.max(part.abs());
                if part.abs() > MEMORY_TOLERANCE {
                    let layout = format!("tp {tensor} pp {pipeline} dp {data} {zero_stage:?}");
                    wrong.push(format!("{:?} {layout} rank {number}: {part:+.4} of {planned:?}", model.dtype));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    worst
}
