//! Builds the graph of a model: embedding, one block for each run of identical layers, head.

use petgraph::graph::{DiGraph, NodeIndex};

use super::{
    Block, BlockRole, Dim, DimName, DropoutSite, Element, Extent, Fusion, ModelGraph, Operand, Operator, OperatorKind,
    Tensor,
};
use crate::model::{Attention, Bias, LayerFeedForward, LayerRun, ModelSpec, NormKind, Position, layer_runs};

/// Builds the graph of a model.
pub fn build_graph(model: &ModelSpec) -> ModelGraph {
    let mut blocks = vec![embedding_block(model)];
    for (index, run) in layer_runs(model).iter().enumerate() {
        blocks.push(layer_block(model, index, run));
    }
    blocks.push(head_block(model));
    ModelGraph { blocks }
}

const MICRO_BATCH: Dim = Dim { name: DimName::MicroBatch, extent: Extent::MicroBatch };
const SEQUENCE: Dim = Dim { name: DimName::Sequence, extent: Extent::Sequence };
const KEY_SEQUENCE: Dim = Dim { name: DimName::KeySequence, extent: Extent::Sequence };

fn fixed(name: DimName, size: u64) -> Dim {
    Dim { name, extent: Extent::Fixed(size) }
}

/// Appends operators to a block; every method returns the node of the new tensor.
struct BlockBuilder {
    graph: DiGraph<Operator, Operand>,
    attention_core: bool,
}

impl BlockBuilder {
    fn new() -> BlockBuilder {
        BlockBuilder { graph: DiGraph::new(), attention_core: false }
    }

    fn source(&mut self, name: &'static str, kind: OperatorKind, shape: Vec<Dim>, element: Element) -> NodeIndex {
        let output = Tensor { shape, element };
        self.graph.add_node(Operator { name, kind, output, fusion: None, attention_core: false, dropout: None })
    }

    fn input(&mut self, name: &'static str, shape: Vec<Dim>, element: Element) -> NodeIndex {
        self.source(name, OperatorKind::Input, shape, element)
    }

    fn parameter(&mut self, name: &'static str, shape: Vec<Dim>) -> NodeIndex {
        self.source(name, OperatorKind::Parameter { tied: false }, shape, Element::Model)
    }

    fn apply(
        &mut self,
        name: &'static str,
        kind: OperatorKind,
        operands: &[NodeIndex],
        shape: Vec<Dim>,
        fusion: impl Into<Option<Fusion>>,
    ) -> NodeIndex {
        let element = match kind {
            OperatorKind::Cast => Element::Single,
            _ => self.element_of(operands),
        };
        let output = Tensor { shape, element };
        let fusion = fusion.into();
        let attention_core = self.attention_core;
        let node = self.graph.add_node(Operator { name, kind, output, fusion, attention_core, dropout: None });
        for (position, operand) in operands.iter().enumerate() {
            self.graph.add_edge(*operand, node, Operand(position));
        }
        node
    }

    /// The number format of a result: that of the first operand which is no index.
    fn element_of(&self, operands: &[NodeIndex]) -> Element {
        let elements = operands.iter().map(|operand| self.graph[*operand].output.element);
        elements.clone().find(|element| *element != Element::Index).unwrap_or(Element::Index)
    }

    /// An elementwise operator: the result has the first operand's shape.
    fn elementwise(
        &mut self,
        name: &'static str,
        kind: OperatorKind,
        operands: &[NodeIndex],
        fusion: impl Into<Option<Fusion>>,
    ) -> NodeIndex {
        let shape = self.graph[operands[0]].output.shape.clone();
        self.apply(name, kind, operands, shape, fusion)
    }

    /// A contraction: the result keeps all dims that are not summed over, the first operand's first.
    fn contraction(&mut self, name: &'static str, left: NodeIndex, right: NodeIndex, over: &[DimName]) -> NodeIndex {
        let shape = self.contracted_shape(left, right, over, &[]);
        self.apply(name, OperatorKind::Contraction { over: over.to_vec() }, &[left, right], shape, None)
    }

    fn contracted_shape(&self, left: NodeIndex, right: NodeIndex, over: &[DimName], routed: &[DimName]) -> Vec<Dim> {
        let mut shape: Vec<Dim> = Vec::new();
        for dim in self.graph[left].output.shape.iter().chain(&self.graph[right].output.shape) {
            let kept = !over.contains(&dim.name) && !routed.contains(&dim.name);
            if kept && !shape.iter().any(|seen| seen.name == dim.name) {
                shape.push(*dim);
            }
        }
        shape
    }

    /// A projection by a new parameter, and its bias if there is one.
    fn project(
        &mut self,
        names: [&'static str; 3],
        input: NodeIndex,
        weight: Vec<Dim>,
        over: &[DimName],
        bias: Option<Fusion>,
    ) -> NodeIndex {
        let [name, weight_name, bias_name] = names;
        let bias_shape: Vec<Dim> = weight.iter().filter(|dim| !over.contains(&dim.name)).copied().collect();
        let weight = self.parameter(weight_name, weight);
        let product = self.contraction(name, input, weight, over);
        match bias {
            None => product,
            Some(fusion) => {
                let bias = self.parameter(bias_name, bias_shape);
                self.elementwise(bias_name, OperatorKind::Add, &[product, bias], fusion)
            }
        }
    }

    fn norm(&mut self, names: [&'static str; 3], kind: NormKind, input: NodeIndex, dim: Dim) -> NodeIndex {
        let [name, weight_name, bias_name] = names;
        let weight = self.parameter(weight_name, vec![dim]);
        let mut operands = vec![input, weight];
        if kind == NormKind::LayerNorm {
            operands.push(self.parameter(bias_name, vec![dim]));
        }
        self.elementwise(name, OperatorKind::Norm(kind), &operands, None)
    }

    /// Lets training drop elements of a result.
    fn drop_at(&mut self, site: DropoutSite, node: NodeIndex) {
        self.graph[node].dropout = Some(site);
    }

    fn finish(self, role: BlockRole, count: u64, output: NodeIndex) -> Block {
        Block { role, count, graph: self.graph, output }
    }
}

fn hidden_dim(model: &ModelSpec) -> Dim {
    fixed(DimName::Hidden, model.hidden_size)
}

fn vocabulary_dim(model: &ModelSpec) -> Dim {
    fixed(DimName::Vocabulary, model.vocabulary.rows())
}

fn embedding_block(model: &ModelSpec) -> Block {
    let mut b = BlockBuilder::new();
    let hidden = hidden_dim(model);
    let ids = b.input("token_ids", vec![MICRO_BATCH, SEQUENCE], Element::Index);
    let table = b.parameter("embedding.token", vec![vocabulary_dim(model), hidden]);
    let mut output =
        b.apply("token_lookup", OperatorKind::Lookup, &[ids, table], vec![MICRO_BATCH, SEQUENCE, hidden], None);
    if model.position == Position::Learned {
        let rows = fixed(DimName::Position, model.max_sequence_length.tokens());
        let positions = b.input("position_ids", vec![SEQUENCE], Element::Index);
        let table = b.parameter("embedding.position", vec![rows, hidden]);
        let vectors =
            b.apply("position_lookup", OperatorKind::Lookup, &[positions, table], vec![SEQUENCE, hidden], None);
        output = b.elementwise("position_add", OperatorKind::Add, &[output, vectors], None);
    }
    if model.embedding_norm {
        let names = ["embedding_norm", "embedding.norm.weight", "embedding.norm.bias"];
        output = b.norm(names, model.norm, output, hidden);
    }
    b.drop_at(DropoutSite::Embedding, output);
    b.finish(BlockRole::Embedding, 1, output)
}

fn layer_block(model: &ModelSpec, index: usize, run: &LayerRun) -> Block {
    let mut b = BlockBuilder::new();
    let hidden = hidden_dim(model);
    let stream = b.input("layer_input", vec![MICRO_BATCH, SEQUENCE, hidden], Element::Model);
    let names = ["attention_norm", "attention.norm.weight", "attention.norm.bias"];
    let normed = b.norm(names, model.norm, stream, hidden);
    let context = match model.attention {
        Attention::MultiHead { .. } => multi_head(&mut b, model, normed),
        Attention::MultiLatent { .. } => multi_latent(&mut b, model, normed),
    };
    let stream = output_projection(&mut b, model, context, stream);
    let names = ["feed_forward_norm", "feed_forward.norm.weight", "feed_forward.norm.bias"];
    let normed = b.norm(names, model.norm, stream, hidden);
    let output = feed_forward(&mut b, model, run.feed_forward, normed, stream);
    b.finish(BlockRole::Layers(index), run.count, output)
}

/// Heads of the model as dims: key-value heads, and queries that share one.
fn head_dims(model: &ModelSpec) -> [Dim; 2] {
    let key_value_heads = model.attention.num_key_value_heads();
    [
        fixed(DimName::KeyValueHeads, key_value_heads),
        fixed(DimName::QueriesPerKeyValue, model.attention.num_attention_heads() / key_value_heads),
    ]
}

fn multi_head(b: &mut BlockBuilder, model: &ModelSpec, normed: NodeIndex) -> NodeIndex {
    let [heads, group] = head_dims(model);
    let Attention::MultiHead { num_attention_heads, head_dim, .. } = model.attention else {
        unreachable!("called for multi-head attention only")
    };
    let width = head_dim.unwrap_or(model.hidden_size / num_attention_heads);
    let (head, value) = (fixed(DimName::HeadDim, width), fixed(DimName::ValueDim, width));
    let bias = (model.bias != Bias::None).then_some(Fusion::BiasEpilogue);
    let hidden = hidden_dim(model);
    let over = [DimName::Hidden];
    let names = ["query", "attention.query.weight", "attention.query.bias"];
    let mut query = b.project(names, normed, vec![hidden, heads, group, head], &over, bias);
    let names = ["key", "attention.key.weight", "attention.key.bias"];
    let mut key = b.project(names, normed, vec![hidden, heads, head], &over, bias);
    let names = ["value", "attention.value.weight", "attention.value.bias"];
    let value = b.project(names, normed, vec![hidden, heads, value], &over, bias);
    if model.position == Position::Rotary {
        query = b.elementwise("query_rotary", OperatorKind::Rotary, &[query], None);
        key = b.elementwise("key_rotary", OperatorKind::Rotary, &[key], None);
    }
    attention_core(b, model, query, key, value)
}

/// Multi-head latent attention without absorbed matrices: keys and values are expanded in training.
fn multi_latent(b: &mut BlockBuilder, model: &ModelSpec, normed: NodeIndex) -> NodeIndex {
    let Attention::MultiLatent { query_rank, key_value_rank, nope_head_dim, rope_head_dim, value_head_dim, .. } =
        model.attention
    else {
        unreachable!("called for latent attention only")
    };
    let [heads, group] = head_dims(model);
    let hidden = hidden_dim(model);
    let query_rank = fixed(DimName::QueryRank, query_rank);
    let key_value_rank = fixed(DimName::KeyValueRank, key_value_rank);
    let nope = fixed(DimName::HeadDim, nope_head_dim);
    let rope = fixed(DimName::RopeDim, rope_head_dim);
    let whole = fixed(DimName::HeadDim, nope_head_dim + rope_head_dim);
    let value_dim = fixed(DimName::ValueDim, value_head_dim);

    let down = [DimName::Hidden];
    let names = ["query_down", "attention.query_down.weight", ""];
    let latent = b.project(names, normed, vec![hidden, query_rank], &down, None);
    let names = ["query_norm", "attention.query_norm.weight", "attention.query_norm.bias"];
    let latent = b.norm(names, NormKind::RmsNorm, latent, query_rank);
    let names = ["query_up", "attention.query_up.weight", ""];
    let query = b.project(names, latent, vec![query_rank, heads, group, whole], &[DimName::QueryRank], None);
    let query = b.elementwise("query_rotary", OperatorKind::Rotary, &[query], None);

    let names = ["key_value_down", "attention.key_value_down.weight", ""];
    let latent = b.project(names, normed, vec![hidden, key_value_rank], &down, None);
    let names = ["key_value_norm", "attention.key_value_norm.weight", "attention.key_value_norm.bias"];
    let latent = b.norm(names, NormKind::RmsNorm, latent, key_value_rank);
    let names = ["key_rope_down", "attention.key_rope_down.weight", ""];
    let shared = b.project(names, normed, vec![hidden, rope], &down, None);
    let shared = b.elementwise("key_rotary", OperatorKind::Rotary, &[shared], None);
    let up = [DimName::KeyValueRank];
    let names = ["key_up", "attention.key_up.weight", ""];
    let key = b.project(names, latent, vec![key_value_rank, heads, nope], &up, None);
    let key =
        b.apply("key_join", OperatorKind::Concatenate, &[key, shared], vec![MICRO_BATCH, SEQUENCE, heads, whole], None);
    let names = ["value_up", "attention.value_up.weight", ""];
    let value = b.project(names, latent, vec![key_value_rank, heads, value_dim], &up, None);
    attention_core(b, model, query, key, value)
}

/// Scores, scale and mask, softmax, weighted sum of values: what flash attention computes in one kernel.
fn attention_core(
    b: &mut BlockBuilder,
    model: &ModelSpec,
    query: NodeIndex,
    key: NodeIndex,
    value: NodeIndex,
) -> NodeIndex {
    let [heads, group] = head_dims(model);
    let value_dim = *b.graph[value].output.shape.last().expect("a value has dims");
    let key = as_keys(b, "keys", key);
    let value = as_keys(b, "values", value);
    b.attention_core = true;
    let shape = vec![MICRO_BATCH, heads, group, SEQUENCE, KEY_SEQUENCE];
    let over = vec![DimName::HeadDim];
    let scores = b.apply("scores", OperatorKind::Contraction { over }, &[query, key], shape, None);
    let mask = OperatorKind::ScaleMask { alibi: model.position == Position::Alibi };
    let scores = b.elementwise("scale_mask", mask, &[scores], Fusion::ScaleMaskSoftmax);
    let weights = b.elementwise("softmax", OperatorKind::Softmax, &[scores], Fusion::ScaleMaskSoftmax);
    b.drop_at(DropoutSite::Attention, weights);
    let shape = vec![MICRO_BATCH, SEQUENCE, heads, group, value_dim];
    let over = vec![DimName::KeySequence];
    let context = b.apply("context", OperatorKind::Contraction { over }, &[weights, value], shape, None);
    b.attention_core = false;
    context
}

/// The same tensor with its positions named as those of keys.
fn as_keys(b: &mut BlockBuilder, name: &'static str, source: NodeIndex) -> NodeIndex {
    let renamed = |dim: &Dim| if dim.name == DimName::Sequence { KEY_SEQUENCE } else { *dim };
    let shape = b.graph[source].output.shape.iter().map(renamed).collect();
    b.apply(name, OperatorKind::AsKeys, &[source], shape, None)
}

fn output_projection(b: &mut BlockBuilder, model: &ModelSpec, context: NodeIndex, stream: NodeIndex) -> NodeIndex {
    let [heads, group] = head_dims(model);
    let value_dim = *b.graph[context].output.shape.last().expect("a context has dims");
    let over = [DimName::KeyValueHeads, DimName::QueriesPerKeyValue, DimName::ValueDim];
    let names = ["attention_output", "attention.output.weight", "attention.output.bias"];
    let weight = vec![heads, group, value_dim, hidden_dim(model)];
    let bias = (model.bias == Bias::All).then_some(Fusion::BiasResidual);
    let output = b.project(names, context, weight, &over, bias);
    b.drop_at(DropoutSite::AttentionOutput, output);
    b.elementwise("attention_residual", OperatorKind::Add, &[output, stream], Fusion::BiasResidual)
}

fn feed_forward(
    b: &mut BlockBuilder,
    model: &ModelSpec,
    kind: LayerFeedForward,
    normed: NodeIndex,
    stream: NodeIndex,
) -> NodeIndex {
    let hidden = hidden_dim(model);
    let inner = |size| fixed(DimName::Intermediate, size);
    let all_biases = model.bias == Bias::All;
    let output = match kind {
        LayerFeedForward::Gelu { intermediate_size } => {
            let names = ["up", "feed_forward.up.weight", "feed_forward.up.bias"];
            let bias = all_biases.then_some(Fusion::BiasActivation);
            let up = b.project(names, normed, vec![hidden, inner(intermediate_size)], &[DimName::Hidden], bias);
            let active = b.elementwise("gelu", OperatorKind::Gelu, &[up], Fusion::BiasActivation);
            let names = ["down", "feed_forward.down.weight", "feed_forward.down.bias"];
            let bias = all_biases.then_some(Fusion::BiasResidual);
            b.project(names, active, vec![inner(intermediate_size), hidden], &[DimName::Intermediate], bias)
        }
        LayerFeedForward::SwiGlu { intermediate_size } => {
            let names = [
                ["gate", "feed_forward.gate.weight", "feed_forward.gate.bias"],
                ["up", "feed_forward.up.weight", "feed_forward.up.bias"],
                ["down", "feed_forward.down.weight", "feed_forward.down.bias"],
            ];
            swiglu(b, names, ["silu", "gated"], normed, [hidden, inner(intermediate_size)], all_biases)
        }
        LayerFeedForward::Experts { num_experts, experts_per_token, intermediate_size, num_shared_experts } => {
            let routed = experts(b, model, normed, [num_experts, experts_per_token, intermediate_size]);
            if num_shared_experts == 0 {
                routed
            } else {
                let names = [
                    ["shared_gate", "shared_expert.gate.weight", ""],
                    ["shared_up", "shared_expert.up.weight", ""],
                    ["shared_down", "shared_expert.down.weight", ""],
                ];
                let width = inner(num_shared_experts * intermediate_size);
                let shared = swiglu(b, names, ["shared_silu", "shared_gated"], normed, [hidden, width], false);
                b.elementwise("expert_sum", OperatorKind::Add, &[routed, shared], None)
            }
        }
    };
    b.drop_at(DropoutSite::FeedForwardOutput, output);
    b.elementwise("feed_forward_residual", OperatorKind::Add, &[output, stream], Fusion::BiasResidual)
}

/// SiLU(x · gate) · (x · up), then down; `dims` are the residual stream and the width between.
fn swiglu(
    b: &mut BlockBuilder,
    names: [[&'static str; 3]; 3],
    activations: [&'static str; 2],
    input: NodeIndex,
    dims: [Dim; 2],
    biases: bool,
) -> NodeIndex {
    let [hidden, inner] = dims;
    let bias = biases.then_some(Fusion::BiasActivation);
    let gate = b.project(names[0], input, vec![hidden, inner], &[DimName::Hidden], bias);
    let up = b.project(names[1], input, vec![hidden, inner], &[DimName::Hidden], bias);
    let active = b.elementwise(activations[0], OperatorKind::Silu, &[gate], Fusion::BiasActivation);
    let gated = b.elementwise(activations[1], OperatorKind::Multiply, &[active, up], Fusion::BiasActivation);
    let bias = biases.then_some(Fusion::BiasResidual);
    b.project(names[2], gated, vec![inner, hidden], &[DimName::Intermediate], bias)
}

/// Router, dispatch, expert SwiGLU, combine; `sizes` are experts, experts per token, expert width.
fn experts(b: &mut BlockBuilder, model: &ModelSpec, normed: NodeIndex, sizes: [u64; 3]) -> NodeIndex {
    let hidden = hidden_dim(model);
    let expert = fixed(DimName::Expert, sizes[0]);
    let choice = fixed(DimName::Choice, sizes[1]);
    let inner = fixed(DimName::ExpertIntermediate, sizes[2]);
    let scored = fixed(DimName::ScoredExpert, sizes[0]);
    let logits = b.project(["router", "router.weight", ""], normed, vec![hidden, scored], &[DimName::Hidden], None);
    let scores = b.elementwise("router_softmax", OperatorKind::Softmax, &[logits], None);
    let weights = b.apply("top_k", OperatorKind::TopK, &[scores], vec![MICRO_BATCH, SEQUENCE, choice], None);
    let routed = vec![MICRO_BATCH, SEQUENCE, choice, hidden];
    let tokens = b.apply("dispatch", OperatorKind::Dispatch, &[normed, weights], routed, None);
    let gate = grouped(b, ["expert_gate", "expert.gate.weight"], tokens, vec![expert, hidden, inner], DimName::Hidden);
    let up = grouped(b, ["expert_up", "expert.up.weight"], tokens, vec![expert, hidden, inner], DimName::Hidden);
    let active = b.elementwise("expert_silu", OperatorKind::Silu, &[gate], Fusion::BiasActivation);
    let gated = b.elementwise("expert_gated", OperatorKind::Multiply, &[active, up], Fusion::BiasActivation);
    let names = ["expert_down", "expert.down.weight"];
    let down = grouped(b, names, gated, vec![expert, inner, hidden], DimName::ExpertIntermediate);
    b.apply("combine", OperatorKind::Combine, &[down, weights], vec![MICRO_BATCH, SEQUENCE, hidden], None)
}

fn grouped(
    b: &mut BlockBuilder,
    names: [&'static str; 2],
    input: NodeIndex,
    weight: Vec<Dim>,
    over: DimName,
) -> NodeIndex {
    let weight = b.parameter(names[1], weight);
    let shape = b.contracted_shape(input, weight, &[over], &[DimName::Expert]);
    b.apply(names[0], OperatorKind::GroupedContraction { over: vec![over] }, &[input, weight], shape, None)
}

fn head_block(model: &ModelSpec) -> Block {
    let mut b = BlockBuilder::new();
    let hidden = hidden_dim(model);
    let vocabulary = vocabulary_dim(model);
    let stream = b.input("head_input", vec![MICRO_BATCH, SEQUENCE, hidden], Element::Model);
    let targets = b.input("targets", vec![MICRO_BATCH, SEQUENCE], Element::Index);
    let normed = b.norm(["final_norm", "final_norm.weight", "final_norm.bias"], model.norm, stream, hidden);
    let kind = OperatorKind::Parameter { tied: model.tied_embedding };
    let weight = b.source("head.weight", kind, vec![vocabulary, hidden], Element::Model);
    let logits = b.contraction("logits", normed, weight, &[DimName::Hidden]);
    let loss = cross_entropy(&mut b, logits, targets);
    b.finish(BlockRole::Head, 1, loss)
}

/// log(sum(exp(x − max))) + max − x[target], summed over tokens, in primitive steps and fp32.
fn cross_entropy(b: &mut BlockBuilder, logits: NodeIndex, targets: NodeIndex) -> NodeIndex {
    let fused = Fusion::CrossEntropy;
    let per_token = vec![MICRO_BATCH, SEQUENCE];
    let logits = b.elementwise("logits_cast", OperatorKind::Cast, &[logits], None);
    let maximum = b.apply("row_max", OperatorKind::ReduceMax(DimName::Vocabulary), &[logits], per_token.clone(), fused);
    let shifted = b.elementwise("shift", OperatorKind::Subtract, &[logits, maximum], fused);
    let exponent = b.elementwise("exp", OperatorKind::Exp, &[shifted], fused);
    let sum = b.apply("exp_sum", OperatorKind::ReduceSum(DimName::Vocabulary), &[exponent], per_token.clone(), fused);
    let log_sum = b.elementwise("log_sum", OperatorKind::Log, &[sum], fused);
    let picked = b.apply("target_logit", OperatorKind::Pick, &[shifted, targets], per_token, fused);
    let token_loss = b.elementwise("token_loss", OperatorKind::Subtract, &[log_sum, picked], fused);
    b.apply("loss_sum", OperatorKind::SumTokens, &[token_loss], Vec::new(), fused)
}
