//! Rotary position embedding (RoFormer, arXiv 2104.09864): pairs (i, i + width/2) of a head are turned.

use cubecl::prelude::*;

use crate::queue::{cubes_for, send};
use crate::{Buffer, Element, Queue};

/// Units of a cube.
const UNITS: u32 = 256;

/// Cosines and sines of all angles.
#[derive(Debug)]
pub struct Turns {
    /// For each position the cosines of its pairs' angles, then the sines.
    table: Buffer,
    positions: usize,
    head_width: usize,
}

/// Heads `[…, positions, heads, head_width]` or `[…, heads, positions, head_width]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Heads between a position and the next: 1 where positions are the dim before the last.
    pub between: usize,
    /// Whether pairs are turned back: the gradient.
    pub back: bool,
}

impl Turns {
    /// Angles position · base^(−2i/width) of a number of positions.
    pub fn new(queue: &Queue, positions: usize, head_width: usize, base: f64) -> Turns {
        let half = head_width / 2;
        let angle = |position: usize, pair: usize| position as f64 * base.powf(-2.0 * pair as f64 / head_width as f64);
        let row = |position| {
            let cosines = (0..half).map(move |pair| angle(position, pair).cos() as f32);
            cosines.chain((0..half).map(move |pair| angle(position, pair).sin() as f32))
        };
        let numbers: Vec<f32> = (0..positions).flat_map(row).collect();
        Turns::of(queue.numbers(&numbers), positions, head_width)
    }

    /// Angles from memory that holds for each position the cosines of its pairs' angles, then the sines.
    pub fn of(table: Buffer, positions: usize, head_width: usize) -> Turns {
        Turns { table, positions, head_width: head_width / 2 * 2 }
    }
}

/// y = x with each head's pairs turned by its position.
///
/// Moves 2e bytes per element, and the table of angles once for all heads of a position that lie together.
pub fn rotary(queue: &Queue, turns: &Turns, heads: Heads, x: &Buffer, y: &Buffer) {
    let half = turns.head_width / 2;
    let (element, width) = (x.element, x.element.width(half));
    assert!(x.length.is_multiple_of(turns.positions * heads.between * turns.head_width), "sequences are whole");
    y.expect(x.length, element);
    turns.table.expect(turns.positions * turns.head_width, Element::Single);
    send!(
        queue,
        rotary_kernel,
        cubes_for(x.length / width / 2, UNITS),
        UNITS,
        width,
        x.argument(width),
        turns.table.argument(width),
        y.result(width, &[x]),
        turns.positions as u32,
        heads.between as u32,
        half / width,
        if heads.back { -1.0 } else { 1.0 },
        element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn rotary_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    turns: &[Vector<f32, N>],
    y: &mut [Vector<F, N>],
    positions: u32,
    between: u32,
    #[comptime] half: usize,
    direction: f32,
    #[define(F)] _element: ElemType,
) {
    let mut pair = ABSOLUTE_POS;
    while pair < y.len() / 2 {
        let row = pair / half;
        let column = pair % half;
        let position = row as u32 / between % positions;
        let turn = position as usize * comptime!(2 * half) + column;
        let at = row * comptime!(2 * half) + column;
        let (cos, sin) = (turns[turn], turns[turn + half] * Vector::new(direction));
        let (a, b) = (Vector::<f32, N>::cast_from(x[at]), Vector::<f32, N>::cast_from(x[at + half]));
        y[at] = Vector::cast_from(a * cos - b * sin);
        y[at + half] = Vector::cast_from(b * cos + a * sin);
        pair += CUBE_COUNT * CUBE_DIM as usize;
    }
}
