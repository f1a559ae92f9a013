//! The values of each choice that the stack offers and the user left open.

use ir::mesh::MeshOrder;
use ir::strategy::{Recompute, ScheduleKind, ZeroStage};

use crate::request::{Request, divisors};

/// Degrees of the mesh's axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Degrees {
    /// Ranks that share each layer's matrices.
    pub tensor: u64,
    /// Stages.
    pub pipeline: u64,
    /// Replicas.
    pub data: u64,
    /// Ranks that split a sequence.
    pub context: u64,
    /// Ranks that split the experts, some of those of data and context, and of tensor where experts are whole.
    pub expert: u64,
    /// Whether each expert is whole on a rank.
    pub whole_experts: bool,
    /// Which of them is outermost.
    pub order: MeshOrder,
}

/// What ZeRO shards over which replicas, and where the optimizer state lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharding {
    /// What is sharded.
    pub zero_stage: ZeroStage,
    /// Replicas that share it.
    pub shard_group: u64,
    /// Whether the optimizer state lives in host memory.
    pub offload_optimizer: bool,
}

/// How a batch passes the stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passes {
    /// Sequences of a forward pass.
    pub micro_batch: u64,
    /// Order of micro-batches.
    pub schedule: ScheduleKind,
    /// Parts of the model on each stage.
    pub virtual_stages: u64,
}

/// Choices that do not depend on the mesh, one line each.
#[derive(Clone, Debug)]
pub struct Choices {
    /// Sequence parallelism.
    pub sequence_parallel: Vec<bool>,
    /// ZeRO stages.
    pub zero_stages: Vec<ZeroStage>,
    /// Optimizer state in host memory.
    pub offload_optimizer: Vec<bool>,
    /// Micro-batches.
    pub micro_batches: Vec<u64>,
    /// Recomputation.
    pub recompute: Vec<Recompute>,
    /// Schedules, the preferred first.
    pub schedules: Vec<ScheduleKind>,
}

/// The choices of a request.
pub fn open_choices(request: &Request) -> Choices {
    let offers = &request.machine.stack.offers;
    let fixed = &request.fixed;
    Choices {
        sequence_parallel: match (fixed.sequence_parallel, offers.sequence_parallel) {
            (Some(choice), _) => vec![choice],
            (None, true) => vec![false, true],
            (None, false) => vec![false],
        },
        zero_stages: fixed.zero_stage.map_or(offers.zero_stages.clone(), |stage| vec![stage]),
        offload_optimizer: match (fixed.offload_optimizer, offers.searches_offload()) {
            (Some(choice), _) => vec![choice],
            (None, true) if request.machine.cluster.host.is_some() => vec![false, true],
            (None, _) => vec![false],
        },
        micro_batches: fixed.micro_batch.map_or(divisors(request.workload.global_batch), |size| vec![size]),
        recompute: fixed.recompute.map_or(offers.searched_recompute(), |choice| vec![choice]),
        schedules: open_schedules(request),
    }
}

/// Schedules, the preferred first: where several parts on a stage are asked for, also those that are planned on request.
pub fn open_schedules(request: &Request) -> Vec<ScheduleKind> {
    let offers = &request.machine.stack.offers;
    let mut schedules = match (request.fixed.schedule, request.fixed.virtual_stages) {
        (Some(schedule), _) => vec![schedule],
        (None, None | Some(1)) => offers.searched_schedules(),
        (None, Some(_)) => offers.schedules.clone(),
    };
    schedules.sort_unstable();
    schedules.dedup();
    schedules
}

/// Orders of the mesh's axes.
pub fn open_orders(request: &Request) -> Vec<MeshOrder> {
    let offers = &request.machine.stack.offers;
    request.fixed.mesh_order.map_or(offers.searched_mesh_orders(), |order| vec![order])
}

/// Whether routed experts are whole, at a tensor degree: with one rank they are, and nothing is to be chosen.
fn open_whole_experts(request: &Request, tensor: u64) -> Vec<bool> {
    let experts = request.model.feed_forward.num_experts() > 1;
    let searched = request.machine.stack.offers.searches_whole_experts();
    match request.fixed.expert_tensor_parallel {
        Some(ranks) => [false, true]
            .into_iter()
            .filter(|whole| if *whole { tensor > 1 && ranks == 1 } else { ranks == tensor })
            .collect(),
        None if experts && tensor > 1 && searched => vec![false, true],
        None => vec![false],
    }
}

/// All meshes: tensor x pipeline x context x data makes up the world, and the expert degree divides the experts and the
/// ranks to spread them over; each with each order of its axes.
pub fn meshes(request: &Request) -> Vec<Degrees> {
    let offers = &request.machine.stack.offers;
    let fixed = &request.fixed;
    let open = |number: u64, fixed: Option<u64>, offered: bool| {
        let allowed = move |degree: &u64| fixed.map_or(offered || *degree == 1, |value| *degree == value);
        divisors(number).into_iter().filter(allowed)
    };
    let experts = request.model.feed_forward.num_experts();
    let orders = open_orders(request);
    let mut meshes = Vec::new();
    for tensor in open(request.gpus, fixed.tensor_parallel, offers.tensor_parallel) {
        for pipeline in open(request.gpus / tensor, fixed.pipeline_parallel, offers.pipeline_parallel) {
            let replicas = request.gpus / (tensor * pipeline);
            for context in open(replicas, fixed.context_parallel, offers.searches_context_parallel()) {
                let data = replicas / context;
                if fixed.data_parallel.is_some_and(|fixed| fixed != data) {
                    continue;
                }
                for whole_experts in open_whole_experts(request, tensor) {
                    let ranks = if whole_experts { replicas * tensor } else { replicas };
                    let spread = open(ranks, fixed.expert_parallel, offers.expert_parallel.is_some());
                    for expert in spread.filter(|degree| experts.is_multiple_of(*degree)) {
                        let degrees = |order| Degrees { tensor, pipeline, data, context, expert, whole_experts, order };
                        meshes.extend(orders.iter().copied().map(degrees));
                    }
                }
            }
        }
    }
    meshes
}

/// Schedules with their parts a stage.
///
/// One part; interleaved parts as many as divide the layers of the fullest of equal stages; a V has two.
pub fn open_parts(request: &Request, choices: &Choices, pipeline: u64) -> Vec<(ScheduleKind, u64)> {
    let layers = request.model.num_layers;
    let candidates = match request.fixed.virtual_stages {
        Some(parts) => vec![parts],
        None => {
            let mut parts = divisors(layers.div_ceil(pipeline));
            parts.push(2);
            parts.sort_unstable();
            parts.dedup();
            parts
        }
    };
    let mut open = Vec::new();
    for &schedule in &choices.schedules {
        for &parts in candidates.iter().filter(|parts| fits_parts(request, schedule, pipeline, **parts)) {
            open.push((schedule, parts));
        }
    }
    open
}

/// Whether the layers fill so many parts on each stage under a schedule.
pub fn fits_parts(request: &Request, schedule: ScheduleKind, pipeline: u64, parts: u64) -> bool {
    let layers = request.model.num_layers;
    let even = layers.div_ceil(pipeline).is_multiple_of(parts) || schedule != ScheduleKind::Interleaved;
    let whole = request.machine.stack.offers.uneven_stages || layers.is_multiple_of(pipeline * parts);
    schedule.allows_virtual_stages(parts) && (parts == 1 || pipeline > 1 && pipeline * parts <= layers && even && whole)
}
