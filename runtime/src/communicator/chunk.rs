//! Chunks: the pieces in which messages travel, and the header that says which message a piece belongs to.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};

/// Bytes of a chunk; the last of a message may be shorter. Several fit into a core's own cache.
pub const CHUNK_BYTES: usize = 64 * 1024;
/// Bytes of a header, which counts as no payload.
pub const HEADER_BYTES: usize = size_of::<Header>();

/// What ranks do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// Reduction, whole on every rank.
    AllReduce,
    /// Reduction, a part on each rank.
    ReduceScatter,
    /// Parts joined on every rank.
    AllGather,
    /// A part of each rank's message to each rank.
    AllToAll,
    /// One rank's message to all.
    Broadcast,
    /// One rank's message to another.
    Send,
    /// Waiting for all.
    Barrier,
}

/// The head of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Header {
    /// Number of the operation in its group.
    pub sequence: u64,
    /// Bytes of the operation's message.
    pub total: u64,
    /// Which operation.
    pub operation: u32,
    /// 0 for what is moved or to be summed, 1 for sums.
    pub phase: u32,
    /// Bytes of this chunk.
    pub length: u32,
    /// Zero.
    pub padding: u32,
}

impl Operation {
    /// All operations, by number.
    pub const ALL: [Operation; 7] = [
        Operation::AllReduce,
        Operation::ReduceScatter,
        Operation::AllGather,
        Operation::AllToAll,
        Operation::Broadcast,
        Operation::Send,
        Operation::Barrier,
    ];

    /// The word used in messages and tables.
    pub fn name(self) -> &'static str {
        match self {
            Operation::AllReduce => "all_reduce",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::AllGather => "all_gather",
            Operation::AllToAll => "all_to_all",
            Operation::Broadcast => "broadcast",
            Operation::Send => "send",
            Operation::Barrier => "barrier",
        }
    }

    /// Its place in `ALL`.
    pub fn number(self) -> usize {
        self as usize
    }
}

/// Chunks of a message of `length` elements; an empty message is one empty chunk, so that ranks meet all the same.
pub fn chunk_count(length: usize, per_chunk: usize) -> usize {
    length.div_ceil(per_chunk).max(1)
}

/// Elements of a chunk.
pub fn chunk_range(length: usize, per_chunk: usize, chunk: usize) -> Range<usize> {
    (chunk * per_chunk).min(length)..((chunk + 1) * per_chunk).min(length)
}

/// Part `index` of `length` elements over `ranks` ranks: `ceil(length / ranks)` each, the last ones shorter or empty.
pub fn part(length: usize, index: usize, ranks: usize) -> Range<usize> {
    let size = length.div_ceil(ranks);
    (index * size).min(length)..((index + 1) * size).min(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_and_chunks_cover_all_once() {
        for length in [0, 1, 2, 7, 8, 9, 64] {
            for ranks in 1..=9 {
                let joined: Vec<usize> = (0..ranks).flat_map(|index| part(length, index, ranks)).collect();
                assert_eq!(joined, (0..length).collect::<Vec<_>>(), "{length} over {ranks}");
                let chunks = (0..chunk_count(length, ranks)).flat_map(|chunk| chunk_range(length, ranks, chunk));
                assert_eq!(chunks.collect::<Vec<_>>(), joined, "{length} by {ranks}");
            }
        }
    }
}
