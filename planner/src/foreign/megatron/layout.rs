//! Degrees, batch, ZeRO stage, recomputation and switches in Megatron's flags.

use hardware_profiles::device::MatmulFormat;
use ir::mesh::MeshOrder;
use ir::model::ModelSpec;
use ir::strategy::{Recompute, Strategy, ZeroStage};

use super::{Fork, noted};
use crate::foreign::flags::Flags;
use crate::foreign::rules::are_whole;
use crate::foreign::{Launcher, Settings, Switches, plain_layout};

/// Degrees of the axes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Degrees {
    tensor: u64,
    pipeline: u64,
    context: u64,
    expert: u64,
    /// Ranks that share each expert's matrices, where a flag says.
    expert_tensor: Option<u64>,
}

impl Degrees {
    /// The axes that split the world beside replicas.
    pub(super) fn dense(self) -> [u64; 3] {
        [self.tensor, self.pipeline, self.context]
    }
}

/// Flags that Megatron itself has given up, each with what replaced it.
const REPLACED: [(&str, &str); 2] =
    [("--model-parallel-size", "--tensor-model-parallel-size"), ("--batch-size", "--micro-batch-size")];

pub(super) fn read_degrees(flags: &mut Flags, fork: Fork) -> Degrees {
    for (old, new) in REPLACED {
        if flags.mentions(old) {
            flags.refuse(format!("Megatron no longer takes {old}"), old, format!("use {new}"));
        }
    }
    let context = flags.count("--context-parallel-size");
    let sequence = flags.count("--ds-sequence-parallel-size");
    let degrees = Degrees {
        tensor: flags.count("--tensor-model-parallel-size").unwrap_or(1),
        pipeline: flags.count("--pipeline-model-parallel-size").unwrap_or(1),
        context: context.or(sequence).unwrap_or(1),
        expert: flags.first_count(&["--expert-model-parallel-size", "--moe-expert-parallel-size"]).unwrap_or(1),
        expert_tensor: flags.count("--expert-tensor-parallel-size"),
    };
    if flags.has("--no-pipeline-parallel") && degrees.pipeline > 1 && fork == Fork::DeepSpeed {
        let help = "leave it out, or use --pipeline-model-parallel-size 1";
        flags.refuse("--no-pipeline-parallel with pipeline stages", "--no-pipeline-parallel", help);
    }
    degrees
}

/// What a step processes, but for the batch, which depends on the replicas.
pub(super) fn read_sequence(flags: &mut Flags, model: &ModelSpec, launcher: &Launcher) -> u64 {
    let stated = flags.first_count(&["--seq-length", "--encoder-seq-length"]);
    let own = || model.sequence_length.map(|length| length.tokens());
    launcher.sequence_length.or(stated).or_else(own).unwrap_or(model.max_sequence_length.tokens())
}

/// The layout without its stage split.
pub(super) fn read_layout(
    flags: &mut Flags,
    fork: Fork,
    degrees: Degrees,
    replicas: u64,
    launcher: &Launcher,
    settings: &mut Settings,
) -> Option<Strategy> {
    let micro_batch = flags.count("--micro-batch-size");
    let micro_batch = noted(flags, "--micro-batch-size", micro_batch)?;
    let global_batch = flags.count("--global-batch-size");
    if flags.mentions_any(&["--rampup-batch-size", "--step-batch-size-schedule"]) {
        settings.warnings.push("the batch grows during the run: steps of its full size are predicted".to_owned());
    }
    let tensor = degrees.tensor;
    let sequence_parallel = flags.has("--sequence-parallel");
    if sequence_parallel && tensor == 1 {
        let warning = "--sequence-parallel does nothing with --tensor-model-parallel-size 1: Megatron turns it off";
        settings.warnings.push(warning.to_owned());
    }
    let whole_experts = are_whole("--expert-tensor-parallel-size", degrees.expert_tensor, tensor, settings);
    let zero_stage = read_zero_stage(flags, fork, degrees.pipeline, settings);
    let instances = flags.count("--num-distributed-optimizer-instances").unwrap_or(1);
    if !replicas.is_multiple_of(instances) {
        let what = format!("--num-distributed-optimizer-instances {instances} does not divide {replicas} replicas");
        flags.refuse(what, "--num-distributed-optimizer-instances", "give a divisor of the replicas");
    }
    Some(Strategy {
        tensor_parallel: tensor,
        pipeline_parallel: degrees.pipeline,
        data_parallel: replicas,
        context_parallel: degrees.context,
        expert_parallel: degrees.expert,
        zero_stage,
        shard_group: (replicas / instances).max(1),
        micro_batch,
        global_batch: launcher.global_batch.or(global_batch).unwrap_or(micro_batch.saturating_mul(replicas)),
        recompute: read_recompute(flags, fork, settings),
        sequence_parallel: sequence_parallel && tensor > 1,
        offload_optimizer: reads_offload(flags, settings),
        mesh_order: read_mesh_order(flags, &degrees),
        whole_experts,
        ..plain_layout()
    })
}

/// With contexts or experts the flag is not for use (NVIDIA-NeMo/Megatron-Bridge, training/config.py).
fn read_mesh_order(flags: &mut Flags, degrees: &Degrees) -> MeshOrder {
    let flag = "--use-tp-pp-dp-mapping";
    match flags.has(flag) {
        false => MeshOrder::PipelineOutermost,
        true => {
            if degrees.context * degrees.expert > 1 {
                let what = format!("{flag} is not for contexts or experts");
                flags.refuse(what, flag, "leave it out, or context and expert parallelism");
            }
            MeshOrder::DataOutermost
        }
    }
}

fn reads_offload(flags: &mut Flags, settings: &mut Settings) -> bool {
    if let Some(optimizer) = flags.text("--optimizer").filter(|optimizer| optimizer != "adam") {
        settings.assumed.push(("--optimizer".to_owned(), format!("{optimizer} is predicted as Adam")));
    }
    flags.has_any(&["--optimizer-cpu-offload", "--cpu-optimizer"])
}

fn read_zero_stage(flags: &mut Flags, fork: Fork, stages: u64, settings: &mut Settings) -> ZeroStage {
    let distributed = flags.has("--use-distributed-optimizer");
    let fsdp = flags.has_any(&["--use-megatron-fsdp", "--use-custom-fsdp"]);
    let strategies = ["no_shard", "optim", "optim_grads", "optim_grads_params"];
    let strategy = flags.word("--data-parallel-sharding-strategy", &strategies);
    let torch_fsdp = flags.has("--use-torch-fsdp2");
    let keeps = flags.has("--torch-fsdp2-no-reshard-after-forward");
    // The flag is read as a number that may have a fraction: its default is 1.0.
    let stage = flags.number("--zero-stage");
    let with_deepspeed = flags.has("--deepspeed");
    if fork == Fork::DeepSpeed {
        let stage = stage.or(with_deepspeed.then_some(1.0)).unwrap_or(0.0);
        return deepspeed_stage(flags, stage, stages, settings);
    }
    match (torch_fsdp, fsdp) {
        (true, _) if keeps => ZeroStage::Gradients,
        (true, _) => ZeroStage::Parameters,
        (false, true) => match strategy.unwrap_or("optim_grads_params") {
            "no_shard" => ZeroStage::None,
            "optim" => ZeroStage::OptimizerState,
            "optim_grads" => ZeroStage::Gradients,
            _ => ZeroStage::Parameters,
        },
        (false, false) if distributed => ZeroStage::OptimizerState,
        (false, false) => ZeroStage::None,
    }
}

fn deepspeed_stage(flags: &mut Flags, number: f64, stages: u64, settings: &mut Settings) -> ZeroStage {
    let found = ZeroStage::ALL.into_iter().find(|stage| f64::from(u8::from(*stage)) == number);
    let Some(stage) = found else {
        flags.refuse(format!("--zero-stage is {number}"), "--zero-stage", "legal values: 0, 1, 2, 3");
        return ZeroStage::None;
    };
    if stage >= ZeroStage::Gradients && stages > 1 {
        let what = format!("--zero-stage {number} with {stages} pipeline stages, which DeepSpeed refuses");
        flags.refuse(what, "--zero-stage", "legal values with pipeline stages: 0, 1");
    }
    if flags.mentions("--deepspeed_config") {
        let warning = "the file of --deepspeed_config is not read: its ZeRO stage is taken to be that of --zero-stage";
        settings.warnings.push(warning.to_owned());
    }
    if stage == ZeroStage::None && flags.has("--bf16") {
        let warning = "DeepSpeed's bf16 optimizer divides its state among replicas at stage 0 too: predicted as ZeRO-1";
        settings.warnings.push(warning.to_owned());
        return ZeroStage::OptimizerState;
    }
    stage
}

fn read_recompute(flags: &mut Flags, fork: Fork, settings: &mut Settings) -> Recompute {
    let selective = flags.has("--recompute-activations");
    let granularity = flags.word("--recompute-granularity", &["full", "selective"]);
    let method = flags.word("--recompute-method", &["uniform", "block"]);
    let modules = flags.texts("--recompute-modules");
    let early_method = flags.word("--activations-checkpoint-method", &["uniform", "block"]);
    let whole = flags.has("--checkpoint-activations") || early_method.is_some();
    let number = flags.count("--recompute-num-layers");
    flags.count("--checkpoint-num-layers");
    flags.count("--activations-checkpoint-num-layers");
    if modules.iter().any(|module| module != "core_attn") {
        let reason = "selective recomputation is predicted as that of the attention core".to_owned();
        settings.assumed.push(("--recompute-modules".to_owned(), reason));
    }
    let place = "--recompute-granularity";
    match granularity {
        Some("full") if fork == Fork::Core && method.is_none() => {
            flags.refuse(
                "--recompute-granularity full without a method",
                place,
                "add --recompute-method uniform or block",
            );
        }
        Some("full") if fork == Fork::Core && number.is_none() => {
            settings.warnings.push("--recompute-num-layers is missing: predicted as 1".to_owned());
        }
        Some("selective") if method.is_some() || number.is_some() => {
            let help = "leave out --recompute-method and --recompute-num-layers, or say full";
            flags.refuse("--recompute-granularity selective takes no method and no number of layers", place, help);
        }
        Some(_) | None => {}
    }
    match granularity {
        Some("full") => Recompute::Full,
        Some(_) => Recompute::Selective,
        None if whole => Recompute::Full,
        None if selective => Recompute::Selective,
        None => Recompute::None,
    }
}

pub(super) fn read_switches(flags: &mut Flags, fork: Fork) -> Switches {
    const FLASH: [&str; 4] =
        ["--use-flash-attn", "--use-flash-attn-v1", "--use-flash-attn-v2", "--use-flash-attn-triton"];
    let flash = flags.has_any(&FLASH);
    let backend = flags.word("--attention-backend", &["flash", "fused", "unfused", "local", "auto"]);
    let overlaps = [flags.has("--overlap-grad-reduce"), flags.has("--overlap-param-gather")];
    let [reduce, gather] = overlaps.map(|overlaps| (fork == Fork::Core).then_some(overlaps));
    let exchange = flags.texts("--cp-comm-type");
    let ulysses = flags.mentions("--ds-sequence-parallel-size");
    let fp8 = flags.word("--fp8-format", &["e4m3", "hybrid"]).is_some();
    let fp4 = flags.word("--fp4-format", &["e2m1"]).is_some();
    if fp8 && fp4 {
        flags.refuse("--fp8-format and --fp4-format are both given", "--fp8-format", "keep one of the two");
    }
    Switches {
        flash_attention: match backend {
            Some("unfused" | "local") => Some(false),
            Some("flash" | "fused") => Some(true),
            _ => flash.then_some(true),
        },
        overlap_gradient_reduction: reduce,
        overlap_parameter_gather: gather,
        context_all_to_all: match exchange.as_slice() {
            [] => ulysses.then_some(true),
            kinds => Some(kinds.iter().all(|kind| kind == "a2a")),
        },
        matmul_format: match (fp8, fp4) {
            (true, _) => MatmulFormat::Fp8,
            (false, true) => MatmulFormat::Fp4,
            (false, false) => MatmulFormat::Model,
        },
    }
}
