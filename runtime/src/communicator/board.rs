//! What the ranks of one host are doing, readable by all of them even after a rank was killed.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::time::{ClockId, clock_gettime};

use super::error::Report;
use super::segment::Segment;

/// Bytes of one rank's entry: a counter, the time, and two texts.
pub const ENTRY_BYTES: usize = 8 * ENTRY_WORDS;
const ENTRY_WORDS: usize = 64;
const INSTRUCTION: usize = 2;
const COLLECTIVE: usize = 33;
/// Words of a text.
const TEXT_WORDS: usize = 31;

/// Entries of the ranks of one host, in shared memory or this process's own.
#[derive(Clone)]
pub struct Board {
    segment: Arc<Segment>,
    /// Where the entries begin.
    offset: usize,
}

/// The entry that one rank writes.
pub struct Entry {
    board: Board,
    index: usize,
    /// Threads of the rank take turns.
    turn: Mutex<()>,
}

impl Board {
    /// Entries from a byte of a segment on.
    pub fn new(segment: Arc<Segment>, offset: usize) -> Board {
        Board { segment, offset }
    }

    /// The entry that this rank writes.
    pub fn entry(&self, index: usize) -> Entry {
        Entry { board: self.clone(), index, turn: Mutex::new(()) }
    }

    /// What a rank reported last.
    pub fn read(&self, index: usize) -> Report {
        let words = self.words(index);
        // A rank that was killed while it wrote leaves an odd counter for ever; its words are taken as they are.
        for _ in 0..1000 {
            let before = words[0].load(Ordering::Acquire);
            let report = read_entry(words);
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && words[0].load(Ordering::Relaxed) == before {
                return report;
            }
        }
        read_entry(words)
    }

    fn words(&self, index: usize) -> &[AtomicU64] {
        self.segment.words(self.offset + index * ENTRY_BYTES, ENTRY_WORDS)
    }
}

impl Entry {
    /// Writes the instruction that this rank begins.
    pub fn instruction(&self, text: std::fmt::Arguments) {
        self.write(INSTRUCTION, text);
    }

    /// Writes the collective that this rank begins.
    pub fn collective(&self, text: std::fmt::Arguments) {
        self.write(COLLECTIVE, text);
    }

    /// What this rank reported last.
    pub fn report(&self) -> Report {
        self.board.read(self.index)
    }

    fn write(&self, at: usize, text: std::fmt::Arguments) {
        let mut buffer = Text { bytes: [0; 8 * TEXT_WORDS], length: 0 };
        // A text that is too long is cut.
        buffer.write_fmt(text).ok();
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let words = self.board.words(self.index);
        let count = words[0].load(Ordering::Relaxed);
        words[0].store(count | 1, Ordering::Relaxed);
        fence(Ordering::Release);
        words[1].store(now_millis(), Ordering::Relaxed);
        // One word more than the text needs, so that the old text ends where the new one does.
        let used = (buffer.length / 8 + 1).min(TEXT_WORDS);
        for (word, bytes) in words[at..at + used].iter().zip(buffer.bytes.as_chunks::<8>().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        words[0].store((count | 1) + 1, Ordering::Release);
    }
}

/// A text in a fixed buffer; what does not fit is dropped.
struct Text {
    bytes: [u8; 8 * TEXT_WORDS],
    length: usize,
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = self.bytes.len() - self.length;
        let kept = &text.as_bytes()[..text.floor_char_boundary(room)];
        self.bytes[self.length..self.length + kept.len()].copy_from_slice(kept);
        self.length += kept.len();
        if kept.len() < text.len() { Err(std::fmt::Error) } else { Ok(()) }
    }
}

fn read_entry(words: &[AtomicU64]) -> Report {
    let text = |at: usize| {
        let words = words[at..at + TEXT_WORDS].iter();
        let bytes: Vec<u8> = words.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    };
    let since = words[1].load(Ordering::Relaxed);
    let age = if since == 0 { 0 } else { now_millis().saturating_sub(since) };
    Report { instruction: text(INSTRUCTION), collective: text(COLLECTIVE), age }
}

/// A clock that all processes of a host read alike.
fn now_millis() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1000 + u64::try_from(time.tv_nsec).unwrap_or(0) / 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_was_written_last() {
        let segment = Segment::private(2 * ENTRY_BYTES).expect("memory");
        let board = Board::new(Arc::new(segment), 0);
        let entry = board.entry(1);
        assert_eq!(board.read(1), Report::default());
        let long = "ü".repeat(200);
        for text in ["layer 3, a longer text", "short", "", "exactly8", long.as_str()] {
            entry.instruction(format_args!("{text}"));
            entry.collective(format_args!("all_reduce {}", text.len()));
            let report = board.read(1);
            assert!(text.starts_with(&report.instruction) && report.instruction.len() >= text.len().min(247), "{text}");
            assert_eq!(report.collective, format!("all_reduce {}", text.len()));
        }
        assert_eq!(board.read(0), Report::default());
    }
}
