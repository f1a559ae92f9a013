//! `plan import`: print a Hugging Face config.json as a model file.

use hardware_profiles::files::{INPUT_LIMIT, read_text};
use ir::text::write_ron;
use planner::huggingface::import_config;

use crate::Printed;
use crate::arguments::ImportOptions;

/// Depth of brackets that are written one field a line.
const WRITTEN_DEPTH: usize = 1;

/// Prints a model file.
pub fn run(options: &ImportOptions) -> Printed {
    let origin = options.config.display().to_string();
    let model = import_config(&read_text(&options.config, INPUT_LIMIT)?, &origin)?;
    Ok(write_ron(&model, WRITTEN_DEPTH))
}
