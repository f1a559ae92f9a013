//! Reductions: each rank reduces its part of the message, chunk by chunk, and hands the result to the others.
//!
//! A rank sends each other rank the summands of that rank's part, and sums its own part from all summands of a
//! chunk at once, in the order of ranks: every element has the same bits as a loop over the ranks would give, and
//! all ranks get them from the one that summed. Sums of a chunk leave while later chunks are still coming in.
//! Over n ranks this moves (n-1)/n of the message from each rank for the sums and as much for the results.

use std::ops::Range;

use super::chunk::{CHUNK_BYTES, Operation, chunk_count, chunk_range, part};
use super::element::{Element, Reduction, reduce};
use super::error::Error;
use super::wire::{Call, Wire};

const SUMMANDS: u32 = 0;
const SUMS: u32 = 1;

/// A reduction under way.
struct Progress<'a, T> {
    reduction: Reduction,
    data: &'a mut [T],
    /// Whether the results go to all ranks.
    gathers: bool,
    /// Chunks of this rank's part that are reduced.
    reduced: usize,
    /// Chunks moved to and from each rank.
    peers: Vec<Moved>,
}

#[derive(Clone, Copy, Default)]
struct Moved {
    summands_sent: usize,
    sums_sent: usize,
    sums_received: usize,
}

/// Reduces `data` over all ranks, whole on every one with `Operation::AllReduce`, or this rank's part of it with
/// `Operation::ReduceScatter`; there the other parts are left as they were.
/// Gives the payload bytes that left this rank.
///
/// # Errors
/// What ended the run.
pub fn reduce_over<T: Element>(
    wire: &mut Wire,
    operation: Operation,
    reduction: Reduction,
    data: &mut [T],
) -> Result<u64, Error> {
    let call = wire.begin(operation, size_of_val(data))?;
    let gathers = operation == Operation::AllReduce;
    let peers = vec![Moved::default(); wire.size()];
    let mut progress = Progress { reduction, data, gathers, reduced: 0, peers };
    loop {
        let mut moved = progress.send_summands(wire, &call)?;
        moved |= progress.reduce_chunks(wire, &call)?;
        if gathers {
            moved |= progress.send_sums(wire, &call)? | progress.receive_sums(wire, &call)?;
        }
        let flushed = wire.flush()?;
        match progress.missing(wire, &call)? {
            None if flushed => return Ok(wire.end()),
            _ if moved => wire.progress(),
            missing => wire.wait(missing.unwrap_or(wire.me))?,
        }
    }
}

impl<T: Element> Progress<'_, T> {
    const PER_CHUNK: usize = CHUNK_BYTES / size_of::<T>();

    fn chunks(&self, rank: usize) -> usize {
        chunk_count(part(self.data.len(), rank, self.peers.len()).len(), Self::PER_CHUNK)
    }

    /// Elements of a chunk of a rank's part.
    fn range(&self, rank: usize, chunk: usize) -> Range<usize> {
        let part = part(self.data.len(), rank, self.peers.len());
        let within = chunk_range(part.len(), Self::PER_CHUNK, chunk);
        part.start + within.start..part.start + within.end
    }

    fn send(&self, wire: &mut Wire, call: &Call, peer: usize, phase: u32, range: Range<usize>) -> Result<bool, Error> {
        wire.send(peer, call, phase, bytemuck::cast_slice(&self.data[range]))
    }

    fn send_summands(&mut self, wire: &mut Wire, call: &Call) -> Result<bool, Error> {
        let mut moved = false;
        for peer in wire.others() {
            while self.peers[peer].summands_sent < self.chunks(peer) {
                let range = self.range(peer, self.peers[peer].summands_sent);
                if !self.send(wire, call, peer, SUMMANDS, range)? {
                    break;
                }
                self.peers[peer].summands_sent += 1;
                moved = true;
            }
        }
        Ok(moved)
    }

    /// Reduces chunks of which all ranks' summands are there. Each result leaves at once where there is room,
    /// while it is still in the core's cache.
    fn reduce_chunks(&mut self, wire: &mut Wire, call: &Call) -> Result<bool, Error> {
        let before = self.reduced;
        while self.reduced < self.chunks(wire.me) && self.without_summands(wire, call)?.is_none() {
            let range = self.range(wire.me, self.reduced);
            let bytes = range.len() * size_of::<T>();
            let places = (0..wire.size()).filter(|place| *place != wire.me);
            let others: Vec<&[T]> = places.map(|place| bytemuck::cast_slice(wire.chunk(place, bytes))).collect();
            reduce(self.reduction, &mut self.data[range], wire.me, &others);
            wire.others().for_each(|peer| wire.release(peer));
            self.reduced += 1;
            if self.gathers {
                self.send_sums(wire, call)?;
            }
        }
        Ok(self.reduced > before)
    }

    /// The first rank whose summands of the next chunk are not there.
    fn without_summands(&self, wire: &mut Wire, call: &Call) -> Result<Option<usize>, Error> {
        for peer in wire.others() {
            if wire.receive(peer, call)? != Some(SUMMANDS) {
                return Ok(Some(peer));
            }
        }
        Ok(None)
    }

    fn send_sums(&mut self, wire: &mut Wire, call: &Call) -> Result<bool, Error> {
        let mut moved = false;
        for peer in wire.others() {
            while self.peers[peer].sums_sent < self.reduced {
                let range = self.range(wire.me, self.peers[peer].sums_sent);
                if !self.send(wire, call, peer, SUMS, range)? {
                    break;
                }
                self.peers[peer].sums_sent += 1;
                moved = true;
            }
        }
        Ok(moved)
    }

    fn receive_sums(&mut self, wire: &mut Wire, call: &Call) -> Result<bool, Error> {
        let mut moved = false;
        for peer in wire.others() {
            while self.peers[peer].sums_received < self.chunks(peer) && wire.receive(peer, call)? == Some(SUMS) {
                let range = self.range(peer, self.peers[peer].sums_received);
                let chunk = wire.chunk(peer, range.len() * size_of::<T>());
                self.data[range].copy_from_slice(bytemuck::cast_slice(chunk));
                wire.release(peer);
                self.peers[peer].sums_received += 1;
                moved = true;
            }
        }
        Ok(moved)
    }

    /// A rank that something is expected from, or that has no room; none if all is done.
    fn missing(&self, wire: &mut Wire, call: &Call) -> Result<Option<usize>, Error> {
        if self.reduced < self.chunks(wire.me) {
            // If the last summands came just now, the next round takes them.
            return Ok(self.without_summands(wire, call)?.or(wire.others().next()));
        }
        let is_open = |peer: &usize| {
            let moved = self.peers[*peer];
            let sums =
                self.gathers && (moved.sums_sent < self.chunks(wire.me) || moved.sums_received < self.chunks(*peer));
            sums || moved.summands_sent < self.chunks(*peer)
        };
        Ok(wire.others().find(is_open))
    }
}
