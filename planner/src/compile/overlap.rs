//! Starts collectives of the data axis early and waits for them late.
//!
//! A gather of stored parameters depends on nothing, so all of a pass's gathers start at its beginning; a
//! reduction starts when its operand is written. Each is waited for before its first reader. Collectives
//! of the tensor axis stay where they are: what follows them needs their result at once.

use ir::distribution::SplitAxis;
use ir::program::{Body, Instruction, ValueId};

/// Splits the data axis's conversions of both passes into starts and waits.
pub fn overlap(mut body: Body) -> Body {
    body.forward = overlapped(body.forward);
    body.backward = overlapped(body.backward);
    body
}

fn overlapped(instructions: Vec<Instruction>) -> Vec<Instruction> {
    let (moved, rest): (Vec<Instruction>, Vec<Instruction>) = instructions.into_iter().partition(is_on_data_axis);
    let mut waits: Vec<(ValueId, ValueId)> = Vec::new();
    let mut starts: Vec<Instruction> = Vec::new();
    for instruction in moved {
        let Instruction::Convert(conversion, axes, from, to) = instruction else { continue };
        waits.push((from, to));
        starts.push(Instruction::Start(conversion, axes, from, to));
    }
    let loads_of_gathered = |instruction: &Instruction| match instruction {
        Instruction::Load(_, value) => waits.iter().any(|(from, _)| from == value),
        _ => false,
    };
    let (loads, rest): (Vec<Instruction>, Vec<Instruction>) = rest.into_iter().partition(loads_of_gathered);
    let at_once = |instruction: &Instruction| match instruction {
        Instruction::Accumulate(_, value) => waits.iter().all(|(_, to)| to != value),
        _ => false,
    };
    let (mut accumulations, rest): (Vec<Instruction>, Vec<Instruction>) = rest.into_iter().partition(at_once);
    let mut result = Vec::new();
    for instruction in loads.into_iter().chain(rest) {
        let read = instruction.reads();
        let (due, later): (Vec<_>, Vec<_>) = waits.into_iter().partition(|(_, to)| read.contains(to));
        result.extend(due.into_iter().map(|(from, to)| Instruction::Wait(from, to)));
        waits = later;
        let written = instruction.writes();
        result.push(instruction);
        let (known, later): (Vec<_>, Vec<_>) =
            accumulations.into_iter().partition(|sum| written.is_some_and(|value| sum.reads().contains(&value)));
        result.extend(known);
        accumulations = later;
        let (ready, later): (Vec<_>, Vec<_>) =
            starts.into_iter().partition(|start| written.is_some_and(|value| start.reads().contains(&value)));
        result.extend(ready);
        starts = later;
    }
    // A gradient that arrived from outside the pass.
    result.extend(accumulations);
    result
}

fn is_on_data_axis(instruction: &Instruction) -> bool {
    matches!(instruction, Instruction::Convert(_, axes, ..) if axes == &[SplitAxis::Data])
}
