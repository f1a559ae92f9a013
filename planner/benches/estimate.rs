//! Estimates a second on one core: layouts of the published runs, each costed from its model's graph on.
//!
//! `cargo bench -p planner --bench estimate`; times are medians of the wall clock.

#![allow(clippy::print_stdout, reason = "this is a program that prints")]

use std::error::Error;
use std::fs;
use std::hint::black_box;
use std::time::Instant;

use planner::validate::case::{Case, prepare};
use planner::validate::table::read_table;
use planner::validate::{predict, validate};

/// Times of which the median counts.
const REPETITIONS: usize = 15;

fn main() -> Result<(), Box<dyn Error>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/published/runs.csv");
    let text = fs::read_to_string(path)?;
    let rows = read_table(&text, "runs.csv")?;
    let cases: Vec<Case> = rows.iter().filter_map(|row| prepare(&row.run).ok()).collect();
    let layouts: usize = cases.iter().map(|case| case.layouts.len()).sum();
    let seconds = median(|| cases.iter().map(predict).filter(Result::is_ok).count());
    println!("{layouts} layouts: {:.0} estimates a second", layouts as f64 / seconds);
    let seconds = median(|| validate(rows.clone()).len());
    println!("{} rows from the table on: {:.0} ms", rows.len(), seconds * 1e3);
    Ok(())
}

/// Median time of a call.
fn median<T>(mut work: impl FnMut() -> T) -> f64 {
    let mut times: Vec<f64> = (0..REPETITIONS)
        .map(|_| {
            let started = Instant::now();
            black_box(work());
            started.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[REPETITIONS / 2]
}
