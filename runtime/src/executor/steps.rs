//! Bodies as one rank executes them: local extents, offsets, last uses and peers, decided when the plan is read.

use ir::distribution::SplitAxis;
use ir::footprint::{is_accumulated_at_once, local_dims};
use ir::graph::{DimName, Element};
use ir::model::DType;
use ir::plan::Plan;
use ir::program::{AttentionOperand, Body, Conversion, InputKind, Instruction, Op, Value, ValueId};
use ir::sharding::TensorSplit;

use super::exchange::Exchange;
use crate::operators::Place;
use crate::place::RankPlace;
use crate::tensor::Format;

/// Forward and backward of a block on one rank.
#[derive(Debug)]
pub struct RankBody {
    /// Local form of each value.
    pub values: Vec<LocalValue>,
    /// Forward pass.
    pub forward: Vec<Step>,
    /// Backward pass.
    pub backward: Vec<Step>,
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
    /// The gradients of query, keys and values together: operands, results.
    AttentionGradients(Op, Vec<Use>, [usize; 3], Place),
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
    let context = Context { plan, split, body, place };
    let index = |value: ValueId| value.0 as usize;
    let reads_output = |instruction: &Instruction| {
        !matches!(instruction, Instruction::Free(_)) && instruction.reads().contains(&body.output)
    };
    RankBody {
        values: body.values.iter().map(|value| context.local_value(value)).collect(),
        forward: context.steps(&body.forward),
        backward: context.steps(&body.backward),
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
}

impl Context<'_> {
    fn value(&self, value: ValueId) -> &Value {
        &self.body.values[value.0 as usize]
    }

    fn dims(&self, value: &Value) -> Vec<(DimName, usize)> {
        local_dims(self.plan, self.split, &value.shape, value.distribution)
    }

    fn local_value(&self, value: &Value) -> LocalValue {
        LocalValue {
            dims: self.dims(value),
            format: format_of(value.element, self.plan.model.dtype),
            summand: value.distribution.data.is_partial(),
        }
    }

    /// Translates a pass. A free that follows an instruction makes its operand's use the last one.
    fn steps(&self, instructions: &[Instruction]) -> Vec<Step> {
        let mut steps = Vec::with_capacity(instructions.len());
        let mut done = vec![false; instructions.len()];
        for (line, instruction) in instructions.iter().enumerate() {
            if done[line] {
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
                    match self.joined(op, operands, *result, rest) {
                        Joined::Gradient(parameter, ending) => {
                            ending.into_iter().for_each(|offset| done[line + 1 + offset] = true);
                            Step::ComputeGradient(*op, uses, result.0 as usize, place, parameter)
                        }
                        Joined::Attention(results, ending) => {
                            let uses = uses.into_iter().map(|operand| Use { last: false, ..operand }).collect();
                            ending.into_iter().for_each(|offset| done[line + 1 + offset] = true);
                            Step::AttentionGradients(*op, uses, results, place)
                        }
                        Joined::Alone => Step::Compute(*op, uses, result.0 as usize, place),
                    }
                }
                Instruction::Convert(conversion, axes, from, to) => {
                    Step::Convert(self.exchange(*conversion, axes, *from, *to), take(*from), to.0 as usize)
                }
                // A started operand lives until the matching wait.
                Instruction::Start(conversion, axes, from, to) => {
                    let operand = Use { value: from.0 as usize, last: false };
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

    /// What the next instructions let an operator do together with them; lines are counted from behind it.
    fn joined(&self, op: &Op, operands: &[ValueId], result: ValueId, rest: &[Instruction]) -> Joined {
        if let Op::FlashAttentionGradient { of: AttentionOperand::Query, .. } = op
            && let Some(joined) = attention_run(op, operands, result, rest)
        {
            return joined;
        }
        if !is_accumulated_at_once(result, rest) {
            return Joined::Alone;
        }
        let mut parameter = None;
        let mut ending = Vec::new();
        for (offset, instruction) in rest.iter().enumerate() {
            match instruction {
                Instruction::Accumulate(number, value) if *value == result => {
                    parameter = Some(*number);
                    ending.push(offset);
                }
                Instruction::Free(value) if *value == result => ending.push(offset),
                _ => {}
            }
        }
        parameter.map_or(Joined::Alone, |parameter| Joined::Gradient(parameter, ending))
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
            // That of the step, known when it runs.
            seed: 0.0,
        }
    }
}

/// How an operator goes together with later instructions, and which of them are done with it.
enum Joined {
    Alone,
    Gradient(u32, Vec<usize>),
    Attention([usize; 3], Vec<usize>),
}

/// The three gradients of the attention core, if the other two follow with the same operands.
fn attention_run(op: &Op, operands: &[ValueId], query: ValueId, rest: &[Instruction]) -> Option<Joined> {
    let find = |part: AttentionOperand| {
        rest.iter().enumerate().find_map(|(offset, instruction)| match instruction {
            Instruction::Compute(other, same, result) if same == operands && *other == of(op, part) => {
                Some((offset, result.0 as usize))
            }
            _ => None,
        })
    };
    let (keys, values) = (find(AttentionOperand::Keys)?, find(AttentionOperand::Values)?);
    Some(Joined::Attention([query.0 as usize, keys.1, values.1], vec![keys.0, values.0]))
}

fn of(op: &Op, part: AttentionOperand) -> Op {
    match op {
        Op::FlashAttentionGradient { scale, alibi, .. } => {
            Op::FlashAttentionGradient { of: part, scale: *scale, alibi: *alibi }
        }
        other => *other,
    }
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
