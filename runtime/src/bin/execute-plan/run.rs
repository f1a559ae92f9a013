//! `execute-plan PLAN`: run a plan.

use runtime::{Error, load};

use crate::arguments::RunOptions;

/// Runs a plan.
pub fn run(options: &RunOptions) -> Result<(), Error> {
    let plan = options.plan.as_deref().expect("the parser requires a plan where there is no subcommand");
    load(plan).map(|_| ())
}
