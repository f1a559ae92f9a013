//! AdamW of the reference, with clipping by the global gradient norm.

use super::parameters::Parameters;

/// Keeps the clipping coefficient finite at a zero gradient (PyTorch, `torch.nn.utils.clip_grad_norm_`).
const CLIP_EPSILON: f64 = 1e-6;

/// Settings of the optimizer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Step size.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay, of every parameter.
    pub weight_decay: f64,
    /// Largest global gradient norm; infinite for no clipping.
    pub clip: f64,
}

/// What the optimizer remembers; `AdamState::default()` before the first step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdamState {
    /// Running mean of the clipped gradients, zero where absent.
    pub first: Parameters,
    /// Running mean of their squares, zero where absent.
    pub second: Parameters,
    /// Steps done.
    pub step: u64,
}

/// One step of AdamW on clipped gradients; returns the global gradient norm before clipping.
///
/// g = gradient · min(1, clip / (norm + 1e-6)); m = β₁m + (1 − β₁)g; v = β₂v + (1 − β₂)g²;
/// p −= learning_rate · (m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + ε) + weight_decay · p), with t the step from 1.
///
/// Source: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, with a schedule multiplier equal to
/// the learning rate, as PyTorch's `AdamW` has it.
///
/// # Panics
/// If parameters, gradients or state differ in keys or sizes.
pub fn adamw_step(
    optimizer: &AdamW,
    state: &mut AdamState,
    parameters: &mut Parameters,
    gradients: &Parameters,
) -> f64 {
    assert!(parameters.keys().eq(gradients.keys()), "parameters and gradients have different keys");
    let norm = gradients.values().flatten().map(|gradient| gradient * gradient).sum::<f64>().sqrt();
    let coefficient = (optimizer.clip / (norm + CLIP_EPSILON)).min(1.0);
    state.step += 1;
    let first_correction = 1.0 - optimizer.beta1.powf(state.step as f64);
    let second_correction = 1.0 - optimizer.beta2.powf(state.step as f64);
    for (key, values) in parameters.iter_mut() {
        let gradient = &gradients[key];
        let first = state.first.entry(key.clone()).or_insert_with(|| vec![0.0; values.len()]);
        let second = state.second.entry(key.clone()).or_insert_with(|| vec![0.0; values.len()]);
        assert_eq!([gradient.len(), first.len(), second.len()], [values.len(); 3], "sizes of {key}");
        for index in 0..values.len() {
            let clipped = gradient[index] * coefficient;
            first[index] = optimizer.beta1 * first[index] + (1.0 - optimizer.beta1) * clipped;
            second[index] = optimizer.beta2 * second[index] + (1.0 - optimizer.beta2) * clipped * clipped;
            let denominator = (second[index] / second_correction).sqrt() + optimizer.epsilon;
            let update = first[index] / first_correction / denominator;
            values[index] -= optimizer.learning_rate * (update + optimizer.weight_decay * values[index]);
        }
    }
    norm
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIMIZER: AdamW =
        AdamW { learning_rate: 0.1, beta1: 0.9, beta2: 0.99, epsilon: 1e-8, weight_decay: 0.5, clip: f64::INFINITY };

    fn two_keys(left: f64, right: f64) -> Parameters {
        Parameters::from([("left".to_owned(), vec![left]), ("right".to_owned(), vec![right])])
    }

    fn assert_close(actual: f64, expected: f64) {
        assert!((actual - expected).abs() <= 1e-12, "{actual} is not {expected}");
    }

    #[test]
    fn gradients_are_clipped_by_the_norm_over_all_keys() {
        let check = |clip: f64, coefficient: f64| {
            let mut state = AdamState::default();
            let optimizer = AdamW { clip, ..OPTIMIZER };
            let norm = adamw_step(&optimizer, &mut state, &mut two_keys(1.0, 2.0), &two_keys(3.0, -4.0));
            assert_close(norm, 5.0);
            assert_close(state.first["left"][0], 0.1 * 3.0 * coefficient);
            assert_close(state.first["right"][0], 0.1 * -4.0 * coefficient);
            assert_close(state.second["right"][0], 0.01 * 16.0 * coefficient * coefficient);
        };
        check(f64::INFINITY, 1.0);
        check(6.0, 1.0);
        check(2.5, 2.5 / 5.000001);
        check(0.0, 0.0);
    }

    #[test]
    fn first_step_moves_by_the_learning_rate_and_decays() {
        let mut parameters = two_keys(1.0, 2.0);
        let optimizer = AdamW { epsilon: 0.0, clip: 1.0, ..OPTIMIZER };
        adamw_step(&optimizer, &mut AdamState::default(), &mut parameters, &two_keys(3.0, -4.0));
        assert_close(parameters["left"][0], 1.0 - 0.1 * (1.0 + 0.5 * 1.0));
        assert_close(parameters["right"][0], 2.0 - 0.1 * (-1.0 + 0.5 * 2.0));
    }

    #[test]
    fn second_step_is_the_one_computed_by_hand() {
        let mut parameters = two_keys(0.0, 0.0);
        let mut state = AdamState::default();
        let optimizer = AdamW { beta1: 0.5, beta2: 0.75, epsilon: 1.0, weight_decay: 0.0, ..OPTIMIZER };
        adamw_step(&optimizer, &mut state, &mut parameters, &two_keys(2.0, 0.0));
        assert_close(parameters["left"][0], -0.1 * 2.0 / 3.0);
        adamw_step(&optimizer, &mut state, &mut parameters, &two_keys(-4.0, 0.0));
        // m = 0.5 · 1 + 0.5 · −4 = −1.5; v = 0.75 · 1 + 0.25 · 16 = 4.75; corrections 3/4 and 7/16.
        let update = -1.5 / 0.75 / ((4.75_f64 / 0.4375).sqrt() + 1.0);
        assert_close(parameters["left"][0], -0.1 * 2.0 / 3.0 - 0.1 * update);
        assert_eq!((state.step, parameters["right"][0]), (2, 0.0));
    }
}
