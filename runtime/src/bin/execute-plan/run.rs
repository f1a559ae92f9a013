//! `execute-plan PLAN`: run a plan, as one rank or by starting local ranks.

use std::process::ExitCode;
use std::time::Duration;

use ir::error::Problem;
use ir::mesh::Rank;
use ir::plan::Plan;
use runtime::communicator::Transport;
use runtime::launch::local::{Ended, reserve_port, start_local_ranks};
use runtime::launch::{Address, Launch, read_launch};
use runtime::run::{Data, Request, check_export, prepare_run, run_rank};
use runtime::tensor::Memory;
use runtime::{Error, load};

use crate::arguments::{Communicator, RunOptions};
use crate::device::Devices;

/// Most ranks that are started on this host.
const MOST_LOCAL_RANKS: u64 = 64;

/// Runs a plan.
pub fn run(options: &RunOptions) -> Result<ExitCode, Error> {
    let path = options.plan.as_deref().expect("the parser requires a plan where there is no subcommand");
    let plan = load(path)?;
    let devices = Devices::find(options.device)?;
    let mut request = request(options)?;
    let prepared = prepare_run(&plan, &request)?;
    let launch = read_launch(|name| std::env::var(name).ok()).map_err(Error::BadInput)?;
    let world_size = plan.strategy.world_size();
    match launch {
        Some(launch) => {
            check_world(&launch, &plan)?;
            request.memory = devices.memory_of(&launch)?;
            print_report(&launch, &run_rank(&plan, &request, &prepared, &launch)?);
        }
        None if world_size == 1 => {
            let reserved = reserve_port().map_err(|error| cannot_start(&error))?;
            let address = Address { host: "127.0.0.1".to_owned(), port: reserved.port };
            let launch = Launch { rank: Rank(0), world_size: 1, local_rank: 0, local_size: 1, node: Some(0), address };
            request.memory = devices.memory_of(&launch)?;
            print_report(&launch, &run_rank(&plan, &request, &prepared, &launch)?);
        }
        None => return start_ranks(world_size),
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints what the run reports, on rank 0.
fn print_report(launch: &Launch, report: &str) {
    if launch.rank.0 == 0 {
        print!("{report}");
    }
}

fn request(options: &RunOptions) -> Result<Request, Error> {
    let refuse = |what: &str, place: &str, help: &str| Err(Problem::new(what, place, help).into());
    let transport = transport(options.communicator)?;
    let data = match (&options.data, options.synthetic) {
        (Some(prefix), _) => Data::Corpus(prefix.clone()),
        (None, true) => Data::Synthetic,
        (None, false) => {
            let help = "give --data PREFIX, made by `execute-plan prepare`, or --synthetic";
            return refuse("there is nothing to train on", "the command line", help);
        }
    };
    if let Some(directory) = &options.export {
        check_export(directory)?;
    }
    Ok(Request {
        train: options.train.clone(),
        data,
        steps: options.steps,
        seed: options.seed,
        weights: options.weights.clone(),
        export: options.export.clone(),
        log: options.log.clone(),
        force: options.force,
        profile: options.profile.clone(),
        evaluate: options.evaluate,
        timeout: Duration::from_secs(options.timeout),
        transport,
        memory: Memory::default(),
    })
}

fn transport(communicator: Communicator) -> Result<Transport, Error> {
    let refuse = |what: &str| {
        let help = "leave --communicator out: launchers such as mpirun and srun work without it";
        Err(Problem::new(what, "--communicator", help).into())
    };
    match communicator {
        Communicator::Local => Ok(Transport::Automatic),
        #[cfg(feature = "mpi")]
        Communicator::Mpi => Ok(Transport::Mpi),
        #[cfg(not(feature = "mpi"))]
        Communicator::Mpi => refuse("this program was built without its feature `mpi`"),
        Communicator::Nccl => refuse(
            "ranks exchange through the memory of their hosts, also those on devices: NCCL connects no ranks of a plan",
        ),
    }
}

fn check_world(launch: &Launch, plan: &Plan) -> Result<(), Error> {
    let expected = plan.strategy.world_size();
    match launch.world_size == expected {
        true => Ok(()),
        false => Err(Problem::new(
            format!("the launcher started {} ranks, the plan is for {expected}", launch.world_size),
            "environment",
            format!("start {expected} ranks, or plan with `--gpus {}`", launch.world_size),
        )
        .into()),
    }
}

/// Starts this program once for each rank and gives the most telling exit code; 128 and the signal's number for a
/// run that SIGINT or SIGTERM stopped, as shells do.
fn start_ranks(world_size: u64) -> Result<ExitCode, Error> {
    if world_size > MOST_LOCAL_RANKS {
        return Err(Problem::new(
            format!("the plan is for {world_size} ranks, this host starts at most {MOST_LOCAL_RANKS} by itself"),
            "the command line",
            "start one process a rank with srun, mpirun or torchrun",
        )
        .into());
    }
    let program = std::env::current_exe().map_err(|error| cannot_start(&error))?;
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let ended = start_local_ranks(&program, &arguments, world_size).map_err(|error| cannot_start(&error))?;
    match ended {
        Ended::With(code) => Ok(ExitCode::from(u8::try_from(code).unwrap_or(1))),
        Ended::Stopped(signal) => {
            let what = format!("{} stopped the run before its end", signal.name());
            let help = "all ranks have ended and nothing was saved: start the run again";
            eprintln!("{}", Problem::new(what, "this process", help));
            Ok(ExitCode::from(128 + signal.number()))
        }
    }
}

fn cannot_start(error: &std::io::Error) -> Error {
    Problem::new(format!("local ranks cannot be started: {error}"), "this host", "see the system's message").into()
}
