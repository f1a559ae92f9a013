//! Learning rate and batch size of a step.

use std::f64::consts::PI;

use ir::strategy::Strategy;

use super::{Anneal, BatchRampUp, Decay, Extent, TrainConfig};

/// What was done before a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Steps done: 0 in the first step, which logs call step 1.
    pub steps: u64,
    /// Samples consumed by them, over all replicas.
    pub samples: u64,
}

impl Extent {
    /// The number, whatever it counts.
    pub fn count(self) -> u64 {
        match self {
            Extent::Steps(count) | Extent::Samples(count) => count,
        }
    }

    /// How much of what this extent counts is done.
    fn done(self, progress: Progress) -> u64 {
        match self {
            Extent::Steps(_) => progress.steps,
            Extent::Samples(_) => progress.samples,
        }
    }
}

/// Learning rate of the step that follows `progress`.
///
/// With n done, w warm-up, u until, a anneal: start + (peak − start) · n / w for n ≤ w; minimum for n > u; else
/// minimum + (peak − minimum) · c with c = 1 − r (linear), (1 + cos πr) / 2 (cosine), r = (n − w) / (u − w). In a
/// warm-up, stable, decay schedule c = 1 up to n = u − a, then the anneal's shape of r = (n − u + a) / a.
///
/// Source: Megatron-Core 0.16.1, `optimizer_param_scheduler.py`, `get_lr`. As there, the first step of a warm-up
/// from 0 has the rate 0.
pub fn learning_rate(config: &TrainConfig, progress: Progress) -> f64 {
    let (peak, start, warmup) = (config.optimizer.learning_rate, config.schedule.start, config.schedule.warmup);
    let warmed = warmup.done(progress);
    if warmup.count() > 0 && warmed <= warmup.count() {
        return start + (peak - start) * warmed as f64 / warmup.count() as f64;
    }
    let (until, minimum) = match config.schedule.decay {
        Decay::Constant => return peak,
        Decay::Linear { until, minimum }
        | Decay::Cosine { until, minimum }
        | Decay::WarmupStableDecay { until, minimum, .. } => (until, minimum),
    };
    let done = until.done(progress);
    if done > until.count() {
        return minimum;
    }
    let ratio = (done - warmup.count()) as f64 / (until.count() - warmup.count()) as f64;
    let coefficient = match config.schedule.decay {
        Decay::Constant => 1.0,
        Decay::Linear { .. } => 1.0 - ratio,
        Decay::Cosine { .. } => half_cosine(ratio),
        Decay::WarmupStableDecay { anneal, shape, .. } => match done.checked_sub(until.count() - anneal.count()) {
            None | Some(0) => 1.0,
            Some(annealed) => anneal_coefficient(shape, annealed as f64 / anneal.count() as f64),
        },
    };
    minimum + (peak - minimum) * coefficient
}

fn anneal_coefficient(shape: Anneal, ratio: f64) -> f64 {
    match shape {
        Anneal::Linear => 1.0 - ratio,
        Anneal::Cosine => half_cosine(ratio),
        Anneal::Exponential => 2.0 * 0.5f64.powf(ratio) - 1.0,
        Anneal::MinusSquareRoot => 1.0 - ratio.sqrt(),
    }
}

fn half_cosine(ratio: f64) -> f64 {
    0.5 * (1.0 + (PI * ratio).cos())
}

/// Sequences of the step that follows `samples` consumed samples, over all replicas.
///
/// start + increment · ⌊n · k / samples⌋ with n consumed and k the number of increments, at most `whole`. Source:
/// Megatron-Core 0.16.1, `num_microbatches_calculator.py`; in whole numbers instead of floating point.
pub fn global_batch_at(ramp_up: Option<BatchRampUp>, whole: u64, samples: u64) -> u64 {
    match ramp_up {
        Some(ramp) if samples < ramp.samples => {
            let increments = (whole - ramp.start) / ramp.increment;
            let done = u128::from(samples) * u128::from(increments) / u128::from(ramp.samples);
            ramp.start + ramp.increment * done as u64
        }
        Some(_) | None => whole,
    }
}

/// Micro-batches of each replica in the step that follows `samples` consumed samples.
///
/// The file must have passed [`super::check_against`] with the same strategy.
pub fn micro_batches_at(config: &TrainConfig, strategy: &Strategy, samples: u64) -> u64 {
    let batch = global_batch_at(config.batch_ramp_up, strategy.global_batch, samples);
    batch / (strategy.micro_batch * strategy.data_parallel)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::{Optimizer, Schedule};

    fn config(schedule: Schedule) -> TrainConfig {
        let optimizer = Optimizer { learning_rate: 1e-3, ..Optimizer::default() };
        TrainConfig { optimizer, schedule, ..TrainConfig::default() }
    }

    /// Expected rates as Megatron-Core 0.16.1's `OptimizerParamScheduler.get_lr` gives them for max_lr 1e-3, min_lr 1e-4.
    #[test]
    fn rates_are_those_of_megatron() {
        use Extent::Steps;
        let (until, minimum) = (Steps(110), 1e-4);
        let stable = |shape| Decay::WarmupStableDecay { until: Steps(100), minimum, anneal: Steps(20), shape };
        type Row<'a> = (&'a str, u64, f64, Decay, &'a [(u64, f64)]);
        let rows: [Row; 9] = [
            (
                "constant",
                10,
                0.0,
                Decay::Constant,
                &[(0, 0.0), (1, 1e-4), (5, 5e-4), (10, 1e-3), (11, 1e-3), (5000, 1e-3)],
            ),
            (
                "linear",
                10,
                0.0,
                Decay::Linear { until, minimum },
                &[
                    (0, 0.0),
                    (5, 5e-4),
                    (10, 1e-3),
                    (11, 9.91e-4),
                    (60, 5.5e-4),
                    (110, 1e-4),
                    (111, 1e-4),
                    (1 << 40, 1e-4),
                ],
            ),
            ("start", 10, 5e-4, Decay::Linear { until, minimum }, &[(0, 5e-4), (5, 7.5e-4), (10, 1e-3)]),
            (
                "cosine",
                10,
                0.0,
                Decay::Cosine { until, minimum },
                &[
                    (11, 0.000_999_777_952_164_579_3),
                    (35, 0.000_868_198_051_533_946_4),
                    (60, 5.5e-4),
                    (85, 0.000_231_801_948_466_053_65),
                    (110, 1e-4),
                    (111, 1e-4),
                    (1 << 40, 1e-4),
                ],
            ),
            (
                "no warm-up",
                0,
                0.0,
                Decay::Cosine { until: Steps(100), minimum },
                &[(0, 1e-3), (50, 5.5e-4), (101, 1e-4)],
            ),
            (
                "stable, linear",
                10,
                0.0,
                stable(Anneal::Linear),
                &[(5, 5e-4), (50, 1e-3), (80, 1e-3), (81, 9.55e-4), (90, 5.5e-4), (100, 1e-4), (101, 1e-4)],
            ),
            (
                "stable, cosine",
                10,
                0.0,
                stable(Anneal::Cosine),
                &[(80, 1e-3), (81, 0.000_994_459_753_267_812), (85, 0.000_868_198_051_533_946_4), (100, 1e-4)],
            ),
            (
                "stable, exponential",
                10,
                0.0,
                stable(Anneal::Exponential),
                &[(80, 1e-3), (81, 0.000_938_685_392_064_722_1), (90, 0.000_472_792_206_135_785_6), (100, 1e-4)],
            ),
            (
                "stable, square root",
                10,
                0.0,
                stable(Anneal::MinusSquareRoot),
                &[(80, 1e-3), (81, 0.000_798_753_882_025_019), (85, 5.5e-4), (100, 1e-4), (200, 1e-4)],
            ),
        ];
        for (name, warmup, start, decay, expected) in rows {
            let config = config(Schedule { warmup: Steps(warmup), start, decay });
            for (steps, rate) in expected {
                let found = learning_rate(&config, Progress { steps: *steps, samples: 7 * steps });
                assert!((found - rate).abs() < 1e-15, "{name}, {steps} steps: {found}, expected {rate}");
            }
        }
    }

    #[test]
    fn samples_count_where_the_file_counts_samples() {
        let decay = Decay::Linear { until: Extent::Samples(1100), minimum: 0.0 };
        let config = config(Schedule { warmup: Extent::Samples(100), start: 0.0, decay });
        for (samples, rate) in [(0, 0.0), (50, 5e-4), (100, 1e-3), (600, 5e-4), (1100, 0.0), (2000, 0.0)] {
            let found = learning_rate(&config, Progress { steps: 3, samples });
            assert!((found - rate).abs() < 1e-15, "{samples} samples: {found}");
        }
    }

    /// Expected sizes by hand: three increments of 16 within 300 samples; BLOOM's ramp-up has 116 within 9,765,625.
    #[test]
    fn batches_grow_in_equal_parts_of_the_samples() {
        let small = BatchRampUp { start: 16, increment: 16, samples: 300 };
        let bloom = BatchRampUp { start: 192, increment: 16, samples: 9_765_625 };
        let rows = [
            (Some(small), 64, 0, 16),
            (Some(small), 64, 99, 16),
            (Some(small), 64, 100, 32),
            (Some(small), 64, 200, 48),
            (Some(small), 64, 299, 48),
            (Some(small), 64, 300, 64),
            (Some(small), 64, u64::MAX, 64),
            (Some(bloom), 2048, 0, 192),
            (Some(bloom), 2048, 84_186, 192),
            (Some(bloom), 2048, 84_187, 208),
            (Some(bloom), 2048, 9_765_624, 2032),
            (Some(bloom), 2048, 9_765_625, 2048),
            (None, 48, 0, 48),
        ];
        for (ramp_up, whole, samples, expected) in rows {
            assert_eq!(global_batch_at(ramp_up, whole, samples), expected, "{ramp_up:?} {samples}");
        }
    }
}
