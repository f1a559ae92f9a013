//! Queues of chunks in shared memory, one for each direction of a pair of ranks, and the bells that wake sleepers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use rustix::thread::futex;
use rustix::time::Timespec;

use super::chunk::{CHUNK_BYTES, HEADER_BYTES, Header};
use super::segment::Segment;

/// Chunks that a queue holds: one is read while others are written.
const SLOTS: usize = 4;
/// A cache line and its neighbour, which is fetched with it.
const LINE: usize = 128;
/// A slot begins with the header, padded so that the chunk is aligned to a line.
const SLOT_BYTES: usize = LINE + CHUNK_BYTES;
/// A queue begins with its two counters, a line each.
const QUEUE_BYTES: usize = 2 * LINE + SLOTS * SLOT_BYTES;

/// Bytes of a segment for a group of which `ranks` share a host.
pub fn segment_bytes(ranks: usize) -> usize {
    ranks * 2 * LINE + ranks * ranks.saturating_sub(1) * QUEUE_BYTES
}

/// Where a rank sleeps until another one has changed a queue.
pub struct Bell {
    segment: Arc<Segment>,
    offset: usize,
}

/// The two queues between this rank and another.
pub struct SharedLink {
    segment: Arc<Segment>,
    outgoing: usize,
    incoming: usize,
    written: u64,
    released: u64,
    /// Payload bytes copied into shared memory.
    sent: u64,
    bell: Bell,
}

impl Bell {
    /// The bell of a rank, by its number among the group's ranks of this host.
    pub fn new(segment: Arc<Segment>, index: usize) -> Bell {
        Bell { segment, offset: index * 2 * LINE }
    }

    /// Says that the rank is about to sleep; it must look at its queues once more before it does.
    pub fn arm(&self) -> u32 {
        let rings = self.segment.word32(self.offset).load(Ordering::Relaxed);
        self.segment.word32(self.offset + LINE).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        rings
    }

    /// Says that the rank is awake.
    pub fn disarm(&self) {
        self.segment.word32(self.offset + LINE).store(0, Ordering::Relaxed);
    }

    /// Sleeps until the bell rings after `arm` gave `rings`, or the time is over.
    pub fn sleep(&self, rings: u32, time: Duration) {
        let time = Timespec::try_from(time).expect("a fraction of a second");
        // Woken too early or not at all, the caller looks again.
        futex::wait(self.segment.word32(self.offset), futex::Flags::empty(), rings, Some(&time)).ok();
    }

    /// Wakes the rank if it sleeps; called after each change of its queues.
    fn ring(&self) {
        // Pairs with the fence in `arm`: either the sleeper sees the change or this sees the sleeper.
        fence(Ordering::SeqCst);
        if self.segment.word32(self.offset + LINE).load(Ordering::Relaxed) != 0 {
            self.segment.word32(self.offset).fetch_add(1, Ordering::Relaxed);
            futex::wake(self.segment.word32(self.offset), futex::Flags::empty(), 1).ok();
        }
    }
}

impl SharedLink {
    /// Link of rank `me` to rank `peer`, numbered among the group's `ranks` ranks of this host.
    pub fn new(segment: Arc<Segment>, me: usize, peer: usize, ranks: usize) -> SharedLink {
        let queue = |from: usize, to: usize| {
            let number = from * (ranks - 1) + if to > from { to - 1 } else { to };
            ranks * 2 * LINE + number * QUEUE_BYTES
        };
        let bell = Bell::new(segment.clone(), peer);
        SharedLink {
            outgoing: queue(me, peer),
            incoming: queue(peer, me),
            segment,
            written: 0,
            released: 0,
            sent: 0,
            bell,
        }
    }

    /// Copies a chunk into the queue; false if it is full.
    pub fn send(&mut self, header: &Header, chunk: &[u8]) -> bool {
        if self.room() == 0 {
            return false;
        }
        let slot = slot(self.outgoing, self.written);
        self.segment.write(slot, bytemuck::bytes_of(header));
        self.segment.write(slot + LINE, chunk);
        self.sent += chunk.len() as u64;
        self.written += 1;
        self.counter(self.outgoing).store(self.written, Ordering::Release);
        self.bell.ring();
        true
    }

    /// Free slots of the queue.
    pub fn room(&self) -> usize {
        let released = self.counter(self.outgoing + LINE).load(Ordering::Acquire);
        SLOTS.saturating_sub(usize::try_from(self.written.wrapping_sub(released)).unwrap_or(SLOTS))
    }

    /// The header of the oldest chunk that waits.
    pub fn receive(&self) -> Option<Header> {
        if self.counter(self.incoming).load(Ordering::Acquire) == self.released {
            return None;
        }
        let bytes = self.segment.read(slot(self.incoming, self.released), HEADER_BYTES);
        Some(bytemuck::pod_read_unaligned(bytes))
    }

    /// The first `length` bytes of the oldest chunk that waits.
    pub fn chunk(&self, length: usize) -> &[u8] {
        self.segment.read(slot(self.incoming, self.released) + LINE, length)
    }

    /// Gives the oldest chunk's slot back to its writer.
    pub fn release(&mut self) {
        self.released += 1;
        self.counter(self.incoming + LINE).store(self.released, Ordering::Release);
        self.bell.ring();
    }

    /// Payload bytes copied into shared memory since the last call.
    pub fn take_sent(&mut self) -> u64 {
        std::mem::take(&mut self.sent)
    }

    fn counter(&self, offset: usize) -> &AtomicU64 {
        &self.segment.words(offset, 1)[0]
    }
}

fn slot(queue: usize, number: u64) -> usize {
    let index = usize::try_from(number % SLOTS as u64).expect("a slot");
    queue + 2 * LINE + index * SLOT_BYTES
}
