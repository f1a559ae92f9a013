//! The same cases on a device, whatever Vulkan driver there is: results written over NaN, operands borrowed and owned.

use runtime::device::Device;
use runtime::operators::{Accumulation, Operand, ResultShape, accumulate_contraction, apply};
use runtime::tensor::{Format, Memory, StepKind, Tensor};

use crate::{Case, Dims, close, expected};

/// The least fp32 number stands for minus infinity, which WGSL has not.
const LEAST: f32 = -3e38;

/// Checks a case on a device, unless the device lacks the number format.
pub fn check(case: &Case, operands: &[Tensor], format: Format) {
    let device = Device::wgpu().unwrap_or_else(|problem| panic!("{problem}"));
    if !device.has(format) {
        return;
    }
    let expected = expected(case, operands);
    for owned in [false, true] {
        let numbers = run(&device, case, operands, format, owned);
        let infinite = |x: f32| if x < LEAST { f32::NEG_INFINITY } else { x };
        let numbers: Vec<f32> = numbers.into_iter().map(infinite).collect();
        close(
            &format!(
                "{} on a device, {:?}, operands owned: {owned}",
                case.name,
                operands.first().map(|operand| &operand.dims)
            ),
            &numbers,
            &expected,
            format,
        );
    }
}

fn run(device: &Device, case: &Case, operands: &[Tensor], format: Format, owned: bool) -> Vec<f32> {
    let device = device.anew();
    device.poison_values();
    let memory = Memory::on(device);
    let result = ResultShape { memory: &memory, dims: &case.result, format, place: case.place };
    let once = || {
        let placed: Vec<Tensor> = operands.iter().map(|operand| operand.clone().into_memory(&memory)).collect();
        match owned {
            true => apply(&case.op, placed.into_iter().map(Operand::Owned).collect(), &result),
            false => apply(&case.op, placed.iter().map(Operand::Borrowed).collect(), &result),
        }
    };
    assert!(!memory.enter(StepKind::Training, 1), "the first pass computes nothing");
    drop(once());
    memory.lay_out(StepKind::Training, 1).unwrap_or_else(|error| panic!("{}: {error}", case.name));
    assert!(memory.enter(StepKind::Training, 1), "the second pass computes");
    let found = once();
    assert_eq!((&found.dims, found.format()), (&case.result, format), "{}", case.name);
    let numbers = found.numbers().unwrap_or_else(|error| panic!("{}: {error}", case.name));
    memory.leave();
    numbers
}

/// Puts a contraction and then adds it into fp32 numbers of a device, unless that lacks the operands' number format.
pub fn accumulates(name: &str, operands: &[Tensor; 2], result: &Dims, twice: &[f64]) {
    let device = Device::wgpu().unwrap_or_else(|problem| panic!("{problem}"));
    if !device.has(operands[0].format()) {
        return;
    }
    let memory = Memory::on(device);
    let mut into = Tensor::stale(&memory, result, Format::Single);
    let mut once = || {
        let [a, b] = operands.each_ref().map(|operand| operand.clone().into_memory(&memory));
        for how in [Accumulation::Set, Accumulation::Add] {
            accumulate_contraction(&mut into, &a, &b, &memory, how);
        }
    };
    assert!(!memory.enter(StepKind::Training, 1), "the first pass computes nothing");
    once();
    memory.lay_out(StepKind::Training, 1).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(memory.enter(StepKind::Training, 1), "the second pass computes");
    once();
    let numbers = into.numbers().unwrap_or_else(|error| panic!("{name}: {error}"));
    memory.leave();
    close(&format!("{name}, twice on a device"), &numbers, twice, Format::Single);
}
