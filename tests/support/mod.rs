//! What several tests share: profiles by name, example models.

#![allow(dead_code, reason = "each test uses a part")]

pub mod plans;
pub mod small;

use cost_models::machine::Machine;
use hardware_profiles::device::MatmulFormat;
use hardware_profiles::{find_cluster, find_device, find_stack};
use ir::model::{ModelSpec, read_model, workload};
use ir::strategy::Strategy;
use planner::request::{FixedChoices, Request, check_request};

/// A machine from built-in profiles.
pub fn machine(cluster: &str, stack: &str, node_gpus: u64) -> Machine {
    let cluster = find_cluster(cluster, "test").expect("the cluster is built in");
    let device = find_device(&cluster.device, "test").expect("the device is built in");
    let stack = find_stack(stack, "test").expect("the stack is built in");
    Machine { device, cluster, stack, node_gpus, matmul_format: MatmulFormat::Model }
}

/// An example model by file name without extension.
pub fn example(name: &str) -> ModelSpec {
    let path = format!("{}/../examples/{name}.ron", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).expect("the example exists");
    read_model(&text, &path).expect("the example is sound")
}

/// A checked request for a model.
pub fn request(model: ModelSpec, machine: Machine, gpus: u64, fixed: FixedChoices) -> Request {
    let workload = workload(&model, "model.ron", None, None).expect("the model states its workload");
    let request = Request {
        model,
        origin: "model.ron".to_owned(),
        workload,
        machine,
        gpus,
        fixed,
        top: 10,
        executable_only: false,
    };
    check_request(&request).expect("the request is sound");
    request
}

/// A layout with given degrees and batch, and nothing else chosen.
pub fn layout(tensor_parallel: u64, pipeline_parallel: u64, data_parallel: u64, global_batch: u64) -> Strategy {
    Strategy::plain([tensor_parallel, pipeline_parallel, data_parallel], global_batch)
}

/// The median; sorts the values.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
