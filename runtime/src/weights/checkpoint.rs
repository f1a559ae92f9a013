//! Reading: a checkpoint is checked as a whole when it is opened, then any part of a parameter can be read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use hardware_profiles::files::read_text;
use ir::error::{Error, Problem};
use ir::graph::DimName;
use ir::model::ModelSpec;
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::architecture::{Architecture, HEAD};
use super::layout::{Location, locate_parameters};
use super::strided::{Walk, copy_strided};

/// File of a checkpoint that is not sharded.
pub(super) const SINGLE_FILE: &str = "model.safetensors";
/// Names the file of each tensor of a sharded checkpoint.
pub(super) const INDEX_FILE: &str = "model.safetensors.index.json";
/// Bytes before the header of a safetensors file: its length.
const LENGTH_BYTES: usize = 8;
/// Largest index accepted; one of a model with a thousand layers has a few MiB.
const INDEX_LIMIT: u64 = 64 << 20;

/// An open checkpoint of a model. Its files must not be changed while it is open.
#[derive(Debug)]
pub struct Checkpoint {
    maps: Vec<Mmap>,
    tensors: BTreeMap<String, Tensor>,
    locations: BTreeMap<String, Location>,
}

/// A part of a dim of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DimRange {
    /// The dim.
    pub name: DimName,
    /// First index.
    pub start: u64,
    /// How many.
    pub length: u64,
}

/// A tensor of a file.
#[derive(Clone, Debug)]
struct Tensor {
    /// Position among the maps.
    file: usize,
    /// Name of the file, for messages.
    path: PathBuf,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Bytes of the file.
    bytes: Range<usize>,
}

/// A dim of a region with its stride in the tensor.
struct RegionDim {
    range: DimRange,
    /// Indices that the tensor holds; the rest, rows that padding added, reads as zero.
    held: u64,
    stride: u64,
}

impl Checkpoint {
    /// Opens a directory with `model.safetensors`, or with `model.safetensors.index.json` and its shards.
    ///
    /// # Errors
    /// Every file that cannot be read and every tensor that is missing, left over, of another shape, or of
    /// another number format than F32, F16 and BF16.
    pub fn open(directory: &Path, model: &ModelSpec) -> Result<Checkpoint, Error> {
        let single = directory.join(SINGLE_FILE);
        let index = directory.join(INDEX_FILE);
        if single.is_file() {
            return Checkpoint::open_files(&[single], model, &BTreeMap::new());
        }
        if !index.is_file() {
            let what = format!("there is neither {SINGLE_FILE} nor {INDEX_FILE}");
            let help = "name the directory of a checkpoint in safetensors; `save_pretrained` writes one";
            return Err(invalid(Problem::new(what, directory.display().to_string(), help)));
        }
        let files_of = read_index(&index).map_err(invalid)?;
        let files: BTreeSet<&String> = files_of.values().collect();
        let files: Vec<PathBuf> = files.into_iter().map(|file| directory.join(file)).collect();
        Checkpoint::open_files(&files, model, &files_of)
    }

    /// Opens one file that holds all tensors of a model under their names, whatever it is called.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open_file(file: &Path, model: &ModelSpec) -> Result<Checkpoint, Error> {
        Checkpoint::open_files(&[file.to_owned()], model, &BTreeMap::new())
    }

    fn open_files(
        files: &[PathBuf],
        model: &ModelSpec,
        files_of: &BTreeMap<String, String>,
    ) -> Result<Checkpoint, Error> {
        let (architecture, locations) = locate_parameters(model).map_err(invalid)?;
        let (mut maps, mut tensors, mut problems) = (Vec::new(), BTreeMap::new(), Vec::new());
        for path in files {
            match map_file(path, maps.len()) {
                Ok((map, found)) => {
                    maps.push(map);
                    found.into_iter().for_each(|(name, tensor)| add_tensor(&mut tensors, name, tensor, &mut problems));
                }
                Err(problem) => problems.push(problem),
            }
        }
        check_index(files_of, &tensors, &mut problems);
        let tensors = without_prefix(architecture, tensors);
        // A file that cannot be read would make all its tensors look missing.
        if problems.is_empty() {
            check_tensors(architecture, model, &locations, &tensors, files, &mut problems);
        }
        if !problems.is_empty() {
            return Err(Error::Invalid(problems));
        }
        let locations = locations.into_iter().map(|location| (location.key.clone(), location)).collect();
        Ok(Checkpoint { maps, tensors, locations })
    }

    /// Keys of the model's parameters (as `ir::interpreter::parameter_key` gives them) with their dims and whole
    /// extents, without rows added for the tensor axis. A tied head has the token embedding's numbers.
    pub fn parameters(&self) -> impl Iterator<Item = (&str, &[(DimName, u64)])> {
        self.locations.values().map(|location| (location.key.as_str(), location.shape.as_slice()))
    }

    /// A part of a parameter, row-major in the order of `region`, which names each dim of the parameter once.
    ///
    /// Rows of the vocabulary beyond those of the checkpoint, which padding added, are zeros.
    ///
    /// # Errors
    /// A key that the model lacks, or a region that is not one of the parameter.
    pub fn read(&self, key: &str, region: &[DimRange]) -> Result<Vec<f32>, Problem> {
        let location = self.location(key)?;
        Ok(self.read_dims(location, &region_dims(location, region)?))
    }

    /// The elements `elements` of what [`Checkpoint::read`] gives, without reading much more than them: what a
    /// rank holds of its part under ZeRO.
    ///
    /// # Errors
    /// As [`Checkpoint::read`]; or elements beyond the region's end.
    pub fn read_elements(&self, key: &str, region: &[DimRange], elements: Range<usize>) -> Result<Vec<f32>, Problem> {
        let location = self.location(key)?;
        let mut dims = region_dims(location, region)?;
        let total: u64 = dims.iter().map(|dim| dim.range.length).product();
        let Range { mut start, end } = elements;
        if start > end || end as u64 > total {
            let what = format!("elements {start} to {end} of {total} were asked for");
            return Err(mismatch(key, what));
        }
        if start == end {
            return Ok(Vec::new());
        }
        let wanted = end - start;
        // Narrow the outermost dims to the indices that hold the elements.
        let mut inner = total as usize;
        for dim in &mut dims {
            inner /= dim.range.length as usize;
            let (first, last) = (start / inner, (start + wanted - 1) / inner);
            dim.range.start += first as u64;
            dim.range.length = (last - first + 1) as u64;
            start -= first * inner;
            if last > first {
                break;
            }
        }
        let covering = self.read_dims(location, &dims);
        Ok(covering[start..start + wanted].to_vec())
    }

    fn location(&self, key: &str) -> Result<&Location, Problem> {
        self.locations.get(key).ok_or_else(|| mismatch(key, "the model has no such parameter".to_owned()))
    }

    fn read_dims(&self, location: &Location, dims: &[RegionDim]) -> Vec<f32> {
        let tensor = &self.tensors[&location.tensor];
        let total: u64 = dims.iter().map(|dim| dim.range.length).product();
        let mut result = vec![0.0; total as usize];
        let (mut from, mut to) = (location.offset, total);
        let mut walks = Vec::new();
        for dim in dims {
            let DimRange { start, length, .. } = dim.range;
            to /= length.max(1);
            from += start * dim.stride;
            let held = length.min(dim.held.saturating_sub(start));
            walks.push(Walk { length: held as usize, from: dim.stride as usize, to: to as usize });
        }
        copy_numbers(tensor.dtype, &self.maps[tensor.file][tensor.bytes.clone()], &walks, from as usize, &mut result);
        result
    }
}

/// Copies numbers of a file to their places, as f32; both sides are in elements.
fn copy_numbers(dtype: Dtype, bytes: &[u8], walks: &[Walk], from: usize, target: &mut [f32]) {
    match dtype {
        Dtype::BF16 => copy_words(bytes, |word| bf16::from_le_bytes(word).to_f32(), walks, from, target),
        Dtype::F16 => copy_words(bytes, |word| f16::from_le_bytes(word).to_f32(), walks, from, target),
        Dtype::F32 => copy_words(bytes, f32::from_le_bytes, walks, from, target),
        other => unreachable!("opening refuses tensors of format {other:?}"),
    }
}

/// Copies words of `N` bytes, which need not be aligned.
fn copy_words<const N: usize>(
    bytes: &[u8],
    number: impl Fn([u8; N]) -> f32,
    walks: &[Walk],
    from: usize,
    target: &mut [f32],
) {
    let (words, _) = bytes.as_chunks::<N>();
    let load_run = |from: usize, run: &mut [f32]| {
        run.iter_mut().zip(&words[from..]).for_each(|(target, word)| *target = number(*word));
    };
    copy_strided(walks, from, 0, |index| number(words[index]), load_run, target);
}

/// The region's dims with strides, checked against the parameter's.
fn region_dims(location: &Location, region: &[DimRange]) -> Result<Vec<RegionDim>, Problem> {
    let names: BTreeSet<DimName> = region.iter().map(|range| range.name).collect();
    let expected: BTreeSet<DimName> = location.shape.iter().map(|(name, _)| *name).collect();
    if names != expected || names.len() != region.len() {
        let given: Vec<DimName> = region.iter().map(|range| range.name).collect();
        return Err(mismatch(&location.key, format!("a part along {given:?} of {:?} was asked for", location.shape)));
    }
    let dim = |range: &DimRange| {
        let position = location.shape.iter().position(|(name, _)| *name == range.name).expect("the names are equal");
        let held = location.shape[position].1;
        let beyond = range.start.checked_add(range.length).is_none_or(|end| end > held);
        if beyond && range.name != DimName::Vocabulary {
            let DimRange { name, start, length } = range;
            return Err(mismatch(&location.key, format!("{length} of {held} {name:?} from {start} on were asked for")));
        }
        Ok(RegionDim { range: *range, held, stride: location.strides[position] })
    };
    region.iter().map(dim).collect()
}

fn invalid(problem: Problem) -> Error {
    Error::Invalid(vec![problem])
}

fn mismatch(key: &str, what: String) -> Problem {
    Problem::new(what, format!("parameter {key}"), "open the checkpoint with the model of the plan that is run")
}

/// Maps a file and reads its header.
fn map_file(path: &Path, file: usize) -> Result<(Mmap, Vec<(String, Tensor)>), Problem> {
    let shown = path.display().to_string();
    let unreadable = |error: std::io::Error| {
        Problem::new(format!("cannot read the file: {error}"), shown.clone(), "fetch the checkpoint's files again")
    };
    let handle = File::open(path).map_err(unreadable)?;
    // SAFETY: the map is read-only, and numbers are copied out of it before they are used; that nobody changes
    // the files of an open checkpoint is the contract of `Checkpoint`, as of every reader of mapped weights.
    #[allow(unsafe_code)]
    let map = unsafe { Mmap::map(&handle) }.map_err(unreadable)?;
    let (header, metadata) = SafeTensors::read_metadata(&map).map_err(|error| {
        Problem::new(format!("this is no safetensors file: {error}"), shown.clone(), "fetch the file again, whole")
    })?;
    let start = LENGTH_BYTES + header;
    let tensors = metadata.tensors().into_iter().map(|(name, info)| {
        let bytes = start + info.data_offsets.0..start + info.data_offsets.1;
        (name, Tensor { file, path: path.to_owned(), dtype: info.dtype, shape: info.shape.clone(), bytes })
    });
    let mut tensors: Vec<(String, Tensor)> = tensors.collect();
    tensors.sort_unstable_by(|(left, _), (right, _)| left.cmp(right));
    Ok((map, tensors))
}

/// The file of each tensor.
fn read_index(path: &Path) -> Result<BTreeMap<String, String>, Problem> {
    let shown = path.display().to_string();
    let text = read_text(path, INDEX_LIMIT)?;
    let wrong = |what: String| Problem::new(what, shown.clone(), "fetch the index again, whole");
    let index: Value = serde_json::from_str(&text).map_err(|error| wrong(format!("this is no JSON: {error}")))?;
    let map = index.get("weight_map").and_then(Value::as_object);
    let map = map.ok_or_else(|| wrong("there is no object `weight_map`".to_owned()))?;
    let mut files = BTreeMap::new();
    for (name, file) in map {
        let plain = file.as_str().filter(|file| Path::new(file).file_name().is_some_and(|name| name == *file));
        let file = plain.ok_or_else(|| wrong(format!("the file of {name} is {file}, not the name of one beside")))?;
        files.insert(name.clone(), file.to_owned());
    }
    Ok(files)
}

fn add_tensor(tensors: &mut BTreeMap<String, Tensor>, name: String, tensor: Tensor, problems: &mut Vec<Problem>) {
    if let Some(first) = tensors.get(&name) {
        let what = format!("{name} is also in {}", first.path.display());
        problems.push(Problem::new(what, tensor.path.display().to_string(), "keep the files of one checkpoint only"));
    } else {
        tensors.insert(name, tensor);
    }
}

/// What the index says must be so.
fn check_index(files_of: &BTreeMap<String, String>, tensors: &BTreeMap<String, Tensor>, problems: &mut Vec<Problem>) {
    for (name, file) in files_of {
        let is_there =
            tensors.get(name).is_some_and(|tensor| tensor.path.file_name().is_some_and(|found| found == file.as_str()));
        if !is_there && problems.iter().all(|problem| !problem.location.ends_with(file.as_str())) {
            let what = format!("{name} is not in {file}");
            problems.push(Problem::new(
                what,
                INDEX_FILE,
                "fetch the index and that file again: they do not belong together",
            ));
        }
    }
}

/// Names without the architecture's prefix, which checkpoints of the model without its head lack.
fn without_prefix(architecture: Architecture, tensors: BTreeMap<String, Tensor>) -> BTreeMap<String, Tensor> {
    let prefix = architecture.prefix();
    tensors.into_iter().map(|(name, tensor)| (name.strip_prefix(prefix).unwrap_or(&name).to_owned(), tensor)).collect()
}

/// Checks names, shapes and number formats of all tensors.
fn check_tensors(
    architecture: Architecture,
    model: &ModelSpec,
    locations: &[Location],
    tensors: &BTreeMap<String, Tensor>,
    files: &[PathBuf],
    problems: &mut Vec<Problem>,
) {
    let origin = match files {
        [file] => file.display().to_string(),
        _ => files.first().and_then(|file| file.parent()).unwrap_or(Path::new("")).display().to_string(),
    };
    let expected: BTreeMap<&str, &Location> =
        locations.iter().map(|location| (location.tensor.as_str(), location)).collect();
    for (name, location) in &expected {
        match tensors.get(*name) {
            None => problems.push(Problem::new(
                format!("{name} is missing: {} of {}", location.key, model.name),
                origin.clone(),
                "name the checkpoint of this model, with all its files",
            )),
            Some(tensor) => check_tensor(name, location, tensor, problems),
        }
    }
    let tied_head = |name: &str| name == HEAD && model.tied_embedding;
    let buffer = |name: &str| architecture.buffers().iter().any(|ending| name.ends_with(ending));
    for (name, tensor) in tensors {
        if !expected.contains_key(name.as_str()) && !tied_head(name) && !buffer(name) {
            problems.push(Problem::new(
                format!("{name} is no parameter of {}", model.name),
                tensor.path.display().to_string(),
                "name the checkpoint of this model; other layers, biases or heads make another model",
            ));
        }
    }
}

fn check_tensor(name: &str, location: &Location, tensor: &Tensor, problems: &mut Vec<Problem>) {
    let place = tensor.path.display().to_string();
    if !tensor.shape.iter().map(|extent| *extent as u64).eq(location.tensor_shape.iter().copied()) {
        let what = format!("{name} has shape {:?}, not {:?}", tensor.shape, location.tensor_shape);
        let help = format!("{} of the model is {:?}; name its checkpoint", location.key, location.shape);
        problems.push(Problem::new(what, place.clone(), help));
    }
    if !matches!(tensor.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
        let what = format!("{name} holds {:?}", tensor.dtype);
        problems.push(Problem::new(what, place, "give a checkpoint in F32, F16 or BF16, not a quantised one"));
    }
}
