//! A plan as files of DeepSpeed, torchtitan, NeMo and SLURM.

use std::path::Path;

use ir::model::{DType, ModelSpec};
use ir::plan::{Executable, Plan};
use ir::strategy::{Recompute, Strategy, ZeroStage};
use serde_json::json;

use super::{Export, commented, megatron};
use crate::foreign::torchtitan::name_of;

/// DeepSpeed's JSON file, which has no comments.
pub(super) fn deepspeed(plan: &Plan) -> Export {
    let strategy = &plan.strategy;
    let mut remarks = vec!["DeepSpeed's file does not hold the model".to_owned()];
    let overlap = strategy.zero_stage > ZeroStage::None;
    let mut file = json!({
        "train_batch_size": strategy.global_batch,
        "train_micro_batch_size_per_gpu": strategy.micro_batch,
        "gradient_accumulation_steps": strategy.num_micro_batches(),
        "zero_optimization": {"stage": u8::from(strategy.zero_stage), "overlap_comm": overlap},
    });
    match plan.model.dtype {
        DType::BF16 => file["bf16"] = json!({"enabled": true}),
        DType::FP16 => file["fp16"] = json!({"enabled": true}),
        DType::FP32 => {}
    }
    if strategy.shard_group < strategy.data_parallel {
        file["zero_optimization"]["mics_shard_size"] = json!(strategy.shard_group);
    }
    if strategy.offload_optimizer {
        file["zero_optimization"]["offload_optimizer"] = json!({"device": "cpu"});
    }
    if strategy.tensor_parallel > 1 {
        file["tensor_parallel"] = json!({"autotp_size": strategy.tensor_parallel});
    }
    if strategy.pipeline_parallel > 1 {
        file["pipeline"] = json!({"stages": strategy.pipeline_parallel});
    }
    if strategy.context_parallel > 1 {
        file["sequence_parallel_size"] = json!(strategy.context_parallel);
    }
    if matches!(strategy.recompute, Recompute::Full | Recompute::Partial) {
        file["activation_checkpointing"] = json!({"partition_activations": false});
        remarks.push("the training script must checkpoint each layer".to_owned());
    }
    remarks.extend(some_layers(strategy));
    if strategy.sequence_parallel {
        remarks.push("DeepSpeed has no sequence parallelism beside tensor parallelism".to_owned());
    }
    Export { text: format!("{file:#}\n"), remarks }
}

/// torchtitan's TOML file.
pub(super) fn torchtitan(plan: &Plan) -> Export {
    let strategy = &plan.strategy;
    let mut remarks = Vec::new();
    let model = match name_of(&plan.model.name) {
        Some((name, flavor)) => format!("name = \"{name}\"\nflavor = \"{flavor}\"\n"),
        None => {
            remarks.push(format!("torchtitan has no flavor for {}: fill in [model]", plan.model.name));
            String::new()
        }
    };
    let (replicate, shard) = match strategy.zero_stage {
        ZeroStage::None => (strategy.data_parallel, 1),
        ZeroStage::OptimizerState | ZeroStage::Gradients | ZeroStage::Parameters => {
            (strategy.data_parallel / strategy.shard_group.max(1), strategy.shard_group)
        }
    };
    let reshard = match strategy.zero_stage {
        ZeroStage::Parameters => "always",
        ZeroStage::None | ZeroStage::OptimizerState | ZeroStage::Gradients => "never",
    };
    if strategy.zero_stage == ZeroStage::OptimizerState {
        remarks
            .push("torchtitan shards gradients together with the optimizer state: ZeRO-2 stands for ZeRO-1".to_owned());
    }
    remarks.extend(some_layers(strategy));
    let staged = strategy.pipeline_parallel > 1;
    let local = strategy.global_batch / strategy.data_parallel;
    let local = if staged { local } else { strategy.micro_batch };
    let mut text = format!(
        "[model]\n{model}\n[training]\nlocal_batch_size = {local}\nglobal_batch_size = {}\nseq_len = {}\n\n[compile]\n\
         enable = true\n\n[activation_checkpoint]\nmode = \"{}\"\n",
        strategy.global_batch,
        plan.workload.sequence_length,
        strategy.recompute.name(),
    );
    if strategy.recompute == Recompute::Selective {
        text += "selective_ac_option = \"op\"\n";
    }
    text += &format!(
        "\n[parallelism]\ndata_parallel_replicate_degree = {replicate}\ndata_parallel_shard_degree = {shard}\n\
         fsdp_reshard_after_forward = \"{reshard}\"\ntensor_parallel_degree = {}\npipeline_parallel_degree = {}\n\
         context_parallel_degree = {}\n",
        strategy.tensor_parallel, strategy.pipeline_parallel, strategy.context_parallel,
    );
    if staged {
        let schedule = if strategy.virtual_stages > 1 { "Interleaved1F1B" } else { "1F1B" };
        text += &format!("pipeline_parallel_schedule = \"{schedule}\"\n");
        text += &format!("pipeline_parallel_microbatch_size = {}\n", strategy.micro_batch);
        remarks.push("torchtitan splits the layers into stages by itself".to_owned());
    }
    if strategy.expert_parallel > 1 {
        text += &format!("expert_parallel_degree = {}\n", strategy.expert_parallel);
    }
    if strategy.whole_experts {
        text += &format!("expert_tensor_parallel_degree = {}\n", strategy.expert_tensor_parallel());
    }
    if strategy.tensor_parallel > 1 && !strategy.sequence_parallel {
        remarks.push("torchtitan splits norms and residuals along the sequence too".to_owned());
    }
    Export { text: commented(&remarks, &text), remarks }
}

/// NeMo's YAML file (NVIDIA/NeMo, examples/nlp/language_modeling/conf/megatron_gpt_config.yaml).
pub(super) fn nemo(plan: &Plan) -> Export {
    let strategy = &plan.strategy;
    let model = &plan.model;
    let mut remarks = vec!["only what the plan decides; names are those of NeMo's megatron_gpt_config.yaml".to_owned()];
    let precision = match model.dtype {
        DType::BF16 => "bf16-mixed",
        DType::FP16 => "16-mixed",
        DType::FP32 => "32",
    };
    let checkpointing = match strategy.recompute {
        Recompute::None => "  activations_checkpoint_granularity: null\n".to_owned(),
        Recompute::Selective => "  activations_checkpoint_granularity: selective\n".to_owned(),
        Recompute::Full | Recompute::Partial => {
            "  activations_checkpoint_granularity: full\n  activations_checkpoint_method: uniform\n  \
             activations_checkpoint_num_layers: 1\n"
                .to_owned()
        }
    };
    let interleaved = (strategy.virtual_stages > 1).then_some(strategy.virtual_stages);
    if !evenly(strategy) {
        remarks.push("NeMo needs the uneven stages of the plan as even ones".to_owned());
    }
    remarks.extend(some_layers(strategy));
    if strategy.zero_stage > ZeroStage::OptimizerState {
        remarks.push("the distributed optimizer shards optimizer state only".to_owned());
    }
    let optimizer = if strategy.zero_stage == ZeroStage::None { "fused_adam" } else { "distributed_fused_adam" };
    let text = format!(
        "trainer:\n  num_nodes: {}\n  devices: {}\n  precision: {precision}\nmodel:\n  micro_batch_size: {}\n  \
         global_batch_size: {}\n  tensor_model_parallel_size: {}\n  pipeline_model_parallel_size: {}\n  \
         virtual_pipeline_model_parallel_size: {}\n  context_parallel_size: {}\n  expert_model_parallel_size: {}\n  \
         sequence_parallel: {}\n  encoder_seq_length: {}\n{}{checkpointing}  optim:\n    name: {optimizer}\n",
        plan.mesh.world_size() / plan.inputs.node_gpus,
        plan.inputs.node_gpus,
        strategy.micro_batch,
        strategy.global_batch,
        strategy.tensor_parallel,
        strategy.pipeline_parallel,
        interleaved.map_or("null".to_owned(), |parts| parts.to_string()),
        strategy.context_parallel,
        strategy.expert_parallel,
        strategy.sequence_parallel,
        plan.workload.sequence_length,
        shape_lines(model),
    );
    Export { text: commented(&remarks, &text), remarks }
}

/// A remark where only some layers are recomputed, which these files cannot say.
fn some_layers(strategy: &Strategy) -> Option<String> {
    let some = strategy.recompute == Recompute::Partial;
    some.then(|| "the plan recomputes some layers of each stage, the file all".to_owned())
}

fn evenly(strategy: &Strategy) -> bool {
    strategy.layers_per_stage.windows(2).all(|pair| pair[0] == pair[1])
}

fn shape_lines(model: &ModelSpec) -> String {
    format!(
        "  max_position_embeddings: {}\n  num_layers: {}\n  hidden_size: {}\n  num_attention_heads: {}\n  \
         num_query_groups: {}\n",
        model.max_sequence_length.tokens(),
        model.num_layers,
        model.hidden_size,
        model.attention.num_attention_heads(),
        model.attention.num_key_value_heads(),
    )
}

/// A batch script.
pub(super) fn slurm(plan: &Plan, path: &Path) -> Export {
    let gpus = plan.inputs.node_gpus;
    let nodes = plan.mesh.world_size() / gpus;
    let (tasks, command, remarks) = match &plan.executable {
        Executable::Yes => (gpus, format!("srun execute-plan {} \"$@\"\n", path.display()), Vec::new()),
        Executable::No(reason) => {
            let flags = megatron::flags(plan);
            let mut remarks = vec![format!("execute-plan cannot run the plan ({reason}): Megatron is started")];
            remarks.extend(flags.remarks);
            let launcher = format!(
                "srun torchrun --nnodes {nodes} --nproc-per-node {gpus} --rdzv-backend c10d \\\n  \
                 --rdzv-endpoint \"$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1):29500\" \\\n  "
            );
            (1, launcher + &flags.command, remarks)
        }
    };
    let head = format!(
        "#!/bin/bash\n#SBATCH --job-name={}\n#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node={tasks}\n\
         #SBATCH --gpus-per-node={gpus}\n#SBATCH --exclusive\n\n",
        plan.model.name
    );
    Export { text: head + &commented(&remarks, &command), remarks }
}
