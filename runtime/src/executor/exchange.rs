//! Conversions between distributions: how a tensor is laid out for a collective, and its result afterwards.

use std::ops::{Deref, DerefMut};

use ir::distribution::SplitAxis;
use ir::graph::DimName;
use ir::program::Conversion;

use crate::communicator::{Error, Group, Pending, Reduction};
use crate::operators::Operand;
use crate::place::RankPlace;
use crate::tensor::{Dims, Format, Memory, Tensor, Values, ValuesMut, bf16, size_of};

/// A conversion of one rank's tensor.
///
/// Along the converted dim a tensor is `[outer, ways, inner]`; a collective needs the parts of ranks one after
/// the other, `[ways, outer, inner]`.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// What is done.
    pub conversion: Conversion,
    /// The axes over which the ranks differ.
    pub axes: Vec<SplitAxis>,
    outer: usize,
    inner: usize,
    ways: usize,
    position: usize,
    result: Vec<(DimName, usize)>,
}

/// A conversion under way.
pub enum Started {
    /// In fp32.
    Single(Pending<Singles>),
    /// In bf16.
    Brain(Pending<Brains>),
    /// It needs no communication.
    Done(Tensor),
}

/// A tensor in fp32 as a slice.
pub struct Singles(pub Tensor);

/// A tensor in bf16 as a slice.
pub struct Brains(pub Tensor);

impl Exchange {
    /// A conversion from local dims to local dims on a rank.
    pub fn new(conversion: Conversion, axes: &[SplitAxis], from: &Dims, to: &Dims, place: &RankPlace) -> Exchange {
        let peers = place.peers(axes);
        let position = peers.iter().position(|rank| *rank == place.rank).unwrap_or(0);
        let part = match conversion {
            Conversion::AllGather(dim) => Some((dim, from)),
            Conversion::ReduceScatter(dim) | Conversion::Slice(dim) => Some((dim, to)),
            Conversion::AllReduceSum
            | Conversion::AllReduceMax
            | Conversion::AllGatherFlat
            | Conversion::ReduceScatterFlat => None,
        };
        let (outer, inner) = part.map_or((1, 1), |(dim, dims)| {
            let at = dims.iter().position(|(name, _)| *name == dim).unwrap_or(0);
            (size_of(&dims[..at]), size_of(&dims[at..]))
        });
        let axes = axes.to_vec();
        Exchange { conversion, axes, outer, inner, ways: peers.len(), position, result: to.to_vec() }
    }

    /// Converts; waits for the other ranks.
    ///
    /// # Errors
    /// What ended the run.
    pub fn convert(&self, group: Option<&Group>, operand: Operand, memory: &Memory) -> Result<Tensor, Error> {
        let mut buffer = self.pack(operand, memory);
        if let Some(group) = group.filter(|_| self.communicates()) {
            match buffer.values_mut() {
                ValuesMut::Single(values) => match self.reduction() {
                    Some((reduction, false)) => group.all_reduce(reduction, values)?,
                    Some((reduction, true)) => group.reduce_scatter(reduction, values)?,
                    None => group.all_gather(values)?,
                },
                ValuesMut::Brain(values) => match self.reduction() {
                    Some((reduction, false)) => group.all_reduce(reduction, values)?,
                    Some((reduction, true)) => group.reduce_scatter(reduction, values)?,
                    None => group.all_gather(values)?,
                },
                ValuesMut::Index(values) => group.all_gather(values)?,
            }
        }
        Ok(self.unpack(buffer, memory))
    }

    /// Starts to convert.
    pub fn start(&self, group: Option<&Group>, operand: Operand, memory: &Memory) -> Started {
        let buffer = self.pack(operand, memory);
        let Some(group) = group.filter(|_| self.communicates()) else { return Started::Done(buffer) };
        match buffer.format() {
            Format::Brain => Started::Brain(match self.reduction() {
                Some((reduction, false)) => group.start_all_reduce(reduction, Brains(buffer)),
                Some((reduction, true)) => group.start_reduce_scatter(reduction, Brains(buffer)),
                None => group.start_all_gather(Brains(buffer)),
            }),
            Format::Single | Format::Index => Started::Single(match self.reduction() {
                Some((reduction, false)) => group.start_all_reduce(reduction, Singles(buffer)),
                Some((reduction, true)) => group.start_reduce_scatter(reduction, Singles(buffer)),
                None => group.start_all_gather(Singles(buffer)),
            }),
        }
    }

    /// Ends a started conversion.
    ///
    /// # Errors
    /// What ended the run.
    pub fn wait(&self, started: Started, memory: &Memory) -> Result<Tensor, Error> {
        let buffer = match started {
            Started::Single(pending) => pending.wait()?.0,
            Started::Brain(pending) => pending.wait()?.0,
            Started::Done(buffer) => buffer,
        };
        Ok(self.unpack(buffer, memory))
    }

    /// A tensor as the conversion gives it, with arbitrary elements.
    pub fn stale_result(&self, memory: &Memory, format: Format) -> Tensor {
        match self.conversion {
            Conversion::ReduceScatterFlat => {
                let range = crate::communicator::part(size_of(&self.result), self.position, self.ways);
                Tensor::stale(memory, &[(DimName::Hidden, range.len())], format)
            }
            _ => Tensor::stale(memory, &self.result, format),
        }
    }

    fn communicates(&self) -> bool {
        !matches!(self.conversion, Conversion::Slice(_)) && self.ways > 1
    }

    /// The reduction, and whether each rank keeps its part only; none for gathers.
    fn reduction(&self) -> Option<(Reduction, bool)> {
        match self.conversion {
            Conversion::AllReduceSum => Some((Reduction::Sum, false)),
            Conversion::AllReduceMax => Some((Reduction::Max, false)),
            Conversion::ReduceScatter(_) | Conversion::ReduceScatterFlat => Some((Reduction::Sum, true)),
            Conversion::AllGather(_) | Conversion::AllGatherFlat | Conversion::Slice(_) => None,
        }
    }

    /// The operand as the collective needs it: parts of ranks one after the other.
    fn pack(&self, operand: Operand, memory: &Memory) -> Tensor {
        let Exchange { outer, inner, ways, position, .. } = *self;
        match self.conversion {
            Conversion::AllReduceSum
            | Conversion::AllReduceMax
            | Conversion::Slice(_)
            | Conversion::ReduceScatterFlat => own(operand, memory),
            Conversion::ReduceScatter(_) if outer == 1 => own(operand, memory),
            Conversion::ReduceScatter(_) => swapped(operand.tensor(), [outer, ways, inner], memory),
            Conversion::AllGather(_) => {
                let part = operand.tensor();
                let mut whole = Tensor::stale(memory, &self.result, part.format());
                copy(part.values(), 0, whole.values_mut(), position * part.len(), part.len());
                whole
            }
            Conversion::AllGatherFlat => {
                let part = operand.tensor();
                let mut whole = Tensor::stale(memory, &self.result, part.format());
                let start = crate::communicator::part(whole.len(), position, ways).start;
                copy(part.values(), 0, whole.values_mut(), start, part.len());
                whole
            }
        }
    }

    /// The result of the collective as the program needs it.
    fn unpack(&self, buffer: Tensor, memory: &Memory) -> Tensor {
        let Exchange { outer, inner, ways, position, .. } = *self;
        match self.conversion {
            Conversion::AllReduceSum | Conversion::AllReduceMax | Conversion::AllGatherFlat => {
                buffer.renamed(&self.result)
            }
            Conversion::AllGather(_) if outer == 1 => buffer.renamed(&self.result),
            Conversion::AllGather(_) => swapped(&buffer, [ways, outer, inner], memory).renamed(&self.result),
            Conversion::ReduceScatter(_) => {
                let mut part = Tensor::stale(memory, &self.result, buffer.format());
                copy(buffer.values(), position * part.len(), part.values_mut(), 0, outer * inner);
                part
            }
            Conversion::Slice(_) => {
                let mut part = Tensor::stale(memory, &self.result, buffer.format());
                for row in 0..outer {
                    let start = (row * ways + position) * inner;
                    copy(buffer.values(), start, part.values_mut(), row * inner, inner);
                }
                part
            }
            Conversion::ReduceScatterFlat => {
                let range = crate::communicator::part(buffer.len(), position, ways);
                let mut part = Tensor::stale(memory, &[(DimName::Hidden, range.len())], buffer.format());
                copy(buffer.values(), range.start, part.values_mut(), 0, range.len());
                part
            }
        }
    }
}

/// The operand's own memory if nobody else needs it, else a copy.
fn own(operand: Operand, memory: &Memory) -> Tensor {
    let mut tensor = operand.into_shared();
    if tensor.is_unshared() {
        return tensor;
    }
    let mut copied = Tensor::stale(memory, &tensor.dims, tensor.format());
    copy(tensor.values(), 0, copied.values_mut(), 0, tensor.len());
    copied
}

/// `[a, b, c]` as `[b, a, c]`.
fn swapped(tensor: &Tensor, extents: [usize; 3], memory: &Memory) -> Tensor {
    let mut result = Tensor::stale(memory, &tensor.dims, tensor.format());
    match (tensor.values(), result.values_mut()) {
        (Values::Single(from), ValuesMut::Single(to)) => swap(from, to, extents),
        (Values::Brain(from), ValuesMut::Brain(to)) => swap(from, to, extents),
        (Values::Index(from), ValuesMut::Index(to)) => swap(from, to, extents),
        _ => unreachable!("the result has the operand's format"),
    }
    result
}

fn swap<T: Copy>(from: &[T], to: &mut [T], [first, second, inner]: [usize; 3]) {
    for (number, row) in from.chunks_exact(inner).enumerate() {
        let at = (number % second * first + number / second) * inner;
        to[at..at + inner].copy_from_slice(row);
    }
}

/// Copies `length` elements of tensors of one format.
pub fn copy(from: Values, start: usize, to: ValuesMut, at: usize, length: usize) {
    match (from, to) {
        (Values::Single(from), ValuesMut::Single(to)) => to[at..at + length].copy_from_slice(&from[start..][..length]),
        (Values::Brain(from), ValuesMut::Brain(to)) => to[at..at + length].copy_from_slice(&from[start..][..length]),
        (Values::Index(from), ValuesMut::Index(to)) => to[at..at + length].copy_from_slice(&from[start..][..length]),
        _ => unreachable!("both tensors have one format"),
    }
}

impl Deref for Singles {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        self.0.singles()
    }
}

impl DerefMut for Singles {
    fn deref_mut(&mut self) -> &mut [f32] {
        self.0.singles_mut()
    }
}

impl Deref for Brains {
    type Target = [bf16];

    fn deref(&self) -> &[bf16] {
        match self.0.values() {
            Values::Brain(values) => values,
            Values::Single(_) | Values::Index(_) => unreachable!("only bf16 tensors are wrapped"),
        }
    }
}

impl DerefMut for Brains {
    fn deref_mut(&mut self) -> &mut [bf16] {
        match self.0.values_mut() {
            ValuesMut::Brain(values) => values,
            ValuesMut::Single(_) | ValuesMut::Index(_) => unreachable!("only bf16 tensors are wrapped"),
        }
    }
}
