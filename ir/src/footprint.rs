//! Memory of a program, counted from the lives of its values: the other view of what the cost model
//! computes by formula.

use std::collections::{BTreeMap, BTreeSet};

use crate::distribution::{Distribution, Place, SplitAxis};
use crate::graph::{Dim, DimName, Extent};
use crate::kernel::PassKind;
use crate::model::DType;
use crate::placement::Placement;
use crate::plan::{Plan, Stage};
use crate::program::{Body, Conversion, Instruction, Op, Parameter, Program, ProgramMemory, ValueId};
use crate::sharding::TensorSplit;
use crate::strategy::ZeroStage;
use crate::units::Bytes;
use crate::verify::stage_chain;

/// Format of accumulated gradients, master weights and moments.
const STATE: DType = DType::FP32;

/// Bytes of a rank of a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageFootprint {
    /// The rank at its fullest.
    pub memory: ProgramMemory,
    /// Values kept between forward and backward, of all micro-batches in flight.
    pub activations: Bytes,
    /// Most bytes alive beside them during a pass of one layer.
    pub transient: Bytes,
}

/// What a body keeps for backward, and the most that is alive during a pass, values kept by it included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct BodyFootprint {
    /// Kept between the passes; what leaves the body is the next one's input and counted there.
    kept: Bytes,
    forward_peak: Bytes,
    backward_peak: Bytes,
}

/// Counts the bytes of each stage's ranks.
pub fn stage_footprints(plan: &Plan, program: &Program, split: TensorSplit) -> Vec<StageFootprint> {
    let sizes = LocalSizes { plan, placement: Placement { split, strategy: &plan.strategy } };
    let bodies: Vec<BodyFootprint> = program.bodies.iter().map(|body| body_footprint(body, sizes)).collect();
    plan.stages.iter().map(|stage| stage_footprint(plan, program, stage, sizes, &bodies)).collect()
}

/// The memory pass: writes what each stage's ranks hold at their fullest into the plan's programs.
pub fn with_memory(plan: Plan, split: TensorSplit) -> Plan {
    let Some(program) = &plan.program else { return plan };
    let footprints = stage_footprints(&plan, program, split);
    let mut program = program.clone();
    for (code, footprint) in program.stages.iter_mut().zip(footprints) {
        code.memory = footprint.memory;
    }
    Plan { program: Some(program), ..plan }
}

fn stage_footprint(
    plan: &Plan,
    program: &Program,
    stage: &Stage,
    sizes: LocalSizes,
    bodies: &[BodyFootprint],
) -> StageFootprint {
    let mut memory = ProgramMemory::default();
    let both_ends = stage.embedding && stage.head;
    let (mut kept, mut pass_peak, mut transient) = (Bytes(0), Bytes(0), Bytes(0));
    for (body, _) in stage_chain(plan, program, stage) {
        for parameter in &program.bodies[body as usize].parameters {
            if !(parameter.tied && both_ends) {
                add_state(&mut memory, parameter, sizes);
            }
        }
        let body = bodies[body as usize];
        // Both passes of a layer find the earlier layers' kept values alive.
        let peak = body.forward_peak.max(body.backward_peak);
        pass_peak = pass_peak.max(kept + peak);
        transient = transient.max(peak - body.kept);
        kept += body.kept;
    }
    memory.values = kept * stage.in_flight.saturating_sub(1) + pass_peak;
    StageFootprint { memory, activations: kept * stage.in_flight, transient }
}

/// Counts a parameter, its accumulated gradient and its optimizer state.
fn add_state(memory: &mut ProgramMemory, parameter: &Parameter, sizes: LocalSizes) {
    let dtype = sizes.plan.model.dtype;
    let shape: Vec<Dim> =
        parameter.shape.iter().map(|(name, size)| Dim { name: *name, extent: Extent::Fixed(*size) }).collect();
    let owner = match sizes.plan.strategy.zero_stage {
        ZeroStage::None => Place::Replicated,
        ZeroStage::OptimizerState | ZeroStage::Gradients | ZeroStage::Parameters => Place::Flat,
    };
    let owned = sizes.elements(&shape, parameter.stored.with(SplitAxis::Data, owner));
    let master = if dtype == STATE { 0 } else { STATE.bytes() };
    memory.weights += Bytes(sizes.elements(&shape, parameter.stored)) * dtype.bytes();
    memory.gradients += Bytes(sizes.elements(&shape, parameter.gradient)) * STATE.bytes();
    memory.optimizer += Bytes(owned) * (2 * STATE.bytes() + master);
}

/// Follows the lives of a body's values through both passes.
fn body_footprint(body: &Body, sizes: LocalSizes) -> BodyFootprint {
    let gradients = gradients_summed_in_parts(body);
    let bytes = |id: &ValueId| {
        let value = &body.values[id.0 as usize];
        let held = value.element.bytes(sizes.plan.model.dtype);
        let held = if gradients.contains(id) { STATE.bytes() } else { held };
        Bytes(sizes.elements(&value.shape, value.distribution)) * held
    };
    let mut alive: BTreeMap<ValueId, Bytes> = body.input.iter().map(|input| (*input, bytes(input))).collect();
    let forward_peak = live_through(body, PassKind::Forward, &mut alive, &bytes);
    alive.remove(&body.output);
    let kept: Bytes = alive.values().copied().sum();
    alive.extend(body.output_gradient.iter().map(|gradient| (*gradient, bytes(gradient))));
    let backward_peak = live_through(body, PassKind::Backward, &mut alive, &bytes);
    BodyFootprint { kept, forward_peak, backward_peak }
}

/// The most bytes alive at once during a pass.
fn live_through(
    body: &Body,
    pass: PassKind,
    alive: &mut BTreeMap<ValueId, Bytes>,
    bytes: &dyn Fn(&ValueId) -> Bytes,
) -> Bytes {
    let instructions = match pass {
        PassKind::Forward => &body.forward,
        PassKind::Backward => &body.backward,
    };
    let inner = inner_values(body, pass, instructions);
    // A kernel reads its operands while it writes its results: what it frees ends with it.
    let kernels = body.kernels.iter().filter(|kernel| kernel.pass == pass);
    let kernels: Vec<(usize, usize)> =
        kernels.map(|kernel| (kernel.instructions.0 as usize, kernel.instructions.1 as usize)).collect();
    let in_kernel = |line: usize| kernels.iter().any(|(start, end)| (*start..*end).contains(&line));
    let mut freed_by_kernel = Vec::new();
    let mut now: Bytes = alive.values().copied().sum();
    let mut peak = now;
    for (line, instruction) in instructions.iter().enumerate() {
        if kernels.iter().any(|(_, end)| *end == line) {
            let ended: Vec<ValueId> = std::mem::take(&mut freed_by_kernel);
            now = now - ended.iter().filter_map(|value| alive.remove(value)).sum::<Bytes>();
        }
        match instruction {
            Instruction::Free(value) if in_kernel(line) => freed_by_kernel.push(*value),
            Instruction::Compute(_, _, value) if inner.contains(value) => {}
            Instruction::Compute(op, operands, value)
                if !in_kernel(line)
                    && let Some(operand) =
                        operand_in_place(op, operands, *value, &instructions[line + 1..], alive, bytes) =>
            {
                let size = alive.insert(operand, Bytes(0)).unwrap_or_default();
                alive.insert(*value, size);
            }
            // The same numbers under another name share the memory, as where nothing is dropped.
            Instruction::Compute(Op::Rename | Op::Cast | Op::Dropout(_), operands, value)
                if bytes(&operands[0]) == bytes(value) =>
            {
                alive.insert(*value, Bytes(0));
            }
            // The kernel adds its result to the accumulated gradient.
            Instruction::Compute(_, _, value) if is_accumulated_at_once(*value, &instructions[line + 1..]) => {}
            Instruction::Free(value) => now = now - alive.remove(value).unwrap_or_default(),
            // A loaded parameter is the stored one; a gather is given its memory when it starts.
            Instruction::Load(..) | Instruction::Accumulate(..) => {}
            Instruction::Wait(_, value) if alive.contains_key(value) => {}
            // A sum forms in its operand's memory, and a part of it is kept when it ends.
            Instruction::Start(Conversion::ReduceScatter(_) | Conversion::ReduceScatterFlat, ..) => {}
            Instruction::Input(_, value)
            | Instruction::Compute(_, _, value)
            | Instruction::Convert(_, _, _, value)
            | Instruction::Start(_, _, _, value)
            | Instruction::Wait(_, value) => {
                let size = bytes(value);
                alive.insert(*value, size);
                now += size;
                peak = peak.max(now);
            }
        }
    }
    alive.retain(|value, _| !freed_by_kernel.contains(value));
    peak
}

/// The operand that ends here and whose memory the result takes.
fn operand_in_place(
    op: &Op,
    operands: &[ValueId],
    value: ValueId,
    after: &[Instruction],
    alive: &BTreeMap<ValueId, Bytes>,
    bytes: &dyn Fn(&ValueId) -> Bytes,
) -> Option<ValueId> {
    let ends = |operand: &ValueId| {
        let mut frees = after.iter().take_while(|instruction| matches!(instruction, Instruction::Free(_)));
        let once = operands.iter().filter(|other| *other == operand).count() == 1;
        once && frees.any(|free| *free == Instruction::Free(*operand))
    };
    // A parameter, and what shares its memory, is not overwritten.
    let owned = |operand: &ValueId| alive.get(operand).is_some_and(|size| *size > Bytes(0));
    let candidates = op.operands_in_place().iter().filter_map(|index| operands.get(*index)).copied();
    candidates.into_iter().find(|operand| bytes(operand) == bytes(&value) && ends(operand) && owned(operand))
}

/// Values that live only inside a kernel, which need no memory.
fn inner_values(body: &Body, pass: PassKind, instructions: &[Instruction]) -> BTreeSet<ValueId> {
    let of_pass = body.kernels.iter().filter(|kernel| kernel.pass == pass);
    let inside =
        of_pass.filter_map(|kernel| instructions.get(kernel.instructions.0 as usize..kernel.instructions.1 as usize));
    inside
        .flat_map(|run| {
            let written = run.iter().filter_map(Instruction::writes);
            written.filter(|value| run.contains(&Instruction::Free(*value)))
        })
        .collect()
}

/// Whether a value's only use, in the instructions behind the one that writes it, is to be added to a gradient directly after it is computed.
pub fn is_accumulated_at_once(value: ValueId, after: &[Instruction]) -> bool {
    let mut uses = after.iter().filter(|instruction| !matches!(instruction, Instruction::Free(_)));
    let added = matches!(uses.next(), Some(Instruction::Accumulate(_, sum)) if *sum == value);
    added && uses.all(|instruction| !instruction.reads().contains(&value))
}

/// Gradients whose sum over replicas is taken in parts, and the parts: ranks hold them in the format of accumulated
/// gradients as soon as they are computed.
pub fn gradients_summed_in_parts(body: &Body) -> BTreeSet<ValueId> {
    let ends = |instruction: &Instruction| match instruction {
        Instruction::Convert(Conversion::ReduceScatterFlat, _, from, to)
        | Instruction::Start(Conversion::ReduceScatterFlat, _, from, to) => Some([*from, *to]),
        _ => None,
    };
    body.forward.iter().chain(&body.backward).filter_map(ends).flatten().collect()
}

#[derive(Clone, Copy)]
struct LocalSizes<'a> {
    plan: &'a Plan,
    placement: Placement<'a>,
}

impl LocalSizes<'_> {
    /// Extents that one rank holds, `Place::Flat` apart.
    fn dims(&self, shape: &[Dim], distribution: Distribution) -> impl Iterator<Item = (DimName, u64)> {
        let whole = |dim: &Dim| match dim.extent {
            Extent::MicroBatch => self.plan.strategy.micro_batch * self.plan.strategy.data_parallel,
            Extent::Sequence => self.plan.workload.sequence_length,
            Extent::Fixed(size) => size,
        };
        shape.iter().map(move |dim| (dim.name, whole(dim) / self.placement.ways(dim.name, distribution)))
    }

    /// Elements that one rank holds.
    fn elements(&self, shape: &[Dim], distribution: Distribution) -> u64 {
        let elements = self.dims(shape, distribution).map(|(_, extent)| extent).fold(1, u64::saturating_mul);
        match distribution.data {
            Place::Flat => elements.div_ceil(self.plan.strategy.data_parallel),
            _ => elements,
        }
    }
}

/// Dims of a value as one rank of a plan holds them, `Place::Flat` apart.
pub fn local_dims(plan: &Plan, split: TensorSplit, shape: &[Dim], distribution: Distribution) -> Vec<(DimName, usize)> {
    let sizes = LocalSizes { plan, placement: Placement { split, strategy: &plan.strategy } };
    sizes.dims(shape, distribution).map(|(name, extent)| (name, extent as usize)).collect()
}

/// Elements of a value, or of a parameter's part, that one rank of a plan holds.
pub fn local_elements(plan: &Plan, split: TensorSplit, shape: &[Dim], distribution: Distribution) -> u64 {
    LocalSizes { plan, placement: Placement { split, strategy: &plan.strategy } }.elements(shape, distribution)
}
