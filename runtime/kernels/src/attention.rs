//! The attention core without a matrix of all scores (FlashAttention, arXiv 2205.14135; its backward pass as in
//! FlashAttention-2, arXiv 2307.08691), with causal mask, linear biases (ALiBi) and shared key-value heads.
//!
//! A cube goes through blocks of keys for a block of queries, or the other way round; tiles lie in shared memory, each
//! unit computes a part of each product. No two cubes write the same number, and sums have a fixed order. Which kernels
//! a device gets is decided in [`Way::of`]: those of `matrix` where planes multiply matrices; elsewhere those of
//! `forward` and `backward`, which use neither plane nor matrix instructions and run wherever there is shared memory.

mod backward;
mod forward;
mod matrix;
mod tile;

use cubecl::prelude::*;

use crate::queue::expect_all;
use crate::{Buffer, Element, Queue};

pub use matrix::Products;

/// Rows of the part of a tile of scores that a unit computes.
const ROWS: usize = 4;
/// Columns of that part.
const COLUMNS: usize = 2;

/// What an attention core is applied to: query and context `[sequences, positions, heads · queries, width]`, keys and
/// values `[sequences, positions, heads, width]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Sequences.
    pub sequences: usize,
    /// Positions of a sequence; a position sees the keys up to its own.
    pub positions: usize,
    /// Key-value heads.
    pub heads: usize,
    /// Queries of a key-value head.
    pub queries: usize,
    /// Width of a head in query and keys.
    pub head_width: usize,
    /// Width of a head in values and context.
    pub value_width: usize,
    /// What scores are multiplied by.
    pub scale: f64,
}

/// How kernels go about an attention core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Each unit computes a part of each tile.
    Units,
    /// Each plane multiplies tiles of 16 rows.
    Tiles(Products),
}

/// Sizes that are known when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Sizes {
    /// Rows of a tile, which is also the number of keys of a block.
    block: usize,
    /// Units along the rows of a tile, and along its columns.
    high: usize,
    wide: usize,
    units: usize,
    heads: usize,
    queries: usize,
    head_width: usize,
    value_width: usize,
}

/// context = softmax(scale · query · keysᵀ + slope · key) · values, and for each query the logarithm of its sum of
/// exponentials `[sequences, heads, positions]`, fp32, for backward. `slopes` has a number for each head, zeros
/// without linear biases.
///
/// Moves e bytes per element of query and context, and per element of keys and values for each block of queries.
pub fn attention(queue: &Queue, core: &Attention, operands: [&Buffer; 4], context: &Buffer, logarithms: &Buffer) {
    attention_by(queue, Way::of(queue, core, context.element), core, operands, context, logarithms);
}

/// [`attention`] in a way that the caller chooses.
pub fn attention_by(
    queue: &Queue,
    way: Way,
    core: &Attention,
    operands: [&Buffer; 4],
    context: &Buffer,
    logarithms: &Buffer,
) {
    let element = expect_operands(core, operands);
    context.expect(core.context_length(), element);
    logarithms.expect(core.statistics_length(), Element::Single);
    match way {
        Way::Units => forward::attention(queue, core, operands, context, logarithms),
        Way::Tiles(products) => matrix::attention(queue, core, products, operands, context, logarithms),
    }
}

/// Gradients `[dquery, dkeys, dvalues]` of [`attention`]'s operands from its results, context and logarithms, and the
/// gradient `dcontext`.
///
/// Moves e bytes per element of each operand, context and gradient, and those of the other side once more for each
/// block of keys, and for each block of queries.
pub fn attention_gradient(
    queue: &Queue,
    core: &Attention,
    operands: [&Buffer; 4],
    results: [&Buffer; 3],
    gradients: [&Buffer; 3],
) {
    attention_gradient_by(queue, Way::of(queue, core, results[0].element), core, operands, results, gradients);
}

/// [`attention_gradient`] in a way that the caller chooses.
pub fn attention_gradient_by(
    queue: &Queue,
    way: Way,
    core: &Attention,
    operands: [&Buffer; 4],
    [context, logarithms, dcontext]: [&Buffer; 3],
    [dquery, dkeys, dvalues]: [&Buffer; 3],
) {
    let element = expect_operands(core, operands);
    expect_all([context, dcontext], core.context_length(), element);
    dquery.expect(core.query_length(), element);
    dkeys.expect(core.keys_length(), element);
    dvalues.expect(core.values_length(), element);
    logarithms.expect(core.statistics_length(), Element::Single);
    let along = backward::context_product(queue, core, context, dcontext);
    let results = [dcontext, logarithms, &along];
    match way {
        Way::Units => backward::attention_gradient(queue, core, operands, results, [dquery, dkeys, dvalues]),
        Way::Tiles(products) => {
            matrix::query_gradient(queue, core, products, operands, results, dquery);
            matrix::keys_gradient(queue, core, products, operands, results, [dkeys, dvalues]);
        }
    }
}

impl Way {
    /// The fastest way that a device has for a core whose tensors are in a number format.
    pub fn of(queue: &Queue, core: &Attention, element: Element) -> Way {
        let widths = [core.head_width, core.value_width];
        let whole = widths.iter().all(|width| width.is_multiple_of(matrix::VECTOR));
        let held = widths.iter().sum::<usize>() <= matrix::WIDEST;
        if element == Element::Brain && whole && held && queue.has_matrix_instructions() {
            Way::Tiles(Products::Instructions)
        } else {
            Way::Units
        }
    }
}

impl Attention {
    fn query_length(&self) -> usize {
        self.sequences * self.positions * self.heads * self.queries * self.head_width
    }

    fn context_length(&self) -> usize {
        self.sequences * self.positions * self.heads * self.queries * self.value_width
    }

    fn keys_length(&self) -> usize {
        self.sequences * self.positions * self.heads * self.head_width
    }

    fn values_length(&self) -> usize {
        self.sequences * self.positions * self.heads * self.value_width
    }

    fn statistics_length(&self) -> usize {
        self.sequences * self.positions * self.heads * self.queries
    }

    /// Elements that are read at once: at most half a row, because rows of one vector come out wrong where kernels run
    /// as WGSL.
    fn width(&self, element: Element) -> usize {
        let width = element.width(self.head_width).min(element.width(self.value_width));
        let narrowest = self.head_width.min(self.value_width);
        if width == narrowest { (width / 2).max(1) } else { width }
    }

    /// The largest blocks whose tiles fit into shared memory: so many of each width, and of scores.
    fn sizes(&self, queue: &Queue, tiles: [usize; 3]) -> Sizes {
        let limit = queue.shared_memory();
        let of = |block: usize| Sizes {
            block,
            high: block / ROWS,
            wide: block / COLUMNS,
            units: (block / ROWS) * (block / COLUMNS),
            heads: self.heads,
            queries: self.queries,
            head_width: self.head_width,
            value_width: self.value_width,
        };
        let bytes = |sizes: &Sizes| {
            let Sizes { block, head_width, value_width, .. } = *sizes;
            let widths = [sizes.stride(head_width), sizes.stride(value_width), block + 1];
            let elements: usize = tiles.iter().zip(widths).map(|(count, width)| count * width * block).sum();
            (elements + 4 * block) * Element::Single.bytes()
        };
        let fits = [32, 16, 8].map(of).into_iter().find(|sizes| bytes(sizes) <= limit);
        fits.expect("heads are narrow enough for tiles of 8 rows")
    }
}

impl Sizes {
    /// Columns of a tile that holds rows of a width: whole parts, the last ones filled with zeros.
    const fn columns(&self, width: usize) -> usize {
        width.div_ceil(self.wide) * self.wide
    }

    /// Numbers from a tile's row to the next: one more than columns, so that rows begin in different banks.
    const fn stride(&self, width: usize) -> usize {
        self.columns(width) + 1
    }
}

/// Checks the operands that forward and backward share.
fn expect_operands(attention: &Attention, [query, keys, values, slopes]: [&Buffer; 4]) -> Element {
    let element = query.element;
    query.expect(attention.query_length(), element);
    keys.expect(attention.keys_length(), element);
    values.expect(attention.values_length(), element);
    slopes.expect(attention.heads * attention.queries, Element::Single);
    element
}

/// The score of a query and a key, the least number for keys that the query does not see: WGSL has no infinity.
#[cube]
fn score(product: f32, position: u32, key: u32, scale: f32, slope: f32) -> f32 {
    select(key <= position, product * scale + slope * f32::cast_from(key), f32::MIN)
}
