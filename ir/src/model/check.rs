//! Checks of a model's fields, alone and against one another.

use super::{Attention, DEFAULT_ROTARY_BASE, FeedForward, ModelSpec, Position, SIZE_LIMIT};
use crate::error::{Error, Problem};
use crate::rotary::RotaryScaling;
use crate::units::BatchSize;

/// Largest accepted number of layers; the deepest published models have a few hundred.
const LAYER_LIMIT: u64 = 1 << 12;
/// Largest accepted number of experts; above it a file is taken to be wrong.
const COUNT_LIMIT: u64 = 1 << 16;
/// Most parameters accepted; keeps every number of bytes within 2^63.
const PARAMETER_LIMIT: u64 = 1 << 48;

/// Checks a model's fields against one another.
///
/// # Errors
/// `Error::Invalid` with every problem found.
pub fn check_model(model: &ModelSpec, origin: &str) -> Result<(), Error> {
    let mut problems = Problems { origin, list: Vec::new() };
    check_sizes(model, &mut problems);
    if problems.list.is_empty() {
        check_relations(model, &mut problems);
    }
    if problems.list.is_empty() {
        check_parameters(model, &mut problems);
    }
    if problems.list.is_empty() { Ok(()) } else { Err(Error::Invalid(problems.list)) }
}

/// Problems found so far.
pub(super) struct Problems<'a> {
    pub(super) origin: &'a str,
    pub(super) list: Vec<Problem>,
}

impl Problems<'_> {
    pub(super) fn add(&mut self, what: impl Into<String>, field: &str, help: impl Into<String>) {
        self.list.push(Problem::new(what, format!("{}, field {field}", self.origin), help));
    }

    fn check_positive(&mut self, value: f64, field: &str) {
        if !(value.is_finite() && value > 0.0) {
            self.add(format!("{field} is {value}"), field, "give a finite number above 0");
        }
    }

    fn check_range(&mut self, value: u64, limit: u64, field: &str) {
        if value == 0 || value > limit {
            self.add(format!("{field} is {value}"), field, format!("give a number from 1 to {limit}"));
        }
    }
}

fn check_scaling_factors(scaling: Option<RotaryScaling>, problems: &mut Problems) {
    let mut check = |value, name| problems.check_positive(value, &format!("rotary_scaling.{name}"));
    match scaling {
        None => {}
        Some(RotaryScaling::Linear { factor }) => check(factor, "factor"),
        Some(RotaryScaling::Llama3 {
            factor,
            low_frequency_factor: low,
            high_frequency_factor: high,
            original_length,
        }) => {
            check(factor, "factor");
            check(low, "low_frequency_factor");
            check(high, "high_frequency_factor");
            problems.check_range(original_length, SIZE_LIMIT, "rotary_scaling.original_length");
            if low >= high {
                problems.add(
                    format!("low_frequency_factor {low} is not below high_frequency_factor {high}"),
                    "rotary_scaling.low_frequency_factor",
                    "waves between the two are scaled in part: lower the one or raise the other",
                );
            }
        }
    }
}

fn check_sizes(model: &ModelSpec, problems: &mut Problems) {
    if model.name.is_empty() || !model.name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)) {
        problems.add(
            format!("the name `{}` cannot be part of a file name", model.name),
            "name",
            "use letters, digits, '-', '_' and '.' only",
        );
    }
    problems.check_range(model.num_layers, LAYER_LIMIT, "num_layers");
    problems.check_range(model.hidden_size, SIZE_LIMIT, "hidden_size");
    problems.check_range(model.vocabulary.size, SIZE_LIMIT, "vocabulary.size");
    problems.check_range(model.vocabulary.rows(), SIZE_LIMIT, "vocabulary.padded");
    problems.check_range(model.max_sequence_length.tokens(), SIZE_LIMIT, "max_sequence_length");
    if let Some(length) = model.sequence_length {
        problems.check_range(length.tokens(), SIZE_LIMIT, "sequence_length");
    }
    match model.global_batch {
        Some(BatchSize::Sequences(sequences)) => problems.check_range(sequences, SIZE_LIMIT, "global_batch"),
        Some(BatchSize::Tokens(tokens)) => problems.check_range(tokens, 1 << 40, "global_batch"),
        None => {}
    }
    problems.check_positive(model.norm_epsilon, "norm_epsilon");
    problems.check_positive(model.rotary_base, "rotary_base");
    check_scaling_factors(model.rotary_scaling, problems);
    check_attention_sizes(&model.attention, problems);
    check_feed_forward_sizes(&model.feed_forward, problems);
}

fn check_attention_sizes(attention: &Attention, problems: &mut Problems) {
    problems.check_range(attention.num_attention_heads(), SIZE_LIMIT, "num_attention_heads");
    match *attention {
        Attention::MultiHead { num_key_value_heads, head_dim, .. } => {
            if let Some(heads) = num_key_value_heads {
                problems.check_range(heads, SIZE_LIMIT, "num_key_value_heads");
            }
            if let Some(width) = head_dim {
                problems.check_range(width, SIZE_LIMIT, "head_dim");
            }
        }
        Attention::MultiLatent { query_rank, key_value_rank, nope_head_dim, rope_head_dim, value_head_dim, .. } => {
            problems.check_range(query_rank, SIZE_LIMIT, "query_rank");
            problems.check_range(key_value_rank, SIZE_LIMIT, "key_value_rank");
            problems.check_range(nope_head_dim, SIZE_LIMIT, "nope_head_dim");
            problems.check_range(rope_head_dim, SIZE_LIMIT, "rope_head_dim");
            problems.check_range(value_head_dim, SIZE_LIMIT, "value_head_dim");
        }
    }
}

fn check_feed_forward_sizes(feed_forward: &FeedForward, problems: &mut Problems) {
    match *feed_forward {
        FeedForward::Gelu { intermediate_size } | FeedForward::SwiGlu { intermediate_size } => {
            problems.check_range(intermediate_size, SIZE_LIMIT, "intermediate_size");
        }
        FeedForward::MixtureOfExperts {
            num_experts,
            experts_per_token,
            intermediate_size,
            num_shared_experts,
            dense_intermediate_size,
            ..
        } => {
            problems.check_range(num_experts, COUNT_LIMIT, "num_experts");
            problems.check_range(experts_per_token, COUNT_LIMIT, "experts_per_token");
            problems.check_range(intermediate_size, SIZE_LIMIT, "intermediate_size");
            if num_shared_experts > 0 {
                problems.check_range(num_shared_experts, COUNT_LIMIT, "num_shared_experts");
            }
            if let Some(width) = dense_intermediate_size {
                problems.check_range(width, SIZE_LIMIT, "dense_intermediate_size");
            }
        }
    }
}

fn check_relations(model: &ModelSpec, problems: &mut Problems) {
    if let Attention::MultiHead { num_attention_heads, head_dim, .. } = model.attention {
        if head_dim.is_none() && !model.hidden_size.is_multiple_of(num_attention_heads) {
            problems.add(
                format!("num_attention_heads {num_attention_heads} does not divide hidden_size {}", model.hidden_size),
                "num_attention_heads",
                "give head_dim, or a number of heads that divides hidden_size",
            );
        }
        let key_value_heads = model.attention.num_key_value_heads();
        if !num_attention_heads.is_multiple_of(key_value_heads) {
            problems.add(
                format!(
                    "num_key_value_heads {key_value_heads} does not divide num_attention_heads {num_attention_heads}"
                ),
                "num_key_value_heads",
                "each key-value head serves the same number of query heads",
            );
        }
    }
    if model.vocabulary.rows() < model.vocabulary.size {
        problems.add(
            format!("{} padded rows for {} tokens", model.vocabulary.rows(), model.vocabulary.size),
            "vocabulary.padded",
            "give at least as many rows as tokens, or leave the field out",
        );
    }
    if model.position != Position::Rotary && model.rotary_scaling.is_some() {
        problems.add(
            format!("rotary_scaling is given but position is {:?}", model.position),
            "rotary_scaling",
            "leave the field out, or say position: Rotary",
        );
    }
    if model.position != Position::Rotary && model.rotary_base != DEFAULT_ROTARY_BASE {
        problems.add(
            format!("rotary_base is {} but position is {:?}", model.rotary_base, model.position),
            "rotary_base",
            "leave the field out, or say position: Rotary",
        );
    }
    check_experts(model, problems);
    if let Some(length) = model.sequence_length
        && length > model.max_sequence_length
    {
        problems.add(
            format!(
                "sequence_length {} exceeds max_sequence_length {}",
                length.tokens(),
                model.max_sequence_length.tokens()
            ),
            "sequence_length",
            "shorten the one or raise the other",
        );
    }
}

fn check_experts(model: &ModelSpec, problems: &mut Problems) {
    let FeedForward::MixtureOfExperts {
        num_experts,
        experts_per_token,
        first_dense_layers,
        dense_intermediate_size,
        ..
    } = model.feed_forward
    else {
        return;
    };
    if experts_per_token > num_experts {
        problems.add(
            format!("experts_per_token {experts_per_token} exceeds num_experts {num_experts}"),
            "experts_per_token",
            "a token can be sent to each expert once",
        );
    }
    if first_dense_layers > model.num_layers {
        problems.add(
            format!("first_dense_layers {first_dense_layers} exceeds num_layers {}", model.num_layers),
            "first_dense_layers",
            "lower it to at most num_layers",
        );
    }
    if first_dense_layers > 0 && dense_intermediate_size.is_none() {
        problems.add(
            format!("the width of {first_dense_layers} dense layers is missing"),
            "dense_intermediate_size",
            "add it beside first_dense_layers",
        );
    }
}

fn check_parameters(model: &ModelSpec, problems: &mut Problems) {
    let counted = crate::graph::count_parameters(model);
    if counted > PARAMETER_LIMIT {
        problems.add(
            format!("the file describes more than {PARAMETER_LIMIT} parameters"),
            "hidden_size",
            "lower num_layers, hidden_size or another width",
        );
        return;
    }
    if let Some(published) = model.published_parameters
        && counted != published
    {
        problems.add(
            format!("the file describes {counted} parameters but says {published}"),
            "published_parameters",
            "mend the shape, or leave the field out",
        );
    }
}
