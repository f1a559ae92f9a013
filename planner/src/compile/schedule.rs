//! The order of passes on each stage, with counts that depend on the number of micro-batches.

use ir::graph::{BlockRole, ModelGraph};
use ir::mesh::StageId;
use ir::model::{ModelSpec, layer_runs};
use ir::program::{Count, Direction, Index, StageInstruction, StageProgram};
use ir::strategy::{ScheduleKind, Strategy};

/// Builds the schedule of each stage.
pub fn schedule_stages(model: &ModelSpec, graph: &ModelGraph, strategy: &Strategy) -> Vec<StageProgram> {
    let count = strategy.pipeline_parallel;
    let mut first_layer = 0;
    let mut stages = Vec::new();
    for (number, layers) in strategy.layers_per_stage.iter().enumerate() {
        let number = number as u64;
        let stage = StageBodies {
            calls: calls(model, graph, first_layer, first_layer + layers, number == 0, number + 1 == count),
            first: number == 0,
            last: number + 1 == count,
        };
        first_layer += layers;
        // 1F1B: stage r runs min(p − r − 1, m) forward passes ahead (arXiv 2104.04473, section 2.2).
        let schedule = match strategy.schedule {
            ScheduleKind::GPipe => all_forward_first(&stage),
            ScheduleKind::OneForwardOneBackward => one_forward_one_backward(&stage, count - number - 1),
        };
        let pass = forward_pass(&stage, &moving(Count::Fixed(0)));
        let evaluation = vec![StageInstruction::Repeat(Count::MicroBatches, pass)];
        stages.push(StageProgram { stage: StageId(number), schedule, evaluation, update: Vec::new() });
    }
    stages
}

struct StageBodies {
    /// Body and its layers in model order.
    calls: Vec<(u32, u64, u64)>,
    first: bool,
    last: bool,
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
    let backward = backward_pass(stage, &moving(Count::Fixed(0)));
    vec![
        StageInstruction::Repeat(Count::MicroBatches, forward),
        StageInstruction::Repeat(Count::MicroBatches, backward),
    ]
}

fn one_forward_one_backward(stage: &StageBodies, ahead: u64) -> Vec<StageInstruction> {
    let warm_up = forward_pass(stage, &moving(Count::Fixed(0)));
    let mut steady = forward_pass(stage, &moving(Count::AtMost(ahead)));
    steady.extend(backward_pass(stage, &moving(Count::Fixed(0))));
    let cool_down = backward_pass(stage, &moving(Count::Beyond(ahead)));
    let rounds = [(Count::AtMost(ahead), warm_up), (Count::Beyond(ahead), steady), (Count::AtMost(ahead), cool_down)];
    let kept = rounds.into_iter().filter(|(count, _)| *count != Count::AtMost(0));
    kept.map(|(count, body)| StageInstruction::Repeat(count, body)).collect()
}

/// A micro-batch that moves with the loop around the pass.
fn moving(start: Count) -> Index {
    Index { start, loop_depth: Some(0), backwards: false }
}

/// The same micro-batch seen from inside a loop over layers.
fn inside_layers(batch: &Index) -> Index {
    Index { loop_depth: Some(1), ..batch.clone() }
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

fn backward_pass(stage: &StageBodies, batch: &Index) -> Vec<StageInstruction> {
    let mut pass = Vec::new();
    if !stage.last {
        pass.push(StageInstruction::Receive(Direction::Gradient, batch.clone()));
    }
    for (body, start, count) in stage.calls.iter().rev() {
        let layer = Index { start: Count::Fixed(start + count - 1), loop_depth: Some(0), backwards: true };
        let call = StageInstruction::Backward(*body, layer, inside_layers(batch));
        pass.push(StageInstruction::Repeat(Count::Fixed(*count), vec![call]));
    }
    if !stage.first {
        pass.push(StageInstruction::Send(Direction::Gradient, batch.clone()));
    }
    pass
}
