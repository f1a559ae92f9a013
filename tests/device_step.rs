//! Whole training steps on a device, whatever Vulkan driver there is, against the same steps on processor cores: loss,
//! every gradient, weights.

#[path = "support/ranks.rs"]
mod ranks;
mod support;

use std::collections::BTreeMap;

use ir::model::{ModelSpec, Workload};
use ir::plan::Plan;
use ir::strategy::{Recompute, ScheduleKind, ZeroStage};
use planner::request::FixedChoices;
use ranks::{OPTIMIZER, RankRun, Run, execute, execute_in, joined};
use runtime::device::Device;
use runtime::tensor::Memory;
use support::plans::fixed_plan;
use support::small::{Family, Shape, small_model};

/// Largest relative difference of a loss or a gradient norm.
const LOSS_TOLERANCE: f64 = 1e-5;
/// Largest difference of a gradient, in units of the tensor's largest.
const GRADIENT_TOLERANCE: f64 = 1e-4;
/// Tensors whose gradients are smaller than this part of the model's largest count as that large.
const SMALL_GRADIENT: f64 = 1e-3;

type Tensors = BTreeMap<String, Vec<f64>>;

/// A device whose memory begins every step with NaN.
fn device() -> Memory {
    let device = Device::wgpu().unwrap_or_else(|problem| panic!("{problem}"));
    device.poison_values();
    Memory::on(device)
}

fn largest(values: &[f64]) -> f64 {
    values.iter().map(|x| x.abs()).fold(0.0, f64::max)
}

/// The largest difference of a tensor's elements in units of the tensor's largest.
fn worst_difference(label: &str, found: &Tensors, wanted: &Tensors) -> f64 {
    assert!(found.keys().eq(wanted.keys()), "{label}");
    let floor = SMALL_GRADIENT * wanted.values().map(|values| largest(values)).fold(0.0, f64::max);
    let mut worst = 0.0_f64;
    for (key, wanted) in wanted {
        let differences: Vec<f64> = found[key].iter().zip(wanted).map(|(found, wanted)| found - wanted).collect();
        assert!(differences.iter().all(|x| x.is_finite()), "{label}: {key} is no number");
        let part = largest(&differences) / largest(wanted).max(floor);
        assert!(part <= GRADIENT_TOLERANCE, "{label}: {key} differs by {part:e}");
        worst = worst.max(part);
    }
    worst
}

fn check(label: &str, plan: &Plan) {
    let run = Run::made_up(plan, 2, 5, OPTIMIZER);
    let on_cores = execute(plan, &run);
    let on_device = execute_in(device, plan, &run);
    let close = |what: &str, found: f64, wanted: f64| {
        let part = (found / wanted - 1.0).abs();
        assert!(part <= LOSS_TOLERANCE, "{label}: {what} is {found}, on cores {wanted}");
        part
    };
    let mut loss = 0.0_f64;
    for (found, wanted) in on_device.iter().zip(&on_cores) {
        close("evaluation", found.evaluation, wanted.evaluation);
        for step in 0..run.batches.len() {
            loss = loss.max(close("loss", found.losses[step], wanted.losses[step]));
            close("norm", found.norms[step], wanted.norms[step]);
        }
    }
    let of = |ranks: &[RankRun], part: fn(&RankRun) -> &ranks::Parts| joined(ranks, part);
    let gradients =
        worst_difference(label, &of(&on_device, |rank| &rank.gradients), &of(&on_cores, |rank| &rank.gradients));
    eprintln!("{label}: loss {loss:.1e}, gradients {gradients:.1e}");
}

fn plan(model: ModelSpec, flash: bool, recompute: Recompute, ranks: [u64; 3], zero_stage: ZeroStage) -> Plan {
    let [tensor_parallel, pipeline_parallel, data_parallel] = ranks;
    let fixed = FixedChoices {
        tensor_parallel: Some(tensor_parallel),
        pipeline_parallel: Some(pipeline_parallel),
        data_parallel: Some(data_parallel),
        zero_stage: Some(zero_stage),
        micro_batch: Some(2),
        recompute: Some(recompute),
        schedule: Some(ScheduleKind::OneForwardOneBackward),
        sequence_parallel: Some(tensor_parallel > 1),
        ..FixedChoices::default()
    };
    fixed_plan(model, Workload { sequence_length: support::small::SEQUENCE as u64, global_batch: 8 }, flash, fixed)
}

fn models() -> [(&'static str, ModelSpec); 3] {
    let model = |family, tied, heads, key_value_heads, vocabulary| {
        small_model(Shape { family, tied, heads, key_value_heads, layers: 2, vocabulary })
    };
    [
        ("BLOOM", model(Family::Bloom, true, 4, 4, 37)),
        ("GPT-2", model(Family::Gpt2, true, 3, 3, 50)),
        ("Llama", model(Family::Llama, false, 6, 2, 41)),
    ]
}

#[test]
fn steps_on_a_device_are_those_on_cores() {
    for (name, model) in models() {
        for (flash, recompute) in [(true, Recompute::None), (false, Recompute::Selective), (true, Recompute::Full)] {
            let plan = plan(model.clone(), flash, recompute, [1, 1, 1], ZeroStage::None);
            check(&format!("{name}, flash {flash}, recompute {recompute:?}"), &plan);
        }
    }
}

#[test]
fn ranks_that_share_a_device_compute_what_cores_do() {
    for (name, model) in models().into_iter().filter(|(name, _)| *name != "GPT-2") {
        for (ranks, zero_stage) in [([2, 2, 1], ZeroStage::None), ([1, 1, 2], ZeroStage::Parameters)] {
            let plan = plan(model.clone(), true, Recompute::None, ranks, zero_stage);
            check(&format!("{name} on {ranks:?}"), &plan);
        }
    }
}
