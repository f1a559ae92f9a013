//! Which rank this process is: read from the variables of whatever launched it.

use std::hash::{DefaultHasher, Hash, Hasher};

use ir::error::Problem;
use ir::mesh::Rank;

pub mod local;
mod slurm;

/// Port of the rendezvous where the launcher names none; torchrun's default.
const DEFAULT_PORT: u16 = 29500;

/// The place of this process among all ranks, and where they meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// This process's rank.
    pub rank: Rank,
    /// Ranks of the run.
    pub world_size: u64,
    /// Number among the ranks of this host.
    pub local_rank: u64,
    /// Ranks of this host.
    pub local_size: u64,
    /// The launcher's number of this host, where it gives one.
    pub node: Option<u64>,
    /// Where rank 0 listens for the others.
    pub address: Address,
}

/// Host and port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Name or address of a host.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

/// Names of a launcher's variables; empty where it has none.
struct Variables {
    launcher: &'static str,
    rank: &'static [&'static str],
    world_size: &'static str,
    local_rank: &'static [&'static str],
    local_size: &'static str,
    node: &'static str,
}

const TORCHRUN: Variables = Variables {
    launcher: "torchrun",
    rank: &["RANK"],
    world_size: "WORLD_SIZE",
    local_rank: &["LOCAL_RANK"],
    local_size: "LOCAL_WORLD_SIZE",
    node: "GROUP_RANK",
};
const SLURM: Variables = Variables {
    launcher: "SLURM",
    rank: &["SLURM_PROCID"],
    world_size: "SLURM_NTASKS",
    local_rank: &["SLURM_LOCALID"],
    local_size: "SLURM_NTASKS_PER_NODE",
    node: "SLURM_NODEID",
};
const OPEN_MPI: Variables = Variables {
    launcher: "Open MPI",
    rank: &["OMPI_COMM_WORLD_RANK"],
    world_size: "OMPI_COMM_WORLD_SIZE",
    local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
    local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    node: "",
};
const PMI: Variables = Variables {
    launcher: "PMI",
    rank: &["PMI_RANK", "PMIX_RANK"],
    world_size: "PMI_SIZE",
    local_rank: &["MPI_LOCALRANKID", "PALS_LOCAL_RANKID"],
    local_size: "",
    node: "",
};

/// What a launcher's variables say.
struct Claim {
    launcher: &'static str,
    rank: u64,
    world_size: u64,
    local_rank: Option<u64>,
    local_size: Option<u64>,
    node: Option<u64>,
}

/// Reads the launcher's variables through `lookup` (`|name| std::env::var(name).ok()`); none where no
/// launcher started this process.
///
/// torchrun's variables are trusted alone. SLURM's, Open MPI's and PMI's are trusted in this order, and must
/// agree where several are set: below `srun`, a daemon's SLURM rank is not the rank of the processes it starts.
///
/// # Errors
/// All problems of variables that are incomplete, no numbers, or contradict one another.
pub fn read_launch(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Launch>, Vec<Problem>> {
    let lookup = |name: &str| lookup(name).filter(|value| !name.is_empty() && !value.trim().is_empty());
    let claim = match read_claim(&TORCHRUN, &lookup)? {
        Some(claim) => claim,
        None => {
            let mut claims = Vec::new();
            for variables in [&SLURM, &OPEN_MPI, &PMI] {
                claims.extend(read_claim(variables, &lookup)?);
            }
            check_agreement(&claims)?;
            match claims.into_iter().next() {
                Some(claim) => claim,
                None => return Ok(None),
            }
        }
    };
    complete(claim, &lookup).map(Some)
}

/// Reads one launcher's variables; none if it set none that make a rank.
fn read_claim(variables: &Variables, lookup: &dyn Fn(&str) -> Option<String>) -> Result<Option<Claim>, Vec<Problem>> {
    let mut problems = Vec::new();
    let mut number = |name: &str| {
        read_number(name, lookup).unwrap_or_else(|problem| {
            problems.push(problem);
            None
        })
    };
    let rank = variables.rank.iter().find_map(|name| number(name));
    let world_size = number(variables.world_size);
    let local_rank = variables.local_rank.iter().find_map(|name| number(name));
    let (local_size, node) = (number(variables.local_size), number(variables.node));
    if !problems.is_empty() {
        return Err(problems);
    }
    let launcher = variables.launcher;
    match (rank, world_size) {
        (Some(rank), Some(world_size)) => Ok(Some(Claim { launcher, rank, world_size, local_rank, local_size, node })),
        (None, None) => Ok(None),
        (None, Some(_)) if launcher != TORCHRUN.launcher => Ok(None),
        // Open MPI sets PMIX_RANK without a size beside variables of its own.
        (Some(_), None) if launcher == PMI.launcher && lookup(OPEN_MPI.rank[0]).or(lookup(SLURM.rank[0])).is_some() => {
            Ok(None)
        }
        _ => Err(vec![incomplete(variables, lookup)]),
    }
}

fn read_number(name: &str, lookup: &dyn Fn(&str) -> Option<String>) -> Result<Option<u64>, Problem> {
    let Some(text) = lookup(name) else { return Ok(None) };
    text.trim().parse().map(Some).map_err(|_| {
        Problem::new(
            format!("{text:?} is no whole number"),
            format!("environment, {name}"),
            "unset it, or let the launcher set it",
        )
    })
}

fn incomplete(variables: &Variables, lookup: &dyn Fn(&str) -> Option<String>) -> Problem {
    let (present, absent) = match variables.rank.iter().find(|name| lookup(name).is_some()) {
        Some(rank) => (*rank, variables.world_size),
        None => (variables.world_size, variables.rank[0]),
    };
    Problem::new(
        format!("{present} is set but {absent} is not"),
        format!("environment, variables of {}", variables.launcher),
        format!("start every rank with the launcher, set {absent} too, or unset {present} to start local ranks"),
    )
}

fn check_agreement(claims: &[Claim]) -> Result<(), Vec<Problem>> {
    let Some((first, others)) = claims.split_first() else { return Ok(()) };
    let differs = |other: &&Claim| (other.rank, other.world_size) != (first.rank, first.world_size);
    let problems = others.iter().filter(differs).map(|other| {
        let says = |claim: &Claim| format!("{} says rank {} of {}", claim.launcher, claim.rank, claim.world_size);
        Problem::new(
            format!("{}, but {}", says(first), says(other)),
            "environment",
            "unset the variables of the one that did not start the ranks, or set RANK, WORLD_SIZE and MASTER_ADDR",
        )
    });
    match problems.collect::<Vec<Problem>>() {
        problems if problems.is_empty() => Ok(()),
        problems => Err(problems),
    }
}

/// Fills in what the launcher did not say, and checks the numbers against one another.
fn complete(claim: Claim, lookup: &dyn Fn(&str) -> Option<String>) -> Result<Launch, Vec<Problem>> {
    let mut problems = Vec::new();
    let listed =
        if claim.launcher == SLURM.launcher { slurm::tasks_of_node(claim.node.unwrap_or(0), lookup) } else { None };
    let local_size = listed.or(claim.local_size);
    let mut check = |index: u64, size: Option<u64>, what: &str| {
        if size.is_some_and(|size| index >= size) {
            let size = size.unwrap_or_default();
            problems.push(Problem::new(
                format!("{what} {index} is not below the number of ranks, {size}"),
                format!("environment, variables of {}", claim.launcher),
                "ranks count from 0; check which launcher set the variables",
            ));
        }
    };
    check(claim.rank, Some(claim.world_size), "rank");
    check(claim.local_rank.unwrap_or(0), local_size, "local rank");
    check(local_size.unwrap_or(1).saturating_sub(1), Some(claim.world_size), "the last local rank");
    let address = read_address(&claim, lookup).map_err(|problem| problems.push(problem));
    match (problems.is_empty(), address) {
        (true, Ok(address)) => Ok(Launch {
            rank: Rank(claim.rank),
            world_size: claim.world_size,
            local_rank: claim.local_rank.unwrap_or(0),
            local_size: local_size.unwrap_or(1),
            node: claim.node,
            address,
        }),
        _ => Err(problems),
    }
}

/// Where rank 0 listens: the launcher's address, SLURM's first host, or this host for a run on one host.
fn read_address(claim: &Claim, lookup: &dyn Fn(&str) -> Option<String>) -> Result<Address, Problem> {
    let is_slurm = claim.launcher == SLURM.launcher;
    let one_host = claim.local_size == Some(claim.world_size) || claim.world_size == 1;
    let listed = if is_slurm { slurm::first_host(lookup) } else { None };
    let host = lookup("MASTER_ADDR").or(listed).or_else(|| one_host.then(|| "127.0.0.1".to_owned()));
    let Some(host) = host else {
        return Err(Problem::new(
            format!("{} does not say where rank 0 is", claim.launcher),
            "environment, MASTER_ADDR",
            "set MASTER_ADDR to the host of rank 0 for all ranks, and MASTER_PORT to a free port there",
        ));
    };
    let port = match read_number("MASTER_PORT", lookup)? {
        Some(port) => u16::try_from(port).map_err(|_| {
            Problem::new(format!("{port} is no port"), "environment, MASTER_PORT", "ports are below 65536")
        })?,
        None if is_slurm => slurm::port_of_job(lookup),
        None => port_of_run(lookup).unwrap_or(DEFAULT_PORT),
    };
    // torchrun's own store listens at MASTER_PORT for as long as the ranks live.
    let store = claim.launcher == TORCHRUN.launcher
        && lookup("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    Ok(Address { host, port: if store { port.checked_add(1).unwrap_or(DEFAULT_PORT) } else { port } })
}

/// A port below the ephemeral range that follows from the name which MPI's launchers give a run, so that runs on
/// one host do not meet.
fn port_of_run(lookup: &dyn Fn(&str) -> Option<String>) -> Option<u16> {
    let name = lookup("PMIX_NAMESPACE").or_else(|| lookup("PMI_JOBID"))?;
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    Some(20_000 + u16::try_from(hasher.finish() % 12_000).expect("below 12000"))
}

#[cfg(test)]
mod tests;
