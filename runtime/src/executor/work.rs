//! What a rank computes in a step, counted from its program: the other half of a rate.

use std::collections::BTreeSet;

use hardware_profiles::device::OperatorClass;
use ir::graph::DimName;
use ir::program::{Op, StageInstruction};
use ir::schedule::{Pass, unroll};

use super::accounts::work_of;
use super::clock::{Account, Phase, Work};
use super::steps::{Charged, RankBody, Step};
use super::{Executor, MOST_PASSES};
use crate::operators::run::{self, Source};
use crate::tensor::{Dims, Tensor, size_of};

/// Extents of a matrix product `[m, k] × [k, n]`, and how many independent ones there are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProductShape {
    /// Independent products.
    pub batch: f64,
    /// Rows of the result.
    pub m: f64,
    /// Columns of the result.
    pub n: f64,
    /// What is summed over.
    pub k: f64,
}

/// Work of a rank in a step, repeated forward operators apart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepWork {
    /// Bytes that forward operators of each class read and write, each tensor once, in the classes' order.
    pub bytes: [f64; OperatorClass::ALL.len()],
    /// Products of forward and backward passes, and how often each is computed.
    pub products: Vec<(ProductShape, f64)>,
    /// FLOPs of the attention core's forward pass, masked positions included.
    pub attention_flops: f64,
    /// Micro-batches.
    pub micro_batches: f64,
    /// Bytes of gradients that micro-batches read and write to add to them.
    pub accumulated_bytes: f64,
    /// Bytes that norm and optimizer read and write: gradients twice, state both ways, weights once.
    pub optimizer_bytes: f64,
}

impl Executor<'_> {
    /// Counts the work of a step.
    pub fn step_work(&self, micro_batches: u64) -> StepWork {
        let schedule: &[StageInstruction] = &self.program.stages[self.place.stage].schedule;
        let passes = unroll(schedule, micro_batches, MOST_PASSES).expect("the verifier unrolls schedules");
        let mut work = StepWork { micro_batches: micro_batches as f64, ..StepWork::default() };
        for (number, body) in (0..).zip(&self.bodies) {
            let count = |wanted: fn(&Pass) -> Option<u32>| {
                passes.iter().filter(|pass| wanted(pass) == Some(number)).count() as f64
            };
            let forward = count(|pass| if let Pass::Forward(body, ..) = pass { Some(*body) } else { None });
            let backward = count(|pass| if let Pass::Backward(body, ..) = pass { Some(*body) } else { None });
            if forward > 0.0 {
                add_forward(&mut work, body, forward);
                add_products(&mut work, body, &body.backward, backward);
            }
        }
        for held in self.parameters.values() {
            let state = 4.0 * if held.master.is_some() { 3.0 } else { 2.0 };
            let weight = held.weight.format().bytes() as f64;
            if micro_batches > 1 {
                let gradient = held.gradient.as_ref().map_or(0, Tensor::len);
                work.accumulated_bytes += 2.0 * 4.0 * (gradient as u64 * micro_batches) as f64;
            }
            work.optimizer_bytes += held.first.len() as f64 * (2.0 * state + 2.0 * 4.0 + weight);
        }
        work
    }
}

fn add_forward(work: &mut StepWork, body: &RankBody, count: f64) {
    add_products(work, body, &body.forward, count);
    let in_head = body.output_gradient.is_none();
    for charged in &body.forward {
        for (op, operands, result) in operators_of(&charged.step) {
            // Bytes count to the operator's own kind, though a run's time goes to one kind: only that adds up to the
            // run's time again where operators are predicted one by one.
            match work_of(&op, in_head) {
                Some(Work::Class(class)) => {
                    work.bytes[class as usize] += count * bytes_of(body, &op, &operands, result)
                }
                Some(Work::Attention) => work.attention_flops += count * attention_flops(body, &operands, result),
                Some(Work::Product) | None => {}
            }
        }
    }
}

/// Operators of an instruction, with their operands and results: several for those that are computed together.
fn operators_of(step: &Step) -> Vec<(Op, Vec<usize>, usize)> {
    match step {
        Step::Compute(op, uses, result, _) => vec![(*op, uses.iter().map(|operand| operand.value).collect(), *result)],
        Step::Run(run) => {
            let value = |source: &Source| match *source {
                Source::Outside(operand) => run.operands[operand].0,
                Source::Step(earlier) => run.steps[earlier].value,
            };
            let operands = |step: &run::Step| step.operands.iter().map(|source| value(source).0 as usize).collect();
            run.steps.iter().map(|step| (step.op, operands(step), step.value.0 as usize)).collect()
        }
        Step::Input(..)
        | Step::Load(..)
        | Step::ComputeGradient(..)
        | Step::Convert(..)
        | Step::Start(..)
        | Step::Wait(_)
        | Step::Accumulate(..)
        | Step::Free(_) => Vec::new(),
    }
}

/// Bytes of an operator's operands and result; of a looked-up table only the rows that are used.
fn bytes_of(body: &RankBody, op: &Op, operands: &[usize], result: usize) -> f64 {
    let bytes = |value: usize| (size_of(&body.values[value].dims) * body.values[value].format.bytes()) as f64;
    let different: BTreeSet<usize> = operands.iter().copied().collect();
    let read = different.into_iter().map(|value| match op {
        Op::Lookup if value == operands[1] => bytes(result),
        _ => bytes(value),
    });
    read.sum::<f64>() + bytes(result)
}

/// Two products: of queries and keys, and of their weights and values.
fn attention_flops(body: &RankBody, operands: &[usize], result: usize) -> f64 {
    let dims = |value: usize| -> &Dims { &body.values[value].dims };
    let keys = dims(operands[1]).iter().find(|(name, _)| *name == DimName::KeySequence);
    let keys = keys.map_or(1, |(_, extent)| *extent);
    2.0 * ((size_of(dims(operands[0])) + size_of(dims(result))) * keys) as f64
}

/// Adds products; those that backward repeats are left out.
fn add_products(work: &mut StepWork, body: &RankBody, steps: &[Charged], count: f64) {
    let mut account = None;
    for charged in steps.iter().rev() {
        account = charged.account.or(account);
        let (Step::Compute(Op::Contraction, uses, result, _)
        | Step::ComputeGradient(Op::Contraction, uses, result, ..)) = &charged.step
        else {
            continue;
        };
        if account != Some(Account::Operator(Work::Product, Phase::Recomputation)) {
            let [a, b] = [0, 1].map(|operand: usize| &*body.values[uses[operand].value].dims);
            work.products.push((product_shape(a, b, &body.values[*result].dims), count));
        }
    }
}

/// The matrix product that a contraction is.
fn product_shape(a: &Dims, b: &Dims, result: &Dims) -> ProductShape {
    let has = |dims: &Dims, name: DimName| dims.iter().any(|(other, _)| *other == name);
    let size = |dims: &Dims, wanted: &dyn Fn(DimName) -> bool| -> f64 {
        dims.iter().filter(|(name, _)| wanted(*name)).map(|(_, extent)| *extent as f64).product()
    };
    ProductShape {
        batch: size(a, &|name| has(b, name) && has(result, name)),
        m: size(a, &|name| !has(b, name)),
        n: size(b, &|name| !has(a, name)),
        k: size(a, &|name| !has(result, name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::graph::DimName::{Hidden, Intermediate, KeyValueHeads, MicroBatch, Sequence, ValueDim};

    #[test]
    fn contractions_are_products_of_named_dims() {
        let (input, weight) = ([(MicroBatch, 2), (Sequence, 3), (Hidden, 5)], [(Hidden, 5), (Intermediate, 7)]);
        let output = [(MicroBatch, 2), (Sequence, 3), (Intermediate, 7)];
        let heads = [(KeyValueHeads, 4), (Sequence, 3), (ValueDim, 6)];
        let more = [(KeyValueHeads, 4), (ValueDim, 6), (Hidden, 5)];
        let shape = |batch, m, n, k| ProductShape { batch, m, n, k };
        assert_eq!(product_shape(&input, &weight, &output), shape(1.0, 6.0, 7.0, 5.0));
        assert_eq!(product_shape(&output, &weight, &input), shape(1.0, 6.0, 5.0, 7.0));
        assert_eq!(product_shape(&input, &output, &weight), shape(1.0, 5.0, 7.0, 6.0));
        let result = [(KeyValueHeads, 4), (Sequence, 3), (Hidden, 5)];
        assert_eq!(product_shape(&heads, &more, &result), shape(4.0, 3.0, 5.0, 6.0));
    }
}
