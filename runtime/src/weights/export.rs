//! Writing: a directory that the library transformers loads, whole or not at all.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use ir::error::Problem;
use ir::graph::DimName;
use ir::model::{DType, ModelSpec};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Value, json};

use super::architecture::{Architecture, HEAD};
use super::checkpoint::{INDEX_FILE, SINGLE_FILE};
use super::config::config;
use super::layout::{Location, locate_parameters};
use super::strided::{Walk, copy_strided};

/// Largest shard, as transformers writes them by default; a single larger tensor has a shard of its own.
const SHARD_LIMIT: u64 = 5_000_000_000;
/// Headers are filled up with spaces to a multiple of this, so that numbers are aligned.
const ALIGNMENT: usize = 8;

/// Numbers that are converted before they are written; the bytes stay in the cache.
const CONVERTED_AT_ONCE: usize = 1 << 14;

/// A tensor to be written and the parameters that it is made of.
struct Output {
    name: String,
    shape: Vec<u64>,
    parts: Vec<Location>,
}

/// Keys in the order in which [`export`] asks for them; a tied head has the token embedding's numbers and is
/// not asked for.
///
/// # Errors
/// That no architecture has the model's parameters.
pub fn export_order(model: &ModelSpec) -> Result<Vec<String>, Problem> {
    let (_, outputs) = outputs(model)?;
    Ok(outputs.into_iter().flat_map(|output| output.parts).map(|part| part.key).collect())
}

/// Writes a checkpoint in the model's number format into a directory that does not exist or is empty.
///
/// `whole` gives a parameter by its key, row-major in the order of its dims; rows that padding added to the
/// vocabulary are left out. It is asked once for each key of [`export_order`], in that order, and at most one
/// tensor's parameters are held at a time. Everything is written beside the directory and renamed at the end.
///
/// # Errors
/// A model that no architecture has, a directory that is not empty, a parameter of another size, or a failed
/// write; or what `whole` gives. The directory is then as it was.
pub fn export<E: From<Problem>>(
    directory: &Path,
    model: &ModelSpec,
    whole: impl FnMut(&str) -> Result<Vec<f32>, E>,
) -> Result<(), E> {
    export_in_shards(directory, model, SHARD_LIMIT, whole)
}

fn export_in_shards<E: From<Problem>>(
    directory: &Path,
    model: &ModelSpec,
    limit: u64,
    mut whole: impl FnMut(&str) -> Result<Vec<f32>, E>,
) -> Result<(), E> {
    let (architecture, outputs) = outputs(model)?;
    let scratch = begin(directory)?;
    let result = write_files(&scratch, architecture, model, &outputs, limit, &mut whole)
        .and_then(|()| finish(&scratch, directory).map_err(E::from));
    if result.is_err() {
        // The first failure is what is reported, not that of tidying up after it.
        fs::remove_dir_all(&scratch).ok();
    }
    result
}

/// Tensors in the order of the model's blocks.
fn outputs(model: &ModelSpec) -> Result<(Architecture, Vec<Output>), Problem> {
    let (architecture, locations) = locate_parameters(model)?;
    let mut outputs: Vec<Output> = Vec::new();
    let mut position_of: BTreeMap<String, usize> = BTreeMap::new();
    for location in locations.into_iter().filter(|location| !location.tied) {
        let position = *position_of.entry(location.tensor.clone()).or_insert_with(|| {
            let prefix = if location.tensor == HEAD { "" } else { architecture.prefix() };
            let (name, shape) = (format!("{prefix}{}", location.tensor), location.tensor_shape.clone());
            outputs.push(Output { name, shape, parts: Vec::new() });
            outputs.len() - 1
        });
        outputs[position].parts.push(location);
    }
    Ok((architecture, outputs))
}

/// Makes the scratch directory beside the one to be written.
fn begin(directory: &Path) -> Result<PathBuf, Problem> {
    let shown = directory.display().to_string();
    if fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_some()) || directory.is_file() {
        return Err(Problem::new("this exists and is not empty", shown, "name a new directory"));
    }
    let name = directory.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| Problem::new("this cannot be the name of a directory", shown, "name a new one"))?;
    let scratch = directory.with_file_name(format!(".{name}.partial"));
    if scratch.exists() {
        // What an export left that was killed.
        fs::remove_dir_all(&scratch).map_err(|error| unwritable(&scratch, &error))?;
    }
    fs::create_dir_all(&scratch).map_err(|error| unwritable(&scratch, &error))?;
    Ok(scratch)
}

/// Gives the scratch directory its name, after all it holds is on the disk.
fn finish(scratch: &Path, directory: &Path) -> Result<(), Problem> {
    let parent = directory.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    sync(scratch)?;
    fs::rename(scratch, directory).map_err(|error| unwritable(directory, &error))?;
    sync(parent)
}

fn sync(path: &Path) -> Result<(), Problem> {
    File::open(path).and_then(|file| file.sync_all()).map_err(|error| unwritable(path, &error))
}

fn unwritable(path: &Path, error: &std::io::Error) -> Problem {
    let help = "name a directory on a disk with room that may be written";
    Problem::new(format!("cannot write: {error}"), path.display().to_string(), help)
}

fn write_files<E: From<Problem>>(
    folder: &Path,
    architecture: Architecture,
    model: &ModelSpec,
    outputs: &[Output],
    limit: u64,
    whole: &mut impl FnMut(&str) -> Result<Vec<f32>, E>,
) -> Result<(), E> {
    let shards = shards(outputs, model.dtype, limit);
    let mut files_of = serde_json::Map::new();
    for (index, shard) in shards.iter().enumerate() {
        let file = match shards.len() {
            1 => SINGLE_FILE.to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
        };
        write_shard(&folder.join(&file), shard, model.dtype, whole)?;
        files_of.extend(shard.iter().map(|output| (output.name.clone(), Value::from(file.as_str()))));
    }
    if shards.len() > 1 {
        let total: u64 = outputs.iter().map(|output| bytes_of(output, model.dtype)).sum();
        let index = json!({"metadata": {"total_size": total}, "weight_map": files_of});
        write_json(&folder.join(INDEX_FILE), &index)?;
    }
    write_json(&folder.join("config.json"), &config(architecture, model))?;
    Ok(())
}

/// Tensors in order, each shard as full as the limit allows.
fn shards(outputs: &[Output], dtype: DType, limit: u64) -> Vec<&[Output]> {
    let (mut shards, mut start, mut size) = (Vec::new(), 0, 0);
    for (index, output) in outputs.iter().enumerate() {
        let bytes = bytes_of(output, dtype);
        if index > start && size + bytes > limit {
            shards.push(&outputs[start..index]);
            (start, size) = (index, 0);
        }
        size += bytes;
    }
    shards.push(&outputs[start..]);
    shards
}

fn bytes_of(output: &Output, dtype: DType) -> u64 {
    output.shape.iter().product::<u64>() * dtype.bytes()
}

fn write_shard<E: From<Problem>>(
    path: &Path,
    shard: &[Output],
    dtype: DType,
    whole: &mut impl FnMut(&str) -> Result<Vec<f32>, E>,
) -> Result<(), E> {
    let failed = |error: std::io::Error| E::from(unwritable(path, &error));
    let mut file = File::create(path).map_err(failed)?;
    file.write_all(&header(shard, dtype)).map_err(failed)?;
    for output in shard {
        let numbers = assemble(output, whole)?;
        write_numbers(&mut file, &numbers, dtype).map_err(failed)?;
    }
    file.sync_all().map_err(failed)
}

/// Length and header of a safetensors file.
fn header(shard: &[Output], dtype: DType) -> Vec<u8> {
    let mut end = 0;
    let info = |output: &Output| {
        let start = end;
        end += bytes_of(output, dtype) as usize;
        let shape = output.shape.iter().map(|extent| *extent as usize).collect();
        let dtype = match dtype {
            DType::BF16 => Dtype::BF16,
            DType::FP16 => Dtype::F16,
            DType::FP32 => Dtype::F32,
        };
        (output.name.clone(), TensorInfo { dtype, shape, data_offsets: (start, end) })
    };
    let tensors = shard.iter().map(info).collect();
    // transformers refuses a file that does not say for which library it was made.
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(metadata), tensors).expect("offsets follow from shapes");
    let mut text = serde_json::to_vec(&metadata).expect("names and numbers can be written");
    text.resize(text.len().next_multiple_of(ALIGNMENT), b' ');
    [&(text.len() as u64).to_le_bytes(), text.as_slice()].concat()
}

/// Puts a tensor together from our parameters.
fn assemble<E: From<Problem>>(
    output: &Output,
    whole: &mut impl FnMut(&str) -> Result<Vec<f32>, E>,
) -> Result<Vec<f32>, E> {
    let mut numbers = vec![0.0; output.shape.iter().product::<u64>() as usize];
    for part in &output.parts {
        let values = whole(&part.key)?;
        check_size(part, values.len() as u64)?;
        let mut from = part.shape.iter().map(|(_, extent)| extent).product::<u64>();
        let walk = |((_, extent), stride): (&(DimName, u64), &u64)| {
            from /= extent;
            Walk { length: *extent as usize, from: from as usize, to: *stride as usize }
        };
        let walks: Vec<Walk> = part.shape.iter().zip(&part.strides).map(walk).collect();
        let load_run = |from: usize, run: &mut [f32]| run.copy_from_slice(&values[from..from + run.len()]);
        copy_strided(&walks, 0, part.offset as usize, |index| values[index], load_run, &mut numbers);
    }
    Ok(numbers)
}

/// A parameter has its size, or more rows of the vocabulary, which comes first.
fn check_size(part: &Location, given: u64) -> Result<(), Problem> {
    let expected: u64 = part.shape.iter().map(|(_, extent)| extent).product();
    let (first, rows) = part.shape[0];
    let padded = first == DimName::Vocabulary && given > expected && given.is_multiple_of(expected / rows);
    if given == expected || padded {
        return Ok(());
    }
    let what = format!("{given} numbers were gathered for {expected} of {:?}", part.shape);
    Err(Problem::new(what, format!("parameter {}", part.key), "export with the model of the plan that is run"))
}

fn write_numbers(file: &mut impl Write, numbers: &[f32], dtype: DType) -> std::io::Result<()> {
    let mut bytes = Vec::new();
    for numbers in numbers.chunks(CONVERTED_AT_ONCE) {
        bytes.clear();
        match dtype {
            DType::BF16 => bytes.extend(numbers.iter().flat_map(|number| bf16::from_f32(*number).to_le_bytes())),
            DType::FP16 => bytes.extend(numbers.iter().flat_map(|number| f16::from_f32(*number).to_le_bytes())),
            DType::FP32 => bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes())),
        }
        file.write_all(&bytes)?;
    }
    Ok(())
}

fn write_json(path: &Path, value: &Value) -> Result<(), Problem> {
    let mut text = serde_json::to_string_pretty(value).expect("keys are text");
    text.push('\n');
    let written = File::create(path).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    written.map_err(|error| unwritable(path, &error))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use ir::model::read_model;
    use tempfile::TempDir;

    use super::super::checkpoint::{Checkpoint, DimRange};
    use super::*;

    /// Makes up parameters whose numbers are all different.
    fn made_up(model: &ModelSpec) -> BTreeMap<String, Vec<f32>> {
        let (_, outputs) = outputs(model).unwrap_or_else(|problem| panic!("{problem}"));
        let mut next = 0.0;
        let mut number = || {
            next += 0.5;
            next
        };
        let parts = outputs.into_iter().flat_map(|output| output.parts);
        let values = |part: Location| {
            let count: u64 = part.shape.iter().map(|(_, extent)| extent).product();
            (part.key, (0..count).map(|_| number()).collect())
        };
        parts.map(values).collect()
    }

    #[test]
    fn shards_hold_each_tensor_once_and_are_read_again() {
        let texts =
            [include_str!("../../../tests/fixtures/gpt2.ron"), include_str!("../../../tests/fixtures/llama.ron")];
        for text in texts {
            let model = read_model(text, "fixture").unwrap_or_else(|error| panic!("{error}"));
            let parameters = made_up(&model);
            for (limit, count) in [(1, None), (40_000, None), (SHARD_LIMIT, Some(1))] {
                let scratch = TempDir::new().expect("a scratch folder");
                let folder = scratch.path().join("exported");
                let gather = |key: &str| Ok::<_, Problem>(parameters[key].clone());
                export_in_shards(&folder, &model, limit, gather).unwrap_or_else(|problem| panic!("{problem}"));
                let shards = check_index(&folder, &model, limit);
                assert!(count.is_none_or(|count| count == shards), "{} at {limit}: {shards}", model.name);
                check_numbers(&folder, &model, &parameters);
            }
        }
    }

    /// The index names every file and tensor; no shard of several tensors exceeds the limit. Gives their number.
    fn check_index(folder: &Path, model: &ModelSpec, limit: u64) -> usize {
        let Ok(text) = fs::read_to_string(folder.join(INDEX_FILE)) else { return 1 };
        let index: Value = serde_json::from_str(&text).expect("it is JSON");
        let map = index["weight_map"].as_object().expect("an object");
        let (_, outputs) = outputs(model).unwrap_or_else(|problem| panic!("{problem}"));
        assert_eq!(map.len(), outputs.len());
        let total: u64 = outputs.iter().map(|output| bytes_of(output, model.dtype)).sum();
        assert_eq!(index["metadata"]["total_size"], total);
        let files: BTreeSet<&str> = map.values().filter_map(Value::as_str).collect();
        for (position, file) in files.iter().enumerate() {
            assert_eq!(*file, format!("model-{:05}-of-{:05}.safetensors", position + 1, files.len()));
            let held: Vec<&Output> = outputs.iter().filter(|output| map[&output.name] == *file).collect();
            let bytes: u64 = held.iter().map(|output| bytes_of(output, model.dtype)).sum();
            assert!(held.len() == 1 || bytes <= limit, "{file} has {bytes} bytes");
        }
        files.len()
    }

    fn check_numbers(folder: &Path, model: &ModelSpec, parameters: &BTreeMap<String, Vec<f32>>) {
        let checkpoint = Checkpoint::open(folder, model).unwrap_or_else(|error| panic!("{error}"));
        for (key, shape) in checkpoint.parameters().filter(|(key, _)| parameters.contains_key(*key)) {
            let whole: Vec<DimRange> =
                shape.iter().map(|(name, length)| DimRange { name: *name, start: 0, length: *length }).collect();
            let found = checkpoint.read(key, &whole).unwrap_or_else(|problem| panic!("{problem}"));
            assert!(found == parameters[key], "{key}");
        }
    }
}
