//! `plan compare`: two plans term by term.

use planner::compare::{Sides, compare};
use planner::report::comparison;

use crate::Printed;
use crate::arguments::CompareOptions;
use crate::inspect::read_verified;

/// Compares two plan files.
pub fn run(options: &CompareOptions) -> Printed {
    let (a, b) = (read_verified(&options.a)?, read_verified(&options.b)?);
    let comparison = compare(&a, &b);
    let plans = Sides { a: &a, b: &b };
    Ok(match options.json {
        true => format!("{:#}\n", comparison::value(plans, &comparison)),
        false => comparison::text(plans, &comparison),
    })
}
