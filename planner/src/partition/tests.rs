//! The solvers against one another and against what is known of splits.

use proptest::prelude::*;

use super::*;

/// A chain like a transformer's: embedding work in front, head work behind, early stages heavier; a layer that is
/// computed again takes a third longer and keeps a tenth.
fn problem(
    layers: LayerCounts,
    stages: usize,
    layer_time: [f64; 2],
    ends: [f64; 2],
    capacity: f64,
) -> PartitionProblem {
    let terms = |stage: usize| {
        let front = if stage == 0 { ends[0] } else { 0.0 };
        let back = if stage + 1 == stages { ends[1] } else { 0.0 };
        let in_flight = (stages - stage) as f64;
        StageTerms {
            least_layers: 1,
            fixed_time: front + back,
            fixed_memory: 1e9 * (1.0 + front),
            layer_memory: [2e9 + 0.2e9 * in_flight, 3e9 + 0.3e9 * in_flight],
            saved_memory: [0.18e9 * in_flight, 0.27e9 * in_flight],
            repeat_memory: 0.2e9,
        }
    };
    PartitionProblem {
        layers,
        layer_time,
        repeat_time: layer_time.map(|time| time / 3.0),
        repeats: Repeats::Never,
        stages: (0..stages).map(terms).collect(),
        stage_of: (0..stages).collect(),
        capacity,
    }
}

fn check_split(problem: &PartitionProblem, split: &[StageShare]) {
    let placed = split.iter().fold([0, 0], |sum, share| [sum[0] + share.layers[0], sum[1] + share.layers[1]]);
    assert_eq!(placed, problem.layers);
    for (stage, share) in split.iter().enumerate() {
        assert!(share.layers.iter().sum::<u64>() >= 1, "stage {stage} is empty: {split:?}");
        assert!(problem.memory(stage, *share) <= problem.capacity * (1.0 + 1e-6), "stage {stage}: {split:?}");
        assert!(share.recomputed.iter().zip(share.layers).all(|(again, all)| *again <= all), "{split:?}");
    }
    let second = split.iter().position(|share| share.layers[1] > 0).unwrap_or(split.len());
    assert!(split.iter().skip(second + 1).all(|share| share.layers[0] == 0), "runs are out of order: {split:?}");
}

fn compare(problem: &PartitionProblem) {
    let [exact, program] = [solve_by_threshold(problem), solve_by_integer_program(problem)];
    assert_eq!(exact.is_some(), program.is_some(), "{exact:?} against {program:?} for {problem:?}");
    let (Some(exact), Some(program)) = (exact, program) else { return };
    check_split(problem, &exact);
    check_split(problem, &program);
    let [a, b] = [problem.slowest(&exact), problem.slowest(&program)];
    assert!((a / b - 1.0).abs() < 1e-6, "{a} by {exact:?}, {b} by {program:?} for {problem:?}");
}

fn layers_of(split: &[StageShare]) -> Vec<u64> {
    split.iter().map(|share| share.layers[0]).collect()
}

#[test]
fn bloom_gives_end_stages_one_layer_less() {
    let problem = problem([70, 0], 12, [1.0, 0.0], [0.9, 0.9], f64::INFINITY);
    let split = solve_by_threshold(&problem).expect("memory is unlimited");
    assert_eq!(layers_of(&split), [5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5]);
}

#[test]
fn what_does_not_fit_is_computed_again() {
    let tight = problem([24, 0], 4, [1.0, 0.0], [0.0, 0.0], 15.5e9);
    assert_eq!(solve_by_threshold(&tight), None, "it does not fit without recomputation");
    let open = PartitionProblem { repeats: Repeats::PerStage, ..tight.clone() };
    let split = solve_by_threshold(&open).expect("it fits if layers are computed again");
    let again: u64 = split.iter().map(|share| share.recomputed[0]).sum();
    assert!((1..24).contains(&again), "{split:?}");
    let same = PartitionProblem { repeats: Repeats::SameOnEachStage, ..tight };
    let alike = solve_by_threshold(&same).expect("it fits if layers are computed again");
    assert!(same.slowest(&alike) >= open.slowest(&split), "one number for all stages cannot be faster");
    let most = alike.iter().map(|share| share.recomputed[0]).max().unwrap_or(0);
    assert!(alike.iter().all(|share| share.recomputed[0] == most.min(share.layers[0])), "{alike:?}");
}

#[test]
fn stages_of_several_parts_are_balanced() {
    // Eight parts of 61 layers on two stages: none has more than eight, and the stages differ by one.
    let parts = problem([61, 0], 8, [1.0, 0.0], [0.0, 0.0], f64::INFINITY);
    let parts = PartitionProblem { stage_of: (0..8).map(|place| place % 2).collect(), ..parts };
    let split = layers_of(&solve_by_threshold(&parts).expect("memory is unlimited"));
    assert!(split.iter().all(|count| *count <= 8) && split.iter().sum::<u64>() == 61, "{split:?}");
    let on = |stage: usize| split.iter().skip(stage).step_by(2).sum::<u64>();
    assert_eq!(on(0).abs_diff(on(1)), 1, "{split:?}");
}

#[test]
fn more_stages_than_layers_have_no_split() {
    let problem = problem([3, 0], 4, [1.0, 0.0], [0.0, 0.0], f64::INFINITY);
    assert_eq!(solve_by_threshold(&problem), None);
    assert_eq!(split_for_least_memory(&problem), None);
}

#[test]
fn least_memory_is_no_more_than_the_fastest_split_has() {
    let problem = problem([40, 0], 8, [1.0, 0.0], [0.5, 2.0], f64::INFINITY);
    let [lean, fast] =
        [split_for_least_memory(&problem), solve_by_threshold(&problem)].map(|split| split.expect("fits"));
    assert!(problem.fullest(&lean) < problem.fullest(&fast));
}

const REPEATS: [Repeats; 4] = [Repeats::Never, Repeats::PerStage, Repeats::SameOnEachStage, Repeats::First(2)];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]
    #[test]
    fn one_run_agrees_with_the_integer_program(
        layers in 1u64..60, stages in 1usize..9, front in 0.0f64..2.0, back in 0.0f64..3.0, memory in 10.0f64..120.0,
    ) {
        compare(&problem([layers, 0], stages, [1.0, 0.0], [front, back], memory * 1e9));
    }

    #[test]
    fn two_runs_agree_with_the_integer_program(
        dense in 1u64..4, experts in 1u64..16, stages in 1usize..5, ratio in 0.3f64..3.0, back in 0.0f64..3.0,
        memory in 10.0f64..80.0,
    ) {
        compare(&problem([dense, experts], stages, [1.0, ratio], [0.2, back], memory * 1e9));
    }

    #[test]
    fn recomputed_layers_agree_with_the_integer_program(
        layers in 1u64..20, stages in 1usize..5, repeats in 0usize..4, back in 0.0f64..3.0, margin in 0.8f64..1.3,
    ) {
        let whole = problem([layers, 0], stages, [1.0, 0.0], [0.3, back], 0.0);
        // Near the limit: between where all layers must be computed again and where none must.
        let even = StageShare { layers: [layers.div_ceil(stages as u64), 0], ..StageShare::default() };
        let capacity = whole.memory(0, even) * margin;
        compare(&PartitionProblem { capacity, repeats: REPEATS[repeats], ..whole });
    }

    #[test]
    fn recomputed_layers_of_two_runs_agree_with_the_integer_program(
        dense in 1u64..4, experts in 1u64..8, stages in 1usize..4, repeats in 0usize..4, ratio in 0.3f64..3.0,
        margin in 0.8f64..1.3,
    ) {
        let whole = problem([dense, experts], stages, [1.0, ratio], [0.2, 0.5], 0.0);
        let even = StageShare { layers: [0, (dense + experts).div_ceil(stages as u64)], ..StageShare::default() };
        let capacity = whole.memory(0, even) * margin;
        compare(&PartitionProblem { capacity, repeats: REPEATS[repeats], ..whole });
    }
}
