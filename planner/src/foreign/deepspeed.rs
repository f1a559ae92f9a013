//! DeepSpeed's JSON file.
//!
//! Sources of names, defaults and rules: www.deepspeed.ai/docs/config-json; microsoft/DeepSpeed, deepspeed/runtime/
//! config.py, zero/config.py, tensor_parallel/config.py and engine.py (0.16). The model is not in the file.

use ir::error::Problem;
use ir::model::{DType, ModelSpec, Workload, workload};
use ir::strategy::{Recompute, Strategy, ZeroStage};
use serde_json::Value;

use super::others::Others;
use super::rules::{Names, layout_problems, replicas};
use super::tree::Tree;
use super::{Format, Launch, Launcher, Settings, Switches, check_world, list, plain_layout, refuse};
use crate::error::Error;
use crate::request::divisors;

/// Settings that the reader does not read, by what they mean for a prediction.
const OTHER_SETTINGS: &str = include_str!("deepspeed/settings.ron");
/// The stack that predictions of such files are for.
const STACK: &str = "deepspeed-zero";

const TRAIN_BATCH: &str = "train_batch_size";
const MICRO_BATCH: &str = "train_micro_batch_size_per_gpu";
const ACCUMULATION: &str = "gradient_accumulation_steps";

/// Reads a file's text; `origin` names it in errors.
///
/// # Errors
/// `Error::BadInput` where the text is no JSON object, and with everything that DeepSpeed would refuse or that cannot
/// be represented.
pub fn read_deepspeed(text: &str, origin: &str, launcher: &Launcher) -> Result<Launch, Error> {
    check_world(launcher)?;
    let mut file = read_object(text, origin)?;
    let Some(given) = &launcher.model else {
        let help = "give --model FILE: the file of DeepSpeed does not hold the model";
        return Err(Error::from(Problem::new("the model is missing", origin, help)));
    };
    let (mut settings, mut defaults) = (Settings::default(), Vec::new());
    let model = ModelSpec { dtype: read_dtype(&mut file, given.dtype, &mut settings), ..given.clone() };
    let names = names(origin);
    let degrees = [
        file.first_count(&["tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"]).unwrap_or(1),
        file.count_or_open("pipeline.stages").unwrap_or(1),
        file.count("sequence_parallel_size").unwrap_or(1),
    ];
    let replicas = replicas(launcher.gpus, degrees, &names).unwrap_or_else(|problem| {
        file.problems.push(problem);
        1
    });
    let batch = read_batch(&mut file, replicas, launcher);
    let zero_stage = read_zero_stage(&mut file, degrees[1], &mut settings);
    let shard_group = read_shard_group(&mut file, replicas, &mut settings);
    let layout = Strategy {
        tensor_parallel: degrees[0],
        pipeline_parallel: degrees[1],
        data_parallel: replicas,
        context_parallel: degrees[2],
        zero_stage,
        shard_group,
        micro_batch: batch.micro_batch,
        global_batch: batch.global_batch,
        recompute: read_recompute(&mut file, launcher, &mut defaults),
        offload_optimizer: read_offload(&mut file, &mut settings),
        ..plain_layout()
    };
    let switches = read_switches(&mut file, zero_stage, degrees[2]);
    let others = Others::read(OTHER_SETTINGS, "deepspeed/settings.ron");
    let asked: Vec<&str> = file.asked().collect();
    let unrepresentable = others.sort(file.rest(), asked.into_iter(), origin, &mut settings);
    file.problems.extend(unrepresentable);
    let step = workload(&model, origin, launcher.sequence_length, Some(layout.global_batch))?;
    if launcher.sequence_length.is_none() && model.sequence_length.is_none() {
        defaults.push("sequence");
    }
    file.problems.extend(layout_problems(&model, step, &layout, &names));
    refuse(file.problems)?;
    let workload = Workload { global_batch: layout.global_batch, ..step };
    let (format, layers) = (Format::DeepSpeed, Vec::new());
    Ok(Launch { format, model, workload, layout, layers, recomputed: 0, stack: STACK, switches, settings, defaults })
}

fn names(origin: &str) -> Names {
    Names {
        origin: origin.to_owned(),
        tensor: "tensor_parallel.autotp_size",
        pipeline: "pipeline.stages",
        context: "sequence_parallel_size",
        expert: "expert parallelism",
        micro_batch: MICRO_BATCH,
        global_batch: TRAIN_BATCH,
    }
}

fn read_object(text: &str, origin: &str) -> Result<Tree, Problem> {
    let value: Value = serde_json::from_str(text).map_err(|error| {
        let message = error.to_string();
        let what = message.rsplit_once(" at line ").map_or(message.as_str(), |(what, _)| what).to_owned();
        let place = format!("{origin}, line {}, column {}", error.line(), error.column());
        Problem::new(what, place, "mend the JSON at this place; comments and trailing commas are not allowed")
    })?;
    match value {
        Value::Object(fields) => Ok(Tree::new(fields, origin)),
        _ => Err(Problem::new("the file holds no object", origin, "give DeepSpeed's settings between { and }")),
    }
}

fn read_dtype(file: &mut Tree, own: DType, settings: &mut Settings) -> DType {
    let bf16 = ["bf16.enabled", "bfloat16.enabled"].map(|path| file.value(path));
    let sections = ["bf16", "bfloat16", "fp16"].map(|path| file.value(path).is_some());
    let bf16 = bf16.into_iter().flatten().any(|value| value == Value::Bool(true));
    let fp16 = file.switch("fp16.enabled");
    match (bf16, fp16) {
        (true, Some(true)) => {
            file.refuse("bf16 and fp16 are both enabled", "bf16.enabled", "enable one of the two");
            DType::BF16
        }
        (true, _) => DType::BF16,
        (false, Some(true)) => DType::FP16,
        // `auto` stands for the trainer's choice, which is the model's own format.
        (false, None) if sections.contains(&true) => own,
        (false, _) => {
            settings.warnings.push("neither bf16 nor fp16 is enabled: the model trains in fp32".to_owned());
            DType::FP32
        }
    }
}

struct Batch {
    micro_batch: u64,
    global_batch: u64,
}

/// Two of three numbers determine the third (config.py, `_set_batch_related_parameters` and `_batch_assertion`).
fn read_batch(file: &mut Tree, replicas: u64, launcher: &Launcher) -> Batch {
    let stated = file.count(TRAIN_BATCH);
    let micro = file.count(MICRO_BATCH);
    let steps = file.count(ACCUMULATION);
    if let (Some(stated), Some(wanted)) = (stated, launcher.global_batch)
        && stated != wanted
    {
        let what = format!("{TRAIN_BATCH} is {stated}, --global-batch says {wanted}");
        file.refuse(what, TRAIN_BATCH, "leave out --global-batch: the file decides");
    }
    let train = stated.or(launcher.global_batch);
    let each = |parts: u64| train.map(|train| train / replicas / parts).filter(|each| *each > 0);
    let (micro_batch, steps) = match (train, micro, steps) {
        (Some(train), Some(micro), steps) => (Some(micro), steps.or(Some((train / replicas / micro).max(1)))),
        (Some(_), None, Some(steps)) => (each(steps), Some(steps)),
        (Some(_), None, None) => (each(1), Some(1)),
        (None, Some(micro), steps) => (Some(micro), Some(steps.unwrap_or(1))),
        (None, None, _) => (None, None),
    };
    let (Some(micro_batch), Some(steps)) = (micro_batch, steps) else {
        match train {
            Some(train) => file.refuse(
                format!("{TRAIN_BATCH} {train} leaves no sequence for each of {replicas} replicas"),
                TRAIN_BATCH,
                format!("legal values: multiples of {replicas}"),
            ),
            None => file.refuse(
                format!("neither {TRAIN_BATCH} nor {MICRO_BATCH} has a number"),
                TRAIN_BATCH,
                "give numbers for two of the three, or --global-batch",
            ),
        }
        return Batch { micro_batch: 1, global_batch: replicas };
    };
    let product = micro_batch.saturating_mul(steps).saturating_mul(replicas);
    if let Some(train) = train.filter(|train| *train != product) {
        let what = format!(
            "{TRAIN_BATCH} {train} is not {MICRO_BATCH} {micro_batch} x {ACCUMULATION} {steps} x {replicas} replicas = \
             {product}"
        );
        let mut help = format!("legal values of {TRAIN_BATCH}: {product}");
        if train.is_multiple_of(replicas) {
            let products = divisors(train / replicas);
            help += &format!("; with it as it is, {MICRO_BATCH} and {ACCUMULATION} multiply to {}", train / replicas);
            help += &format!(" ({MICRO_BATCH} {})", list(&products[..products.len().min(8)]));
        }
        file.refuse(what, TRAIN_BATCH, help);
    }
    Batch { micro_batch, global_batch: product }
}

fn read_zero_stage(file: &mut Tree, stages: u64, settings: &mut Settings) -> ZeroStage {
    const PATH: &str = "zero_optimization.stage";
    let number = file.value(PATH);
    let number = number.map_or(Some(0), |value| value.as_u64());
    let found = number.and_then(|number| ZeroStage::try_from(u8::try_from(number).ok()?).ok());
    let Some(stage) = found else {
        file.refuse(format!("{PATH} is no stage"), PATH, "legal values: 0, 1, 2, 3");
        return ZeroStage::None;
    };
    if stage >= ZeroStage::Gradients && stages > 1 {
        let what = format!("{PATH} {} with {stages} pipeline stages, which DeepSpeed refuses", u8::from(stage));
        file.refuse(what, PATH, "legal values with pipeline stages: 0, 1");
    }
    let bf16 = file.value("bf16.enabled") == Some(Value::Bool(true));
    if stage == ZeroStage::None && bf16 {
        let warning = "DeepSpeed's bf16 optimizer divides its state among replicas at stage 0 too: predicted as ZeRO-1";
        settings.warnings.push(warning.to_owned());
        return ZeroStage::OptimizerState;
    }
    stage
}

/// Replicas among which ZeRO-3 divides parameters: all, or a group (MiCS, arXiv 2205.00119).
fn read_shard_group(file: &mut Tree, replicas: u64, settings: &mut Settings) -> u64 {
    let group = file.count_or_open("zero_optimization.mics_shard_size").unwrap_or(replicas);
    let secondary = file.count("zero_optimization.zero_hpz_partition_size").unwrap_or(1);
    for (path, size) in
        [("zero_optimization.mics_shard_size", group), ("zero_optimization.zero_hpz_partition_size", secondary)]
    {
        if !replicas.is_multiple_of(size) {
            let help = format!("legal values: {}", list(&divisors(replicas)));
            file.refuse(format!("{path} {size} does not divide {replicas} replicas"), path, help);
        }
    }
    if secondary > 1 {
        let reason =
            "parameters are predicted gathered from all replicas, without a second copy inside groups".to_owned();
        settings.assumed.push(("zero_optimization.zero_hpz_partition_size".to_owned(), reason));
    }
    group
}

fn read_recompute(file: &mut Tree, launcher: &Launcher, defaults: &mut Vec<&'static str>) -> Recompute {
    let interval = file.count_or_open("pipeline.activation_checkpoint_interval").is_some();
    let section = file.value("activation_checkpointing").is_some();
    launcher.recompute.unwrap_or_else(|| {
        defaults.push("recomputation");
        if interval || section { Recompute::Full } else { Recompute::None }
    })
}

fn read_offload(file: &mut Tree, settings: &mut Settings) -> bool {
    let mut device = |path: &'static str, old: &'static str| {
        let device = file.word(path, &["none", "cpu", "nvme"]).unwrap_or("none");
        if device == "none" && file.switch(old).unwrap_or(false) { "cpu" } else { device }
    };
    let optimizer = device("zero_optimization.offload_optimizer.device", "zero_optimization.cpu_offload");
    let parameters = device("zero_optimization.offload_param.device", "zero_optimization.cpu_offload_param");
    if optimizer == "nvme" {
        let reason = "the optimizer is predicted in host memory".to_owned();
        settings.assumed.push(("zero_optimization.offload_optimizer.device".to_owned(), reason));
    }
    if parameters != "none" {
        let reason = "parameters are predicted on the GPU".to_owned();
        settings.assumed.push(("zero_optimization.offload_param".to_owned(), reason));
    }
    optimizer != "none"
}

fn read_switches(file: &mut Tree, zero_stage: ZeroStage, sequence_parallel: u64) -> Switches {
    let overlap = file.switch("zero_optimization.overlap_comm");
    // Where the file says nothing DeepSpeed overlaps from stage 3 on.
    let overlap = overlap.unwrap_or(zero_stage == ZeroStage::Parameters);
    let stated = (zero_stage > ZeroStage::None).then_some(overlap);
    Switches {
        overlap_gradient_reduction: stated,
        overlap_parameter_gather: stated.filter(|_| zero_stage == ZeroStage::Parameters),
        context_all_to_all: (sequence_parallel > 1).then_some(true),
        ..Switches::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::foreign::others::assert_disjoint;

    #[test]
    fn no_setting_is_listed_twice() {
        assert_disjoint(&Others::read(OTHER_SETTINGS, "deepspeed/settings.ron"), &[]);
    }
}
