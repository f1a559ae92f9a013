//! The same problem as a mixed-integer program: layer counts per stage and run, solved by microlp, or with the feature
//! `highs` by HiGHS.

use good_lp::{Expression, ProblemVariables, Solution, SolverModel, Variable, constraint, variable, variables};

use super::{LayerCounts, PartitionProblem, Repeats, StageShare};

#[cfg(feature = "highs")]
use good_lp::highs as solver;
#[cfg(not(feature = "highs"))]
use good_lp::microlp as solver;

/// Scales bytes to GiB, so that coefficients are of similar size.
const GIB: f64 = (1u64 << 30) as f64;

/// A stage's numbers of layers: of each run, and those computed again.
struct StageVariables {
    layers: [Variable; 2],
    recomputed: [Variable; 2],
    /// Whether any layer is computed again.
    repeats: Variable,
    /// Whether of each run all layers are computed again, and all that the stage may compute again are of it or before.
    is_least: [[Variable; 2]; 2],
    /// Whether the second run has begun.
    begun: Variable,
}

/// The split whose slowest stage is fastest, or `None` if no split fits into memory.
///
/// Minimise T over integers n[stage][run] ≥ r[stage][run] ≥ 0 with: Σ n[·][run] = layers[run]; the least number of
/// layers a stage; r = 0 unless the stage has room to repeat in (binary); time and memory of each stage at most T and
/// the capacity; and for two runs, in order: where a stage holds layers of the second run (binary y = 1), no later stage
/// holds layers of the first. With the same number N on each stage r0 = min(N, n0) and r1 = min(N − r0, n1), each by one
/// more binary that says which of the two is less.
pub fn solve_by_integer_program(problem: &PartitionProblem) -> Option<Vec<StageShare>> {
    let mut variables = variables!();
    let slowest = variables.add(variable().min(0.0));
    let stages: Vec<StageVariables> = problem.stages.iter().map(|_| stage_variables(&mut variables, problem)).collect();
    // Times are scaled so that the whole model takes about 1.
    let scale = super::dot(problem.layers, problem.layer_time).max(f64::MIN_POSITIVE);
    let all: u64 = problem.layers.iter().sum();
    let shared = match problem.repeats {
        Repeats::Never | Repeats::PerStage => None,
        Repeats::First(count) => Some(variables.add(variable().integer().min(count as f64).max(count as f64))),
        Repeats::SameOnEachStage => Some(count(&mut variables, all)),
    };
    let mut model = variables.minimise(slowest).using(solver);
    for (run, layers) in problem.layers.into_iter().enumerate() {
        let placed: Expression = stages.iter().map(|stage| stage.layers[run]).sum();
        model = model.with(constraint!(placed == layers as f64));
    }
    for (index, (stage, terms)) in stages.iter().zip(&problem.stages).enumerate() {
        let weighed = |counts: [Variable; 2], each: [f64; 2], unit: f64| -> Expression {
            counts[0] * (each[0] / unit) + counts[1] * (each[1] / unit)
        };
        let time =
            weighed(stage.layers, problem.layer_time, scale) + weighed(stage.recomputed, problem.repeat_time, scale);
        let memory = weighed(stage.layers, terms.layer_memory, GIB)
            - weighed(stage.recomputed, terms.saved_memory, GIB)
            + stage.repeats * (terms.repeat_memory / GIB);
        let [first, second] = stage.layers;
        model = model
            .with(constraint!(first + second >= terms.least_layers as f64))
            .with(constraint!(time + terms.fixed_time / scale <= slowest))
            .with(constraint!(second <= stage.begun * problem.layers[1] as f64));
        if problem.capacity.is_finite() {
            model = model.with(constraint!(memory <= (problem.capacity - terms.fixed_memory) / GIB));
        }
        for run in 0..2 {
            model = model
                .with(constraint!(stage.recomputed[run] <= stage.layers[run]))
                .with(constraint!(stage.recomputed[run] <= stage.repeats * problem.layers[run] as f64));
        }
        if let Some(shared) = shared {
            let [first, second] = stage.recomputed;
            let left: [Expression; 2] = [shared.into(), shared - first];
            for ((run, least), left) in [first, second].into_iter().enumerate().zip(left) {
                let [all_layers, all_left] = stage.is_least[run];
                model = model
                    .with(constraint!(least <= left.clone()))
                    .with(constraint!(least >= stage.layers[run] - (1 - all_layers) * all as f64))
                    .with(constraint!(least >= left - (1 - all_left) * all as f64))
                    .with(constraint!(all_layers + all_left >= 1));
            }
        }
        let later_stages = if problem.layers[1] > 0 { &stages[index + 1..] } else { &[] };
        for later in later_stages {
            model = model.with(constraint!(later.layers[0] <= (1 - stage.begun) * problem.layers[0] as f64));
        }
    }
    let solution = model.solve().ok()?;
    let values = |counts: [Variable; 2]| counts.map(|count| solution.value(count).round() as u64);
    let share =
        |stage: &StageVariables| StageShare { layers: values(stage.layers), recomputed: values(stage.recomputed) };
    Some(stages.iter().map(share).collect())
}

fn stage_variables(variables: &mut ProblemVariables, problem: &PartitionProblem) -> StageVariables {
    let open = if problem.repeats == Repeats::Never { LayerCounts::default() } else { problem.layers };
    StageVariables {
        layers: problem.layers.map(|most| count(variables, most)),
        recomputed: open.map(|most| count(variables, most)),
        repeats: variables.add(variable().binary()),
        is_least: [(); 2].map(|()| [(); 2].map(|()| variables.add(variable().binary()))),
        begun: variables.add(variable().binary()),
    }
}

fn count(variables: &mut ProblemVariables, most: u64) -> Variable {
    variables.add(variable().integer().min(0.0).max(most as f64))
}
