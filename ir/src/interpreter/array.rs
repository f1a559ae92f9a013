//! Arrays with named dims, and the part of a whole that a rank holds.

use super::{Coordinate, Degrees, Sizes};
use crate::distribution::{Distribution, Place, SplitAxis};
use crate::graph::{Dim, DimName, Extent};

/// An array; row-major in its dims.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// Dims and extents.
    pub dims: Vec<(DimName, usize)>,
    /// Elements.
    pub data: Vec<f64>,
}

impl Array {
    /// Zeros.
    pub fn zeros(dims: Vec<(DimName, usize)>) -> Array {
        let size = dims.iter().map(|(_, extent)| extent).product();
        Array { dims, data: vec![0.0; size] }
    }

    /// Extent of a dim; 1 if the array lacks it.
    pub fn extent(&self, name: DimName) -> usize {
        self.dims.iter().find(|(dim, _)| *dim == name).map_or(1, |(_, extent)| *extent)
    }

    /// Distance between neighbours along each of `dims`; 0 for dims that the array lacks.
    pub fn strides(&self, dims: &[(DimName, usize)]) -> Vec<usize> {
        let stride = |name: DimName| -> usize {
            match self.dims.iter().position(|(dim, _)| *dim == name) {
                Some(place) => self.dims[place + 1..].iter().map(|(_, extent)| extent).product(),
                None => 0,
            }
        };
        dims.iter().map(|(name, _)| stride(*name)).collect()
    }

    /// The part `index` of `ways` equal parts along a dim.
    pub fn part(&self, name: DimName, index: usize, ways: usize) -> Array {
        let dims = self.dims.iter().map(|(dim, extent)| (*dim, if *dim == name { extent / ways } else { *extent }));
        let mut part = Array::zeros(dims.collect());
        let whole_strides = self.strides(&part.dims);
        let place = part.dims.iter().position(|(dim, _)| *dim == name);
        let offset = place.map_or(0, |place| index * part.dims[place].1 * whole_strides[place]);
        let dims = part.dims.clone();
        for_each_index(&dims, &[&whole_strides], |position, offsets| {
            part.data[position] = self.data[offset + offsets[0]]
        });
        part
    }

    /// Parts joined along a dim, in order.
    pub fn join(parts: &[&Array], name: DimName) -> Array {
        let dims =
            parts[0].dims.iter().map(|(dim, extent)| (*dim, if *dim == name { extent * parts.len() } else { *extent }));
        let mut whole = Array::zeros(dims.collect());
        for (index, part) in parts.iter().enumerate() {
            let strides = whole.strides(&part.dims);
            let place = part.dims.iter().position(|(dim, _)| *dim == name);
            let offset = place.map_or(0, |place| index * part.dims[place].1 * strides[place]);
            for_each_index(&part.dims, &[&strides], |position, offsets| {
                whole.data[offset + offsets[0]] = part.data[position];
            });
        }
        whole
    }
}

/// Calls `f` for each index of `dims` in row-major order with the position and, for each list of strides,
/// the offset it gives.
pub fn for_each_index(dims: &[(DimName, usize)], strides: &[&[usize]], mut f: impl FnMut(usize, &[usize])) {
    let total: usize = dims.iter().map(|(_, extent)| extent).product();
    let mut index = vec![0usize; dims.len()];
    let mut offsets = vec![0usize; strides.len()];
    for position in 0..total {
        f(position, &offsets);
        for place in (0..dims.len()).rev() {
            index[place] += 1;
            offsets.iter_mut().zip(strides).for_each(|(offset, strides)| *offset += strides[place]);
            if index[place] < dims[place].1 {
                break;
            }
            offsets.iter_mut().zip(strides).for_each(|(offset, strides)| *offset -= strides[place] * dims[place].1);
            index[place] = 0;
        }
    }
}

impl Sizes {
    /// Whole extent of a dim; a micro-batch counts over all replicas.
    pub fn whole(&self, dim: &Dim) -> usize {
        match dim.extent {
            Extent::MicroBatch => self.micro_batch * self.degrees.data,
            Extent::Sequence => self.sequence,
            Extent::Fixed(size) => size as usize,
        }
    }
}

/// Ranks along an axis.
pub fn degree(degrees: Degrees, axis: SplitAxis) -> usize {
    match axis {
        SplitAxis::Data => degrees.data,
        SplitAxis::Tensor => degrees.tensor,
        SplitAxis::Query => degrees.query,
    }
}

/// A rank's index along an axis.
pub fn index_on(coordinate: Coordinate, axis: SplitAxis) -> usize {
    match axis {
        SplitAxis::Data => coordinate.data,
        SplitAxis::Tensor => coordinate.tensor,
        SplitAxis::Query => coordinate.query,
    }
}

/// In how many parts a dim is split, and which one a rank holds.
pub fn part_of(dim: DimName, distribution: Distribution, degrees: Degrees, coordinate: Coordinate) -> (usize, usize) {
    let split = SplitAxis::ALL.into_iter().filter(|axis| distribution.on(*axis) == Place::Sharded(dim));
    split.fold((1, 0), |(ways, index), axis| {
        (ways * degree(degrees, axis), index * degree(degrees, axis) + index_on(coordinate, axis))
    })
}

/// Extents of a rank's part.
pub fn local_dims(shape: &[(DimName, usize)], distribution: Distribution, degrees: Degrees) -> Vec<(DimName, usize)> {
    let origin = Coordinate { data: 0, tensor: 0, query: 0 };
    let local = |(name, extent): &(DimName, usize)| (*name, extent / part_of(*name, distribution, degrees, origin).0);
    shape.iter().map(local).collect()
}

/// A rank's part of a whole array, `Flat` apart.
pub fn local_part(whole: &Array, distribution: Distribution, degrees: Degrees, coordinate: Coordinate) -> Array {
    let dims = whole.dims.clone();
    dims.iter().fold(whole.clone(), |part, (name, _)| {
        let (ways, index) = part_of(*name, distribution, degrees, coordinate);
        part.part(*name, index, ways)
    })
}

/// The part `index` of `ways` equal parts of the elements in order, padded with zeros.
pub fn flat_part(array: &Array, index: usize, ways: usize) -> Array {
    let size = array.data.len().div_ceil(ways);
    let element = |position: usize| array.data.get(position).copied().unwrap_or(0.0);
    let data = (index * size..(index + 1) * size).map(element).collect();
    Array { dims: Vec::new(), data }
}
