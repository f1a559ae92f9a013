//! Errors on runs that a fit has not seen, and the intervals that follow from them.

use std::collections::{BTreeMap, BTreeSet};

use planner::validate::summary::errors;
use planner::validate::table::Run;

use crate::constants::Scoped;
use crate::{Sample, fit, log_error, set};

/// Folds of the cross-validation.
const FOLDS: usize = 5;

/// A source whose authors say that equal runs differ by 40 %: it tells no interval of a stack that has other runs.
pub const NOISY: &str = "bigscience-workshop/bigscience (V100 gpt2)";

/// A run that a fit has not seen.
pub struct Unseen {
    index: usize,
    fold: usize,
    /// The logarithm of predicted over measured.
    log_error: f64,
}

/// Runs of all folds, and of all sources left out.
#[derive(Default)]
pub struct HeldOut {
    pub folds: Vec<Unseen>,
    pub sources: Vec<Unseen>,
}

/// Half width of a stack's 90 % interval.
pub struct Width {
    pub stack: String,
    pub value: f64,
    pub runs: usize,
}

/// Widths by stack, and what blank cells and unseen sources widen them by.
pub struct Widths {
    pub stacks: Vec<Width>,
    pub blank: f64,
    pub outside: f64,
}

/// Errors on runs that the fit has not seen: of five folds of configurations, and of sources left out in turn.
pub fn report_folds(samples: &[Sample], chosen: &[usize], constants: &[Scoped], found: &mut HeldOut) {
    // Successive releases repeat a configuration, so that its year does not make it another.
    let configuration = |index: usize| Run { year: None, ..samples[index].row.run.clone() }.configuration();
    let mut configurations: Vec<String> = chosen.iter().map(|index| configuration(*index)).collect();
    configurations.sort();
    configurations.dedup();
    let fold_of = |index: usize| configurations.binary_search(&configuration(index)).map_or(0, |place| place % FOLDS);
    let known: BTreeSet<usize> = found.folds.iter().map(|unseen| unseen.index).collect();
    let mut folds = Vec::new();
    for fold in 0..FOLDS {
        folds.extend(held_out(samples, chosen, constants, fold, |index| fold_of(index) == fold));
    }
    println!("  five folds: {}", describe(&folds.iter().collect::<Vec<_>>()));
    // A run of two groups counts in the first.
    found.folds.extend(folds.into_iter().filter(|unseen| !known.contains(&unseen.index)));
    let mut sources: Vec<&str> = chosen.iter().map(|index| &*samples[*index].row.source).collect();
    sources.sort_unstable();
    sources.dedup();
    for (fold, source) in sources.iter().enumerate().filter(|_| sources.len() > 1) {
        let unseen = held_out(samples, chosen, constants, fold, |index| samples[index].row.source == *source);
        println!("  without {source}: {}", describe(&unseen.iter().collect::<Vec<_>>()));
        found.sources.extend(unseen);
    }
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

fn describe(unseen: &[&Unseen]) -> String {
    let found = errors(unseen.iter().map(|unseen| unseen.log_error.exp() - 1.0));
    let Some(errors) = found else { return "no runs".to_owned() };
    let [mean, median, bias] = [errors.mean_absolute, errors.median_absolute, errors.bias].map(|error| error * 100.0);
    format!("{} runs, mean error {mean:.2} %, median {median:.2} %, bias {bias:+.1} %", errors.count)
}

/// Errors by source and over groups of sources, of folds and of sources left out.
pub fn report_sources(samples: &[Sample], found: &HeldOut) {
    for (what, unseen) in [("five folds", &found.folds), ("sources left out", &found.sources)] {
        println!("{what}:");
        let mut by: BTreeMap<&str, Vec<&Unseen>> = BTreeMap::new();
        for unseen in unseen {
            let source = &*samples[unseen.index].row.source;
            by.entry(source).or_default().push(unseen);
            if source != NOISY {
                // Sources whose layouts are fully stated leave no cell open that decides time.
                let stated = !samples.iter().any(|other| other.row.source == source && other.case.open);
                by.entry(if stated { "~ all of stated layouts" } else { "~ all of others" }).or_default().push(unseen);
                by.entry("~ all but V100").or_default().push(unseen);
            }
        }
        by.into_iter().for_each(|(source, unseen)| println!("  {source}: {}", describe(&unseen)));
    }
}

/// What 90 % of unseen runs do not exceed, by stack; how blank cells and unseen sources widen it; and how many of each
/// fold's runs lie within the widths of the other folds.
pub fn report_intervals(samples: &[Sample], found: &HeldOut) -> Widths {
    let stack = |unseen: &Unseen| samples[unseen.index].case.request.machine.stack.name.as_str();
    let open = |unseen: &Unseen| samples[unseen.index].case.open;
    let deviation = |unseen: &Unseen| ((-unseen.log_error).exp() - 1.0).abs();
    let folds: Vec<&Unseen> = found.folds.iter().filter(|unseen| tells(samples, unseen.index)).collect();
    let ratio = |all: Vec<f64>| ninetieth(all).unwrap_or(f64::NAN);
    let raw = |name: &str| ratio(folds.iter().filter(|unseen| stack(unseen) == name).map(|u| deviation(u)).collect());
    let in_raw = |is: bool| {
        let some = folds.iter().filter(|unseen| open(unseen) == is);
        ratio(some.map(|unseen| deviation(unseen) / raw(stack(unseen))).filter(|width| width.is_finite()).collect())
    };
    let blank = (in_raw(true) / in_raw(false)).max(1.0);
    println!("blank cells: {:.2} widths, others {:.2}: factor {blank:.2}", in_raw(true), in_raw(false));
    let narrowed = |unseen: &Unseen| deviation(unseen) / if open(unseen) { blank } else { 1.0 };
    let width = |name: &str, without: Option<usize>| {
        let of_stack = folds.iter().filter(|unseen| stack(unseen) == name && Some(unseen.fold) != without);
        ninetieth(of_stack.map(|unseen| narrowed(unseen)).collect())
    };
    let names: BTreeSet<&str> = folds.iter().map(|unseen| stack(unseen)).collect();
    let mut stacks = Vec::new();
    for name in names {
        let runs = folds.iter().filter(|unseen| stack(unseen) == name).count();
        let Some(value) = width(name, None) else { continue };
        println!("{name}: 90 % of {runs} unseen runs within {:.1} %", value * 100.0);
        stacks.push(Width { stack: name.to_owned(), value, runs });
    }
    let known = |unseen: &Unseen| stacks.iter().find(|width| width.stack == stack(unseen)).map(|width| width.value);
    let left_out = || found.sources.iter().filter(|unseen| samples[unseen.index].row.source != NOISY);
    let outside = ratio(left_out().filter_map(|unseen| Some(narrowed(unseen) / known(unseen)?)).collect());
    println!(
        "unseen sources: {outside:.2} widths; 90 % within {:.1} %",
        ratio(left_out().map(narrowed).collect()) * 100.0
    );
    let within =
        |unseen: &&&Unseen| width(stack(unseen), Some(unseen.fold)).is_none_or(|width| narrowed(unseen) <= width);
    let covered = folds.iter().filter(within).count() as f64 / folds.len() as f64;
    println!("{:.1} % of {} runs within the widths of the other folds", covered * 100.0, folds.len());
    Widths { stacks, blank, outside }
}

/// Whether a run tells how far steps are from the predictions of its stack.
pub fn tells(samples: &[Sample], index: usize) -> bool {
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
