//! Messages between ranks: latency, bandwidth, and what they take from the computation beside them.

use std::hint::black_box;
use std::time::Instant;

use ir::graph::DimName::{Hidden, Intermediate, Sequence};
use ir::mesh::Rank;
use ir::program::{Direction, Op};

use super::median;
use crate::communicator::{Error, Group, Reduction, World};
use crate::operators::{Operand, Place, ResultShape, apply};
use crate::tensor::{Format, Memory, Tensor};

/// Bytes of the messages whose bandwidth is measured.
const SIZES: [usize; 4] = [256 << 10, 1 << 20, 4 << 20, 16 << 20];
/// Times that each large one is sent.
const REPETITIONS: usize = 7;
/// Times that computation with and without messages is compared, in turns.
const TURNS: usize = 15;
/// Times that each small one is sent.
const MANY: usize = 200;
/// Elements of a small message.
const SMALL: usize = 16;
/// Elements of the message that is sent beside computation.
const BESIDE: usize = 1 << 20;
/// Edge of the products beside which it is sent.
const EDGE: usize = 256;
/// Products between two collectives that ranks wait at.
const BETWEEN: usize = 4;
/// Collectives between two readings of the clock.
const COLLECTIVES: usize = 20;
/// Collectives that are started together.
const TOGETHER: usize = 8;
/// Bytes of tensors whose copies are timed.
const COPIED: [usize; 4] = [64 << 10, 512 << 10, 2 << 20, 8 << 20];

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkRates {
    /// Bytes a second that a rank sends in a ring.
    pub bandwidth: f64,
    /// Fixed time of a collective, its steps apart.
    pub base: f64,
    /// Time of a message without payload.
    pub hop: f64,
    /// Time by which a collective delays the computation beside it, over its time alone; above 1 where the threads that
    /// compute and communicate wait for one another's turn on a processor.
    pub occupancy: f64,
    /// Time that ranks wait for one another at a collective that the computation stops for.
    pub blocking: f64,
    /// The same for one that was started before.
    pub started: f64,
    /// Delay of the computation by each further one that is started with it.
    pub further: f64,
    /// Bytes that are copied a second, by [`COPIED`].
    pub copies: [f64; COPIED.len()],
}

impl LinkRates {
    /// Sizes of copied tensors with the bytes that are copied a second.
    pub fn copies(&self) -> impl Iterator<Item = (usize, f64)> {
        COPIED.into_iter().zip(self.copies)
    }
}

/// Measures on all ranks together.
///
/// # Errors
/// What ended the run.
pub fn measure_links(world: &World, all: &Group) -> Result<LinkRates, Error> {
    let steps = 2.0 * (all.size() - 1) as f64;
    let hop = measure_hop(world)?;
    let mut small = vec![1.0_f32; SMALL];
    let latency = time(MANY, || all.all_reduce(Reduction::Sum, &mut small))?;
    let bandwidth = measure_bandwidth(all, latency)?;
    let occupancy = measure_occupancy(all)?;
    let [blocking, started, together] = measure_waiting(all)?;
    let further = (together - started) / (TOGETHER - 1) as f64;
    let [blocking, started] = [blocking, started].map(|waiting| waiting - latency);
    let copies = measure_copies(all)?;
    let times = [hop, latency - steps * hop, blocking, started, further].map(|seconds| seconds.max(0.0));
    let mut rates = [&[bandwidth, occupancy], &times[..], &copies[..]].concat();
    all.all_reduce(Reduction::Sum, &mut rates)?;
    rates.iter_mut().for_each(|rate| *rate /= all.size() as f64);
    let copies = std::array::from_fn(|size| rates[7 + size]);
    let [bandwidth, occupancy] = [rates[0], rates[1]];
    let [hop, base, blocking, started, further] = std::array::from_fn(|time| rates[2 + time]);
    Ok(LinkRates { bandwidth, base, hop, occupancy, blocking, started, further, copies })
}

/// Time of a small message between neighbours.
fn measure_hop(world: &World) -> Result<f64, Error> {
    let (rank, size) = (world.rank().0, world.size());
    let [next, previous] = [Rank((rank + 1) % size), Rank((rank + size - 1) % size)];
    let mut numbers = [0.0_f32; SMALL];
    // Rank 0 begins a round; the message goes once through all ranks.
    let round = time(MANY, || {
        if rank == 0 {
            world.send(next, Direction::Activation, numbers.to_vec())?;
            return world.recv(previous, Direction::Activation, &mut numbers);
        }
        world.recv(previous, Direction::Activation, &mut numbers)?;
        world.send(next, Direction::Activation, numbers.to_vec())
    })?;
    Ok(round / size as f64)
}

/// Payload that leaves a rank over the time beyond the latency, over sizes and kinds together.
fn measure_bandwidth(all: &Group, latency: f64) -> Result<f64, Error> {
    let part = (all.size() - 1) as f64 / all.size() as f64;
    let (mut bytes, mut seconds) = (0.0, 0.0);
    for size in SIZES {
        let mut data = vec![1.0_f32; size / size_of::<f32>()];
        let reduce = time(REPETITIONS, || all.all_reduce(Reduction::Max, &mut data))?;
        let gather = time(REPETITIONS, || all.all_gather(&mut data))?;
        let scatter = time(REPETITIONS, || all.reduce_scatter(Reduction::Max, &mut data))?;
        // An all_reduce sends twice as much as each of the others, in twice as many steps.
        bytes += 4.0 * part * size as f64;
        seconds += (reduce + gather + scatter - 2.0 * latency).max(0.0);
    }
    Ok(bytes / seconds)
}

/// How much longer computation takes with a collective beside it, over the time of the collective alone.
fn measure_occupancy(all: &Group) -> Result<f64, Error> {
    let mut data = vec![1.0_f32; BESIDE];
    let alone = time(REPETITIONS, || all.all_reduce(Reduction::Max, &mut data))?;
    let operands = Computation::new();
    let one = time(REPETITIONS, || {
        operands.compute(1);
        Ok(())
    })?;
    let mut counts = [(3.0 * alone / one).ceil().clamp(1.0, 1e4)];
    all.all_reduce(Reduction::Max, &mut counts)?;
    let count = counts[0] as usize;
    let computing = || {
        operands.compute(count);
        Ok(())
    };
    let both = || {
        let pending = all.start_all_reduce(Reduction::Max, vec![1.0_f32; BESIDE]);
        operands.compute(count);
        pending.wait().map(drop)
    };
    let [delay] = delays(all, &computing, [&both])?;
    Ok((delay / alone).max(0.0))
}

/// How much longer equal computation takes for each small collective between its parts: where it stops for it, where
/// the collective is started before the last part, and where several are.
fn measure_waiting(all: &Group) -> Result<[f64; 3], Error> {
    let operands = Computation::new();
    let numbers = || vec![1.0_f32; SMALL];
    let repeated = |between: &dyn Fn() -> Result<(), Error>| {
        (0..COLLECTIVES).try_for_each(|_| {
            operands.compute(BETWEEN - 1);
            between()
        })
    };
    let started = |count: usize| {
        let pending: Vec<_> = (0..count).map(|_| all.start_all_reduce(Reduction::Max, numbers())).collect();
        operands.compute(1);
        pending.into_iter().try_for_each(|pending| pending.wait().map(drop))
    };
    let blocking = || {
        operands.compute(1);
        all.all_reduce(Reduction::Max, &mut numbers())
    };
    let computing = || repeated(&|| started(0));
    let delays = delays(
        all,
        &computing,
        [&|| repeated(&blocking), &|| repeated(&|| started(1)), &|| repeated(&|| started(TOGETHER))],
    )?;
    Ok(delays.map(|delay| delay / COLLECTIVES as f64))
}

/// Median of how much longer each of `others` takes than `base`, all in turns, so that a change of the machine's speed
/// meets them alike.
fn delays<const N: usize>(
    all: &Group,
    base: &dyn Fn() -> Result<(), Error>,
    others: [&dyn Fn() -> Result<(), Error>; N],
) -> Result<[f64; N], Error> {
    let mut delays = [(); N].map(|()| Vec::with_capacity(TURNS));
    let once = |run: &dyn Fn() -> Result<(), Error>| {
        all.barrier()?;
        time(1, run)
    };
    for _ in 0..TURNS {
        let alone = once(base)?;
        for (delays, run) in delays.iter_mut().zip(others) {
            delays.push(once(run)? - alone);
        }
    }
    Ok(delays.map(median))
}

/// Bytes that a rank copies a second, by the size of the tensor, all ranks at once. The source has just been written, as
/// an operator leaves it.
fn measure_copies(all: &Group) -> Result<[f64; COPIED.len()], Error> {
    let mut rates = [0.0; COPIED.len()];
    for (rate, size) in rates.iter_mut().zip(COPIED) {
        let mut from = vec![1.0_f32; size / size_of::<f32>()];
        let mut to = vec![0.0_f32; from.len()];
        all.barrier()?;
        let mut seconds = Vec::with_capacity(TURNS);
        for turn in 0..TURNS {
            from.fill(turn as f32);
            seconds.push(time(1, || {
                black_box(&mut to).copy_from_slice(&from);
                Ok(())
            })?);
        }
        *rate = size as f64 / median(seconds);
    }
    Ok(rates)
}

/// Products that are computed beside messages.
struct Computation {
    memory: Memory,
    operands: [Tensor; 2],
}

impl Computation {
    fn new() -> Computation {
        let memory = Memory::default();
        let dims = [[(Sequence, EDGE), (Hidden, EDGE)], [(Hidden, EDGE), (Intermediate, EDGE)]];
        let operands = dims.map(|dims| Tensor::zeros(&memory, &dims, Format::Single));
        Computation { memory, operands }
    }

    fn compute(&self, count: usize) {
        let [a, b] = &self.operands;
        let result = [(Sequence, EDGE), (Intermediate, EDGE)];
        let shape = ResultShape { memory: &self.memory, dims: &result, format: Format::Single, place: Place::WHOLE };
        for _ in 0..count {
            drop(apply(&Op::Contraction, vec![Operand::Borrowed(a), Operand::Borrowed(b)], &shape));
        }
    }
}

/// Median time of an operation.
fn time(repetitions: usize, mut run: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
    let mut seconds = Vec::with_capacity(repetitions);
    for _ in 0..repetitions {
        let start = Instant::now();
        run()?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    Ok(median(seconds))
}
