//! Where a run's tokens come from, and which of them a rank reads in a step.
//!
//! A source is an endless sequence of tokens t₀, t₁, …: for a corpus all its documents one after another and
//! then again from the start, for `--synthetic` random ids. With sequence length s, sample k is the s + 1
//! tokens from t at k · s on: the first s are inputs, the last s are their targets, so that neighbouring samples
//! share one token, as in Megatron. An epoch need not be whole samples: the sample that reaches the end of the
//! corpus goes on with its first tokens, and the next epoch is cut at other places. Nothing is shuffled.
//!
//! Samples of a step go to ranks micro-batch by micro-batch ([`sample_index`]), as in Megatron's
//! `MegatronPretrainingSampler`: every layout with the same global batch sees the same samples in each step.

mod corpus;
mod index;
mod writer;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ir::error::Problem;

use crate::random::Stream;

pub use corpus::Corpus;
pub use index::TokenType;
pub use writer::DatasetWriter;

/// A sequence of tokens.
#[derive(Clone, Debug)]
pub enum Source {
    /// A part of a corpus, over and over.
    Corpus {
        /// The files.
        corpus: Arc<Corpus>,
        /// Tokens of the part; not empty.
        part: Range<u64>,
    },
    /// Random ids, each equally likely.
    Synthetic {
        /// Where the ids come from.
        stream: Stream,
        /// Ids of the vocabulary.
        vocabulary: u32,
    },
}

/// What a run trains on and what it evaluates on.
#[derive(Clone, Debug)]
pub struct Sources {
    /// For training steps.
    pub training: Source,
    /// For evaluations.
    pub evaluation: Source,
}

/// Sequences of a step, by the rank and micro-batch that process them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchShape {
    /// Replicas.
    pub data_parallel: u64,
    /// Sequences of a micro-batch on one replica.
    pub micro_batch: u64,
}

/// Opens `PREFIX.bin` and `PREFIX.idx` for a model with `vocabulary` tokens.
///
/// The last documents, about the fraction `held_out` of the tokens, are kept from training and used for
/// evaluation. With 0, evaluation reads the corpus that training reads.
///
/// # Errors
/// Files that are missing, of another kind or cut short; a corpus too small to be split.
pub fn open_corpus(prefix: &Path, vocabulary: u64, held_out: f64) -> Result<Sources, Problem> {
    let corpus = Arc::new(Corpus::open(prefix, vocabulary)?);
    let tokens = corpus.tokens();
    let part = |part| Source::Corpus { corpus: Arc::clone(&corpus), part };
    if held_out == 0.0 {
        return Ok(Sources { training: part(0..tokens), evaluation: part(0..tokens) });
    }
    let border = corpus.document_border(((1.0 - held_out) * tokens as f64) as u64);
    if border == 0 || border == tokens {
        return Err(Problem::new(
            format!("no documents can be held out: the corpus is too small to give up {held_out} of its tokens"),
            corpus.origin().display().to_string(),
            "use a corpus of more documents, or evaluation without `held_out`",
        ));
    }
    Ok(Sources { training: part(0..border), evaluation: part(border..tokens) })
}

/// Random tokens for benchmarks, the same for every layout.
pub fn synthetic(seed: u64, vocabulary: u32) -> Sources {
    let source = |name| Source::Synthetic { stream: Stream::new(seed, name), vocabulary };
    Sources { training: source("synthetic/training"), evaluation: source("synthetic/evaluation") }
}

/// Number of the sample that a rank reads as sequence `sequence` of micro-batch `micro_batch` of a step.
///
/// consumed + (m · d + r) · b + i, with m micro-batch, d replicas, r replica, b sequences of a micro-batch, i
/// sequence; `consumed` are the samples of all steps before.
pub fn sample_index(consumed: u64, shape: BatchShape, micro_batch: u64, replica: u64, sequence: u64) -> u64 {
    consumed + (micro_batch * shape.data_parallel + replica) * shape.micro_batch + sequence
}

/// Reads a micro-batch of one replica: inputs and targets, each `[micro_batch, sequence_length]` row-major.
///
/// # Errors
/// A token id that the model's vocabulary lacks.
pub fn read_micro_batch(
    source: &Source,
    first_sample: u64,
    sequences: u64,
    sequence_length: usize,
) -> Result<(Vec<u32>, Vec<u32>), Problem> {
    let mut inputs = Vec::with_capacity(sequences as usize * sequence_length);
    let mut targets = Vec::with_capacity(sequences as usize * sequence_length);
    let mut sample = vec![0; sequence_length + 1];
    for sequence in 0..sequences {
        read_sample(source, first_sample + sequence, &mut sample)?;
        inputs.extend_from_slice(&sample[..sequence_length]);
        targets.extend_from_slice(&sample[1..]);
    }
    Ok((inputs, targets))
}

/// Reads sample `sample` with the sequence length `out.len() − 1`.
///
/// # Errors
/// A token id that the model's vocabulary lacks.
pub fn read_sample(source: &Source, sample: u64, out: &mut [u32]) -> Result<(), Problem> {
    let start = sample * (out.len() as u64 - 1);
    match source {
        Source::Corpus { corpus, part } => read_around(corpus, part, start, out),
        Source::Synthetic { stream, vocabulary } => {
            out.iter_mut().zip(start..).for_each(|(token, index)| *token = stream.below(index, *vocabulary));
            Ok(())
        }
    }
}

/// Reads tokens from `start` on of a part that is repeated without end.
fn read_around(corpus: &Corpus, part: &Range<u64>, start: u64, out: &mut [u32]) -> Result<(), Problem> {
    let length = part.end - part.start;
    let mut rest = out;
    let mut at = start % length;
    while !rest.is_empty() {
        let (piece, behind) = rest.split_at_mut(rest.len().min((length - at) as usize));
        corpus.read(part.start + at, piece)?;
        (rest, at) = (behind, 0);
    }
    Ok(())
}
