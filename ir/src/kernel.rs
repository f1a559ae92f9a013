//! Runs of instructions that one kernel may compute together.

use serde::{Deserialize, Serialize};

use crate::program::Op;

/// A run of instructions that one kernel may compute: values that live only inside it need no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kernel {
    /// The pass that holds the run.
    pub pass: PassKind,
    /// What is computed together.
    pub kind: KernelKind,
    /// First instruction and one past the last.
    pub instructions: (u32, u32),
}

/// A pass of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PassKind {
    /// Forward.
    Forward,
    /// Backward.
    Backward,
}

/// What a kernel computes together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KernelKind {
    /// Bias and GeLU.
    BiasActivation,
    /// SiLU of the gate times up.
    GatedActivation,
    /// Bias, dropout and residual sum.
    BiasResidual,
    /// Residual sum and norm.
    ResidualNorm,
    /// Bias, dropout, residual sum and norm.
    BiasResidualNorm,
    /// Scale, mask and softmax, or their gradients.
    ScaleMaskSoftmax,
    /// Steps of cross-entropy between two collectives.
    CrossEntropy,
}

/// What a kernel makes of the operators at the start of a run, and how many it takes: the longest pattern.
pub fn kernel_pattern(ops: &[Op]) -> Option<(KernelKind, usize)> {
    match ops {
        [Op::Add, Op::Dropout(_), Op::Add, Op::Norm { .. }, ..] => Some((KernelKind::BiasResidualNorm, 4)),
        [Op::Add, Op::Dropout(_), Op::Add, ..] => Some((KernelKind::BiasResidual, 3)),
        [Op::Add, Op::Norm { .. }, ..] => Some((KernelKind::ResidualNorm, 2)),
        [Op::Add, Op::Gelu, ..] => Some((KernelKind::BiasActivation, 2)),
        [Op::Silu, Op::Multiply, ..] => Some((KernelKind::GatedActivation, 2)),
        [Op::ScaleMask { .. }, Op::Softmax, ..] => Some((KernelKind::ScaleMaskSoftmax, 2)),
        [Op::SoftmaxGradient, Op::ScaleMaskGradient { .. }, ..] => Some((KernelKind::ScaleMaskSoftmax, 2)),
        [Op::Subtract, Op::Exp, Op::ReduceSum, ..] => Some((KernelKind::CrossEntropy, 3)),
        [Op::Multiply, Op::PickGradient, Op::Add, Op::Cast, ..] => Some((KernelKind::CrossEntropy, 4)),
        [Op::Add, Op::Add, ..] => Some((KernelKind::BiasResidual, 2)),
        _ => None,
    }
}
