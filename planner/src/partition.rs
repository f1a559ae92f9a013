//! The split of layers into pipeline stages, and which of them backward computes again: the problem, and two
//! independent solvers of it.
//!
//! [`solve_by_threshold`] is exact and what the search uses; [`solve_by_integer_program`] states the
//! same problem to a MILP solver and is the check on it.

mod balance;
mod bound;
mod integer_program;
mod state;
#[cfg(test)]
mod tests;
mod threshold;

use ir::model::MAX_LAYER_RUNS;

pub use bound::slowest_lower_bound;
pub use integer_program::solve_by_integer_program;
pub use state::{recompute_to_fit, stage_contents, state_problem};
pub use threshold::{can_split, solve_by_threshold, solve_evenly, split_evenly, split_for_least_memory};

/// Layers of each run on one stage.
pub type LayerCounts = [u64; MAX_LAYER_RUNS];

/// Layers of a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageShare {
    /// Of each run.
    pub layers: LayerCounts,
    /// Those of them that partial recomputation computes again.
    pub recomputed: LayerCounts,
}

impl From<LayerCounts> for StageShare {
    /// Nothing is computed again.
    fn from(layers: LayerCounts) -> StageShare {
        StageShare { layers, recomputed: LayerCounts::default() }
    }
}

/// Which layers may be computed again so that a stage fits into memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeats {
    /// None: what is recomputed is the same for all layers, and part of their coefficients.
    Never,
    /// So many of each stage, its first ones.
    First(u64),
    /// The same number of each stage's first ones, left open (Megatron-LM, `--recompute-num-layers`).
    SameOnEachStage,
    /// Any number on each stage.
    PerStage,
}

/// Place the runs' layers in order on stages, and choose which of them are computed again, so that the slowest stage
/// is as fast as possible, each stage stays within memory and holds its least number of layers.
#[derive(Clone, Debug, PartialEq)]
pub struct PartitionProblem {
    /// Layers of each run, in model order.
    pub layers: LayerCounts,
    /// Seconds of a layer of each run for one micro-batch.
    pub layer_time: [f64; MAX_LAYER_RUNS],
    /// Seconds more where the layer is computed again.
    pub repeat_time: [f64; MAX_LAYER_RUNS],
    /// Which layers may be computed again.
    pub repeats: Repeats,
    /// Stages, first to last, or parts of the model in its order where stages have several.
    pub stages: Vec<StageTerms>,
    /// The stage that each of these lies on.
    pub stage_of: Vec<usize>,
    /// Bytes that a rank may use.
    pub capacity: f64,
}

/// What a stage costs beside its layers, and what a layer costs there.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageTerms {
    /// Fewest layers.
    pub least_layers: u64,
    /// Seconds without any layer.
    pub fixed_time: f64,
    /// Bytes without any layer.
    pub fixed_memory: f64,
    /// Bytes of a layer of each run; more on early stages, which hold more micro-batches.
    pub layer_memory: [f64; MAX_LAYER_RUNS],
    /// Bytes less where the layer is computed again.
    pub saved_memory: [f64; MAX_LAYER_RUNS],
    /// Bytes in which layers are computed again, once there is one.
    pub repeat_memory: f64,
}

impl PartitionProblem {
    /// Whether stages hold several parts of the model.
    pub fn has_parts(&self) -> bool {
        self.stage_of.iter().max().is_some_and(|last| last + 1 < self.stages.len())
    }

    /// Seconds of a stage that holds `share`.
    pub fn time(&self, stage: usize, share: StageShare) -> f64 {
        self.stages[stage].fixed_time + dot(share.layers, self.layer_time) + dot(share.recomputed, self.repeat_time)
    }

    /// Bytes of a stage that holds `share`.
    pub fn memory(&self, stage: usize, share: StageShare) -> f64 {
        let terms = &self.stages[stage];
        let repeat = if share.recomputed == LayerCounts::default() { 0.0 } else { terms.repeat_memory };
        let layers = dot(share.layers, terms.layer_memory);
        terms.fixed_memory + layers + repeat - dot(share.recomputed, terms.saved_memory)
    }

    /// Seconds of the slowest stage.
    pub fn slowest(&self, split: &[StageShare]) -> f64 {
        split.iter().enumerate().map(|(stage, share)| self.time(stage, *share)).fold(0.0, f64::max)
    }

    /// Bytes of the fullest stage.
    pub fn fullest(&self, split: &[StageShare]) -> f64 {
        split.iter().enumerate().map(|(stage, share)| self.memory(stage, *share)).fold(0.0, f64::max)
    }

    /// Seconds of the mean stage with nothing computed again: no slowest stage is faster.
    fn mean_time(&self) -> f64 {
        let fixed: f64 = self.stages.iter().map(|stage| stage.fixed_time).sum();
        (fixed + dot(self.layers, self.layer_time)) / self.stages.len() as f64
    }

    /// A time that no stage of so many layers beats.
    fn fastest_of(&self, layers: u64) -> f64 {
        let fixed = self.stages.iter().map(|stage| stage.fixed_time).fold(f64::INFINITY, f64::min);
        let used = self.layers.into_iter().zip(self.layer_time).filter(|(count, _)| *count > 0);
        fixed + layers as f64 * used.map(|(_, time)| time).fold(f64::INFINITY, f64::min)
    }

    /// The fastest way for a stage to hold layers within memory, or `None` if there is none.
    ///
    /// Complexity: O(layers of the first run) with recomputation open, else O(1).
    fn share(&self, stage: usize, layers: LayerCounts) -> Option<StageShare> {
        let whole = StageShare::from(layers);
        let limit = self.capacity * (1.0 + threshold::TOLERANCE);
        let fits = |share: &StageShare| self.memory(stage, *share) <= limit;
        match self.repeats {
            Repeats::Never => Some(whole).filter(fits),
            Repeats::First(count) => {
                let first = layers[0].min(count);
                let recomputed = [first, layers[1].min(count - first)];
                Some(StageShare { layers, recomputed }).filter(fits)
            }
            Repeats::PerStage | Repeats::SameOnEachStage if fits(&whole) => Some(whole),
            Repeats::PerStage | Repeats::SameOnEachStage => {
                let terms = &self.stages[stage];
                let excess = self.memory(stage, whole) + terms.repeat_memory - limit;
                self.cheapest_repeats(layers, excess, terms.saved_memory)
                    .map(|recomputed| StageShare { layers, recomputed })
            }
        }
    }

    /// The layers that save `excess` bytes in the least time; of equally fast choices the one with fewest of the first
    /// run.
    fn cheapest_repeats(&self, layers: LayerCounts, excess: f64, saved: [f64; MAX_LAYER_RUNS]) -> Option<LayerCounts> {
        let needed = |bytes: f64, each: f64| if bytes <= 0.0 { 0.0 } else { (bytes / each).ceil() };
        let beside = layers[1] as f64 * saved[1];
        let least = needed(excess - beside, saved[0]);
        let choices = (least as u64..=layers[0]).filter_map(|first| {
            let second = needed(excess - first as f64 * saved[0], saved[1]);
            (second <= layers[1] as f64).then_some([first, second as u64])
        });
        // Of one run as few as save enough are cheapest.
        let choices = choices.take(if layers[1] == 0 { 1 } else { usize::MAX });
        choices.min_by(|a, b| dot(*a, self.repeat_time).total_cmp(&dot(*b, self.repeat_time)))
    }
}

fn dot(counts: LayerCounts, each: [f64; MAX_LAYER_RUNS]) -> f64 {
    counts.into_iter().zip(each).map(|(count, value)| count as f64 * value).sum()
}
