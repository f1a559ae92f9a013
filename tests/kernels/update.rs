//! AdamW and the squared norm.

use kernels::Element;
use kernels::optimizer::{AdamW, State, WeightDecay, adamw, sum_of_squares};
use runtime::optimizer;

use crate::device::device;
use crate::random::random;

/// Three steps on a shard of several parameters with different weight decay.
#[test]
fn adamw_on_flat_shards() {
    let device = device();
    let shards = [vec![(1, 0.1)], vec![(5, 0.1), (3, 0.0), (40, 0.2)], vec![(4096, 0.1), (64, 0.0), (70_000, 0.3)]];
    let formats: Vec<Option<Element>> = device.formats().into_iter().map(Some).chain([None]).collect();
    for (parameters, rounded) in shards.iter().flat_map(|shard| formats.iter().map(move |format| (shard, *format))) {
        let count = parameters.iter().map(|(length, _)| length).sum();
        let name = format!("adamw {count}");
        let mut state = [random(count, 1), vec![0.0; count], vec![0.0; count]];
        let queue = device.queue();
        let [master, first, second] = [0, 1, 2].map(|part| device.upload(&state[part], Element::Single));
        let written = rounded.map(|format| device.poisoned(count, format));
        let decay = WeightDecay::new(&queue, parameters);
        let scale = queue.numbers(&[0.5]);
        for step in 1..=3 {
            let gradient = random(count, 10 + u64::from(step));
            let settings = AdamW { learning_rate: 1e-3, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, step };
            let on_device = State { master: &master, first: &first, second: &second, parameter: written.as_ref() };
            adamw(&queue, &settings, &decay, &device.upload(&gradient, Element::Single), &scale, on_device);
            let mut start = 0;
            for (length, weight_decay) in parameters {
                let part = start..start + length;
                let settings = optimizer::AdamW {
                    learning_rate: 1e-3,
                    beta1: 0.9,
                    beta2: 0.95,
                    epsilon: 1e-8,
                    weight_decay: f64::from(*weight_decay),
                    step,
                    gradient_scale: 0.5,
                };
                let [master, first, second] = &mut state;
                let of = optimizer::State {
                    master: &mut master[part.clone()],
                    first: &mut first[part.clone()],
                    second: &mut second[part.clone()],
                    parameter: None,
                };
                optimizer::adamw(&settings, &gradient[part], of);
                start += length;
            }
        }
        for (what, found, expected) in
            [("master", &master, &state[0]), ("first", &first, &state[1]), ("second", &second, &state[2])]
        {
            device.check(&format!("{name}, {what}"), found, expected, 1e-6);
        }
        if let Some(written) = written {
            device.check(&format!("{name}, parameter"), &written, &state[0], 1e-6);
        }
    }
}

#[test]
fn squared_norm() {
    let device = device();
    for count in [1, 3, 256, 1000, 4096 * 33, 1_000_003] {
        let numbers = random(count, 5);
        let expected = optimizer::sum_of_squares(&numbers) as f32;
        let gradient = device.upload(&numbers, Element::Single);
        let total = device.poisoned(1, Element::Single);
        sum_of_squares(&device.queue(), &gradient, &total, false);
        device.check(&format!("squares {count}"), &total, &[expected], 1e-6);
        let first = device.read(&total);
        sum_of_squares(&device.queue(), &gradient, &total, true);
        device.check(&format!("squares {count} twice"), &total, &[2.0 * expected], 1e-6);
        sum_of_squares(&device.queue(), &gradient, &total, false);
        assert_eq!(device.read(&total), first, "the same bits again");
    }
}
