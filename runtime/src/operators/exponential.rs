//! The exponential and the logistic function, without branches, so that loops of them are vectorised.

/// exp(x) to one unit in the last place; zero below -87.3, where fp32 has no normal numbers.
///
/// exp(x) = 2^n · exp(r) with n the integer nearest to x / ln 2 and |r| ≤ ln 2 / 2, where the Taylor
/// polynomial of degree 7 is exact to 2⁻²⁷. ln 2 is taken in two parts (Cody and Waite), so that r is exact.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LOWEST: f32 = -87.336_54;
    const HIGHEST: f32 = 88.722_83;
    /// Adding and subtracting it rounds to an integer.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let inside = if x < LOWEST { LOWEST } else { x };
    let inside = if inside > HIGHEST { HIGHEST } else { inside };
    let shifted = inside * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (inside - n * LN_2_HIGH) - n * LN_2_LOW;
    let p = 1.0 / 5040.0;
    let p = p * r + 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let p = p * r * r + r + 1.0;
    // 2^128 has no exponent of its own: the power is applied in two halves.
    // Wrapping sums, because checks of overflow, which cannot happen, would be branches.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    let scaled = p * power(half) * power(n.wrapping_sub(half));
    let scaled = if x < LOWEST { 0.0 } else { scaled };
    let scaled = if x > HIGHEST { f32::INFINITY } else { scaled };
    if x.is_nan() { x } else { scaled }
}

/// 1 / (1 + exp(−x)).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_exact_to_a_unit_in_the_last_place() {
        let numbers = (-870_000..=887_000).map(|step| step as f32 * 1e-4);
        let worst = numbers.map(|x| {
            let expected = f64::from(x).exp();
            ((f64::from(exp(x)) - expected) / expected).abs()
        });
        let worst = worst.fold(0.0, f64::max);
        assert!(worst < 1.5 * f64::from(f32::EPSILON), "relative error {worst:e}");
    }

    #[test]
    fn exp_at_the_ends() {
        let rows = [
            (f32::NEG_INFINITY, 0.0),
            (-1e30, 0.0),
            (-88.0, 0.0),
            (0.0, 1.0),
            (88.8, f32::INFINITY),
            (1e30, f32::INFINITY),
            (f32::INFINITY, f32::INFINITY),
        ];
        for (x, expected) in rows {
            assert_eq!(exp(x), expected, "exp({x})");
        }
        assert!(exp(f32::NAN).is_nan());
        assert_eq!((sigmoid(-1e4), sigmoid(1e4)), (0.0, 1.0));
    }
}
