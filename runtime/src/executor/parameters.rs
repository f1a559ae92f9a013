//! What a rank holds of the parameters of its stage: weights, accumulated gradients, optimizer state.

use std::collections::BTreeMap;
use std::ops::Range;

use ir::distribution::{Distribution, Place};
use ir::graph::DimName;
use ir::model::DType;
use ir::plan::Plan;
use ir::program::{Parameter, ParameterRef, Program};
use ir::strategy::ZeroStage;
use ir::verify::stage_chain;

use crate::initial::{flat_range, local_region, logical_name};
use crate::place::RankPlace;
use crate::random::Region;
use crate::tensor::{Dims, Format, Memory, Tensor, ValuesMut, size_of};

/// A parameter on one rank.
#[derive(Debug)]
pub struct Held {
    /// Logical name: `embedding/…`, `layer 3/…`, `head/…`.
    pub name: String,
    /// The part of the whole parameter that the rank's tensors are of, the data axis apart.
    pub region: Region,
    /// As stored: the region, or with ZeRO-3 a part of its elements in order.
    pub weight: Tensor,
    /// Sum of gradients so far, in fp32: of the region, or from ZeRO-2 on of the owned part.
    pub gradient: Option<Tensor>,
    /// Whether this step has added to the gradient.
    pub accumulated: bool,
    /// The owned elements of the region in order.
    pub owned: Range<usize>,
    /// Master weights of the owned part, where weights are not fp32.
    pub master: Option<Tensor>,
    /// First moments of the owned part.
    pub first: Tensor,
    /// Second moments of the owned part.
    pub second: Tensor,
    /// Whether weight decay applies.
    pub decays: bool,
}

/// Parameters of a rank's stage.
pub type Parameters = BTreeMap<ParameterRef, Held>;

/// Where weights come from: fills elements `range` of a region of a parameter, row-major.
pub type Fill<'a> = dyn FnMut(&str, &Parameter, &Region, Range<u64>, &mut [f32]) -> Result<(), crate::Error> + 'a;

/// Makes the parameters of a rank's stage. Only the rank's own parts are ever in memory.
///
/// # Errors
/// Those of `fill`.
pub fn make_parameters(
    plan: &Plan,
    program: &Program,
    place: &RankPlace,
    memory: &Memory,
    decays: &dyn Fn(&str, &Parameter) -> bool,
    fill: &mut Fill,
) -> Result<Parameters, crate::Error> {
    let stage = &plan.stages[place.stage];
    let both_ends = stage.embedding && stage.head;
    let mut held = Parameters::new();
    for (body, layer) in stage_chain(plan, program, stage) {
        for (number, parameter) in (0..).zip(&program.bodies[body as usize].parameters) {
            // On one stage the head's use of the embedding is the embedding itself.
            if parameter.tied && both_ends {
                continue;
            }
            let reference = ParameterRef { body, layer, parameter: number };
            let name = logical_name(program, reference);
            let decays = decays(&name, parameter);
            held.insert(reference, make(plan, parameter, name, decays, place, memory, fill)?);
        }
    }
    Ok(held)
}

fn make(
    plan: &Plan,
    parameter: &Parameter,
    name: String,
    decays: bool,
    place: &RankPlace,
    memory: &Memory,
    fill: &mut Fill,
) -> Result<Held, crate::Error> {
    let region = local_region(&parameter.shape, parameter.stored, &place.place);
    let whole = 0..region.elements();
    let part = flat_range(region.elements(), place.place.data);
    let owned = match plan.strategy.zero_stage {
        ZeroStage::None => whole.clone(),
        ZeroStage::OptimizerState | ZeroStage::Gradients | ZeroStage::Parameters => part.clone(),
    };
    let range = |distribution: Distribution| match distribution.data {
        Place::Flat => part.clone(),
        Place::Replicated | Place::Sharded(_) | Place::PartialSum | Place::PartialMax => whole.clone(),
    };
    let dims = |range: &Range<u64>| -> Vec<(DimName, usize)> {
        match *range == whole {
            true => {
                parameter.shape.iter().zip(&region.spans).map(|((name, _), s)| (*name, s.length as usize)).collect()
            }
            false => vec![(DimName::Hidden, (range.end - range.start) as usize)],
        }
    };
    let stored = range(parameter.stored);
    let host = memory.of_host();
    let numbers = |range: Range<u64>, fill: &mut Fill| {
        let mut tensor = Tensor::zeros(&host, &dims(&range), Format::Single);
        fill(&name, parameter, &region, range, tensor.singles_mut()).map(|()| tensor)
    };
    let weight = numbers(stored, fill)?;
    let state = |dims: &Dims| Tensor::zeros(memory, dims, Format::Single);
    let own_dims = [(DimName::Hidden, (owned.end - owned.start) as usize)];
    let (weight, master) = match plan.model.dtype {
        DType::FP32 => (weight, None),
        DType::BF16 | DType::FP16 => {
            let master = numbers(owned.clone(), fill)?;
            let rounded = Tensor::from_numbers(&host, &weight.dims, Format::Brain, weight.singles());
            (rounded, Some(master))
        }
    };
    let gradient = state(&dims(&range(parameter.gradient)));
    debug_assert!(size_of(&gradient.dims) as u64 >= owned.end - owned.start, "{name}: the owner has its gradient");
    Ok(Held {
        name: name.clone(),
        weight: weight.into_memory(memory),
        gradient: Some(gradient),
        accumulated: false,
        owned: owned.start as usize..owned.end as usize,
        master: master.map(|master| master.into_memory(memory)),
        first: state(&own_dims),
        second: state(&own_dims),
        decays,
        region,
    })
}

impl Held {
    /// The gradient in the host's memory, for a collective; [`Held::give_gradient`] ends the loan. A device keeps its
    /// copy.
    ///
    /// # Errors
    /// A device that failed.
    pub fn lend_gradient(&mut self, host: &Memory) -> Result<Tensor, crate::Error> {
        let gradient = self.gradient.as_ref().expect("each sum starts once");
        match gradient.is_on_device() {
            true => gradient.on_host(host),
            false => Ok(self.gradient.take().expect("it was there")),
        }
    }

    /// Takes a lent gradient back.
    pub fn give_gradient(&mut self, gradient: Tensor) {
        match &self.gradient {
            Some(own) => own.copy_from(&gradient),
            None => self.gradient = Some(gradient),
        }
    }

    /// Changes the weight's elements in the host's memory.
    ///
    /// # Errors
    /// Those of `change`, and a device that failed.
    pub fn change_weight(
        &mut self,
        host: &Memory,
        change: impl FnOnce(ValuesMut) -> Result<(), crate::Error>,
    ) -> Result<(), crate::Error> {
        if !self.weight.is_on_device() {
            return change(self.weight.values_mut());
        }
        let mut weight = self.weight.on_host(host)?;
        change(weight.values_mut())?;
        self.weight.copy_from(&weight);
        Ok(())
    }

    /// The owned elements' places in a tensor of the region or of the owned part.
    pub fn owned_in(&self, tensor: &Tensor) -> Range<usize> {
        if tensor.len() == self.owned.len() { 0..tensor.len() } else { self.owned.clone() }
    }
}
