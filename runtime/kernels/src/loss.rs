//! Cross-entropy of logits whose vocabulary is split over ranks, without probabilities in memory.
//!
//! A rank computes the largest logit and the sum of exponentials of its columns ([`statistics`]); ranks exchange one
//! number per token, put their sums on the common largest ([`rescale`]) and add them; gradients then take the place
//! of the logits ([`gradient`]).

use cubecl::prelude::*;

use crate::queue::{cubes_for, expect_all, send};
use crate::sums::{largest_lane, largest_of_cube, sum_of_cube, sum_of_lanes};
use crate::{Buffer, Element, Queue};

/// Units of a cube.
const UNITS: u32 = 256;

/// The columns of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vocabulary {
    /// First row of the vocabulary.
    pub start: u32,
    /// Columns of the rank.
    pub columns: usize,
    /// Columns of the rank that stand for tokens; the others fill it up.
    pub used: usize,
}

/// Numbers of each token, fp32.
#[derive(Clone, Copy, Debug)]
pub struct Statistics<'a> {
    /// The largest logit.
    pub largest: &'a Buffer,
    /// Sum of exponentials of logits less the largest.
    pub sum: &'a Buffer,
    /// The target's logit; zero if another rank has it.
    pub picked: &'a Buffer,
}

impl Statistics<'_> {
    fn expect(&self, tokens: usize) {
        expect_all([self.largest, self.sum, self.picked], tokens, Element::Single);
    }
}

/// Statistics of logits `[tokens, columns]` for targets `[tokens]`.
///
/// Moves e bytes per logit.
pub fn statistics(queue: &Queue, vocabulary: &Vocabulary, logits: &Buffer, targets: &Buffer, of: Statistics) {
    let (element, width) = (logits.element, logits.element.width(vocabulary.columns));
    let tokens = targets.length;
    logits.expect(tokens * vocabulary.columns, element);
    targets.expect(tokens, Element::Index);
    of.expect(tokens);
    send!(
        queue,
        statistics_kernel,
        CubeCount::Static(tokens as u32, 1, 1),
        UNITS,
        width,
        logits.argument(width),
        logits.argument(1),
        targets.argument(1),
        of.largest.argument(1),
        of.sum.argument(1),
        of.picked.argument(1),
        vocabulary.start,
        vocabulary.columns as u32,
        vocabulary.used as u32,
        UNITS,
        queue.has_planes(),
        element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn statistics_kernel<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    single_logits: &[F],
    targets: &[u32],
    largest: &mut [f32],
    sums: &mut [f32],
    picked: &mut [f32],
    vocabulary_start: u32,
    all_columns: u32,
    used: u32,
    #[comptime] units: u32,
    #[comptime] planes: bool,
    #[define(F)] _element: ElemType,
) {
    let columns = all_columns as usize / N::value();
    let start = CUBE_POS * columns;
    let mut most = f32::MIN.runtime();
    let mut sum = 0.0f32;
    let mut column = UNIT_POS as usize;
    while column < columns {
        let numbers = logits_of::<N>(Vector::cast_from(logits[start + column]), column, used);
        let here = largest_lane::<N>(numbers);
        if here > most {
            sum *= (most - here).exp();
            most = here;
        }
        sum += sum_of_lanes::<N>((numbers - Vector::new(most)).exp());
        column += units as usize;
    }
    let all = largest_of_cube(most, units, planes);
    let total = sum_of_cube(sum * (most - all).exp(), units, planes);
    if UNIT_POS == 0 {
        largest[CUBE_POS] = all;
        sums[CUBE_POS] = total;
        let target = targets[CUBE_POS] - vocabulary_start;
        picked[CUBE_POS] = 0.0;
        if target < all_columns {
            picked[CUBE_POS] = f32::cast_from(single_logits[CUBE_POS * all_columns as usize + target as usize]);
        }
    }
}

/// The logits of a vector, the least number for columns that stand for no token: WGSL has no infinity.
#[cube]
fn logits_of<N: Size>(numbers: Vector<f32, N>, column: usize, used: u32) -> Vector<f32, N> {
    let mut logits = numbers;
    #[unroll]
    for lane in 0..N::value() {
        let number = numbers.extract(lane);
        logits.insert(lane, select(((column * N::value() + lane) as u32) < used, number, f32::MIN));
    }
    logits
}

/// Puts a rank's sums of exponentials on the largest logit of all ranks: sum · e^(largest − common).
pub fn rescale(queue: &Queue, of: Statistics, common: &Buffer) {
    let tokens = common.expect(common.length, Element::Single).length;
    of.expect(tokens);
    send!(
        queue,
        rescale_kernel,
        cubes_for(tokens, UNITS),
        UNITS,
        of.largest.argument(1),
        common.argument(1),
        of.sum.argument(1)
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn rescale_kernel(largest: &[f32], common: &[f32], sums: &mut [f32]) {
    let mut token = ABSOLUTE_POS;
    while token < sums.len() {
        sums[token] *= (largest[token] - common[token]).exp();
        token += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Losses of tokens from the statistics of all ranks: ln sum + largest − picked.
pub fn losses(queue: &Queue, of: Statistics, losses: &Buffer) {
    let tokens = losses.expect(losses.length, Element::Single).length;
    of.expect(tokens);
    send!(
        queue,
        losses_kernel,
        cubes_for(tokens, UNITS),
        UNITS,
        of.largest.argument(1),
        of.sum.argument(1),
        of.picked.argument(1),
        losses.argument(1)
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn losses_kernel(largest: &[f32], sums: &[f32], picked: &[f32], losses: &mut [f32]) {
    let mut token = ABSOLUTE_POS;
    while token < losses.len() {
        losses[token] = sums[token].ln() + largest[token] - picked[token];
        token += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Turns logits into their gradients (e^(logit − largest) / sum − [is target]) · `dloss`, with the statistics of all
/// ranks, and `dloss` of each token or one for all.
///
/// Moves 2e bytes per logit.
pub fn gradient(
    queue: &Queue,
    vocabulary: &Vocabulary,
    logits: &Buffer,
    targets: &Buffer,
    of: Statistics,
    dloss: &Buffer,
) {
    let (element, width) = (logits.element, logits.element.width(vocabulary.columns));
    let tokens = targets.length;
    logits.expect(tokens * vocabulary.columns, element);
    of.expect(tokens);
    assert!(dloss.length == 1 || dloss.length == tokens, "one gradient for all tokens, or one for each");
    send!(
        queue,
        gradient_kernel,
        CubeCount::Static(tokens as u32, 1, 1),
        UNITS,
        width,
        logits.argument(width),
        targets.argument(1),
        of.largest.argument(1),
        of.sum.argument(1),
        dloss.argument(1),
        vocabulary.start,
        vocabulary.columns as u32,
        vocabulary.used as u32,
        element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn gradient_kernel<F: Float, N: Size>(
    logits: &mut [Vector<F, N>],
    targets: &[u32],
    largest: &[f32],
    sums: &[f32],
    dloss: &[f32],
    vocabulary_start: u32,
    all_columns: u32,
    used: u32,
    #[define(F)] _element: ElemType,
) {
    let columns = all_columns as usize / N::value();
    let start = CUBE_POS * columns;
    let (most, share) = (largest[CUBE_POS], 1.0 / sums[CUBE_POS]);
    let scale = dloss[CUBE_POS % dloss.len()];
    let target = targets[CUBE_POS] - vocabulary_start;
    let mut column = UNIT_POS as usize;
    while column < columns {
        let numbers = logits_of::<N>(Vector::cast_from(logits[start + column]), column, used);
        let mut own = (numbers - Vector::new(most)).exp() * Vector::new(share);
        #[unroll]
        for lane in 0..N::value() {
            let is_target = (column * N::value() + lane) as u32 == target;
            own.insert(lane, (own.extract(lane) - select(is_target, 1.0, 0.0)) * scale);
        }
        logits[start + column] = Vector::cast_from(own);
        column += CUBE_DIM as usize;
    }
}
