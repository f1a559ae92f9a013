//! Runs the programs of all ranks in one process on plain f64 arrays: the oracle for compiled programs.
//!
//! Ranks of a stage execute the same instructions, so a stage is interpreted for all its ranks at once and
//! collectives are loops over arrays. Stages exchange activations through queues; a round in which no
//! stage can go on is a deadlock. Shares no code with [`crate::reference`].

mod array;
mod conversion;
mod operator;
mod stage;
mod update;

use std::collections::BTreeMap;

use crate::model::ModelSpec;
use crate::plan::Plan;
use crate::program::{ParameterRef, Program};

pub use array::Array;
pub use operator::{Result as OperatorResult, apply as apply_operator};
pub use update::Optimizer;

use stage::Stage;

/// Degrees of the mesh as programs see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Degrees {
    /// Replicas.
    pub data: usize,
    /// Groups of key-value heads.
    pub tensor: usize,
    /// Ranks that share key-value heads.
    pub query: usize,
}

/// Place of a rank in its stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coordinate {
    /// Along data.
    pub data: usize,
    /// Along tensor.
    pub tensor: usize,
    /// Along query.
    pub query: usize,
}

/// Index data of a step: `[micro_batches · replicas · micro_batch · sequence]`, micro-batch outermost.
#[derive(Clone, Debug)]
pub struct StepInput<'a> {
    /// Token ids.
    pub tokens: &'a [usize],
    /// Ids of the next tokens.
    pub targets: &'a [usize],
    /// Micro-batches of each replica.
    pub micro_batches: u64,
}

/// What a step gives.
#[derive(Clone, Debug)]
pub struct StepOutput {
    /// Mean loss over all tokens.
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub gradient_norm: f64,
    /// Reduced gradients, whole, by parameter.
    pub gradients: BTreeMap<String, Vec<f64>>,
}

/// A world of ranks with their parameters and optimizer state.
#[derive(Debug)]
pub struct World<'a> {
    program: &'a Program,
    stages: Vec<Stage<'a>>,
}

/// Sizes that programs leave symbolic.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Sequences of a micro-batch on one replica.
    pub micro_batch: usize,
    /// Tokens of a sequence.
    pub sequence: usize,
    /// Degrees of a stage.
    pub degrees: Degrees,
}

impl Degrees {
    /// Ranks of a stage.
    pub fn ranks(self) -> usize {
        self.data * self.tensor * self.query
    }

    /// All places, in the order of ranks.
    pub fn coordinates(self) -> impl Iterator<Item = Coordinate> {
        (0..self.ranks()).map(move |rank| Coordinate {
            data: rank / (self.tensor * self.query),
            tensor: rank / self.query % self.tensor,
            query: rank % self.query,
        })
    }
}

/// The key under which a parameter is named outside: `embedding/…`, `layer 3/…`, `head/…`.
pub fn parameter_key(program: &Program, reference: ParameterRef) -> String {
    let body = &program.bodies[reference.body as usize];
    let name = &body.parameters[reference.parameter as usize].name;
    match body.name.as_str() {
        "embedding" | "head" => format!("{}/{name}", body.name),
        _ => format!("layer {}/{name}", reference.layer),
    }
}

impl<'a> World<'a> {
    /// Places whole parameters on the ranks of a program.
    ///
    /// # Errors
    /// A parameter that is missing or has another size.
    pub fn new(
        program: &'a Program,
        sizes: Sizes,
        parameters: &BTreeMap<String, Vec<f64>>,
    ) -> Result<World<'a>, String> {
        let stages = program.stages.iter().map(|stage| Stage::new(program, stage, sizes, parameters));
        Ok(World { program, stages: stages.collect::<Result<_, _>>()? })
    }

    /// Runs a step with the update.
    ///
    /// # Errors
    /// A deadlock, a value used before it exists or after it ended, or one that never ends.
    pub fn step(&mut self, input: &StepInput, optimizer: &Optimizer) -> Result<StepOutput, String> {
        stage::run_schedules(&mut self.stages, input)?;
        let (gradient_norm, gradients) = update::run_updates(self.program, &mut self.stages, optimizer)?;
        Ok(StepOutput { loss: self.take_loss(input), gradient_norm, gradients })
    }

    /// Runs the forward passes only, and gives the mean loss.
    ///
    /// # Errors
    /// As [`World::step`].
    pub fn evaluate(&mut self, input: &StepInput) -> Result<f64, String> {
        stage::run_evaluations(&mut self.stages, input)?;
        Ok(self.take_loss(input))
    }

    fn take_loss(&mut self, input: &StepInput) -> f64 {
        let losses = self.stages.iter_mut().map(|stage| std::mem::take(&mut stage.loss));
        losses.sum::<f64>() / input.tokens.len() as f64
    }

    /// Whole parameters after a step.
    ///
    /// # Errors
    /// Ranks that should hold equal numbers and do not, bit for bit.
    pub fn parameters(&self) -> Result<BTreeMap<String, Vec<f64>>, String> {
        let mut whole = BTreeMap::new();
        for stage in &self.stages {
            for (reference, held) in &stage.parameters {
                let key = parameter_key(self.program, *reference);
                whole.insert(key, stage.collect(*reference, held)?);
            }
        }
        Ok(whole)
    }
}

/// Degrees of a plan's stages.
pub fn degrees_of(plan: &Plan) -> Option<Degrees> {
    degrees(&plan.model, plan.strategy.data_parallel, plan.strategy.tensor_parallel)
}

/// Degrees of a stage for a model; `None` if the tensor degree cannot split it.
pub fn degrees(model: &ModelSpec, data: u64, tensor: u64) -> Option<Degrees> {
    let split = crate::sharding::tensor_split(model, tensor, false).ok()?;
    Some(Degrees {
        data: data as usize,
        tensor: split.key_value_ways as usize,
        query: (tensor / split.key_value_ways) as usize,
    })
}
