//! The reference against finite differences of its own loss, and against the graph's list of parameters.

use std::collections::BTreeMap;
use std::ops::Range;

use super::*;
use crate::graph::{BlockRole, Extent, OperatorKind, Tensor, build_graph};
use crate::model::{Attention, Bias, DType, FeedForward, NormKind, Vocabulary};
use crate::units::SequenceLength;

const SEQUENCES: usize = 3;
const SEQUENCE_LENGTH: usize = 6;

/// Learned positions, LayerNorm, GeLU, biases, tied head, padded vocabulary.
fn gpt2_like() -> ModelSpec {
    ModelSpec {
        name: "gpt2-like".to_owned(),
        source: "made up".to_owned(),
        num_layers: 2,
        hidden_size: 16,
        attention: Attention::MultiHead { num_attention_heads: 4, num_key_value_heads: None, head_dim: None },
        feed_forward: FeedForward::Gelu { intermediate_size: 20 },
        norm: NormKind::LayerNorm,
        norm_epsilon: 1e-5,
        bias: Bias::All,
        position: Position::Learned,
        rotary_base: 10_000.0,
        rotary_scaling: None,
        vocabulary: Vocabulary { size: 13, padded: Some(16) },
        embedding_norm: false,
        tied_embedding: true,
        max_sequence_length: SequenceLength::Tokens(8),
        sequence_length: None,
        global_batch: None,
        dtype: DType::FP32,
        published_parameters: None,
        deviations: Vec::new(),
    }
}

/// ALiBi over a number of heads that is no power of two, embedding norm.
fn bloom_like() -> ModelSpec {
    ModelSpec {
        name: "bloom-like".to_owned(),
        hidden_size: 24,
        attention: Attention::MultiHead { num_attention_heads: 6, num_key_value_heads: None, head_dim: None },
        position: Position::Alibi,
        embedding_norm: true,
        ..gpt2_like()
    }
}

/// RMSNorm, rotary positions, grouped queries, SwiGLU, no bias, untied head.
fn llama_like() -> ModelSpec {
    ModelSpec {
        name: "llama-like".to_owned(),
        attention: Attention::MultiHead { num_attention_heads: 4, num_key_value_heads: Some(2), head_dim: Some(6) },
        feed_forward: FeedForward::SwiGlu { intermediate_size: 20 },
        norm: NormKind::RmsNorm,
        norm_epsilon: 1e-3,
        bias: Bias::None,
        position: Position::Rotary,
        rotary_base: 300.0,
        rotary_scaling: None,
        tied_embedding: false,
        ..gpt2_like()
    }
}

/// Llama's with biases of query, key and value.
fn qwen2_like() -> ModelSpec {
    ModelSpec { name: "qwen2-like".to_owned(), bias: Bias::QueryKeyValue, ..llama_like() }
}

/// Llama's with every bias and a tied head.
fn biased_swiglu() -> ModelSpec {
    ModelSpec { name: "biased-swiglu".to_owned(), bias: Bias::All, tied_embedding: true, ..llama_like() }
}

fn models() -> [ModelSpec; 5] {
    [gpt2_like(), bloom_like(), llama_like(), qwen2_like(), biased_swiglu()]
}

/// Slope at 0 by the five-point central difference, whose error is of fourth order in the step.
fn difference(function: impl Fn(f64) -> f64) -> f64 {
    const STEP: f64 = 1e-3;
    let central = |step: f64| (function(step) - function(-step)) / (2.0 * step);
    (4.0 * central(STEP) - central(2.0 * STEP)) / 3.0
}

fn assert_near(computed: f64, expected: f64, case: &str) {
    let tolerance = 1e-7 * computed.abs().max(expected.abs()) + 1e-11;
    assert!((computed - expected).abs() <= tolerance, "{case}: {computed:e} but {expected:e} by differences");
}

/// Indices to differentiate: eight at random and that of the largest gradient.
fn probes(key: &str, gradient: &[f64]) -> Vec<usize> {
    let largest = (0..gradient.len()).max_by(|a, b| gradient[*a].abs().total_cmp(&gradient[*b].abs()));
    let random = (0..8).map(|draw| (unit_hash(7, key, draw) * gradient.len() as f64) as usize);
    random.chain(largest).collect()
}

#[test]
fn gradients_are_the_slopes_of_the_loss() {
    for model in models() {
        let parameters = initial_parameters(&model, 1);
        let batch = random_batch(&model, SEQUENCES, SEQUENCE_LENGTH, 2);
        let (value, gradients) = loss_and_gradients(&model, &parameters, &batch, SEQUENCE_LENGTH);
        assert_eq!(value, loss(&model, &parameters, &batch, SEQUENCE_LENGTH));
        for (key, gradient) in &gradients {
            for index in probes(key, gradient) {
                let moved = |step: f64| {
                    let mut moved = parameters.clone();
                    moved.get_mut(key).expect("the same keys")[index] += step;
                    loss(&model, &moved, &batch, SEQUENCE_LENGTH)
                };
                assert_near(gradient[index], difference(moved), &format!("{}, {key}[{index}]", model.name));
            }
        }
    }
}

#[test]
fn gradients_give_the_slope_along_a_direction_of_all_parameters() {
    for model in models() {
        let parameters = initial_parameters(&model, 3);
        let direction = initial_parameters(&model, 4);
        let batch = random_batch(&model, SEQUENCES, SEQUENCE_LENGTH, 5);
        let (_, gradients) = loss_and_gradients(&model, &parameters, &batch, SEQUENCE_LENGTH);
        let moved = |step: f64| {
            let mut moved = parameters.clone();
            for (key, values) in &mut moved {
                values.iter_mut().zip(&direction[key]).for_each(|(value, towards)| *value += 0.1 * step * towards);
            }
            loss(&model, &moved, &batch, SEQUENCE_LENGTH)
        };
        let products = gradients.iter().flat_map(|(key, values)| values.iter().zip(&direction[key]));
        let slope = products.map(|(gradient, towards)| 0.1 * gradient * towards).sum();
        assert_near(slope, difference(moved), &model.name);
    }
}

#[test]
fn every_parameter_has_a_gradient() {
    for model in models() {
        let batch = random_batch(&model, SEQUENCES, SEQUENCE_LENGTH, 2);
        let (_, gradients) = loss_and_gradients(&model, &initial_parameters(&model, 1), &batch, SEQUENCE_LENGTH);
        for (key, gradient) in gradients {
            let largest = gradient.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
            // A bias of all keys shifts a query's scores alike, unless rotation makes it depend on the position.
            let cancels = key.ends_with("key.bias") && model.position != Position::Rotary;
            assert_eq!(largest < 1e-15, cancels, "{}, {key}: {largest:e}", model.name);
        }
    }
}

#[test]
fn parameters_are_those_of_the_graph() {
    for model in models() {
        let mut expected = BTreeMap::new();
        for block in &build_graph(&model).blocks {
            let own = block.parameters().filter(|operator| operator.kind == OperatorKind::Parameter { tied: false });
            for operator in own {
                for repetition in 0..block.count {
                    let key = format!("{}/{}", block_key(block.role, repetition), operator.name);
                    expected.insert(key, fixed_shape(&operator.output));
                }
            }
        }
        assert_eq!(parameter_shapes(&model), expected, "{}", model.name);
    }
}

fn block_key(role: BlockRole, repetition: u64) -> String {
    match role {
        BlockRole::Embedding => "embedding".to_owned(),
        BlockRole::Layers(_) => format!("layer {repetition}"),
        BlockRole::Head => "head".to_owned(),
    }
}

fn fixed_shape(tensor: &Tensor) -> Vec<usize> {
    let size = |extent| match extent {
        Extent::Fixed(size) => size as usize,
        Extent::MicroBatch | Extent::Sequence => panic!("a parameter's extents are fixed"),
    };
    tensor.shape.iter().map(|dim| size(dim.extent)).collect()
}

#[test]
fn values_are_spread_as_promised() {
    let parameters = initial_parameters(&gpt2_like(), 1);
    let values = &parameters["layer 1/feed_forward.up.weight"];
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let deviation = (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64).sqrt();
    assert!(mean.abs() < 0.02 && (0.1..0.13).contains(&deviation), "mean {mean}, deviation {deviation}");
    assert!(parameters["head/final_norm.weight"].iter().all(|value| (0.8..1.2).contains(value) && *value != 1.0));
    assert_ne!(values, &parameters["layer 0/feed_forward.up.weight"]);
    assert_ne!(values, &initial_parameters(&gpt2_like(), 2)["layer 1/feed_forward.up.weight"]);
    let batch = random_batch(&gpt2_like(), 40, SEQUENCE_LENGTH, 1);
    for ids in [&batch.tokens, &batch.targets] {
        assert_eq!((ids.len(), ids.iter().min(), ids.iter().max()), (240, Some(&0), Some(&12)));
    }
}

#[test]
fn sequences_are_independent() {
    for model in models() {
        let parameters = initial_parameters(&model, 1);
        let both = random_batch(&model, 2, SEQUENCE_LENGTH, 2);
        let part = |range: Range<usize>| {
            let part = Batch { tokens: both.tokens[range.clone()].to_vec(), targets: both.targets[range].to_vec() };
            loss(&model, &parameters, &part, SEQUENCE_LENGTH)
        };
        let mean = (part(0..SEQUENCE_LENGTH) + part(SEQUENCE_LENGTH..2 * SEQUENCE_LENGTH)) / 2.0;
        assert!((part(0..2 * SEQUENCE_LENGTH) - mean).abs() < 1e-12, "{}", model.name);
    }
}

#[test]
fn a_token_is_seen_by_itself_and_later_ones_of_its_sequence() {
    for model in models() {
        let parameters = initial_parameters(&model, 1);
        let batch = random_batch(&model, 2, SEQUENCE_LENGTH, 2);
        let mut changed = batch.clone();
        changed.tokens[3] = (changed.tokens[3] + 1) % model.vocabulary.size as usize;
        let network = network(&model, &parameters, &batch, SEQUENCE_LENGTH);
        let [before, after] = [&batch, &changed].map(|batch| forward(&network, batch).probabilities);
        let differing: Vec<usize> = (0..before.rows()).filter(|row| before.row(*row) != after.row(*row)).collect();
        assert_eq!(differing, [3, 4, 5], "{}", model.name);
    }
}

#[test]
#[should_panic(expected = "the reference has dense feed-forward only")]
fn experts_are_refused() {
    let feed_forward = FeedForward::MixtureOfExperts {
        num_experts: 2,
        experts_per_token: 1,
        intermediate_size: 4,
        num_shared_experts: 0,
        first_dense_layers: 0,
        dense_intermediate_size: None,
    };
    initial_parameters(&ModelSpec { feed_forward, ..llama_like() }, 1);
}
