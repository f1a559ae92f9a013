//! Writes Megatron's `.bin` and `.idx`, byte for byte as Megatron-Core does; nothing half written is left.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use ir::error::Problem;
use tempfile::{Builder, NamedTempFile};

use super::corpus::with_ending;
use super::index::{MAGIC, TokenType, VERSION};

/// A pair of files that is being written, under other names until it is finished.
#[derive(Debug)]
pub struct DatasetWriter {
    prefix: PathBuf,
    token_type: TokenType,
    bin: BufWriter<NamedTempFile>,
    /// Tokens of each sequence.
    lengths: Vec<i32>,
    /// Sequences before each document, and all of them.
    borders: Vec<i64>,
}

impl DatasetWriter {
    /// Starts a pair of files with a prefix.
    ///
    /// # Errors
    /// A folder that cannot be written to.
    pub fn create(prefix: &Path, token_type: TokenType) -> Result<DatasetWriter, Problem> {
        let bin = BufWriter::with_capacity(1 << 20, scratch_file(prefix)?);
        Ok(DatasetWriter { prefix: prefix.to_owned(), token_type, bin, lengths: Vec::new(), borders: vec![0] })
    }

    /// Appends a document of one sequence, or without a sequence if it has no tokens.
    ///
    /// # Errors
    /// A full disk, an id that the token type cannot hold, a document of 2³¹ tokens or more.
    pub fn add_document(&mut self, tokens: &[u32]) -> Result<(), Problem> {
        let wrong =
            |what: String, help: &str| Problem::new(what, with_ending(&self.prefix, "bin").display().to_string(), help);
        let number = self.borders.len() - 1;
        let length = i32::try_from(tokens.len()).map_err(|_| {
            wrong(format!("document {number} has {} tokens", tokens.len()), "split it: a document has less than 2^31")
        })?;
        for token in tokens {
            if u64::from(*token) > self.token_type.largest() {
                let what = format!("id {token} of document {number} does not fit in a token's bytes");
                return Err(wrong(what, "write with more bytes for each token"));
            }
            let bytes = i64::from(*token).to_le_bytes();
            let written = self.bin.write_all(&bytes[..self.token_type.bytes() as usize]);
            written.map_err(|error| cannot_write(&self.prefix, &error))?;
        }
        if length > 0 {
            self.lengths.push(length);
        }
        self.borders.push(self.lengths.len() as i64);
        Ok(())
    }

    /// Tokens written so far.
    pub fn tokens(&self) -> u64 {
        self.lengths.iter().map(|length| *length as u64).sum()
    }

    /// Writes the index and gives both files their names; an older pair of that name is replaced.
    ///
    /// # Errors
    /// A full disk or a folder that cannot be written to.
    pub fn finish(self) -> Result<(), Problem> {
        let DatasetWriter { prefix, token_type, bin, lengths, borders } = self;
        let failed = |error: std::io::Error| cannot_write(&prefix, &error);
        let mut index = BufWriter::new(scratch_file(&prefix)?);
        write_index(&mut index, token_type, &lengths, &borders).map_err(failed)?;
        let [bin_path, index_path] = ["bin", "idx"].map(|ending| with_ending(&prefix, ending));
        let [bin, index] = [bin, index].map(|file| file.into_inner().map_err(|error| failed(error.into_error())));
        let (bin, index) = (bin?, index?);
        bin.as_file().sync_all().map_err(failed)?;
        index.as_file().sync_all().map_err(failed)?;
        // The index comes last and an old one goes first: at no moment does an index belong to other tokens.
        match fs::remove_file(&index_path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        bin.persist(&bin_path).map_err(|error| failed(error.error))?;
        index.persist(&index_path).map_err(|error| failed(error.error))?;
        File::open(folder_of(&prefix)).and_then(|folder| folder.sync_all()).map_err(failed)
    }
}

fn write_index(file: &mut impl Write, token_type: TokenType, lengths: &[i32], borders: &[i64]) -> std::io::Result<()> {
    file.write_all(&MAGIC)?;
    file.write_all(&VERSION.to_le_bytes())?;
    file.write_all(&[token_type.code()])?;
    file.write_all(&(lengths.len() as u64).to_le_bytes())?;
    file.write_all(&(borders.len() as u64).to_le_bytes())?;
    lengths.iter().try_for_each(|length| file.write_all(&length.to_le_bytes()))?;
    let mut offset = 0i64;
    for length in lengths {
        file.write_all(&offset.to_le_bytes())?;
        offset += i64::from(*length) * token_type.bytes() as i64;
    }
    borders.iter().try_for_each(|border| file.write_all(&border.to_le_bytes()))
}

/// A file beside the final one, readable by whoever may read new files; it goes away if it is not renamed.
fn scratch_file(prefix: &Path) -> Result<NamedTempFile, Problem> {
    let mut builder = Builder::new();
    builder.prefix(".prepare-");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder_of(prefix)).map_err(|error| cannot_write(prefix, &error))
}

fn folder_of(prefix: &Path) -> &Path {
    match prefix.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

fn cannot_write(prefix: &Path, error: &std::io::Error) -> Problem {
    let help = match error.kind() {
        std::io::ErrorKind::NotFound => "make the folder first",
        std::io::ErrorKind::StorageFull => "free some space, or write to another disk",
        _ => "choose a folder that can be written to",
    };
    Problem::new(format!("cannot write: {error}"), prefix.display().to_string(), help)
}
