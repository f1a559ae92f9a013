//! The built-in profiles, found by name, and profiles read from a user's file.

use include_dir::{Dir, include_dir};
use ir::error::Problem;
use ir::text::read_ron;
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::cluster::{ClusterProfile, Host, Nics, Reliability};
use crate::device::DeviceProfile;
use crate::stack::StackProfile;

static DEVICES: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/devices");
static CLUSTERS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/clusters");
static STACKS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/stacks");

/// How many near names an error lists.
const SUGGESTIONS: usize = 3;
/// Most bytes that a profile may give to the gradient or the optimizer state of one parameter.
const STATE_LIMIT: f64 = 64.0;

/// A profile that cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Error {
    /// The file is not a profile.
    #[error(transparent)]
    Text(#[from] ir::error::Error),
    /// The profile's numbers make no sense.
    #[error("{}", .0.iter().map(Problem::to_string).collect::<Vec<_>>().join("\n"))]
    Invalid(Vec<Problem>),
    /// No built-in profile has this name.
    #[error("{0}")]
    Unknown(Problem),
}

impl Error {
    /// All problems, at least one.
    pub fn problems(&self) -> &[Problem] {
        match self {
            Error::Text(error) => error.problems(),
            Error::Invalid(problems) => problems,
            Error::Unknown(problem) => std::slice::from_ref(problem),
        }
    }
}

/// All built-in devices, by name.
///
/// # Errors
/// Never for the files of this repository; a test reads them all.
pub fn builtin_devices() -> Result<Vec<DeviceProfile>, Error> {
    read_all(&DEVICES)
}

/// All built-in clusters, by name.
///
/// # Errors
/// Never for the files of this repository; a test reads them all.
pub fn builtin_clusters() -> Result<Vec<ClusterProfile>, Error> {
    read_all(&CLUSTERS)
}

/// All built-in stacks, by name.
///
/// # Errors
/// Never for the files of this repository; a test reads them all.
pub fn builtin_stacks() -> Result<Vec<StackProfile>, Error> {
    read_all(&STACKS)
}

/// A built-in device.
///
/// # Errors
/// `Error::Unknown` with the nearest names.
pub fn find_device(name: &str, location: &str) -> Result<DeviceProfile, Error> {
    read_ron_file(&DEVICES, "device", name, location)
}

/// A built-in cluster.
///
/// # Errors
/// `Error::Unknown` with the nearest names.
pub fn find_cluster(name: &str, location: &str) -> Result<ClusterProfile, Error> {
    read_ron_file(&CLUSTERS, "cluster", name, location)
}

/// A built-in stack.
///
/// # Errors
/// `Error::Unknown` with the nearest names.
pub fn find_stack(name: &str, location: &str) -> Result<StackProfile, Error> {
    read_ron_file(&STACKS, "stack", name, location)
}

/// A cluster profile from the text of a user's file.
///
/// # Errors
/// `Error::Text` where it is malformed, `Error::Invalid` with every number that makes no sense.
pub fn read_cluster(text: &str, origin: &str) -> Result<ClusterProfile, Error> {
    let cluster: ClusterProfile = read_ron(text, origin)?;
    refuse(check_cluster(&cluster, origin))?;
    Ok(cluster)
}

/// A stack profile from the text of a user's file.
///
/// # Errors
/// `Error::Text` where it is malformed, `Error::Invalid` with every number that makes no sense.
pub fn read_stack(text: &str, origin: &str) -> Result<StackProfile, Error> {
    let stack: StackProfile = read_ron(text, origin)?;
    refuse(check_stack(&stack, origin))?;
    Ok(stack)
}

/// Every number of a cluster that makes no sense.
pub(crate) fn check_cluster(cluster: &ClusterProfile, origin: &str) -> Vec<Problem> {
    let nics = match &cluster.inter.nics {
        Nics::PerGpu(count) | Nics::PerNode(count) => count.value,
    };
    let positive = [
        ("node_gpus", cluster.node_gpus as f64),
        ("fast_domain_gpus", cluster.fast_domain_gpus.unwrap_or(1) as f64),
        ("intra.bandwidth_per_gpu_per_direction", cluster.intra.bandwidth_per_gpu_per_direction.value.0),
        ("intra.efficiency", cluster.intra.efficiency.value),
        ("inter.nics", nics),
        ("inter.bandwidth_per_nic_per_direction", cluster.inter.bandwidth_per_nic_per_direction.value.0),
        ("inter.efficiency", cluster.inter.efficiency.value),
        ("inter.nics_per_group", cluster.inter.nics_per_group.as_ref().map_or(1.0, |count| count.value)),
    ];
    let mut problems = check_positive(origin, &positive);
    if let Some(price) = &cluster.price_per_gpu_hour {
        problems.extend(check_positive(origin, &[("price_per_gpu_hour", price.value.0)]));
    }
    if let Some(reliability) = &cluster.reliability {
        let Reliability { mean_time_between_failures_per_gpu, restart: _, checkpoint_write_per_node } = reliability;
        let positive = [
            ("reliability.mean_time_between_failures_per_gpu", mean_time_between_failures_per_gpu.value.0),
            ("reliability.checkpoint_write_per_node", checkpoint_write_per_node.value.0),
        ];
        problems.extend(check_positive(origin, &positive));
    }
    problems.extend(cluster.host.iter().flat_map(|host| check_host(host, origin)));
    problems
}

fn check_host(host: &Host, origin: &str) -> Vec<Problem> {
    let positive = [
        ("host.memory", host.memory.value.0 as f64),
        ("host.memory_bandwidth", host.memory_bandwidth.value.0),
        ("host.memory_efficiency", host.memory_efficiency.value),
        ("host.link_per_gpu_per_direction", host.link_per_gpu_per_direction.value.0),
        ("host.link_efficiency", host.link_efficiency.value),
    ];
    let shares = [
        ("host.reserved", host.reserved.value),
        ("host.memory_efficiency", host.memory_efficiency.value),
        ("host.link_efficiency", host.link_efficiency.value),
    ];
    let mut problems = check_positive(origin, &positive);
    problems.extend(shares.iter().filter_map(|(field, share)| check_at_most(origin, field, *share, 1.0)));
    problems
}

/// Every number of a stack that makes no sense.
pub(crate) fn check_stack(stack: &StackProfile, origin: &str) -> Vec<Problem> {
    let memory = &stack.memory;
    let shares = [
        ("overlap.gradient_reduction", stack.overlap.gradient_reduction.value),
        ("overlap.parameter_gather", stack.overlap.parameter_gather.value),
        ("memory.allocator_slack", memory.allocator_slack.value),
        ("memory.safety_margin", memory.safety_margin.value),
        ("relative_error_90", stack.relative_error_90.value),
    ];
    let waiting = stack.overlap.waiting.iter().flat_map(|waiting| {
        [
            ("overlap.waiting.blocking", waiting.blocking.value.0),
            ("overlap.waiting.started", waiting.started.value.0),
            ("overlap.waiting.further", waiting.further.value.0),
        ]
    });
    let copies: Vec<(&str, f64)> =
        stack.overlap.copies.iter().map(|copy| ("overlap.copies.rate", copy.rate.value.0)).collect();
    let bytes = [
        ("memory.gradient_bytes.bf16", memory.gradient_bytes.bf16.value),
        ("memory.gradient_bytes.fp16", memory.gradient_bytes.fp16.value),
        ("memory.gradient_bytes.fp32", memory.gradient_bytes.fp32.value),
        ("memory.optimizer_bytes.bf16", memory.optimizer_bytes.bf16.value),
        ("memory.optimizer_bytes.fp16", memory.optimizer_bytes.fp16.value),
        ("memory.optimizer_bytes.fp32", memory.optimizer_bytes.fp32.value),
    ];
    let offers = [
        ("offers.zero_stages", stack.offers.zero_stages.is_empty()),
        ("offers.recompute", stack.offers.recompute.is_empty()),
        ("offers.schedules", stack.offers.schedules.is_empty()),
    ];
    let mut problems = check_positive(origin, &[("kernels.matmul_speed", stack.kernels.matmul_speed.value)]);
    if let Some(least) = &memory.least_slack {
        problems.extend(check_at_most(origin, "memory.least_slack", least.value, memory.allocator_slack.value));
    }
    problems.extend(shares.iter().filter_map(|(field, share)| check_at_most(origin, field, *share, 1.0)));
    problems.extend(check_positive(origin, &copies));
    let occupancy = stack.overlap.occupancy.as_ref().map_or(0.0, |time| time.value);
    problems.extend(check_at_most(origin, "overlap.occupancy", occupancy, f64::MAX));
    problems.extend(waiting.filter_map(|(field, seconds)| check_at_most(origin, field, seconds, f64::MAX)));
    problems.extend(bytes.iter().filter_map(|(field, count)| check_at_most(origin, field, *count as f64, STATE_LIMIT)));
    for (field, _) in offers.iter().filter(|(_, empty)| *empty) {
        problems.push(at_field(format!("{field} is empty"), origin, field, "list at least one choice"));
    }
    problems
}

pub(crate) fn check_positive(origin: &str, fields: &[(&str, f64)]) -> Vec<Problem> {
    let wrong = fields.iter().filter(|(_, value)| !(value.is_finite() && *value > 0.0));
    let problem = |(field, value): &(&str, f64)| {
        at_field(format!("{field} is {value}"), origin, field, "give a positive, finite number")
    };
    wrong.map(problem).collect()
}

pub(crate) fn check_at_most(origin: &str, field: &str, value: f64, most: f64) -> Option<Problem> {
    let wrong = !(0.0..=most).contains(&value);
    wrong.then(|| at_field(format!("{field} is {value}"), origin, field, format!("give a number from 0 to {most}")))
}

pub(crate) fn at_field(what: String, origin: &str, field: &str, help: impl Into<String>) -> Problem {
    Problem::new(what, format!("{origin}, field {field}"), help)
}

pub(crate) fn refuse(problems: Vec<Problem>) -> Result<(), Error> {
    if problems.is_empty() { Ok(()) } else { Err(Error::Invalid(problems)) }
}

fn read_all<T: DeserializeOwned>(folder: &Dir<'_>) -> Result<Vec<T>, Error> {
    names(folder).iter().map(|name| Ok(read_ron(text_of(folder, name).unwrap_or_default(), name)?)).collect()
}

fn read_ron_file<T: DeserializeOwned>(folder: &Dir<'_>, kind: &str, name: &str, location: &str) -> Result<T, Error> {
    match text_of(folder, name) {
        Some(text) => Ok(read_ron(text, name)?),
        None => Err(Error::Unknown(Problem::new(
            format!("there is no {kind} `{name}`"),
            location,
            format!("nearest names: {}", nearest(names(folder), name)),
        ))),
    }
}

fn text_of<'a>(folder: &'a Dir<'_>, name: &str) -> Option<&'a str> {
    folder.get_file(format!("{name}.ron")).and_then(|file| file.contents_utf8())
}

/// Names of a folder's profiles, sorted.
fn names(folder: &Dir<'_>) -> Vec<String> {
    let mut names: Vec<String> =
        folder.files().filter_map(|file| Some(file.path().file_stem()?.to_str()?.to_owned())).collect();
    names.sort();
    names
}

/// The known names that are most like one, nearest first, for an error.
pub fn nearest<N: AsRef<str>>(known: impl IntoIterator<Item = N>, name: &str) -> String {
    let mut known: Vec<N> = known.into_iter().collect();
    known.sort_by_key(|known| strsim::damerau_levenshtein(known.as_ref(), name));
    known.truncate(SUGGESTIONS);
    known.iter().map(AsRef::as_ref).collect::<Vec<&str>>().join(", ")
}
