//! Every GPU kernel on whatever Vulkan driver there is, against the operators of processor cores and against the
//! interpreter in fp64: odd sizes included, results written over NaN.
//!
//! WGSL knows no bf16: there the kernels run in fp32, and in both formats on devices that say they have both.

use runtime::gpu_check::cases::CASES;
use runtime::gpu_check::checks::Checks;
use runtime::gpu_check::device::{Device, Driver};
use runtime::gpu_check::reference::Reference;

/// Runs all cases. A host without a Vulkan driver fails: a check that finds no device is no check.
fn check_all(reference: Reference) {
    let device = Device::open(Driver::Wgpu, "this test").unwrap_or_else(|problem| panic!("{problem}"));
    let mut wrong = Vec::new();
    for (name, case) in CASES {
        let mut checks = Checks::new(&device, reference);
        case(&mut checks);
        assert!(!checks.found.is_empty(), "{name} compares something");
        let largest = checks.found.iter().map(|comparison| comparison.largest_error).fold(0.0, f64::max);
        eprintln!("{name}: {} results, largest error {largest:.1e} of a result's largest number", checks.found.len());
        wrong.extend(checks.found.into_iter().filter(|comparison| comparison.wrong.is_some()));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn kernels_give_what_operators_on_cores_do() {
    check_all(Reference::Operators);
}

#[test]
fn kernels_give_what_the_interpreter_does() {
    check_all(Reference::Interpreter);
}
