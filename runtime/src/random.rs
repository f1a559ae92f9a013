//! Counter-based random numbers: element i of a stream is a function of (seed, name, i) and of nothing else.
//!
//! A rank can so create its part of a parameter, or of a dropout mask, without the other parts, and every
//! layout sees the same numbers. The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers:
//! as easy as 1, 2, 3", SC 2011, figure 3 and table 2). Seed and name become a key and the upper half of the
//! counter by SHA-256; the lower half counts blocks of four elements.
//!
//! Numbers are the same bits on every platform: only IEEE additions, multiplications, divisions and square
//! roots are used, no function of the platform's mathematical library.

mod normal;
mod region;

use std::ops::Range;

use ir::graph::DropoutSite;
use sha2::{Digest, Sha256};

pub use region::{Region, Span};

use normal::normal_of_word;

/// Multipliers of Philox4x32; source: table 2 of the paper.
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// What the key grows by in each round: golden ratio and √3 − 1; source: section 3.3 of the paper.
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
/// Rounds; the paper finds no failure of statistical tests from 7 on and recommends 10.
const ROUNDS: usize = 10;
/// Numbers of one block.
const WORDS: usize = 4;
/// Blocks that are computed side by side, so that the compiler uses vector registers.
const BLOCKS: usize = 16;
/// Numbers that are computed side by side.
const CHUNK: usize = WORDS * BLOCKS;

/// An endless sequence of random numbers, each reachable by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// Key of the generator.
    pub key: [u32; 2],
    /// Upper half of every counter.
    pub counter_high: [u32; 2],
}

/// Philox4x32-10 of a counter under a key.
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    rounds(counter.map(|word| [word]), key).map(|[word]| word)
}

impl Stream {
    /// The stream of a name, such as a parameter's, under a seed.
    pub fn new(seed: u64, name: &str) -> Stream {
        let digest = Sha256::new().chain_update(seed.to_le_bytes()).chain_update(name.as_bytes()).finalize();
        let word = |at: usize| u32::from_le_bytes([digest[at], digest[at + 1], digest[at + 2], digest[at + 3]]);
        Stream { key: [word(0), word(4)], counter_high: [word(8), word(12)] }
    }

    /// The stream of a dropout mask; steps are counted over the whole run, layers over the model.
    ///
    /// Equal places give equal masks, in forward, recomputation and backward. The micro-batch is not part of the
    /// name but of the element's index: masks are regions of the whole `[global_batch, …]` activation, so that they
    /// do not depend on how a batch is cut into micro-batches.
    pub fn dropout(seed: u64, step: u64, layer: u64, site: DropoutSite) -> Stream {
        let site = match site {
            DropoutSite::Embedding => "embedding",
            DropoutSite::Attention => "attention",
            DropoutSite::AttentionOutput => "attention_output",
            DropoutSite::FeedForwardOutput => "feed_forward_output",
        };
        Stream::new(seed, &format!("dropout/step {step}/layer {layer}/{site}"))
    }

    /// Element `index` as 32 random bits.
    pub fn word(&self, index: u64) -> u32 {
        let block = index / WORDS as u64;
        let counter = [block as u32, (block >> 32) as u32, self.counter_high[0], self.counter_high[1]];
        philox(counter, self.key)[(index % WORDS as u64) as usize]
    }

    /// Element `index` as a whole number from 0 to `bound` − 1, each equally likely up to 2⁻³² · `bound`.
    pub fn below(&self, index: u64, bound: u32) -> u32 {
        ((u64::from(self.word(index)) * u64::from(bound)) >> 32) as u32
    }

    /// Element `index` as a number of [0, 1).
    pub fn uniform(&self, index: u64) -> f32 {
        uniform_of_word(self.word(index))
    }

    /// Element `index` as a number of the standard normal distribution.
    pub fn normal(&self, index: u64) -> f32 {
        normal_of_word(self.word(index))
    }

    /// Elements `WORDS · block` to `WORDS · block + CHUNK` − 1 as random bits.
    fn chunk(&self, block: u64) -> [u32; CHUNK] {
        let blocks: [u64; BLOCKS] = std::array::from_fn(|lane| block.wrapping_add(lane as u64));
        let [high, higher] = self.counter_high.map(|word| [word; BLOCKS]);
        let counter = [blocks.map(|block| block as u32), blocks.map(|block| (block >> 32) as u32), high, higher];
        let words = rounds(counter, self.key);
        let mut chunk = [0; CHUNK];
        for lane in 0..BLOCKS {
            (0..WORDS).for_each(|word| chunk[WORDS * lane + word] = words[word][lane]);
        }
        chunk
    }
}

/// Fills `out` with elements `range` of a region, row-major, as uniform numbers of [0, 1).
pub fn fill_uniform(stream: Stream, region: &Region, range: Range<u64>, out: &mut [f32]) {
    change(stream, region, range, out, |_, word| uniform_of_word(word));
}

/// Fills `out` with elements `range` of a region, row-major, of the normal distribution with mean 0 and
/// standard deviation `deviation`.
pub fn fill_normal(stream: Stream, region: &Region, range: Range<u64>, deviation: f32, out: &mut [f32]) {
    change(stream, region, range, out, |_, word| normal_of_word(word) * deviation);
}

/// Applies a dropout mask to elements `range` of a region, row-major: each becomes 0 with probability
/// `probability`, else it is divided by 1 − `probability`.
pub fn drop_elements(stream: Stream, region: &Region, range: Range<u64>, probability: f64, elements: &mut [f32]) {
    let scale = (1.0 / (1.0 - probability)) as f32;
    let threshold = (probability * 4_294_967_296.0) as u32;
    change(stream, region, range, elements, |element, word| if word >= threshold { element * scale } else { 0.0 });
}

/// Changes elements run by run: each run of a region's neighbouring elements meets a run of the stream.
fn change(
    stream: Stream,
    region: &Region,
    range: Range<u64>,
    elements: &mut [f32],
    changed: impl Fn(f32, u32) -> f32 + Copy,
) {
    assert_eq!(range.end - range.start, elements.len() as u64, "the range must be as long as the slice");
    let mut rest = elements;
    region.for_each_run(range, |start, length| {
        let (run, behind) = std::mem::take(&mut rest).split_at_mut(length as usize);
        change_run(stream, start, run, changed);
        rest = behind;
    });
}

/// Changes elements by numbers `start`, `start` + 1, … of a stream.
fn change_run(stream: Stream, start: u64, elements: &mut [f32], changed: impl Fn(f32, u32) -> f32 + Copy) {
    let mut block = start / WORDS as u64;
    let lead = (start % WORDS as u64) as usize;
    let (head, body) = elements.split_at_mut(elements.len().min(if lead == 0 { 0 } else { CHUNK - lead }));
    if !head.is_empty() {
        let words = stream.chunk(block);
        head.iter_mut().zip(&words[lead..]).for_each(|(element, word)| *element = changed(*element, *word));
        block += BLOCKS as u64;
    }
    for piece in body.chunks_mut(CHUNK) {
        let words = stream.chunk(block);
        match <&mut [f32; CHUNK]>::try_from(&mut *piece) {
            Ok(whole) => (0..CHUNK).for_each(|at| whole[at] = changed(whole[at], words[at])),
            Err(_) => piece.iter_mut().zip(&words).for_each(|(element, word)| *element = changed(*element, *word)),
        }
        block += BLOCKS as u64;
    }
}

/// The rounds of Philox on `N` counters at once; word by word, so that each line is one vector operation.
fn rounds<const N: usize>(mut counter: [[u32; N]; 4], mut key: [u32; 2]) -> [[u32; N]; 4] {
    for _ in 0..ROUNDS {
        let [a, b, c, d] = &mut counter;
        for lane in 0..N {
            let first = u64::from(MULTIPLIERS[0]) * u64::from(a[lane]);
            let second = u64::from(MULTIPLIERS[1]) * u64::from(c[lane]);
            a[lane] = (second >> 32) as u32 ^ b[lane] ^ key[0];
            b[lane] = second as u32;
            c[lane] = (first >> 32) as u32 ^ d[lane] ^ key[1];
            d[lane] = first as u32;
        }
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    counter
}

/// The upper 24 bits as a multiple of 2⁻²⁴: exact.
fn uniform_of_word(word: u32) -> f32 {
    (word >> 8) as i32 as f32 * (1.0 / 16_777_216.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the authors' own implementation: Random123 1.14, `kat_vectors`, `philox4x32 10`.
    #[test]
    fn philox_gives_the_known_answers() {
        let pi = ([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]);
        let rows = [
            (([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            (([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (pi, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]),
        ];
        for ((counter, key), expected) in rows {
            assert_eq!(philox(counter, key), expected, "{counter:x?} {key:x?}");
        }
    }

    #[test]
    fn filled_slices_hold_the_single_elements() {
        let stream = Stream::new(7, "layer 0/attention.query.weight");
        let base = (1u64 << 34) - 70;
        for (lead, length) in [(0, 0), (0, 1), (0, 64), (0, 200), (1, 1), (1, 62), (1, 63), (3, 61), (3, 62), (3, 190)]
        {
            let start = base + lead;
            let region = Region { spans: vec![Span { whole: 1 << 40, start, length }] };
            let mut filled = [vec![0.0; length as usize], vec![0.0; length as usize], vec![0.0; length as usize]];
            fill_normal(stream, &region, 0..length, 0.5, &mut filled[0]);
            fill_uniform(stream, &region, 0..length, &mut filled[1]);
            filled[2].fill(3.0);
            drop_elements(stream, &region, 0..length, 0.25, &mut filled[2]);
            let [normal, uniform, dropout] = filled;
            for (((index, normal), uniform), dropout) in (start..).zip(normal).zip(uniform).zip(dropout) {
                assert_eq!(normal.to_bits(), (stream.normal(index) * 0.5).to_bits(), "{lead} {length} {index}");
                assert_eq!(uniform.to_bits(), stream.uniform(index).to_bits(), "{lead} {length} {index}");
                let kept = if stream.word(index) >= 1 << 30 { 4.0 } else { 0.0 };
                assert_eq!(dropout, kept, "{lead} {length} {index}");
            }
        }
    }

    /// Fixed numbers: a change of the generator would change every run that is resumed.
    #[test]
    fn streams_never_change() {
        let stream = Stream::new(1234, "embedding/embedding.token");
        let bits: Vec<u32> = (0..6).map(|index| stream.normal(index).to_bits()).collect();
        assert_eq!(bits, [0xbf67_8aeb, 0x3fd4_36ae, 0xbd66_fe19, 0x3f93_0916, 0x3ec1_f6d9, 0x3e97_b1b7]);
    }

    #[test]
    fn moments_are_those_of_the_distributions() {
        let count = 1u64 << 20;
        let region = Region::whole(&[count]);
        let mut numbers = vec![0.0; count as usize];
        let mut moments = |power: i32, fill: &dyn Fn(&mut [f32])| {
            fill(&mut numbers);
            numbers.iter().map(|x| f64::from(*x).powi(power)).sum::<f64>() / count as f64
        };
        let normal = |out: &mut [f32]| fill_normal(Stream::new(1, "n"), &region, 0..count, 1.0, out);
        let uniform = |out: &mut [f32]| fill_uniform(Stream::new(1, "u"), &region, 0..count, out);
        let dropout = |out: &mut [f32]| {
            let stream = Stream::dropout(1, 3, 2, DropoutSite::AttentionOutput);
            out.fill(1.0);
            drop_elements(stream, &region, 0..count, 0.1, out);
        };
        // Power, expected mean of the powers, and its standard deviation over 2²⁰ numbers: tolerances are 5 of them.
        type Row<'a> = (&'a str, i32, &'a dyn Fn(&mut [f32]), f64, f64);
        let rows: [Row; 8] = [
            ("normal, mean", 1, &normal, 0.0, 1.0),
            ("normal, variance", 2, &normal, 1.0, 2f64.sqrt()),
            ("normal, skew", 3, &normal, 0.0, 15f64.sqrt()),
            ("normal, fourth", 4, &normal, 3.0, 96f64.sqrt()),
            ("uniform, mean", 1, &uniform, 0.5, (1.0 / 12f64).sqrt()),
            ("uniform, square", 2, &uniform, 1.0 / 3.0, (4.0 / 45f64).sqrt()),
            ("dropout, mean", 1, &dropout, 1.0, (1.0 / 9f64).sqrt()),
            ("dropout, square", 2, &dropout, 1.0 / 0.9, (1.0 / 9f64).sqrt() / 0.9),
        ];
        for (name, power, fill, expected, deviation) in rows {
            let found = moments(power, fill);
            let tolerance = 5.0 * deviation / (count as f64).sqrt();
            assert!((found - expected).abs() < tolerance, "{name}: {found}, expected {expected} ± {tolerance}");
        }
    }

    #[test]
    fn neighbours_and_streams_are_not_correlated() {
        let count = 1u64 << 18;
        let numbers = |seed, name: &str, start| {
            let mut numbers = vec![0.0; count as usize];
            let region = Region { spans: vec![Span { whole: 2 * count, start, length: count }] };
            fill_normal(Stream::new(seed, name), &region, 0..count, 1.0, &mut numbers);
            numbers
        };
        let base = numbers(1, "a", 0);
        let rows = [
            ("next", numbers(1, "a", 1)),
            ("second next", numbers(1, "a", 2)),
            ("next block", numbers(1, "a", 4)),
            ("other name", numbers(1, "b", 0)),
            ("other seed", numbers(2, "a", 0)),
        ];
        for (name, other) in rows {
            let product: f64 = base.iter().zip(&other).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            let correlation = product / count as f64;
            assert!(correlation.abs() < 5.0 / (count as f64).sqrt(), "{name}: {correlation}");
        }
    }

    #[test]
    fn bounded_numbers_reach_both_ends() {
        let stream = Stream::new(5, "tokens");
        let seen: std::collections::BTreeSet<u32> = (0..200).map(|index| stream.below(index, 7)).collect();
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6]);
        assert!((0..200).all(|index| stream.below(index, 1) == 0));
    }
}
