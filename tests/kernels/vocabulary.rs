//! Kernels over the vocabulary: cross-entropy split over ranks, rows of the embedding table.

use ir::graph::DimName::{Hidden, MicroBatch, Sequence, Vocabulary};
use ir::program::Op;
use kernels::loss::{self, Statistics};
use kernels::{Element, embedding};
use runtime::operators::Place;
use runtime::tensor::{Memory, Tensor};

use crate::device::{Dims, device, operator, rounded, tensor};
use crate::random::random;

fn ids(count: usize, limit: usize, seed: u64) -> Vec<u32> {
    random(count, seed).iter().map(|x| ((x + 1.0) / 2.0 * limit as f32) as u32).collect()
}

/// Ranks one after the other on one device, with padding on the last; the numbers that ranks exchange go through
/// the host.
#[test]
fn cross_entropy_of_a_split_vocabulary() {
    let device = device();
    // Tokens, ranks, columns of a rank, columns of all that stand for tokens.
    let rows = [(7, 1, 11, 11), (7, 2, 11, 18), (5, 2, 36, 70), (3, 1, 5000, 4999), (4, 3, 1032, 2064)];
    for ((tokens, ranks, columns, used), format) in
        rows.into_iter().flat_map(|row| device.formats().into_iter().map(move |format| (row, format)))
    {
        let name = format!("loss {tokens} x {columns} on {ranks}");
        let all = ranks * columns;
        let logits: Vec<f32> = rounded(random(tokens * all, 1).iter().map(|x| x * 8.0).collect(), format);
        let (targets, dloss) = (ids(tokens, used, 2), random(tokens, 3));
        let dims: Dims = vec![(MicroBatch, 1), (Sequence, tokens), (Vocabulary, all)];
        let token_dims = dims[..2].to_vec();
        let ids = Tensor::from_ids(&Memory::default(), &token_dims, &targets);
        let of = |op: Op, operands: &[&Tensor], dims: &Dims| operator(&op, operands, dims, Place::WHOLE);
        let masked = of(Op::MaskColumns(used as u64), &[&tensor(&dims, &logits)], &dims);
        let largest = of(Op::ReduceMax, &[&masked], &token_dims);
        let weights = of(Op::Exp, &[&of(Op::Subtract, &[&masked, &largest], &dims)], &dims);
        let sum = of(Op::ReduceSum, &[&weights], &token_dims);
        let picked = of(Op::Pick, &[&masked, &ids], &token_dims);
        let shifted = of(Op::Add, &[&of(Op::Log, &[&sum], &token_dims), &largest], &token_dims);
        let losses = of(Op::Subtract, &[&shifted, &picked], &token_dims).to_numbers();
        let gradient = tensor(&token_dims, &dloss);
        let spread = of(Op::PickGradient, &[&ids, &gradient], &dims);
        let shares = of(Op::Multiply, &[&of(Op::Divide, &[&weights, &sum], &dims), &gradient], &dims);
        let dlogits = of(Op::Subtract, &[&shares, &spread], &dims).to_numbers();

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
        let exchange = |part: usize, join: fn(f32, f32) -> f32| {
            let read = own.iter().map(|own| device.read(&own[part]));
            read.reduce(|a, b| a.iter().zip(b).map(|(a, b)| join(*a, b)).collect()).expect("there is a rank")
        };
        let common = queue.numbers(&exchange(0, f32::max));
        device.check(&format!("{name}, largest"), &common, &largest.to_numbers(), 0.0);
        (0..ranks).for_each(|rank| loss::rescale(&queue, statistics(rank), &common));
        let [sums, picks] = [1, 2].map(|part| queue.numbers(&exchange(part, |a, b| a + b)));
        let joined = Statistics { largest: &common, sum: &sums, picked: &picks };
        let found = device.poisoned(tokens, Element::Single);
        loss::losses(&queue, joined, &found);
        device.check(&name, &found, &losses, 1e-6);
        let dloss = queue.numbers(&dloss);
        for (rank, found) in parts.iter().enumerate() {
            loss::gradient(&queue, &vocabulary(rank), found, &targets, joined, &dloss);
            device.check(&format!("{name}, gradient"), found, &part(&dlogits, rank), 1e-6);
        }
    }
}

#[test]
fn rows_of_tables_and_their_gradients() {
    let device = device();
    // Tokens, ids, first row and rows of the rank, columns.
    let shapes = [(7, 22, 11, 11, 5), (40, 5, 0, 5, 36), (300, 40, 8, 20, 202), (600, 900, 0, 900, 1028)];
    for ((tokens, limit, start, rows, columns), format) in
        shapes.into_iter().flat_map(|shape| device.formats().into_iter().map(move |format| (shape, format)))
    {
        let name = format!("lookup {tokens} of {rows} x {columns}");
        let chosen = ids(tokens, limit, 1);
        let table = rounded(random(rows * columns, 2), format);
        let dy = rounded(random(tokens * columns, 3), format);
        let token_dims: Dims = vec![(MicroBatch, 1), (Sequence, tokens)];
        let dims: Dims = vec![(MicroBatch, 1), (Sequence, tokens), (Hidden, columns)];
        let table_dims: Dims = vec![(Vocabulary, rows), (Hidden, columns)];
        let place = Place { vocabulary_start: start, ..Place::WHOLE };
        let ids = Tensor::from_ids(&Memory::default(), &token_dims, &chosen);
        let y = operator(&Op::Lookup, &[&ids, &tensor(&table_dims, &table)], &dims, place).to_numbers();
        let dtable = operator(&Op::LookupGradient, &[&ids, &tensor(&dims, &dy)], &table_dims, place).to_numbers();

        let queue = device.queue();
        let [table, dy] = [&table, &dy].map(|numbers| device.upload(numbers, format));
        let ids = queue.indices(&chosen);
        let found = device.poisoned(tokens * columns, format);
        embedding::lookup(&queue, &table, columns, &ids, start as u32, &found);
        device.check(&name, &found, &y, 0.0);
        let before = random(rows * columns, 4);
        let found = device.upload(&before, Element::Single);
        embedding::lookup_gradient(&queue, &ids, &dy, start as u32, &found);
        let expected: Vec<f32> = before.iter().zip(&dtable).map(|(before, more)| before + more).collect();
        device.check(&format!("{name}, gradient"), &found, &expected, 1e-6);
    }
}
