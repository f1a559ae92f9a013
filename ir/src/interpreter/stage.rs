//! One stage: parameters of its ranks, values of the passes in flight, and its schedule.

use std::collections::BTreeMap;

use super::array::{Array, flat_part, local_dims, local_part, part_of};
use super::conversion::{convert, unflatten};
use super::operator::{Result as OperatorResult, apply};
use super::{Coordinate, Degrees, Sizes, StepInput, parameter_key};
use crate::distribution::{Distribution, Place, SplitAxis};
use crate::graph::DimName;
use crate::program::{
    Body, Conversion, Direction, InputKind, Instruction, Op, ParameterRef, Program, StageProgram, Value, ValueId,
};
use crate::schedule::{Pass, unroll};

/// Most passes of a stage that are interpreted.
const MOST_PASSES: usize = 1 << 20;

/// Arrays of all ranks of a stage.
pub type PerRank = Vec<Array>;

/// A stage's ranks.
#[derive(Debug)]
pub struct Stage<'a> {
    pub program: &'a Program,
    pub code: &'a StageProgram,
    pub sizes: Sizes,
    /// Parameters as stored.
    pub parameters: BTreeMap<ParameterRef, PerRank>,
    /// Accumulated gradients.
    pub gradients: BTreeMap<ParameterRef, PerRank>,
    /// Sums of gradients over replicas that have started.
    pub started: BTreeMap<ParameterRef, PerRank>,
    /// First and second moments of the owned parts, and steps taken.
    pub moments: BTreeMap<ParameterRef, (PerRank, PerRank)>,
    pub steps: i32,
    /// Sum of losses of this stage's micro-batches over replicas.
    pub loss: f64,
    streams: BTreeMap<(Direction, u64), PerRank>,
    frames: BTreeMap<(u32, u64, u64), Frame>,
}

/// Values of one body for one layer and micro-batch.
#[derive(Debug)]
struct Frame {
    values: Vec<Option<PerRank>>,
    /// Results of conversions that have started.
    started: BTreeMap<ValueId, PerRank>,
}

/// Messages between stages: sender, what, micro-batch.
type Mail = BTreeMap<(usize, Direction, u64), PerRank>;

impl<'a> Stage<'a> {
    /// Places a stage's parameters on its ranks.
    pub fn new(
        program: &'a Program,
        code: &'a StageProgram,
        sizes: Sizes,
        whole: &BTreeMap<String, Vec<f64>>,
    ) -> Result<Stage<'a>, String> {
        let mut stage = Stage {
            program,
            code,
            sizes,
            parameters: BTreeMap::new(),
            gradients: BTreeMap::new(),
            started: BTreeMap::new(),
            moments: BTreeMap::new(),
            steps: 0,
            loss: 0.0,
            streams: BTreeMap::new(),
            frames: BTreeMap::new(),
        };
        for pass in unroll(&code.schedule, 1, MOST_PASSES)? {
            let Pass::Forward(body, layer, _) = pass else { continue };
            for parameter in 0..program.bodies[body as usize].parameters.len() as u32 {
                let reference = stage.resolve(ParameterRef { body, layer, parameter });
                if !stage.parameters.contains_key(&reference) {
                    let placed = stage.place(reference, whole)?;
                    stage.parameters.insert(reference, placed);
                }
            }
        }
        Ok(stage)
    }

    fn degrees(&self) -> Degrees {
        self.sizes.degrees
    }

    /// The head's use of an embedding that is on the same stage is the embedding itself.
    pub fn resolve(&self, reference: ParameterRef) -> ParameterRef {
        let parameter = &self.program.bodies[reference.body as usize].parameters[reference.parameter as usize];
        let embedding = ParameterRef { body: 0, layer: 0, parameter: 0 };
        let table = self.program.bodies[0].parameters.iter().position(|parameter| parameter.name == "embedding.token");
        let embedding = ParameterRef { parameter: table.unwrap_or(0) as u32, ..embedding };
        if parameter.tied && self.parameters.contains_key(&embedding) { embedding } else { reference }
    }

    fn shape(&self, reference: ParameterRef) -> Vec<(DimName, usize)> {
        let parameter = &self.program.bodies[reference.body as usize].parameters[reference.parameter as usize];
        parameter.shape.iter().map(|(name, extent)| (*name, *extent as usize)).collect()
    }

    /// Dims of a rank's part of a parameter with the data axis joined.
    pub fn local_parameter_dims(&self, reference: ParameterRef) -> Vec<(DimName, usize)> {
        local_dims(&self.shape(reference), without_data(self.stored(reference)), self.degrees())
    }

    pub fn stored(&self, reference: ParameterRef) -> Distribution {
        self.program.bodies[reference.body as usize].parameters[reference.parameter as usize].stored
    }

    fn place(&self, reference: ParameterRef, whole: &BTreeMap<String, Vec<f64>>) -> Result<PerRank, String> {
        let tied = self.program.bodies[reference.body as usize].parameters[reference.parameter as usize].tied;
        let own = parameter_key(self.program, reference);
        let key = if tied { "embedding/embedding.token".to_owned() } else { own };
        let given = whole.get(&key).ok_or_else(|| format!("parameter {key} is missing"))?;
        let shape = self.shape(reference);
        let mut array = Array::zeros(shape);
        if given.len() > array.data.len() {
            return Err(format!(
                "parameter {key} has {} elements, the program holds {}",
                given.len(),
                array.data.len()
            ));
        }
        // Rows that padding adds come last and start as zeros.
        array.data[..given.len()].copy_from_slice(given);
        let stored = self.stored(reference);
        let part = |coordinate: Coordinate| {
            let part = local_part(&array, without_data(stored), self.degrees(), coordinate);
            match stored.data {
                Place::Flat => flat_part(&part, coordinate.data, self.degrees().data),
                _ => part,
            }
        };
        Ok(self.degrees().coordinates().map(part).collect())
    }

    /// A parameter or reduced gradient whole, from the parts of all ranks; checks that copies are equal.
    pub fn collect(&self, reference: ParameterRef, held: &PerRank) -> Result<Vec<f64>, String> {
        let degrees = self.degrees();
        let local = self.local_parameter_dims(reference);
        let local_size: usize = local.iter().map(|(_, extent)| extent).product();
        let flat = held[0].data.len() != local_size || self.stored(reference).data == Place::Flat;
        let mut whole = Array::zeros(self.shape(reference));
        let mut written = vec![false; whole.data.len()];
        for (rank, coordinate) in degrees.coordinates().enumerate() {
            let part = match flat {
                true => {
                    let peers = super::conversion::groups(degrees, &[SplitAxis::Data]);
                    let group = peers.into_iter().find(|group| group.contains(&rank)).unwrap_or_default();
                    let parts: Vec<&Array> = group.iter().map(|peer| &held[*peer]).collect();
                    unflatten(&parts, local.clone())
                }
                false => held[rank].clone(),
            };
            self.write_part(reference, &part, coordinate, &mut whole, &mut written)?;
        }
        Ok(whole.data)
    }

    fn write_part(
        &self,
        reference: ParameterRef,
        part: &Array,
        coordinate: Coordinate,
        whole: &mut Array,
        written: &mut [bool],
    ) -> Result<(), String> {
        let strides = whole.strides(&part.dims);
        let stored = without_data(self.stored(reference));
        let start: usize = part
            .dims
            .iter()
            .zip(&strides)
            .map(|((name, extent), stride)| part_of(*name, stored, self.degrees(), coordinate).1 * extent * stride)
            .sum();
        let mut conflict = false;
        super::array::for_each_index(&part.dims, &[&strides], |position, at| {
            let place = start + at[0];
            conflict |= written[place] && whole.data[place].to_bits() != part.data[position].to_bits();
            whole.data[place] = part.data[position];
            written[place] = true;
        });
        match conflict {
            true => Err(format!("ranks hold different copies of {}", parameter_key(self.program, reference))),
            false => Ok(()),
        }
    }

    fn value_shape(&self, value: &Value) -> Vec<(DimName, usize)> {
        value.shape.iter().map(|dim| (dim.name, self.sizes.whole(dim))).collect()
    }

    fn forward(&mut self, body: u32, layer: u64, batch: u64, input: &StepInput) -> Result<(), String> {
        let code = &self.program.bodies[body as usize];
        let mut frame = Frame { values: vec![None; code.values.len()], started: BTreeMap::new() };
        if let Some(value) = code.input {
            let stream = self.streams.remove(&(Direction::Activation, batch));
            frame.values[value.0 as usize] = Some(stream.ok_or_else(|| missing(&code.name, "activation", batch))?);
        }
        self.execute(code, &code.forward, layer, batch, &mut frame, input)?;
        let kept_for_backward = reads_value(&code.backward, code.output);
        let output = frame.values[code.output.0 as usize].take().ok_or_else(|| missing(&code.name, "output", batch))?;
        if kept_for_backward {
            frame.values[code.output.0 as usize] = Some(output.clone());
        }
        if code.output_gradient.is_none() {
            self.loss += self.loss_of(code, &output);
        } else {
            self.streams.insert((Direction::Activation, batch), output);
        }
        match self.frames.insert((body, layer, batch), frame) {
            None => Ok(()),
            Some(_) => Err(format!("{} runs forward twice for layer {layer}, micro-batch {batch}", code.name)),
        }
    }

    /// Losses of a micro-batch: summands over replicas, equal on tensor ranks.
    fn loss_of(&self, code: &Body, output: &PerRank) -> f64 {
        let summed = code.values[code.output.0 as usize].distribution.data == Place::PartialSum;
        let counted = |coordinate: &Coordinate| {
            coordinate.tensor == 0 && coordinate.query == 0 && (summed || coordinate.data == 0)
        };
        let ranks = self.degrees().coordinates().zip(output).filter(|(coordinate, _)| counted(coordinate));
        ranks.map(|(_, loss)| loss.data[0]).sum()
    }

    fn backward(&mut self, body: u32, layer: u64, batch: u64, input: &StepInput) -> Result<(), String> {
        let code = &self.program.bodies[body as usize];
        let frame = self.frames.remove(&(body, layer, batch));
        let mut frame = frame.ok_or_else(|| format!("{} has no forward pass for micro-batch {batch}", code.name))?;
        if let Some(value) = code.output_gradient {
            let stream = self.streams.remove(&(Direction::Gradient, batch));
            frame.values[value.0 as usize] = Some(stream.ok_or_else(|| missing(&code.name, "gradient", batch))?);
        }
        self.execute(code, &code.backward, layer, batch, &mut frame, input)?;
        if let Some(value) = code.input_gradient {
            let gradient = frame.values[value.0 as usize].take();
            let gradient = gradient.ok_or_else(|| missing(&code.name, "input gradient", batch))?;
            self.streams.insert((Direction::Gradient, batch), gradient);
        }
        frame.values[code.output.0 as usize] = None;
        match frame.values.iter().position(Option::is_some) {
            Some(index) => Err(format!("{}: value {} is never freed", code.name, code.values[index].name)),
            None => Ok(()),
        }
    }

    /// Takes a layer's gradients, which nothing may add to from here on, and sums them over replicas.
    fn start_reduction(
        &mut self,
        body: u32,
        layer: u64,
        parameters: (u32, u32),
        conversion: Conversion,
    ) -> Result<(), String> {
        for parameter in parameters.0..parameters.1 {
            let reference = ParameterRef { body, layer, parameter };
            let summands = self.gradients.remove(&reference);
            let summands = summands.ok_or_else(|| format!("{reference:?} has no gradient to reduce"))?;
            let stored = without_data(self.stored(reference));
            let shape = self.shape(reference);
            let sum = convert(conversion, &[SplitAxis::Data], &summands, &shape, stored, self.degrees());
            self.started.insert(reference, sum);
        }
        Ok(())
    }

    /// Puts the sum over replicas in the gradient's place.
    pub fn end_reduction(&mut self, reference: ParameterRef) -> Result<(), String> {
        let sum = self.started.remove(&reference);
        let sum = sum.ok_or_else(|| format!("the sum of {reference:?} over replicas has not started"))?;
        match self.gradients.insert(reference, sum) {
            None => Ok(()),
            Some(_) => Err(format!("{reference:?} is added to after its sum over replicas has started")),
        }
    }

    fn execute(
        &mut self,
        code: &Body,
        instructions: &[Instruction],
        layer: u64,
        batch: u64,
        frame: &mut Frame,
        input: &StepInput,
    ) -> Result<(), String> {
        let body = self.program.bodies.iter().position(|other| std::ptr::eq(other, code)).unwrap_or(0) as u32;
        let reference = |parameter: u32| ParameterRef { body, layer, parameter };
        for instruction in instructions {
            match instruction {
                Instruction::Input(kind, value) => {
                    let arrays = self.input_arrays(*kind, &code.values[value.0 as usize], batch, input);
                    frame.values[value.0 as usize] = Some(arrays);
                }
                Instruction::Load(parameter, value) => {
                    let resolved = self.resolve(reference(*parameter));
                    frame.values[value.0 as usize] = Some(self.parameters[&resolved].clone());
                }
                Instruction::Compute(op, operands, value) => {
                    let result = self.compute(code, op, operands, *value, frame, input)?;
                    frame.values[value.0 as usize] = Some(result);
                }
                Instruction::Convert(conversion, axes, from, to) => {
                    let result = self.convert(code, frame, *conversion, axes, [*from, *to])?;
                    frame.values[to.0 as usize] = Some(result);
                }
                Instruction::Start(conversion, axes, from, to) => {
                    let result = self.convert(code, frame, *conversion, axes, [*from, *to])?;
                    frame.started.insert(*to, result);
                }
                Instruction::Wait(from, to) => {
                    read(code, frame, *from)?;
                    let result = frame.started.remove(to);
                    let unstarted = || format!("{}: the conversion into value {} has not started", code.name, to.0);
                    frame.values[to.0 as usize] = Some(result.ok_or_else(unstarted)?);
                }
                Instruction::Accumulate(parameter, value) => {
                    let resolved = self.resolve(reference(*parameter));
                    accumulate(&mut self.gradients, resolved, read(code, frame, *value)?);
                }
                Instruction::Free(value) => {
                    let freed = frame.values[value.0 as usize].take();
                    freed.ok_or_else(|| {
                        format!("{}: {} is freed twice", code.name, code.values[value.0 as usize].name)
                    })?;
                }
            }
        }
        Ok(())
    }

    fn convert(
        &self,
        code: &Body,
        frame: &Frame,
        conversion: Conversion,
        axes: &[SplitAxis],
        ends: [ValueId; 2],
    ) -> Result<PerRank, String> {
        let [from, to] = ends;
        let target = &code.values[to.0 as usize];
        let shape = self.value_shape(target);
        Ok(convert(conversion, axes, read(code, frame, from)?, &shape, target.distribution, self.degrees()))
    }

    fn input_arrays(&self, kind: InputKind, value: &Value, batch: u64, input: &StepInput) -> PerRank {
        let Sizes { micro_batch, sequence, degrees } = self.sizes;
        let shape = self.value_shape(value);
        let whole: Vec<f64> = match kind {
            InputKind::Positions => (0..sequence).map(|position| position as f64).collect(),
            InputKind::Tokens | InputKind::Targets => {
                let ids = if kind == InputKind::Tokens { input.tokens } else { input.targets };
                let size = micro_batch * degrees.data * sequence;
                ids[batch as usize * size..(batch as usize + 1) * size].iter().map(|id| *id as f64).collect()
            }
        };
        let whole = Array { dims: shape, data: whole };
        degrees.coordinates().map(|coordinate| local_part(&whole, value.distribution, degrees, coordinate)).collect()
    }

    fn compute(
        &self,
        code: &Body,
        op: &Op,
        operands: &[ValueId],
        result: ValueId,
        frame: &Frame,
        input: &StepInput,
    ) -> Result<PerRank, String> {
        let value = &code.values[result.0 as usize];
        let arrays: Vec<&PerRank> =
            operands.iter().map(|operand| read(code, frame, *operand)).collect::<Result<_, _>>()?;
        let dims = local_dims(&self.value_shape(value), value.distribution, self.degrees());
        // Offsets of a part are those of whichever value has the dim: the result or an operand.
        let involved: Vec<&Value> =
            operands.iter().chain([&result]).map(|value| &code.values[value.0 as usize]).collect();
        let mut results = Vec::with_capacity(self.degrees().ranks());
        for (rank, coordinate) in self.degrees().coordinates().enumerate() {
            let inputs: Vec<&Array> = arrays.iter().map(|arrays| &arrays[rank]).collect();
            let part = |dim| self.start_of(&involved, dim, coordinate);
            let context = OperatorResult {
                dims: &dims,
                vocabulary_start: part(DimName::Vocabulary).0,
                heads: part(DimName::KeyValueHeads),
                queries: part(DimName::QueriesPerKeyValue),
                seed: 1.0 / input.tokens.len() as f64,
            };
            results.push(apply(op, &inputs, &context));
        }
        Ok(results)
    }

    /// Start of a rank's part along a dim, and the dim's whole extent.
    fn start_of(&self, values: &[&Value], dim: DimName, coordinate: Coordinate) -> (usize, usize) {
        let Some(value) = values.iter().find(|value| value.shape.iter().any(|other| other.name == dim)) else {
            return (0, 1);
        };
        let whole = value.shape.iter().find(|other| other.name == dim).map_or(1, |dim| self.sizes.whole(dim));
        let (ways, index) = part_of(dim, value.distribution, self.degrees(), coordinate);
        (index * (whole / ways), whole)
    }
}

/// Runs the schedules of all stages.
pub fn run_schedules(stages: &mut [Stage], input: &StepInput) -> Result<(), String> {
    run_all(stages, input, |code| &code.schedule)?;
    match stages.iter().find(|stage| !stage.frames.is_empty()) {
        Some(stage) => Err(format!("stage {} ends with forward passes that have no backward", stage.code.stage.0)),
        None => Ok(()),
    }
}

/// Runs the evaluations of all stages.
pub fn run_evaluations(stages: &mut [Stage], input: &StepInput) -> Result<(), String> {
    run_all(stages, input, |code| &code.evaluation)?;
    stages.iter_mut().for_each(|stage| stage.frames.clear());
    Ok(())
}

fn run_all(
    stages: &mut [Stage],
    input: &StepInput,
    schedule: fn(&StageProgram) -> &Vec<crate::program::StageInstruction>,
) -> Result<(), String> {
    let unrolled = stages.iter().map(|stage| unroll(schedule(stage.code), input.micro_batches, MOST_PASSES));
    let passes: Vec<Vec<Pass>> = unrolled.collect::<Result<_, _>>()?;
    let mut next = vec![0; stages.len()];
    let mut mail = Mail::new();
    loop {
        let mut progress = false;
        for index in 0..stages.len() {
            while let Some(pass) = passes[index].get(next[index]) {
                if !run_pass(&mut stages[index], index, *pass, &mut mail, input)? {
                    break;
                }
                next[index] += 1;
                progress = true;
            }
        }
        if next.iter().zip(&passes).all(|(next, passes)| *next == passes.len()) {
            break;
        }
        if !progress {
            return Err(format!("deadlock: stages wait at passes {next:?}"));
        }
    }
    match mail.is_empty() {
        true => Ok(()),
        false => Err("messages were sent that nobody received".to_owned()),
    }
}

/// Runs a pass; `false` if it has to wait for a message.
fn run_pass(stage: &mut Stage, index: usize, pass: Pass, mail: &mut Mail, input: &StepInput) -> Result<bool, String> {
    match pass {
        Pass::Receive(direction, batch) => {
            let sender = match direction {
                Direction::Activation => index.checked_sub(1),
                Direction::Gradient => Some(index + 1),
            };
            let sender = sender.ok_or("the first stage receives no activations")?;
            let Some(message) = mail.remove(&(sender, direction, batch)) else { return Ok(false) };
            stage.streams.insert((direction, batch), message);
        }
        Pass::Send(direction, batch) => {
            let message = stage.streams.remove(&(direction, batch));
            let message =
                message.ok_or_else(|| format!("stage {index} has nothing to send for micro-batch {batch}"))?;
            mail.insert((index, direction, batch), message);
        }
        Pass::Forward(body, layer, batch) => stage.forward(body, layer, batch, input)?,
        Pass::Backward(body, layer, batch) => stage.backward(body, layer, batch, input)?,
        Pass::StartReduction(body, layer, parameters, conversion) => {
            stage.start_reduction(body, layer, parameters, conversion)?;
        }
    }
    Ok(true)
}

/// A distribution with the data axis left out.
pub fn without_data(distribution: Distribution) -> Distribution {
    distribution.with(SplitAxis::Data, Place::Replicated)
}

fn accumulate(gradients: &mut BTreeMap<ParameterRef, PerRank>, reference: ParameterRef, value: &PerRank) {
    match gradients.get_mut(&reference) {
        None => {
            gradients.insert(reference, value.clone());
        }
        Some(sums) => {
            for (sum, value) in sums.iter_mut().zip(value) {
                sum.data.iter_mut().zip(&value.data).for_each(|(sum, value)| *sum += value);
            }
        }
    }
}

fn read<'f>(code: &Body, frame: &'f Frame, value: ValueId) -> Result<&'f PerRank, String> {
    let held = frame.values.get(value.0 as usize).and_then(Option::as_ref);
    held.ok_or_else(|| format!("{}: value {} is read but not alive", code.name, value.0))
}

fn reads_value(instructions: &[Instruction], value: ValueId) -> bool {
    let read = |instruction: &&Instruction| !matches!(instruction, Instruction::Free(_));
    instructions.iter().filter(read).any(|instruction| instruction.reads().contains(&value))
}

fn missing(body: &str, what: &str, batch: u64) -> String {
    format!("{body}: the {what} of micro-batch {batch} does not exist")
}
