//! `plan models`, `plan clusters`, `plan stacks`: what is built in, with sources.

use hardware_profiles::cluster::Nics;
use hardware_profiles::stack::Offers;
use hardware_profiles::{builtin_clusters, builtin_stacks, find_device};
use ir::graph::count_parameters;
use ir::strategy::ScheduleKind;
use planner::examples::builtin_models;
use planner::report::table;
use serde_json::{Value, json};

use crate::Printed;

/// Lists the example models.
pub fn models(as_json: bool) -> Printed {
    let models = builtin_models()?;
    if as_json {
        let entries: Vec<Value> = models
            .iter()
            .map(|model| json!({"name": model.name, "parameters": count_parameters(model), "source": model.source}))
            .collect();
        return Ok(format!("{:#}\n", json!({ "models": entries })));
    }
    let rows = models.iter().map(|model| {
        vec![
            model.name.clone(),
            count_parameters(model).to_string(),
            model.num_layers.to_string(),
            model.hidden_size.to_string(),
            model.attention.num_attention_heads().to_string(),
        ]
    });
    let sources = models.iter().map(|model| format!("{}: {}\n", model.name, model.source));
    let rows: Vec<Vec<String>> = rows.collect();
    Ok(table(&["model", "parameters", "layers", "hidden", "heads"], rows) + "\n" + &sources.collect::<String>())
}

/// Lists the clusters.
pub fn clusters(as_json: bool) -> Printed {
    let mut rows = Vec::new();
    let mut entries: Vec<Value> = Vec::new();
    let mut sources = String::new();
    for cluster in builtin_clusters()? {
        let device = find_device(&cluster.device, &cluster.name)?;
        let cards = match &cluster.inter.nics {
            Nics::PerGpu(count) => format!("{} a GPU", count.value),
            Nics::PerNode(count) => format!("{} a node", count.value),
        };
        let fast = cluster.intra.bandwidth_per_gpu_per_direction.value.0 / 1e9;
        let card = cluster.inter.bandwidth_per_nic_per_direction.value.0 / 1e9;
        entries.push(json!({
            "name": cluster.name, "device": cluster.device, "node_gpus": cluster.node_gpus,
            "fast_domain_gpus": cluster.fast_domain_gpus.unwrap_or(cluster.node_gpus), "memory_gib": device.memory.value.gib(),
            "link_gb_per_second": fast, "nic_gb_per_second": card, "nics": cards, "source": cluster.source,
        }));
        sources += &format!("{}: {}\n", cluster.name, cluster.source);
        rows.push(vec![
            cluster.name,
            device.name,
            cluster.node_gpus.to_string(),
            format!("{:.0}", device.memory.value.gib()),
            format!("{fast:.0}"),
            cards,
            format!("{card:.1}"),
        ]);
    }
    if as_json {
        return Ok(format!("{:#}\n", json!({ "clusters": entries })));
    }
    let columns = ["cluster", "device", "GPUs/node", "GiB", "link GB/s", "network cards", "GB/s a card"];
    Ok(table(&columns, rows) + "\n" + &sources)
}

/// What is planned only where it is asked for.
const ON_REQUEST: &str = "on request";

/// Schedules that are searched, and those that are planned on request.
fn schedules(offers: &Offers) -> String {
    let searched = offers.searched_schedules();
    let (always, asked): (Vec<ScheduleKind>, Vec<ScheduleKind>) =
        offers.schedules.iter().partition(|schedule| searched.contains(schedule));
    let names = |kinds: &[ScheduleKind]| kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(" ");
    if asked.is_empty() { names(&always) } else { format!("{}, {ON_REQUEST} {}", names(&always), names(&asked)) }
}

/// Lists the stacks.
pub fn stacks(as_json: bool) -> Printed {
    let stacks = builtin_stacks()?;
    if as_json {
        let entries: Vec<Value> =
            stacks.iter().map(|stack| json!({"name": stack.name, "source": stack.source})).collect();
        return Ok(format!("{:#}\n", json!({ "stacks": entries })));
    }
    let yes = |offered: bool| if offered { "yes" } else { "no" }.to_owned();
    let rows: Vec<Vec<String>> = stacks
        .iter()
        .map(|stack| {
            let offers = &stack.offers;
            let zero: Vec<String> = offers.zero_stages.iter().map(|stage| u8::from(*stage).to_string()).collect();
            vec![
                stack.name.clone(),
                yes(offers.tensor_parallel),
                yes(offers.pipeline_parallel),
                yes(offers.sequence_parallel),
                match (offers.context_parallel.is_some(), offers.searches_context_parallel()) {
                    (true, false) => ON_REQUEST.to_owned(),
                    (offered, _) => yes(offered),
                },
                match (offers.expert_parallel.is_some(), offers.searches_whole_experts()) {
                    (true, true) => "yes, also whole".to_owned(),
                    (offered, _) => yes(offered),
                },
                schedules(offers),
                zero.join(" "),
                yes(stack.kernels.flash_attention),
            ]
        })
        .collect();
    let sources: String = stacks.iter().map(|stack| format!("{}: {}\n", stack.name, stack.source)).collect();
    let columns =
        ["stack", "tensor", "pipeline", "sequence", "context", "expert", "schedules", "ZeRO", "flash attention"];
    Ok(table(&columns, rows) + "\n" + &sources)
}
