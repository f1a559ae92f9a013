//! Gradients of the attention core's operands on tiles: weights are computed again from the logarithms that forward left.
//! Of a weight w the score's gradient is w · (dcontext · value − along), times the scale once all are summed.

use std::f32::consts::LOG2_E;

use cubecl::prelude::*;

use super::parts::{
    arrive, column_of, fetch, fetch_numbers, multiply_rows, multiply_weights, place, power_of_two, put, row_of, score,
    zeros,
};
use super::{COLUMNS, Held, Products, Shape};
use crate::attention::Attention;
use crate::queue::send;
use crate::{Buffer, Queue};

/// The gradient of the query; `along` is Σ context · dcontext of each query.
pub fn query_gradient(
    queue: &Queue,
    attention: &Attention,
    products: Products,
    [query, keys, values, slopes]: [&Buffer; 4],
    [dcontext, logarithms, along]: [&Buffer; 3],
    dquery: &Buffer,
) {
    let held = Held { own: [1, 1], streamed: [1, 1], statistics: 0, sums: [1, 0], scores: 2, tiles: 1 };
    let shape = Shape::new(attention, products, query.element, queue, &held);
    let blocks = attention.positions.div_ceil(shape.rows()) as u32;
    let width = products.vector();
    send!(
        queue,
        query_gradient_tiles_kernel,
        CubeCount::Static(blocks, (attention.sequences * attention.heads * attention.queries) as u32, 1),
        shape.units() as u32,
        width,
        query.argument(width),
        keys.argument(width),
        values.argument(width),
        slopes.argument(1),
        dcontext.argument(width),
        logarithms.argument(1),
        along.argument(1),
        dquery.argument(width),
        attention.positions as u32,
        attention.scale as f32,
        shape,
        query.element.kind()
    );
}

/// The gradients of keys and values.
pub fn keys_gradient(
    queue: &Queue,
    attention: &Attention,
    products: Products,
    [query, keys, values, slopes]: [&Buffer; 4],
    [dcontext, logarithms, along]: [&Buffer; 3],
    [dkeys, dvalues]: [&Buffer; 2],
) {
    let held = Held { own: [1, 1], streamed: [1, 1], statistics: 2, sums: [1, 1], scores: 2, tiles: 1 };
    let shape = Shape::new(attention, products, query.element, queue, &held);
    let blocks = attention.positions.div_ceil(shape.rows()) as u32;
    let width = products.vector();
    send!(
        queue,
        keys_gradient_tiles_kernel,
        CubeCount::Static(blocks, (attention.sequences * attention.heads) as u32, 1),
        shape.units() as u32,
        width,
        query.argument(width),
        keys.argument(width),
        values.argument(width),
        slopes.argument(1),
        dcontext.argument(width),
        logarithms.argument(1),
        along.argument(1),
        dkeys.argument(width),
        dvalues.argument(width),
        attention.positions as u32,
        attention.scale as f32,
        shape,
        query.element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn query_gradient_tiles_kernel<F: Float, N: Size>(
    query: &[Vector<F, N>],
    keys: &[Vector<F, N>],
    values: &[Vector<F, N>],
    slopes: &[f32],
    dcontext: &[Vector<F, N>],
    logarithms: &[f32],
    along: &[f32],
    dquery: &mut [Vector<F, N>],
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
    let mut gradient_tile =
        Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(shape.vectors(shape.rows(), shape.value_width)), 16usize);
    let mut key_tiles = Shared::<[Vector<F, N>]>::new_aligned_slice(
        comptime!(shape.vectors(2 * shape.block, shape.head_width)),
        16usize,
    );
    let mut value_tiles = Shared::<[Vector<F, N>]>::new_aligned_slice(
        comptime!(shape.vectors(2 * shape.block, shape.value_width)),
        16usize,
    );
    let query_row = (sequence * positions as usize + first as usize) * all_heads + head;
    let (head_step, value_step) = (all_heads * head_vectors, all_heads * value_vectors);
    let query_at = query_row * head_vectors;
    fetch(query, &mut query_tile, 0usize, query_at, head_step, rows, shape.rows(), shape.head_width, shape);
    let gradient_at = query_row * value_vectors;
    fetch(dcontext, &mut gradient_tile, 0usize, gradient_at, value_step, rows, shape.rows(), shape.value_width, shape);

    let halves = comptime!(shape.tiles * 2);
    let among = comptime!(shape.block / COLUMNS);
    let mut own = zeros(comptime!(shape.held(shape.head_width)));
    let mut powers = zeros(halves);
    let mut shared = zeros(halves);
    let mut factors = zeros(halves);
    #[unroll]
    for half in 0..halves {
        let row = min(row_of(half, shape) as u32, rows - 1);
        let at = CUBE_POS_Y as usize * positions as usize + (first + row) as usize;
        powers[half] = logarithms[at] * LOG2_E;
        shared[half] = along[at];
        factors[half] = scale;
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
            let rows = positions - start;
            let (to, at, step) = (part * head_stride, key_row * head_vectors, comptime!(shape.heads) * head_vectors);
            fetch(keys, &mut key_tiles, to, at, step, rows, shape.block, shape.head_width, shape);
            let (to, at, step) = (part * value_stride, key_row * value_vectors, comptime!(shape.heads) * value_vectors);
            fetch(values, &mut value_tiles, to, at, step, rows, shape.block, shape.value_width, shape);
        }
        if step > 0 {
            let start = (step - 1) * block;
            let part = ((step - 1) % 2) as usize * comptime!(shape.block);
            let mut scores = zeros(comptime!(shape.held(shape.block)));
            multiply_rows(&query_tile, &key_tiles, part * head_stride, &mut scores, shape.head_width, shape);
            score(&mut scores, scale * LOG2_E, slope, first, start, false, shape);
            let mut slants = zeros(comptime!(shape.held(shape.block)));
            multiply_rows(&gradient_tile, &value_tiles, part * value_stride, &mut slants, shape.value_width, shape);
            #[unroll]
            for half in 0..halves {
                #[unroll]
                for column in 0..comptime!(among * 2) {
                    let at = comptime!(place(half, column / 2, among) + column % 2);
                    let weight = power_of_two(scores[at] - powers[half], shape);
                    slants[at] = weight * (slants[at] - shared[half]);
                }
            }
            multiply_weights(&slants, &key_tiles, part * head_stride, &mut own, shape.head_width, shape);
        }
        step += 1;
    }
    let (at, step) =
        (query_row * comptime!(shape.head_width), comptime!(shape.heads * shape.queries * shape.head_width));
    put(&own, &factors, dquery, at, step, rows, shape.head_width, shape);
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn keys_gradient_tiles_kernel<F: Float, N: Size>(
    query: &[Vector<F, N>],
    keys: &[Vector<F, N>],
    values: &[Vector<F, N>],
    slopes: &[f32],
    dcontext: &[Vector<F, N>],
    logarithms: &[f32],
    along: &[f32],
    dkeys: &mut [Vector<F, N>],
    dvalues: &mut [Vector<F, N>],
    positions: u32,
    scale: f32,
    #[comptime] shape: Shape,
    #[define(F)] _element: ElemType,
) {
    let all_heads = comptime!(shape.heads * shape.queries);
    let key_head = CUBE_POS_Y as usize % shape.heads;
    let sequence = CUBE_POS_Y as usize / shape.heads;
    let first = CUBE_POS_X * comptime!(shape.rows() as u32);
    let rows = min(positions - first, comptime!(shape.rows() as u32));
    let block = comptime!(shape.block as u32);

    let head_stride = comptime!(shape.vectors(1, shape.head_width));
    let value_stride = comptime!(shape.vectors(1, shape.value_width));
    let head_vectors = comptime!(shape.head_width) / N::value();
    let value_vectors = comptime!(shape.value_width) / N::value();
    let mut key_tile =
        Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(shape.vectors(shape.rows(), shape.head_width)), 16usize);
    let mut value_tile =
        Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(shape.vectors(shape.rows(), shape.value_width)), 16usize);
    let mut query_tiles = Shared::<[Vector<F, N>]>::new_aligned_slice(
        comptime!(shape.vectors(2 * shape.block, shape.head_width)),
        16usize,
    );
    let mut gradient_tiles = Shared::<[Vector<F, N>]>::new_aligned_slice(
        comptime!(shape.vectors(2 * shape.block, shape.value_width)),
        16usize,
    );
    let mut powers = Shared::<[f32]>::new_slice(comptime!(2 * shape.block));
    let mut shared = Shared::<[f32]>::new_slice(comptime!(2 * shape.block));
    let key_row = (sequence * positions as usize + first as usize) * shape.heads + key_head;
    let (at, step) = (key_row * head_vectors, comptime!(shape.heads) * head_vectors);
    fetch(keys, &mut key_tile, 0usize, at, step, rows, shape.rows(), shape.head_width, shape);
    let (at, step) = (key_row * value_vectors, comptime!(shape.heads) * value_vectors);
    fetch(values, &mut value_tile, 0usize, at, step, rows, shape.rows(), shape.value_width, shape);

    let halves = comptime!(shape.tiles * 2);
    let among = comptime!(shape.block / COLUMNS);
    let mut own_keys = zeros(comptime!(shape.held(shape.head_width)));
    let mut own_values = zeros(comptime!(shape.held(shape.value_width)));
    // Queries of this key-value head one after the other, each from the block on that sees the first key. Round `step`
    // works on block `step - 1`, and block `step` is fetched meanwhile.
    let before = first / block;
    let blocks = positions.div_ceil(block) - before;
    let steps = blocks * comptime!(shape.queries as u32);
    let mut step = 0u32;
    while step <= steps {
        if step > 0 {
            arrive(shape);
        }
        if step < steps {
            let head = key_head * shape.queries + (step / blocks) as usize;
            let start = (before + step % blocks) * block;
            let rows = positions - start;
            let part = (step % 2) as usize * comptime!(shape.block);
            let query_row = (sequence * positions as usize + start as usize) * all_heads + head;
            let (to, at, step) = (part * head_stride, query_row * head_vectors, all_heads * head_vectors);
            fetch(query, &mut query_tiles, to, at, step, rows, shape.block, shape.head_width, shape);
            let (to, at, step) = (part * value_stride, query_row * value_vectors, all_heads * value_vectors);
            fetch(dcontext, &mut gradient_tiles, to, at, step, rows, shape.block, shape.value_width, shape);
            let at = (sequence * all_heads + head) * positions as usize + start as usize;
            fetch_numbers(logarithms, &mut powers, part, at, rows, shape);
            fetch_numbers(along, &mut shared, part, at, rows, shape);
        }
        if step > 0 {
            let head = key_head * shape.queries + ((step - 1) / blocks) as usize;
            let slope = slopes[head] * LOG2_E;
            let start = (before + (step - 1) % blocks) * block;
            let part = ((step - 1) % 2) as usize * comptime!(shape.block);
            let mut weights = zeros(comptime!(shape.held(shape.block)));
            multiply_rows(&key_tile, &query_tiles, part * head_stride, &mut weights, shape.head_width, shape);
            score(&mut weights, scale * LOG2_E, slope, first, start, true, shape);
            let mut slants = zeros(comptime!(shape.held(shape.block)));
            multiply_rows(&value_tile, &gradient_tiles, part * value_stride, &mut slants, shape.value_width, shape);
            #[unroll]
            for column in 0..comptime!(among * 2) {
                let row = column_of(comptime!(column / 2)) + comptime!(column % 2);
                let power = powers[part + row] * LOG2_E;
                let along = shared[part + row];
                // Queries beyond the last position have nothing to give.
                let exists = start + (row as u32) < positions;
                #[unroll]
                for half in 0..halves {
                    let at = comptime!(place(half, column / 2, among) + column % 2);
                    let weight = select(exists, power_of_two(weights[at] - power, shape), 0.0);
                    weights[at] = weight;
                    slants[at] = weight * (slants[at] - along);
                }
            }
            let (gradients_at, queries_at) = (part * value_stride, part * head_stride);
            multiply_weights(&weights, &gradient_tiles, gradients_at, &mut own_values, shape.value_width, shape);
            multiply_weights(&slants, &query_tiles, queries_at, &mut own_keys, shape.head_width, shape);
        }
        step += 1;
    }
    let mut ones = zeros(halves);
    let mut factors = zeros(halves);
    #[unroll]
    for half in 0..halves {
        ones[half] = 1.0;
        factors[half] = scale;
    }
    let (at, step) = (key_row * comptime!(shape.head_width), comptime!(shape.heads * shape.head_width));
    put(&own_keys, &factors, dkeys, at, step, rows, shape.head_width, shape);
    let (at, step) = (key_row * comptime!(shape.value_width), comptime!(shape.heads * shape.value_width));
    put(&own_values, &ones, dvalues, at, step, rows, shape.value_width, shape);
}
