//! The stated space of layouts: every combination of the choices that the stack offers and the user left
//! open, each either open for estimation or out under exactly one rule.
//!
//! Layouts of one mesh are a product of independent choices. A rule takes values out of one of them, so the layouts
//! that it takes out are counted without being visited.

mod choices;
mod layouts;
mod rules;

use std::collections::BTreeMap;

use crate::request::Request;

pub use choices::{Degrees, Passes, Sharding, fits_parts, open_schedules};
pub use layouts::Layouts;
pub use rules::repeats_another;

/// Why a layout cannot run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rejection {
    /// The tensor degree does not divide the heads.
    HeadsNotDivisible,
    /// The tensor degree and the key-value heads do not divide one another.
    KeyValueHeadsNotDivisible,
    /// The tensor degree does not divide a feed-forward width.
    IntermediateNotDivisible,
    /// Context and sequence parallelism need whole parts of the sequence.
    SequenceNotDivisible,
    /// The stack's context ranks exchange whole heads for positions.
    ContextHeadsNotDivisible,
    /// A stage would hold no layer.
    MoreStagesThanLayers,
    /// The stack needs equal stages.
    UnevenStagesNotOffered,
    /// The stack cannot combine this ZeRO stage with pipeline stages.
    ZeroStageNotOfferedWithPipeline,
    /// The stack cannot keep the optimizer state of this ZeRO stage in host memory.
    OffloadNotOfferedWithZeroStage,
    /// Whole experts need ranks that each route their part of the sequence.
    WholeExpertsNeedSequenceParallel,
    /// The stack cannot put the data axis outermost with contexts or experts.
    MeshOrderNotOfferedWithContextsOrExperts,
    /// The batch is not whole micro-batches on each replica.
    BatchNotDivisible,
    /// The schedule takes micro-batches in groups of one a stage.
    MicroBatchesNotGrouped,
    /// The compiler cannot build it, and only executable layouts were asked for.
    NotExecutable,
    /// No stage split fits into memory.
    OutOfMemory,
    /// The optimizer state of the split that fits and is fastest does not fit into the hosts' memory.
    OutOfHostMemory,
}

/// Why a layout that can run need not be estimated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pruning {
    /// With one rank to shard over all ZeRO stages are the same.
    ZeroStageWithoutReplicas,
    /// With one tensor rank sequence parallelism is nothing.
    SequenceParallelWithoutTensorParallel,
    /// With flash attention selective recomputation is none.
    SelectiveEqualsNone,
    /// Recomputation of some layers, of which memory asks for none.
    PartialEqualsNone,
    /// Recomputation of some layers, of which memory asks for all.
    PartialEqualsFull,
    /// With one stage or one replica all orders of the mesh are the same.
    MeshOrderWithoutEffect,
    /// No transfer is shorter in this order of the mesh than in the usual one.
    MeshOrderNoFaster,
    /// With one stage no schedule is faster than 1F1B or holds less.
    ScheduleWithoutStages,
    /// Its lower bound is above the reported layouts.
    SlowerThanReported,
    /// The user ended the search before.
    Interrupted,
}

/// A mesh that can split the model, and its layouts that are open for estimation.
#[derive(Clone, Debug)]
pub struct OpenMesh {
    /// Its degrees.
    pub degrees: Degrees,
    /// Its open layouts.
    pub layouts: Layouts,
}

/// The stated space, sorted into open layouts and counts.
#[derive(Clone, Debug, Default)]
pub struct Space {
    /// Meshes with open layouts.
    pub meshes: Vec<OpenMesh>,
    /// All layouts.
    pub enumerated: u64,
    /// Layouts out by rule.
    pub rejected: BTreeMap<Rejection, u64>,
    /// Layouts left out by rule.
    pub pruned: BTreeMap<Pruning, u64>,
}

impl Rejection {
    /// The name used in reports.
    pub fn name(self) -> &'static str {
        match self {
            Rejection::HeadsNotDivisible => "heads_not_divisible",
            Rejection::KeyValueHeadsNotDivisible => "key_value_heads_not_divisible",
            Rejection::IntermediateNotDivisible => "intermediate_not_divisible",
            Rejection::SequenceNotDivisible => "sequence_not_divisible",
            Rejection::ContextHeadsNotDivisible => "context_heads_not_divisible",
            Rejection::MoreStagesThanLayers => "more_stages_than_layers",
            Rejection::UnevenStagesNotOffered => "uneven_stages_not_offered",
            Rejection::ZeroStageNotOfferedWithPipeline => "zero_stage_not_offered_with_pipeline",
            Rejection::OffloadNotOfferedWithZeroStage => "offload_not_offered_with_zero_stage",
            Rejection::WholeExpertsNeedSequenceParallel => "whole_experts_need_sequence_parallel",
            Rejection::MeshOrderNotOfferedWithContextsOrExperts => "mesh_order_not_offered_with_contexts_or_experts",
            Rejection::BatchNotDivisible => "batch_not_divisible",
            Rejection::MicroBatchesNotGrouped => "micro_batches_not_divisible_by_stages",
            Rejection::NotExecutable => "not_executable",
            Rejection::OutOfMemory => "out_of_memory",
            Rejection::OutOfHostMemory => "out_of_host_memory",
        }
    }
}

impl Pruning {
    /// The name used in reports.
    pub fn name(self) -> &'static str {
        match self {
            Pruning::ZeroStageWithoutReplicas => "zero_stage_without_replicas",
            Pruning::SequenceParallelWithoutTensorParallel => "sequence_parallel_without_tensor_parallel",
            Pruning::SelectiveEqualsNone => "selective_recompute_equals_none",
            Pruning::PartialEqualsNone => "partial_recompute_equals_none",
            Pruning::PartialEqualsFull => "partial_recompute_equals_full",
            Pruning::MeshOrderWithoutEffect => "mesh_order_without_effect",
            Pruning::MeshOrderNoFaster => "mesh_order_no_faster",
            Pruning::ScheduleWithoutStages => "schedule_without_stages",
            Pruning::SlowerThanReported => "lower_bound_above_reported",
            Pruning::Interrupted => "interrupted",
        }
    }
}

/// Enumerates the stated space of a checked request.
pub fn enumerate(request: &Request) -> Space {
    let mut space = Space::default();
    let choices = choices::open_choices(request);
    for degrees in choices::meshes(request) {
        let mut layouts = Layouts::of(request, &choices, degrees);
        space.enumerated += layouts.count();
        if let Some(reason) = rules::reject_mesh(request, degrees) {
            *space.rejected.entry(reason).or_default() += layouts.count();
            continue;
        }
        if rules::repeats_mesh(request, degrees) {
            *space.pruned.entry(Pruning::MeshOrderWithoutEffect).or_default() += layouts.count();
            continue;
        }
        rules::reject_layouts(request, degrees, &mut layouts, &mut space.rejected);
        rules::prune_layouts(request, &choices, degrees, &mut layouts, &mut space.pruned);
        if layouts.count() > 0 {
            space.meshes.push(OpenMesh { degrees, layouts });
        }
    }
    space
}
