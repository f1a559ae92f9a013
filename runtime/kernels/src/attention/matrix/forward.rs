//! The attention core on tiles, forward.

use std::f32::consts::{LN_2, LOG2_E};

use cubecl::prelude::*;

use super::parts::{
    arrive, column_of, fetch, multiply_rows, multiply_weights, over_row, place, power_of_two, put, row_of, score, zeros,
};
use super::{COLUMNS, Held, Products, Shape};
use crate::attention::Attention;
use crate::queue::send;
use crate::{Buffer, Queue};

/// As [`crate::attention::attention`], which checks the operands.
pub fn attention(
    queue: &Queue,
    attention: &Attention,
    products: Products,
    [query, keys, values, slopes]: [&Buffer; 4],
    context: &Buffer,
    logarithms: &Buffer,
) {
    let held = Held { own: [1, 0], streamed: [1, 1], statistics: 0, sums: [0, 1], scores: 1, tiles: 2 };
    let shape = Shape::new(attention, products, query.element, queue, &held);
    let blocks = attention.positions.div_ceil(shape.rows()) as u32;
    let width = products.vector();
    send!(
        queue,
        attention_tiles_kernel,
        CubeCount::Static(blocks, (attention.sequences * attention.heads * attention.queries) as u32, 1),
        shape.units() as u32,
        width,
        query.argument(width),
        keys.argument(width),
        values.argument(width),
        slopes.argument(1),
        context.argument(width),
        logarithms.argument(1),
        attention.positions as u32,
        attention.scale as f32 * LOG2_E,
        shape,
        query.element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn attention_tiles_kernel<F: Float, N: Size>(
    query: &[Vector<F, N>],
    keys: &[Vector<F, N>],
    values: &[Vector<F, N>],
    slopes: &[f32],
    context: &mut [Vector<F, N>],
    logarithms: &mut [f32],
    positions: u32,
    scale: f32,
    #[comptime] shape: Shape,
    #[define(F)] _element: ElemType,
) {
    let all_heads = comptime!(shape.heads * shape.queries);
    let head = CUBE_POS_Y as usize % all_heads;
    let sequence = CUBE_POS_Y as usize / all_heads;
    let key_head = head / shape.queries;
    // The last queries see most keys and start first.
    let first = (positions.div_ceil(comptime!(shape.rows() as u32)) - 1 - CUBE_POS_X) * comptime!(shape.rows() as u32);
    let rows = min(positions - first, comptime!(shape.rows() as u32));
    let block = comptime!(shape.block as u32);
    let blocks = (first + rows).div_ceil(block);
    let slope = slopes[head] * LOG2_E;

    let head_stride = comptime!(shape.vectors(1, shape.head_width));
    let value_stride = comptime!(shape.vectors(1, shape.value_width));
    let head_vectors = comptime!(shape.head_width) / N::value();
    let value_vectors = comptime!(shape.value_width) / N::value();
    let mut query_tile =
        Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(shape.vectors(shape.rows(), shape.head_width)), 16usize);
    let mut key_tiles = Shared::<[Vector<F, N>]>::new_aligned_slice(
        comptime!(shape.vectors(2 * shape.block, shape.head_width)),
        16usize,
    );
    let mut value_tiles = Shared::<[Vector<F, N>]>::new_aligned_slice(
        comptime!(shape.vectors(2 * shape.block, shape.value_width)),
        16usize,
    );
    let query_row = (sequence * positions as usize + first as usize) * all_heads + head;
    fetch(
        query,
        &mut query_tile,
        0usize,
        query_row * head_vectors,
        all_heads * head_vectors,
        rows,
        shape.rows(),
        shape.head_width,
        shape,
    );

    let halves = comptime!(shape.tiles * 2);
    let among = comptime!(shape.block / COLUMNS);
    let beside = comptime!(Shape::columns(shape.value_width) / COLUMNS);
    let mut own = zeros(comptime!(shape.held(shape.value_width)));
    let mut sums = zeros(halves);
    let mut largest = Array::<f32>::new(halves);
    #[unroll]
    for half in 0..halves {
        largest[half] = f32::MIN;
    }
    // Round `step` works on block `step - 1`, and block `step` is fetched meanwhile.
    let mut step = 0u32;
    while step <= blocks {
        if step > 0 {
            arrive(shape);
        }
        if step < blocks {
            let start = step * block;
            let key_row = (sequence * positions as usize + start as usize) * shape.heads + key_head;
            let part = (step % 2) as usize * comptime!(shape.block);
            fetch(
                keys,
                &mut key_tiles,
                part * head_stride,
                key_row * head_vectors,
                comptime!(shape.heads) * head_vectors,
                positions - start,
                shape.block,
                shape.head_width,
                shape,
            );
            fetch(
                values,
                &mut value_tiles,
                part * value_stride,
                key_row * value_vectors,
                comptime!(shape.heads) * value_vectors,
                positions - start,
                shape.block,
                shape.value_width,
                shape,
            );
        }
        if step > 0 {
            let start = (step - 1) * block;
            let part = ((step - 1) % 2) as usize * comptime!(shape.block);
            let mut scores = zeros(comptime!(shape.held(shape.block)));
            multiply_rows(&query_tile, &key_tiles, part * head_stride, &mut scores, shape.head_width, shape);
            score(&mut scores, scale, slope, first, start, false, shape);
            #[unroll]
            for half in 0..halves {
                let mut own_most = f32::MIN.runtime();
                #[unroll]
                for column in 0..comptime!(among * 2) {
                    own_most = max(own_most, scores[comptime!(place(half, column / 2, among) + column % 2)]);
                }
                let most = over_row(max(own_most, largest[half]), true, shape);
                let shrink = power_of_two(largest[half] - most, shape);
                largest[half] = most;
                let mut sum = sums[half] * shrink;
                #[unroll]
                for column in 0..comptime!(among * 2) {
                    let at = comptime!(place(half, column / 2, among) + column % 2);
                    let weight = power_of_two(scores[at] - most, shape);
                    scores[at] = weight;
                    sum += weight;
                }
                sums[half] = sum;
                #[unroll]
                for column in 0..comptime!(beside * 2) {
                    own[comptime!(place(half, column / 2, beside) + column % 2)] *= shrink;
                }
            }
            multiply_weights(&scores, &value_tiles, part * value_stride, &mut own, shape.value_width, shape);
        }
        step += 1;
    }

    let mut shares = zeros(halves);
    #[unroll]
    for half in 0..halves {
        let sum = over_row(sums[half], false, shape);
        shares[half] = 1.0 / sum;
        let row = row_of(half, shape);
        if (row as u32) < rows && column_of(0usize) == 0 {
            logarithms[CUBE_POS_Y as usize * positions as usize + first as usize + row] =
                largest[half] * LN_2 + sum.ln();
        }
    }
    put(
        &own,
        &shares,
        context,
        query_row * comptime!(shape.value_width),
        comptime!(shape.heads * shape.queries * shape.value_width),
        rows,
        shape.value_width,
        shape,
    );
}
