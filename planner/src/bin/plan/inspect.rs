//! `plan inspect`: show a plan.

use std::path::Path;

use hardware_profiles::files::{PLAN_LIMIT, read_text};
use ir::error::Problem;
use ir::mesh::{Axis, Rank};
use ir::plan::{Plan, Stage, read_plan};
use ir::verify::verify;
use planner::error::Error;
use planner::report::{inspect, json};

use crate::Printed;
use crate::arguments::InspectOptions;

/// Reads and verifies a plan file.
pub fn read_verified(path: &Path) -> Result<Plan, Error> {
    let origin = path.display().to_string();
    let plan = read_plan(&read_text(path, PLAN_LIMIT)?, &origin)?;
    let problems = verify(&plan, &origin);
    if problems.is_empty() { Ok(plan) } else { Err(Error::Verification(problems)) }
}

/// Shows a plan.
pub fn run(options: &InspectOptions) -> Printed {
    let plan = read_verified(&options.plan)?;
    let stage = named_stage(options, &plan)?;
    if options.json {
        return Ok(format!("{:#}\n", json::plan_value(&plan)));
    }
    Ok(match (stage, options.rank) {
        (Some(stage), Some(rank)) => inspect::rank(&plan, Rank(rank), stage),
        (Some(stage), None) => inspect::stage(&plan, stage),
        (None, _) => inspect::whole(&plan),
    })
}

/// The stage that the options name, by its number or by one of its ranks.
fn named_stage<'a>(options: &InspectOptions, plan: &'a Plan) -> Result<Option<&'a Stage>, Problem> {
    if let Some(number) = options.rank {
        let on_pipeline = plan.mesh.coordinate(Rank(number)).into_iter().find(|(axis, _)| *axis == Axis::Pipeline);
        let inside = on_pipeline.filter(|_| number < plan.mesh.world_size());
        let stage = inside.and_then(|(_, stage)| plan.stages.get(stage as usize));
        return stage.map(Some).ok_or_else(|| outside("rank", number, plan.mesh.world_size()));
    }
    let Some(number) = options.stage else { return Ok(None) };
    let stage = usize::try_from(number).ok().and_then(|index| plan.stages.get(index));
    stage.map(Some).ok_or_else(|| outside("stage", number, plan.stages.len() as u64))
}

fn outside(what: &str, number: u64, count: u64) -> Problem {
    Problem::new(
        format!("there is no {what} {number}"),
        format!("--{what}"),
        format!("the plan has {what}s 0 to {}", count - 1),
    )
}
