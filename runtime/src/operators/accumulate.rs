//! Sums of gradients in fp32: values added to what has been accumulated, and the operators whose results
//! need no tensor of their own on the way.

use super::contraction::contract_into;
use super::rows::add_rows;
use super::{ResultShape, parallel, vector};
use crate::tensor::{Memory, Tensor, ValuesMut};

/// What becomes of the numbers that a result meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accumulation {
    /// They are replaced.
    Set,
    /// The result is added to them.
    Add,
}

/// Puts or adds a value's numbers into fp32 numbers of the same size.
///
/// # Panics
/// If `into` is not fp32, has another size, or its storage is shared.
pub fn accumulate(into: &mut Tensor, value: &Tensor, how: Accumulation) {
    assert_eq!(into.len(), value.len(), "a gradient has the size of its accumulator");
    #[cfg(feature = "kernels")]
    if let Some(device) = into.device() {
        return crate::device::accumulate(device, into, value, how);
    }
    let values = value.values();
    parallel::for_each_piece(ValuesMut::Single(into.singles_mut()), 1, |start, mut piece| {
        let all = 0..piece.len();
        piece.update(all.clone(), &mut Vec::new(), |sums| match how {
            Accumulation::Set => values.copy_to(start, sums),
            Accumulation::Add => {
                let mut scratch = Vec::new();
                vector::add(sums, values.read(start..start + all.end, &mut scratch));
            }
        });
    });
}

/// [`ir::program::Op::Contraction`] put or added into fp32 numbers: how a weight's gradient reaches its
/// accumulator without a tensor between. The dims of `into` are those of the result.
///
/// # Panics
/// If `into` is not fp32, or its storage is shared.
pub fn accumulate_contraction(into: &mut Tensor, a: &Tensor, b: &Tensor, memory: &Memory, how: Accumulation) {
    #[cfg(feature = "kernels")]
    if let Some(device) = into.device() {
        return crate::device::accumulate_contraction(device, into, a, b, how);
    }
    contract_into(into, a, b, memory, how);
}

/// [`ir::program::Op::LookupGradient`] put or added into fp32 numbers. The dims of `into` are those of the
/// table; of `result` the place counts.
///
/// # Panics
/// If `into` is not fp32, or its storage is shared.
pub fn accumulate_lookup(into: &mut Tensor, ids: &Tensor, gradient: &Tensor, result: &ResultShape, how: Accumulation) {
    #[cfg(feature = "kernels")]
    if let Some(device) = into.device() {
        return crate::device::accumulate_lookup(device, into, [ids, gradient], &result.place, how);
    }
    if how == Accumulation::Set {
        into.singles_mut().fill(0.0);
    }
    add_rows(ids, gradient, into, result);
}
