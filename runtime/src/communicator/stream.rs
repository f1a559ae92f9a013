//! Links over TCP: chunks with their headers on one connection for each pair of ranks and group.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;

use super::chunk::{CHUNK_BYTES, HEADER_BYTES, Header};

/// A connection that never blocks: what the system does not take is kept here, one chunk at most.
pub struct StreamLink {
    stream: TcpStream,
    rest: Vec<u8>,
    rest_at: usize,
    /// Bytes of `rest` that belong to a header.
    rest_header: usize,
    /// Header and chunk that are coming in; words, so that elements are aligned.
    incoming: Vec<u64>,
    received: usize,
    /// Payload bytes that the system took.
    sent: u64,
}

impl StreamLink {
    /// Takes over a connection on which the greeting is done.
    ///
    /// # Errors
    /// Those of the system.
    pub fn new(stream: TcpStream) -> io::Result<StreamLink> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let incoming = vec![0; (HEADER_BYTES + CHUNK_BYTES) / 8];
        Ok(StreamLink { stream, rest: Vec::new(), rest_at: 0, rest_header: 0, incoming, received: 0, sent: 0 })
    }

    /// The connection, to wait for.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Writes a chunk, or keeps what the system does not take; false if an earlier chunk is still kept.
    ///
    /// # Errors
    /// If the connection is broken.
    pub fn send(&mut self, header: &Header, chunk: &[u8]) -> io::Result<bool> {
        if !self.flush()? {
            return Ok(false);
        }
        let head = bytemuck::bytes_of(header);
        let taken = match self.stream.write_vectored(&[IoSlice::new(head), IoSlice::new(chunk)]) {
            Ok(taken) => taken,
            Err(error) if is_retry(&error) => 0,
            Err(error) => return Err(error),
        };
        let head_taken = taken.min(HEADER_BYTES);
        self.sent += (taken - head_taken) as u64;
        self.rest.clear();
        self.rest.extend_from_slice(&head[head_taken..]);
        self.rest.extend_from_slice(&chunk[taken - head_taken..]);
        (self.rest_at, self.rest_header) = (0, HEADER_BYTES - head_taken);
        Ok(true)
    }

    /// Writes what is kept; true if nothing is left.
    ///
    /// # Errors
    /// If the connection is broken.
    pub fn flush(&mut self) -> io::Result<bool> {
        while self.rest_at < self.rest.len() {
            match self.stream.write(&self.rest[self.rest_at..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(taken) => {
                    let head_taken = taken.min(self.rest_header.saturating_sub(self.rest_at));
                    self.sent += (taken - head_taken) as u64;
                    self.rest_at += taken;
                }
                Err(error) if is_retry(&error) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Whether a chunk is kept that the system has not taken whole.
    pub fn is_writing(&self) -> bool {
        self.rest_at < self.rest.len()
    }

    /// Reads on; the header once its chunk is complete.
    ///
    /// # Errors
    /// If the connection is broken, or the other side sends no chunks.
    pub fn receive(&mut self) -> io::Result<Option<Header>> {
        while !self.is_ready() {
            let wanted = self.wanted()?;
            let buffer: &mut [u8] = bytemuck::cast_slice_mut(&mut self.incoming);
            match self.stream.read(&mut buffer[self.received..wanted]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(length) => self.received += length,
                Err(error) if is_retry(&error) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        Ok(Some(self.header()))
    }

    /// Whether a whole chunk waits.
    pub fn is_ready(&self) -> bool {
        self.received >= HEADER_BYTES && self.received == HEADER_BYTES + self.header().length as usize
    }

    /// The first `length` bytes of the chunk that waits.
    pub fn chunk(&self, length: usize) -> &[u8] {
        &bytemuck::cast_slice(&self.incoming)[HEADER_BYTES..HEADER_BYTES + length]
    }

    /// Drops the chunk that waits.
    pub fn release(&mut self) {
        self.received = 0;
    }

    /// Payload bytes that the system took since the last call.
    pub fn take_sent(&mut self) -> u64 {
        std::mem::take(&mut self.sent)
    }

    fn header(&self) -> Header {
        bytemuck::pod_read_unaligned(&bytemuck::cast_slice(&self.incoming)[..HEADER_BYTES])
    }

    /// Bytes to have before something can be done.
    fn wanted(&self) -> io::Result<usize> {
        if self.received < HEADER_BYTES {
            return Ok(HEADER_BYTES);
        }
        let length = self.header().length as usize;
        if length > CHUNK_BYTES {
            return Err(ErrorKind::InvalidData.into());
        }
        Ok(HEADER_BYTES + length)
    }
}

fn is_retry(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
