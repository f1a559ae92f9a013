//! Mutation test of the verifier: every single change to a program is rejected, or changes nothing.

mod support;

use ir::distribution::{Distribution, Place, SplitAxis};
use ir::graph::{DimName, DropoutSite, Extent, build_graph};
use ir::interpreter::{Optimizer, Sizes, StepInput, StepOutput, World, degrees};
use ir::model::Workload;
use ir::plan::Plan;
use ir::program::{
    Body, Conversion, Count, Direction, Index, Instruction, Op, Program, StageInstruction, UpdateInstruction, ValueId,
};
use ir::reference::{initial_parameters, random_batch};
use ir::strategy::{Recompute, ScheduleKind, ZeroStage};
use ir::verify::verify;
use planner::lower::{lower, search_report};
use planner::request::{FixedChoices, Request, check_request};
use planner::search::search;
use support::machine;
use support::small::{Family, SEQUENCE, Shape, small_model};

const OPTIMIZER: Optimizer =
    Optimizer { learning_rate: 1e-2, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, clip: 0.02 };

/// Plans whose programs hold every kind of instruction between them.
fn plans() -> Vec<(&'static str, Plan)> {
    let gpt2 = Shape { family: Family::Gpt2, tied: true, heads: 4, key_value_heads: 4, layers: 3, vocabulary: 19 };
    let bloom = Shape { family: Family::Bloom, tied: true, heads: 6, key_value_heads: 6, layers: 2, vocabulary: 20 };
    let llama = Shape { family: Family::Llama, tied: false, heads: 4, key_value_heads: 2, layers: 2, vocabulary: 20 };
    let fixed = FixedChoices {
        tensor_parallel: Some(2),
        pipeline_parallel: Some(2),
        data_parallel: Some(2),
        zero_stage: Some(ZeroStage::OptimizerState),
        micro_batch: Some(1),
        recompute: Some(Recompute::None),
        schedule: Some(ScheduleKind::OneForwardOneBackward),
        sequence_parallel: Some(true),
        ..FixedChoices::default()
    };
    vec![
        ("gpt2 tp2 pp2 dp2 zero1 sp", small_plan(gpt2, 8, fixed)),
        (
            "bloom tp2 pp1 dp2 zero2 full",
            small_plan(
                bloom,
                4,
                FixedChoices {
                    pipeline_parallel: Some(1),
                    zero_stage: Some(ZeroStage::Gradients),
                    recompute: Some(Recompute::Full),
                    sequence_parallel: Some(false),
                    ..fixed
                },
            ),
        ),
        (
            "llama tp4 pp2 dp2 zero3 gpipe",
            small_plan(
                llama,
                16,
                FixedChoices {
                    tensor_parallel: Some(4),
                    zero_stage: Some(ZeroStage::Parameters),
                    schedule: Some(ScheduleKind::GPipe),
                    ..fixed
                },
            ),
        ),
    ]
}

fn small_plan(shape: Shape, gpus: u64, fixed: FixedChoices) -> Plan {
    let mut machine = machine("dgx-h100", "planwright", gpus.min(8));
    machine.stack.kernels.flash_attention = shape.family == Family::Llama;
    let workload = Workload { sequence_length: SEQUENCE as u64, global_batch: 6 };
    let request = Request {
        model: small_model(shape),
        origin: "small".to_owned(),
        workload,
        machine,
        gpus,
        fixed,
        top: 1,
        executable_only: false,
    };
    check_request(&request).expect("the request is sound");
    let graph = build_graph(&request.model);
    let outcome = search(&request, &graph);
    let winner = outcome.best.first().expect("a layout fits");
    let plan = lower(&request, &graph, winner, search_report(&request, &outcome, Vec::new(), Vec::new()));
    assert_eq!(verify(&plan, "plan"), []);
    plan
}

fn interpret(plan: &Plan, program: &Program) -> Result<(StepOutput, Vec<Vec<f64>>), String> {
    let degrees = degrees(&plan.model, plan.strategy.data_parallel, plan.strategy.tensor_parallel).expect("sound");
    let sizes = Sizes { micro_batch: 1, sequence: SEQUENCE, degrees };
    let sequences = plan.strategy.global_batch as usize;
    let batch = random_batch(&plan.model, sequences, SEQUENCE, 3);
    let mut world = World::new(program, sizes, &initial_parameters(&plan.model, 5))?;
    let micro_batches = plan.strategy.num_micro_batches();
    let input = StepInput { tokens: &batch.tokens, targets: &batch.targets, micro_batches };
    let evaluated = world.evaluate(&input)?;
    let output = world.step(&input, &OPTIMIZER)?;
    let mut numbers: Vec<Vec<f64>> = world.parameters()?.into_values().collect();
    numbers.push(vec![evaluated]);
    Ok((output, numbers))
}

/// A changed program and what was changed.
struct Mutant {
    what: String,
    program: Program,
}

fn mutants(program: &Program) -> Vec<Mutant> {
    let mut mutants = Vec::new();
    for body in 0..program.bodies.len() {
        for forward in [true, false] {
            let list = |program: &Program| pass(&program.bodies[body], forward).clone();
            mutate_list(program, &list(program), &format!("body {body} forward {forward}"), &mut mutants, |program| {
                pass_mut(&mut program.bodies[body], forward)
            });
            for line in 0..list(program).len() {
                for changed in changed_instructions(&list(program)[line], program.bodies[body].values.len() as u32) {
                    let mut mutant = program.clone();
                    let what = format!("body {body} forward {forward} line {line}: {changed:?}");
                    pass_mut(&mut mutant.bodies[body], forward)[line] = changed;
                    mutants.push(Mutant { what, program: mutant });
                }
            }
        }
        mutate_values(program, body, &mut mutants);
        for kernel in 0..program.bodies[body].kernels.len() {
            for (start, end) in [(-1, 0), (1, 0), (0, -1), (0, 1), (-2, 2), (0, 1000)] {
                let mut mutant = program.clone();
                let run = &mut mutant.bodies[body].kernels[kernel].instructions;
                *run = (run.0.saturating_add_signed(start), run.1.saturating_add_signed(end));
                mutants.push(Mutant { what: format!("body {body} kernel {kernel} moved"), program: mutant });
            }
        }
    }
    for stage in 0..program.stages.len() {
        mutate_schedule(program, stage, &mut mutants);
        let update = program.stages[stage].update.clone();
        mutate_list(program, &update, &format!("update of stage {stage}"), &mut mutants, |program| {
            &mut program.stages[stage].update
        });
        for (line, instruction) in update.iter().enumerate() {
            for changed in changed_updates(instruction) {
                let mut mutant = program.clone();
                let what = format!("update of stage {stage} line {line}: {changed:?}");
                mutant.stages[stage].update[line] = changed;
                mutants.push(Mutant { what, program: mutant });
            }
        }
    }
    mutants
}

fn pass(body: &Body, forward: bool) -> &Vec<Instruction> {
    if forward { &body.forward } else { &body.backward }
}

fn pass_mut(body: &mut Body, forward: bool) -> &mut Vec<Instruction> {
    if forward { &mut body.forward } else { &mut body.backward }
}

/// A change to a line of a list.
type Change<T> = fn(&mut Vec<T>, usize);

/// Drop, duplicate, and swap with the next, for each line of a list.
fn mutate_list<T: Clone>(
    program: &Program,
    lines: &[T],
    place: &str,
    mutants: &mut Vec<Mutant>,
    list: impl Fn(&mut Program) -> &mut Vec<T>,
) {
    for line in 0..lines.len() {
        let changes: [(&str, Change<T>); 3] = [
            ("dropped", |list, line| drop(list.remove(line))),
            ("duplicated", |list, line| list.insert(line, list[line].clone())),
            ("swapped with the next", |list, line| {
                if line + 1 < list.len() {
                    list.swap(line, line + 1);
                }
            }),
        ];
        for (name, change) in changes {
            let mut mutant = program.clone();
            change(list(&mut mutant), line);
            if mutant != *program {
                mutants.push(Mutant { what: format!("{place} line {line} {name}"), program: mutant });
            }
        }
    }
}

fn changed_instructions(instruction: &Instruction, values: u32) -> Vec<Instruction> {
    let others =
        |value: ValueId| [value.0.wrapping_sub(1), value.0 + 1].into_iter().filter(move |id| *id < values).map(ValueId);
    let mut changed = Vec::new();
    match instruction {
        Instruction::Input(kind, value) => {
            changed.extend(others(*value).map(|value| Instruction::Input(*kind, value)));
        }
        Instruction::Load(parameter, value) => {
            changed.push(Instruction::Load(parameter + 1, *value));
            changed.extend(others(*value).map(|value| Instruction::Load(*parameter, value)));
        }
        Instruction::Compute(op, operands, value) => {
            changed.extend(other_ops(op).into_iter().map(|op| Instruction::Compute(op, operands.clone(), *value)));
            for position in 0..operands.len() {
                for other in others(operands[position]) {
                    let mut operands = operands.clone();
                    operands[position] = other;
                    changed.push(Instruction::Compute(*op, operands, *value));
                }
            }
            if operands.len() > 1 {
                let mut operands = operands.clone();
                operands.swap(0, 1);
                changed.push(Instruction::Compute(*op, operands, *value));
            }
            changed.extend(others(*value).map(|value| Instruction::Compute(*op, operands.clone(), value)));
        }
        Instruction::Convert(conversion, axes, from, to) => {
            for other in other_conversions(conversion) {
                changed.push(Instruction::Convert(other, axes.clone(), *from, *to));
            }
            for other in other_axes(axes) {
                changed.push(Instruction::Convert(*conversion, other, *from, *to));
            }
            changed.extend(others(*from).map(|from| Instruction::Convert(*conversion, axes.clone(), from, *to)));
        }
        Instruction::Start(conversion, axes, from, to) => {
            for other in other_conversions(conversion) {
                changed.push(Instruction::Start(other, axes.clone(), *from, *to));
            }
            for other in other_axes(axes) {
                changed.push(Instruction::Start(*conversion, other, *from, *to));
            }
            changed.extend(others(*from).map(|from| Instruction::Start(*conversion, axes.clone(), from, *to)));
            changed.extend(others(*to).map(|to| Instruction::Start(*conversion, axes.clone(), *from, to)));
        }
        Instruction::Wait(from, to) => {
            changed.extend(others(*from).map(|from| Instruction::Wait(from, *to)));
            changed.extend(others(*to).map(|to| Instruction::Wait(*from, to)));
        }
        Instruction::Accumulate(parameter, value) => {
            changed.push(Instruction::Accumulate(parameter + 1, *value));
            changed.extend(others(*value).map(|value| Instruction::Accumulate(*parameter, value)));
        }
        Instruction::Free(value) => changed.extend(others(*value).map(Instruction::Free)),
    }
    changed
}

fn other_ops(op: &Op) -> Vec<Op> {
    let all = [
        Op::Add,
        Op::Multiply,
        Op::Subtract,
        Op::Contraction,
        Op::ReduceSum,
        Op::ReduceMax,
        Op::Scale(2.0),
        Op::Dropout(DropoutSite::Embedding),
        Op::Gelu,
        Op::Silu,
        Op::Cast,
        Op::Softmax,
        Op::Rotary { base: 10_000.0, scaling: None },
        Op::RotaryGradient { base: 10_000.0, scaling: None },
        Op::ScaleMaskGradient { scale: 1.0 },
        Op::ScaleMask { scale: 0.5, alibi: false },
    ];
    all.into_iter().chain(other_constants(op)).filter(|other| other != op).collect()
}

/// The operator with another constant.
fn other_constants(op: &Op) -> Option<Op> {
    match *op {
        Op::Norm { kind, epsilon } => Some(Op::Norm { kind, epsilon: 10.0 * epsilon }),
        Op::NormInputGradient { kind, epsilon } => Some(Op::NormInputGradient { kind, epsilon: 10.0 * epsilon }),
        Op::NormWeightGradient { kind, epsilon } => Some(Op::NormWeightGradient { kind, epsilon: 10.0 * epsilon }),
        Op::Dropout(DropoutSite::Embedding) => Some(Op::Dropout(DropoutSite::Attention)),
        Op::Rotary { base, scaling } => Some(Op::Rotary { base: 2.0 * base, scaling }),
        Op::RotaryGradient { base, scaling } => Some(Op::RotaryGradient { base: 2.0 * base, scaling }),
        _ => None,
    }
}

fn other_conversions(conversion: &Conversion) -> Vec<Conversion> {
    let all = [
        Conversion::AllReduceSum,
        Conversion::AllReduceMax,
        Conversion::AllGather(DimName::Sequence),
        Conversion::AllGather(DimName::Hidden),
        Conversion::ReduceScatter(DimName::Sequence),
        Conversion::ReduceScatter(DimName::MicroBatch),
        Conversion::Slice(DimName::Sequence),
        Conversion::AllGatherFlat,
        Conversion::ReduceScatterFlat,
    ];
    all.into_iter().filter(|other| other != conversion).collect()
}

fn other_axes(axes: &[SplitAxis]) -> Vec<Vec<SplitAxis>> {
    let all = [
        vec![SplitAxis::Data],
        vec![SplitAxis::Tensor],
        vec![SplitAxis::Query],
        vec![SplitAxis::Tensor, SplitAxis::Query],
        vec![SplitAxis::Data, SplitAxis::Tensor],
        vec![],
    ];
    all.into_iter().filter(|other| other != axes).collect()
}

/// Shrunk shapes and changed types.
fn mutate_values(program: &Program, body: usize, mutants: &mut Vec<Mutant>) {
    for value in 0..program.bodies[body].values.len() {
        for dim in 0..program.bodies[body].values[value].shape.len() {
            let mut mutant = program.clone();
            let extent = &mut mutant.bodies[body].values[value].shape[dim].extent;
            *extent = match *extent {
                Extent::Fixed(size) => Extent::Fixed(size / 2),
                Extent::MicroBatch | Extent::Sequence => Extent::Fixed(1),
            };
            mutants.push(Mutant { what: format!("body {body} value {value} shrunk along {dim}"), program: mutant });
        }
        for axis in SplitAxis::ALL {
            for place in [Place::Replicated, Place::PartialSum, Place::Sharded(DimName::Sequence), Place::Flat] {
                let mut mutant = program.clone();
                let distribution: &mut Distribution = &mut mutant.bodies[body].values[value].distribution;
                *distribution = distribution.with(axis, place);
                if mutant != *program {
                    let what = format!("body {body} value {value} is {place:?} over {axis:?}");
                    mutants.push(Mutant { what, program: mutant });
                }
            }
        }
    }
    for parameter in 0..program.bodies[body].parameters.len() {
        for place in [Place::Replicated, Place::PartialSum, Place::Flat] {
            for axis in SplitAxis::ALL {
                for stored in [true, false] {
                    let mut mutant = program.clone();
                    let parameter = &mut mutant.bodies[body].parameters[parameter];
                    let distribution = if stored { &mut parameter.stored } else { &mut parameter.gradient };
                    *distribution = distribution.with(axis, place);
                    if mutant != *program {
                        let what = format!("body {body} parameter type {place:?} over {axis:?}, stored {stored}");
                        mutants.push(Mutant { what, program: mutant });
                    }
                }
            }
        }
    }
}

/// Every change to every instruction of a schedule, at any depth.
fn mutate_schedule(program: &Program, stage: usize, mutants: &mut Vec<Mutant>) {
    for (what, changed) in changed_schedules(&program.stages[stage].schedule) {
        let mut mutant = program.clone();
        mutant.stages[stage].schedule = changed;
        mutants.push(Mutant { what: format!("schedule of stage {stage}: {what}"), program: mutant });
    }
    for (what, changed) in changed_schedules(&program.stages[stage].evaluation) {
        let mut mutant = program.clone();
        mutant.stages[stage].evaluation = changed;
        mutants.push(Mutant { what: format!("evaluation of stage {stage}: {what}"), program: mutant });
    }
}

fn changed_schedules(schedule: &[StageInstruction]) -> Vec<(String, Vec<StageInstruction>)> {
    let mut all = Vec::new();
    for line in 0..schedule.len() {
        let mut add = |what: &str, change: &dyn Fn(&mut Vec<StageInstruction>)| {
            let mut changed = schedule.to_vec();
            change(&mut changed);
            if changed != schedule {
                all.push((format!("{what} {:?}", schedule[line]), changed));
            }
        };
        add("dropped", &|list| drop(list.remove(line)));
        add("duplicated", &|list| list.insert(line, list[line].clone()));
        add("swapped", &|list| {
            if line + 1 < list.len() {
                list.swap(line, line + 1);
            }
        });
        let replacements: Vec<StageInstruction> = match &schedule[line] {
            StageInstruction::Repeat(count, body) => {
                let mut replaced: Vec<_> = other_counts(count)
                    .into_iter()
                    .map(|count| StageInstruction::Repeat(count, body.clone()))
                    .collect();
                let inner = changed_schedules(body).into_iter();
                replaced.extend(inner.map(|(_, body)| StageInstruction::Repeat(count.clone(), body)));
                replaced
            }
            StageInstruction::Receive(direction, batch) => {
                let other = StageInstruction::Receive(opposite(*direction), batch.clone());
                let moved = other_indices(batch).into_iter().map(|batch| StageInstruction::Receive(*direction, batch));
                moved.chain([other]).collect()
            }
            StageInstruction::Send(direction, batch) => {
                let other = StageInstruction::Send(opposite(*direction), batch.clone());
                let moved = other_indices(batch).into_iter().map(|batch| StageInstruction::Send(*direction, batch));
                moved.chain([other]).collect()
            }
            StageInstruction::Forward(body, layer, batch) => {
                let other = StageInstruction::Backward(*body, layer.clone(), batch.clone());
                let layers =
                    other_indices(layer).into_iter().map(|l| StageInstruction::Forward(*body, l, batch.clone()));
                let batches =
                    other_indices(batch).into_iter().map(|b| StageInstruction::Forward(*body, layer.clone(), b));
                let bodies = [StageInstruction::Forward(body + 1, layer.clone(), batch.clone()), other];
                layers.chain(batches).chain(bodies).collect()
            }
            StageInstruction::Backward(body, layer, batch) => {
                let other = StageInstruction::Forward(*body, layer.clone(), batch.clone());
                let layers =
                    other_indices(layer).into_iter().map(|l| StageInstruction::Backward(*body, l, batch.clone()));
                let batches =
                    other_indices(batch).into_iter().map(|b| StageInstruction::Backward(*body, layer.clone(), b));
                let bodies = [StageInstruction::Backward(body + 1, layer.clone(), batch.clone()), other];
                layers.chain(batches).chain(bodies).collect()
            }
            StageInstruction::StartReduction(body, layer, (first, end), conversion) => {
                let start = |body: u32, layer: &Index, parameters, conversion| {
                    StageInstruction::StartReduction(body, layer.clone(), parameters, conversion)
                };
                let same = (*first, *end);
                let layers = other_indices(layer).into_iter().map(|layer| start(*body, &layer, same, *conversion));
                let ranges = [(*first, end + 1), (*first, end - 1), (first + 1, *end), (first.saturating_sub(1), *end)];
                let ranges = ranges.map(|range| start(*body, layer, range, *conversion));
                let others = other_conversions(conversion).into_iter().map(|other| start(*body, layer, same, other));
                let bodies = [start(body + 1, layer, same, *conversion)];
                layers.chain(ranges).chain(others).chain(bodies).collect()
            }
        };
        for replacement in replacements {
            add(&format!("replaced by {replacement:?}"), &|list| list[line] = replacement.clone());
        }
    }
    all
}

fn opposite(direction: Direction) -> Direction {
    match direction {
        Direction::Activation => Direction::Gradient,
        Direction::Gradient => Direction::Activation,
    }
}

fn other_counts(count: &Count) -> Vec<Count> {
    let number = match count {
        Count::Fixed(n) | Count::AtMost(n) | Count::Beyond(n) | Count::LessThan(n) => *n,
        Count::MicroBatches => 0,
    };
    let all = [
        Count::Fixed(number + 1),
        Count::Fixed(number.saturating_sub(1)),
        Count::AtMost(number + 1),
        Count::AtMost(number),
        Count::Beyond(number + 1),
        Count::Beyond(number),
        Count::LessThan(number + 1),
        Count::LessThan(number),
        Count::MicroBatches,
    ];
    all.into_iter().filter(|other| other != count).collect()
}

fn other_indices(index: &Index) -> Vec<Index> {
    let mut all: Vec<Index> =
        other_counts(&index.start).into_iter().map(|start| Index { start, ..index.clone() }).collect();
    all.push(Index { backwards: !index.backwards, ..index.clone() });
    all.push(Index { loop_depth: None, ..index.clone() });
    all.push(Index { loop_depth: index.loop_depth.map(|depth| depth + 1), ..index.clone() });
    all
}

fn changed_updates(instruction: &UpdateInstruction) -> Vec<UpdateInstruction> {
    let mut changed = Vec::new();
    let Some(range) = instruction.parameters() else { return changed };
    let (start, end) = range.layers;
    let mut ranges = vec![range; 7];
    ranges[0].parameters = (range.parameters.0 + 1, range.parameters.1 + 1);
    ranges[4].parameters.0 += 1;
    ranges[5].parameters.1 -= 1;
    ranges[6].parameters.1 += 1;
    ranges[1].layers = (start, end + 1);
    ranges[2].layers = (start + 1, end);
    ranges[3].body += 1;
    for other in ranges {
        changed.push(match instruction {
            UpdateInstruction::ReduceOverTensor(_, axes) => UpdateInstruction::ReduceOverTensor(other, axes.clone()),
            UpdateInstruction::ReduceOverTied(_) => UpdateInstruction::ReduceOverTied(other),
            UpdateInstruction::WaitReduction(_) => UpdateInstruction::WaitReduction(other),
            UpdateInstruction::AddSquares(_, axes) => UpdateInstruction::AddSquares(other, axes.clone()),
            UpdateInstruction::AdamW(_) => UpdateInstruction::AdamW(other),
            UpdateInstruction::GatherOverData(_) => UpdateInstruction::GatherOverData(other),
            UpdateInstruction::FinishNorm => UpdateInstruction::FinishNorm,
        });
    }
    match instruction {
        UpdateInstruction::ReduceOverTensor(_, axes) => {
            changed.extend(other_axes(axes).into_iter().map(|axes| UpdateInstruction::ReduceOverTensor(range, axes)));
        }
        UpdateInstruction::AddSquares(_, axes) => {
            changed.extend(other_axes(axes).into_iter().map(|axes| UpdateInstruction::AddSquares(range, axes)));
        }
        UpdateInstruction::WaitReduction(_)
        | UpdateInstruction::ReduceOverTied(_)
        | UpdateInstruction::AdamW(_)
        | UpdateInstruction::GatherOverData(_)
        | UpdateInstruction::FinishNorm => {}
    }
    changed
}

/// Equal but for the order of sums.
fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-12 * a.abs().max(b.abs()).max(1e-3)
}

#[test]
fn every_mutant_is_rejected_or_equal() {
    let (mut rejected, mut equal) = (0, 0);
    let mut survivors = Vec::new();
    for (name, plan) in plans() {
        let program = plan.program.clone().expect("the plan has a program");
        let (output, parameters) = interpret(&plan, &program).expect("the plan runs");
        for mutant in mutants(&program) {
            let changed = Plan { program: Some(mutant.program), ..plan.clone() };
            if !verify(&changed, "mutant").is_empty() {
                rejected += 1;
                continue;
            }
            let run = std::panic::catch_unwind(|| interpret(&plan, changed.program.as_ref().expect("set above")));
            let same = |(found, after): &(StepOutput, Vec<Vec<f64>>)| {
                close(found.loss, output.loss)
                    && close(found.gradient_norm, output.gradient_norm)
                    && after.iter().flatten().zip(parameters.iter().flatten()).all(|(a, b)| close(*a, *b))
            };
            if matches!(&run, Ok(Ok(result)) if same(result)) {
                equal += 1;
            } else {
                survivors.push(format!("{name}: {}", mutant.what));
            }
        }
    }
    println!("{rejected} mutants rejected, {equal} proven equal, {} survived", survivors.len());
    assert!(survivors.is_empty(), "{}", survivors[..survivors.len().min(20)].join("\n"));
}
