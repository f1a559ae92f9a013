//! `plan calibrate`: fit a user's own cluster from a few logged runs.

use hardware_profiles::cluster_file::{read_cluster_file, write_cluster_file};
use hardware_profiles::files::read_text;
use planner::calibrate::calibrate;
use planner::report::calibration;
use planner::validate::table::read_own_runs;

use crate::Printed;
use crate::arguments::CalibrateOptions;
use crate::output::write_whole;
use crate::search::read_profiles;
use crate::validate::TABLE_LIMIT;

/// Fits, writes the cluster file, and reports.
pub fn run(options: &CalibrateOptions) -> Printed {
    let origin = options.runs.display().to_string();
    let rows = read_own_runs(&read_text(&options.runs, TABLE_LIMIT)?, &origin)?;
    let subject = read_profiles(&options.cluster, options.stack.as_deref())?;
    let table = options.runs.file_name().unwrap_or_default().to_string_lossy();
    let name = options.out.file_stem().unwrap_or_default().to_string_lossy();
    let names = [&*subject.cluster.name.clone(), &*subject.stack.name.clone()];
    let found = calibrate(rows, &table, &subject, &name)?;
    let text = write_cluster_file(&found.file);
    let shown = options.out.display().to_string();
    // A constant that no profile may have is better found here than by the next command.
    read_cluster_file(&text, &shown)?;
    write_whole(&options.out, &text, options.force)?;
    Ok(match options.json {
        true => format!("{:#}\n", calibration::value(&found, names, &shown)),
        false => calibration::text(&found, names, &format!("written to {shown}: plan --cluster {shown}")),
    })
}
