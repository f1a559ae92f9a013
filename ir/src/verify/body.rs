//! Rules on a body: it computes the block and its derivative, is well typed, and ends every life once.

use std::collections::BTreeMap;

use super::{Check, EDITED};
use crate::derivative::{Draft, Step};
use crate::distribution::{Distribution, Operand, Place, SplitAxis, infer};
use crate::graph::{Dim, DimName, Element, Extent};
use crate::kernel::{PassKind, kernel_pattern};
use crate::placement::Placement;
use crate::program::{Body, Conversion, Instruction, Op, Value, ValueId};
use crate::strategy::ZeroStage;

/// Checks a body against the block's draft.
pub fn check_body(body: &Body, draft: &Draft, placement: Placement, place: &str, check: &mut Check) {
    if !ids_exist(body, place, check) {
        return;
    }
    check_parameters(body, draft, placement, place, check);
    check_lives(body, place, check);
    check_kernels(body, place, check);
    check_types(body, placement, place, check);
    check_computation(body, draft, placement, place, check);
}

/// Whether every id names something; nothing else is checked otherwise.
fn ids_exist(body: &Body, place: &str, check: &mut Check) -> bool {
    let values = body.values.len();
    let ends = [body.input, Some(body.output), body.output_gradient, body.input_gradient];
    let in_range = |value: &ValueId| (value.0 as usize) < values;
    let mut sound = ends.iter().flatten().all(in_range);
    for instruction in body.forward.iter().chain(&body.backward) {
        let parameter = match instruction {
            Instruction::Load(parameter, _) | Instruction::Accumulate(parameter, _) => *parameter as usize,
            _ => 0,
        };
        if let Instruction::Start(_, _, _, to) = instruction {
            sound &= in_range(to);
        }
        let known = parameter < body.parameters.len().max(1);
        sound &= known && instruction.reads().iter().chain(&instruction.writes()).all(in_range);
    }
    if !sound {
        check.report("an instruction names a value or parameter that does not exist", place, EDITED);
    }
    sound
}

fn check_parameters(body: &Body, draft: &Draft, placement: Placement, place: &str, check: &mut Check) {
    check.expect(body.name.as_str(), draft.name.as_str(), place, "name of the block");
    check.expect(body.parameters.len(), draft.parameters.len(), place, "number of parameters");
    for (found, expected) in body.parameters.iter().zip(&draft.parameters) {
        let place = format!("{place}, parameter {}", expected.name);
        check.expect(found.name.as_str(), expected.name, &place, "name");
        check.expect(found.tied, expected.tied, &place, "tied");
        let extent = |name: DimName, extent: Extent| match (name, extent) {
            (DimName::Vocabulary, _) => placement.split.padded_rows,
            (_, Extent::Fixed(size)) => size,
            (_, Extent::MicroBatch | Extent::Sequence) => 0,
        };
        let shape = expected.tensor.shape.iter().map(|dim| (dim.name, extent(dim.name, dim.extent))).collect();
        check.expect(&found.shape, &shape, &place, "shape");
        check.expect(
            found.stored,
            placement.stored(shape.iter().map(|(name, _)| *name)),
            &place,
            "stored distribution",
        );
    }
}

/// Kernels are disjoint runs of operators, loads and frees in order, each of several operators.
fn check_kernels(body: &Body, place: &str, check: &mut Check) {
    for pass in [PassKind::Forward, PassKind::Backward] {
        let instructions = match pass {
            PassKind::Forward => &body.forward,
            PassKind::Backward => &body.backward,
        };
        let mut before = 0;
        for (index, kernel) in body.kernels.iter().enumerate().filter(|(_, kernel)| kernel.pass == pass) {
            let place = format!("{place}, kernels[{index}]");
            let (start, end) = (kernel.instructions.0 as usize, kernel.instructions.1 as usize);
            let Some(run) = instructions.get(start..end).filter(|_| start >= before) else {
                check.report(format!("instructions {start} to {end} are no run after {before}"), &place, EDITED);
                continue;
            };
            before = end;
            let inside = |found: &Instruction| {
                matches!(found, Instruction::Compute(..) | Instruction::Load(..) | Instruction::Free(_))
            };
            let operator = |found: &Instruction| match found {
                Instruction::Compute(op, ..) => Some(*op),
                _ => None,
            };
            let ops: Vec<Op> = run.iter().filter_map(operator).collect();
            if !run.iter().all(inside) || kernel_pattern(&ops) != Some((kernel.kind, ops.len())) {
                check.report(format!("the run is no {:?}, or a collective stands in it", kernel.kind), &place, EDITED);
            }
        }
    }
}

/// Whether a value is alive.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Life {
    Unborn,
    Alive,
    Ended,
}

fn check_lives(body: &Body, place: &str, check: &mut Check) {
    let mut lives = vec![Life::Unborn; body.values.len()];
    if let Some(input) = body.input {
        lives[input.0 as usize] = Life::Alive;
    }
    live_through(body, &body.forward, &mut lives, &format!("{place}, forward"), check);
    if lives[body.output.0 as usize] != Life::Alive {
        check.report("the output does not exist at the end of forward", place, EDITED);
    }
    if let Some(gradient) = body.output_gradient {
        if lives[gradient.0 as usize] != Life::Unborn {
            check.report("forward writes the gradient of the output", place, EDITED);
        }
        lives[gradient.0 as usize] = Life::Alive;
    }
    live_through(body, &body.backward, &mut lives, &format!("{place}, backward"), check);
    for (index, life) in lives.iter().enumerate() {
        let value = ValueId(index as u32);
        let leaves = value == body.output || Some(value) == body.input_gradient;
        let expected = if leaves { Life::Alive } else { Life::Ended };
        if *life != expected {
            let what = match life {
                Life::Unborn => "is never written",
                Life::Alive => "is never freed",
                Life::Ended => "leaves the body but is freed",
            };
            check.report(format!("value {index} ({}) {what}", body.values[index].name), place, EDITED);
        }
    }
}

fn live_through(body: &Body, instructions: &[Instruction], lives: &mut [Life], place: &str, check: &mut Check) {
    // Conversions that have started: the result and the operand.
    let mut started: Vec<(ValueId, ValueId)> = Vec::new();
    for (line, instruction) in instructions.iter().enumerate() {
        let place = format!("{place}, instruction {line}");
        let name = |value: ValueId| body.values[value.0 as usize].name.clone();
        for value in instruction.reads() {
            if lives[value.0 as usize] != Life::Alive {
                check.report(format!("value {} ({}) is used but not alive", value.0, name(value)), &place, EDITED);
            }
        }
        if let Instruction::Free(value) = instruction {
            lives[value.0 as usize] = Life::Ended;
        }
        match instruction {
            Instruction::Start(_, _, from, to) => {
                if started.iter().any(|(other, _)| other == to) {
                    check.report(format!("the conversion into value {} starts twice", to.0), &place, EDITED);
                }
                started.push((*to, *from));
            }
            Instruction::Wait(from, to) => match started.iter().position(|pair| *pair == (*to, *from)) {
                Some(index) => drop(started.remove(index)),
                None => check.report(format!("the conversion into value {} has not started", to.0), &place, EDITED),
            },
            Instruction::Free(value) if started.iter().any(|(_, from)| from == value) => {
                check.report(format!("value {} is freed while it is converted", value.0), &place, EDITED);
            }
            _ => {}
        }
        if let Some(value) = instruction.writes() {
            if lives[value.0 as usize] != Life::Unborn {
                check.report(format!("value {} ({}) is written twice", value.0, name(value)), &place, EDITED);
            }
            lives[value.0 as usize] = Life::Alive;
        }
    }
    for (to, _) in started {
        check.report(format!("nobody waits for value {} ({})", to.0, body.values[to.0 as usize].name), place, EDITED);
    }
}

fn check_types(body: &Body, placement: Placement, place: &str, check: &mut Check) {
    let value = |id: ValueId| &body.values[id.0 as usize];
    for (index, instruction) in body.forward.iter().chain(&body.backward).enumerate() {
        let line = match index.checked_sub(body.forward.len()) {
            None => format!("{place}, forward, instruction {index}"),
            Some(index) => format!("{place}, backward, instruction {index}"),
        };
        match instruction {
            Instruction::Input(_, id) => {
                check.expect(
                    value(*id).distribution,
                    placement.stream(&value(*id).dim_names()),
                    &line,
                    "type of index data",
                );
            }
            Instruction::Load(parameter, id) => {
                let parameter = &body.parameters[*parameter as usize];
                check.expect(value(*id).distribution, parameter.stored, &line, "type of the stored parameter");
                let whole = |(name, size): &(DimName, u64)| Dim { name: *name, extent: Extent::Fixed(*size) };
                let shape: Vec<Dim> = parameter.shape.iter().map(whole).collect();
                check.expect(&value(*id).shape, &shape, &line, "shape of the stored parameter");
                check.expect(value(*id).element, Element::Model, &line, "number format of a parameter");
            }
            Instruction::Compute(op, operands, id) => check_operator(body, op, operands, *id, placement, &line, check),
            Instruction::Convert(conversion, axes, from, to) | Instruction::Start(conversion, axes, from, to) => {
                check_conversion(*conversion, axes, [value(*from), value(*to)], placement, &line, check);
            }
            Instruction::Accumulate(parameter, id) => {
                let parameter = &body.parameters[*parameter as usize];
                check.expect(value(*id).distribution, parameter.gradient, &line, "type of the accumulated gradient");
                check_gradient(parameter.gradient, parameter.stored, placement, &line, check);
            }
            Instruction::Wait(..) | Instruction::Free(_) => {}
        }
    }
    let ends = [body.input, body.output_gradient.map(|_| body.output), body.output_gradient, body.input_gradient];
    for id in ends.into_iter().flatten() {
        check.expect(
            value(id).distribution,
            placement.stream(&value(id).dim_names()),
            place,
            "type of an activation between blocks",
        );
    }
}

/// An accumulated gradient lies as its parameter or is a summand over tensor ranks; over replicas it is a
/// summand, or from ZeRO-2 on the owner's part.
fn check_gradient(gradient: Distribution, stored: Distribution, placement: Placement, line: &str, check: &mut Check) {
    for axis in [SplitAxis::Tensor, SplitAxis::Query] {
        let whole = stored.on(axis) == Place::Replicated && gradient.on(axis) == Place::PartialSum;
        if gradient.on(axis) != stored.on(axis) && !whole {
            check.report(format!("the gradient is {:?} over {axis:?}", gradient.on(axis)), line, EDITED);
        }
    }
    let expected = match placement.strategy.zero_stage {
        _ if placement.degree(SplitAxis::Data) == 1 => Place::Replicated,
        ZeroStage::None | ZeroStage::OptimizerState => Place::PartialSum,
        ZeroStage::Gradients | ZeroStage::Parameters => Place::Flat,
    };
    check.expect(gradient.data, expected, line, "place of the gradient over replicas");
}

fn check_operator(
    body: &Body,
    op: &Op,
    operands: &[ValueId],
    id: ValueId,
    placement: Placement,
    line: &str,
    check: &mut Check,
) {
    let value = |id: ValueId| &body.values[id.0 as usize];
    let dims: Vec<Vec<DimName>> = operands.iter().map(|operand| value(*operand).dim_names()).collect();
    let typed: Vec<Operand> = operands
        .iter()
        .zip(&dims)
        .map(|(operand, dims)| Operand { dims, distribution: value(*operand).distribution })
        .collect();
    match infer(op, &typed, &value(id).dim_names(), value(id).distribution) {
        Ok(found) => check.expect(value(id).distribution, placement.normal(found), line, "type of the result"),
        Err(error) => check.report(format!("{op:?} is not well typed: {error:?}"), line, EDITED),
    }
}

fn check_conversion(
    conversion: Conversion,
    axes: &[SplitAxis],
    ends: [&Value; 2],
    placement: Placement,
    line: &str,
    check: &mut Check,
) {
    let [from, to] = ends;
    if from.shape != to.shape || from.element != to.element {
        check.report("a conversion changes the shape or the number format", line, EDITED);
    }
    let sorted = axes.windows(2).all(|pair| pair[0] < pair[1]);
    if axes.is_empty() || !sorted || axes.iter().any(|axis| placement.degree(*axis) == 1) {
        check.report(format!("axes {axes:?} are no group of several ranks"), line, EDITED);
        return;
    }
    let (before, after) = match conversion {
        Conversion::AllReduceSum => (Place::PartialSum, Place::Replicated),
        Conversion::AllReduceMax => (Place::PartialMax, Place::Replicated),
        Conversion::AllGather(dim) => (Place::Sharded(dim), Place::Replicated),
        Conversion::ReduceScatter(dim) => (Place::PartialSum, Place::Sharded(dim)),
        Conversion::Slice(dim) => (Place::Replicated, Place::Sharded(dim)),
        Conversion::AllGatherFlat => (Place::Flat, Place::Replicated),
        Conversion::ReduceScatterFlat => (Place::PartialSum, Place::Flat),
    };
    let mut expected = from.distribution;
    for axis in axes {
        check.expect(from.distribution.on(*axis), before, line, "place before the conversion");
        expected = expected.with(*axis, after);
    }
    check.expect(to.distribution, expected, line, "type after the conversion");
    // Parts along a dim are numbered over all axes that split it, so it is split or joined at once.
    let dim = match conversion {
        Conversion::AllGather(dim) | Conversion::ReduceScatter(dim) | Conversion::Slice(dim) => dim,
        Conversion::AllReduceSum
        | Conversion::AllReduceMax
        | Conversion::AllGatherFlat
        | Conversion::ReduceScatterFlat => return,
    };
    let elsewhere = |axis: &SplitAxis| !axes.contains(axis) && from.distribution.on(*axis) == Place::Sharded(dim);
    if SplitAxis::ALL.iter().any(elsewhere) || !from.shape.iter().any(|other| other.name == dim) {
        check.report(format!("{dim:?} is not split or joined over all its axes at once"), line, EDITED);
    }
}

/// Where a value's numbers come from: conversions are looked through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Parameter(u32),
    Value(ValueId),
}

/// The steps left when conversions, loads and frees are taken out must be those of the draft.
fn check_computation(body: &Body, draft: &Draft, placement: Placement, place: &str, check: &mut Check) {
    let mut origins: BTreeMap<ValueId, Origin> = BTreeMap::new();
    for instruction in body.forward.iter().chain(&body.backward) {
        match instruction {
            Instruction::Load(parameter, value) => {
                origins.insert(*value, Origin::Parameter(*parameter));
            }
            Instruction::Convert(_, _, from, to) | Instruction::Start(_, _, from, to) => {
                let origin = origins.get(from).copied().unwrap_or(Origin::Value(*from));
                origins.insert(*to, origin);
            }
            Instruction::Input(..)
            | Instruction::Compute(..)
            | Instruction::Wait(..)
            | Instruction::Accumulate(..)
            | Instruction::Free(_) => {}
        }
    }
    let mut names: BTreeMap<ValueId, Origin> = BTreeMap::new();
    for (index, parameter) in draft.parameters.iter().enumerate() {
        names.insert(parameter.value, Origin::Parameter(index as u32));
    }
    let mut computation = Computation { body, draft, rows: placement.split.padded_rows, origins, names };
    computation.match_end(draft.input, body.input, place, check);
    computation.match_end(draft.output_gradient, body.output_gradient, place, check);
    computation.match_steps(&body.forward, &draft.forward, &format!("{place}, forward"), check);
    computation.match_steps(&body.backward, &draft.backward, &format!("{place}, backward"), check);
    computation.check_results(place, check);
}

/// A body and its draft side by side.
struct Computation<'a> {
    body: &'a Body,
    draft: &'a Draft,
    /// Vocabulary rows with those that padding adds.
    rows: u64,
    /// Where converted and loaded values come from.
    origins: BTreeMap<ValueId, Origin>,
    /// What stands in the body for each value of the draft.
    names: BTreeMap<ValueId, Origin>,
}

impl Computation<'_> {
    fn origin(&self, value: ValueId) -> Origin {
        self.origins.get(&value).copied().unwrap_or(Origin::Value(value))
    }

    fn name(&self, drafted: Option<ValueId>) -> Option<Origin> {
        drafted.and_then(|drafted| self.names.get(&drafted).copied())
    }

    /// An activation or gradient that arrives from outside.
    fn match_end(&mut self, drafted: Option<ValueId>, found: Option<ValueId>, place: &str, check: &mut Check) {
        check.expect(found.is_some(), drafted.is_some(), place, "ends of the body");
        if let (Some(drafted), Some(found)) = (drafted, found) {
            self.match_value(drafted, found, place, check);
        }
    }

    /// A value has the draft's dims, the vocabulary with the rows that padding adds.
    fn match_value(&mut self, drafted: ValueId, found: ValueId, place: &str, check: &mut Check) {
        let (expected, value) = (&self.draft.values[drafted.0 as usize].tensor, &self.body.values[found.0 as usize]);
        let padded = |dim: &Dim| match dim.name {
            DimName::Vocabulary => Dim { extent: Extent::Fixed(self.rows), ..*dim },
            _ => *dim,
        };
        let shape: Vec<Dim> = expected.shape.iter().map(padded).collect();
        check.expect(&value.shape, &shape, place, "shape of a value");
        check.expect(value.element, expected.element, place, "number format of a value");
        self.names.insert(drafted, Origin::Value(found));
    }

    fn match_steps(&mut self, instructions: &[Instruction], steps: &[Step], place: &str, check: &mut Check) {
        let is_step = |found: &&Instruction| matches!(found, Instruction::Compute(..) | Instruction::Input(..));
        let found: Vec<&Instruction> = instructions.iter().filter(is_step).collect();
        check.expect(found.len(), steps.len(), place, "operators of the block and its derivative");
        for (found, expected) in found.into_iter().zip(steps) {
            match (found, expected) {
                (Instruction::Input(kind, value), Step::Input(expected, drafted)) => {
                    check.expect(kind, expected, place, "index data");
                    self.match_value(*drafted, *value, place, check);
                }
                (Instruction::Compute(op, operands, value), Step::Compute(expected, drafted, result, _)) => {
                    let name = &self.draft.values[result.0 as usize].name;
                    check.expect(op, expected, place, &format!("operator of {name}"));
                    let operands: Vec<_> = operands.iter().map(|operand| Some(self.origin(*operand))).collect();
                    let drafted: Vec<_> = drafted.iter().map(|operand| self.name(Some(*operand))).collect();
                    check.expect(operands, drafted, place, &format!("operands of {name}"));
                    self.match_value(*result, *value, place, check);
                }
                _ => {
                    check.report("an operator stands where index data should, or the other way round", place, EDITED);
                    return;
                }
            }
        }
    }

    /// What leaves the body, and the gradients that it accumulates.
    fn check_results(&self, place: &str, check: &mut Check) {
        let (body, draft) = (self.body, self.draft);
        check.expect(Some(self.origin(body.output)), self.name(Some(draft.output)), place, "output of the body");
        let input_gradient = body.input_gradient.map(|gradient| self.origin(gradient));
        check.expect(input_gradient, self.name(draft.input_gradient), place, "gradient of the input");
        let accumulated = |instruction: &Instruction| match instruction {
            Instruction::Accumulate(parameter, value) => Some((*parameter, Some(self.origin(*value)))),
            _ => None,
        };
        let mut found: Vec<_> = body.backward.iter().filter_map(accumulated).collect();
        found.sort_by_key(|(parameter, _)| *parameter);
        let gradients = draft.parameters.iter().map(|parameter| self.name(parameter.gradient));
        let expected: Vec<_> = gradients.enumerate().map(|(index, origin)| (index as u32, origin)).collect();
        check.expect(found, expected, place, "accumulated gradients");
        if body.forward.iter().any(|instruction| matches!(instruction, Instruction::Accumulate(..))) {
            check.report("forward accumulates a gradient", place, EDITED);
        }
    }
}
