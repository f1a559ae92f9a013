//! Logits of a batch: the evaluation's passes, of which the head's ends where it has computed them.

use std::sync::Arc;

use ir::graph::DimName;
use ir::schedule::Pass;

use super::steps::{Charged, RankBody, Step};
use super::{Executor, Kept, MicroBatches};
use crate::Error;
use crate::tensor::Tensor;

/// This rank's part of a micro-batch's logits.
#[derive(Clone, Debug)]
pub struct Logits {
    /// `[micro_batch, sequence, vocabulary / tensor_parallel]`, before padding is masked.
    pub values: Tensor,
    /// The vocabulary's first row here.
    pub vocabulary_start: usize,
}

impl Executor<'_> {
    /// Runs the forward passes as far as the logits; gives those of this replica's micro-batches, in order, on ranks
    /// of the last stage and nothing on others. All ranks must call it.
    ///
    /// # Errors
    /// A lost rank or link.
    pub fn logits(&mut self, input: &MicroBatches) -> Result<Vec<Logits>, Error> {
        let program = self.program;
        let head = program.bodies.len() as u32 - 1;
        let mut logits = Vec::new();
        for pass in self.start(&program.stages[self.place.stage].evaluation, input) {
            match pass {
                Pass::Forward(body, layer, batch) if body == head => {
                    logits.push(self.logits_of((body, layer, batch), input)?);
                }
                pass => self.run_pass(pass, input, Kept::Never)?,
            }
        }
        Ok(logits)
    }

    fn logits_of(&mut self, (body, layer, batch): (u32, u64, u64), input: &MicroBatches) -> Result<Logits, Error> {
        let code = Arc::clone(&self.bodies[body as usize]);
        let (steps, value, vocabulary_start) = until_logits(&code);
        let mut frame = self.enter(&code, batch);
        self.execute(&code, steps, (body, layer, batch), &mut frame, input)?;
        Ok(Logits { values: frame.take(value), vocabulary_start })
    }
}

/// The steps of a head up to its logits, which value these are, and which row of the vocabulary is their first.
fn until_logits(head: &RankBody) -> (&[Charged], usize, usize) {
    let has_vocabulary = |value: usize| head.values[value].dims.iter().any(|(name, _)| *name == DimName::Vocabulary);
    let found = head.forward.iter().enumerate().find_map(|(line, Charged { step, .. })| match step {
        Step::Compute(_, _, value, place) if has_vocabulary(*value) => Some((line, *value, place.vocabulary_start)),
        _ => None,
    });
    let (line, value, start) = found.expect("a head multiplies by its weight");
    (&head.forward[..=line], value, start)
}
