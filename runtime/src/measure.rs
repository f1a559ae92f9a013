//! Where the time of a run's steps went, over all ranks: beside the plan's estimate, and as a profile of the
//! machine that the next `plan` may use.
//!
//! Rates come from the run itself (`Times` over `StepWork`); what a run does not show is measured after it, on all
//! ranks at once: products of many shapes (`products`), and messages between ranks (`links`).

mod links;
mod products;
mod profile;
mod table;

use crate::communicator::{Error, Group};
use crate::executor::Times;

pub use profile::{Circumstances, measure_profile};
pub use table::comparison;

/// Steps of a run as one rank saw them.
#[derive(Clone, Debug, Default)]
pub struct Steps {
    /// Of each step where its time went.
    pub times: Vec<Times>,
    /// Of each step its time on the slowest rank.
    pub seconds: Vec<f64>,
}

/// A typical step.
#[derive(Clone, Debug)]
pub struct Typical {
    /// Where each rank's time goes, by rank.
    pub times: Vec<Times>,
    /// Time of the step.
    pub seconds: f64,
    /// Steps that this is the median of.
    pub steps: usize,
}

impl Steps {
    /// Medians over the steps, without the first one if there are others: it takes fresh memory.
    ///
    /// # Errors
    /// What ended the run.
    pub fn typical(&self, rank: usize, all: Option<&Group>) -> Result<Option<Typical>, Error> {
        let first = usize::from(self.times.len() > 1);
        let (times, seconds) = (&self.times[first..], &self.seconds[first..]);
        if times.is_empty() {
            return Ok(None);
        }
        let own = Times::typical(times);
        let mut gathered = vec![own; all.map_or(1, Group::size)];
        if let Some(all) = all {
            let mut numbers = vec![0.0; own.numbers().len() * gathered.len()];
            numbers[rank * own.numbers().len()..][..own.numbers().len()].copy_from_slice(own.numbers());
            all.all_gather(&mut numbers)?;
            let parts = numbers.chunks_exact(own.numbers().len());
            gathered.iter_mut().zip(parts).for_each(|(times, part)| times.numbers_mut().copy_from_slice(part));
        }
        Ok(Some(Typical { times: gathered, seconds: median(seconds.to_vec()), steps: times.len() }))
    }
}

/// The middle one, or the upper of two; NaN of none.
fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(f64::NAN)
}
