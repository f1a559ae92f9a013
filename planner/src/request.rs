//! What the user asks for, checked before anything is searched.

use cost_models::machine::Machine;
use hardware_profiles::cluster::Nics;
use ir::error::Problem;
use ir::mesh::MeshOrder;
use ir::model::{ModelSpec, SIZE_LIMIT, Workload};
use ir::sharding::{SplitError, tensor_split};
use ir::strategy::{Recompute, ScheduleKind, ZeroStage};

use crate::error::Error;
use crate::space::{fits_parts, open_schedules};

/// Most GPUs of a request.
pub const GPU_LIMIT: u64 = 1 << 20;

/// A model, a machine, and the choices already made.
#[derive(Clone, Debug)]
pub struct Request {
    /// The model.
    pub model: ModelSpec,
    /// The model file's name, for messages.
    pub origin: String,
    /// What a step processes.
    pub workload: Workload,
    /// The machine.
    pub machine: Machine,
    /// Ranks of the world.
    pub gpus: u64,
    /// Choices that the user fixed.
    pub fixed: FixedChoices,
    /// Layouts to report, the best included.
    pub top: usize,
    /// Whether layouts that the compiler cannot build are left out.
    pub executable_only: bool,
}

/// Choices that the user fixed; the rest is searched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FixedChoices {
    /// `--tensor-parallel`.
    pub tensor_parallel: Option<u64>,
    /// `--pipeline-parallel`.
    pub pipeline_parallel: Option<u64>,
    /// `--data-parallel`.
    pub data_parallel: Option<u64>,
    /// `--context-parallel`.
    pub context_parallel: Option<u64>,
    /// `--expert-parallel`.
    pub expert_parallel: Option<u64>,
    /// `--expert-tensor-parallel`.
    pub expert_tensor_parallel: Option<u64>,
    /// `--zero-stage`.
    pub zero_stage: Option<ZeroStage>,
    /// `--micro-batch`.
    pub micro_batch: Option<u64>,
    /// `--recompute`.
    pub recompute: Option<Recompute>,
    /// `--virtual-stages`.
    pub virtual_stages: Option<u64>,
    /// `--schedule`.
    pub schedule: Option<ScheduleKind>,
    /// `--sequence-parallel`.
    pub sequence_parallel: Option<bool>,
    /// `--offload-optimizer`.
    pub offload_optimizer: Option<bool>,
    /// `--mesh-order`.
    pub mesh_order: Option<MeshOrder>,
}

impl FixedChoices {
    /// The choices as flags, in the order of the help text.
    pub fn flags(&self) -> Vec<String> {
        let mut flags = Vec::new();
        let mut push = |name: &str, value: Option<String>| flags.extend(value.map(|value| format!("--{name} {value}")));
        push("tensor-parallel", self.tensor_parallel.map(|n| n.to_string()));
        push("pipeline-parallel", self.pipeline_parallel.map(|n| n.to_string()));
        push("data-parallel", self.data_parallel.map(|n| n.to_string()));
        push("context-parallel", self.context_parallel.map(|n| n.to_string()));
        push("expert-parallel", self.expert_parallel.map(|n| n.to_string()));
        push("expert-tensor-parallel", self.expert_tensor_parallel.map(|n| n.to_string()));
        push("zero-stage", self.zero_stage.map(|stage| u8::from(stage).to_string()));
        push("micro-batch", self.micro_batch.map(|n| n.to_string()));
        push("recompute", self.recompute.map(|recompute| recompute.name().to_owned()));
        push("virtual-stages", self.virtual_stages.map(|n| n.to_string()));
        push("schedule", self.schedule.map(|schedule| schedule.name().to_owned()));
        let switch = |on: bool| if on { "on" } else { "off" }.to_owned();
        push("sequence-parallel", self.sequence_parallel.map(switch));
        push("offload-optimizer", self.offload_optimizer.map(switch));
        push("mesh-order", self.mesh_order.map(|order| order.name().to_owned()));
        flags
    }

    /// The same choices with one of them freed, for each that is fixed, with its flag.
    pub fn each_freed(&self) -> Vec<(String, FixedChoices)> {
        let freed = [
            FixedChoices { tensor_parallel: None, ..*self },
            FixedChoices { pipeline_parallel: None, ..*self },
            FixedChoices { data_parallel: None, ..*self },
            FixedChoices { context_parallel: None, ..*self },
            FixedChoices { expert_parallel: None, ..*self },
            FixedChoices { expert_tensor_parallel: None, ..*self },
            FixedChoices { zero_stage: None, ..*self },
            FixedChoices { micro_batch: None, ..*self },
            FixedChoices { recompute: None, ..*self },
            FixedChoices { virtual_stages: None, ..*self },
            FixedChoices { schedule: None, ..*self },
            FixedChoices { sequence_parallel: None, ..*self },
            FixedChoices { offload_optimizer: None, ..*self },
            FixedChoices { mesh_order: None, ..*self },
        ];
        let changed = freed.into_iter().filter(|choices| choices != self);
        self.flags().into_iter().zip(changed).collect()
    }
}

/// Checks a request.
///
/// # Errors
/// `Error::BadInput` with every problem found.
pub fn check_request(request: &Request) -> Result<(), Error> {
    let mut problems = Vec::new();
    check_world(request, &mut problems);
    check_device(request, &mut problems);
    if problems.is_empty() {
        check_degrees(request, &mut problems);
        check_batch(request, &mut problems);
        check_offers(request, &mut problems);
    }
    if problems.is_empty() { Ok(()) } else { Err(Error::BadInput(problems)) }
}

fn check_world(request: &Request, problems: &mut Vec<Problem>) {
    let Request { gpus, machine, .. } = request;
    let node_gpus = machine.node_gpus;
    if *gpus == 0 || *gpus > GPU_LIMIT {
        problems.push(Problem::new(format!("gpus is {gpus}"), "--gpus", format!("give 1 to {GPU_LIMIT} GPUs")));
        return;
    }
    if node_gpus == 0 {
        problems.push(Problem::new("node-gpus is 0", "--node-gpus", "give at least 1 GPU a node"));
    } else if !gpus.is_multiple_of(node_gpus) {
        let help = match gpus / node_gpus {
            0 => format!("give {node_gpus} GPUs, or nodes of at most {gpus}"),
            nodes => format!("give whole nodes: {} or {} GPUs", nodes * node_gpus, (nodes + 1) * node_gpus),
        };
        problems.push(Problem::new(format!("node-gpus {node_gpus} does not divide gpus {gpus}"), "--node-gpus", help));
    }
    let cluster = &machine.cluster;
    // A part of one node uses no network card.
    let inside_node = *gpus == node_gpus && node_gpus < cluster.node_gpus;
    if let Nics::PerNode(count) = &cluster.inter.nics
        && node_gpus != cluster.node_gpus
        && !inside_node
    {
        problems.push(Problem::new(
            format!(
                "cluster {} has nodes of {} GPUs that share {} network cards, not {node_gpus}",
                cluster.name, cluster.node_gpus, count.value
            ),
            "--node-gpus",
            format!("give --node-gpus {}, or a cluster file with other nodes", cluster.node_gpus),
        ));
    }
}

fn check_device(request: &Request, problems: &mut Vec<Problem>) {
    let device = &request.machine.device;
    if device.peak_rate(request.model.dtype).is_none() {
        problems.push(Problem::new(
            format!("device {} has no {:?} matrix units", device.name, request.model.dtype),
            format!("{}, field dtype", request.origin),
            "change dtype (FP16 on V100), or choose another --cluster",
        ));
    }
}

fn check_degrees(request: &Request, problems: &mut Vec<Problem>) {
    let FixedChoices { tensor_parallel, pipeline_parallel, data_parallel, context_parallel, .. } = request.fixed;
    let degrees = [
        ("--tensor-parallel", tensor_parallel),
        ("--pipeline-parallel", pipeline_parallel),
        ("--data-parallel", data_parallel),
        ("--context-parallel", context_parallel),
    ];
    let others = [
        ("--expert-parallel", request.fixed.expert_parallel),
        ("--expert-tensor-parallel", request.fixed.expert_tensor_parallel),
        ("--virtual-stages", request.fixed.virtual_stages),
    ];
    let zero = degrees.iter().chain(&others).filter(|(_, degree)| *degree == Some(0));
    problems.extend(zero.map(|(flag, _)| Problem::new(format!("{flag} is 0"), *flag, "degrees are 1 or more")));
    if !problems.is_empty() {
        return;
    }
    let given: Vec<(&str, u64)> = degrees.into_iter().filter_map(|(flag, degree)| Some((flag, degree?))).collect();
    let product = given.iter().try_fold(1u64, |product, (_, degree)| product.checked_mul(*degree));
    let fits = product.is_some_and(|product| match given.len() {
        4 => product == request.gpus,
        _ => request.gpus.is_multiple_of(product),
    });
    // A stack without context parallelism leaves nothing to fill up with beside three degrees.
    let whole = context_parallel.is_some() || request.machine.stack.offers.searches_context_parallel();
    let fits = fits && (whole || given.len() < 3 || product == Some(request.gpus));
    if !fits {
        let flags: Vec<String> = given.iter().map(|(flag, degree)| format!("{flag} {degree}")).collect();
        problems.push(Problem::new(
            format!("{} cannot make up {} GPUs", flags.join(" "), request.gpus),
            flags.join(" "),
            format!(
                "the product of the degrees divides {0}; divisors of {0}: {1}",
                request.gpus,
                list(&divisors(request.gpus))
            ),
        ));
    }
    if let Some(degree) = tensor_parallel {
        check_tensor_degree(request, degree, problems);
    }
    if let Some(stages) = pipeline_parallel
        && stages > request.model.num_layers
    {
        problems.push(Problem::new(
            format!("{stages} stages for {} layers", request.model.num_layers),
            "--pipeline-parallel",
            format!("give at most {} stages: each holds at least one layer", request.model.num_layers),
        ));
    }
    check_context_degree(request, problems);
    check_expert_degree(request, problems);
    check_expert_tensor_degree(request, problems);
    check_virtual_stages(request, problems);
}

fn check_context_degree(request: &Request, problems: &mut Vec<Problem>) {
    let Some(degree) = request.fixed.context_parallel else { return };
    let sequence = request.workload.sequence_length;
    let splits = |degree: u64| degree == 1 || sequence.is_multiple_of(degree.saturating_mul(2));
    if !splits(degree) {
        let legal: Vec<u64> = divisors(request.gpus).into_iter().filter(|degree| splits(*degree)).collect();
        problems.push(Problem::new(
            format!("context_parallel {degree} does not split a sequence of {sequence} into two parts a rank"),
            "--context-parallel",
            format!("degrees that split it and divide {} GPUs: {}", request.gpus, list(&legal)),
        ));
    }
}

/// The expert degree divides the experts, and the ranks that fixed degrees leave to spread them over.
fn check_expert_degree(request: &Request, problems: &mut Vec<Problem>) {
    let Some(degree) = request.fixed.expert_parallel else { return };
    let experts = request.model.feed_forward.num_experts();
    let FixedChoices { tensor_parallel, pipeline_parallel, data_parallel, context_parallel, .. } = request.fixed;
    let whole = match request.fixed.expert_tensor_parallel {
        Some(ranks) => ranks == 1,
        None => request.machine.stack.offers.searches_whole_experts(),
    };
    let shared = if whole { 1 } else { tensor_parallel.unwrap_or(1) };
    let ranks = match (data_parallel, context_parallel, tensor_parallel) {
        (Some(data), Some(context), Some(tensor)) => data.saturating_mul(context).saturating_mul(tensor / shared),
        _ => request.gpus / shared.saturating_mul(pipeline_parallel.unwrap_or(1)).max(1),
    };
    let shares = |degree: u64| experts.is_multiple_of(degree) && ranks.is_multiple_of(degree);
    if !shares(degree) {
        let legal: Vec<u64> = divisors(experts).into_iter().filter(|degree| shares(*degree)).collect();
        let what = match experts {
            1 => format!("expert_parallel {degree} for a model without routed experts"),
            _ => {
                format!("expert_parallel {degree} does not divide {experts} experts and {ranks} ranks of a stage")
            }
        };
        problems.push(Problem::new(what, "--expert-parallel", format!("legal degrees: {}", list(&legal))));
    }
}

/// Tensor ranks share each expert, or it is whole.
fn check_expert_tensor_degree(request: &Request, problems: &mut Vec<Problem>) {
    let Some(degree) = request.fixed.expert_tensor_parallel else { return };
    let tensor = request.fixed.tensor_parallel;
    let mut problem = |what: String, help: &str| {
        problems.push(Problem::new(what, "--expert-tensor-parallel", help.to_owned()));
    };
    if request.model.feed_forward.num_experts() == 1 {
        problem(format!("expert_tensor_parallel {degree} for a model without routed experts"), "leave it out");
    } else if degree > 1 && tensor.is_some_and(|tensor| tensor != degree) {
        let tensor = tensor.unwrap_or_default();
        let what = format!("expert_tensor_parallel {degree} is neither 1 nor tensor_parallel {tensor}");
        problem(what, &format!("legal degrees: 1, {tensor}"));
    } else if degree == 1 && tensor != Some(1) && request.fixed.sequence_parallel == Some(false) {
        let what = "whole experts on tensor ranks need sequence parallelism".to_owned();
        problem(what, "give --sequence-parallel on, or --tensor-parallel 1");
    }
}

/// The schedule takes so many parts a stage, and the layers fill them.
fn check_virtual_stages(request: &Request, problems: &mut Vec<Problem>) {
    let layers = request.model.num_layers;
    let schedules = open_schedules(request);
    let stages = match request.fixed.pipeline_parallel {
        Some(stages) => vec![stages],
        None => divisors(request.gpus),
    };
    let fits = |parts: u64| {
        let on = |stages: &u64| schedules.iter().any(|schedule| fits_parts(request, *schedule, *stages, parts));
        stages.iter().any(on)
    };
    let Some(parts) = request.fixed.virtual_stages else {
        if let Some(schedule) = request.fixed.schedule.filter(|_| !(1..=layers).any(fits)) {
            let what = format!("schedule {} has no parts of {layers} layers on these stages", schedule.name());
            let help = "it needs 2 or more stages with 2 or more parts of whole layers on each";
            problems.push(Problem::new(what, "--schedule", help));
        }
        return;
    };
    if !fits(parts) {
        let legal: Vec<u64> = (1..=layers).filter(|parts| fits(*parts)).collect();
        let schedule = request.fixed.schedule.map_or(String::new(), |schedule| format!(" under {}", schedule.name()));
        let what = match schedules.iter().any(|schedule| schedule.allows_virtual_stages(parts)) {
            true => format!("{layers} layers do not fill {parts} parts on each stage{schedule}"),
            false if request.fixed.schedule.is_none() => {
                format!("stack {} does not offer {parts} parts on a stage", request.machine.stack.name)
            }
            false => format!("{parts} parts on a stage are not possible{schedule}"),
        };
        problems.push(Problem::new(what, "--virtual-stages", format!("legal numbers: {}", list(&legal))));
    }
}

fn check_tensor_degree(request: &Request, degree: u64, problems: &mut Vec<Problem>) {
    let model = &request.model;
    let Err(error) = tensor_split(model, degree, false) else { return };
    let heads = model.attention.num_attention_heads();
    let (field, size) = match error {
        SplitError::Heads => ("num_attention_heads", heads),
        SplitError::KeyValueHeads => ("num_key_value_heads", model.attention.num_key_value_heads()),
        SplitError::Intermediate => ("intermediate_size", 0),
    };
    let legal: Vec<u64> = divisors(heads).into_iter().filter(|n| tensor_split(model, *n, false).is_ok()).collect();
    let in_domain: Vec<u64> = legal.into_iter().filter(|n| *n <= request.machine.fast_domain_gpus()).collect();
    let what = match error {
        SplitError::Intermediate => format!("tensor_parallel {degree} does not divide {field}"),
        SplitError::Heads | SplitError::KeyValueHeads => {
            format!("tensor_parallel {degree} does not divide {field} {size}")
        }
    };
    let help = format!(
        "degrees that split this model and fit in a node of {} GPUs: {}",
        request.machine.fast_domain_gpus(),
        list(&in_domain)
    );
    problems.push(Problem::new(what, format!("{}, field {field}", request.origin), help));
}

fn check_batch(request: &Request, problems: &mut Vec<Problem>) {
    let batch = request.workload.global_batch;
    let micro_batch = request.fixed.micro_batch.unwrap_or(1);
    let replicas = request.fixed.data_parallel.unwrap_or(1);
    if micro_batch == 0 {
        problems.push(Problem::new("micro-batch is 0", "--micro-batch", "give 1 or more sequences"));
        return;
    }
    let unit = micro_batch.saturating_mul(replicas);
    if replicas > 0 && !batch.is_multiple_of(unit) {
        let flags = [("--micro-batch", request.fixed.micro_batch), ("--data-parallel", request.fixed.data_parallel)];
        let given: Vec<&str> = flags.into_iter().filter_map(|(flag, size)| size.map(|_| flag)).collect();
        let help = match batch.checked_next_multiple_of(unit) {
            Some(larger) if larger <= SIZE_LIMIT => format!("give --global-batch {larger}, or divisors of {batch}"),
            Some(_) | None => format!("give divisors of {batch}"),
        };
        problems.push(Problem::new(
            format!("global batch {batch} is not divisible by micro-batch {micro_batch} x data-parallel {replicas}"),
            given.join(" "),
            help,
        ));
    }
}

fn check_offers(request: &Request, problems: &mut Vec<Problem>) {
    let stack = &request.machine.stack;
    let offers = &stack.offers;
    let fixed = &request.fixed;
    let more_than_one = |degree: Option<u64>| degree.is_some_and(|degree| degree > 1);
    let missing = [
        (more_than_one(fixed.tensor_parallel) && !offers.tensor_parallel, "--tensor-parallel", "tensor parallelism"),
        (more_than_one(fixed.pipeline_parallel) && !offers.pipeline_parallel, "--pipeline-parallel", "pipeline stages"),
        (
            more_than_one(fixed.context_parallel) && offers.context_parallel.is_none(),
            "--context-parallel",
            "context parallelism",
        ),
        (
            more_than_one(fixed.expert_parallel) && offers.expert_parallel.is_none(),
            "--expert-parallel",
            "expert parallelism",
        ),
        (
            fixed.expert_tensor_parallel == Some(1)
                && fixed.tensor_parallel.is_none_or(|tensor| tensor > 1)
                && offers.whole_experts.is_none(),
            "--expert-tensor-parallel",
            "whole experts on tensor ranks",
        ),
        (
            fixed.sequence_parallel == Some(true) && !offers.sequence_parallel,
            "--sequence-parallel",
            "sequence parallelism",
        ),
        (fixed.zero_stage.is_some_and(|stage| !offers.zero_stages.contains(&stage)), "--zero-stage", "this ZeRO stage"),
        (
            fixed.recompute.is_some_and(|choice| !offers.recompute.contains(&choice)),
            "--recompute",
            "this recomputation",
        ),
        (fixed.schedule.is_some_and(|choice| !offers.schedules.contains(&choice)), "--schedule", "this schedule"),
        (
            fixed.offload_optimizer == Some(true) && offers.offload_zero_stages.is_empty(),
            "--offload-optimizer",
            "optimizer state in host memory",
        ),
        (
            fixed.mesh_order.is_some_and(|order| !offers.mesh_orders.contains(&order)),
            "--mesh-order",
            "this order of ranks",
        ),
    ];
    for (_, flag, what) in missing.into_iter().filter(|(absent, _, _)| *absent) {
        problems.push(Problem::new(
            format!("stack {} does not offer {what}", stack.name),
            flag,
            "leave the flag out, or choose another --stack (`plan stacks` lists them)",
        ));
    }
    if fixed.offload_optimizer == Some(true) && request.machine.cluster.host.is_none() {
        problems.push(Problem::new(
            format!("cluster {} does not say what its hosts have", request.machine.cluster.name),
            "--offload-optimizer",
            "leave the flag out, or give a --cluster file with `host`",
        ));
    }
}

/// Divisors in rising order.
pub fn divisors(n: u64) -> Vec<u64> {
    let mut low: Vec<u64> = (1..).take_while(|d| d * d <= n).filter(|d| n.is_multiple_of(*d)).collect();
    let high: Vec<u64> = low.iter().rev().map(|d| n / d).filter(|d| d * d > n).collect();
    low.extend(high);
    low
}

fn list(numbers: &[u64]) -> String {
    numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_are_complete_and_sorted() {
        assert_eq!(divisors(1), [1]);
        assert_eq!(divisors(36), [1, 2, 3, 4, 6, 9, 12, 18, 36]);
        assert_eq!(divisors(384).len(), 16);
    }
}
