//! `plan score` through the real program: published launch configurations are read as the layouts they are, other
//! settings are sorted and never lost, and what cannot work is refused with legal values.

#[path = "support/launches.rs"]
mod launches;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

use launches::{LAUNCHES, Launch};

fn run(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_plan")).current_dir(folder).args(arguments).output().expect("the program starts")
}

fn example(name: &str) -> String {
    format!("{}/../examples/{name}.ron", env!("CARGO_MANIFEST_DIR"))
}

/// Arguments that score a text in a format, written to the folder where the format is a file.
fn arguments(folder: &Path, format: &str, text: &str, options: &str) -> Vec<String> {
    let configuration = match format {
        "megatron" => text.to_owned(),
        _ => {
            fs::write(folder.join("configuration"), text).expect("the scratch folder is writable");
            "configuration".to_owned()
        }
    };
    let mut arguments = vec!["score".to_owned(), format!("--from-{format}"), configuration];
    arguments.extend(options.split_whitespace().map(|word| match word.strip_prefix('%') {
        Some(name) => example(name),
        None => word.to_owned(),
    }));
    arguments
}

fn scored(name: &str, format: &str, text: &str, options: &str) -> Value {
    let folder = TempDir::new().expect("a scratch folder");
    let mut arguments = arguments(folder.path(), format, text, options);
    let plain: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let output = run(folder.path(), &plain);
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    assert!(shown.contains("configuration: ") && shown.contains("best plan"), "{name}: {shown}");
    arguments.push("--json".to_owned());
    let plain: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let output = run(folder.path(), &plain);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Names in one of the lists of settings.
fn names(value: &Value, list: &str) -> Vec<String> {
    let items = value["settings"][list].as_array().expect("a list").iter();
    let name = |item: &Value| item.as_str().or(item["name"].as_str()).expect("a name").to_owned();
    items.map(name).collect()
}

#[test]
fn published_launches_are_read_as_what_they_are() {
    for launch in LAUNCHES {
        check_launch(launch);
    }
}

fn check_launch(launch: &Launch) {
    let name = launch.source;
    let value = scored(name, launch.format, launch.text, launch.options);
    for (path, expected) in launch.expected {
        let found = value.pointer(path).unwrap_or_else(|| panic!("{name}: there is no {path}"));
        let expected: Value = serde_json::from_str(expected).expect("expected values are JSON");
        assert_eq!(*found, expected, "{name}: {path}");
    }
    let unknown = names(&value, "unknown");
    assert!(unknown.is_empty(), "{name}: unknown {unknown:?}");
    let terms = value["gain"]["terms"].as_object().expect("terms by name");
    let sum: f64 = terms.values().map(|term| term["difference"].as_f64().expect("a number")).sum();
    let total = value["gain"]["total"]["difference"].as_f64().expect("a number");
    assert!((sum - total).abs() < 1e-6 * value["estimate"]["step_seconds"].as_f64().expect("a number"), "{name}");
}

/// A small sound Megatron configuration for 32 GPUs, the ground on which rows make one change.
const SMALL: &str = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 \
                     --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 128 --bf16 \
                     --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --vocab-size 50257";
const ON_32: &str = "--gpus 32 --node-gpus 8";

/// A name, what is changed or added, and values of the JSON report by their places.
type Reading = (&'static str, &'static str, &'static [(&'static str, &'static str)]);

/// Flags with one or more values changed, or added where they are absent; an empty value removes the flag.
fn changed(changes: &str) -> String {
    let mut text = SMALL.to_owned();
    for change in changes.split(" & ").filter(|change| !change.is_empty()) {
        let (name, value) = change.split_once(' ').unwrap_or((change, "-"));
        if let Some(start) = text.find(&format!("{name} ")) {
            let end = text[start + 2..].find("--").map_or(text.len(), |end| start + 2 + end);
            text.replace_range(start..end, "");
        }
        match value {
            "" => {}
            "-" => text += &format!(" {name}"),
            value => text += &format!(" {name} {value}"),
        }
    }
    text
}

#[test]
fn megatron_flags_mean_what_megatron_makes_of_them() {
    let rows: &[Reading] = &[
        ("nothing changed", "", &[("/strategy/data_parallel", "2"), ("/strategy/layers_per_stage", "[8,8,8,8]")]),
        ("the batch by default", "--global-batch-size ", &[("/strategy/global_batch", "2")]),
        ("flag=value", "--micro-batch-size=4", &[("/strategy/micro_batch", "4")]),
        ("a quoted value", "--micro-batch-size '2'", &[("/strategy/micro_batch", "2")]),
        ("sequence parallelism", "--sequence-parallel", &[("/strategy/sequence_parallel", "true")]),
        (
            "partly recomputed",
            "--recompute-granularity full & --recompute-method block & --recompute-num-layers 3",
            &[("/strategy/recompute", "\"partial\""), ("/strategy/recomputed_layers_per_stage/0", "3")],
        ),
        ("optimizer in host memory", "--optimizer-cpu-offload", &[("/strategy/offload_optimizer", "true")]),
        ("stages as neighbours", "--use-tp-pp-dp-mapping", &[("/strategy/mesh_order/0", "\"data\"")]),
        ("a distributed optimizer", "--use-distributed-optimizer", &[("/strategy/zero_stage", "1")]),
        (
            "instances of it",
            "--use-distributed-optimizer & --num-distributed-optimizer-instances 2",
            &[("/strategy/shard_group", "1")],
        ),
        ("FSDP", "--use-megatron-fsdp & --pipeline-model-parallel-size 1", &[("/strategy/zero_stage", "3")]),
        (
            "FSDP without parameters",
            "--use-megatron-fsdp & --data-parallel-sharding-strategy optim_grads",
            &[("/strategy/zero_stage", "2")],
        ),
        ("torch's FSDP", "--use-torch-fsdp2", &[("/strategy/zero_stage", "3")]),
        ("selective", "--recompute-activations", &[("/strategy/recompute", "\"selective\"")]),
        ("selective by granularity", "--recompute-granularity selective", &[("/strategy/recompute", "\"selective\"")]),
        (
            "full",
            "--recompute-granularity full & --recompute-method uniform & --recompute-num-layers 1",
            &[("/strategy/recompute", "\"full\""), ("/strategy/recomputed_layers_per_stage", "[8,8,8,8]")],
        ),
        (
            "virtual stages by layers",
            "--num-layers-per-virtual-pipeline-stage 2",
            &[("/strategy/virtual_stages", "4"), ("/strategy/layers_per_stage", "[2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2]")],
        ),
        ("virtual stages by number", "--num-virtual-stages-per-pipeline-rank 2", &[("/strategy/virtual_stages", "2")]),
        (
            "uneven ends",
            "--decoder-first-pipeline-num-layers 7 & --decoder-last-pipeline-num-layers 9",
            &[("/strategy/layers_per_stage", "[7,8,8,9]")],
        ),
        (
            "embedding and head as layers",
            "--num-layers 30 & --account-for-embedding-in-pipeline-split & --account-for-loss-in-pipeline-split",
            &[("/strategy/layers_per_stage", "[7,8,8,7]")],
        ),
        (
            "a layout of stages",
            "--pipeline-model-parallel-layout E(t)*7|(t*8|)*2t*9,L",
            &[("/strategy/layers_per_stage", "[7,8,8,9]")],
        ),
        (
            "a layout of virtual stages",
            "--pipeline-model-parallel-layout Ett|(tttt|)*6tttttt,L",
            &[("/strategy/layers_per_stage", "[2,4,4,4,4,4,4,6]"), ("/strategy/virtual_stages", "2")],
        ),
        (
            "context",
            "--context-parallel-size 2",
            &[("/strategy/context_parallel", "2"), ("/strategy/data_parallel", "1")],
        ),
        (
            "grouped queries",
            "--group-query-attention & --num-query-groups 8",
            &[("/model_shape/attention/MultiHead/num_key_value_heads", "8")],
        ),
        ("a width of heads", "--kv-channels 64", &[("/model_shape/attention/MultiHead/head_dim", "64")]),
        ("gated", "--swiglu", &[("/model_shape/feed_forward/SwiGlu/intermediate_size", "10880")]),
        (
            "gated with a width",
            "--swiglu & --ffn-hidden-size 11008",
            &[("/model_shape/feed_forward/SwiGlu/intermediate_size", "11008")],
        ),
        ("no biases", "--disable-bias-linear", &[("/model_shape/bias", "\"Nothing\"")]),
        ("some biases", "--disable-bias-linear & --add-qkv-bias", &[("/model_shape/bias", "\"QueryKeyValue\"")]),
        (
            "rotary",
            "--position-embedding-type rope & --rotary-base 500000",
            &[("/model_shape/rotary_base", "500000.0")],
        ),
        (
            "scaled rotary",
            "--position-embedding-type rope & --use-rope-scaling & --rope-scaling-factor 32",
            &[(
                "/model_shape/rotary_scaling/Llama3",
                r#"{"factor": 32.0, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_length": 8192}"#,
            )],
        ),
        (
            "interpolated rotary",
            "--position-embedding-type rope & --rotary-seq-len-interpolation-factor 4",
            &[("/model_shape/rotary_scaling/Linear/factor", "4.0")],
        ),
        ("untied", "--untie-embeddings-and-output-weights", &[("/model_shape/tied_embedding", "false")]),
        ("padding", "", &[("/model_shape/vocabulary/padded", "50688")]),
        ("other padding", "--make-vocab-size-divisible-by 1", &[("/model_shape/vocabulary/padded", "50260")]),
        (
            "experts after dense layers",
            "--swiglu & --num-experts 8 & --moe-ffn-hidden-size 1024 & --moe-layer-freq '([0]*2+[1]*30)' & \
             --moe-router-topk 3 & --expert-model-parallel-size 2 & --moe-shared-expert-intermediate-size 2048",
            &[
                ("/strategy/expert_parallel", "2"),
                (
                    "/model_shape/feed_forward/MixtureOfExperts",
                    r#"{"num_experts": 8, "experts_per_token": 3, "intermediate_size": 1024, "num_shared_experts": 2,
                        "first_dense_layers": 2, "dense_intermediate_size": 10880}"#,
                ),
            ],
        ),
        (
            "whole experts",
            "--swiglu & --num-experts 8 & --expert-model-parallel-size 8 & --expert-tensor-parallel-size 1 & \
             --sequence-parallel",
            &[("/strategy/expert_parallel", "8"), ("/strategy/expert_tensor_parallel", "1")],
        ),
        (
            "latent attention",
            "--multi-latent-attention & --q-lora-rank 1536 & --kv-lora-rank 512",
            &[("/model_shape/attention/MultiLatent/value_head_dim", "128")],
        ),
        ("DeepSpeed", "--deepspeed & --zero-stage 1", &[("/stack", "\"megatron-deepspeed-2022\"")]),
        ("DeepSpeed's bf16 state", "--deepspeed & --zero-stage 0", &[("/strategy/zero_stage", "1")]),
        (
            "DeepSpeed's uneven stages",
            "--deepspeed & --zero-stage 1 & --num-layers 30",
            &[("/strategy/layers_per_stage", "[8,8,7,7]")],
        ),
        (
            "early Megatron",
            "--checkpoint-activations",
            &[("/stack", "\"megatron-2021\""), ("/strategy/recompute", "\"full\"")],
        ),
    ];
    for (name, changes, expected) in rows {
        let value = scored(name, "megatron", &changed(changes), ON_32);
        for (path, expected) in *expected {
            let found = value.pointer(path).unwrap_or_else(|| panic!("{name}: there is no {path} in {value:#}"));
            assert_eq!(*found, serde_json::from_str::<Value>(expected).expect("JSON"), "{name}: {path}");
        }
        assert_eq!(names(&value, "unknown"), [""; 0], "{name}");
    }
}

#[test]
fn settings_are_sorted_and_none_is_lost() {
    let rows = [
        ("learning rate", "--lr 1e-4", "no_effect", "--lr"),
        ("several values", "--data-path 1.0 a 2.0 b", "no_effect", "--data-path"),
        ("overlapped products", "--tp-comm-overlap & --sequence-parallel", "not_followed", "--tp-comm-overlap"),
        ("other optimizer", "--optimizer muon", "not_followed", "--optimizer"),
        (
            "recomputed in units",
            "--recompute-granularity full & --recompute-method uniform & --recompute-num-layers 3",
            "not_followed",
            "--recompute-num-layers",
        ),
        ("misspelt", "--tensor-model-paralel-size 8", "unknown", "--tensor-model-paralel-size"),
        ("unheard of", "--frobnicate", "unknown", "--frobnicate"),
    ];
    for (name, changes, list, flag) in rows {
        let value = scored(name, "megatron", &changed(changes), ON_32);
        for other in ["no_effect", "not_followed", "unknown"] {
            let listed = names(&value, other).iter().any(|found| found == flag);
            assert_eq!(listed, other == list, "{name}: {flag} in {other}");
        }
    }
    let value = scored("near", "megatron", &changed("--tensor-model-paralel-size 8"), ON_32);
    assert_eq!(value.pointer("/settings/unknown/0/near/0"), Some(&Value::from("--tensor-model-parallel-size")));
    let warned = scored("alone", "megatron", &changed("--tensor-model-parallel-size 1 & --sequence-parallel"), ON_32);
    assert!(warned["settings"]["warnings"].to_string().contains("--sequence-parallel does nothing"), "{warned:#}");
    assert_eq!(warned["strategy"]["sequence_parallel"], false);
}

/// Runs arguments twice, the second time with `--json`: both end with 2 and hold every piece.
fn check_refused(name: &str, format: &str, text: &str, options: &str, pieces: &[&str]) {
    let folder = TempDir::new().expect("a scratch folder");
    let mut arguments = arguments(folder.path(), format, text, options);
    let plain: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let output = run(folder.path(), &plain);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{name}: {stderr}\n{}", String::from_utf8_lossy(&output.stdout));
    for piece in ["error: ", "\n  --> ", "\n  help: "].iter().chain(pieces) {
        assert!(stderr.contains(piece), "{name}: `{piece}` is not in\n{stderr}");
    }
    arguments.push("--json".to_owned());
    let plain: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let output = run(folder.path(), &plain);
    assert_eq!(output.status.code(), Some(2), "{name} --json");
    let value: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(value["error"]["what"].is_string(), "{name}: {value}");
}

#[test]
fn megatron_flags_that_cannot_work_are_refused_with_legal_values() {
    let rows: &[(&str, &str, &[&str])] = &[
        (
            "layers over stages",
            "--num-layers 30",
            &[
                "30 layers over 4 stages are not even",
                "legal values of --pipeline-model-parallel-size: 1, 2, 3, 5, 6",
                "28, 32",
                "--account-for-embedding-in-pipeline-split",
            ],
        ),
        ("more stages than layers", "--num-layers 2", &["4 stages for 2 layers", "at most 2"]),
        (
            "heads over tensor",
            "--num-attention-heads 31 & --kv-channels 128",
            &["--tensor-model-parallel-size 4 does not divide the 31 attention heads", "legal values: 1"],
        ),
        ("heads of the width", "--num-attention-heads 30", &["30 does not divide hidden_size 4096"]),
        (
            "key-value heads",
            "--num-attention-heads 30 & --kv-channels 64 & --tensor-model-parallel-size 2 & --group-query-attention & \
             --num-query-groups 3 & --ffn-hidden-size 12288",
            &["3 key-value heads", "legal values: 1, 3"],
        ),
        (
            "the world",
            "--tensor-model-parallel-size 8 & --pipeline-model-parallel-size 16 & --num-layers 48",
            &["do not divide 32 GPUs", "--pipeline-model-parallel-size 1, 2, 4", "launch it on 128 GPUs"],
        ),
        (
            "the batch",
            "--global-batch-size 127",
            &["--global-batch-size 127 is not whole micro-batches of 1 on 2 replicas", "126, 128"],
        ),
        ("the micro-batch", "--micro-batch-size 3", &["micro-batches of 3", "1, 2, 4, 8, 16, 32, 64", "126, 132"]),
        ("context", "--context-parallel-size 2 & --seq-length 2046", &["2046", "legal values: 1, 3, 11"]),
        (
            "sequence parallelism",
            "--sequence-parallel & --seq-length 2046",
            &["4 does not divide 2046 tokens", "legal values: 1, 2, 3"],
        ),
        (
            "virtual stages",
            "--num-layers-per-virtual-pipeline-stage 3",
            &["3 layers a virtual stage do not divide the 8 of a stage", "legal values: 1, 2, 4, 8"],
        ),
        ("virtual stages by number", "--num-virtual-stages-per-pipeline-rank 3", &["legal values: 1, 2, 4, 8"]),
        (
            "virtual stages without stages",
            "--pipeline-model-parallel-size 1 & --num-virtual-stages-per-pipeline-rank 2",
            &["virtual stages with 1 pipeline stages", "2 or more"],
        ),
        (
            "micro-batches of virtual stages",
            "--num-virtual-stages-per-pipeline-rank 2 & --global-batch-size 132",
            &["66 micro-batches", "--global-batch-size 128, 136"],
        ),
        (
            "two kinds of virtual stages",
            "--num-virtual-stages-per-pipeline-rank 2 & --num-layers-per-virtual-pipeline-stage 4",
            &["both given"],
        ),
        ("uneven ends", "--decoder-first-pipeline-num-layers 6", &["leave 26 for 3 stages"]),
        ("a layout of stages", "--pipeline-model-parallel-layout Et|tL", &["2 stages with 2 layers", "multiple of 4"]),
        ("no layout of stages", "--pipeline-model-parallel-layout (x", &["no layout of stages"]),
        ("experts without experts", "--expert-model-parallel-size 2", &["for a model without experts"]),
        (
            "experts",
            "--swiglu & --num-experts 6 & --expert-model-parallel-size 4",
            &["must divide the 6 experts and the 2 ranks", "legal values: 1, 2"],
        ),
        (
            "whole experts",
            "--swiglu & --num-experts 6 & --expert-tensor-parallel-size 1",
            &["whole experts", "sequence parallelism"],
        ),
        ("experts without gates", "--num-experts 8", &["experts without a gate", "--swiglu"]),
        (
            "a pattern of experts",
            "--swiglu & --num-experts 8 & --moe-layer-freq 2",
            &["--moe-layer-freq 2", "`([0]*1+[1]*31)`"],
        ),
        ("full without a method", "--recompute-granularity full", &["--recompute-method uniform or block"]),
        (
            "selective with a method",
            "--recompute-granularity selective & --recompute-method block",
            &["takes no method"],
        ),
        ("two formats", "--fp16", &["--bf16 and --fp16"]),
        ("fp8 on A100", "--fp8-format hybrid", &["no fp8 products"]),
        ("ZeRO-2 with stages", "--deepspeed & --zero-stage 2", &["DeepSpeed refuses", "0, 1"]),
        ("no stage of ZeRO", "--deepspeed & --zero-stage 5", &["legal values: 0, 1, 2, 3"]),
        ("positions", "--seq-length 4096", &["exceeds --max-position-embeddings 2048", "at least 4096"]),
        ("no number", "--num-layers many", &["--num-layers is `many`"]),
        ("a variable", "--num-layers $NLAYERS", &["variables must be replaced"]),
        ("zero", "--tensor-model-parallel-size 0", &["--tensor-model-parallel-size is `0`"]),
        ("no value", "--num-layers", &["--num-layers has no value"]),
        ("a value too many", "--num-layers 32 33", &["two values"]),
        ("a switch with a value", "--bf16 true", &["--bf16 takes no value"]),
        ("an unknown word", "--position-embedding-type sinusoidal", &["sinusoidal is not known", "rope"]),
        ("given up", "--model-parallel-size 4", &["use --tensor-model-parallel-size"]),
        ("hybrid", "--hybrid-layer-pattern M*M*", &["cannot be represented"]),
        ("an open quotation", "--tokenizer-type 'GPT", &["has no end"]),
    ];
    for (name, changes, pieces) in rows {
        check_refused(name, "megatron", &changed(changes), ON_32, pieces);
    }
    let missing: &[&str] =
        &["--hidden-size is missing", "--num-attention-heads is missing", "--micro-batch-size is missing"];
    check_refused("missing flags", "megatron", "--num-layers 2", ON_32, missing);
    check_refused("no flags", "megatron", "32 layers", ON_32, &["`32` belongs to no flag"]);
    check_refused("empty", "megatron", "", ON_32, &["--num-layers is missing"]);
    let other = "--gpus 32 --node-gpus 8 --stack fsdp-2023";
    check_refused(
        "a stack without it",
        "megatron",
        SMALL,
        other,
        &["does not offer tensor parallelism", "--stack fsdp-2023"],
    );
    check_refused(
        "another model",
        "megatron",
        SMALL,
        "--gpus 32 --node-gpus 8 --model %tiny",
        &["the model file says"],
    );
    check_refused("no GPUs", "megatron", SMALL, "--gpus 0 --node-gpus 8", &["gpus is 0"]);
    check_refused("no file", "megatron", "@missing", ON_32, &["cannot read the file", "missing"]);
}

/// A small sound DeepSpeed file.
const DEEPSPEED: &str = r#"{"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2},
  "bf16": {"enabled": true}}"#;
const LLAMA_ON_32: &str = "--gpus 32 --node-gpus 8 --model %llama-2-7b";

#[test]
fn deepspeed_files_determine_batches_and_stages() {
    let rows: &[(&str, &str, &str, &str)] = &[
        ("two of three", DEEPSPEED, "/estimate/micro_batches", "4"),
        (
            "batch and steps",
            r#"{"train_batch_size": 256, "gradient_accumulation_steps": 4}"#,
            "/strategy/micro_batch",
            "2",
        ),
        (
            "micro-batch and steps",
            r#"{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}"#,
            "/strategy/global_batch",
            "256",
        ),
        ("batch alone", r#"{"train_batch_size": 64}"#, "/strategy/micro_batch", "2"),
        ("micro-batch alone", r#"{"train_micro_batch_size_per_gpu": 2}"#, "/strategy/global_batch", "64"),
        ("stage", r#"{"train_batch_size": 64, "zero_optimization": {"stage": 3}}"#, "/strategy/zero_stage", "3"),
        ("no stage", r#"{"train_batch_size": 64, "fp16": {"enabled": true}}"#, "/strategy/zero_stage", "0"),
        ("bf16 state", r#"{"train_batch_size": 64, "bf16": {"enabled": true}}"#, "/strategy/zero_stage", "1"),
        ("fp32", r#"{"train_batch_size": 64}"#, "/model_shape/dtype", "\"FP32\""),
        ("fp16", r#"{"train_batch_size": 64, "fp16": {"enabled": true}}"#, "/model_shape/dtype", "\"FP16\""),
        (
            "the trainer's format",
            r#"{"train_batch_size": 64, "bf16": {"enabled": "auto"}}"#,
            "/model_shape/dtype",
            "\"BF16\"",
        ),
        (
            "groups",
            r#"{"train_batch_size": 64, "zero_optimization": {"stage": 3, "mics_shard_size": 8}}"#,
            "/strategy/shard_group",
            "8",
        ),
        (
            "tensor",
            r#"{"train_batch_size": 64, "tensor_parallel": {"autotp_size": 4}}"#,
            "/strategy/tensor_parallel",
            "4",
        ),
        (
            "checkpointing",
            r#"{"train_batch_size": 64, "activation_checkpointing": {"cpu_checkpointing": false}}"#,
            "/strategy/recompute",
            "\"full\"",
        ),
    ];
    for (name, text, path, expected) in rows {
        let value = scored(name, "deepspeed", text, LLAMA_ON_32);
        assert_eq!(value.pointer(path), Some(&serde_json::from_str(expected).expect("JSON")), "{name}: {path}");
        assert_eq!(names(&value, "unknown"), [""; 0], "{name}");
    }
    let left_open = r#"{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_clipping": "auto"}"#;
    let options = format!("{LLAMA_ON_32} --global-batch 512 --recompute full");
    let value = scored("left open", "deepspeed", left_open, &options);
    assert_eq!(value["strategy"]["global_batch"], 512);
    assert_eq!(value["strategy"]["recompute"], "full");
    let odd = r#"{"train_batch_size": 64, "zero_optimization": {"stage": 2, "overlap_com": true}, "frobnicate": 1}"#;
    let value = scored("odd", "deepspeed", odd, LLAMA_ON_32);
    assert_eq!(names(&value, "unknown"), ["zero_optimization.overlap_com", "frobnicate"]);
    assert_eq!(value["settings"]["unknown"][0]["near"][0], "zero_optimization.overlap_comm");
}

#[test]
fn deepspeed_files_that_cannot_work_are_refused() {
    let rows: &[(&str, &str, &[&str])] = &[
        (
            "three that disagree",
            r#"{"train_batch_size": 250, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}"#,
            &["train_batch_size 250 is not", "= 256", "legal values of train_batch_size: 256"],
        ),
        ("too small a batch", r#"{"train_batch_size": 16}"#, &["leaves no sequence", "multiples of 32"]),
        ("no batch", r#"{"zero_optimization": {"stage": 2}}"#, &["neither train_batch_size", "--global-batch"]),
        (
            "no stage of ZeRO",
            r#"{"train_batch_size": 64, "zero_optimization": {"stage": 4}}"#,
            &["legal values: 0, 1, 2, 3"],
        ),
        (
            "groups",
            r#"{"train_batch_size": 64, "zero_optimization": {"stage": 3, "mics_shard_size": 5}}"#,
            &["5 does not divide 32 replicas", "1, 2, 4, 8, 16, 32"],
        ),
        (
            "two formats",
            r#"{"train_batch_size": 64, "bf16": {"enabled": true}, "fp16": {"enabled": true}}"#,
            &["both enabled"],
        ),
        (
            "sparse attention",
            r#"{"train_batch_size": 64, "sparse_attention": {"mode": "fixed"}}"#,
            &["cannot be represented"],
        ),
        ("a text for a number", r#"{"train_batch_size": "64"}"#, &["train_batch_size is \"64\"", "whole number"]),
        ("no JSON", "train_batch_size: 64", &["line 1"]),
        ("no object", "[1]", &["holds no object"]),
        (
            "stages with ZeRO-2",
            r#"{"train_batch_size": 64, "zero_optimization": {"stage": 2}, "pipeline": {"stages": 4}}"#,
            &["DeepSpeed refuses"],
        ),
    ];
    for (name, text, pieces) in rows {
        check_refused(name, "deepspeed", text, LLAMA_ON_32, pieces);
    }
    check_refused("no model", "deepspeed", DEEPSPEED, ON_32, &["--model FILE"]);
}

/// A small sound torchtitan file.
const TORCHTITAN: &str = "[model]\nname = \"llama3\"\nflavor = \"8B\"\n[training]\nlocal_batch_size = 2\nseq_len = 8192\n\
                          compile = true\n[activation_checkpoint]\nmode = \"full\"\n";

#[test]
fn torchtitan_files_determine_axes_and_stages() {
    let rows: &[Reading] = &[
        (
            "sharded over all",
            "",
            &[("/strategy/zero_stage", "3"), ("/strategy/shard_group", "32"), ("/strategy/global_batch", "64")],
        ),
        (
            "sharded inside nodes",
            "[parallelism]\ndata_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 8",
            &[("/strategy/data_parallel", "32"), ("/strategy/shard_group", "8")],
        ),
        (
            "replicas only",
            "[parallelism]\ndata_parallel_replicate_degree = 32\ndata_parallel_shard_degree = 1",
            &[("/strategy/zero_stage", "0")],
        ),
        (
            "tensor and context",
            "[parallelism]\ntensor_parallel_degree = 4\ncontext_parallel_degree = 2",
            &[("/strategy/data_parallel", "4"), ("/strategy/sequence_parallel", "true")],
        ),
        (
            "stages",
            "[parallelism]\npipeline_parallel_degree = 4\ndata_parallel_shard_degree = 8",
            &[
                ("/strategy/layers_per_stage", "[8,9,8,7]"),
                ("/strategy/zero_stage", "2"),
                ("/strategy/micro_batch", "1"),
            ],
        ),
        (
            "interleaved stages",
            "[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_schedule = \"Interleaved1F1B\"",
            &[("/strategy/virtual_stages", "2"), ("/strategy/layers_per_stage", "[4,4,5,4,4,4,4,3]")],
        ),
        (
            "never gathered again",
            "[parallelism]\nfsdp_reshard_after_forward = \"never\"",
            &[("/strategy/zero_stage", "2")],
        ),
    ];
    for (name, more, expected) in rows {
        let value = scored(name, "torchtitan", &format!("{TORCHTITAN}{more}"), "--gpus 32 --node-gpus 8");
        for (path, expected) in *expected {
            assert_eq!(value.pointer(path), Some(&serde_json::from_str(expected).expect("JSON")), "{name}: {path}");
        }
        assert_eq!(names(&value, "unknown"), [""; 0], "{name}");
    }
    let odd = format!("{TORCHTITAN}[parallelism]\ntensor_paralel_degree = 2\n[frobnicate]\nx = 1\n");
    let value = scored("odd", "torchtitan", &odd, "--gpus 32 --node-gpus 8");
    assert_eq!(names(&value, "unknown"), ["frobnicate.x", "parallelism.tensor_paralel_degree"]);
}

#[test]
fn torchtitan_files_that_cannot_work_are_refused() {
    let rows: &[(&str, &str, &str, &[&str])] = &[
        ("the world", "", "[parallelism]\ndata_parallel_shard_degree = 5", &["shard 5", "legal values", "-1, 32"]),
        ("heads", "", "[parallelism]\ntensor_parallel_degree = 3", &["is not 32 GPUs", "1, 2, 4, 8, 16, 32"]),
        ("a model nobody knows", "8B", "9B", &["the shape of llama3 9B is not known", "--model FILE", "llama3 70B"]),
        ("no TOML", "seq_len = 8192", "seq_len 8192", &["line 6", "mend the TOML"]),
        ("a text for a number", "seq_len = 8192", "seq_len = \"long\"", &["training.seq_len is \"long\""]),
        (
            "a mode",
            "mode = \"full\"",
            "mode = \"some\"",
            &["activation_checkpoint.mode is `some`", "selective, full, none"],
        ),
    ];
    for (name, from, to, pieces) in rows {
        let text = if from.is_empty() { format!("{TORCHTITAN}{to}") } else { TORCHTITAN.replacen(from, to, 1) };
        check_refused(name, "torchtitan", &text, "--gpus 32 --node-gpus 8", pieces);
    }
    let batch = TORCHTITAN.replacen("seq_len", "global_batch_size = 65\nseq_len", 1);
    check_refused("the batch", "torchtitan", &batch, "--gpus 32 --node-gpus 8", &["65", "64, 128"]);
}

#[test]
fn exactly_one_configuration_is_scored() {
    let folder = TempDir::new().expect("a scratch folder");
    for arguments in [vec!["score", "--gpus", "8", "--node-gpus", "8"], vec!["score", "--from-megatron", SMALL]] {
        let output = run(folder.path(), &arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    }
}

#[test]
fn scoring_the_best_plan_finds_nothing_to_gain() {
    let first = scored("small", "megatron", &changed("--use-distributed-optimizer & --overlap-grad-reduce"), ON_32);
    let best = &first["best"]["strategy"];
    let number = |name: &str| best[name].as_u64().expect("a number").to_string();
    let mut flags = changed(&format!(
        "--tensor-model-parallel-size {} & --pipeline-model-parallel-size {} & --micro-batch-size {} & --overlap-grad-reduce",
        number("tensor_parallel"),
        number("pipeline_parallel"),
        number("micro_batch")
    ));
    if best["zero_stage"] == 1 {
        flags += " --use-distributed-optimizer";
    }
    if best["sequence_parallel"] == true {
        flags += " --sequence-parallel";
    }
    flags += match best["recompute"].as_str() {
        Some("full") => " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        Some("selective") => " --recompute-granularity selective",
        _ => "",
    };
    let again = scored("best", "megatron", &flags, ON_32);
    let [step, target] = [&again["estimate"], &first["best"]["estimate"]]
        .map(|estimate| estimate["step_seconds"].as_f64().expect("seconds"));
    assert!((step / target - 1.0).abs() < 0.02, "{step} against {target}: {best:#}");
}
