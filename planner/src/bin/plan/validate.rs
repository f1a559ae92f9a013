//! `plan validate`: predict every row of a table of measured runs.

use hardware_profiles::files::read_text;
use planner::report::validation;
use planner::validate::summary::summarize;
use planner::validate::table::read_table;
use planner::validate::validate;

use crate::Printed;
use crate::arguments::ValidateOptions;

/// Largest table.
pub const TABLE_LIMIT: u64 = 64 << 20;

/// Predicts a table.
pub fn run(options: &ValidateOptions) -> Printed {
    let origin = options.runs.display().to_string();
    let rows = validate(read_table(&read_text(&options.runs, TABLE_LIMIT)?, &origin)?);
    let summary = summarize(&rows);
    Ok(match options.json {
        true => format!("{:#}\n", validation::value(&rows, &summary)),
        false => validation::text(&rows, &summary),
    })
}
