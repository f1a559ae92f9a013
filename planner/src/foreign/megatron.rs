//! Flags of Megatron-LM and of the Megatron-DeepSpeed forks.
//!
//! Sources of names, defaults and rules: NVIDIA/Megatron-LM, megatron/training/arguments.py, megatron/core/transformer/
//! transformer_config.py and megatron/core/pipeline_parallel/schedules.py (2026-08); bigscience-workshop and microsoft
//! Megatron-DeepSpeed, megatron/arguments.py and megatron/model/gpt_model.py; DeepSpeed, runtime/pipe/engine.py.

mod layout;
mod model;
mod stages;

pub(crate) use model::LLAMA3_SCALING;

use ir::model::{Workload, check_model};
use ir::strategy::{Recompute, ScheduleKind, Strategy};

use super::flags::Flags;
use super::others::Others;
use super::rules::{Names, layout_problems, replicas};
use super::{Format, Launch, Launcher, Settings, check_world, refuse};
use crate::error::Error;

/// Flags that the reader does not read, by what they mean for a prediction.
const OTHER_FLAGS: &str = include_str!("megatron/flags.ron");

/// Which fork of Megatron the flags are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fork {
    /// Megatron-Core: Megatron-LM since 2023.
    Core,
    /// Megatron-LM before Megatron-Core.
    Early,
    /// A Megatron-DeepSpeed fork.
    DeepSpeed,
}

/// Reads flags; `origin` names them in errors.
///
/// # Errors
/// `Error::BadInput` with everything that Megatron would refuse or that cannot be represented.
pub fn read_megatron(text: &str, origin: &str, launcher: &Launcher) -> Result<Launch, Error> {
    check_world(launcher)?;
    let mut flags = Flags::read(text, origin)?;
    let fork = fork_of(&mut flags);
    let names = names(origin);
    let (mut settings, mut defaults) = (Settings::default(), Vec::new());
    let model = model::read_model(&mut flags, fork, launcher, &mut settings, &mut defaults);
    let degrees = layout::read_degrees(&mut flags, fork);
    let replicas = replicas(launcher.gpus, degrees.dense(), &names).unwrap_or_else(|problem| {
        flags.problems.push(problem);
        1
    });
    let layout = layout::read_layout(&mut flags, fork, degrees, replicas, launcher, &mut settings);
    let switches = layout::read_switches(&mut flags, fork);
    let (Some(model), Some(layout)) = (model, layout) else {
        sort_rest(&mut flags, origin, &mut settings);
        return Err(Error::BadInput(flags.problems));
    };
    let parts = stages::split(&mut flags, fork, &model, &layout, &mut settings);
    let schedule = if parts.virtual_stages > 1 { ScheduleKind::Interleaved } else { layout.schedule };
    let recomputed = stages::recomputed_layers(&mut flags, &parts, &mut settings);
    let recompute = if recomputed > 0 { Recompute::Partial } else { layout.recompute };
    let layout = Strategy { virtual_stages: parts.virtual_stages, schedule, recompute, ..layout };
    let sequence_length = layout::read_sequence(&mut flags, &model, launcher);
    let workload = Workload { sequence_length, global_batch: layout.global_batch };
    sort_rest(&mut flags, origin, &mut settings);
    // What is wrong with the flags would only be told again of the model.
    if flags.problems.is_empty() {
        check_model(&model, origin)?;
        flags.problems.extend(layout_problems(&model, workload, &layout, &names));
    }
    refuse(std::mem::take(&mut flags.problems))?;
    check_launcher(&flags, launcher, &mut settings);
    settings.warnings.append(&mut flags.warnings);
    let (format, stack, layers) = (Format::Megatron, stack_of(fork), parts.layers);
    Ok(Launch { format, model, workload, layout, layers, recomputed, stack, switches, settings, defaults })
}

fn names(origin: &str) -> Names {
    Names {
        origin: origin.to_owned(),
        tensor: "--tensor-model-parallel-size",
        pipeline: "--pipeline-model-parallel-size",
        context: "--context-parallel-size",
        expert: "--expert-model-parallel-size",
        micro_batch: "--micro-batch-size",
        global_batch: "--global-batch-size",
    }
}

/// The fork by flags that only it has.
fn fork_of(flags: &mut Flags) -> Fork {
    const DEEPSPEED: [&str; 5] =
        ["--deepspeed", "--zero-stage", "--pp-partition-method", "--ds-sequence-parallel-size", "--deepspeed_config"];
    const EARLY: [&str; 4] =
        ["--DDP-impl", "--activations-checkpoint-method", "--checkpoint-activations", "--model-parallel-size"];
    match (flags.mentions_any(&DEEPSPEED), flags.mentions_any(&EARLY)) {
        (true, _) => Fork::DeepSpeed,
        (false, true) => Fork::Early,
        (false, false) => Fork::Core,
    }
}

fn stack_of(fork: Fork) -> &'static str {
    match fork {
        Fork::Core => "megatron-core-2025",
        Fork::Early => "megatron-2021",
        Fork::DeepSpeed => "megatron-deepspeed-2022",
    }
}

/// Says where the launcher in front of the script and the command line of `plan` disagree.
fn check_launcher(flags: &Flags, launcher: &Launcher, settings: &mut Settings) {
    let processes = flags.launched(&["--nproc_per_node", "--nproc-per-node", "--num_gpus"]);
    let nodes = flags.launched(&["--nnodes", "--num_nodes"]).unwrap_or(1);
    let Some(world) = processes.and_then(|processes| processes.checked_mul(nodes)) else { return };
    if world != launcher.gpus {
        let gpus = launcher.gpus;
        settings.warnings.push(format!("the launcher starts {world} ranks, --gpus says {gpus}: {gpus} are predicted"));
    }
}

/// Sorts the flags that nothing has read.
fn sort_rest(flags: &mut Flags, origin: &str, settings: &mut Settings) {
    let others = Others::read(OTHER_FLAGS, "megatron/flags.ron");
    let rest: Vec<String> = flags.rest().map(str::to_owned).collect();
    let asked: Vec<&str> = flags.asked().collect();
    flags.problems.extend(others.sort(rest, asked.iter().copied(), origin, settings));
}

/// A value that must be given; its absence is noted.
fn noted(flags: &mut Flags, name: &'static str, value: Option<u64>) -> Option<u64> {
    if value.is_none() && !flags.mentions(name) {
        flags.refuse(format!("{name} is missing"), name, "add it with its value");
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::foreign::others::assert_disjoint;

    #[test]
    fn no_flag_is_both_read_and_listed() {
        let text = "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --micro-batch-size 1 \
                    --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 4";
        let launcher = Launcher { gpus: 4, model: None, global_batch: None, sequence_length: None, recompute: None };
        let launch = read_megatron(text, "flags", &launcher);
        assert!(launch.is_ok_and(|launch| launch.settings.unknown.is_empty()));
        let mut flags = Flags::read(text, "flags").expect("the flags are sound");
        let fork = fork_of(&mut flags);
        let mut settings = Settings::default();
        let model = model::read_model(&mut flags, fork, &launcher, &mut settings, &mut Vec::new());
        let degrees = layout::read_degrees(&mut flags, fork);
        let layout = layout::read_layout(&mut flags, fork, degrees, 1, &launcher, &mut settings);
        layout::read_switches(&mut flags, fork);
        let (model, layout) = (model.expect("the shape is whole"), layout.expect("the layout is whole"));
        stages::split(&mut flags, fork, &model, &layout, &mut settings);
        let asked: Vec<&str> = flags.asked().collect();
        assert!(asked.len() > 100, "{asked:?}");
        assert_disjoint(&Others::read(OTHER_FLAGS, "megatron/flags.ron"), &asked);
    }
}
