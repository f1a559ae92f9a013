//! How torchtitan splits the layers into stages.

use ir::model::ModelSpec;

use crate::foreign::Settings;
use crate::foreign::tree::Tree;

/// Parts of the model on each stage of a schedule that interleaves, where nothing says otherwise.
const INTERLEAVED_PARTS: u64 = 2;
/// Schedules with one part of the model on each stage.
const SINGLE: [&str; 2] = ["1F1B", "GPipe"];
/// Schedules with several.
const SEVERAL: [&str; 5] = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"];

/// A pipeline schedule as far as predictions follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Schedule {
    /// All forward passes first.
    GPipe,
    /// One forward, one backward.
    OneForwardOneBackward,
    /// Several parts of the model on each stage.
    Interleaved,
    /// Two parts, down the stages and back, with weight gradients that wait.
    ZeroBubbleV,
}

/// Parts of the model on each stage, and layers of each part in the model's order.
pub(super) struct Parts {
    pub virtual_stages: u64,
    pub layers: Vec<u64>,
}

pub(super) fn read_schedule(file: &mut Tree, stages: u64, settings: &mut Settings) -> Schedule {
    const PATH: &str = "parallelism.pipeline_parallel_schedule";
    let words: Vec<&'static str> = SINGLE.into_iter().chain(SEVERAL).collect();
    let older = file.word("experimental.pipeline_parallel_schedule", &words);
    let word = file.word(PATH, &words).or(older).unwrap_or(SINGLE[0]);
    let schedule = match word {
        "GPipe" => Schedule::GPipe,
        "1F1B" => Schedule::OneForwardOneBackward,
        "ZBVZeroBubble" | "DualPipeV" => Schedule::ZeroBubbleV,
        _ => Schedule::Interleaved,
    };
    let predicted = match word {
        "LoopedBFS" | "InterleavedZeroBubble" => Some("Interleaved1F1B"),
        "DualPipeV" => Some("ZBVZeroBubble"),
        _ => None,
    };
    if let Some(other) = predicted.filter(|_| stages > 1) {
        settings.assumed.push((PATH.to_owned(), format!("{word} is predicted as {other}")));
    }
    schedule
}

/// Layers of each part: embedding and head count as layers, and the first parts hold what does not come out even
/// (distributed/pipeline.py).
pub(super) fn split(file: &mut Tree, model: &ModelSpec, stages: u64, schedule: Schedule) -> Parts {
    const PATH: &str = "parallelism.pipeline_parallel_layers_per_stage";
    let each = file.count(PATH);
    let ends = [
        file.count("parallelism.pipeline_parallel_first_stage_less_layers").unwrap_or(1),
        file.count("parallelism.pipeline_parallel_last_stage_less_layers").unwrap_or(1),
    ];
    if stages == 1 {
        return Parts { virtual_stages: 1, layers: Vec::new() };
    }
    let items = model.num_layers + ends[0] + ends[1];
    let several = matches!(schedule, Schedule::Interleaved | Schedule::ZeroBubbleV);
    let number = match each {
        Some(each) => items.div_ceil(each),
        None if several => stages * INTERLEAVED_PARTS,
        None => stages,
    };
    let fits = match schedule {
        Schedule::GPipe | Schedule::OneForwardOneBackward => number == stages,
        Schedule::Interleaved => number > stages && number.is_multiple_of(stages),
        Schedule::ZeroBubbleV => number == 2 * stages,
    };
    if !fits || number > model.num_layers {
        let what = format!("{number} parts of {} layers for {stages} stages", model.num_layers);
        let help =
            "give layers a stage so that each stage has one part, with an interleaved schedule several, two of a V";
        file.refuse(what, PATH, help);
        return Parts { virtual_stages: 1, layers: Vec::new() };
    }
    let mut layers: Vec<u64> = (0..number).map(|part| items / number + u64::from(part < items % number)).collect();
    let last = layers.len() - 1;
    for (part, less) in [(0, ends[0]), (last, ends[1])] {
        layers[part] = layers[part].saturating_sub(less);
    }
    if layers.iter().sum::<u64>() != model.num_layers {
        return Parts { virtual_stages: number / stages, layers: Vec::new() };
    }
    Parts { virtual_stages: number / stages, layers }
}
