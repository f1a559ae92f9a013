//! The end of a step: gradients reduced to their owners, the global norm, the optimizer, weights gathered.

use ir::distribution::{Place, SplitAxis};
use ir::model::ModelSpec;
use ir::program::{Body, Conversion, Parameter, ParameterRange, StageInstruction, StageProgram, UpdateInstruction};
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
    let mut update = Vec::new();
    let held = parameters_of(stage, bodies, ends);
    for (reference, parameter) in &held {
        reduce(*reference, parameter, model, strategy, ends, &mut update);
    }
    for (reference, parameter) in held.iter().filter(|(_, parameter)| !parameter.tied) {
        update.push(UpdateInstruction::AddSquares(*reference, sharded_axes(parameter, strategy)));
    }
    update.push(UpdateInstruction::FinishNorm);
    let gathered = matches!(strategy.zero_stage, ZeroStage::OptimizerState | ZeroStage::Gradients);
    for (reference, _) in &held {
        update.push(UpdateInstruction::AdamW(*reference));
        if gathered && strategy.data_parallel > 1 {
            update.push(UpdateInstruction::GatherOverData(*reference));
        }
    }
    update
}

fn reduce(
    reference: ParameterRange,
    parameter: &Parameter,
    model: &ModelSpec,
    strategy: &Strategy,
    ends: Ends,
    update: &mut Vec<UpdateInstruction>,
) {
    let partial = |axis: &SplitAxis| parameter.gradient.on(*axis) == Place::PartialSum;
    let tensor: Vec<SplitAxis> = [SplitAxis::Tensor, SplitAxis::Query].into_iter().filter(partial).collect();
    if !tensor.is_empty() {
        update.push(UpdateInstruction::ReduceOverTensor(reference, tensor));
    }
    let token_table = parameter.tied || parameter.name == "embedding.token";
    if model.tied_embedding && token_table && ends.first != ends.last {
        update.push(UpdateInstruction::ReduceOverTied(reference));
    }
    if parameter.gradient.data == Place::PartialSum {
        let conversion = match strategy.zero_stage {
            ZeroStage::None => Conversion::AllReduceSum,
            ZeroStage::OptimizerState | ZeroStage::Gradients | ZeroStage::Parameters => Conversion::ReduceScatterFlat,
        };
        update.push(UpdateInstruction::ReduceOverData(reference, conversion));
    }
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
        for (index, parameter) in bodies[body as usize].parameters.iter().enumerate() {
            let elsewhere = parameter.tied && ends.first && ends.last;
            if !elsewhere {
                held.push((ParameterRange { body, layers, parameter: index as u32 }, parameter));
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
        let StageInstruction::Repeat(_, passes) = instruction else { continue };
        for pass in passes {
            let StageInstruction::Repeat(count, inner) = pass else { continue };
            for call in inner {
                if let StageInstruction::Forward(body, layer, _) = call {
                    let start = layer.start.value(0);
                    calls.push((*body, (start, start + count.value(0))));
                }
            }
        }
    }
    calls
}
