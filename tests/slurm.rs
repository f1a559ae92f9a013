//! Ranks that SLURM starts.

#[path = "support/slurm.rs"]
mod cluster;

use cluster::Cluster;
use ir::mesh::Rank;
use runtime::communicator::{Options, Reduction, World};
use runtime::launch::read_launch;
use tempfile::TempDir;

const RANKS: u64 = 4;

/// A rank, when `srun` starts this test; nothing in the test run itself.
#[test]
#[allow(clippy::print_stdout)]
fn rank() {
    if std::env::var_os("RANK_UNDER_SLURM").is_none() {
        return;
    }
    let launch = read_launch(|name| std::env::var(name).ok()).expect("SLURM's variables agree").expect("a rank");
    assert_eq!((launch.local_rank, launch.local_size, launch.node), (launch.rank.0, RANKS, Some(0)));
    let world = World::connect(&launch, &[], Options::default()).expect("all ranks come");
    let mut data = [launch.rank.0 as f32; 100];
    let all = world.group(&(0..RANKS).map(Rank).collect::<Vec<_>>());
    all.all_reduce(Reduction::Sum, &mut data).expect("all ranks come");
    assert_eq!(data, [6.0; 100]);
    world.finish().expect("all ranks finish");
    println!("done");
}

#[test]
fn ranks_under_srun() {
    let folder = TempDir::new().expect("a scratch folder");
    let cluster = match Cluster::start(folder.path()) {
        Ok(cluster) => cluster,
        Err(reason) => return println!("skipped: SLURM cannot be started: {reason}"),
    };
    let mut command = cluster.command("srun");
    command.args(["--overcommit", "-n", &RANKS.to_string()]).arg(std::env::current_exe().expect("a program"));
    let output = command.args(["--exact", "rank", "--nocapture"]).env("RANK_UNDER_SLURM", "1").output();
    let output = output.expect("srun can be started");
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{error}{}", cluster.logs());
    assert_eq!(out.matches("done").count(), RANKS as usize, "{out}{error}");
}
