//! Every operator on odd shapes, in both number formats, against the interpreter in fp64.

#[cfg(feature = "wgpu")]
#[path = "operators/device.rs"]
mod device;
#[path = "support/random.rs"]
mod random;

use ir::graph::DimName::{
    self, HeadDim, Hidden, Intermediate, KeySequence, KeyValueHeads, MicroBatch, Position, QueriesPerKeyValue,
    Sequence, ValueDim, Vocabulary,
};
use ir::graph::DropoutSite;
use ir::interpreter::{Array, OperatorResult, apply_operator};
use ir::model::NormKind::{LayerNorm, RmsNorm};
use ir::program::{AttentionOperand, Op};
use ir::rotary::RotaryScaling;
use runtime::operators::{
    Accumulation, Operand, Place, ResultShape, accumulate, accumulate_contraction, accumulate_lookup, apply,
    attention_gradients,
};
use runtime::tensor::{Format, Memory, Tensor, size_of};

use random::random;

type Dims = Vec<(DimName, usize)>;

/// What an operand holds.
#[derive(Clone, Debug)]
enum Filled {
    /// Numbers around zero.
    Numbers(Dims),
    /// Numbers from a half up.
    Positive(Dims),
    /// Rows that sum to one.
    Weights(Dims),
    /// Ids below a limit.
    Ids(Dims, usize),
}

use Filled::{Ids, Numbers, Positive, Weights};

struct Case {
    name: &'static str,
    op: Op,
    operands: Vec<Filled>,
    result: Dims,
    place: Place,
}

fn case(name: &'static str, op: Op, operands: Vec<Filled>, result: Dims) -> Case {
    Case { name, op, operands, result, place: Place { seed: 0.0625, ..Place::WHOLE } }
}

impl Case {
    fn at(mut self, place: Place) -> Case {
        self.place = place;
        self
    }
}

impl Filled {
    fn dims(&self) -> &Dims {
        match self {
            Numbers(dims) | Positive(dims) | Weights(dims) | Ids(dims, _) => dims,
        }
    }

    fn tensor(&self, memory: &Memory, format: Format, seed: u64) -> Tensor {
        let mut numbers = random(size_of(self.dims()), seed);
        match self {
            Numbers(_) => numbers.iter_mut().for_each(|x| *x *= 2.0),
            Positive(_) => numbers.iter_mut().for_each(|x| *x = x.abs() + 0.5),
            Weights(dims) => numbers.chunks_mut(dims.last().map_or(1, |dim| dim.1)).for_each(|row| {
                let sum: f32 = row.iter().map(|x| x.abs()).sum();
                row.iter_mut().for_each(|x| *x = x.abs() / sum);
            }),
            Ids(dims, limit) => {
                let ids: Vec<u32> = numbers.iter().map(|x| ((x + 1.0) / 2.0 * *limit as f32) as u32).collect();
                return Tensor::from_ids(memory, dims, &ids);
            }
        }
        Tensor::from_numbers(memory, self.dims(), format, &numbers)
    }
}

fn wide(tensor: &Tensor) -> Array {
    Array { dims: tensor.dims.clone(), data: tensor.to_numbers().iter().map(|x| f64::from(*x)).collect() }
}

fn expected(case: &Case, operands: &[Tensor]) -> Vec<f64> {
    let Place { vocabulary_start, heads, queries, seed, .. } = case.place;
    let result = OperatorResult { dims: &case.result, vocabulary_start, heads, queries, seed };
    let arrays: Vec<Array> = operands.iter().map(wide).collect();
    apply_operator(&case.op, &arrays.iter().collect::<Vec<_>>(), &result).data
}

/// Checks numbers to 1e-5 of the largest, and in bf16 to one rounding of each besides.
fn close(name: &str, found: &[f32], expected: &[f64], format: Format) {
    assert_eq!(found.len(), expected.len(), "{name}");
    let finite = expected.iter().filter(|x| x.is_finite());
    let largest = finite.map(|x| x.abs()).fold(0.0, f64::max);
    for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
        let rounding = if format == Format::Brain { expected.abs() / 256.0 } else { 0.0 };
        let difference = (f64::from(*found) - expected).abs();
        let same = f64::from(*found) == *expected || difference <= 1e-5 * largest + rounding;
        assert!(same, "{name}, {format:?}: element {place} is {found}, expected {expected}, largest {largest}");
    }
}

fn check(case: &Case, format: Format) {
    let memory = Memory::default();
    let operands: Vec<Tensor> =
        case.operands.iter().enumerate().map(|(at, operand)| operand.tensor(&memory, format, at as u64 + 7)).collect();
    let result = ResultShape { memory: &memory, dims: &case.result, format, place: case.place };
    #[cfg(feature = "wgpu")]
    device::check(case, &operands, format);
    let before: Vec<Vec<f32>> = operands.iter().map(Tensor::to_numbers).collect();
    let found = apply(&case.op, operands.iter().map(Operand::Borrowed).collect(), &result);
    assert_eq!((&found.dims, found.format()), (&case.result, format), "{}", case.name);
    let expected = expected(case, &operands);
    close(case.name, &found.to_numbers(), &expected, format);
    let after: Vec<Vec<f32>> = operands.iter().map(Tensor::to_numbers).collect();
    assert_eq!(before, after, "{}: borrowed operands are as they were", case.name);
    // The same bits whichever operands may be reused.
    for owned in 0..1 << operands.len() {
        let given = operands.iter().enumerate().map(|(at, operand)| match owned >> at & 1 {
            0 => Operand::Borrowed(operand),
            _ => Operand::Owned(Tensor::clone(&case.operands[at].tensor(&memory, format, at as u64 + 7))),
        });
        let again = apply(&case.op, given.collect(), &result);
        let same = again.to_numbers().iter().zip(found.to_numbers()).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same && again.dims == case.result, "{}: operands {owned:b} owned", case.name);
    }
}

fn check_all(cases: Vec<Case>) {
    for case in cases {
        check(&case, Format::Single);
        check(&case, Format::Brain);
    }
}

fn activations(width: usize) -> Dims {
    vec![(MicroBatch, 3), (Sequence, 7), (Hidden, width)]
}

fn tokens() -> Dims {
    vec![(MicroBatch, 3), (Sequence, 7)]
}

fn vocabulary(width: usize) -> Dims {
    vec![(MicroBatch, 3), (Sequence, 7), (Vocabulary, width)]
}

#[test]
fn tables_and_ids() {
    let second = Place { vocabulary_start: 11, ..Place::WHOLE };
    let table = vec![(Vocabulary, 11), (Hidden, 5)];
    let positions = vec![(Position, 9), (Hidden, 5)];
    let lookup = |name| {
        let operands = vec![Ids(tokens(), 22), Numbers(table.clone())];
        case(name, Op::Lookup, operands, activations(5))
    };
    let gradient = |name| {
        let operands = vec![Ids(tokens(), 22), Numbers(activations(5))];
        case(name, Op::LookupGradient, operands, table.clone())
    };
    let pick = |name| case(name, Op::Pick, vec![Numbers(vocabulary(11)), Ids(tokens(), 22)], tokens());
    let spread = |name, of: Dims| case(name, Op::PickGradient, vec![Ids(tokens(), 22), Numbers(of)], vocabulary(11));
    let mask = |name, columns| case(name, Op::MaskColumns(columns), vec![Numbers(vocabulary(11))], vocabulary(11));
    check_all(vec![
        lookup("lookup"),
        lookup("lookup, second part of the vocabulary").at(second),
        case(
            "positions",
            Op::Lookup,
            vec![Ids(vec![(Sequence, 7)], 9), Numbers(positions.clone())],
            vec![(Sequence, 7), (Hidden, 5)],
        )
        .at(second),
        gradient("lookup gradient"),
        gradient("lookup gradient, second part").at(second),
        case(
            "position gradient",
            Op::LookupGradient,
            vec![Ids(vec![(Sequence, 7)], 9), Numbers(vec![(Sequence, 7), (Hidden, 5)])],
            positions,
        )
        .at(second),
        pick("pick"),
        pick("pick, second part").at(second),
        spread("pick gradient", tokens()),
        spread("pick gradient of one number", vec![]),
        spread("pick gradient, second part", tokens()).at(second),
        mask("no padding", 11),
        mask("padding", 8),
        mask("padding in the second part", 15).at(second),
        mask("the second part is padding", 9).at(second),
    ]);
}

#[test]
fn contractions() {
    let by_head =
        |width| vec![(MicroBatch, 3), (Sequence, 7), (KeyValueHeads, 2), (QueriesPerKeyValue, 3), (HeadDim, width)];
    let keys = |width| vec![(MicroBatch, 3), (KeySequence, 7), (KeyValueHeads, 2), (HeadDim, width)];
    let values = |width| vec![(MicroBatch, 3), (KeySequence, 7), (KeyValueHeads, 2), (ValueDim, width)];
    let context =
        |width| vec![(MicroBatch, 3), (Sequence, 7), (KeyValueHeads, 2), (QueriesPerKeyValue, 3), (ValueDim, width)];
    let scores = vec![(MicroBatch, 3), (KeyValueHeads, 2), (QueriesPerKeyValue, 3), (Sequence, 7), (KeySequence, 7)];
    let query_weight = vec![(Hidden, 13), (KeyValueHeads, 2), (QueriesPerKeyValue, 3), (HeadDim, 4)];
    let head = vec![(Vocabulary, 17), (Hidden, 13)];
    let wide = |width| vec![(MicroBatch, 3), (Sequence, 7), (Intermediate, width)];
    let up = vec![(Hidden, 13), (Intermediate, 65)];
    // Long enough for the matrix products of a library on devices.
    let long = |dim, width| vec![(MicroBatch, 3), (Sequence, 17), (dim, width)];
    let long_up = vec![(Hidden, 40), (Intermediate, 56)];
    let long_head = vec![(Vocabulary, 48), (Hidden, 40)];
    let rows: Vec<(&str, Dims, Dims, Dims)> = vec![
        ("projection by head", activations(13), query_weight.clone(), by_head(4)),
        ("its input gradient", by_head(4), query_weight.clone(), activations(13)),
        ("its weight gradient", activations(13), by_head(4), query_weight),
        ("logits", activations(13), head.clone(), vocabulary(17)),
        ("logits' input gradient", vocabulary(17), head.clone(), activations(13)),
        ("logits' weight gradient", activations(13), vocabulary(17), head),
        ("up", activations(13), up.clone(), wide(65)),
        ("up's input gradient", wide(65), up.clone(), activations(13)),
        ("up's weight gradient", activations(13), wide(65), up),
        ("scores", by_head(5), keys(5), scores.clone()),
        ("scores' query gradient", scores.clone(), keys(5), by_head(5)),
        ("scores' key gradient", by_head(5), scores.clone(), keys(5)),
        ("context", scores.clone(), values(5), context(5)),
        ("weights' gradient", context(5), values(5), scores.clone()),
        ("values' gradient", scores, context(5), values(5)),
        ("a dim of one operand is summed", activations(13), vec![(Hidden, 13)], vec![(Sequence, 7)]),
        ("no sum", vec![(Sequence, 7)], vec![(Hidden, 3)], vec![(Sequence, 7), (Hidden, 3)]),
        ("a number", vec![(Hidden, 9)], vec![(Hidden, 9)], vec![]),
        (
            "dims of one",
            vec![(MicroBatch, 1), (Sequence, 1), (Hidden, 6)],
            vec![(Hidden, 6), (Intermediate, 1)],
            vec![(MicroBatch, 1), (Sequence, 1), (Intermediate, 1)],
        ),
        ("long up", long(Hidden, 40), long_up.clone(), long(Intermediate, 56)),
        ("long up's input gradient", long(Intermediate, 56), long_up.clone(), long(Hidden, 40)),
        ("long up's weight gradient", long(Hidden, 40), long(Intermediate, 56), long_up),
        ("long logits", long(Hidden, 40), long_head.clone(), long(Vocabulary, 48)),
        ("long logits' input gradient", long(Vocabulary, 48), long_head.clone(), long(Hidden, 40)),
        ("long logits' weight gradient", long(Hidden, 40), long(Vocabulary, 48), long_head),
    ];
    for (name, a, b, result) in rows {
        check_all(vec![case(name, Op::Contraction, vec![Numbers(a.clone()), Numbers(b.clone())], result.clone())]);
        accumulates(name, a, b, result);
    }
}

/// A contraction put and then added into fp32 numbers gives twice what it gives once.
fn accumulates(name: &str, a: Dims, b: Dims, result: Dims) {
    for format in [Format::Single, Format::Brain] {
        let memory = Memory::default();
        let operands = [Numbers(a.clone()).tensor(&memory, format, 1), Numbers(b.clone()).tensor(&memory, format, 2)];
        let mut into = Tensor::from_numbers(&memory, &result, Format::Single, &vec![f32::NAN; size_of(&result)]);
        for how in [Accumulation::Set, Accumulation::Add] {
            accumulate_contraction(&mut into, &operands[0], &operands[1], &memory, how);
        }
        let case = case("", Op::Contraction, vec![], result.clone());
        let twice: Vec<f64> = expected(&case, &operands).iter().map(|x| 2.0 * x).collect();
        close(name, &into.to_numbers(), &twice, Format::Single);
        #[cfg(feature = "wgpu")]
        device::accumulates(name, &operands, &result, &twice);
    }
}

#[test]
fn values_and_rows_accumulate() {
    for format in [Format::Single, Format::Brain] {
        let memory = Memory::default();
        let table = vec![(Vocabulary, 11), (Hidden, 5)];
        let place = Place { vocabulary_start: 11, ..Place::WHOLE };
        let operands = [Ids(tokens(), 22), Numbers(activations(5))];
        let operands = operands.map(|operand| operand.tensor(&memory, format, 3));
        let shape = ResultShape { memory: &memory, dims: &table, format: Format::Single, place };
        let case = case("", Op::LookupGradient, vec![], table.clone()).at(place);
        let twice: Vec<f64> = expected(&case, &operands).iter().map(|x| 2.0 * x).collect();
        let stale = |dims: &Dims| Tensor::from_numbers(&memory, dims, Format::Single, &vec![f32::NAN; size_of(dims)]);
        let (mut rows, mut long) = (stale(&table), stale(&activations(3001)));
        let value = Numbers(activations(3001)).tensor(&memory, format, 5);
        for how in [Accumulation::Set, Accumulation::Add] {
            accumulate_lookup(&mut rows, &operands[0], &operands[1], &shape, how);
            accumulate(&mut long, &value, how);
        }
        close("rows", &rows.to_numbers(), &twice, Format::Single);
        let twice: Vec<f64> = value.to_numbers().iter().map(|x| 2.0 * f64::from(*x)).collect();
        close("values", &long.to_numbers(), &twice, Format::Single);
    }
}

#[test]
fn norms() {
    let weight = || Positive(vec![(Hidden, 37)]);
    let input = || Numbers(activations(37));
    let mut cases = Vec::new();
    for (kind, epsilon) in [(LayerNorm, 1e-5), (RmsNorm, 1e-6)] {
        let name = if kind == LayerNorm { "LayerNorm" } else { "RMSNorm" };
        let sum = vec![(Hidden, 37)];
        cases.push(case(name, Op::Norm { kind, epsilon }, vec![input(), weight()], activations(37)));
        cases.push(case(
            name,
            Op::Norm { kind, epsilon },
            vec![input(), weight(), Numbers(sum.clone())],
            activations(37),
        ));
        cases.push(case(
            name,
            Op::NormInputGradient { kind, epsilon },
            vec![input(), weight(), input()],
            activations(37),
        ));
        cases.push(case(name, Op::NormWeightGradient { kind, epsilon }, vec![input(), input()], sum));
    }
    let long = vec![(MicroBatch, 2), (Sequence, 301), (Hidden, 100)];
    let operands = vec![Numbers(long.clone()), Numbers(long.clone())];
    cases.push(case(
        "many rows",
        Op::NormWeightGradient { kind: LayerNorm, epsilon: 1e-5 },
        operands,
        vec![(Hidden, 100)],
    ));
    check_all(cases);
}

#[test]
fn elementwise() {
    let whole = || Numbers(activations(13));
    let positive = || Positive(activations(13));
    let suffix = || Numbers(vec![(Hidden, 13)]);
    let prefix = || Positive(tokens());
    let middle = || Numbers(vec![(Sequence, 7)]);
    let outer = || Numbers(vec![(MicroBatch, 3), (Hidden, 13)]);
    let scalar = || Positive(vec![]);
    let mut cases = vec![
        case("seed", Op::Seed, vec![], vec![]),
        case("scale", Op::Scale(-0.3), vec![whole()], activations(13)),
        case("gelu", Op::Gelu, vec![whole()], activations(13)),
        case("gelu gradient", Op::GeluGradient, vec![whole(), whole()], activations(13)),
        case("silu", Op::Silu, vec![whole()], activations(13)),
        case("silu gradient", Op::SiluGradient, vec![whole(), whole()], activations(13)),
        case("exp", Op::Exp, vec![whole()], activations(13)),
        case("log", Op::Log, vec![positive()], activations(13)),
        case("cast", Op::Cast, vec![whole()], activations(13)),
        case("dropout of nothing", Op::Dropout(DropoutSite::Embedding), vec![whole()], activations(13)),
        case("rename", Op::Rename, vec![whole()], vec![(MicroBatch, 3), (KeySequence, 7), (Hidden, 13)]),
        case("long", Op::Add, vec![Numbers(activations(3001)), Numbers(activations(3001))], activations(3001)),
        case("long rows", Op::Subtract, vec![Numbers(activations(5001)), Numbers(tokens())], activations(5001)),
        case(
            "numbers of one",
            Op::Add,
            vec![Numbers(vec![(MicroBatch, 1), (Hidden, 5)]), Numbers(vec![(Hidden, 5)])],
            vec![(MicroBatch, 1), (Hidden, 5)],
        ),
    ];
    for op in [Op::Add, Op::Subtract, Op::Multiply] {
        for other in [whole(), suffix(), prefix(), middle(), outer(), scalar()] {
            cases.push(case("broadcast second", op, vec![whole(), other.clone()], activations(13)));
            cases.push(case("broadcast first", op, vec![other, whole()], activations(13)));
        }
        cases.push(case("both are broadcast", op, vec![prefix(), suffix()], activations(13)));
    }
    cases.push(case("divide", Op::Divide, vec![scalar(), prefix()], tokens()));
    cases.push(case("divide", Op::Divide, vec![whole(), positive()], activations(13)));
    check_all(cases);
}

#[test]
fn reductions() {
    let whole = || Numbers(activations(13));
    let rows: [(&str, Filled, Dims); 9] = [
        ("bias", whole(), vec![(Hidden, 13)]),
        ("batch", whole(), vec![(Sequence, 7), (Hidden, 13)]),
        ("rows", whole(), tokens()),
        ("middle", whole(), vec![(MicroBatch, 3), (Hidden, 13)]),
        ("all", whole(), vec![]),
        ("same", whole(), activations(13)),
        ("long rows", Numbers(vocabulary(5003)), tokens()),
        ("many rows", Numbers(vec![(Sequence, 5003), (Hidden, 9)]), vec![(Hidden, 9)]),
        (
            "few long rows",
            Numbers(vec![(MicroBatch, 3), (Sequence, 250), (Hidden, 99)]),
            vec![(Sequence, 250), (Hidden, 99)],
        ),
    ];
    let mut cases = vec![case("sum of tokens", Op::SumTokens, vec![Numbers(tokens())], vec![])];
    for (name, operand, result) in rows {
        cases.push(case(name, Op::ReduceSum, vec![operand.clone()], result.clone()));
        cases.push(case(name, Op::ReduceMax, vec![operand], result));
    }
    check_all(cases);
}

fn scores(heads: usize, queries: usize, length: usize) -> Dims {
    vec![
        (MicroBatch, 2),
        (KeyValueHeads, heads),
        (QueriesPerKeyValue, queries),
        (Sequence, length),
        (KeySequence, length),
    ]
}

#[test]
fn scores_and_softmax() {
    let place = Place { heads: (2, 6), queries: (1, 4), ..Place::WHOLE };
    let of = || Numbers(scores(2, 3, 9));
    let mut cases = vec![
        case("softmax", Op::Softmax, vec![of()], scores(2, 3, 9)),
        case("softmax gradient", Op::SoftmaxGradient, vec![Weights(scores(2, 3, 9)), of()], scores(2, 3, 9)),
        case("mask gradient", Op::ScaleMaskGradient { scale: 0.3 }, vec![of()], scores(2, 3, 9)),
    ];
    for alibi in [false, true] {
        cases.push(case("mask", Op::ScaleMask { scale: 0.3, alibi }, vec![of()], scores(2, 3, 9)).at(place));
    }
    check_all(cases);
}

#[test]
fn rotary() {
    let query = vec![(MicroBatch, 2), (Sequence, 9), (KeyValueHeads, 2), (QueriesPerKeyValue, 3), (HeadDim, 6)];
    let keys = vec![(MicroBatch, 2), (KeySequence, 9), (KeyValueHeads, 2), (HeadDim, 6)];
    let mut cases = Vec::new();
    let llama3 = RotaryScaling::Llama3 {
        factor: 8.0,
        low_frequency_factor: 1.0,
        high_frequency_factor: 4.0,
        original_length: 20,
    };
    for dims in [query, keys] {
        for scaling in [None, Some(llama3)] {
            let (forward, back) =
                (Op::Rotary { base: 10_000.0, scaling }, Op::RotaryGradient { base: 10_000.0, scaling });
            cases.push(case("rotary", forward, vec![Numbers(dims.clone())], dims.clone()));
            cases.push(case("rotary gradient", back, vec![Numbers(dims.clone())], dims.clone()));
        }
    }
    check_all(cases);
}

/// Query, keys, values and gradient of the context.
fn attention_operands(batch: usize, heads: usize, queries: usize, length: usize, widths: [usize; 2]) -> Vec<Dims> {
    let [width, value_width] = widths;
    let query = |name, width| {
        vec![
            (MicroBatch, batch),
            (Sequence, length),
            (KeyValueHeads, heads),
            (QueriesPerKeyValue, queries),
            (name, width),
        ]
    };
    let keys = |name, width| vec![(MicroBatch, batch), (KeySequence, length), (KeyValueHeads, heads), (name, width)];
    vec![query(HeadDim, width), keys(HeadDim, width), keys(ValueDim, value_width), query(ValueDim, value_width)]
}

#[test]
fn flash_attention() {
    let place = Place { heads: (2, 6), queries: (1, 4), ..Place::WHOLE };
    let shapes = [
        (2, 2, 3, 9, [5, 7]),
        (1, 1, 1, 1, [4, 4]),
        (1, 2, 1, 130, [8, 8]),
        (1, 1, 2, 64, [3, 3]),
        (1, 1, 1, 1100, [2, 2]),
    ];
    for (batch, heads, queries, length, widths) in shapes {
        for alibi in [false, true] {
            let dims = attention_operands(batch, heads, queries, length, widths);
            let operands: Vec<Filled> = dims.iter().cloned().map(Numbers).collect();
            let scale = 0.4;
            let mut cases =
                vec![case("attention", Op::FlashAttention { scale, alibi }, operands[..3].to_vec(), dims[3].clone())];
            let parts = [AttentionOperand::Query, AttentionOperand::Keys, AttentionOperand::Values];
            for (at, of) in parts.into_iter().enumerate() {
                let op = Op::FlashAttentionGradient { of, scale, alibi };
                cases.push(case("attention gradient", op, operands.clone(), dims[at].clone()));
            }
            check_all(cases.into_iter().map(|case| case.at(place)).collect());
        }
    }
}

#[test]
fn gradients_of_attention_together_are_those_apart() {
    let memory = Memory::default();
    let dims = attention_operands(2, 2, 3, 70, [5, 7]);
    let tensors: Vec<Tensor> = dims
        .iter()
        .enumerate()
        .map(|(at, dims)| Numbers(dims.clone()).tensor(&memory, Format::Single, at as u64))
        .collect();
    let operands = [&tensors[0], &tensors[1], &tensors[2], &tensors[3]];
    let shape = ResultShape { memory: &memory, dims: &[], format: Format::Single, place: Place::WHOLE };
    let found = attention_gradients([true; 3], operands, 0.4, true, &shape);
    let found = [found.query, found.keys, found.values];
    let parts = [AttentionOperand::Query, AttentionOperand::Keys, AttentionOperand::Values];
    for ((of, found), dims) in parts.into_iter().zip(found).zip(&dims) {
        let op = Op::FlashAttentionGradient { of, scale: 0.4, alibi: true };
        let apart = apply(&op, operands.map(Operand::Borrowed).into(), &ResultShape { dims, ..shape });
        assert_eq!(found.map(|tensor| tensor.to_numbers()), Some(apart.to_numbers()), "{of:?}");
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let memory = Memory::default();
    let dims = attention_operands(2, 2, 2, 130, [32, 32]);
    let wide = vec![(MicroBatch, 4), (Sequence, 70), (Hidden, 300)];
    let inner = vec![(MicroBatch, 4), (Sequence, 70), (Intermediate, 500)];
    let weight = vec![(Hidden, 300), (Intermediate, 500)];
    let attention = Op::FlashAttention { scale: 0.3, alibi: true };
    let of = AttentionOperand::Keys;
    let gradient = Op::FlashAttentionGradient { of, scale: 0.3, alibi: true };
    let rows: Vec<(Op, Vec<Dims>, Dims)> = vec![
        (Op::Contraction, vec![wide.clone(), weight.clone()], inner.clone()),
        (Op::Contraction, vec![wide.clone(), inner.clone()], weight.clone()),
        (Op::Contraction, vec![inner.clone(), weight], wide.clone()),
        (Op::Norm { kind: LayerNorm, epsilon: 1e-5 }, vec![wide.clone(), vec![(Hidden, 300)]], wide.clone()),
        (
            Op::NormWeightGradient { kind: LayerNorm, epsilon: 1e-5 },
            vec![wide.clone(), wide.clone()],
            vec![(Hidden, 300)],
        ),
        (Op::ReduceSum, vec![inner.clone()], vec![(Intermediate, 500)]),
        (Op::ReduceSum, vec![inner.clone()], vec![]),
        (Op::Gelu, vec![inner.clone()], inner),
        (attention, dims[..3].to_vec(), dims[3].clone()),
        (gradient, dims.clone(), dims[1].clone()),
    ];
    for (op, operands, result) in rows {
        let tensors = operands.into_iter().enumerate();
        let tensors: Vec<Tensor> =
            tensors.map(|(at, dims)| Numbers(dims).tensor(&memory, Format::Single, at as u64)).collect();
        let place = Place::WHOLE;
        let shape = ResultShape { memory: &memory, dims: &result, format: Format::Single, place };
        let bits = [1, 2, 3].map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads can be made");
            let found = pool.install(|| apply(&op, tensors.iter().map(Operand::Borrowed).collect(), &shape));
            found.to_numbers().iter().map(|x| x.to_bits()).collect::<Vec<u32>>()
        });
        assert!(bits[0] == bits[1] && bits[1] == bits[2], "{op:?}");
    }
}
