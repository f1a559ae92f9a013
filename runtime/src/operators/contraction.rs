//! Sums of products over named dims, as products of strided matrices.
//!
//! Dims fall into four classes: of both operands and the result (batches), of one operand and the result
//! (rows and columns), and of no result (summed). Neighbours in one class that are neighbours in memory are
//! one dim; the longest of each class becomes the matrices' extent, what is left is looped over.

use super::matrix::{Extents, Matrix, MatrixMut, is_in_blocks, multiply, multiply_many, multiply_rounded, readable};
use super::{Accumulation, ResultShape, in_format};
use crate::tensor::{Dims, Format, Memory, Tensor, Values, ValuesMut, strides};

/// A loop over a dim, or over several that are neighbours in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Axis {
    pub extent: usize,
    /// Distance between neighbours in the first operand, the second and the result; 0 where the dim lacks.
    pub strides: [usize; 3],
}

/// A contraction as matrix products.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Products {
    pub rows: Axis,
    pub columns: Axis,
    pub summed: Axis,
    /// Loops over products that write different elements.
    pub outer: Vec<Axis>,
    /// Loops over products that add to the same elements.
    pub inner: Vec<Axis>,
}

/// Sum of products of two tensors over the dims that the result lacks.
pub fn contraction(a: &Tensor, b: &Tensor, result: &ResultShape) -> Tensor {
    let products = products(&a.dims, &b.dims, result.dims);
    if result.format == Format::Brain && products.inner.is_empty() && is_in_blocks(products.layout()) {
        return rounded_contraction(&products, a, b, result);
    }
    let mut target = Tensor::stale(result.memory, result.dims, Format::Single);
    contract_into(&mut target, a, b, result.memory, Accumulation::Set);
    in_format(target, result)
}

/// A contraction whose result is bf16 without ever being fp32 as a whole.
fn rounded_contraction(products: &Products, a: &Tensor, b: &Tensor, result: &ResultShape) -> Tensor {
    let mut target = Tensor::stale(result.memory, result.dims, Format::Brain);
    let ValuesMut::Brain(into) = target.values_mut() else { unreachable!("the target is bf16") };
    run(products, a.values(), b.values(), into, |extents, a, b, into, _, threads| {
        multiply_rounded(extents, a, b, into, threads);
    });
    target
}

/// Puts or adds the sum of products over the dims that `into` lacks.
pub fn contract_into(into: &mut Tensor, a: &Tensor, b: &Tensor, memory: &Memory, how: Accumulation) {
    let products = products(&a.dims, &b.dims, &into.dims);
    let layout = products.layout();
    let (a, b) = (readable(a, layout, memory), readable(b, layout, memory));
    run(&products, a.values(), b.values(), into.singles_mut(), |extents, a, b, into, more, threads| {
        multiply(extents, a, b, into, how == Accumulation::Add || more, threads);
    });
}

/// Calls `one` for each product with its operands, its place in the result, whether it adds to what an earlier one
/// put there, and whether to use all threads.
fn run<E: Send + Sync + Copy>(
    products: &Products,
    a: Values,
    b: Values,
    into: &mut [E],
    one: impl Fn(Extents, Matrix, Matrix, MatrixMut<E>, bool, bool) + Sync,
) {
    let Products { rows, columns, summed, outer, inner } = products;
    let extents = Extents { rows: rows.extent, columns: columns.extent, summed: summed.extent };
    let into = MatrixMut::new(into, rows.strides[2], columns.strides[2]);
    let count: usize = outer.iter().map(|axis| axis.extent).product();
    let sums: usize = inner.iter().map(|axis| axis.extent).product();
    multiply_many(count, extents, |index: usize, threads: bool| {
        let [a_start, b_start, start] = offsets(outer, index);
        for sum in 0..sums {
            let [a_more, b_more, _] = offsets(inner, sum);
            let a = Matrix::of(a, a_start + a_more, rows.strides[0], summed.strides[0]);
            let b = Matrix::of(b, b_start + b_more, summed.strides[1], columns.strides[1]);
            one(extents, a, b, into.at(start), sum > 0, threads);
        }
    });
}

impl Products {
    /// Distances between rows and between columns of the result.
    fn layout(&self) -> [usize; 2] {
        [self.rows.strides[2], self.columns.strides[2]]
    }
}

/// Where the product of a combined index starts in the operands and the result.
fn offsets(axes: &[Axis], mut index: usize) -> [usize; 3] {
    let mut offsets = [0; 3];
    for axis in axes.iter().rev() {
        let step = index % axis.extent;
        offsets.iter_mut().zip(axis.strides).for_each(|(offset, stride)| *offset += step * stride);
        index /= axis.extent;
    }
    offsets
}

/// The contraction of tensors with these dims.
pub(crate) fn products(a: &Dims, b: &Dims, result: &Dims) -> Products {
    let mut all = result.to_vec();
    for dim in a.iter().chain(b) {
        if !all.iter().any(|(name, _)| *name == dim.0) {
            all.push(*dim);
        }
    }
    let (a, b, c) = (strides(a, &all), strides(b, &all), strides(result, &all));
    let axes = all.iter().enumerate().filter(|(_, (_, extent))| *extent != 1);
    let axes = axes.map(|(at, (_, extent))| Axis { extent: *extent, strides: [a[at], b[at], c[at]] });
    let (mut rows, mut columns, mut summed, mut batches) = (vec![], vec![], vec![], vec![]);
    for axis in axes {
        match axis.strides {
            [_, _, 0] => summed.push(axis),
            [_, 0, _] => rows.push(axis),
            [0, _, _] => columns.push(axis),
            _ => batches.push(axis),
        }
    }
    let (rows, more_rows) = longest(merge(rows, 2));
    let (columns, more_columns) = longest(merge(columns, 2));
    let (summed, inner) = longest(merge(summed, 0));
    let outer = [merge(batches, 2), more_rows, more_columns].concat();
    Products { rows, columns, summed, outer, inner }
}

/// Joins dims that are neighbours in every tensor; `by` says whose order counts.
fn merge(mut axes: Vec<Axis>, by: usize) -> Vec<Axis> {
    axes.sort_by_key(|axis| std::cmp::Reverse((axis.strides[by], axis.strides[1])));
    let mut merged: Vec<Axis> = Vec::new();
    for axis in axes {
        match merged.last_mut() {
            Some(last) if last.strides == axis.strides.map(|stride| stride * axis.extent) => {
                *last = Axis { extent: last.extent * axis.extent, strides: axis.strides };
            }
            _ => merged.push(axis),
        }
    }
    merged
}

/// The longest axis, and the others.
fn longest(mut axes: Vec<Axis>) -> (Axis, Vec<Axis>) {
    match (0..axes.len()).max_by_key(|place| axes[*place].extent) {
        Some(place) => (axes.remove(place), axes),
        None => (Axis { extent: 1, strides: [0; 3] }, axes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::graph::DimName::{Hidden, KeySequence, KeyValueHeads, MicroBatch, QueriesPerKeyValue, Sequence, ValueDim};

    #[test]
    fn projections_are_one_product() {
        let (input, weight) =
            ([(MicroBatch, 2), (Sequence, 3), (Hidden, 5)], [(Hidden, 5), (KeyValueHeads, 2), (ValueDim, 7)]);
        let output = [(MicroBatch, 2), (Sequence, 3), (KeyValueHeads, 2), (ValueDim, 7)];
        let rows = [
            (products(&input, &weight, &output), [6, 14, 5]),
            (products(&output, &weight, &input), [6, 5, 14]),
            (products(&input, &output, &weight), [5, 14, 6]),
        ];
        for (products, extents) in rows {
            let found = [products.rows, products.columns, products.summed].map(|axis| axis.extent);
            assert_eq!((found, products.outer.len(), products.inner.len()), (extents, 0, 0));
        }
    }

    #[test]
    fn grouped_queries_are_a_loop() {
        let weights = [(MicroBatch, 2), (KeyValueHeads, 3), (QueriesPerKeyValue, 4), (Sequence, 9), (KeySequence, 9)];
        let values = [(MicroBatch, 2), (KeySequence, 9), (KeyValueHeads, 3), (ValueDim, 7)];
        let context = [(MicroBatch, 2), (Sequence, 9), (KeyValueHeads, 3), (QueriesPerKeyValue, 4), (ValueDim, 7)];
        let forward = products(&weights, &values, &context);
        assert_eq!(forward.outer.iter().map(|axis| axis.extent).product::<usize>(), 24);
        assert_eq!([forward.rows.extent, forward.columns.extent, forward.summed.extent], [9, 7, 9]);
        let gradient = products(&weights, &context, &values);
        assert_eq!(gradient.inner.iter().map(|axis| axis.extent).product::<usize>(), 4);
    }
}
