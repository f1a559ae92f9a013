//! A user's runs on the machine that is calibrated: which of them can be used, and how far predictions are from them.

use std::collections::BTreeMap;

use hardware_profiles::find_cluster;
use hardware_profiles::run_names::{GpuName, run_names};
use ir::error::Problem;

use super::Subject;
use crate::validate::case::{Case, assemble, prepare_on};
use crate::validate::table::Row;
use crate::validate::{Prediction, predict};

/// Bytes of a GB in a device's nominal memory.
const GIGABYTE: f64 = 1e9;
/// By how much a device's memory may differ from what a row says: makers and drivers count it differently.
const MEMORY_TOLERANCE: f64 = 0.15;
/// Log error of a run that cannot be predicted with some constants.
const NO_PREDICTION: f64 = 1.0;

/// A run that can be used.
#[derive(Clone, Debug)]
pub struct OwnRun {
    /// Its row.
    pub row: Row,
    /// Its layouts on the machine.
    pub case: Case,
    /// Repeats of a configuration count together as one run.
    pub weight: f64,
}

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// Seconds of a step.
    Time,
    /// Peak memory.
    Memory(MemoryCount),
}

/// What a logged peak counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryCount {
    /// What the framework's allocator gave out at most.
    Allocator,
    /// What the driver shows.
    Device,
}

impl MemoryCount {
    /// Words for people.
    pub fn name(self) -> &'static str {
        match self {
            MemoryCount::Allocator => "allocator peak",
            MemoryCount::Device => "device use",
        }
    }
}

impl Quantity {
    /// Logarithm of predicted over measured; `None` where nothing was measured.
    pub fn log_error(self, row: &Row, prediction: &Prediction) -> Option<f64> {
        Some((self.predicted(prediction) / self.measured(row)?).ln())
    }

    /// What was measured, in seconds or GiB.
    pub fn measured(self, row: &Row) -> Option<f64> {
        match self {
            Quantity::Time => row.measured.step_seconds,
            Quantity::Memory(_) => row.measured.peak_memory_gib,
        }
    }

    /// What is predicted, in seconds or GiB.
    pub fn predicted(self, prediction: &Prediction) -> f64 {
        match self {
            Quantity::Time => prediction.step.0,
            Quantity::Memory(MemoryCount::Allocator) => prediction.allocator_peak.gib(),
            Quantity::Memory(MemoryCount::Device) => prediction.device_memory.gib(),
        }
    }
}

/// Log errors of runs that all have the quantity.
pub fn log_errors(runs: &[OwnRun], quantity: Quantity) -> Vec<f64> {
    let error = |run: &OwnRun| quantity.log_error(&run.row, &predict(&run.case).ok()?);
    runs.iter().map(|run| error(run).unwrap_or(NO_PREDICTION)).collect()
}

/// Runs that can be used, and the others with the reason.
pub fn usable(rows: Vec<Row>, subject: &Subject) -> (Vec<OwnRun>, Vec<(Row, String)>) {
    let (mut runs, mut others) = (Vec::new(), Vec::new());
    for row in rows {
        match use_run(&row, subject) {
            Ok(case) => runs.push(OwnRun { row, case, weight: 1.0 }),
            Err(reason) => others.push((row, reason)),
        }
    }
    (runs, others)
}

fn use_run(row: &Row, subject: &Subject) -> Result<Case, String> {
    let measured = &row.measured;
    if measured.step_seconds.is_none() && measured.peak_memory_gib.is_none() {
        return Err("neither measured_step_s nor measured_peak_mem_gib says anything".to_owned());
    }
    let Subject { cluster, device, stack } = subject.clone();
    let case = prepare_on(&row.run, assemble(&row.run, cluster, device, stack)?)?;
    predict(&case)?;
    Ok(case)
}

/// Runs with a quantity, weighted so that repeats of a configuration count as one.
pub fn runs_with(runs: &[OwnRun], quantity: Quantity) -> Vec<OwnRun> {
    let mut with: Vec<OwnRun> = runs.iter().filter(|run| quantity.measured(&run.row).is_some()).cloned().collect();
    let mut repeats: BTreeMap<String, f64> = BTreeMap::new();
    with.iter().for_each(|run| *repeats.entry(run.row.run.configuration()).or_default() += 1.0);
    with.iter_mut().for_each(|run| run.weight = 1.0 / repeats[&run.row.run.configuration()]);
    with
}

/// Configurations of runs, in order and each once.
pub fn configurations(runs: &[OwnRun]) -> Vec<String> {
    let mut all: Vec<String> = runs.iter().map(|run| run.row.run.configuration()).collect();
    all.sort();
    all.dedup();
    all
}

/// Runs that say that they took place on another device than the machine's.
///
/// Names that nobody knows, and blank ones, mean the machine's own.
pub fn of_other_devices(rows: &[Row], subject: &Subject, origin: &str) -> Vec<Problem> {
    let other = |row: &&Row| other_device(row, subject);
    let problem = |row: &Row| {
        let memory = row.run.gpu_mem_gb.map_or(String::new(), |gb| format!(" with {gb} GB"));
        let cluster = &subject.cluster;
        let what = format!("it ran on {}{memory}, cluster {} has {}", row.run.gpu, cluster.name, cluster.device);
        let help = "name the cluster on which it ran, leave it out, or leave its gpu and gpu_mem_gb blank";
        Problem::new(what, format!("{origin}, {}", row.id), help)
    };
    rows.iter().filter(other).map(problem).collect()
}

fn other_device(row: &Row, subject: &Subject) -> bool {
    let memory = subject.device.memory.value.0 as f64;
    let stated = row.run.gpu_mem_gb.map_or(memory, |gb| gb * GIGABYTE);
    if (stated / memory - 1.0).abs() > MEMORY_TOLERANCE {
        return true;
    }
    let device = |name: &str| find_cluster(name, "run_names.ron").map_or(String::new(), |cluster| cluster.device);
    let gpus = &run_names().gpus;
    let is_meant = |gpu: &GpuName| gpu.all_clusters().any(|name| device(name) == subject.device.name);
    let Some(named) = gpus.iter().find(|gpu| gpu.name == row.run.gpu) else { return false };
    gpus.iter().any(is_meant) && !is_meant(named)
}
