//! Megatron's `.idx` file: lengths of sequences and borders of documents.
//!
//! Little-endian: magic `MMIDIDX\0\0`, u64 version 1, u8 code of the token's type, u64 sequences S, u64
//! entries of the document array D (documents + 1); then i32 `[S]` lengths in tokens, i64 `[S]` offsets into
//! `.bin` in bytes, i64 `[D]` sequence numbers at which documents end, the first 0 and the last S. The arrays
//! start at byte 34, unaligned, so numbers are put together from bytes. Source: Megatron-Core 0.16.1,
//! `megatron/core/datasets/indexed_dataset.py`.

use std::path::Path;

use ir::error::Problem;
use memmap2::Mmap;

/// First bytes of an index.
pub const MAGIC: [u8; 9] = *b"MMIDIDX\0\0";
/// Version of the layout.
pub const VERSION: u64 = 1;
/// Bytes before the arrays.
pub const HEADER: u64 = 34;
/// First bytes of the layout that Megatron used before.
const FORMER_MAGIC: &[u8] = b"TNTIDX";
/// What to do about files that do not belong together.
const WRITE_AGAIN: &str = "write both files again with `execute-plan prepare` or Megatron's preprocess_data.py";

/// How a token is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenType {
    /// Unsigned, 1 byte.
    U8,
    /// Signed, 1 byte.
    I8,
    /// Signed, 2 bytes.
    I16,
    /// Signed, 4 bytes.
    I32,
    /// Signed, 8 bytes.
    I64,
    /// Unsigned, 2 bytes.
    U16,
}

impl TokenType {
    /// Every type.
    pub const ALL: [TokenType; 6] =
        [TokenType::U8, TokenType::I8, TokenType::I16, TokenType::I32, TokenType::I64, TokenType::U16];

    /// The type that Megatron-Core writes for a vocabulary: u16 below 65,500 tokens, else i32.
    ///
    /// Readers trust the header: another part of Megatron-Core takes u16 up to 65,536.
    pub fn for_vocabulary(size: u64) -> TokenType {
        if size < 65_500 { TokenType::U16 } else { TokenType::I32 }
    }

    /// Code in the header.
    pub fn code(self) -> u8 {
        match self {
            TokenType::U8 => 1,
            TokenType::I8 => 2,
            TokenType::I16 => 3,
            TokenType::I32 => 4,
            TokenType::I64 => 5,
            TokenType::U16 => 8,
        }
    }

    /// Bytes of a token.
    pub fn bytes(self) -> u64 {
        match self {
            TokenType::U8 | TokenType::I8 => 1,
            TokenType::I16 | TokenType::U16 => 2,
            TokenType::I32 => 4,
            TokenType::I64 => 8,
        }
    }

    /// The largest id.
    pub fn largest(self) -> u64 {
        match self {
            TokenType::U8 => u64::from(u8::MAX),
            TokenType::I8 => i8::MAX as u64,
            TokenType::I16 => i16::MAX as u64,
            TokenType::U16 => u64::from(u16::MAX),
            TokenType::I32 => i32::MAX as u64,
            TokenType::I64 => i64::MAX as u64,
        }
    }

    /// The token at the start of `bytes`.
    pub fn read(self, bytes: &[u8]) -> i64 {
        match self {
            TokenType::U8 => i64::from(bytes[0]),
            TokenType::I8 => i64::from(bytes[0] as i8),
            TokenType::I16 => i64::from(i16::from_le_bytes([bytes[0], bytes[1]])),
            TokenType::U16 => i64::from(u16::from_le_bytes([bytes[0], bytes[1]])),
            TokenType::I32 => i64::from(i32_at(bytes, 0)),
            TokenType::I64 => u64_at(bytes, 0) as i64,
        }
    }
}

/// A checked index.
#[derive(Debug)]
pub struct Index {
    map: Mmap,
    /// How tokens are stored in `.bin`.
    pub token_type: TokenType,
    /// Sequences.
    pub sequences: u64,
    /// Entries of the document array.
    borders: u64,
    /// Tokens of all sequences.
    pub tokens: u64,
}

impl Index {
    /// Reads and checks an index from its mapped file.
    pub fn new(map: Mmap, path: &Path) -> Result<Index, Problem> {
        let wrong = |what: String, help: &str| Problem::new(what, path.display().to_string(), help);
        if map.starts_with(FORMER_MAGIC) {
            return Err(wrong("this is an index of Megatron's former layout, TNTIDX".to_owned(), WRITE_AGAIN));
        }
        if map.len() < HEADER as usize || !map.starts_with(&MAGIC) {
            return Err(wrong(
                "this is no index of tokens: it does not start with MMIDIDX and a header".to_owned(),
                "name the prefix of a .bin and .idx file that `execute-plan prepare` or Megatron wrote",
            ));
        }
        let version = u64_at(&map, 9);
        if version != VERSION {
            return Err(wrong(format!("the index has version {version}, this program reads 1"), WRITE_AGAIN));
        }
        let token_type = token_type(map[17]).map_err(|what| wrong(what, WRITE_AGAIN))?;
        let mut index = Index { sequences: u64_at(&map, 18), borders: u64_at(&map, 26), tokens: 0, token_type, map };
        index.check_size().map_err(|what| wrong(what, WRITE_AGAIN))?;
        index.tokens = index.check_arrays().map_err(|what| wrong(what, WRITE_AGAIN))?;
        Ok(index)
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// First sequence of document `document`; for the number of documents, the number of sequences.
    fn border(&self, document: u64) -> u64 {
        u64_at(&self.map, (HEADER + 12 * self.sequences + 8 * document) as usize)
    }

    /// Number of documents.
    pub fn documents(&self) -> u64 {
        self.borders - 1
    }

    /// Token at which document `document` starts; for the number of documents, the number of tokens.
    pub fn document_start(&self, document: u64) -> u64 {
        match self.border(document) {
            sequence if sequence == self.sequences => self.tokens,
            sequence => self.offset(sequence) / self.token_type.bytes(),
        }
    }

    fn length(&self, sequence: u64) -> i32 {
        i32_at(&self.map, (HEADER + 4 * sequence) as usize)
    }

    fn offset(&self, sequence: u64) -> u64 {
        u64_at(&self.map, (HEADER + 4 * self.sequences + 8 * sequence) as usize)
    }

    fn check_size(&self) -> Result<(), String> {
        let arrays = |sequences: u64| {
            let lengths_and_offsets = sequences.checked_mul(12)?;
            self.borders.checked_mul(8)?.checked_add(lengths_and_offsets)?.checked_add(HEADER)
        };
        let (sequences, borders, found) = (self.sequences, self.borders, self.map.len() as u64);
        match arrays(sequences) {
            Some(expected) if expected == found && borders > 0 => Ok(()),
            Some(expected) if expected.checked_add(sequences) == Some(found) && sequences > 0 => {
                Err("the index holds modes of sequences: it is of a multimodal data set, not of text".to_owned())
            }
            expected => {
                let expected = expected.map_or("more than 2^64".to_owned(), |bytes| bytes.to_string());
                Err(format!(
                    "the index is cut short or damaged: {found} bytes, but {sequences} sequences and {borders} \
                     document borders take {expected}"
                ))
            }
        }
    }

    /// Checks that sequences follow one another without gaps, and that documents do; gives all tokens.
    fn check_arrays(&self) -> Result<u64, String> {
        let mut tokens = 0u64;
        for sequence in 0..self.sequences {
            let length = self.length(sequence);
            let expected = tokens * self.token_type.bytes();
            if length < 0 || self.offset(sequence) != expected {
                let offset = self.offset(sequence);
                return Err(format!(
                    "the index is damaged: sequence {sequence} has {length} tokens and starts at byte {offset}, \
                     the one before ends at byte {expected}"
                ));
            }
            tokens += length as u64;
        }
        let borders = (0..self.borders).map(|document| self.border(document));
        let rising = borders.clone().zip(borders.skip(1)).all(|(start, end)| start <= end);
        let (first, last) = (self.border(0), self.border(self.borders - 1));
        if first != 0 || last != self.sequences || !rising {
            return Err(format!(
                "the index is damaged: documents run from sequence {first} to {last}, of {} sequences",
                self.sequences
            ));
        }
        Ok(tokens)
    }
}

fn token_type(code: u8) -> Result<TokenType, String> {
    match (TokenType::ALL.into_iter().find(|kind| kind.code() == code), code) {
        (Some(kind), _) => Ok(kind),
        // 7 is float32 in Megatron-Core, and float64 in the version that BLOOM was trained with.
        (None, 6 | 7) => Err(format!("the index says that tokens are fractions (type code {code}), not ids")),
        (None, _) => Err(format!("the index has the unknown type code {code}")),
    }
}

fn i32_at(bytes: &[u8], at: usize) -> i32 {
    i32::from_le_bytes(bytes[at..at + 4].try_into().expect("a slice of four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("a slice of eight bytes"))
}
