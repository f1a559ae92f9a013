//! Tokenises text into the files that a run reads: `execute-plan prepare`.
//!
//! As Megatron-LM's `preprocess_data.py --append-eod`: a `.jsonl` file has one document in the field `text` of each
//! line, any other file is one document; a document that gives no tokens has no sequence, every other ends with
//! the tokenizer's end-of-text token if it has one. No other special token is added.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use hardware_profiles::files::read_text;
use ir::error::Problem;
use serde::Deserialize;
use tokenizers::Tokenizer;

use crate::data::{DatasetWriter, TokenType};

/// Names of an end-of-text token in published tokenizers, the commonest first.
const SEPARATORS: [&str; 6] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>"];
/// Largest tokenizer file; the largest published ones have some 30 MB.
const TOKENIZER_LIMIT: u64 = 256 << 20;
/// Largest file that is one document: all of it is in memory, with its tokens.
const DOCUMENT_LIMIT: u64 = 1 << 30;
/// Bytes of text that are tokenised at once, on all cores.
const BATCH: u64 = 1 << 20;

/// What is to be tokenised.
#[derive(Clone, Debug)]
pub struct Request {
    /// Files of text.
    pub texts: Vec<PathBuf>,
    /// Tokenizer file of the `tokenizers` library.
    pub tokenizer: PathBuf,
    /// What the two files are called, endings apart.
    pub out: PathBuf,
    /// Whether files that exist are replaced.
    pub force: bool,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Documents.
    pub documents: u64,
    /// Tokens.
    pub tokens: u64,
    /// One more than the largest id that the tokenizer can give.
    pub vocabulary: u64,
    /// How tokens are stored.
    pub token_type: TokenType,
    /// The token behind each document and its id.
    pub separator: Option<(String, u32)>,
}

/// A line of a `.jsonl` file; other fields are of no interest.
#[derive(Deserialize)]
struct Line {
    text: String,
}

/// A tokenizer, what ends a document, and the files that grow.
struct Output {
    tokenizer: Tokenizer,
    separator: Option<(String, u32)>,
    writer: DatasetWriter,
    documents: u64,
}

/// Bytes of all texts: what progress counts up to.
///
/// # Errors
/// Every file that does not exist.
pub fn bytes_of(texts: &[PathBuf]) -> Result<u64, Vec<Problem>> {
    let sizes: Vec<_> = texts.iter().map(|path| file_size(path)).collect();
    let problems: Vec<Problem> = sizes.iter().filter_map(|size| size.clone().err()).collect();
    if problems.is_empty() { Ok(sizes.into_iter().flatten().sum()) } else { Err(problems) }
}

/// Tokenises texts into a pair of files; `progress` is told how many bytes are done since it was last told.
///
/// # Errors
/// Files that cannot be read or written, a text that is not UTF-8 or not of its kind, files in the way.
pub fn prepare(request: &Request, mut progress: impl FnMut(u64)) -> Result<Report, Problem> {
    check_free(request)?;
    let tokenizer = read_tokenizer(&request.tokenizer)?;
    let largest = tokenizer.get_vocab(true).into_values().max().unwrap_or(0);
    let vocabulary = u64::from(largest) + 1;
    let token_type = TokenType::for_vocabulary(vocabulary);
    let separator = SEPARATORS.iter().find_map(|name| Some(((*name).to_owned(), tokenizer.token_to_id(name)?)));
    let writer = DatasetWriter::create(&request.out, token_type)?;
    let mut output = Output { tokenizer, separator, writer, documents: 0 };
    for path in &request.texts {
        match path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("jsonl")) {
            true => tokenise_lines(path, &mut output, &mut progress)?,
            false => {
                let text = read_text(path, DOCUMENT_LIMIT)?;
                let bytes = text.len() as u64;
                add_documents(&mut output, path, vec![text])?;
                progress(bytes);
            }
        }
    }
    let Output { separator, writer, documents, .. } = output;
    let tokens = writer.tokens();
    writer.finish()?;
    Ok(Report { documents, tokens, vocabulary, token_type, separator })
}

fn tokenise_lines(path: &Path, output: &mut Output, progress: &mut impl FnMut(u64)) -> Result<(), Problem> {
    let mut file = BufReader::with_capacity(1 << 20, File::open(path).map_err(|error| unreadable(path, &error))?);
    let (mut batch, mut bytes, mut number) = (Vec::new(), 0, 0u64);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = file.read_until(b'\n', &mut line).map_err(|error| unreadable(path, &error))?;
        if read > 0 {
            number += 1;
            bytes += read as u64;
            batch.extend(document_of(path, number, &line)?);
        }
        if bytes >= BATCH || read == 0 {
            add_documents(output, path, std::mem::take(&mut batch))?;
            progress(bytes);
            bytes = 0;
        }
        if read == 0 {
            return Ok(());
        }
    }
}

/// The document of a line; none for a blank one.
fn document_of(path: &Path, number: u64, line: &[u8]) -> Result<Option<String>, Problem> {
    if line.iter().all(u8::is_ascii_whitespace) {
        return Ok(None);
    }
    match serde_json::from_slice(line) {
        Ok(Line { text }) => Ok(Some(text)),
        Err(error) => Err(Problem::new(
            format!("the line is no document: {error}"),
            format!("{}, line {number}", path.display()),
            "each line is a JSON object with a string field `text`; a plain text file is called .txt",
        )),
    }
}

fn add_documents(output: &mut Output, path: &Path, documents: Vec<String>) -> Result<(), Problem> {
    let encoded = output.tokenizer.encode_batch_fast(documents, false).map_err(|error| {
        let help = "the tokenizer cannot encode this text: check that its file is whole";
        Problem::new(format!("cannot tokenise: {error}"), path.display().to_string(), help)
    })?;
    for encoding in encoded {
        let mut tokens = encoding.get_ids().to_vec();
        if !tokens.is_empty() {
            tokens.extend(output.separator.as_ref().map(|(_, id)| *id));
        }
        output.writer.add_document(&tokens)?;
        output.documents += 1;
    }
    Ok(())
}

fn read_tokenizer(path: &Path) -> Result<Tokenizer, Problem> {
    let text = read_text(path, TOKENIZER_LIMIT)?;
    let wrong = |error: tokenizers::Error| {
        Problem::new(
            format!("this is no tokenizer: {error}"),
            path.display().to_string(),
            "name a tokenizer.json of the `tokenizers` library, as models on Hugging Face have it",
        )
    };
    let mut tokenizer: Tokenizer = text.parse().map_err(wrong)?;
    // Files of fine-tuned models often cut and pad documents; a corpus has them whole.
    tokenizer.with_truncation(None).map_err(wrong)?;
    tokenizer.with_padding(None);
    Ok(tokenizer)
}

fn check_free(request: &Request) -> Result<(), Problem> {
    let existing = ["bin", "idx"].map(|ending| PathBuf::from(format!("{}.{ending}", request.out.display())));
    match existing.iter().find(|path| path.exists() && !request.force) {
        None => Ok(()),
        Some(path) => {
            let help = "choose another --out, or replace it with --force";
            Err(Problem::new("the file exists", path.display().to_string(), help))
        }
    }
}

fn file_size(path: &Path) -> Result<u64, Problem> {
    let found = std::fs::metadata(path).map_err(|error| unreadable(path, &error))?;
    match found.is_file() {
        true => Ok(found.len()),
        false => Err(Problem::new("this is no file", path.display().to_string(), "name files of text")),
    }
}

fn unreadable(path: &Path, error: &std::io::Error) -> Problem {
    Problem::new(format!("cannot read the text: {error}"), path.display().to_string(), "check the path and the disk")
}
