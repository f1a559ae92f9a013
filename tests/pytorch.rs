//! The fixtures that PyTorch made (`tests/fixtures/make.py`), read as checkpoints and computed again by the
//! single-rank reference: names, layouts and meaning of every parameter are those of the library transformers.

#[path = "support/ranks.rs"]
mod ranks;
mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ir::model::{ModelSpec, Position, Workload, read_model};
use ir::plan::Plan;
use ir::reference::{AdamState, AdamW, Batch, Parameters, adamw_step, logits, loss_and_gradients};
use ir::strategy::{Recompute, ScheduleKind, ZeroStage};
use planner::request::FixedChoices;
use ranks::{RankRun, Run, execute, joined};
use runtime::executor::StepOptions;
use runtime::train::Dropout;
use runtime::weights::{Checkpoint, DimRange};
use safetensors::SafeTensors;
use support::plans::fixed_plan;

const MODELS: [&str; 4] = ["bloom", "gpt2", "llama", "qwen2"];

/// Largest difference of a logit.
const LOGIT_TOLERANCE: f64 = 1e-5;
/// Largest relative difference of a loss or a gradient norm.
const LOSS_TOLERANCE: f64 = 1e-6;
/// Largest difference of a gradient, in units of the tensor's largest.
const GRADIENT_TOLERANCE: f64 = 1e-5;
/// Tensors whose gradients are smaller than this part of the model's largest count as that large.
const SMALL_GRADIENT: f64 = 1e-3;
/// Largest difference of an updated tensor, in units of how far it moved; both as Euclidean norms.
const UPDATE_TOLERANCE: f64 = 1e-3;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

fn model(name: &str) -> ModelSpec {
    let path = folder(&format!("{name}.ron"));
    let text = std::fs::read_to_string(&path).expect("the fixture exists");
    read_model(&text, name).unwrap_or_else(|error| panic!("{error}"))
}

/// All parameters of a file, whole. A tied head is the token embedding and has no key of its own.
fn parameters(file: &Path, model: &ModelSpec) -> Parameters {
    let checkpoint = Checkpoint::open_file(file, model).unwrap_or_else(|error| panic!("{error}"));
    let read = |(key, shape): (&str, &[_])| {
        let whole: Vec<DimRange> =
            shape.iter().map(|(name, extent)| DimRange { name: *name, start: 0, length: *extent }).collect();
        let values = checkpoint.read(key, &whole).unwrap_or_else(|problem| panic!("{problem}"));
        (key.to_owned(), values.into_iter().map(f64::from).collect())
    };
    let own = checkpoint.parameters().filter(|(key, _)| !(model.tied_embedding && *key == "head/head.weight"));
    own.map(read).collect()
}

/// What PyTorch computed beside gradients and parameters.
struct Expected {
    batches: Vec<Batch>,
    sequence_length: usize,
    logits: Vec<f64>,
    losses: Vec<f64>,
    gradient_norms: Vec<f64>,
    settings: BTreeMap<String, f64>,
}

fn expected(name: &str) -> Expected {
    let bytes = std::fs::read(folder(name).join("expected.safetensors")).expect("the fixture exists");
    let tensors = SafeTensors::deserialize(&bytes).expect("the fixture is sound");
    let (_, header) = SafeTensors::read_metadata(&bytes).expect("the fixture is sound");
    let words = |name: &str| {
        let data = tensors.tensor(name).expect("the fixture holds it").data();
        data.chunks_exact(4).map(|word| [word[0], word[1], word[2], word[3]]).collect::<Vec<_>>()
    };
    let numbers = |name: &str| words(name).into_iter().map(|word| f64::from(f32::from_le_bytes(word))).collect();
    let ids = |name: &str| words(name).into_iter().map(|word| i32::from_le_bytes(word) as usize).collect::<Vec<_>>();
    let shape = tensors.tensor("input_ids").expect("the fixture holds it").shape().to_vec();
    let tokens = shape[1] * shape[2];
    let (inputs, targets) = (ids("input_ids"), ids("targets"));
    let batches = inputs.chunks(tokens).zip(targets.chunks(tokens));
    let settings = header.metadata().clone().expect("the settings are written in the file");
    Expected {
        batches: batches
            .map(|(tokens, targets)| Batch { tokens: tokens.to_vec(), targets: targets.to_vec() })
            .collect(),
        sequence_length: shape[2],
        logits: numbers("logits"),
        losses: numbers("losses"),
        gradient_norms: numbers("gradient_norms"),
        settings: settings.into_iter().map(|(key, value)| (key, value.parse().expect("a number"))).collect(),
    }
}

fn largest(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().map(f64::abs).fold(0.0, f64::max)
}

fn largest_difference(left: &[f64], right: &[f64]) -> f64 {
    assert_eq!(left.len(), right.len());
    largest(left.iter().zip(right).map(|(left, right)| left - right))
}

fn distance(left: &[f64], right: &[f64]) -> f64 {
    left.iter().zip(right).map(|(left, right)| (left - right) * (left - right)).sum::<f64>().sqrt()
}

/// Without rotary positions a key's bias shifts all scores of a query alike, so that its gradient is zero but
/// for rounding, and AdamW makes steps of the rounding.
fn is_noise(key: &str, model: &ModelSpec) -> bool {
    key.ends_with("attention.key.bias") && model.position != Position::Rotary
}

/// Weight decay is of matrices: weights that are not of a norm.
fn decays(key: &str) -> bool {
    !key.ends_with(".bias") && !key.ends_with("norm.weight")
}

/// One step of AdamW that decays matrices only.
fn step(optimizer: &AdamW, state: &mut AdamState, parameters: &mut Parameters, gradients: &Parameters) -> f64 {
    let before = parameters.clone();
    let norm = adamw_step(&AdamW { weight_decay: 0.0, ..*optimizer }, state, parameters, gradients);
    for (key, values) in parameters.iter_mut().filter(|(key, _)| decays(key)) {
        let decay = optimizer.learning_rate * optimizer.weight_decay;
        values.iter_mut().zip(&before[key]).for_each(|(value, before)| *value -= decay * before);
    }
    norm
}

#[test]
fn logits_losses_and_gradients_are_those_of_pytorch() {
    for name in MODELS {
        let (model, expected) = (model(name), expected(name));
        let initial = parameters(&folder(name).join("model.safetensors"), &model);
        let wanted = parameters(&folder(name).join("gradients.safetensors"), &model);
        let (batch, length) = (&expected.batches[0], expected.sequence_length);
        let difference = largest_difference(&logits(&model, &initial, batch, length), &expected.logits);
        assert!(difference <= LOGIT_TOLERANCE, "{name}: logits differ by {difference:e}");
        let (loss, gradients) = loss_and_gradients(&model, &initial, batch, length);
        let loss_difference = loss / expected.losses[0] - 1.0;
        assert!(loss_difference.abs() <= LOSS_TOLERANCE, "{name}: loss differs by {loss_difference:e}");
        assert!(gradients.keys().eq(wanted.keys()), "{name}");
        let floor = SMALL_GRADIENT * largest(wanted.values().flatten().copied());
        let mut worst = 0.0_f64;
        for (key, wanted) in &wanted {
            let part = largest_difference(&gradients[key], wanted) / largest(wanted.iter().copied()).max(floor);
            assert!(part <= GRADIENT_TOLERANCE, "{name}: gradient of {key} differs by {part:e}");
            worst = worst.max(part);
        }
        println!("{name}: logits {difference:.1e}, loss {loss_difference:.1e}, gradients {worst:.1e}");
    }
}

#[test]
fn parameters_after_five_steps_are_those_of_pytorch() {
    for name in MODELS {
        let (model, expected) = (model(name), expected(name));
        let setting = |key: &str| expected.settings[key];
        let optimizer = AdamW {
            learning_rate: setting("learning_rate"),
            beta1: setting("beta1"),
            beta2: setting("beta2"),
            epsilon: setting("epsilon"),
            weight_decay: setting("weight_decay"),
            clip: setting("clip"),
        };
        let initial = parameters(&folder(name).join("model.safetensors"), &model);
        let wanted = parameters(&folder(name).join("updated.safetensors"), &model);
        let (mut now, mut state) = (initial.clone(), AdamState::default());
        for (index, batch) in expected.batches.iter().enumerate() {
            let (loss, gradients) = loss_and_gradients(&model, &now, batch, expected.sequence_length);
            let norm = step(&optimizer, &mut state, &mut now, &gradients);
            let differences = [loss / expected.losses[index] - 1.0, norm / expected.gradient_norms[index] - 1.0];
            assert!(largest(differences) <= LOSS_TOLERANCE, "{name} step {index}: {differences:?}");
            assert!(norm > optimizer.clip, "{name} step {index}: clipping is not active");
        }
        let mut worst = 0.0_f64;
        for (key, wanted) in wanted.iter().filter(|(key, _)| !is_noise(key, &model)) {
            let part = distance(&now[key], wanted) / distance(wanted, &initial[key]);
            let element = largest_difference(&now[key], wanted);
            assert!(part <= UPDATE_TOLERANCE, "{name}: {key} is off by {part:e} of how far it moved");
            assert!(element <= 2.0 * optimizer.learning_rate, "{name}: an element of {key} is off by {element:e}");
            worst = worst.max(part);
        }
        println!("{name}: parameters {worst:.1e}");
    }
}

/// Plans of a fixture: one rank, and two of each axis.
fn plans(model: &ModelSpec, length: usize) -> Vec<Plan> {
    let layouts =
        [(1, ZeroStage::None, false), (2, ZeroStage::OptimizerState, true), (2, ZeroStage::Parameters, false)];
    let plan = |(degree, zero_stage, sequence_parallel)| {
        let fixed = FixedChoices {
            tensor_parallel: Some(degree),
            pipeline_parallel: Some(degree),
            data_parallel: Some(degree),
            zero_stage: Some(zero_stage),
            micro_batch: Some(2),
            recompute: Some(Recompute::None),
            schedule: Some(ScheduleKind::OneForwardOneBackward),
            sequence_parallel: Some(sequence_parallel),
            ..FixedChoices::default()
        };
        let workload = Workload { sequence_length: length as u64, global_batch: 8 };
        fixed_plan(model.clone(), workload, degree > 1, fixed)
    };
    layouts.map(plan).to_vec()
}

#[test]
fn ranks_compute_what_pytorch_computes() {
    for name in MODELS {
        let (model, expected) = (model(name), expected(name));
        let setting = |key: &str| expected.settings[key];
        let [initial, gradients, updated] = ["model", "gradients", "updated"]
            .map(|file| parameters(&folder(name).join(format!("{file}.safetensors")), &model));
        for plan in plans(&model, expected.sequence_length) {
            let run = Run {
                weights: initial.clone(),
                batches: expected.batches.clone(),
                optimizer: StepOptions {
                    dropout: Dropout::default(),
                    seed: 0,
                    learning_rate: setting("learning_rate"),
                    betas: (setting("beta1"), setting("beta2")),
                    epsilon: setting("epsilon"),
                    weight_decay: setting("weight_decay"),
                    clip: Some(setting("clip")),
                },
                decays,
            };
            let ranks = execute(&plan, &run);
            let label = format!("{name} on {} ranks", ranks.len());
            let logits = joined_logits(&ranks, expected.logits.len(), model.vocabulary.rows() as usize);
            let logits = largest_difference(&logits, &expected.logits);
            assert!(logits <= LOGIT_TOLERANCE, "{label}: logits differ by {logits:e}");
            for step in 0..expected.batches.len() {
                let loss = ranks[0].losses[step] / expected.losses[step] - 1.0;
                assert!(loss.abs() <= LOSS_TOLERANCE, "{label}: loss of step {step} differs by {loss:e}");
            }
            let worst_gradient = compare_gradients(&label, &joined(&ranks, |rank| &rank.gradients), &gradients);
            let weights = joined(&ranks, |rank| &rank.weights);
            let mut worst = 0.0_f64;
            for (key, wanted) in updated.iter().filter(|(key, _)| !is_noise(key, &model)) {
                // Rows that padding added follow the model's.
                let found = &weights[key][..wanted.len()];
                let part = distance(found, wanted) / distance(wanted, &initial[key]);
                let element = largest_difference(found, wanted);
                assert!(part <= UPDATE_TOLERANCE, "{label}: {key} is off by {part:e} of how far it moved");
                assert!(element <= 2.0 * run.optimizer.learning_rate, "{label}: {key} is off by {element:e}");
                worst = worst.max(part);
            }
            println!("{label}: logits {logits:.1e}, gradients {worst_gradient:.1e}, parameters {worst:.1e}");
        }
    }
}

/// The logits of all ranks in one array, infinite where nobody has them; the model has `rows` ids.
fn joined_logits(ranks: &[RankRun], size: usize, rows: usize) -> Vec<f64> {
    let mut whole = vec![f64::INFINITY; size];
    for (token, start, numbers) in ranks.iter().flat_map(|rank| &rank.logits) {
        // Rows that padding added follow the model's.
        for (row, number) in (*start..rows).zip(numbers) {
            whole[token * rows + row] = f64::from(*number);
        }
    }
    whole
}

/// The largest difference of a gradient in units of the tensor's largest.
fn compare_gradients(label: &str, found: &Parameters, wanted: &Parameters) -> f64 {
    let floor = SMALL_GRADIENT * largest(wanted.values().flatten().copied());
    let mut worst = 0.0_f64;
    for (key, wanted) in wanted {
        let found = &found[key][..wanted.len()];
        let part = largest_difference(found, wanted) / largest(wanted.iter().copied()).max(floor);
        assert!(part <= GRADIENT_TOLERANCE, "{label}: gradient of {key} differs by {part:e}");
        worst = worst.max(part);
    }
    worst
}
