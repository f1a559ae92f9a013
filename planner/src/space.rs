//! The stated space of layouts: every combination of the choices that the stack offers and the user left
//! open, each either open for estimation or out under exactly one rule.

use std::collections::BTreeMap;

use ir::sharding::{SplitError, TensorSplit, tensor_split};
use ir::strategy::{Recompute, ScheduleKind, Strategy, ZeroStage};

use crate::compile::not_executable;
use crate::request::{Request, divisors};

/// Why a layout cannot run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rejection {
    /// The tensor degree does not divide the heads.
    HeadsNotDivisible,
    /// The tensor degree and the key-value heads do not divide one another.
    KeyValueHeadsNotDivisible,
    /// The tensor degree does not divide a feed-forward width.
    IntermediateNotDivisible,
    /// Sequence parallelism needs whole parts of the sequence.
    SequenceNotDivisible,
    /// A stage would hold no layer.
    MoreStagesThanLayers,
    /// The stack needs equal stages.
    UnevenStagesNotOffered,
    /// The stack cannot combine this ZeRO stage with pipeline stages.
    ZeroStageNotOfferedWithPipeline,
    /// The batch is not whole micro-batches on each replica.
    BatchNotDivisible,
    /// The compiler cannot build it, and only executable layouts were asked for.
    NotExecutable,
    /// No stage split fits into memory.
    OutOfMemory,
}

/// Why a layout that can run need not be estimated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pruning {
    /// With one replica all ZeRO stages are the same.
    ZeroStageWithoutReplicas,
    /// With one tensor rank sequence parallelism is nothing.
    SequenceParallelWithoutTensorParallel,
    /// With flash attention selective recomputation is none.
    SelectiveEqualsNone,
    /// Its lower bound is above the reported layouts.
    SlowerThanReported,
    /// The user ended the search before.
    Interrupted,
}

/// The stated space, sorted into open layouts and counts.
#[derive(Clone, Debug, Default)]
pub struct Space {
    /// Layouts to estimate; `layers_per_stage` is empty.
    pub open: Vec<Strategy>,
    /// Splits of the model by tensor degree and sequence parallelism.
    pub splits: BTreeMap<(u64, bool), TensorSplit>,
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
            Rejection::MoreStagesThanLayers => "more_stages_than_layers",
            Rejection::UnevenStagesNotOffered => "uneven_stages_not_offered",
            Rejection::ZeroStageNotOfferedWithPipeline => "zero_stage_not_offered_with_pipeline",
            Rejection::BatchNotDivisible => "batch_not_divisible",
            Rejection::NotExecutable => "not_executable",
            Rejection::OutOfMemory => "out_of_memory",
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
            Pruning::SlowerThanReported => "lower_bound_above_reported",
            Pruning::Interrupted => "interrupted",
        }
    }
}

/// The values of each choice that the stack offers and the user left open.
struct Choices {
    sequence_parallel: Vec<bool>,
    zero_stages: Vec<ZeroStage>,
    micro_batches: Vec<u64>,
    recompute: Vec<Recompute>,
    schedule: ScheduleKind,
}

/// Enumerates the stated space of a checked request.
pub fn enumerate(request: &Request) -> Space {
    let mut space = Space::default();
    let choices = open_choices(request);
    let each = choices.sequence_parallel.len() * choices.zero_stages.len();
    let inner = (each * choices.micro_batches.len() * choices.recompute.len()) as u64;
    for [tensor, pipeline, data] in meshes(request) {
        space.enumerated += inner;
        let rejected = reject_mesh(request, tensor, pipeline);
        match rejected {
            Some(reason) => *space.rejected.entry(reason).or_default() += inner,
            None => enumerate_mesh(request, &choices, [tensor, pipeline, data], &mut space),
        }
    }
    space
}

/// All degrees of tensor, pipeline and data whose product is the world.
fn meshes(request: &Request) -> Vec<[u64; 3]> {
    let offers = &request.machine.stack.offers;
    let fixed = &request.fixed;
    let allowed = |fixed: Option<u64>, offered: bool, degree: u64| match fixed {
        Some(value) => degree == value,
        None => offered || degree == 1,
    };
    let mut meshes = Vec::new();
    for tensor in divisors(request.gpus) {
        for pipeline in divisors(request.gpus / tensor) {
            let data = request.gpus / (tensor * pipeline);
            if allowed(fixed.tensor_parallel, offers.tensor_parallel, tensor)
                && allowed(fixed.pipeline_parallel, offers.pipeline_parallel, pipeline)
                && allowed(fixed.data_parallel, true, data)
            {
                meshes.push([tensor, pipeline, data]);
            }
        }
    }
    meshes
}

fn open_choices(request: &Request) -> Choices {
    let offers = &request.machine.stack.offers;
    let fixed = &request.fixed;
    let sequence_parallel = match (fixed.sequence_parallel, offers.sequence_parallel) {
        (Some(choice), _) => vec![choice],
        (None, true) => vec![false, true],
        (None, false) => vec![false],
    };
    Choices {
        sequence_parallel,
        zero_stages: fixed.zero_stage.map_or(offers.zero_stages.clone(), |stage| vec![stage]),
        micro_batches: fixed.micro_batch.map_or(divisors(request.workload.global_batch), |size| vec![size]),
        recompute: fixed.recompute.map_or(offers.recompute.clone(), |choice| vec![choice]),
        schedule: fixed.schedule.unwrap_or(offers.schedules[0]),
    }
}

/// Rules on the degrees alone.
fn reject_mesh(request: &Request, tensor: u64, pipeline: u64) -> Option<Rejection> {
    let layers = request.model.num_layers;
    match tensor_split(&request.model, tensor, false) {
        Err(SplitError::Heads) => Some(Rejection::HeadsNotDivisible),
        Err(SplitError::KeyValueHeads) => Some(Rejection::KeyValueHeadsNotDivisible),
        Err(SplitError::Intermediate) => Some(Rejection::IntermediateNotDivisible),
        Ok(_) if pipeline > layers => Some(Rejection::MoreStagesThanLayers),
        Ok(_) if !request.machine.stack.offers.uneven_stages && !layers.is_multiple_of(pipeline) => {
            Some(Rejection::UnevenStagesNotOffered)
        }
        Ok(_) => None,
    }
}

fn enumerate_mesh(request: &Request, choices: &Choices, degrees: [u64; 3], space: &mut Space) {
    let [tensor_parallel, pipeline_parallel, data_parallel] = degrees;
    for &sequence_parallel in &choices.sequence_parallel {
        for &zero_stage in &choices.zero_stages {
            for &micro_batch in &choices.micro_batches {
                for &recompute in &choices.recompute {
                    let strategy = Strategy {
                        tensor_parallel,
                        pipeline_parallel,
                        data_parallel,
                        context_parallel: 1,
                        expert_parallel: 1,
                        zero_stage,
                        shard_group: data_parallel,
                        micro_batch,
                        global_batch: request.workload.global_batch,
                        virtual_stages: fewest_parts(choices.schedule),
                        schedule: choices.schedule,
                        recompute,
                        sequence_parallel,
                        offload_optimizer: false,
                        layers_per_stage: Vec::new(),
                        recomputed_layers: Vec::new(),
                    };
                    sort_in(request, choices, strategy, space);
                }
            }
        }
    }
}

/// The fewest parts of the model on each stage that a schedule allows.
fn fewest_parts(schedule: ScheduleKind) -> u64 {
    if schedule.allows_virtual_stages(1) { 1 } else { 2 }
}

/// Puts a layout where it belongs; the first rule that applies counts it.
fn sort_in(request: &Request, choices: &Choices, strategy: Strategy, space: &mut Space) {
    if let Some(reason) = reject_layout(request, &strategy) {
        *space.rejected.entry(reason).or_default() += 1;
    } else if let Some(rule) = prune_layout(request, choices, &strategy) {
        *space.pruned.entry(rule).or_default() += 1;
    } else {
        let key = (strategy.tensor_parallel, strategy.sequence_parallel);
        space.splits.entry(key).or_insert_with(|| {
            tensor_split(&request.model, key.0, key.1).expect("reject_mesh has split the model by this degree")
        });
        space.open.push(strategy);
    }
}

fn reject_layout(request: &Request, strategy: &Strategy) -> Option<Rejection> {
    let workload = &request.workload;
    let with_pipeline = &request.machine.stack.offers.pipeline_zero_stages;
    let per_replica = strategy.micro_batch * strategy.data_parallel;
    let whole = |strategy: &Strategy| {
        strategy.schedule.allows_micro_batches(strategy.num_micro_batches(), strategy.pipeline_parallel)
    };
    if !workload.global_batch.is_multiple_of(per_replica) || !whole(strategy) {
        Some(Rejection::BatchNotDivisible)
    } else if strategy.pipeline_parallel * strategy.virtual_stages > request.model.num_layers {
        Some(Rejection::MoreStagesThanLayers)
    } else if strategy.sequence_parallel && !workload.sequence_length.is_multiple_of(strategy.tensor_parallel) {
        Some(Rejection::SequenceNotDivisible)
    } else if strategy.pipeline_parallel > 1 && !with_pipeline.contains(&strategy.zero_stage) {
        Some(Rejection::ZeroStageNotOfferedWithPipeline)
    } else if request.executable_only && not_executable(&request.model, strategy).is_some() {
        Some(Rejection::NotExecutable)
    } else {
        None
    }
}

/// Rules under which an equal layout of the same space is estimated instead.
fn prune_layout(request: &Request, choices: &Choices, strategy: &Strategy) -> Option<Pruning> {
    let flash = request.machine.stack.kernels.flash_attention;
    let selective = strategy.recompute == Recompute::Selective;
    if strategy.data_parallel == 1 && choices.zero_stages.iter().any(|stage| *stage < strategy.zero_stage) {
        Some(Pruning::ZeroStageWithoutReplicas)
    } else if strategy.tensor_parallel == 1 && strategy.sequence_parallel && choices.sequence_parallel.contains(&false)
    {
        Some(Pruning::SequenceParallelWithoutTensorParallel)
    } else if flash && selective && choices.recompute.contains(&Recompute::None) {
        Some(Pruning::SelectiveEqualsNone)
    } else {
        None
    }
}
