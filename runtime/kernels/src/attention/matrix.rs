//! The attention core on tiles of 16 rows, as matrix instructions of NVIDIA's tensor cores multiply them (FlashAttention-2,
//! arXiv 2307.08691).
//!
//! A plane holds 16 or 32 rows of a block in its registers: scores, weights, gradients and sums, in the layout of
//! accumulators of `mma.m16n8k16` (PTX ISA, "Matrix Fragments for mma.m16n8k16"). The other side streams through shared
//! memory, one block ahead, with one barrier for each block. Weights become the left operand of the second product
//! without leaving registers. Backward has a kernel whose planes hold queries and one whose planes hold keys, so that no
//! two cubes write the same number.
//!
//! The same kernels have their products formed by loops over the same tiles instead ([`Products::Loops`]), in fp32 and
//! without plane instructions: that is how their numbers are checked where there is no GPU.

mod backward;
mod forward;
mod parts;

use super::Attention;
use crate::{Element, Queue};

pub(super) use backward::{keys_gradient, query_gradient};
pub(super) use forward::attention;

/// Rows of a tile.
const ROWS: usize = 16;
/// Units of a plane.
const PLANE: usize = 32;
/// Columns of an accumulator.
const COLUMNS: usize = 8;
/// Numbers of an accumulator that a unit holds: two neighbours in a row, and two 8 rows further.
const OWN: usize = 4;
/// Numbers between a row's end in shared memory and the next row: rows of 8 numbers of 2 bytes then begin in different
/// banks.
const GAP: usize = 8;
/// Elements of bf16 that move at once.
pub(super) const VECTOR: usize = 8;
/// Widest heads, of query and values together, whose sums fit into registers.
pub(super) const WIDEST: usize = 320;
/// The most numbers that a unit holds from product to product, of 255 registers: with more, compilers put some elsewhere.
const MOST_HELD: usize = 176;

/// How tiles are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Products {
    /// By matrix instructions: bf16, widths of heads that are multiples of 8.
    Instructions,
    /// By loops, in any format.
    Loops,
}

/// Sizes that are known when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    products: Products,
    /// Planes of a cube.
    planes: usize,
    /// Tiles of a plane.
    tiles: usize,
    /// Rows of a block of the side that streams.
    block: usize,
    heads: usize,
    queries: usize,
    head_width: usize,
    value_width: usize,
}

/// What a kernel holds, in so many widths of heads and values.
struct Held {
    /// Rows of the cube in shared memory.
    own: [usize; 2],
    /// Rows of each of two blocks there.
    streamed: [usize; 2],
    /// Statistics of the blocks' rows there.
    statistics: usize,
    /// Sums in registers.
    sums: [usize; 2],
    /// Tiles of scores in registers.
    scores: usize,
    /// The most tiles of a plane.
    tiles: usize,
}

impl Products {
    /// Elements that move at once.
    const fn vector(self) -> usize {
        match self {
            Products::Instructions => VECTOR,
            Products::Loops => 1,
        }
    }
}

impl Shape {
    /// The largest cube of which shared memory holds two, or else one.
    fn new(attention: &Attention, products: Products, element: Element, queue: &Queue, held: &Held) -> Shape {
        let tiles = held.tiles;
        // Loops are for checks on small devices: few rows, but more than one tile, plane and block.
        let candidates = match products {
            Products::Instructions => vec![(4, tiles, 64), (4, tiles, 32), (4, tiles, 16), (4, 1, 16)],
            Products::Loops => vec![(2, 2, 16), (1, 2, 16), (1, 1, 16)],
        };
        let of = |(planes, tiles, block): (usize, usize, usize)| {
            let &Attention { heads, queries, head_width, value_width, .. } = attention;
            Shape { products, planes, tiles, block, heads, queries, head_width, value_width }
        };
        let limit = queue.shared_memory();
        let fits = |limit: usize| {
            let fits = |shape: &Shape| shape.bytes(element, held) <= limit && shape.numbers(held) <= MOST_HELD;
            candidates.iter().map(|it| of(*it)).find(fits)
        };
        // A multiprocessor has little more than what one cube may ask for.
        let two = if products == Products::Instructions { fits(limit / 2 - 1024) } else { None };
        two.or_else(|| fits(limit)).expect("the narrowest tiles fit where matrix instructions are")
    }

    /// Bytes of shared memory.
    fn bytes(&self, element: Element, held: &Held) -> usize {
        let numbers = |of: [usize; 2]| of[0] * self.stride(self.head_width) + of[1] * self.stride(self.value_width);
        let tiles = self.rows() * numbers(held.own) + 2 * self.block * numbers(held.streamed);
        // Loops hand weights, and numbers of neighbouring units, through shared memory.
        let handed = match self.products {
            Products::Instructions => 0,
            Products::Loops => 2 * self.rows() * (self.block + 1) + 4 * self.tiles * self.units(),
        };
        tiles * element.bytes() + (2 * self.block * held.statistics + handed) * Element::Single.bytes()
    }

    /// Numbers that a unit holds from product to product.
    fn numbers(&self, held: &Held) -> usize {
        let sums = held.sums[0] * self.held(self.head_width) + held.sums[1] * self.held(self.value_width);
        sums + held.scores * self.held(self.block)
    }

    /// Rows of a cube.
    const fn rows(&self) -> usize {
        self.planes * self.tiles * ROWS
    }

    const fn units(&self) -> usize {
        self.planes * PLANE
    }

    /// Columns of a tile that holds rows of a width: whole products, the last ones filled with zeros.
    const fn columns(width: usize) -> usize {
        width.next_multiple_of(ROWS)
    }

    /// Numbers from a row in shared memory to the next.
    const fn stride(&self, width: usize) -> usize {
        Shape::columns(width) + GAP
    }

    /// Vectors of so many rows in shared memory.
    const fn vectors(&self, rows: usize, width: usize) -> usize {
        rows * self.stride(width) / self.products.vector()
    }

    /// Numbers that a unit holds of its plane's rows of a width.
    const fn held(&self, width: usize) -> usize {
        self.tiles * Shape::columns(width) / COLUMNS * OWN
    }
}
