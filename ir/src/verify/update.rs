//! Rules on updates: each gradient becomes the type of its parameter's optimizer state, is counted once in
//! the norm, and each parameter is stepped once and whole where it is stored whole.

use std::collections::BTreeMap;

use super::schedule::{Reductions, chain};
use super::{Check, EDITED};
use crate::distribution::{Distribution, Place, SplitAxis};
use crate::placement::Placement;
use crate::plan::Plan;
use crate::program::{Conversion, Parameter, ParameterRef, Program, UpdateInstruction};
use crate::strategy::ZeroStage;

/// What has happened to one parameter's gradient.
#[derive(Clone, Debug, Default)]
struct History {
    gradient: Option<Distribution>,
    /// The sum over replicas that the schedule started and that is not waited for yet.
    started: Option<Conversion>,
    /// Type in which the copies of a tied embedding were summed.
    tied: Option<Distribution>,
    squares: u32,
    steps: u32,
    gathers: u32,
}

/// Checks the updates of all stages; `reductions` are the sums that each stage's schedule starts.
pub fn check_updates(
    plan: &Plan,
    program: &Program,
    placement: Placement,
    reductions: &[Reductions],
    check: &mut Check,
) {
    let mut tied = Vec::new();
    for (index, stage) in plan.stages.iter().enumerate() {
        let place = format!("program.stages[{index}].update");
        let both_ends = stage.embedding && stage.head;
        let mut held: BTreeMap<ParameterRef, History> = BTreeMap::new();
        for (body, layer) in chain(plan, program, stage) {
            for (number, parameter) in program.bodies[body as usize].parameters.iter().enumerate() {
                // On one stage the head's use of the embedding is the embedding itself.
                if !(parameter.tied && both_ends) {
                    let reference = ParameterRef { body, layer, parameter: number as u32 };
                    held.insert(reference, History { gradient: Some(parameter.gradient), ..History::default() });
                }
            }
        }
        for (reference, conversion) in reductions.get(index).into_iter().flatten() {
            match held.get_mut(reference) {
                Some(history) => history.started = Some(*conversion),
                None => check.report(format!("{reference:?} has no gradient of its own to sum"), &place, EDITED),
            }
        }
        follow(program, index, placement, &mut held, &place, check);
        for (reference, history) in &held {
            let parameter = &program.bodies[reference.body as usize].parameters[reference.parameter as usize];
            let table = parameter.tied || parameter.name == "embedding.token";
            let summed = table && plan.model.tied_embedding && !both_ends;
            check.expect(history.tied.is_some(), summed, &place, &format!("sum of {} over its copies", parameter.name));
            check_history(parameter, reference.layer, history, placement, &place, check);
            tied.extend(history.tied.map(|distribution| (index, distribution)));
        }
    }
    let several = plan.stages.len() > 1 && plan.model.tied_embedding;
    let met = match tied.as_slice() {
        [] => !several,
        [(first, a), (last, b)] => several && *first == 0 && *last + 1 == plan.stages.len() && a == b,
        _ => false,
    };
    if !met {
        check.report(
            "the tied embedding is not summed once over the first and the last stage",
            "program.stages",
            EDITED,
        );
    }
}

/// Follows a stage's instructions.
fn follow(
    program: &Program,
    index: usize,
    placement: Placement,
    held: &mut BTreeMap<ParameterRef, History>,
    place: &str,
    check: &mut Check,
) {
    let mut norms = 0;
    for (line, instruction) in program.stages[index].update.iter().enumerate() {
        let place = format!("{place}, instruction {line}");
        let Some(range) = instruction.parameters() else {
            norms += 1;
            continue;
        };
        if range.is_empty() || range.len() > held.len() as u64 {
            check.report(format!("{range:?} names no parameters of this stage"), &place, EDITED);
            continue;
        }
        for reference in range.each() {
            let Some(history) = held.get_mut(&reference) else {
                check.report(format!("{reference:?} is no parameter of this stage"), &place, EDITED);
                continue;
            };
            let parameter = &program.bodies[reference.body as usize].parameters[reference.parameter as usize];
            apply(instruction, parameter, history, norms, placement, &place, check);
        }
    }
    check.expect(norms, 1, place, "number of global norms");
}

fn apply(
    instruction: &UpdateInstruction,
    parameter: &Parameter,
    history: &mut History,
    norms: u32,
    placement: Placement,
    place: &str,
    check: &mut Check,
) {
    let name = &parameter.name;
    let waits = matches!(instruction, UpdateInstruction::WaitReduction(_));
    if history.started.is_some() && !waits {
        check.report(format!("the gradient of {name} is used before its sum over replicas has ended"), place, EDITED);
    }
    let gradient = history.gradient.unwrap_or(Distribution::REPLICATED);
    let mut reduce = |axis: SplitAxis, to: Place| {
        if gradient.on(axis) != Place::PartialSum {
            check.report(format!("the gradient of {name} is not partial over {axis:?}"), place, EDITED);
        }
        let gradient = history.gradient.unwrap_or(Distribution::REPLICATED);
        history.gradient = Some(gradient.with(axis, to));
    };
    match instruction {
        UpdateInstruction::ReduceOverTensor(_, axes) => {
            axes.iter().for_each(|axis| reduce(*axis, Place::Replicated));
            if axes.is_empty() || axes.contains(&SplitAxis::Data) || axes.windows(2).any(|pair| pair[0] >= pair[1]) {
                check.report(format!("{axes:?} are no tensor axes"), place, EDITED);
            }
        }
        UpdateInstruction::WaitReduction(_) => match history.started.take() {
            Some(Conversion::AllReduceSum) => reduce(SplitAxis::Data, Place::Replicated),
            Some(Conversion::ReduceScatterFlat) => reduce(SplitAxis::Data, Place::Flat),
            Some(other) => check.report(format!("{other:?} is no reduction over replicas"), place, EDITED),
            None => check.report(format!("no sum of {name} over replicas has started"), place, EDITED),
        },
        UpdateInstruction::ReduceOverTied(_) => {
            if history.tied.is_some() || history.squares > 0 {
                check.report(format!("the copies of {name} are summed too often or too late"), place, EDITED);
            }
            history.tied = Some(gradient);
        }
        UpdateInstruction::AddSquares(_, axes) => {
            history.squares += 1;
            let sharded = |axis: &SplitAxis| matches!(gradient.on(*axis), Place::Sharded(_) | Place::Flat);
            let expected: Vec<SplitAxis> = SplitAxis::ALL.into_iter().filter(sharded).collect();
            check.expect(axes, &expected, place, &format!("axes over which {name} is sharded"));
            check_optimizer_type(gradient, parameter, placement, place, check);
        }
        UpdateInstruction::AdamW(_) => {
            history.steps += 1;
            check_optimizer_type(gradient, parameter, placement, place, check);
        }
        UpdateInstruction::GatherOverData(_) => {
            history.gathers += 1;
            check.expect(history.steps, 1, place, &format!("steps of {name} before it is gathered"));
        }
        UpdateInstruction::FinishNorm => {}
    }
    let after_norm = matches!(instruction, UpdateInstruction::AdamW(_) | UpdateInstruction::GatherOverData(_));
    check.expect(norms, u32::from(after_norm), place, "norms before this instruction");
}

/// The optimizer state lies as the parameter over tensor ranks; from ZeRO-1 on each replica owns a part.
fn check_optimizer_type(
    gradient: Distribution,
    parameter: &Parameter,
    placement: Placement,
    place: &str,
    check: &mut Check,
) {
    let owned = placement.strategy.zero_stage != ZeroStage::None && placement.degree(SplitAxis::Data) > 1;
    let data = if owned { Place::Flat } else { Place::Replicated };
    let expected = parameter.stored.with(SplitAxis::Data, data);
    check.expect(gradient, expected, place, &format!("type of {}'s gradient at the optimizer", parameter.name));
}

/// One step and one count for each parameter, and a gather where replicas own parts of what each stores.
fn check_history(
    parameter: &Parameter,
    layer: u64,
    history: &History,
    placement: Placement,
    place: &str,
    check: &mut Check,
) {
    let what = |text: &str| format!("{text} of {} in layer {layer}", parameter.name);
    if history.started.is_some() {
        check.report(what("the started sum over replicas is never waited for"), place, EDITED);
    }
    check.expect(history.steps, 1, place, &what("optimizer steps"));
    check.expect(history.squares, u32::from(!parameter.tied), place, &what("counts in the norm"));
    let zero = placement.strategy.zero_stage;
    let parts = matches!(zero, ZeroStage::OptimizerState | ZeroStage::Gradients);
    let gathered = parts && placement.degree(SplitAxis::Data) > 1;
    check.expect(history.gathers, u32::from(gathered), place, &what("gathers"));
}
