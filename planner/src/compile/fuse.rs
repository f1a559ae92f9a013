//! Names the runs of instructions that one kernel computes.
//!
//! A run matches a pattern of `ir::kernel`, operator by operator; loads and frees may stand between. A
//! collective ends a run, so no kernel reaches across one. What is computed does not change.

use ir::kernel::{Kernel, PassKind, kernel_pattern};
use ir::program::{Body, Instruction, Op};

/// Lists the kernels of both passes.
pub fn fuse(mut body: Body) -> Body {
    let mut kernels = kernels_of(&body.forward, PassKind::Forward);
    kernels.extend(kernels_of(&body.backward, PassKind::Backward));
    body.kernels = kernels;
    body
}

fn kernels_of(instructions: &[Instruction], pass: PassKind) -> Vec<Kernel> {
    let mut kernels = Vec::new();
    let mut next = 0;
    while next < instructions.len() {
        let run = computing_run(&instructions[next..]);
        let ops: Vec<Op> = run.iter().map(|(_, op)| *op).collect();
        match kernel_pattern(&ops) {
            Some((kind, length)) if run[0].0 == 0 => {
                let end = next + run[length - 1].0 + 1;
                kernels.push(Kernel { pass, kind, instructions: (next as u32, end as u32) });
                next = end;
            }
            _ => next += 1,
        }
    }
    kernels
}

/// Operators up to the next collective or accumulation, with their distance from the start.
fn computing_run(instructions: &[Instruction]) -> Vec<(usize, Op)> {
    let mut run = Vec::new();
    for (distance, instruction) in instructions.iter().enumerate() {
        match instruction {
            Instruction::Compute(op, ..) => run.push((distance, *op)),
            Instruction::Load(..) | Instruction::Free(_) => {}
            Instruction::Input(..)
            | Instruction::Convert(..)
            | Instruction::Start(..)
            | Instruction::Wait(..)
            | Instruction::Accumulate(..) => break,
        }
    }
    run
}
