//! Fits the named constants of device and stack profiles to the step times of a table of published runs.
//!
//! ```text
//! cargo run --release -p planner --example fit -- tests/published/runs.csv [--write] [--folds] [PROFILE …]
//! ```
//!
//! Each profile's constants are those with the least mean absolute log error over the runs that use
//! the profile; repeats of a configuration count together as one run. `--write` puts the values and the number of
//! runs behind them into the profile's file. `--folds` reports the errors on runs that the fit has not seen: five
//! folds of configurations, and each source left out in turn.

#![allow(clippy::print_stdout, reason = "this is a program that prints")]

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::Path;

use cost_models::machine::Machine;
use planner::fitting::{self, Free, PULL};
use planner::validate::case::{Case, prepare};
use planner::validate::predict;
use planner::validate::summary::errors;
use planner::validate::table::{Row, read_table};

/// Folds of the cross-validation.
const FOLDS: usize = 5;

/// A constant that runs decide.
struct Constant {
    /// Field in the profile's file, after its section where another one has it too.
    field: &'static str,
    /// Least and largest value.
    range: (f64, f64),
    /// Value before any run is looked at; the profile's own where absent.
    prior: Option<f64>,
    /// The number in a machine's profiles, if it has one.
    place: fn(&mut Machine) -> Option<&mut f64>,
    /// What belongs to the unit in the file: `Micros`, `Millis` or nothing.
    unit: (&'static str, f64),
}

impl Constant {
    const fn new(
        field: &'static str,
        range: (f64, f64),
        prior: Option<f64>,
        place: fn(&mut Machine) -> Option<&mut f64>,
    ) -> Constant {
        Constant { field, range, prior, place, unit: ("", 1.0) }
    }

    const fn in_micros(self) -> Constant {
        Constant { unit: ("Micros", 1e-6), ..self }
    }

    const fn in_millis(self) -> Constant {
        Constant { unit: ("Millis", 1e-3), ..self }
    }
}

/// Constants of stacks.
const STACK: [Constant; 17] = [
    Constant::new("matmul_speed", (0.5, 1.3), Some(0.92), |m| Some(&mut m.stack.kernels.matmul_speed.value)),
    Constant::new("streaming_speed", (0.2, 1.3), Some(0.8), |m| {
        m.stack.kernels.streaming_speed.as_mut().map(|x| &mut x.value)
    }),
    Constant::new("attention_speed", (0.2, 2.0), Some(0.9), |m| {
        m.stack.kernels.attention_speed.as_mut().map(|x| &mut x.value)
    }),
    Constant::new("host_launch", (1e-6, 2e-4), Some(3e-5), |m| {
        m.stack.kernels.host_launch.as_mut().map(|x| &mut x.value.0)
    })
    .in_micros(),
    Constant::new("launch_floor", (1e-6, 2e-5), Some(5e-06), |m| Some(&mut m.stack.kernels.launch_floor.value.0))
        .in_micros(),
    Constant::new("gradient_reduction", (0.0, 1.0), Some(0.8), |m| Some(&mut m.stack.overlap.gradient_reduction.value)),
    Constant::new("parameter_gather", (0.0, 1.0), Some(0.8), |m| Some(&mut m.stack.overlap.parameter_gather.value)),
    Constant::new("tensor", (0.0, 1.0), Some(0.3), |m| m.stack.overlap.tensor.as_mut().map(|x| &mut x.value)),
    Constant::new("occupancy", (0.0, 1.0), Some(0.1), |m| m.stack.overlap.occupancy.as_mut().map(|x| &mut x.value)),
    Constant::new("micro_batch", (0.0, 0.06), Some(0.001), |m| Some(&mut m.stack.overhead.micro_batch.value.0))
        .in_millis(),
    Constant::new("step", (0.0, 0.5), Some(0.05), |m| Some(&mut m.stack.overhead.step.value.0)).in_millis(),
    Constant::new("speed", (0.3, 1.5), Some(0.95), |m| {
        m.stack.kernels.low_precision.as_mut().map(|x| &mut x.speed.value)
    }),
    Constant::new("fp4_speed", (0.3, 1.5), Some(0.75), |m| {
        m.stack.kernels.low_precision.as_mut().and_then(|x| x.fp4_speed.as_mut()).map(|x| &mut x.value)
    }),
    Constant::new("grouped_speed", (0.2, 1.5), Some(0.8), |m| {
        m.stack.kernels.experts.as_mut().map(|x| &mut x.grouped_speed.value)
    }),
    Constant::new("routing", (1e-6, 1e-2), Some(0.0003), |m| {
        m.stack.kernels.experts.as_mut().map(|x| &mut x.routing.value.0)
    })
    .in_micros(),
    Constant::new("exchange_hidden", (0.0, 1.0), Some(0.3), |m| {
        m.stack.kernels.experts.as_mut().map(|x| &mut x.exchange_hidden.value)
    }),
    Constant::new("conversion_bytes", (0.0, 20.0), Some(3.0), |m| {
        m.stack.kernels.low_precision.as_mut().map(|x| &mut x.conversion_bytes.value)
    }),
];

/// Constants of devices.
const DEVICE: [Constant; 3] = [
    Constant::new("maximum", (0.3, 0.85), None, |m| Some(&mut m.device.matmul.maximum.value)),
    Constant::new("eights", (0.2, 1.0), None, |m| m.device.matmul.misaligned.as_mut().map(|x| &mut x.eights.value)),
    Constant::new("odd", (0.02, 1.0), None, |m| m.device.matmul.misaligned.as_mut().map(|x| &mut x.odd.value)),
];

/// Constants of clusters.
const CLUSTER: [Constant; 3] = [
    Constant::new("intra.efficiency", (0.1, 1.0), None, |m| Some(&mut m.cluster.intra.efficiency.value)),
    Constant::new("inter.efficiency", (0.1, 1.0), None, |m| Some(&mut m.cluster.inter.efficiency.value)),
    Constant::new("intra.hop_latency", (0.0, 2e-4), None, |m| Some(&mut m.cluster.intra.hop_latency.value.0))
        .in_micros(),
];

/// Profiles whose constants are fitted together, since the same runs use them.
const GROUPS: [&[&str]; 4] = [
    &["jean-zay-a100-80gb", "megatron-deepspeed-2022", "a100-sxm-80gb", "fsdp-2023", "megatron-2021"],
    &[
        "megatron-core-2024",
        "megatron-core-2025",
        "megatron-core-2026",
        "megatron-core-plain",
        "fsdp-2024",
        "h100-sxm-80gb",
        "gb200-186gb",
        "gb300-288gb",
        "b300-sxm-288gb",
        "b200-sxm-180gb",
    ],
    &["fsdp-compile-2024"],
    &["jean-zay-v100", "deepspeed-zero"],
];

/// A run that can be predicted and was measured.
#[derive(Clone)]
struct Sample {
    row: Row,
    case: Case,
    weight: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let table = arguments.first().ok_or("name the table")?;
    let flag = |name: &str| arguments.iter().any(|argument| argument == name);
    let named: Vec<&str> = arguments[1..].iter().map(String::as_str).filter(|name| !name.starts_with("--")).collect();
    let mut samples = samples(&read_table(&fs::read_to_string(table)?, table)?);
    let groups: Vec<Vec<&str>> = match named.is_empty() {
        true => GROUPS.iter().map(|group| group.to_vec()).collect(),
        false => vec![named],
    };
    for group in groups {
        let chosen: Vec<usize> =
            (0..samples.len()).filter(|index| group.iter().any(|name| uses(&samples[*index], name))).collect();
        let constants = scoped(&samples, &group);
        let before = error_of(&samples, &chosen);
        let values = fit(&mut samples, &chosen, &constants);
        let after = error_of(&samples, &chosen);
        println!("{}: {} runs, {:.2} % -> {:.2} %", group.join(", "), chosen.len(), before * 100.0, after * 100.0);
        for (scoped, value) in constants.iter().zip(&values) {
            println!("  {:<24} {:<22} {:.4}", scoped.profile, scoped.constant.field, value / scoped.constant.unit.1);
        }
        if flag("--write") {
            write(&constants, &values, &samples)?;
        }
        if flag("--folds") {
            report_folds(&samples, &chosen, &constants);
        }
    }
    Ok(())
}

/// A constant of one profile.
struct Scoped<'a> {
    profile: &'a str,
    constant: &'static Constant,
}

/// The constants that the profiles of a group have.
fn scoped<'a>(samples: &[Sample], group: &[&'a str]) -> Vec<Scoped<'a>> {
    let mut found = Vec::new();
    for profile in group {
        let Some(user) = samples.iter().find(|sample| uses(sample, profile)) else { continue };
        let mut machine = user.case.request.machine.clone();
        let constants: &'static [Constant] = match () {
            _ if machine.stack.name == *profile => &STACK,
            _ if machine.device.name == *profile => &DEVICE,
            _ => &CLUSTER,
        };
        let held = constants.iter().filter(|constant| (constant.place)(&mut machine).is_some());
        found.extend(held.map(|constant| Scoped { profile, constant }));
    }
    found
}

fn uses(sample: &Sample, profile: &str) -> bool {
    let machine = &sample.case.request.machine;
    [&machine.device.name, &machine.stack.name, &machine.cluster.name].into_iter().any(|name| name == profile)
}

fn samples(rows: &[Row]) -> Vec<Sample> {
    let mut samples: Vec<Sample> = Vec::new();
    for row in rows.iter().filter(|row| row.measured.step_seconds.is_some()) {
        if let Ok(case) = prepare(&row.run) {
            samples.push(Sample { row: row.clone(), case, weight: 1.0 });
        }
    }
    let mut repeats: BTreeMap<String, f64> = BTreeMap::new();
    for sample in &samples {
        *repeats.entry(sample.row.run.configuration()).or_default() += 1.0;
    }
    for sample in &mut samples {
        sample.weight = 1.0 / repeats[&sample.row.run.configuration()];
    }
    samples
}

/// Error of one sample: the logarithm of predicted over measured.
fn log_error(sample: &Sample) -> f64 {
    let measured = sample.row.measured.step_seconds.unwrap_or(f64::NAN);
    predict(&sample.case).map_or(1.0, |found| (found.step.0 / measured).ln())
}

fn error_of(samples: &[Sample], chosen: &[usize]) -> f64 {
    let weight: f64 = chosen.iter().map(|index| samples[*index].weight).sum();
    chosen.iter().map(|index| samples[*index].weight * log_error(&samples[*index]).abs()).sum::<f64>() / weight
}

fn set(samples: &mut [Sample], chosen: &[usize], scoped: &Scoped, value: f64) {
    for index in chosen {
        if !uses(&samples[*index], scoped.profile) {
            continue;
        }
        if let Some(place) = (scoped.constant.place)(&mut samples[*index].case.request.machine) {
            *place = value;
        }
    }
}

fn read(samples: &[Sample], chosen: &[usize], scoped: &Scoped) -> f64 {
    let user = chosen.iter().find(|index| uses(&samples[**index], scoped.profile));
    let mut machine = samples[*user.or(chosen.first()).unwrap_or(&0)].case.request.machine.clone();
    (scoped.constant.place)(&mut machine).map_or(0.0, |value| *value)
}

/// The constants with the least error, put into the samples' machines.
fn fit(samples: &mut [Sample], chosen: &[usize], constants: &[Scoped]) -> Vec<f64> {
    let own = |scoped: &Scoped| scoped.constant.prior.unwrap_or_else(|| read(samples, chosen, scoped));
    let free = |scoped: &Scoped| Free { prior: own(scoped), range: scoped.constant.range, pull: PULL };
    let free: Vec<Free> = constants.iter().map(free).collect();
    let weights: Vec<f64> = chosen.iter().map(|index| samples[*index].weight).collect();
    let place = |samples: &mut [Sample], values: &[f64]| {
        constants.iter().zip(values).for_each(|(scoped, value)| set(samples, chosen, scoped, *value));
    };
    let values = fitting::fit(&free, &weights, |values| {
        place(samples, values);
        chosen.iter().map(|index| log_error(&samples[*index])).collect()
    });
    place(samples, &values);
    values
}

/// Errors on runs that the fit has not seen.
fn report_folds(samples: &[Sample], chosen: &[usize], constants: &[Scoped]) {
    let mut configurations: Vec<String> = chosen.iter().map(|index| samples[*index].row.run.configuration()).collect();
    configurations.sort();
    configurations.dedup();
    let fold_of = |index: usize| {
        configurations.binary_search(&samples[index].row.run.configuration()).map_or(0, |place| place % FOLDS)
    };
    let mut unseen = Vec::new();
    for fold in 0..FOLDS {
        unseen.extend(held_out(samples, chosen, constants, |index| fold_of(index) == fold));
    }
    println!("  five folds: {}", describe(unseen));
    let mut sources: Vec<&str> = chosen.iter().map(|index| &*samples[*index].row.source).collect();
    sources.sort_unstable();
    sources.dedup();
    if sources.len() > 1 {
        for source in sources {
            let unseen = held_out(samples, chosen, constants, |index| samples[index].row.source == source);
            println!("  without {source}: {}", describe(unseen));
        }
    }
}

fn held_out(samples: &[Sample], chosen: &[usize], constants: &[Scoped], held: impl Fn(usize) -> bool) -> Vec<f64> {
    let mut samples = samples.to_vec();
    let (out, seen): (Vec<usize>, Vec<usize>) = chosen.iter().partition(|index| held(**index));
    let values = fit(&mut samples, &seen, constants);
    for (constant, value) in constants.iter().zip(values) {
        set(&mut samples, &out, constant, value);
    }
    out.iter().map(|index| log_error(&samples[*index]).exp() - 1.0).collect()
}

fn describe(unseen: Vec<f64>) -> String {
    let Some(errors) = errors(unseen.into_iter()) else { return "no runs".to_owned() };
    let [mean, median] = [errors.mean_absolute, errors.median_absolute].map(|error| error * 100.0);
    format!("{} runs, mean error {mean:.2} %, median {median:.2} %", errors.count)
}

/// Puts values into the profiles' files: `field: Origin(VALUE, "source")` keeps its field and gets a new rest.
fn write(constants: &[Scoped], values: &[f64], samples: &[Sample]) -> Result<(), Box<dyn Error>> {
    for (Scoped { profile, constant }, value) in constants.iter().zip(values) {
        let folders = ["stacks", "devices", "clusters"].map(|folder| Path::new("hardware-profiles").join(folder));
        let paths = folders.map(|folder| folder.join(format!("{profile}.ron")));
        let path = paths.iter().find(|path| path.exists()).ok_or("the profile has no file")?;
        let text = fs::read_to_string(path)?;
        let (section, field) = constant.field.split_once('.').unwrap_or(("", constant.field));
        let start =
            if section.is_empty() { 0 } else { text.find(&format!(" {section}: (")).ok_or("no such section")? };
        let key = format!(" {field}: ");
        let begin = start + text[start..].find(&key).ok_or("no such field")? + key.len();
        let end = begin + text[begin..].find('\n').ok_or("the file ends early")?;
        let number = format!("{:.4}", value / constant.unit.1);
        let number = number.trim_end_matches('0').trim_end_matches('.');
        let unit = constant.unit.0;
        let shown = if unit.is_empty() { number.to_owned() } else { format!("{unit}({number})") };
        let runs = samples.iter().filter(|sample| uses(sample, profile)).count();
        let source = format!("least error of step times on {runs} runs of tests/published/runs.csv");
        let entry = format!("Fitted({shown}, \"{source}; planner/examples/fit.rs\"),");
        fs::write(path, format!("{}{entry}{}", &text[..begin], &text[end..]))?;
    }
    Ok(())
}
