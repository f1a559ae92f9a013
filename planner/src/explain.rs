//! Why the winner won, and why nothing fits where nothing does.

use cost_models::collective::{place, ring_bandwidth};
use cost_models::offload::usable_host_memory;
use ir::error::Problem;
use ir::graph::ModelGraph;
use ir::mesh::{Axis, build_mesh};
use ir::plan::{StopReason, TimeTerm};
use ir::strategy::{Recompute, ScheduleKind, Strategy};
use ir::units::Seconds;

use crate::error::Error;
use crate::partition::{StageShare, solve_by_integer_program};
use crate::request::{FixedChoices, Request, check_request};
use crate::search::{Outcome, Scored, nearest_miss, partition_of, search_best};
use crate::space::Pruning;
use crate::watch::Watch;

/// Most multiples of the given GPU count that are tried to find one that fits.
const GPU_MULTIPLES: [u64; 10] = [2, 3, 4, 6, 8, 12, 16, 32, 64, 128];

/// Most stages for which the integer program is asked as well (milliseconds; it slows down beyond).
const MOST_PROGRAM_STAGES: u64 = 16;

/// Sentences on the choices that users ask about; those that need a search are left out once the watch is stopped.
pub fn explain(request: &Request, graph: &ModelGraph, winner: &Scored, watch: &Watch) -> Vec<String> {
    let mut sentences = vec![memory_sentence(request, winner)];
    if watch.stopped() {
        return sentences;
    }
    sentences.extend(split_sentence(request, graph, winner));
    sentences.extend(tensor_across_domains(request, graph, winner, watch));
    sentences
}

/// The layout in one line: degrees and settings.
pub fn describe(strategy: &Strategy) -> String {
    let recompute = match strategy.recompute {
        Recompute::None => "no recomputation".to_owned(),
        Recompute::Partial => format!("recomputation of {} layers", strategy.recomputed_layers.iter().sum::<u64>()),
        choice => format!("{} recomputation", choice.name()),
    };
    let beyond_one = |name: &str, degree: u64| match degree {
        1 => String::new(),
        degree => format!("{name}{degree}"),
    };
    format!(
        "tensor {} x pipeline {} x data {}{}{}{}{}{}{}, ZeRO-{}{}{}, micro-batch {}, {recompute}{}",
        strategy.tensor_parallel,
        strategy.pipeline_parallel,
        strategy.data_parallel,
        beyond_one(" x context ", strategy.context_parallel),
        beyond_one(", experts over ", strategy.expert_parallel),
        if strategy.whole_experts { ", whole experts" } else { "" },
        if strategy.mesh_order.is_usual() { "" } else { ", data outermost" },
        beyond_one(", virtual stages ", strategy.virtual_stages),
        match strategy.schedule {
            ScheduleKind::OneForwardOneBackward | ScheduleKind::Interleaved => String::new(),
            schedule => format!(", schedule {}", schedule.name()),
        },
        u8::from(strategy.zero_stage),
        match strategy.shard_group == strategy.data_parallel {
            true => String::new(),
            false => format!(" in groups of {}", strategy.shard_group),
        },
        if strategy.offload_optimizer { " in host memory" } else { "" },
        strategy.micro_batch,
        if strategy.sequence_parallel { ", sequence parallel" } else { "" }
    )
}

/// What the best layout that can be executed is, where it is another than the best.
pub fn executable_sentence(outcome: &Outcome) -> Option<String> {
    let (best, executable) = (outcome.best.first()?, outcome.executable.as_ref()?);
    Some(format!(
        "this layout cannot be executed yet; the fastest that can ({}) takes {}, {:+.1} %: `--executable` plans it",
        describe(&executable.strategy),
        executable.prediction.step,
        (executable.prediction.step.0 / best.prediction.step.0 - 1.0) * 100.0,
    ))
}

fn memory_sentence(request: &Request, winner: &Scored) -> String {
    let (stage, used) = winner.fullest_stage();
    let usable = request.machine.usable_memory();
    format!(
        "the fullest rank is on stage {stage}: {used} of {usable} usable ({} less the stack's margin)",
        request.machine.device.memory.value
    )
}

/// The stage split checked by the integer program, where that takes a moment only.
fn split_sentence(request: &Request, graph: &ModelGraph, winner: &Scored) -> Option<String> {
    let stages = winner.strategy.pipeline_parallel;
    let uneven = request.machine.stack.offers.uneven_stages;
    if !(2..=MOST_PROGRAM_STAGES).contains(&stages) || !uneven || winner.strategy.virtual_stages > 1 {
        return None;
    }
    let problem = partition_of(request, graph, &winner.strategy)?;
    let program = problem.slowest(&solve_by_integer_program(&problem)?);
    let shares = winner.contents.iter().map(|part| StageShare { layers: part.layers, recomputed: part.recomputed });
    let found = problem.slowest(&shares.collect::<Vec<_>>());
    Some(format!(
        "the slowest stage takes {} a micro-batch; the integer program over layers per stage finds none faster than {}",
        Seconds(found),
        Seconds(program)
    ))
}

/// What the narrowest tensor degree beyond a fast domain costs against the winner.
fn tensor_across_domains(request: &Request, graph: &ModelGraph, winner: &Scored, watch: &Watch) -> Option<String> {
    let domain = request.machine.fast_domain_gpus();
    if request.fixed.tensor_parallel.is_some() || winner.strategy.tensor_parallel > domain {
        return None;
    }
    let wider = crate::request::divisors(request.gpus).into_iter().filter(|degree| *degree > domain);
    let mut outcomes = wider.filter_map(|degree| {
        let fixed = FixedChoices { tensor_parallel: Some(degree), ..request.fixed };
        let case = Request { fixed, top: 1, ..request.clone() };
        check_request(&case).ok()?;
        let outcome = search_best(&case, graph, &watch.of_a_step());
        outcome.best.into_iter().next().filter(|_| outcome.stop_reason == StopReason::Optimal)
    });
    let crossing = outcomes.next()?;
    let communication = |scored: &Scored| scored.prediction.terms[&TimeTerm::TensorCommunication];
    let bandwidth = |scored: &Scored| {
        let family = build_mesh(&scored.strategy).groups(Axis::Tensor);
        ring_bandwidth(place(&family, domain), &request.machine).0 / 1e9
    };
    let inside = Strategy { tensor_parallel: domain.min(2), ..winner.strategy.clone() };
    let fast = ring_bandwidth(place(&build_mesh(&inside).groups(Axis::Tensor), domain), &request.machine).0 / 1e9;
    Some(format!(
        "tensor {} would cross nodes of {domain}: its rings run at {:.1} GB/s instead of {fast:.0}; the best such layout ({}) \
         takes {}, {:+.0} %, {} of it tensor communication against {}",
        crossing.strategy.tensor_parallel,
        bandwidth(&crossing),
        describe(&crossing.strategy),
        crossing.prediction.step,
        (crossing.prediction.step.0 / winner.prediction.step.0 - 1.0) * 100.0,
        communication(&crossing),
        communication(winner),
    ))
}

/// The error for a search that the user ended before it had found anything.
pub fn interrupted(request: &Request, outcome: &Outcome) -> Error {
    let rest = outcome.pruned.get(&Pruning::Interrupted).copied().unwrap_or(0);
    let what = format!("interrupted with {rest} of {} candidates left; none before them fits", outcome.enumerated);
    Error::Interrupted(Problem::new(what, request.origin.clone(), "let the search end, or fix choices to shorten it"))
}

/// The error for a search that found nothing: the nearest layout, its fullest stage, and the smallest
/// change that helps.
pub fn no_plan(request: &Request, graph: &ModelGraph, outcome: &Outcome) -> Error {
    let location = format!("{} on {} x {}", request.origin, request.gpus, request.machine.device.name);
    let Some(nearest) = nearest_miss(request, graph) else {
        let reasons: Vec<String> =
            outcome.rejected.iter().map(|(reason, count)| format!("{} {count}", reason.name())).collect();
        let all = outcome.enumerated;
        let what = format!("no layout can run: all {all} candidates are rejected ({})", reasons.join(", "));
        return Error::NoPlan(Problem::new(what, location, smallest_change(request, graph, Direction::Fewer)));
    };
    let (stage, needed) = nearest.fullest_stage();
    let usable = request.machine.usable_memory();
    let lack = match usable_host_memory(&request.machine).filter(|_| needed <= usable) {
        Some(of_host) => format!("a node needs {} of host memory and {of_host} are", nearest.host_memory),
        None => format!("its worst stage, {stage}, needs {needed} a GPU and {usable} are"),
    };
    let what = format!(
        "no plan fits: the nearest candidate is {} with {} layers on stages; {lack} available",
        describe(&nearest.strategy),
        runs(&nearest.strategy.layers_per_stage),
    );
    Error::NoPlan(Problem::new(what, location, smallest_change(request, graph, Direction::More)))
}

/// Which way the number of GPUs must change.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    More,
    Fewer,
}

/// The first of these that makes something fit: freeing one fixed choice, then another number of GPUs.
fn smallest_change(request: &Request, graph: &ModelGraph, direction: Direction) -> String {
    let fits =
        |case: &Request| check_request(case).is_ok() && !search_best(case, graph, &Watch::default()).best.is_empty();
    if request.executable_only && fits(&Request { executable_only: false, top: 1, ..request.clone() }) {
        return "leave out --executable: then a layout fits, which cannot be run yet".to_owned();
    }
    for (flag, fixed) in request.fixed.each_freed() {
        if fits(&Request { fixed, top: 1, ..request.clone() }) {
            return format!("leave out {flag}: then a layout fits");
        }
    }
    let counts = GPU_MULTIPLES.map(|multiple| match direction {
        Direction::More => request.gpus * multiple,
        Direction::Fewer => request.gpus / multiple,
    });
    let fixed = FixedChoices { data_parallel: None, ..request.fixed };
    for gpus in counts {
        if fits(&Request { gpus, fixed, top: 1, ..request.clone() }) {
            return format!("with {gpus} GPUs a layout fits");
        }
    }
    let last = counts[counts.len() - 1];
    let batch = request.workload.global_batch;
    match direction {
        Direction::More => format!(
            "none of {} to {last} GPUs fits either: use GPUs with more memory, or a shorter sequence than {}",
            request.gpus, request.workload.sequence_length
        ),
        Direction::Fewer => format!(
            "use fewer GPUs, or a global batch with more divisors than {batch}: each replica needs whole micro-batches"
        ),
    }
}

/// A list of counts with repeats folded: `5, 10 x 6, 5`.
pub fn runs(counts: &[u64]) -> String {
    let parts = counts.chunk_by(|a, b| a == b).map(|run| match run.len() {
        1 => run[0].to_string(),
        length => format!("{length} x {}", run[0]),
    });
    parts.collect::<Vec<_>>().join(", ")
}
