//! What failures cost a long run: how often to write a checkpoint, and the share of time that makes progress.

use ir::units::Seconds;

/// Failures of a run and the work around them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interruptions {
    /// Mean time between failures of the whole run.
    pub mean_time_between_failures: Seconds,
    /// Time to write a checkpoint, during which the run waits.
    pub checkpoint: Seconds,
    /// Time from a failure to the first step after it.
    pub restart: Seconds,
}

/// Time of progress between two checkpoints that loses least to failures and checkpoints together.
///
/// τ = √(2δM) · (1 + √(δ/2M)/3 + (δ/2M)/9) − δ for δ < 2M, else M
///
/// δ: time of a checkpoint; M: mean time between failures, which come at random with a constant rate. The first
/// factor alone is Young's (Young, CACM 17(9), 1974); the rest is Daly's (Daly, FGCS 22(3), 2006, equation 37).
/// Infinite where a checkpoint takes no time at all: then it may come after every step.
pub fn checkpoint_interval(run: Interruptions) -> Seconds {
    let (delta, between) = (run.checkpoint.0, run.mean_time_between_failures.0);
    if delta >= 2.0 * between {
        return run.mean_time_between_failures;
    }
    let ratio = delta / (2.0 * between);
    Seconds((2.0 * delta * between).sqrt() * (1.0 + ratio.sqrt() / 3.0 + ratio / 9.0) - delta)
}

/// Share of the time in which steps are made that stay, with a checkpoint after each `interval` of progress.
///
/// G = τ / (M · e^(R/M) · (e^((τ + δ)/M) − 1))
///
/// τ: the interval, δ: time of a checkpoint, R: of a restart, M: mean time between failures. Failures come at
/// random with a constant rate, during checkpoints and restarts too. Source: Daly, FGCS 22(3), 2006, equation 20.
pub fn goodput(run: Interruptions, interval: Seconds) -> f64 {
    let between = run.mean_time_between_failures.0;
    let segment = ((interval.0 + run.checkpoint.0) / between).exp_m1();
    interval.0 / (between * (run.restart.0 / between).exp() * segment)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(between: f64, checkpoint: f64, restart: f64) -> Interruptions {
        Interruptions {
            mean_time_between_failures: Seconds(between),
            checkpoint: Seconds(checkpoint),
            restart: Seconds(restart),
        }
    }

    /// Time for `work` seconds of progress, failures drawn one by one.
    fn simulated(run: Interruptions, interval: f64, work: f64) -> f64 {
        let mut state = 1u64;
        let mut next = || {
            // Knuth's MMIX generator; the upper bits are uniform enough for a mean.
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let uniform = ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
            -run.mean_time_between_failures.0 * uniform.ln()
        };
        let (mut time, mut done, mut failure) = (0.0, 0.0, next());
        while done < work {
            let segment = interval + run.checkpoint.0;
            if segment <= failure {
                (time, done, failure) = (time + segment, done + interval, failure - segment);
                continue;
            }
            (time, failure) = (time + failure, next());
            while run.restart.0 > failure {
                (time, failure) = (time + failure, next());
            }
            (time, failure) = (time + run.restart.0, failure - run.restart.0);
        }
        time
    }

    #[test]
    fn a_simulated_run_takes_as_long_as_the_formula_says() {
        for (between, checkpoint, restart, interval) in
            [(10_000.0, 60.0, 600.0, 1_000.0), (3_000.0, 120.0, 900.0, 800.0), (100_000.0, 40.0, 600.0, 3_600.0)]
        {
            let run = run(between, checkpoint, restart);
            let work = 20_000.0 * between;
            let found = work / simulated(run, interval, work);
            let expected = goodput(run, Seconds(interval));
            assert!((found / expected - 1.0).abs() < 0.01, "{run:?}: simulated {found}, formula {expected}");
        }
    }

    #[test]
    fn no_other_interval_is_much_better() {
        for (between, checkpoint) in [(1e5, 1.0), (1e5, 100.0), (1e4, 300.0), (3e3, 600.0), (1e3, 900.0)] {
            let run = run(between, checkpoint, 600.0);
            let best = goodput(run, checkpoint_interval(run));
            let others = (1..2000).map(|tenth| goodput(run, Seconds(between * f64::from(tenth) / 400.0)));
            let most = others.fold(0.0, f64::max);
            assert!(best > most * 0.995, "{run:?}: {best} at the interval, {most} at another");
        }
    }
}
