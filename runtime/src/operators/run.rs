//! Runs of operators that are computed together: row by row, or the three gradients of attention at once.
//!
//! A run is planned when a program is loaded. Where every operator works on rows, one pass over the rows
//! computes all of them while a row is in the first-level cache: what lives only inside the run is never
//! written to memory. Rows are computed by the functions that the operators use alone.

mod row;

use std::ops::Range;

use ir::graph::DimName;
use ir::program::{Instruction, Op, ValueId};

use super::attention::attention_gradients;
use super::{Dropping, Operand, Place, ResultShape, apply};
use crate::tensor::{Format, Memory, Tensor};

/// Shape and format of a value on the rank.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalShape {
    /// Local dims.
    pub dims: Vec<(DimName, usize)>,
    /// Number format.
    pub format: Format,
}

/// Where an operand of a step comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The run's operand of this number.
    Outside(usize),
    /// The result of an earlier step.
    Step(usize),
}

/// An operator of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The operator.
    pub op: Op,
    /// Its operands.
    pub operands: Vec<Source>,
    /// Its result.
    pub value: ValueId,
    /// The result's shape.
    pub shape: LocalShape,
    /// Where the rank's parts begin.
    pub place: Place,
    /// Whether the result is read after the run.
    pub kept: bool,
}

/// Operators that are computed together.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// The instructions, which hold operators, loads and frees.
    pub instructions: Range<usize>,
    /// Values that exist before, in the order in which [`apply_run`] wants them, and whether the run ends them.
    pub operands: Vec<(ValueId, bool)>,
    /// Operators in order.
    pub steps: Vec<Step>,
    how: How,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// Rows of this width.
    Rows(usize),
    /// The gradients of one attention core.
    AttentionGradients,
    /// One operator after another.
    Apart,
}

/// Plans a run of instructions.
///
/// `shape` gives a value's local shape, `place` where the rank's parts of an operator begin; it gets the
/// operator's operands and result.
pub fn plan_run(
    instructions: &[Instruction],
    range: Range<usize>,
    shape: impl Fn(ValueId) -> LocalShape,
    place: impl Fn(&[ValueId], ValueId) -> Place,
) -> Run {
    let inside = &instructions[range.clone()];
    let freed = |value: ValueId| inside.contains(&Instruction::Free(value));
    let (mut operands, mut steps): (Vec<(ValueId, bool)>, Vec<Step>) = (Vec::new(), Vec::new());
    for instruction in inside {
        let Instruction::Compute(op, read, value) = instruction else { continue };
        let source = |value: &ValueId| {
            if let Some(step) = steps.iter().position(|step: &Step| step.value == *value) {
                return Source::Step(step);
            }
            let known = operands.iter().position(|(known, _)| known == value);
            Source::Outside(known.unwrap_or_else(|| {
                operands.push((*value, freed(*value)));
                operands.len() - 1
            }))
        };
        let sources = read.iter().map(source).collect();
        let place = place(read, *value);
        let (value, kept) = (*value, !freed(*value));
        steps.push(Step { op: *op, operands: sources, value, shape: shape(value), place, kept });
    }
    let outside: Vec<LocalShape> = operands.iter().map(|(value, _)| shape(*value)).collect();
    let how = if are_attention_gradients(&steps) {
        How::AttentionGradients
    } else {
        row::width(&steps, &outside).map_or(How::Apart, How::Rows)
    };
    Run { instructions: range, operands, steps, how }
}

/// Runs of gradients of the same attention core, which no plan lists: their first instruction and one past
/// the last.
pub fn attention_gradient_runs(instructions: &[Instruction]) -> Vec<Range<usize>> {
    let mut runs = Vec::new();
    let mut next = 0;
    while next < instructions.len() {
        let operands = gradient_operands(&instructions[next]);
        let same = |other: &&Instruction| operands.is_some() && gradient_operands(other) == operands;
        let length = instructions[next..].iter().take_while(same).count();
        if length > 1 {
            runs.push(next..next + length);
        }
        next += length.max(1);
    }
    runs
}

/// Computes a run in a pass that drops `dropping`. Operands are those that the run lists; gives the results that
/// are read after it.
pub fn apply_run(
    run: &Run,
    operands: Vec<Operand>,
    memory: &Memory,
    dropping: Option<Dropping>,
) -> Vec<(ValueId, Tensor)> {
    match run.how {
        // A device's memory is no place for rows of the host.
        How::Rows(_) if memory.is_on_device() => apart(run, operands, memory, dropping),
        How::Rows(width) => row::apply(run, width, &operands, memory, dropping),
        How::AttentionGradients => gradients(run, &operands, memory, dropping),
        How::Apart => apart(run, operands, memory, dropping),
    }
}

impl Step {
    fn result<'a>(&'a self, memory: &'a Memory, dropping: Option<Dropping>) -> ResultShape<'a> {
        let LocalShape { dims, format } = &self.shape;
        ResultShape { memory, dims, format: *format, place: Place { dropping, ..self.place } }
    }
}

fn gradient_operands(instruction: &Instruction) -> Option<&Vec<ValueId>> {
    match instruction {
        Instruction::Compute(Op::FlashAttentionGradient { .. }, operands, _) => Some(operands),
        _ => None,
    }
}

fn are_attention_gradients(steps: &[Step]) -> bool {
    let gradient = |step: &Step| matches!(step.op, Op::FlashAttentionGradient { .. });
    steps.iter().all(|step| gradient(step) && step.operands == steps[0].operands && step.kept)
}

fn gradients(run: &Run, operands: &[Operand], memory: &Memory, dropping: Option<Dropping>) -> Vec<(ValueId, Tensor)> {
    let of = |source: &Source| match source {
        Source::Outside(operand) => operands[*operand].tensor(),
        Source::Step(_) => unreachable!("gradients of one core do not read each other"),
    };
    let step = &run.steps[0];
    let Op::FlashAttentionGradient { scale, alibi, .. } = step.op else { unreachable!("the run was planned so") };
    let tensors = [0, 1, 2, 3].map(|operand| of(&step.operands[operand]));
    let part = |op: &Op| match op {
        Op::FlashAttentionGradient { of, .. } => *of as usize,
        _ => unreachable!("the run was planned so"),
    };
    let wanted = [0, 1, 2].map(|at| run.steps.iter().any(|step| part(&step.op) == at));
    let found = attention_gradients(wanted, tensors, scale, alibi, &step.result(memory, dropping));
    let mut found = [found.query, found.keys, found.values];
    let finish = |step: &Step| {
        let gradient = found[part(&step.op)].take().expect("each gradient was asked for");
        (step.value, gradient.renamed(&step.shape.dims))
    };
    run.steps.iter().map(finish).collect()
}

/// One operator after another, or on a device two at a time where one kernel computes them.
fn apart(run: &Run, operands: Vec<Operand>, memory: &Memory, dropping: Option<Dropping>) -> Vec<(ValueId, Tensor)> {
    let mut outside: Vec<Option<Operand>> = operands.into_iter().map(Some).collect();
    let mut results: Vec<Option<Tensor>> = Vec::new();
    while results.len() < run.steps.len() {
        let group = results.len()..results.len() + steps_together(run, results.len(), memory);
        let inside = |source: &Source| matches!(source, Source::Step(earlier) if group.contains(earlier));
        let read = run.steps[group.clone()].iter().flat_map(|step| &step.operands);
        let read: Vec<Source> = read.filter(|source| !inside(source)).copied().collect();
        let last = |source: &Source| !run.steps[group.end..].iter().any(|later| later.operands.contains(source));
        let once = |source: &Source| read.iter().filter(|other| *other == source).count() == 1;
        // What ends here is moved, so that the result may take its memory; the rest is lent.
        let mut moved: Vec<Option<Operand>> = Vec::new();
        for source in &read {
            let ends = last(source) && once(source);
            moved.push(match *source {
                Source::Outside(operand) if ends => outside[operand].take(),
                Source::Step(earlier) if ends && !run.steps[earlier].kept => {
                    results[earlier].take().map(Operand::Owned)
                }
                _ => None,
            });
        }
        let given = read.iter().zip(moved).map(|(source, moved)| match (moved, *source) {
            (Some(moved), _) => moved,
            (None, Source::Outside(operand)) => {
                Operand::Borrowed(outside[operand].as_ref().expect("it is read until its last step").tensor())
            }
            (None, Source::Step(earlier)) => {
                Operand::Borrowed(results[earlier].as_ref().expect("it is read until its last step"))
            }
        });
        let found = apply_steps(&run.steps[group.clone()], given.collect(), memory, dropping);
        results.extend(found);
    }
    let kept = run.steps.iter().zip(results).filter(|(step, _)| step.kept);
    kept.filter_map(|(step, result)| Some((step.value, result?))).collect()
}

/// How many steps from one on are computed together.
fn steps_together(run: &Run, at: usize, memory: &Memory) -> usize {
    #[cfg(feature = "kernels")]
    if let [first, second, ..] = &run.steps[at..]
        && memory.is_on_device()
    {
        let later = run.steps[at + 2..].iter().any(|step| step.operands.contains(&Source::Step(at)));
        return 1 + usize::from(crate::device::are_one_kernel([first, second], at, first.kept || later));
    }
    let _ = (run, at, memory);
    1
}

/// The results of steps that are computed together; none for those that nobody reads.
fn apply_steps(
    steps: &[Step],
    operands: Vec<Operand>,
    memory: &Memory,
    dropping: Option<Dropping>,
) -> Vec<Option<Tensor>> {
    #[cfg(feature = "kernels")]
    if let ([first, second], Some(device)) = (steps, memory.device()) {
        let shapes = [first, second].map(|step| step.result(memory, dropping));
        return crate::device::apply_two(device, [&first.op, &second.op], operands, &shapes).into();
    }
    vec![Some(apply(&steps[0].op, operands, &steps[0].result(memory, dropping)))]
}
