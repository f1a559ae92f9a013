//! Keys, shapes and made-up values of the reference's parameters.

use std::collections::BTreeMap;

use crate::model::{Attention, Bias, FeedForward, ModelSpec, NormKind, Position};

/// Whole parameters by key, row-major, dims in the order of the model's graph.
///
/// A key is the block and the parameter's name in it: `embedding/embedding.token`,
/// `layer 0/attention.query.weight`, `head/final_norm.weight`. A tied head has no key of its own.
pub type Parameters = BTreeMap<String, Vec<f64>>;

/// Made-up parameters lie in ±`BOUND`, so that their standard deviation is 0.2/√3 = 0.115.
const BOUND: f64 = 0.2;

/// The sizes of a model that the reference supports.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub hidden: usize,
    pub key_value_heads: usize,
    pub queries_per_key_value: usize,
    pub head_dim: usize,
    pub intermediate: usize,
    pub vocabulary_rows: usize,
    pub num_layers: usize,
}

/// Made-up parameters, a pure function of seed, key and index: norm weights around 1, all others around 0.
///
/// # Panics
/// If the model has latent attention or experts.
pub fn initial_parameters(model: &ModelSpec, seed: u64) -> Parameters {
    let fill = |(key, shape): (String, Vec<usize>)| {
        let centre = if key.ends_with("norm.weight") { 1.0 } else { 0.0 };
        let value = |index| centre + BOUND * (2.0 * unit_hash(seed, &key, index) - 1.0);
        let values = (0..shape.iter().product()).map(value).collect();
        (key, values)
    };
    parameter_shapes(model).into_iter().map(fill).collect()
}

/// A number in [0, 1) that looks random: FNV-1a over seed and key, then one SplitMix64 draw at `index`.
pub(super) fn unit_hash(seed: u64, key: &str, index: usize) -> f64 {
    const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const FNV_PRIME: u64 = 0x0000_0100_0000_01b3;
    const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
    let bytes = seed.to_le_bytes().into_iter().chain(key.bytes());
    let state = bytes.fold(FNV_OFFSET, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(FNV_PRIME));
    let mut bits = state.wrapping_add(GOLDEN_GAMMA.wrapping_mul(index as u64 + 1));
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^= bits >> 31;
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// The sizes of a model.
///
/// # Panics
/// If the model has latent attention or experts.
pub(super) fn sizes(model: &ModelSpec) -> Sizes {
    let Attention::MultiHead { num_attention_heads, head_dim, .. } = model.attention else {
        panic!("the reference has multi-head attention only, {} has {:?}", model.name, model.attention)
    };
    let (FeedForward::Gelu { intermediate_size } | FeedForward::SwiGlu { intermediate_size }) = model.feed_forward
    else {
        panic!("the reference has dense feed-forward only, {} has {:?}", model.name, model.feed_forward)
    };
    let key_value_heads = model.attention.num_key_value_heads();
    Sizes {
        hidden: model.hidden_size as usize,
        key_value_heads: key_value_heads as usize,
        queries_per_key_value: (num_attention_heads / key_value_heads) as usize,
        head_dim: head_dim.unwrap_or(model.hidden_size / num_attention_heads) as usize,
        intermediate: intermediate_size as usize,
        vocabulary_rows: model.vocabulary.rows() as usize,
        num_layers: model.num_layers as usize,
    }
}

/// Shape of each parameter by key.
pub(super) fn parameter_shapes(model: &ModelSpec) -> BTreeMap<String, Vec<usize>> {
    let Sizes { hidden, vocabulary_rows, num_layers, .. } = sizes(model);
    let mut shapes = BTreeMap::from([("embedding/embedding.token".to_owned(), vec![vocabulary_rows, hidden])]);
    if model.position == Position::Learned {
        let rows = model.max_sequence_length.tokens() as usize;
        shapes.insert("embedding/embedding.position".to_owned(), vec![rows, hidden]);
    }
    if model.embedding_norm {
        add_norm(&mut shapes, model, "embedding/embedding.norm");
    }
    for layer in 0..num_layers {
        add_layer(&mut shapes, model, layer);
    }
    add_norm(&mut shapes, model, "head/final_norm");
    if !model.tied_embedding {
        shapes.insert("head/head.weight".to_owned(), vec![vocabulary_rows, hidden]);
    }
    shapes
}

fn add_layer(shapes: &mut BTreeMap<String, Vec<usize>>, model: &ModelSpec, layer: usize) {
    let Sizes { hidden, key_value_heads: heads, queries_per_key_value: group, head_dim, intermediate, .. } =
        sizes(model);
    let (some, all) = (model.bias != Bias::None, model.bias == Bias::All);
    let mut linear = |name: &str, input: &[usize], output: &[usize], bias: bool| {
        shapes.insert(format!("layer {layer}/{name}.weight"), [input, output].concat());
        if bias {
            shapes.insert(format!("layer {layer}/{name}.bias"), output.to_vec());
        }
    };
    linear("attention.query", &[hidden], &[heads, group, head_dim], some);
    linear("attention.key", &[hidden], &[heads, head_dim], some);
    linear("attention.value", &[hidden], &[heads, head_dim], some);
    linear("attention.output", &[heads, group, head_dim], &[hidden], all);
    if matches!(model.feed_forward, FeedForward::SwiGlu { .. }) {
        linear("feed_forward.gate", &[hidden], &[intermediate], all);
    }
    linear("feed_forward.up", &[hidden], &[intermediate], all);
    linear("feed_forward.down", &[intermediate], &[hidden], all);
    add_norm(shapes, model, &format!("layer {layer}/attention.norm"));
    add_norm(shapes, model, &format!("layer {layer}/feed_forward.norm"));
}

fn add_norm(shapes: &mut BTreeMap<String, Vec<usize>>, model: &ModelSpec, name: &str) {
    let shape = vec![model.hidden_size as usize];
    if model.norm == NormKind::LayerNorm {
        shapes.insert(format!("{name}.bias"), shape.clone());
    }
    shapes.insert(format!("{name}.weight"), shape);
}
