//! How Megatron's flags split the layers into stages.

use ir::model::ModelSpec;
use ir::strategy::Strategy;

use super::Fork;
use crate::foreign::flags::Flags;
use crate::foreign::{Settings, list};
use crate::request::divisors;

/// Most layers that are counted one by one; no model has more.
const MOST_LAYERS: u64 = 1 << 14;
/// Longest pipeline layout that is expanded.
const LONGEST_LAYOUT: usize = 1 << 14;

/// Parts of the model on each stage, and layers of each part in the model's order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    pub virtual_stages: u64,
    pub layers: Vec<u64>,
}

/// Splits the layers; problems are noted with the flags.
pub(super) fn split(
    flags: &mut Flags,
    fork: Fork,
    model: &ModelSpec,
    layout: &Strategy,
    settings: &mut Settings,
) -> Parts {
    let stages = layout.pipeline_parallel;
    let ends = Ends::read(flags);
    let pattern = flags.text("--pipeline-model-parallel-layout");
    let method = flags.text("--pp-partition-method");
    let numbers = Numbers {
        each: flags.count("--num-layers-per-virtual-pipeline-stage"),
        parts: flags.count("--num-virtual-stages-per-pipeline-rank"),
        group: flags.count("--microbatch-group-size-per-virtual-pipeline-stage"),
        plain_sends: flags.has("--no-overlap-p2p-communication"),
    };
    if stages > model.num_layers || model.num_layers > MOST_LAYERS {
        // The rules of all programs refuse it.
        return Parts { virtual_stages: 1, layers: Vec::new() };
    }
    let parts = match (pattern, fork) {
        (Some(pattern), _) => by_pattern(flags, &pattern, model.num_layers, stages, settings),
        (None, Fork::DeepSpeed) => by_deepspeed(method.as_deref(), model.num_layers, stages, settings),
        (None, Fork::Core | Fork::Early) => by_numbers(flags, ends, numbers, model.num_layers, stages),
    };
    if parts.virtual_stages > 1 {
        check_interleaving(flags, fork, numbers, layout, settings);
    }
    parts
}

/// Flags of interleaved stages.
#[derive(Clone, Copy)]
struct Numbers {
    /// Layers of a virtual stage.
    each: Option<u64>,
    /// Virtual stages of a stage.
    parts: Option<u64>,
    /// Micro-batches that a virtual stage takes in a row.
    group: Option<u64>,
    /// Sends that do not run beside computation.
    plain_sends: bool,
}

/// What the first and the last stage hold.
#[derive(Clone, Copy)]
struct Ends {
    /// Layers of the first stage, where a flag says.
    first: Option<u64>,
    /// Layers of the last stage, where a flag says.
    last: Option<u64>,
    /// Layers for which the embedding counts.
    embedding: u64,
    /// Layers for which the head counts.
    head: u64,
}

impl Ends {
    fn read(flags: &mut Flags) -> Ends {
        Ends {
            first: flags.count("--decoder-first-pipeline-num-layers"),
            last: flags.count("--decoder-last-pipeline-num-layers"),
            embedding: u64::from(flags.has("--account-for-embedding-in-pipeline-split")),
            head: u64::from(flags.has("--account-for-loss-in-pipeline-split")),
        }
    }
}

/// By numbers of layers (Megatron-LM, `validate_args`).
fn by_numbers(flags: &mut Flags, ends: Ends, numbers: Numbers, layers: u64, stages: u64) -> Parts {
    let Numbers { each, parts: number, .. } = numbers;
    if each.is_some() && number.is_some() {
        let what = "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank are both given";
        flags.refuse(what, "--num-virtual-stages-per-pipeline-rank", "keep one of the two");
    }
    if each.is_some() && (ends.first.is_some() || ends.last.is_some()) {
        let help = "use --num-virtual-stages-per-pipeline-rank";
        let what = "--num-layers-per-virtual-pipeline-stage beside a number of layers of the first or last stage";
        flags.refuse(what, "--num-layers-per-virtual-pipeline-stage", help);
    }
    let Some(per_stage) = layers_of_stages(flags, ends, layers, stages) else {
        return Parts { virtual_stages: 1, layers: Vec::new() };
    };
    let whole = (layers + ends.embedding + ends.head) / stages;
    let parts = match (each, number) {
        (Some(each), None) if !whole.is_multiple_of(each) => {
            let what = format!("{each} layers a virtual stage do not divide the {whole} of a stage");
            let help = format!("legal values: {}", list(&divisors(whole)));
            flags.refuse(what, "--num-layers-per-virtual-pipeline-stage", help);
            1
        }
        (Some(each), _) => whole / each,
        (None, Some(number)) => number,
        (None, None) => 1,
    };
    // Embedding and head take the place of a layer of the first and the last part.
    let padded = |stage: usize, count: u64| {
        count + if stage == 0 { ends.embedding } else { 0 } + if stage + 1 == per_stage.len() { ends.head } else { 0 }
    };
    let whole: Vec<u64> = per_stage.iter().enumerate().map(|(stage, count)| padded(stage, *count)).collect();
    if let Some(count) = whole.iter().find(|count| !count.is_multiple_of(parts)) {
        let what = format!("{parts} virtual stages do not divide the {count} layers of a stage");
        let help = format!("legal values: {}", list(&divisors(*count)));
        flags.refuse(what, "--num-virtual-stages-per-pipeline-rank", help);
        return Parts { virtual_stages: 1, layers: per_stage };
    }
    let mut chunks: Vec<u64> = (0..parts).flat_map(|_| whole.iter().map(|count| count / parts)).collect();
    if let Some(first) = chunks.first_mut() {
        *first = first.saturating_sub(ends.embedding);
    }
    if let Some(last) = chunks.last_mut() {
        *last = last.saturating_sub(ends.head);
    }
    Parts { virtual_stages: parts, layers: chunks }
}

/// Layers of each stage; `None` where they do not come out even, which is noted.
fn layers_of_stages(flags: &mut Flags, ends: Ends, layers: u64, stages: u64) -> Option<Vec<u64>> {
    if ends.first.is_none() && ends.last.is_none() {
        let counted = layers + ends.embedding + ends.head;
        if !counted.is_multiple_of(stages) {
            refuse_uneven(flags, layers, counted, stages);
            return None;
        }
        let mut counts = vec![counted / stages; stages as usize];
        counts[0] = counts[0].saturating_sub(ends.embedding);
        let last = counts.len() - 1;
        counts[last] = counts[last].saturating_sub(ends.head);
        return Some(counts);
    }
    let given = u64::from(ends.first.is_some()) + u64::from(ends.last.is_some());
    let held = ends.first.unwrap_or(0) + ends.last.unwrap_or(0);
    let between = stages.checked_sub(given);
    let rest = layers.checked_sub(held);
    let each = match (between, rest) {
        (Some(0), Some(0)) => Some(0),
        (Some(between), Some(rest)) if between > 0 && rest > 0 && rest.is_multiple_of(between) => Some(rest / between),
        _ => None,
    };
    let Some(each) = each else {
        let what = format!("{held} layers on the ends leave {} for {} stages", rest.unwrap_or(0), between.unwrap_or(0));
        let help = format!("the other layers of {layers} must divide evenly among the other stages");
        flags.refuse(what, "--decoder-first-pipeline-num-layers", help);
        return None;
    };
    let middle = std::iter::repeat_n(each, between.unwrap_or(0) as usize);
    Some(ends.first.into_iter().chain(middle).chain(ends.last).collect())
}

fn refuse_uneven(flags: &mut Flags, layers: u64, counted: u64, stages: u64) {
    let what = format!("{layers} layers over {stages} stages are not even");
    let near = [layers / stages * stages, (layers / stages + 1) * stages];
    let near: Vec<u64> = near.into_iter().filter(|layers| *layers > 0).collect();
    let mut help = format!(
        "legal values of --pipeline-model-parallel-size: {}; of --num-layers: {}",
        list(&divisors(counted)),
        list(&near)
    );
    help += "; or say --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers";
    if layers == counted && (layers + 2).is_multiple_of(stages) {
        help += ", or --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split";
    }
    flags.refuse(what, "--pipeline-model-parallel-size", help);
}

/// By DeepSpeed's balanced partition: as even as possible, the larger stages first.
fn by_deepspeed(method: Option<&str>, layers: u64, stages: u64, settings: &mut Settings) -> Parts {
    let even = |items: u64| -> Vec<u64> {
        let larger = items % stages;
        (0..stages).map(|stage| items / stages + u64::from(stage < larger)).collect()
    };
    let method = method.map(|method| method.trim_matches('\'').to_lowercase());
    let mut counts = match method.as_deref() {
        Some("type:transformer|embedding" | "type:embedding|transformer") if stages > 1 => even(layers + 2),
        _ => even(layers),
    };
    if counts.iter().sum::<u64>() > layers {
        let last = counts.len() - 1;
        counts[0] -= 1;
        counts[last] -= 1;
    }
    if let Some(method @ ("uniform" | "parameters")) = method.as_deref() {
        let reason = format!("{method} is predicted as the same number of layers on each stage");
        settings.assumed.push(("--pp-partition-method".to_owned(), reason));
    }
    Parts { virtual_stages: 1, layers: counts }
}

/// By `--pipeline-model-parallel-layout`: `E|(t|)*3,m|m||L`, stages in the model's order.
fn by_pattern(flags: &mut Flags, pattern: &str, layers: u64, stages: u64, settings: &mut Settings) -> Parts {
    const NAME: &str = "--pipeline-model-parallel-layout";
    let letters: String = pattern.chars().filter(|letter| !letter.is_whitespace() && *letter != ',').collect();
    let none = Parts { virtual_stages: 1, layers: Vec::new() };
    let Some(expanded) = expand(&letters).filter(|text| text.chars().all(|letter| "EtmL|".contains(letter))) else {
        flags.refuse(format!("`{pattern}` is no layout of stages"), NAME, "write stages of E, t, m and L between bars");
        return none;
    };
    let counts: Vec<u64> = expanded.split('|').map(|stage| stage.matches('t').count() as u64).collect();
    let number = counts.len() as u64;
    if !number.is_multiple_of(stages) || counts.iter().sum::<u64>() != layers {
        let held: u64 = counts.iter().sum();
        let what = format!("the layout has {number} stages with {held} layers");
        let help = format!("give a multiple of {stages} stages with {layers} layers altogether");
        flags.refuse(what, NAME, help);
        return none;
    }
    if expanded.contains('m') {
        settings.assumed.push((NAME.to_owned(), "layers of multi-token prediction are not counted".to_owned()));
    }
    Parts { virtual_stages: number / stages, layers: counts }
}

/// A layout with its repetitions written out: `t*3` and `(t|)*3`.
fn expand(text: &str) -> Option<String> {
    let (mut out, mut rest) = (String::new(), text);
    while let Some(letter) = rest.chars().next() {
        let (item, after) = match letter {
            '(' => {
                let end = closing(rest)?;
                (expand(&rest[1..end])?, &rest[end + 1..])
            }
            ')' => return None,
            other => (other.to_string(), &rest[other.len_utf8()..]),
        };
        let (times, after) = match after.strip_prefix('*') {
            Some(after) => {
                let digits = after.chars().take_while(char::is_ascii_digit).count();
                (after[..digits].parse::<usize>().ok()?, &after[digits..])
            }
            None => (1, after),
        };
        if item.len().checked_mul(times)? + out.len() > LONGEST_LAYOUT {
            return None;
        }
        out += &item.repeat(times);
        rest = after;
    }
    Some(out)
}

/// Place of the parenthesis that closes the first one.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 0_usize;
    for (place, letter) in text.char_indices() {
        match letter {
            '(' => depth += 1,
            ')' if depth == 1 => return Some(place),
            ')' => depth = depth.checked_sub(1)?,
            _ => {}
        }
    }
    None
}

/// Rules of the interleaved schedule.
fn check_interleaving(flags: &mut Flags, fork: Fork, numbers: Numbers, layout: &Strategy, settings: &mut Settings) {
    let stages = layout.pipeline_parallel;
    let least = if numbers.plain_sends || fork == Fork::Early { 3 } else { 2 };
    if stages < least {
        let what = format!("virtual stages with {stages} pipeline stages");
        let help = format!("interleaving needs --pipeline-model-parallel-size {least} or more");
        flags.refuse(what, "--pipeline-model-parallel-size", help);
    }
    let unit = layout.micro_batch.saturating_mul(layout.data_parallel);
    let micro_batches = layout.global_batch / unit.max(1);
    let group = numbers.group.unwrap_or(stages);
    let rest = micro_batches % group;
    if group < stages || group > micro_batches || (rest > 0 && rest < stages) {
        let near = [(micro_batches / stages) * stages, (micro_batches / stages + 1) * stages];
        let near: Vec<u64> = near.into_iter().filter(|n| *n > 0).map(|n| n.saturating_mul(unit)).collect();
        let what =
            format!("{micro_batches} micro-batches cannot be interleaved over {stages} stages in groups of {group}");
        let help = format!("use a multiple of {stages} micro-batches: --global-batch-size {}", list(&near));
        flags.refuse(what, "--global-batch-size", help);
    }
    if group != stages {
        let name = "--microbatch-group-size-per-virtual-pipeline-stage".to_owned();
        settings.assumed.push((name, format!("groups of {stages} micro-batches are predicted")));
    }
}

/// Layers of each part that are recomputed where that is not all of them; 0 elsewhere.
pub(super) fn recomputed_layers(flags: &mut Flags, parts: &Parts, settings: &mut Settings) -> u64 {
    let method = flags.word("--recompute-method", &["uniform", "block"]);
    let number = flags.count("--recompute-num-layers").unwrap_or(1);
    let most = parts.layers.iter().max().copied().unwrap_or(0);
    if method == Some("uniform") && number > 1 {
        let reason = format!("units of {number} layers are predicted as single ones, which keep more inputs");
        settings.assumed.push(("--recompute-num-layers".to_owned(), reason));
    }
    if method == Some("block") && number < most { number } else { 0 }
}
