//! Kernels that hold rows: norms, softmax of scores, rotary positions.

use ir::graph::DimName::{HeadDim, Hidden, KeySequence, KeyValueHeads, MicroBatch, QueriesPerKeyValue, Sequence};
use ir::model::NormKind;
use ir::program::Op;
use kernels::Element;
use kernels::norm::{Norm, norm, norm_gradient};
use kernels::rotary::{Heads, Turns, rotary};
use kernels::softmax::{Scores, masked_softmax, masked_softmax_gradient};

use crate::gpu_check::checks::{Checks, held, rounded};
use crate::gpu_check::reference::{Dims, Reference, Value};
use crate::operators::Place;

pub fn norms_and_gradients(checks: &mut Checks) {
    // No whole vector; few columns; rows of several vectors for each unit; more rows than strips.
    let shapes = [(2, 5), (3, 36), (7, 202), (5, 2048), (3, 8196), (1111, 64)];
    let device = checks.device;
    for (shape, format) in device.in_each_format(shapes) {
        for kind in [NormKind::LayerNorm, NormKind::RmsNorm] {
            norm_of_kind(checks, kind, shape, format);
        }
    }
}

fn norm_of_kind(checks: &mut Checks, kind: NormKind, (rows, columns): (usize, usize), format: Element) {
    let device = checks.device;
    let name = format!("{kind:?} {rows} x {columns}");
    let (dims, row_dims): (Dims, Dims) =
        (vec![(MicroBatch, 1), (Sequence, rows), (Hidden, columns)], vec![(Hidden, columns)]);
    let all = |seed| held(rows * columns, seed, 2.0, format);
    let (x, residual, dy, upstream) = (all(1), all(2), all(3), all(4));
    let (weight, bias) = (held(columns, 5, 2.0, format), held(columns, 6, 2.0, format));
    let epsilon = 1e-5;
    let whole = |numbers: &Vec<f32>| Value::new(&dims, numbers);
    let (w, b) = (Value::new(&row_dims, &weight), Value::new(&row_dims, &bias));
    let is_centered = kind == NormKind::LayerNorm;
    let sum = checks.of(&Op::Add, &[&whole(&x), &whole(&residual)], &dims);
    let operands = if is_centered { vec![&sum, &w, &b] } else { vec![&sum, &w] };
    let y = checks.of(&Op::Norm { kind, epsilon }, &operands, &dims);
    let dx = checks.of(&Op::NormInputGradient { kind, epsilon }, &[&whole(&x), &w, &whole(&dy)], &dims);
    let dx = checks.of(&Op::Add, &[&dx, &whole(&upstream)], &dims);
    let dweight = checks.of(&Op::NormWeightGradient { kind, epsilon }, &[&whole(&x), &whole(&dy)], &row_dims);
    let dbias = checks.of(&Op::SumTokens, &[&whole(&dy)], &row_dims);
    let operands = [&whole(&x), &w, &b];
    let alone = checks.of(&Op::Norm { kind, epsilon }, &operands[..if is_centered { 3 } else { 2 }], &dims);

    let queue = device.queue();
    let settings = Norm { centered: is_centered, epsilon, columns };
    let [x, residual, dy, upstream, weight, bias] =
        [&x, &residual, &dy, &upstream, &weight, &bias].map(|numbers| device.upload(numbers, format));
    let found = [(); 2].map(|()| device.poisoned(rows * columns, format));
    let bias = is_centered.then_some(&bias);
    norm(&queue, &settings, &x, Some((&residual, &found[0])), &weight, bias, &found[1]);
    checks.compare(format!("{name}, sum"), &found[0], sum.numbers(), 1e-7);
    checks.compare(name.clone(), &found[1], y.numbers(), 1e-5);

    let found = device.poisoned(rows * columns, format);
    let totals = [(); 2].map(|()| device.poisoned(columns, Element::Single));
    let into = (&totals[0], is_centered.then_some(&totals[1]));
    norm_gradient(&queue, &settings, [&x, &weight, &dy], Some(&upstream), &found, into, false);
    checks.compare(format!("{name}, dx"), &found, dx.numbers(), 1e-5);
    checks.compare(format!("{name}, dweight"), &totals[0], dweight.numbers(), 1e-5);
    if is_centered {
        checks.compare(format!("{name}, dbias"), &totals[1], dbias.numbers(), 1e-5);
    }
    // Without residual and upstream gradient.
    let found = device.poisoned(rows * columns, format);
    norm(&queue, &settings, &x, None, &weight, bias, &found);
    checks.compare(format!("{name} alone"), &found, alone.numbers(), 1e-5);
}

pub fn scores_and_gradient(checks: &mut Checks) {
    let device = checks.device;
    let rows = [(1, 2, 9, false), (2, 3, 9, true), (1, 1, 40, true), (1, 2, 202, false), (1, 1, 1030, true)];
    for ((sequences, queries, positions, alibi), format) in device.in_each_format(rows) {
        let name = format!("softmax {sequences} x {queries} x {positions}, alibi {alibi}");
        let place = Place { heads: (2, 6), queries: (1, 4), ..Place::WHOLE };
        let (heads, scale) = (2 * queries, 0.3);
        let dims: Dims = vec![
            (MicroBatch, sequences),
            (KeyValueHeads, 2),
            (QueriesPerKeyValue, queries),
            (Sequence, positions),
            (KeySequence, positions),
        ];
        let count = sequences * heads * positions * positions;
        let (x, dy) = (held(count, 1, 2.0, format), held(count, 2, 2.0, format));
        let of = |op: Op, operands: &[&Value]| checks.reference.apply(&op, operands, &dims, place);
        let y = of(Op::Softmax, &[&of(Op::ScaleMask { scale, alibi }, &[&Value::new(&dims, &x)])]);
        let kept = rounded(y.singles(), format);
        let dscores = of(Op::SoftmaxGradient, &[&Value::new(&dims, &kept), &Value::new(&dims, &dy)]);
        let dx = of(Op::ScaleMaskGradient { scale }, &[&dscores]);
        let slopes = slopes(checks.reference, &dims, place, alibi);

        let queue = device.queue();
        let [x, dy, kept] = [&x, &dy, &kept].map(|numbers| device.upload(numbers, format));
        let scores = Scores { heads, positions, keys: positions };
        let found = device.poisoned(count, format);
        masked_softmax(&queue, &scores, scale, [&x, &queue.numbers(&slopes)], &found);
        checks.compare(name.clone(), &found, y.numbers(), 1e-5);
        let found = device.poisoned(count, format);
        masked_softmax_gradient(&queue, &scores, scale, [&kept, &dy], &found);
        checks.compare(format!("{name}, gradient"), &found, dx.numbers(), 1e-5);
    }
}

/// Slope of each head of scores, from what the reference adds to scores of zero at the second key.
pub fn slopes(reference: Reference, dims: &Dims, place: Place, alibi: bool) -> Vec<f32> {
    let (queries, positions) = (dims[2].1, dims[3].1);
    let zeros = Value::new(dims, &vec![0.0; dims.iter().map(|(_, extent)| extent).product()]);
    let masked = reference.apply(&Op::ScaleMask { scale: 1.0, alibi }, &[&zeros], dims, place).singles();
    (0..dims[1].1 * queries).map(|head| masked[head * positions * positions + positions + 1]).collect()
}

pub fn rotary_there_and_back(checks: &mut Checks) {
    let device = checks.device;
    for ((sequences, positions, heads, width), format) in
        device.in_each_format([(2, 9, 6, 6), (1, 5, 1, 10), (3, 33, 4, 64)])
    {
        let dims: Dims = vec![(MicroBatch, sequences), (Sequence, positions), (KeyValueHeads, heads), (HeadDim, width)];
        let x = held(sequences * positions * heads * width, 1, 2.0, format);
        let base = 10_000.0;
        let queue = device.queue();
        let turns = Turns::new(&queue, positions, width, base);
        let on_device = device.upload(&x, format);
        for (back, op) in
            [(false, Op::Rotary { base, scaling: None }), (true, Op::RotaryGradient { base, scaling: None })]
        {
            let y = checks.of(&op, &[&Value::new(&dims, &x)], &dims);
            let found = device.poisoned(x.len(), format);
            rotary(&queue, &turns, Heads { between: heads, back }, &on_device, &found);
            let name = format!("rotary {sequences} x {positions} x {heads} x {width}, back {back}");
            checks.compare(name, &found, y.numbers(), 1e-6);
        }
    }
}
