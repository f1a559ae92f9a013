//! `execute-plan gpu-check`: what a host with one GPU shows of this program.
//!
//! | Step | Function | Module |
//! |---|---|---|
//! | open the device | `Device::open` | `device` |
//! | numbers of every kernel against the interpreter in fp64 | `CASES`, `products_of_odd_sizes` | `cases`, `products` |
//! | bandwidth of memory-bound kernels beside a copy's | `measure_bandwidth` | `bandwidth` |
//! | rates of products and attention | `measure_products`, `measure_attention` | `products` |
//! | training steps, and ranks that share the device | `measure_steps`, `compare_ranks` | `steps` |
//! | NCCL with one rank | `check_nccl` | `nccl` |
//! | the same operators in PyTorch | `measure_pytorch` | `pytorch` |
//! | a cluster file of what was measured | `profile` | `profile` |
//! | tables | `tables` | `tables` |

mod bandwidth;
pub mod cases;
pub mod checks;
#[cfg(all(feature = "cuda", feature = "cublaslt"))]
mod cublaslt;
pub mod device;
#[cfg(feature = "cuda")]
mod nccl;
mod products;
mod profile;
pub mod pytorch;
pub mod reference;
mod steps;
mod tables;

use std::fs;
use std::path::Path;

use ir::error::Problem;
use ir::units::Bytes;
use serde::Serialize;

use crate::Error;
use bandwidth::measure_bandwidth;
pub use bandwidth::{Time, Timed};
use cases::CASES;
use checks::{Checks, Comparison};
use device::{Device, Driver};
pub use products::Computed;
use products::{measure_attention, measure_products, products_of_odd_sizes};
use reference::Reference;
pub use steps::Trained;
use steps::{compare_ranks, measure_steps, steps_in_pytorch};
pub use tables::tables;

/// Share of a copy's bandwidth that memory-bound kernels should reach.
const WANTED_SHARE: f64 = 0.85;

/// What was seen.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The device's name.
    pub device: String,
    /// What its driver says of it.
    pub about: String,
    /// `cuda` or `wgpu`.
    pub driver: &'static str,
    /// Bytes of its memory, where the driver says it.
    pub memory_bytes: Option<u64>,
    /// Results of kernels beside what was expected.
    pub numbers: Vec<Comparison>,
    /// Memory-bound kernels.
    pub bandwidth: Vec<Timed>,
    /// Matrix products.
    pub products: Vec<Computed>,
    /// The attention core.
    pub attention: Vec<Computed>,
    /// Training steps.
    pub steps: Vec<Trained>,
    /// Ranks that share the device, or what is wrong with them.
    pub ranks: Outcome<String>,
    /// NCCL with one rank, or why not.
    pub nccl: Outcome<String>,
    /// PyTorch's times, or why there are none.
    pub pytorch: Outcome<Vec<pytorch::Row>>,
    /// Training steps in PyTorch, or why there are none.
    pub pytorch_steps: Outcome<Vec<pytorch::StepRow>>,
}

/// What came of an optional part.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome<T> {
    /// It was done.
    Done(T),
    /// It was not, for this reason.
    NotDone(String),
}

impl<T> From<Result<T, String>> for Outcome<T> {
    fn from(result: Result<T, String>) -> Outcome<T> {
        result.map_or_else(Outcome::NotDone, Outcome::Done)
    }
}

impl Report {
    /// What was wrong: kernels whose numbers differ, and what failed.
    pub fn problems(&self) -> Vec<Problem> {
        let location = |kernel: &str, format: &str| format!("{kernel}, {format}, on {}", self.device);
        let help = "keep the report and tell the authors; `--device cpu` does not use these kernels";
        let numbers = self.numbers.iter().filter_map(|comparison| {
            let wrong = comparison.wrong.as_ref()?;
            Some(Problem::new(
                format!("a kernel's numbers are wrong: {wrong}"),
                location(&comparison.kernel, comparison.format),
                help,
            ))
        });
        let failed = |time: &Time| match time {
            Time::Failed(reason) => Some(format!("there is no time: {reason}")),
            Time::Seconds(_) => None,
        };
        let bound = self
            .bandwidth
            .iter()
            .filter_map(|timed| Some(Problem::new(failed(&timed.time)?, location(timed.kernel, timed.format), help)));
        let attention = self.attention.iter().filter_map(|computed| {
            Some(Problem::new(failed(&computed.time)?, location(&computed.kernel, computed.format), help))
        });
        let steps = self.steps.iter().filter_map(|trained| {
            let reason = failed(&trained.time).filter(|reason| !reason.contains("skipped"))?;
            Some(Problem::new(reason, format!("steps of {}, on {}", trained.model, self.device), help))
        });
        let not_done = |outcome: &Outcome<String>, what: &str, help: &str| match outcome {
            Outcome::NotDone(reason) if !reason.starts_with("skipped") => {
                Some(Problem::new(format!("{what} failed: {reason}"), what, help))
            }
            _ => None,
        };
        let ranks = not_done(&self.ranks, "ranks that share the device", help);
        let nccl = not_done(&self.nccl, "NCCL with one rank", "set NCCL_DEBUG=WARN");
        numbers.chain(bound).chain(attention).chain(steps).chain(ranks).chain(nccl).collect()
    }
}

/// What to check.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// What runs the kernels.
    pub driver: Driver,
    /// Whether to measure more sizes.
    pub full: bool,
    /// Where to write `report.md`, `report.json` and `profile.ron`.
    pub out: Option<&'a Path>,
}

/// Checks a device. `progress` is told what comes next.
///
/// # Errors
/// `BadInput` if there is no device or the folder cannot be written to. Wrong numbers are no error: they are in the
/// report's [`problems`](Report::problems).
pub fn check(request: Request, progress: &dyn Fn(&str)) -> Result<Report, Error> {
    let Request { driver, full, out } = request;
    let device = Device::open(driver, "execute-plan gpu-check")?;
    if let Some(folder) = out {
        fs::create_dir_all(folder).map_err(|error| cannot_write(folder, &error))?;
    }
    progress("numbers of kernels");
    let mut checks = Checks::new(&device, Reference::Interpreter);
    CASES.iter().for_each(|(_, case)| case(&mut checks));
    products_of_odd_sizes(&mut checks);
    let numbers = checks.found;
    progress("bandwidth of memory-bound kernels");
    let bandwidth = measure_bandwidth(&device);
    progress("matrix products");
    let products = measure_products(&device, full);
    progress("attention");
    let attention = measure_attention(&device, full);
    progress("training steps");
    let steps = measure_steps(&device, full);
    progress("ranks that share the device");
    let ranks = compare_ranks(&device).into();
    progress("NCCL");
    let nccl = single_rank(driver);
    progress("PyTorch");
    let pytorch = pytorch::measure_pytorch(&device, &operators_of(&bandwidth, &products, &attention)).into();
    let pytorch_steps = steps_in_pytorch(&device, full).into();
    let report = Report {
        device: device.name.clone(),
        about: device.about.clone(),
        driver: match driver {
            Driver::Cuda => "cuda",
            Driver::Wgpu => "wgpu",
        },
        memory_bytes: device.memory.map(|Bytes(bytes)| bytes),
        numbers,
        bandwidth,
        products,
        attention,
        steps,
        ranks,
        nccl,
        pytorch,
        pytorch_steps,
    };
    if let Some(folder) = out {
        write(folder, &device, &report)?;
    }
    Ok(report)
}

fn single_rank(driver: Driver) -> Outcome<String> {
    match driver {
        Driver::Wgpu => Outcome::NotDone("skipped: NCCL connects NVIDIA GPUs only".to_owned()),
        #[cfg(feature = "cuda")]
        Driver::Cuda => nccl::check_nccl().into(),
        #[cfg(not(feature = "cuda"))]
        Driver::Cuda => unreachable!("no such device was opened"),
    }
}

/// What PyTorch is asked for: the sizes of what was measured, once in each number format.
fn operators_of(bandwidth: &[Timed], products: &[Computed], attention: &[Computed]) -> Vec<pytorch::Operator> {
    let sizes = |text: &str| text.split(" x ").map_while(|size| size.parse().ok()).collect::<Vec<usize>>();
    let kernels = ["copy", "bias_gelu", "swiglu", "layer_norm", "rms_norm"];
    let bound = bandwidth.iter().filter(|timed| kernels.contains(&timed.kernel));
    let bound = bound.map(|timed| (timed.kernel, sizes(&timed.sizes), timed.format));
    let loss = bandwidth.iter().filter(|timed| timed.kernel == "loss_statistics");
    let loss = loss.map(|timed| ("loss", sizes(&timed.sizes), timed.format));
    let products = products.iter().map(|computed| ("product", sizes(&computed.sizes), computed.format));
    let attention = attention.iter().map(|computed| ("attention", sizes(&computed.sizes), computed.format));
    let mut operators: Vec<_> = products.chain(attention).chain(bound).chain(loss).collect();
    operators.dedup();
    operators
}

fn write(folder: &Path, device: &Device, report: &Report) -> Result<(), Error> {
    let json = serde_json::to_string_pretty(report).expect("a report is plain data");
    let files =
        [("report.md", tables(report)), ("report.json", json), ("profile.ron", profile::profile(device, report)?)];
    for (name, text) in files {
        let path = folder.join(name);
        fs::write(&path, text).map_err(|error| cannot_write(&path, &error))?;
    }
    Ok(())
}

fn cannot_write(path: &Path, error: &std::io::Error) -> Error {
    Problem::new(format!("cannot be written: {error}"), path.display().to_string(), "give another folder with --out")
        .into()
}
