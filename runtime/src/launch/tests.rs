//! Launchers' variables as tables.

use super::*;

fn launch(variables: &str) -> Result<Option<Launch>, Vec<Problem>> {
    let table: Vec<(&str, &str)> = variables.split_whitespace().filter_map(|pair| pair.split_once('=')).collect();
    read_launch(|name| table.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
}

fn check(variables: &str, expected: &str) {
    let found = match launch(variables) {
        Ok(None) => "none".to_owned(),
        Ok(Some(l)) => format!(
            "{}/{} {}/{} {:?} {}:{}",
            l.rank.0, l.world_size, l.local_rank, l.local_size, l.node, l.address.host, l.address.port
        ),
        Err(problems) => problems.iter().map(|problem| problem.what.clone()).collect::<Vec<_>>().join("; "),
    };
    assert_eq!(found, expected, "{variables}");
}

#[test]
fn launchers() {
    let torchrun = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 MASTER_ADDR=a MASTER_PORT=7";
    check("", "none");
    check(torchrun, "5/8 1/4 Some(1) a:7");
    check(&format!("{torchrun} SLURM_PROCID=1 SLURM_NTASKS=2"), "5/8 1/4 Some(1) a:7");
    check("RANK=0 WORLD_SIZE=1", "0/1 0/1 None 127.0.0.1:29500");
    check("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a", "0/2 0/1 None a:29500");
    check(&format!("{torchrun} TORCHELASTIC_USE_AGENT_STORE=True"), "5/8 1/4 Some(1) a:8");
    let slurm =
        "SLURM_PROCID=3 SLURM_NTASKS=5 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_JOB_NODELIST=n[07-09,12] SLURM_JOB_ID=2";
    check(slurm, "3/5 1/1 Some(1) n07:20032");
    check(&format!("{slurm} SLURM_STEP_TASKS_PER_NODE=2(x2),1"), "3/5 1/2 Some(1) n07:20032");
    check(&format!("{slurm} SLURM_NTASKS_PER_NODE=2 MASTER_ADDR=b MASTER_PORT=9"), "3/5 1/2 Some(1) b:9");
    check(&format!("{slurm} PMI_RANK=3 PMI_SIZE=5 PMIX_RANK=3"), "3/5 1/1 Some(1) n07:20032");
    check("SLURM_NTASKS=4", "none");
    let open_mpi =
        "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2";
    check(&format!("{open_mpi} PMIX_RANK=1"), "1/2 1/2 None 127.0.0.1:29500");
    check("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=0 MASTER_ADDR=c", "1/2 0/1 None c:29500");
}

#[test]
fn contradictions() {
    check("RANK=1", "RANK is set but WORLD_SIZE is not");
    check("WORLD_SIZE=2", "WORLD_SIZE is set but RANK is not");
    check("SLURM_PROCID=0", "SLURM_PROCID is set but SLURM_NTASKS is not");
    check("PMIX_RANK=0", "PMIX_RANK is set but PMI_SIZE is not");
    check("RANK=x WORLD_SIZE=-2", "\"x\" is no whole number; \"-2\" is no whole number");
    check("RANK=2 WORLD_SIZE=2 MASTER_ADDR=a", "rank 2 is not below the number of ranks, 2");
    check(
        "RANK=0 WORLD_SIZE=2 LOCAL_RANK=3 LOCAL_WORLD_SIZE=3 MASTER_ADDR=a",
        "local rank 3 is not below the number of ranks, 3; the last local rank 2 is not below the number of ranks, 2",
    );
    check("RANK=0 WORLD_SIZE=2", "torchrun does not say where rank 0 is");
    check("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=70000", "70000 is no port");
    check(
        "SLURM_PROCID=1 SLURM_NTASKS=2 OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 MASTER_ADDR=a",
        "SLURM says rank 1 of 2, but Open MPI says rank 5 of 8",
    );
}

#[test]
fn first_hosts_of_lists() {
    let rows = [("n1", "n1"), ("n1,n2", "n1"), ("n[3,5]", "n3"), ("r[1-2]x[07-08]", "r1x07"), ("a[9]-ib,b", "a9-ib")];
    for (list, expected) in rows {
        let lookup = |name: &str| (name == "SLURM_STEP_NODELIST").then(|| list.to_owned());
        assert_eq!(slurm::first_host(&lookup).as_deref(), Some(expected), "{list}");
    }
}
