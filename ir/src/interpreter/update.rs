//! The update at the end of a step, with the collectives that cross stages.

use std::collections::BTreeMap;

use super::array::{Array, flat_part};
use super::conversion::{convert, groups, unflatten};
use super::stage::{Stage, without_data};
use super::{Sizes, parameter_key};
use crate::distribution::{Place, SplitAxis};
use crate::program::{Conversion, ParameterRef, Program, UpdateInstruction};

/// Hyper-parameters of AdamW (arXiv 1711.05101) and of clipping by the global norm.
#[derive(Clone, Copy, Debug)]
pub struct Optimizer {
    /// Step size.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Largest global gradient norm.
    pub clip: f64,
}

/// Squares summed so far, by the axes over which they are still to be summed.
type Squares = BTreeMap<Vec<SplitAxis>, Vec<f64>>;

/// Runs the updates of all stages; gives the gradient norm and the reduced gradients, whole.
pub fn run_updates(
    program: &Program,
    stages: &mut [Stage],
    optimizer: &Optimizer,
) -> Result<(f64, BTreeMap<String, Vec<f64>>), String> {
    let split = |stage: &Stage| stage.code.update.iter().position(|i| *i == UpdateInstruction::FinishNorm);
    let ends: Vec<usize> = stages.iter().map(split).collect::<Option<_>>().ok_or("a stage has no FinishNorm")?;
    let mut squares: Vec<Squares> = vec![Squares::new(); stages.len()];
    let mut next = vec![0; stages.len()];
    // Up to the norm; the sum over the tied embedding is a meeting of the first and the last stage.
    loop {
        let mut waiting = Vec::new();
        for index in 0..stages.len() {
            while next[index] < ends[index] {
                let instruction = &stages[index].code.update[next[index]];
                if let UpdateInstruction::ReduceOverTied(range) = instruction {
                    let reference = range.each().next().ok_or("an empty range of tied parameters")?;
                    waiting.push((index, reference));
                    break;
                }
                reduce(&mut stages[index], instruction, &mut squares[index])?;
                next[index] += 1;
            }
        }
        match waiting.as_slice() {
            [] => break,
            [(first, a), (last, b)] => {
                sum_tied(stages, (*first, *a), (*last, *b))?;
                next[*first] += 1;
                next[*last] += 1;
            }
            _ => return Err(format!("deadlock: only stage {} waits at the tied embedding", waiting[0].0)),
        }
    }
    if let Some(stage) = stages.iter().find(|stage| !stage.started.is_empty()) {
        return Err(format!("stage {} ends with sums over replicas that it never waits for", stage.code.stage.0));
    }
    let norm = finish_norm(stages, &squares)?;
    let coefficient = (optimizer.clip / (norm + 1e-6)).min(1.0);
    let mut gradients = BTreeMap::new();
    for (stage, end) in stages.iter_mut().zip(ends) {
        for (reference, held) in &stage.gradients {
            gradients.insert(parameter_key(program, *reference), stage.collect(*reference, held)?);
        }
        stage.steps += 1;
        for instruction in &stage.code.update[end + 1..] {
            match instruction {
                UpdateInstruction::AdamW(range) => {
                    range.each().try_for_each(|reference| adamw(stage, reference, optimizer, coefficient))?;
                }
                UpdateInstruction::GatherOverData(range) => {
                    range.each().try_for_each(|reference| gather(stage, reference))?;
                }
                other => return Err(format!("{other:?} after the norm")),
            }
        }
        stage.gradients.clear();
    }
    Ok((norm, gradients))
}

fn reduce(stage: &mut Stage, instruction: &UpdateInstruction, squares: &mut Squares) -> Result<(), String> {
    let Sizes { degrees, .. } = stage.sizes;
    match instruction {
        UpdateInstruction::ReduceOverTensor(range, axes) => range.each().try_for_each(|reference| {
            over_gradient(stage, reference, |held, shape, stored| {
                convert(Conversion::AllReduceSum, axes, held, shape, stored, degrees)
            })
        }),
        UpdateInstruction::WaitReduction(range) => {
            range.each().try_for_each(|reference| stage.end_reduction(reference))
        }
        UpdateInstruction::AddSquares(range, axes) => range.each().try_for_each(|reference| {
            let held = gradient(stage, reference)?;
            let sums = squares.entry(axes.clone()).or_insert_with(|| vec![0.0; degrees.ranks()]);
            for (sum, array) in sums.iter_mut().zip(held) {
                *sum += array.data.iter().map(|x| x * x).sum::<f64>();
            }
            Ok(())
        }),
        UpdateInstruction::ReduceOverTied(_)
        | UpdateInstruction::FinishNorm
        | UpdateInstruction::AdamW(_)
        | UpdateInstruction::GatherOverData(_) => Err(format!("{instruction:?} before the norm")),
    }
}

fn gradient<'s>(stage: &'s Stage, reference: ParameterRef) -> Result<&'s Vec<Array>, String> {
    let missing = || format!("no gradient of {}", parameter_key(stage.program, reference));
    stage.gradients.get(&reference).ok_or_else(missing)
}

fn over_gradient(
    stage: &mut Stage,
    reference: ParameterRef,
    f: impl Fn(&[Array], &[(crate::graph::DimName, usize)], crate::distribution::Distribution) -> Vec<Array>,
) -> Result<(), String> {
    let parameter = &stage.program.bodies[reference.body as usize].parameters[reference.parameter as usize];
    let shape: Vec<_> = parameter.shape.iter().map(|(name, extent)| (*name, *extent as usize)).collect();
    let stored = without_data(parameter.stored);
    let reduced = f(gradient(stage, reference)?, &shape, stored);
    stage.gradients.insert(reference, reduced);
    Ok(())
}

fn sum_tied(stages: &mut [Stage], first: (usize, ParameterRef), last: (usize, ParameterRef)) -> Result<(), String> {
    let mut sums = gradient(&stages[first.0], first.1)?.clone();
    for (sum, other) in sums.iter_mut().zip(gradient(&stages[last.0], last.1)?) {
        sum.data.iter_mut().zip(&other.data).for_each(|(a, b)| *a += b);
    }
    stages[first.0].gradients.insert(first.1, sums.clone());
    stages[last.0].gradients.insert(last.1, sums);
    Ok(())
}

/// Sums each class over its axes, the classes, and the stages; every rank must find the same.
fn finish_norm(stages: &[Stage], squares: &[Squares]) -> Result<f64, String> {
    let mut total = 0.0;
    for (stage, classes) in stages.iter().zip(squares) {
        let ranks = stage.sizes.degrees.ranks();
        let mut sums = vec![0.0; ranks];
        for (axes, class) in classes {
            for members in groups(stage.sizes.degrees, axes) {
                let sum: f64 = members.iter().map(|rank| class[*rank]).sum();
                members.iter().for_each(|rank| sums[*rank] += sum);
            }
        }
        if sums.iter().any(|sum| sum.to_bits() != sums[0].to_bits()) {
            return Err(format!("ranks of stage {} find different norms: {sums:?}", stage.code.stage.0));
        }
        total += sums[0];
    }
    Ok(total.sqrt())
}

fn adamw(stage: &mut Stage, reference: ParameterRef, optimizer: &Optimizer, coefficient: f64) -> Result<(), String> {
    let degrees = stage.sizes.degrees;
    let gradients = gradient(stage, reference)?.clone();
    let stored = stage.parameters[&reference].clone();
    let local: usize = stage.local_parameter_dims(reference).iter().map(|(_, extent)| extent).product();
    let flat_storage = stage.stored(reference).data == Place::Flat;
    let zeros =
        || gradients.iter().map(|array| Array { dims: Vec::new(), data: vec![0.0; array.data.len()] }).collect();
    let (mut first, mut second) = stage.moments.remove(&reference).unwrap_or_else(|| (zeros(), zeros()));
    let correction = |beta: f64| 1.0 - beta.powi(stage.steps);
    let (first_correction, second_correction) = (correction(optimizer.beta1), correction(optimizer.beta2));
    let mut updated = stored.clone();
    for (rank, coordinate) in degrees.coordinates().enumerate() {
        let owns_part = gradients[rank].data.len() != local && !flat_storage;
        let mut owned = match owns_part {
            true => flat_part(&stored[rank], coordinate.data, degrees.data),
            false => stored[rank].clone(),
        };
        for (index, p) in owned.data.iter_mut().enumerate() {
            let g = gradients[rank].data[index] * coefficient;
            let m = &mut first[rank].data[index];
            *m = optimizer.beta1 * *m + (1.0 - optimizer.beta1) * g;
            let v = &mut second[rank].data[index];
            *v = optimizer.beta2 * *v + (1.0 - optimizer.beta2) * g * g;
            let direction = (*m / first_correction) / ((*v / second_correction).sqrt() + optimizer.epsilon);
            *p -= optimizer.learning_rate * (direction + optimizer.weight_decay * *p);
        }
        match owns_part {
            true => {
                let size = owned.data.len();
                let start = (coordinate.data * size).min(local);
                let end = (start + size).min(local);
                updated[rank].data[start..end].copy_from_slice(&owned.data[..end - start]);
            }
            false => updated[rank] = owned,
        }
    }
    stage.parameters.insert(reference, updated);
    stage.moments.insert(reference, (first, second));
    Ok(())
}

/// Joins the parts that replicas own of a parameter that each stores whole.
fn gather(stage: &mut Stage, reference: ParameterRef) -> Result<(), String> {
    let degrees = stage.sizes.degrees;
    let held = stage.parameters[&reference].clone();
    let coordinates: Vec<_> = degrees.coordinates().collect();
    let mut joined = held.clone();
    for members in groups(degrees, &[SplitAxis::Data]) {
        let parts: Vec<Array> =
            members.iter().map(|rank| flat_part(&held[*rank], coordinates[*rank].data, degrees.data)).collect();
        let parts: Vec<&Array> = parts.iter().collect();
        for rank in &members {
            let dims = held[*rank].dims.clone();
            joined[*rank] = unflatten(&parts, dims);
        }
    }
    stage.parameters.insert(reference, joined);
    Ok(())
}
