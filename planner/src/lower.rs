//! Lowers a scored layout to a plan.

use cost_models::flops::{MFU_FORMULA, step_flops};
use cost_models::memory::{StageMemory, checkpoint_bytes, state_bytes};
use cost_models::step::{StageContent, costed_blocks, stage_load, with_provenance};
use ir::footprint::with_memory;
use ir::graph::{BlockRole, ModelGraph, count_parameters};
use ir::mesh::{StageId, build_mesh, stage_ranks};
use ir::model::{MAX_LAYER_RUNS, ModelSpec};
use ir::pipeline::{Pipeline, in_flight};
use ir::plan::{
    Binding, BlockShards, Estimate, Executable, FORMAT_VERSION, Inputs, OWN_STACK, Plan, SearchReport, Stage,
};
use ir::program::AttentionKernel;
use ir::provenance::Provenance;
use ir::sharding::{self, TensorSplit};
use ir::strategy::Strategy;
use ir::text::content_hash;
use ir::units::Bytes;

use crate::compile::{compile, not_executable};
use crate::interval::{Circumstances, interval};
use crate::request::Request;
use crate::search::{Outcome, Scored, scenario};

/// Builds the plan of a layout.
pub fn lower(request: &Request, graph: &ModelGraph, scored: &Scored, search: SearchReport) -> Plan {
    let strategy = &scored.strategy;
    let mesh = build_mesh(strategy);
    let split = split_of(request, strategy);
    let axes = mesh.axes.iter().filter(|(_, degree)| *degree > 1);
    let attention = match request.machine.stack.kernels.flash_attention {
        true => AttentionKernel::Flash,
        false => AttentionKernel::Primitive,
    };
    let executable = executable(&request.model, strategy);
    let plan = Plan {
        format_version: FORMAT_VERSION,
        planwright_version: env!("CARGO_PKG_VERSION").to_owned(),
        inputs: inputs(request),
        model: request.model.clone(),
        parameters: count_parameters(&request.model),
        added_parameters: split.added_parameters(&request.model),
        workload: request.workload,
        strategy: strategy.clone(),
        program: (executable == Executable::Yes).then(|| compile(&request.model, graph, strategy, attention)),
        executable,
        groups: axes.map(|(axis, _)| mesh.groups(*axis)).collect(),
        mesh,
        parameter_shards: parameter_shards(graph, split),
        stages: stages(request, graph, scored, split),
        estimate: estimate(request, graph, scored),
        search,
    };
    with_memory(plan, split)
}

/// Whether a strategy can be run, and if not why.
pub fn executable(model: &ModelSpec, strategy: &Strategy) -> Executable {
    not_executable(model, strategy).map_or(Executable::Yes, Executable::No)
}

/// What a layout should cost.
pub fn estimate(request: &Request, graph: &ModelGraph, scored: &Scored) -> Estimate {
    let scenario = scenario(request, graph);
    let machine = &request.machine;
    let strategy = &scored.strategy;
    let step = scored.prediction.step;
    let recomputed = scored.contents.iter().fold([0; MAX_LAYER_RUNS], |mut sum, part| {
        sum.iter_mut().zip(part.recomputed).for_each(|(sum, count)| *sum += count);
        sum
    });
    let flops = step_flops(graph, request.workload, strategy.recompute, recomputed);
    let tokens = (request.workload.global_batch * request.workload.sequence_length) as f64;
    let gpu_seconds = step.0 * request.gpus as f64;
    let peak = machine.peak_rate(request.model.dtype).0;
    let (fullest, device_memory) = scored.fullest_stage();
    let dtype = request.model.dtype;
    let circumstances = Circumstances { machine, dtype, gpus: request.gpus, framework: None, open: false };
    let parameters = count_parameters(&request.model);
    Estimate {
        step,
        interval: interval(step, circumstances),
        terms: with_provenance(scenario, strategy, &scored.prediction.terms),
        tokens_per_second_per_gpu: tokens / gpu_seconds,
        model_flops: flops.model,
        hardware_flops: flops.hardware,
        mfu: flops.model.0 / (gpu_seconds * peak),
        mfu_formula: MFU_FORMULA.to_owned(),
        device_memory,
        allocator_peak: scored.memory.iter().map(StageMemory::allocator_peak).max().unwrap_or(Bytes(0)),
        fullest_stage: StageId(fullest as u64),
        checkpoint: checkpoint_bytes(parameters, state_bytes(machine, request.model.dtype)),
        remarks: remarks(request),
    }
}

/// The record of a search, for the plan file.
pub fn search_report(
    request: &Request,
    outcome: &Outcome,
    limits: Vec<Binding>,
    explanations: Vec<String>,
) -> SearchReport {
    let pruned = outcome.pruned.iter().map(|(rule, count)| (rule.name().to_owned(), *count));
    let rejected = outcome.rejected.iter().map(|(reason, count)| (reason.name().to_owned(), *count));
    SearchReport {
        enumerated: outcome.enumerated,
        feasible: outcome.feasible,
        pruned: pruned.collect(),
        rejected: rejected.collect(),
        fixed: request.fixed.flags(),
        stop_reason: outcome.stop_reason,
        limits,
        explanations,
    }
}

fn split_of(request: &Request, strategy: &Strategy) -> TensorSplit {
    sharding::split_of(&request.model, strategy).expect("the search keeps only degrees that split the model")
}

fn inputs(request: &Request) -> Inputs {
    let machine = &request.machine;
    Inputs {
        model_hash: content_hash(&request.model),
        cluster: machine.cluster.name.clone(),
        cluster_hash: content_hash(&machine.cluster),
        device: machine.device.name.clone(),
        device_hash: content_hash(&machine.device),
        stack: machine.stack.name.clone(),
        stack_hash: content_hash(&machine.stack),
        node_gpus: machine.node_gpus,
        fast_domain_gpus: machine.fast_domain_gpus(),
        usable_memory: machine.usable_memory(),
    }
}

fn parameter_shards(graph: &ModelGraph, split: TensorSplit) -> Vec<BlockShards> {
    let shards = graph.blocks.iter().map(|block| BlockShards {
        block: match block.role {
            BlockRole::Embedding => "embedding".to_owned(),
            BlockRole::Layers(run) => format!("layers {run}"),
            BlockRole::Head => "head".to_owned(),
        },
        count: block.count,
        parameters: block.parameters().map(|parameter| split.shard(parameter)).collect(),
    });
    shards.collect()
}

fn stages(request: &Request, graph: &ModelGraph, scored: &Scored, split: TensorSplit) -> Vec<Stage> {
    let scenario = scenario(request, graph);
    let strategy = &scored.strategy;
    let blocks = costed_blocks(scenario, split, strategy.micro_batch);
    let pipeline = Pipeline::of(strategy);
    let layers = part_layers(pipeline, &strategy.layers_per_stage);
    let held = scored.contents.chunks(pipeline.virtual_stages as usize);
    let stage = |(parts, stage): (&[StageContent], u64)| {
        let time = scored.prediction.stages[stage as usize];
        let mut layers = (0..pipeline.virtual_stages).map(|part| layers[pipeline.position(stage, part) as usize]);
        Stage {
            stage: StageId(stage),
            ranks: stage_ranks(strategy, stage),
            embedding: parts.iter().any(|part| part.embedding),
            layers: layers.next().expect("a stage has at least one part"),
            further_layers: layers.collect(),
            head: parts.iter().any(|part| part.head),
            parameters_per_rank: stage_load(&blocks, strategy, parts, stage).parameters,
            in_flight: in_flight(pipeline, stage),
            forward: time.forward,
            backward: time.backward,
            memory: scored.memory[stage as usize].terms(),
        }
    };
    held.zip(0..).map(stage).collect()
}

/// First layer and one past the last of each part, in model order; `counts` has those of the first stage first.
fn part_layers(pipeline: Pipeline, counts: &[u64]) -> Vec<(u64, u64)> {
    let mut next = 0;
    let range = |place: u64| {
        let (stage, part) = pipeline.stage_and_part(place);
        let first = next;
        next += counts[(stage * pipeline.virtual_stages + part) as usize];
        (first, next)
    };
    (0..pipeline.num_parts()).map(range).collect()
}

fn remarks(request: &Request) -> Vec<String> {
    let mut remarks = Vec::new();
    let stack = &request.machine.stack;
    if stack.name != OWN_STACK {
        remarks.push(format!("time and memory are those of stack {}, not of this plan's own program", stack.name));
    }
    if stack.relative_error_90.provenance == Provenance::Assumed {
        remarks.push(format!(
            "constants of stack {} are assumed: no run has been compared with it, and the interval is a guess",
            stack.name
        ));
    }
    remarks
}
