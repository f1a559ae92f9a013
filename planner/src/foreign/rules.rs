//! Rules that every program has for degrees and batches, with the legal values in their messages.

use ir::error::Problem;
use ir::model::{FeedForward, ModelSpec, SIZE_LIMIT, Workload};
use ir::sharding::{SplitError, tensor_split};
use ir::strategy::Strategy;

use super::{Settings, list};
use crate::request::divisors;

/// Most legal values that a message lists.
const LISTED: usize = 12;

/// How a program calls the settings that the rules speak of.
pub(super) struct Names {
    /// The configuration, for places.
    pub origin: String,
    /// Tensor degree.
    pub tensor: &'static str,
    /// Pipeline degree.
    pub pipeline: &'static str,
    /// Context degree.
    pub context: &'static str,
    /// Expert degree.
    pub expert: &'static str,
    /// Micro-batch.
    pub micro_batch: &'static str,
    /// Global batch.
    pub global_batch: &'static str,
}

impl Names {
    fn problem(&self, what: String, name: &str, help: String) -> Problem {
        Problem::new(what, format!("{}, {name}", self.origin), help)
    }
}

/// Replicas of a world: what tensor, pipeline and context degrees leave of it.
///
/// # Errors
/// The degrees do not divide the world; the message lists legal values of each with the others as they are.
pub(super) fn replicas(gpus: u64, [tensor, pipeline, context]: [u64; 3], names: &Names) -> Result<u64, Problem> {
    let product = [pipeline, context].into_iter().try_fold(tensor, u64::checked_mul).unwrap_or(u64::MAX);
    if product > 0 && gpus > 0 && gpus.is_multiple_of(product) {
        return Ok(gpus / product);
    }
    let degrees = [(names.tensor, tensor), (names.pipeline, pipeline), (names.context, context)];
    let given: Vec<String> = degrees.iter().map(|(name, degree)| format!("{name} {degree}")).collect();
    let what = format!("{} do not divide {gpus} GPUs: their product is {product}", given.join(" x "));
    let legal = degrees.iter().filter(|(_, degree)| *degree > 1).filter_map(|(name, degree)| {
        let others = product / degree;
        let left = gpus.is_multiple_of(others).then(|| gpus / others).filter(|left| *left > 0)?;
        Some(format!("{name} {}", shortened(&divisors(left))))
    });
    let legal: Vec<String> = legal.collect();
    let worlds = [(gpus / product) * product, (gpus / product + 1).saturating_mul(product)];
    let worlds: Vec<u64> = worlds.into_iter().filter(|world| *world > 0).collect();
    let help = match legal.is_empty() {
        true => format!("launch it on {} GPUs", list(&worlds)),
        false => format!("launch it on {} GPUs, or use {}", list(&worlds), legal.join(" or ")),
    };
    Err(names.problem(what, names.tensor, help))
}

/// Everything about a layout that the program would refuse.
pub(super) fn layout_problems(model: &ModelSpec, workload: Workload, layout: &Strategy, names: &Names) -> Vec<Problem> {
    let mut problems = Vec::new();
    problems.extend(tensor_problem(model, layout, names));
    problems.extend(sequence_problem(workload, layout, names));
    problems.extend(expert_problem(model, layout, names));
    problems.extend(batch_problem(layout, names));
    if layout.global_batch > SIZE_LIMIT {
        let what = format!("{} is {}", names.global_batch, layout.global_batch);
        problems.push(names.problem(what, names.global_batch, format!("give at most {SIZE_LIMIT} sequences")));
    }
    if problems.is_empty()
        && !layout.schedule.allows_micro_batches(layout.num_micro_batches(), layout.pipeline_parallel)
    {
        let (batches, stages) = (layout.num_micro_batches(), layout.pipeline_parallel);
        let what = format!("{batches} micro-batches are not whole groups of {stages}, which interleaved stages need");
        problems.push(names.problem(
            what,
            names.global_batch,
            "give a multiple of the stages, or one part a stage".to_owned(),
        ));
    }
    let stages = layout.pipeline_parallel.saturating_mul(layout.virtual_stages);
    if stages > model.num_layers {
        let what = format!("{stages} stages for {} layers", model.num_layers);
        let help = format!("use at most {} stages: each holds at least one layer", model.num_layers);
        problems.push(names.problem(what, names.pipeline, help));
    }
    problems
}

fn tensor_problem(model: &ModelSpec, layout: &Strategy, names: &Names) -> Option<Problem> {
    let degree = layout.tensor_parallel;
    let error = tensor_split(model, degree, false).err()?;
    let heads = model.attention.num_attention_heads();
    let what = match error {
        SplitError::Heads => format!("{} {degree} does not divide the {heads} attention heads", names.tensor),
        SplitError::KeyValueHeads => format!(
            "{} {degree} and the {} key-value heads do not divide one another",
            names.tensor,
            model.attention.num_key_value_heads()
        ),
        SplitError::Intermediate => format!("{} {degree} does not divide the feed-forward width", names.tensor),
    };
    let legal: Vec<u64> = divisors(heads).into_iter().filter(|n| tensor_split(model, *n, false).is_ok()).collect();
    Some(names.problem(what, names.tensor, format!("legal values: {}", shortened(&legal))))
}

fn sequence_problem(workload: Workload, layout: &Strategy, names: &Names) -> Option<Problem> {
    let length = workload.sequence_length;
    let context = layout.context_parallel;
    // Each context rank holds one part from either end of the sequence, so that causal attention is balanced.
    if context > 1 && !length.is_multiple_of(2 * context) {
        let legal: Vec<u64> = divisors(length / 2).into_iter().filter(|n| length.is_multiple_of(2 * n)).collect();
        let what = format!("a sequence of {length} is not {} parts: two for each of {context} ranks", 2 * context);
        return Some(names.problem(what, names.context, format!("legal values: {}", shortened(&legal))));
    }
    let part = length / context;
    if layout.sequence_parallel && !part.is_multiple_of(layout.tensor_parallel) {
        let tensor = layout.tensor_parallel;
        let what = format!("sequence parallelism needs whole parts, and {tensor} does not divide {part} tokens");
        let legal = shortened(&divisors(part));
        return Some(names.problem(what, names.tensor, format!("legal values: {legal}; or no sequence parallelism")));
    }
    None
}

/// Whether experts are whole by a setting of the ranks that share each: that of one among several tensor ranks.
pub(super) fn are_whole(name: &str, shared: Option<u64>, tensor: u64, settings: &mut Settings) -> bool {
    if let Some(ranks) = shared.filter(|ranks| *ranks != tensor && *ranks != 1) {
        let reason = format!("experts are predicted split over {tensor} tensor ranks, not {ranks}");
        settings.assumed.push((name.to_owned(), reason));
    }
    shared == Some(1) && tensor > 1
}

fn expert_problem(model: &ModelSpec, layout: &Strategy, names: &Names) -> Option<Problem> {
    let degree = layout.expert_parallel;
    let FeedForward::MixtureOfExperts { num_experts, .. } = model.feed_forward else {
        let what = format!("{} {degree} for a model without experts", names.expert);
        return (degree > 1).then(|| names.problem(what, names.expert, "leave it out, or give experts".to_owned()));
    };
    let ranks = layout.expert_ranks();
    if layout.whole_experts && !layout.sequence_parallel {
        let what = "whole experts on tensor ranks without sequence parallelism".to_owned();
        return Some(names.problem(what, names.expert, "turn sequence parallelism on".to_owned()));
    }
    if degree > 0 && num_experts.is_multiple_of(degree) && ranks.is_multiple_of(degree) {
        return None;
    }
    let legal: Vec<u64> = divisors(num_experts).into_iter().filter(|n| ranks.is_multiple_of(*n)).collect();
    let what = format!(
        "{} {degree} must divide the {num_experts} experts and the {ranks} ranks to spread them over",
        names.expert
    );
    Some(names.problem(what, names.expert, format!("legal values: {}", shortened(&legal))))
}

fn batch_problem(layout: &Strategy, names: &Names) -> Option<Problem> {
    let Strategy { global_batch, micro_batch, data_parallel, .. } = *layout;
    let unit = micro_batch.saturating_mul(data_parallel);
    if unit > 0 && global_batch > 0 && global_batch.is_multiple_of(unit) {
        return None;
    }
    let what = format!(
        "{} {global_batch} is not whole micro-batches of {micro_batch} on {data_parallel} replicas",
        names.global_batch
    );
    let near = [global_batch / unit.max(1) * unit, (global_batch / unit.max(1) + 1).saturating_mul(unit)];
    let near: Vec<u64> = near.into_iter().filter(|batch| *batch > 0).collect();
    let mut help = format!("legal values of {} near it: {}", names.global_batch, list(&near));
    if global_batch.is_multiple_of(data_parallel) {
        let sizes = shortened(&divisors(global_batch / data_parallel));
        help += &format!("; legal values of {} with this batch: {sizes}", names.micro_batch);
    }
    Some(names.problem(what, names.global_batch, help))
}

/// The first legal values.
fn shortened(numbers: &[u64]) -> String {
    match numbers.get(..LISTED) {
        Some(first) if numbers.len() > LISTED => format!("{}, …", list(first)),
        _ => list(numbers),
    }
}
