//! Bodies as one rank executes them: local extents, offsets, last uses and peers, decided when the plan is read.

use std::collections::{BTreeMap, BTreeSet};

use ir::distribution::SplitAxis;
use ir::footprint::{gradients_summed_in_parts, is_accumulated_at_once, local_dims};
use ir::graph::{DimName, Element};
use ir::kernel::PassKind;
use ir::model::DType;
use ir::plan::Plan;
use ir::program::{Body, Conversion, InputKind, Instruction, Op, Value, ValueId};
use ir::sharding::TensorSplit;
use ir::strategy::Recompute;

use super::accounts::{Pass, charged};
use super::clock::Account;
use super::exchange::Exchange;
use crate::operators::Place;
use crate::operators::run::{LocalShape, Run, attention_gradient_runs, plan_run};
use crate::place::RankPlace;
use crate::tensor::Format;

/// Forward and backward of a block on one rank.
#[derive(Debug)]
pub struct RankBody {
    /// Local form of each value.
    pub values: Vec<LocalValue>,
    /// Forward pass.
    pub forward: Vec<Charged>,
    /// Backward pass.
    pub backward: Vec<Charged>,
    /// The activation that enters.
    pub input: Option<usize>,
    /// The activation that leaves, or the loss.
    pub output: usize,
    /// Whether backward reads what left.
    pub keeps_output: bool,
    /// The gradient of the output.
    pub output_gradient: Option<usize>,
    /// The gradient of the input.
    pub input_gradient: Option<usize>,
}

/// What a rank holds of a value.
#[derive(Clone, Debug)]
pub struct LocalValue {
    /// Local dims.
    pub dims: Vec<(DimName, usize)>,
    /// Number format.
    pub format: Format,
    /// Whether replicas hold summands of it.
    pub summand: bool,
}

/// An operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    /// The value.
    pub value: usize,
    /// Whether nobody reads it later.
    pub last: bool,
}

/// An instruction, and what the time until its end is charged to; none if the next one goes to the same account.
#[derive(Debug)]
pub struct Charged {
    /// The instruction.
    pub step: Step,
    /// The account.
    pub account: Option<Account>,
}

/// One instruction of a rank.
#[derive(Debug)]
pub enum Step {
    /// Index data of the micro-batch.
    Input(InputKind, usize),
    /// A parameter as it is stored.
    Load(u32, usize),
    /// An operator.
    Compute(Op, Vec<Use>, usize, Place),
    /// An operator whose result is added to a parameter's gradient and used by nobody else.
    ComputeGradient(Op, Vec<Use>, usize, Place, u32),
    /// Operators that are computed together.
    Run(Run),
    /// A conversion between ranks: operand, result.
    Convert(Exchange, Use, usize),
    /// Starts a conversion.
    Start(Exchange, Use, usize),
    /// Ends the conversion into a value.
    Wait(usize),
    /// Adds a value to a parameter's gradient.
    Accumulate(u32, Use),
    /// Ends a value's life.
    Free(usize),
}

/// Resolves a body for a rank.
pub fn resolve(plan: &Plan, split: TensorSplit, body: &Body, place: &RankPlace) -> RankBody {
    let context = Context { plan, split, body, place, gradients: gradients_summed_in_parts(body) };
    let index = |value: ValueId| value.0 as usize;
    let reads_output = |instruction: &Instruction| {
        !matches!(instruction, Instruction::Free(_)) && instruction.reads().contains(&body.output)
    };
    let pass = match plan.strategy.recompute {
        Recompute::None => Pass::Backward,
        Recompute::Selective | Recompute::Full | Recompute::Partial => Pass::RepeatingBackward,
    };
    RankBody {
        values: (0..body.values.len() as u32).map(|value| context.local_value(ValueId(value))).collect(),
        forward: charged(context.steps(&body.forward, PassKind::Forward), body, Pass::Forward),
        backward: charged(context.steps(&body.backward, PassKind::Backward), body, pass),
        input: body.input.map(index),
        output: index(body.output),
        keeps_output: body.backward.iter().any(reads_output),
        output_gradient: body.output_gradient.map(index),
        input_gradient: body.input_gradient.map(index),
    }
}

struct Context<'a> {
    plan: &'a Plan,
    split: TensorSplit,
    body: &'a Body,
    place: &'a RankPlace,
    /// Gradients in fp32 whatever the program's number format.
    gradients: BTreeSet<ValueId>,
}

impl Context<'_> {
    fn value(&self, value: ValueId) -> &Value {
        &self.body.values[value.0 as usize]
    }

    fn dims(&self, value: &Value) -> Vec<(DimName, usize)> {
        local_dims(self.plan, self.split, &value.shape, value.distribution)
    }

    fn local_value(&self, id: ValueId) -> LocalValue {
        let value = self.value(id);
        let format = format_of(value.element, self.plan.model.dtype);
        LocalValue {
            dims: self.dims(value),
            format: if self.gradients.contains(&id) { Format::Single } else { format },
            summand: value.distribution.data.is_partial(),
        }
    }

    /// Runs of a pass that one kernel computes: those that the plan names, and gradients of one attention core.
    fn runs(&self, instructions: &[Instruction], pass: PassKind) -> BTreeMap<usize, Run> {
        let named = self.body.kernels.iter().filter(|kernel| kernel.pass == pass);
        let named = named.map(|kernel| kernel.instructions.0 as usize..kernel.instructions.1 as usize);
        let shape = |value: ValueId| {
            let LocalValue { dims, format, .. } = self.local_value(value);
            LocalShape { dims, format }
        };
        let place = |operands: &[ValueId], result: ValueId| self.operator_place(operands, result);
        let runs = named.chain(attention_gradient_runs(instructions));
        runs.map(|range| (range.start, plan_run(instructions, range, shape, place))).collect()
    }

    /// Translates a pass. A free that follows an instruction makes its operand's use the last one.
    fn steps(&self, instructions: &[Instruction], pass: PassKind) -> Vec<Step> {
        let runs = self.runs(instructions, pass);
        let mut steps = Vec::with_capacity(instructions.len());
        let mut done = vec![false; instructions.len()];
        for (line, instruction) in instructions.iter().enumerate() {
            if done[line] {
                continue;
            }
            if let Some(run) = runs.get(&line) {
                let loads = instructions[run.instructions.clone()].iter().filter_map(|instruction| match instruction {
                    Instruction::Load(parameter, value) => Some(Step::Load(*parameter, value.0 as usize)),
                    _ => None,
                });
                steps.extend(loads);
                steps.push(Step::Run(run.clone()));
                done[run.instructions.clone()].fill(true);
                continue;
            }
            let frees = line + 1..line + 1 + count_frees(&instructions[line + 1..]);
            let mut take = |value: ValueId| {
                let free = frees.clone().find(|line| instructions[*line] == Instruction::Free(value));
                if let Some(line) = free {
                    done[line] = true;
                }
                Use { value: value.0 as usize, last: free.is_some() }
            };
            let step = match instruction {
                Instruction::Input(kind, value) => Step::Input(*kind, value.0 as usize),
                Instruction::Load(parameter, value) => Step::Load(*parameter, value.0 as usize),
                Instruction::Compute(op, operands, result) => {
                    let uses = uses_of(operands, &mut take);
                    let place = self.operator_place(operands, *result);
                    let rest = &instructions[line + 1..];
                    match gradient_of(*result, rest) {
                        Some((parameter, ending)) => {
                            ending.into_iter().for_each(|offset| done[line + 1 + offset] = true);
                            Step::ComputeGradient(*op, uses, result.0 as usize, place, parameter)
                        }
                        None => Step::Compute(*op, uses, result.0 as usize, place),
                    }
                }
                Instruction::Convert(conversion, axes, from, to) => {
                    Step::Convert(self.exchange(*conversion, axes, *from, *to), take(*from), to.0 as usize)
                }
                // An operand that nobody else reads lives on in the conversion.
                Instruction::Start(conversion, axes, from, to) => {
                    let end = last_line_of_operand(instructions, line, *from);
                    end.into_iter().for_each(|line| done[line] = true);
                    let operand = Use { value: from.0 as usize, last: end.is_some() };
                    Step::Start(self.exchange(*conversion, axes, *from, *to), operand, to.0 as usize)
                }
                Instruction::Wait(_, to) => Step::Wait(to.0 as usize),
                Instruction::Accumulate(parameter, value) => Step::Accumulate(*parameter, take(*value)),
                Instruction::Free(value) => Step::Free(value.0 as usize),
            };
            steps.push(step);
        }
        steps
    }

    fn exchange(&self, conversion: Conversion, axes: &[SplitAxis], from: ValueId, to: ValueId) -> Exchange {
        let (from, to) = (self.value(from), self.value(to));
        Exchange::new(conversion, axes, &self.dims(from), &self.dims(to), self.place)
    }

    /// Where this rank's parts begin along the dims that operators count from: those of whichever value has them.
    fn operator_place(&self, operands: &[ValueId], result: ValueId) -> Place {
        let involved: Vec<&Value> = operands.iter().chain([&result]).map(|value| self.value(*value)).collect();
        let start = |dim: DimName| {
            let holder = involved.iter().find(|value| value.shape.iter().any(|other| other.name == dim));
            let Some(value) = holder else { return (0, 1) };
            let local = self.dims(value).iter().find(|(name, _)| *name == dim).map_or(1, |(_, extent)| *extent);
            let (ways, index) = self.place.part_of(dim, value.distribution);
            (index * local, ways * local)
        };
        Place {
            vocabulary_start: start(DimName::Vocabulary).0,
            heads: start(DimName::KeyValueHeads),
            queries: start(DimName::QueriesPerKeyValue),
            positions: start(DimName::Sequence),
            // Those of the step, known when it runs.
            seed: 0.0,
            dropping: None,
        }
    }
}

/// The parameter to whose gradient a value is added, if nothing else is done with it, and the instructions that
/// are done with that; they are counted from behind the one that writes the value.
fn gradient_of(value: ValueId, rest: &[Instruction]) -> Option<(u32, Vec<usize>)> {
    if !is_accumulated_at_once(value, rest) {
        return None;
    }
    let mut parameter = None;
    let mut ending = Vec::new();
    for (offset, instruction) in rest.iter().enumerate() {
        match instruction {
            Instruction::Accumulate(number, added) if *added == value => {
                parameter = Some(*number);
                ending.push(offset);
            }
            Instruction::Free(freed) if *freed == value => ending.push(offset),
            _ => {}
        }
    }
    parameter.map(|parameter| (parameter, ending))
}

/// Where an operand of a conversion started at `line` is freed, if only the wait for it reads it until then.
fn last_line_of_operand(instructions: &[Instruction], line: usize, operand: ValueId) -> Option<usize> {
    let mut readers = (line + 1..instructions.len()).filter(|later| instructions[*later].reads().contains(&operand));
    let waits = readers.next().filter(|later| matches!(instructions[*later], Instruction::Wait(..)));
    let freed = readers.next().filter(|later| matches!(instructions[*later], Instruction::Free(_)));
    waits.and(freed)
}

fn count_frees(instructions: &[Instruction]) -> usize {
    instructions.iter().take_while(|instruction| matches!(instruction, Instruction::Free(_))).count()
}

/// Uses of operands; one that an operator reads twice outlives it.
fn uses_of(operands: &[ValueId], take: &mut impl FnMut(ValueId) -> Use) -> Vec<Use> {
    let once = |operand: &ValueId| operands.iter().filter(|other| *other == operand).count() == 1;
    let of = |operand: &ValueId| match once(operand) {
        true => take(*operand),
        false => Use { value: operand.0 as usize, last: false },
    };
    operands.iter().map(of).collect()
}

/// The format in which a rank holds elements of a kind.
pub fn format_of(element: Element, dtype: DType) -> Format {
    match (element, dtype) {
        (Element::Index, _) => Format::Index,
        (Element::Single, _) | (Element::Model, DType::FP32) => Format::Single,
        (Element::Model, DType::BF16 | DType::FP16) => Format::Brain,
    }
}
