//! The order of passes on each stage, with counts that depend on the number of micro-batches.
//!
//! Where gradients are summed over replicas after the last micro-batch, its backward pass stands apart from
//! the loop, and each layer's sum starts as soon as its gradients are complete.

use ir::distribution::Place;
use ir::graph::{BlockRole, ModelGraph};
use ir::mesh::StageId;
use ir::model::{ModelSpec, layer_runs};
use ir::program::{Body, Conversion, Count, Direction, Index, ProgramMemory, StageInstruction, StageProgram};
use ir::strategy::{ScheduleKind, Strategy, ZeroStage};

/// Builds the schedule of each stage.
pub fn schedule_stages(
    model: &ModelSpec,
    graph: &ModelGraph,
    bodies: &[Body],
    strategy: &Strategy,
) -> Vec<StageProgram> {
    let count = strategy.pipeline_parallel;
    let mut first_layer = 0;
    let mut stages = Vec::new();
    for (number, layers) in strategy.layers_per_stage.iter().enumerate() {
        let number = number as u64;
        let stage = StageBodies {
            calls: calls(model, graph, first_layer, first_layer + layers, number == 0, number + 1 == count),
            first: number == 0,
            last: number + 1 == count,
            reductions: bodies.iter().map(|body| reductions(body, strategy, count == 1)).collect(),
        };
        first_layer += layers;
        // 1F1B: stage r runs min(p − r − 1, m) forward passes ahead (arXiv 2104.04473, section 2.2).
        let schedule = match strategy.schedule {
            ScheduleKind::GPipe => all_forward_first(&stage),
            ScheduleKind::OneForwardOneBackward => one_forward_one_backward(&stage, count - number - 1),
            ScheduleKind::Interleaved | ScheduleKind::ZeroBubbleH1 | ScheduleKind::ZeroBubbleV => {
                unreachable!("`not_programmed` keeps these from the compiler")
            }
        };
        let pass = forward_pass(&stage, &moving(Count::Fixed(0)));
        let evaluation = vec![StageInstruction::Repeat(Count::MicroBatches, pass)];
        let memory = ProgramMemory::default();
        stages.push(StageProgram { stage: StageId(number), schedule, evaluation, update: Vec::new(), memory });
    }
    stages
}

struct StageBodies {
    /// Body and its layers in model order.
    calls: Vec<(u32, u64, u64)>,
    first: bool,
    last: bool,
    /// For each body, consecutive parameters whose gradients are summed over replicas at the end, and how.
    reductions: Vec<Vec<((u32, u32), Conversion)>>,
}

/// Runs of parameters whose accumulated gradients are summands over replicas. On a single stage the head's
/// use of the embedding adds to the embedding's own gradient.
fn reductions(body: &Body, strategy: &Strategy, single_stage: bool) -> Vec<((u32, u32), Conversion)> {
    let conversion = match strategy.zero_stage {
        ZeroStage::None => Conversion::AllReduceSum,
        ZeroStage::OptimizerState | ZeroStage::Gradients | ZeroStage::Parameters => Conversion::ReduceScatterFlat,
    };
    let mut runs: Vec<((u32, u32), Conversion)> = Vec::new();
    for (number, parameter) in body.parameters.iter().enumerate() {
        let number = number as u32;
        if parameter.gradient.data != Place::PartialSum || (parameter.tied && single_stage) {
            continue;
        }
        match runs.last_mut() {
            Some(((_, end), _)) if *end == number => *end += 1,
            _ => runs.push(((number, number + 1), conversion)),
        }
    }
    runs
}

/// Bodies of a stage: number, first layer, layers.
fn calls(model: &ModelSpec, graph: &ModelGraph, start: u64, end: u64, first: bool, last: bool) -> Vec<(u32, u64, u64)> {
    let runs = layer_runs(model);
    let mut calls = Vec::new();
    for (number, block) in graph.blocks.iter().enumerate() {
        let number = number as u32;
        match block.role {
            BlockRole::Embedding if first => calls.push((number, 0, 1)),
            BlockRole::Head if last => calls.push((number, 0, 1)),
            BlockRole::Embedding | BlockRole::Head => {}
            BlockRole::Layers(run) => {
                let begin: u64 = runs[..run].iter().map(|run| run.count).sum();
                let (from, to) = (start.max(begin), end.min(begin + runs[run].count));
                if from < to {
                    calls.push((number, from, to - from));
                }
            }
        }
    }
    calls
}

fn all_forward_first(stage: &StageBodies) -> Vec<StageInstruction> {
    let forward = forward_pass(stage, &moving(Count::Fixed(0)));
    let backward = backward_pass(stage, &moving(Count::Fixed(0)), Gradients::Accumulate);
    let mut schedule = vec![StageInstruction::Repeat(Count::MicroBatches, forward)];
    if !stage.reduces_at_end() {
        schedule.push(StageInstruction::Repeat(Count::MicroBatches, backward));
        return schedule;
    }
    schedule.push(StageInstruction::Repeat(Count::Beyond(1), backward));
    schedule.extend(backward_pass(stage, &last_micro_batch(), Gradients::Reduce));
    schedule
}

fn one_forward_one_backward(stage: &StageBodies, ahead: u64) -> Vec<StageInstruction> {
    let warm_up = forward_pass(stage, &moving(Count::Fixed(0)));
    let mut steady = forward_pass(stage, &moving(Count::AtMost(ahead)));
    steady.extend(backward_pass(stage, &moving(Count::Fixed(0)), Gradients::Accumulate));
    let cool_down = backward_pass(stage, &moving(Count::Beyond(ahead)), Gradients::Accumulate);
    let reduces = stage.reduces_at_end();
    let (pairs, drained) = match (reduces, ahead) {
        (false, _) => (Count::Beyond(ahead), Count::AtMost(ahead)),
        (true, 0) => (Count::Beyond(1), Count::AtMost(0)),
        (true, _) => (Count::Beyond(ahead), Count::LessThan(ahead)),
    };
    let rounds = [(Count::AtMost(ahead), warm_up), (pairs, steady), (drained, cool_down)];
    let none = [Count::AtMost(0), Count::LessThan(1)];
    let kept = rounds.into_iter().filter(|(count, _)| !none.contains(count));
    let mut schedule: Vec<_> = kept.map(|(count, body)| StageInstruction::Repeat(count, body)).collect();
    if reduces && ahead == 0 {
        schedule.extend(forward_pass(stage, &last_micro_batch()));
    }
    if reduces {
        schedule.extend(backward_pass(stage, &last_micro_batch(), Gradients::Reduce));
    }
    schedule
}

impl StageBodies {
    fn reduces_at_end(&self) -> bool {
        self.calls.iter().any(|(body, ..)| !self.reductions[*body as usize].is_empty())
    }
}

/// What a backward pass does with gradients beyond accumulating them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Gradients {
    Accumulate,
    /// Starts the sum over replicas of each layer's gradients.
    Reduce,
}

/// Micro-batch m − 1, outside all loops.
fn last_micro_batch() -> Index {
    Index { start: Count::Beyond(1), loop_depth: None, backwards: false }
}

/// A micro-batch that moves with the loop around the pass.
fn moving(start: Count) -> Index {
    Index { start, loop_depth: Some(0), backwards: false }
}

/// The same micro-batch seen from inside a loop over layers.
fn inside_layers(batch: &Index) -> Index {
    Index { loop_depth: batch.loop_depth.map(|depth| depth + 1), ..batch.clone() }
}

fn forward_pass(stage: &StageBodies, batch: &Index) -> Vec<StageInstruction> {
    let mut pass = Vec::new();
    if !stage.first {
        pass.push(StageInstruction::Receive(Direction::Activation, batch.clone()));
    }
    for (body, start, count) in &stage.calls {
        let layer = Index { start: Count::Fixed(*start), loop_depth: Some(0), backwards: false };
        let call = StageInstruction::Forward(*body, layer, inside_layers(batch));
        pass.push(StageInstruction::Repeat(Count::Fixed(*count), vec![call]));
    }
    if !stage.last {
        pass.push(StageInstruction::Send(Direction::Activation, batch.clone()));
    }
    pass
}

fn backward_pass(stage: &StageBodies, batch: &Index, gradients: Gradients) -> Vec<StageInstruction> {
    let mut pass = Vec::new();
    if !stage.last {
        pass.push(StageInstruction::Receive(Direction::Gradient, batch.clone()));
    }
    for (body, start, count) in stage.calls.iter().rev() {
        let layer = Index { start: Count::Fixed(start + count - 1), loop_depth: Some(0), backwards: true };
        let mut calls = vec![StageInstruction::Backward(*body, layer.clone(), inside_layers(batch))];
        if gradients == Gradients::Reduce {
            let start = |(parameters, conversion): &((u32, u32), Conversion)| {
                StageInstruction::StartReduction(*body, layer.clone(), *parameters, *conversion)
            };
            calls.extend(stage.reductions[*body as usize].iter().map(start));
        }
        pass.push(StageInstruction::Repeat(Count::Fixed(*count), calls));
    }
    if !stage.first {
        pass.push(StageInstruction::Send(Direction::Gradient, batch.clone()));
    }
    pass
}
