//! Sums of products on a device: cubek's matrix products where they apply, else tiles of our own.
//!
//! What decides is [`way_of`] alone, and it depends on nothing but the product's sizes, strides and number formats, so
//! that all ranks decide alike. A kernel of cubek that was never used on this device is tried first, on memory of its
//! own: what a device's compiler refuses, or computes wrongly, is not used.

use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use cubecl::zspace::{shape, strides};
use cubek_matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek_matmul::launch::launch_ref;
use cubek_matmul::multi_level;
use cubek_matmul::strategy::Strategy;
use cubek_std::InputBinding;
use kernels::elementwise::{Unary, fill, unary};
use kernels::product::{Products, products};
use kernels::strided::{Axis, Loops};
use kernels::{Buffer, Element, Queue};

use super::Device;
use crate::operators::contraction;
use crate::tensor::{Dims, bf16};

/// Rows, columns and summed elements from which on a product is a matter of cubek: those of one of its smallest tiles.
const SMALLEST: usize = 32;
/// Elements of a tried result that are looked at, at each end.
const LOOKED_AT: usize = 1 << 18;

/// A product c = a · b of whole matrices, with rows or columns that are neighbours in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matrices {
    /// Rows of a and c.
    pub rows: usize,
    /// Columns of a, rows of b.
    pub summed: usize,
    /// Columns of b and c.
    pub columns: usize,
    /// Elements from row to row and from column to column, of a and b; rows of c are whole.
    pub strides: [[usize; 2]; 2],
    /// Number formats of the operands and of the result.
    pub formats: [Element; 2],
}

/// How a product is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// By tiles of our own.
    Tiles,
    /// By cubek; with operands exchanged where columns of the result are neighbours in memory.
    Cubek(Matrices, bool),
}

/// Puts or adds the sum of products over the dims that the result lacks.
pub fn contract(device: &Device, [a, b]: [(&Dims, &Buffer); 2], (dims, c): (&Dims, &Buffer), accumulate: bool) {
    let contraction::Products { rows, columns, summed, outer, inner } = contraction::products(a.0, b.0, dims);
    let axis = |axis: contraction::Axis| Axis { extent: axis.extent, strides: axis.strides };
    let loops = |axes: Vec<contraction::Axis>| Loops::new(&axes.into_iter().map(axis).collect::<Vec<_>>());
    let found = Products {
        rows: axis(rows),
        columns: axis(columns),
        summed: axis(summed),
        outer: loops(outer),
        inner: loops(inner),
    };
    let queue = &device.queue();
    match (way_of(device, &found, [a.1, b.1, c]), queue) {
        (Way::Cubek(matrices, exchanged), Queue::Device(client)) => {
            let [a, b] = if exchanged { [b.1, a.1] } else { [a.1, b.1] };
            let sum = if accumulate { queue.buffer(c.length, c.element) } else { c.clone() };
            multiply(client, &strategy(&matrices), &matrices, [a, b, &sum])
                .expect("what was tried once is taken again");
            if accumulate {
                unary(queue, Unary::Copy, 1.0, &sum, c, true);
            }
        }
        _ => products(queue, &found, [a.1, b.1], c, accumulate),
    }
}

/// How a product is computed on a device.
fn way_of(device: &Device, products: &Products, of: [&Buffer; 3]) -> Way {
    let exchanged = products.columns.strides[2] != 1;
    match matrices_of(products, of, exchanged) {
        Some(matrices) if device.has_tried(matrices, try_product) => Way::Cubek(matrices, exchanged),
        _ => Way::Tiles,
    }
}

/// cubek's routine for a product: on tensor cores in bf16, where all they round is the operands; in fp32 without them,
/// because they round that to fewer bits.
pub(crate) fn strategy(matrices: &Matrices) -> Strategy {
    match matrices.formats[0] {
        Element::Brain => multi_level::Strategy::SimpleCyclicCmma(Default::default()).into(),
        Element::Single | Element::Index => multi_level::Strategy::SimpleUnit(Default::default()).into(),
    }
}

/// The one product of whole matrices that these products are, with the operands exchanged if that is asked for.
fn matrices_of(products: &Products, [a, b, c]: [&Buffer; 3], exchanged: bool) -> Option<Matrices> {
    let Products { rows, columns, summed, outer, inner } = products;
    let (rows, columns, [first, second]) = if exchanged { (columns, rows, [1, 0]) } else { (rows, columns, [0, 1]) };
    let strides = [[rows.strides[first], summed.strides[first]], [summed.strides[second], columns.strides[second]]];
    let is_large = [rows, columns, summed].iter().all(|axis| axis.extent >= SMALLEST);
    let is_one = outer.rounds() == 1 && inner.rounds() == 1;
    let is_whole =
        columns.strides[2] == 1 && rows.strides[2] == columns.extent && c.length == rows.extent * columns.extent;
    let extents = [[rows.extent, summed.extent], [summed.extent, columns.extent]];
    let lie = strides
        .iter()
        .zip(extents)
        .all(|([row, column], [high, wide])| (*column == 1 && *row >= wide) || (*row == 1 && *column >= high));
    let alike = a.element == b.element && a.element != Element::Index;
    (is_large && is_one && is_whole && lie && alike).then_some(Matrices {
        rows: rows.extent,
        summed: summed.extent,
        columns: columns.extent,
        strides,
        formats: [a.element, c.element],
    })
}

/// c = a · b by a routine of cubek.
///
/// # Errors
/// What it says if it does not multiply such matrices on this device.
pub(crate) fn multiply(
    client: &Client,
    strategy: &Strategy,
    matrices: &Matrices,
    [a, b, c]: [&Buffer; 3],
) -> Result<(), String> {
    let Matrices { rows, summed, columns, strides: [of_a, of_b], formats: [operand, result] } = *matrices;
    // SAFETY: the buffers are as long as extents and strides reach.
    #[allow(unsafe_code)]
    let binding = |buffer: &Buffer, [high, wide]: [usize; 2], [row, column]: [usize; 2]| unsafe {
        assert!((high - 1) * row + (wide - 1) * column < buffer.length, "a matrix lies in its buffer");
        TensorBinding::from_raw_parts(buffer.handle.clone(), strides![row, column], shape![high, wide])
    };
    let [operand, result] = [operand.kind(), result.kind()];
    let mut elements = MatmulElems::from_globals(&MatmulGlobalElems { lhs: operand, rhs: operand, out: result });
    let left = InputBinding::new(binding(a, [rows, summed], of_a), operand);
    let right = InputBinding::new(binding(b, [summed, columns], of_b), operand);
    launch_ref(strategy, client, left, right, binding(c, [rows, columns], [columns, 1]), &mut elements)
        .map_err(|error| format!("cubek refuses: {error:?}"))
}

/// Multiplies matrices of ones in memory of their own, written over NaN: every sum is the number of its terms.
///
/// # Errors
/// What was wrong.
fn try_product(client: &Client, matrices: &Matrices) -> Result<(), String> {
    let Matrices { rows, summed, columns, strides, formats: [operand, result] } = *matrices;
    let queue = Queue::Device(client);
    let reach = |[high, wide]: [usize; 2], [row, column]: [usize; 2]| (high - 1) * row + (wide - 1) * column + 1;
    let lengths = [(reach([rows, summed], strides[0]), operand), (reach([summed, columns], strides[1]), operand)];
    let [a, b, c] = client.memory_dedicated_allocation((), |()| {
        [lengths[0], lengths[1], (rows * columns, result)].map(|(length, element)| queue.buffer(length, element))
    });
    [(&a, 1.0), (&b, 1.0), (&c, f32::NAN)].into_iter().for_each(|(buffer, number)| fill(&queue, number, buffer));
    multiply(client, &strategy(matrices), matrices, [&a, &b, &c])?;
    let expected = match result {
        Element::Brain => bf16::from_f32(summed as f32).to_f32(),
        Element::Single | Element::Index => summed as f32,
    };
    let bytes = result.bytes() as u64;
    let skipped = c.length.saturating_sub(LOOKED_AT) as u64 * bytes;
    let ends = [c.handle.clone().offset_end(skipped), c.handle.clone().offset_start(skipped)];
    for end in ends {
        let read = client.read_one(end).map_err(|error| super::said(&error))?;
        let wrong = |number: f32| (number != expected).then(|| format!("{number} instead of {expected}"));
        let found = match result {
            Element::Brain => read.chunks_exact(2).find_map(|it| wrong(bf16::from_le_bytes([it[0], it[1]]).to_f32())),
            Element::Single | Element::Index => {
                read.chunks_exact(4).find_map(|it| wrong(f32::from_le_bytes([it[0], it[1], it[2], it[3]])))
            }
        };
        found.map_or(Ok(()), Err)?;
    }
    Ok(())
}
