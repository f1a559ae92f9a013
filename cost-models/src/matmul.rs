//! Time of a matrix product by its shape.

use hardware_profiles::device::MatmulFormat;
use ir::model::DType;
use ir::units::Seconds;

use crate::machine::Machine;

/// Edge of the result tile that one multiprocessor computes.
const TILE: f64 = 128.0;
/// Share of a wave that is lost on average when tiles do not fill the last wave.
const WAVE_LOSS: f64 = 0.5;

/// A batch of equal matrix products `[m, k] × [k, n]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatmulShape {
    /// Independent products.
    pub batch: f64,
    /// Rows of the result.
    pub m: f64,
    /// Columns of the result.
    pub n: f64,
    /// Depth that is summed over.
    pub k: f64,
}

impl MatmulShape {
    /// 2 · batch · m · n · k.
    pub fn flops(self) -> f64 {
        2.0 * self.batch * self.m * self.n * self.k
    }

    /// Elements read and written if each matrix passes once.
    pub fn elements(self) -> f64 {
        self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)
    }

    /// The product that gives the left operand's gradient: `[m, n] × [n, k]`.
    pub fn left_gradient(self) -> MatmulShape {
        MatmulShape { n: self.k, k: self.n, ..self }
    }

    /// The product that gives the right operand's gradient: `[k, m] × [m, n]`.
    pub fn right_gradient(self) -> MatmulShape {
        MatmulShape { m: self.k, k: self.m, ..self }
    }
}

/// Share of the dense peak that a product reaches on a device.
///
/// maximum · w / (w + 1/2) · k / (k + half_depth)
///
/// w: result tiles of 128 × 128 over multiprocessors (waves); the half wave is the mean loss of the
/// last one. k / (k + half_depth): prologue and epilogue of a tile against its main loop. Form chosen
/// and constants fitted on the matmul rows of MooreThreads/SimuMax, configs/system (A100-PCIe: mean
/// error 4.6 % over 183 shapes). Not valid for dims off the multiples of 8.
///
/// Where the profile has edges instead of tiles (processor cores): maximum · m/(m + rows) · n/(n + columns)
/// · k/(k + half_depth). A blocked product packs k · n numbers whatever m is, m · k whatever n is, and reads
/// and writes m · n whatever k is (Goto and van de Geijn, ACM TOMS 34(3), 2008); against the 2 · m · n · k
/// FLOPs each is a constant over one extent.
///
/// In a format of which the device multiplies `faster` as many as of the model's, the main loop of a depth takes as
/// much less time while prologue and epilogue keep theirs: half_depth grows by that factor.
pub fn matmul_efficiency(shape: MatmulShape, faster: f64, machine: &Machine) -> f64 {
    let profile = &machine.device.matmul;
    if let Some(edges) = &profile.edges {
        let reached = |extent: f64, half: f64| extent / (extent + half);
        let edges = reached(shape.m, edges.rows.value) * reached(shape.n, edges.columns.value);
        return profile.maximum.value * edges * reached(shape.k, profile.half_depth.value);
    }
    let tiles = shape.batch * (shape.m / TILE).ceil() * (shape.n / TILE).ceil();
    let waves = tiles / profile.multiprocessors.value as f64;
    let filled = (shape.m * shape.n * shape.batch) / (tiles * TILE * TILE);
    let depth = shape.k / (shape.k + profile.half_depth.value * faster);
    profile.maximum.value * filled * waves / (waves + WAVE_LOSS) * depth * alignment(shape, machine)
}

/// Relative speed by how the extents that are contiguous in memory divide.
fn alignment(shape: MatmulShape, machine: &Machine) -> f64 {
    let Some(misaligned) = &machine.device.matmul.misaligned else { return 1.0 };
    let [n, k] = [shape.n, shape.k].map(|extent| extent as u64);
    match () {
        _ if n.is_multiple_of(64) && k.is_multiple_of(64) => 1.0,
        _ if n.is_multiple_of(8) && k.is_multiple_of(8) => misaligned.eights.value,
        _ if shape.batch > 1.0 => misaligned.odd.value,
        _ => misaligned.odd_alone.value,
    }
}

/// Time of a product: the longer of computing it and of moving its matrices once, plus the launch floor
/// where both are shorter.
pub fn matmul_time(shape: MatmulShape, format: MatmulFormat, dtype: DType, machine: &Machine) -> Seconds {
    if shape.flops() == 0.0 {
        return Seconds(0.0);
    }
    let kernels = &machine.stack.kernels;
    let low = kernels.low_precision.as_ref().filter(|_| format != MatmulFormat::Model);
    let relative = low.map_or(1.0, |low| match (format, &low.fp4_speed) {
        (MatmulFormat::Fp4, Some(speed)) => speed.value,
        _ => low.speed.value,
    });
    let speed = kernels.matmul_speed.value * relative;
    let peak = machine.device.product_peak(format, dtype).map_or(0.0, |peak| peak.value.0);
    let faster = if low.is_some() { peak / machine.peak_rate(dtype).0 } else { 1.0 };
    let rate = peak * matmul_efficiency(shape, faster, machine) * speed;
    let moving = shape.elements() * dtype.bytes() as f64 / machine.streaming_bandwidth().0;
    Seconds((shape.flops() / rate).max(moving)).max(kernels.launch_floor.value)
}
