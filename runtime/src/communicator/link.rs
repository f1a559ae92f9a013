//! A link to another rank, whichever way its chunks go.

use std::io;

use super::chunk::Header;
#[cfg(feature = "mpi")]
use super::message_passing::MessageLink;
use super::ring::SharedLink;
use super::stream::StreamLink;

/// A link to another rank. Chunks arrive in the order in which they are sent; one at a time waits to be read.
pub enum Link {
    /// Through memory of this host.
    Shared(SharedLink),
    /// Over TCP.
    Stream(Box<StreamLink>),
    /// Through the host's MPI.
    #[cfg(feature = "mpi")]
    Message(Box<MessageLink>),
}

impl Link {
    /// Takes a chunk; false if there is no room now.
    ///
    /// # Errors
    /// If the link is broken, here and below.
    pub fn send(&mut self, header: &Header, chunk: &[u8]) -> io::Result<bool> {
        match self {
            Link::Shared(link) => Ok(link.send(header, chunk)),
            Link::Stream(link) => link.send(header, chunk),
            #[cfg(feature = "mpi")]
            Link::Message(link) => Ok(link.send(header, chunk)),
        }
    }

    /// Chunks for which there is room for certain.
    pub fn room(&self) -> usize {
        match self {
            Link::Shared(link) => link.room(),
            Link::Stream(_) => 0,
            #[cfg(feature = "mpi")]
            Link::Message(_) => 0,
        }
    }

    /// Hands on what was taken; true if nothing is left.
    pub fn flush(&mut self) -> io::Result<bool> {
        match self {
            Link::Shared(_) => Ok(true),
            Link::Stream(link) => link.flush(),
            #[cfg(feature = "mpi")]
            Link::Message(link) => Ok(link.flush()),
        }
    }

    /// The header of the chunk that waits, once all of it is here.
    pub fn receive(&mut self) -> io::Result<Option<Header>> {
        match self {
            Link::Shared(link) => Ok(link.receive()),
            Link::Stream(link) => link.receive(),
            #[cfg(feature = "mpi")]
            Link::Message(link) => link.receive(),
        }
    }

    /// The first `length` bytes of the chunk that waits.
    pub fn chunk(&self, length: usize) -> &[u8] {
        match self {
            Link::Shared(link) => link.chunk(length),
            Link::Stream(link) => link.chunk(length),
            #[cfg(feature = "mpi")]
            Link::Message(link) => link.chunk(length),
        }
    }

    /// Lets go of the chunk that waits.
    pub fn release(&mut self) {
        match self {
            Link::Shared(link) => link.release(),
            Link::Stream(link) => link.release(),
            #[cfg(feature = "mpi")]
            Link::Message(link) => link.release(),
        }
    }

    /// Payload bytes that left this rank since the last call.
    pub fn take_sent(&mut self) -> u64 {
        match self {
            Link::Shared(link) => link.take_sent(),
            Link::Stream(link) => link.take_sent(),
            #[cfg(feature = "mpi")]
            Link::Message(link) => link.take_sent(),
        }
    }
}
