//! Forward and backward passes of bodies on one rank: one arm for each kind of instruction.

use std::mem;
use std::sync::Arc;

use ir::program::{Direction, InputKind, ParameterRef};

use super::clock::Account;
use super::exchange::{Exchange, Started};
use super::gradient::{add_operator, add_value};
use super::steps::{Charged, LocalValue, RankBody, Step, Use};
use super::{Executor, MicroBatches};
use crate::Error;
use crate::data::{BatchShape, sample_index};
use crate::operators::run::apply_run;
use crate::operators::{Dropping, Operand, Place, ResultShape, apply};
use crate::tensor::{Memory, Tensor};
use crate::train::Dropout;

/// Values of one body for one layer and micro-batch.
pub struct Frame {
    values: Vec<Option<Tensor>>,
    /// Conversions that have started, by result.
    started: Vec<(usize, Exchange, Option<Started>)>,
}

impl Frame {
    fn new(values: usize) -> Frame {
        Frame { values: (0..values).map(|_| None).collect(), started: Vec::new() }
    }

    pub(super) fn take(&mut self, value: usize) -> Tensor {
        self.values[value].take().expect("the verifier follows lives")
    }

    /// An operand: moved out if this is its last use.
    fn operand(&mut self, operand: Use) -> Operand<'_> {
        match operand.last {
            true => Operand::Owned(self.take(operand.value)),
            false => Operand::Borrowed(self.values[operand.value].as_ref().expect("the verifier follows lives")),
        }
    }

    fn operands(&mut self, uses: &[Use]) -> Vec<Operand<'_>> {
        let ended: Vec<Option<Tensor>> =
            uses.iter().map(|operand| operand.last.then(|| self.take(operand.value))).collect();
        let read = |operand: &Use| self.values[operand.value].as_ref().expect("the verifier follows lives");
        uses.iter()
            .zip(ended)
            .map(|(operand, ended)| ended.map_or_else(|| Operand::Borrowed(read(operand)), Operand::Owned))
            .collect()
    }
}

impl Executor<'_> {
    /// Runs a body forward for a layer and a micro-batch; gives what it keeps for backward.
    pub(super) fn forward(&mut self, body: u32, layer: u64, batch: u64, input: &MicroBatches) -> Result<Frame, Error> {
        let code = Arc::clone(&self.bodies[body as usize]);
        let mut frame = self.enter(&code, batch);
        self.execute(&code, &code.forward, (body, layer, batch), &mut frame, input)?;
        let output = match code.keeps_output {
            true => frame.values[code.output].clone().expect("a body gives its output"),
            false => frame.take(code.output),
        };
        match code.output_gradient {
            Some(_) => drop(self.streams.insert((Direction::Activation, batch), output)),
            None => self.loss.add(&output),
        }
        Ok(frame)
    }

    /// The values with which a body's forward pass starts.
    pub(super) fn enter(&mut self, code: &RankBody, batch: u64) -> Frame {
        let mut frame = Frame::new(code.values.len());
        if let Some(value) = code.input {
            frame.values[value] = Some(self.take_stream(Direction::Activation, batch));
        }
        self.clock.charge(Account::MicroBatch);
        frame
    }

    /// Runs a body backward for a layer and a micro-batch.
    pub(super) fn backward(&mut self, body: u32, layer: u64, batch: u64, input: &MicroBatches) -> Result<(), Error> {
        let code = Arc::clone(&self.bodies[body as usize]);
        let mut frame = self.frames.remove(&(body, layer, batch)).expect("the verifier follows passes");
        if let Some(value) = code.output_gradient {
            frame.values[value] = Some(self.take_stream(Direction::Gradient, batch));
        }
        self.clock.charge(Account::MicroBatch);
        self.execute(&code, &code.backward, (body, layer, batch), &mut frame, input)?;
        if let Some(value) = code.input_gradient {
            let gradient = frame.take(value);
            self.streams.insert((Direction::Gradient, batch), gradient);
        }
        Ok(())
    }

    fn take_stream(&mut self, direction: Direction, batch: u64) -> Tensor {
        self.streams.remove(&(direction, batch)).expect("the verifier follows streams")
    }

    pub(super) fn execute(
        &mut self,
        code: &RankBody,
        steps: &[Charged],
        (body, layer, batch): (u32, u64, u64),
        frame: &mut Frame,
        input: &MicroBatches,
    ) -> Result<(), Error> {
        let reference = |parameter: u32| ParameterRef { body, layer, parameter };
        let dropping = self.dropping(layer, batch);
        for Charged { step, account } in steps {
            match step {
                Step::Input(kind, value) => {
                    frame.values[*value] = Some(self.input(*kind, &code.values[*value], batch, input))
                }
                Step::Load(parameter, value) => {
                    let held = &self.parameters[&self.resolve(reference(*parameter))];
                    frame.values[*value] = Some(held.weight.clone());
                }
                Step::Compute(op, uses, value, place) => {
                    let shape = self.shape(&code.values[*value], Place { dropping, ..*place });
                    let result = apply(op, frame.operands(uses), &shape);
                    frame.values[*value] = Some(result);
                }
                Step::ComputeGradient(op, uses, value, place, parameter) => {
                    let resolved = self.resolve(reference(*parameter));
                    let Executor { parameters, memory, .. } = self;
                    let held = parameters.get_mut(&resolved).expect("the verifier follows parameters");
                    let value = &code.values[*value];
                    let shape = ResultShape { memory, dims: &value.dims, format: value.format, place: *place };
                    add_operator(held, op, frame.operands(uses), &shape);
                }
                Step::Run(run) => {
                    let uses: Vec<Use> =
                        run.operands.iter().map(|(value, last)| Use { value: value.0 as usize, last: *last }).collect();
                    for (value, result) in apply_run(run, frame.operands(&uses), &self.memory, dropping) {
                        frame.values[value.0 as usize] = Some(result);
                    }
                }
                Step::Convert(exchange, operand, value) => {
                    let result = self.convert(exchange, frame.operand(*operand), &code.values[*value])?;
                    frame.values[*value] = Some(result);
                }
                Step::Start(exchange, operand, value) => {
                    let started = self.start_conversion(exchange, frame.operand(*operand))?;
                    frame.started.push((*value, exchange.clone(), started));
                }
                Step::Wait(value) => {
                    let place = frame.started.iter().position(|(result, ..)| result == value);
                    let (_, exchange, started) =
                        frame.started.swap_remove(place.expect("the verifier follows conversions"));
                    frame.values[*value] = Some(self.end_conversion(&exchange, started, &code.values[*value])?);
                }
                Step::Accumulate(parameter, operand) => {
                    let resolved = self.resolve(reference(*parameter));
                    let held = self.parameters.get_mut(&resolved).expect("the verifier follows parameters");
                    add_value(held, frame.operand(*operand).tensor());
                }
                Step::Free(value) => drop(mem::take(&mut frame.values[*value])),
            }
            if let Some(account) = account {
                self.clock.charge(*account);
            }
        }
        Ok(())
    }

    /// Converts between ranks; what a device holds passes through the host's memory.
    fn convert(&self, exchange: &Exchange, operand: Operand, value: &LocalValue) -> Result<Tensor, Error> {
        if self.memory.is_tracing() {
            return Ok(exchange.stale_result(&self.memory, value.format));
        }
        let host = self.memory.of_host();
        let result = exchange.convert(self.links.over(&exchange.axes), on_host(operand, &host)?, &host)?;
        Ok(result.into_memory(&self.memory))
    }

    /// Starts a conversion; none starts where nothing is computed.
    fn start_conversion(&self, exchange: &Exchange, operand: Operand) -> Result<Option<Started>, Error> {
        if self.memory.is_tracing() {
            return Ok(None);
        }
        let host = self.memory.of_host();
        Ok(Some(exchange.start(self.links.over(&exchange.axes), on_host(operand, &host)?, &host)))
    }

    fn end_conversion(
        &self,
        exchange: &Exchange,
        started: Option<Started>,
        value: &LocalValue,
    ) -> Result<Tensor, Error> {
        match started {
            None => Ok(exchange.stale_result(&self.memory, value.format)),
            Some(started) => Ok(exchange.wait(started, &self.memory.of_host())?.into_memory(&self.memory)),
        }
    }

    /// What a pass for a layer and a micro-batch drops.
    fn dropping(&self, layer: u64, batch: u64) -> Option<Dropping> {
        let (Dropout { hidden, attention }, seed) = self.dropout?;
        let strategy = &self.plan.strategy;
        let shape = BatchShape { data_parallel: strategy.data_parallel, micro_batch: strategy.micro_batch };
        let first_sequence = sample_index(0, shape, batch, self.place.place.data.index, 0);
        Some(Dropping { hidden, attention, seed, step: self.steps, layer, first_sequence })
    }

    fn shape<'s>(&'s self, value: &'s LocalValue, place: Place) -> ResultShape<'s> {
        ResultShape {
            memory: &self.memory,
            dims: &value.dims,
            format: value.format,
            place: Place { seed: self.seed, ..place },
        }
    }

    /// The head's use of an embedding on the same stage is the embedding itself.
    fn resolve(&self, reference: ParameterRef) -> ParameterRef {
        match self.tied {
            Some((head, embedding)) if head == reference => embedding,
            _ => reference,
        }
    }

    fn input(&self, kind: InputKind, value: &LocalValue, batch: u64, input: &MicroBatches) -> Tensor {
        let ids = match kind {
            InputKind::Tokens => &input.tokens[batch as usize],
            InputKind::Targets => &input.targets[batch as usize],
            InputKind::Positions => &input.positions,
        };
        Tensor::from_ids(&self.memory, &value.dims, ids)
    }
}

/// An operand in the host's memory: itself if it is there.
fn on_host<'t>(operand: Operand<'t>, host: &Memory) -> Result<Operand<'t>, Error> {
    match operand.tensor().is_on_device() {
        true => Ok(Operand::Owned(operand.tensor().on_host(host)?)),
        false => Ok(operand),
    }
}
