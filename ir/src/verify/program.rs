//! Rules on a plan's programs, put together.

use super::body::check_body;
use super::schedule::check_schedules;
use super::update::check_updates;
use super::{Check, EDITED};
use crate::derivative::{differentiate, undifferentiable};
use crate::footprint::stage_footprints;
use crate::graph::{BlockRole, ModelGraph};
use crate::placement::Placement;
use crate::plan::{Executable, MemoryTerm, OWN_STACK, Plan};
use crate::program::Program;
use crate::sharding::TensorSplit;
use crate::strategy::{Recompute, not_programmed};
use crate::units::Bytes;

/// Most by which values counted from a program may exceed the plan's terms, relative to them.
const MEMORY_TOLERANCE: f64 = 0.01;
/// The same in bytes, for models so small that numbers of each row count.
const SMALL_TENSORS: Bytes = Bytes(1 << 20);

/// Checks the programs of a plan that has some, and that a plan has some if it says so. What they compute is
/// checked only if the stages, whose layers the checks walk over, are sound.
pub fn check_program(plan: &Plan, graph: &ModelGraph, split: TensorSplit, stages_are_sound: bool, check: &mut Check) {
    let Some(program) = &plan.program else {
        if plan.executable == Executable::Yes {
            check.report("the plan is executable but holds no program", "program", EDITED);
        }
        return;
    };
    if plan.executable != Executable::Yes {
        check.report("the plan holds a program but is not executable", "executable", EDITED);
    }
    if let Some(reason) = undifferentiable(&plan.model) {
        check.report(format!("programs of this model cannot be checked: {reason}"), "program", EDITED);
        return;
    }
    if let Some(reason) = not_programmed(&plan.strategy) {
        check.report(format!("programs of this strategy cannot be checked: {reason}"), "program", EDITED);
        return;
    }
    check.expect(program.bodies.len(), graph.blocks.len(), "program.bodies", "number of bodies");
    check.expect(program.stages.len(), plan.stages.len(), "program.stages", "number of stages");
    let sizes = program.bodies.len() == graph.blocks.len() && program.stages.len() == plan.stages.len();
    if !sizes || !stages_are_sound {
        return;
    }
    let placement = Placement { split, strategy: &plan.strategy };
    let before = check.problems.len();
    for (index, (body, block)) in program.bodies.iter().zip(&graph.blocks).enumerate() {
        let recompute = match block.role {
            BlockRole::Layers(_) => plan.strategy.recompute,
            BlockRole::Embedding | BlockRole::Head => Recompute::None,
        };
        let draft = differentiate(block, &plan.model, recompute, program.attention);
        check_body(body, &draft, placement, &format!("program.bodies[{index}]"), check);
    }
    for (stage, code) in plan.stages.iter().zip(&program.stages) {
        check.expect(code.stage, stage.stage, &format!("program.stages[{}]", stage.stage.0), "number of the stage");
    }
    if check.problems.len() > before {
        return;
    }
    let reductions = check_schedules(plan, program, check);
    check_updates(plan, program, placement, &reductions, check);
    check_footprints(plan, program, split, check);
}

/// The program's values, counted from their lives, fit into the memory that the plan's stages name, where that is
/// the memory of a program and not of another software.
fn check_footprints(plan: &Plan, program: &Program, split: TensorSplit, check: &mut Check) {
    for (index, (stage, footprint)) in plan.stages.iter().zip(stage_footprints(plan, program, split)).enumerate() {
        let place = format!("program.stages[{index}].memory");
        check.expect(program.stages[index].memory, footprint.memory, &place, "memory of the program");
        let terms = [(MemoryTerm::Weights, footprint.memory.weights), (MemoryTerm::Activations, footprint.activations)];
        for (term, counted) in terms.into_iter().filter(|_| plan.inputs.stack == OWN_STACK) {
            let named = stage.memory.get(&term).copied().unwrap_or_default();
            if counted > named.scale(1.0 + MEMORY_TOLERANCE) + SMALL_TENSORS {
                let what = format!("the program holds {counted} of {}, the plan names {named}", term.name());
                check.report(what, &format!("stages[{}].memory", stage.stage.0), EDITED);
            }
        }
    }
}
