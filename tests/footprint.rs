//! Memory counted from a program's values against the cost model's terms: two views of one plan.

mod support;

use ir::footprint::stage_footprints;
use ir::graph::build_graph;
use ir::plan::MemoryTerm;
use ir::sharding::tensor_split;
use ir::strategy::{Recompute, ZeroStage};
use ir::units::{BatchSize, Bytes};
use planner::lower::{lower, search_report};
use planner::request::FixedChoices;
use planner::search::search;
use support::{example, machine, median, request};

/// Most by which the temporary values of a pass may exceed what the cost model sets aside for them.
const MOST_TEMPORARY: f64 = 1.15;
/// Largest relative difference between the two views.
const TOLERANCE: f64 = 0.01;

#[test]
fn both_views_agree_for_the_projects_own_stack() {
    let mut ratios = Vec::new();
    for name in ["bloom", "gpt3-175b", "llama-3.1-70b", "llama-2-7b", "gpt2-124m"] {
        for (tensor, pipeline) in [(1, 1), (2, 2), (4, 4), (8, 2)] {
            for recompute in [Recompute::None, Recompute::Full] {
                for zero_stage in ZeroStage::ALL {
                    for sequence_parallel in [false, true] {
                        let fixed = FixedChoices {
                            tensor_parallel: Some(tensor),
                            pipeline_parallel: Some(pipeline),
                            recompute: Some(recompute),
                            zero_stage: Some(zero_stage),
                            sequence_parallel: Some(sequence_parallel),
                            micro_batch: Some(2),
                            ..FixedChoices::default()
                        };
                        ratios.extend(compare(name, fixed));
                    }
                }
            }
        }
    }
    let middle = median(&mut ratios);
    let most = ratios[ratios.len() - 1];
    println!(
        "{} stages compared; temporary values counted over computed: median {middle:.3}, most {most:.2}",
        ratios.len()
    );
    assert!(ratios.len() > 500 && most < MOST_TEMPORARY, "{most}");
}

/// Compares every stage of a plan; gives temporary values counted over those computed, nothing if the degrees do
/// not suit the model.
fn compare(name: &str, fixed: FixedChoices) -> Vec<f64> {
    let mut model = example(name);
    model.global_batch = Some(BatchSize::Sequences(1024));
    // Deviations change no size, and programs are what is compared.
    model.deviations.clear();
    let tensor = fixed.tensor_parallel.unwrap_or(1);
    let Ok(split) = tensor_split(&model, tensor, fixed.sequence_parallel.unwrap_or(false)) else { return Vec::new() };
    let mut machine = machine("dgx-h200", "planwright", 8);
    machine.device.memory.value = Bytes(1 << 46);
    let request = request(model, machine, 64, fixed);
    let graph = build_graph(&request.model);
    let outcome = search(&request, &graph);
    let winner = outcome.best.first().expect("memory is plenty");
    let plan = lower(&request, &graph, winner, search_report(&request, &outcome, Vec::new(), Vec::new()));
    let program = plan.program.as_ref().expect("the layout is executable");
    let footprints = stage_footprints(&plan, program, split);
    for (stage, footprint) in plan.stages.iter().zip(&footprints) {
        let term = |term| stage.memory[&term].0 as f64;
        let pairs = [
            ("weights", footprint.memory.weights.0 as f64, term(MemoryTerm::Weights)),
            ("gradients", footprint.memory.gradients.0 as f64, term(MemoryTerm::Gradients)),
            ("optimizer", footprint.memory.optimizer.0 as f64, term(MemoryTerm::OptimizerState)),
            ("activations", footprint.activations.0 as f64, term(MemoryTerm::Activations)),
        ];
        for (what, counted, computed) in pairs {
            let difference = counted / computed - 1.0;
            assert!(difference.abs() < TOLERANCE, "{name} {fixed:?} stage {}: {what} {difference:+.4}", stage.stage.0);
        }
    }
    // The peak: state, kept values, and the pass that is executed beside those of the other micro-batches.
    for (code, footprint) in program.stages.iter().zip(&footprints) {
        assert_eq!(code.memory, footprint.memory, "{name} {fixed:?}");
        let values = code.memory.values;
        assert!(values >= footprint.activations && values <= footprint.activations + footprint.transient, "{name}");
    }
    let ratios = plan.stages.iter().zip(&footprints).map(|(stage, footprint)| {
        let temporary = stage.memory[&MemoryTerm::Workspace] + stage.memory[&MemoryTerm::GatheredParameters];
        footprint.transient.0 as f64 / temporary.0.max(1) as f64
    });
    ratios.collect()
}
