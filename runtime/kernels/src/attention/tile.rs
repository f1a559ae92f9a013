//! Tiles in shared memory: how they come there, what is multiplied with what, how they leave.
//!
//! A tile is `[block, stride]`. Unit (x, y) of `wide` times `high` units holds rows y + high · i and columns
//! x + wide · j of a result.

use cubecl::prelude::*;

use super::{COLUMNS, ROWS, Sizes};

/// Fills a tile with rows of `source` from vector `start` on, `step` vectors apart; zeros for rows from `rows` on
/// and for columns beyond `width`.
#[cube]
pub(super) fn load<F: Float, N: Size>(
    source: &[Vector<F, N>],
    tile: &mut Shared<[f32]>,
    start: usize,
    step: usize,
    rows: u32,
    #[comptime] width: usize,
    #[comptime] sizes: Sizes,
) {
    let vectors = comptime!(width) / N::value();
    let mut at = UNIT_POS as usize;
    while at < sizes.block * vectors {
        let row = at / vectors;
        let column = at % vectors;
        let mut numbers = Vector::<f32, N>::new(0.0);
        if (row as u32) < rows {
            numbers = Vector::cast_from(source[start + row * step + column]);
        }
        #[unroll]
        for lane in 0..N::value() {
            tile[row * comptime!(sizes.stride(width)) + column * N::value() + lane] = numbers.extract(lane);
        }
        at += sizes.units;
    }
    let rest = comptime!(sizes.columns(width) - width);
    if comptime!(rest > 0) {
        let mut at = UNIT_POS as usize;
        while at < comptime!(sizes.block * rest) {
            tile[at / rest * comptime!(sizes.stride(width)) + width + at % rest] = 0.0;
            at += sizes.units;
        }
    }
}

/// Writes the rows of a tile, the first `rows` of them.
#[cube]
pub(super) fn store<F: Float, N: Size>(
    tile: &Shared<[f32]>,
    target: &mut [Vector<F, N>],
    start: usize,
    step: usize,
    rows: u32,
    #[comptime] width: usize,
    #[comptime] sizes: Sizes,
) {
    let vectors = comptime!(width) / N::value();
    let mut at = UNIT_POS as usize;
    while at < sizes.block * vectors {
        let row = at / vectors;
        let column = at % vectors;
        let mut numbers = Vector::<f32, N>::new(0.0);
        #[unroll]
        for lane in 0..N::value() {
            numbers.insert(lane, tile[row * comptime!(sizes.stride(width)) + column * N::value() + lane]);
        }
        if (row as u32) < rows {
            target[start + row * step + column] = Vector::cast_from(numbers);
        }
        at += sizes.units;
    }
}

/// The unit's place in a tile: column (x) and row (y).
#[cube]
pub(super) fn place(#[comptime] sizes: Sizes) -> (usize, usize) {
    (UNIT_POS as usize % sizes.wide, UNIT_POS as usize / sizes.wide)
}

/// a · bᵀ of two tiles of rows of a width: the unit's part `[ROWS, COLUMNS]`.
#[cube]
pub(super) fn product(
    a: &Shared<[f32]>,
    b: &Shared<[f32]>,
    part: &mut Array<f32>,
    #[comptime] width: usize,
    #[comptime] sizes: Sizes,
) {
    let (x, y) = place(sizes);
    let stride = comptime!(sizes.stride(width));
    #[unroll]
    for at in 0..comptime!(ROWS * COLUMNS) {
        part[at] = 0.0;
    }
    for inner in 0..width {
        let mut own = Array::<f32>::new(COLUMNS);
        #[unroll]
        for j in 0..COLUMNS {
            own[j] = b[(x + j * sizes.wide) * stride + inner];
        }
        #[unroll]
        for i in 0..ROWS {
            let left = a[(y + i * sizes.high) * stride + inner];
            #[unroll]
            for j in 0..COLUMNS {
                part[comptime!(i * COLUMNS + j)] += left * own[j];
            }
        }
    }
}

/// Adds weights · b, or weightsᵀ · b if `transposed`, for weights `[block, block + 1]` and rows b of a width: the
/// unit's part `[ROWS, columns / wide]`.
#[cube]
pub(super) fn accumulate(
    weights: &Shared<[f32]>,
    b: &Shared<[f32]>,
    part: &mut Array<f32>,
    #[comptime] transposed: bool,
    #[comptime] width: usize,
    #[comptime] sizes: Sizes,
) {
    let (x, y) = place(sizes);
    let stride = comptime!(sizes.stride(width));
    let columns = comptime!(sizes.columns(width) / sizes.wide);
    for inner in 0..sizes.block {
        #[unroll]
        for i in 0..ROWS {
            let row = y + i * sizes.high;
            let own = if comptime!(transposed) {
                weights[inner * comptime!(sizes.block + 1) + row]
            } else {
                weights[row * comptime!(sizes.block + 1) + inner]
            };
            #[unroll]
            for j in 0..columns {
                part[comptime!(i * columns + j)] += own * b[inner * stride + x + j * sizes.wide];
            }
        }
    }
}

/// Puts the unit's part of rows of a width into a tile.
#[cube]
pub(super) fn put(part: &Array<f32>, tile: &mut Shared<[f32]>, #[comptime] width: usize, #[comptime] sizes: Sizes) {
    let (x, y) = place(sizes);
    let columns = comptime!(sizes.columns(width) / sizes.wide);
    #[unroll]
    for i in 0..ROWS {
        #[unroll]
        for j in 0..columns {
            let at = (y + i * sizes.high) * comptime!(sizes.stride(width)) + x + j * sizes.wide;
            tile[at] = part[comptime!(i * columns + j)];
        }
    }
}
