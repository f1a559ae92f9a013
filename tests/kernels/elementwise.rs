//! Activations and dropout.

use ir::graph::DimName::{Hidden, Intermediate, MicroBatch, Sequence};
use ir::graph::DropoutSite;
use ir::program::Op;
use kernels::Element;
use kernels::activation::{bias_gelu, bias_gelu_gradient, swiglu, swiglu_gradient};
use kernels::dropout::{Mask, dropout};
use runtime::operators::{Dropping, Place};
use runtime::random::Stream;
use runtime::tensor::Tensor;

use crate::device::{Dims, device, operator, rounded, tensor};
use crate::random::random;

/// Rows and columns: one element, no whole vector, vectors of each width, more columns than units, many rows.
const SHAPES: [(usize, usize); 7] = [(1, 1), (3, 5), (7, 36), (33, 202), (2, 1030), (5, 2048), (1111, 12)];

fn dims(rows: usize, columns: usize) -> Dims {
    vec![(MicroBatch, 1), (Sequence, rows), (Intermediate, columns)]
}

#[test]
fn gelu_with_bias_and_its_gradients() {
    let device = device();
    for ((rows, columns), format) in
        SHAPES.into_iter().flat_map(|shape| device.formats().into_iter().map(move |f| (shape, f)))
    {
        let name = format!("gelu {rows} x {columns}");
        let numbers = |count, seed| rounded(random(count, seed).iter().map(|x| x * 3.0).collect(), format);
        let (x, bias, dy) = (numbers(rows * columns, 1), numbers(columns, 2), numbers(rows * columns, 3));
        let (dims, bias_dims) = (dims(rows, columns), vec![(Intermediate, columns)]);
        let sum = operator(&Op::Add, &[&tensor(&dims, &x), &tensor(&bias_dims, &bias)], &dims, Place::WHOLE);
        let y = operator(&Op::Gelu, &[&sum], &dims, Place::WHOLE);
        let dx = operator(&Op::GeluGradient, &[&sum, &tensor(&dims, &dy)], &dims, Place::WHOLE);
        let dbias = operator(&Op::SumTokens, &[&dx], &bias_dims, Place::WHOLE).to_numbers();

        let queue = device.queue();
        let [x, bias, dy] = [&x, &bias, &dy].map(|numbers| device.upload(numbers, format));
        let found = device.poisoned(x.length, format);
        bias_gelu(&queue, &x, &bias, &found);
        device.check(&name, &found, &y.to_numbers(), 1e-5);

        let found = device.poisoned(x.length, format);
        let total = device.poisoned(columns, Element::Single);
        bias_gelu_gradient(&queue, [&x, &bias, &dy], &found, &total, false);
        device.check(&format!("{name}, dx"), &found, &dx.to_numbers(), 1e-5);
        device.check(&format!("{name}, dbias"), &total, &dbias, 1e-5);
        bias_gelu_gradient(&queue, [&x, &bias, &dy], &found, &total, true);
        let twice: Vec<f32> = dbias.iter().map(|x| 2.0 * x).collect();
        device.check(&format!("{name}, dbias twice"), &total, &twice, 1e-5);
    }
}

#[test]
fn swiglu_and_its_gradients() {
    let device = device();
    for ((rows, columns), format) in
        SHAPES.into_iter().flat_map(|shape| device.formats().into_iter().map(move |f| (shape, f)))
    {
        let name = format!("swiglu {rows} x {columns}");
        let numbers = |seed| rounded(random(rows * columns, seed).iter().map(|x| x * 3.0).collect(), format);
        let (gate, up, dy) = (numbers(1), numbers(2), numbers(3));
        let dims = dims(rows, columns);
        let [g, u, d] = [&gate, &up, &dy].map(|numbers| tensor(&dims, numbers));
        let of = |op: Op, operands: &[&Tensor]| operator(&op, operands, &dims, Place::WHOLE);
        let active = of(Op::Silu, &[&g]);
        let y = of(Op::Multiply, &[&active, &u]);
        let dup = of(Op::Multiply, &[&active, &d]);
        let dgate = of(Op::SiluGradient, &[&g, &of(Op::Multiply, &[&u, &d])]);

        let queue = device.queue();
        let [gate, up, dy] = [&gate, &up, &dy].map(|numbers| device.upload(numbers, format));
        let found = device.poisoned(gate.length, format);
        swiglu(&queue, [&gate, &up], &found);
        device.check(&name, &found, &y.to_numbers(), 1e-5);
        let found = [(); 2].map(|()| device.poisoned(gate.length, format));
        swiglu_gradient(&queue, [&gate, &up, &dy], [&found[0], &found[1]]);
        device.check(&format!("{name}, gate"), &found[0], &dgate.to_numbers(), 1e-5);
        device.check(&format!("{name}, up"), &found[1], &dup.to_numbers(), 1e-5);
    }
}

/// The same elements are dropped as on the CPU, whatever part of the batch and of the sequences a rank holds.
#[test]
fn dropout_with_residual() {
    let device = device();
    let dropping = Dropping { hidden: 0.3, attention: 0.0, seed: 7, step: 3, layer: 2, first_sequence: 0 };
    // Sequences, positions, width; first sequence; first position and number of all.
    let rows = [
        ([2, 3, 8], 0, (0, 3)),
        ([3, 5, 36], 2, (5, 20)),
        ([1, 7, 5], 4, (0, 7)),
        ([2, 33, 202], 1, (33, 66)),
        // The elements' indices need more than 32 bits.
        ([2, 3, 1 << 14], 1 << 12, (1000, 4096)),
    ];
    for ((shape, first_sequence, positions), format) in
        rows.into_iter().flat_map(|row| device.formats().into_iter().map(move |format| (row, format)))
    {
        let count: usize = shape.iter().product();
        let name = format!("dropout {shape:?}");
        let (x, residual) = (rounded(random(count, 1), format), rounded(random(count, 2), format));
        let dims = vec![(MicroBatch, shape[0]), (Sequence, shape[1]), (Hidden, shape[2])];
        let dropping = Dropping { first_sequence: u64::from(first_sequence), ..dropping };
        let place = Place { positions, dropping: Some(dropping), ..Place::WHOLE };
        let site = DropoutSite::FeedForwardOutput;
        let dropped = operator(&Op::Dropout(site), &[&tensor(&dims, &x)], &dims, place);
        let sum = operator(&Op::Add, &[&dropped, &tensor(&dims, &residual)], &dims, place);

        let stream = Stream::dropout(dropping.seed, dropping.step, dropping.layer, site);
        let positions = (positions.0 as u32, positions.1 as u32);
        let mask = Mask {
            key: stream.key,
            counter_high: stream.counter_high,
            probability: dropping.hidden,
            first_sequence,
            positions,
        };
        let [x, residual] = [&x, &residual].map(|numbers| device.upload(numbers, format));
        let found = device.poisoned(count, format);
        dropout(&device.queue(), &mask, shape, &x, None, &found);
        device.check(&name, &found, &dropped.to_numbers(), 0.0);
        let found = device.poisoned(count, format);
        dropout(&device.queue(), &mask, shape, &x, Some(&residual), &found);
        device.check(&format!("{name} with residual"), &found, &sum.to_numbers(), 1e-7);
    }
}
