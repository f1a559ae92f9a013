//! Kernels over the vocabulary: cross-entropy split over ranks, rows of the embedding table.

use ir::graph::DimName::{Hidden, MicroBatch, Sequence, Vocabulary};
use ir::program::Op;
use kernels::loss::{self, Statistics};
use kernels::{Buffer, Element, embedding};

use crate::gpu_check::checks::{Checks, held};
use crate::gpu_check::reference::{Dims, Value, ids, numbers};
use crate::operators::Place;

/// Expected numbers of a loss over the whole vocabulary.
struct Expected {
    largest: Value,
    losses: Value,
    dlogits: Value,
}

/// Ranks one after the other on one device, with padding on the last; the numbers that ranks exchange go through
/// the host.
pub fn cross_entropy_of_a_split_vocabulary(checks: &mut Checks) {
    let device = checks.device;
    // Tokens, ranks, columns of a rank, columns of all that stand for tokens.
    let rows = [(7, 1, 11, 11), (7, 2, 11, 18), (5, 2, 36, 70), (3, 1, 5000, 4999), (4, 3, 1032, 2064)];
    for ((tokens, ranks, columns, used), format) in device.in_each_format(rows) {
        let name = format!("loss {tokens} x {columns} on {ranks}");
        let all = ranks * columns;
        let logits = held(tokens * all, 1, 8.0, format);
        let (targets, dloss) = (ids(tokens, used, 2), numbers(tokens, 3, 1.0));
        let expected = expected(checks, [tokens, all, used], &logits, &targets, &dloss);

        let queue = device.queue();
        let part = |numbers: &[f32], rank: usize| -> Vec<f32> {
            numbers.chunks(all).flat_map(|row| row[rank * columns..(rank + 1) * columns].to_vec()).collect()
        };
        let targets = queue.indices(&targets);
        let vocabulary = |rank| loss::Vocabulary {
            start: (rank * columns) as u32,
            columns,
            used: used.saturating_sub(rank * columns).min(columns),
        };
        let parts: Vec<_> = (0..ranks).map(|rank| device.upload(&part(&logits, rank), format)).collect();
        let own: Vec<_> = (0..ranks).map(|_| [(); 3].map(|()| device.poisoned(tokens, Element::Single))).collect();
        let statistics = |rank: usize| Statistics { largest: &own[rank][0], sum: &own[rank][1], picked: &own[rank][2] };
        for (rank, part) in parts.iter().enumerate() {
            loss::statistics(&queue, &vocabulary(rank), part, &targets, statistics(rank));
        }
        // A number that cannot be read is one that is wrong.
        let read = |buffer: &Buffer| device.read(buffer).unwrap_or_else(|_| vec![f32::NAN; tokens]);
        let exchange = |part: usize, join: fn(f32, f32) -> f32| {
            let read = own.iter().map(|own| read(&own[part]));
            read.reduce(|a, b| a.iter().zip(b).map(|(a, b)| join(*a, b)).collect()).expect("there is a rank")
        };
        let common = queue.numbers(&exchange(0, f32::max));
        checks.compare(format!("{name}, largest"), &common, expected.largest.numbers(), 0.0);
        (0..ranks).for_each(|rank| loss::rescale(&queue, statistics(rank), &common));
        let [sums, picks] = [1, 2].map(|part| queue.numbers(&exchange(part, |a, b| a + b)));
        let joined = Statistics { largest: &common, sum: &sums, picked: &picks };
        let found = device.poisoned(tokens, Element::Single);
        loss::losses(&queue, joined, &found);
        checks.compare(name.clone(), &found, expected.losses.numbers(), 1e-6);
        let dloss = queue.numbers(&dloss);
        for (rank, found) in parts.iter().enumerate() {
            loss::gradient(&queue, &vocabulary(rank), found, &targets, joined, &dloss);
            let rows = expected.dlogits.numbers().chunks(all);
            let own: Vec<f64> = rows.flat_map(|row| row[rank * columns..(rank + 1) * columns].to_vec()).collect();
            checks.compare(format!("{name}, gradient"), found, &own, 1e-6);
        }
    }
}

fn expected(
    checks: &Checks,
    [tokens, columns, used]: [usize; 3],
    logits: &[f32],
    targets: &[u32],
    dloss: &[f32],
) -> Expected {
    let dims: Dims = vec![(MicroBatch, 1), (Sequence, tokens), (Vocabulary, columns)];
    let token_dims = dims[..2].to_vec();
    let ids = Value::ids(&token_dims, targets);
    let of = |op: Op, operands: &[&Value], dims: &Dims| checks.of(&op, operands, dims);
    let masked = of(Op::MaskColumns(used as u64), &[&Value::new(&dims, logits)], &dims);
    let largest = of(Op::ReduceMax, &[&masked], &token_dims);
    let weights = of(Op::Exp, &[&of(Op::Subtract, &[&masked, &largest], &dims)], &dims);
    let sum = of(Op::ReduceSum, &[&weights], &token_dims);
    let picked = of(Op::Pick, &[&masked, &ids], &token_dims);
    let shifted = of(Op::Add, &[&of(Op::Log, &[&sum], &token_dims), &largest], &token_dims);
    let losses = of(Op::Subtract, &[&shifted, &picked], &token_dims);
    let gradient = Value::new(&token_dims, dloss);
    let spread = of(Op::PickGradient, &[&ids, &gradient], &dims);
    let shares = of(Op::Multiply, &[&of(Op::Divide, &[&weights, &sum], &dims), &gradient], &dims);
    let dlogits = of(Op::Subtract, &[&shares, &spread], &dims);
    Expected { largest, losses, dlogits }
}

pub fn rows_of_tables(checks: &mut Checks) {
    let device = checks.device;
    // Tokens, ids, first row and rows of the rank, columns.
    let shapes = [(7, 22, 11, 11, 5), (40, 5, 0, 5, 36), (300, 40, 8, 20, 202), (600, 900, 0, 900, 1028)];
    for ((tokens, limit, start, rows, columns), format) in device.in_each_format(shapes) {
        let name = format!("lookup {tokens} of {rows} x {columns}");
        let chosen = ids(tokens, limit, 1);
        let table = held(rows * columns, 2, 1.0, format);
        let dy = held(tokens * columns, 3, 1.0, format);
        let token_dims: Dims = vec![(MicroBatch, 1), (Sequence, tokens)];
        let dims: Dims = vec![(MicroBatch, 1), (Sequence, tokens), (Hidden, columns)];
        let table_dims: Dims = vec![(Vocabulary, rows), (Hidden, columns)];
        let place = Place { vocabulary_start: start, ..Place::WHOLE };
        let of = |op: &Op, operand: &Value, dims: &Dims| {
            checks.reference.apply(op, &[&Value::ids(&token_dims, &chosen), operand], dims, place)
        };
        let y = of(&Op::Lookup, &Value::new(&table_dims, &table), &dims);
        let dtable = of(&Op::LookupGradient, &Value::new(&dims, &dy), &table_dims);

        let queue = device.queue();
        let [table, dy] = [&table, &dy].map(|numbers| device.upload(numbers, format));
        let ids = queue.indices(&chosen);
        let found = device.poisoned(tokens * columns, format);
        embedding::lookup(&queue, &table, columns, &ids, start as u32, &found);
        checks.compare(name.clone(), &found, y.numbers(), 0.0);
        let before = numbers(rows * columns, 4, 1.0);
        let found = device.upload(&before, Element::Single);
        embedding::lookup_gradient(&queue, &ids, &dy, start as u32, &found);
        let expected: Vec<f64> =
            before.iter().zip(dtable.numbers()).map(|(old, more)| f64::from(*old) + more).collect();
        checks.compare(format!("{name}, gradient"), &found, &expected, 1e-6);
    }
}
