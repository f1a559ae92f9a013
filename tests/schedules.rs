//! Schedules, partial recomputation and offload through the whole planner: legal plans, what the verifier says of
//! changed ones, and what they cost against one another.

mod support;

use ir::graph::build_graph;
use ir::plan::{Executable, MemoryTerm, Plan, TimeTerm};
use ir::strategy::{Recompute, ScheduleKind, Strategy, ZeroStage};
use ir::verify::verify;
use planner::lower::{lower, search_report};
use planner::request::{FixedChoices, Request};
use planner::search::{Scored, score_layout, search};
use support::{example, layout, machine, request};

const GPUS: u64 = 256;

fn gpt3(cluster: &str, fixed: FixedChoices) -> Request {
    let machine = machine(cluster, "planwright", 8);
    request(example("gpt3-175b"), machine, GPUS, fixed)
}

/// Tensor 8 x pipeline 8 x data 4 with ZeRO-1 under a schedule, with so many parts a stage.
fn scheduled(request: &Request, schedule: ScheduleKind, virtual_stages: u64) -> Strategy {
    let zero_stage = ZeroStage::OptimizerState;
    Strategy { schedule, virtual_stages, zero_stage, ..layout(8, 8, 4, request.workload.global_batch) }
}

fn score(request: &Request, strategy: &Strategy) -> Scored {
    score_layout(request, &build_graph(&request.model), strategy).expect("the layout splits the model")
}

fn planned(schedule: ScheduleKind) -> Plan {
    let fixed = FixedChoices {
        tensor_parallel: Some(8),
        pipeline_parallel: Some(8),
        schedule: Some(schedule),
        ..FixedChoices::default()
    };
    let request = gpt3("dgx-h100", fixed);
    let graph = build_graph(&request.model);
    let outcome = search(&request, &graph);
    let winner = outcome.best.first().expect("a layout fits");
    lower(&request, &graph, winner, search_report(&request, &outcome, Vec::new(), Vec::new()))
}

fn places(plan: &Plan) -> Vec<String> {
    verify(plan, "plan").into_iter().map(|problem| problem.location).collect()
}

#[test]
fn every_schedule_gives_a_sound_plan() {
    for schedule in ScheduleKind::ALL {
        let plan = planned(schedule);
        assert_eq!(plan.strategy.schedule, schedule);
        assert_eq!(places(&plan), Vec::<String>::new(), "{schedule:?}");
        let compiled = matches!(schedule, ScheduleKind::GPipe | ScheduleKind::OneForwardOneBackward);
        assert_eq!(plan.executable == Executable::Yes, compiled, "{schedule:?}");
        let parts = plan.strategy.virtual_stages * plan.strategy.pipeline_parallel;
        assert_eq!(plan.strategy.layers_per_stage.len() as u64, parts, "{schedule:?}");
        let head = plan.stages.iter().position(|stage| stage.head);
        assert_eq!(head, Some(if schedule == ScheduleKind::ZeroBubbleV { 0 } else { 7 }), "{schedule:?}");
    }
}

#[test]
fn the_verifier_knows_each_schedules_rules() {
    for schedule in ScheduleKind::ALL {
        let plan = planned(schedule);
        let mut more = plan.clone();
        more.stages[3].in_flight += 1;
        assert!(places(&more).iter().any(|place| place.contains("stages[3]")), "{schedule:?}: one more in flight");
        for other in ScheduleKind::ALL.into_iter().filter(|other| *other != schedule) {
            let mut changed = plan.clone();
            changed.strategy.schedule = other;
            changed.program = None;
            changed.executable = Executable::No("changed".to_owned());
            // 1F1B and ZB-H1 hold the same and lie alike; nothing but the time tells them apart.
            let alike = |kind| matches!(kind, ScheduleKind::OneForwardOneBackward | ScheduleKind::ZeroBubbleH1);
            assert_eq!(places(&changed).is_empty(), alike(schedule) && alike(other), "{schedule:?} as {other:?}");
        }
    }
    let mut swapped = planned(ScheduleKind::Interleaved);
    let stage = &mut swapped.stages[0];
    std::mem::swap(&mut stage.layers, &mut stage.further_layers[0]);
    assert!(places(&swapped).iter().any(|place| place.contains("stages[0]")), "parts are out of order");
}

#[test]
fn finer_schedules_wait_less_in_the_same_memory() {
    let request = gpt3("dgx-h100", FixedChoices::default());
    let of = |schedule, parts| score(&request, &scheduled(&request, schedule, parts));
    let plain = of(ScheduleKind::OneForwardOneBackward, 1);
    let [interleaved, finer] = [2, 4].map(|parts| of(ScheduleKind::Interleaved, parts));
    let h1 = of(ScheduleKind::ZeroBubbleH1, 1);
    let v = of(ScheduleKind::ZeroBubbleV, 2);
    let bubble = |scored: &Scored| scored.prediction.terms[&TimeTerm::Bubble].0;
    assert!(bubble(&finer) < bubble(&interleaved) && bubble(&interleaved) < bubble(&plain));
    assert!(bubble(&v) < bubble(&h1) && bubble(&h1) < bubble(&plain));
    let activations = |scored: &Scored, stage: usize| scored.memory[stage].activations.0 as f64;
    assert_eq!(activations(&h1, 0), activations(&plain, 0), "stage 0 delays no weight gradient");
    assert!(activations(&interleaved, 0) > activations(&plain, 0), "more passes ahead");
    for stage in 0..8 {
        assert!(activations(&v, stage) <= activations(&plain, 0) * 1.05, "stage {stage} of a V");
        assert!(activations(&h1, stage) <= activations(&plain, 0) * 1.05, "stage {stage} of ZB-H1");
    }
}

#[test]
fn some_layers_recomputed_lie_between_none_and_all() {
    let request = gpt3("dgx-h100", FixedChoices::default());
    let sized = |recompute, micro_batch| Strategy {
        recompute,
        micro_batch,
        zero_stage: ZeroStage::OptimizerState,
        ..layout(8, 8, 4, request.workload.global_batch)
    };
    let usable = request.machine.usable_memory();
    let fits = |scored: &Scored| scored.fullest_stage().1 <= usable;
    let micro_batch = [1, 2, 4, 8].into_iter().find(|size| !fits(&score(&request, &sized(Recompute::None, *size))));
    let micro_batch = micro_batch.expect("large micro-batches do not fit");
    let [all, some] = [Recompute::Full, Recompute::Partial].map(|kind| score(&request, &sized(kind, micro_batch)));
    assert!(fits(&all) && fits(&some), "both fit");
    assert!(some.prediction.step < all.prediction.step);
    let again = some.strategy.recomputed_layers_per_stage();
    assert!(again[0] > 0 && again.is_sorted_by(|a, b| a >= b), "{again:?}");
    assert!(again.iter().sum::<u64>() < request.model.num_layers, "{again:?}");
}

#[test]
fn offload_frees_the_optimizer_state_for_time() {
    let request = gpt3("dgx-h100", FixedChoices::default());
    let offloaded = |offload_optimizer| Strategy {
        offload_optimizer,
        zero_stage: ZeroStage::OptimizerState,
        ..layout(8, 8, 4, request.workload.global_batch)
    };
    let [device, host] = [false, true].map(|offload| score(&request, &offloaded(offload)));
    let state = |scored: &Scored| scored.memory[0].terms()[&MemoryTerm::OptimizerState];
    assert!(state(&device).0 > 0 && state(&host).0 == 0);
    let update = |scored: &Scored| scored.prediction.terms[&TimeTerm::Optimizer].0;
    assert!(update(&host) > update(&device) && update(&host).is_finite());
    let elsewhere = gpt3("jean-zay-a100-80gb", FixedChoices::default());
    assert!(!score(&elsewhere, &offloaded(true)).prediction.step.0.is_finite(), "nothing is known of that host");
}
