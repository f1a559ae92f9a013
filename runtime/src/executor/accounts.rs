//! Which account each instruction of a body is charged to, decided when the plan is read.

use std::collections::BTreeSet;

use hardware_profiles::device::OperatorClass;
use ir::distribution::SplitAxis;
use ir::program::{Body, Op};

use super::clock::{Account, Phase, Work};
use super::steps::{Charged, Step};
use crate::operators::run::Run;

/// A pass of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Forward.
    Forward,
    /// Backward, with what was kept.
    Backward,
    /// Backward, which repeats forward operators first.
    RepeatingBackward,
}

/// Gives each instruction its account. Loads and frees go with the operator before them: they touch memory for
/// its sake.
pub fn charged(steps: Vec<Step>, body: &Body, pass: Pass) -> Vec<Charged> {
    let mut gradients: BTreeSet<usize> = body.output_gradient.iter().map(|value| value.0 as usize).collect();
    let mut accounts = Vec::with_capacity(steps.len());
    let mut last = Account::MicroBatch;
    for step in &steps {
        last = account_of(step, body, pass, &mut gradients).unwrap_or(last);
        accounts.push(last);
    }
    let next = accounts.iter().skip(1).map(Some).chain([None]);
    let changes: Vec<Option<Account>> =
        accounts.iter().zip(next).map(|(account, next)| (next != Some(account)).then_some(*account)).collect();
    steps.into_iter().zip(changes).map(|(step, account)| Charged { step, account }).collect()
}

/// The account of an instruction that has one of its own; notes which values depend on the output's gradient.
fn account_of(step: &Step, body: &Body, pass: Pass, gradients: &mut BTreeSet<usize>) -> Option<Account> {
    let in_head = body.output_gradient.is_none();
    let mut depends = |operands: Vec<usize>, results: &[usize]| {
        let depends = operands.iter().any(|value| gradients.contains(value));
        if depends {
            gradients.extend(results);
        }
        depends
    };
    let phase = |depends: bool| match pass {
        Pass::Forward => Phase::Forward,
        Pass::RepeatingBackward if !depends && !in_head => Phase::Recomputation,
        Pass::Backward | Pass::RepeatingBackward => Phase::Backward,
    };
    let values = |uses: &[super::steps::Use]| uses.iter().map(|operand| operand.value).collect();
    match step {
        Step::Compute(op, uses, result, _) | Step::ComputeGradient(op, uses, result, _, _) => {
            let depends = depends(values(uses), &[*result]);
            work_of(op, in_head).map(|work| Account::Operator(work, phase(depends)))
        }
        // One pass computes them all.
        Step::Run(run) => {
            let operands = run.operands.iter().map(|(value, _)| value.0 as usize).collect();
            let results: Vec<usize> = run.steps.iter().map(|step| step.value.0 as usize).collect();
            let depends = depends(operands, &results);
            work_of_run(run, in_head).map(|work| Account::Operator(work, phase(depends)))
        }
        Step::Convert(exchange, operand, result) | Step::Start(exchange, operand, result) => {
            depends(vec![operand.value], &[*result]);
            Some(if exchange.axes.contains(&SplitAxis::Data) { Account::Data } else { Account::Tensor })
        }
        // Only collectives of the data axis are started early.
        Step::Wait(_) => Some(Account::Data),
        Step::Accumulate(..) => Some(Account::Operator(Work::Class(OperatorClass::Arithmetic), Phase::Backward)),
        Step::Input(..) | Step::Load(..) | Step::Free(_) => None,
    }
}

/// The kind to which operators that are computed together count: the first that is not mere arithmetic.
fn work_of_run(run: &Run, in_head: bool) -> Option<Work> {
    let works: Vec<Work> = run.steps.iter().filter_map(|step| work_of(&step.op, in_head)).collect();
    let telling = works.iter().find(|work| **work != Work::Class(OperatorClass::Arithmetic));
    telling.or(works.first()).copied()
}

/// The kind of an operator; none if it does no work.
pub fn work_of(op: &Op, in_head: bool) -> Option<Work> {
    let arithmetic = if in_head { OperatorClass::Loss } else { OperatorClass::Arithmetic };
    Some(match op {
        // Estimates know of no dropout: its time goes with the operator before it.
        Op::Rename | Op::Seed | Op::Dropout(_) => return None,
        Op::Contraction => Work::Product,
        Op::FlashAttention { .. } | Op::FlashAttentionGradient { .. } => Work::Attention,
        Op::Lookup | Op::LookupGradient => Work::Class(OperatorClass::Embedding),
        Op::Norm { .. } | Op::NormInputGradient { .. } | Op::NormWeightGradient { .. } => {
            Work::Class(OperatorClass::Norm)
        }
        Op::Gelu | Op::GeluGradient | Op::Silu | Op::SiluGradient => Work::Class(OperatorClass::Activation),
        Op::MaskColumns(_) | Op::ReduceMax | Op::Exp | Op::Log | Op::Pick | Op::PickGradient | Op::SumTokens => {
            Work::Class(OperatorClass::Loss)
        }
        Op::Add
        | Op::Multiply
        | Op::Subtract
        | Op::Divide
        | Op::Scale(_)
        | Op::ScaleMask { .. }
        | Op::ScaleMaskGradient { .. }
        | Op::Softmax
        | Op::SoftmaxGradient
        | Op::Rotary { .. }
        | Op::RotaryGradient { .. }
        | Op::Cast
        | Op::ReduceSum => Work::Class(arithmetic),
    })
}
