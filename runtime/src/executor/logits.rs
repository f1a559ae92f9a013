//! Logits of a batch: the evaluation's passes, of which the head's ends where it has computed them.

use std::sync::Arc;

use ir::graph::DimName;

use super::steps::{Charged, RankBody, Step};
use super::{Executor, MicroBatches};
use crate::Error;
use crate::tensor::{StepKind, Tensor};

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
        self.run(input, StepKind::Logits)
    }

    /// The logits of a micro-batch, in the host's memory.
    pub(super) fn logits_of(
        &mut self,
        (body, layer, batch): (u32, u64, u64),
        input: &MicroBatches,
    ) -> Result<Logits, Error> {
        let code = Arc::clone(&self.bodies[body as usize]);
        let (steps, value, vocabulary_start) = until_logits(&code);
        let mut frame = self.enter(&code, batch);
        self.execute(&code, steps, (body, layer, batch), &mut frame, input)?;
        let values = frame.take(value);
        let values = if self.memory.is_tracing() { values } else { values.on_host(&self.memory.of_host())? };
        Ok(Logits { values, vocabulary_start })
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
