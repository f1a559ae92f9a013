//! Numbers that collectives reduce, and the order in which they are summed.

use bytemuck::Pod;
use half::bf16;
use half::slice::HalfFloatSliceExt;

/// Elements summed at a time: two buffers of wide numbers that stay in the nearest cache.
const BLOCK: usize = 1024;

/// How a reduction combines the elements of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Their sum, in the order of ranks of the group.
    Sum,
    /// The largest.
    Max,
}

/// A number that can be reduced. Implementations widen exactly, and round once when they narrow.
pub trait Element: Pod + Send + Sync {
    /// The type in which sums are formed.
    type Wide: Copy + Default + PartialOrd + std::ops::AddAssign;

    /// Widens elements; both slices have one length.
    fn widen(from: &[Self], to: &mut [Self::Wide]);

    /// Rounds to elements; both slices have one length.
    fn narrow(from: &[Self::Wide], to: &mut [Self]);
}

impl Element for f32 {
    type Wide = f32;

    fn widen(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    fn narrow(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
}

impl Element for f64 {
    type Wide = f64;

    fn widen(from: &[f64], to: &mut [f64]) {
        to.copy_from_slice(from);
    }

    fn narrow(from: &[f64], to: &mut [f64]) {
        to.copy_from_slice(from);
    }
}

impl Element for bf16 {
    type Wide = f32;

    fn widen(from: &[bf16], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    fn narrow(from: &[f32], to: &mut [bf16]) {
        to.convert_from_f32_slice(from);
    }
}

/// Replaces `own`, the elements of the group's rank `position`, by the reduction over all ranks, of which
/// `others` are the elements in order, without `own`. All slices have one length.
pub fn reduce<T: Element>(reduction: Reduction, own: &mut [T], position: usize, others: &[&[T]]) {
    let (mut total, mut next) = ([T::Wide::default(); BLOCK], [T::Wide::default(); BLOCK]);
    for start in (0..own.len()).step_by(BLOCK) {
        let end = own.len().min(start + BLOCK);
        let (total, next) = (&mut total[..end - start], &mut next[..end - start]);
        let (before, behind) = others.split_at(position);
        let own_block = &mut own[start..end];
        let mut first = true;
        let mut include = |block: &[T]| {
            match first {
                true => T::widen(block, total),
                false => {
                    T::widen(block, next);
                    combine::<T>(reduction, total, next);
                }
            }
            first = false;
        };
        before.iter().for_each(|other| include(&other[start..end]));
        include(own_block);
        behind.iter().for_each(|other| include(&other[start..end]));
        T::narrow(total, own_block);
    }
}

fn combine<T: Element>(reduction: Reduction, total: &mut [T::Wide], next: &[T::Wide]) {
    match reduction {
        Reduction::Sum => total.iter_mut().zip(next).for_each(|(a, b)| *a += *b),
        Reduction::Max => total.iter_mut().zip(next).for_each(|(a, b)| *a = if *b > *a { *b } else { *a }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_in_the_order_of_ranks() {
        let values = [1e8_f32, 1.0, -1e8, 3.0];
        let expected = ((1e8_f32 + 1.0) - 1e8) + 3.0;
        for position in 0..4 {
            let mut own = vec![values[position]; 2 * BLOCK + 1];
            let others: Vec<Vec<f32>> =
                (0..4).filter(|rank| *rank != position).map(|rank| vec![values[rank]; own.len()]).collect();
            let others: Vec<&[f32]> = others.iter().map(Vec::as_slice).collect();
            reduce(Reduction::Sum, &mut own, position, &others);
            assert!(own.iter().all(|sum| *sum == expected), "position {position}");
        }
    }

    #[test]
    fn rounds_once() {
        let mut own = [bf16::from_f32(256.0)];
        let one = [bf16::from_f32(1.0)];
        // Rounded after each addition the sum would stay at 256: bf16 has 8 bits.
        reduce(Reduction::Sum, &mut own, 0, &[&one, &one, &one, &one]);
        assert_eq!(own[0].to_f32(), 260.0);
        reduce(Reduction::Max, &mut own, 1, &[&one, &[bf16::from_f32(300.0)]]);
        assert_eq!(own[0].to_f32(), 300.0);
    }
}
