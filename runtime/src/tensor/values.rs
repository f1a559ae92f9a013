//! Elements as slices of their format, read and written in fp32.

use std::ops::Range;

use super::bf16;

/// Elements of a tensor or of a part.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    /// fp32.
    Single(&'a [f32]),
    /// bf16.
    Brain(&'a [bf16]),
    /// Ids.
    Index(&'a [u32]),
}

/// Elements of a tensor or of a part, to be written.
#[derive(Debug)]
pub enum ValuesMut<'a> {
    /// fp32.
    Single(&'a mut [f32]),
    /// bf16.
    Brain(&'a mut [bf16]),
    /// Ids.
    Index(&'a mut [u32]),
}

impl<'a> Values<'a> {
    /// Number of elements.
    pub fn len(self) -> usize {
        match self {
            Values::Single(values) => values.len(),
            Values::Brain(values) => values.len(),
            Values::Index(values) => values.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The elements of a range in fp32: themselves, or widened into `scratch`.
    #[inline(always)]
    pub fn read<'s>(self, range: Range<usize>, scratch: &'s mut Vec<f32>) -> &'s [f32]
    where
        'a: 's,
    {
        match self {
            Values::Single(values) => &values[range],
            Values::Brain(values) => {
                widen(&values[range], scratch);
                scratch
            }
            Values::Index(_) => unreachable!("ids are not computed with"),
        }
    }

    /// Writes the elements from `start` on into `numbers`, in fp32.
    #[inline(always)]
    pub fn copy_to(self, start: usize, numbers: &mut [f32]) {
        match self {
            Values::Single(values) => numbers.copy_from_slice(&values[start..start + numbers.len()]),
            Values::Brain(values) => {
                let values = &values[start..start + numbers.len()];
                numbers.iter_mut().zip(values).for_each(|(number, value)| *number = widened(*value));
            }
            Values::Index(_) => unreachable!("ids are not computed with"),
        }
    }

    /// One element in fp32.
    #[inline(always)]
    pub fn at(self, place: usize) -> f32 {
        match self {
            Values::Single(values) => values[place],
            Values::Brain(values) => values[place].to_f32(),
            Values::Index(_) => unreachable!("ids are not computed with"),
        }
    }
}

impl<'a> ValuesMut<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            ValuesMut::Single(values) => values.len(),
            ValuesMut::Brain(values) => values.len(),
            ValuesMut::Index(values) => values.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Consecutive parts of `size` elements; the last may be shorter.
    pub fn pieces(self, size: usize) -> Vec<ValuesMut<'a>> {
        match self {
            ValuesMut::Single(values) => values.chunks_mut(size).map(ValuesMut::Single).collect(),
            ValuesMut::Brain(values) => values.chunks_mut(size).map(ValuesMut::Brain).collect(),
            ValuesMut::Index(values) => values.chunks_mut(size).map(ValuesMut::Index).collect(),
        }
    }

    /// Lets `f` write the elements of a range, which it must not read, in fp32; bf16 passes through `scratch`.
    #[inline(always)]
    pub fn write(&mut self, range: Range<usize>, scratch: &mut Vec<f32>, f: impl FnOnce(&mut [f32])) {
        match self {
            ValuesMut::Single(values) => f(&mut values[range]),
            ValuesMut::Brain(values) => {
                scratch.resize(range.len(), 0.0);
                f(scratch);
                narrow(scratch, &mut values[range]);
            }
            ValuesMut::Index(_) => unreachable!("ids are not computed with"),
        }
    }

    /// Lets `f` change the elements of a range in fp32; bf16 passes through `scratch` and is rounded after.
    #[inline(always)]
    pub fn update(&mut self, range: Range<usize>, scratch: &mut Vec<f32>, f: impl FnOnce(&mut [f32])) {
        match self {
            ValuesMut::Single(values) => f(&mut values[range]),
            ValuesMut::Brain(values) => {
                let values = &mut values[range];
                widen(values, scratch);
                f(scratch);
                narrow(scratch, values);
            }
            ValuesMut::Index(_) => unreachable!("ids are not computed with"),
        }
    }
}

#[inline(always)]
fn widen(values: &[bf16], scratch: &mut Vec<f32>) {
    scratch.clear();
    scratch.extend(values.iter().map(|value| widened(*value)));
}

/// The same number in fp32.
#[inline(always)]
pub(crate) fn widened(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

#[inline(always)]
fn narrow(numbers: &[f32], values: &mut [bf16]) {
    values.iter_mut().zip(numbers).for_each(|(value, number)| *value = rounded(*number));
}

/// The nearest bf16, ties to even; without branches, so that loops of it are vectorised.
#[inline(always)]
pub(crate) fn rounded(number: f32) -> bf16 {
    let bits = number.to_bits();
    let nearest = ((bits.wrapping_add(0x7fff + (bits >> 16 & 1))) >> 16) as u16;
    let quiet = (bits >> 16) as u16 | 0x40;
    bf16::from_bits(if number.is_nan() { quiet } else { nearest })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_that_of_the_type() {
        let odd = (0..=u16::MAX).flat_map(|high| [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| (high, low)));
        for (high, low) in odd {
            let number = f32::from_bits(u32::from(high) << 16 | low);
            let (own, expected) = (rounded(number), bf16::from_f32(number));
            assert!(own.to_bits() == expected.to_bits() || own.is_nan() && expected.is_nan(), "{number:e}");
            let mut wide = Vec::new();
            widen(&[expected], &mut wide);
            assert!(wide[0] == expected.to_f32() || wide[0].is_nan() && expected.is_nan(), "{number:e}");
        }
    }
}
