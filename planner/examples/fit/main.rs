//! Fits the named constants of device and stack profiles to the step times of a table of published runs.
//!
//! ```text
//! cargo run --release -p planner --example fit -- tests/published/runs.csv [--write] [--folds] [PROFILE …]
//! ```
//!
//! Each profile's constants are those with the least mean absolute log error over the runs that use
//! the profile; repeats of a configuration count together as one run. `--write` puts the values and the number of
//! runs behind them into the profile's file. `--folds` reports the errors on runs that the fit has not seen: five
//! folds of configurations, and each source left out in turn; stacks' 90 % intervals and what widens them follow, which
//! `--write` puts into the files too.

#![allow(clippy::print_stdout, reason = "this is a program that prints")]

mod constants;
mod files;
mod report;

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;

use planner::fitting::{self, Free};
use planner::validate::case::{Case, prepare};
use planner::validate::predict;
use planner::validate::table::{Row, read_table};

use constants::{GROUPS, Scoped, scoped};
use files::{write, write_widths};
use report::{HeldOut, NOISY, report_folds, report_intervals, report_sources};

/// Weight, beside runs of other sources, of a run of that whose equal runs differ by 40 %, not by about 5 %.
const NOISY_WEIGHT: f64 = 0.05 / 0.4;

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
    let mut held_out = HeldOut::default();
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
            report_folds(&samples, &chosen, &constants, &mut held_out);
        }
    }
    if flag("--folds") {
        report_sources(&samples, &held_out);
        let widths = report_intervals(&samples, &held_out);
        if flag("--write") {
            write_widths(&samples, &widths)?;
        }
    }
    Ok(())
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
    let own = |scoped: &Scoped| scoped.prior().unwrap_or_else(|| read(samples, chosen, scoped));
    let free = |scoped: &Scoped| Free { prior: own(scoped), range: scoped.constant.range, pull: scoped.constant.pull };
    let free: Vec<Free> = constants.iter().map(free).collect();
    let beside_others = chosen.iter().any(|index| samples[*index].row.source != NOISY);
    let weight = |sample: &Sample| match beside_others && sample.row.source == NOISY {
        true => NOISY_WEIGHT * sample.weight,
        false => sample.weight,
    };
    let weights: Vec<f64> = chosen.iter().map(|index| weight(&samples[*index])).collect();
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
