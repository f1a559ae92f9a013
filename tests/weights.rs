//! Weights in and out: parts of parameters are parts of the whole, an exported checkpoint is the one that was
//! read, and what is wrong with a checkpoint is said at once.
//!
//! `EXPORTED=DIR cargo test -p runtime --test weights` leaves the exported fixtures in DIR, where
//! `tests/fixtures/make.py check` compares their logits with PyTorch's.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use ir::error::{Error, Problem};
use ir::graph::DimName;
use ir::model::{DType, ModelSpec, read_model};
use ir::sharding::tensor_split;
use runtime::weights::{Checkpoint, DimRange, export, export_order};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use tempfile::TempDir;

const MODELS: [&str; 4] = ["bloom", "gpt2", "llama", "qwen2"];

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

fn model(name: &str) -> ModelSpec {
    let text = fs::read_to_string(folder(&format!("{name}.ron"))).expect("the fixture exists");
    read_model(&text, name).unwrap_or_else(|error| panic!("{error}"))
}

fn open(folder: &Path, model: &ModelSpec) -> Checkpoint {
    Checkpoint::open(folder, model).unwrap_or_else(|error| panic!("{error}"))
}

fn whole(shape: &[(DimName, u64)]) -> Vec<DimRange> {
    shape.iter().map(|(name, length)| DimRange { name: *name, start: 0, length: *length }).collect()
}

fn read(checkpoint: &Checkpoint, key: &str, region: &[DimRange]) -> Vec<f32> {
    checkpoint.read(key, region).unwrap_or_else(|problem| panic!("{problem}"))
}

/// The part of a row-major array that a region names, element by element.
fn part(values: &[f32], shape: &[(DimName, u64)], region: &[DimRange]) -> Vec<f32> {
    let count: u64 = region.iter().map(|range| range.length).product();
    let element = |mut index: u64| {
        let mut of_dim = BTreeMap::new();
        for range in region.iter().rev() {
            of_dim.insert(range.name, range.start + index % range.length);
            index /= range.length;
        }
        values[shape.iter().fold(0, |at, (name, extent)| at * extent + of_dim[name]) as usize]
    };
    (0..count).map(element).collect()
}

/// Every part of a parameter that cutting each dim into equal parts gives, up to four along a dim.
fn tilings(shape: &[(DimName, u64)]) -> Vec<Vec<DimRange>> {
    let mut regions = vec![Vec::new()];
    for (name, extent) in shape {
        let ways = [1, 2, 3, 4].into_iter().filter(|ways| extent.is_multiple_of(*ways));
        let cuts = ways.flat_map(|ways| (0..ways).map(move |part| (part * (extent / ways), extent / ways)));
        let ranges: Vec<DimRange> = cuts.map(|(start, length)| DimRange { name: *name, start, length }).collect();
        let longer = |region: &Vec<DimRange>| {
            let with = |range: &DimRange| region.iter().chain([range]).copied().collect();
            ranges.iter().map(with).collect::<Vec<Vec<DimRange>>>()
        };
        regions = regions.iter().flat_map(longer).collect();
    }
    regions
}

/// Layers are alike: the last one stands for all.
fn sample(checkpoint: &Checkpoint) -> Vec<(String, Vec<(DimName, u64)>)> {
    let kept = |key: &str| !key.starts_with("layer") || key.starts_with("layer 2");
    let parameters = checkpoint.parameters().filter(|(key, _)| kept(key));
    parameters.map(|(key, shape)| (key.to_owned(), shape.to_vec())).collect()
}

#[test]
fn every_part_is_a_part_of_the_whole() {
    let mut count = 0;
    for name in MODELS {
        let checkpoint = open(&folder(name), &model(name));
        for (key, shape) in sample(&checkpoint) {
            let values = read(&checkpoint, &key, &whole(&shape));
            for region in tilings(&shape) {
                assert!(read(&checkpoint, &key, &region) == part(&values, &shape, &region), "{name} {key} {region:?}");
                count += 1;
            }
            let turned: Vec<DimRange> = whole(&shape).into_iter().rev().collect();
            assert!(read(&checkpoint, &key, &turned) == part(&values, &shape, &turned), "{name} {key}, turned");
        }
    }
    assert!(count > 5000, "{count}");
}

#[test]
fn elements_are_those_of_the_part() {
    for name in MODELS {
        let checkpoint = open(&folder(name), &model(name));
        for (key, shape) in sample(&checkpoint) {
            let regions = tilings(&shape);
            for region in [&regions[0], &regions[regions.len() / 2], &regions[regions.len() - 1]] {
                let values = read(&checkpoint, &key, region);
                let n = values.len();
                let ranges = [0..n, 0..n / 2, n / 2..n, n / 3..n / 3 + 1, n / 3..2 * n / 3, n..n, n - 1..n, 0..0];
                for Range { start, end } in ranges {
                    let found = checkpoint.read_elements(&key, region, start..end);
                    let found = found.unwrap_or_else(|problem| panic!("{problem}"));
                    assert!(found == values[start..end], "{name} {key} {region:?} {start} to {end}");
                }
                let beyond = checkpoint.read_elements(&key, region, n..n + 1).expect_err("no such element");
                assert!(beyond.what.contains("were asked for"), "{beyond}");
            }
        }
    }
}

#[test]
fn rows_that_padding_added_are_zeros() {
    for name in MODELS {
        let model = model(name);
        let split = tensor_split(&model, 2, false).expect("two ranks divide the fixtures");
        let (rows, padded, hidden) = (model.vocabulary.rows(), split.padded_rows, model.hidden_size);
        assert!(padded > rows, "{name} needs no padding");
        let checkpoint = open(&folder(name), &model);
        for key in ["embedding/embedding.token", "head/head.weight"] {
            let region = |start, length| {
                let columns = DimRange { name: DimName::Hidden, start: 0, length: hidden };
                [DimRange { name: DimName::Vocabulary, start, length }, columns]
            };
            let values = read(&checkpoint, key, &region(0, rows));
            let held = [values.clone(), vec![0.0; ((padded - rows) * hidden) as usize]].concat();
            let (left, right) = held.split_at(held.len() / 2);
            assert!(read(&checkpoint, key, &region(0, padded / 2)) == left, "{name} {key}");
            assert!(read(&checkpoint, key, &region(padded / 2, padded / 2)) == right, "{name} {key}");
            let last = (rows * hidden - 1) as usize;
            let found = checkpoint.read_elements(key, &region(0, padded), last..last + 3).expect("in range");
            assert_eq!(found, [values[last], 0.0, 0.0], "{name} {key}");
        }
    }
}

#[test]
fn regions_that_are_not_of_the_parameter_are_refused() {
    let checkpoint = open(&folder("gpt2"), &model("gpt2"));
    let range = |name, start, length| DimRange { name, start, length };
    let hidden = range(DimName::Hidden, 0, 48);
    let table: [(&str, &[DimRange], &str); 7] = [
        ("layer 3/attention.norm.bias", &[hidden], "the model has no such parameter"),
        ("layer 0/feed_forward.gate.weight", &[hidden], "the model has no such parameter"),
        ("layer 0/attention.norm.bias", &[], "a part along [] of [(Hidden, 48)]"),
        ("layer 0/attention.norm.bias", &[range(DimName::Intermediate, 0, 48)], "a part along [Intermediate]"),
        ("layer 0/attention.norm.bias", &[hidden, hidden], "a part along [Hidden, Hidden]"),
        ("layer 0/attention.norm.bias", &[range(DimName::Hidden, 24, 25)], "25 of 48 Hidden from 24 on"),
        ("layer 0/attention.norm.bias", &[range(DimName::Hidden, u64::MAX, 2)], "2 of 48 Hidden from"),
    ];
    for (key, region, expected) in table {
        let problem = checkpoint.read(key, region).expect_err("the region is wrong");
        assert!(problem.what.contains(expected) && problem.location.contains(key), "{problem}");
    }
}

/// Number format, shape and bytes of tensors by name.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// A file's tensors.
fn tensors(file: &Path) -> Tensors {
    let bytes = fs::read(file).expect("the file exists");
    let tensors = SafeTensors::deserialize(&bytes).expect("the file is sound");
    let owned =
        |(name, view): (String, TensorView)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()));
    tensors.tensors().into_iter().map(owned).collect()
}

fn write(file: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).expect("the sizes agree"))
    });
    let text = safetensors::serialize(views, None).expect("the tensors are sound");
    fs::write(file, text).expect("writable");
}

/// Exports what a checkpoint holds, with rows that padding for two ranks would add.
fn export_again(checkpoint: &Checkpoint, model: &ModelSpec, directory: &Path) -> Result<(), Problem> {
    let split = tensor_split(model, 2, false).expect("two ranks divide the fixtures");
    let shapes: BTreeMap<&str, &[(DimName, u64)]> = checkpoint.parameters().collect();
    export(directory, model, |key| {
        let mut region = whole(shapes[key]);
        if region[0].name == DimName::Vocabulary {
            region[0].length = split.padded_rows;
        }
        checkpoint.read(key, &region)
    })
}

/// The same numbers in another format, rounded to it.
fn converted(bytes: &[u8], dtype: DType) -> (Dtype, Vec<u8>) {
    let numbers = bytes.chunks_exact(4).map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]));
    match dtype {
        DType::FP32 => (Dtype::F32, bytes.to_vec()),
        DType::BF16 => (Dtype::BF16, numbers.flat_map(|number| bf16::from_f32(number).to_le_bytes()).collect()),
        DType::FP16 => (Dtype::F16, numbers.flat_map(|number| f16::from_f32(number).to_le_bytes()).collect()),
    }
}

#[test]
fn what_was_read_is_exported_byte_for_byte() {
    for name in MODELS {
        for dtype in [DType::FP32, DType::BF16, DType::FP16] {
            let scratch = TempDir::new().expect("a scratch folder");
            let model = ModelSpec { dtype, ..model(name) };
            let mut original = tensors(&folder(name).join("model.safetensors"));
            for (format, _, bytes) in original.values_mut() {
                (*format, *bytes) = converted(bytes, dtype);
            }
            write(&scratch.path().join("model.safetensors"), &original);
            let target = scratch.path().join("exported");
            let checkpoint = open(scratch.path(), &model);
            export_again(&checkpoint, &model, &target).unwrap_or_else(|problem| panic!("{problem}"));
            if let Some(kept) = std::env::var_os("EXPORTED").filter(|_| dtype == DType::FP32) {
                export_again(&checkpoint, &model, &Path::new(&kept).join(name)).expect("the folder is new");
            }
            assert!(tensors(&target.join("model.safetensors")) == original, "{name} {dtype:?}");
            let files: Vec<String> = list(&target);
            assert_eq!(files, ["config.json", "model.safetensors"], "{name}");
            assert_eq!(list(scratch.path()), ["exported", "model.safetensors"], "{name}");
        }
    }
}

fn list(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("the folder exists").map(|entry| entry.expect("readable").file_name());
    let mut names: Vec<String> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Every field of an exported config that transformers wrote into the fixture's too has the fixture's value.
#[test]
fn an_exported_config_says_what_the_fixtures_says() {
    for name in MODELS {
        let scratch = TempDir::new().expect("a scratch folder");
        let (model, target) = (model(name), scratch.path().join("exported"));
        export_again(&open(&folder(name), &model), &model, &target).unwrap_or_else(|problem| panic!("{problem}"));
        let read = |path: &Path| -> serde_json::Value {
            serde_json::from_str(&fs::read_to_string(path).expect("it exists")).expect("it is JSON")
        };
        let (ours, theirs) = (read(&target.join("config.json")), read(&folder(name).join("config.json")));
        let fields = ours.as_object().expect("an object");
        let mut equal = 0;
        for (field, value) in fields {
            if let Some(expected) = theirs.get(field) {
                assert_eq!(value, expected, "{name} {field}");
                equal += 1;
            }
        }
        assert!(equal >= 12, "{name}: {equal} fields compared");
        assert_eq!(fields["torch_dtype"], theirs["dtype"], "{name}");
        let rope = theirs.get("rope_parameters").and_then(serde_json::Value::as_object);
        for (field, value) in rope.into_iter().flatten().filter(|(field, _)| *field != "rope_theta") {
            let plain = fields["rope_scaling"].is_null() && value == "default";
            assert!(plain || fields["rope_scaling"][field] == *value, "{name}: {field} of rope_scaling");
        }
        assert_eq!(fields.get("rope_theta"), rope.map(|rope| &rope["rope_theta"]), "{name}");
    }
}

#[test]
fn the_order_of_an_export_is_known_before() {
    for name in MODELS {
        let (model, scratch) = (model(name), TempDir::new().expect("a scratch folder"));
        let checkpoint = open(&folder(name), &model);
        let shapes: BTreeMap<&str, &[(DimName, u64)]> = checkpoint.parameters().collect();
        let mut asked = Vec::new();
        let gather = |key: &str| {
            asked.push(key.to_owned());
            checkpoint.read(key, &whole(shapes[key]))
        };
        export(&scratch.path().join("exported"), &model, gather).unwrap_or_else(|problem| panic!("{problem}"));
        assert_eq!(asked, export_order(&model).unwrap_or_else(|problem| panic!("{problem}")), "{name}");
        let untied = shapes.len() - usize::from(model.tied_embedding);
        assert_eq!(asked.len(), untied, "{name}");
    }
}

#[test]
fn a_failed_export_leaves_nothing() {
    let model = model("llama");
    let checkpoint = open(&folder("llama"), &model);
    let shapes: BTreeMap<&str, &[(DimName, u64)]> = checkpoint.parameters().collect();
    let scratch = TempDir::new().expect("a scratch folder");
    let target = scratch.path().join("exported");
    let mut left = 20;
    let failing = |key: &str| {
        left -= 1;
        if left == 0 {
            Err(Problem::new("rank 3 is gone", key, "start again"))
        } else {
            checkpoint.read(key, &whole(shapes[key]))
        }
    };
    let problem = export(&target, &model, failing).expect_err("a rank is gone");
    assert!(problem.what.contains("rank 3 is gone") && list(scratch.path()).is_empty(), "{problem}");

    let short = |key: &str| checkpoint.read(key, &whole(shapes[key])).map(|values| values[1..].to_vec());
    let problem = export(&target, &model, short).expect_err("a number is missing");
    assert!(problem.what.contains("4655 numbers were gathered for 4656"), "{problem}");

    // A killed export's remains do not stand in the way, files of the user do.
    fs::create_dir_all(scratch.path().join(".exported.partial/model.safetensors")).expect("writable");
    fs::create_dir(&target).expect("writable");
    export_again(&checkpoint, &model, &target).unwrap_or_else(|problem| panic!("{problem}"));
    let before = tensors(&target.join("model.safetensors"));
    let problem = export_again(&checkpoint, &model, &target).expect_err("the directory is full");
    assert!(problem.what.contains("not empty"), "{problem}");
    assert!(tensors(&target.join("model.safetensors")) == before);
    assert_eq!(list(scratch.path()), ["exported"]);
}

/// Names as older versions of transformers, or a model without its head, saved them.
#[test]
fn names_and_buffers_of_other_versions_are_understood() {
    type Extra = &'static [(&'static str, Dtype)];
    let table: [(&str, &str, Extra); 4] = [
        ("bloom", "transformer.", &[]),
        ("gpt2", "transformer.", &[("h.0.attn.bias", Dtype::U8), ("h.1.attn.masked_bias", Dtype::F32)]),
        ("llama", "model.", &[("layers.0.self_attn.rotary_emb.inv_freq", Dtype::F32)]),
        ("qwen2", "model.", &[("lm_head.weight", Dtype::F32)]),
    ];
    for (name, prefix, extra) in table {
        let (model, scratch) = (model(name), TempDir::new().expect("a scratch folder"));
        let original = tensors(&folder(name).join("model.safetensors"));
        let renamed = original.into_iter().map(|(name, tensor)| (name.trim_start_matches(prefix).to_owned(), tensor));
        let mut renamed: BTreeMap<_, _> = renamed.collect();
        for (name, dtype) in extra {
            renamed.insert((*name).to_owned(), (*dtype, vec![2], vec![0; 2 * dtype.bitsize() / 8]));
        }
        write(&scratch.path().join("model.safetensors"), &renamed);
        let (found, expected) = (open(scratch.path(), &model), open(&folder(name), &model));
        for (key, shape) in expected.parameters() {
            assert!(read(&found, key, &whole(shape)) == read(&expected, key, &whole(shape)), "{name} {key}");
        }
    }
}

/// A checkpoint of two shards with an index.
fn sharded(folder: &Path, tensors: &Tensors) {
    let file = |index: usize| format!("model-0000{}-of-00002.safetensors", index % 2 + 1);
    let mut map = serde_json::Map::new();
    for shard in 0..2 {
        let names = tensors.iter().enumerate().filter(|(index, _)| index % 2 == shard);
        let held: BTreeMap<_, _> = names.map(|(_, (name, tensor))| (name.clone(), tensor.clone())).collect();
        map.extend(held.keys().map(|name| (name.clone(), file(shard).into())));
        write(&folder.join(file(shard)), &held);
    }
    let index = serde_json::json!({"metadata": {}, "weight_map": map});
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).expect("writable");
}

#[test]
fn shards_are_read_as_one_checkpoint() {
    for name in MODELS {
        let (model, scratch) = (model(name), TempDir::new().expect("a scratch folder"));
        sharded(scratch.path(), &tensors(&folder(name).join("model.safetensors")));
        let (found, expected) = (open(scratch.path(), &model), open(&folder(name), &model));
        for (key, shape) in expected.parameters() {
            assert!(read(&found, key, &whole(shape)) == read(&expected, key, &whole(shape)), "{name} {key}");
        }
    }
}

/// Each problem's first line and the end of its location.
fn problems(folder: &Path, model: &ModelSpec) -> Vec<String> {
    let error = Checkpoint::open(folder, model).expect_err("the checkpoint is wrong");
    assert!(matches!(error, Error::Invalid(_)));
    let short = |problem: &Problem| {
        assert!(!problem.help.is_empty());
        format!("{} @ {}", problem.what, problem.location.rsplit('/').next().unwrap_or_default())
    };
    error.problems().iter().map(short).collect()
}

#[test]
fn everything_wrong_with_a_checkpoint_is_said_at_once() {
    let (model, scratch) = (model("llama"), TempDir::new().expect("a scratch folder"));
    let mut wrong = tensors(&folder("llama").join("model.safetensors"));
    wrong.remove("model.layers.1.mlp.up_proj.weight");
    wrong.insert("model.layers.0.self_attn.q_proj.bias".to_owned(), (Dtype::F32, vec![48], vec![0; 192]));
    wrong.insert("model.norm.weight".to_owned(), (Dtype::F32, vec![47], vec![0; 188]));
    wrong.insert("lm_head.weight".to_owned(), (Dtype::I8, vec![97, 48], vec![0; 97 * 48]));
    write(&scratch.path().join("model.safetensors"), &wrong);
    let expected = [
        "layers.1.mlp.up_proj.weight is missing: layer 1/feed_forward.up.weight of llama @ model.safetensors",
        "lm_head.weight holds I8 @ model.safetensors",
        "norm.weight has shape [47], not [48] @ model.safetensors",
        "layers.0.self_attn.q_proj.bias is no parameter of llama @ model.safetensors",
    ];
    let mut found = problems(scratch.path(), &model);
    let mut expected = expected.map(str::to_owned).to_vec();
    found.sort();
    expected.sort();
    assert_eq!(found, expected);
}

#[test]
fn files_that_are_no_checkpoint() {
    const INDEX: &str = "model.safetensors.index.json";
    const FIRST: &str = "model-00001-of-00002.safetensors";
    let original = tensors(&folder("llama").join("model.safetensors"));
    type Break = fn(&Path);
    let table: [(&str, Break, &str); 8] = [
        ("nothing", |folder| fs::remove_file(folder.join(INDEX)).expect("there"), "neither model.safetensors nor"),
        ("no JSON", |folder| fs::write(folder.join(INDEX), "{").expect("writable"), "this is no JSON"),
        ("no map", |folder| fs::write(folder.join(INDEX), "{}").expect("writable"), "no object `weight_map`"),
        (
            "a file elsewhere",
            |folder| fs::write(folder.join(INDEX), r#"{"weight_map": {"a": "../b"}}"#).expect("writable"),
            "the file of a is \"../b\", not the name of one beside",
        ),
        ("a shard missing", |folder| fs::remove_file(folder.join(FIRST)).expect("there"), "cannot read the file"),
        ("an empty shard", |folder| fs::write(folder.join(FIRST), "").expect("writable"), "@ model-00001-of-00002"),
        (
            "a cut shard",
            |folder| {
                let bytes = fs::read(folder.join(FIRST)).expect("there");
                fs::write(folder.join(FIRST), &bytes[..bytes.len() - 1]).expect("writable");
            },
            "this is no safetensors file",
        ),
        (
            "the shard of another checkpoint",
            |folder| {
                let other = tensors(&folder.join("model-00002-of-00002.safetensors"));
                write(&folder.join(FIRST), &other);
            },
            "is also in",
        ),
    ];
    for (case, damage, expected) in table {
        let scratch = TempDir::new().expect("a scratch folder");
        sharded(scratch.path(), &original);
        damage(scratch.path());
        let found = problems(scratch.path(), &model("llama"));
        assert!(found.iter().any(|problem| problem.contains(expected)), "{case}: {found:?}");
    }
}

#[test]
fn the_checkpoint_of_another_model_is_refused() {
    for (files, described) in [("llama", "qwen2"), ("qwen2", "llama"), ("bloom", "gpt2"), ("gpt2", "bloom")] {
        let found = problems(&folder(files), &model(described));
        assert!(
            found.iter().any(|problem| problem.contains("is missing") || problem.contains("has shape")),
            "{found:?}"
        );
    }
}
