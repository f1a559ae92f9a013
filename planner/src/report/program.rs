//! Programs as text: schedules, bodies with types and message sizes, updates.

use ir::distribution::{Distribution, Place, SplitAxis};
use ir::footprint::local_elements;
use ir::graph::{Dim, Extent};
use ir::model::DType;
use ir::plan::{Plan, Stage};
use ir::program::{
    Body, Conversion, Count, Direction, Index, Instruction, Program, ProgramMemory, StageInstruction,
    UpdateInstruction, Value,
};
use ir::sharding::tensor_split;
use ir::units::Bytes;

/// The program of one stage: its schedule, the bodies that it calls, its update.
pub fn stage_program(plan: &Plan, program: &Program, stage: &Stage) -> String {
    let Some(code) = program.stages.iter().find(|code| code.stage == stage.stage) else { return String::new() };
    let mut text = format!("schedule for m micro-batches ({} planned)\n", plan.strategy.num_micro_batches());
    schedule_lines(&code.schedule, program, 1, &mut text);
    for (number, body) in program.bodies.iter().enumerate() {
        let called = match number {
            0 => stage.embedding,
            _ if number + 1 == program.bodies.len() => stage.head,
            _ => true,
        };
        if called {
            text += &body_text(plan, body);
        }
    }
    text += "\nupdate\n";
    for instruction in &code.update {
        text += &format!("  {}\n", update_line(program, instruction));
    }
    let ProgramMemory { weights, gradients, optimizer, values } = code.memory;
    text += &format!(
        "\nmemory of a rank at its fullest: {}\n  weights {weights}, gradients {gradients}, optimizer {optimizer}, \
         values {values}\n",
        code.memory.total()
    );
    text
}

fn schedule_lines(schedule: &[StageInstruction], program: &Program, depth: usize, text: &mut String) {
    let indent = "  ".repeat(depth);
    for instruction in schedule {
        let line = match instruction {
            StageInstruction::Repeat(count, body) => {
                // Loops are named i, j, k from the outside.
                *text += &format!("{indent}repeat {} times, {} = 0 …\n", count_text(count), loop_name(depth - 1));
                schedule_lines(body, program, depth + 1, text);
                continue;
            }
            StageInstruction::Receive(direction, batch) => {
                format!("receive {} of micro-batch {}", direction_text(*direction), index_text(batch, depth))
            }
            StageInstruction::Send(direction, batch) => {
                format!("send {} of micro-batch {}", direction_text(*direction), index_text(batch, depth))
            }
            StageInstruction::Forward(body, layer, batch) => call_text("forward", program, *body, layer, batch, depth),
            StageInstruction::Backward(body, layer, batch) => {
                call_text("backward", program, *body, layer, batch, depth)
            }
            StageInstruction::StartReduction(body, layer, parameters, conversion) => {
                let names = program.bodies.get(*body as usize).map_or("?".to_owned(), |body| names(body, *parameters));
                format!("start {conversion:?} of gradients over data, layer {}: {names}", index_text(layer, depth))
            }
        };
        *text += &format!("{indent}{line}\n");
    }
}

fn call_text(pass: &str, program: &Program, body: u32, layer: &Index, batch: &Index, depth: usize) -> String {
    let name = program.bodies.get(body as usize).map_or("?", |body| body.name.as_str());
    format!("{pass} {name}, layer {}, micro-batch {}", index_text(layer, depth), index_text(batch, depth))
}

fn loop_name(depth: usize) -> char {
    char::from(b'i' + depth.min(17) as u8)
}

fn direction_text(direction: Direction) -> &'static str {
    match direction {
        Direction::Activation => "activation",
        Direction::Gradient => "gradient",
    }
}

fn count_text(count: &Count) -> String {
    match count {
        Count::Fixed(number) => number.to_string(),
        Count::MicroBatches => "m".to_owned(),
        Count::AtMost(limit) => format!("min({limit}, m)"),
        Count::Beyond(start) => format!("max(m - {start}, 0)"),
        Count::LessThan(limit) => format!("min({limit}, m) - 1"),
    }
}

fn index_text(index: &Index, depth: usize) -> String {
    let start = count_text(&index.start);
    let Some(outward) = index.loop_depth else { return start };
    // `depth` counts the loops around the instruction plus one.
    let name = loop_name((depth - 1).saturating_sub(1 + outward as usize));
    match (start.as_str(), index.backwards) {
        ("0", false) => name.to_string(),
        (_, false) => format!("{start} + {name}"),
        (_, true) => format!("{start} - {name}"),
    }
}

fn body_text(plan: &Plan, body: &Body) -> String {
    let mut text = String::new();
    for (pass, instructions) in [("forward", &body.forward), ("backward", &body.backward)] {
        text += &format!("\nbody {}, {pass}\n", body.name);
        for instruction in instructions.iter().filter(|instruction| !matches!(instruction, Instruction::Free(_))) {
            text += &format!("  {}\n", instruction_line(plan, body, instruction));
        }
    }
    text
}

fn instruction_line(plan: &Plan, body: &Body, instruction: &Instruction) -> String {
    let value = |id: &ir::program::ValueId| &body.values[id.0 as usize];
    let result = |id: &ir::program::ValueId| format!("%{} {} {}", id.0, value(id).name, type_text(value(id)));
    let parameter =
        |number: &u32| body.parameters.get(*number as usize).map_or("?", |parameter| parameter.name.as_str());
    match instruction {
        Instruction::Input(kind, id) => format!("{} = {kind:?}", result(id)),
        Instruction::Load(number, id) => format!("{} = load {}", result(id), parameter(number)),
        Instruction::Compute(op, operands, id) => {
            let operands: Vec<String> = operands.iter().map(|operand| format!("%{}", operand.0)).collect();
            format!("{} = {op:?} {}", result(id), operands.join(" "))
        }
        Instruction::Convert(conversion, axes, from, to) => {
            let message = message_bytes(plan, *conversion, [value(from), value(to)]);
            format!("{} = {conversion:?} over {} of %{}, {message}", result(to), axes_text(axes), from.0)
        }
        Instruction::Start(conversion, axes, from, to) => {
            let message = message_bytes(plan, *conversion, [value(from), value(to)]);
            format!("start %{} = {conversion:?} over {} of %{}, {message}", to.0, axes_text(axes), from.0)
        }
        Instruction::Wait(_, to) => format!("wait for {}", result(to)),
        Instruction::Accumulate(number, id) => format!("gradient of {} += %{}", parameter(number), id.0),
        Instruction::Free(id) => format!("free %{}", id.0),
    }
}

/// Dims with extents; a split dim names its axes, a partial value says so.
fn type_text(value: &Value) -> String {
    let dims: Vec<String> = value.shape.iter().map(|dim| dim_text(dim, value.distribution)).collect();
    let partial = SplitAxis::ALL.into_iter().filter(|axis| value.distribution.on(*axis).is_partial());
    let partial: Vec<String> = partial.map(|axis| format!(" partial over {axis:?}").to_lowercase()).collect();
    let flat = if value.distribution.data == Place::Flat { " a part over data" } else { "" };
    format!("[{}]{}{flat}", dims.join(", "), partial.concat())
}

fn dim_text(dim: &Dim, distribution: Distribution) -> String {
    let extent = match dim.extent {
        Extent::MicroBatch | Extent::Sequence => String::new(),
        Extent::Fixed(size) => format!(" {size}"),
    };
    let split = SplitAxis::ALL.into_iter().filter(|axis| distribution.on(*axis) == Place::Sharded(dim.name));
    let split: Vec<String> = split.map(|axis| format!("/{axis:?}").to_lowercase()).collect();
    format!("{:?}{extent}{}", dim.name, split.concat())
}

/// Size of a message: the whole tensor for gathers and scatters, a rank's for all_reduce.
fn message_bytes(plan: &Plan, conversion: Conversion, ends: [&Value; 2]) -> Bytes {
    let [from, to] = ends;
    let whole = match conversion {
        Conversion::AllGather(_) | Conversion::AllGatherFlat => to,
        Conversion::AllReduceSum
        | Conversion::AllReduceMax
        | Conversion::ReduceScatter(_)
        | Conversion::ReduceScatterFlat => from,
        Conversion::Slice(_) => return Bytes(0),
    };
    let split = tensor_split(&plan.model, plan.strategy.tensor_parallel, plan.strategy.sequence_parallel);
    let elements = split.map_or(0, |split| local_elements(plan, split, &whole.shape, whole.distribution));
    let reduced_gradient = conversion == Conversion::ReduceScatterFlat;
    let size = if reduced_gradient { DType::FP32.bytes() } else { whole.element.bytes(plan.model.dtype) };
    Bytes(elements) * size
}

fn axes_text(axes: &[SplitAxis]) -> String {
    let names: Vec<String> = axes.iter().map(|axis| format!("{axis:?}").to_lowercase()).collect();
    if names.is_empty() { "no axis".to_owned() } else { names.join(" x ") }
}

fn update_line(program: &Program, instruction: &UpdateInstruction) -> String {
    let Some(range) = instruction.parameters() else {
        return "global gradient norm: classes over their axes, then stages".to_owned();
    };
    let body = program.bodies.get(range.body as usize);
    let names = body.map_or("?".to_owned(), |body| names(body, range.parameters));
    let layers = match body.map(|body| body.name.as_str()) {
        Some("embedding" | "head") | None => String::new(),
        Some(_) => format!(" of layers {} to {}", range.layers.0, range.layers.1.saturating_sub(1)),
    };
    let what = match instruction {
        UpdateInstruction::ReduceOverTensor(_, axes) => format!("all_reduce gradients over {}", axes_text(axes)),
        UpdateInstruction::ReduceOverTied(_) => "all_reduce gradients over the first and the last stage".to_owned(),
        UpdateInstruction::WaitReduction(_) => "wait for the sums of gradients over data".to_owned(),
        UpdateInstruction::AddSquares(_, axes) => format!("add squares, to be summed over {}", axes_text(axes)),
        UpdateInstruction::AdamW(_) => "AdamW".to_owned(),
        UpdateInstruction::GatherOverData(_) => "all_gather over data".to_owned(),
        UpdateInstruction::FinishNorm => String::new(),
    };
    format!("{what}{layers}: {names}")
}

/// Names of a run of a body's parameters.
fn names(body: &Body, (first, end): (u32, u32)) -> String {
    let parameters = body.parameters.get(first as usize..end as usize).unwrap_or_default();
    let names: Vec<&str> = parameters.iter().map(|parameter| parameter.name.as_str()).collect();
    names.join(", ")
}
