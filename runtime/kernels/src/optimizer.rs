//! AdamW over flat shards of many parameters, and the squared norm of gradients.

use cubecl::prelude::*;

use crate::queue::{BUSY, cubes_for, expect_all, send};
use crate::sums::{sum_of_cube, sum_of_lanes};
use crate::{Buffer, Element, Queue};

/// Units of a cube.
const UNITS: u32 = 256;

/// Hyper-parameters of a step; those of the runtime's AdamW.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Step size of this step.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// The step's number, from 1.
    pub step: u32,
}

/// Weight decay of the parameters that lie one behind the other in a flat shard.
#[derive(Debug)]
pub struct WeightDecay {
    /// Where each parameter ends.
    ends: Buffer,
    /// Weight decay of each.
    factors: Buffer,
    /// Elements that share a parameter if they are taken from a multiple of that number on.
    aligned: usize,
    length: usize,
}

/// State of a flat shard: the number that is updated, and its moments, all fp32.
#[derive(Clone, Copy, Debug)]
pub struct State<'a> {
    /// The fp32 parameters, or the fp32 masters of bf16 ones.
    pub master: &'a Buffer,
    /// First moment.
    pub first: &'a Buffer,
    /// Second moment.
    pub second: &'a Buffer,
    /// The parameters, in bf16 for example, that become the rounded masters, if there are any.
    pub parameter: Option<&'a Buffer>,
}

impl WeightDecay {
    /// Weight decay of parameters of given lengths.
    pub fn new(queue: &Queue, parameters: &[(usize, f32)]) -> WeightDecay {
        let ends = parameters.iter().scan(0, |end, (length, _)| {
            *end += length;
            Some(*end)
        });
        let ends: Vec<usize> = ends.collect();
        let length = ends.last().copied().unwrap_or(0);
        let aligned = [8, 4, 2].into_iter().find(|width| ends.iter().all(|end| end.is_multiple_of(*width)));
        let factors: Vec<f32> = parameters.iter().map(|(_, factor)| *factor).collect();
        WeightDecay {
            ends: queue.indices(&ends.iter().map(|end| *end as u32).collect::<Vec<_>>()),
            factors: queue.numbers(&factors),
            aligned: aligned.unwrap_or(1),
            length,
        }
    }
}

/// One step of AdamW (arXiv 1711.05101) on a flat shard, in one pass; `scale`, one number on the device, multiplies
/// the fp32 gradients.
///
/// Moves 28 bytes per element, and 2 more where bf16 parameters are written.
pub fn adamw(queue: &Queue, settings: &AdamW, decay: &WeightDecay, gradient: &Buffer, scale: &Buffer, state: State) {
    let State { master, first, second, parameter } = state;
    expect_all([gradient, master, first, second], decay.length, Element::Single);
    scale.expect(1, Element::Single);
    // Without rounded parameters the master stands in for them, and the kernel leaves it alone there.
    let rounded = parameter.unwrap_or(master);
    let width = decay.aligned.min(rounded.expect(decay.length, rounded.element).element.width(1 << 10));
    let correction = |beta: f64| 1.0 - beta.powf(f64::from(settings.step));
    send!(
        queue,
        adamw_kernel,
        cubes_for(decay.length / width, UNITS),
        UNITS,
        width,
        gradient.argument(width),
        scale.argument(1),
        decay.ends.argument(1),
        decay.factors.argument(1),
        master.argument(width),
        first.argument(width),
        second.argument(width),
        rounded.argument(width),
        settings.beta1 as f32,
        (1.0 - settings.beta1) as f32,
        settings.beta2 as f32,
        (1.0 - settings.beta2) as f32,
        (settings.learning_rate / correction(settings.beta1)) as f32,
        (1.0 / correction(settings.beta2)).sqrt() as f32,
        settings.epsilon as f32,
        settings.learning_rate as f32,
        parameter.is_some(),
        rounded.element.kind()
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn adamw_kernel<F: Float, N: Size>(
    gradient: &[Vector<f32, N>],
    scale: &[f32],
    ends: &[u32],
    factors: &[f32],
    master: &mut [Vector<f32, N>],
    first: &mut [Vector<f32, N>],
    second: &mut [Vector<f32, N>],
    parameter: &mut [Vector<F, N>],
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    rate: f32,
    root: f32,
    epsilon: f32,
    learning_rate: f32,
    #[comptime] is_rounded: bool,
    #[define(F)] _element: ElemType,
) {
    let scale = scale[0];
    let mut at = ABSOLUTE_POS;
    while at < gradient.len() {
        let decay = learning_rate * factors[parameter_of(ends, (at * N::value()) as u32)];
        let g = gradient[at] * Vector::new(scale);
        let m = first[at] * Vector::new(beta1) + g * Vector::new(rest1);
        let v = second[at] * Vector::new(beta2) + g * g * Vector::new(rest2);
        let p = master[at];
        let step = m * Vector::new(rate) / (v.sqrt() * Vector::new(root) + Vector::new(epsilon));
        let p = p - (step + p * Vector::new(decay));
        first[at] = m;
        second[at] = v;
        master[at] = p;
        if comptime!(is_rounded) {
            parameter[at] = Vector::cast_from(p);
        }
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// The parameter that holds an element: the first that ends behind it.
#[cube]
fn parameter_of(ends: &[u32], element: u32) -> usize {
    let mut low = 0usize.runtime();
    let mut high = ends.len();
    while low < high {
        let middle = (low + high) / 2;
        if ends[middle] > element {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

/// Puts, or adds if `accumulate`, the sum of squares of `gradient` into the one fp32 number of `total`. The order of
/// the sum depends on the gradient's length alone.
///
/// Moves e bytes per element.
pub fn sum_of_squares(queue: &Queue, gradient: &Buffer, total: &Buffer, accumulate: bool) {
    total.expect(1, Element::Single);
    let width = gradient.element.width(gradient.length);
    let cubes = (gradient.length / width).div_ceil(UNITS as usize).clamp(1, BUSY);
    let partial = queue.buffer(cubes, Element::Single);
    send!(
        queue,
        squares_kernel,
        CubeCount::Static(cubes as u32, 1, 1),
        UNITS,
        width,
        gradient.argument(width),
        partial.argument(1),
        UNITS,
        queue.has_planes(),
        gradient.element.kind()
    );
    send!(
        queue,
        sum_kernel,
        CubeCount::Static(1, 1, 1),
        UNITS,
        partial.argument(1),
        total.argument(1),
        UNITS,
        queue.has_planes(),
        accumulate
    );
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn squares_kernel<F: Float, N: Size>(
    gradient: &[Vector<F, N>],
    partial: &mut [f32],
    #[comptime] units: u32,
    #[comptime] planes: bool,
    #[define(F)] _element: ElemType,
) {
    let mut sum = Vector::<f32, N>::new(0.0);
    let mut at = ABSOLUTE_POS;
    while at < gradient.len() {
        let g = Vector::<f32, N>::cast_from(gradient[at]);
        sum += g * g;
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
    let total = sum_of_cube(sum_of_lanes::<N>(sum), units, planes);
    if UNIT_POS == 0 {
        partial[CUBE_POS] = total;
    }
}

#[cube(launch_unchecked, create_dummy_kernel)]
fn sum_kernel(
    partial: &[f32],
    total: &mut [f32],
    #[comptime] units: u32,
    #[comptime] planes: bool,
    #[comptime] accumulate: bool,
) {
    let mut sum = 0.0f32;
    let mut at = UNIT_POS as usize;
    while at < partial.len() {
        sum += partial[at];
        at += units as usize;
    }
    let sum = sum_of_cube(sum, units, planes);
    if UNIT_POS == 0 {
        if comptime!(accumulate) {
            total[0] += sum;
        } else {
            total[0] = sum;
        }
    }
}
