//! Runs of operators that are computed together, against the interpreter in fp64 operator by operator.

use std::collections::BTreeMap;

use ir::graph::DimName::{
    self, HeadDim, Hidden, KeySequence, KeyValueHeads, MicroBatch, QueriesPerKeyValue, Sequence, ValueDim, Vocabulary,
};
use ir::graph::DropoutSite;
use ir::interpreter::{Array, OperatorResult, apply_operator};
use ir::kernel::kernel_pattern;
use ir::model::NormKind::{LayerNorm, RmsNorm};
use ir::program::{AttentionOperand, Instruction, Op, ValueId};
use runtime::operators::run::{LocalShape, apply_run, attention_gradient_runs, plan_run};
use runtime::operators::{Operand, Place};
use runtime::tensor::{Format, Memory, Tensor, size_of};

type Dims = Vec<(DimName, usize)>;

/// A run: values from outside, then operators with operands and result dims, then which values end in it.
struct Case {
    name: &'static str,
    outside: Vec<Dims>,
    steps: Vec<(Op, Vec<u32>, Dims)>,
    freed: Vec<u32>,
    /// The outside value that holds ids below twice the vocabulary.
    ids: Option<u32>,
}

/// Cases that are no run over rows.
const APART: [&str; 3] = ["unrelated sums", "sums of small values", "gradients of attention"];

const PLACE: Place = Place { vocabulary_start: 4, heads: (2, 6), queries: (1, 4), ..Place::WHOLE };

fn tokens() -> Dims {
    vec![(MicroBatch, 3), (Sequence, 7)]
}

fn wide(name: DimName, width: usize) -> Dims {
    [tokens(), vec![(name, width)]].concat()
}

fn scores() -> Dims {
    vec![(MicroBatch, 2), (KeyValueHeads, 2), (QueriesPerKeyValue, 3), (Sequence, 5), (KeySequence, 5)]
}

fn case(name: &'static str, outside: Vec<Dims>, steps: Vec<(Op, Vec<u32>, Dims)>, freed: Vec<u32>) -> Case {
    Case { name, outside, steps, freed, ids: None }
}

fn cases() -> Vec<Case> {
    let hidden = || wide(Hidden, 37);
    let bias = || vec![(Hidden, 37)];
    let logits = || wide(Vocabulary, 4001);
    let by_head = || [tokens(), vec![(KeyValueHeads, 2), (HeadDim, 5)]].concat();
    let add = |a, b, dims: Dims| (Op::Add, vec![a, b], dims);
    let dropout = |a| (Op::Dropout(DropoutSite::AttentionOutput), vec![a], hidden());
    vec![
        case(
            "bias and activation",
            vec![hidden(), bias()],
            vec![add(0, 1, hidden()), (Op::Gelu, vec![2], hidden())],
            vec![0],
        ),
        case(
            "activation alone is kept",
            vec![hidden(), bias()],
            vec![add(0, 1, hidden()), (Op::Gelu, vec![2], hidden())],
            vec![0, 1, 2],
        ),
        case(
            "gated",
            vec![hidden(), hidden()],
            vec![(Op::Silu, vec![0], hidden()), (Op::Multiply, vec![2, 1], hidden())],
            vec![2],
        ),
        case(
            "bias, dropout and residual",
            vec![hidden(), bias(), hidden()],
            vec![add(0, 1, hidden()), dropout(3), add(4, 2, hidden())],
            vec![0, 3, 4],
        ),
        case(
            "what dropout left is kept",
            vec![hidden(), bias(), hidden()],
            vec![add(0, 1, hidden()), dropout(3), add(4, 2, hidden())],
            vec![0, 3],
        ),
        case(
            "bias by head",
            vec![by_head(), vec![(KeyValueHeads, 2), (HeadDim, 5)], by_head()],
            vec![add(0, 1, by_head()), add(3, 2, by_head())],
            vec![0, 3],
        ),
        case(
            "residual and norm",
            vec![hidden(), hidden(), bias()],
            vec![add(0, 1, hidden()), (Op::Norm { kind: RmsNorm, epsilon: 1e-5 }, vec![3, 2], hidden())],
            vec![0],
        ),
        case(
            "bias, dropout, residual and norm",
            vec![hidden(), bias(), hidden(), bias(), bias()],
            vec![
                add(0, 1, hidden()),
                dropout(5),
                add(6, 2, hidden()),
                (Op::Norm { kind: LayerNorm, epsilon: 1e-5 }, vec![7, 3, 4], hidden()),
            ],
            vec![0, 5, 6],
        ),
        case(
            "mask and softmax",
            vec![scores()],
            vec![(Op::ScaleMask { scale: 0.3, alibi: true }, vec![0], scores()), (Op::Softmax, vec![1], scores())],
            vec![0, 1],
        ),
        case(
            "their gradients",
            vec![scores(), scores()],
            vec![
                (Op::SoftmaxGradient, vec![0, 1], scores()),
                (Op::ScaleMaskGradient { scale: 0.3 }, vec![2], scores()),
            ],
            vec![2],
        ),
        case(
            "cross-entropy",
            vec![logits(), tokens()],
            vec![
                (Op::Subtract, vec![0, 1], logits()),
                (Op::Exp, vec![2], logits()),
                (Op::ReduceSum, vec![3], tokens()),
            ],
            vec![0, 1],
        ),
        Case {
            ids: Some(2),
            ..case(
                "cross-entropy's gradient",
                vec![logits(), tokens(), tokens(), vec![]],
                vec![
                    (Op::Multiply, vec![0, 1], logits()),
                    (Op::PickGradient, vec![2, 3], logits()),
                    add(5, 4, logits()),
                    (Op::Cast, vec![6], logits()),
                ],
                vec![4, 5, 6, 0],
            )
        },
        // Sums that do not follow from one another, and rows of different dims.
        case(
            "unrelated sums",
            vec![hidden(), bias(), wide(Vocabulary, 4), wide(Vocabulary, 4)],
            vec![add(0, 1, hidden()), add(2, 3, wide(Vocabulary, 4))],
            vec![0],
        ),
        case("a value read twice", vec![hidden(), bias()], vec![add(0, 0, hidden()), add(2, 2, hidden())], vec![0, 2]),
        case(
            "sums of small values",
            vec![bias(), bias(), hidden()],
            vec![add(0, 1, bias()), add(2, 3, hidden())],
            vec![3],
        ),
    ]
}

fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|at| ((at * 7919 + seed * 104_729) % 2003) as f32 / 1000.0 - 1.0).collect()
}

fn check(case: &Case, format: Format, threads: usize) -> Vec<Vec<u32>> {
    let memory = Memory::default();
    let outside = case.outside.iter().enumerate().map(|(at, dims)| match case.ids {
        Some(ids) if ids as usize == at => {
            let ids: Vec<u32> = (0..size_of(dims)).map(|at| (at * 977 % 8002) as u32).collect();
            Tensor::from_ids(&memory, dims, &ids)
        }
        _ => Tensor::from_numbers(&memory, dims, format, &numbers(size_of(dims), at)),
    });
    let outside: Vec<Tensor> = outside.collect();
    let array = |tensor: &Tensor| Array {
        dims: tensor.dims.clone(),
        data: tensor.to_numbers().iter().map(|x| f64::from(*x)).collect(),
    };
    let mut arrays: Vec<Array> = outside.iter().map(array).collect();
    for (op, operands, dims) in &case.steps {
        let Place { vocabulary_start, heads, queries, seed, .. } = PLACE;
        let result = OperatorResult { dims, vocabulary_start, heads, queries, seed };
        let read: Vec<&Array> = operands.iter().map(|operand| &arrays[*operand as usize]).collect();
        let computed = apply_operator(op, &read, &result);
        arrays.push(computed);
    }
    let first = case.outside.len() as u32;
    let steps = case.steps.iter().enumerate().map(|(at, (op, operands, _))| {
        Instruction::Compute(*op, operands.iter().copied().map(ValueId).collect(), ValueId(first + at as u32))
    });
    let frees = case.freed.iter().map(|value| Instruction::Free(ValueId(*value)));
    let instructions: Vec<Instruction> = steps.chain(frees).collect();
    let shape = |value: ValueId| {
        let dims = arrays[value.0 as usize].dims.clone();
        let format = outside.get(value.0 as usize).map_or(format, Tensor::format);
        LocalShape { dims, format }
    };
    let run = plan_run(&instructions, 0..instructions.len(), shape, |_, _| PLACE);
    let given = run.operands.iter().map(|(value, ends)| {
        let tensor = &outside[value.0 as usize];
        match *ends && tensor.format() != Format::Index {
            true => Operand::Owned(Tensor::from_numbers(&memory, &tensor.dims, format, &tensor.to_numbers())),
            false => Operand::Borrowed(tensor),
        }
    });
    let given: Vec<Operand> = given.collect();
    memory.reset_peak();
    let before = memory.live_bytes();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads can be made");
    let found: BTreeMap<ValueId, Tensor> = pool.install(|| apply_run(&run, given, &memory, None)).into_iter().collect();
    let expected: Vec<u32> =
        (first..first + case.steps.len() as u32).filter(|value| !case.freed.contains(value)).collect();
    assert_eq!(found.keys().map(|value| value.0).collect::<Vec<_>>(), expected, "{}", case.name);
    if !APART.contains(&case.name) {
        let kept: usize = found.values().map(|tensor| tensor.len() * tensor.format().bytes()).sum();
        assert_eq!(memory.peak_bytes() - before, kept as u64, "{}: only what is kept has memory", case.name);
    }
    for (value, tensor) in &found {
        close(case.name, tensor, &arrays[value.0 as usize], format);
    }
    found.values().map(|tensor| tensor.to_numbers().iter().map(|x| x.to_bits()).collect()).collect()
}

/// Within 1e-5 of the largest element; in bf16 a rounding of each operator's result besides, as if one
/// after another.
fn close(name: &str, found: &Tensor, expected: &Array, format: Format) {
    assert_eq!(found.dims, expected.dims, "{name}");
    let finite = expected.data.iter().filter(|x| x.is_finite());
    let largest = finite.map(|x| x.abs()).fold(0.0, f64::max);
    let tolerance = if format == Format::Brain { 2.0 / 256.0 } else { 1e-5 };
    for (place, (found, expected)) in found.to_numbers().iter().zip(&expected.data).enumerate() {
        let same = f64::from(*found) == *expected || (f64::from(*found) - expected).abs() <= tolerance * largest;
        assert!(same, "{name}, {format:?}: element {place} is {found}, expected {expected}, largest {largest}");
    }
}

#[test]
fn runs_compute_what_their_operators_do() {
    for case in cases() {
        for format in [Format::Single, Format::Brain] {
            assert_eq!(check(&case, format, 1), check(&case, format, 3), "{}: bits depend on threads", case.name);
        }
    }
}

#[test]
fn every_kernel_of_plans_is_a_case() {
    let ops = |case: &Case| case.steps.iter().map(|(op, ..)| *op).collect::<Vec<Op>>();
    let kinds: Vec<String> =
        cases().iter().filter_map(|case| kernel_pattern(&ops(case))).map(|(kind, _)| format!("{kind:?}")).collect();
    let all = [
        "BiasActivation",
        "GatedActivation",
        "BiasResidual",
        "ResidualNorm",
        "BiasResidualNorm",
        "ScaleMaskSoftmax",
        "CrossEntropy",
    ];
    for kind in all {
        assert!(kinds.iter().any(|found| found == kind), "{kind} is no case");
    }
}

#[test]
fn gradients_of_one_attention_core_are_a_run() {
    let query = vec![(MicroBatch, 2), (Sequence, 50), (KeyValueHeads, 2), (QueriesPerKeyValue, 3), (HeadDim, 5)];
    let keys = vec![(MicroBatch, 2), (KeySequence, 50), (KeyValueHeads, 2), (HeadDim, 5)];
    let values = vec![(MicroBatch, 2), (KeySequence, 50), (KeyValueHeads, 2), (ValueDim, 7)];
    let context = vec![(MicroBatch, 2), (Sequence, 50), (KeyValueHeads, 2), (QueriesPerKeyValue, 3), (ValueDim, 7)];
    let parts =
        [(AttentionOperand::Query, &query), (AttentionOperand::Keys, &keys), (AttentionOperand::Values, &values)];
    let steps = parts
        .map(|(of, dims)| (Op::FlashAttentionGradient { of, scale: 0.4, alibi: true }, vec![0, 1, 2, 3], dims.clone()));
    let outside = vec![query.clone(), keys.clone(), values.clone(), context];
    for kept in [3, 2] {
        let case = case("gradients of attention", outside.clone(), steps[..kept].to_vec(), vec![]);
        assert_eq!(check(&case, Format::Single, 1), check(&case, Format::Single, 3));
    }
    let gradient = |of, operands: [u32; 4], value| {
        let op = Op::FlashAttentionGradient { of, scale: 0.4, alibi: true };
        Instruction::Compute(op, operands.map(ValueId).to_vec(), ValueId(value))
    };
    let instructions = [
        Instruction::Free(ValueId(9)),
        gradient(AttentionOperand::Query, [0, 1, 2, 3], 4),
        gradient(AttentionOperand::Keys, [0, 1, 2, 3], 5),
        gradient(AttentionOperand::Values, [0, 1, 2, 3], 6),
        gradient(AttentionOperand::Values, [0, 1, 8, 3], 7),
    ];
    assert_eq!(attention_gradient_runs(&instructions), vec![std::ops::Range { start: 1, end: 4 }]);
}
