//! Collectives as loops over the arrays of all ranks of a stage.

use super::array::{Array, flat_part, index_on, local_dims};
use super::{Coordinate, Degrees};
use crate::distribution::{Distribution, SplitAxis};
use crate::graph::DimName;
use crate::program::Conversion;

/// Groups of ranks that differ along the axes, members in order.
pub fn groups(degrees: Degrees, axes: &[SplitAxis]) -> Vec<Vec<usize>> {
    let coordinates: Vec<Coordinate> = degrees.coordinates().collect();
    let rest = |coordinate: &Coordinate| -> Vec<usize> {
        SplitAxis::ALL.into_iter().filter(|axis| !axes.contains(axis)).map(|axis| index_on(*coordinate, axis)).collect()
    };
    let mut groups: Vec<(Vec<usize>, Vec<usize>)> = Vec::new();
    for (rank, coordinate) in coordinates.iter().enumerate() {
        let key = rest(coordinate);
        match groups.iter_mut().find(|(seen, _)| *seen == key) {
            Some((_, members)) => members.push(rank),
            None => groups.push((key, vec![rank])),
        }
    }
    groups.into_iter().map(|(_, members)| members).collect()
}

/// Converts the arrays of all ranks; `shape` and `to` are the result's whole extents and distribution.
pub fn convert(
    conversion: Conversion,
    axes: &[SplitAxis],
    from: &[Array],
    shape: &[(DimName, usize)],
    to: Distribution,
    degrees: Degrees,
) -> Vec<Array> {
    let mut results = from.to_vec();
    for members in groups(degrees, axes) {
        let inputs: Vec<&Array> = members.iter().map(|rank| &from[*rank]).collect();
        let ways = members.len();
        for (index, rank) in members.iter().enumerate() {
            results[*rank] = match conversion {
                Conversion::AllReduceSum => fold(&inputs, |a, b| a + b),
                Conversion::AllReduceMax => fold(&inputs, f64::max),
                Conversion::AllGather(dim) => Array::join(&inputs, dim),
                Conversion::ReduceScatter(dim) => fold(&inputs, |a, b| a + b).part(dim, index, ways),
                Conversion::Slice(dim) => inputs[index].part(dim, index, ways),
                Conversion::AllGatherFlat => unflatten(&inputs, local_dims(shape, to, degrees)),
                Conversion::ReduceScatterFlat => flat_part(&fold(&inputs, |a, b| a + b), index, ways),
            };
        }
    }
    results
}

/// Elementwise combination in the order of ranks, so that every rank has the same bits.
fn fold(inputs: &[&Array], f: impl Fn(f64, f64) -> f64) -> Array {
    let mut result = inputs[0].clone();
    for input in &inputs[1..] {
        result.data.iter_mut().zip(&input.data).for_each(|(a, b)| *a = f(*a, *b));
    }
    result
}

/// Parts of the elements in order, joined and cut to the array's size.
pub fn unflatten(parts: &[&Array], dims: Vec<(DimName, usize)>) -> Array {
    let size = dims.iter().map(|(_, extent)| extent).product();
    let data: Vec<f64> = parts.iter().flat_map(|part| part.data.iter().copied()).take(size).collect();
    Array { dims, data }
}
