//! Limits, changes and constraints as JSON.

use ir::model::ModelSpec;
use ir::plan::Binding;
use serde_json::{Value, json};

use super::json::strategy_value;
use crate::advice::{Advice, Change, Constraint, MoreGpus};
use crate::lower::executable;
use crate::shapes::ShapeAdvice;

/// What a user could change, as one object.
pub fn advice_value(model: &ModelSpec, advice: &Advice) -> Value {
    json!({
        "fullest_stage": advice.fullest_stage,
        "limits": binding_values(&advice.limits),
        "changes": advice.changes.iter().map(|change| change_value(model, change)).collect::<Vec<_>>(),
        "more_gpus": advice.more_gpus.as_ref().map(more_gpus_value),
        "shapes": advice.shapes.iter().map(shape_value).collect::<Vec<_>>(),
        "constraint": advice.constraint.as_ref().map(|constraint| constraint_value(model, constraint)),
    })
}

/// Limits with their weights.
pub fn binding_values(limits: &[Binding]) -> Vec<Value> {
    limits.iter().map(|binding| json!({"limit": binding.limit.name(), "gain": binding.gain})).collect()
}

fn change_value(model: &ModelSpec, change: &Change) -> Value {
    json!({
        "change": change.what,
        "relieves": change.relieves.name(),
        "seconds": change.time.0,
        "gain": change.gain,
        "strategy": change.layout.as_ref().map(|layout| strategy_value(layout, &executable(model, layout))),
    })
}

fn more_gpus_value(more: &MoreGpus) -> Value {
    json!({
        "gpus": more.gpus,
        "data_parallel": more.data_parallel,
        "global_batches": more.global_batches,
        "step_seconds": more.step.0,
        "speed_up": more.speed_up,
    })
}

fn shape_value(shape: &ShapeAdvice) -> Value {
    json!({"field": shape.field, "from": shape.from, "to": shape.to, "gain": shape.gain, "reason": shape.reason})
}

fn constraint_value(model: &ModelSpec, constraint: &Constraint) -> Value {
    json!({
        "fixed": constraint.flags,
        "free_strategy": strategy_value(&constraint.free, &executable(model, &constraint.free)),
        "free_step_seconds": constraint.free_step.0,
        "seconds": constraint.more.0,
        "ratio": constraint.ratio,
    })
}
