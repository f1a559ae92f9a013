//! Neighbouring operators of a run that one kernel computes.

use ir::program::Op;
use kernels::activation::swiglu;
use kernels::norm::norm;
use kernels::softmax::{masked_softmax, masked_softmax_gradient};

use super::{View, norm_of, scores_of, slopes, target, views_of};
use crate::device::Device;
use crate::operators::run::{Source, Step};
use crate::operators::{Operand, ResultShape};
use crate::tensor::{Tensor, size_of};

/// Whether a step, the run's step `at`, and the next one are one kernel. `is_read` says that others read the first
/// one's result, which only sums before norms write.
pub fn are_one_kernel([first, second]: [&Step; 2], at: usize, is_read: bool) -> bool {
    let follows = |operand: usize| second.operands.get(operand) == Some(&Source::Step(at));
    let once = second.operands.iter().filter(|source| **source == Source::Step(at)).count() == 1;
    match (&first.op, &second.op) {
        (Op::Add, Op::Norm { .. }) => {
            let both = first.operands[0] != first.operands[1];
            both && once && follows(0) && size_of(&first.shape.dims) == size_of(&second.shape.dims)
        }
        (Op::ScaleMask { .. }, Op::Softmax) | (Op::SoftmaxGradient, Op::ScaleMaskGradient { .. }) => {
            !is_read && once && follows(0)
        }
        (Op::Silu, Op::Multiply) => !is_read && once && follows(0) && first.operands[0] != second.operands[1],
        _ => false,
    }
}

/// Computes two operators that are one kernel. Operands are those of the first, then those of the second without the
/// first one's result.
pub fn apply_two(
    device: &Device,
    ops: [&Op; 2],
    operands: Vec<Operand>,
    shapes: &[ResultShape; 2],
) -> [Option<Tensor>; 2] {
    let is_norm = matches!(ops[1], Op::Norm { .. });
    if is_norm && operands[..2].iter().any(|operand| operand.tensor().len() != size_of(shapes[0].dims)) {
        return one_after_another(device, ops, operands, shapes);
    }
    let views = views_of(device, &operands);
    // Operands live until both results have their memory.
    let mut operands: Vec<Option<Operand>> = operands.into_iter().map(Some).collect();
    let found = match is_norm {
        true => {
            let sum = target(ops[0], &mut operands, &shapes[0]);
            [Some(sum), Some(Tensor::stale(shapes[1].memory, shapes[1].dims, shapes[1].format))]
        }
        false => [None, Some(target(ops[0], &mut operands, &shapes[1]))],
    };
    if let Some(views) = views {
        launch(device, ops, &views, found.each_ref().map(|tensor| tensor.as_ref().map(View::of)), shapes);
    }
    found
}

fn launch(device: &Device, ops: [&Op; 2], operands: &[View], results: [Option<View>; 2], shapes: &[ResultShape; 2]) {
    let queue = &device.queue();
    let x = &operands[0];
    let (Some(y), place) = (&results[1], &shapes[0].place) else { unreachable!("the second result is written") };
    match (ops, &results[0]) {
        ([Op::Add, Op::Norm { kind, epsilon }], Some(sum)) => {
            let bias = operands.get(3).map(|bias| &bias.buffer);
            let residual = (&operands[1].buffer, &sum.buffer);
            let settings = norm_of(x, *kind, *epsilon);
            norm(queue, &settings, &x.buffer, Some(residual), &operands[2].buffer, bias, &y.buffer);
        }
        ([Op::ScaleMask { scale, alibi }, Op::Softmax], _) => {
            let slopes = slopes(device, x, place, *alibi);
            masked_softmax(queue, &scores_of(x), *scale, [&x.buffer, &slopes], &y.buffer);
        }
        ([Op::SoftmaxGradient, Op::ScaleMaskGradient { scale }], _) => {
            masked_softmax_gradient(queue, &scores_of(x), *scale, [&x.buffer, &operands[1].buffer], &y.buffer);
        }
        ([Op::Silu, Op::Multiply], _) => swiglu(queue, [&x.buffer, &operands[1].buffer], &y.buffer),
        _ => unreachable!("only what is one kernel is computed together"),
    }
}

/// Two operators whose operands turn out not to fit the kernel.
fn one_after_another(
    device: &Device,
    ops: [&Op; 2],
    mut operands: Vec<Operand>,
    shapes: &[ResultShape; 2],
) -> [Option<Tensor>; 2] {
    let others = operands.split_off(2);
    let first = super::apply(device, ops[0], operands, &shapes[0]);
    let given = std::iter::once(Operand::Borrowed(&first)).chain(others).collect();
    let second = super::apply(device, ops[1], given, &shapes[1]);
    [Some(first), Some(second)]
}
