//! What one accelerator can do.

use ir::model::DType;
use ir::units::{Bytes, BytesPerSecond, FlopsPerSecond};
use serde::{Deserialize, Serialize};

use crate::sourced::Sourced;

/// One accelerator model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceProfile {
    /// Name; clusters refer to it.
    pub name: String,
    /// Memory that the driver reports in total.
    pub memory: Sourced<Bytes>,
    /// Memory bandwidth, peak.
    pub memory_bandwidth: Sourced<BytesPerSecond>,
    /// Share of the peak bandwidth that streaming kernels reach.
    pub memory_efficiency: Sourced<f64>,
    /// Dense matrix peaks by number format.
    pub peak: PeakRates,
    /// Efficiency of matrix kernels by shape.
    pub matmul: MatmulProfile,
    /// Share of the matrix peak that a flash-attention kernel reaches, forward and backward together.
    pub flash_attention_efficiency: Sourced<f64>,
    /// Memory that the driver's context takes before the first tensor.
    pub context_memory: Sourced<Bytes>,
}

/// Dense matrix peaks, without sparsity.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeakRates {
    /// bf16 with fp32 accumulation; absent where the device has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bf16: Option<Sourced<FlopsPerSecond>>,
    /// fp16 with fp32 accumulation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp16: Option<Sourced<FlopsPerSecond>>,
    /// fp32 as frameworks run it by default (no TF32).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp32: Option<Sourced<FlopsPerSecond>>,
}

/// Efficiency of a matrix product `m × k × n`: `maximum · w/(w + 1/2) · k/(k + half_depth)`, where `w`
/// is the number of 128 × 128 tiles of the result over `multiprocessors`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulProfile {
    /// Efficiency of large shapes, relative to the peak.
    pub maximum: Sourced<f64>,
    /// Depth at which half of the maximum is lost to prologue and epilogue.
    pub half_depth: Sourced<f64>,
    /// Streaming multiprocessors or compute units.
    pub multiprocessors: Sourced<u64>,
}

impl DeviceProfile {
    /// The dense peak for a number format, if the device has one.
    pub fn peak_rate(&self, dtype: DType) -> Option<&Sourced<FlopsPerSecond>> {
        match dtype {
            DType::BF16 => self.peak.bf16.as_ref(),
            DType::FP16 => self.peak.fp16.as_ref(),
            DType::FP32 => self.peak.fp32.as_ref(),
        }
    }
}
