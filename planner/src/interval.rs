//! How far a step may be from its prediction: the stack's error on runs that a fit has not seen, wider where less is known.

use cost_models::machine::Machine;
use hardware_profiles::device::MatmulFormat;
use hardware_profiles::interval::interval_widths;
use hardware_profiles::stack::ComparedRuns;
use ir::model::DType;
use ir::units::Seconds;

/// Widest half interval, relative to the prediction.
const MOST_WIDTH: f64 = 0.9;

/// What a prediction is made of, as far as its interval depends on it.
#[derive(Clone, Copy, Debug)]
pub struct Circumstances<'a> {
    /// Device, cluster and stack.
    pub machine: &'a Machine,
    /// The model's number format.
    pub dtype: DType,
    /// GPUs.
    pub gpus: u64,
    /// Name of the software where a table of runs gives it.
    pub framework: Option<&'a str>,
    /// Whether cells that decide time were blank.
    pub open: bool,
}

/// The 90 % interval of a predicted step.
pub fn interval(step: Seconds, circumstances: Circumstances) -> (Seconds, Seconds) {
    let width = half_width(circumstances);
    (step * (1.0 - width), step * (1.0 + width))
}

/// Half of the interval, relative to the prediction.
fn half_width(circumstances: Circumstances) -> f64 {
    let stack = &circumstances.machine.stack;
    let outside = stack.compared.as_ref().is_some_and(|compared| is_outside(compared, circumstances));
    let widths = interval_widths();
    let blank = if circumstances.open { widths.blank.value } else { 1.0 };
    let outside = if outside { widths.outside.value } else { 1.0 };
    (stack.relative_error_90.value * blank * outside).min(MOST_WIDTH)
}

/// Whether no run like this was compared with the stack's predictions: on another device, with more GPUs, in another
/// number format, or of software of another name.
fn is_outside(compared: &ComparedRuns, Circumstances { machine, dtype, gpus, framework, .. }: Circumstances) -> bool {
    let format = format_name(machine.matmul_format, dtype);
    !compared.devices.contains(&machine.device.name)
        || gpus > compared.most_gpus
        || !compared.formats.iter().any(|known| known == format)
        || framework.is_some_and(|name| !compared.frameworks.iter().any(|known| known == name))
}

/// Name of the number format of a model's matrix products, as tables of runs have it.
pub fn format_name(format: MatmulFormat, dtype: DType) -> &'static str {
    match (format, dtype) {
        (MatmulFormat::Fp8, _) => "fp8",
        (MatmulFormat::Fp4, _) => "nvfp4",
        (MatmulFormat::Model, DType::BF16) => "bf16",
        (MatmulFormat::Model, DType::FP16) => "fp16",
        (MatmulFormat::Model, DType::FP32) => "fp32",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hardware_profiles::{find_cluster, find_device, find_stack};

    #[test]
    fn intervals_widen_where_less_is_known() {
        let cluster = find_cluster("dgx-a100-80gb", "test").expect("it is built in");
        let device = find_device(&cluster.device, "test").expect("it is built in");
        let mut stack = find_stack("megatron-deepspeed-2022", "test").expect("it is built in");
        stack.relative_error_90.value = 0.1;
        stack.compared = Some(ComparedRuns {
            devices: vec![device.name.clone()],
            frameworks: vec!["Megatron-DeepSpeed".to_owned()],
            formats: vec!["bf16".to_owned()],
            most_gpus: 512,
        });
        let mut machine = Machine { node_gpus: 8, matmul_format: MatmulFormat::Model, device, cluster, stack };
        let [blank, outside] = [&interval_widths().blank, &interval_widths().outside].map(|width| width.value);
        assert!(blank >= 1.0 && outside > blank, "{blank} {outside}");
        let rows = [
            (512, DType::BF16, None, false, 0.1),
            (512, DType::BF16, Some("Megatron-DeepSpeed"), true, 0.1 * blank),
            (520, DType::BF16, None, false, 0.1 * outside),
            (512, DType::FP16, None, false, 0.1 * outside),
            (512, DType::BF16, Some("another"), true, 0.1 * outside * blank),
        ];
        for (gpus, dtype, framework, open, expected) in rows {
            let found = half_width(Circumstances { machine: &machine, dtype, gpus, framework, open });
            assert!((found - expected).abs() < 1e-12, "{gpus} {dtype:?} {framework:?} {open}: {found}");
        }
        machine.device.name = "another".to_owned();
        let other = Circumstances { machine: &machine, dtype: DType::BF16, gpus: 8, framework: None, open: false };
        assert!((half_width(other) - 0.1 * outside).abs() < 1e-12);
    }
}
