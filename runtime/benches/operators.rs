//! Time of the operators of one training step of a GPT, each alone, and their sum.
//!
//! 4 layers, hidden 512, 8 heads, sequence 256, batch 4, vocabulary 8192 untied, LayerNorm before, GeLU,
//! fp32, with AdamW. `RAYON_NUM_THREADS` says on how many threads; times are medians of the wall clock.

#![allow(clippy::print_stdout, reason = "this is a program that prints")]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Instant;

use ir::graph::DimName::{
    self, HeadDim, Hidden, Intermediate, KeySequence, KeyValueHeads, MicroBatch, QueriesPerKeyValue, Sequence,
    ValueDim, Vocabulary,
};
use ir::model::NormKind::LayerNorm;
use ir::program::{AttentionOperand, Instruction, Op, ValueId};
use runtime::operators::run::{LocalShape, apply_run, plan_run};
use runtime::operators::{Accumulation, Operand, Place, ResultShape, accumulate_contraction, apply};
use runtime::optimizer::{AdamW, State, adamw, sum_of_squares};
use runtime::tensor::{Format, Memory, Tensor, size_of};

type Dims = Vec<(DimName, usize)>;

const LAYERS: usize = 4;
const REPETITIONS: usize = 9;

/// Shapes of the model's values.
struct Shapes {
    stream: Dims,
    hidden: Dims,
    query: Dims,
    query_bias: Dims,
    query_weight: Dims,
    keys: Dims,
    values: Dims,
    context: Dims,
    inner: Dims,
    inner_bias: Dims,
    up: Dims,
    down: Dims,
    tokens: Dims,
    logits: Dims,
    head: Dims,
}

/// Times so far.
struct Report {
    memory: Memory,
    milliseconds: f64,
}

fn shapes() -> Shapes {
    let tokens = vec![(MicroBatch, 4), (Sequence, 256)];
    let keys = vec![(MicroBatch, 4), (KeySequence, 256), (KeyValueHeads, 8)];
    let heads = vec![(KeyValueHeads, 8), (QueriesPerKeyValue, 1)];
    let with = |dims: &Dims, name, extent| [dims.clone(), vec![(name, extent)]].concat();
    let by_head = [tokens.clone(), heads.clone()].concat();
    Shapes {
        stream: with(&tokens, Hidden, 512),
        hidden: vec![(Hidden, 512)],
        query: with(&by_head, HeadDim, 64),
        query_bias: with(&heads, HeadDim, 64),
        query_weight: [vec![(Hidden, 512)], with(&heads, HeadDim, 64)].concat(),
        keys: with(&keys, HeadDim, 64),
        values: with(&keys, ValueDim, 64),
        context: with(&by_head, ValueDim, 64),
        inner: with(&tokens, Intermediate, 2048),
        inner_bias: vec![(Intermediate, 2048)],
        up: vec![(Hidden, 512), (Intermediate, 2048)],
        down: vec![(Intermediate, 2048), (Hidden, 512)],
        logits: with(&tokens, Vocabulary, 8192),
        head: vec![(Vocabulary, 8192), (Hidden, 512)],
        tokens,
    }
}

fn filled(memory: &Memory, dims: &Dims) -> Tensor {
    let numbers: Vec<f32> = (0..size_of(dims)).map(|at| (at * 7919 % 1999) as f32 / 1000.0 - 1.0).collect();
    Tensor::from_numbers(memory, dims, Format::Single, &numbers)
}

fn bytes(dims: &[&Dims]) -> f64 {
    dims.iter().map(|dims| 4.0 * size_of(dims) as f64).sum()
}

impl Report {
    /// Median of the times of what `prepare` prepares and `work` does.
    fn time<T>(&mut self, name: &str, count: usize, work: (f64, &str), prepare: impl Fn() -> T, f: impl Fn(T)) {
        let mut times: Vec<f64> = (0..=REPETITIONS)
            .map(|_| {
                let prepared = prepare();
                let start = Instant::now();
                f(prepared);
                start.elapsed().as_secs_f64()
            })
            .skip(1)
            .collect();
        times.sort_by(f64::total_cmp);
        let (median, (amount, unit)) = (times[REPETITIONS / 2], work);
        self.milliseconds += 1e3 * median * count as f64;
        println!("{name:28} {:9.3} ms × {count:2} {:9.1} {unit}", 1e3 * median, amount / median / 1e9);
    }

    fn contraction(&mut self, name: &str, count: usize, a: &Dims, b: &Dims, result: &Dims, how: Accumulation) {
        let memory = self.memory.clone();
        let (first, second) = (filled(&memory, a), filled(&memory, b));
        let into = std::cell::RefCell::new(Tensor::zeros(&memory, result, Format::Single));
        let dims: BTreeMap<DimName, usize> = a.iter().chain(b).copied().collect();
        let flops = 2.0 * dims.values().product::<usize>() as f64;
        let work = || accumulate_contraction(&mut into.borrow_mut(), &first, &second, &memory, how);
        self.time(name, count, (flops, "GFLOP/s"), || (), |()| work());
    }

    /// An operator; operands with `true` are owned.
    fn operator(&mut self, name: &str, count: usize, op: Op, operands: &[(&Dims, bool)], result: &Dims) {
        let memory = self.memory.clone();
        let tensors: Vec<Tensor> = operands.iter().map(|(dims, _)| filled(&memory, dims)).collect();
        let (format, place) = (Format::Single, Place::WHOLE);
        let shape = ResultShape { memory: &memory, dims: result, format, place };
        let prepare = || {
            let given = operands.iter().zip(&tensors).map(|((dims, owned), tensor)| match owned {
                true => Operand::Owned(filled(&memory, dims)),
                false => Operand::Borrowed(tensor),
            });
            given.collect::<Vec<Operand>>()
        };
        let moved = operands.iter().map(|(dims, _)| *dims).chain([result]).collect::<Vec<&Dims>>();
        self.time(name, count, (bytes(&moved), "GB/s"), prepare, |operands| {
            black_box(apply(&op, operands, &shape));
        });
    }

    /// A run of operators on borrowed operands; those of `kept` are results.
    fn run(&mut self, name: &str, count: usize, outside: &[&Dims], steps: &[(Op, &[u32], &Dims)], kept: &[u32]) {
        let memory = self.memory.clone();
        let tensors: Vec<Tensor> = outside.iter().map(|dims| filled(&memory, dims)).collect();
        let first = outside.len() as u32;
        let mut instructions = Vec::new();
        for (at, (op, operands, _)) in steps.iter().enumerate() {
            let operands = operands.iter().copied().map(ValueId).collect();
            instructions.push(Instruction::Compute(*op, operands, ValueId(first + at as u32)));
        }
        let ended = (first..first + steps.len() as u32).filter(|value| !kept.contains(value));
        instructions.extend(ended.map(|value| Instruction::Free(ValueId(value))));
        let dims = |value: usize| outside.get(value).copied().unwrap_or_else(|| steps[value - outside.len()].2);
        let shape = |value: ValueId| LocalShape { dims: dims(value.0 as usize).clone(), format: Format::Single };
        let run = plan_run(&instructions, 0..instructions.len(), shape, |_, _| Place::WHOLE);
        let prepare = || run.operands.iter().map(|(value, _)| Operand::Borrowed(&tensors[value.0 as usize])).collect();
        let moved = outside.iter().copied().chain(kept.iter().map(|value| dims(*value as usize)));
        let moved = bytes(&moved.collect::<Vec<&Dims>>());
        self.time(name, count, (moved, "GB/s"), prepare, |operands: Vec<Operand>| {
            black_box(apply_run(&run, operands, &memory, None));
        });
    }
}

fn main() {
    let mut report = Report { memory: Memory::default(), milliseconds: 0.0 };
    println!("{} threads", rayon::current_num_threads());
    contractions(&mut report, &shapes());
    let contractions = report.milliseconds;
    layers(&mut report, &shapes());
    head(&mut report, &shapes());
    optimizer(&mut report);
    println!("contractions {contractions:.0} ms, all {:.0} ms", report.milliseconds);
}

fn contractions(report: &mut Report, shapes: &Shapes) {
    let Shapes { stream, query, query_weight, inner, up, down, logits, head, .. } = shapes;
    let rows = [
        ("projection of heads", 4 * LAYERS, stream, query_weight, query),
        ("up", LAYERS, stream, up, inner),
        ("down", LAYERS, inner, down, stream),
        ("logits", 1, stream, head, logits),
    ];
    for (name, count, input, weight, output) in rows {
        report.contraction(name, count, input, weight, output, Accumulation::Set);
        report.contraction(&format!("{name}: input gradient"), count, output, weight, input, Accumulation::Set);
        report.contraction(&format!("{name}: weight gradient"), count, input, output, weight, Accumulation::Add);
    }
}

fn layers(report: &mut Report, shapes: &Shapes) {
    let Shapes { stream, hidden, query, query_bias, keys, values, context, inner, inner_bias, .. } = shapes;
    let norms = 2 * LAYERS + 1;
    let norm = Op::Norm { kind: LayerNorm, epsilon: 1e-5 };
    report.operator("norm", norms, norm, &[(stream, false), (hidden, false), (hidden, false)], stream);
    let operands = [(stream, false), (hidden, false), (stream, false)];
    report.operator(
        "norm: input gradient",
        norms,
        Op::NormInputGradient { kind: LayerNorm, epsilon: 1e-5 },
        &operands,
        stream,
    );
    let operands = [(stream, false), (stream, false)];
    report.operator(
        "norm: weight gradient",
        norms,
        Op::NormWeightGradient { kind: LayerNorm, epsilon: 1e-5 },
        &operands,
        hidden,
    );
    report.operator("bias of heads", 3 * LAYERS, Op::Add, &[(query, true), (query_bias, false)], query);
    report.operator("sum of gradients", 4 * LAYERS, Op::Add, &[(stream, true), (stream, false)], stream);
    report.operator("bias gradient", norms + 5 * LAYERS, Op::ReduceSum, &[(stream, false)], hidden);
    report.operator("bias gradient of up", LAYERS, Op::ReduceSum, &[(inner, false)], inner_bias);
    let steps: [(Op, &[u32], &Dims); 2] = [(Op::Add, &[0, 1], inner), (Op::Gelu, &[2], inner)];
    report.run("bias and GeLU", LAYERS, &[inner, inner_bias], &steps, &[2, 3]);
    report.operator("GeLU gradient", LAYERS, Op::GeluGradient, &[(inner, false), (inner, true)], inner);
    let steps: [(Op, &[u32], &Dims); 2] = [(Op::Add, &[0, 1], stream), (Op::Add, &[3, 2], stream)];
    report.run("bias and residual", 2 * LAYERS, &[stream, hidden, stream], &steps, &[4]);
    let core = [(query, false), (keys, false), (values, false)];
    report.operator("attention", LAYERS, Op::FlashAttention { scale: 0.125, alibi: false }, &core, context);
    let gradient = |of| Op::FlashAttentionGradient { of, scale: 0.125, alibi: false };
    let operands: &[u32] = &[0, 1, 2, 3];
    let steps = [
        (gradient(AttentionOperand::Query), operands, query),
        (gradient(AttentionOperand::Keys), operands, keys),
        (gradient(AttentionOperand::Values), operands, values),
    ];
    report.run("attention: gradients", LAYERS, &[query, keys, values, context], &steps, &[4, 5, 6]);
}

fn head(report: &mut Report, shapes: &Shapes) {
    let Shapes { tokens, logits, .. } = shapes;
    report.operator("padding's mask", 1, Op::MaskColumns(8192), &[(logits, true)], logits);
    report.operator("maximum of logits", 1, Op::ReduceMax, &[(logits, false)], tokens);
    let steps: [(Op, &[u32], &Dims); 3] =
        [(Op::Subtract, &[0, 1], logits), (Op::Exp, &[2], logits), (Op::ReduceSum, &[3], tokens)];
    report.run("cross-entropy", 1, &[logits, tokens], &steps, &[2, 3, 4]);
    report.operator("its gradient, scaled", 1, Op::Multiply, &[(logits, true), (tokens, false)], logits);
    report.operator("its gradient, sum", 1, Op::Add, &[(logits, true), (logits, false)], logits);
}

fn optimizer(report: &mut Report) {
    // Weights of the layers, of embedding and head.
    let count = LAYERS * 12 * 512 * 512 + 2 * 8192 * 512;
    let gradient = vec![1e-3f32; count];
    let state = std::cell::RefCell::new([vec![0.5f32; count], vec![0.0; count], vec![0.0; count]]);
    let settings = AdamW {
        learning_rate: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        step: 1,
        gradient_scale: 1.0,
    };
    report.time(
        "squared norm",
        1,
        (4.0 * count as f64, "GB/s"),
        || (),
        |()| {
            black_box(sum_of_squares(&gradient));
        },
    );
    report.time(
        "AdamW",
        1,
        (28.0 * count as f64, "GB/s"),
        || (),
        |()| {
            let [master, first, second] = &mut *state.borrow_mut();
            adamw(&settings, &gradient, State { master, first, second, parameter: None });
        },
    );
}
