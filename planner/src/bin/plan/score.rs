//! `plan score`: predict a launch configuration of another program, and say what the best plan would gain.

use std::path::Path;

use cost_models::machine::Machine;
use hardware_profiles::device::MatmulFormat;
use hardware_profiles::files::{INPUT_LIMIT, read_text};
use hardware_profiles::{ClusterFile, find_device};
use ir::error::Problem;
use ir::graph::build_graph;
use planner::error::Error;
use planner::foreign::deepspeed::read_deepspeed;
use planner::foreign::megatron::read_megatron;
use planner::foreign::torchtitan::read_torchtitan;
use planner::foreign::{Launch, Launcher};
use planner::report::score as report;
use planner::request::{FixedChoices, Request, check_request};
use planner::score::{machine_of, not_offered, place_optimizer, score};

use crate::Printed;
use crate::arguments::{DEFAULT_CLUSTER, RecomputeOption, ScoreOptions};
use crate::search::{read_cluster_option, read_model_file, read_stack_option};

/// What a text of flags starts with that is the name of a file instead.
const FILE_MARK: char = '@';

/// Scores a configuration.
pub fn run(options: &ScoreOptions) -> Printed {
    let (mut launch, origin) = read_launch(options)?;
    let machine = read_machine(options, &launch)?;
    place_optimizer(&mut launch, &machine);
    let request = Request {
        model: launch.model.clone(),
        origin: origin.clone(),
        workload: launch.workload,
        gpus: options.gpus,
        fixed: FixedChoices::default(),
        top: 1,
        executable_only: false,
        machine: machine_of(&machine, &launch, &origin)?,
    };
    check_request(&request)?;
    let missing = not_offered(&request, &launch);
    match &options.stack {
        Some(stack) if !missing.is_empty() => return Err(refused(&missing, stack, launch.stack)),
        _ => launch
            .settings
            .warnings
            .extend(missing.into_iter().map(|what| format!("{what}; it is predicted all the same"))),
    }
    let scored = score(&request, &build_graph(&request.model), &launch, &machine)?;
    let defaults = defaults(options, &launch);
    Ok(match options.json {
        true => format!("{:#}\n", report::value(&request, &launch, &scored, &defaults)),
        false => report::text(&request, &launch, &scored, &defaults),
    })
}

fn read_launch(options: &ScoreOptions) -> Result<(Launch, String), Error> {
    let model = options.model.as_deref().map(|path| read_model_file(path, &path.display().to_string())).transpose()?;
    let launcher = Launcher {
        gpus: options.gpus,
        model,
        global_batch: options.global_batch,
        sequence_length: options.sequence_length,
        recompute: options.recompute.map(RecomputeOption::choice),
    };
    if let Some(flags) = &options.from_megatron {
        let (text, origin) = match flags.trim_start().strip_prefix(FILE_MARK) {
            Some(path) => (read_text(Path::new(path.trim_end()), INPUT_LIMIT)?, path.trim_end().to_owned()),
            None => (flags.clone(), "--from-megatron".to_owned()),
        };
        return Ok((read_megatron(&text, &origin, &launcher)?, origin));
    }
    let read = |path: &Path| Ok::<_, Error>((read_text(path, INPUT_LIMIT)?, path.display().to_string()));
    if let Some(path) = &options.from_deepspeed {
        let (text, origin) = read(path)?;
        return Ok((read_deepspeed(&text, &origin, &launcher)?, origin));
    }
    let path = options.from_torchtitan.as_deref().expect("the argument parser asks for one of the three");
    let (text, origin) = read(path)?;
    Ok((read_torchtitan(&text, &origin, &launcher)?, origin))
}

fn read_machine(options: &ScoreOptions, launch: &Launch) -> Result<Machine, Error> {
    let ClusterFile { cluster, device, stack } = read_cluster_option(&options.cluster)?;
    let device = match device {
        Some(device) => device,
        None => find_device(&cluster.device, &format!("{}, field device", options.cluster))?,
    };
    let stack = match (&options.stack, stack) {
        (Some(option), _) => read_stack_option(option)?,
        (None, Some(stack)) => stack,
        (None, None) => read_stack_option(launch.stack)?,
    };
    Ok(Machine { device, cluster, stack, node_gpus: options.node_gpus, matmul_format: MatmulFormat::Model })
}

fn refused(missing: &[String], stack: &str, fitting: &str) -> Error {
    let help = format!("leave out --stack, which is {fitting} for this configuration, or name another");
    let place = format!("--stack {stack}");
    Error::BadInput(missing.iter().map(|what| Problem::new(what.clone(), place.clone(), help.clone())).collect())
}

/// Names of what a default decided.
fn defaults(options: &ScoreOptions, launch: &Launch) -> Vec<&'static str> {
    let own = [(options.cluster == DEFAULT_CLUSTER, "cluster"), (options.stack.is_none(), "stack")];
    own.into_iter().filter(|(default, _)| *default).map(|(_, name)| name).chain(launch.defaults.clone()).collect()
}
