//! What a communicator promises a group of ranks, as one suite of checks that runs over each of them.

use runtime::communicator::{Element, Reduction, part};

/// Message lengths: empty, one element, odd, around a chunk of 64 KiB, larger than all queues between two ranks.
pub const LENGTHS: [usize; 7] = [0, 1, 7, 1000, 16_384, 16_385, 300_007];

/// A communicator of a group of ranks. An operation that fails is a panic.
pub trait Communicator {
    /// Number of ranks.
    fn size(&self) -> usize;
    /// This rank's place among them.
    fn place(&self) -> usize;
    /// Reduces over all ranks.
    fn all_reduce<T: Element>(&self, reduction: Reduction, data: &mut [T]);
    /// Reduces this rank's part over all ranks and leaves the others.
    fn reduce_scatter<T: Element>(&self, reduction: Reduction, data: &mut [T]);
    /// Fills `data` with the parts of all ranks.
    fn all_gather<T: Element>(&self, data: &mut [T]);
    /// Fills `data` with that of one rank.
    fn broadcast<T: Element>(&self, root: usize, data: &mut [T]);
    /// Gives rank i the i-th of equal parts, and has such parts of all ranks.
    fn all_to_all<T: Element>(&self, data: &[T]) -> Vec<T>;
    /// Sends messages to ranks and has messages of given lengths from ranks, all under way at once.
    fn exchange(&self, sent: [(usize, Vec<f32>); 2], received: [(usize, usize); 2]) -> [Vec<f32>; 2];
}

/// An element of a rank's message by its place.
pub type Values = fn(rank: usize, place: usize) -> f32;

/// Differ between ranks and places, and their sums depend on the order: for communicators that promise one.
pub fn order_shows(rank: usize, place: usize) -> f32 {
    let mixed = (rank + 1) * 7919 + place * 104_729;
    ((mixed % 2003) as f32 - 1001.0) * (1.0 + (mixed % 7) as f32 * 1e-3)
}

/// Small whole numbers, whose sums are exact in every order and format.
pub fn whole(rank: usize, place: usize) -> f32 {
    ((rank * 31 + place * 17) % 16) as f32 - 5.0
}

pub fn message<T>(rank: usize, length: usize, values: Values, from: fn(f32) -> T) -> Vec<T> {
    (0..length).map(|place| from(values(rank, place))).collect()
}

/// The reduction of all ranks' messages, in the order of ranks, rounded once.
fn reduced<T: Element>(size: usize, length: usize, values: Values, from: fn(f32) -> T, reduction: Reduction) -> Vec<T> {
    let wide = |rank| {
        let mut wide = vec![T::Wide::default(); length];
        T::widen(&message(rank, length, values, from), &mut wide);
        wide
    };
    let mut total = wide(0);
    for rank in 1..size {
        for (a, b) in total.iter_mut().zip(wide(rank)) {
            match reduction {
                Reduction::Max => *a = if b > *a { b } else { *a },
                Reduction::Sum => *a += b,
            }
        }
    }
    let mut result = message(0, length, values, from);
    T::narrow(&total, &mut result);
    result
}

fn assert_same<T: Element>(found: &[T], expected: &[T], what: std::fmt::Arguments) {
    assert!(bytemuck::cast_slice::<T, u8>(found) == bytemuck::cast_slice::<T, u8>(expected), "{what}");
}

/// Reductions of every length, bit for bit.
pub fn check_reductions<T: Element>(ranks: &impl Communicator, values: Values, from: fn(f32) -> T) {
    let (size, place) = (ranks.size(), ranks.place());
    for length in LENGTHS {
        for reduction in [Reduction::Sum, Reduction::Max] {
            let expected = reduced(size, length, values, from, reduction);
            let own = message(place, length, values, from);
            let mut data = own.clone();
            ranks.all_reduce(reduction, &mut data);
            assert_same(&data, &expected, format_args!("all_reduce {reduction:?} of {length} over {size}"));
            let mut data = own.clone();
            ranks.reduce_scatter(reduction, &mut data);
            let part = part(length, place, size);
            let mut scattered = own;
            scattered[part.clone()].copy_from_slice(&expected[part]);
            assert_same(&data, &scattered, format_args!("reduce_scatter {reduction:?} of {length} over {size}"));
        }
    }
}

/// Movements of every length, and from every rank.
pub fn check_movements<T: Element>(ranks: &impl Communicator, from: fn(f32) -> T) {
    let (size, place) = (ranks.size(), ranks.place());
    let of = |rank, length| message(rank, length, order_shows, from);
    for length in LENGTHS {
        let whole = of(size, length);
        let mut data = of(place, length);
        let own = part(length, place, size);
        data[own.clone()].copy_from_slice(&whole[own]);
        ranks.all_gather(&mut data);
        assert_same(&data, &whole, format_args!("all_gather of {length} over {size}"));
        for root in 0..size {
            let mut data = of(place, length);
            ranks.broadcast(root, &mut data);
            assert_same(&data, &of(root, length), format_args!("broadcast of {length} from {root} of {size}"));
        }
        let equal = length - length % size;
        let result = ranks.all_to_all(&of(place, equal));
        for sender in 0..size {
            let (theirs, mine) = (part(equal, sender, size), part(equal, place, size));
            assert_same(&result[theirs], &of(sender, equal)[mine], format_args!("all_to_all of {equal} over {size}"));
        }
    }
}

/// Neighbours on a ring send to each other at once; for three ranks and more.
pub fn check_messages(ranks: &impl Communicator) {
    let (size, place) = (ranks.size(), ranks.place());
    let (next, before) = ((place + 1) % size, (place + size - 1) % size);
    for length in LENGTHS {
        let sent =
            [(next, message(place, length, order_shows, |x| x)), (before, message(place + size, 3, whole, |x| x))];
        let found = ranks.exchange(sent, [(before, length), (next, 3)]);
        assert_eq!(found[0], message(before, length, order_shows, |x| x), "from rank {before} to {place}");
        assert_eq!(found[1], message(next + size, 3, whole, |x| x), "from rank {next} to {place}");
    }
}
