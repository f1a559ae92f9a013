//! How good predictions are: errors by source, GPU and stack, order and regret in sweeps, memory and verdicts.

use std::collections::BTreeMap;

use ir::units::Seconds;

use super::{Prediction, Validated};

/// Fewest runs of a sweep.
const LEAST_SWEEP: usize = 3;

/// Errors of a set of predictions, relative to what was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Errors {
    /// Predictions.
    pub count: usize,
    /// Mean of the absolute errors (MAPE).
    pub mean_absolute: f64,
    /// Median of the absolute errors.
    pub median_absolute: f64,
    /// Mean error.
    pub bias: f64,
    /// The absolute error that nine of ten do not exceed.
    pub ninetieth_percentile: f64,
}

/// Runs of one model on equal GPUs that differ in layout.
#[derive(Clone, Debug, PartialEq)]
pub struct Sweep {
    /// What the runs have in common.
    pub name: String,
    /// Runs.
    pub count: usize,
    /// Kendall's rank correlation of predicted and measured seconds per sequence.
    pub tau: f64,
    /// Time of the run that is predicted fastest over that of the fastest one, less one.
    pub regret: f64,
}

/// A table's summary.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Rows.
    pub rows: usize,
    /// Rows that were predicted.
    pub predicted: usize,
    /// Errors of step times of all rows.
    pub time: Option<Errors>,
    /// By the table's sources.
    pub by_source: BTreeMap<String, Errors>,
    /// By GPU.
    pub by_gpu: BTreeMap<String, Errors>,
    /// By stack.
    pub by_stack: BTreeMap<String, Errors>,
    /// Share of runs within their 90 % interval.
    pub covered: f64,
    /// Sweeps.
    pub sweeps: Vec<Sweep>,
    /// Errors of peak memory by source: the nearer of device use and allocator peak is what the source states.
    pub memory_by_source: BTreeMap<String, Errors>,
    /// Runs that ended out of memory, and those of them that were predicted to fit.
    pub out_of_memory: (usize, usize),
}

/// Summarises a table.
pub fn summarize(rows: &[Validated]) -> Summary {
    let mut summary = Summary {
        rows: rows.len(),
        predicted: rows.iter().filter(|row| row.prediction.is_ok()).count(),
        time: errors(rows.iter().filter_map(Validated::error)),
        by_source: grouped(rows, Validated::error, |row, _| row.row.source.clone()),
        by_gpu: grouped(rows, Validated::error, |row, _| row.row.run.gpu.clone()),
        by_stack: grouped(rows, Validated::error, |_, prediction| prediction.stack.clone()),
        covered: 0.0,
        sweeps: sweeps(rows),
        memory_by_source: memory_by_source(rows),
        out_of_memory: (0, 0),
    };
    let timed = rows.iter().filter_map(|row| Some((row.prediction.as_ref().ok()?, row.row.measured.step_seconds?)));
    let inside = |(prediction, measured): &(&Prediction, f64)| {
        (prediction.interval.0..=prediction.interval.1).contains(&Seconds(*measured))
    };
    let timed: Vec<(&Prediction, f64)> = timed.collect();
    summary.covered = timed.iter().filter(|pair| inside(pair)).count() as f64 / timed.len().max(1) as f64;
    for prediction in rows.iter().filter(|row| row.row.measured.out_of_memory).flat_map(|row| &row.prediction) {
        summary.out_of_memory.0 += 1;
        summary.out_of_memory.1 += usize::from(prediction.fits);
    }
    summary
}

impl Validated {
    /// Predicted over measured time, less one.
    pub fn error(&self) -> Option<f64> {
        let measured = self.row.measured.step_seconds?;
        Some(self.prediction.as_ref().ok()?.step.0 / measured - 1.0)
    }
}

/// Errors of a set; `None` if it is empty.
pub fn errors(all: impl Iterator<Item = f64>) -> Option<Errors> {
    let all: Vec<f64> = all.collect();
    let mut sizes: Vec<f64> = all.iter().map(|error| error.abs()).collect();
    sizes.sort_by(f64::total_cmp);
    let count = sizes.len();
    let last = count.checked_sub(1)?;
    Some(Errors {
        count,
        mean_absolute: sizes.iter().sum::<f64>() / count as f64,
        median_absolute: sizes[count / 2],
        bias: all.iter().sum::<f64>() / count as f64,
        ninetieth_percentile: sizes[(0.9 * last as f64).round() as usize],
    })
}

fn grouped(
    rows: &[Validated],
    error: impl Fn(&Validated) -> Option<f64>,
    name: impl Fn(&Validated, &Prediction) -> String,
) -> BTreeMap<String, Errors> {
    let mut groups: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for row in rows {
        if let (Some(error), Ok(prediction)) = (error(row), &row.prediction) {
            groups.entry(name(row, prediction)).or_default().push(error);
        }
    }
    groups.into_iter().filter_map(|(name, group)| Some((name, errors(group.into_iter())?))).collect()
}

/// Sources state either what the driver or what the allocator counts; which one shows in the table as a whole.
fn memory_by_source(rows: &[Validated]) -> BTreeMap<String, Errors> {
    let by = |bytes: fn(&Prediction) -> f64| {
        let error =
            move |row: &Validated| Some(bytes(row.prediction.as_ref().ok()?) / row.row.measured.peak_memory_gib? - 1.0);
        grouped(rows, error, |row, _| row.row.source.clone())
    };
    let mut device = by(|prediction| prediction.device_memory.gib());
    for (source, allocator) in by(|prediction| prediction.allocator_peak.gib()) {
        let nearer = device.get(&source).is_none_or(|device| allocator.mean_absolute < device.mean_absolute);
        if nearer {
            device.insert(source, allocator);
        }
    }
    device
}

fn sweeps(rows: &[Validated]) -> Vec<Sweep> {
    let mut groups: BTreeMap<String, Vec<[f64; 2]>> = BTreeMap::new();
    for row in rows {
        let run = &row.row.run;
        let (Ok(prediction), Some(measured)) = (&row.prediction, row.row.measured.step_seconds) else { continue };
        let Some(batch) = run.global_batch else { continue };
        let shape = [run.layers, run.hidden, run.ffn_hidden, run.heads, run.kv_heads, run.vocab, run.seq_len];
        let shape = shape.map(|extent| extent.map_or("-".to_owned(), |extent| extent.to_string())).join("/");
        let day = row.row.measured.day.as_ref().map_or(String::new(), |day| format!(", {day}"));
        let precision = run.precision.as_deref().unwrap_or("-");
        let name = format!("{}{day}: {} x {}, {precision}, {shape}", row.row.source, run.gpus.unwrap_or(0), run.gpu);
        groups.entry(name).or_default().push([prediction.step.0, measured].map(|seconds| seconds / batch as f64));
    }
    let large = groups.into_iter().filter(|(_, runs)| runs.len() >= LEAST_SWEEP);
    large
        .map(|(name, runs)| Sweep { name, count: runs.len(), tau: kendall_tau(&runs), regret: regret(&runs) })
        .collect()
}

/// Kendall's tau-b of pairs: concordant less discordant pairs over the geometric mean of those without ties.
fn kendall_tau(runs: &[[f64; 2]]) -> f64 {
    let (mut order, mut different) = (0.0, [0.0; 2]);
    for (place, a) in runs.iter().enumerate() {
        for b in &runs[..place] {
            let signs = [0, 1].map(|side: usize| if a[side] == b[side] { 0.0 } else { (a[side] - b[side]).signum() });
            order += signs[0] * signs[1];
            different.iter_mut().zip(signs).for_each(|(sum, sign)| *sum += sign.abs());
        }
    }
    if different[0] * different[1] == 0.0 { 0.0 } else { order / (different[0] * different[1]).sqrt() }
}

/// What the run predicted fastest costs beyond the fastest; of equal predictions the first counts.
fn regret(runs: &[[f64; 2]]) -> f64 {
    let picked = runs.iter().min_by(|a, b| a[0].total_cmp(&b[0])).map_or(1.0, |run| run[1]);
    picked / runs.iter().map(|run| run[1]).fold(f64::INFINITY, f64::min) - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_regret_of_small_sweeps() {
        let cases: [(&[[f64; 2]], f64, f64); 4] = [
            (&[[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]], 1.0, 0.0),
            (&[[3.0, 10.0], [2.0, 20.0], [1.0, 30.0]], -1.0, 2.0),
            (&[[1.0, 12.0], [2.0, 10.0], [3.0, 30.0]], 1.0 / 3.0, 0.2),
            (&[[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], 0.0, 0.0),
        ];
        for (runs, tau, excess) in cases {
            assert!((kendall_tau(runs) - tau).abs() < 1e-12, "{runs:?}");
            assert!((regret(runs) - excess).abs() < 1e-12, "{runs:?}");
        }
    }

    #[test]
    fn errors_of_a_known_set() {
        let found = errors([0.1, -0.2, 0.3, 0.0].into_iter()).expect("the set is not empty");
        assert!((found.mean_absolute - 0.15).abs() < 1e-12 && (found.bias - 0.05).abs() < 1e-12);
        assert_eq!((found.median_absolute, found.ninetieth_percentile), (0.2, 0.3));
        assert_eq!(errors(std::iter::empty()), None);
    }
}
