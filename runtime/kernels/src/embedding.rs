//! Rows of an embedding table for token ids, and the sum of gradients into them, in a fixed order without atomics.

use cubecl::prelude::*;

use crate::queue::{cubes_for, send};
use crate::sums::sum_of_cube;
use crate::{Buffer, Element, Queue};

/// Units of a cube.
const UNITS: u32 = 256;
/// The most units of a cube that adds gradients.
const MOST_UNITS: usize = 1024;

/// y = the rows of the table `[rows, columns]` that ids `[tokens]` name, zeros for ids that another rank holds;
/// `start` is the first id of the table's rows.
///
/// Moves 2e bytes per element of `y`.
pub fn lookup(queue: &Queue, table: &Buffer, columns: usize, ids: &Buffer, start: u32, y: &Buffer) {
    let (element, width) = (table.element, table.element.width(columns));
    assert!(table.length.is_multiple_of(columns), "rows are whole");
    ids.expect(ids.length, Element::Index);
    y.expect(ids.length * columns, element);
    send!(
        queue,
        lookup_kernel,
        cubes_for(y.length / width, UNITS),
        UNITS,
        width,
        table.argument(width),
        ids.argument(1),
        y.argument(width),
        start,
        columns / width,
        element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn lookup_kernel<F: Float, N: Size>(
    table: &[Vector<F, N>],
    ids: &[u32],
    y: &mut [Vector<F, N>],
    start: u32,
    #[comptime] columns: usize,
    #[define(F)] _element: ElemType,
) {
    let rows = table.len() / columns;
    let mut at = ABSOLUTE_POS;
    while at < y.len() {
        let row = (ids[at / columns] - start) as usize;
        if row < rows {
            y[at] = table[row * columns + at % columns];
        } else {
            y[at] = Vector::new(F::new(0.0));
        }
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Adds the gradients `dy` of [`lookup`]'s result to the fp32 gradient of the table.
///
/// The cube of a token leaves at once if an earlier token has the same id; else it looks for the later ones and adds
/// their gradients in order. Moves e bytes per element of `dy` and 8 per element of the rows that ids name; the ids
/// are read tokens² / 2 times, from the cache.
pub fn lookup_gradient(queue: &Queue, ids: &Buffer, dy: &Buffer, start: u32, dtable: &Buffer) {
    let tokens = ids.expect(ids.length, Element::Index).length;
    assert!(dy.length.is_multiple_of(tokens), "rows are whole");
    let columns = dy.length / tokens;
    let width = dy.element.width(columns);
    dtable.expect(dtable.length, Element::Single);
    let units = queue.units_for(columns / width, MOST_UNITS);
    send!(
        queue,
        lookup_gradient_kernel,
        CubeCount::Static(tokens as u32, 1, 1),
        units as u32,
        width,
        ids.argument(1),
        dy.argument(width),
        dtable.argument(width),
        start,
        columns / width,
        units as u32,
        queue.has_planes(),
        dy.element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn lookup_gradient_kernel<F: Float, N: Size>(
    ids: &[u32],
    dy: &[Vector<F, N>],
    dtable: &mut [Vector<f32, N>],
    start: u32,
    #[comptime] columns: usize,
    #[comptime] units: u32,
    #[comptime] planes: bool,
    #[define(F)] _element: ElemType,
) {
    let held = comptime!(columns.div_ceil(units as usize));
    let (token, tokens) = (CUBE_POS as u32, ids.len() as u32);
    let id = ids[CUBE_POS];
    let mut equal = 0.0f32;
    let mut at = UNIT_POS;
    while at < token {
        if ids[at as usize] == id {
            equal = 1.0;
        }
        at += units;
    }
    let row = (id - start) as usize;
    let is_first = sum_of_cube(equal, units, planes) == 0.0 && row < dtable.len() / columns;
    // Where others do the work there is none.
    let end = select(is_first, tokens, 0u32);
    let mut seen = Shared::<[u32]>::new_slice(comptime!(units as usize));
    let mut sums = Array::<Vector<f32, N>>::new(held);
    #[unroll]
    for part in 0..held {
        sums[part] = Vector::new(0.0);
    }
    let mut chunk = token;
    while chunk < end {
        let own = chunk + UNIT_POS;
        let mut here = 0u32;
        if own < tokens {
            here = select(ids[own as usize] == id, 1u32, 0u32);
        }
        seen[UNIT_POS as usize] = here;
        if sum_of_cube(f32::cast_from(here), units, planes) > 0.0 {
            for place in 0..units {
                if seen[place as usize] == 1 {
                    let from = (chunk + place) as usize * columns;
                    #[unroll]
                    for part in 0..held {
                        let column = UNIT_POS as usize + part * units as usize;
                        if column < columns {
                            sums[part] += Vector::cast_from(dy[from + column]);
                        }
                    }
                }
            }
        }
        sync_cube();
        chunk += units;
    }
    if end > token {
        let row = (ids[CUBE_POS] - start) as usize;
        #[unroll]
        for part in 0..held {
            let column = UNIT_POS as usize + part * units as usize;
            if column < columns {
                dtable[row * columns + column] += sums[part];
            }
        }
    }
}
