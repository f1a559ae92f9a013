//! Sums of products on a device.

use kernels::product::{Products, products};
use kernels::strided::{Axis, Loops};
use kernels::{Buffer, Queue};

use crate::operators::contraction;
use crate::tensor::Dims;

/// Puts or adds the sum of products over the dims that the result lacks.
pub fn contract(queue: &Queue, [a, b]: [(&Dims, &Buffer); 2], (dims, c): (&Dims, &Buffer), accumulate: bool) {
    let contraction::Products { rows, columns, summed, outer, inner } = contraction::products(a.0, b.0, dims);
    let axis = |axis: contraction::Axis| Axis { extent: axis.extent, strides: axis.strides };
    let loops = |axes: Vec<contraction::Axis>| Loops::new(&axes.into_iter().map(axis).collect::<Vec<_>>());
    let found = Products {
        rows: axis(rows),
        columns: axis(columns),
        summed: axis(summed),
        outer: loops(outer),
        inner: loops(inner),
    };
    products(queue, &found, [a.1, b.1], c, accumulate);
}
