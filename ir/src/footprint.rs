//! Memory of a program, counted from the lives of its values: the other view of what the cost model
//! computes by formula.

use std::collections::BTreeMap;

use crate::distribution::{Distribution, Place};
use crate::graph::{Dim, DimName, Extent};
use crate::placement::Placement;
use crate::plan::{Plan, Stage};
use crate::program::{Body, Instruction, Program, ValueId};
use crate::sharding::TensorSplit;
use crate::units::Bytes;
use crate::verify::stage_chain;

/// Bytes of a rank of a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageFootprint {
    /// Parameters as stored.
    pub weights: Bytes,
    /// Elements of accumulated gradients.
    pub gradient_elements: u64,
    /// Values kept between forward and backward, of all micro-batches in flight.
    pub activations: Bytes,
    /// Most bytes alive beside them during a pass of one layer.
    pub transient: Bytes,
}

/// What a body keeps for backward, and the most that is alive beside it during a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BodyFootprint {
    /// Kept between the passes; what leaves the body is the next one's input and counted there.
    pub kept: Bytes,
    /// Alive beside what is kept.
    pub transient: Bytes,
}

/// Counts the bytes of each stage's ranks.
pub fn stage_footprints(plan: &Plan, program: &Program, split: TensorSplit) -> Vec<StageFootprint> {
    let sizes = LocalSizes { plan, placement: Placement { split, strategy: &plan.strategy } };
    let bodies: Vec<BodyFootprint> = program.bodies.iter().map(|body| body_footprint(body, sizes)).collect();
    plan.stages.iter().map(|stage| stage_footprint(plan, program, stage, sizes, &bodies)).collect()
}

fn stage_footprint(
    plan: &Plan,
    program: &Program,
    stage: &Stage,
    sizes: LocalSizes,
    bodies: &[BodyFootprint],
) -> StageFootprint {
    let mut footprint = StageFootprint::default();
    let both_ends = stage.embedding && stage.head;
    for (body, _) in stage_chain(plan, program, stage) {
        for parameter in &program.bodies[body as usize].parameters {
            if !(parameter.tied && both_ends) {
                let whole = |(name, size): &(DimName, u64)| Dim { name: *name, extent: Extent::Fixed(*size) };
                let shape: Vec<Dim> = parameter.shape.iter().map(whole).collect();
                footprint.weights += Bytes(sizes.elements(&shape, parameter.stored)) * plan.model.dtype.bytes();
                let gradient = sizes.elements(&shape, parameter.gradient);
                footprint.gradient_elements = footprint.gradient_elements.saturating_add(gradient);
            }
        }
        footprint.activations += bodies[body as usize].kept * stage.in_flight;
        footprint.transient = footprint.transient.max(bodies[body as usize].transient);
    }
    footprint
}

/// Follows the lives of a body's values through both passes.
fn body_footprint(body: &Body, sizes: LocalSizes) -> BodyFootprint {
    let bytes = |value: &ValueId| {
        let value = &body.values[value.0 as usize];
        Bytes(sizes.elements(&value.shape, value.distribution)) * value.element.bytes(sizes.plan.model.dtype)
    };
    let mut alive: BTreeMap<ValueId, Bytes> = body.input.iter().map(|input| (*input, bytes(input))).collect();
    let forward_peak = live_through(&body.forward, &mut alive, &bytes);
    alive.remove(&body.output);
    let kept: Bytes = alive.values().copied().sum();
    alive.extend(body.output_gradient.iter().map(|gradient| (*gradient, bytes(gradient))));
    let backward_peak = live_through(&body.backward, &mut alive, &bytes);
    BodyFootprint { kept, transient: forward_peak.max(backward_peak) - kept }
}

/// The most bytes alive at once.
fn live_through(
    instructions: &[Instruction],
    alive: &mut BTreeMap<ValueId, Bytes>,
    bytes: &dyn Fn(&ValueId) -> Bytes,
) -> Bytes {
    let mut now: Bytes = alive.values().copied().sum();
    let mut peak = now;
    for (line, instruction) in instructions.iter().enumerate() {
        match instruction {
            // The kernel adds its result to the accumulated gradient.
            Instruction::Compute(_, _, value) if is_accumulated_at_once(*value, &instructions[line + 1..]) => {}
            Instruction::Free(value) => now = now - alive.remove(value).unwrap_or_default(),
            // A loaded parameter is the stored one; a started conversion has its memory already.
            Instruction::Load(..) | Instruction::Accumulate(..) | Instruction::Wait(..) => {}
            Instruction::Input(_, value)
            | Instruction::Compute(_, _, value)
            | Instruction::Convert(_, _, _, value)
            | Instruction::Start(_, _, _, value) => {
                let size = bytes(value);
                alive.insert(*value, size);
                now += size;
                peak = peak.max(now);
            }
        }
    }
    peak
}

/// Whether a value's only use is to be added to a gradient directly after it is computed.
fn is_accumulated_at_once(value: ValueId, after: &[Instruction]) -> bool {
    let mut uses = after.iter().filter(|instruction| !matches!(instruction, Instruction::Free(_)));
    let added = matches!(uses.next(), Some(Instruction::Accumulate(_, sum)) if *sum == value);
    added && uses.all(|instruction| !instruction.reads().contains(&value))
}

#[derive(Clone, Copy)]
struct LocalSizes<'a> {
    plan: &'a Plan,
    placement: Placement<'a>,
}

impl LocalSizes<'_> {
    /// Elements that one rank holds.
    fn elements(&self, shape: &[Dim], distribution: Distribution) -> u64 {
        let whole = |dim: &Dim| match dim.extent {
            Extent::MicroBatch => self.plan.strategy.micro_batch * self.plan.strategy.data_parallel,
            Extent::Sequence => self.plan.workload.sequence_length,
            Extent::Fixed(size) => size,
        };
        let local = |dim: &Dim| whole(dim) / self.placement.ways(dim.name, distribution);
        let elements = shape.iter().map(local).fold(1, u64::saturating_mul);
        match distribution.data {
            Place::Flat => elements.div_ceil(self.plan.strategy.data_parallel),
            _ => elements,
        }
    }
}

/// Elements of a value, or of a parameter's part, that one rank of a plan holds.
pub fn local_elements(plan: &Plan, split: TensorSplit, shape: &[Dim], distribution: Distribution) -> u64 {
    LocalSizes { plan, placement: Placement { split, strategy: &plan.strategy } }.elements(shape, distribution)
}
