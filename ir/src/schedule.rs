//! Schedules with their loops unrolled for a number of micro-batches.

use crate::program::{Conversion, Direction, Index, StageInstruction};

/// An instruction of a schedule with its indices as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Takes what a neighbour sent for a micro-batch.
    Receive(Direction, u64),
    /// Hands what a micro-batch has reached to a neighbour.
    Send(Direction, u64),
    /// Forward pass: body, layer, micro-batch.
    Forward(u32, u64, u64),
    /// Backward pass: body, layer, micro-batch.
    Backward(u32, u64, u64),
    /// Starts the sum of gradients over replicas: body, layer, parameters.
    StartReduction(u32, u64, (u32, u32), Conversion),
}

/// Unrolls a schedule into at most `limit` passes.
///
/// # Errors
/// An index outside its loops or below zero, or more passes than the limit.
pub fn unroll(schedule: &[StageInstruction], micro_batches: u64, limit: usize) -> Result<Vec<Pass>, String> {
    let mut unrolled = Unrolled { micro_batches, limit, rounds: 0, loops: Vec::new(), passes: Vec::new() };
    unrolled.append(schedule)?;
    Ok(unrolled.passes)
}

struct Unrolled {
    micro_batches: u64,
    limit: usize,
    rounds: usize,
    loops: Vec<u64>,
    passes: Vec<Pass>,
}

impl Unrolled {
    fn append(&mut self, schedule: &[StageInstruction]) -> Result<(), String> {
        for instruction in schedule {
            let pass = match instruction {
                StageInstruction::Repeat(count, body) => {
                    for round in 0..count.value(self.micro_batches) {
                        self.rounds += 1;
                        self.check_limit()?;
                        self.loops.push(round);
                        self.append(body)?;
                        self.loops.pop();
                    }
                    continue;
                }
                StageInstruction::Receive(direction, batch) => Pass::Receive(*direction, self.at(batch)?),
                StageInstruction::Send(direction, batch) => Pass::Send(*direction, self.at(batch)?),
                StageInstruction::Forward(body, layer, batch) => Pass::Forward(*body, self.at(layer)?, self.at(batch)?),
                StageInstruction::Backward(body, layer, batch) => {
                    Pass::Backward(*body, self.at(layer)?, self.at(batch)?)
                }
                StageInstruction::StartReduction(body, layer, parameters, conversion) => {
                    Pass::StartReduction(*body, self.at(layer)?, *parameters, *conversion)
                }
            };
            self.passes.push(pass);
            self.check_limit()?;
        }
        Ok(())
    }

    fn check_limit(&self) -> Result<(), String> {
        match self.passes.len().max(self.rounds) > self.limit {
            true => Err(format!("the schedule has more than {} passes", self.limit)),
            false => Ok(()),
        }
    }

    fn at(&self, index: &Index) -> Result<u64, String> {
        let outside = || format!("index {index:?} is outside its loops");
        index.value(self.micro_batches, &self.loops).ok_or_else(outside)
    }
}
