//! Frequencies of rotary position embedding.

use std::f64::consts::TAU;

use serde::{Deserialize, Serialize};

/// How rotary frequencies are lowered, for longer sequences than in pre-training.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum RotaryScaling {
    /// All by one factor (arXiv 2306.15595, equation 4).
    Linear {
        /// Divides each frequency.
        factor: f64,
    },
    /// Those of long waves by a factor, those of short waves not, and those between in part, as the published code of
    /// Llama 3.1 has it (`apply_scaling`; `rope_type` llama3 of Hugging Face, `--use-rope-scaling` of Megatron).
    Llama3 {
        /// Divides the frequencies of long waves.
        factor: f64,
        /// Waves longer than `original_length` over this are long.
        low_frequency_factor: f64,
        /// Waves shorter than `original_length` over this are short.
        high_frequency_factor: f64,
        /// Tokens of a sequence in pre-training.
        original_length: u64,
    },
}

impl RotaryScaling {
    fn apply(self, frequency: f64) -> f64 {
        match self {
            RotaryScaling::Linear { factor } => frequency / factor,
            RotaryScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_length } => {
                let waves = original_length as f64 * frequency / TAU;
                let kept = (waves - low_frequency_factor) / (high_frequency_factor - low_frequency_factor);
                let kept = kept.clamp(0.0, 1.0);
                (1.0 - kept) * frequency / factor + kept * frequency
            }
        }
    }
}

/// Radians by which each pair of a head turns from one position to the next: base^(−2i/width) for pair i (RoFormer,
/// arXiv 2104.09864, section 3.2.2), scaled where the model says so. `[width/2]`
pub fn rotary_frequencies(base: f64, scaling: Option<RotaryScaling>, width: usize) -> Vec<f64> {
    let plain = (0..width / 2).map(|pair| base.powf(-2.0 * pair as f64 / width as f64));
    plain.map(|frequency| scaling.map_or(frequency, |scaling| scaling.apply(frequency))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the rule of Llama 3.1 in words: what turns less than once in 8192 positions is divided by 8, what turns
    /// more than four times is kept, what turns 2.5 times is the mean of both.
    #[test]
    fn short_waves_are_kept_and_long_ones_divided() {
        let scaling = RotaryScaling::Llama3 {
            factor: 8.0,
            low_frequency_factor: 1.0,
            high_frequency_factor: 4.0,
            original_length: 8192,
        };
        let turns = |number: f64| TAU * number / 8192.0;
        for (number, expected) in [(0.9, 0.9 / 8.0), (1.0, 1.0 / 8.0), (4.0, 4.0), (100.0, 100.0), (2.5, 2.5 * 0.5625)]
        {
            let scaled = scaling.apply(turns(number));
            assert!((scaled / turns(expected) - 1.0).abs() < 1e-12, "{number} turns: {scaled}");
        }
    }

    #[test]
    fn one_factor_divides_all() {
        let [plain, scaled] =
            [None, Some(RotaryScaling::Linear { factor: 4.0 })].map(|scaling| rotary_frequencies(100.0, scaling, 8));
        assert_eq!(plain.len(), 4);
        assert!(plain.iter().zip(&scaled).all(|(plain, scaled)| plain / 4.0 == *scaled));
    }
}
