//! Operations that move messages as they are: gathering, broadcast, all-to-all, send and receive.

use bytemuck::{Pod, cast_slice, cast_slice_mut};

use super::chunk::{CHUNK_BYTES, Operation, chunk_count, chunk_range, part};
use super::error::Error;
use super::wire::{Call, Wire};

/// Fills `data` with the parts of all ranks. Gives the payload bytes that left this rank, as all functions here do.
///
/// # Errors
/// What ended the run, here and below.
pub fn all_gather<T: Pod>(wire: &mut Wire, operation: Operation, data: &mut [T]) -> Result<u64, Error> {
    let (length, size) = (data.len(), wire.size());
    let (mut rest, mut parts) = (data, Vec::new());
    for place in 0..size {
        let (part, behind) = rest.split_at_mut(part(length, place, size).len());
        parts.push(part);
        rest = behind;
    }
    let (before, own_and_behind) = parts.split_at_mut(wire.me);
    let Some((own, behind)) = own_and_behind.split_first_mut() else { return Ok(0) };
    let own: &[u8] = cast_slice(own);
    let outgoing = wire.others().map(|peer| Outgoing::new(peer, own)).collect();
    let others = before.iter_mut().zip(0..).chain(behind.iter_mut().zip(wire.me + 1..));
    let incoming = others.map(|(part, peer)| Incoming::new(peer, cast_slice_mut(part))).collect();
    transfer(wire, operation, length * size_of::<T>(), outgoing, incoming)
}

/// Exchanges equal parts; `result` holds a copy of `data` at first, and so this rank's part for itself.
pub fn all_to_all<T: Pod>(wire: &mut Wire, data: &[T], result: &mut [T]) -> Result<u64, Error> {
    let (me, size) = (wire.me, wire.size());
    let outgoing = wire.others().map(|peer| Outgoing::new(peer, cast_slice(&data[part(data.len(), peer, size)])));
    let parts = result.chunks_mut((data.len() / size).max(1)).map(cast_slice_mut);
    // An empty message has no parts, but the ranks still meet.
    let parts = parts.map(Some).chain(std::iter::repeat_with(|| None)).take(size);
    let incoming = parts.enumerate().filter(|(peer, _)| *peer != me);
    let incoming = incoming.map(|(peer, part)| Incoming::new(peer, part.unwrap_or_default())).collect();
    transfer(wire, Operation::AllToAll, size_of_val(data), outgoing.collect(), incoming)
}

/// Fills `data` with that of the rank at place `root`.
pub fn broadcast<T: Pod>(wire: &mut Wire, root: usize, data: &mut [T]) -> Result<u64, Error> {
    let total = size_of_val(data);
    let (outgoing, incoming) = match wire.me == root {
        true => (wire.others().map(|peer| Outgoing::new(peer, cast_slice(data))).collect(), Vec::new()),
        false => (Vec::new(), vec![Incoming::new(root, cast_slice_mut(data))]),
    };
    transfer(wire, Operation::Broadcast, total, outgoing, incoming)
}

/// Sends `data` to the rank at place `to`.
pub fn send<T: Pod>(wire: &mut Wire, to: usize, data: &[T]) -> Result<u64, Error> {
    let outgoing = vec![Outgoing::new(to, cast_slice(data))];
    transfer(wire, Operation::Send, size_of_val(data), outgoing, Vec::new())
}

/// Receives `data` from the rank at place `from`.
pub fn recv<T: Pod>(wire: &mut Wire, from: usize, data: &mut [T]) -> Result<u64, Error> {
    let total = size_of_val(data);
    transfer(wire, Operation::Send, total, Vec::new(), vec![Incoming::new(from, cast_slice_mut(data))])
}

/// A message to a rank.
struct Outgoing<'a> {
    peer: usize,
    bytes: &'a [u8],
    chunks: usize,
}

/// Room for a message from a rank.
struct Incoming<'a> {
    peer: usize,
    bytes: &'a mut [u8],
    chunks: usize,
}

impl<'a> Outgoing<'a> {
    /// `bytes` for the rank at place `peer` of the group.
    fn new(peer: usize, bytes: &'a [u8]) -> Outgoing<'a> {
        Outgoing { peer, bytes, chunks: 0 }
    }

    /// Sends chunks while there is room; whether any was sent.
    fn advance(&mut self, wire: &mut Wire, call: &Call) -> Result<bool, Error> {
        let before = self.chunks;
        while !self.is_done() {
            let range = chunk_range(self.bytes.len(), CHUNK_BYTES, self.chunks);
            if !wire.send(self.peer, call, 0, &self.bytes[range])? {
                break;
            }
            self.chunks += 1;
        }
        Ok(self.chunks > before)
    }

    fn is_done(&self) -> bool {
        self.chunks == chunk_count(self.bytes.len(), CHUNK_BYTES)
    }
}

impl<'a> Incoming<'a> {
    /// `bytes` from the rank at place `peer` of the group.
    fn new(peer: usize, bytes: &'a mut [u8]) -> Incoming<'a> {
        Incoming { peer, bytes, chunks: 0 }
    }

    /// Takes the chunks that wait; whether there were any.
    fn advance(&mut self, wire: &mut Wire, call: &Call) -> Result<bool, Error> {
        let before = self.chunks;
        while !self.is_done() && wire.receive(self.peer, call)?.is_some() {
            let range = chunk_range(self.bytes.len(), CHUNK_BYTES, self.chunks);
            self.bytes[range.clone()].copy_from_slice(wire.chunk(self.peer, range.len()));
            wire.release(self.peer);
            self.chunks += 1;
        }
        Ok(self.chunks > before)
    }

    fn is_done(&self) -> bool {
        self.chunks == chunk_count(self.bytes.len(), CHUNK_BYTES)
    }
}

/// Moves all messages of an operation; `total` is the operation's message size, by which ranks check one another.
/// Gives the payload bytes that left this rank.
///
/// # Errors
/// What ended the run.
fn transfer(
    wire: &mut Wire,
    operation: Operation,
    total: usize,
    mut outgoing: Vec<Outgoing>,
    mut incoming: Vec<Incoming>,
) -> Result<u64, Error> {
    let call = wire.begin(operation, total)?;
    loop {
        let mut moved = false;
        for message in &mut outgoing {
            moved |= message.advance(wire, &call)?;
        }
        for message in &mut incoming {
            moved |= message.advance(wire, &call)?;
        }
        let from = incoming.iter().find(|message| !message.is_done()).map(|message| message.peer);
        let to = outgoing.iter().find(|message| !message.is_done()).map(|message| message.peer);
        let flushed = wire.flush()?;
        match from.or(to) {
            None if flushed => return Ok(wire.end()),
            _ if moved => wire.progress(),
            missing => wire.wait(missing.unwrap_or(outgoing.first().map_or(wire.me, |message| message.peer)))?,
        }
    }
}
