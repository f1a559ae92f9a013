//! `plan --model … --gpus …`: search, write the plan, print the summary.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Instant;

use cost_models::machine::Machine;
use hardware_profiles::device::MatmulFormat;
use hardware_profiles::files::{INPUT_LIMIT, read_text};
use hardware_profiles::{
    ClusterFile, StackProfile, find_cluster, find_device, find_stack, read_cluster_file, read_stack,
};
use ir::error::Problem;
use ir::graph::{ModelGraph, build_graph};
use ir::model::{ModelSpec, read_model, workload};
use ir::plan::{StopReason, write_plan};
use ir::verify::verify;
use planner::advice::{advise, sentences};
use planner::calibrate::Subject;
use planner::error::{Error, INTERRUPTED};
use planner::explain::{executable_sentence, explain, interrupted, no_plan};
use planner::huggingface::import_config;
use planner::lower::{estimate, lower, search_report};
use planner::objective::check_objective;
use planner::report::advice::advice_value;
use planner::report::json::error_value;
use planner::report::summary::Heading;
use planner::report::sweep::{none_fits, sweep_text, sweep_value};
use planner::report::{json, summary};
use planner::request::{Request, check_request};
use planner::search::{Scored, costs, search_remembering};
use planner::sweep::{counts, sweep};
use planner::training::training;
use planner::watch::Watch;

use crate::arguments::{DEFAULT_CLUSTER, DEFAULT_STACK, Gpus, SearchOptions};
use crate::output::{Report, write_whole};
use crate::progress::watched;

/// Runs the search, or the sweep over several numbers of GPUs.
pub fn run(options: &SearchOptions) -> Result<Report, Error> {
    let request = read_request(options)?;
    check_objective(options.objective.objective(), &request.machine)?;
    match &options.gpus {
        Some(Gpus::Range(range)) => compare(options, &request, range),
        Some(Gpus::One(_)) | None => {
            check_request(&request)?;
            let graph = build_graph(&request.model);
            watched(|watch| plan(options, &request, &graph, watch))
        }
    }
}

/// Searches every number of GPUs of a range and compares them.
fn compare(options: &SearchOptions, request: &Request, range: &RangeInclusive<u64>) -> Result<Report, Error> {
    if let Some(out) = &options.out {
        let what = "a range of --gpus writes no plan";
        let help = "leave out --out, or give one number of GPUs";
        return Err(Problem::new(what, format!("--out {}", out.display()), help).into());
    }
    let counts = counts(range, request.machine.node_gpus)?;
    let graph = build_graph(&request.model);
    let objective = options.objective.objective();
    let sweep = watched(|watch| sweep(request, &graph, &counts, options.tokens, objective, watch))?;
    let missing = none_fits(request, range, &sweep);
    if options.json {
        let mut value = sweep_value(request, &sweep);
        if let Some(error) = &missing {
            value["error"] = error_value(error.problems())["error"].take();
        }
        let code = missing.map_or(code_of(sweep.stop_reason), |error| error.exit_code());
        return Ok(Report { text: format!("{value:#}\n"), code });
    }
    if let Some(error) = missing {
        return Err(error);
    }
    let header = summary::header(&Heading::of_range(request, range), &defaults(options, request));
    Ok(Report { text: header + &sweep_text(request, &sweep, objective), code: code_of(sweep.stop_reason) })
}

fn code_of(stop_reason: StopReason) -> u8 {
    match stop_reason {
        StopReason::Optimal => 0,
        StopReason::Interrupted => INTERRUPTED,
    }
}

/// Searches one number of GPUs and writes the plan.
fn plan(options: &SearchOptions, request: &Request, graph: &ModelGraph, watch: &Watch) -> Result<Report, Error> {
    let started = Instant::now();
    let mut costs = costs(request, graph);
    let outcome = search_remembering(request, graph, watch, &mut costs);
    let proven = outcome.stop_reason == StopReason::Optimal;
    let Some(winner) = outcome.best.first() else {
        return Err(if proven { no_plan(request, graph, &outcome) } else { interrupted(request, &outcome) });
    };
    let mut explanations = explain(request, graph, winner, watch);
    explanations.extend(executable_sentence(&outcome));
    let advice = advise(request, graph, winner, watch, &mut costs);
    explanations.extend(advice.iter().flat_map(sentences));
    let limits = advice.as_ref().map(|advice| advice.limits.clone()).unwrap_or_default();
    let report = search_report(request, &outcome, limits, explanations);
    let plan = lower(request, graph, winner, report);
    let estimated = |scored: &Scored| (scored.strategy.clone(), estimate(request, graph, scored));
    let alternatives: Vec<_> = outcome.best.iter().map(estimated).collect();
    let executable = outcome.executable.as_ref().map(estimated);
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
    // Only what is proven to be the best replaces or becomes a file.
    let out = (proven && !options.dry_run).then_some(shown.as_str());
    if out.is_some() {
        write_whole(&path, &write_plan(&plan), options.force)?;
    }
    let code = code_of(outcome.stop_reason);
    let of_tokens = |tokens| training(request, tokens, plan.estimate.step, plan.estimate.checkpoint);
    let training = options.tokens.map(of_tokens);
    if options.json {
        let mut value = json::search_result(request, &plan, &alternatives, seconds, out);
        value["why"] = advice.as_ref().map(|advice| advice_value(&request.model, advice)).into();
        value["executable_optimum"] = executable.map(|layout| json::layout_value(request, &plan, &layout)).into();
        value["objective"] = options.objective.objective().name().into();
        value["training"] = training.as_ref().map(json::training_value).into();
        return Ok(Report { text: format!("{value:#}\n"), code });
    }
    let written = match (out, proven) {
        (Some(path), _) => format!("written to {path}"),
        (None, true) => "nothing written (--dry-run)".to_owned(),
        (None, false) => "nothing written (interrupted)".to_owned(),
    };
    let header = summary::header(&Heading::of_plan(&plan), &defaults(options, request));
    let body = summary::body(request, &plan, &alternatives, training.as_ref());
    Ok(Report { text: format!("{header}{body}{written}\n"), code })
}

/// Reads what the options name; a range of GPUs leaves the number at 0.
fn read_request(options: &SearchOptions) -> Result<Request, Error> {
    let path = options.model.as_deref().unwrap_or(Path::new(""));
    let origin = path.display().to_string();
    let model = read_model_file(path, &origin)?;
    let workload = workload(&model, &origin, options.sequence_length, options.global_batch)?;
    let Subject { cluster, device, mut stack } = read_profiles(&options.cluster, options.stack.as_deref())?;
    // Neither model nor plan says whether training drops anything.
    stack.kernels.attention_dropout = false;
    let node_gpus = options.node_gpus.unwrap_or(0);
    let gpus = match &options.gpus {
        Some(Gpus::One(gpus)) => *gpus,
        Some(Gpus::Range(_)) | None => 0,
    };
    Ok(Request {
        model,
        origin,
        workload,
        machine: Machine { device, cluster, stack, node_gpus, matmul_format: MatmulFormat::Model },
        gpus,
        fixed: options.fixed.choices(),
        top: options.top,
        executable_only: options.executable,
    })
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
pub fn read_model_file(path: &Path, origin: &str) -> Result<ModelSpec, Error> {
    let text = read_text(path, INPUT_LIMIT)?;
    let json = path.extension().is_some_and(|extension| extension == "json") || text.trim_start().starts_with('{');
    Ok(if json { import_config(&text, origin)? } else { read_model(&text, origin)? })
}

/// Whether an option names a file rather than something built in.
fn is_file(option: &str) -> bool {
    option.ends_with(".ron") || option.contains(std::path::MAIN_SEPARATOR)
}

/// Reads the cluster of an option.
pub fn read_cluster_option(option: &str) -> Result<ClusterFile, Error> {
    if is_file(option) {
        return Ok(read_cluster_file(&read_text(Path::new(option), INPUT_LIMIT)?, option)?);
    }
    Ok(ClusterFile { cluster: find_cluster(option, "--cluster")?, device: None, stack: None })
}

/// Reads the stack of an option.
pub fn read_stack_option(option: &str) -> Result<StackProfile, Error> {
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
