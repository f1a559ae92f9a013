//! Loops over pieces of a result, shared among threads where that pays.
//!
//! What a piece holds depends on shapes only, and sums are taken in an order that does too, so that results
//! are the same bits for any number of threads.

use rayon::prelude::*;

use crate::tensor::ValuesMut;

/// Elements of a piece: small enough for the second-level cache together with the operands' pieces.
pub const PIECE: usize = 1 << 14;

/// Whether so many elements are shared among threads.
pub fn is_shared(elements: usize) -> bool {
    elements >= 2 * PIECE && rayon::current_num_threads() > 1
}

/// Calls `f` for each index below `count`, on all threads if `elements`, the work of all, is large.
pub fn for_each(count: usize, elements: usize, f: impl Fn(usize) + Sync) {
    if count < 2 || !is_shared(elements) {
        (0..count).for_each(f);
    } else {
        (0..count).into_par_iter().for_each(&f);
    }
}

/// Calls `f` for each piece of the values with its first element's place. Pieces hold whole rows of `width`.
pub fn for_each_piece(values: ValuesMut, width: usize, f: impl Fn(usize, ValuesMut) + Sync) {
    let elements = values.len();
    let size = (PIECE / width).max(1) * width;
    let pieces = values.pieces(size).into_iter().enumerate();
    if !is_shared(elements) {
        pieces.for_each(|(index, piece)| f(index * size, piece));
    } else {
        let pieces: Vec<_> = pieces.collect();
        pieces.into_par_iter().for_each(|(index, piece)| f(index * size, piece));
    }
}

/// Gives what `f` gives for each index below `count`, in order.
pub fn map<T: Send>(count: usize, elements: usize, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
    if count < 2 || !is_shared(elements) {
        (0..count).map(f).collect()
    } else {
        (0..count).into_par_iter().map(&f).collect()
    }
}
