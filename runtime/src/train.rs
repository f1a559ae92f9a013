//! The training file `train.ron`: what belongs to a run but not to its plan.
//!
//! Every field may be left out; the defaults are those of GPT-3 and Megatron-LM where they agree. Rates and
//! batch sizes of a step are pure functions of what was done before it ([`learning_rate`],
//! [`micro_batches_at`]), so that a resumed run goes on as if it had not stopped.

mod check;
mod schedule;

use ir::error::Error;
use ir::program::Parameter;
use ir::text::read_ron;
use serde::{Deserialize, Serialize};

pub use check::{check_against, check_train};
pub use schedule::{Progress, global_batch_at, learning_rate, micro_batches_at};

/// A training file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// Seed of initial values and dropout; `--seed` goes before it.
    pub seed: u64,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// How the learning rate changes.
    pub schedule: Schedule,
    /// A smaller batch at the start.
    pub batch_ramp_up: Option<BatchRampUp>,
    /// Dropout.
    pub dropout: Dropout,
    /// Initial values.
    pub initialisation: Initial,
    /// Evaluation during training; none without it.
    pub evaluation: Option<Evaluation>,
    /// Steps from one progress line to the next; `--log` has every step.
    pub log_interval: u64,
}

/// AdamW (arXiv 1711.05101) with clipping by the global gradient norm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Optimizer {
    /// Largest learning rate.
    pub learning_rate: f64,
    /// Decay of the first and the second moment.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay; each step subtracts learning rate × weight decay × weight.
    pub weight_decay: f64,
    /// Parameters without weight decay: those whose logical name, such as `layer 3/attention.norm.weight`,
    /// contains one of these words. Norms and biases where absent ([`has_weight_decay`]).
    pub no_weight_decay: Option<Vec<String>>,
    /// Largest global gradient norm; `None` for no clipping.
    pub clip: Option<f64>,
}

/// A number of steps or of samples (sequences) since the start of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Extent {
    /// Optimizer steps.
    Steps(u64),
    /// Samples over all replicas.
    Samples(u64),
}

/// How the learning rate changes: up in a line, then as `decay` says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Schedule {
    /// Length of the warm-up, from `start` to the optimizer's learning rate.
    pub warmup: Extent,
    /// Learning rate at the start of the warm-up.
    pub start: f64,
    /// What comes behind the warm-up.
    pub decay: Decay,
}

/// The learning rate behind the warm-up. `until` counts from the start of the run; `minimum` is held from there on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Decay {
    /// It stays.
    Constant,
    /// It falls in a line.
    Linear {
        /// Where it ends.
        until: Extent,
        /// The rate at the end and behind it.
        minimum: f64,
    },
    /// It falls along half a cosine wave.
    Cosine {
        /// Where it ends.
        until: Extent,
        /// The rate at the end and behind it.
        minimum: f64,
    },
    /// It stays until the last part (arXiv 2404.06395, section 4.1).
    WarmupStableDecay {
        /// Where it ends.
        until: Extent,
        /// The rate at the end and behind it.
        minimum: f64,
        /// Length of the last part.
        anneal: Extent,
        /// How it falls in the last part.
        shape: Anneal,
    },
}

/// How the learning rate falls in the last part of a warm-up, stable, decay schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Anneal {
    /// In a line.
    Linear,
    /// Along half a cosine wave.
    Cosine,
    /// As 2 · ½ʳ − 1, r from 0 to 1.
    Exponential,
    /// As 1 − √r, r from 0 to 1.
    MinusSquareRoot,
}

/// A global batch that grows in equal parts of `samples` from `start` to the plan's (Megatron-LM's
/// `--rampup-batch-size`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchRampUp {
    /// Sequences of the first step.
    pub start: u64,
    /// Sequences that are added each time.
    pub increment: u64,
    /// Samples after which the batch is the plan's.
    pub samples: u64,
}

/// Probabilities with which activations are set to 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Dropout {
    /// Embedding, and what attention and feed-forward add to the residual stream.
    pub hidden: f64,
    /// Attention weights.
    pub attention: f64,
}

/// Initial values of parameters that are not read from a checkpoint ([`crate::initial`]).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Initial {
    /// Standard deviation of matrices and tables.
    pub deviation: f64,
}

/// Evaluation during training.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evaluation {
    /// Training steps from one evaluation to the next.
    pub interval: u64,
    /// Global batches of an evaluation.
    pub steps: u64,
    /// Fraction of the corpus that is kept from training and evaluated on; with 0 the corpus itself.
    #[serde(default)]
    pub held_out: f64,
}

impl Default for TrainConfig {
    fn default() -> TrainConfig {
        TrainConfig {
            seed: 1234,
            optimizer: Optimizer::default(),
            schedule: Schedule::default(),
            batch_ramp_up: None,
            dropout: Dropout::default(),
            initialisation: Initial::default(),
            evaluation: None,
            log_interval: 1,
        }
    }
}

impl Default for Optimizer {
    /// Source: GPT-3 (arXiv 2005.14165), appendix B; the learning rate is that of its 350 M model (table 2.1).
    fn default() -> Optimizer {
        Optimizer {
            learning_rate: 3e-4,
            betas: (0.9, 0.95),
            eps: 1e-8,
            weight_decay: 0.1,
            no_weight_decay: None,
            clip: Some(1.0),
        }
    }
}

impl Default for Schedule {
    fn default() -> Schedule {
        Schedule { warmup: Extent::Steps(0), start: 0.0, decay: Decay::Constant }
    }
}

impl Default for Initial {
    /// Source: GPT-2; Megatron-LM's `--init-method-std`.
    fn default() -> Initial {
        Initial { deviation: 0.02 }
    }
}

/// Reads and checks a training file; `origin` names the file in errors.
///
/// # Errors
/// `Error::Syntax` at the first malformed place, `Error::Invalid` with every field that makes no sense.
pub fn read_train(text: &str, origin: &str) -> Result<TrainConfig, Error> {
    let config: TrainConfig = read_ron(text, origin)?;
    check_train(&config, origin)?;
    Ok(config)
}

/// Whether a parameter decays; `logical_name` as [`crate::initial::logical_name`] gives it.
///
/// Norms and biases do not, unless the file lists words of its own: Megatron-Core exempts parameters of one dim
/// and those called bias. A bias of heads has several dims here, so the name counts, not the shape alone. A tied
/// head has the embedding's name, so both copies decay alike.
pub fn has_weight_decay(optimizer: &Optimizer, logical_name: &str, parameter: &Parameter) -> bool {
    match &optimizer.no_weight_decay {
        Some(words) => !words.iter().any(|word| logical_name.contains(word.as_str())),
        None => parameter.shape.len() != 1 && !parameter.name.ends_with(".bias"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::distribution::Distribution;
    use ir::graph::DimName;

    #[test]
    fn an_empty_file_gives_the_defaults_and_a_written_one_comes_back() {
        assert_eq!(read_train("()", "train.ron"), Ok(TrainConfig::default()));
        let text = r#"(
            seed: 7,
            optimizer: (learning_rate: 6e-5, clip: None, no_weight_decay: ["norm", "bias", "embedding.token"]),
            schedule: (warmup: Samples(183_105), decay: Cosine(until: Samples(200_000_000), minimum: 6e-6)),
            batch_ramp_up: (start: 192, increment: 16, samples: 9_765_625),
            dropout: (hidden: 0.1),
            initialisation: (deviation: 0.0048),
            evaluation: (interval: 1000, steps: 10, held_out: 0.05),
        )"#;
        let config = read_train(text, "train.ron").expect("sound");
        assert_eq!(config.optimizer.betas, (0.9, 0.95));
        assert_eq!(config.dropout, Dropout { hidden: 0.1, attention: 0.0 });
        assert_eq!(config.batch_ramp_up, Some(BatchRampUp { start: 192, increment: 16, samples: 9_765_625 }));
        assert_eq!(read_train(&ir::text::write_ron(&config, 2), "written"), Ok(config));
    }

    #[test]
    fn norms_and_biases_do_not_decay_unless_the_file_says_so() {
        use DimName::{HeadDim, Hidden, KeyValueHeads, Vocabulary};
        let rows: [(&str, &[DimName], bool, bool); 5] = [
            ("layer 3/attention.norm.weight", &[Hidden], false, true),
            ("layer 3/feed_forward.down.bias", &[Hidden], false, true),
            ("layer 3/attention.key.bias", &[KeyValueHeads, HeadDim], false, true),
            ("layer 3/attention.key.weight", &[Hidden, KeyValueHeads, HeadDim], true, true),
            ("embedding/embedding.token", &[Vocabulary, Hidden], true, false),
        ];
        let own = Optimizer { no_weight_decay: Some(vec!["embedding.".to_owned()]), ..Optimizer::default() };
        for (logical_name, dims, by_default, by_words) in rows {
            let parameter = Parameter {
                name: logical_name.rsplit('/').next().unwrap_or_default().to_owned(),
                shape: dims.iter().map(|dim| (*dim, 4)).collect(),
                stored: Distribution::REPLICATED,
                gradient: Distribution::REPLICATED,
                tied: false,
            };
            assert_eq!(has_weight_decay(&Optimizer::default(), logical_name, &parameter), by_default, "{logical_name}");
            assert_eq!(has_weight_decay(&own, logical_name, &parameter), by_words, "{logical_name}");
        }
    }
}
