//! Kernels that hold rows: norms, softmax of scores, rotary positions.

use ir::graph::DimName::{HeadDim, Hidden, KeySequence, KeyValueHeads, MicroBatch, QueriesPerKeyValue, Sequence};
use ir::model::NormKind;
use ir::program::Op;
use kernels::Element;
use kernels::norm::{Norm, norm, norm_gradient};
use kernels::rotary::{Heads, Turns, rotary};
use kernels::softmax::{Scores, masked_softmax, masked_softmax_gradient};
use runtime::operators::Place;
use runtime::tensor::Tensor;

use crate::device::{Dims, device, operator, rounded, tensor};
use crate::random::random;

fn numbers(count: usize, seed: u64, format: Element) -> Vec<f32> {
    rounded(random(count, seed).iter().map(|x| x * 2.0).collect(), format)
}

#[test]
fn norms_with_residual_and_their_gradients() {
    let device = device();
    // No whole vector; few columns; rows of several vectors for each unit; more rows than strips.
    let shapes = [(2, 5), (3, 36), (7, 202), (5, 2048), (3, 8196), (1111, 64)];
    let kinds = [NormKind::LayerNorm, NormKind::RmsNorm];
    let cases = shapes.into_iter().flat_map(|shape| kinds.map(|kind| (shape, kind)));
    for ((rows, columns), kind, format) in
        cases.flat_map(|(shape, kind)| device.formats().into_iter().map(move |format| (shape, kind, format)))
    {
        let name = format!("{kind:?} {rows} x {columns}");
        let (dims, row_dims): (Dims, Dims) =
            (vec![(MicroBatch, 1), (Sequence, rows), (Hidden, columns)], vec![(Hidden, columns)]);
        let all = |seed| numbers(rows * columns, seed, format);
        let (x, residual, dy, upstream) = (all(1), all(2), all(3), all(4));
        let (weight, bias) = (numbers(columns, 5, format), numbers(columns, 6, format));
        let epsilon = 1e-5;
        let of = |op: Op, operands: &[&Tensor], dims: &Dims| operator(&op, operands, dims, Place::WHOLE);
        let whole = |numbers: &Vec<f32>| tensor(&dims, numbers);
        let (w, b) = (tensor(&row_dims, &weight), tensor(&row_dims, &bias));
        let is_centered = kind == NormKind::LayerNorm;
        let sum = of(Op::Add, &[&whole(&x), &whole(&residual)], &dims);
        let operands = if is_centered { vec![&sum, &w, &b] } else { vec![&sum, &w] };
        let y = of(Op::Norm { kind, epsilon }, &operands, &dims);
        let dx = of(Op::NormInputGradient { kind, epsilon }, &[&whole(&x), &w, &whole(&dy)], &dims);
        let dx = of(Op::Add, &[&dx, &whole(&upstream)], &dims);
        let dweight = of(Op::NormWeightGradient { kind, epsilon }, &[&whole(&x), &whole(&dy)], &row_dims);
        let dbias = of(Op::SumTokens, &[&whole(&dy)], &row_dims);

        let queue = device.queue();
        let settings = Norm { centered: is_centered, epsilon, columns };
        let [x, residual, dy, upstream, weight, bias] =
            [&x, &residual, &dy, &upstream, &weight, &bias].map(|numbers| device.upload(numbers, format));
        let found = [(); 2].map(|()| device.poisoned(rows * columns, format));
        let bias = is_centered.then_some(&bias);
        norm(&queue, &settings, &x, Some((&residual, &found[0])), &weight, bias, &found[1]);
        device.check(&format!("{name}, sum"), &found[0], &sum.to_numbers(), 1e-7);
        device.check(&name, &found[1], &y.to_numbers(), 1e-5);

        let found = device.poisoned(rows * columns, format);
        let totals = [(); 2].map(|()| device.poisoned(columns, Element::Single));
        let into = (&totals[0], is_centered.then_some(&totals[1]));
        norm_gradient(&queue, &settings, [&x, &weight, &dy], Some(&upstream), &found, into, false);
        device.check(&format!("{name}, dx"), &found, &dx.to_numbers(), 1e-5);
        device.check(&format!("{name}, dweight"), &totals[0], &dweight.to_numbers(), 1e-5);
        if is_centered {
            device.check(&format!("{name}, dbias"), &totals[1], &dbias.to_numbers(), 1e-5);
        }
        // Without residual and upstream gradient.
        let operands = if is_centered { vec![whole(&device.read(&x)), w, b] } else { vec![whole(&device.read(&x)), w] };
        let operands: Vec<&Tensor> = operands.iter().collect();
        let y = of(Op::Norm { kind, epsilon }, &operands, &dims);
        norm(&queue, &settings, &x, None, &weight, bias, &found);
        device.check(&format!("{name} alone"), &found, &y.to_numbers(), 1e-5);
    }
}

#[test]
fn scores_and_their_gradient() {
    let device = device();
    let rows = [(1, 2, 9, false), (2, 3, 9, true), (1, 1, 40, true), (1, 2, 202, false), (1, 1, 1030, true)];
    for ((sequences, queries, positions, alibi), format) in
        rows.into_iter().flat_map(|row| device.formats().into_iter().map(move |format| (row, format)))
    {
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
        let (x, dy) = (numbers(count, 1, format), numbers(count, 2, format));
        let of = |op: Op, operands: &[&Tensor]| operator(&op, operands, &dims, place);
        let y = of(Op::Softmax, &[&of(Op::ScaleMask { scale, alibi }, &[&tensor(&dims, &x)])]);
        let kept = rounded(y.to_numbers(), format);
        let dscores = of(Op::SoftmaxGradient, &[&tensor(&dims, &kept), &tensor(&dims, &dy)]);
        let dx = of(Op::ScaleMaskGradient { scale }, &[&dscores]);
        // Slopes of the rank's heads, from what the CPU adds to scores of zero at the second key.
        let slopes = slopes(&dims, place, alibi);

        let queue = device.queue();
        let [x, dy, kept] = [&x, &dy, &kept].map(|numbers| device.upload(numbers, format));
        let scores = Scores { heads, positions, keys: positions };
        let found = device.poisoned(count, format);
        masked_softmax(&queue, &scores, scale, [&x, &queue.numbers(&slopes)], &found);
        device.check(&name, &found, &y.to_numbers(), 1e-5);
        let found = device.poisoned(count, format);
        masked_softmax_gradient(&queue, &scores, scale, [&kept, &dy], &found);
        device.check(&format!("{name}, gradient"), &found, &dx.to_numbers(), 1e-5);
    }
}

/// Slope of each head of scores.
pub fn slopes(dims: &Dims, place: Place, alibi: bool) -> Vec<f32> {
    let (queries, positions) = (dims[2].1, dims[3].1);
    let zeros = vec![0.0; dims.iter().map(|(_, extent)| extent).product()];
    let masked = operator(&Op::ScaleMask { scale: 1.0, alibi }, &[&tensor(dims, &zeros)], dims, place).to_numbers();
    (0..dims[1].1 * queries).map(|head| masked[head * positions * positions + positions + 1]).collect()
}

#[test]
fn rotary_positions_there_and_back() {
    let device = device();
    let shapes = [(2, 9, 6, 6), (1, 5, 1, 10), (3, 33, 4, 64)];
    for ((sequences, positions, heads, width), format) in
        shapes.into_iter().flat_map(|shape| device.formats().into_iter().map(move |format| (shape, format)))
    {
        let dims: Dims = vec![(MicroBatch, sequences), (Sequence, positions), (KeyValueHeads, heads), (HeadDim, width)];
        let x = numbers(sequences * positions * heads * width, 1, format);
        let base = 10_000.0;
        let queue = device.queue();
        let turns = Turns::new(&queue, positions, width, base);
        let on_device = device.upload(&x, format);
        for (back, op) in [(false, Op::Rotary { base }), (true, Op::RotaryGradient { base })] {
            let y = operator(&op, &[&tensor(&dims, &x)], &dims, Place::WHOLE).to_numbers();
            let found = device.poisoned(x.len(), format);
            rotary(&queue, &turns, Heads { between: heads, back }, &on_device, &found);
            device.check(&format!("rotary {sequences} x {positions} x {heads} x {width}"), &found, &y, 1e-6);
        }
    }
}
