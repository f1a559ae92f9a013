//! Dropout with a residual, masked by the counter-based random numbers of the runtime.

use cubecl::prelude::*;

use crate::queue::{cubes_for, expect_all, send};
use crate::{Buffer, Queue};

/// Units of a cube.
const UNITS: u32 = 256;
/// Multipliers of Philox4x32 (Salmon et al., SC 2011, table 2).
const FIRST: u32 = 0xD251_1F53;
const SECOND: u32 = 0xCD9E_8D57;
/// What the key grows by in each round (section 3.3 of the paper).
const FIRST_STEP: u32 = 0x9E37_79B9;
const SECOND_STEP: u32 = 0xBB67_AE85;
/// Rounds of the generator.
const ROUNDS: u32 = 10;

/// Which elements of activations `[sequences, positions, width]` are dropped.
///
/// The number that decides on an element is that of its index in the whole `[global_batch, sequence_length, width]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mask {
    /// Key of the stream.
    pub key: [u32; 2],
    /// Upper half of the stream's counters.
    pub counter_high: [u32; 2],
    /// Probability that an element is dropped.
    pub probability: f64,
    /// First sequence, counted over the global batch.
    pub first_sequence: u32,
    /// First position that this rank holds, and the number of all.
    pub positions: (u32, u32),
}

/// y = residual + dropped x, or without a residual only that, for tensors `[sequences, positions, width]`; its own
/// backward pass without a residual. What is kept is divided by 1 − probability.
///
/// Moves 3e bytes per element with a residual, else 2e.
pub fn dropout(queue: &Queue, mask: &Mask, shape: [usize; 3], x: &Buffer, residual: Option<&Buffer>, y: &Buffer) {
    let (element, width) = (x.element, x.element.width(shape[2]));
    expect_all([x, y, residual.unwrap_or(x)], shape.iter().product(), element);
    let cubes = cubes_for(x.length / width, UNITS);
    send!(
        queue,
        dropout_kernel,
        cubes,
        UNITS,
        width,
        x.argument(width),
        residual.unwrap_or(x).argument(width),
        y.result(width, &[x]),
        mask.key[0],
        mask.key[1],
        mask.counter_high[0],
        mask.counter_high[1],
        (mask.probability * 4_294_967_296.0) as u32,
        (1.0 / (1.0 - mask.probability)) as f32,
        mask.first_sequence * mask.positions.1 + mask.positions.0,
        shape[1] as u32,
        mask.positions.1,
        shape[2] as u32,
        residual.is_some(),
        element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn dropout_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    residual: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    key: u32,
    second_key: u32,
    high: u32,
    higher: u32,
    threshold: u32,
    scale: f32,
    first_row: u32,
    positions: u32,
    all_positions: u32,
    elements: u32,
    #[comptime] has_residual: bool,
    #[define(F)] _element: ElemType,
) {
    let columns = elements as usize / N::value();
    let mut at = ABSOLUTE_POS;
    while at < y.len() {
        let row = (at / columns) as u32;
        let column = ((at % columns) * N::value()) as u32;
        let whole_row = first_row + row / positions * all_positions + row % positions;
        let low = whole_row * elements + column;
        let mut above = whole_row.mul_hi(elements);
        if low < column {
            above += 1;
        }
        let mut dropped = Vector::<f32, N>::cast_from(x[at]);
        #[unroll]
        for lane in 0..N::value() {
            let index = low + lane as u32;
            let words = philox((index / 4) | (above << 30), above / 4, high, higher, key, second_key);
            let word = words.of(index % 4);
            dropped.insert(lane, select(word >= threshold, dropped.extract(lane) * scale, 0.0));
        }
        if comptime!(has_residual) {
            dropped += Vector::<f32, N>::cast_from(residual[at]);
        }
        y[at] = Vector::cast_from(dropped);
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// A block of four random numbers.
#[derive(CubeType)]
struct Words {
    a: u32,
    b: u32,
    c: u32,
    d: u32,
}

#[cube]
impl Words {
    fn of(&self, place: u32) -> u32 {
        select(place < 2, select(place == 0, self.a, self.b), select(place == 2, self.c, self.d))
    }
}

/// Philox4x32-10 (Salmon et al., SC 2011, figure 3) of a counter under a key.
#[cube]
fn philox(low: u32, lower_high: u32, high: u32, higher: u32, key: u32, second_key: u32) -> Words {
    let mut a = low;
    let mut b = lower_high;
    let mut c = high;
    let mut d = higher;
    let mut key = key;
    let mut second_key = second_key;
    #[unroll]
    for _ in 0..ROUNDS {
        let next_a = c.mul_hi(SECOND) ^ b ^ key;
        let next_c = a.mul_hi(FIRST) ^ d ^ second_key;
        b = c * SECOND;
        d = a * FIRST;
        a = next_a;
        c = next_c;
        key += FIRST_STEP;
        second_key += SECOND_STEP;
    }
    Words { a, b, c, d }
}
