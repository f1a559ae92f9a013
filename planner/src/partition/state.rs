//! States the partition problem of a strategy, and puts a solution's parts on their stages.

use cost_models::step::{
    BlockTime, CostedBlock, PerBlock, Scenario, StageContent, StagePosition, stage_memory_holding, stage_memory_of,
    stage_time, transfer_time,
};
use ir::model::MAX_LAYER_RUNS;
use ir::pipeline::{Held, HeldState, Pipeline, held_states, in_flight};
use ir::strategy::{Recompute, Strategy};

use super::{LayerCounts, PartitionProblem, Repeats, StageShare, StageTerms};

/// States the problem for a strategy; with several parts a stage, the stages of the problem are parts in model order,
/// and memory, which parts of a stage share, is left to [`recompute_to_fit`].
///
/// A stage's memory is linear in its layers but for the largest temporary, which is taken over all
/// layers of the model; the coefficients are differences of the cost model's own formula.
pub fn state_problem(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    times: &PerBlock<BlockTime>,
    strategy: &Strategy,
    layers: LayerCounts,
) -> PartitionProblem {
    let pipeline = Pipeline::of(strategy);
    let transfer = transfer_time(scenario, strategy, blocks);
    let alone = strategy.virtual_stages == 1;
    let partial = strategy.recompute == Recompute::Partial;
    let add_memory_at = |terms: &mut StageTerms, place, states| {
        let bytes = |share| {
            let content = content_at(place, pipeline, share);
            stage_memory_holding(scenario, blocks, strategy, &[content], states).least_use().0 as f64
        };
        add_memory(terms, layers, partial, bytes);
    };
    let whole_micro_batches = alone && !pipeline.schedule.splits_backward();
    let lines = whole_micro_batches.then(|| MemoryLines::of(pipeline.num_stages, add_memory_at));
    let mut before = None;
    let stages = (0..pipeline.num_parts()).map(|place| {
        let (stage, part) = pipeline.stage_and_part(place);
        let empty = content_at(place, pipeline, StageShare::default());
        let position = StagePosition::of(pipeline, stage, part);
        let fixed_time = match before {
            Some((content, there, time)) if (content, there) == (empty, position) => time,
            _ => stage_time(&empty, times, position, transfer, strategy, scenario.machine).total().0,
        };
        before = Some((empty, position, fixed_time));
        // One of several parts may be the embedding or the head alone.
        let least_layers = u64::from(alone || !(empty.embedding || empty.head));
        let mut terms = StageTerms { least_layers, fixed_time, ..StageTerms::default() };
        match &lines {
            Some(lines) => lines.add_memory(&mut terms, pipeline, stage),
            None if alone => add_memory_at(&mut terms, place, held_states(pipeline, stage)),
            None => {}
        }
        terms
    });
    let pass = |block: BlockTime| block.pass.total().0;
    PartitionProblem {
        layers,
        layer_time: times.layers.map(pass),
        repeat_time: std::array::from_fn(|run| pass(times.recomputed[run]) - pass(times.layers[run])),
        repeats: repeats(scenario, strategy),
        stages: stages.collect(),
        stage_of: (0..pipeline.num_parts()).map(|place| pipeline.stage_and_part(place).0 as usize).collect(),
        capacity: if alone { scenario.machine.usable_memory().0 as f64 } else { f64::INFINITY },
    }
}

/// Micro-batches at which a line is drawn, so many that rounding to bytes is no matter.
const FAR: u64 = 1 << 10;

/// Memory of stages that hold whole micro-batches, which is linear in their number: of the first, the last and the
/// other stages, with none and with [`FAR`].
struct MemoryLines([[StageTerms; 2]; 3]);

impl MemoryLines {
    fn of(num_stages: u64, add_memory_at: impl Fn(&mut StageTerms, u64, [HeldState; 3])) -> MemoryLines {
        let holding = |place, activations| {
            let mut terms = StageTerms::default();
            add_memory_at(&mut terms, place, [HeldState::One(Held { activations, weight_inputs: 0 }); 3]);
            terms
        };
        MemoryLines([0, num_stages / 2, num_stages - 1].map(|place| [0, FAR].map(|held| holding(place, held))))
    }

    fn add_memory(&self, terms: &mut StageTerms, pipeline: Pipeline, stage: u64) {
        let kind = usize::from(stage > 0) + usize::from(stage > 0 && stage + 1 == pipeline.num_stages);
        let [none, far] = &self.0[kind];
        let share = in_flight(pipeline, stage) as f64 / FAR as f64;
        let between = |from: f64, to: f64| from + (to - from) * share;
        terms.fixed_memory = between(none.fixed_memory, far.fixed_memory);
        terms.repeat_memory = between(none.repeat_memory, far.repeat_memory);
        for run in 0..MAX_LAYER_RUNS {
            terms.layer_memory[run] = between(none.layer_memory[run], far.layer_memory[run]);
            terms.saved_memory[run] = between(none.saved_memory[run], far.saved_memory[run]);
        }
    }
}

/// What of recomputation is open.
fn repeats(scenario: Scenario, strategy: &Strategy) -> Repeats {
    match (strategy.recompute, scenario.machine.stack.offers.same_recompute_on_stages) {
        (Recompute::None | Recompute::Selective | Recompute::Full, _) => Repeats::Never,
        (Recompute::Partial, true) => Repeats::SameOnEachStage,
        (Recompute::Partial, false) => Repeats::PerStage,
    }
}

/// The coefficients of memory, as differences of `bytes`.
fn add_memory(terms: &mut StageTerms, layers: LayerCounts, partial: bool, bytes: impl Fn(StageShare) -> f64) {
    let none = LayerCounts::default();
    let one_of_each = layers.map(|layers| layers.min(1));
    let base = bytes(StageShare { layers: one_of_each, recomputed: none });
    terms.fixed_memory = base;
    let mut all_saved = 0.0;
    for run in (0..MAX_LAYER_RUNS).filter(|run| one_of_each[*run] > 0) {
        let mut more = one_of_each;
        more[run] += 1;
        terms.layer_memory[run] = bytes(StageShare { layers: more, recomputed: none }) - base;
        terms.fixed_memory -= terms.layer_memory[run];
        if partial {
            let again = bytes(StageShare { layers: more, recomputed: one_of_each });
            terms.saved_memory[run] = again - bytes(StageShare { layers: more, recomputed: more });
            all_saved += terms.saved_memory[run];
        }
    }
    if partial {
        terms.repeat_memory = bytes(StageShare { layers: one_of_each, recomputed: one_of_each }) - base + all_saved;
    }
}

/// What the part at a place of model order holds.
fn content_at(place: u64, pipeline: Pipeline, share: StageShare) -> StageContent {
    let StageShare { layers, recomputed } = share;
    StageContent { embedding: place == 0, layers, recomputed, head: place + 1 == pipeline.num_parts() }
}

/// What the parts of a split in model order hold, those of the first stage first.
pub fn stage_contents(strategy: &Strategy, split: &[StageShare]) -> Vec<StageContent> {
    let pipeline = Pipeline::of(strategy);
    let places = |stage| (0..pipeline.virtual_stages).map(move |part| pipeline.position(stage, part));
    let content = |place: u64| content_at(place, pipeline, split[place as usize]);
    (0..pipeline.num_stages).flat_map(places).map(content).collect()
}

/// Chooses the layers that stages of several parts compute again so that they fit: as few as do, from the part that
/// holds most micro-batches on, where a layer saves most. Stages that do not fit even so keep all of them.
pub fn recompute_to_fit(
    scenario: Scenario,
    blocks: &PerBlock<CostedBlock>,
    strategy: &Strategy,
    contents: &mut [StageContent],
) {
    let pipeline = Pipeline::of(strategy);
    let usable = scenario.machine.usable_memory();
    let fits = |parts: &[StageContent], stage| {
        stage_memory_of(scenario, blocks, strategy, parts, stage).device_use() <= usable
    };
    let on_stages = |contents: &mut [StageContent], first: Option<u64>| {
        let stages = contents.chunks_mut(pipeline.virtual_stages as usize).zip(0..);
        stages.fold(true, |all, (parts, stage)| {
            match first {
                Some(count) => parts.iter_mut().for_each(|part| part.recomputed = first_layers(part.layers, count)),
                None => recompute_stage(parts, pipeline, stage, |parts| fits(parts, stage)),
            }
            all && fits(parts, stage)
        })
    };
    match repeats(scenario, strategy) {
        Repeats::Never | Repeats::First(_) => {}
        Repeats::PerStage => {
            on_stages(contents, None);
        }
        Repeats::SameOnEachStage => {
            let most = contents.iter().map(|part| part.layers.iter().sum()).max().unwrap_or(0);
            let _ = (0..=most).find(|count| on_stages(contents, Some(*count)));
        }
    }
}

/// The first layers of a part, at most `count`.
fn first_layers(layers: LayerCounts, count: u64) -> LayerCounts {
    let first = layers[0].min(count);
    [first, layers[1].min(count - first)]
}

/// Computes layer by layer again until the stage fits.
fn recompute_stage(parts: &mut [StageContent], pipeline: Pipeline, stage: u64, fits: impl Fn(&[StageContent]) -> bool) {
    let [fullest, ..] = held_states(pipeline, stage);
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by_key(|part| std::cmp::Reverse(fullest.of_part(*part as u64).activations));
    for part in order {
        for run in 0..MAX_LAYER_RUNS {
            while parts[part].recomputed[run] < parts[part].layers[run] {
                if fits(parts) {
                    return;
                }
                parts[part].recomputed[run] += 1;
            }
        }
    }
}
