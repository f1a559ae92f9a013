//! `execute-plan prepare`: tokenise text.

use indicatif::{ProgressBar, ProgressStyle};
use runtime::Error;
use runtime::prepare::{Report, Request, bytes_of, prepare};

use crate::arguments::PrepareOptions;

/// Tokenises text and prints what was written.
pub fn run(options: PrepareOptions) -> Result<(), Error> {
    let PrepareOptions { text, tokenizer, out, force } = options;
    let shown = out.display().to_string();
    let bar = ProgressBar::new(bytes_of(&text).map_err(Error::BadInput)?).with_style(style());
    let request = Request { texts: text, tokenizer, out, force };
    let prepared = prepare(&request, |bytes| bar.inc(bytes));
    bar.finish_and_clear();
    let report = prepared.map_err(|problem| Error::BadInput(vec![problem]))?;
    println!("{}", summary(&shown, &report));
    Ok(())
}

/// On stderr, and only if that is a terminal.
fn style() -> ProgressStyle {
    ProgressStyle::with_template("{bar:40} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left")
        .expect("the template names known fields only")
}

fn summary(prefix: &str, report: &Report) -> String {
    let end = match &report.separator {
        Some((token, id)) => format!("each document ends with {token}, id {id}"),
        None => "the tokenizer has no end-of-text token, so documents follow one another without one".to_owned(),
    };
    format!(
        "{prefix}.bin, {prefix}.idx: {} documents, {} tokens of {} bytes; ids 0 to {}; {end}",
        report.documents,
        report.tokens,
        report.token_type.bytes(),
        report.vocabulary - 1
    )
}
