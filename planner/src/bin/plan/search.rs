//! `plan --model … --gpus …`: search, write the plan, print the summary.

use std::path::{Path, PathBuf};
use std::time::Instant;

use cost_models::machine::Machine;
use hardware_profiles::device::MatmulFormat;
use hardware_profiles::files::{INPUT_LIMIT, read_text};
use hardware_profiles::{
    ClusterFile, StackProfile, find_cluster, find_device, find_stack, read_cluster_file, read_stack,
};
use ir::graph::build_graph;
use ir::model::{ModelSpec, read_model, workload};
use ir::plan::write_plan;
use ir::verify::verify;
use planner::calibrate::Subject;
use planner::error::Error;
use planner::explain::{explain, no_plan};
use planner::huggingface::import_config;
use planner::lower::{estimate, lower, search_report};
use planner::report::{json, summary};
use planner::request::{Request, check_request};
use planner::search::search;

use crate::Printed;
use crate::arguments::{DEFAULT_CLUSTER, DEFAULT_STACK, SearchOptions};
use crate::output::write_whole;

/// Runs the search.
pub fn run(options: &SearchOptions) -> Printed {
    let started = Instant::now();
    let request = read_request(options)?;
    let graph = build_graph(&request.model);
    let outcome = search(&request, &graph);
    let Some(winner) = outcome.best.first() else {
        return Err(no_plan(&request, &graph, &outcome));
    };
    let report = search_report(&request, &outcome, explain(&request, &graph, winner));
    let plan = lower(&request, &graph, winner, report);
    let alternatives: Vec<_> =
        outcome.best.iter().map(|scored| (scored.strategy.clone(), estimate(&request, &graph, scored))).collect();
    let seconds = started.elapsed().as_secs_f64();

    let path = options
        .out
        .clone()
        .unwrap_or_else(|| PathBuf::from(format!("{}-{}.plan.ron", request.model.name, request.gpus)));
    let shown = path.display().to_string();
    let problems = verify(&plan, &shown);
    if !problems.is_empty() {
        return Err(Error::Verification(problems));
    }
    if !options.dry_run {
        write_whole(&path, &write_plan(&plan), options.force)?;
    }
    let out = (!options.dry_run).then_some(shown.as_str());
    if options.json {
        return Ok(format!("{:#}\n", json::search_result(&plan, &alternatives, seconds, out)));
    }
    let written = out.map_or("nothing written (--dry-run)".to_owned(), |path| format!("written to {path}"));
    Ok(format!(
        "{}{}{written}\n",
        summary::header(&plan, &defaults(options, &request)),
        summary::body(&plan, &alternatives)
    ))
}

fn read_request(options: &SearchOptions) -> Result<Request, Error> {
    let path = options.model.as_deref().unwrap_or(Path::new(""));
    let origin = path.display().to_string();
    let model = read_model_file(path, &origin)?;
    let workload = workload(&model, &origin, options.sequence_length, options.global_batch)?;
    let Subject { cluster, device, stack } = read_profiles(&options.cluster, options.stack.as_deref())?;
    let node_gpus = options.node_gpus.unwrap_or(0);
    let request = Request {
        model,
        origin,
        workload,
        machine: Machine { device, cluster, stack, node_gpus, matmul_format: MatmulFormat::Model },
        gpus: options.gpus.unwrap_or(0),
        fixed: options.fixed.choices(),
        top: options.top,
        executable_only: options.executable,
    };
    check_request(&request)?;
    Ok(request)
}

/// Reads what `--cluster` and `--stack` name.
pub fn read_profiles(cluster_option: &str, stack_option: Option<&str>) -> Result<Subject, Error> {
    let ClusterFile { cluster, device, stack } = read_cluster_option(cluster_option)?;
    let device = match device {
        Some(device) => device,
        None => find_device(&cluster.device, &format!("{cluster_option}, field device"))?,
    };
    let stack = match (stack_option, stack) {
        (Some(option), _) => read_stack_option(option)?,
        (None, Some(stack)) => stack,
        (None, None) => read_stack_option(DEFAULT_STACK)?,
    };
    Ok(Subject { cluster, device, stack })
}

/// Reads a model file: RON, or JSON as Hugging Face writes it.
fn read_model_file(path: &Path, origin: &str) -> Result<ModelSpec, Error> {
    let text = read_text(path, INPUT_LIMIT)?;
    let json = path.extension().is_some_and(|extension| extension == "json") || text.trim_start().starts_with('{');
    Ok(if json { import_config(&text, origin)? } else { read_model(&text, origin)? })
}

/// Whether an option names a file rather than something built in.
fn is_file(option: &str) -> bool {
    option.ends_with(".ron") || option.contains(std::path::MAIN_SEPARATOR)
}

fn read_cluster_option(option: &str) -> Result<ClusterFile, Error> {
    if is_file(option) {
        return Ok(read_cluster_file(&read_text(Path::new(option), INPUT_LIMIT)?, option)?);
    }
    Ok(ClusterFile { cluster: find_cluster(option, "--cluster")?, device: None, stack: None })
}

fn read_stack_option(option: &str) -> Result<StackProfile, Error> {
    if is_file(option) {
        return Ok(read_stack(&read_text(Path::new(option), INPUT_LIMIT)?, option)?);
    }
    Ok(find_stack(option, "--stack")?)
}

/// Names of what the user left to a default that changes the answer.
fn defaults(options: &SearchOptions, request: &Request) -> Vec<&'static str> {
    let model = &request.model;
    let taken = [
        (options.cluster == DEFAULT_CLUSTER, "cluster"),
        (find_stack(DEFAULT_STACK, "--stack").as_ref() == Ok(&request.machine.stack), "stack"),
        (options.sequence_length.is_none() && model.sequence_length.is_none(), "sequence"),
        (options.global_batch.is_none() && model.global_batch.is_none(), "batch"),
    ];
    taken.into_iter().filter(|(default, _)| *default).map(|(_, name)| name).collect()
}
