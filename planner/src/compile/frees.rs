//! Ends each value's life after its last reader.
//!
//! Forward frees what neither backward nor the caller reads; what is left is kept until backward's last
//! reader. Values that leave the body are the caller's to free.

use std::collections::BTreeSet;

use ir::program::{Body, Instruction, ValueId};

/// Inserts frees into both passes.
pub fn insert_frees(mut body: Body) -> Body {
    let leaving: BTreeSet<ValueId> = [Some(body.output), body.input_gradient].into_iter().flatten().collect();
    let needed: BTreeSet<ValueId> =
        body.backward.iter().flat_map(Instruction::reads).chain(leaving.iter().copied()).collect();
    let forward_values: BTreeSet<ValueId> =
        body.forward.iter().filter_map(Instruction::writes).chain(body.input).collect();
    body.forward = with_frees(body.forward, &needed, body.input);
    // Backward owns what forward kept, what it computes itself, and the gradient it was given.
    let kept = forward_values.into_iter().filter(|value| needed.contains(value));
    let given = kept.chain(body.output_gradient);
    body.backward = with_frees(body.backward, &leaving, given);
    body
}

/// Frees `given` values and those written, except `spared`, after their last reader.
fn with_frees(
    instructions: Vec<Instruction>,
    spared: &BTreeSet<ValueId>,
    given: impl IntoIterator<Item = ValueId>,
) -> Vec<Instruction> {
    let mut alive: BTreeSet<ValueId> = given.into_iter().filter(|value| !spared.contains(value)).collect();
    alive.extend(instructions.iter().filter_map(Instruction::writes).filter(|value| !spared.contains(value)));
    let mut reversed = Vec::with_capacity(instructions.len());
    for instruction in instructions.into_iter().rev() {
        // A value that nobody reads ends where it is written.
        let mut ending: Vec<ValueId> = instruction.reads().into_iter().chain(instruction.writes()).collect();
        ending.sort_unstable();
        ending.dedup();
        reversed.extend(ending.into_iter().filter(|value| alive.remove(value)).map(Instruction::Free));
        reversed.push(instruction);
    }
    // What is given but never read ends at once.
    reversed.extend(alive.into_iter().map(Instruction::Free));
    reversed.reverse();
    reversed
}
