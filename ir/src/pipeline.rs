//! Where the parts of a model lie on pipeline stages, and what each stage holds when it holds the most.
//!
//! A part is the run of layers between two transfers: a stage has one, or `virtual_stages` of them. All counts are
//! exact for the order of passes that `cost-models` times, for any number of micro-batches; a test walks the orders.

use crate::strategy::{ScheduleKind, Strategy};

/// What the order of passes depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pipeline {
    /// The schedule.
    pub schedule: ScheduleKind,
    /// Stages.
    pub num_stages: u64,
    /// Parts of the model on each stage.
    pub virtual_stages: u64,
    /// Micro-batches of a step on each replica.
    pub micro_batches: u64,
}

/// What a stage holds of one part, in micro-batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Gone forward, not yet backward: everything that backward needs.
    pub activations: u64,
    /// Gone backward as far as the part's input: what the gradients of its weights still need.
    pub weight_inputs: u64,
}

/// What a stage holds at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldState {
    /// Of its only part.
    One(Held),
    /// Of both parts of a V.
    Two([Held; 2]),
    /// So many forward passes of interleaved parts, from the first on; none of them backward.
    Interleaved {
        /// Forward passes.
        passes: u64,
        /// Micro-batches that a part takes in a row.
        group: u64,
        /// Parts on the stage.
        virtual_stages: u64,
    },
}

impl HeldState {
    /// Of one part.
    pub fn of_part(self, part: u64) -> Held {
        match self {
            HeldState::One(held) => held,
            HeldState::Two(held) => held[part as usize],
            HeldState::Interleaved { passes, group, virtual_stages } => {
                let round = group * virtual_stages;
                let begun = (passes % round).saturating_sub(part * group).min(group);
                Held { activations: passes / round * group + begun, weight_inputs: 0 }
            }
        }
    }
}

impl Pipeline {
    /// That of a strategy.
    pub fn of(strategy: &Strategy) -> Pipeline {
        Pipeline {
            schedule: strategy.schedule,
            num_stages: strategy.pipeline_parallel,
            virtual_stages: strategy.virtual_stages,
            micro_batches: strategy.num_micro_batches(),
        }
    }

    /// Micro-batches that an interleaved part takes in a row: one for each stage.
    pub fn group(self) -> u64 {
        self.num_stages.min(self.micro_batches).max(1)
    }

    /// Parts of the model on all stages.
    pub fn num_parts(self) -> u64 {
        self.num_stages * self.virtual_stages
    }

    /// Place of a stage's part in model order, from 0.
    ///
    /// Interleaved: parts go round the stages (arXiv 2104.04473, section 2.2.2). ZB-V: down the stages and back
    /// (arXiv 2401.10241, section 6), so that first and last part share a stage.
    pub fn position(self, stage: u64, part: u64) -> u64 {
        match (self.schedule, part) {
            (ScheduleKind::ZeroBubbleV, 1) => (2 * self.num_stages - 1).saturating_sub(stage),
            _ => part * self.num_stages + stage,
        }
    }

    /// Stage and part of a place in model order.
    pub fn stage_and_part(self, position: u64) -> (u64, u64) {
        let stages = self.num_stages;
        match self.schedule {
            ScheduleKind::ZeroBubbleV if position >= stages => (2 * stages - 1 - position, 1),
            _ => (position % stages, position / stages),
        }
    }
}

/// The fullest moments of a stage, one of which is the fullest whatever the two kinds of bytes are (some repeat).
///
/// With p stages, stage r and m micro-batches:
/// - GPipe: all m (arXiv 1811.06965); 1F1B: min(p − r, m) (arXiv 2104.04473, section 2.2);
/// - interleaved, v parts: 2(p − r − 1) + (v − 1) min(p, m) + 1 passes (arXiv 2104.04473, section 2.2.2, as
///   Megatron-LM orders them), counted at the end of the warm-up;
/// - ZB-H1: 1F1B's, and the weight inputs of r micro-batches, whose weight gradients are delayed by that many so
///   that all stages hold p (arXiv 2401.10241, section 2.1);
/// - ZB-V: 2p passes over both parts; weight gradients follow at once but in the last r passes of each part
///   (arXiv 2401.10241, section 6).
pub fn held_states(pipeline: Pipeline, stage: u64) -> [HeldState; 3] {
    let Pipeline { schedule, num_stages: stages, virtual_stages, micro_batches: batches } = pipeline;
    let behind = stages.saturating_sub(stage);
    let one = |activations, weight_inputs| HeldState::One(Held { activations, weight_inputs });
    match schedule {
        ScheduleKind::GPipe => [one(batches, 0); 3],
        ScheduleKind::OneForwardOneBackward => [one(behind.min(batches), 0); 3],
        ScheduleKind::Interleaved => {
            let group = pipeline.group();
            let ahead = 2 * behind.saturating_sub(1) + (virtual_stages - 1) * group + 1;
            let passes = ahead.min(batches * virtual_stages);
            [HeldState::Interleaved { passes, group, virtual_stages }; 3]
        }
        ScheduleKind::ZeroBubbleH1 => {
            let forward = behind.min(batches);
            let delayed = stage.min(batches - forward);
            let more = (stage + 1 - delayed).min(forward);
            [one(forward, delayed), one(forward - more, delayed + more), one(forward, delayed)]
        }
        ScheduleKind::ZeroBubbleV => held_states_of_v(stages, stage, batches),
    }
}

/// ZB-V: after the last forward pass of the warm-up, after the backward pass that follows, and when the delayed
/// weight gradients are most.
fn held_states_of_v(stages: u64, stage: u64, batches: u64) -> [HeldState; 3] {
    let behind = stages.saturating_sub(stage);
    // Fewer micro-batches leave passes of this order out.
    let ordered = batches.max(2 * stages - 1);
    let left_from = |start: u64, most: u64| batches.saturating_sub(start).min(most);
    let held = |activations, weight_inputs| Held { activations, weight_inputs };
    let [first, second] = [batches.min(stages + behind - 1), batches.min(stage + 1)];
    let delayed = [left_from(ordered - stages, stage), left_from(ordered.saturating_sub(stage), stage)];
    let last = left_from(ordered - behind, behind);
    let begun = last.min(1);
    [
        HeldState::Two([held(first, 0), held(second, 0)]),
        HeldState::Two([held(first, 0), held(second.saturating_sub(1), 1)]),
        HeldState::Two([held(last - begun, delayed[0] + begun), held(0, delayed[1])]),
    ]
}

/// Passes whose activations a stage holds at once: micro-batches, or micro-batches times parts.
pub fn in_flight(pipeline: Pipeline, stage: u64) -> u64 {
    let [fullest, _, _] = held_states(pipeline, stage);
    match fullest {
        HeldState::One(held) => held.activations,
        HeldState::Two([first, second]) => first.activations + second.activations,
        HeldState::Interleaved { passes, .. } => passes,
    }
}
