//! Executes one rank's program: passes of its stage, messages between stages, and the update.
//!
//! The program says what happens and in which order; nothing is decided here. What depends on the rank (local
//! extents, offsets, peers, last uses) is resolved once, when the plan is read (`steps`).

mod accounts;
mod clock;
mod exchange;
mod gradient;
mod links;
mod logits;
mod parameters;
mod pass;
mod steps;
mod sums;
mod update;
mod work;

use std::collections::BTreeMap;
use std::sync::Arc;

use ir::error::Problem;
use ir::mesh::Rank;
use ir::plan::Plan;
use ir::program::{Direction, Parameter, ParameterRef, Program};
use ir::schedule::{Pass, unroll};
use ir::sharding::tensor_split;
use ir::verify::stage_chain;

use crate::Error;
use crate::communicator::{Pending, World};
use crate::place::RankPlace;
use crate::tensor::{Memory, StepKind, Tensor, Values, ValuesMut};
use crate::train::Dropout;

use clock::Clock;
use exchange::Singles;
use links::Links;
use parameters::{Parameters, make_parameters};
use pass::Frame;
use steps::{RankBody, resolve};
use sums::Sum;

pub use clock::{Account, Phase, Times, Work};
pub use logits::Logits;
pub use parameters::{Fill, Held};
pub use update::{StepOptions, Updated};
pub use work::{ProductShape, StepWork};

/// Most passes of a stage in a step.
const MOST_PASSES: usize = 1 << 24;

/// Index data of a step on one replica, micro-batch by micro-batch.
#[derive(Clone, Debug, Default)]
pub struct MicroBatches {
    /// Token ids, each `[micro_batch, sequence]`.
    pub tokens: Vec<Vec<u32>>,
    /// Ids of the next tokens.
    pub targets: Vec<Vec<u32>>,
    /// 0, 1, 2, …
    pub positions: Vec<u32>,
}

/// One rank with its parameters and optimizer state.
pub struct Executor<'a> {
    plan: &'a Plan,
    program: &'a Program,
    world: &'a World,
    /// Where the rank is.
    pub place: RankPlace,
    bodies: Vec<Arc<RankBody>>,
    /// The tied use of the head and the embedding it stands for, where both are on this stage.
    tied: Option<(ParameterRef, ParameterRef)>,
    /// Parameters of the stage.
    pub parameters: Parameters,
    links: Links,
    /// Memory of all tensors.
    pub memory: Memory,
    streams: BTreeMap<(Direction, u64), Tensor>,
    frames: BTreeMap<(u32, u64, u64), Frame>,
    /// Sums of gradients over replicas that have started.
    reductions: BTreeMap<ParameterRef, Pending<Singles>>,
    /// Sum of the losses of this rank's micro-batches.
    loss: Sum,
    /// One over the tokens of the step's global batch.
    seed: f64,
    /// What passes drop, and the seed of it; nothing in evaluations.
    dropout: Option<(Dropout, u64)>,
    clock: Clock,
    /// Optimizer steps taken.
    pub steps: u64,
}

impl<'a> Executor<'a> {
    /// Prepares a rank that computes on the host's processor cores. `plan` must be verified and hold a program;
    /// `decays` says whether weight decay applies to a parameter, `fill` where its numbers come from.
    ///
    /// # Errors
    /// Those of `fill`.
    pub fn new(
        plan: &'a Plan,
        program: &'a Program,
        world: &'a World,
        decays: &dyn Fn(&str, &Parameter) -> bool,
        fill: &mut Fill,
    ) -> Result<Executor<'a>, Error> {
        Executor::in_memory(Memory::default(), plan, program, world, decays, fill)
    }

    /// Prepares a rank that computes where its memory is: [`Executor::new`] otherwise.
    ///
    /// # Errors
    /// Those of `fill`.
    pub fn in_memory(
        memory: Memory,
        plan: &'a Plan,
        program: &'a Program,
        world: &'a World,
        decays: &dyn Fn(&str, &Parameter) -> bool,
        fill: &mut Fill,
    ) -> Result<Executor<'a>, Error> {
        let strategy = &plan.strategy;
        let split = tensor_split(&plan.model, strategy.tensor_parallel, strategy.sequence_parallel)
            .expect("the verifier checks the split");
        let place = RankPlace::of(plan, split, Rank(world.rank().0));
        let parameters = make_parameters(plan, program, &place, &memory, decays, fill)?;
        let bodies = program.bodies.iter().map(|body| Arc::new(resolve(plan, split, body, &place))).collect();
        Ok(Executor {
            plan,
            program,
            world,
            place,
            bodies,
            tied: tied_use(plan, program, place.stage),
            parameters,
            links: Links::new(world, &place),
            memory,
            streams: BTreeMap::new(),
            frames: BTreeMap::new(),
            reductions: BTreeMap::new(),
            loss: Sum::default(),
            seed: 0.0,
            dropout: None,
            clock: Clock::start(),
            steps: 0,
        })
    }

    /// Runs a training step with its update, unless loss or norm are no numbers.
    ///
    /// # Errors
    /// A lost rank or link; `Error::Numerical` before the update if the loss or the norm is no number; a device that
    /// failed, or is to drop attention weights, for which there is no kernel.
    pub fn step(&mut self, input: &MicroBatches, options: &StepOptions) -> Result<Updated, Error> {
        if options.dropout.attention > 0.0 && self.memory.is_on_device() {
            let what = "attention weights cannot be dropped on a device";
            return Err(Problem::new(what, "dropout.attention", "set it to 0, or run on processor cores").into());
        }
        self.clock = Clock::start();
        self.dropout = Some((options.dropout, options.seed));
        self.run(input, StepKind::Training)?;
        self.update(input, options)
    }

    /// Where the time of the last step went.
    pub fn times(&self) -> Times {
        self.clock.times()
    }

    /// Runs the forward passes only; the mean loss, on every rank.
    ///
    /// # Errors
    /// A lost rank or link; a device that failed.
    pub fn evaluate(&mut self, input: &MicroBatches) -> Result<f64, Error> {
        self.dropout = None;
        self.run(input, StepKind::Evaluation)?;
        self.mean_loss(input)
    }

    /// Runs the passes of a step; gives the logits if it is for them.
    fn run(&mut self, input: &MicroBatches, kind: StepKind) -> Result<Vec<Logits>, Error> {
        let stage = &self.program.stages[self.place.stage];
        let schedule = match kind {
            StepKind::Training => &stage.schedule,
            StepKind::Evaluation | StepKind::Logits => &stage.evaluation,
        };
        let passes = unroll(schedule, input.tokens.len() as u64, MOST_PASSES).expect("the verifier unrolls schedules");
        self.seed = 1.0 / self.tokens_of(input) as f64;
        if !self.memory.enter(kind, input.tokens.len()) {
            self.run_passes(&passes, input, kind)?;
            self.parameters.values_mut().for_each(|held| held.accumulated = false);
            self.memory.lay_out(kind, input.tokens.len())?;
            self.memory.enter(kind, input.tokens.len());
            self.clock = Clock::start();
        }
        self.loss = Sum::default();
        self.clock.charge(Account::Step);
        let logits = self.run_passes(&passes, input, kind);
        self.memory.leave();
        logits
    }

    fn run_passes(&mut self, passes: &[Pass], input: &MicroBatches, kind: StepKind) -> Result<Vec<Logits>, Error> {
        let logits = passes.iter().filter_map(|pass| self.run_pass(*pass, input, kind).transpose());
        logits.collect()
    }

    fn run_pass(&mut self, pass: Pass, input: &MicroBatches, kind: StepKind) -> Result<Option<Logits>, Error> {
        self.world.report(format_args!("{pass:?}"));
        let mut logits = None;
        match pass {
            Pass::Receive(direction, batch) => self.receive(direction, batch)?,
            Pass::Send(direction, batch) => self.send(direction, batch)?,
            Pass::Forward(body, layer, batch) if kind == StepKind::Logits && self.is_head(body) => {
                let found = self.logits_of((body, layer, batch), input)?;
                logits = Some(found).filter(|_| !self.memory.is_tracing());
            }
            Pass::Forward(body, layer, batch) => {
                let frame = self.forward(body, layer, batch, input)?;
                if kind == StepKind::Training {
                    self.frames.insert((body, layer, batch), frame);
                }
            }
            Pass::Backward(body, layer, batch) => self.backward(body, layer, batch, input)?,
            Pass::StartReduction(body, layer, parameters, conversion) => {
                self.start_reduction(body, layer, parameters, conversion)?;
            }
        }
        self.clock.charge(match pass {
            Pass::Receive(..) | Pass::Send(..) => Account::Pipeline,
            Pass::Forward(..) | Pass::Backward(..) => Account::MicroBatch,
            Pass::StartReduction(..) => Account::Data,
        });
        Ok(logits)
    }

    fn is_head(&self, body: u32) -> bool {
        body as usize + 1 == self.program.bodies.len()
    }

    /// Tokens of a step over all replicas.
    fn tokens_of(&self, input: &MicroBatches) -> u64 {
        let strategy = &self.plan.strategy;
        let sequences = input.tokens.len() as u64 * strategy.micro_batch * strategy.data_parallel;
        sequences * self.plan.workload.sequence_length
    }

    fn send(&mut self, direction: Direction, batch: u64) -> Result<(), Error> {
        let tensor = self.streams.remove(&(direction, batch)).expect("the verifier follows streams");
        let to = match direction {
            Direction::Activation => self.links.next,
            Direction::Gradient => self.links.previous,
        };
        let to = to.expect("the verifier checks neighbours");
        if self.memory.is_tracing() {
            return Ok(());
        }
        match tensor.on_host(&self.memory.of_host())?.values() {
            Values::Brain(values) => self.world.send(to, direction, values.to_vec())?,
            Values::Single(values) => self.world.send(to, direction, values.to_vec())?,
            Values::Index(_) => unreachable!("activations are no ids"),
        }
        Ok(())
    }

    fn receive(&mut self, direction: Direction, batch: u64) -> Result<(), Error> {
        let (from, body) = match direction {
            Direction::Activation => (self.links.previous, self.end_body(|chain| chain.first())),
            Direction::Gradient => (self.links.next, self.end_body(|chain| chain.last())),
        };
        let from = from.expect("the verifier checks neighbours");
        let value = match direction {
            Direction::Activation => body.input,
            Direction::Gradient => body.output_gradient,
        };
        let value = &body.values[value.expect("streams enter where blocks have neighbours")];
        if self.memory.is_tracing() {
            let tensor = Tensor::stale(&self.memory, &value.dims, value.format);
            self.streams.insert((direction, batch), tensor);
            return Ok(());
        }
        let mut tensor = Tensor::stale(&self.memory.of_host(), &value.dims, value.format);
        match tensor.values_mut() {
            ValuesMut::Brain(values) => self.world.recv(from, direction, values)?,
            ValuesMut::Single(values) => self.world.recv(from, direction, values)?,
            ValuesMut::Index(_) => unreachable!("activations are no ids"),
        }
        self.streams.insert((direction, batch), tensor.into_memory(&self.memory));
        Ok(())
    }

    /// The body at an end of the stage.
    fn end_body(&self, end: impl Fn(&[(u32, u64)]) -> Option<&(u32, u64)>) -> &RankBody {
        let chain = stage_chain(self.plan, self.program, &self.plan.stages[self.place.stage]);
        let (body, _) = end(&chain).expect("a stage has layers");
        &self.bodies[*body as usize]
    }
}

/// The head's tied parameter and the embedding's table, where both are on one stage.
fn tied_use(plan: &Plan, program: &Program, stage: usize) -> Option<(ParameterRef, ParameterRef)> {
    let stage = &plan.stages[stage];
    let head = program.bodies.len() as u32 - 1;
    let find = |body: u32, wanted: &dyn Fn(&Parameter) -> bool| {
        let parameter = program.bodies[body as usize].parameters.iter().position(wanted)?;
        Some(ParameterRef { body, layer: 0, parameter: parameter as u32 })
    };
    let tied = find(head, &|parameter| parameter.tied)?;
    let table = find(0, &|parameter| parameter.name == crate::initial::TOKEN_EMBEDDING)?;
    (stage.embedding && stage.head).then_some((tied, table))
}
