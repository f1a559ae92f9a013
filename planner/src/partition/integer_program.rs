//! The same problem as a mixed-integer program: layer counts per stage and run, solved by microlp.

use good_lp::{
    Expression, ProblemVariables, Solution, SolverModel, Variable, constraint, microlp, variable, variables,
};

use super::{LayerCounts, PartitionProblem};

/// Scales bytes to GiB, so that coefficients are of similar size.
const GIB: f64 = (1u64 << 30) as f64;

/// The split whose slowest stage is fastest, or `None` if no split fits into memory.
///
/// Minimise T over integers n[stage][run] ≥ 0 with: Σ n[·][run] = layers[run]; at least one layer a
/// stage; time and memory of each stage at most T and the capacity; and for two runs, in order: where a
/// stage holds layers of the second run (binary y = 1), no later stage holds layers of the first.
pub fn solve_by_integer_program(problem: &PartitionProblem) -> Option<Vec<LayerCounts>> {
    let mut variables = variables!();
    let slowest = variables.add(variable().min(0.0));
    let counts: Vec<[Variable; 2]> =
        problem.stages.iter().map(|_| problem.layers.map(|n| count(&mut variables, n))).collect();
    let begun: Vec<Variable> = problem.stages.iter().map(|_| variables.add(variable().binary())).collect();
    // Times are scaled so that the whole model takes about 1.
    let scale = super::dot(problem.layers, problem.layer_time).max(f64::MIN_POSITIVE);
    let mut model = variables.minimise(slowest).using(microlp);
    for (run, layers) in problem.layers.into_iter().enumerate() {
        let placed: Expression = counts.iter().map(|stage| stage[run]).sum();
        model = model.with(constraint!(placed == layers as f64));
    }
    for (stage, terms) in problem.stages.iter().enumerate() {
        let [first, second] = counts[stage];
        let time = first * (problem.layer_time[0] / scale) + second * (problem.layer_time[1] / scale);
        let memory = first * (terms.layer_memory[0] / GIB) + second * (terms.layer_memory[1] / GIB);
        model = model
            .with(constraint!(first + second >= 1))
            .with(constraint!(time + terms.fixed_time / scale <= slowest))
            .with(constraint!(memory <= (problem.capacity - terms.fixed_memory) / GIB))
            .with(constraint!(second <= begun[stage] * problem.layers[1] as f64));
        let later_stages = if problem.layers[1] > 0 { &counts[stage + 1..] } else { &[] };
        for later in later_stages {
            model = model.with(constraint!(later[0] <= (1 - begun[stage]) * problem.layers[0] as f64));
        }
    }
    let solution = model.solve().ok()?;
    Some(counts.iter().map(|stage| stage.map(|count| solution.value(count).round() as u64)).collect())
}

fn count(variables: &mut ProblemVariables, most: u64) -> Variable {
    variables.add(variable().integer().min(0.0).max(most as f64))
}
