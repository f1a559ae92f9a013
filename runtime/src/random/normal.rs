//! From random bits to the standard normal distribution, by its inverse distribution function.

/// √2.
const ROOT_TWO: f32 = std::f32::consts::SQRT_2;

/// Coefficients of erf⁻¹(x) / x in w − 2.5 for w = −ln(1 − x²) below 5, highest power first.
///
/// Source of both tables: M. Giles, "Approximating the erfinv function", GPU Computing Gems 2 (2011), single
/// precision; relative error below 3e-7.
const CENTRE: [f32; 9] = [
    2.810_226_4e-8,
    3.432_739_4e-7,
    -3.523_387_7e-6,
    -4.391_506_5e-6,
    2.185_808_7e-4,
    -1.253_725e-3,
    -4.177_681_6e-3,
    0.246_640_73,
    1.501_409_4,
];

/// The same in √w − 3 for w of 5 and above.
const TAIL: [f32; 9] = [
    -2.002_142_6e-4,
    1.009_505_6e-4,
    1.349_343_2e-3,
    -3.673_428_4e-3,
    5.739_507_7e-3,
    -7.622_461_3e-3,
    9.438_870_5e-3,
    1.001_674,
    2.832_976_8,
];

/// Coefficients of (ln(1 + z) − z + z²/2) / z³ for 1 + z from √½ to √2, highest power first.
///
/// Source: S. Moshier, Cephes library, `logf.c`; relative error below 1e-7.
const LOGARITHM: [f32; 9] = [
    7.037_683_6e-2,
    -0.115_146_1,
    0.116_769_985,
    -0.124_201_41,
    0.142_493_23,
    -0.166_680_57,
    0.200_007_15,
    -0.249_999_94,
    0.333_333_3,
];

/// A number of the standard normal distribution from 32 random bits: 23 for the size, one for the sign.
///
/// The size is √2 · erf⁻¹(1 − a) for a = (m + ½) / 2²³, m the upper 23 bits: exact, never 0 or 1. The largest
/// is 5.42. Free of branches, so that many are computed side by side.
pub fn normal_of_word(word: u32) -> f32 {
    let a = ((word >> 9) as i32 as f32 + 0.5) * (1.0 / 8_388_608.0);
    let w = -logarithm(a * (2.0 - a));
    let centre = polynomial(&CENTRE, w - 2.5);
    let tail = polynomial(&TAIL, w.max(0.0).sqrt() - 3.0);
    let factor = if w < 5.0 { centre } else { tail };
    let size = ROOT_TWO * (1.0 - a) * factor;
    f32::from_bits(size.to_bits() ^ (word << 31))
}

/// Natural logarithm of a positive normal number; the platform's own differs from one to the next.
fn logarithm(x: f32) -> f32 {
    /// Bits of √½: subtracting them moves a number's exponent by one where its mantissa passes √2.
    const ROOT_HALF: u32 = 0x3F35_04F3;
    const MANTISSA: u32 = 0x007F_FFFF;
    let offset = x.to_bits().wrapping_sub(ROOT_HALF);
    let exponent = ((offset as i32) >> 23) as f32;
    let z = f32::from_bits((offset & MANTISSA).wrapping_add(ROOT_HALF)) - 1.0;
    let square = z * z;
    let small = z * square * polynomial(&LOGARITHM, z) - 0.5 * square;
    // ln 2 in two parts, of which the first has few digits, so that its product with the exponent is exact.
    (small + exponent * -2.121_944_4e-4) + z + exponent * 0.693_359_4
}

/// Horner's rule, without fused operations.
fn polynomial(coefficients: &[f32; 9], x: f32) -> f32 {
    coefficients.iter().fold(0.0, |sum, coefficient| sum * x + coefficient)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Quantiles of the standard normal distribution: two-sided tail probability and size; source: tables of
    /// the inverse distribution function to seven digits.
    const QUANTILES: [(f64, f64); 9] = [
        (0.9, 0.125_661_3),
        (0.5, 0.674_489_8),
        (0.317_310_5, 1.0),
        (0.1, 1.644_853_6),
        (0.05, 1.959_964_0),
        (0.01, 2.575_829_3),
        (0.001, 3.290_526_7),
        (1e-4, 3.890_591_9),
        (1e-5, 4.417_173_4),
    ];

    #[test]
    fn quantiles_are_those_of_the_tables() {
        for (tail, size) in QUANTILES {
            let word = ((tail * 8_388_608.0).round() as u32) << 9;
            let found = f64::from(normal_of_word(word));
            // Half a step of `a` moves a quantile by at most step / (2 · density).
            let density = (-size * size / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
            let step = 1.0 / 8_388_608.0 / (2.0 * density);
            assert!((found - size).abs() < 2e-6 + step, "tail {tail}: {found}, expected {size}");
            assert_eq!(normal_of_word(word | 1).to_bits(), (-found as f32).to_bits(), "the lowest bit is the sign");
        }
    }

    #[test]
    fn extremes_are_finite() {
        let [widest, narrowest] = [0u32, 0xFFFF_FFFE].map(normal_of_word);
        assert!((widest - 5.42).abs() < 0.01, "{widest}");
        assert!((0.0..1e-6).contains(&narrowest), "{narrowest}");
    }

    #[test]
    fn logarithm_is_within_two_units_in_the_last_place() {
        for step in 1..20_000u32 {
            let x = step as f32 / 10_000.0;
            let expected = f64::from(x).ln();
            let unit = f64::from(f32::EPSILON) * expected.abs().max(1e-4);
            assert!((f64::from(logarithm(x)) - expected).abs() <= 2.0 * unit, "ln {x}");
        }
    }
}
