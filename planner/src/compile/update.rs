//! The end of a step: the sums of gradients that the schedule started are waited for, the global norm, the
//! optimizer, weights gathered.

use ir::distribution::{Place, SplitAxis};
use ir::model::ModelSpec;
use ir::program::{Body, Parameter, ParameterRange, StageInstruction, StageProgram, UpdateInstruction};
use ir::strategy::{Strategy, ZeroStage};

/// Appends the update to each stage.
pub fn update_parameters(
    stages: Vec<StageProgram>,
    bodies: &[Body],
    model: &ModelSpec,
    strategy: &Strategy,
) -> Vec<StageProgram> {
    let last = stages.len().saturating_sub(1);
    let with_update = stages.into_iter().enumerate().map(|(index, stage)| {
        let ends = Ends { first: index == 0, last: index == last };
        let update = stage_update(&stage, bodies, model, strategy, ends);
        StageProgram { update, ..stage }
    });
    with_update.collect()
}

#[derive(Clone, Copy)]
struct Ends {
    first: bool,
    last: bool,
}

fn stage_update(
    stage: &StageProgram,
    bodies: &[Body],
    model: &ModelSpec,
    strategy: &Strategy,
    ends: Ends,
) -> Vec<UpdateInstruction> {
    let held = parameters_of(stage, bodies, ends);
    let summands = |parameter: &Parameter| (parameter.gradient.data == Place::PartialSum).then_some(());
    let token_table = |parameter: &Parameter| parameter.tied || parameter.name == "embedding.token";
    let copied = |parameter: &Parameter| {
        (model.tied_embedding && token_table(parameter) && ends.first != ends.last).then_some(())
    };
    let squares = |parameter: &Parameter| (!parameter.tied).then(|| sharded_axes(parameter, strategy));
    let mut update = for_runs(&held, summands, |range, ()| UpdateInstruction::WaitReduction(range));
    update.extend(for_runs(&held, partial_axes, UpdateInstruction::ReduceOverTensor));
    update.extend(for_runs(&held, copied, |range, ()| UpdateInstruction::ReduceOverTied(range)));
    update.extend(for_runs(&held, squares, UpdateInstruction::AddSquares));
    update.push(UpdateInstruction::FinishNorm);
    let zero_stage = strategy.zero_stage;
    let gathered = matches!(zero_stage, ZeroStage::OptimizerState | ZeroStage::Gradients) && strategy.data_parallel > 1;
    for adamw in for_runs(&held, |_| Some(()), |range, ()| UpdateInstruction::AdamW(range)) {
        let range = adamw.parameters().filter(|_| gathered);
        update.push(adamw);
        update.extend(range.map(UpdateInstruction::GatherOverData));
    }
    update
}

/// One instruction for each run of consecutive parameters that have the same key.
fn for_runs<K: PartialEq>(
    held: &[(ParameterRange, &Parameter)],
    key: impl Fn(&Parameter) -> Option<K>,
    instruction: impl Fn(ParameterRange, K) -> UpdateInstruction,
) -> Vec<UpdateInstruction> {
    let mut runs: Vec<(ParameterRange, K)> = Vec::new();
    for (range, parameter) in held {
        let Some(key) = key(parameter) else { continue };
        match runs.last_mut() {
            Some((run, same)) if *same == key && run.is_followed_by(*range) => run.parameters.1 = range.parameters.1,
            _ => runs.push((*range, key)),
        }
    }
    runs.into_iter().map(|(range, key)| instruction(range, key)).collect()
}

/// Tensor axes over which a gradient is made of summands.
fn partial_axes(parameter: &Parameter) -> Option<Vec<SplitAxis>> {
    let partial = |axis: &SplitAxis| parameter.gradient.on(*axis) == Place::PartialSum;
    let axes: Vec<SplitAxis> = [SplitAxis::Tensor, SplitAxis::Query].into_iter().filter(partial).collect();
    (!axes.is_empty()).then_some(axes)
}

/// Axes over which the ranks hold different elements of the reduced gradient.
fn sharded_axes(parameter: &Parameter, strategy: &Strategy) -> Vec<SplitAxis> {
    let flat = strategy.zero_stage != ZeroStage::None && strategy.data_parallel > 1;
    let sharded = |axis: &SplitAxis| match axis {
        SplitAxis::Data => flat,
        SplitAxis::Tensor | SplitAxis::Query => matches!(parameter.stored.on(*axis), Place::Sharded(_)),
    };
    SplitAxis::ALL.into_iter().filter(sharded).collect()
}

/// Parameters that a stage holds; the head's use of an embedding on the same stage is the embedding's.
fn parameters_of<'a>(stage: &StageProgram, bodies: &'a [Body], ends: Ends) -> Vec<(ParameterRange, &'a Parameter)> {
    let mut held = Vec::new();
    for (body, layers) in forward_calls(&stage.schedule) {
        for (index, parameter) in (0..).zip(&bodies[body as usize].parameters) {
            let elsewhere = parameter.tied && ends.first && ends.last;
            if !elsewhere {
                held.push((ParameterRange { body, layers, parameters: (index, index + 1) }, parameter));
            }
        }
    }
    held.sort_by_key(|(range, _)| *range);
    held.dedup_by_key(|(range, _)| *range);
    held
}

/// Bodies that a schedule calls forward, each with its layers.
fn forward_calls(schedule: &[StageInstruction]) -> Vec<(u32, (u64, u64))> {
    let mut calls = Vec::new();
    for instruction in schedule {
        let StageInstruction::Repeat(count, inner) = instruction else { continue };
        calls.extend(forward_calls(inner));
        for call in inner {
            if let StageInstruction::Forward(body, layer, _) = call {
                let start = layer.start.value(0);
                calls.push((*body, (start, start + count.value(0))));
            }
        }
    }
    calls
}
