//! Bytes that the ranks of a plan send one another in a step, counted from its program.
//!
//! Sent bytes are the payload that leaves one rank for another, summed over the group of n ranks that takes
//! part: all_reduce 2 (n − 1) S, all_gather and reduce_scatter (n − 1) S, send S, with S the message: a rank's
//! for all_reduce and send, the whole tensor for the others.

use std::collections::{BTreeMap, BTreeSet};

use crate::distribution::{Distribution, Place, SplitAxis};
use crate::footprint::local_elements;
use crate::graph::{Dim, DimName, Extent};
use crate::model::DType;
use crate::placement::Placement;
use crate::plan::Plan;
use crate::program::{
    Body, Conversion, Direction, Instruction, Parameter, ParameterRange, Program, StageProgram, UpdateInstruction,
    Value,
};
use crate::schedule::{Pass, unroll};
use crate::sharding::TensorSplit;
use crate::strategy::ZeroStage;
use crate::units::Bytes;
use crate::verify::stage_chain;

/// Format in which gradients are accumulated and reduced.
const GRADIENT: DType = DType::FP32;
/// Bytes of a scalar of the norm and the loss.
const SCALAR: u64 = 8;
/// Most passes of a stage in a step.
const MOST_PASSES: usize = 1 << 24;

/// Who communicates.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Link {
    /// Ranks of a stage that differ along the axes.
    Axes(Vec<SplitAxis>),
    /// Neighbouring stages.
    Neighbours(Direction),
    /// The first and the last stage.
    Ends,
    /// All stages.
    Stages,
}

/// What they do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Collective {
    /// Sum or maximum, whole on every rank.
    AllReduce,
    /// Parts joined on every rank.
    AllGather,
    /// Sum, a part on each rank.
    ReduceScatter,
    /// A message to one rank.
    Send,
}

/// Sent bytes of all ranks.
pub type Traffic = BTreeMap<(Link, Collective), Bytes>;

/// Counts a training step of so many micro-batches with its update.
///
/// # Errors
/// A schedule that cannot be unrolled.
pub fn step_traffic(plan: &Plan, program: &Program, split: TensorSplit, micro_batches: u64) -> Result<Traffic, String> {
    let mut count = Count { plan, program, split, traffic: Traffic::new() };
    for (index, stage) in program.stages.iter().enumerate() {
        for pass in unroll(&stage.schedule, micro_batches, MOST_PASSES)? {
            count.pass(index, pass);
        }
        stage.update.iter().for_each(|instruction| count.update(instruction));
        count.scalars(stage);
    }
    count.scalars_of_stages();
    Ok(count.traffic)
}

struct Count<'a> {
    plan: &'a Plan,
    program: &'a Program,
    split: TensorSplit,
    traffic: Traffic,
}

impl Count<'_> {
    fn degree(&self, axis: SplitAxis) -> u64 {
        Placement { split: self.split, strategy: &self.plan.strategy }.degree(axis)
    }

    /// Ranks of a stage.
    fn ranks(&self) -> u64 {
        SplitAxis::ALL.into_iter().map(|axis| self.degree(axis)).product()
    }

    fn add(&mut self, link: Link, collective: Collective, bytes: u64) {
        if bytes > 0 {
            *self.traffic.entry((link, collective)).or_default() += Bytes(bytes);
        }
    }

    /// Adds a collective of every group of a stage along the axes; `message` is in bytes.
    fn over_axes(&mut self, axes: &[SplitAxis], collective: Collective, message: u64) {
        let axes: Vec<SplitAxis> = axes.iter().copied().filter(|axis| self.degree(*axis) > 1).collect();
        let size: u64 = axes.iter().map(|axis| self.degree(*axis)).product();
        let groups = self.ranks() / size;
        let bytes = groups * sent(collective, size) * message;
        self.add(Link::Axes(axes), collective, bytes);
    }

    fn pass(&mut self, stage: usize, pass: Pass) {
        let program = self.program;
        match pass {
            Pass::Forward(body, ..) => {
                let body = &program.bodies[body as usize];
                body.forward.iter().for_each(|instruction| self.instruction(body, instruction));
            }
            Pass::Backward(body, ..) => {
                let body = &program.bodies[body as usize];
                body.backward.iter().for_each(|instruction| self.instruction(body, instruction));
            }
            Pass::Send(direction, _) => {
                let bytes = self.message(stage, direction) * self.ranks();
                self.add(Link::Neighbours(direction), Collective::Send, bytes);
            }
            Pass::Receive(..) => {}
            Pass::StartReduction(body, layer, parameters, conversion) => {
                let range = ParameterRange { body, layers: (layer, layer + 1), parameters };
                let collective = collective(conversion).expect("gradients are reduced by collectives");
                for parameter in parameters_of(program, range) {
                    let whole = parameter.gradient.with(SplitAxis::Data, Place::Replicated);
                    let message = self.elements(parameter, whole) * GRADIENT.bytes();
                    self.over_axes(&[SplitAxis::Data], collective, message);
                }
            }
        }
    }

    /// Bytes of a message from a stage: what leaves its last body, or its first body's gradient.
    fn message(&self, stage: usize, direction: Direction) -> u64 {
        let chain = stage_chain(self.plan, self.program, &self.plan.stages[stage]);
        let end = match direction {
            Direction::Activation => chain.last(),
            Direction::Gradient => chain.first(),
        };
        let Some((body, _)) = end else { return 0 };
        let body = &self.program.bodies[*body as usize];
        let value = match direction {
            Direction::Activation => Some(body.output),
            Direction::Gradient => body.input_gradient,
        };
        value.map_or(0, |value| self.value_bytes(&body.values[value.0 as usize]))
    }

    fn value_bytes(&self, value: &Value) -> u64 {
        local_elements(self.plan, self.split, &value.shape, value.distribution)
            * value.element.bytes(self.plan.model.dtype)
    }

    fn instruction(&mut self, body: &Body, instruction: &Instruction) {
        let (Instruction::Convert(conversion, axes, from, to) | Instruction::Start(conversion, axes, from, to)) =
            instruction
        else {
            return;
        };
        let Some(kind) = collective(*conversion) else { return };
        let whole = if kind == Collective::AllGather { to } else { from };
        let value = &body.values[whole.0 as usize];
        let message = match conversion {
            Conversion::ReduceScatterFlat => {
                local_elements(self.plan, self.split, &value.shape, value.distribution) * GRADIENT.bytes()
            }
            _ => self.value_bytes(value),
        };
        self.over_axes(axes, kind, message);
    }

    fn update(&mut self, instruction: &UpdateInstruction) {
        let program = self.program;
        match instruction {
            UpdateInstruction::ReduceOverTensor(range, axes) => {
                for parameter in parameters_of(program, *range) {
                    let message = self.owned_by_all(parameter) * GRADIENT.bytes();
                    let axes: Vec<SplitAxis> = axes.iter().copied().filter(|axis| self.degree(*axis) > 1).collect();
                    let size: u64 = axes.iter().map(|axis| self.degree(*axis)).product();
                    let groups = self.ranks() / size / self.degree(SplitAxis::Data);
                    let bytes = groups * sent(Collective::AllReduce, size) * message;
                    self.add(Link::Axes(axes), Collective::AllReduce, bytes);
                }
            }
            UpdateInstruction::ReduceOverTied(range) => {
                for parameter in parameters_of(program, *range) {
                    let groups = self.ranks() / self.degree(SplitAxis::Data);
                    let message = self.owned_by_all(parameter) * GRADIENT.bytes();
                    // Two ranks; each of the two stages is counted by itself.
                    self.add(Link::Ends, Collective::AllReduce, groups * message);
                }
            }
            UpdateInstruction::GatherOverData(range) => {
                for parameter in parameters_of(program, *range) {
                    let message = self.elements(parameter, parameter.stored) * self.plan.model.dtype.bytes();
                    self.over_axes(&[SplitAxis::Data], Collective::AllGather, message);
                }
            }
            UpdateInstruction::WaitReduction(_)
            | UpdateInstruction::AddSquares(..)
            | UpdateInstruction::FinishNorm
            | UpdateInstruction::AdamW(_) => {}
        }
    }

    /// Gradient elements that the ranks along the data axis own together, a replica's if each owns all.
    fn owned_by_all(&self, parameter: &Parameter) -> u64 {
        let whole = parameter.gradient.with(SplitAxis::Data, Place::Replicated);
        let replicas = match self.plan.strategy.zero_stage {
            ZeroStage::None => self.degree(SplitAxis::Data),
            _ => 1,
        };
        self.elements(parameter, whole) * replicas
    }

    fn elements(&self, parameter: &Parameter, distribution: Distribution) -> u64 {
        let dim = |(name, size): &(DimName, u64)| Dim { name: *name, extent: Extent::Fixed(*size) };
        let shape: Vec<Dim> = parameter.shape.iter().map(dim).collect();
        local_elements(self.plan, self.split, &shape, distribution)
    }

    /// The norm's classes and the loss, summed over the ranks of a stage.
    fn scalars(&mut self, stage: &StageProgram) {
        let axes = |instruction: &UpdateInstruction| match instruction {
            UpdateInstruction::AddSquares(_, axes) => Some(axes.clone()),
            _ => None,
        };
        let classes: BTreeSet<Vec<SplitAxis>> = stage.update.iter().filter_map(axes).collect();
        classes.iter().for_each(|axes| self.over_axes(axes, Collective::AllReduce, SCALAR));
        let head = self.program.bodies.last();
        if head.is_some_and(|head| head.values[head.output.0 as usize].distribution.data == Place::PartialSum) {
            self.over_axes(&[SplitAxis::Data], Collective::AllReduce, SCALAR);
        }
    }

    /// Norm and loss, summed over the stages.
    fn scalars_of_stages(&mut self) {
        let bytes = self.ranks() * sent(Collective::AllReduce, self.plan.strategy.pipeline_parallel) * 2 * SCALAR;
        self.add(Link::Stages, Collective::AllReduce, bytes);
    }
}

/// Bytes sent per byte of message in a group.
fn sent(collective: Collective, size: u64) -> u64 {
    match collective {
        Collective::AllReduce => 2 * (size - 1),
        Collective::AllGather | Collective::ReduceScatter => size - 1,
        Collective::Send => 1,
    }
}

/// The collective of a conversion; none if it needs no communication.
fn collective(conversion: Conversion) -> Option<Collective> {
    match conversion {
        Conversion::AllReduceSum | Conversion::AllReduceMax => Some(Collective::AllReduce),
        Conversion::AllGather(_) | Conversion::AllGatherFlat => Some(Collective::AllGather),
        Conversion::ReduceScatter(_) | Conversion::ReduceScatterFlat => Some(Collective::ReduceScatter),
        Conversion::Slice(_) => None,
    }
}

fn parameters_of(program: &Program, range: ParameterRange) -> impl Iterator<Item = &Parameter> {
    range.each().map(move |reference| &program.bodies[range.body as usize].parameters[reference.parameter as usize])
}
