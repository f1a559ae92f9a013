//! Initial values of a rank's part of each parameter, equal for every layout.
//!
//! GPT-2's and Megatron's rules: norm weights are 1, biases 0, matrices and tables normal with one standard
//! deviation, the two projections that write into the residual stream with that over √(2 · layers). A value
//! depends on the seed, the parameter's logical name and the element's index in the whole parameter.

use std::ops::Range;

use ir::distribution::{Distribution, Place, SplitAxis};
use ir::graph::DimName;
use ir::model::ModelSpec;
use ir::program::{Parameter, ParameterRef, Program};

use crate::random::{Region, Span, Stream, fill_normal};
use crate::train::TrainConfig;

/// Name of the token embedding in its body; a tied head has the embedding's values.
pub const TOKEN_EMBEDDING: &str = "embedding.token";

/// Parameters that write into the residual stream.
const OUTPUT_PROJECTIONS: [&str; 4] =
    ["attention.output.weight", "feed_forward.down.weight", "expert.down.weight", "shared_expert.down.weight"];

/// What initial values depend on besides a parameter's name and shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Initialisation {
    /// Seed of the run.
    pub seed: u64,
    /// Standard deviation of matrices and tables.
    pub deviation: f64,
    /// Layers of the model.
    pub num_layers: u64,
    /// Rows of the vocabulary tables that belong to the model; those behind them are zeros.
    pub vocabulary_rows: u64,
}

impl Initialisation {
    /// What a training file says of a model's.
    pub fn of(config: &TrainConfig, model: &ModelSpec) -> Initialisation {
        Initialisation {
            seed: config.seed,
            deviation: config.initialisation.deviation,
            num_layers: model.num_layers,
            vocabulary_rows: model.vocabulary.rows(),
        }
    }
}

/// The rule that a parameter's initial values follow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum InitialRule {
    /// Norm weights.
    Ones,
    /// Biases.
    Zeros,
    /// Matrices and tables: normal, mean 0.
    Normal {
        /// Standard deviation.
        deviation: f64,
    },
}

/// A rank's place on one axis of its stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AxisPlace {
    /// Place, from 0.
    pub index: u64,
    /// Ranks along the axis.
    pub degree: u64,
}

/// A rank's place among the ranks of its stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagePlace {
    /// Along [`SplitAxis::Data`].
    pub data: AxisPlace,
    /// Along [`SplitAxis::Tensor`].
    pub tensor: AxisPlace,
    /// Along [`SplitAxis::Query`].
    pub query: AxisPlace,
}

impl StagePlace {
    /// The only rank of a stage.
    pub const SINGLE: StagePlace = {
        let single = AxisPlace { index: 0, degree: 1 };
        StagePlace { data: single, tensor: single, query: single }
    };

    /// The place on an axis.
    pub fn on(&self, axis: SplitAxis) -> AxisPlace {
        match axis {
            SplitAxis::Data => self.data,
            SplitAxis::Tensor => self.tensor,
            SplitAxis::Query => self.query,
        }
    }
}

/// A parameter's name outside its body: `embedding/…`, `layer 3/…`, `head/…`. A tied head has the
/// embedding's name.
pub fn logical_name(program: &Program, reference: ParameterRef) -> String {
    let body = &program.bodies[reference.body as usize];
    let parameter = &body.parameters[reference.parameter as usize];
    match body.name.as_str() {
        _ if parameter.tied => format!("embedding/{TOKEN_EMBEDDING}"),
        "embedding" | "head" => format!("{}/{}", body.name, parameter.name),
        _ => format!("layer {}/{}", reference.layer, parameter.name),
    }
}

/// The rule for a parameter, by its name in the body.
///
/// Normal(deviation / √(2 · layers)) for output projections keeps the variance of the residual stream from
/// growing with depth. Source: GPT-2 paper (Radford et al. 2019), section 2.3; Megatron-LM's
/// `scaled_init_method_normal`.
pub fn initial_rule(name: &str, settings: &Initialisation) -> InitialRule {
    if name.ends_with(".bias") {
        InitialRule::Zeros
    } else if name.ends_with("norm.weight") {
        InitialRule::Ones
    } else if OUTPUT_PROJECTIONS.contains(&name) {
        InitialRule::Normal { deviation: settings.deviation / (2.0 * settings.num_layers as f64).sqrt() }
    } else {
        InitialRule::Normal { deviation: settings.deviation }
    }
}

/// The part of a whole parameter that a rank holds, the data axis apart.
///
/// A dim that two axes split is split along [`SplitAxis::Tensor`] first.
pub fn local_region(shape: &[(DimName, u64)], stored: Distribution, place: &StagePlace) -> Region {
    let span = |(dim, extent): &(DimName, u64)| {
        let split = [SplitAxis::Tensor, SplitAxis::Query].into_iter();
        let split = split.filter(|axis| stored.on(*axis) == Place::Sharded(*dim)).map(|axis| place.on(axis));
        let (index, ways) =
            split.fold((0, 1), |(index, ways), axis| (index * axis.degree + axis.index, ways * axis.degree));
        Span::part(*extent, index, ways)
    };
    Region { spans: shape.iter().map(span).collect() }
}

/// Part `place` of a region's elements in order, cut into equal parts of which the last may be short or empty.
///
/// A rank holds `elements.div_ceil(degree)` elements whatever the range's length: padding follows.
pub fn flat_range(elements: u64, place: AxisPlace) -> Range<u64> {
    let size = elements.div_ceil(place.degree);
    (place.index * size).min(elements)..((place.index + 1) * size).min(elements)
}

/// Fills a rank's part of a parameter as it is stored; `logical_name` as [`logical_name`] gives it.
///
/// `out` has the local dims of [`local_region`], row-major, or with `Place::Flat` on the data axis the rank's
/// flat part of them; padding becomes zeros.
pub fn fill_shard(
    settings: &Initialisation,
    logical_name: &str,
    parameter: &Parameter,
    place: &StagePlace,
    out: &mut [f32],
) {
    let region = local_region(&parameter.shape, parameter.stored, place);
    let range = match parameter.stored.data {
        Place::Flat => flat_range(region.elements(), place.data),
        Place::Replicated | Place::Sharded(_) | Place::PartialSum | Place::PartialMax => 0..region.elements(),
    };
    let (values, padding) = out.split_at_mut((range.end - range.start) as usize);
    padding.fill(0.0);
    fill_initial(settings, logical_name, parameter, &region, range, values);
}

/// Fills `out` with elements `range` of a region of a parameter, row-major.
pub fn fill_initial(
    settings: &Initialisation,
    logical_name: &str,
    parameter: &Parameter,
    region: &Region,
    range: Range<u64>,
    out: &mut [f32],
) {
    match initial_rule(&parameter.name, settings) {
        InitialRule::Ones => out.fill(1.0),
        InitialRule::Zeros => out.fill(0.0),
        InitialRule::Normal { deviation } => {
            let stream = Stream::new(settings.seed, logical_name);
            fill_normal(stream, region, range.clone(), deviation as f32, out);
        }
    }
    if let Some((DimName::Vocabulary, rows)) = parameter.shape.first()
        && settings.vocabulary_rows < *rows
    {
        let row: u64 = parameter.shape[1..].iter().map(|(_, extent)| extent).product();
        clear_from(settings.vocabulary_rows * row, region, range, out);
    }
}

/// Clears elements whose index in the whole array is `limit` or more.
fn clear_from(limit: u64, region: &Region, range: Range<u64>, out: &mut [f32]) {
    let mut at = 0;
    region.for_each_run(range, |start, length| {
        let kept = limit.saturating_sub(start).min(length);
        out[at + kept as usize..at + length as usize].fill(0.0);
        at += length as usize;
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::path::PathBuf;

    use ir::graph::build_graph;
    use ir::interpreter::parameter_key;
    use ir::model::read_model;
    use ir::plan::read_plan;

    const SETTINGS: Initialisation = Initialisation { seed: 11, deviation: 0.02, num_layers: 8, vocabulary_rows: 7 };

    fn root() -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
    }

    fn golden_program() -> Program {
        let path = root().join("tests/golden/tiny-tp2-pp2-dp2.plan.ron");
        let text = std::fs::read_to_string(path).expect("the golden plan exists");
        read_plan(&text, "golden").expect("the golden plan is sound").program.expect("it is executable")
    }

    fn parameter(name: &str, shape: &[(DimName, u64)], stored: Distribution) -> Parameter {
        let gradient = Distribution::REPLICATED;
        Parameter { name: name.to_owned(), shape: shape.to_vec(), stored, gradient, tied: false }
    }

    /// Every parameter of the examples and its standard deviation; none for constants, which follow.
    #[test]
    fn each_parameter_of_the_examples_has_its_rule() {
        let normal = InitialRule::Normal { deviation: 0.02 };
        // 0.02 / √(2 · 8).
        let output = InitialRule::Normal { deviation: 0.005 };
        let rows: BTreeMap<&str, InitialRule> = BTreeMap::from([
            ("attention.key.bias", InitialRule::Zeros),
            ("attention.key.weight", normal),
            ("attention.key_rope_down.weight", normal),
            ("attention.key_up.weight", normal),
            ("attention.key_value_down.weight", normal),
            ("attention.key_value_norm.weight", InitialRule::Ones),
            ("attention.norm.bias", InitialRule::Zeros),
            ("attention.norm.weight", InitialRule::Ones),
            ("attention.output.bias", InitialRule::Zeros),
            ("attention.output.weight", output),
            ("attention.query.bias", InitialRule::Zeros),
            ("attention.query.weight", normal),
            ("attention.query_down.weight", normal),
            ("attention.query_norm.weight", InitialRule::Ones),
            ("attention.query_up.weight", normal),
            ("attention.value.bias", InitialRule::Zeros),
            ("attention.value.weight", normal),
            ("attention.value_up.weight", normal),
            ("embedding.norm.bias", InitialRule::Zeros),
            ("embedding.norm.weight", InitialRule::Ones),
            ("embedding.position", normal),
            ("embedding.token", normal),
            ("expert.down.weight", output),
            ("expert.gate.weight", normal),
            ("expert.up.weight", normal),
            ("feed_forward.down.bias", InitialRule::Zeros),
            ("feed_forward.down.weight", output),
            ("feed_forward.gate.weight", normal),
            ("feed_forward.norm.bias", InitialRule::Zeros),
            ("feed_forward.norm.weight", InitialRule::Ones),
            ("feed_forward.up.bias", InitialRule::Zeros),
            ("feed_forward.up.weight", normal),
            ("final_norm.bias", InitialRule::Zeros),
            ("final_norm.weight", InitialRule::Ones),
            ("head.weight", normal),
            ("router.weight", normal),
            ("shared_expert.down.weight", output),
            ("shared_expert.gate.weight", normal),
            ("shared_expert.up.weight", normal),
        ]);
        let mut seen = BTreeMap::new();
        for entry in std::fs::read_dir(root().join("examples")).expect("the folder exists") {
            let path = entry.expect("readable").path();
            if path.extension().is_none_or(|extension| extension != "ron") {
                continue;
            }
            let text = std::fs::read_to_string(&path).expect("readable");
            let model = read_model(&text, "example").expect("sound");
            for operator in build_graph(&model).blocks.iter().flat_map(|block| block.parameters()) {
                seen.insert(operator.name, initial_rule(operator.name, &SETTINGS));
            }
        }
        assert_eq!(seen, rows);
    }

    #[test]
    fn parts_of_every_layout_are_parts_of_one_whole() {
        use DimName::{HeadDim, Hidden, Intermediate, KeyValueHeads, QueriesPerKeyValue, Vocabulary};
        let sharded = |tensor, query| Distribution { data: Place::Replicated, tensor, query };
        let split = |dim| sharded(Place::Sharded(dim), Place::Sharded(dim));
        let whole = Distribution::REPLICATED;
        let heads = sharded(Place::Sharded(KeyValueHeads), Place::Sharded(QueriesPerKeyValue));
        let query_shape = [(Hidden, 5), (KeyValueHeads, 4), (QueriesPerKeyValue, 6), (HeadDim, 3)];
        type Row<'a> = (&'a str, &'a [(DimName, u64)], Distribution);
        let rows: [Row; 6] = [
            ("attention.query.weight", &query_shape, heads),
            ("attention.output.weight", &[query_shape[1], query_shape[2], query_shape[3], query_shape[0]], heads),
            ("feed_forward.up.weight", &[(Hidden, 7), (Intermediate, 24)], split(Intermediate)),
            ("feed_forward.down.weight", &[(Intermediate, 24), (Hidden, 7)], split(Intermediate)),
            ("embedding.token", &[(Vocabulary, 16), (Hidden, 5)], split(Vocabulary)),
            ("attention.norm.weight", &[(Hidden, 13)], whole),
        ];
        for (name, shape, stored) in rows {
            let mut single = vec![f32::NAN; shape.iter().map(|(_, extent)| *extent as usize).product()];
            fill_shard(&SETTINGS, name, &parameter(name, shape, whole), &StagePlace::SINGLE, &mut single);
            for degrees in [[1, 1, 1], [1, 2, 1], [1, 4, 1], [1, 4, 2], [3, 2, 2], [5, 1, 1]] {
                let place = if degrees[0] > 1 { Place::Flat } else { Place::Replicated };
                let joined = joined(&parameter(name, shape, stored.with(SplitAxis::Data, place)), name, degrees);
                assert_eq!(joined, single, "{name} {degrees:?}");
            }
        }
    }

    /// A parameter put together from what each rank of a stage creates; degrees are data, tensor, query.
    fn joined(parameter: &Parameter, name: &str, degrees: [u64; 3]) -> Vec<f32> {
        let mut whole = vec![f32::NAN; parameter.shape.iter().map(|(_, extent)| *extent as usize).product()];
        for rank in 0..degrees.iter().product() {
            let [data, tensor, query] = [rank / (degrees[1] * degrees[2]), rank / degrees[2], rank];
            let at = |index: u64, degree| AxisPlace { index: index % degree, degree };
            let place =
                StagePlace { data: at(data, degrees[0]), tensor: at(tensor, degrees[1]), query: at(query, degrees[2]) };
            let region = local_region(&parameter.shape, parameter.stored, &place);
            let flat = parameter.stored.data == Place::Flat;
            let axis = if flat { place.data } else { StagePlace::SINGLE.data };
            let mut part = vec![f32::NAN; region.elements().div_ceil(axis.degree) as usize];
            fill_shard(&SETTINGS, name, parameter, &place, &mut part);
            let mut values = part.into_iter();
            region.for_each_run(flat_range(region.elements(), axis), |start, length| {
                for at in start..start + length {
                    whole[at as usize] = values.next().expect("a value for each element");
                }
            });
            assert!(values.all(|padding| padding == 0.0), "padding is zero");
        }
        whole
    }

    #[test]
    fn added_rows_are_zero_and_change_nothing_else() {
        let table = |rows| {
            parameter("head.weight", &[(DimName::Vocabulary, rows), (DimName::Hidden, 4)], Distribution::REPLICATED)
        };
        let fill = |rows: u64| {
            let mut values = vec![f32::NAN; rows as usize * 4];
            fill_shard(&SETTINGS, "head/head.weight", &table(rows), &StagePlace::SINGLE, &mut values);
            values
        };
        let (own, padded) = (fill(7), fill(12));
        assert_eq!(padded[..28], own);
        assert_eq!(padded[28..], [0.0; 20]);
        assert!(own.iter().all(|value| *value != 0.0));
    }

    #[test]
    fn names_are_the_interpreters_and_a_tied_head_is_the_embedding() {
        let program = golden_program();
        let mut tied = 0;
        for (body, code) in program.bodies.iter().enumerate() {
            for parameter in 0..code.parameters.len() {
                let reference = ParameterRef { body: body as u32, layer: 3, parameter: parameter as u32 };
                let name = logical_name(&program, reference);
                if code.parameters[parameter].tied {
                    assert_eq!(name, "embedding/embedding.token");
                    tied += 1;
                } else {
                    assert_eq!(name, parameter_key(&program, reference));
                }
            }
        }
        assert_eq!(tied, 1, "the golden model ties its head");
        let embedding = ParameterRef { body: 0, layer: 0, parameter: 0 };
        assert_eq!(logical_name(&program, embedding), "embedding/embedding.token");
    }

    #[test]
    fn layers_differ_and_have_the_stated_deviation() {
        let shape = [(DimName::Intermediate, 512), (DimName::Hidden, 256)];
        let fill = |layer: u64, name: &str| {
            let mut values = vec![0.0; 512 * 256];
            let parameter = parameter(name, &shape, Distribution::REPLICATED);
            fill_shard(&SETTINGS, &format!("layer {layer}/{name}"), &parameter, &StagePlace::SINGLE, &mut values);
            values
        };
        for (name, deviation) in [("feed_forward.down.weight", 0.005), ("feed_forward.up.weight", 0.02)] {
            let [first, second] = [0, 1].map(|layer| fill(layer, name));
            let moment = |a: &[f32], b: &[f32]| {
                a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() / a.len() as f64
            };
            // 5 standard deviations of each moment over 2¹⁷ numbers.
            let ones = vec![1.0; first.len()];
            assert!(moment(&first, &ones).abs() < 0.0139 * deviation, "{name}: mean");
            assert!((moment(&first, &first) / deviation.powi(2) - 1.0).abs() < 0.0196, "{name}: variance");
            assert!(moment(&first[1..], &first[..first.len() - 1]).abs() < 0.0139 * deviation.powi(2), "{name}: next");
            assert!(
                moment(&first[256..], &first[..first.len() - 256]).abs() < 0.0139 * deviation.powi(2),
                "{name}: row"
            );
            assert!(moment(&first, &second).abs() < 0.0139 * deviation.powi(2), "{name}: layer");
        }
    }
}
