//! Dims as loops over strided memory: how kernels find their operands' elements where tensors lack dims or order them
//! otherwise.

use cubecl::prelude::*;

/// The most loops of a kernel after neighbours were joined.
const MOST: usize = 6;

/// A loop over a dim, or over several that are neighbours in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Axis {
    /// Number of rounds.
    pub extent: usize,
    /// Elements from one round to the next in each of up to three tensors; 0 where a tensor lacks the dim.
    pub strides: [usize; 3],
}

/// Nested loops, outermost first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Loops {
    axes: [Axis; MOST],
    count: usize,
}

impl Loops {
    /// Loops over the axes; those that are neighbours in every tensor become one, and axes of one round none.
    ///
    /// # Panics
    /// If more than six are left.
    pub fn new(axes: &[Axis]) -> Loops {
        let mut loops = Loops::default();
        for axis in axes.iter().filter(|axis| axis.extent != 1) {
            match loops.last() {
                Some(last) if last.strides == axis.strides.map(|stride| stride * axis.extent) => {
                    *last = Axis { extent: last.extent * axis.extent, strides: axis.strides };
                }
                _ => {
                    loops.axes[loops.count] = *axis;
                    loops.count += 1;
                }
            }
        }
        loops
    }

    /// Number of rounds of all loops together.
    pub fn rounds(&self) -> usize {
        self.axes[..self.count].iter().map(|axis| axis.extent).product()
    }

    /// The innermost loop.
    pub(crate) fn innermost(&self) -> Axis {
        self.axes[..self.count].last().copied().unwrap_or(Axis { extent: 1, strides: [0; 3] })
    }

    /// Elements of a tensor that these loops reach: the largest place and one.
    pub(crate) fn reach(&self, of: usize) -> usize {
        1 + self.axes[..self.count].iter().map(|axis| (axis.extent - 1) * axis.strides[of]).sum::<usize>()
    }

    /// The loops with the innermost one in steps of `width`; strides of the tensors that are read in vectors count
    /// vectors. None if a loop or a stride is no multiple.
    pub(crate) fn in_vectors(&self, width: usize, vectors: [bool; 3]) -> Option<Loops> {
        let mut loops = *self;
        for (place, axis) in loops.axes[..self.count].iter_mut().enumerate() {
            if place + 1 == self.count {
                if !axis.extent.is_multiple_of(width) {
                    return None;
                }
                axis.extent /= width;
                continue;
            }
            for (stride, _) in axis.strides.iter_mut().zip(vectors).filter(|(_, vectors)| *vectors) {
                if !stride.is_multiple_of(width) {
                    return None;
                }
                *stride /= width;
            }
        }
        (self.count > 0 || width == 1).then_some(loops)
    }

    /// The loops over a tensor that is read in vectors, with its strides counted in these; none if one is no multiple.
    pub(crate) fn over_vectors(&self, width: usize, of: usize) -> Option<Loops> {
        let mut loops = *self;
        for stride in loops.axes[..self.count].iter_mut().map(|axis| &mut axis.strides[of]) {
            if !stride.is_multiple_of(width) {
                return None;
            }
            *stride /= width;
        }
        Some(loops)
    }

    fn last(&mut self) -> Option<&mut Axis> {
        self.axes[..self.count].last_mut()
    }

    const fn outwards(&self, number: usize) -> Axis {
        self.axes[self.count - 1 - number]
    }
}

/// Where a tensor's element of a round lies; rounds are counted as the loops run.
#[cube]
pub(crate) fn place_of(round: usize, #[comptime] loops: Loops, #[comptime] of: usize) -> usize {
    let mut rest = round;
    let mut place = 0usize.runtime();
    #[unroll]
    for number in 0..loops.count {
        let extent = comptime!(loops.outwards(number).extent);
        let stride = comptime!(loops.outwards(number).strides[of]);
        if comptime!(stride > 0) {
            place += rest % extent * stride;
        }
        rest /= extent;
    }
    place
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_in_every_tensor_are_one_loop() {
        let axis = |extent, strides| Axis { extent, strides };
        let whole = Loops::new(&[axis(2, [12, 12, 12]), axis(3, [4, 4, 4]), axis(1, [9, 9, 9]), axis(4, [1, 1, 1])]);
        assert_eq!((whole.count, whole.rounds(), whole.innermost()), (1, 24, axis(24, [1, 1, 1])));
        let bias = Loops::new(&[axis(2, [12, 0, 12]), axis(3, [4, 0, 4]), axis(4, [1, 1, 1])]);
        assert_eq!((bias.count, bias.rounds(), bias.reach(1)), (2, 24, 4));
        let wide = bias.in_vectors(4, [true, true, true]).expect("all are multiples");
        assert_eq!((wide.rounds(), wide.axes[0]), (6, axis(6, [1, 0, 1])));
        assert_eq!(bias.in_vectors(8, [true; 3]), None);
    }
}
