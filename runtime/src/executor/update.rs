//! The end of a step: sums of gradients, the global norm, the optimizer, weights joined again.

use std::collections::BTreeMap;

use ir::distribution::SplitAxis;
use ir::error::Problem;
use ir::program::{Conversion, ParameterRef, UpdateInstruction};

use super::clock::Account;
use super::exchange::Singles;
use super::parameters::Held;
use super::sums::Sum;
use super::{Executor, MicroBatches};
use crate::Error;
use crate::communicator::{Group, Reduction};
use crate::optimizer::{AdamW, State, adamw};
use crate::tensor::ValuesMut;
use crate::train::{Dropout, TrainConfig};

/// Added to the norm before the clipping coefficient is taken (PyTorch's `clip_grad_norm_`).
const CLIP_EPSILON: f64 = 1e-6;

/// What a step does that is no matter of its plan.
#[derive(Clone, Copy, Debug)]
pub struct StepOptions {
    /// Probabilities with which activations are dropped.
    pub dropout: Dropout,
    /// Seed of what is dropped.
    pub seed: u64,
    /// Step size.
    pub learning_rate: f64,
    /// Decays of the moments.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay, of the parameters that it applies to.
    pub weight_decay: f64,
    /// Largest global gradient norm; none to leave gradients as they are.
    pub clip: Option<f64>,
}

impl StepOptions {
    /// What a training file says, at a learning rate.
    pub fn of(config: &TrainConfig, learning_rate: f64) -> StepOptions {
        let optimizer = &config.optimizer;
        StepOptions {
            dropout: config.dropout,
            seed: config.seed,
            learning_rate,
            betas: optimizer.betas,
            epsilon: optimizer.eps,
            weight_decay: optimizer.weight_decay,
            clip: optimizer.clip,
        }
    }
}

/// What a step came to, equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Updated {
    /// Mean loss over the tokens of the global batch.
    pub loss: f64,
    /// Global norm of gradients before clipping.
    pub gradient_norm: f64,
}

impl Executor<'_> {
    /// Starts the sum over replicas of a layer's gradients, in place.
    pub(super) fn start_reduction(
        &mut self,
        body: u32,
        layer: u64,
        parameters: (u32, u32),
        conversion: Conversion,
    ) -> Result<(), Error> {
        if self.memory.is_tracing() {
            return Ok(());
        }
        let host = self.memory.of_host();
        let group = self.links.over(&[SplitAxis::Data]).expect("gradients are summands over several replicas");
        for parameter in parameters.0..parameters.1 {
            let reference = ParameterRef { body, layer, parameter };
            let held = self.parameters.get_mut(&reference).expect("the verifier follows parameters");
            let gradient = Singles(held.lend_gradient(&host)?);
            let pending = match conversion {
                Conversion::ReduceScatterFlat => group.start_reduce_scatter(Reduction::Sum, gradient),
                _ => group.start_all_reduce(Reduction::Sum, gradient),
            };
            self.reductions.insert(reference, pending);
        }
        Ok(())
    }

    /// Runs the update's instructions.
    pub(super) fn update(&mut self, input: &MicroBatches, options: &StepOptions) -> Result<Updated, Error> {
        let program = self.program;
        let mut squares: BTreeMap<Vec<SplitAxis>, Sum> = BTreeMap::new();
        let mut step = None;
        let mut updated = Updated { loss: f64::NAN, gradient_norm: f64::NAN };
        for instruction in &program.stages[self.place.stage].update {
            self.world.report(format_args!("{instruction:?}"));
            match instruction {
                UpdateInstruction::WaitReduction(range) => {
                    range.each().try_for_each(|reference| self.wait_reduction(reference))?;
                }
                UpdateInstruction::ReduceOverTensor(range, axes) => {
                    range.each().try_for_each(|reference| self.reduce_over_tensor(reference, axes))?;
                }
                UpdateInstruction::ReduceOverTied(range) => {
                    range.each().try_for_each(|reference| self.reduce_over_tied(reference))?;
                }
                UpdateInstruction::AddSquares(range, axes) => {
                    let sum = squares.entry(axes.clone()).or_default();
                    range.each().for_each(|reference| self.add_squares(reference, sum));
                }
                UpdateInstruction::FinishNorm => {
                    updated = self.finish_norm(&squares, input)?;
                    step = Some(self.begin_step(options, updated.gradient_norm));
                }
                UpdateInstruction::AdamW(range) => {
                    let step = step.expect("the verifier puts the norm before the optimizer");
                    range.each().for_each(|reference| self.adamw(reference, step));
                }
                UpdateInstruction::GatherOverData(range) => {
                    range.each().try_for_each(|reference| self.gather(reference))?;
                }
            }
            self.clock.charge(account_of(instruction));
        }
        Ok(updated)
    }

    fn held(&mut self, reference: ParameterRef) -> &mut Held {
        self.parameters.get_mut(&reference).expect("the verifier follows parameters")
    }

    fn wait_reduction(&mut self, reference: ParameterRef) -> Result<(), Error> {
        let pending = self.reductions.remove(&reference).expect("the verifier follows sums");
        let Singles(gradient) = pending.wait()?;
        self.held(reference).give_gradient(gradient);
        Ok(())
    }

    fn reduce_over_tensor(&mut self, reference: ParameterRef, axes: &[SplitAxis]) -> Result<(), Error> {
        match self.links.over(axes).cloned() {
            Some(group) => self.reduce_gradient(reference, &group),
            None => Ok(()),
        }
    }

    fn reduce_over_tied(&mut self, reference: ParameterRef) -> Result<(), Error> {
        let group = self.links.ends.clone().expect("the verifier checks where copies are");
        self.reduce_gradient(reference, &group)
    }

    /// Sums the owned part of a gradient over a group.
    fn reduce_gradient(&mut self, reference: ParameterRef, group: &Group) -> Result<(), Error> {
        let host = self.memory.of_host();
        let held = self.held(reference);
        let mut gradient = held.lend_gradient(&host)?;
        let range = held.owned_in(&gradient);
        group.all_reduce(Reduction::Sum, &mut gradient.singles_mut()[range])?;
        held.give_gradient(gradient);
        Ok(())
    }

    fn add_squares(&mut self, reference: ParameterRef, sum: &mut Sum) {
        let held = self.held(reference);
        let gradient = held.gradient.as_ref().expect("the verifier follows sums");
        sum.add_squares(gradient, held.owned_in(gradient));
    }

    /// Sums each class over its axes, the classes, and the stages; loss and norm are the same bits on every rank.
    fn finish_norm(&mut self, squares: &BTreeMap<Vec<SplitAxis>, Sum>, input: &MicroBatches) -> Result<Updated, Error> {
        let mut total = 0.0;
        for (axes, sum) in squares {
            let mut sum = [sum.value()?];
            if let Some(group) = self.links.over(axes) {
                group.all_reduce(Reduction::Sum, &mut sum)?;
            }
            total += sum[0];
        }
        if let Some(stages) = &self.links.stages {
            let mut sum = [total];
            stages.all_reduce(Reduction::Sum, &mut sum)?;
            total = sum[0];
        }
        let (loss, gradient_norm) = (self.mean_loss(input)?, total.sqrt());
        for (what, number) in [("loss", loss), ("gradient norm", gradient_norm)] {
            if !number.is_finite() {
                return Err(Error::Numerical(Problem::new(
                    format!("the {what} is {number}"),
                    format!("step {}", self.steps + 1),
                    "no weight was changed: lower the learning rate, or look at the data of this step",
                )));
            }
        }
        Ok(Updated { loss, gradient_norm })
    }

    /// The mean loss over all tokens of the batch: summands over replicas, known to the last stage.
    pub(super) fn mean_loss(&mut self, input: &MicroBatches) -> Result<f64, Error> {
        let head = self.bodies.last().expect("a program has a head");
        let mut loss = [std::mem::take(&mut self.loss).value()?];
        if head.values[head.output].summand
            && let Some(replicas) = self.links.over(&[SplitAxis::Data])
        {
            replicas.all_reduce(Reduction::Sum, &mut loss)?;
        }
        if let Some(stages) = &self.links.stages {
            stages.all_reduce(Reduction::Sum, &mut loss)?;
        }
        Ok(loss[0] / self.tokens_of(input) as f64)
    }

    fn begin_step(&mut self, options: &StepOptions, norm: f64) -> AdamW {
        self.steps += 1;
        AdamW {
            learning_rate: options.learning_rate,
            beta1: options.betas.0,
            beta2: options.betas.1,
            epsilon: options.epsilon,
            weight_decay: options.weight_decay,
            step: u32::try_from(self.steps).unwrap_or(u32::MAX),
            gradient_scale: options.clip.map_or(1.0, |clip| (clip / (norm + CLIP_EPSILON)).min(1.0)),
        }
    }

    fn adamw(&mut self, reference: ParameterRef, step: AdamW) {
        let held = self.held(reference);
        let step = AdamW { weight_decay: if held.decays { step.weight_decay } else { 0.0 }, ..step };
        let gradient = held.gradient.as_ref().expect("the verifier follows sums");
        #[cfg(feature = "kernels")]
        if let Some(device) = gradient.device() {
            crate::device::adamw(device, &step, held);
            held.accumulated = false;
            return;
        }
        let gradient = &gradient.singles()[held.owned_in(gradient)];
        let place = held.owned_in(&held.weight);
        let (first, second) = (held.first.singles_mut(), held.second.singles_mut());
        let state = match (held.weight.values_mut(), &mut held.master) {
            (ValuesMut::Brain(weight), Some(master)) => {
                State { master: master.singles_mut(), first, second, parameter: Some(&mut weight[place]) }
            }
            (ValuesMut::Single(weight), _) => State { master: &mut weight[place], first, second, parameter: None },
            _ => unreachable!("weights are fp32, or bf16 with a master copy"),
        };
        adamw(&step, gradient, state);
        held.accumulated = false;
    }

    /// Joins the parts that replicas own of a weight that each stores whole, in place.
    fn gather(&mut self, reference: ParameterRef) -> Result<(), Error> {
        let Some(group) = self.links.over(&[SplitAxis::Data]).cloned() else { return Ok(()) };
        let host = self.memory.of_host();
        self.held(reference).change_weight(&host, |weight| {
            match weight {
                ValuesMut::Single(weight) => group.all_gather(weight)?,
                ValuesMut::Brain(weight) => group.all_gather(weight)?,
                ValuesMut::Index(_) => unreachable!("weights are no ids"),
            }
            Ok(())
        })
    }
}

/// Where the time of an instruction goes.
fn account_of(instruction: &UpdateInstruction) -> Account {
    match instruction {
        UpdateInstruction::WaitReduction(_) | UpdateInstruction::GatherOverData(_) => Account::Data,
        // The cost model counts the sum of the two copies of a tied embedding there.
        UpdateInstruction::ReduceOverTied(_) => Account::Data,
        UpdateInstruction::ReduceOverTensor(..) => Account::Tensor,
        UpdateInstruction::AddSquares(..) | UpdateInstruction::AdamW(_) => Account::Optimizer,
        UpdateInstruction::FinishNorm => Account::Step,
    }
}
