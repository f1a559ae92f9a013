//! Gives every value of a block its distribution and inserts the conversions that the typing rules ask for.
//!
//! Two choices are made here; everything else follows from the types. A partial result is reduced where
//! it is first read, to the type of the residual stream (whole, or with sequence parallelism a part of the
//! sequence). Forward and backward convert for themselves: what forward gathered is not kept.

use std::collections::BTreeMap;

use ir::distribution::{Distribution, Operand, Place, SplitAxis, TypeError, infer};
use ir::graph::{Dim, DimName, Extent, Tensor};
use ir::placement::Placement;
use ir::program::{Body, Conversion, Instruction, Op, Parameter, Value, ValueId};
use ir::strategy::ZeroStage;

use ir::derivative::{Draft, DraftValue, Step};

/// Types a block.
pub fn insert_collectives(draft: Draft, placement: Placement) -> Body {
    let mut pass = Pass {
        placement,
        draft: &draft,
        values: Vec::new(),
        typed: BTreeMap::new(),
        converted: BTreeMap::new(),
        instructions: Vec::new(),
    };
    let input = draft.input.map(|input| pass.stream_value(input));
    draft.forward.iter().for_each(|step| pass.append(step));
    let output = pass.as_stream(draft.output);
    let forward = std::mem::take(&mut pass.instructions);

    pass.converted.clear();
    let output_gradient = draft.output_gradient.map(|gradient| pass.stream_value(gradient));
    draft.backward.iter().for_each(|step| pass.append(step));
    let input_gradient = draft.input_gradient.map(|gradient| pass.as_stream(gradient));
    let parameters = (0..draft.parameters.len()).map(|index| pass.accumulate(index)).collect();
    let backward = std::mem::take(&mut pass.instructions);
    let values = pass.values;
    Body {
        name: draft.name.clone(),
        parameters,
        values,
        forward,
        backward,
        kernels: Vec::new(),
        input,
        output,
        output_gradient,
        input_gradient,
    }
}

struct Pass<'a> {
    placement: Placement<'a>,
    draft: &'a Draft,
    values: Vec<Value>,
    /// Typed value of each draft value, as it was computed.
    typed: BTreeMap<ValueId, ValueId>,
    /// The same numbers in other distributions, of the current pass.
    converted: BTreeMap<(ValueId, Distribution), ValueId>,
    instructions: Vec<Instruction>,
}

impl Pass<'_> {
    fn value(&mut self, name: String, tensor: &Tensor, distribution: Distribution) -> ValueId {
        let rows = Extent::Fixed(self.placement.split.padded_rows);
        let whole = |dim: &Dim| if dim.name == DimName::Vocabulary { Dim { extent: rows, ..*dim } } else { *dim };
        let shape = tensor.shape.iter().map(whole).collect();
        self.values.push(Value { name, shape, element: tensor.element, distribution });
        ValueId(self.values.len() as u32 - 1)
    }

    fn distribution(&self, value: ValueId) -> Distribution {
        self.values[value.0 as usize].distribution
    }

    /// A value that arrives from outside the body.
    fn stream_value(&mut self, draft: ValueId) -> ValueId {
        let DraftValue { name, tensor } = self.drafted(draft);
        let value = self.value(name, &tensor, self.placement.stream(&tensor.dim_names()));
        self.typed.insert(draft, value);
        value
    }

    fn drafted(&self, draft: ValueId) -> DraftValue {
        self.draft.values[draft.0 as usize].clone()
    }

    fn append(&mut self, step: &Step) {
        match step {
            Step::Input(kind, draft) => {
                let value = self.stream_value(*draft);
                self.instructions.push(Instruction::Input(*kind, value));
            }
            Step::Compute(op, operands, result, like) => self.append_operator(*op, operands, *result, *like),
        }
    }

    /// Types an operator, converting its operands as long as the rules ask for it.
    fn append_operator(&mut self, op: Op, draft_operands: &[ValueId], result: ValueId, like: Option<ValueId>) {
        let mut operands: Vec<ValueId> = draft_operands.iter().map(|draft| self.current(*draft)).collect();
        let declared = like.map_or(Distribution::REPLICATED, |like| self.place_of(like));
        let DraftValue { name, tensor } = self.drafted(result);
        let result_dims: Vec<DimName> = tensor.shape.iter().map(|dim| dim.name).collect();
        let distribution = loop {
            match self.infer(op, &operands, &result_dims, declared) {
                Ok(distribution) => break self.placement.normal(distribution),
                Err(TypeError::Partial { operand, axis }) => {
                    assert!(axis != SplitAxis::Data, "only gradients of parameters are partial over replicas: {op:?}");
                    operands[operand] = self.reduced(operands[operand]);
                    // From here on the value is the reduced one, in backward too: only gathers are repeated.
                    self.typed.insert(draft_operands[operand], operands[operand]);
                }
                Err(TypeError::Convert { operand, axis, to }) => {
                    operands[operand] = self.placed(operands[operand], axis, to);
                }
            }
        };
        let value = self.value(name, &tensor, distribution);
        self.typed.insert(result, value);
        self.instructions.push(Instruction::Compute(op, operands, value));
    }

    /// How a value lies; a parameter as it is gathered, without loading it.
    fn place_of(&self, draft: ValueId) -> Distribution {
        match self.typed.get(&draft) {
            Some(value) => self.distribution(*value),
            None => {
                let dims = self.draft.values[draft.0 as usize].tensor.dim_names();
                self.placement.stored(dims).with(SplitAxis::Data, Place::Replicated)
            }
        }
    }

    fn infer(
        &self,
        op: Op,
        operands: &[ValueId],
        result_dims: &[DimName],
        declared: Distribution,
    ) -> Result<Distribution, TypeError> {
        let dims: Vec<Vec<DimName>> = operands.iter().map(|operand| self.dims(*operand)).collect();
        let typed: Vec<Operand> = operands
            .iter()
            .zip(&dims)
            .map(|(operand, dims)| Operand { dims, distribution: self.distribution(*operand) })
            .collect();
        infer(&op, &typed, result_dims, declared)
    }

    fn dims(&self, value: ValueId) -> Vec<DimName> {
        self.values[value.0 as usize].dim_names()
    }

    /// The typed value of a draft value; a parameter is loaded, and gathered over replicas, on first use.
    fn current(&mut self, draft: ValueId) -> ValueId {
        let parameter = self.draft.parameters.iter().position(|parameter| parameter.value == draft);
        let Some(index) = parameter else { return self.typed[&draft] };
        // The unconverted parameter is remembered per pass under a distribution that no conversion has.
        let key = (ValueId(u32::MAX - index as u32), Distribution::REPLICATED);
        if let Some(value) = self.converted.get(&key) {
            return *value;
        }
        let DraftValue { name, tensor } = self.drafted(draft);
        let stored = self.placement.stored(tensor.dim_names());
        let loaded = self.value(name, &tensor, stored);
        self.instructions.push(Instruction::Load(index as u32, loaded));
        let value = match stored.data {
            Place::Flat => {
                let whole = stored.with(SplitAxis::Data, Place::Replicated);
                self.convert(loaded, Conversion::AllGatherFlat, vec![SplitAxis::Data], whole)
            }
            _ => loaded,
        };
        self.converted.insert(key, value);
        value
    }

    /// A draft value in the type of the residual stream.
    fn as_stream(&mut self, draft: ValueId) -> ValueId {
        let value = self.typed[&draft];
        let mut axes = self.placement.tensor_axes().into_iter();
        let partial = axes.any(|axis| self.distribution(value).on(axis).is_partial());
        if partial { self.reduced(value) } else { value }
    }

    /// The value with its partial places on tensor axes reduced to the type of the stream.
    fn reduced(&mut self, value: ValueId) -> ValueId {
        let from = self.distribution(value);
        let all = self.placement.tensor_axes();
        let axes: Vec<SplitAxis> = all.iter().copied().filter(|axis| from.on(*axis).is_partial()).collect();
        let scattered = self.placement.splits_sequence(&self.dims(value));
        let place = |axes: &[SplitAxis], place| axes.iter().fold(from, |to, axis| to.with(*axis, place));
        let maximum = axes.iter().any(|axis| from.on(*axis) == Place::PartialMax);
        if scattered && axes == all {
            let dim = DimName::Sequence;
            return self.convert(
                value,
                Conversion::ReduceScatter(dim),
                axes.clone(),
                place(&axes, Place::Sharded(dim)),
            );
        }
        let reduction = if maximum { Conversion::AllReduceMax } else { Conversion::AllReduceSum };
        let whole = self.convert(value, reduction, axes.clone(), place(&axes, Place::Replicated));
        if scattered {
            return self.placed(whole, SplitAxis::Tensor, Place::Sharded(DimName::Sequence));
        }
        whole
    }

    /// The value placed in another way on an axis, and on the axis beside it where the dim is split over both.
    fn placed(&mut self, value: ValueId, axis: SplitAxis, to: Place) -> ValueId {
        let from = self.distribution(value);
        let (conversion, dim) = match (from.on(axis), to) {
            (Place::Replicated, Place::Sharded(dim)) => (Conversion::Slice(dim), dim),
            (Place::Sharded(dim), _) => (Conversion::AllGather(dim), dim),
            (found, to) => unreachable!("the rules ask for no conversion from {found:?} to {to:?}"),
        };
        let both = axis != SplitAxis::Data && !matches!(dim, DimName::KeyValueHeads | DimName::QueriesPerKeyValue);
        let axes: Vec<SplitAxis> = match both {
            true => self.placement.tensor_axes(),
            false => vec![axis],
        };
        let place = if matches!(conversion, Conversion::Slice(_)) { Place::Sharded(dim) } else { Place::Replicated };
        let target = axes.iter().fold(from, |target, axis| target.with(*axis, place));
        self.convert(value, conversion, axes, target)
    }

    fn convert(&mut self, value: ValueId, conversion: Conversion, axes: Vec<SplitAxis>, to: Distribution) -> ValueId {
        if let Some(converted) = self.converted.get(&(value, to)) {
            return *converted;
        }
        let Value { name, shape, element, .. } = self.values[value.0 as usize].clone();
        let result = self.value(name, &Tensor { shape, element }, to);
        self.instructions.push(Instruction::Convert(conversion, axes, value, result));
        self.converted.insert((value, to), result);
        result
    }

    /// Adds a parameter's gradient to the accumulated one; from ZeRO-2 on the owner's part only.
    fn accumulate(&mut self, index: usize) -> Parameter {
        let parameter = &self.draft.parameters[index];
        let (name, tensor, tied) = (parameter.name.to_owned(), parameter.tensor.clone(), parameter.tied);
        let stored = self.placement.stored(tensor.dim_names());
        let gradient = self.typed[&parameter.gradient.expect("every parameter has a gradient")];
        let early =
            self.placement.strategy.zero_stage >= ZeroStage::Gradients && self.placement.degree(SplitAxis::Data) > 1;
        let accumulated = match early {
            true => {
                let to = self.distribution(gradient).with(SplitAxis::Data, Place::Flat);
                self.convert(gradient, Conversion::ReduceScatterFlat, vec![SplitAxis::Data], to)
            }
            false => gradient,
        };
        self.instructions.push(Instruction::Accumulate(index as u32, accumulated));
        let rows = self.placement.split.padded_rows;
        let extent = |dim: &Dim| match (dim.name, dim.extent) {
            (DimName::Vocabulary, _) => (dim.name, rows),
            (name, Extent::Fixed(size)) => (name, size),
            (name, extent) => unreachable!("parameter dim {name:?} has extent {extent:?}"),
        };
        Parameter {
            name,
            shape: tensor.shape.iter().map(extent).collect(),
            stored,
            gradient: self.distribution(accumulated),
            tied,
        }
    }
}
