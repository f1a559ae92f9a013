//! A plan as flags of Megatron-LM; names and rules as in `foreign::megatron`.

use std::iter;

use ir::mesh::MeshOrder;
use ir::model::{Attention, Bias, DType, FeedForward, ModelSpec, NormKind, Position};
use ir::plan::Plan;
use ir::rotary::RotaryScaling;
use ir::sharding::split_of;
use ir::strategy::{Recompute, ScheduleKind, Strategy, ZeroStage};

use super::{Export, commented};
use crate::explain::runs;
use crate::foreign::megatron::LLAMA3_SCALING;

/// Flags of one line.
const FLAGS_A_LINE: usize = 4;

/// The script with its flags, and what they do not say.
pub(super) struct Flags {
    pub command: String,
    pub remarks: Vec<String>,
}

/// The script that trains with the flags of a plan.
pub(super) fn flags(plan: &Plan) -> Flags {
    let mut remarks = Vec::new();
    let mut flags = vec!["pretrain_gpt.py".to_owned()];
    flags.extend(model_flags(plan, &mut remarks));
    flags.extend(layout_flags(plan, &mut remarks));
    let lines: Vec<String> = flags.chunks(FLAGS_A_LINE).map(|line| line.join(" ")).collect();
    Flags { command: lines.join(" \\\n  ") + "\n", remarks }
}

/// The same as text.
pub(super) fn export(plan: &Plan) -> Export {
    let Flags { command, remarks } = flags(plan);
    Export { text: commented(&remarks, &command), remarks }
}

fn model_flags(plan: &Plan, remarks: &mut Vec<String>) -> Vec<String> {
    let model = &plan.model;
    let mut flags = vec![
        format!("--num-layers {}", model.num_layers),
        format!("--hidden-size {}", model.hidden_size),
        format!("--num-attention-heads {}", model.attention.num_attention_heads()),
        format!("--seq-length {}", plan.workload.sequence_length),
        format!("--max-position-embeddings {}", model.max_sequence_length.tokens().max(plan.workload.sequence_length)),
    ];
    flags.extend(attention_flags(model));
    flags.extend(feed_forward_flags(model));
    flags.extend(position_flags(model, remarks));
    flags.extend(match model.norm {
        NormKind::LayerNorm => Vec::new(),
        NormKind::RmsNorm => vec!["--normalization RMSNorm".to_owned()],
    });
    flags.extend(match model.bias {
        Bias::All => Vec::new(),
        Bias::None => vec!["--disable-bias-linear".to_owned()],
        Bias::QueryKeyValue => vec!["--disable-bias-linear".to_owned(), "--add-qkv-bias".to_owned()],
    });
    if !model.tied_embedding {
        flags.push("--untie-embeddings-and-output-weights".to_owned());
    }
    let split = split_of(model, &plan.strategy).expect("the verifier has checked that the degrees split the model");
    flags.push(format!("--vocab-size {}", model.vocabulary.size));
    flags.push(format!("--padded-vocab-size {}", split.padded_rows));
    flags.extend(match model.dtype {
        DType::BF16 => vec!["--bf16".to_owned()],
        DType::FP16 => vec!["--fp16".to_owned()],
        DType::FP32 => Vec::new(),
    });
    flags
}

fn attention_flags(model: &ModelSpec) -> Vec<String> {
    match model.attention {
        Attention::MultiHead { num_attention_heads, num_key_value_heads, head_dim } => {
            let groups = num_key_value_heads.filter(|heads| *heads != num_attention_heads);
            let groups = groups.map(|heads| format!("--group-query-attention --num-query-groups {heads}"));
            groups.into_iter().chain(head_dim.map(|width| format!("--kv-channels {width}"))).collect()
        }
        Attention::MultiLatent { query_rank, key_value_rank, nope_head_dim, rope_head_dim, value_head_dim, .. } => {
            vec![
                "--multi-latent-attention".to_owned(),
                format!("--q-lora-rank {query_rank} --kv-lora-rank {key_value_rank}"),
                format!(
                    "--qk-head-dim {nope_head_dim} --qk-pos-emb-head-dim {rope_head_dim} --v-head-dim {value_head_dim}"
                ),
            ]
        }
    }
}

fn feed_forward_flags(model: &ModelSpec) -> Vec<String> {
    match model.feed_forward {
        FeedForward::Gelu { intermediate_size } => vec![format!("--ffn-hidden-size {intermediate_size}")],
        FeedForward::SwiGlu { intermediate_size } => {
            vec!["--swiglu".to_owned(), format!("--ffn-hidden-size {intermediate_size}")]
        }
        FeedForward::MixtureOfExperts {
            num_experts,
            experts_per_token,
            intermediate_size,
            num_shared_experts,
            first_dense_layers,
            dense_intermediate_size,
        } => {
            let mut flags = vec![
                "--swiglu".to_owned(),
                format!("--ffn-hidden-size {}", dense_intermediate_size.unwrap_or(intermediate_size)),
                format!("--num-experts {num_experts} --moe-router-topk {experts_per_token}"),
                format!("--moe-ffn-hidden-size {intermediate_size}"),
                "--moe-grouped-gemm --moe-token-dispatcher-type alltoall".to_owned(),
            ];
            if num_shared_experts > 0 {
                flags.push(format!("--moe-shared-expert-intermediate-size {}", num_shared_experts * intermediate_size));
            }
            if first_dense_layers > 0 {
                let routed = model.num_layers - first_dense_layers;
                flags.push(format!("--moe-layer-freq '([0]*{first_dense_layers}+[1]*{routed})'"));
            }
            flags
        }
    }
}

/// Megatron knows Llama 3.1's scaling with its constants but for the factor.
fn scaling_flags(scaling: RotaryScaling, remarks: &mut Vec<String>) -> String {
    match scaling {
        RotaryScaling::Linear { factor } => format!("--rotary-seq-len-interpolation-factor {factor}"),
        RotaryScaling::Llama3 { factor, low_frequency_factor: low, high_frequency_factor: high, original_length } => {
            let (own_low, own_high, own_length) = LLAMA3_SCALING;
            if (low, high, original_length) != LLAMA3_SCALING {
                remarks.push(format!(
                    "not in the flags: rotary scaling with factors {low} and {high} for {original_length} tokens; \
                     --use-rope-scaling means {own_low} and {own_high} for {own_length}"
                ));
            }
            format!("--use-rope-scaling --rope-scaling-factor {factor}")
        }
    }
}

fn position_flags(model: &ModelSpec, remarks: &mut Vec<String>) -> Vec<String> {
    let mut flags = match model.position {
        Position::Learned => Vec::new(),
        Position::Rotary => {
            let base = format!("--position-embedding-type rope --rotary-base {}", model.rotary_base as u64);
            iter::once(base).chain(model.rotary_scaling.map(|scaling| scaling_flags(scaling, remarks))).collect()
        }
        Position::Alibi => {
            remarks.push("only the Megatron-DeepSpeed forks have ALiBi positions".to_owned());
            vec!["--position-embedding-type alibi".to_owned()]
        }
    };
    if model.embedding_norm {
        remarks.push("only the Megatron-DeepSpeed forks have a norm after the embedding".to_owned());
        flags.push("--embed-layernorm".to_owned());
    }
    for deviation in &model.deviations {
        remarks.push(format!("not in the flags: {}", deviation.reason().replace(" are not compiled yet", "")));
    }
    flags
}

fn layout_flags(plan: &Plan, remarks: &mut Vec<String>) -> Vec<String> {
    let strategy = &plan.strategy;
    let mut flags = vec![
        format!("--tensor-model-parallel-size {}", strategy.tensor_parallel),
        format!("--pipeline-model-parallel-size {}", strategy.pipeline_parallel),
    ];
    if strategy.context_parallel > 1 {
        flags.push(format!("--context-parallel-size {}", strategy.context_parallel));
    }
    if strategy.expert_parallel > 1 {
        flags.push(format!("--expert-model-parallel-size {}", strategy.expert_parallel));
    }
    if strategy.whole_experts {
        flags.push(format!("--expert-tensor-parallel-size {}", strategy.expert_tensor_parallel()));
    }
    flags.extend(stage_flags(strategy));
    flags.push(format!("--micro-batch-size {}", strategy.micro_batch));
    flags.push(format!("--global-batch-size {}", strategy.global_batch));
    if strategy.sequence_parallel {
        flags.push("--sequence-parallel".to_owned());
    }
    flags.extend(recompute_flags(strategy, remarks));
    flags.extend(sharding_flags(strategy));
    if strategy.offload_optimizer {
        flags.push("--optimizer-cpu-offload".to_owned());
    }
    match strategy.mesh_order {
        MeshOrder::PipelineOutermost => {}
        MeshOrder::DataOutermost => flags.push("--use-tp-pp-dp-mapping".to_owned()),
    }
    match strategy.schedule {
        ScheduleKind::OneForwardOneBackward | ScheduleKind::Interleaved => {}
        ScheduleKind::GPipe | ScheduleKind::ZeroBubbleH1 | ScheduleKind::ZeroBubbleV => {
            remarks.push(format!("Megatron runs 1F1B, not {}", strategy.schedule.name()));
        }
    }
    flags
}

fn recompute_flags(strategy: &Strategy, remarks: &mut Vec<String>) -> Vec<String> {
    let full = |method: &str, layers: u64| {
        vec![format!("--recompute-granularity full --recompute-method {method} --recompute-num-layers {layers}")]
    };
    match strategy.recompute {
        Recompute::None => Vec::new(),
        Recompute::Selective => vec!["--recompute-granularity selective".to_owned()],
        Recompute::Full => full("uniform", 1),
        Recompute::Partial => {
            let most = strategy.recomputed_layers.iter().max().copied().unwrap_or(0);
            if !is_even(&strategy.recomputed_layers) {
                let counts = runs(&strategy.recomputed_layers);
                remarks.push(format!("the plan recomputes {counts} layers of the stages, the flags {most} of each"));
            }
            full("block", most.max(1))
        }
    }
}

fn is_even(counts: &[u64]) -> bool {
    counts.windows(2).all(|pair| pair[0] == pair[1])
}

/// Flags for parts of the model on each stage, and for stages that are not even.
fn stage_flags(strategy: &Strategy) -> Vec<String> {
    let layers = &strategy.layers_per_stage;
    if is_even(layers) {
        let parts = (strategy.virtual_stages > 1).then_some(strategy.virtual_stages);
        return parts.map(|parts| format!("--num-virtual-stages-per-pipeline-rank {parts}")).into_iter().collect();
    }
    if strategy.virtual_stages == 1 && is_even(&layers[1..layers.len() - 1]) {
        return vec![
            format!("--decoder-first-pipeline-num-layers {}", layers[0]),
            format!("--decoder-last-pipeline-num-layers {}", layers[layers.len() - 1]),
        ];
    }
    // The plan names a stage's parts together, the flag the parts in the model's order.
    let parts = strategy.virtual_stages as usize;
    let in_order = (0..parts).flat_map(|part| layers.iter().skip(part).step_by(parts));
    let stages: Vec<String> = in_order.map(|count| format!("t*{count}")).collect();
    vec![format!("--pipeline-model-parallel-layout 'E{}L'", stages.join("|"))]
}

fn sharding_flags(strategy: &Strategy) -> Vec<String> {
    let strategy_of = |name: &str| {
        format!(
            "--use-megatron-fsdp --data-parallel-sharding-strategy {name} --overlap-grad-reduce --overlap-param-gather"
        )
    };
    match strategy.zero_stage {
        ZeroStage::None => vec!["--overlap-grad-reduce".to_owned()],
        ZeroStage::OptimizerState => {
            let mut flags = vec!["--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather".to_owned()];
            let instances = strategy.data_parallel / strategy.shard_group.max(1);
            if instances > 1 {
                flags.push(format!("--num-distributed-optimizer-instances {instances}"));
            }
            flags
        }
        ZeroStage::Gradients => vec![strategy_of("optim_grads")],
        ZeroStage::Parameters => vec![strategy_of("optim_grads_params")],
    }
}
