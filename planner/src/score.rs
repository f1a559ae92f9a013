//! A foreign configuration predicted as it is, and what the best plan of the same request would gain.

use cost_models::machine::Machine;
use hardware_profiles::device::MatmulFormat;
use hardware_profiles::sourced::Sourced;
use hardware_profiles::stack::ContextExchange;
use ir::error::Problem;
use ir::graph::ModelGraph;
use ir::plan::Estimate;
use ir::provenance::Provenance;

use crate::error::Error;
use crate::explain::no_plan;
use crate::foreign::{Launch, Switches};
use crate::lower::estimate;
use crate::partition::{LayerCounts, StageShare};
use crate::request::{FixedChoices, Request, check_request};
use crate::search::{Scored, run_lengths, score_as_run, score_given_split, search_best};
use crate::watch::Watch;

/// Gain of a switch, relative to the step, from which it is worth a sentence.
const NOTABLE: f64 = 0.002;

/// A layout with what it should cost.
#[derive(Clone, Debug)]
pub struct Predicted {
    /// The layout with its stages.
    pub scored: Scored,
    /// What a step should cost.
    pub estimate: Estimate,
}

/// A configuration's prediction beside the best plan.
#[derive(Clone, Debug)]
pub struct Score {
    /// The configuration.
    pub configuration: Predicted,
    /// Whether it fits into the devices' memory.
    pub fits: bool,
    /// The best layout of the search's space, or why there is none.
    pub best: Result<Predicted, Problem>,
    /// What switches of the software would gain.
    pub hints: Vec<String>,
}

/// The machine as a configuration uses it.
///
/// # Errors
/// The device has no products in the format that the configuration asks for.
pub fn machine_of(machine: &Machine, launch: &Launch, origin: &str) -> Result<Machine, Problem> {
    let Switches { flash_attention, overlap_gradient_reduction, overlap_parameter_gather, matmul_format, .. } =
        launch.switches;
    let mut used = Machine { matmul_format, ..machine.clone() };
    if machine.device.product_peak(matmul_format, launch.model.dtype).is_none() {
        let format = match matmul_format {
            MatmulFormat::Model => format!("{:?}", launch.model.dtype),
            MatmulFormat::Fp8 => "fp8".to_owned(),
            MatmulFormat::Fp4 => "4-bit".to_owned(),
        };
        let help = "choose another --cluster, or another format in the configuration";
        return Err(Problem::new(format!("{} has no {format} products", machine.device.name), origin, help));
    }
    let stack = &mut used.stack;
    if let Some(flash) = flash_attention {
        stack.kernels.flash_attention = flash;
    }
    let off = |share: &Sourced<f64>| Sourced {
        value: 0.0,
        provenance: Provenance::Measured,
        source: format!("switched off by the configuration; on: {}", share.source),
    };
    if overlap_gradient_reduction == Some(false) {
        stack.overlap.gradient_reduction = off(&stack.overlap.gradient_reduction);
    }
    if overlap_parameter_gather == Some(false) {
        stack.overlap.parameter_gather = off(&stack.overlap.parameter_gather);
    }
    match launch.switches.context_all_to_all {
        Some(true) => stack.overlap.context = ContextExchange::AllToAll,
        Some(false) => stack.overlap.context = ContextExchange::Ring,
        None => {}
    }
    Ok(used)
}

/// Puts the optimizer of a configuration where it can be predicted: on the device if nothing is known of its host.
pub fn place_optimizer(launch: &mut Launch, machine: &Machine) {
    if launch.layout.offload_optimizer && machine.cluster.host.is_none() {
        launch.layout.offload_optimizer = false;
        let cluster = &machine.cluster.name;
        let warning =
            format!("cluster {cluster} does not say what its hosts have: the optimizer is predicted on the GPU");
        launch.settings.warnings.push(warning);
    }
}

/// What the stack does not offer of a configuration's layout.
pub fn not_offered(request: &Request, launch: &Launch) -> Vec<String> {
    let layout = &launch.layout;
    let fixed = FixedChoices {
        tensor_parallel: (layout.tensor_parallel > 1).then_some(layout.tensor_parallel),
        pipeline_parallel: (layout.pipeline_parallel > 1).then_some(layout.pipeline_parallel),
        expert_tensor_parallel: layout.whole_experts.then_some(1),
        zero_stage: Some(layout.zero_stage),
        recompute: Some(layout.recompute),
        schedule: Some(layout.schedule),
        sequence_parallel: Some(layout.sequence_parallel),
        offload_optimizer: layout.offload_optimizer.then_some(true),
        mesh_order: Some(layout.mesh_order),
        ..FixedChoices::default()
    };
    match check_request(&Request { fixed, ..request.clone() }) {
        Ok(()) => Vec::new(),
        Err(error) => error.problems().iter().map(|problem| problem.what.clone()).collect(),
    }
}

/// Predicts a configuration and searches the same request; `profile` is the machine with the stack's own switches.
///
/// # Errors
/// The layers cannot be split as the layout says.
pub fn score(request: &Request, graph: &ModelGraph, launch: &Launch, profile: &Machine) -> Result<Score, Error> {
    let configuration = predict(request, graph, launch).ok_or_else(|| {
        let what = format!("the layers cannot be split over {} stages", launch.layout.pipeline_parallel);
        Problem::new(what, request.origin.clone(), "give a layout whose stages hold at least one layer")
    })?;
    let outcome = search_best(request, graph, &Watch::default());
    let best = outcome.best.first().map(|winner| priced(request, graph, winner.clone()));
    let best = best.ok_or_else(|| no_plan(request, graph, &outcome).problems()[0].clone());
    let fits = configuration.scored.fullest_stage().1 <= request.machine.usable_memory();
    let hints = hints(request, graph, launch, profile, &configuration);
    Ok(Score { configuration, fits, best, hints })
}

fn predict(request: &Request, graph: &ModelGraph, launch: &Launch) -> Option<Predicted> {
    let layout = &launch.layout;
    let scored = match launch.layers.as_slice() {
        [] => score_as_run(request, graph, layout)?,
        parts => {
            let split = shares_of(run_lengths(request), parts, launch.recomputed);
            score_given_split(request, graph, layout, &split)?
        }
    };
    Some(priced(request, graph, scored))
}

fn priced(request: &Request, graph: &ModelGraph, scored: Scored) -> Predicted {
    Predicted { estimate: estimate(request, graph, &scored), scored }
}

/// Layers of each run on each part, in the model's order, the first `recomputed` of them computed again.
fn shares_of(mut runs: LayerCounts, parts: &[u64], recomputed: u64) -> Vec<StageShare> {
    let share = |layers: &u64| {
        let layers = take(&mut runs, *layers);
        StageShare { layers, recomputed: take(&mut layers.clone(), recomputed) }
    };
    parts.iter().map(share).collect()
}

/// Takes the first `count` layers, or all.
fn take(runs: &mut LayerCounts, mut count: u64) -> LayerCounts {
    std::array::from_fn(|run| {
        let taken = count.min(runs[run]);
        runs[run] -= taken;
        count -= taken;
        taken
    })
}

/// What switches that the configuration leaves off would gain with the same layout.
fn hints(
    request: &Request,
    graph: &ModelGraph,
    launch: &Launch,
    profile: &Machine,
    configuration: &Predicted,
) -> Vec<String> {
    let Switches { overlap_gradient_reduction, overlap_parameter_gather, .. } = launch.switches;
    let off = |switch: Option<bool>| switch == Some(false);
    if !off(overlap_gradient_reduction) && !off(overlap_parameter_gather) {
        return Vec::new();
    }
    let mut machine = request.machine.clone();
    machine.stack.overlap = profile.stack.overlap.clone();
    let overlapping = Request { machine, ..request.clone() };
    let Some(other) = predict(&overlapping, graph, launch) else { return Vec::new() };
    let (now, then) = (configuration.estimate.step, other.estimate.step);
    let gain = 1.0 - then.0 / now.0;
    let sentence = format!(
        "communication of the data axis is not overlapped: with it overlapped the same layout takes {then} ({:+.1} %)",
        -gain * 100.0
    );
    if gain > NOTABLE { vec![sentence] } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_take_layers_in_order() {
        let rows: [(LayerCounts, &[u64], &[LayerCounts]); 3] = [
            ([8, 0], &[3, 5], &[[3, 0], [5, 0]]),
            ([3, 5], &[2, 2, 2, 2], &[[2, 0], [1, 1], [0, 2], [0, 2]]),
            ([1, 6], &[1, 2, 3, 1], &[[1, 0], [0, 2], [0, 3], [0, 1]]),
        ];
        for (runs, parts, expected) in rows {
            let found: Vec<LayerCounts> = shares_of(runs, parts, 0).into_iter().map(|share| share.layers).collect();
            assert_eq!(found, expected, "{runs:?} in {parts:?}");
        }
    }
}
