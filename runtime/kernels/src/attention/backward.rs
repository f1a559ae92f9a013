//! Gradients of the attention core's operands: scores are computed again from the logarithms that forward left.

use cubecl::prelude::*;

use super::tile::{accumulate, load, place, product, put, store};
use super::{Attention, COLUMNS, ROWS, Sizes, score};
use crate::queue::send;
use crate::sums::{sum_of_cube, sum_of_lanes};
use crate::{Buffer, Element, Queue};

/// Units of a cube that multiplies a context with its gradient.
const UNITS: u32 = 32;

/// Σ context · dcontext of each query, `[sequences, heads, positions]`: what its weights' gradients share.
///
/// Moves e bytes per element of both.
pub fn context_product(queue: &Queue, attention: &Attention, context: &Buffer, dcontext: &Buffer) -> Buffer {
    let element = context.element;
    let width = attention.width(element);
    let along = queue.buffer(attention.statistics_length(), Element::Single);
    let heads = attention.heads * attention.queries;
    send!(
        queue,
        context_product_kernel,
        CubeCount::Static(attention.positions as u32, (attention.sequences * heads) as u32, 1),
        UNITS,
        width,
        context.argument(width),
        dcontext.argument(width),
        along.argument(1),
        heads as u32,
        attention.value_width,
        UNITS,
        queue.has_planes(),
        element.kind()
    );
    along
}

/// As [`crate::attention::attention_gradient`], which checks the operands; `along` is what [`context_product`] gives.
pub fn attention_gradient(
    queue: &Queue,
    attention: &Attention,
    [query, keys, values, slopes]: [&Buffer; 4],
    [dcontext, logarithms, along]: [&Buffer; 3],
    [dquery, dkeys, dvalues]: [&Buffer; 3],
) {
    let element = query.element;
    let width = attention.width(element);
    let heads = attention.heads * attention.queries;
    let sizes = attention.sizes(queue, [2, 2, 1]);
    let blocks = attention.positions.div_ceil(sizes.block) as u32;
    send!(
        queue,
        query_gradient_kernel,
        CubeCount::Static(blocks, (attention.sequences * heads) as u32, 1),
        sizes.units as u32,
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
        sizes,
        element.kind()
    );
    for (of_keys, target) in [(true, dkeys), (false, dvalues)] {
        send!(
            queue,
            keys_gradient_kernel,
            CubeCount::Static(blocks, (attention.sequences * attention.heads) as u32, 1),
            sizes.units as u32,
            width,
            query.argument(width),
            keys.argument(width),
            values.argument(width),
            slopes.argument(1),
            dcontext.argument(width),
            logarithms.argument(1),
            along.argument(1),
            target.argument(width),
            attention.positions as u32,
            attention.scale as f32,
            of_keys,
            sizes,
            element.kind()
        );
    }
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn context_product_kernel<F: Float, N: Size>(
    context: &[Vector<F, N>],
    dcontext: &[Vector<F, N>],
    along: &mut [f32],
    heads: u32,
    #[comptime] width: usize,
    #[comptime] units: u32,
    #[comptime] planes: bool,
    #[define(F)] _element: ElemType,
) {
    let vectors = comptime!(width) / N::value();
    let row =
        (CUBE_POS_Y / heads * CUBE_COUNT_X + CUBE_POS_X) as usize * heads as usize + (CUBE_POS_Y % heads) as usize;
    let mut sum = Vector::<f32, N>::new(0.0);
    let mut column = UNIT_POS as usize;
    while column < vectors {
        let at = row * vectors + column;
        sum += Vector::<f32, N>::cast_from(context[at]) * Vector::<f32, N>::cast_from(dcontext[at]);
        column += units as usize;
    }
    let total = sum_of_cube(sum_of_lanes::<N>(sum), units, planes);
    if UNIT_POS == 0 {
        along[CUBE_POS_Y as usize * CUBE_COUNT_X as usize + CUBE_POS_X as usize] = total;
    }
}

/// The weight of a key for a query, from their score and the logarithm of the query's sum of exponentials.
#[cube]
fn weight(score: f32, logarithm: f32) -> f32 {
    (score - logarithm).exp()
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn query_gradient_kernel<F: Float, N: Size>(
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
    #[comptime] sizes: Sizes,
    #[define(F)] _element: ElemType,
) {
    let all_heads = comptime!((sizes.heads * sizes.queries) as u32);
    let head = CUBE_POS_Y % all_heads;
    let sequence = CUBE_POS_Y / all_heads;
    let key_head = head / comptime!(sizes.queries as u32);
    let slope = slopes[head as usize];
    let block = comptime!(sizes.block as u32);
    let first = CUBE_POS_X * block;
    let (x, y) = place(sizes);
    let columns = comptime!(sizes.columns(sizes.head_width) / sizes.wide);
    let head_vectors = comptime!(sizes.head_width) / N::value();
    let value_vectors = comptime!(sizes.value_width) / N::value();
    let query_row = (sequence * positions + first) as usize * all_heads as usize + head as usize;
    let mut query_tile = Shared::<[f32]>::new_slice(comptime!(sizes.block * sizes.stride(sizes.head_width)));
    let mut key_tile = Shared::<[f32]>::new_slice(comptime!(sizes.block * sizes.stride(sizes.head_width)));
    let mut value_tile = Shared::<[f32]>::new_slice(comptime!(sizes.block * sizes.stride(sizes.value_width)));
    let mut gradient_tile = Shared::<[f32]>::new_slice(comptime!(sizes.block * sizes.stride(sizes.value_width)));
    let mut weights = Shared::<[f32]>::new_slice(comptime!(sizes.block * (sizes.block + 1)));
    let rows = positions - first;
    let (head_step, value_step) = (all_heads as usize * head_vectors, all_heads as usize * value_vectors);
    load::<F, N>(query, &mut query_tile, query_row * head_vectors, head_step, rows, sizes.head_width, sizes);
    load::<F, N>(dcontext, &mut gradient_tile, query_row * value_vectors, value_step, rows, sizes.value_width, sizes);
    let mut own = Array::<f32>::new(comptime!(ROWS * columns));
    #[unroll]
    for at in 0..comptime!(ROWS * columns) {
        own[at] = 0.0;
    }
    let statistics = (CUBE_POS_Y * positions) as usize;
    let mut start = 0u32;
    while start <= first {
        let key_row = (sequence * positions + start) as usize * sizes.heads + key_head as usize;
        let rows = positions - start;
        let (head_step, value_step) = (sizes.heads * head_vectors, sizes.heads * value_vectors);
        load::<F, N>(keys, &mut key_tile, key_row * head_vectors, head_step, rows, sizes.head_width, sizes);
        load::<F, N>(values, &mut value_tile, key_row * value_vectors, value_step, rows, sizes.value_width, sizes);
        sync_cube();
        let mut scores = Array::<f32>::new(comptime!(ROWS * COLUMNS));
        let mut gradients = Array::<f32>::new(comptime!(ROWS * COLUMNS));
        product(&query_tile, &key_tile, &mut scores, sizes.head_width, sizes);
        product(&gradient_tile, &value_tile, &mut gradients, sizes.value_width, sizes);
        #[unroll]
        for i in 0..ROWS {
            let row = y + i * sizes.high;
            let position = first + row as u32;
            let at = statistics + min(position, positions - 1) as usize;
            let (logarithm, shared) = (logarithms[at], along[at]);
            #[unroll]
            for j in 0..COLUMNS {
                let column = x + j * sizes.wide;
                let own = score(scores[comptime!(i * COLUMNS + j)], position, start + column as u32, scale, slope);
                let slant = gradients[comptime!(i * COLUMNS + j)] - shared;
                weights[row * comptime!(sizes.block + 1) + column] = weight(own, logarithm) * slant * scale;
            }
        }
        sync_cube();
        accumulate(&weights, &key_tile, &mut own, false, sizes.head_width, sizes);
        sync_cube();
        start += block;
    }
    put(&own, &mut query_tile, sizes.head_width, sizes);
    sync_cube();
    store::<F, N>(&query_tile, dquery, query_row * head_vectors, head_step, rows, sizes.head_width, sizes);
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn keys_gradient_kernel<F: Float, N: Size>(
    query: &[Vector<F, N>],
    keys: &[Vector<F, N>],
    values: &[Vector<F, N>],
    slopes: &[f32],
    dcontext: &[Vector<F, N>],
    logarithms: &[f32],
    along: &[f32],
    target: &mut [Vector<F, N>],
    positions: u32,
    scale: f32,
    #[comptime] of_keys: bool,
    #[comptime] sizes: Sizes,
    #[define(F)] _element: ElemType,
) {
    let all_heads = comptime!((sizes.heads * sizes.queries) as u32);
    let key_head = CUBE_POS_Y % comptime!(sizes.heads as u32);
    let sequence = CUBE_POS_Y / comptime!(sizes.heads as u32);
    let block = comptime!(sizes.block as u32);
    let start = CUBE_POS_X * block;
    let (x, y) = place(sizes);
    let width = comptime!(if of_keys { sizes.head_width } else { sizes.value_width });
    let columns = comptime!(sizes.columns(width) / sizes.wide);
    let head_vectors = comptime!(sizes.head_width) / N::value();
    let value_vectors = comptime!(sizes.value_width) / N::value();
    let key_row = (sequence * positions + start) as usize * sizes.heads + key_head as usize;
    let mut query_tile = Shared::<[f32]>::new_slice(comptime!(sizes.block * sizes.stride(sizes.head_width)));
    let mut key_tile = Shared::<[f32]>::new_slice(comptime!(sizes.block * sizes.stride(sizes.head_width)));
    let mut value_tile = Shared::<[f32]>::new_slice(comptime!(sizes.block * sizes.stride(sizes.value_width)));
    let mut gradient_tile = Shared::<[f32]>::new_slice(comptime!(sizes.block * sizes.stride(sizes.value_width)));
    let mut weights = Shared::<[f32]>::new_slice(comptime!(sizes.block * (sizes.block + 1)));
    let key_rows = positions - start;
    let (head_step, value_step) = (sizes.heads * head_vectors, sizes.heads * value_vectors);
    load::<F, N>(keys, &mut key_tile, key_row * head_vectors, head_step, key_rows, sizes.head_width, sizes);
    if comptime!(of_keys) {
        load::<F, N>(values, &mut value_tile, key_row * value_vectors, value_step, key_rows, sizes.value_width, sizes);
    }
    let mut own = Array::<f32>::new(comptime!(ROWS * columns));
    #[unroll]
    for at in 0..comptime!(ROWS * columns) {
        own[at] = 0.0;
    }
    let blocks = positions.div_ceil(block) - CUBE_POS_X;
    // Queries of this key-value head one after the other, each from the block on that sees the first key.
    for step in 0..blocks * comptime!(sizes.queries as u32) {
        let head = key_head * comptime!(sizes.queries as u32) + step / blocks;
        let first = (CUBE_POS_X + step % blocks) * block;
        let slope = slopes[head as usize];
        let query_row = (sequence * positions + first) as usize * all_heads as usize + head as usize;
        let rows = positions - first;
        let (head_step, value_step) = (all_heads as usize * head_vectors, all_heads as usize * value_vectors);
        load::<F, N>(query, &mut query_tile, query_row * head_vectors, head_step, rows, sizes.head_width, sizes);
        load::<F, N>(
            dcontext,
            &mut gradient_tile,
            query_row * value_vectors,
            value_step,
            rows,
            sizes.value_width,
            sizes,
        );
        sync_cube();
        let mut scores = Array::<f32>::new(comptime!(ROWS * COLUMNS));
        product(&query_tile, &key_tile, &mut scores, sizes.head_width, sizes);
        let mut gradients = Array::<f32>::new(comptime!(ROWS * COLUMNS));
        if comptime!(of_keys) {
            product(&gradient_tile, &value_tile, &mut gradients, sizes.value_width, sizes);
        }
        let statistics = ((sequence * all_heads + head) * positions) as usize;
        #[unroll]
        for i in 0..ROWS {
            let row = y + i * sizes.high;
            let position = first + row as u32;
            let at = statistics + min(position, positions - 1) as usize;
            let (logarithm, shared) = (logarithms[at], along[at]);
            #[unroll]
            for j in 0..COLUMNS {
                let column = x + j * sizes.wide;
                let of = score(scores[comptime!(i * COLUMNS + j)], position, start + column as u32, scale, slope);
                // Queries beyond the last position have nothing to give.
                let mut share = select(position < positions, weight(of, logarithm), 0.0);
                if comptime!(of_keys) {
                    share *= (gradients[comptime!(i * COLUMNS + j)] - shared) * scale;
                }
                weights[row * comptime!(sizes.block + 1) + column] = share;
            }
        }
        sync_cube();
        if comptime!(of_keys) {
            accumulate(&weights, &query_tile, &mut own, true, sizes.head_width, sizes);
        } else {
            accumulate(&weights, &gradient_tile, &mut own, true, sizes.value_width, sizes);
        }
        sync_cube();
    }
    if comptime!(of_keys) {
        put(&own, &mut key_tile, sizes.head_width, sizes);
        sync_cube();
        store::<F, N>(&key_tile, target, key_row * head_vectors, head_step, key_rows, sizes.head_width, sizes);
    } else {
        put(&own, &mut value_tile, sizes.value_width, sizes);
        sync_cube();
        store::<F, N>(&value_tile, target, key_row * value_vectors, value_step, key_rows, sizes.value_width, sizes);
    }
}
