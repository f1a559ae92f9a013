//! A rank's local part of a value: named dims over a burn-flex buffer in one of three number formats.
//!
//! Elements are row-major in the dims. Storage is shared by clones and written only while nobody else
//! holds it, so that a parameter is loaded and a value renamed without a copy.

mod memory;
mod staging;
mod values;

use std::sync::Arc;

use ir::graph::DimName;

pub use burn::tensor::bf16;
pub use memory::Memory;
pub use staging::StepKind;
pub use values::{Values, ValuesMut};
pub(crate) use values::{rounded, widened};

use memory::Storage;

/// Names and local extents of dims, outermost first.
pub type Dims = [(DimName, usize)];

/// Number format of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// fp32.
    Single,
    /// bf16.
    Brain,
    /// Unsigned 32-bit integers: token ids, targets, positions.
    Index,
}

/// A rank's local part of a value.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Dims, outermost first.
    pub dims: Vec<(DimName, usize)>,
    storage: Arc<Storage>,
}

impl Format {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Format::Single | Format::Index => 4,
            Format::Brain => 2,
        }
    }
}

impl Tensor {
    /// A tensor whose elements are those of whatever held the memory before.
    pub fn stale(memory: &Memory, dims: &Dims, format: Format) -> Tensor {
        Tensor { dims: dims.to_vec(), storage: Arc::new(memory.allocate(size_of(dims), format)) }
    }

    /// Zeros.
    pub fn zeros(memory: &Memory, dims: &Dims, format: Format) -> Tensor {
        let mut tensor = Tensor::stale(memory, dims, format);
        #[cfg(feature = "kernels")]
        if tensor.is_on_device() {
            tensor.clear();
            return tensor;
        }
        match tensor.values_mut() {
            ValuesMut::Single(values) => values.fill(0.0),
            ValuesMut::Brain(values) => values.fill(bf16::ZERO),
            ValuesMut::Index(values) => values.fill(0),
        }
        tensor
    }

    /// Numbers given in fp32, rounded to the format; `Format::Index` takes their integer parts.
    ///
    /// # Panics
    /// If there are not as many as the dims say.
    pub fn from_numbers(memory: &Memory, dims: &Dims, format: Format, numbers: &[f32]) -> Tensor {
        assert_eq!(numbers.len(), size_of(dims), "numbers and dims agree");
        let mut tensor = Tensor::stale(memory, dims, format);
        match tensor.values_mut() {
            ValuesMut::Single(values) => values.copy_from_slice(numbers),
            ValuesMut::Brain(values) => {
                values.iter_mut().zip(numbers).for_each(|(value, number)| *value = bf16::from_f32(*number));
            }
            ValuesMut::Index(values) => {
                values.iter_mut().zip(numbers).for_each(|(value, number)| *value = *number as u32)
            }
        }
        tensor
    }

    /// Index data.
    ///
    /// # Panics
    /// If there are not as many ids as the dims say.
    pub fn from_ids(memory: &Memory, dims: &Dims, ids: &[u32]) -> Tensor {
        let mut tensor = Tensor::stale(memory, dims, Format::Index);
        #[cfg(feature = "kernels")]
        if tensor.is_on_device() {
            tensor.write(bytemuck::cast_slice(ids).to_vec());
            return tensor;
        }
        if let ValuesMut::Index(values) = tensor.values_mut() {
            values.copy_from_slice(ids);
        }
        tensor
    }

    /// The elements in fp32.
    pub fn to_numbers(&self) -> Vec<f32> {
        match self.values() {
            Values::Single(values) => values.to_vec(),
            Values::Brain(values) => values.iter().map(|value| value.to_f32()).collect(),
            Values::Index(values) => values.iter().map(|value| *value as f32).collect(),
        }
    }

    /// The same elements under other dims of the same size.
    pub fn renamed(mut self, dims: &Dims) -> Tensor {
        debug_assert_eq!(size_of(dims), self.len(), "a renaming keeps the size");
        self.dims = dims.to_vec();
        self
    }

    /// Number format.
    pub fn format(&self) -> Format {
        match &*self.storage {
            Storage::Host(buffer) => buffer.format(),
            #[cfg(feature = "kernels")]
            Storage::Device(placed) => placed.format,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match &*self.storage {
            Storage::Host(buffer) => buffer.len(),
            #[cfg(feature = "kernels")]
            Storage::Device(placed) => placed.len,
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Extent of a dim; 1 if the tensor lacks it.
    pub fn extent(&self, name: DimName) -> usize {
        self.dims.iter().find(|(dim, _)| *dim == name).map_or(1, |(_, extent)| *extent)
    }

    /// Whether no other tensor shares the storage.
    pub fn is_unshared(&mut self) -> bool {
        Arc::get_mut(&mut self.storage).is_some()
    }

    /// The elements.
    ///
    /// # Panics
    /// If they are in a device's memory.
    pub fn values(&self) -> Values<'_> {
        match &*self.storage {
            Storage::Host(buffer) => buffer.values(),
            #[cfg(feature = "kernels")]
            Storage::Device(_) => unreachable!("what the host reads is copied to it first"),
        }
    }

    /// The elements, to be written.
    ///
    /// # Panics
    /// If another tensor shares the storage, or it is in a device's memory.
    pub fn values_mut(&mut self) -> ValuesMut<'_> {
        match Arc::get_mut(&mut self.storage).expect("only unshared storage is written") {
            Storage::Host(buffer) => buffer.values_mut(),
            #[cfg(feature = "kernels")]
            Storage::Device(_) => unreachable!("what the host writes is copied to the device afterwards"),
        }
    }

    /// The elements of a tensor in fp32.
    ///
    /// # Panics
    /// If the format is another one.
    pub fn singles(&self) -> &[f32] {
        match self.values() {
            Values::Single(values) => values,
            Values::Brain(_) | Values::Index(_) => unreachable!("the caller checked the format"),
        }
    }

    /// The elements of a tensor in fp32, to be written.
    ///
    /// # Panics
    /// If the format is another one, or another tensor shares the storage.
    pub fn singles_mut(&mut self) -> &mut [f32] {
        match self.values_mut() {
            ValuesMut::Single(values) => values,
            ValuesMut::Brain(_) | ValuesMut::Index(_) => unreachable!("the caller checked the format"),
        }
    }

    /// The elements of a tensor of ids.
    ///
    /// # Panics
    /// If the format is another one.
    pub fn ids(&self) -> &[u32] {
        match self.values() {
            Values::Index(values) => values,
            Values::Single(_) | Values::Brain(_) => unreachable!("the compiler gives ids where ids are read"),
        }
    }
}

/// Number of elements of dims.
pub fn size_of(dims: &Dims) -> usize {
    dims.iter().map(|(_, extent)| extent).product()
}

/// Distance between neighbours along each of `dims` in a tensor with `own` dims; 0 for dims that it lacks.
pub fn strides(own: &Dims, dims: &Dims) -> Vec<usize> {
    let stride = |name: DimName| match own.iter().position(|(dim, _)| *dim == name) {
        Some(place) => size_of(&own[place + 1..]),
        None => 0,
    };
    dims.iter().map(|(name, _)| stride(*name)).collect()
}
