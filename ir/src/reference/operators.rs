//! Matrices, and the operators of the reference that work on every token alone, forward and backward.
//!
//! A backward function takes the gradient of its operator's output, adds the gradients of the
//! operator's parameters to `gradients`, and returns the gradient of the operator's input.

use super::parameters::Parameters;
use crate::model::{ModelSpec, NormKind};

/// Rows of equal length, row-major; activations have one row for each token.
#[derive(Clone, Debug)]
pub(super) struct Matrix {
    pub columns: usize,
    pub values: Vec<f64>,
}

impl Matrix {
    pub fn zeros(rows: usize, columns: usize) -> Matrix {
        Matrix { columns, values: vec![0.0; rows * columns] }
    }

    pub fn rows(&self) -> usize {
        self.values.len() / self.columns
    }

    pub fn row(&self, row: usize) -> &[f64] {
        &self.values[row * self.columns..(row + 1) * self.columns]
    }

    pub fn row_mut(&mut self, row: usize) -> &mut [f64] {
        &mut self.values[row * self.columns..(row + 1) * self.columns]
    }
}

/// left · right.
pub(super) fn multiply(left: &Matrix, right: &Matrix) -> Matrix {
    assert_eq!(left.columns, right.rows(), "the factors' inner dims differ");
    let mut product = Matrix::zeros(left.rows(), right.columns);
    for row in 0..left.rows() {
        for (inner, factor) in left.row(row).iter().enumerate() {
            for (sum, value) in product.row_mut(row).iter_mut().zip(right.row(inner)) {
                *sum += factor * value;
            }
        }
    }
    product
}

/// Rows become columns.
pub(super) fn transpose(matrix: &Matrix) -> Matrix {
    let mut transposed = Matrix::zeros(matrix.columns, matrix.rows());
    for row in 0..matrix.rows() {
        for (column, value) in matrix.row(row).iter().enumerate() {
            transposed.row_mut(column)[row] = *value;
        }
    }
    transposed
}

/// `function` of elements at the same place.
pub(super) fn combine(left: &Matrix, right: &Matrix, function: impl Fn(f64, f64) -> f64) -> Matrix {
    assert_eq!((left.rows(), left.columns), (right.rows(), right.columns), "the shapes differ");
    let values = left.values.iter().zip(&right.values).map(|(left, right)| function(*left, *right)).collect();
    Matrix { columns: left.columns, values }
}

/// left + right.
pub(super) fn add(left: &Matrix, right: &Matrix) -> Matrix {
    combine(left, right, |left, right| left + right)
}

/// left[i] += right[i].
pub(super) fn accumulate(left: &mut [f64], right: &[f64]) {
    assert_eq!(left.len(), right.len(), "the lengths differ");
    left.iter_mut().zip(right).for_each(|(left, right)| *left += right);
}

/// The gradient of a parameter, to add to.
pub(super) fn gradient_of<'a>(gradients: &'a mut Parameters, key: &str) -> &'a mut [f64] {
    gradients.get_mut(key).unwrap_or_else(|| panic!("no parameter is called {key}"))
}

/// A parameter as a matrix of the given number of rows.
pub(super) fn parameter_matrix(parameters: &Parameters, key: &str, rows: usize) -> Matrix {
    let values = parameters[key].clone();
    Matrix { columns: values.len() / rows, values }
}

/// x · W + b, the bias where there is one.
pub(super) fn linear(parameters: &Parameters, name: &str, input: &Matrix) -> Matrix {
    let weight = parameter_matrix(parameters, &format!("{name}.weight"), input.columns);
    let mut output = multiply(input, &weight);
    if let Some(bias) = parameters.get(&format!("{name}.bias")) {
        (0..output.rows()).for_each(|row| accumulate(output.row_mut(row), bias));
    }
    output
}

/// dx = dy · Wᵀ, dW = xᵀ · dy, db = sum of dy over tokens.
pub(super) fn linear_backward(
    parameters: &Parameters,
    gradients: &mut Parameters,
    name: &str,
    input: &Matrix,
    output_gradient: &Matrix,
) -> Matrix {
    let key = format!("{name}.weight");
    let weight = parameter_matrix(parameters, &key, input.columns);
    accumulate(gradient_of(gradients, &key), &multiply(&transpose(input), output_gradient).values);
    if let Some(gradient) = gradients.get_mut(&format!("{name}.bias")) {
        (0..output_gradient.rows()).for_each(|row| accumulate(gradient, output_gradient.row(row)));
    }
    multiply(output_gradient, &transpose(&weight))
}

/// LayerNorm: (x − mean) / √(variance + ε) · w + b. RMSNorm: x / √(mean of x² + ε) · w.
pub(super) fn norm(parameters: &Parameters, model: &ModelSpec, name: &str, input: &Matrix) -> Matrix {
    let weight = &parameters[&format!("{name}.weight")];
    let mut output = Matrix::zeros(input.rows(), input.columns);
    for row in 0..input.rows() {
        let (normalised, _) = normalise(model, input.row(row));
        for (index, value) in normalised.iter().enumerate() {
            output.row_mut(row)[index] = value * weight[index];
        }
        if model.norm == NormKind::LayerNorm {
            accumulate(output.row_mut(row), &parameters[&format!("{name}.bias")]);
        }
    }
    output
}

/// With n the normalised row, d its deviation and g = dy · w:
/// dx = (g − mean(g) − n · mean(g · n)) / d, where RMSNorm has no mean(g).
pub(super) fn norm_backward(
    parameters: &Parameters,
    gradients: &mut Parameters,
    model: &ModelSpec,
    name: &str,
    input: &Matrix,
    output_gradient: &Matrix,
) -> Matrix {
    let weight = &parameters[&format!("{name}.weight")];
    let mut input_gradient = Matrix::zeros(input.rows(), input.columns);
    for row in 0..input.rows() {
        let (normalised, deviation) = normalise(model, input.row(row));
        let upstream = output_gradient.row(row);
        accumulate(gradient_of(gradients, &format!("{name}.weight")), &products(upstream, &normalised));
        if model.norm == NormKind::LayerNorm {
            accumulate(gradient_of(gradients, &format!("{name}.bias")), upstream);
        }
        let inner = products(upstream, weight);
        let centre = match model.norm {
            NormKind::LayerNorm => mean(&inner),
            NormKind::RmsNorm => 0.0,
        };
        let along = mean(&products(&inner, &normalised));
        for (index, value) in input_gradient.row_mut(row).iter_mut().enumerate() {
            *value = (inner[index] - centre - normalised[index] * along) / deviation;
        }
    }
    input_gradient
}

/// The normalised row and the deviation that it was divided by.
fn normalise(model: &ModelSpec, row: &[f64]) -> (Vec<f64>, f64) {
    let centre = match model.norm {
        NormKind::LayerNorm => mean(row),
        NormKind::RmsNorm => 0.0,
    };
    let centred: Vec<f64> = row.iter().map(|value| value - centre).collect();
    let deviation = (mean(&products(&centred, &centred)) + model.norm_epsilon).sqrt();
    (centred.iter().map(|value| value / deviation).collect(), deviation)
}

fn products(left: &[f64], right: &[f64]) -> Vec<f64> {
    left.iter().zip(right).map(|(left, right)| left * right).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// exp(x − max) / sum of exp(x − max).
pub(super) fn softmax(scores: &[f64]) -> Vec<f64> {
    let maximum = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exponents: Vec<f64> = scores.iter().map(|score| (score - maximum).exp()).collect();
    let sum: f64 = exponents.iter().sum();
    exponents.iter().map(|exponent| exponent / sum).collect()
}
