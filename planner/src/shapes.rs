//! Near sizes of a model that would run better: heads, widths, vocabulary.
//!
//! A size is predicted in the chosen layout. Only rows of the vocabulary decide which layouts are good at all, since
//! tensor parallelism pads them: where they are off a multiple, a search says what padded rows would give.

use cost_models::flops::step_flops;
use ir::graph::{ModelGraph, build_graph};
use ir::model::{Attention, FeedForward, MAX_LAYER_RUNS, ModelSpec, check_model};
use ir::strategy::{Recompute, Strategy};

use crate::request::Request;
use crate::search::{Scored, costs, score_layout, search_within};
use crate::watch::Watch;

/// Multiples of a rank's part of a size at which matrix products are tried: those that kernels load, and their tiles.
const MULTIPLES: [u64; 2] = [64, 128];
/// Rows of a tile of a product, to which vocabularies are padded (`--make-vocab-size-divisible-by` of Megatron-LM).
const TILE: u64 = 128;
/// Multiples of elements that kernels load at once, compute at once, and give a tile, the stricter demand last.
const ALIGNMENTS: [u64; 3] = [8, 64, TILE];
/// Multiples that attention kernels demand of a head's width.
const HEAD_ALIGNMENTS: [u64; 2] = [8, 64];
/// Farthest change of a width, as one over its share: farther ones make another model.
const NEAR: u64 = 8;
/// Widths of heads that attention kernels are written for.
const HEAD_WIDTHS: [u64; 6] = [64, 80, 96, 128, 192, 256];
/// Gain from which a size is worth mentioning.
const WORTH: f64 = 0.01;

/// A size that would run better.
#[derive(Clone, Debug, PartialEq)]
pub struct ShapeAdvice {
    /// The field of the model file.
    pub field: &'static str,
    /// Its value.
    pub from: u64,
    /// The better one.
    pub to: u64,
    /// Share of the time for equal work that goes away: a step's for heads and vocabulary rows, which add no work, a
    /// FLOP's for widths.
    pub gain: f64,
    /// The multiple that the present value is off.
    pub reason: String,
}

/// A changed model.
struct Candidate {
    field: &'static str,
    from: u64,
    to: u64,
    model: ModelSpec,
}

/// The best near value of each size, where it is worth it; largest gain first.
pub fn shape_advice(request: &Request, graph: &ModelGraph, winner: &Scored, watch: &Watch) -> Vec<ShapeAdvice> {
    let (model, split) = (&request.model, winner.strategy.tensor_parallel);
    let fields = [heads(model), widths(model, split), intermediates(model, split)];
    let rate = |graph: &ModelGraph, scored: &Scored| {
        scored.prediction.step.0 / step_flops(graph, request.workload, Recompute::None, [0; MAX_LAYER_RUNS]).model.0
    };
    let gain = |candidate: &Candidate| {
        let (graph_of, scored) = score_changed(request, &candidate.model, &winner.strategy)?;
        let is_work = matches!(candidate.field, HIDDEN | INTERMEDIATE);
        Some(match is_work {
            true => 1.0 - rate(&graph_of, &scored) / rate(graph, winner),
            false => 1.0 - scored.prediction.step.0 / winner.prediction.step.0,
        })
    };
    let best_of = |candidates: Vec<Candidate>| {
        let gains = candidates.into_iter().filter_map(|candidate| Some((gain(&candidate)?, candidate)));
        let (gain, Candidate { field, from, to, .. }) =
            gains.max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.to.cmp(&a.1.to)))?;
        let reason = reason(model, field, from, split)?;
        (gain > WORTH).then_some(ShapeAdvice { field, from, to, gain, reason })
    };
    let mut advice: Vec<ShapeAdvice> = fields.into_iter().filter_map(best_of).collect();
    advice.extend(padded_vocabulary(request, winner, watch));
    advice.sort_by(|a, b| b.gain.total_cmp(&a.gain).then(a.field.cmp(b.field)));
    advice
}

const HEADS: &str = "num_attention_heads";
const HIDDEN: &str = "hidden_size";
const INTERMEDIATE: &str = "intermediate_size";

/// The layout with another model; `None` if the model contradicts itself or the layout cannot split it.
fn score_changed(request: &Request, model: &ModelSpec, strategy: &Strategy) -> Option<(ModelGraph, Scored)> {
    check_model(model, &request.origin).ok()?;
    let graph = build_graph(model);
    let changed = Request { model: model.clone(), ..request.clone() };
    let scored = score_layout(&changed, &graph, strategy)?;
    Some((graph, scored))
}

/// The nearest multiples of `unit` below and above, itself apart.
fn neighbours(size: u64, unit: u64) -> [u64; 2] {
    [size.saturating_sub(1) / unit * unit, (size / unit + 1) * unit]
}

/// The nearest sizes whose parts on `split` ranks are multiples that products like, if the size's own are none.
fn near_multiples(size: u64, split: u64) -> impl Iterator<Item = u64> {
    let off = !size.is_multiple_of(TILE * split);
    let multiples = MULTIPLES.into_iter().filter(move |_| off);
    let near = move |other: &u64| other.abs_diff(size) <= size / NEAR;
    multiples.flat_map(move |multiple| neighbours(size, multiple * split)).filter(near)
}

/// What padded rows of the vocabulary would give, where they are no multiple of a tile.
fn padded_vocabulary(request: &Request, winner: &Scored, watch: &Watch) -> Option<ShapeAdvice> {
    let from = request.model.vocabulary.rows();
    if from.is_multiple_of(TILE) {
        return None;
    }
    let to = from.next_multiple_of(TILE);
    let mut model = without_count(&request.model);
    model.vocabulary.padded = Some(to);
    check_model(&model, &request.origin).ok()?;
    let graph = build_graph(&model);
    let padded = Request { model, top: 1, ..request.clone() };
    let worth = winner.prediction.step * (1.0 - WORTH);
    let outcome = search_within(&padded, &graph, &watch.of_a_step(), &mut costs(&padded, &graph), worth);
    let best = outcome.best.into_iter().next()?;
    let gain = 1.0 - best.prediction.step.0 / winner.prediction.step.0;
    let reason = format!("{from} rows are not a multiple of {}", off_multiple(from, &ALIGNMENTS)?);
    (gain > WORTH && !watch.stopped()).then_some(ShapeAdvice { field: "vocabulary.padded", from, to, gain, reason })
}

/// The first of some multiples that a size is off.
fn off_multiple(size: u64, multiples: &[u64]) -> Option<u64> {
    multiples.iter().copied().find(|multiple| !size.is_multiple_of(*multiple))
}

/// What is wrong with a size.
fn reason(model: &ModelSpec, field: &str, size: u64, split: u64) -> Option<String> {
    if field == HEADS {
        let Attention::MultiHead { head_dim, .. } = model.attention else { return None };
        let width = head_dim.unwrap_or(model.hidden_size / size);
        return off_multiple(width, &HEAD_ALIGNMENTS)
            .map(|multiple| format!("heads of width {width}, not a multiple of {multiple}"));
    }
    let local = size / split;
    off_multiple(local, &ALIGNMENTS).map(|multiple| match split {
        1 => format!("{size} is not a multiple of {multiple}"),
        _ => format!("{size} / tensor {split} is {local}, not a multiple of {multiple}"),
    })
}

/// Other numbers of heads of the same total width; latent attention states its widths one by one and is left alone.
fn heads(model: &ModelSpec) -> Vec<Candidate> {
    let Attention::MultiHead { num_attention_heads: from, num_key_value_heads, head_dim } = model.attention else {
        return Vec::new();
    };
    let width = head_dim.unwrap_or(model.hidden_size / from);
    if off_multiple(width, &HEAD_ALIGNMENTS).is_none() {
        return Vec::new();
    }
    let total = from * width;
    let whole = HEAD_WIDTHS.into_iter().filter(|width| total.is_multiple_of(*width));
    let changed = whole
        .map(|width| (width, total / width))
        .filter(|(_, to)| (from / 2 + 1..2 * from).contains(to) && *to != from);
    let candidates = changed.filter_map(|(width, to)| {
        // As many queries for each key and value as before.
        let scaled = |count: u64| (count * to).is_multiple_of(from).then(|| count * to / from);
        let num_key_value_heads = match num_key_value_heads {
            Some(count) => Some(scaled(count)?),
            None => None,
        };
        let mut model = without_count(model);
        model.attention =
            Attention::MultiHead { num_attention_heads: to, num_key_value_heads, head_dim: head_dim.map(|_| width) };
        Some(Candidate { field: HEADS, from, to, model })
    });
    candidates.collect()
}

fn widths(model: &ModelSpec, split: u64) -> Vec<Candidate> {
    let from = model.hidden_size;
    let changed = near_multiples(from, split).map(|to| {
        let model = ModelSpec { hidden_size: to, ..without_count(model) };
        Candidate { field: HIDDEN, from, to, model }
    });
    changed.collect()
}

fn intermediates(model: &ModelSpec, split: u64) -> Vec<Candidate> {
    let from = match model.feed_forward {
        FeedForward::Gelu { intermediate_size }
        | FeedForward::SwiGlu { intermediate_size }
        | FeedForward::MixtureOfExperts { intermediate_size, .. } => intermediate_size,
    };
    let changed = near_multiples(from, split).map(|to| {
        let mut model = without_count(model);
        match &mut model.feed_forward {
            FeedForward::Gelu { intermediate_size }
            | FeedForward::SwiGlu { intermediate_size }
            | FeedForward::MixtureOfExperts { intermediate_size, .. } => *intermediate_size = to,
        }
        Candidate { field: INTERMEDIATE, from, to, model }
    });
    changed.collect()
}

/// A changed model has no published number of parameters.
fn without_count(model: &ModelSpec) -> ModelSpec {
    ModelSpec { published_parameters: None, ..model.clone() }
}
