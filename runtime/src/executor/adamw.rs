//! The optimizer on slices: AdamW (arXiv 1711.05101) and the sum of squares for the global norm.

/// Elements whose squares are summed before the sums are.
const BLOCK: usize = 4096;

/// The numbers of one step.
#[derive(Clone, Copy, Debug, Default)]
pub struct AdamWStep {
    /// Step size.
    pub learning_rate: f64,
    /// Decays of the moments.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Factor of gradients, 1 where the norm is small enough.
    pub coefficient: f64,
    /// Number of the step, from 1.
    pub step: u64,
}

/// Steps weights: m = β₁ m + (1 − β₁) g, v = β₂ v + (1 − β₂) g²,
/// w = w − lr (m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + ε) + λ w). All slices have one length.
pub fn adamw(step: &AdamWStep, weights: &mut [f32], first: &mut [f32], second: &mut [f32], gradient: &[f32]) {
    let (beta1, beta2) = step.betas;
    let correction = |beta: f64| 1.0 - beta.powi(step.step as i32);
    let rate = (step.learning_rate / correction(beta1)) as f32;
    let root = (1.0 / correction(beta2).sqrt()) as f32;
    let keep = (1.0 - step.learning_rate * step.weight_decay) as f32;
    let (coefficient, epsilon) = (step.coefficient as f32, step.epsilon as f32);
    let (b1, b2) = (beta1 as f32, beta2 as f32);
    let (c1, c2) = ((1.0 - beta1) as f32, (1.0 - beta2) as f32);
    let state = weights.iter_mut().zip(first).zip(second).zip(gradient);
    for (((w, m), v), g) in state {
        let g = g * coefficient;
        *m = b1 * *m + c1 * g;
        *v = b2 * *v + c2 * g * g;
        *w = *w * keep - rate * *m / (v.sqrt() * root + epsilon);
    }
}

/// Sum of squares, block by block in fp64: the same bits whatever computes it.
pub fn sum_of_squares(values: &[f32]) -> f64 {
    let block = |block: &[f32]| {
        let mut lanes = [0.0f64; 8];
        for chunk in block.chunks(8) {
            lanes.iter_mut().zip(chunk).for_each(|(sum, x)| *sum += f64::from(*x) * f64::from(*x));
        }
        lanes.iter().sum::<f64>()
    };
    values.chunks(BLOCK).map(block).sum()
}
