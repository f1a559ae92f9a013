//! The attention core on a device: the kernels of FlashAttention, whose statistics backward computes again.

use ir::graph::DimName;
use kernels::attention::{Attention, attention as send_attention, attention_gradient};
use kernels::{Buffer, Element};

use super::{View, slopes};
use crate::device::Device;
use crate::operators::{AttentionGradients, Place, ResultShape};
use crate::tensor::Tensor;

/// The context of query, keys and values.
pub fn attention(device: &Device, scale: f64, alibi: bool, operands: &[View], context: &View, place: &Place) {
    let core = core_of(operands, scale);
    let slopes = slopes(device, &operands[0], place, alibi);
    let logarithms = device.queue().buffer(rows_of(&core), Element::Single);
    let [query, keys, values] = [0, 1, 2].map(|operand| &operands[operand].buffer);
    send_attention(&device.queue(), &core, [query, keys, values, &slopes], &context.buffer, &logarithms);
}

/// Gradients of query, keys and values, those that are wanted. Operands: query, keys, values, gradient of the context.
pub fn gradients(
    device: &Device,
    scale: f64,
    alibi: bool,
    operands: &[View],
    wanted: [Option<&View>; 3],
    place: &Place,
) {
    let queue = device.queue();
    let core = core_of(operands, scale);
    let slopes = slopes(device, &operands[0], place, alibi);
    let [query, keys, values, gradient] = [0, 1, 2, 3].map(|operand| &operands[operand].buffer);
    // The program keeps neither context nor statistics for this operator.
    let context = queue.buffer(gradient.length, gradient.element);
    let logarithms = queue.buffer(rows_of(&core), Element::Single);
    let inputs = [query, keys, values, &slopes];
    send_attention(&queue, &core, inputs, &context, &logarithms);
    let found: [Buffer; 3] = [0, 1, 2].map(|part| match wanted[part] {
        Some(view) => view.buffer.clone(),
        None => queue.buffer(operands[part].buffer.length, query.element),
    });
    let [dquery, dkeys, dvalues] = &found;
    attention_gradient(&queue, &core, inputs, [&context, &logarithms, gradient], [dquery, dkeys, dvalues]);
}

/// All gradients of one core that are wanted, at once, as tensors with the operands' dims.
pub fn attention_gradients(
    device: &Device,
    wanted: [bool; 3],
    operands: [&Tensor; 4],
    (scale, alibi): (f64, bool),
    result: &ResultShape,
) -> AttentionGradients {
    let of = |part: usize| Tensor::stale(result.memory, &operands[part].dims, result.format);
    let found = [0, 1, 2].map(|part| wanted[part].then(|| of(part)));
    if !device.is_tracing() {
        let views = operands.map(View::of);
        let into = found.each_ref().map(|tensor| tensor.as_ref().map(View::of));
        gradients(device, scale, alibi, &views, into.each_ref().map(Option::as_ref), &result.place);
    }
    let [query, keys, values] = found;
    AttentionGradients { query, keys, values }
}

fn core_of(operands: &[View], scale: f64) -> Attention {
    let (query, values) = (&operands[0], &operands[2]);
    Attention {
        sequences: query.extent(DimName::MicroBatch),
        positions: query.extent(DimName::Sequence),
        heads: query.extent(DimName::KeyValueHeads),
        queries: query.extent(DimName::QueriesPerKeyValue),
        head_width: query.extent(DimName::HeadDim),
        value_width: values.extent(DimName::ValueDim),
        scale,
    }
}

fn rows_of(core: &Attention) -> usize {
    core.sequences * core.positions * core.heads * core.queries
}
