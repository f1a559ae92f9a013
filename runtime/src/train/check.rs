//! Checks of a training file, by itself and against a plan's strategy.

use ir::error::{Error, Problem};
use ir::strategy::Strategy;

use super::{BatchRampUp, Decay, Evaluation, Extent, Optimizer, Schedule, TrainConfig};

struct Problems<'a> {
    origin: &'a str,
    list: Vec<Problem>,
}

impl Problems<'_> {
    fn add(&mut self, what: impl Into<String>, field: &str, help: impl Into<String>) {
        self.list.push(Problem::new(what, format!("{}, field {field}", self.origin), help));
    }

    fn require(&mut self, sound: bool, value: f64, field: &str, help: &str) {
        if !sound {
            let name = field.rsplit('.').next().unwrap_or(field);
            self.add(format!("{name} is {value:?}"), field, help);
        }
    }

    fn require_positive(&mut self, value: u64, field: &str) {
        self.require(value > 0, value as f64, field, "give a whole number of at least 1");
    }

    fn finish(self) -> Result<(), Error> {
        if self.list.is_empty() { Ok(()) } else { Err(Error::Invalid(self.list)) }
    }
}

/// Checks a training file's fields by themselves and against one another.
///
/// # Errors
/// `Error::Invalid` with every problem found.
pub fn check_train(config: &TrainConfig, origin: &str) -> Result<(), Error> {
    let mut problems = Problems { origin, list: Vec::new() };
    check_optimizer(&config.optimizer, &mut problems);
    check_schedule(&config.schedule, config.optimizer.learning_rate, &mut problems);
    if let Some(ramp) = config.batch_ramp_up {
        problems.require_positive(ramp.start, "batch_ramp_up.start");
        problems.require_positive(ramp.increment, "batch_ramp_up.increment");
        problems.require_positive(ramp.samples, "batch_ramp_up.samples");
    }
    for (value, field) in [(config.dropout.hidden, "dropout.hidden"), (config.dropout.attention, "dropout.attention")] {
        problems.require(is_ratio(value), value, field, "give a probability from 0 to below 1");
    }
    let deviation = config.initialisation.deviation;
    let sound = deviation > 0.0 && deviation.is_finite();
    problems.require(sound, deviation, "initialisation.deviation", "give a positive number, such as 0.02");
    if let Some(Evaluation { interval, steps, held_out }) = config.evaluation {
        problems.require_positive(interval, "evaluation.interval");
        problems.require_positive(steps, "evaluation.steps");
        problems.require(is_ratio(held_out), held_out, "evaluation.held_out", "give a fraction from 0 to below 1");
    }
    problems.require_positive(config.log_interval, "log_interval");
    problems.finish()
}

/// Checks a training file against the strategy of the plan that it is to run: every batch of a ramp-up must be
/// whole micro-batches on every replica.
///
/// # Errors
/// `Error::Invalid` with every problem found.
pub fn check_against(config: &TrainConfig, strategy: &Strategy, origin: &str) -> Result<(), Error> {
    let mut problems = Problems { origin, list: Vec::new() };
    if let Some(ramp) = config.batch_ramp_up {
        check_ramp_up(ramp, strategy, &mut problems);
    }
    problems.finish()
}

fn check_ramp_up(ramp: BatchRampUp, strategy: &Strategy, problems: &mut Problems) {
    let (whole, unit) = (strategy.global_batch, strategy.micro_batch * strategy.data_parallel);
    for (value, field) in [(ramp.start, "start"), (ramp.increment, "increment")] {
        if !value.is_multiple_of(unit) {
            problems.add(
                format!(
                    "{field} {value} is not whole micro-batches: the plan has {} replicas with micro-batches of {}",
                    strategy.data_parallel, strategy.micro_batch
                ),
                &format!("batch_ramp_up.{field}"),
                format!("use a multiple of {unit}"),
            );
        }
    }
    if ramp.start >= whole {
        problems.add(
            format!("start {} is not below the plan's global batch of {whole}", ramp.start),
            "batch_ramp_up.start",
            format!("start below {whole}, or leave batch_ramp_up out"),
        );
    } else if !(whole - ramp.start).is_multiple_of(ramp.increment) {
        problems.add(
            format!("steps of {} from {} do not reach the plan's global batch of {whole}", ramp.increment, ramp.start),
            "batch_ramp_up.increment",
            format!("use a divisor of {}", whole - ramp.start),
        );
    }
}

fn check_optimizer(optimizer: &Optimizer, problems: &mut Problems) {
    let not_negative = |value: f64| value.is_finite() && value >= 0.0;
    let Optimizer { learning_rate, betas, eps, weight_decay, ref no_weight_decay, clip } = *optimizer;
    let rate_help = "give a finite number of at least 0";
    problems.require(not_negative(learning_rate), learning_rate, "optimizer.learning_rate", rate_help);
    for beta in [betas.0, betas.1] {
        problems.require(is_ratio(beta), beta, "optimizer.betas", "give two numbers from 0 to below 1");
    }
    problems.require(eps > 0.0 && eps.is_finite(), eps, "optimizer.eps", "give a positive number, such as 1e-8");
    problems.require(not_negative(weight_decay), weight_decay, "optimizer.weight_decay", rate_help);
    if let Some(clip) = clip {
        let sound = clip > 0.0 && clip.is_finite();
        problems.require(sound, clip, "optimizer.clip", "give a positive number, or None for no clipping");
    }
    if no_weight_decay.iter().flatten().any(String::is_empty) {
        let help = "every name contains the empty word: for no decay at all set weight_decay to 0";
        problems.add("an empty word exempts all parameters", "optimizer.no_weight_decay", help);
    }
}

fn check_schedule(schedule: &Schedule, peak: f64, problems: &mut Problems) {
    // A peak that makes no sense is reported already, once.
    let highest = if peak >= 0.0 { peak } else { f64::INFINITY };
    let rate = |value: f64| (0.0..=highest).contains(&value);
    let rate_help = "give a rate from 0 to the optimizer's learning_rate";
    problems.require(rate(schedule.start), schedule.start, "schedule.start", rate_help);
    let (until, minimum, anneal) = match schedule.decay {
        Decay::Constant => return,
        Decay::Linear { until, minimum } | Decay::Cosine { until, minimum } => (until, minimum, None),
        Decay::WarmupStableDecay { until, minimum, anneal, .. } => (until, minimum, Some(anneal)),
    };
    problems.require(rate(minimum), minimum, "schedule.decay.minimum", rate_help);
    let warmup = schedule.warmup;
    let units = [Some(until), anneal, Some(warmup).filter(|warmup| warmup.count() > 0)];
    if !units.iter().flatten().all(|extent| same_unit(*extent, until)) {
        let help = "count warm-up and decay both in Steps(n) or both in Samples(n)";
        problems.add("the schedule counts some parts in steps and some in samples", "schedule", help);
    }
    if until.count() <= warmup.count() {
        let what = format!("the decay ends at {} but the warm-up lasts {}", until.count(), warmup.count());
        problems.add(what, "schedule.decay.until", "`until` counts from the start of the run: raise it");
    } else if let Some(anneal) = anneal
        && (anneal.count() == 0 || anneal.count() > until.count() - warmup.count())
    {
        let most = until.count() - warmup.count();
        let what = format!("the last part lasts {} of {most} behind the warm-up", anneal.count());
        problems.add(what, "schedule.decay.anneal", format!("give a number from 1 to {most}"));
    }
}

fn same_unit(a: Extent, b: Extent) -> bool {
    matches!((a, b), (Extent::Steps(_), Extent::Steps(_)) | (Extent::Samples(_), Extent::Samples(_)))
}

fn is_ratio(value: f64) -> bool {
    (0.0..1.0).contains(&value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::{global_batch_at, micro_batches_at, read_train};
    use ir::strategy::ScheduleKind;

    fn strategy(data_parallel: u64, micro_batch: u64, global_batch: u64) -> Strategy {
        Strategy {
            micro_batch,
            schedule: ScheduleKind::GPipe,
            layers_per_stage: vec![1],
            ..Strategy::plain([1, 1, data_parallel], global_batch)
        }
    }

    fn fields(checked: Result<(), Error>) -> Vec<String> {
        let problems = checked.map_err(|error| error.problems().to_vec()).err().unwrap_or_default();
        let fields = problems.iter().map(|problem| {
            assert!(!problem.what.is_empty() && !problem.help.is_empty(), "{problem}");
            problem.location.strip_prefix("train.ron, field ").expect("names file and field").to_owned()
        });
        fields.collect()
    }

    #[test]
    fn each_field_that_makes_no_sense_is_named() {
        let rows = [
            ("optimizer: (learning_rate: -1e-3)", "optimizer.learning_rate"),
            ("optimizer: (learning_rate: inf)", "optimizer.learning_rate"),
            ("optimizer: (betas: (1.0, 0.95))", "optimizer.betas"),
            ("optimizer: (betas: (0.9, -0.1))", "optimizer.betas"),
            ("optimizer: (eps: 0)", "optimizer.eps"),
            ("optimizer: (weight_decay: NaN)", "optimizer.weight_decay"),
            ("optimizer: (clip: 0.0)", "optimizer.clip"),
            ("optimizer: (no_weight_decay: [\"\"])", "optimizer.no_weight_decay"),
            ("schedule: (start: 1.0)", "schedule.start"),
            ("schedule: (decay: Linear(until: Steps(9), minimum: 1.0))", "schedule.decay.minimum"),
            ("schedule: (decay: Linear(until: Steps(0), minimum: 0.0))", "schedule.decay.until"),
            ("schedule: (warmup: Steps(9), decay: Cosine(until: Steps(9), minimum: 0.0))", "schedule.decay.until"),
            ("schedule: (warmup: Steps(9), decay: Cosine(until: Samples(10), minimum: 0.0))", "schedule"),
            (
                "schedule: (decay: WarmupStableDecay(until: Steps(9), minimum: 0.0, anneal: Steps(10), shape: Linear))",
                "schedule.decay.anneal",
            ),
            (
                "schedule: (decay: WarmupStableDecay(until: Steps(9), minimum: 0.0, anneal: Samples(5), shape: Linear))",
                "schedule",
            ),
            ("batch_ramp_up: (start: 0, increment: 1, samples: 1)", "batch_ramp_up.start"),
            ("batch_ramp_up: (start: 1, increment: 0, samples: 1)", "batch_ramp_up.increment"),
            ("batch_ramp_up: (start: 1, increment: 1, samples: 0)", "batch_ramp_up.samples"),
            ("dropout: (hidden: 1.0)", "dropout.hidden"),
            ("dropout: (attention: -0.1)", "dropout.attention"),
            ("initialisation: (deviation: 0)", "initialisation.deviation"),
            ("evaluation: (interval: 0, steps: 1)", "evaluation.interval"),
            ("evaluation: (interval: 1, steps: 0)", "evaluation.steps"),
            ("evaluation: (interval: 1, steps: 1, held_out: 1.0)", "evaluation.held_out"),
            ("log_interval: 0", "log_interval"),
        ];
        for (text, field) in rows {
            let found = fields(read_train(&format!("({text})"), "train.ron").map(|_| ()));
            assert_eq!(found, [field], "{text}");
        }
    }

    #[test]
    fn all_problems_are_reported_at_once_and_unknown_fields_refused() {
        let text = "(log_interval: 0, optimizer: (eps: -1.0, clip: -1.0), dropout: (hidden: 2.0))";
        let found = fields(read_train(text, "train.ron").map(|_| ()));
        assert_eq!(found, ["optimizer.eps", "optimizer.clip", "dropout.hidden", "log_interval"]);
        for text in
            ["(learning_rate: 1e-3)", "(optimizer: (lr: 1e-3))", "(schedule: (decay: Step))", "(dropout: (p: 0.1))"]
        {
            assert!(matches!(read_train(text, "train.ron"), Err(Error::Syntax(_))), "{text}");
        }
    }

    #[test]
    fn every_batch_of_a_ramp_up_is_whole_micro_batches() {
        // Start and increment of a ramp-up for 4 replicas with micro-batches of 2 and a global batch of 64.
        let rows: [(u64, u64, &[&str]); 7] = [
            (16, 16, &[]),
            (8, 8, &[]),
            (12, 4, &["batch_ramp_up.start", "batch_ramp_up.increment"]),
            (16, 12, &["batch_ramp_up.increment"]),
            (16, 32, &["batch_ramp_up.increment"]),
            (64, 8, &["batch_ramp_up.start"]),
            (72, 8, &["batch_ramp_up.start"]),
        ];
        let strategy = strategy(4, 2, 64);
        for (start, increment, expected) in rows {
            let ramp = BatchRampUp { start, increment, samples: 1000 };
            let config = TrainConfig { batch_ramp_up: Some(ramp), ..TrainConfig::default() };
            let found = fields(check_against(&config, &strategy, "train.ron"));
            // One field may have two problems.
            let named: std::collections::BTreeSet<&str> = found.iter().map(String::as_str).collect();
            assert_eq!(named, expected.iter().copied().collect(), "{start} {increment}");
            if expected.is_empty() {
                for samples in (0..1100).step_by(7) {
                    let batch = global_batch_at(Some(ramp), 64, samples);
                    assert_eq!(micro_batches_at(&config, &strategy, samples) * 8, batch, "{samples}");
                }
            }
        }
        assert_eq!(fields(check_against(&TrainConfig::default(), &strategy, "train.ron")), [""; 0]);
    }
}
