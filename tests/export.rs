//! `plan export` through the real program: what is exported is read back as the same layout and predicted as the same
//! step.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

fn plan(folder: &Path, arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plan"));
    command.current_dir(folder).args(arguments.split_whitespace()).output().expect("the program starts")
}

fn printed(name: &str, folder: &Path, arguments: &str) -> String {
    let output = plan(folder, arguments);
    assert!(output.status.success(), "{name}: {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Facts of a strategy that survive the way there and back.
const KEPT: [&str; 12] = [
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "context_parallel",
    "expert_parallel",
    "expert_tensor_parallel",
    "zero_stage",
    "shard_group",
    "micro_batch",
    "global_batch",
    "recompute",
    "sequence_parallel",
];

#[test]
fn exported_plans_are_read_back_as_they_are() {
    let core = "--stack megatron-core-2025";
    let titan = "--stack fsdp-compile-2024";
    let rows = [
        ("found", "megatron", "llama-2-70b", "--gpus 256", core, ""),
        ("plain", "megatron", "gpt3-175b", "--gpus 1024", core, "--zero-stage 0 --recompute full"),
        ("one node", "megatron", "gpt2-124m", "--gpus 8", core, ""),
        ("experts", "megatron", "mixtral-8x7b", "--gpus 64", core, "--tensor-parallel 2"),
        (
            "whole experts",
            "megatron",
            "mixtral-8x7b",
            "--gpus 64",
            core,
            "--tensor-parallel 2 --expert-parallel 8 --expert-tensor-parallel 1",
        ),
        ("scaled positions", "megatron", "llama-3.1-8b", "--gpus 32", core, ""),
        ("latent attention", "megatron", "deepseek-v3", "--gpus 2048 --cluster dgx-h100", core, ""),
        ("uneven stages", "megatron", "bloom", "--gpus 384", core, "--pipeline-parallel 12 --recompute selective"),
        ("uneven everywhere", "megatron", "bloom", "--gpus 256", core, "--pipeline-parallel 16"),
        ("ZeRO-3", "deepspeed", "llama-2-7b", "--gpus 32", "--stack deepspeed-zero", "--zero-stage 3"),
        ("ZeRO-1", "deepspeed", "llama-2-7b", "--gpus 64", "--stack deepspeed-zero", "--zero-stage 1"),
        ("recomputed", "deepspeed", "llama-2-7b", "--gpus 64", "--stack deepspeed-zero", "--recompute full"),
        ("sharded", "torchtitan", "llama-3.1-8b", "--gpus 64", titan, "--zero-stage 3 --recompute full"),
        (
            "tensor",
            "torchtitan",
            "llama-3.1-70b",
            "--gpus 256",
            titan,
            "--zero-stage 3 --tensor-parallel 8 --sequence-parallel on",
        ),
    ];
    for (name, format, model, machine, stack, fixed) in rows {
        let folder = TempDir::new().expect("a scratch folder");
        let folder = folder.path();
        let model = format!("{}/../examples/{model}.ron", env!("CARGO_MANIFEST_DIR"));
        let made = format!("--model {model} {machine} --node-gpus 8 {stack} {fixed} --out a.plan.ron --json");
        let made: Value = serde_json::from_str(&printed(name, folder, &made)).expect("one JSON object");
        let text = printed(name, folder, &format!("export a.plan.ron --to {format}"));
        fs::write(folder.join("exported"), &text).expect("writable");
        let from = if format == "megatron" { "@exported" } else { "exported" };
        let model = if format == "deepspeed" { format!("--model {model}") } else { String::new() };
        let score = format!("score --from-{format} {from} {machine} --node-gpus 8 {stack} {model} --json");
        let read: Value = serde_json::from_str(&printed(name, folder, &score)).expect("one JSON object");
        for fact in KEPT {
            assert_eq!(read["strategy"][fact], made["strategy"][fact], "{name}: {fact} by\n{text}");
        }
        assert_eq!(read["settings"]["unknown"], Value::Array(Vec::new()), "{name}: {text}");
        if format != "megatron" {
            continue;
        }
        assert_eq!(read["strategy"]["layers_per_stage"], made["strategy"]["layers_per_stage"], "{name}: {text}");
        // Megatron counts the rows that it adds to the vocabulary, the plan those of the model alone.
        let [counted, given] = [&read, &made].map(|value| value["parameters"].as_u64().expect("a number"));
        assert!(counted >= given && counted - given < given / 100, "{name}: {counted} of {given} in\n{text}");
        let [there, back] =
            [&made, &read].map(|value| value["estimate"]["step_seconds"].as_f64().expect("a number of seconds"));
        assert!((back / there - 1.0).abs() < 1e-6, "{name}: planned with {there} s, read back with {back} s:\n{text}");
    }
}

#[test]
fn other_formats_hold_the_layout() {
    let folder = TempDir::new().expect("a scratch folder");
    let folder = folder.path();
    let model = format!("{}/../examples/llama-2-70b.ron", env!("CARGO_MANIFEST_DIR"));
    let fixed = "--tensor-parallel 8 --pipeline-parallel 4 --micro-batch 1 --sequence-parallel on --out a.plan.ron";
    printed("plan", folder, &format!("--model {model} --gpus 64 --node-gpus 8 {fixed}"));
    let rows: [(&str, &[&str]); 2] = [
        (
            "nemo",
            &["num_nodes: 8", "tensor_model_parallel_size: 8", "pipeline_model_parallel_size: 4", "num_layers: 80"],
        ),
        ("slurm", &["#!/bin/bash", "--nodes=8", "--ntasks-per-node=8", "srun execute-plan a.plan.ron"]),
    ];
    for (target, pieces) in rows {
        let text = printed(target, folder, &format!("export a.plan.ron --to {target}"));
        for piece in pieces {
            assert!(text.contains(piece), "{target}: `{piece}` is not in\n{text}");
        }
        let value = printed(target, folder, &format!("export a.plan.ron --to {target} --json"));
        let value: Value = serde_json::from_str(&value).expect("one JSON object");
        assert_eq!(value["text"], text, "{target}");
    }
    for (arguments, code) in [("export missing --to nemo", 2), ("export a.plan.ron --to alpa", 2)] {
        assert_eq!(plan(folder, arguments).status.code(), Some(code), "{arguments}");
    }
}
