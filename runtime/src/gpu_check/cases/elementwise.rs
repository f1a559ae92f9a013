//! Activations and dropout.

use ir::graph::DimName::{Hidden, Intermediate, MicroBatch, Sequence};
use ir::graph::DropoutSite;
use ir::program::Op;
use kernels::Element;
use kernels::activation::{bias_gelu, bias_gelu_gradient, swiglu, swiglu_gradient};
use kernels::dropout::{Mask, dropout};

use crate::gpu_check::checks::{Checks, held};
use crate::gpu_check::reference::{Dims, Reference, Value};
use crate::operators::{Dropping, Place};
use crate::random::Stream;

/// Rows and columns: one element, no whole vector, vectors of each width, more columns than units, many rows.
const SHAPES: [(usize, usize); 7] = [(1, 1), (3, 5), (7, 36), (33, 202), (2, 1030), (5, 2048), (1111, 12)];

fn dims(rows: usize, columns: usize) -> Dims {
    vec![(MicroBatch, 1), (Sequence, rows), (Intermediate, columns)]
}

pub fn bias_gelu_and_gradients(checks: &mut Checks) {
    let device = checks.device;
    for ((rows, columns), format) in device.in_each_format(SHAPES) {
        let name = format!("gelu {rows} x {columns}");
        let numbers = |count, seed| held(count, seed, 3.0, format);
        let (x, bias, dy) = (numbers(rows * columns, 1), numbers(columns, 2), numbers(rows * columns, 3));
        let (dims, bias_dims) = (dims(rows, columns), vec![(Intermediate, columns)]);
        let sum = checks.of(&Op::Add, &[&Value::new(&dims, &x), &Value::new(&bias_dims, &bias)], &dims);
        let y = checks.of(&Op::Gelu, &[&sum], &dims);
        let dx = checks.of(&Op::GeluGradient, &[&sum, &Value::new(&dims, &dy)], &dims);
        let dbias = checks.of(&Op::SumTokens, &[&dx], &bias_dims);

        let queue = device.queue();
        let [x, bias, dy] = [&x, &bias, &dy].map(|numbers| device.upload(numbers, format));
        let found = device.poisoned(x.length, format);
        bias_gelu(&queue, &x, &bias, &found);
        checks.compare(name.clone(), &found, y.numbers(), 1e-5);

        let found = device.poisoned(x.length, format);
        let total = device.poisoned(columns, Element::Single);
        bias_gelu_gradient(&queue, [&x, &bias, &dy], &found, &total, false);
        checks.compare(format!("{name}, dx"), &found, dx.numbers(), 1e-5);
        checks.compare(format!("{name}, dbias"), &total, dbias.numbers(), 1e-5);
        bias_gelu_gradient(&queue, [&x, &bias, &dy], &found, &total, true);
        let twice: Vec<f64> = dbias.numbers().iter().map(|x| 2.0 * x).collect();
        checks.compare(format!("{name}, dbias twice"), &total, &twice, 1e-5);
    }
}

pub fn swiglu_and_gradients(checks: &mut Checks) {
    let device = checks.device;
    for ((rows, columns), format) in device.in_each_format(SHAPES) {
        let name = format!("swiglu {rows} x {columns}");
        let numbers = |seed| held(rows * columns, seed, 3.0, format);
        let (gate, up, dy) = (numbers(1), numbers(2), numbers(3));
        let dims = dims(rows, columns);
        let [g, u, d] = [&gate, &up, &dy].map(|numbers| Value::new(&dims, numbers));
        let of = |op: Op, operands: &[&Value]| checks.of(&op, operands, &dims);
        let active = of(Op::Silu, &[&g]);
        let y = of(Op::Multiply, &[&active, &u]);
        let dup = of(Op::Multiply, &[&active, &d]);
        let dgate = of(Op::SiluGradient, &[&g, &of(Op::Multiply, &[&u, &d])]);

        let queue = device.queue();
        let [gate, up, dy] = [&gate, &up, &dy].map(|numbers| device.upload(numbers, format));
        let found = device.poisoned(gate.length, format);
        swiglu(&queue, [&gate, &up], &found);
        checks.compare(name.clone(), &found, y.numbers(), 1e-5);
        let found = [(); 2].map(|()| device.poisoned(gate.length, format));
        swiglu_gradient(&queue, [&gate, &up, &dy], [&found[0], &found[1]]);
        checks.compare(format!("{name}, gate"), &found[0], dgate.numbers(), 1e-5);
        checks.compare(format!("{name}, up"), &found[1], dup.numbers(), 1e-5);
    }
}

/// The same elements are dropped as on processor cores, whatever part of the batch and of the sequences a rank holds.
pub fn dropout_with_residual(checks: &mut Checks) {
    let device = checks.device;
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
    for ((shape, first_sequence, positions), format) in device.in_each_format(rows) {
        let count: usize = shape.iter().product();
        let name = format!("dropout {shape:?}");
        let (x, residual) = (held(count, 1, 1.0, format), held(count, 2, 1.0, format));
        let dims = vec![(MicroBatch, shape[0]), (Sequence, shape[1]), (Hidden, shape[2])];
        let dropping = Dropping { first_sequence: u64::from(first_sequence), ..dropping };
        let place = Place { positions, dropping: Some(dropping), ..Place::WHOLE };
        let site = DropoutSite::FeedForwardOutput;
        // Which elements are dropped, only the operators know; the numbers are the reference's.
        let operators = |x: &Value| Reference::Operators.apply(&Op::Dropout(site), &[x], &dims, place);
        let dropped = match checks.reference {
            Reference::Operators => operators(&Value::new(&dims, &x)),
            Reference::Interpreter => {
                let left = operators(&Value::new(&dims, &vec![1.0; count]));
                let mask: Vec<f32> = left.numbers().iter().map(|left| if *left == 0.0 { 0.0 } else { 1.0 }).collect();
                let whole = checks.of(&Op::Multiply, &[&Value::new(&dims, &x), &Value::new(&dims, &mask)], &dims);
                checks.of(&Op::Scale(1.0 / (1.0 - dropping.hidden)), &[&whole], &dims)
            }
        };
        let sum = checks.of(&Op::Add, &[&dropped, &Value::new(&dims, &residual)], &dims);

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
        // Two roundings in fp32: of the factor and of the product.
        checks.compare(name.clone(), &found, dropped.numbers(), 2.0 * checks.reference.one_rounding());
        let found = device.poisoned(count, format);
        dropout(&device.queue(), &mask, shape, &x, Some(&residual), &found);
        let tolerance = 1e-7 + 2.0 * checks.reference.one_rounding();
        checks.compare(format!("{name} with residual"), &found, sum.numbers(), tolerance);
    }
}
