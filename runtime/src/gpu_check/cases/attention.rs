//! The attention core, forward and backward.

use ir::graph::DimName::{HeadDim, KeySequence, KeyValueHeads, MicroBatch, QueriesPerKeyValue, Sequence, ValueDim};
use ir::program::{AttentionOperand, Op};
use kernels::Element;
use kernels::attention::{Attention, Products, Way, attention_by, attention_gradient_by};

use super::rows::slopes;
use crate::gpu_check::checks::{Checks, held, largest};
use crate::gpu_check::reference::{Dims, Value};
use crate::operators::Place;

/// Sequences, key-value heads, queries of each, positions, widths of heads and values, linear biases.
const SHAPES: [(usize, usize, usize, usize, [usize; 2], bool); 7] = [
    (1, 1, 1, 1, [4, 4], false),
    (2, 2, 3, 9, [5, 7], true),
    (1, 2, 1, 33, [8, 8], false),
    (1, 1, 2, 100, [32, 16], true),
    (2, 1, 1, 64, [12, 20], true),
    (1, 2, 2, 70, [64, 64], false),
    (1, 1, 1, 130, [72, 40], true),
];

/// Gradients smaller than this part of the operator's largest count as that large: of one key the query's vanishes but
/// for the rounding of terms that cancel.
const SMALL_GRADIENT: f64 = 1e-2;
/// Of the largest number, what roundings to bf16 inside change: of weights and their gradients before they are
/// multiplied, and of the context that gradients start from.
const ROUNDED_INSIDE: f64 = 1.0 / 128.0;

pub fn attention_and_gradients(checks: &mut Checks) {
    let device = checks.device;
    for ((sequences, heads, queries, positions, [head_width, value_width], alibi), format) in
        device.in_each_format(SHAPES)
    {
        let name = format!("attention {sequences} x {heads} x {queries} x {positions} x {head_width} x {value_width}");
        let place = Place { heads: (2, 6), queries: (1, 4), ..Place::WHOLE };
        let scale = 0.4;
        let query_dims = |name, width| -> Dims {
            vec![
                (MicroBatch, sequences),
                (Sequence, positions),
                (KeyValueHeads, heads),
                (QueriesPerKeyValue, queries),
                (name, width),
            ]
        };
        let key_dims = |name, width| -> Dims {
            vec![(MicroBatch, sequences), (KeySequence, positions), (KeyValueHeads, heads), (name, width)]
        };
        let dims = [
            query_dims(HeadDim, head_width),
            key_dims(HeadDim, head_width),
            key_dims(ValueDim, value_width),
            query_dims(ValueDim, value_width),
        ];
        let mut seed = 0;
        let numbers = dims.each_ref().map(|dims| {
            seed += 1;
            held(dims.iter().map(|(_, extent)| extent).product(), seed, 2.0, format)
        });
        let values = [0, 1, 2, 3].map(|at| Value::new(&dims[at], &numbers[at]));
        let operands: Vec<_> = values.iter().collect();
        let of = |op: &Op, operands: &[&Value], dims: &Dims| checks.reference.apply(op, operands, dims, place);
        let context = of(&Op::FlashAttention { scale, alibi }, &operands[..3], &dims[3]);
        let parts = [AttentionOperand::Query, AttentionOperand::Keys, AttentionOperand::Values];
        let gradients = [0, 1, 2].map(|at| {
            let op = Op::FlashAttentionGradient { of: parts[at], scale, alibi };
            of(&op, &operands, &dims[at])
        });

        let core = Attention { sequences, positions, heads, queries, head_width, value_width, scale };
        let queue = device.queue();
        let score_dims: Dims = vec![
            (MicroBatch, 1),
            (KeyValueHeads, heads),
            (QueriesPerKeyValue, queries),
            (Sequence, 2),
            (KeySequence, 2),
        ];
        let slopes = queue.numbers(&slopes(checks.reference, &score_dims, place, alibi));
        let [query, keys, values, dcontext] = numbers.each_ref().map(|numbers| device.upload(numbers, format));
        let on_device = [&query, &keys, &values, &slopes];
        let own = Way::of(&queue, &core, format);
        // Where kernels multiply matrices, and where they do not, the loops in the matrices' place are checked too.
        for way in [own, Way::Tiles(Products::Loops)] {
            let name = format!("{name}, {way:?}");
            let rounds = |rounds: bool| if rounds && format == Element::Brain { ROUNDED_INSIDE } else { 1e-5 };
            let found = device.poisoned(context.numbers().len(), format);
            let logarithms = device.poisoned(sequences * heads * queries * positions, Element::Single);
            attention_by(&queue, way, &core, on_device, &found, &logarithms);
            checks.compare(name.clone(), &found, context.numbers(), rounds(way == Way::Tiles(Products::Instructions)));
            let found_gradients = [&query, &keys, &values].map(|operand| device.poisoned(operand.length, format));
            let results = [&found, &logarithms, &dcontext];
            attention_gradient_by(&queue, way, &core, on_device, results, found_gradients.each_ref());
            let beside =
                SMALL_GRADIENT * gradients.iter().map(|gradient| largest(gradient.numbers())).fold(0.0, f64::max);
            for ((found, expected), part) in found_gradients.iter().zip(&gradients).zip(parts) {
                let name = format!("{name}, {part:?}");
                checks.compare_beside(name, found, expected.numbers(), rounds(true), beside);
            }
        }
    }
}
