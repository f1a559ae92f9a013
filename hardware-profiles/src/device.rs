//! What one accelerator can do.

use ir::model::DType;
use ir::units::{Bytes, BytesPerSecond, FlopsPerSecond, Watts};
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
    /// The same of FlashAttention-2's kernel, where others are made for the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flash_attention_2_efficiency: Option<Sourced<f64>>,
    /// Time of the attention core's backward pass over that of its forward pass; by FLOPs where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flash_attention_backward: Option<Sourced<f64>>,
    /// Rates of other operators where the memory's bandwidth does not give them; classes are listed once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub operators: Vec<OperatorRate>,
    /// Memory that the driver's context takes before the first tensor.
    pub context_memory: Sourced<Bytes>,
    /// Limit of the board's power.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub board_power: Option<Sourced<Watts>>,
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
    /// fp8 with fp32 accumulation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp8: Option<Sourced<FlopsPerSecond>>,
    /// 4-bit floats with block scales (NVFP4, MXFP4).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp4: Option<Sourced<FlopsPerSecond>>,
}

/// Number format in which matrix products of layers are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum MatmulFormat {
    /// The model's own format.
    #[default]
    Model,
    /// Operands converted to fp8.
    Fp8,
    /// Operands converted to 4-bit floats with block scales.
    Fp4,
}

/// Operators that are no matrix products, by what their time depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OperatorClass {
    /// LayerNorm and RMSNorm.
    Norm,
    /// GeLU and SiLU.
    Activation,
    /// Softmax cross-entropy and the conversion before it.
    Loss,
    /// Rows looked up in a table.
    Embedding,
    /// Biases, residual sums, rotary positions and the like.
    Arithmetic,
}

/// Rates of a class of operators: bytes that its forward operators read and write, each tensor once, over the
/// time of a pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OperatorRate {
    /// The class.
    pub class: OperatorClass,
    /// Over the time of the forward pass.
    pub forward: Sourced<BytesPerSecond>,
    /// Over the time of the backward pass.
    pub backward: Sourced<BytesPerSecond>,
}

/// Efficiency of a matrix product `m × k × n`: `maximum · w/(w + 1/2) · k/(k + half_depth)`, where `w`
/// is the number of 128 × 128 tiles of the result over `multiprocessors`; with `edges` in place of tiles
/// `maximum · m/(m + rows) · n/(n + columns) · k/(k + half_depth)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulProfile {
    /// Efficiency of large shapes, relative to the peak.
    pub maximum: Sourced<f64>,
    /// Depth at which half of the maximum is lost to prologue and epilogue.
    pub half_depth: Sourced<f64>,
    /// Streaming multiprocessors or compute units.
    pub multiprocessors: Sourced<u64>,
    /// Speed of products with extents off the multiples that kernels load, relative to those on them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub misaligned: Option<Misaligned>,
    /// For processors whose tiles are small against any matrix.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub edges: Option<MatmulEdges>,
}

/// Speed of products whose depth or columns are off the multiples that kernels load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Misaligned {
    /// Multiples of 8 elements, but not of 64.
    pub eights: Sourced<f64>,
    /// No multiples of 8 elements, so that rows do not begin at 16 bytes, in batches of small products: attention's.
    pub odd: Sourced<f64>,
    /// The same in a large product by itself: a vocabulary's.
    pub odd_alone: Sourced<f64>,
}

/// Extents of a result at which half of the maximum is lost to packing operands and to narrow tiles.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulEdges {
    /// Rows.
    pub rows: Sourced<f64>,
    /// Columns.
    pub columns: Sourced<f64>,
}

impl OperatorClass {
    /// All classes.
    pub const ALL: [OperatorClass; 5] = [
        OperatorClass::Norm,
        OperatorClass::Activation,
        OperatorClass::Loss,
        OperatorClass::Embedding,
        OperatorClass::Arithmetic,
    ];
}

impl DeviceProfile {
    /// The rates of a class of operators, if the profile has them.
    pub fn operator_rate(&self, class: OperatorClass) -> Option<&OperatorRate> {
        self.operators.iter().find(|rate| rate.class == class)
    }

    /// The dense peak of matrix products, if the device has one.
    pub fn product_peak(&self, format: MatmulFormat, dtype: DType) -> Option<&Sourced<FlopsPerSecond>> {
        match format {
            MatmulFormat::Model => self.peak_rate(dtype),
            MatmulFormat::Fp8 => self.peak.fp8.as_ref(),
            MatmulFormat::Fp4 => self.peak.fp4.as_ref(),
        }
    }

    /// The dense peak for a number format, if the device has one.
    pub fn peak_rate(&self, dtype: DType) -> Option<&Sourced<FlopsPerSecond>> {
        match dtype {
            DType::BF16 => self.peak.bf16.as_ref(),
            DType::FP16 => self.peak.fp16.as_ref(),
            DType::FP32 => self.peak.fp32.as_ref(),
        }
    }
}
