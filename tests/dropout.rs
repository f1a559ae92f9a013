//! Dropout: the same elements in every layout, the right share of them, and gradients of what was computed.

#[path = "support/ranks.rs"]
mod ranks;
mod support;

use ir::graph::DimName::{
    self, HeadDim, Hidden, KeySequence, KeyValueHeads, MicroBatch, QueriesPerKeyValue, Sequence, ValueDim,
};
use ir::graph::DropoutSite;
use ir::interpreter::{Array, OperatorResult, apply_operator};
use ir::model::Workload;
use ir::plan::Plan;
use ir::program::{AttentionOperand, Op};
use ir::strategy::{Recompute, ScheduleKind, ZeroStage};
use planner::request::FixedChoices;
use ranks::{RankRun, Run, execute, joined, planned, sent};
use runtime::executor::StepOptions;
use runtime::operators::{Dropping, Operand, Place, ResultShape, apply};
use runtime::tensor::{Format, Memory, Tensor, size_of};
use runtime::train::Dropout;
use support::plans::fixed_plan;
use support::small::{Family, SEQUENCE, Shape, small_model};

type Dims = Vec<(DimName, usize)>;

const DROPPING: Dropping = Dropping { hidden: 0.1, attention: 0.25, seed: 5, step: 3, layer: 2, first_sequence: 6 };

const OPTIMIZER: StepOptions =
    StepOptions { dropout: Dropout { hidden: 0.1, attention: 0.1 }, seed: 77, ..ranks::OPTIMIZER };

const GPT2: Shape = Shape { family: Family::Gpt2, tied: true, heads: 4, key_value_heads: 4, layers: 4, vocabulary: 19 };
const BLOOM: Shape = Shape { family: Family::Bloom, heads: 6, key_value_heads: 6, ..GPT2 };
const LLAMA: Shape = Shape { family: Family::Llama, tied: false, key_value_heads: 2, ..GPT2 };

/// One rank with everything at once.
const SINGLE: FixedChoices = FixedChoices {
    tensor_parallel: Some(1),
    pipeline_parallel: Some(1),
    data_parallel: Some(1),
    zero_stage: Some(ZeroStage::None),
    micro_batch: Some(8),
    recompute: Some(Recompute::None),
    schedule: Some(ScheduleKind::OneForwardOneBackward),
    sequence_parallel: Some(false),
    context_parallel: None,
    expert_parallel: None,
    expert_tensor_parallel: None,
    virtual_stages: None,
    offload_optimizer: None,
    mesh_order: None,
};

fn plan(shape: Shape, flash: bool, fixed: FixedChoices) -> Plan {
    let workload = Workload { sequence_length: SEQUENCE as u64, global_batch: 8 };
    fixed_plan(small_model(shape), workload, flash, fixed)
}

fn run(plan: &Plan, optimizer: StepOptions) -> Vec<RankRun> {
    execute(plan, &Run::made_up(plan, 5, 11, optimizer))
}

/// Degrees of tensor, pipeline and data parallelism, ZeRO stage, micro-batch, recomputation, sequence parallelism.
type Layout = ((u64, u64, u64), ZeroStage, u64, Recompute, bool);

/// Layouts of up to eight ranks; every one is run with a flash and with a primitive attention core.
const LAYOUTS: [(Shape, Layout); 8] = [
    (GPT2, ((1, 1, 1), ZeroStage::None, 1, Recompute::Full, false)),
    (BLOOM, ((2, 1, 1), ZeroStage::None, 2, Recompute::Selective, false)),
    (GPT2, ((1, 2, 2), ZeroStage::Gradients, 2, Recompute::Full, false)),
    (BLOOM, ((2, 2, 2), ZeroStage::OptimizerState, 1, Recompute::Full, true)),
    (LLAMA, ((4, 1, 2), ZeroStage::None, 2, Recompute::None, true)),
    (LLAMA, ((4, 2, 1), ZeroStage::None, 1, Recompute::Selective, false)),
    (GPT2, ((1, 1, 4), ZeroStage::Parameters, 1, Recompute::None, false)),
    (GPT2, ((4, 2, 1), ZeroStage::None, 4, Recompute::Selective, true)),
];

#[test]
fn layouts_drop_the_same_elements() {
    let mut worst = [0.0_f64; 2];
    for flash in [true, false] {
        for (shape, ((tensor, pipeline, data), zero_stage, micro_batch, recompute, sequence_parallel)) in LAYOUTS {
            let single = &run(&plan(shape, flash, SINGLE), OPTIMIZER)[0];
            let fixed = FixedChoices {
                tensor_parallel: Some(tensor),
                pipeline_parallel: Some(pipeline),
                data_parallel: Some(data),
                zero_stage: Some(zero_stage),
                micro_batch: Some(micro_batch),
                recompute: Some(recompute),
                sequence_parallel: Some(sequence_parallel),
                ..SINGLE
            };
            let name = format!("{:?}, flash {flash}, {fixed:?}", shape.family);
            let plan = plan(shape, flash, fixed);
            let ranks = run(&plan, OPTIMIZER);
            for rank in &ranks {
                for (at, (found, expected)) in
                    [(&rank.losses, &single.losses), (&rank.norms, &single.norms)].into_iter().enumerate()
                {
                    let off = found.iter().zip(expected).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
                    worst[at] = worst[at].max(off);
                    assert!(off <= [1e-6, 1e-5][at], "{name}: {found:?}, expected {expected:?}");
                }
            }
            joined(&ranks, |rank| &rank.weights);
            let bytes = planned(&plan).into_iter().map(|(link, bytes)| (link, 5 * bytes)).collect();
            let mut found = sent(&ranks);
            found.retain(|_, bytes| *bytes > 0);
            assert_eq!(found, bytes, "{name}: dropout sends nothing");
        }
    }
    println!("largest relative difference of a loss {:.1e}, of a norm {:.1e}", worst[0], worst[1]);
}

#[test]
fn runs_depend_on_seed_and_probability_only() {
    let plan = plan(LLAMA, true, FixedChoices { data_parallel: Some(2), micro_batch: Some(2), ..SINGLE });
    let with = |hidden, attention, seed| {
        let options = StepOptions { dropout: Dropout { hidden, attention }, seed, learning_rate: 0.0, ..OPTIMIZER };
        // One batch over and over, and weights that stay: steps differ in what they drop alone.
        let mut run = Run::made_up(&plan, 3, 11, options);
        run.batches = vec![run.batches[0].clone(); 3];
        execute(&plan, &run).remove(0)
    };
    let numbers = |run: &RankRun| (run.losses.clone(), run.norms.clone(), run.gradients.clone());
    let none = with(0.0, 0.0, 1);
    assert_eq!(none.losses[1..], none.losses[..2], "without dropout steps are equal");
    // A probability below 2⁻³² drops nothing, but draws every number.
    assert_eq!(numbers(&with(1e-12, 1e-12, 1)), numbers(&none), "nothing is dropped");
    let first = with(0.1, 0.1, 1);
    assert_eq!(numbers(&with(0.1, 0.1, 1)), numbers(&first), "two runs");
    assert_eq!(first.evaluation, none.evaluation, "evaluations drop nothing");
    let all = [
        none.losses[0],
        first.losses[0],
        first.losses[1],
        first.losses[2],
        with(0.1, 0.1, 2).losses[0],
        with(0.1, 0.0, 1).losses[0],
        with(0.0, 0.1, 1).losses[0],
    ];
    for (at, loss) in all.iter().enumerate() {
        assert!((loss / none.losses[0] - 1.0).abs() < 0.3 && !all[..at].contains(loss), "{all:?}");
    }
}

/// The slope of the loss along its gradient is the gradient's length: central differences with the masks of a step.
#[test]
fn gradients_are_those_of_the_loss() {
    for (shape, flash) in [(GPT2, true), (BLOOM, true), (LLAMA, true), (BLOOM, false), (LLAMA, false)] {
        let dropout = Dropout { hidden: 0.2, attention: 0.3 };
        let optimizer = StepOptions { dropout, clip: None, ..OPTIMIZER };
        let plan = plan(shape, flash, SINGLE);
        let mut run = Run::made_up(&plan, 1, 11, optimizer);
        let start = execute(&plan, &run).remove(0);
        let gradients = joined(std::slice::from_ref(&start), |rank| &rank.gradients);
        let weights = run.weights.clone();
        let mut loss = |distance: f64| {
            for (name, numbers) in &mut run.weights {
                let gradient = gradients.get(name).into_iter().flatten();
                let moved = weights[name].iter().zip(gradient);
                let moved: Vec<f64> = moved.map(|(w, g)| w + distance * g / start.norms[0]).collect();
                numbers.splice(..moved.len(), moved);
            }
            execute(&plan, &run)[0].losses[0]
        };
        let distance = 4e-3;
        let slope = (loss(distance) - loss(-distance)) / (2.0 * distance);
        let off = slope / start.norms[0] - 1.0;
        println!("{:?}, flash {flash}: the slope is off by {off:.1e}", shape.family);
        assert!(off.abs() < 1e-3, "{:?}, flash {flash}: slope {slope}, norm {}", shape.family, start.norms[0]);
    }
}

fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|at| ((at * 7919 + seed * 104_729) % 2003) as f32 / 1000.0 - 1.0).collect()
}

/// What an operator makes of numbers on a rank's place.
fn applied(op: Op, operands: &[(&Dims, &[f32])], dims: &Dims, place: Place) -> Vec<f32> {
    let memory = Memory::default();
    let tensor = |(dims, numbers): &(&Dims, &[f32])| {
        Operand::Owned(Tensor::from_numbers(&memory, dims, Format::Single, numbers))
    };
    let result = ResultShape { memory: &memory, dims, format: Format::Single, place };
    apply(&op, operands.iter().map(tensor).collect(), &result).to_numbers()
}

/// What dropout makes of ones.
fn mask(site: DropoutSite, dims: &Dims, place: Place) -> Vec<f32> {
    applied(Op::Dropout(site), &[(dims, &vec![1.0; size_of(dims)])], dims, place)
}

#[test]
fn the_right_share_is_kept_and_scaled() {
    let dims = vec![(MicroBatch, 4), (Sequence, 64), (Hidden, 512)];
    for probability in [0.1, 0.5, 0.9] {
        let dropping = Some(Dropping { hidden: probability, ..DROPPING });
        let place = Place { positions: (0, 64), dropping, ..Place::WHOLE };
        let operand = numbers(size_of(&dims), 3);
        let found = applied(Op::Dropout(DropoutSite::Embedding), &[(&dims, &operand)], &dims, place);
        let scale = (1.0 / (1.0 - probability)) as f32;
        assert!(operand.iter().zip(&found).all(|(before, after)| *after == 0.0 || *after == before * scale));
        let count = operand.iter().filter(|x| **x != 0.0).count() as f64;
        let share = found.iter().filter(|x| **x != 0.0).count() as f64 / count;
        let deviation = (probability * (1.0 - probability) / count).sqrt();
        assert!((share - 1.0 + probability).abs() < 5.0 * deviation, "{probability}: {share} kept");
    }
    // Sites, layers and steps drop different elements.
    let place = |dropping| Place { positions: (0, 64), dropping: Some(dropping), ..Place::WHOLE };
    let masks = [
        mask(DropoutSite::Embedding, &dims, place(DROPPING)),
        mask(DropoutSite::AttentionOutput, &dims, place(DROPPING)),
        mask(DropoutSite::FeedForwardOutput, &dims, place(DROPPING)),
        mask(DropoutSite::Embedding, &dims, place(Dropping { layer: 3, ..DROPPING })),
        mask(DropoutSite::Embedding, &dims, place(Dropping { step: 4, ..DROPPING })),
        mask(DropoutSite::Embedding, &dims, place(Dropping { seed: 6, ..DROPPING })),
        mask(DropoutSite::Embedding, &dims, place(Dropping { first_sequence: 10, ..DROPPING })),
    ];
    for (at, mask) in masks.iter().enumerate() {
        assert!(!masks[..at].contains(mask), "{at}");
    }
}

/// A rank's part of a mask is that part of the whole.
#[test]
fn parts_of_masks_fit_together() {
    let attention = |batch, heads, queries| {
        vec![
            (MicroBatch, batch),
            (KeyValueHeads, heads),
            (QueriesPerKeyValue, queries),
            (Sequence, 5),
            (KeySequence, 5),
        ]
    };
    let hidden = |batch, length| vec![(MicroBatch, batch), (Sequence, length), (Hidden, 37)];
    let whole = Place { heads: (0, 6), queries: (0, 4), positions: (0, 8), dropping: Some(DROPPING), ..Place::WHOLE };
    let later = |sequences: u64| Some(Dropping { first_sequence: 6 + sequences, ..DROPPING });
    let attention_place = Place { positions: (0, 5), ..whole };
    /// Whole dims and place, the part's, and first indices of the part.
    type Row = (&'static str, DropoutSite, (Dims, Place), (Dims, Place), [usize; 5]);
    let site = DropoutSite::AttentionOutput;
    let rows: [Row; 5] = [
        (
            "sequences",
            site,
            (hidden(4, 8), whole),
            (hidden(2, 8), Place { dropping: later(2), ..whole }),
            [2, 0, 0, 0, 0],
        ),
        (
            "positions",
            site,
            (hidden(4, 8), whole),
            (hidden(4, 4), Place { positions: (4, 8), ..whole }),
            [0, 4, 0, 0, 0],
        ),
        (
            "heads",
            DropoutSite::Attention,
            (attention(2, 6, 4), attention_place),
            (attention(2, 2, 4), Place { heads: (2, 6), ..attention_place }),
            [0, 2, 0, 0, 0],
        ),
        (
            "queries",
            DropoutSite::Attention,
            (attention(2, 6, 4), attention_place),
            (attention(2, 6, 2), Place { queries: (2, 4), ..attention_place }),
            [0, 0, 2, 0, 0],
        ),
        (
            "all",
            DropoutSite::Attention,
            (attention(2, 6, 4), attention_place),
            (attention(1, 3, 1), Place { heads: (3, 6), queries: (1, 4), dropping: later(1), ..attention_place }),
            [1, 3, 1, 0, 0],
        ),
    ];
    for (name, site, (all, place), (dims, part), first) in rows {
        let (mask_of_all, mask_of_part) = (mask(site, &all, place), mask(site, &dims, part));
        for (at, found) in mask_of_part.iter().enumerate() {
            let (mut rest, mut stride, mut index) = (at, 1, 0);
            for ((&(_, extent), &(_, whole)), first) in dims.iter().zip(&all).zip(first).rev() {
                index += (rest % extent + first) * stride;
                rest /= extent;
                stride *= whole;
            }
            assert_eq!(*found, mask_of_all[index], "{name}: element {at}");
        }
    }
}

/// An attention core with a fixed mask in fp64.
struct Core {
    dims: [Dims; 4],
    weights: Dims,
    mask: Array,
    alibi: bool,
}

const SCALE: f64 = 0.4;
const PLACE: Place = Place { heads: (2, 6), queries: (1, 4), ..Place::WHOLE };

impl Core {
    fn new(heads: usize, queries: usize, length: usize, alibi: bool) -> Core {
        let by_query = |name, width| {
            vec![
                (MicroBatch, 2),
                (Sequence, length),
                (KeyValueHeads, heads),
                (QueriesPerKeyValue, queries),
                (name, width),
            ]
        };
        let by_key = |name, width| vec![(MicroBatch, 2), (KeySequence, length), (KeyValueHeads, heads), (name, width)];
        let dims = [by_query(HeadDim, 5), by_key(HeadDim, 5), by_key(ValueDim, 7), by_query(ValueDim, 7)];
        let weights = vec![
            (MicroBatch, 2),
            (KeyValueHeads, heads),
            (QueriesPerKeyValue, queries),
            (Sequence, length),
            (KeySequence, length),
        ];
        let place = Core::place(length);
        let drawn = mask(DropoutSite::Attention, &weights, place).iter().map(|x| f64::from(*x)).collect();
        Core { dims, mask: Array { dims: weights.clone(), data: drawn }, weights, alibi }
    }

    fn place(length: usize) -> Place {
        Place { positions: (0, length), dropping: Some(DROPPING), ..PLACE }
    }

    fn context(&self, operands: &[Array; 3]) -> Array {
        let apply = |op: Op, operands: &[&Array], dims: &Dims| {
            let Place { heads, queries, seed, .. } = PLACE;
            apply_operator(&op, operands, &OperatorResult { dims, vocabulary_start: 0, heads, queries, seed })
        };
        let [query, keys, values] = operands;
        let scores = apply(Op::Contraction, &[query, keys], &self.weights);
        let scores = apply(Op::ScaleMask { scale: SCALE, alibi: self.alibi }, &[&scores], &self.weights);
        let weights = apply(Op::Softmax, &[&scores], &self.weights);
        let left = apply(Op::Multiply, &[&weights, &self.mask], &self.weights);
        apply(Op::Contraction, &[&left, values], &self.dims[3])
    }
}

#[test]
fn attention_and_its_gradients_drop_the_same_weights() {
    // Grouped queries, ALiBi, several blocks of queries, several strips of keys.
    for (heads, queries, length, alibi) in [(2, 3, 9, true), (2, 3, 9, false), (2, 1, 60, true), (1, 1, 1100, false)] {
        let core = Core::new(heads, queries, length, alibi);
        let place = Core::place(length);
        let given: Vec<Vec<f32>> = (0..4).map(|at| numbers(size_of(&core.dims[at]), at)).collect();
        let given: Vec<(&Dims, &[f32])> = core.dims.iter().zip(given.iter().map(Vec::as_slice)).collect();
        let wide = |at: usize| Array {
            dims: core.dims[at].clone(),
            data: given[at].1.iter().map(|x| f64::from(*x)).collect(),
        };
        let operands = [wide(0), wide(1), wide(2)];
        let found = applied(Op::FlashAttention { scale: SCALE, alibi }, &given[..3], &core.dims[3], place);
        let expected = core.context(&operands).data;
        let worst = found.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
        assert!(worst < 1e-5, "{heads} {queries} {length}: context off by {worst}");
        let parts = [AttentionOperand::Query, AttentionOperand::Keys, AttentionOperand::Values];
        for (at, of) in parts.into_iter().enumerate() {
            let op = Op::FlashAttentionGradient { of, scale: SCALE, alibi };
            let found = applied(op, &given, &core.dims[at], place);
            let largest = found.iter().map(|x| f64::from(x.abs())).fold(0.0, f64::max);
            // Central differences of Σ gradient · context, for elements all over the operand.
            let count = if length > 100 { 3 } else { 40 };
            for element in (0..count).map(|step| (step * 7919 + 13) % found.len()) {
                let value = |distance: f64| {
                    let mut moved = operands.clone();
                    moved[at].data[element] += distance;
                    let context = core.context(&moved).data;
                    context.iter().zip(given[3].1).map(|(a, b)| a * f64::from(*b)).sum::<f64>()
                };
                let slope = (value(1e-4) - value(-1e-4)) / 2e-4;
                let off = (f64::from(found[element]) - slope).abs();
                assert!(
                    off < 1e-5 * largest + 1e-6,
                    "{of:?}, {length}: {} at {element}, slope {slope}",
                    found[element]
                );
            }
        }
    }
}

/// Dropout is linear: its gradient is itself.
#[test]
fn the_gradient_of_dropout_is_dropout() {
    let dims = vec![(MicroBatch, 2), (Sequence, 7), (Hidden, 13)];
    let place = Place { positions: (0, 7), dropping: Some(DROPPING), ..Place::WHOLE };
    let of = |numbers: &[f32]| applied(Op::Dropout(DropoutSite::Embedding), &[(&dims, numbers)], &dims, place);
    let (input, gradient) = (numbers(size_of(&dims), 1), numbers(size_of(&dims), 2));
    let found = of(&gradient);
    for element in 0..input.len() {
        let value = |distance: f32| {
            let mut moved = input.clone();
            moved[element] += distance;
            of(&moved).iter().zip(&gradient).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
        };
        let slope = value(0.5) - value(-0.5);
        assert!((slope - f64::from(found[element])).abs() < 1e-5, "{element}: {}, slope {slope}", found[element]);
    }
}
