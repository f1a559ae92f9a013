//! Where tensors of a step lie in a device's memory: from their lives, which one pass through the step without
//! computing anything tells.

/// From when to when each tensor lives, in the order in which they begin.
#[derive(Debug, Default)]
pub struct Lives {
    lives: Vec<Life>,
    now: usize,
}

#[derive(Clone, Copy, Debug)]
struct Life {
    bytes: usize,
    start: usize,
    /// One past the last moment.
    end: usize,
}

/// Places of tensors in the order in which they begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// First byte and number of bytes of each.
    pub places: Vec<(usize, usize)>,
    /// Bytes of all together.
    pub size: usize,
}

impl Lives {
    /// A tensor begins; gives its number.
    pub fn begin(&mut self, bytes: usize) -> usize {
        self.now += 1;
        self.lives.push(Life { bytes, start: self.now, end: usize::MAX });
        self.lives.len() - 1
    }

    /// A tensor ends.
    pub fn end(&mut self, number: usize) {
        self.now += 1;
        self.lives[number].end = self.now;
    }

    /// Places such that no two tensors that live at one moment overlap, each a multiple of `alignment`: the largest
    /// first, each into the lowest gap that it fits into (arXiv 2001.03288, section 5.2). Time n² for n tensors.
    pub fn layout(&self, alignment: usize) -> Layout {
        let mut order: Vec<usize> = (0..self.lives.len()).collect();
        order.sort_by_key(|number| (std::cmp::Reverse(self.lives[*number].bytes), *number));
        let mut places: Vec<(usize, usize)> = vec![(0, 0); self.lives.len()];
        // Placed tensors by their first byte.
        let mut placed: Vec<usize> = Vec::with_capacity(order.len());
        let mut size = 0;
        for number in order {
            let life = self.lives[number];
            let bytes = life.bytes.next_multiple_of(alignment);
            let mut start = 0;
            for other in &placed {
                let (other_start, other_bytes) = places[*other];
                if !life.meets(&self.lives[*other]) {
                    continue;
                }
                if start + bytes <= other_start {
                    break;
                }
                start = start.max(other_start + other_bytes.next_multiple_of(alignment));
            }
            places[number] = (start, life.bytes);
            let at = placed.partition_point(|other| places[*other].0 <= start);
            placed.insert(at, number);
            size = size.max(start + bytes);
        }
        Layout { places, size }
    }
}

impl Life {
    fn meets(&self, other: &Life) -> bool {
        self.start < other.end && other.start < self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Begins (the bytes) and ends (the number) in order.
    enum Event {
        Begin(usize),
        End(usize),
    }

    fn lives(events: &[Event]) -> Lives {
        let mut lives = Lives::default();
        for event in events {
            match event {
                Event::Begin(bytes) => drop(lives.begin(*bytes)),
                Event::End(number) => lives.end(*number),
            }
        }
        lives
    }

    #[test]
    fn ended_tensors_give_their_place_to_later_ones() {
        use Event::{Begin, End};
        let rows: [(&[Event], &[usize], usize); 4] = [
            (&[Begin(8), End(0), Begin(8)], &[0, 0], 16),
            (&[Begin(8), Begin(8), End(0), Begin(8)], &[0, 16, 0], 32),
            (&[Begin(8), Begin(40), End(0), Begin(20), End(1), Begin(30)], &[48, 0, 48, 0], 80),
            (&[], &[], 0),
        ];
        for (events, starts, size) in rows {
            let layout = lives(events).layout(16);
            let found: Vec<usize> = layout.places.iter().map(|(start, _)| *start).collect();
            assert_eq!((found.as_slice(), layout.size), (starts, size));
        }
    }

    #[test]
    fn no_two_tensors_that_live_at_once_overlap() {
        let mut lives = Lives::default();
        let mut alive = Vec::new();
        let mut state = 1u64;
        for _ in 0..400 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let draw = (state >> 33) as usize;
            if draw.is_multiple_of(3) && !alive.is_empty() {
                lives.end(alive.swap_remove(draw / 3 % alive.len()));
            } else {
                alive.push(lives.begin(1 + draw % 900));
            }
        }
        let layout = lives.layout(64);
        let all = lives.lives.iter().zip(&layout.places).enumerate();
        for (number, (life, (start, bytes))) in all.clone() {
            assert!(start.is_multiple_of(64) && start + bytes <= layout.size);
            for (_, (other, (other_start, other_bytes))) in all.clone().filter(|(other, _)| *other < number) {
                let apart = start + bytes <= *other_start || other_start + other_bytes <= *start;
                assert!(apart || !life.meets(other));
            }
        }
    }
}
