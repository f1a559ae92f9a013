//! LayerNorm (arXiv 1607.06450) and RMSNorm (arXiv 1910.07467), with the sum that feeds them, forward and backward.
//!
//! A cube holds a row in its units' registers, so that the row is read once though its moments come first. Backward
//! computes the moments again, for the same reason: the row is there anyway.

use cubecl::prelude::*;

use crate::queue::{BUSY, expect_all, send};
use crate::sums::{add_strips, strips, sum_of_cube, sum_of_lanes};
use crate::{Buffer, Element, Queue};

/// Elements of a row that a unit holds if rows allow it: few enough for registers, enough to hide the latency of memory.
const HELD: usize = 16;
/// The same backward, where sums over rows need registers too.
const HELD_BACKWARD: usize = 8;
/// The most units of a cube.
const MOST_UNITS: usize = 512;

/// Which norm, and of which rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// Whether the mean is subtracted: LayerNorm; RMSNorm does not.
    pub centered: bool,
    /// Added to the variance.
    pub epsilon: f64,
    /// Elements of a row.
    pub columns: usize,
}

/// How a cube holds a row. A unit keeps its part, and sums of it over rows, in registers, or else reads the row again
/// from the cache and has the sums in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Layout {
    /// Vectors of a row.
    columns: usize,
    /// Vectors of a unit.
    held: usize,
    units: u32,
    keeps: bool,
    planes: bool,
    centered: bool,
}

/// What a row is divided by.
#[derive(CubeType, Clone, Copy)]
struct Moments {
    mean: f32,
    scale: f32,
}

impl Norm {
    fn layout(&self, queue: &Queue, width: usize, wanted: usize) -> Layout {
        let columns = self.columns / width;
        let units = queue.units_for(columns.div_ceil((wanted / width).max(1)), MOST_UNITS);
        let held = columns.div_ceil(units);
        let sums = 2 * held * units * width * Element::Single.bytes();
        let keeps = held * width <= wanted || sums + (units + 1) * Element::Single.bytes() > queue.shared_memory();
        Layout { columns, held, units: units as u32, keeps, planes: queue.has_planes(), centered: self.centered }
    }

    fn rows(&self, x: &Buffer) -> usize {
        assert!(x.length.is_multiple_of(self.columns), "rows are whole");
        x.length / self.columns
    }
}

/// y = norm(x) · weight + bias, for `x` of `[rows, columns]`; with a `residual`, of x + residual, which becomes
/// `sum`.
///
/// Moves 2e bytes per element of `x`, with a residual 4e.
pub fn norm(
    queue: &Queue,
    settings: &Norm,
    x: &Buffer,
    residual: Option<(&Buffer, &Buffer)>,
    weight: &Buffer,
    bias: Option<&Buffer>,
    y: &Buffer,
) {
    let (element, width) = (x.element, x.element.width(settings.columns));
    let (layout, rows) = (Layout { keeps: true, ..settings.layout(queue, width, HELD) }, settings.rows(x));
    y.expect(x.length, element);
    expect_all([weight, bias.unwrap_or(weight)], settings.columns, element);
    // Operands that there are not are never read: others stand in for them.
    let nothing = queue.buffer(width, element);
    let has_residual = residual.is_some();
    let (residual, sum) = residual
        .map_or((x, &nothing), |(residual, sum)| (residual.expect(x.length, element), sum.expect(x.length, element)));
    send!(
        queue,
        norm_kernel,
        CubeCount::Static(rows as u32, 1, 1),
        layout.units,
        width,
        x.argument(width),
        residual.argument(width),
        weight.argument(width),
        bias.unwrap_or(weight).argument(width),
        sum.result(width, &[x, residual]),
        y.result(width, &[x]),
        settings.epsilon as f32,
        layout,
        has_residual,
        bias.is_some(),
        element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn norm_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    residual: &[Vector<F, N>],
    weight: &[Vector<F, N>],
    bias: &[Vector<F, N>],
    sum: &mut [Vector<F, N>],
    y: &mut [Vector<F, N>],
    epsilon: f32,
    #[comptime] layout: Layout,
    #[comptime] has_residual: bool,
    #[comptime] has_bias: bool,
    #[define(F)] _element: ElemType,
) {
    let start = CUBE_POS * layout.columns;
    let mut row = Array::<Vector<f32, N>>::new(layout.held);
    #[unroll]
    for part in 0..layout.held {
        let column = UNIT_POS as usize + part * layout.units as usize;
        row[part] = Vector::new(0.0);
        if column < layout.columns {
            let mut own = Vector::<f32, N>::cast_from(x[start + column]);
            if comptime!(has_residual) {
                own += Vector::<f32, N>::cast_from(residual[start + column]);
                sum[start + column] = Vector::cast_from(own);
            }
            row[part] = own;
        }
    }
    let moments = moments::<F, N>(&row, x, start, epsilon, layout);
    #[unroll]
    for part in 0..layout.held {
        let column = UNIT_POS as usize + part * layout.units as usize;
        if column < layout.columns {
            let normal = (row[part] - Vector::new(moments.mean)) * Vector::new(moments.scale);
            let mut own = normal * Vector::<f32, N>::cast_from(weight[column]);
            if comptime!(has_bias) {
                own += Vector::<f32, N>::cast_from(bias[column]);
            }
            y[start + column] = Vector::cast_from(own);
        }
    }
}

/// Moments of the row that a cube holds.
#[cube]
fn moments<F: Float, N: Size>(
    row: &Array<Vector<f32, N>>,
    x: &[Vector<F, N>],
    start: usize,
    epsilon: f32,
    #[comptime] layout: Layout,
) -> Moments {
    let count = comptime!(layout.columns as f32) * N::value() as f32;
    let mut mean = 0.0f32;
    if comptime!(layout.centered) {
        let mut sum = Vector::<f32, N>::new(0.0);
        #[unroll]
        for part in 0..layout.held {
            let column = UNIT_POS as usize + part * layout.units as usize;
            if column < layout.columns {
                sum += of_row::<F, N>(row, x, start + column, part, layout);
            }
        }
        mean = sum_of_cube(sum_of_lanes::<N>(sum), layout.units, layout.planes) / count;
    }
    let mut squares = Vector::<f32, N>::new(0.0);
    #[unroll]
    for part in 0..layout.held {
        let column = UNIT_POS as usize + part * layout.units as usize;
        if column < layout.columns {
            let distance = of_row::<F, N>(row, x, start + column, part, layout) - Vector::new(mean);
            squares += distance * distance;
        }
    }
    let variance = sum_of_cube(sum_of_lanes::<N>(squares), layout.units, layout.planes) / count;
    Moments { mean, scale: (variance + epsilon).inverse_sqrt() }
}

/// Part of a row, from registers or memory.
#[cube]
fn of_row<F: Float, N: Size>(
    row: &Array<Vector<f32, N>>,
    x: &[Vector<F, N>],
    at: usize,
    #[comptime] part: usize,
    #[comptime] layout: Layout,
) -> Vector<f32, N> {
    if comptime!(layout.keeps) { row[part] } else { Vector::cast_from(x[at]) }
}

/// Gradients of [`norm`] from `dy`, `x` being what was normalized: `dx`, to which `upstream` is added where the sum
/// has other readers, and what is added to the fp32 gradients of weight and bias, which are replaced unless
/// `accumulate`.
///
/// Moves 3e bytes per element of `x`, and e more with `upstream`.
pub fn norm_gradient(
    queue: &Queue,
    settings: &Norm,
    [x, weight, dy]: [&Buffer; 3],
    upstream: Option<&Buffer>,
    dx: &Buffer,
    (dweight, dbias): (&Buffer, Option<&Buffer>),
    accumulate: bool,
) {
    let (element, width) = (x.element, x.element.width(settings.columns));
    let (layout, rows) = (settings.layout(queue, width, HELD_BACKWARD), settings.rows(x));
    expect_all([dy, dx, upstream.unwrap_or(dy)], x.length, element);
    weight.expect(settings.columns, element);
    let strips = strips(rows, BUSY);
    let partial = |wanted: bool| {
        let length = if wanted { strips * settings.columns } else { width };
        queue.buffer(length, Element::Single)
    };
    let [weights, biases] = [partial(true), partial(dbias.is_some())];
    send!(
        queue,
        norm_gradient_kernel,
        CubeCount::Static(strips as u32, 1, 1),
        layout.units,
        width,
        x.argument(width),
        weight.argument(width),
        dy.argument(width),
        upstream.unwrap_or(dy).argument(width),
        dx.result(width, &[x, weight, dy]),
        weights.argument(width),
        biases.argument(width),
        settings.epsilon as f32,
        rows as u32,
        layout,
        upstream.is_some(),
        dbias.is_some(),
        element.kind()
    );
    add_strips(queue, &weights, dweight, accumulate);
    if let Some(total) = dbias {
        add_strips(queue, &biases, total, accumulate);
    }
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn norm_gradient_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    weight: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    upstream: &[Vector<F, N>],
    dx: &mut [Vector<F, N>],
    weights: &mut [Vector<f32, N>],
    biases: &mut [Vector<f32, N>],
    epsilon: f32,
    rows: u32,
    #[comptime] layout: Layout,
    #[comptime] has_upstream: bool,
    #[comptime] has_bias: bool,
    #[define(F)] _element: ElemType,
) {
    let count = comptime!(layout.columns as f32) * N::value() as f32;
    let mut row = Array::<Vector<f32, N>>::new(comptime!(if layout.keeps { layout.held } else { 1 }));
    let mut weight_sums = Sums::<N>::new(layout);
    let mut bias_sums = Sums::<N>::new(layout);
    let mut at = CUBE_POS as u32;
    while at < rows {
        let start = at as usize * layout.columns;
        if comptime!(layout.keeps) {
            #[unroll]
            for part in 0..layout.held {
                let column = UNIT_POS as usize + part * layout.units as usize;
                row[part] = Vector::new(0.0);
                if column < layout.columns {
                    row[part] = Vector::cast_from(x[start + column]);
                }
            }
        }
        let moments = moments::<F, N>(&row, x, start, epsilon, layout);
        let mut level = 0.0f32;
        let mut along = 0.0f32;
        #[unroll]
        for part in 0..layout.held {
            let column = UNIT_POS as usize + part * layout.units as usize;
            if column < layout.columns {
                let own = of_row::<F, N>(&row, x, start + column, part, layout);
                let normal = (own - Vector::new(moments.mean)) * Vector::new(moments.scale);
                let gradient = Vector::<f32, N>::cast_from(dy[start + column]);
                let dnormal = gradient * Vector::<f32, N>::cast_from(weight[column]);
                weight_sums.add(normal * gradient, part, layout);
                if comptime!(has_bias) {
                    bias_sums.add(gradient, part, layout);
                }
                if comptime!(layout.centered) {
                    level += sum_of_lanes::<N>(dnormal);
                }
                along += sum_of_lanes::<N>(dnormal * normal);
            }
        }
        let mut mean = 0.0f32;
        if comptime!(layout.centered) {
            mean = sum_of_cube(level, layout.units, layout.planes) / count;
        }
        let slope = sum_of_cube(along, layout.units, layout.planes) / count;
        #[unroll]
        for part in 0..layout.held {
            let column = UNIT_POS as usize + part * layout.units as usize;
            if column < layout.columns {
                // Read again, from the cache: registers are needed for the sums.
                let gradient = Vector::<f32, N>::cast_from(dy[start + column]);
                let dnormal = gradient * Vector::<f32, N>::cast_from(weight[column]);
                let own = of_row::<F, N>(&row, x, start + column, part, layout);
                let normal = (own - Vector::new(moments.mean)) * Vector::new(moments.scale);
                let inner = dnormal - Vector::new(mean) - normal * Vector::new(slope);
                let mut own = inner * Vector::new(moments.scale);
                if comptime!(has_upstream) {
                    own += Vector::<f32, N>::cast_from(upstream[start + column]);
                }
                dx[start + column] = Vector::cast_from(own);
            }
        }
        at += CUBE_COUNT as u32;
    }
    #[unroll]
    for part in 0..layout.held {
        let column = UNIT_POS as usize + part * layout.units as usize;
        if column < layout.columns {
            weights[CUBE_POS * layout.columns + column] = weight_sums.of(part, layout);
            if comptime!(has_bias) {
                biases[CUBE_POS * layout.columns + column] = bias_sums.of(part, layout);
            }
        }
    }
}

/// Sums of a unit over rows.
#[derive(CubeType)]
struct Sums<N: Size> {
    own: Array<Vector<f32, N>>,
    shared: Shared<[Vector<f32, N>]>,
}

#[cube]
impl<N: Size> Sums<N> {
    /// Zeros.
    fn new(#[comptime] layout: Layout) -> Sums<N> {
        let parts = layout.held;
        let mut own = Array::<Vector<f32, N>>::new(comptime!(if layout.keeps { parts } else { 1 }));
        let mut shared = Shared::<[Vector<f32, N>]>::new_slice(comptime!(if layout.keeps {
            1
        } else {
            parts * layout.units as usize
        }));
        #[unroll]
        for part in 0..parts {
            if comptime!(layout.keeps) {
                own[part] = Vector::new(0.0);
            } else {
                shared[part * layout.units as usize + UNIT_POS as usize] = Vector::new(0.0);
            }
        }
        Sums::<N> { own, shared }
    }

    fn add(&mut self, more: Vector<f32, N>, #[comptime] part: usize, #[comptime] layout: Layout) {
        if comptime!(layout.keeps) {
            self.own[part] += more;
        } else {
            self.shared[part * layout.units as usize + UNIT_POS as usize] += more;
        }
    }

    fn of(&self, #[comptime] part: usize, #[comptime] layout: Layout) -> Vector<f32, N> {
        if comptime!(layout.keeps) {
            self.own[part]
        } else {
            self.shared[part * layout.units as usize + UNIT_POS as usize]
        }
    }
}
