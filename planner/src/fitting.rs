//! Constants with the least absolute error: Levenberg and Marquardt's method on log errors, reweighted so that the
//! sum of absolute errors counts rather than that of squares, and pulled to what is believed without any run.

use nalgebra::{Cholesky, DMatrix, DVector};

/// Most iterations.
const ITERATIONS: usize = 30;
/// Most dampings that are tried in an iteration.
const DAMPINGS: usize = 8;
/// Longest step of a coordinate.
const LONGEST: f64 = 0.5;
/// Step of finite differences.
const DIFFERENCE: f64 = 1e-3;
/// Log errors below this count little.
const CORNER: f64 = 0.02;
/// Usual weight of the squared distance from the value before any run, so that what hardly any run decides stays there.
pub const PULL: f64 = 2.0;
/// First damping, and the factors by which it falls and rises.
const DAMPING: (f64, f64, f64) = (1e-2, 0.3, 4.0);

/// A constant to be fitted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Free {
    /// Value before any run is looked at.
    pub prior: f64,
    /// Least and largest value; a scale where the least is above zero, else a share of the largest.
    pub range: (f64, f64),
    /// Weight of the squared distance of its coordinate from the prior's, against runs of weight 1.
    pub pull: f64,
}

impl Free {
    /// The coordinate of a value in the search: its logarithm, or the part of the largest value.
    pub fn coordinate(&self, value: f64) -> f64 {
        if self.range.0 == 0.0 { value / self.range.1 } else { value.ln() }
    }

    /// The value of a coordinate.
    pub fn value(&self, coordinate: f64) -> f64 {
        if self.range.0 == 0.0 { coordinate * self.range.1 } else { coordinate.exp() }
    }

    /// The coordinate inside the range that is nearest.
    pub fn clamp(&self, coordinate: f64) -> f64 {
        let [least, most] = [self.range.0, self.range.1].map(|end| self.coordinate(end));
        coordinate.clamp(least, most)
    }
}

/// Values for which the weighted sum of absolute `errors` is least.
///
/// `errors` gives log errors for values of the constants, as many as there are `weights`.
pub fn fit(constants: &[Free], weights: &[f64], mut errors: impl FnMut(&[f64]) -> Vec<f64>) -> Vec<f64> {
    let values =
        |point: &[f64]| -> Vec<f64> { constants.iter().zip(point).map(|(constant, at)| constant.value(*at)).collect() };
    let priors: Vec<f64> = constants.iter().map(|constant| constant.coordinate(constant.prior)).collect();
    let mut point = priors.clone();
    let mut found = errors(&values(&point));
    let mut damping = DAMPING.0;
    for _ in 0..ITERATIONS {
        let sharp: Vec<f64> = weights.iter().zip(&found).map(|(weight, e)| weight / e.abs().max(CORNER)).collect();
        let merit = |found: &[f64], point: &[f64]| -> f64 {
            let distances = point.iter().zip(&priors).map(|(at, prior)| (at - prior).powi(2));
            let away = constants.iter().zip(distances).map(|(constant, square)| constant.pull * square).sum::<f64>();
            found.iter().zip(&sharp).map(|(error, weight)| weight * error * error).sum::<f64>() + away
        };
        let mut shifted = |index: usize, step: f64| {
            let mut moved = point.clone();
            moved[index] += step;
            errors(&values(&moved))
        };
        let slopes = slopes(constants, &point, &found, &mut shifted);
        let (mut normal, mut gradient) = normal_equations(&slopes, &found, &sharp);
        for (index, constant) in constants.iter().enumerate() {
            normal[(index, index)] += constant.pull;
            gradient[index] += constant.pull * (point[index] - priors[index]);
        }
        let least = merit(&found, &point) * (1.0 - 1e-6);
        let mut better = None;
        for _ in 0..DAMPINGS {
            let Some(tried) = damped_step(constants, &normal, &gradient, &point, damping) else { break };
            let errors = errors(&values(&tried));
            if merit(&errors, &tried) < least {
                better = Some((tried, errors));
                break;
            }
            damping *= DAMPING.2;
        }
        let Some((tried, errors)) = better else { break };
        (point, found) = (tried, errors);
        damping = (damping * DAMPING.1).max(1e-6);
    }
    values(&point)
}

/// Change of each error with each coordinate.
fn slopes(
    constants: &[Free],
    point: &[f64],
    found: &[f64],
    shifted: &mut impl FnMut(usize, f64) -> Vec<f64>,
) -> DMatrix<f64> {
    let mut slopes = DMatrix::zeros(found.len(), constants.len());
    for (index, constant) in constants.iter().enumerate() {
        let inside = constant.clamp(point[index] + DIFFERENCE) == point[index] + DIFFERENCE;
        let step = if inside { DIFFERENCE } else { -DIFFERENCE };
        for (row, (moved, error)) in shifted(index, step).iter().zip(found).enumerate() {
            slopes[(row, index)] = (moved - error) / step;
        }
    }
    slopes
}

fn normal_equations(slopes: &DMatrix<f64>, found: &[f64], weights: &[f64]) -> (DMatrix<f64>, DVector<f64>) {
    let weighted = DMatrix::from_fn(slopes.nrows(), slopes.ncols(), |row, column| slopes[(row, column)] * weights[row]);
    (weighted.transpose() * slopes, weighted.transpose() * DVector::from_column_slice(found))
}

fn damped_step(
    constants: &[Free],
    normal: &DMatrix<f64>,
    gradient: &DVector<f64>,
    point: &[f64],
    damping: f64,
) -> Option<Vec<f64>> {
    let mut damped = normal.clone();
    (0..point.len()).for_each(|index| damped[(index, index)] *= 1.0 + damping);
    let step = Cholesky::new(damped)?.solve(gradient);
    let moved = constants.iter().zip(point).zip(step.iter());
    Some(moved.map(|((constant, at), step)| constant.clamp(at - step.clamp(-LONGEST, LONGEST))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_truth_is_found_although_one_run_is_wrong() {
        let truth = [2.0, 0.3];
        let model = |values: &[f64], x: f64| (values[0] * x + values[1] * 10.0).ln();
        let measured: Vec<f64> = (1..20).map(|x| model(&truth, f64::from(x))).collect();
        let constants =
            [Free { prior: 1.5, range: (0.1, 10.0), pull: PULL }, Free { prior: 0.5, range: (0.0, 1.0), pull: PULL }];
        let weights = vec![100.0; measured.len()];
        let found = fit(&constants, &weights, |values| {
            let error =
                |(x, measured): (i32, &f64)| model(values, f64::from(x)) - measured + if x == 7 { 1.0 } else { 0.0 };
            (1..20).zip(&measured).map(error).collect()
        });
        for (found, truth) in found.iter().zip(truth) {
            assert!((found / truth - 1.0).abs() < 0.05, "{found} in place of {truth}");
        }
    }

    #[test]
    fn a_constant_that_no_run_sees_keeps_its_prior() {
        let constants = [Free { prior: 0.7, range: (0.1, 2.0), pull: PULL }];
        assert!((fit(&constants, &[1.0], |_| vec![0.5])[0] - 0.7).abs() < 1e-12);
    }
}
