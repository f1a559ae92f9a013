//! Constants that a user's own runs may decide, and the choice of those that they can tell.

use cost_models::machine::Machine;
use hardware_profiles::sourced::Sourced;
use ir::provenance::Provenance;
use ir::units::{Bytes, Seconds};
use nalgebra::{Cholesky, DMatrix, DVector};

use super::runs::{OwnRun, Quantity, log_errors};
use crate::fitting::Free;

/// Error that runs have however well the constants are known: repeats differ by a few per cent.
pub const NOISE: f64 = 0.03;

/// Least squared effect of a constant's spread on the runs, relative to their noise, for which it is fitted.
const LEAST_SHOWN: f64 = 0.1;

/// A constant that runs may decide.
#[derive(Clone, Copy)]
pub struct Constant {
    /// Profile and field.
    pub name: &'static str,
    /// How far it differs from its prior between machines: of its logarithm, or of its share of the largest value.
    pub spread: f64,
    /// Least and largest value, as in [`Free`].
    pub range: (f64, f64),
    /// The number in a machine's profiles, if it has one.
    pub number: fn(&mut Machine) -> Option<Number<'_>>,
}

/// A number of a profile with its unit.
pub enum Number<'a> {
    /// Without unit.
    Ratio(&'a mut Sourced<f64>),
    /// Seconds.
    Time(&'a mut Sourced<Seconds>),
    /// Bytes.
    Size(&'a mut Sourced<Bytes>),
}

/// Constants of a step's time.
#[rustfmt::skip]
pub const TIME: [Constant; 12] = [
    Constant { name: "stack kernels.matmul_speed", spread: 0.2, range: (0.1, 4.0), number: |m| Some(Number::Ratio(&mut m.stack.kernels.matmul_speed)) },
    Constant { name: "stack kernels.streaming_speed", spread: 0.3, range: (0.1, 4.0), number: |m| Some(Number::Ratio(or_one(&mut m.stack.kernels.streaming_speed))) },
    Constant { name: "stack kernels.attention_speed", spread: 0.3, range: (0.1, 4.0), number: |m| Some(Number::Ratio(or_one(&mut m.stack.kernels.attention_speed))) },
    Constant { name: "stack kernels.experts.grouped_speed", spread: 0.3, range: (0.1, 4.0), number: |m| Some(Number::Ratio(&mut m.stack.kernels.experts.as_mut()?.grouped_speed)) },
    Constant { name: "stack kernels.low_precision.speed", spread: 0.2, range: (0.1, 4.0), number: |m| Some(Number::Ratio(&mut m.stack.kernels.low_precision.as_mut()?.speed)) },
    Constant { name: "cluster intra.efficiency", spread: 0.5, range: (0.05, 1.2), number: |m| Some(Number::Ratio(&mut m.cluster.intra.efficiency)) },
    Constant { name: "cluster inter.efficiency", spread: 0.5, range: (0.05, 1.2), number: |m| Some(Number::Ratio(&mut m.cluster.inter.efficiency)) },
    Constant { name: "stack overlap.gradient_reduction", spread: 0.3, range: (0.0, 1.0), number: |m| Some(Number::Ratio(&mut m.stack.overlap.gradient_reduction)) },
    Constant { name: "stack overlap.parameter_gather", spread: 0.3, range: (0.0, 1.0), number: |m| Some(Number::Ratio(&mut m.stack.overlap.parameter_gather)) },
    Constant { name: "stack kernels.host_launch", spread: 0.5, range: (1e-7, 1e-3), number: |m| Some(Number::Time(m.stack.kernels.host_launch.as_mut()?)) },
    Constant { name: "stack overhead.micro_batch", spread: 0.1, range: (0.0, 0.1), number: |m| Some(Number::Time(&mut m.stack.overhead.micro_batch)) },
    Constant { name: "stack overhead.step", spread: 0.2, range: (0.0, 1.0), number: |m| Some(Number::Time(&mut m.stack.overhead.step)) },
];

/// Constants of peak memory.
#[rustfmt::skip]
pub const MEMORY: [Constant; 2] = [
    Constant { name: "stack memory.communication_buffers", spread: 0.1, range: (0.0, 16.0 * GIB), number: |m| Some(Number::Size(&mut m.stack.memory.communication_buffers)) },
    Constant { name: "stack memory.allocator_slack", spread: 0.1, range: (0.0, 1.0), number: |m| Some(Number::Ratio(&mut m.stack.memory.allocator_slack)) },
];

/// Bytes of a GiB.
const GIB: f64 = 1_073_741_824.0;

/// A speed that a profile may leave out, which then is 1.
fn or_one(speed: &mut Option<Sourced<f64>>) -> &mut Sourced<f64> {
    let source = || "left out of the profile".to_owned();
    speed.get_or_insert_with(|| Sourced { value: 1.0, provenance: Provenance::Assumed, source: source() })
}

impl Number<'_> {
    /// The value in the unit of the type: a ratio, seconds or bytes.
    pub fn value(&self) -> f64 {
        match self {
            Number::Ratio(ratio) => ratio.value,
            Number::Time(time) => time.value.0,
            Number::Size(size) => size.value.0 as f64,
        }
    }

    /// Puts a value there, without a word about its origin.
    pub fn set(self, value: f64) {
        match self {
            Number::Ratio(ratio) => ratio.value = value,
            Number::Time(time) => time.value = Seconds(value),
            Number::Size(size) => size.value = Bytes(value as u64),
        }
    }

    /// Says where the value comes from: a fit.
    pub fn fitted(self, text: &str) {
        let (provenance, source) = match self {
            Number::Ratio(ratio) => (&mut ratio.provenance, &mut ratio.source),
            Number::Time(time) => (&mut time.provenance, &mut time.source),
            Number::Size(size) => (&mut size.provenance, &mut size.source),
        };
        *provenance = Provenance::Fitted;
        text.clone_into(source);
    }

    /// The value with its unit, for people.
    pub fn shown(&self) -> String {
        match self {
            Number::Ratio(ratio) => format!("{:.3}", ratio.value),
            Number::Time(time) if time.value.0 < 1e-3 => format!("{:.1} us", time.value.0 * 1e6),
            Number::Time(time) => format!("{:.2} ms", time.value.0 * 1e3),
            Number::Size(size) => format!("{:.2} GiB", size.value.gib()),
        }
    }
}

impl Constant {
    /// The constant before any run is looked at, if the machine has it.
    pub fn free(&self, machine: &mut Machine) -> Option<Free> {
        let prior = (self.number)(machine)?.value();
        let (least, most) = self.range;
        // A user's own profile may hold what no built-in one does.
        let least = if least > 0.0 { least.min(prior) } else { least };
        Some(Free { prior, range: (least, most.max(prior)), pull: NOISE / (self.spread * self.spread) })
    }

    /// Change of each run's log error when the constant moves by its spread.
    fn effects(&self, runs: &[OwnRun], quantity: Quantity) -> Option<DVector<f64>> {
        let mut runs = runs.to_vec();
        let free = self.free(&mut runs.first()?.case.request.machine.clone())?;
        let here = free.coordinate(free.prior);
        let mut at = |side: f64| {
            let coordinate = free.clamp(here + side * self.spread);
            for run in &mut runs {
                if let Some(number) = (self.number)(&mut run.case.request.machine) {
                    number.set(free.value(coordinate));
                }
            }
            (DVector::from_vec(log_errors(&runs, quantity)), coordinate)
        };
        let ((low, left), (high, right)) = (at(-1.0), at(1.0));
        (right > left).then(|| (high - low) * (self.spread / (right - left)))
    }
}

/// The constants, at most `most`, that the runs tell apart from their noise: one after another that whose spread still
/// shows most in runs whose other constants are uncertain too. It looks at no measurement, only at layouts.
pub fn told_by(candidates: &'static [Constant], runs: &[OwnRun], quantity: Quantity, most: usize) -> Vec<Constant> {
    let effects = candidates.iter().filter_map(|constant| Some((constant, constant.effects(runs, quantity)? / NOISE)));
    let mut open: Vec<(&Constant, DVector<f64>)> = effects.collect();
    let mut spread = DMatrix::identity(runs.len(), runs.len());
    let mut chosen = Vec::new();
    while chosen.len() < most {
        let Some(cholesky) = Cholesky::new(spread.clone()) else { break };
        let shown: Vec<f64> = open.iter().map(|(_, effect)| effect.dot(&cholesky.solve(effect))).collect();
        let best = (0..open.len()).max_by(|a, b| shown[*a].total_cmp(&shown[*b]));
        let Some(best) = best.filter(|best| shown[*best] > LEAST_SHOWN) else { break };
        let (constant, effect) = open.remove(best);
        spread += &effect * effect.transpose();
        chosen.push(*constant);
    }
    chosen
}
