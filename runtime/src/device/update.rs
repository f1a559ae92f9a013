//! AdamW on a device, on the part of a parameter that the rank owns.

use std::ops::Range;

use kernels::copy::copy_part;
use kernels::optimizer::{self, State, WeightDecay};
use kernels::{Buffer, Queue};

use super::Device;
use crate::executor::Held;
use crate::optimizer::AdamW;

/// One step of AdamW.
pub(crate) fn adamw(device: &Device, step: &AdamW, held: &Held) {
    let queue = &device.queue();
    let gradient = held.gradient.as_ref().expect("the verifier follows sums");
    let gradient = gradient.part(queue, held.owned_in(gradient));
    let weight = held.weight.buffer();
    let range = held.owned_in(&held.weight);
    let (first, second) = (held.first.buffer(), held.second.buffer());
    let settings = optimizer::AdamW {
        learning_rate: step.learning_rate,
        beta1: step.beta1,
        beta2: step.beta2,
        epsilon: step.epsilon,
        step: step.step,
    };
    let decay = WeightDecay::new(queue, &[(range.len(), step.weight_decay as f32)]);
    let scale = queue.numbers(&[step.gradient_scale as f32]);
    in_part(queue, &weight, range, |weight| {
        let master = held.master.as_ref().map(|master| master.buffer());
        let (master, parameter) = match &master {
            Some(master) => (master, Some(weight)),
            None => (weight, None),
        };
        let state = State { master, first: &first, second: &second, parameter };
        optimizer::adamw(queue, &settings, &decay, &gradient, &scale, state);
    });
}

/// Lets `send` change a part of a buffer: the buffer itself if it is all, else a copy that is put back.
fn in_part(queue: &Queue, whole: &Buffer, range: Range<usize>, send: impl FnOnce(&Buffer)) {
    if range == (0..whole.length) {
        return send(whole);
    }
    let part = queue.buffer(range.len(), whole.element);
    copy_part(queue, range.len(), (whole, range.start), (&part, 0));
    send(&part);
    copy_part(queue, range.len(), (&part, 0), (whole, range.start));
}
