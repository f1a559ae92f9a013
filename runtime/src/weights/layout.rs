//! Where a model's parameters lie in the tensors of its checkpoint, as offsets and strides.

use std::collections::BTreeMap;

use ir::error::Problem;
use ir::graph::{BlockRole, DimName, Extents, Operator, OperatorKind, build_graph};
use ir::model::ModelSpec;

use super::architecture::{Architecture, Factor, Row, architecture};

/// Parts of a tensor that holds query, key and value.
const THIRDS: u64 = 3;

/// One of our parameters as a strided part of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Location {
    /// Our key: `embedding/…`, `layer 3/…`, `head/…`.
    pub key: String,
    /// Our dims with whole extents, outermost first; rows added for the tensor axis are not counted.
    pub shape: Vec<(DimName, u64)>,
    /// The tensor's name without the architecture's prefix.
    pub tensor: String,
    /// The tensor's shape.
    pub tensor_shape: Vec<u64>,
    /// Element of the tensor that holds our first.
    pub offset: u64,
    /// Elements of the tensor between neighbours along each of our dims.
    pub strides: Vec<u64>,
    /// Whether the parameter is the token embedding, used by the head.
    pub tied: bool,
}

/// Every parameter of a model, in the order of the model's blocks.
///
/// # Errors
/// That no architecture has the model's parameters.
pub(super) fn locate_parameters(model: &ModelSpec) -> Result<(Architecture, Vec<Location>), Problem> {
    let architecture = architecture(model)?;
    let mut locations = Vec::new();
    let mut first_layer = 0;
    for block in &build_graph(model).blocks {
        let layers = match block.role {
            BlockRole::Layers(_) => first_layer..first_layer + block.count,
            BlockRole::Embedding | BlockRole::Head => 0..1,
        };
        for layer in layers.clone() {
            locations.extend(block.parameters().map(|operator| locate(architecture, block.role, layer, operator)));
        }
        if matches!(block.role, BlockRole::Layers(_)) {
            first_layer = layers.end;
        }
    }
    Ok((architecture, locations))
}

fn locate(architecture: Architecture, role: BlockRole, layer: u64, operator: &Operator) -> Location {
    let tied = operator.kind == OperatorKind::Parameter { tied: true };
    let block = match role {
        BlockRole::Embedding => "embedding".to_owned(),
        BlockRole::Layers(_) => format!("layer {layer}"),
        BlockRole::Head => "head".to_owned(),
    };
    let name = if tied { "embedding.token" } else { operator.name };
    let row = architecture.rows().iter().find(|row| row.ours == name);
    let row = row.expect("the architecture was chosen because it has the model's parameters");
    let none = Extents { micro_batch: 0, sequence_length: 0 };
    let shape: Vec<_> = operator.output.shape.iter().map(|dim| (dim.name, dim.extent.value(none))).collect();
    let (tensor_shape, offset, strides) = fold(row, &shape);
    Location {
        key: format!("{block}/{}", operator.name),
        shape,
        tensor: row.theirs.replace("{}", &layer.to_string()),
        tensor_shape,
        offset,
        strides,
        tied,
    }
}

/// Shape of the tensor, and offset and strides of our parameter in it.
fn fold(row: &Row, shape: &[(DimName, u64)]) -> (Vec<u64>, u64, Vec<u64>) {
    let extents: BTreeMap<DimName, u64> = shape.iter().copied().collect();
    let extent = |factor: &Factor| match factor {
        Factor::Dim(name) => extents[name],
        Factor::Third(_) => THIRDS,
    };
    let tensor_shape = row.dims.iter().map(|factors| factors.iter().map(extent).product()).collect();
    let (mut stride, mut offset, mut strides) = (1, 0, BTreeMap::new());
    for factor in row.dims.iter().rev().flat_map(|factors| factors.iter().rev()) {
        match factor {
            Factor::Dim(name) => drop(strides.insert(*name, stride)),
            Factor::Third(part) => offset += part * stride,
        }
        stride *= extent(factor);
    }
    (tensor_shape, offset, shape.iter().map(|(name, _)| strides[name]).collect())
}

#[cfg(test)]
mod tests {
    use ir::model::read_model;

    use super::*;

    fn model(name: &str) -> ModelSpec {
        let text = match name {
            "bloom" => include_str!("../../../tests/fixtures/bloom.ron"),
            "gpt2" => include_str!("../../../tests/fixtures/gpt2.ron"),
            "llama" => include_str!("../../../tests/fixtures/llama.ron"),
            _ => include_str!("../../../tests/fixtures/qwen2.ron"),
        };
        read_model(text, name).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Model, key, tensor, its shape, offset, strides.
    type Row = (&'static str, &'static str, &'static str, &'static [u64], u64, &'static [u64]);

    #[test]
    fn offsets_and_strides_are_those_worked_out_by_hand() {
        // BLOOM: hidden 48, 6 heads of 8; GPT-2: 48, 4 of 12; Llama: 48, 4 of 12 on 2; Qwen2: 32, 4 of 8 on 2.
        let table: [Row; 10] = [
            ("bloom", "embedding/embedding.token", "word_embeddings.weight", &[101, 48], 0, &[48, 1]),
            ("bloom", "head/head.weight", "word_embeddings.weight", &[101, 48], 0, &[48, 1]),
            (
                "bloom",
                "layer 2/attention.key.weight",
                "h.2.self_attention.query_key_value.weight",
                &[144, 48],
                8 * 48,
                &[1, 24 * 48, 48],
            ),
            ("bloom", "layer 0/attention.value.bias", "h.0.self_attention.query_key_value.bias", &[144], 16, &[24, 1]),
            ("gpt2", "layer 1/attention.query.weight", "h.1.attn.c_attn.weight", &[48, 144], 0, &[144, 12, 12, 1]),
            ("gpt2", "layer 1/attention.value.weight", "h.1.attn.c_attn.weight", &[48, 144], 96, &[144, 12, 1]),
            ("gpt2", "layer 0/feed_forward.up.weight", "h.0.mlp.c_fc.weight", &[48, 64], 0, &[64, 1]),
            (
                "llama",
                "layer 0/attention.query.weight",
                "layers.0.self_attn.q_proj.weight",
                &[48, 48],
                0,
                &[1, 24 * 48, 12 * 48, 48],
            ),
            ("llama", "head/head.weight", "lm_head.weight", &[97, 48], 0, &[48, 1]),
            ("qwen2", "layer 3/attention.key.bias", "layers.3.self_attn.k_proj.bias", &[16], 0, &[8, 1]),
        ];
        for (name, key, tensor, shape, offset, strides) in table {
            let (_, locations) = locate_parameters(&model(name)).unwrap_or_else(|problem| panic!("{problem}"));
            let found = locations.iter().find(|location| location.key == key).expect("a parameter of the model");
            let expected = (tensor, shape, offset, strides);
            let found = (&*found.tensor, &*found.tensor_shape, found.offset, &*found.strides);
            assert_eq!(found, expected, "{name} {key}");
        }
    }

    #[test]
    fn every_element_of_every_tensor_has_one_place() {
        for name in ["bloom", "gpt2", "llama", "qwen2"] {
            let (_, locations) = locate_parameters(&model(name)).unwrap_or_else(|problem| panic!("{problem}"));
            let mut seen: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
            for location in locations.iter().filter(|location| !location.tied) {
                let elements: u64 = location.tensor_shape.iter().product();
                let counts = seen.entry(&location.tensor).or_insert_with(|| vec![0; elements as usize]);
                let extents: Vec<u64> = location.shape.iter().map(|(_, extent)| *extent).collect();
                for mut index in 0..extents.iter().product() {
                    let mut at = location.offset;
                    for (extent, stride) in extents.iter().zip(&location.strides).rev() {
                        at += index % extent * stride;
                        index /= extent;
                    }
                    counts[at as usize] += 1;
                }
            }
            assert!(seen.values().flatten().all(|count| *count == 1), "{name}");
        }
    }

    #[test]
    fn a_model_that_no_architecture_has_says_why() {
        type Change = fn(&mut ModelSpec);
        let table: [(&str, Change, &str); 5] = [
            ("bloom", |model| model.embedding_norm = false, "a norm on the embedding comes with ALiBi"),
            ("gpt2", |model| model.bias = ir::model::Bias::None, "not every linear operator has a bias"),
            ("llama", |model| model.norm = ir::model::NormKind::LayerNorm, "norms are not RMSNorm"),
            ("qwen2", |model| model.embedding_norm = true, "there is a norm on the embedding"),
            ("llama", |model| model.deviations.push(ir::model::Deviation::RotaryScaling), "scaled rotary frequencies"),
        ];
        for (name, change, expected) in table {
            let mut changed = model(name);
            change(&mut changed);
            let problem = locate_parameters(&changed).expect_err("the model was changed");
            assert!(problem.what.contains(expected), "{name}: {problem}");
        }
    }
}
