//! Fits the named constants of device and stack profiles to the step times of a table of published runs.
//!
//! ```text
//! cargo run --release -p planner --example fit -- tests/published/runs.csv [--write] [--folds] [PROFILE …]
//! ```
//!
//! Each profile's constants are those with the least mean absolute log error over the runs that use
//! the profile; repeats of a configuration count together as one run. `--write` puts the values and the number of
//! runs behind them into the profile's file. `--folds` reports the errors on runs that the fit has not seen: five
//! folds of configurations, and each source left out in turn; stacks' 90 % intervals follow from them, which `--write`
//! puts into the files too.

#![allow(clippy::print_stdout, reason = "this is a program that prints")]

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fs;
use std::path::Path;

use cost_models::machine::Machine;
use planner::fitting::{self, Free, PULL};
use planner::interval::{BLANK, format_name};
use planner::validate::case::{Case, prepare};
use planner::validate::predict;
use planner::validate::summary::errors;
use planner::validate::table::{Row, Run, read_table};

/// Folds of the cross-validation.
const FOLDS: usize = 5;

/// A source whose authors say that equal runs differ by 40 %: it tells no interval of a stack that has other runs.
const NOISY: &str = "bigscience-workshop/bigscience (V100 gpt2)";

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
    Constant::new("host_launch", (1e-6, 2e-4), Some(5e-5), |m| {
        m.stack.kernels.host_launch.as_mut().map(|x| &mut x.value.0)
    })
    .in_micros(),
    Constant::new("launch_floor", (1e-6, 2e-5), Some(5e-06), |m| Some(&mut m.stack.kernels.launch_floor.value.0))
        .in_micros(),
    Constant::new("gradient_reduction", (0.0, 1.0), Some(0.8), |m| Some(&mut m.stack.overlap.gradient_reduction.value)),
    Constant::new("parameter_gather", (0.0, 1.0), Some(0.8), |m| Some(&mut m.stack.overlap.parameter_gather.value)),
    Constant::new("tensor", (0.0, 1.0), Some(0.3), |m| m.stack.overlap.tensor.as_mut().map(|x| &mut x.value)),
    Constant::new("occupancy", (0.0, 1.0), Some(0.1), |m| m.stack.overlap.occupancy.as_mut().map(|x| &mut x.value)),
    Constant::new("micro_batch", (1e-4, 0.06), Some(0.001), |m| Some(&mut m.stack.overhead.micro_batch.value.0))
        .in_millis(),
    Constant::new("step", (1e-3, 0.5), Some(0.03), |m| Some(&mut m.stack.overhead.step.value.0)).in_millis(),
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
    Constant::new("exchange_hidden", (0.0, 1.0), Some(0.5), |m| {
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

/// Constants that the software fixes, which no run decides.
const FIXED: [(&str, &str); 2] =
    [("megatron-2021", "gradient_reduction"), ("megatron-deepspeed-2022", "gradient_reduction")];

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
    &["maxtext-2024"],
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
    let (mut folds, mut left_out) = (Vec::new(), Vec::new());
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
            let (of_group, of_sources) = report_folds(&samples, &chosen, &constants);
            folds.extend(of_group);
            left_out.extend(of_sources);
        }
    }
    if flag("--folds") {
        let widths = report_intervals(&samples, &folds, &left_out);
        if flag("--write") {
            widths.iter().try_for_each(|width| write_interval(&samples, width))?;
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
        let free = constants.iter().filter(|constant| !FIXED.contains(&(profile, constant.field)));
        let held = free.filter(|constant| (constant.place)(&mut machine).is_some());
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
    // Runs that use none of the profiles that changed since the last call have the same errors as then.
    let mut last: Option<(Vec<f64>, Vec<f64>)> = None;
    let values = fitting::fit(&free, &weights, |values| {
        let differs = |place: usize| last.as_ref().is_none_or(|(last, _)| last[place] != values[place]);
        let changed: Vec<usize> = (0..values.len()).filter(|place| differs(*place)).collect();
        changed.iter().for_each(|place| set(samples, chosen, &constants[*place], values[*place]));
        let touched = |sample: &Sample| changed.iter().any(|place| uses(sample, constants[*place].profile));
        let error = |(row, index): (usize, &usize)| match &last {
            Some((_, errors)) if !touched(&samples[*index]) => errors[row],
            _ => log_error(&samples[*index]),
        };
        let errors: Vec<f64> = chosen.iter().enumerate().map(error).collect();
        last = Some((values.to_vec(), errors.clone()));
        errors
    });
    constants.iter().zip(&values).for_each(|(scoped, value)| set(samples, chosen, scoped, *value));
    values
}

/// A run that a fit has not seen.
struct Unseen {
    index: usize,
    fold: usize,
    /// The logarithm of predicted over measured.
    log_error: f64,
}

/// Errors on runs that the fit has not seen: of five folds of configurations, and of sources left out in turn.
fn report_folds(samples: &[Sample], chosen: &[usize], constants: &[Scoped]) -> (Vec<Unseen>, Vec<Unseen>) {
    // Successive releases repeat a configuration, so that its year does not make it another.
    let configuration = |index: usize| Run { year: None, ..samples[index].row.run.clone() }.configuration();
    let mut configurations: Vec<String> = chosen.iter().map(|index| configuration(*index)).collect();
    configurations.sort();
    configurations.dedup();
    let fold_of = |index: usize| configurations.binary_search(&configuration(index)).map_or(0, |place| place % FOLDS);
    let mut folds = Vec::new();
    for fold in 0..FOLDS {
        folds.extend(held_out(samples, chosen, constants, fold, |index| fold_of(index) == fold));
    }
    println!("  five folds: {}", describe(&folds));
    let mut sources: Vec<&str> = chosen.iter().map(|index| &*samples[*index].row.source).collect();
    sources.sort_unstable();
    sources.dedup();
    let mut left_out = Vec::new();
    for (fold, source) in sources.iter().enumerate().filter(|_| sources.len() > 1) {
        let unseen = held_out(samples, chosen, constants, fold, |index| samples[index].row.source == *source);
        println!("  without {source}: {}", describe(&unseen));
        left_out.extend(unseen);
    }
    (folds, left_out)
}

fn held_out(
    samples: &[Sample],
    chosen: &[usize],
    constants: &[Scoped],
    fold: usize,
    held: impl Fn(usize) -> bool,
) -> Vec<Unseen> {
    let mut samples = samples.to_vec();
    let (out, seen): (Vec<usize>, Vec<usize>) = chosen.iter().partition(|index| held(**index));
    let values = fit(&mut samples, &seen, constants);
    for (constant, value) in constants.iter().zip(values) {
        set(&mut samples, &out, constant, value);
    }
    out.into_iter().map(|index| Unseen { index, fold, log_error: log_error(&samples[index]) }).collect()
}

fn describe(unseen: &[Unseen]) -> String {
    let found = errors(unseen.iter().map(|unseen| unseen.log_error.exp() - 1.0));
    let Some(errors) = found else { return "no runs".to_owned() };
    let [mean, median, bias] = [errors.mean_absolute, errors.median_absolute, errors.bias].map(|error| error * 100.0);
    format!("{} runs, mean error {mean:.2} %, median {median:.2} %, bias {bias:+.1} %", errors.count)
}

/// Half width of a stack's 90 % interval.
struct Width<'a> {
    stack: &'a str,
    value: f64,
    runs: usize,
}

/// What 90 % of unseen runs do not exceed, by stack; how blank cells and unseen sources widen it; and how many of each
/// fold's runs lie within the widths of the other folds.
fn report_intervals<'a>(samples: &'a [Sample], folds: &[Unseen], left_out: &[Unseen]) -> Vec<Width<'a>> {
    let stack = |unseen: &Unseen| samples[unseen.index].case.request.machine.stack.name.as_str();
    let open = |unseen: &&Unseen| samples[unseen.index].case.open;
    let deviation = |unseen: &Unseen| ((-unseen.log_error).exp() - 1.0).abs();
    let mut counted = BTreeSet::new();
    let folds: Vec<&Unseen> =
        folds.iter().filter(|unseen| tells(samples, unseen.index) && counted.insert(unseen.index)).collect();
    let left_out = || left_out.iter().filter(|unseen| samples[unseen.index].row.source != NOISY);
    let narrowed = |unseen: &Unseen| deviation(unseen) / if open(&unseen) { BLANK } else { 1.0 };
    let width = |name: &str, without: Option<usize>| {
        let of_stack = folds.iter().filter(|unseen| stack(unseen) == name && Some(unseen.fold) != without);
        ninetieth(of_stack.map(|unseen| narrowed(unseen)).collect())
    };
    let mut names: Vec<&str> =
        folds.iter().map(|unseen| samples[unseen.index].case.request.machine.stack.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let mut widths = Vec::new();
    for name in names {
        let runs = folds.iter().filter(|unseen| stack(unseen) == name).count();
        let Some(value) = width(name, None) else { continue };
        println!("{name}: 90 % of {runs} unseen runs within {:.1} %", value * 100.0);
        widths.push(Width { stack: name, value, runs });
    }
    let known = |unseen: &&Unseen| widths.iter().find(|width| width.stack == stack(unseen)).map(|width| width.value);
    let in_widths = |unseen: &Unseen, of: f64| deviation(unseen) / of;
    let ratio = |all: Vec<f64>| ninetieth(all).unwrap_or(f64::NAN);
    let blank = |is: bool| {
        let some = folds.iter().filter(|unseen| open(unseen) == is);
        ratio(some.filter_map(|unseen| Some(in_widths(unseen, known(unseen)?))).collect())
    };
    println!(
        "blank cells: {:.2} widths, others {:.2}: ratio {:.2}",
        blank(true),
        blank(false),
        blank(true) / blank(false)
    );
    let widths_of_left_out = left_out().filter_map(|unseen| Some(narrowed(unseen) / known(&unseen)?)).collect();
    println!("unseen sources: {:.2} widths", ratio(widths_of_left_out));
    println!("any unseen source: 90 % within {:.1} %", ratio(left_out().map(narrowed).collect()) * 100.0);
    let covered = folds
        .iter()
        .filter(|unseen| width(stack(unseen), Some(unseen.fold)).is_none_or(|width| narrowed(unseen) <= width));
    println!(
        "{:.1} % of {} runs within the widths of the other folds",
        covered.count() as f64 / folds.len() as f64 * 100.0,
        folds.len()
    );
    widths
}

/// Whether a run tells how far steps are from the predictions of its stack.
fn tells(samples: &[Sample], index: usize) -> bool {
    let stack = |sample: &Sample| sample.case.request.machine.stack.name.clone();
    let others = || samples.iter().any(|other| other.row.source != NOISY && stack(other) == stack(&samples[index]));
    samples[index].row.source != NOISY || !others()
}

/// The least number that is not exceeded by 90 % of what else may come (arXiv 1604.04173, section 2.2); `None` where
/// there are too few.
fn ninetieth(mut all: Vec<f64>) -> Option<f64> {
    all.sort_by(f64::total_cmp);
    let rank = (0.9 * (all.len() + 1) as f64).ceil() as usize;
    all.get(rank.checked_sub(1)?).copied()
}

/// Puts the width of an interval into the stack's file, with what the runs behind it had.
fn write_interval(samples: &[Sample], width: &Width) -> Result<(), Box<dyn Error>> {
    let of_stack = || {
        let all = (0..samples.len()).filter(|index| tells(samples, *index)).map(|index| &samples[index]);
        all.filter(|sample| sample.case.request.machine.stack.name == width.stack)
    };
    let list = |name: fn(&Sample) -> &str| {
        let mut names: Vec<String> = of_stack().map(|sample| format!("\"{}\"", name(sample))).collect();
        names.sort();
        names.dedup();
        names.join(", ")
    };
    let format: fn(&Sample) -> &str = |sample| {
        let request = &sample.case.request;
        format_name(request.machine.matmul_format, request.model.dtype)
    };
    let entry = format!(
        "  relative_error_90: Fitted({:.3}, \"90 % of {} runs of tests/published/runs.csv, held out of a fit in folds of \
         configurations; planner/examples/fit.rs --folds\"),\n  compared: (\n    devices: [{}],\n    frameworks: [{}],\n    \
         formats: [{}],\n    most_gpus: {},\n  ),\n)\n",
        width.value,
        width.runs,
        list(|sample| &sample.case.request.machine.device.name),
        list(|sample| &sample.case.framework),
        list(format),
        of_stack().map(|sample| sample.case.request.gpus).max().unwrap_or(0),
    );
    let path = Path::new("hardware-profiles/stacks").join(format!("{}.ron", width.stack));
    let text = fs::read_to_string(&path)?;
    let begin = text.find("  relative_error_90: ").ok_or("the stack states no error")?;
    Ok(fs::write(&path, format!("{}{entry}", &text[..begin]))?)
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
