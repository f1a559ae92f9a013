//! The example models, compiled into the program so that `plan models` lists them anywhere.

use include_dir::{Dir, include_dir};
use ir::model::{ModelSpec, read_model};

use crate::error::Error;

static EXAMPLES: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../examples");

/// All example models, by file name.
///
/// # Errors
/// Never for the files of this repository; a test reads them all.
pub fn builtin_models() -> Result<Vec<ModelSpec>, Error> {
    let files = EXAMPLES.files().filter(|file| file.path().extension().is_some_and(|extension| extension == "ron"));
    let mut files: Vec<_> = files.collect();
    files.sort_by_key(|file| file.path());
    let read = |file: &include_dir::File<'_>| {
        let origin = format!("examples/{}", file.path().display());
        Ok(read_model(file.contents_utf8().unwrap_or_default(), &origin)?)
    };
    files.into_iter().map(read).collect()
}
