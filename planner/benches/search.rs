//! Time of a search by the number of GPUs, by the number of layers, and of the largest examples, and how many layouts of
//! the space are accounted for in a second: `cargo bench -p planner --bench search`.

#![allow(missing_docs, reason = "the functions that criterion's macros make have no place for them")]

use std::path::Path;
use std::time::Duration;

use cost_models::machine::Machine;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use hardware_profiles::device::MatmulFormat;
use hardware_profiles::{find_cluster, find_device, find_stack};
use ir::graph::build_graph;
use ir::model::{ModelSpec, read_model, workload};
use planner::request::{FixedChoices, Request, check_request};
use planner::search::search;

const STACKS: [&str; 2] = ["planwright", "megatron-core-2025"];

fn example(name: &str) -> ModelSpec {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../examples/{name}.ron"));
    let text = std::fs::read_to_string(&path).expect("the example exists");
    read_model(&text, name).expect("the example is sound")
}

fn request(model: ModelSpec, cluster: &str, stack: &str, gpus: u64) -> Request {
    let cluster = find_cluster(cluster, "bench").expect("the cluster is built in");
    let device = find_device(&cluster.device, "bench").expect("the device is built in");
    let stack = find_stack(stack, "bench").expect("the stack is built in");
    let workload = workload(&model, "bench", None, None).expect("the model states its workload");
    let machine = Machine { device, cluster, stack, node_gpus: 8, matmul_format: MatmulFormat::Model };
    let fixed = FixedChoices::default();
    let origin = "bench".to_owned();
    let request = Request { model, origin, workload, machine, gpus, fixed, top: 10, executable_only: false };
    check_request(&request).expect("the request is sound");
    request
}

/// Times a search under both stacks.
fn time(criterion: &mut Criterion, group: &str, label: String, model: ModelSpec, cluster: &str, gpus: u64) {
    let graph = build_graph(&model);
    let mut group = criterion.benchmark_group(group);
    group.sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    for stack in STACKS {
        let request = request(model.clone(), cluster, stack, gpus);
        group.throughput(Throughput::Elements(search(&request, &graph).enumerated));
        group.bench_function(BenchmarkId::new(stack, &label), |bencher| bencher.iter(|| search(&request, &graph)));
    }
    group.finish();
}

fn by_gpus(criterion: &mut Criterion) {
    for gpus in [64, 384, 1024, 4096, 16384] {
        time(criterion, "gpus", gpus.to_string(), example("bloom"), "dgx-h100", gpus);
    }
}

fn by_layers(criterion: &mut Criterion) {
    for num_layers in [24, 48, 96, 192] {
        let model = ModelSpec { num_layers, published_parameters: None, ..example("gpt3-175b") };
        time(criterion, "layers", num_layers.to_string(), model, "dgx-h100", 1024);
    }
}

fn largest(criterion: &mut Criterion) {
    let cases = [
        ("bloom", "dgx-a100-80gb", 384),
        ("gpt3-175b", "dgx-a100-80gb", 1024),
        ("deepseek-v3", "dgx-h100", 2048),
        ("gpt-1t", "dgx-h100", 65536),
    ];
    for (model, cluster, gpus) in cases {
        time(criterion, "examples", format!("{model} on {gpus}"), example(model), cluster, gpus);
    }
}

criterion_group!(benches, by_gpus, by_layers, largest);
criterion_main!(benches);
