//! The order in which a stage executes its passes under each schedule.

use ir::pipeline::Pipeline;
use ir::strategy::ScheduleKind;

/// What a pass computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassKind {
    /// The forward pass.
    Forward,
    /// The backward pass; without gradients of weights where the schedule splits it.
    Backward,
    /// Gradients of weights.
    Weights,
}

/// A pass of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagePass {
    /// What it computes.
    pub kind: PassKind,
    /// Which part of the model on the stage.
    pub part: u64,
    /// Of which micro-batch.
    pub micro_batch: u64,
}

/// Passes of a stage in order.
///
/// GPipe: arXiv 1811.06965. 1F1B and interleaved: arXiv 2104.04473, section 2.2, in the order of Megatron-LM. ZB-H1:
/// arXiv 2401.10241, figure 3 top: 1F1B in which stage r starts its weight gradients after r + 1 backward passes.
/// ZB-V: arXiv 2401.10241, section 6.
pub fn pass_order(pipeline: Pipeline, stage: u64) -> Vec<StagePass> {
    let mut order = Order::default();
    let batches = pipeline.micro_batches;
    match pipeline.schedule {
        ScheduleKind::GPipe => {
            (0..batches).for_each(|batch| order.add(PassKind::Forward, 0, batch));
            (0..batches).for_each(|batch| order.add(PassKind::Backward, 0, batch));
        }
        ScheduleKind::OneForwardOneBackward | ScheduleKind::ZeroBubbleH1 => one_part(pipeline, stage, &mut order),
        ScheduleKind::Interleaved => interleaved(pipeline, stage, &mut order),
        ScheduleKind::ZeroBubbleV => v_shaped(pipeline, stage, &mut order),
    }
    order.passes
}

/// Passes so far, and the next micro-batch of each kind of pass and part.
#[derive(Default)]
struct Order {
    passes: Vec<StagePass>,
    next: [[u64; 2]; 3],
}

impl Order {
    fn add(&mut self, kind: PassKind, part: u64, micro_batch: u64) {
        self.passes.push(StagePass { kind, part, micro_batch });
    }

    /// The pass of the next micro-batch.
    fn add_next(&mut self, kind: PassKind, part: u64) {
        let micro_batch = self.done(kind, part);
        self.next[kind as usize][part as usize] += 1;
        self.add(kind, part, micro_batch);
    }

    fn done(&self, kind: PassKind, part: u64) -> u64 {
        self.next[kind as usize][part as usize]
    }
}

fn one_part(pipeline: Pipeline, stage: u64, order: &mut Order) {
    let Pipeline { num_stages, micro_batches, .. } = pipeline;
    let splits = pipeline.schedule.splits_backward();
    let warm_up = micro_batches.min(num_stages - stage - 1);
    (0..warm_up).for_each(|_| order.add_next(PassKind::Forward, 0));
    for batch in 0..micro_batches {
        if order.done(PassKind::Forward, 0) < micro_batches {
            order.add_next(PassKind::Forward, 0);
        }
        order.add_next(PassKind::Backward, 0);
        if splits && batch >= stage {
            order.add_next(PassKind::Weights, 0);
        }
    }
    while splits && order.done(PassKind::Weights, 0) < micro_batches {
        order.add_next(PassKind::Weights, 0);
    }
}

/// Groups of micro-batches pass all parts of a stage before the next group begins.
fn interleaved(pipeline: Pipeline, stage: u64, order: &mut Order) {
    let Pipeline { num_stages, virtual_stages, micro_batches, .. } = pipeline;
    let group = pipeline.group();
    let round = group * virtual_stages;
    let all = micro_batches * virtual_stages;
    let at = |index: u64| (index % round / group, index / round * group + index % group);
    let warm_up = all.min(2 * (num_stages - stage - 1) + (virtual_stages - 1) * group);
    let forward = |order: &mut Order, index: u64| order.add(PassKind::Forward, at(index).0, at(index).1);
    (0..warm_up).for_each(|index| forward(order, index));
    for index in 0..all {
        if index + warm_up < all {
            forward(order, index + warm_up);
        }
        order.add(PassKind::Backward, virtual_stages - 1 - at(index).0, at(index).1);
    }
}

fn v_shaped(pipeline: Pipeline, stage: u64, order: &mut Order) {
    use PassKind::{Backward, Forward, Weights};
    let Pipeline { num_stages, micro_batches, .. } = pipeline;
    let ordered = micro_batches.max(2 * num_stages - 1);
    let behind = num_stages - stage;
    let back = |order: &mut Order, part| {
        order.add_next(Backward, part);
        order.add_next(Weights, part);
    };
    (0..2 * behind - 1).for_each(|_| order.add_next(Forward, 0));
    for _ in 0..stage {
        order.add_next(Forward, 1);
        order.add_next(Forward, 0);
    }
    for _ in 0..behind {
        order.add_next(Forward, 1);
        back(order, 1);
    }
    while order.done(Forward, 1) < ordered {
        if order.done(Forward, 0) < ordered {
            order.add_next(Forward, 0);
        }
        back(order, 0);
        order.add_next(Forward, 1);
        back(order, 1);
    }
    for _ in 0..stage {
        order.add_next(Backward, 0);
        order.add_next(Backward, 1);
    }
    (0..behind).for_each(|_| back(order, 0));
    for part in [1, 0] {
        while order.done(Weights, part) < ordered {
            order.add_next(Weights, part);
        }
    }
    order.passes.retain(|pass| pass.micro_batch < micro_batches);
}

#[cfg(test)]
mod tests {
    use ir::pipeline::held_states;
    use proptest::prelude::*;

    use super::*;
    use crate::pipeline::tests::allowed;

    /// The most that a stage holds of all parts, walking its passes; an activation has one byte, a weight input `ratio`.
    fn walked_peak(pipeline: Pipeline, stage: u64, ratio: f64) -> f64 {
        let splits = pipeline.schedule.splits_backward();
        let (mut held, mut peak) = (0.0f64, 0.0f64);
        for pass in pass_order(pipeline, stage) {
            held += match pass.kind {
                PassKind::Forward => 1.0,
                PassKind::Backward if splits => ratio - 1.0,
                PassKind::Backward => -1.0,
                PassKind::Weights => -ratio,
            };
            peak = peak.max(held);
        }
        peak
    }

    fn stated_peak(pipeline: Pipeline, stage: u64, ratio: f64) -> f64 {
        let of = |state: ir::pipeline::HeldState| -> f64 {
            let held = (0..pipeline.virtual_stages).map(|part| state.of_part(part));
            held.map(|held| held.activations as f64 + held.weight_inputs as f64 * ratio).sum()
        };
        held_states(pipeline, stage).map(of).into_iter().fold(0.0, f64::max)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn what_stages_hold_is_what_their_passes_hold(
            kind in 0usize..5, stages in 1u64..10, parts in 2u64..5, batches in 1u64..40, ratio in 0.0f64..4.0,
        ) {
            let pipeline = allowed(ScheduleKind::ALL[kind], stages, parts, batches);
            for stage in 0..stages {
                let [walked, stated] = [walked_peak, stated_peak].map(|peak| peak(pipeline, stage, ratio));
                prop_assert!((walked - stated).abs() < 1e-9, "{pipeline:?} {stage}: {walked} walked, {stated} stated");
            }
        }

        #[test]
        fn every_pass_comes_once(
            kind in 0usize..5, stages in 1u64..8, batches in 1u64..20,
        ) {
            let schedule = ScheduleKind::ALL[kind];
            let virtual_stages = (1..3).find(|parts| schedule.allows_virtual_stages(*parts)).unwrap_or(1);
            let whole = schedule.allows_micro_batches(batches, stages);
            let micro_batches = if whole { batches } else { batches * stages };
            let pipeline = Pipeline { schedule, num_stages: stages, virtual_stages, micro_batches };
            let kinds = if schedule.splits_backward() { 3 } else { 2 };
            for stage in 0..stages {
                let mut passes: Vec<_> = pass_order(pipeline, stage)
                    .into_iter()
                    .map(|pass| (pass.kind as usize, pass.part, pass.micro_batch))
                    .collect();
                passes.sort_unstable();
                passes.dedup();
                prop_assert_eq!(passes.len() as u64, kinds * virtual_stages * micro_batches);
                prop_assert_eq!(pass_order(pipeline, stage).len(), passes.len());
            }
        }
    }
}
