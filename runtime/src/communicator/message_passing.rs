//! Links through the host's own MPI: chunks as messages between two ranks, sent and received without waiting.
//!
//! Only messages between two ranks are used, not MPI's collectives: their sums may depend on the number of ranks
//! and the message size, and neither their bytes nor their waits could be watched.

use std::io;
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ir::error::Problem;
use mpi::environment::Universe;
use mpi::ffi;
use mpi::point_to_point::Source;
use mpi::raw::AsRaw;
use mpi::topology::{Communicator, SimpleCommunicator};
use mpi::{Tag, Threading};

use super::chunk::{CHUNK_BYTES, HEADER_BYTES, Header};
use super::error::Error;

/// Chunks that may be on their way to a rank.
const SLOTS: usize = 4;
/// Words of a header and a chunk.
const SLOT_WORDS: usize = (HEADER_BYTES + CHUNK_BYTES) / 8;
/// Tags are taken from groups' numbers; all implementations allow tags below this.
const TAGS: u64 = 1 << 27;

/// MPI as the threads of this process use it: one at a time.
pub struct MessagePassing {
    turn: Mutex<()>,
}

/// Messages to and from one rank for one group.
pub struct MessageLink {
    shared: Arc<MessagePassing>,
    peer: i32,
    tag: Tag,
    outgoing: [Slot; SLOTS],
    /// The slot that is used next.
    next: usize,
    incoming: Vec<u64>,
    is_ready: bool,
    sent: u64,
}

/// A chunk on its way; the request is null when it has left.
struct Slot {
    words: Vec<u64>,
    request: ffi::MPI_Request,
}

/// Starts MPI in this process, which must be `rank` of `world_size` for MPI too. MPI ends with the `Universe`.
///
/// # Errors
/// `BadInput` if the process was not started by MPI, or MPI was already started.
pub fn start(rank: u64, world_size: u64) -> Result<(Universe, Arc<MessagePassing>), Error> {
    let problem = |what: String| {
        let help = "start the ranks with mpirun or with srun --mpi, or choose --communicator local";
        Error::BadInput(vec![Problem::new(what, "--communicator mpi", help)])
    };
    let started = mpi::initialize_with_threading(Threading::Serialized);
    let (universe, threading) = started.ok_or_else(|| problem("MPI was started before".to_owned()))?;
    let world = universe.world();
    let found = (u64::from(world.rank().cast_unsigned()), u64::from(world.size().cast_unsigned()));
    if found != (rank, world_size) {
        let (rank_there, size_there) = found;
        let what = format!("this is rank {rank} of {world_size}, but for MPI rank {rank_there} of {size_there}");
        return Err(problem(what));
    }
    if !matches!(threading, Threading::Serialized | Threading::Multiple) {
        return Err(problem(format!("this MPI allows one thread only ({threading:?})")));
    }
    Ok((universe, Arc::new(MessagePassing { turn: Mutex::new(()) })))
}

impl MessagePassing {
    /// Messages to and from a rank for a group.
    pub fn link(self: &Arc<MessagePassing>, peer: u64, group: u64) -> MessageLink {
        MessageLink {
            shared: self.clone(),
            peer: i32::try_from(peer).expect("MPI counts ranks in 32 bits"),
            tag: i32::try_from(group % TAGS).expect("a tag"),
            outgoing: [(); SLOTS].map(|()| Slot { words: vec![0; SLOT_WORDS], request: no_request() }),
            next: 0,
            incoming: vec![0; SLOT_WORDS],
            is_ready: false,
            sent: 0,
        }
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// SAFETY: what keeps a link from moving between threads is the requests, pointers that MPI gave. MPI may be called
// from any thread, one at a time (`Threading::Serialized`), and all calls here are made under `MessagePassing::turn`.
#[allow(unsafe_code)]
unsafe impl Send for MessageLink {}

impl MessageLink {
    /// Starts to send a chunk; false if too many are on their way.
    pub fn send(&mut self, header: &Header, chunk: &[u8]) -> bool {
        let _turn = self.shared.turn();
        let slot = &mut self.outgoing[self.next];
        if !slot.has_left() {
            return false;
        }
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut slot.words);
        bytes[..HEADER_BYTES].copy_from_slice(bytemuck::bytes_of(header));
        bytes[HEADER_BYTES..HEADER_BYTES + chunk.len()].copy_from_slice(chunk);
        slot.start(HEADER_BYTES + chunk.len(), self.peer, self.tag);
        self.sent += chunk.len() as u64;
        self.next = (self.next + 1) % SLOTS;
        true
    }

    /// Whether all chunks have left.
    pub fn flush(&mut self) -> bool {
        let _turn = self.shared.turn();
        self.outgoing.iter_mut().all(Slot::has_left)
    }

    /// Takes the next chunk if none waits; its header.
    ///
    /// # Errors
    /// If the message is no chunk.
    pub fn receive(&mut self) -> io::Result<Option<Header>> {
        if !self.is_ready {
            let _turn = self.shared.turn();
            let process = SimpleCommunicator::world();
            let probed = process.process_at_rank(self.peer).immediate_matched_probe_with_tag(self.tag);
            let Some((message, _)) = probed else { return Ok(None) };
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.incoming);
            message.matched_receive_into(bytes);
            self.is_ready = true;
        }
        let header: Header = bytemuck::pod_read_unaligned(&bytemuck::cast_slice(&self.incoming)[..HEADER_BYTES]);
        if header.length as usize > CHUNK_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Some(header))
    }

    /// The first `length` bytes of the chunk that waits.
    pub fn chunk(&self, length: usize) -> &[u8] {
        &bytemuck::cast_slice(&self.incoming)[HEADER_BYTES..HEADER_BYTES + length]
    }

    /// Drops the chunk that waits.
    pub fn release(&mut self) {
        self.is_ready = false;
    }

    /// Payload bytes handed to MPI since the last call.
    pub fn take_sent(&mut self) -> u64 {
        std::mem::take(&mut self.sent)
    }
}

impl Slot {
    /// Starts to send the first `length` bytes. The caller has the turn, and the slot has left.
    #[allow(unsafe_code)]
    fn start(&mut self, length: usize, peer: i32, tag: Tag) {
        let count = i32::try_from(length).expect("a chunk");
        let world = SimpleCommunicator::world();
        // SAFETY: the words are longer than `length` bytes, do not move while the vector is not resized, and are
        // neither written nor dropped before `has_left` saw the request complete (see `Drop`).
        unsafe {
            let bytes = self.words.as_ptr().cast();
            ffi::MPI_Isend(bytes, count, ffi::RSMPI_UINT8_T, peer, tag, world.as_raw(), &mut self.request);
        }
    }

    /// Whether the chunk has left, so that the slot is free. The caller has the turn.
    #[allow(unsafe_code)]
    fn has_left(&mut self) -> bool {
        let mut flag = 0;
        let mut status = MaybeUninit::uninit();
        // SAFETY: the request is null, for which the call says yes, or one that `start` began; the call makes it
        // null when it is complete.
        unsafe { ffi::MPI_Test(&mut self.request, &mut flag, status.as_mut_ptr()) };
        flag != 0
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // A run that ended early leaves chunks under way, which MPI may still read: they are never freed.
        if self.request != no_request() {
            std::mem::forget(std::mem::take(&mut self.words));
        }
    }
}

#[allow(unsafe_code)]
fn no_request() -> ffi::MPI_Request {
    // SAFETY: a constant of the MPI library, read through the bindings' own C code.
    unsafe { ffi::RSMPI_REQUEST_NULL }
}
