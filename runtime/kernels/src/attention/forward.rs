//! The attention core, forward.

use cubecl::prelude::*;

use super::tile::{accumulate, load, place, product, put, store};
use super::{Attention, COLUMNS, ROWS, Sizes, score};
use crate::queue::send;
use crate::{Buffer, Queue};

/// As [`crate::attention::attention`], which checks the operands.
pub fn attention(
    queue: &Queue,
    attention: &Attention,
    [query, keys, values, slopes]: [&Buffer; 4],
    context: &Buffer,
    logarithms: &Buffer,
) {
    let element = query.element;
    let (width, sizes) = (attention.width(element), attention.sizes(queue, [2, 1, 1]));
    let blocks = attention.positions.div_ceil(sizes.block);
    send!(
        queue,
        attention_kernel,
        CubeCount::Static(blocks as u32, (attention.sequences * attention.heads * attention.queries) as u32, 1),
        sizes.units as u32,
        width,
        query.argument(width),
        keys.argument(width),
        values.argument(width),
        slopes.argument(1),
        context.argument(width),
        logarithms.argument(1),
        attention.positions as u32,
        attention.scale as f32,
        sizes,
        element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn attention_kernel<F: Float, N: Size>(
    query: &[Vector<F, N>],
    keys: &[Vector<F, N>],
    values: &[Vector<F, N>],
    slopes: &[f32],
    context: &mut [Vector<F, N>],
    logarithms: &mut [f32],
    positions: u32,
    scale: f32,
    #[comptime] sizes: Sizes,
    #[define(F)] _element: ElemType,
) {
    let all_heads = comptime!((sizes.heads * sizes.queries) as u32);
    let head = CUBE_POS_Y % all_heads;
    let sequence = CUBE_POS_Y / all_heads;
    let key_head = head / comptime!(sizes.queries as u32);
    let block = comptime!(sizes.block as u32);
    let first = CUBE_POS_X * block;
    let (x, y) = place(sizes);
    let columns = comptime!(sizes.columns(sizes.value_width) / sizes.wide);

    let head_vectors = comptime!(sizes.head_width) / N::value();
    let value_vectors = comptime!(sizes.value_width) / N::value();
    let query_row = (sequence * positions + first) as usize * all_heads as usize + head as usize;
    let mut query_tile = Shared::<[f32]>::new_slice(comptime!(sizes.block * sizes.stride(sizes.head_width)));
    let mut key_tile = Shared::<[f32]>::new_slice(comptime!(sizes.block * sizes.stride(sizes.head_width)));
    let mut value_tile = Shared::<[f32]>::new_slice(comptime!(sizes.block * sizes.stride(sizes.value_width)));
    let mut weights = Shared::<[f32]>::new_slice(comptime!(sizes.block * (sizes.block + 1)));
    let mut largest = Shared::<[f32]>::new_slice(sizes.block);
    let mut sums = Shared::<[f32]>::new_slice(sizes.block);
    let mut shrink = Shared::<[f32]>::new_slice(sizes.block);
    load::<F, N>(
        query,
        &mut query_tile,
        query_row * head_vectors,
        all_heads as usize * head_vectors,
        positions - first,
        sizes.head_width,
        sizes,
    );
    let mut row = UNIT_POS as usize;
    while row < sizes.block {
        largest[row] = f32::MIN;
        sums[row] = 0.0;
        row += sizes.units;
    }
    let mut own = Array::<f32>::new(comptime!(ROWS * columns));
    #[unroll]
    for at in 0..comptime!(ROWS * columns) {
        own[at] = 0.0;
    }

    let mut start = 0u32;
    while start <= first {
        let key_row = (sequence * positions + start) as usize * sizes.heads + key_head as usize;
        let rows = positions - start;
        load::<F, N>(
            keys,
            &mut key_tile,
            key_row * head_vectors,
            sizes.heads * head_vectors,
            rows,
            sizes.head_width,
            sizes,
        );
        load::<F, N>(
            values,
            &mut value_tile,
            key_row * value_vectors,
            sizes.heads * value_vectors,
            rows,
            sizes.value_width,
            sizes,
        );
        sync_cube();
        let mut scores = Array::<f32>::new(comptime!(ROWS * COLUMNS));
        product(&query_tile, &key_tile, &mut scores, sizes.head_width, sizes);
        let slope = slopes[head as usize];
        #[unroll]
        for i in 0..ROWS {
            #[unroll]
            for j in 0..COLUMNS {
                let (row, column) = (y + i * sizes.high, x + j * sizes.wide);
                let own = scores[comptime!(i * COLUMNS + j)];
                weights[row * comptime!(sizes.block + 1) + column] =
                    score(own, first + row as u32, start + column as u32, scale, slope);
            }
        }
        sync_cube();
        let mut row = UNIT_POS as usize;
        while row < sizes.block {
            weigh(&mut weights, row, &mut largest, &mut sums, &mut shrink, sizes);
            row += sizes.units;
        }
        sync_cube();
        #[unroll]
        for i in 0..ROWS {
            let factor = shrink[y + i * sizes.high];
            #[unroll]
            for j in 0..columns {
                own[comptime!(i * columns + j)] *= factor;
            }
        }
        accumulate(&weights, &value_tile, &mut own, false, sizes.value_width, sizes);
        sync_cube();
        start += block;
    }

    #[unroll]
    for i in 0..ROWS {
        let share = 1.0 / sums[y + i * sizes.high];
        #[unroll]
        for j in 0..columns {
            own[comptime!(i * columns + j)] *= share;
        }
    }
    put(&own, &mut value_tile, sizes.value_width, sizes);
    sync_cube();
    store::<F, N>(
        &value_tile,
        context,
        query_row * value_vectors,
        all_heads as usize * value_vectors,
        positions - first,
        sizes.value_width,
        sizes,
    );
    let mut row = UNIT_POS;
    while row < min(block, positions - first) {
        let at = (CUBE_POS_Y * positions + first + row) as usize;
        logarithms[at] = largest[row as usize] + sums[row as usize].ln();
        row += comptime!(sizes.units as u32);
    }
}

/// Turns a row of scores into exponentials less the largest so far, and says by what earlier sums shrink.
#[cube]
fn weigh(
    weights: &mut Shared<[f32]>,
    row: usize,
    largest: &mut Shared<[f32]>,
    sums: &mut Shared<[f32]>,
    shrink: &mut Shared<[f32]>,
    #[comptime] sizes: Sizes,
) {
    let start = row * comptime!(sizes.block + 1);
    let before = largest[row];
    let mut most = before;
    for column in 0..sizes.block {
        most = max(most, weights[start + column]);
    }
    let mut sum = 0.0f32;
    for column in 0..sizes.block {
        let weight = (weights[start + column] - most).exp();
        weights[start + column] = weight;
        sum += weight;
    }
    let factor = (before - most).exp();
    largest[row] = most;
    sums[row] = sums[row] * factor + sum;
    shrink[row] = factor;
}
