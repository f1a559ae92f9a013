//! The JSON form of results; its names are a contract with outside tools (see the README).

use ir::error::Problem;
use ir::plan::{Estimate, Executable, Plan};
use ir::provenance::Provenance;
use ir::strategy::Strategy;
use ir::units::Bytes;
use serde_json::{Value, json};

use crate::lower::executable;
use crate::objective::{expense, expense_provenance};
use crate::report::{DAY, MEGAWATT_HOUR};
use crate::request::Request;
use crate::training::{Failures, Training};

/// `plan --json`: the plan and its alternatives, the best first.
pub fn search_result(
    request: &Request,
    plan: &Plan,
    alternatives: &[(Strategy, Estimate)],
    search_seconds: f64,
    out: Option<&str>,
) -> Value {
    let mut search = json!({
        "enumerated": plan.search.enumerated,
        "feasible": plan.search.feasible,
        "pruned": plan.search.pruned,
        "rejected": plan.search.rejected,
        "seconds": search_seconds,
        "stop_reason": plan.search.stop_reason.name(),
    });
    search["fixed"] = json!(plan.search.fixed);
    search["explanations"] = json!(plan.search.explanations);
    let alternatives: Vec<Value> = alternatives.iter().map(|layout| layout_value(request, plan, layout)).collect();
    let mut value = plan_value(plan);
    value["estimate"] = costed_estimate_value(request, &plan.strategy, &plan.estimate);
    value["search"] = search;
    value["alternatives"] = json!(alternatives);
    value["plan_file"] = json!(out);
    value
}

/// A layout of a plan's search, and what it should cost.
pub fn layout_value(request: &Request, plan: &Plan, (strategy, estimate): &(Strategy, Estimate)) -> Value {
    json!({
        "strategy": strategy_value(strategy, &executable(&plan.model, strategy)),
        "estimate": costed_estimate_value(request, strategy, estimate),
    })
}

/// A plan as one object: what `plan inspect --json` prints.
pub fn plan_value(plan: &Plan) -> Value {
    json!({
        "model": plan.model.name,
        "parameters": plan.parameters,
        "added_parameters": plan.added_parameters,
        "gpus": plan.mesh.world_size(),
        "node_gpus": plan.inputs.node_gpus,
        "cluster": plan.inputs.cluster,
        "device": plan.inputs.device,
        "stack": plan.inputs.stack,
        "sequence_length": plan.workload.sequence_length,
        "global_batch": plan.workload.global_batch,
        "strategy": strategy_value(&plan.strategy, &plan.executable),
        "estimate": estimate_value(&plan.strategy, &plan.estimate, plan.mesh.world_size()),
        "stages": plan.stages.iter().map(stage_value).collect::<Vec<_>>(),
        "groups": plan.groups.iter().map(|family| json!({
            "axis": family.axis.name(), "size": family.size, "stride": family.stride, "count": family.count,
        })).collect::<Vec<_>>(),
        "search": {
            "enumerated": plan.search.enumerated,
            "feasible": plan.search.feasible,
            "pruned": plan.search.pruned,
            "rejected": plan.search.rejected,
            "stop_reason": plan.search.stop_reason.name(),
        },
    })
}

/// Problems as `{"error": …}`: the first in full, the others beside it.
pub fn error_value(problems: &[Problem]) -> Value {
    let fields = |problem: &Problem| json!({"what": problem.what, "where": problem.location, "help": problem.help});
    let mut error = problems.first().map(fields).unwrap_or_else(|| json!({}));
    error["others"] = problems.iter().skip(1).map(fields).collect();
    json!({ "error": error })
}

/// A strategy as one object.
pub fn strategy_value(strategy: &Strategy, executable: &Executable) -> Value {
    let reason = match executable {
        Executable::Yes => None,
        Executable::No(reason) => Some(reason),
    };
    json!({
        "tensor_parallel": strategy.tensor_parallel,
        "pipeline_parallel": strategy.pipeline_parallel,
        "data_parallel": strategy.data_parallel,
        "context_parallel": strategy.context_parallel,
        "expert_parallel": strategy.expert_parallel,
        "expert_tensor_parallel": strategy.expert_tensor_parallel(),
        "zero_stage": u8::from(strategy.zero_stage),
        "shard_group": strategy.shard_group,
        "micro_batch": strategy.micro_batch,
        "global_batch": strategy.global_batch,
        "virtual_stages": strategy.virtual_stages,
        "schedule": strategy.schedule.name(),
        "recompute": strategy.recompute.name(),
        "recomputed_layers_per_stage": strategy.recomputed_layers_per_stage(),
        "sequence_parallel": strategy.sequence_parallel,
        "offload_optimizer": strategy.offload_optimizer,
        "layers_per_stage": strategy.layers_per_stage,
        "mesh_order": strategy.mesh_order.axes().map(|axis| axis.name()),
        "executable": reason.is_none(),
        "reason": reason,
    })
}

/// An estimate with what a step and a token take.
pub(super) fn costed_estimate_value(request: &Request, strategy: &Strategy, estimate: &Estimate) -> Value {
    let gpus = strategy.world_size();
    let step = expense(&request.machine, gpus, estimate.step);
    let tokens = (request.workload.global_batch * request.workload.sequence_length) as f64;
    let [price, power] = expense_provenance(&request.machine).map(|origin| origin.map(Provenance::name));
    let mut value = estimate_value(strategy, estimate, gpus);
    value["gpu_hours_per_step"] = json!(step.gpu_hours);
    value["tokens_per_gpu_hour"] = json!(tokens / step.gpu_hours);
    value["cost_usd_per_step"] = json!(step.cost.map(|cost| cost.0));
    value["cost_usd_per_million_tokens"] = json!(step.cost.map(|cost| cost.0 / tokens * 1e6));
    value["energy_joules_per_step"] = json!(step.energy.map(|energy| energy.0));
    value["energy_joules_per_token"] = json!(step.energy.map(|energy| energy.0 / tokens));
    value["price_provenance"] = json!(price);
    value["power_provenance"] = json!(power);
    value
}

/// A training and what it takes; null where the profiles do not tell.
pub fn training_value(training: &Training) -> Value {
    let failures = training.failures.as_ref();
    let of = |value: fn(&Failures) -> f64| failures.map(value);
    json!({
        "tokens": training.tokens,
        "steps": training.steps,
        "days_without_failures": training.undisturbed.0 / DAY,
        "days": training.expense.time.0 / DAY,
        "gpu_hours": training.expense.gpu_hours,
        "cost_usd": training.expense.cost.map(|cost| cost.0),
        "energy_mwh": training.expense.energy.map(|energy| energy.0 / MEGAWATT_HOUR),
        "goodput": of(|failures| failures.goodput),
        "failures": of(|failures| failures.count),
        "mean_time_between_failures_hours": of(|failures| failures.interruptions.mean_time_between_failures.0 / 3600.0),
        "restart_seconds": of(|failures| failures.interruptions.restart.0),
        "checkpoint_gib": of(|failures| failures.checkpoint.gib()),
        "checkpoint_seconds": of(|failures| failures.interruptions.checkpoint.0),
        "checkpoint_interval_steps": failures.map(|failures| failures.interval_steps),
        "checkpoint_interval_seconds": of(|failures| failures.interval.0),
        "provenance": failures.map(|failures| failures.provenance.name()),
    })
}

fn estimate_value(strategy: &Strategy, estimate: &Estimate, gpus: u64) -> Value {
    let gpu_seconds = estimate.step.0 * gpus as f64;
    let terms: serde_json::Map<String, Value> =
        estimate.terms.iter().map(|(term, value)| (term.name().to_owned(), json!(value.time.0))).collect();
    let provenance: serde_json::Map<String, Value> =
        estimate.terms.iter().map(|(term, value)| (term.name().to_owned(), json!(value.provenance.name()))).collect();
    json!({
        "step_seconds": estimate.step.0,
        "interval_seconds": [estimate.interval.0.0, estimate.interval.1.0],
        "tokens_per_second_per_gpu": estimate.tokens_per_second_per_gpu,
        "model_tflops_per_gpu": estimate.model_flops.0 / gpu_seconds / 1e12,
        "hardware_tflops_per_gpu": estimate.hardware_flops.0 / gpu_seconds / 1e12,
        "mfu": estimate.mfu,
        "mfu_formula": estimate.mfu_formula,
        "device_memory_gib": estimate.device_memory.gib(),
        "allocator_peak_gib": estimate.allocator_peak.gib(),
        "fullest_stage": estimate.fullest_stage.0,
        "checkpoint_gib": estimate.checkpoint.gib(),
        "micro_batches": strategy.num_micro_batches(),
        "terms": terms,
        "provenance": provenance,
        "remarks": estimate.remarks,
    })
}

fn stage_value(stage: &ir::plan::Stage) -> Value {
    let memory: serde_json::Map<String, Value> =
        stage.memory.iter().map(|(term, bytes)| (term.name().replace(' ', "_"), gib(*bytes))).collect();
    json!({
        "stage": stage.stage.0,
        "ranks": [stage.ranks.0, stage.ranks.1],
        "embedding": stage.embedding,
        "layers": [stage.layers.0, stage.layers.1],
        "further_layers": stage.further_layers,
        "head": stage.head,
        "parameters_per_rank": stage.parameters_per_rank,
        "in_flight": stage.in_flight,
        "forward_seconds": stage.forward.0,
        "backward_seconds": stage.backward.0,
        "memory_gib": memory,
        "device_memory_gib": stage.device_memory().gib(),
    })
}

fn gib(bytes: Bytes) -> Value {
    json!(bytes.gib())
}
