//! AdamW (arXiv 1711.05101) and the squared norm of gradients, on slices.

use multiversion::multiversion;
use rayon::prelude::*;

use crate::tensor::{bf16, rounded};

/// Elements that a thread takes at a time, and that are summed in one go.
const PIECE: usize = 1 << 14;

/// Hyper-parameters of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Step size of this step.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay of this parameter.
    pub weight_decay: f64,
    /// The step's number, from 1.
    pub step: u32,
    /// What gradients are multiplied by: below 1 where their norm is clipped.
    pub gradient_scale: f64,
}

/// A parameter's state: the number that is updated, and its moments.
#[derive(Debug)]
pub struct State<'a> {
    /// The fp32 parameter, or the fp32 master of a bf16 one.
    pub master: &'a mut [f32],
    /// First moment.
    pub first: &'a mut [f32],
    /// Second moment.
    pub second: &'a mut [f32],
    /// The bf16 parameter that becomes the rounded master, if there is one.
    pub parameter: Option<&'a mut [bf16]>,
}

/// Factors of a step in fp32.
#[derive(Clone, Copy)]
struct Factors {
    gradient_scale: f32,
    beta1: f32,
    beta2: f32,
    /// 1 − beta1 and 1 − beta2.
    rest1: f32,
    rest2: f32,
    /// Learning rate over the first moment's bias correction.
    rate: f32,
    /// One over the root of the second moment's bias correction.
    root: f32,
    epsilon: f32,
    /// Learning rate times weight decay.
    decay: f32,
}

/// One step of AdamW, in one pass over the state.
///
/// m = β₁ m + (1 − β₁) g; v = β₂ v + (1 − β₂) g²;
/// p = p − η (m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + ε) + λ p).
///
/// # Panics
/// If the slices differ in length.
pub fn adamw(settings: &AdamW, gradient: &[f32], state: State) {
    let factors = Factors::new(settings);
    let lengths = [state.master.len(), state.first.len(), state.second.len()];
    assert!(lengths == [gradient.len(); 3], "a gradient and its parameter's state are as long");
    assert!(state.parameter.as_ref().is_none_or(|it| it.len() == gradient.len()), "and so is a rounded parameter");
    let pieces = state.pieces().into_iter().zip(gradient.chunks(PIECE));
    match is_shared(gradient.len()) {
        true => pieces.collect::<Vec<_>>().into_par_iter().for_each(|(state, g)| update(factors, g, state)),
        false => pieces.for_each(|(state, g)| update(factors, g, state)),
    }
}

/// Sum of squares in fp64: of pieces of fixed size, and of these in order, whatever the number of threads.
pub fn sum_of_squares(gradient: &[f32]) -> f64 {
    let pieces: Vec<f64> = match is_shared(gradient.len()) {
        true => gradient.par_chunks(PIECE).map(squares).collect(),
        false => gradient.chunks(PIECE).map(squares).collect(),
    };
    pieces.iter().sum()
}

impl Factors {
    fn new(settings: &AdamW) -> Factors {
        let AdamW { learning_rate, beta1, beta2, epsilon, weight_decay, step, gradient_scale } = *settings;
        let correction = |beta: f64| 1.0 - beta.powf(f64::from(step));
        Factors {
            gradient_scale: gradient_scale as f32,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            rest1: (1.0 - beta1) as f32,
            rest2: (1.0 - beta2) as f32,
            rate: (learning_rate / correction(beta1)) as f32,
            root: (1.0 / correction(beta2)).sqrt() as f32,
            epsilon: epsilon as f32,
            decay: (learning_rate * weight_decay) as f32,
        }
    }
}

impl<'a> State<'a> {
    fn pieces(self) -> Vec<State<'a>> {
        let mut parameters = self.parameter.map(|it| it.chunks_mut(PIECE));
        let moments = self.first.chunks_mut(PIECE).zip(self.second.chunks_mut(PIECE));
        let pieces = self.master.chunks_mut(PIECE).zip(moments).map(|(master, (first, second))| {
            let parameter = parameters.as_mut().and_then(Iterator::next);
            State { master, first, second, parameter }
        });
        pieces.collect()
    }
}

fn is_shared(elements: usize) -> bool {
    elements >= 2 * PIECE && rayon::current_num_threads() > 1
}

#[multiversion(targets = "simd")]
fn update(factors: Factors, gradient: &[f32], state: State) {
    let Factors { gradient_scale, beta1, beta2, rest1, rest2, rate, root, epsilon, decay } = factors;
    let State { master, first, second, parameter } = state;
    let moments = first.iter_mut().zip(second);
    for ((g, p), (m, v)) in gradient.iter().zip(&mut *master).zip(moments) {
        let g = g * gradient_scale;
        *m = beta1 * *m + rest1 * g;
        *v = beta2 * *v + rest2 * g * g;
        *p -= rate * *m / (v.sqrt() * root + epsilon) + decay * *p;
    }
    if let Some(parameter) = parameter {
        parameter.iter_mut().zip(master).for_each(|(parameter, master)| *parameter = rounded(*master));
    }
}

#[multiversion(targets = "simd")]
fn squares(gradient: &[f32]) -> f64 {
    let mut partial = [0.0f64; 8];
    let chunks = gradient.chunks_exact(8);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..8 {
            partial[lane] += f64::from(chunk[lane]) * f64::from(chunk[lane]);
        }
    }
    partial.iter_mut().zip(rest).for_each(|(partial, g)| *partial += f64::from(*g) * f64::from(*g));
    partial.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: AdamW = AdamW {
        learning_rate: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        step: 1,
        gradient_scale: 0.5,
    };

    fn gradient(count: usize, step: usize) -> Vec<f32> {
        (0..count).map(|at| ((at * 37 + step * 11) % 101) as f32 / 50.0 - 1.0).collect()
    }

    /// The formula of the documentation in fp64.
    fn expected(count: usize, steps: usize) -> Vec<f64> {
        let (mut p, mut m, mut v) = (vec![0.5f64; count], vec![0.0; count], vec![0.0; count]);
        let AdamW { learning_rate, beta1, beta2, epsilon, weight_decay, gradient_scale, .. } = SETTINGS;
        for step in 1..=steps {
            for (at, g) in gradient(count, step).into_iter().enumerate() {
                let g = f64::from(g) * gradient_scale;
                m[at] = beta1 * m[at] + (1.0 - beta1) * g;
                v[at] = beta2 * v[at] + (1.0 - beta2) * g * g;
                let (first, second) =
                    (m[at] / (1.0 - beta1.powi(step as i32)), v[at] / (1.0 - beta2.powi(step as i32)));
                p[at] -= learning_rate * (first / (second.sqrt() + epsilon) + weight_decay * p[at]);
            }
        }
        p
    }

    #[test]
    fn five_steps_follow_the_formula() {
        for count in [1, 17, 3 * PIECE + 5] {
            let (mut master, mut first, mut second) = (vec![0.5; count], vec![0.0; count], vec![0.0; count]);
            let mut parameter = vec![bf16::ZERO; count];
            for step in 1..=5 {
                let parameter = (step % 2 == 1).then_some(parameter.as_mut_slice());
                let state = State { master: &mut master, first: &mut first, second: &mut second, parameter };
                adamw(&AdamW { step, ..SETTINGS }, &gradient(count, step as usize), state);
            }
            for (at, expected) in expected(count, 5).into_iter().enumerate() {
                assert!((f64::from(master[at]) - expected).abs() < 1e-6, "{count}: element {at}");
                assert_eq!(parameter[at], bf16::from_f32(master[at]), "{count}: element {at}");
            }
        }
    }

    #[test]
    fn squares_are_summed_in_the_same_order_by_any_number_of_threads() {
        let numbers = gradient(5 * PIECE + 3, 1);
        let expected: f64 = numbers.iter().map(|g| f64::from(*g) * f64::from(*g)).sum();
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads can be made");
            pool.install(|| sum_of_squares(&numbers))
        };
        assert!((with(1) - expected).abs() < 1e-9 * expected);
        assert_eq!(with(1).to_bits(), with(3).to_bits());
    }
}
