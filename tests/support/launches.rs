//! Published launch configurations with what they mean. Shell variables are replaced by their values; paths are shortened.

/// A published launch configuration.
pub struct Launch {
    /// Where it was published.
    pub source: &'static str,
    /// `megatron`, `deepspeed` or `torchtitan`.
    pub format: &'static str,
    /// The configuration.
    pub text: &'static str,
    /// Options of `plan score`; `%name` is an example model.
    pub options: &'static str,
    /// Values of the JSON report by their places.
    pub expected: &'static [(&'static str, &'static str)],
}

/// All of them.
pub const LAUNCHES: &[Launch] = &[
    Launch {
        source: "NVIDIA/Megatron-LM, examples/gpt3/train_gpt3_175b_distributed.sh",
        format: "megatron",
        text: r#"torchrun --nproc_per_node 8 --nnodes 128 --master_addr localhost --master_port 29500 pretrain_gpt.py \
            --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 \
            --max-position-embeddings 2048 --attention-backend auto \
            --micro-batch-size 1 --global-batch-size 1536 \
            --step-batch-size-schedule "0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536" --train-iters 500000 \
            --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 \
            --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000 \
            --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 \
            --data-path data --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1 \
            --log-interval 100 --save-interval 10000 --eval-interval 1000 --save checkpoints --load checkpoints \
            --eval-iters 10 --tensorboard-dir logs"#,
        options: "--gpus 1024 --node-gpus 8",
        expected: &[
            ("/stack", "\"megatron-core-2025\""),
            ("/strategy/tensor_parallel", "8"),
            ("/strategy/pipeline_parallel", "16"),
            ("/strategy/data_parallel", "8"),
            ("/strategy/zero_stage", "0"),
            ("/strategy/micro_batch", "1"),
            ("/strategy/global_batch", "1536"),
            ("/strategy/recompute", "\"none\""),
            ("/strategy/sequence_parallel", "false"),
            ("/model_shape/dtype", "\"FP16\""),
            ("/model_shape/feed_forward/Gelu/intermediate_size", "49152"),
            ("/model_shape/vocabulary/padded", "51200"),
            ("/model_shape/tied_embedding", "true"),
            ("/defaults", r#"["cluster", "stack", "vocabulary of GPT-2"]"#),
            ("/fits", "true"),
        ],
    },
    Launch {
        source: "NVIDIA/Megatron-LM, examples/llama/train_llama3_8b_h100_fp8.sh",
        format: "megatron",
        text: r#"torchrun --nproc_per_node 8 --nnodes 1 --node_rank 0 pretrain_gpt.py
            --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
            --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192
            --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0
            --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --normalization RMSNorm --init-method-std 0.0134
            --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear
            --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
            --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
            --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
            --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc
            --empty-unused-memory-level 1 --exit-duration-in-mins 235 --use-distributed-optimizer
            --overlap-grad-reduce --overlap-param-gather "--fp8-format hybrid" "--fp8-amax-history-len 1024"
            "--fp8-amax-compute-algo max" "--fp8-param-gather" --tensor-model-parallel-size 1
            --context-parallel-size 1 --sequence-parallel "--mock-data" "--tokenizer-type NullTokenizer"
            "--vocab-size 128256" "--data-cache-path cache" "--tiktoken-pattern v2" "--split '99,1,0'"
            "--no-create-attention-mask-in-dataloader" "--no-mmap-bin-files" "--num-workers 1"
            --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile
            --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60
            --save checkpoints --load checkpoints --tensorboard-dir logs"#,
        options: "--gpus 8 --node-gpus 8 --cluster dgx-h100",
        expected: &[
            ("/strategy/data_parallel", "8"),
            ("/strategy/zero_stage", "1"),
            ("/strategy/sequence_parallel", "false"),
            ("/parameters", "8030261248"),
            ("/defaults", r#"["stack"]"#),
        ],
    },
    Launch {
        source: "NVIDIA/Megatron-LM, examples/mixtral/train_mixtral_8x7b_distributed.sh",
        format: "megatron",
        text: r#"--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768
            --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01
            --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
            --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8
            --no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000
            --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
            --moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
            --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer --data-path data --split 99990,8,2
            --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000
            --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16
            --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
            --use-distributed-optimizer --sequence-parallel --log-interval 1 --save-interval 10000
            --eval-interval 1000 --eval-iters 10 --save checkpoints --load checkpoints --tensorboard-dir logs
            --no-load-optim --no-load-rng"#,
        options: "--gpus 64 --node-gpus 8 --cluster dgx-h100",
        expected: &[
            ("/strategy/data_parallel", "16"),
            ("/strategy/expert_parallel", "8"),
            ("/strategy/pipeline_parallel", "4"),
            ("/parameters", "46702792704"),
        ],
    },
    Launch {
        source: "NVIDIA/Megatron-LM, examples/academic_paper_scripts/sc21/run_table_1.sh, 76B",
        format: "megatron",
        text: "--activations-checkpoint-method uniform --num-layers-per-virtual-pipeline-stage 5
            --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --micro-batch-size 2
            --global-batch-size 1792 --num-layers 60 --hidden-size 10240 --num-attention-heads 80 --DDP-impl local
            --data-path data --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --log-interval 5
            --seq-length 2048 --max-position-embeddings 2048 --train-iters 500 --lr-decay-iters 320 --lr 0.0001
            --min-lr 0.00001 --lr-decay-style cosine --lr-warmup-fraction 0.01 --split 969,30,1 --eval-iters 100
            --eval-interval 1000 --clip-grad 1.0 --fp16 --loss-scale 8192",
        options: "--gpus 1024 --node-gpus 8 --cluster dgx-a100-80gb",
        expected: &[
            ("/stack", "\"megatron-2021\""),
            ("/strategy/data_parallel", "32"),
            ("/strategy/virtual_stages", "3"),
            ("/strategy/recompute", "\"full\""),
            ("/strategy/zero_stage", "0"),
            ("/estimate/micro_batches", "28"),
        ],
    },
    Launch {
        source: "bigscience-workshop/bigscience, train/tr11-176B-ml/tr11-176B-ml.slurm",
        format: "megatron",
        text: "python -u -m torch.distributed.run --nproc_per_node 8 --nnodes 48 --rdzv_backend c10d --max_restarts 0
            --tee 3 pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 12
            --pp-partition-method 'type:transformer|embedding' --num-layers 70 --hidden-size 14336
            --num-attention-heads 112 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2
            --rampup-batch-size 192 16 9_765_625 --global-batch-size 2048 --train-samples 220_000_000
            --tokenizer-type PretrainedFromHF --tokenizer-name-or-path tokenizer --init-method-std 0.0048
            --embed-layernorm --sync-tp-duplicated-parameters --bf16 --seed 42 --position-embedding-type alibi
            --checkpoint-activations --abort-on-unmet-fused-kernel-constraints --kill-switch-path kill
            --pad-vocab-size-to 250880 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --lr 6e-5
            --min-lr 6e-6 --lr-decay-style cosine --lr-decay-samples 200_000_000 --lr-warmup-samples 183_105
            --clip-grad 1.0 --weight-decay 1e-1 --exit-duration-in-mins 5990 --log-interval 1 --save-interval 100
            --eval-interval 1000 --eval-iters 1 --tensorboard-dir logs --tensorboard-queue-size 5
            --log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard
            --save checkpoints --load checkpoints --train-weighted-split-paths-path train
            --valid-weighted-split-paths-path valid --num-workers 2 --valid-num-workers 0 --data-impl mmap
            --distributed-backend nccl --deepspeed --deepspeed_config ds_config.json --zero-stage 0
            --deepspeed-activation-checkpointing",
        options: "--gpus 384 --node-gpus 8 --cluster jean-zay-a100-80gb",
        expected: &[
            ("/stack", "\"megatron-deepspeed-2022\""),
            ("/parameters", "176247271424"),
            ("/strategy/tensor_parallel", "4"),
            ("/strategy/pipeline_parallel", "12"),
            ("/strategy/data_parallel", "8"),
            ("/strategy/micro_batch", "2"),
            ("/strategy/zero_stage", "1"),
            ("/strategy/recompute", "\"full\""),
            ("/strategy/layers_per_stage", "[5,6,6,6,6,6,6,6,6,6,6,5]"),
            ("/model_shape/position", "\"Alibi\""),
            ("/model_shape/embedding_norm", "true"),
            ("/fits", "true"),
        ],
    },
    Launch {
        source: "pytorch/torchtitan, torchtitan/models/llama3/train_configs/llama3_405b.toml",
        format: "torchtitan",
        text: r#"
[job]
dump_folder = "./outputs"
description = "Llama 3 405B training"
[profiling]
enable_profiling = true
save_traces_folder = "profile_trace"
profile_freq = 100
[metrics]
log_freq = 10
enable_tensorboard = true
save_tb_folder = "tb"
[model]
name = "llama3"
flavor = "405B"
tokenizer_path = "./assets/tokenizer/original/tokenizer.model"
converters = "float8"
[optimizer]
name = "AdamW"
lr = 8e-5
eps = 1e-8
[lr_scheduler]
warmup_steps = 600  # lr scheduler warm up, normally 20% of the train steps
[training]
batch_size = 2
seq_len = 8192
max_norm = 1.0  # grad norm clipping
steps = 3000
compile = true
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8  # 8-way TP
enable_async_tensor_parallel = true
pipeline_parallel_degree = 1
context_parallel_degree = 1
[checkpoint]
enable_checkpoint = false
folder = "checkpoint"
interval = 500
model_weights_only = false
export_dtype = "float32"
async_mode = "disabled" # ["disabled", "async", "async_with_pinned_mem"]
[activation_checkpoint]
mode = 'full' # ['none', 'selective', 'full']
[float8]
enable_fsdp_float8_all_gather = true
precompute_float8_dynamic_scale_for_fsdp = true
filter_fqns = "output"
"#,
        options: "--gpus 512 --node-gpus 8 --cluster dgx-h100",
        expected: &[
            ("/model", "\"llama-3.1-405b\""),
            ("/stack", "\"fsdp-compile-2024\""),
            ("/strategy/tensor_parallel", "8"),
            ("/strategy/data_parallel", "64"),
            ("/strategy/zero_stage", "3"),
            ("/strategy/global_batch", "128"),
            ("/strategy/recompute", "\"full\""),
            ("/strategy/sequence_parallel", "true"),
        ],
    },
    Launch {
        source: "pytorch/torchtitan, torchtitan/models/llama3/train_configs/llama3_70b.toml",
        format: "torchtitan",
        text: r#"
[job]
dump_folder = "./outputs"
description = "Llama 3 70B training"
[profiling]
enable_profiling = true
[model]
name = "llama3"
flavor = "70B"
hf_assets_path = "./assets/hf/Llama-3.1-70B"
[optimizer]
name = "AdamW"
lr = 1.5e-4
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 8
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
pipeline_parallel_degree = 1
context_parallel_degree = 1
[checkpoint]
enable_checkpoint = false
last_save_model_only = true
[activation_checkpoint]
mode = "full"
[compile]
enable=false
components = ["model", "loss"]
[float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
filter_fqns = ["output"]
[validation]
enabled = false
dataset = "c4_validation"
freq = 500
steps = -1
"#,
        options: "--gpus 64 --node-gpus 8",
        expected: &[
            ("/model", "\"llama-3.1-70b\""),
            ("/strategy/data_parallel", "8"),
            ("/strategy/micro_batch", "8"),
            ("/strategy/global_batch", "64"),
        ],
    },
    Launch {
        source: "huggingface/transformers, docs, DeepSpeed, ZeRO-3 example",
        format: "deepspeed",
        text: r#"{
            "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
                     "hysteresis": 2, "min_loss_scale": 1},
            "optimizer": {"type": "AdamW",
                          "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}},
            "zero_optimization": {
                "stage": 3, "offload_optimizer": {"device": "none"}, "overlap_comm": true, "contiguous_gradients": true,
                "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true},
            "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
            "train_batch_size": "auto", "train_micro_batch_size_per_gpu": 1, "wall_clock_breakdown": false}"#,
        options: "--gpus 16 --node-gpus 8 --model %llama-2-7b --global-batch 64 --recompute full",
        expected: &[
            ("/stack", "\"deepspeed-zero\""),
            ("/strategy/zero_stage", "3"),
            ("/strategy/data_parallel", "16"),
            ("/strategy/micro_batch", "1"),
            ("/estimate/micro_batches", "4"),
            ("/model_shape/dtype", "\"BF16\""),
        ],
    },
];
