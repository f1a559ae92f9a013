//! Appends to a block's forward operators the vector-Jacobian product of each, last to first.
//!
//! Recomputation is visible: backward then starts with forward operators again, from what was kept.

use std::collections::BTreeMap;

use crate::graph::{Block, BlockRole, Dim, DropoutSite, Element, OperatorId, OperatorKind, Tensor};
use crate::model::{Attention, LayerFeedForward, LayerRun, ModelSpec, Position, layer_runs};
use crate::program::{AttentionKernel, AttentionOperand, InputKind, Op, ValueId};
use crate::strategy::Recompute;

/// A block with untyped forward and backward steps.
#[derive(Clone, Debug)]
pub struct Draft {
    /// Name of the block.
    pub name: String,
    /// Values of both passes.
    pub values: Vec<DraftValue>,
    /// Parameters by name, with the value that stands for each.
    pub parameters: Vec<DraftParameter>,
    /// Forward steps.
    pub forward: Vec<Step>,
    /// Backward steps.
    pub backward: Vec<Step>,
    /// The activation that enters.
    pub input: Option<ValueId>,
    /// The activation that leaves.
    pub output: ValueId,
    /// The gradient of the output.
    pub output_gradient: Option<ValueId>,
    /// The gradient of the input.
    pub input_gradient: Option<ValueId>,
}

/// A value before it has a type.
#[derive(Clone, Debug)]
pub struct DraftValue {
    /// Name for readers.
    pub name: String,
    /// Shape and number format.
    pub tensor: Tensor,
}

/// A parameter of the block.
#[derive(Clone, Debug)]
pub struct DraftParameter {
    /// Name in the block.
    pub name: &'static str,
    /// Shape.
    pub tensor: Tensor,
    /// Whether it is the token embedding again.
    pub tied: bool,
    /// Its value in the forward pass.
    pub value: ValueId,
    /// Its gradient.
    pub gradient: Option<ValueId>,
}

/// A step before it has a type.
#[derive(Clone, Debug)]
pub enum Step {
    /// Index data.
    Input(InputKind, ValueId),
    /// An operator; the last value, if any, is one whose place the result takes where it is free.
    Compute(Op, Vec<ValueId>, ValueId, Option<ValueId>),
}

/// Why the blocks of a model cannot be differentiated, or `None` if they can.
pub fn undifferentiable(model: &ModelSpec) -> Option<&'static str> {
    let experts = |run: LayerRun| matches!(run.feed_forward, LayerFeedForward::Experts { .. });
    if matches!(model.attention, Attention::MultiLatent { .. }) {
        Some("latent attention is not compiled yet")
    } else if layer_runs(model).into_iter().any(experts) {
        Some("mixtures of experts are not compiled yet")
    } else {
        model.deviations.first().map(|deviation| deviation.reason())
    }
}

/// Differentiates a block of a model to which [`undifferentiable`] has no objection.
pub fn differentiate(block: &Block, model: &ModelSpec, recompute: Recompute, attention: AttentionKernel) -> Draft {
    let mut pass = Pass::new(block, model, attention);
    pass.append_forward();
    let forward_steps = pass.draft.forward.clone();
    let renamed = pass.append_recomputation(recompute, &forward_steps);
    pass.append_backward(&forward_steps, &renamed);
    pass.drop_unused();
    pass.draft
}

struct Pass<'a> {
    block: &'a Block,
    model: &'a ModelSpec,
    attention: AttentionKernel,
    draft: Draft,
    /// Value of each operator's result, after dropout.
    of_node: BTreeMap<OperatorId, ValueId>,
    /// Operator of each forward result.
    node_of: BTreeMap<ValueId, OperatorId>,
    /// Summands of each value's gradient.
    gradients: BTreeMap<ValueId, ValueId>,
}

impl<'a> Pass<'a> {
    fn new(block: &'a Block, model: &'a ModelSpec, attention: AttentionKernel) -> Pass<'a> {
        let name = match block.role {
            BlockRole::Embedding => "embedding".to_owned(),
            BlockRole::Layers(run) => format!("layers {run}"),
            BlockRole::Head => "head".to_owned(),
        };
        let draft = Draft {
            name,
            values: Vec::new(),
            parameters: Vec::new(),
            forward: Vec::new(),
            backward: Vec::new(),
            input: None,
            output: ValueId(0),
            output_gradient: None,
            input_gradient: None,
        };
        let (of_node, node_of, gradients) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Pass { block, model, attention, draft, of_node, node_of, gradients }
    }

    fn value(&mut self, name: String, tensor: Tensor) -> ValueId {
        self.draft.values.push(DraftValue { name, tensor });
        ValueId(self.draft.values.len() as u32 - 1)
    }

    fn tensor(&self, value: ValueId) -> &Tensor {
        &self.draft.values[value.0 as usize].tensor
    }

    fn append_forward(&mut self) {
        for node in self.block.graph.node_indices() {
            let operator = &self.block.graph[node];
            let value = self.value(operator.name.to_owned(), operator.output.clone());
            self.of_node.insert(node, value);
            self.node_of.insert(value, node);
            match operator.kind {
                OperatorKind::Parameter { tied } => {
                    let (name, tensor) = (operator.name, operator.output.clone());
                    self.draft.parameters.push(DraftParameter { name, tensor, tied, value, gradient: None });
                }
                OperatorKind::Input => self.append_input(operator.name, value),
                _ if self.attention == AttentionKernel::Flash && operator.attention_core => {
                    if let Some(operands) = self.flash_operands(node) {
                        self.draft.forward.push(Step::Compute(self.flash(), operands, value, None));
                    }
                    continue;
                }
                _ => {
                    let operands = self.block.operands(node).iter().map(|node| self.of_node[node]).collect();
                    let op = self.op_of(node);
                    self.draft.forward.push(Step::Compute(op, operands, value, None));
                }
            }
            if let Some(site) = operator.dropout {
                self.append_dropout(site, node, value);
            }
        }
        self.draft.output = self.of_node[&self.block.output];
    }

    /// Readers of the operator's result get what dropout leaves of it.
    fn append_dropout(&mut self, site: DropoutSite, node: OperatorId, value: ValueId) {
        let DraftValue { name, tensor } = self.draft.values[value.0 as usize].clone();
        let left = self.value(format!("{name} dropped"), tensor);
        self.draft.forward.push(Step::Compute(Op::Dropout(site), vec![value], left, None));
        self.of_node.insert(node, left);
        self.node_of.insert(left, node);
    }

    /// Query, keys and values of the attention core, for the operator that ends it.
    fn flash_operands(&self, node: OperatorId) -> Option<Vec<ValueId>> {
        let outside = |operand: &OperatorId| !self.block.graph[*operand].attention_core;
        let operands = self.block.operands(node);
        let values = operands.iter().copied().find(outside)?;
        let is_end = operands.iter().any(|operand| !outside(operand));
        // The first operator of the core reads query and keys; it is reached from the end by first operands.
        let mut first = operands.into_iter().find(|operand| !outside(operand)).filter(|_| is_end)?;
        while let Some(before) = self.block.operands(first).into_iter().find(|operand| !outside(operand)) {
            first = before;
        }
        let scored = self.block.operands(first);
        Some(vec![self.of_node[&scored[0]], self.of_node[&scored[1]], self.of_node[&values]])
    }

    fn flash(&self) -> Op {
        Op::FlashAttention { scale: score_scale(self.model), alibi: self.model.position == Position::Alibi }
    }

    fn append_input(&mut self, name: &str, value: ValueId) {
        match name {
            "token_ids" => self.draft.forward.push(Step::Input(InputKind::Tokens, value)),
            "position_ids" => self.draft.forward.push(Step::Input(InputKind::Positions, value)),
            "targets" => self.draft.forward.push(Step::Input(InputKind::Targets, value)),
            _ => self.draft.input = Some(value),
        }
    }

    fn op_of(&self, node: OperatorId) -> Op {
        match &self.block.graph[node].kind {
            OperatorKind::Lookup => Op::Lookup,
            OperatorKind::Contraction { .. } => Op::Contraction,
            OperatorKind::Norm(kind) => Op::Norm { kind: *kind, epsilon: self.model.norm_epsilon },
            OperatorKind::Add => Op::Add,
            OperatorKind::Multiply => Op::Multiply,
            OperatorKind::Subtract => Op::Subtract,
            OperatorKind::ScaleMask { alibi } => Op::ScaleMask { scale: score_scale(self.model), alibi: *alibi },
            OperatorKind::Softmax => Op::Softmax,
            OperatorKind::Gelu => Op::Gelu,
            OperatorKind::Silu => Op::Silu,
            OperatorKind::Rotary => Op::Rotary { base: self.model.rotary_base, scaling: self.model.rotary_scaling },
            OperatorKind::AsKeys => Op::Rename,
            OperatorKind::Cast => Op::MaskColumns(self.model.vocabulary.rows()),
            OperatorKind::ReduceMax(_) => Op::ReduceMax,
            OperatorKind::ReduceSum(_) => Op::ReduceSum,
            OperatorKind::Exp => Op::Exp,
            OperatorKind::Log => Op::Log,
            OperatorKind::Pick => Op::Pick,
            OperatorKind::SumTokens => Op::SumTokens,
            OperatorKind::Input
            | OperatorKind::Parameter { .. }
            | OperatorKind::GroupedContraction { .. }
            | OperatorKind::Concatenate
            | OperatorKind::TopK
            | OperatorKind::Dispatch
            | OperatorKind::Combine => unreachable!("`undifferentiable` names models with these operators"),
        }
    }

    /// Repeats forward steps at the start of backward; gives the new name of each repeated value.
    fn append_recomputation(&mut self, recompute: Recompute, forward: &[Step]) -> BTreeMap<ValueId, ValueId> {
        let mut renamed = BTreeMap::new();
        for step in forward {
            let Step::Compute(op, operands, result, _) = step else { continue };
            let repeated = match recompute {
                // What dropout left is not kept: its operand is, and the mask comes from a counter.
                Recompute::None => matches!(op, Op::Dropout(_)),
                // A flash kernel's backward computes its scores again by itself.
                Recompute::Selective => {
                    self.attention == AttentionKernel::Primitive
                        && self.block.graph[self.node_of[result]].attention_core
                }
                Recompute::Full | Recompute::Partial => true,
            };
            if repeated {
                let DraftValue { name, tensor } = self.draft.values[result.0 as usize].clone();
                let again = self.value(format!("{name} again"), tensor);
                let operands = operands.iter().map(|operand| *renamed.get(operand).unwrap_or(operand)).collect();
                self.draft.backward.push(Step::Compute(*op, operands, again, None));
                renamed.insert(*result, again);
            }
        }
        renamed
    }

    fn append_backward(&mut self, forward: &[Step], renamed: &BTreeMap<ValueId, ValueId>) {
        let output = self.draft.output;
        let seed = self.value(format!("{} gradient", self.name_of(output)), self.tensor(output).clone());
        if self.block.role == BlockRole::Head {
            self.draft.backward.push(Step::Compute(Op::Seed, Vec::new(), seed, None));
        } else {
            self.draft.output_gradient = Some(seed);
        }
        self.gradients.insert(output, seed);
        for step in forward.iter().rev() {
            let Step::Compute(op, operands, result, _) = step else { continue };
            let Some(gradient) = self.gradients.get(result).copied() else { continue };
            let now = |value: &ValueId| *renamed.get(value).unwrap_or(value);
            self.append_product(*op, operands, *result, gradient, &now);
        }
        let gradients = &self.gradients;
        self.draft.input_gradient = self.draft.input.and_then(|input| gradients.get(&input).copied());
        for parameter in &mut self.draft.parameters {
            parameter.gradient = gradients.get(&parameter.value).copied();
        }
    }

    /// The gradient of each operand that has one. `now` gives a forward value's name in backward.
    fn append_product(
        &mut self,
        op: Op,
        operands: &[ValueId],
        result: ValueId,
        gradient: ValueId,
        now: &dyn Fn(&ValueId) -> ValueId,
    ) {
        let at = |index: usize| now(&operands[index]);
        match op {
            Op::Lookup => {
                self.send(operands[1], Op::LookupGradient, vec![at(0), gradient], Some(operands[1]));
            }
            Op::Contraction => {
                self.send(operands[0], Op::Contraction, vec![gradient, at(1)], None);
                self.send(operands[1], Op::Contraction, vec![at(0), gradient], None);
            }
            Op::Norm { kind, epsilon } => {
                let op = Op::NormInputGradient { kind, epsilon };
                self.send(operands[0], op, vec![at(0), at(1), gradient], None);
                let op = Op::NormWeightGradient { kind, epsilon };
                self.send(operands[1], op, vec![at(0), gradient], None);
                if let Some(bias) = operands.get(2) {
                    self.send(*bias, Op::ReduceSum, vec![gradient], None);
                }
            }
            Op::Add => operands.iter().for_each(|operand| self.send_sum(*operand, gradient)),
            Op::Subtract => {
                self.send_sum(operands[0], gradient);
                // The maximum is only a shift: the loss does not depend on it.
                if !self.is_maximum(operands[1]) {
                    let negative = self.value(self.name_of(gradient), self.tensor(gradient).clone());
                    self.draft.backward.push(Step::Compute(Op::Scale(-1.0), vec![gradient], negative, None));
                    self.send_sum(operands[1], negative);
                }
            }
            Op::Multiply => {
                self.send(operands[0], Op::Multiply, vec![at(1), gradient], None);
                self.send(operands[1], Op::Multiply, vec![at(0), gradient], None);
            }
            Op::ScaleMask { scale, .. } => {
                self.send(operands[0], Op::ScaleMaskGradient { scale }, vec![gradient], None);
            }
            Op::FlashAttention { scale, alibi } => {
                let parts = [AttentionOperand::Query, AttentionOperand::Keys, AttentionOperand::Values];
                for (of, operand) in parts.into_iter().zip(operands) {
                    let op = Op::FlashAttentionGradient { of, scale, alibi };
                    self.send(*operand, op, vec![at(0), at(1), at(2), gradient], None);
                }
            }
            Op::Softmax => self.send(operands[0], Op::SoftmaxGradient, vec![now(&result), gradient], None),
            Op::Gelu => self.send(operands[0], Op::GeluGradient, vec![at(0), gradient], None),
            Op::Silu => self.send(operands[0], Op::SiluGradient, vec![at(0), gradient], None),
            Op::Rotary { base, scaling } => {
                self.send(operands[0], Op::RotaryGradient { base, scaling }, vec![gradient], None)
            }
            Op::Rename => self.send(operands[0], Op::Rename, vec![gradient], None),
            Op::Dropout(site) => self.send(operands[0], Op::Dropout(site), vec![gradient], None),
            // The gradient of a masked column is zero already: its exponential is.
            Op::Cast | Op::MaskColumns(_) => self.send(operands[0], Op::Cast, vec![gradient], None),
            Op::Exp => self.send(operands[0], Op::Multiply, vec![now(&result), gradient], None),
            Op::Log => self.send(operands[0], Op::Divide, vec![gradient, at(0)], None),
            Op::Pick => self.send(operands[0], Op::PickGradient, vec![at(1), gradient], Some(at(0))),
            // A broadcast of the gradient: elementwise operators broadcast missing dims themselves.
            Op::ReduceSum | Op::SumTokens => self.add_gradient(operands[0], gradient),
            Op::ReduceMax => {}
            Op::LookupGradient
            | Op::NormInputGradient { .. }
            | Op::NormWeightGradient { .. }
            | Op::Divide
            | Op::Scale(_)
            | Op::Seed
            | Op::ScaleMaskGradient { .. }
            | Op::SoftmaxGradient
            | Op::FlashAttentionGradient { .. }
            | Op::GeluGradient
            | Op::SiluGradient
            | Op::RotaryGradient { .. }
            | Op::PickGradient => unreachable!("operators of backward are not differentiated"),
        }
    }

    fn name_of(&self, value: ValueId) -> String {
        self.draft.values[value.0 as usize].name.clone()
    }

    fn is_maximum(&self, value: ValueId) -> bool {
        matches!(self.block.graph[self.node_of[&value]].kind, OperatorKind::ReduceMax(_))
    }

    fn has_gradient(&self, value: ValueId) -> bool {
        self.tensor(value).element != Element::Index
    }

    /// Computes a summand of a value's gradient.
    fn send(&mut self, to: ValueId, op: Op, operands: Vec<ValueId>, like: Option<ValueId>) {
        if !self.has_gradient(to) {
            return;
        }
        let tensor = self.tensor(to).clone();
        let summand = self.value(format!("{} gradient", self.name_of(to)), tensor);
        self.draft.backward.push(Step::Compute(op, operands, summand, like));
        self.add_gradient(to, summand);
    }

    /// Passes a gradient on, summed over dims that were broadcast.
    fn send_sum(&mut self, to: ValueId, gradient: ValueId) {
        let missing = |dim: &Dim| self.tensor(to).extent(dim.name).is_none();
        let broadcast = self.tensor(gradient).shape.iter().any(missing);
        if broadcast {
            self.send(to, Op::ReduceSum, vec![gradient], None);
        } else {
            self.add_gradient(to, gradient);
        }
    }

    fn add_gradient(&mut self, to: ValueId, summand: ValueId) {
        let sum = match self.gradients.get(&to).copied() {
            None => summand,
            Some(before) => {
                let sum = self.value(format!("{} gradient", self.name_of(to)), self.tensor(to).clone());
                // The summand with all dims comes first: the result of an elementwise operator has its dims.
                let fuller = self.tensor(before).shape.len() >= self.tensor(summand).shape.len();
                let operands = if fuller { vec![before, summand] } else { vec![summand, before] };
                self.draft.backward.push(Step::Compute(Op::Add, operands, sum, None));
                sum
            }
        };
        self.gradients.insert(to, sum);
    }

    /// Drops steps whose results nobody reads.
    fn drop_unused(&mut self) {
        let mut used: Vec<bool> = vec![false; self.draft.values.len()];
        let results = self.draft.parameters.iter().filter_map(|parameter| parameter.gradient);
        let ends = [Some(self.draft.output), self.draft.input_gradient];
        results.chain(ends.into_iter().flatten()).for_each(|value| used[value.0 as usize] = true);
        let mut keep = |steps: &mut Vec<Step>| {
            let mut kept: Vec<Step> = Vec::new();
            for step in steps.drain(..).rev() {
                if let Step::Compute(_, operands, result, like) = &step {
                    if !used[result.0 as usize] {
                        continue;
                    }
                    operands.iter().chain(like).for_each(|value| used[value.0 as usize] = true);
                } else if let Step::Input(_, result) = &step
                    && !used[result.0 as usize]
                {
                    continue;
                }
                kept.push(step);
            }
            kept.reverse();
            *steps = kept;
        };
        keep(&mut self.draft.backward);
        keep(&mut self.draft.forward);
    }
}

/// 1 / sqrt(width of a head).
fn score_scale(model: &ModelSpec) -> f64 {
    let width = match model.attention {
        Attention::MultiHead { num_attention_heads, head_dim, .. } => {
            head_dim.unwrap_or(model.hidden_size / num_attention_heads)
        }
        Attention::MultiLatent { nope_head_dim, rope_head_dim, .. } => nope_head_dim + rope_head_dim,
    };
    1.0 / (width as f64).sqrt()
}
