//! Distribution types of tensors, and the one typing rule of each operator.
//!
//! On each axis a tensor is replicated, sharded along a dim, or a partial result that still has to be
//! reduced. Collectives are the only conversions (the same idea as OneFlow's SBP signatures, arXiv
//! 2110.15032). A program is well typed if [`infer`] accepts every operator; the compiler inserts the
//! conversions that [`infer`] asks for, so there is no second statement of the rules.

use serde::{Deserialize, Serialize};

use crate::graph::DimName;
use crate::program::Op;

/// An axis along which the ranks of a stage differ.
///
/// The tensor axis of the mesh is two axes here: `Tensor` runs over groups of key-value heads, `Query`
/// over ranks that share key-value heads. Its degree is 1 unless there are fewer key-value heads than
/// tensor ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum SplitAxis {
    /// Replicas.
    Data,
    /// Groups of key-value heads.
    Tensor,
    /// Ranks that share key-value heads.
    Query,
}

/// What a rank holds of a tensor along one axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Place {
    /// The whole.
    Replicated,
    /// An equal part along a dim.
    Sharded(DimName),
    /// An equal part of the elements in order, padded: how ZeRO shards a parameter.
    Flat,
    /// A summand.
    PartialSum,
    /// A candidate for the maximum.
    PartialMax,
}

/// What a rank holds of a tensor along every axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Distribution {
    /// Along [`SplitAxis::Data`].
    pub data: Place,
    /// Along [`SplitAxis::Tensor`].
    pub tensor: Place,
    /// Along [`SplitAxis::Query`].
    pub query: Place,
}

/// An operand as the typing rules see it.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// Names of its dims.
    pub dims: &'a [DimName],
    /// Its distribution.
    pub distribution: Distribution,
}

/// Why an operator is not well typed, and the conversion that mends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TypeError {
    /// The operand is partial on the axis and must be reduced first.
    Partial {
        /// Which operand.
        operand: usize,
        /// Where.
        axis: SplitAxis,
    },
    /// The operand must be placed in another way on the axis.
    Convert {
        /// Which operand.
        operand: usize,
        /// Where.
        axis: SplitAxis,
        /// The place that fits.
        to: Place,
    },
}

impl SplitAxis {
    /// All axes.
    pub const ALL: [SplitAxis; 3] = [SplitAxis::Data, SplitAxis::Tensor, SplitAxis::Query];
}

impl Place {
    /// Whether the tensor is a partial result here.
    pub fn is_partial(self) -> bool {
        matches!(self, Place::PartialSum | Place::PartialMax)
    }
}

impl Distribution {
    /// The whole tensor on every rank.
    pub const REPLICATED: Distribution =
        Distribution { data: Place::Replicated, tensor: Place::Replicated, query: Place::Replicated };

    /// The place on an axis.
    pub fn on(&self, axis: SplitAxis) -> Place {
        match axis {
            SplitAxis::Data => self.data,
            SplitAxis::Tensor => self.tensor,
            SplitAxis::Query => self.query,
        }
    }

    /// The same distribution with another place on an axis.
    pub fn with(mut self, axis: SplitAxis, place: Place) -> Distribution {
        match axis {
            SplitAxis::Data => self.data = place,
            SplitAxis::Tensor => self.tensor = place,
            SplitAxis::Query => self.query = place,
        }
        self
    }
}

/// The type of an operator's result.
///
/// `result_dims` are the dims of the result. `declared` is used by operators whose result may be any part
/// of a whole that each rank can compute (`Op::LookupGradient`, `Op::PickGradient`).
///
/// # Errors
/// The first conversion that would make the operands fit.
pub fn infer(
    op: &Op,
    operands: &[Operand],
    result_dims: &[DimName],
    declared: Distribution,
) -> Result<Distribution, TypeError> {
    let mut result = Distribution::REPLICATED;
    for axis in SplitAxis::ALL {
        result = result.with(axis, infer_on(op, axis, operands, result_dims, declared.on(axis))?);
    }
    Ok(result)
}

fn infer_on(
    op: &Op,
    axis: SplitAxis,
    operands: &[Operand],
    result_dims: &[DimName],
    declared: Place,
) -> Result<Place, TypeError> {
    let places: Vec<Place> = operands.iter().map(|operand| operand.distribution.on(axis)).collect();
    if is_linear(op) && places.iter().all(|place| *place == Place::PartialSum) {
        return Ok(Place::PartialSum);
    }
    // Linear in the gradient: summands of it give summands of the table's.
    let whole_table = !matches!(declared, Place::Sharded(_));
    if *op == Op::LookupGradient && places == [Place::Replicated, Place::PartialSum] && whole_table {
        return Ok(Place::PartialSum);
    }
    if let Some(operand) = places.iter().position(|place| place.is_partial()) {
        return Err(TypeError::Partial { operand, axis });
    }
    let convert = |operand, to| Err(TypeError::Convert { operand, axis, to });
    if let Some(operand) = places.iter().position(|place| *place == Place::Flat) {
        return convert(operand, Place::Replicated);
    }
    if let (true, Place::Sharded(dim)) = (is_free(op), declared)
        && operands.iter().all(|operand| !operand.dims.contains(&dim))
    {
        return match places.iter().position(|place| *place != Place::Replicated) {
            Some(operand) => convert(operand, Place::Replicated),
            None => Ok(declared),
        };
    }
    let whole = whole_dims(op);
    for (index, place) in places.iter().enumerate() {
        if matches!(place, Place::Sharded(dim) if whole.contains(dim)) {
            return convert(index, Place::Replicated);
        }
    }
    let Some(dim) = shared_dim(op, axis, &places)? else { return Ok(Place::Replicated) };
    for (index, operand) in operands.iter().enumerate() {
        if operand.dims.contains(&dim) && places[index] != Place::Sharded(dim) {
            return convert(index, Place::Sharded(dim));
        }
    }
    if result_dims.contains(&dim) {
        return Ok(Place::Sharded(dim));
    }
    match op {
        Op::Contraction
        | Op::ReduceSum
        | Op::SumTokens
        | Op::Lookup
        | Op::LookupGradient
        | Op::NormWeightGradient { .. }
        | Op::FlashAttentionGradient { .. }
        | Op::Pick => Ok(Place::PartialSum),
        Op::ReduceMax => Ok(Place::PartialMax),
        _ => convert(0, Place::Replicated),
    }
}

/// The dim that the operands are sharded along on an axis. Where two differ, the one that is split along
/// the sequence is gathered: a weight stays where it is.
fn shared_dim(op: &Op, axis: SplitAxis, places: &[Place]) -> Result<Option<DimName>, TypeError> {
    let mut shared: Option<(usize, DimName)> = None;
    for (index, place) in places.iter().enumerate() {
        let Place::Sharded(dim) = *place else { continue };
        match shared {
            Some((first, other)) if other != dim => {
                let operand = if dim == DimName::Sequence || *op != Op::Contraction { index } else { first };
                return Err(TypeError::Convert { operand, axis, to: Place::Replicated });
            }
            Some(_) => {}
            None => shared = Some((index, dim)),
        }
    }
    Ok(shared.map(|(_, dim)| dim))
}

/// Whether a sum of summands of the operands is a summand of the result.
fn is_linear(op: &Op) -> bool {
    matches!(op, Op::Add | Op::Scale(_) | Op::Rename | Op::Cast | Op::ReduceSum)
}

/// Whether each rank can compute any part of the result from whole operands.
fn is_free(op: &Op) -> bool {
    matches!(op, Op::LookupGradient | Op::PickGradient)
}

/// Dims that an operator needs whole on every rank.
fn whole_dims(op: &Op) -> &'static [DimName] {
    match op {
        Op::Norm { .. } | Op::NormInputGradient { .. } | Op::NormWeightGradient { .. } => &[DimName::Hidden],
        Op::Softmax | Op::SoftmaxGradient => &[DimName::KeySequence],
        Op::ScaleMask { .. } | Op::ScaleMaskGradient { .. } => &[DimName::Sequence, DimName::KeySequence],
        Op::FlashAttention { .. } | Op::FlashAttentionGradient { .. } => {
            &[DimName::Sequence, DimName::KeySequence, DimName::HeadDim, DimName::ValueDim]
        }
        Op::Dropout(_) => &[DimName::Hidden, DimName::KeySequence],
        Op::Rotary { .. } | Op::RotaryGradient { .. } => &[DimName::Sequence, DimName::KeySequence, DimName::HeadDim],
        _ => &[],
    }
}
