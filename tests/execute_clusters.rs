//! The real `execute-plan` below launchers: torchrun's variables on two hosts, `mpirun` and `srun`. Eight ranks
//! give the losses of the run that starts its ranks by itself.

#[path = "support/slurm.rs"]
mod cluster;
#[path = "support/namespaces.rs"]
mod namespaces;
#[path = "support/programs.rs"]
mod programs;
mod support;

use std::path::Path;
use std::process::{Command, Output, Stdio};

use cluster::Cluster;
use namespaces::{FIRST_HOST, Namespaces};
use programs::{PROGRAM, command, degrees, plan, succeed, timeless, write};
use support::small::{Family, SEQUENCE, Shape, small_model};
use tempfile::TempDir;

const RANKS: usize = 8;
const RUN: [&str; 6] = ["plan", "--synthetic", "--steps", "3", "--log", "log"];

/// A folder with a plan for eight ranks and the log of a run that started its ranks itself.
fn folder() -> TempDir {
    let folder = TempDir::new().expect("a scratch folder");
    let shape = Shape { family: Family::Gpt2, tied: true, heads: 4, key_value_heads: 4, layers: 2, vocabulary: 19 };
    write(folder.path(), "plan", &plan(&small_model(shape), SEQUENCE as u64, 8, degrees(2, 2, 2)));
    succeed(folder.path(), "plan --synthetic --steps 3 --log local");
    folder
}

/// The run ended well and logged what local ranks log.
fn check(name: &str, folder: &Path, outputs: &[Output]) {
    for output in outputs {
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let log = timeless(folder, "log");
    assert!(log.len() == 3 && log == timeless(folder, "local"), "{name}: {log:?}");
}

#[test]
fn two_hosts_with_torchruns_variables() {
    let namespaces = match Namespaces::new() {
        Ok(namespaces) => namespaces,
        Err(reason) => return println!("skipped: no network namespaces can be made: {reason}"),
    };
    let folder = folder();
    let ranks = (0..RANKS).map(|rank| {
        let (node, local) = (rank * 2 / RANKS, rank % (RANKS / 2));
        let mut command = Command::new("ip");
        command.current_dir(folder.path()).args(["netns", "exec", &namespaces.names[node], PROGRAM]).args(RUN);
        for (name, value) in [
            ("RANK", rank),
            ("WORLD_SIZE", RANKS),
            ("LOCAL_RANK", local),
            ("LOCAL_WORLD_SIZE", RANKS / 2),
            ("GROUP_RANK", node),
            ("RAYON_NUM_THREADS", 1),
        ] {
            command.env(name, value.to_string());
        }
        command.env("MASTER_ADDR", FIRST_HOST).env("MASTER_PORT", "29511");
        command.stderr(Stdio::piped()).spawn().expect("the program starts")
    });
    let ranks: Vec<_> = ranks.collect();
    let ends = ranks.into_iter().map(|rank| rank.wait_with_output().expect("a process of this test"));
    check("two hosts", folder.path(), &ends.collect::<Vec<_>>());
}

#[test]
fn ranks_under_mpirun() {
    // By shared memory, and through MPI's own messages where they are built in.
    let communicators = if cfg!(feature = "mpi") { ["local", "mpi"].as_slice() } else { &["local"] };
    for communicator in communicators {
        let folder = folder();
        let mut command = Command::new("mpirun");
        command.current_dir(folder.path()).args(["--allow-run-as-root", "--oversubscribe", "-n", "8", PROGRAM]);
        command.args(RUN).args(["--communicator", communicator]).env("RAYON_NUM_THREADS", "1");
        match command.output() {
            Ok(output) => check(&format!("mpirun, {communicator}"), folder.path(), &[output]),
            Err(reason) => return println!("skipped: mpirun cannot be started: {reason}"),
        }
    }
}

#[test]
fn eight_ranks_under_srun() {
    let scratch = TempDir::new().expect("a scratch folder");
    let cluster = match Cluster::start(scratch.path()) {
        Ok(cluster) => cluster,
        Err(reason) => return println!("skipped: SLURM cannot be started: {reason}"),
    };
    let folder = folder();
    let mut command = cluster.command("srun");
    command.current_dir(folder.path()).args(["--overcommit", "-n", "8", PROGRAM]).args(RUN);
    let output = command.env("RAYON_NUM_THREADS", "1").output().expect("srun can be started");
    check(&format!("srun{}", cluster.logs()), folder.path(), &[output]);
}

#[test]
fn every_rank_of_a_launcher_names_both_world_sizes() {
    let folder = folder();
    for rank in 0..2 {
        let mut command = command(folder.path(), "plan --synthetic");
        command.env("OMPI_COMM_WORLD_RANK", rank.to_string()).env("OMPI_COMM_WORLD_SIZE", "2");
        let output = command.env("OMPI_COMM_WORLD_LOCAL_SIZE", "2").output().expect("the program starts");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains("the launcher started 2 ranks, the plan is for 8"), "{text}");
    }
}
