//! Programs executed by ranks against the reference interpreter: every layout gives the single rank's numbers.

#[path = "support/ranks.rs"]
mod ranks;
mod support;

use std::collections::BTreeMap;

use ir::graph::build_graph;
use ir::model::Workload;
use ir::plan::Plan;
use ir::strategy::{Recompute, ScheduleKind, ZeroStage};
use ir::verify::verify;
use planner::lower::{lower, search_report};
use planner::request::{FixedChoices, Request, check_request};
use planner::search::search;
use ranks::{Run, execute, interpret, planned, sent};
use runtime::executor::StepOptions;
use support::machine;
use support::small::{Family, SEQUENCE, Shape, small_model};

/// Relative tolerance of losses and norms, of weights against their largest.
const LOSS: f64 = 1e-6;
const NORM: f64 = 1e-5;

fn run() -> Run {
    let optimizer =
        StepOptions { learning_rate: 1e-3, betas: (0.9, 0.95), epsilon: 1e-8, weight_decay: 0.1, clip: Some(0.02) };
    Run { steps: 3, seed: 11, optimizer }
}

fn small_plan(shape: Shape, flash: bool, fixed: FixedChoices) -> Plan {
    let degree = |choice: Option<u64>| choice.unwrap_or(1);
    let gpus = degree(fixed.tensor_parallel) * degree(fixed.pipeline_parallel) * degree(fixed.data_parallel);
    let mut machine = machine("dgx-h100", "planwright", gpus);
    machine.stack.kernels.flash_attention = flash;
    let request = Request {
        model: small_model(shape),
        origin: "small".to_owned(),
        workload: Workload { sequence_length: SEQUENCE as u64, global_batch: 8 },
        machine,
        gpus,
        fixed,
        top: 1,
        executable_only: false,
    };
    check_request(&request).expect("the request is sound");
    let graph = build_graph(&request.model);
    let outcome = search(&request, &graph);
    let winner = outcome.best.first().expect("a layout fits");
    let plan = lower(&request, &graph, winner, search_report(&request, &outcome, Vec::new()));
    assert_eq!(verify(&plan, "plan"), []);
    plan
}

fn close(found: f64, expected: f64, tolerance: f64) -> bool {
    (found - expected).abs() <= tolerance * expected.abs()
}

fn check(name: &str, plan: &Plan) {
    let run = run();
    let (losses, norms, weights) = interpret(plan, &run);
    let ranks = execute(plan, &run);
    let expected: BTreeMap<_, u64> =
        planned(plan).into_iter().map(|(link, bytes)| (link, bytes * run.steps as u64)).collect();
    let found: BTreeMap<_, u64> = sent(&ranks).into_iter().filter(|(_, bytes)| *bytes > 0).collect();
    assert_eq!(found, expected, "{name}: bytes sent");
    for rank in &ranks {
        for step in 0..run.steps {
            assert!(close(rank.losses[step], losses[step], LOSS), "{name}: loss {:?} {losses:?}", rank.losses);
            assert!(close(rank.norms[step], norms[step], NORM), "{name}: norm {:?} {norms:?}", rank.norms);
        }
        assert!(close(rank.evaluation, losses[0], LOSS), "{name}: evaluation {}", rank.evaluation);
        assert_eq!(rank.losses, ranks[0].losses, "{name}: all ranks know the same loss");
        for (parameter, runs) in &rank.weights {
            let expected = &weights[parameter];
            for (start, numbers) in runs {
                for (index, number) in (*start as usize..).zip(numbers) {
                    // Key biases of models without rotary positions have no gradient but rounding errors.
                    let off = (f64::from(*number) - expected.get(index).copied().unwrap_or(0.0)).abs();
                    let bound = if parameter.ends_with("key.bias") { 2.0 * 3e-3 } else { 3e-4 };
                    assert!(off <= bound, "{name}: {parameter} element {index} is off by {off}");
                }
            }
        }
    }
}

#[test]
fn layouts_give_the_interpreters_numbers() {
    let gpt2 = Shape { family: Family::Gpt2, tied: true, heads: 6, key_value_heads: 6, layers: 3, vocabulary: 19 };
    let bloom = Shape { family: Family::Bloom, tied: true, heads: 6, key_value_heads: 6, layers: 3, vocabulary: 21 };
    let llama = Shape { family: Family::Llama, tied: false, heads: 4, key_value_heads: 2, layers: 3, vocabulary: 20 };
    let mut number = 0;
    for (name, shape) in [("gpt2", gpt2), ("bloom", bloom), ("llama", llama)] {
        for (tensor, pipeline, data) in [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2), (4, 1, 2), (1, 3, 2)] {
            if shape.heads % tensor != 0 {
                continue;
            }
            for zero_stage in ZeroStage::ALL {
                number += 1;
                let choice = |bit: usize| number >> bit & 1 == 1;
                let fixed = FixedChoices {
                    tensor_parallel: Some(tensor),
                    pipeline_parallel: Some(pipeline),
                    data_parallel: Some(data),
                    zero_stage: Some(zero_stage),
                    micro_batch: Some(if choice(0) { 2 } else { 1 }),
                    recompute: Some(if choice(1) { Recompute::Full } else { Recompute::None }),
                    schedule: Some(if choice(2) { ScheduleKind::GPipe } else { ScheduleKind::OneForwardOneBackward }),
                    sequence_parallel: Some(tensor > 1 && choice(0)),
                };
                let name = format!("{name} {number} {fixed:?}");
                check(&name, &small_plan(shape, choice(1), fixed));
            }
        }
    }
}
