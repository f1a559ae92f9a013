//! A tokenised corpus: Megatron's `.bin` and `.idx`, read through memory maps.

use std::fs::File;
use std::path::{Path, PathBuf};

use ir::error::Problem;
use ir::text::byte_hash;
use memmap2::{Advice, Mmap};

use super::index::Index;

/// An open corpus.
#[derive(Debug)]
pub struct Corpus {
    bin: Mmap,
    bin_path: PathBuf,
    index: Index,
    vocabulary: u64,
}

impl Corpus {
    /// Opens `PREFIX.bin` and `PREFIX.idx`; ids are checked against `vocabulary` when they are read.
    ///
    /// # Errors
    /// Files that are missing, of another kind, cut short or without tokens.
    pub fn open(prefix: &Path, vocabulary: u64) -> Result<Corpus, Problem> {
        let [index_path, bin_path] = ["idx", "bin"].map(|ending| with_ending(prefix, ending));
        let index = Index::new(map_file(&index_path, prefix)?, &index_path)?;
        if index.tokens == 0 {
            let help = "tokenise some text with `execute-plan prepare`";
            return Err(Problem::new("the corpus holds no tokens", index_path.display().to_string(), help));
        }
        let bin = map_file(&bin_path, prefix)?;
        let expected = index.tokens * index.token_type.bytes();
        if bin.len() as u64 != expected {
            return Err(Problem::new(
                format!(
                    "the file has {} bytes, but its index lists {} tokens of {} bytes: {expected}",
                    bin.len(),
                    index.tokens,
                    index.token_type.bytes()
                ),
                bin_path.display().to_string(),
                "the file was cut short, or the two files are not of one pair: copy or write both again",
            ));
        }
        Ok(Corpus { bin, bin_path, index, vocabulary })
    }

    /// The file that holds the tokens.
    pub fn origin(&self) -> &Path {
        &self.bin_path
    }

    /// SHA-256 of the index file, as 16 hexadecimal digits: which sequences and documents there are.
    pub fn index_hash(&self) -> String {
        byte_hash(self.index.bytes())
    }

    /// All tokens.
    pub fn tokens(&self) -> u64 {
        self.index.tokens
    }

    /// Number of documents.
    pub fn documents(&self) -> u64 {
        self.index.documents()
    }

    /// The first token at or behind `token` that starts a document, or the number of tokens.
    pub fn document_border(&self, token: u64) -> u64 {
        let (mut low, mut high) = (0, self.index.documents());
        while low < high {
            let middle = low + (high - low) / 2;
            match self.index.document_start(middle) < token {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        self.index.document_start(low)
    }

    /// Reads the tokens from `start` on; they must exist.
    ///
    /// # Errors
    /// An id that is negative or not in the vocabulary.
    pub fn read(&self, start: u64, out: &mut [u32]) -> Result<(), Problem> {
        let width = self.index.token_type.bytes();
        let bytes = &self.bin[(start * width) as usize..][..out.len() * width as usize];
        for (position, (token, bytes)) in out.iter_mut().zip(bytes.chunks_exact(width as usize)).enumerate() {
            let id = self.index.token_type.read(bytes);
            if id < 0 || id as u64 >= self.vocabulary {
                return Err(self.foreign_id(start + position as u64, id));
            }
            *token = id as u32;
        }
        Ok(())
    }

    fn foreign_id(&self, position: u64, id: i64) -> Problem {
        Problem::new(
            format!("token {position} is id {id}, but the model's vocabulary has ids 0 to {}", self.vocabulary - 1),
            self.bin_path.display().to_string(),
            "tokenise the text with this model's tokenizer, or give the model the tokenizer's vocabulary size",
        )
    }
}

/// A prefix with an ending; what the prefix has behind a dot stays.
pub fn with_ending(prefix: &Path, ending: &str) -> PathBuf {
    let mut name = prefix.as_os_str().to_owned();
    name.push(".");
    name.push(ending);
    PathBuf::from(name)
}

#[allow(unsafe_code, reason = "a memory map is the only way to read without a copy")]
fn map_file(path: &Path, prefix: &Path) -> Result<Mmap, Problem> {
    let wrong = |error: std::io::Error| {
        let what = format!("cannot read the file: {error}");
        Problem::new(what, path.display().to_string(), help_for(prefix, error.kind()))
    };
    let file = File::open(path).map_err(wrong)?;
    // SAFETY: the map is read only, and bytes are interpreted after they are copied out. Another program that
    // shortens the file during the run ends this one with SIGBUS, as with any memory map.
    let map = unsafe { Mmap::map(&file) }.map_err(wrong)?;
    // Samples are read in order; whether the kernel takes the advice changes nothing but speed.
    map.advise(Advice::Sequential).ok();
    Ok(map)
}

fn help_for(prefix: &Path, kind: std::io::ErrorKind) -> String {
    let shown = prefix.display().to_string();
    let stem = shown.strip_suffix(".bin").or_else(|| shown.strip_suffix(".idx"));
    let megatron = format!("{shown}_text_document");
    match (stem, kind) {
        (Some(stem), _) => format!("leave the ending out: --data {stem}"),
        (None, std::io::ErrorKind::NotFound) if with_ending(Path::new(&megatron), "idx").exists() => {
            format!("Megatron adds to the prefix: --data {megatron}")
        }
        (None, std::io::ErrorKind::NotFound) => {
            "--data takes the common prefix of a .bin and an .idx file; `execute-plan prepare` writes them".to_owned()
        }
        (None, std::io::ErrorKind::PermissionDenied) => "allow reading it, or run as its owner".to_owned(),
        (None, _) => "check the path and the disk".to_owned(),
    }
}
