//! A user's own logged runs decide a few constants of a cluster and its stack: those that the runs can tell.
//!
//! Everything else stays as the profiles have it, and what a run hardly tells stays near there: a constant is pulled to
//! its old value by how far it usually differs between machines, against the noise of a run.

pub mod constants;
pub mod runs;

use cost_models::machine::Machine;
use hardware_profiles::device::MatmulFormat;
use hardware_profiles::stack::ComparedRuns;
use hardware_profiles::{ClusterFile, ClusterProfile, DeviceProfile, Sourced, StackProfile};
use ir::error::Problem;
use ir::provenance::Provenance;

use crate::error::Error;
use crate::fitting::{self, Free};
use crate::interval::format_name;
use crate::request::Request;
use crate::validate::table::Row;
use crate::validate::{Prediction, predict};
use constants::{Constant, MEMORY, TIME, told_by};
use runs::{MemoryCount, OwnRun, Quantity, configurations, log_errors, of_other_devices, runs_with, usable};

/// Most constants that are fitted.
pub const MOST_CONSTANTS: usize = 6;
/// Most folds in which runs are left out: each configuration in turn where there are fewer.
const MOST_FOLDS: usize = 10;
/// The same where it is decided whether anything changes.
const INNER_FOLDS: usize = 5;
/// Runs for which the stack's stated error counts beside the runs that were left out.
const STATED_COUNTS: f64 = 4.0;
/// Half width of a normal distribution's 90 % interval in standard deviations.
const NORMAL_90: f64 = 1.645;

/// What is calibrated.
#[derive(Clone, Debug, PartialEq)]
pub struct Subject {
    /// The cluster.
    pub cluster: ClusterProfile,
    /// Its device.
    pub device: DeviceProfile,
    /// The software.
    pub stack: StackProfile,
}

/// What the runs said.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// Cluster, device and stack with the new constants.
    pub file: ClusterFile,
    /// Constants that were fitted.
    pub constants: Vec<Change>,
    /// Runs that were used.
    pub runs: Vec<Residual>,
    /// Rows that were not, with the reason.
    pub unused: Vec<(String, String)>,
    /// What peaks in memory count, where there are any: the nearer of both.
    pub memory_count: Option<MemoryCount>,
}

/// A constant before and after.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// Profile and field.
    pub name: &'static str,
    /// Value in the profile: a ratio, seconds or bytes.
    pub old: f64,
    /// The same with its unit, for people.
    pub old_shown: String,
    /// Fitted value.
    pub new: f64,
    /// The same with its unit, for people.
    pub new_shown: String,
    /// Runs that decided it.
    pub runs: usize,
}

/// A run's measurements and what is predicted of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Residual {
    /// Name of the run.
    pub id: String,
    /// Step time, if it was measured.
    pub step: Option<Compared>,
    /// Peak memory in GiB, if it was measured.
    pub memory: Option<Compared>,
}

/// A measurement beside its predictions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Compared {
    /// As measured.
    pub measured: f64,
    /// By the old constants.
    pub before: f64,
    /// By the new ones.
    pub after: f64,
    /// By constants for which this run was left out; `None` where no other run is there.
    pub left_out: Option<f64>,
}

impl Compared {
    /// Predicted over measured, less one.
    pub fn error(&self, predicted: f64) -> f64 {
        predicted / self.measured - 1.0
    }
}

/// Fits the constants that the rows tell, at most [`MOST_CONSTANTS`] of them.
///
/// `origin` names the table and `name` the new cluster.
///
/// # Errors
/// `Error::BadInput` with every run of another device, or with the reason of each where none can be used.
pub fn calibrate(rows: Vec<Row>, origin: &str, subject: &Subject, name: &str) -> Result<Calibration, Error> {
    let others = of_other_devices(&rows, subject, origin);
    if !others.is_empty() {
        return Err(Error::BadInput(others));
    }
    let (runs, unused) = usable(rows, subject);
    if runs.is_empty() {
        let help = "see the columns of tests/published/runs.csv; plan validate explains rows of published runs";
        let problem = |(row, reason): (Row, String)| Problem::new(reason, format!("{origin}, {}", row.id), help);
        return Err(Error::BadInput(unused.into_iter().map(problem).collect()));
    }
    let memory_count = memory_count(&runs);
    let mut machine = machine_of(subject);
    let memory =
        memory_count.map(|count| fit_quantity(&mut machine, &runs, Quantity::Memory(count), MOST_CONSTANTS, origin));
    let memory = memory.unwrap_or_else(|| Fitted { constants: Vec::new(), compared: vec![None; runs.len()] });
    let most = MOST_CONSTANTS - memory.constants.len();
    let time = fit_quantity(&mut machine, &runs, Quantity::Time, most, origin);
    state_error(&mut machine.stack, &time.compared, origin);
    widen_compared(&mut machine.stack, &runs);
    let compared = runs.iter().zip(time.compared).zip(memory.compared);
    let residual = |((run, step), memory): ((&OwnRun, _), _)| Residual { id: run.row.id.clone(), step, memory };
    Ok(Calibration {
        runs: compared.map(residual).collect(),
        constants: [time.constants, memory.constants].concat(),
        unused: unused.into_iter().map(|(row, reason)| (row.id, reason)).collect(),
        file: file_of(machine, name),
        memory_count,
    })
}

/// Constants of one quantity, and all runs' measurements of it beside the predictions.
struct Fitted {
    constants: Vec<Change>,
    compared: Vec<Option<Compared>>,
}

/// The count that is nearer to the measured peaks; `None` without peaks.
fn memory_count(runs: &[OwnRun]) -> Option<MemoryCount> {
    let away = |count: MemoryCount| {
        let with = runs_with(runs, Quantity::Memory(count));
        log_errors(&with, Quantity::Memory(count)).iter().map(|error| error.abs()).sum::<f64>()
    };
    let some = runs.iter().any(|run| run.row.measured.peak_memory_gib.is_some());
    let nearer = |a: &MemoryCount, b: &MemoryCount| away(*a).total_cmp(&away(*b));
    some.then_some([MemoryCount::Device, MemoryCount::Allocator])?.into_iter().min_by(nearer)
}

fn machine_of(subject: &Subject) -> Machine {
    let Subject { cluster, device, stack } = subject.clone();
    Machine { node_gpus: cluster.node_gpus, matmul_format: MatmulFormat::Model, device, cluster, stack }
}

/// Fits the constants of a quantity, puts them into the machine with their origin, and compares.
fn fit_quantity(machine: &mut Machine, runs: &[OwnRun], quantity: Quantity, most: usize, origin: &str) -> Fitted {
    let with = runs_with(runs, quantity);
    let chosen = choose(&with, quantity, most);
    let values = fit(&with, &chosen, quantity);
    let mut constants = Vec::with_capacity(chosen.len());
    for (constant, new) in chosen.iter().zip(&values) {
        let Some(number) = (constant.number)(machine) else { continue };
        let (old, old_shown) = (number.value(), number.shown());
        number.set(*new);
        let Some(number) = (constant.number)(machine) else { continue };
        let new_shown = number.shown();
        number.fitted(&format!("least error of {} runs of {origin}; plan calibrate", with.len()));
        constants.push(Change { name: constant.name, old, old_shown, new: *new, new_shown, runs: with.len() });
    }
    let mut after = runs.to_vec();
    put(&mut after, &chosen, &values);
    let left_out = left_out(runs, &with, MOST_FOLDS, |seen| {
        let chosen = choose(seen, quantity, most);
        let values = fit(seen, &chosen, quantity);
        (chosen, values)
    });
    let places = runs.iter().zip(&after).zip(left_out);
    let compared = places.map(|((before, after), left_out)| compare(before, after, left_out, quantity)).collect();
    Fitted { constants, compared }
}

/// Constants that the runs tell, at most one for each configuration; none where they would predict runs that are left
/// out in turn worse than the profiles do as they are.
fn choose(with: &[OwnRun], quantity: Quantity, most: usize) -> Vec<Constant> {
    let candidates: &[Constant] = match quantity {
        Quantity::Time => &TIME,
        Quantity::Memory(_) => &MEMORY,
    };
    let told = told_by(candidates, with, quantity, most.min(configurations(with).len()));
    let unseen = left_out(with, with, INNER_FOLDS, |seen| (told.clone(), fit(seen, &told, quantity)));
    let errors: Option<Vec<f64>> =
        with.iter().zip(unseen).map(|(run, found)| quantity.log_error(&run.row, &found?)).collect();
    let sum = |errors: &[f64]| -> f64 { with.iter().zip(errors).map(|(run, error)| run.weight * error.abs()).sum() };
    match errors {
        Some(errors) if sum(&errors) > sum(&log_errors(with, quantity)) => Vec::new(),
        _ => told,
    }
}

/// Values of the constants with the least error, from those in the runs' machines on.
fn fit(with: &[OwnRun], chosen: &[Constant], quantity: Quantity) -> Vec<f64> {
    let Some(first) = with.first() else { return Vec::new() };
    let mut machine = first.case.request.machine.clone();
    let free: Vec<Free> = chosen.iter().filter_map(|constant| constant.free(&mut machine)).collect();
    let weights: Vec<f64> = with.iter().map(|run| run.weight).collect();
    let mut moved = with.to_vec();
    fitting::fit(&free, &weights, |values| {
        put(&mut moved, chosen, values);
        log_errors(&moved, quantity)
    })
}

/// Puts constants into the machine of each run.
fn put(runs: &mut [OwnRun], constants: &[Constant], values: &[f64]) {
    for run in runs {
        for (constant, value) in constants.iter().zip(values) {
            if let Some(number) = (constant.number)(&mut run.case.request.machine) {
                number.set(*value);
            }
        }
    }
}

/// Predictions of each run by constants for which its configuration was left out, in at most so many folds.
fn left_out(
    runs: &[OwnRun],
    with: &[OwnRun],
    most_folds: usize,
    fit: impl Fn(&[OwnRun]) -> (Vec<Constant>, Vec<f64>),
) -> Vec<Option<Prediction>> {
    let configurations = configurations(with);
    let folds = configurations.len().min(most_folds);
    let fold_of = |run: &OwnRun| configurations.binary_search(&run.row.run.configuration()).map(|place| place % folds);
    let mut found = vec![None; runs.len()];
    if folds < 2 {
        return found;
    }
    for fold in 0..folds {
        let seen: Vec<OwnRun> = with.iter().filter(|run| fold_of(run) != Ok(fold)).cloned().collect();
        let (constants, values) = fit(&seen);
        for (run, found) in runs.iter().zip(&mut found).filter(|(run, _)| fold_of(run) == Ok(fold)) {
            let mut held = [run.clone()];
            put(&mut held, &constants, &values);
            *found = predict(&held[0].case).ok();
        }
    }
    found
}

fn compare(before: &OwnRun, after: &OwnRun, left_out: Option<Prediction>, quantity: Quantity) -> Option<Compared> {
    let of = |prediction: &Prediction| quantity.predicted(prediction);
    Some(Compared {
        measured: quantity.measured(&before.row)?,
        before: of(&predict(&before.case).ok()?),
        after: of(&predict(&after.case).ok()?),
        left_out: left_out.as_ref().map(of),
    })
}

/// States the stack's error anew: the errors of runs that were left out, beside the stated one as that of
/// [`STATED_COUNTS`] runs.
fn state_error(stack: &mut StackProfile, compared: &[Option<Compared>], origin: &str) {
    let unseen = compared.iter().flatten().filter_map(|pair| Some(pair.measured / pair.left_out? - 1.0));
    let squares: Vec<f64> = unseen.map(|error| (NORMAL_90 * error).powi(2)).collect();
    if squares.is_empty() {
        return;
    }
    let stated = stack.relative_error_90.value;
    let sum = STATED_COUNTS * stated * stated + squares.iter().sum::<f64>();
    let width = (sum / (STATED_COUNTS + squares.len() as f64)).sqrt();
    stack.relative_error_90 = Sourced {
        value: width.min(1.0),
        provenance: Provenance::Fitted,
        source: format!(
            "errors of {} runs of {origin}, each left out of a fit, beside {stated} as that of {STATED_COUNTS} runs; \
             plan calibrate",
            squares.len()
        ),
    };
}

/// Adds the runs to what the stack was compared with.
fn widen_compared(stack: &mut StackProfile, runs: &[OwnRun]) {
    let empty = || ComparedRuns { devices: Vec::new(), frameworks: Vec::new(), formats: Vec::new(), most_gpus: 0 };
    let compared = stack.compared.get_or_insert_with(empty);
    for run in runs {
        let Request { machine, model, gpus, .. } = &run.case.request;
        let format = format_name(machine.matmul_format, model.dtype);
        compared.most_gpus = compared.most_gpus.max(*gpus);
        for (names, name) in [(&mut compared.devices, &*machine.device.name), (&mut compared.formats, format)] {
            if !names.iter().any(|known| known == name) {
                names.push(name.to_owned());
            }
        }
    }
}

fn file_of(machine: Machine, name: &str) -> ClusterFile {
    let Machine { mut cluster, device, stack, .. } = machine;
    cluster.source = format!("{} with constants fitted to logged runs; {}", cluster.name, cluster.source);
    name.clone_into(&mut cluster.name);
    ClusterFile { cluster, device: Some(device), stack: Some(stack) }
}
