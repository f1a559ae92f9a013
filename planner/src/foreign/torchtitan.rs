//! torchtitan's TOML file, as its versions of 2024 and 2025 read it.
//!
//! Sources of names, defaults and rules: pytorch/torchtitan, torchtitan/config/job_config.py (2025) and config_manager.py
//! (2024), distributed/parallel_dims.py and distributed/pipeline.py, models/llama3/train_configs.

mod stages;

use hardware_profiles::device::MatmulFormat;
use ir::error::Problem;
use ir::model::{DType, ModelSpec, Position, Workload};
use ir::strategy::{Recompute, ScheduleKind, Strategy, ZeroStage};
use serde_json::{Map, Value};

use super::others::Others;
use super::rules::{Names, are_whole, layout_problems};
use super::tree::Tree;
use super::{Format, Launch, Launcher, Settings, Switches, check_world, list, plain_layout, refuse};
use crate::error::Error;
use crate::examples::builtin_models;
use crate::request::divisors;
use stages::Schedule;

/// Settings that the reader does not read, by what they mean for a prediction.
const OTHER_SETTINGS: &str = include_str!("torchtitan/settings.ron");
/// The stack that predictions of such files are for.
const STACK: &str = "fsdp-compile-2024";

/// Sequences of a forward pass where the file does not say.
const LOCAL_BATCH: u64 = 8;
/// Tokens of a sequence where the file does not say.
const SEQUENCE_LENGTH: u64 = 2048;

const SHARD: &str = "parallelism.data_parallel_shard_degree";
const TENSOR: &str = "parallelism.tensor_parallel_degree";
const PIPELINE: &str = "parallelism.pipeline_parallel_degree";
const CONTEXT: &str = "parallelism.context_parallel_degree";
const LOCAL: &str = "training.local_batch_size";
const GLOBAL: &str = "training.global_batch_size";

/// Models whose shape is exactly that of an example: name and flavor there, name here.
const MODELS: [(&str, &str, &str); 6] = [
    ("llama3", "8B", "llama-3.1-8b"),
    ("llama3", "70B", "llama-3.1-70b"),
    ("llama3", "405B", "llama-3.1-405b"),
    ("llama2", "7B", "llama-2-7b"),
    ("llama2", "70B", "llama-2-70b"),
    ("deepseek_v3", "671B", "deepseek-v3"),
];

/// What torchtitan calls a built-in model: name and flavor.
pub fn name_of(model: &str) -> Option<(&'static str, &'static str)> {
    MODELS.into_iter().find(|(_, _, example)| *example == model).map(|(name, flavor, _)| (name, flavor))
}

/// Reads a file's text; `origin` names it in errors.
///
/// # Errors
/// `Error::BadInput` where the text is no TOML, and with everything that torchtitan would refuse or that cannot be
/// represented.
pub fn read_torchtitan(text: &str, origin: &str, launcher: &Launcher) -> Result<Launch, Error> {
    check_world(launcher)?;
    let mut file = read_tables(text, origin)?;
    let (mut settings, mut defaults) = (Settings::default(), Vec::new());
    let model = read_model(&mut file, origin, launcher)?;
    let names = names(origin);
    let axes = read_axes(&mut file, launcher.gpus);
    let sequence_length = launcher.sequence_length.or(file.count("training.seq_len")).unwrap_or(SEQUENCE_LENGTH);
    check_length(&mut file, &model, sequence_length);
    let schedule = stages::read_schedule(&mut file, axes.pipeline, &mut settings);
    let batch = read_batch(&mut file, &axes, launcher, &mut settings, &mut defaults);
    let parts = stages::split(&mut file, &model, axes.pipeline, schedule);
    let tensor_sequence = file.switch("parallelism.enable_sequence_parallel").unwrap_or(true);
    let layout = Strategy {
        tensor_parallel: axes.tensor,
        pipeline_parallel: axes.pipeline,
        data_parallel: axes.replicate * axes.shard,
        context_parallel: axes.context,
        expert_parallel: file.count("parallelism.expert_parallel_degree").unwrap_or(1),
        zero_stage: read_zero_stage(&mut file, &axes),
        shard_group: axes.shard,
        micro_batch: batch[0],
        global_batch: batch[1],
        virtual_stages: parts.virtual_stages,
        schedule: if axes.pipeline > 1 { schedule.kind() } else { ScheduleKind::OneForwardOneBackward },
        recompute: read_recompute(&mut file, &mut settings),
        sequence_parallel: axes.tensor > 1 && tensor_sequence,
        offload_optimizer: read_offload(&mut file, &mut settings),
        whole_experts: read_whole_experts(&mut file, axes.tensor, &mut settings),
        ..plain_layout()
    };
    let switches = read_switches(&mut file, &mut settings);
    let model = ModelSpec { dtype: read_dtype(&mut file), ..model };
    let others = Others::read(OTHER_SETTINGS, "torchtitan/settings.ron");
    let asked: Vec<&str> = file.asked().collect();
    let unrepresentable = others.sort(file.rest(), asked.into_iter(), origin, &mut settings);
    file.problems.extend(unrepresentable);
    let workload = Workload { sequence_length, global_batch: layout.global_batch };
    if file.problems.is_empty() {
        file.problems.extend(layout_problems(&model, workload, &layout, &names));
    }
    refuse(file.problems)?;
    let (format, layers) = (Format::Torchtitan, parts.layers);
    Ok(Launch { format, model, workload, layout, layers, recomputed: 0, stack: STACK, switches, settings, defaults })
}

fn names(origin: &str) -> Names {
    Names {
        origin: origin.to_owned(),
        tensor: TENSOR,
        pipeline: PIPELINE,
        context: CONTEXT,
        expert: "parallelism.expert_parallel_degree",
        micro_batch: LOCAL,
        global_batch: GLOBAL,
    }
}

fn read_tables(text: &str, origin: &str) -> Result<Tree, Problem> {
    let fields: Map<String, Value> = toml::from_str(text).map_err(|error| {
        let place = error.span().map_or(origin.to_owned(), |span| {
            let line = text.get(..span.start).map_or(1, |before| before.matches('\n').count() + 1);
            format!("{origin}, line {line}")
        });
        Problem::new(error.message().to_owned(), place, "mend the TOML at this place")
    })?;
    Ok(Tree::new(fields, origin))
}

/// The model by its name and flavor, or the given one.
fn read_model(file: &mut Tree, origin: &str, launcher: &Launcher) -> Result<ModelSpec, Error> {
    let name = file.text("model.name").unwrap_or_else(|| "llama3".to_owned());
    let flavor = file.text("model.flavor").unwrap_or_else(|| "debugmodel".to_owned());
    if let Some(model) = &launcher.model {
        return Ok(model.clone());
    }
    let known = MODELS.into_iter().find(|(known, size, _)| *known == name && size.eq_ignore_ascii_case(&flavor));
    let Some((_, _, example)) = known else {
        let known = MODELS.map(|(name, flavor, _)| format!("{name} {flavor}")).join(", ");
        let what = format!("the shape of {name} {flavor} is not known");
        let help = format!("give it with --model FILE; known are {known}");
        return Err(Error::from(Problem::new(what, format!("{origin}, model.flavor"), help)));
    };
    let models = builtin_models()?;
    Ok(models.into_iter().find(|model| model.name == example).expect("the example models are part of this program"))
}

fn check_length(file: &mut Tree, model: &ModelSpec, length: u64) {
    let most = model.max_sequence_length.tokens();
    if model.position == Position::Learned && length > most {
        let what = format!("training.seq_len {length} exceeds the {most} learned positions");
        file.refuse(what, "training.seq_len", format!("give at most {most}"));
    }
}

/// Degrees of the axes.
struct Axes {
    replicate: u64,
    shard: u64,
    tensor: u64,
    pipeline: u64,
    context: u64,
}

/// Degrees, of which that of sharding is what the others leave where it is -1 (parallel_dims.py).
fn read_axes(file: &mut Tree, gpus: u64) -> Axes {
    let old = |name: &'static str, older: &'static str, file: &mut Tree| file.first_count(&[name, older]).unwrap_or(1);
    let replicate = old("parallelism.data_parallel_replicate_degree", "training.data_parallel_replicate_degree", file);
    let tensor = old(TENSOR, "training.tensor_parallel_degree", file);
    let pipeline = old(PIPELINE, "experimental.pipeline_parallel_degree", file);
    let context = old(CONTEXT, "experimental.context_parallel_degree", file);
    let shards = [SHARD, "training.data_parallel_shard_degree"].map(|path| file.count_or_open(path));
    let stated = shards.into_iter().flatten().next();
    let others = [tensor, pipeline, context].into_iter().try_fold(replicate, u64::checked_mul).unwrap_or(u64::MAX);
    let left = (gpus > 0 && gpus.is_multiple_of(others)).then(|| gpus / others);
    if left.is_none_or(|left| stated.is_some_and(|stated| stated != left)) {
        let shard = stated.map_or(String::new(), |stated| format!(" x shard {stated}"));
        let what = format!(
            "replicate {replicate}{shard} x tensor {tensor} x pipeline {pipeline} x context {context} is not {gpus} GPUs"
        );
        let help = match left {
            Some(left) => {
                format!(
                    "legal values of {SHARD}: -1, {left}; or launch it on {} GPUs",
                    others.saturating_mul(stated.unwrap_or(1))
                )
            }
            None => format!("the product divides {gpus}: degrees are among {}", list(&divisors(gpus))),
        };
        file.refuse(what, SHARD, help);
    }
    Axes { replicate, shard: stated.or(left).unwrap_or(1), tensor, pipeline, context }
}

/// Sequences of a micro-batch and of a step.
fn read_batch(
    file: &mut Tree,
    axes: &Axes,
    launcher: &Launcher,
    settings: &mut Settings,
    defaults: &mut Vec<&'static str>,
) -> [u64; 2] {
    let local = file.first_count(&[LOCAL, "training.batch_size"]).unwrap_or_else(|| {
        defaults.push("local batch");
        LOCAL_BATCH
    });
    let replicas = axes.replicate * axes.shard;
    let stated = file.count_or_open(GLOBAL);
    let global = launcher.global_batch.or(stated).unwrap_or(local.saturating_mul(replicas));
    let size = file.count("parallelism.pipeline_parallel_microbatch_size");
    let number = file
        .first_count(&["parallelism.pipeline_parallel_microbatches", "experimental.pipeline_parallel_microbatches"]);
    if axes.pipeline == 1 {
        return [local, global];
    }
    let micro_batch = match (size, number) {
        (Some(size), _) => size,
        (None, Some(number)) => (local / number).max(1),
        (None, None) => 1,
    };
    if !local.is_multiple_of(micro_batch) {
        let what = format!("{micro_batch} does not divide the local batch of {local}");
        let help = format!("legal values: {}", list(&divisors(local)));
        file.refuse(what, "parallelism.pipeline_parallel_microbatch_size", help);
    }
    if global > local.saturating_mul(replicas) {
        let reason = "the pipeline is predicted to drain once a step, not after each local batch".to_owned();
        settings.assumed.push((GLOBAL.to_owned(), reason));
    }
    [micro_batch, global]
}

/// Parameters are sharded over the shard and the context axis; with pipeline stages they stay whole between passes
/// unless the file says otherwise.
fn read_zero_stage(file: &mut Tree, axes: &Axes) -> ZeroStage {
    let policy = file.word("parallelism.fsdp_reshard_after_forward", &["default", "always", "never"]);
    let reshards = match policy.unwrap_or("default") {
        "always" => true,
        "never" => false,
        _ => axes.pipeline == 1,
    };
    match (axes.shard * axes.context > 1, reshards) {
        (false, _) => ZeroStage::None,
        (true, true) => ZeroStage::Parameters,
        (true, false) => ZeroStage::Gradients,
    }
}

fn read_recompute(file: &mut Tree, settings: &mut Settings) -> Recompute {
    let mode = file.word("activation_checkpoint.mode", &["selective", "full", "none"]).unwrap_or("selective");
    let option = file.value("activation_checkpoint.selective_ac_option");
    let option = option.map_or("2".to_owned(), |value| value.as_str().map_or(value.to_string(), str::to_owned));
    match (mode, option.as_str()) {
        ("none", _) => Recompute::None,
        ("full", _) | ("selective", "1") => Recompute::Full,
        (_, option) => {
            let reason = match option {
                "op" => "what operators keep is predicted as without the attention core".to_owned(),
                every => format!("recomputation of one layer in {every} is predicted as that of the attention core"),
            };
            settings.assumed.push(("activation_checkpoint.selective_ac_option".to_owned(), reason));
            Recompute::Selective
        }
    }
}

fn read_offload(file: &mut Tree, settings: &mut Settings) -> bool {
    let offload = file.switch("training.enable_cpu_offload").unwrap_or(false);
    if offload {
        let reason = "the optimizer is predicted in host memory, parameters on the GPU".to_owned();
        settings.assumed.push(("training.enable_cpu_offload".to_owned(), reason));
    }
    offload
}

fn read_whole_experts(file: &mut Tree, tensor: u64, settings: &mut Settings) -> bool {
    let path = "parallelism.expert_tensor_parallel_degree";
    are_whole(path, file.count(path), tensor, settings)
}

fn read_switches(file: &mut Tree, settings: &mut Settings) -> Switches {
    let compiled = file.any(&["compile.enable", "training.compile"]);
    if !compiled {
        settings.assumed.push(("compile.enable".to_owned(), "the model is predicted compiled".to_owned()));
    }
    let converters = match file.value("model.converters") {
        Some(Value::String(names)) => names.split(',').map(|name| name.trim().to_owned()).collect(),
        Some(Value::Array(names)) => names.iter().filter_map(|name| name.as_str().map(str::to_owned)).collect(),
        _ => Vec::new(),
    };
    let low =
        |name: &String| ["float8", "mx", "mxfp8"].iter().any(|format| name.rsplit('.').any(|part| part == *format));
    let fp8 = file.any(&["float8.enable_float8_linear"]) || converters.iter().any(low);
    let rotate = file.word("parallelism.context_parallel_rotate_method", &["allgather", "alltoall"]);
    if rotate.is_some() {
        let reason = "keys and values are predicted to go round a ring".to_owned();
        settings.assumed.push(("parallelism.context_parallel_rotate_method".to_owned(), reason));
    }
    Switches { matmul_format: if fp8 { MatmulFormat::Fp8 } else { MatmulFormat::Model }, ..Switches::default() }
}

fn read_dtype(file: &mut Tree) -> DType {
    match file.word("training.mixed_precision_param", &["bfloat16", "float32"]) {
        Some("float32") => DType::FP32,
        _ => DType::BF16,
    }
}

impl Schedule {
    /// The order of micro-batches that stands for it.
    fn kind(self) -> ScheduleKind {
        match self {
            Schedule::GPipe => ScheduleKind::GPipe,
            Schedule::OneForwardOneBackward => ScheduleKind::OneForwardOneBackward,
            Schedule::Interleaved => ScheduleKind::Interleaved,
            Schedule::ZeroBubbleV => ScheduleKind::ZeroBubbleV,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::foreign::others::assert_disjoint;

    #[test]
    fn no_setting_is_listed_twice() {
        assert_disjoint(&Others::read(OTHER_SETTINGS, "torchtitan/settings.ron"), &[]);
    }
}
