//! AdamW and the squared norm.

use ir::reference;
use kernels::Element;
use kernels::optimizer::{AdamW, State, WeightDecay, adamw, sum_of_squares};

use crate::gpu_check::checks::Checks;
use crate::gpu_check::reference::{Reference, numbers};
use crate::optimizer;

/// Settings of the checked steps; gradients are scaled by `SCALE`.
const SETTINGS: AdamW = AdamW { learning_rate: 1e-3, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, step: 1 };
const SCALE: f32 = 0.5;
const STEPS: u32 = 3;

/// Three steps on a shard of several parameters with different weight decay.
pub fn adamw_on_flat_shards(checks: &mut Checks) {
    let device = checks.device;
    let shards = [vec![(1, 0.1)], vec![(5, 0.1), (3, 0.0), (40, 0.2)], vec![(4096, 0.1), (64, 0.0), (70_000, 0.3)]];
    let formats: Vec<Option<Element>> = device.formats().into_iter().map(Some).chain([None]).collect();
    for (parameters, rounded) in shards.iter().flat_map(|shard| formats.iter().map(move |format| (shard, *format))) {
        let count = parameters.iter().map(|(length, _)| length).sum();
        let name = format!("adamw {count}");
        let start = numbers(count, 1, 1.0);
        let gradients: Vec<Vec<f32>> = (1..=STEPS).map(|step| numbers(count, 10 + u64::from(step), 1.0)).collect();
        let expected = match checks.reference {
            Reference::Operators => on_cores(parameters, &start, &gradients),
            Reference::Interpreter => in_double(parameters, &start, &gradients),
        };

        let queue = device.queue();
        let master = device.upload(&start, Element::Single);
        let [first, second] = [(); 2].map(|()| device.upload(&vec![0.0; count], Element::Single));
        let written = rounded.map(|format| device.poisoned(count, format));
        let decay = WeightDecay::new(&queue, parameters);
        let scale = queue.numbers(&[SCALE]);
        for (step, gradient) in (1..).zip(&gradients) {
            let state = State { master: &master, first: &first, second: &second, parameter: written.as_ref() };
            let gradient = device.upload(gradient, Element::Single);
            adamw(&queue, &AdamW { step, ..SETTINGS }, &decay, &gradient, &scale, state);
        }
        for (what, found, expected) in
            [("master", &master, &expected[0]), ("first", &first, &expected[1]), ("second", &second, &expected[2])]
        {
            checks.compare(format!("{name}, {what}"), found, expected, 1e-6);
        }
        if let Some(written) = written {
            checks.compare(format!("{name}, parameter"), &written, &expected[0], 1e-6);
        }
    }
}

/// Numbers and moments after the steps, by the runtime's own AdamW in fp32.
fn on_cores(parameters: &[(usize, f32)], start: &[f32], gradients: &[Vec<f32>]) -> [Vec<f64>; 3] {
    let mut state = [start.to_vec(), vec![0.0; start.len()], vec![0.0; start.len()]];
    let AdamW { learning_rate, beta1, beta2, epsilon, .. } = SETTINGS;
    for (step, gradient) in (1..).zip(gradients) {
        let mut start = 0;
        for (length, weight_decay) in parameters {
            let part = start..start + length;
            let settings = optimizer::AdamW {
                learning_rate,
                beta1,
                beta2,
                epsilon,
                weight_decay: f64::from(*weight_decay),
                step,
                gradient_scale: SCALE.into(),
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
    state.map(|numbers| numbers.into_iter().map(f64::from).collect())
}

/// The same by the single-rank reference in fp64.
fn in_double(parameters: &[(usize, f32)], start: &[f32], gradients: &[Vec<f32>]) -> [Vec<f64>; 3] {
    let mut result = [(); 3].map(|()| Vec::new());
    let mut from = 0;
    for (length, weight_decay) in parameters {
        let part = from..from + length;
        let only = |numbers: Vec<f64>| reference::Parameters::from([(String::new(), numbers)]);
        let wide = |numbers: &[f32], factor: f64| numbers.iter().map(|x| f64::from(*x) * factor).collect::<Vec<_>>();
        let AdamW { learning_rate, beta1, beta2, epsilon, .. } = SETTINGS;
        let weight_decay = f64::from(*weight_decay);
        let settings = reference::AdamW { learning_rate, beta1, beta2, epsilon, weight_decay, clip: f64::INFINITY };
        let mut state = reference::AdamState::default();
        let mut values = only(wide(&start[part.clone()], 1.0));
        for gradient in gradients {
            let gradient = only(wide(&gradient[part.clone()], SCALE.into()));
            reference::adamw_step(&settings, &mut state, &mut values, &gradient);
        }
        for (all, own) in result.iter_mut().zip([&values, &state.first, &state.second]) {
            all.extend(&own[""]);
        }
        from += length;
    }
    result
}

pub fn squared_norm(checks: &mut Checks) {
    let device = checks.device;
    for count in [1, 3, 256, 1000, 4096 * 33, 1_000_003] {
        let numbers = numbers(count, 5, 1.0);
        let expected = match checks.reference {
            Reference::Operators => optimizer::sum_of_squares(&numbers),
            Reference::Interpreter => numbers.iter().map(|x| f64::from(*x).powi(2)).sum(),
        };
        let gradient = device.upload(&numbers, Element::Single);
        let total = device.poisoned(1, Element::Single);
        sum_of_squares(&device.queue(), &gradient, &total, false);
        checks.compare(format!("squares {count}"), &total, &[expected], 1e-6);
        let first = device.read(&total);
        sum_of_squares(&device.queue(), &gradient, &total, true);
        checks.compare(format!("squares {count} twice"), &total, &[2.0 * expected], 1e-6);
        sum_of_squares(&device.queue(), &gradient, &total, false);
        if let Ok(first) = first {
            checks.compare(format!("squares {count}, the same bits again"), &total, &[first[0].into()], 0.0);
        }
    }
}
