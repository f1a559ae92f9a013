//! Columns of tables of layouts: the choices that most layouts differ in, and of the others those that some layout uses.

use ir::strategy::{Recompute, ScheduleKind, Strategy};

/// A choice as a column.
struct Column {
    title: &'static str,
    /// Whether the column is there although all layouts leave the choice out.
    always: bool,
    shown: fn(&Strategy) -> String,
    used: fn(&Strategy) -> bool,
}

const COLUMNS: [Column; 15] = [
    column("tensor", |layout| layout.tensor_parallel.to_string()),
    column("pipeline", |layout| layout.pipeline_parallel.to_string()),
    used_column("parts", |layout| layout.virtual_stages.to_string(), |layout| layout.virtual_stages > 1),
    used_column("schedule", |layout| layout.schedule.name().to_owned(), |layout| !is_usual(layout.schedule)),
    column("data", |layout| layout.data_parallel.to_string()),
    used_column("context", |layout| layout.context_parallel.to_string(), |layout| layout.context_parallel > 1),
    used_column("experts", |layout| layout.expert_parallel.to_string(), |layout| layout.expert_parallel > 1),
    used_column("ranks an expert", |layout| layout.expert_tensor_parallel().to_string(), |layout| layout.whole_experts),
    column("ZeRO", |layout| u8::from(layout.zero_stage).to_string()),
    used_column(
        "in groups of",
        |layout| layout.shard_group.to_string(),
        |layout| layout.shard_group != layout.data_parallel,
    ),
    used_column("optimizer in", |layout| place(layout).to_owned(), |layout| layout.offload_optimizer),
    used_column("outermost", outermost, |layout| !layout.mesh_order.is_usual()),
    column("micro-batch", |layout| layout.micro_batch.to_string()),
    column("recompute", recompute),
    column("sequence parallel", |layout| if layout.sequence_parallel { "on" } else { "off" }.to_owned()),
];

const fn column(title: &'static str, shown: fn(&Strategy) -> String) -> Column {
    Column { title, always: true, shown, used: |_| true }
}

const fn used_column(title: &'static str, shown: fn(&Strategy) -> String, used: fn(&Strategy) -> bool) -> Column {
    Column { title, always: false, shown, used }
}

/// Whether the number of parts on a stage says which schedule it is.
fn is_usual(schedule: ScheduleKind) -> bool {
    matches!(schedule, ScheduleKind::OneForwardOneBackward | ScheduleKind::Interleaved)
}

fn place(layout: &Strategy) -> &'static str {
    if layout.offload_optimizer { "host" } else { "device" }
}

fn outermost(layout: &Strategy) -> String {
    layout.mesh_order.axes()[0].name().to_owned()
}

fn recompute(layout: &Strategy) -> String {
    match layout.recompute {
        Recompute::Partial => format!("{} layers", layout.recomputed_layers.iter().sum::<u64>()),
        all => all.name().to_owned(),
    }
}

/// The titles of the columns for these layouts, and each layout's row.
pub(super) fn layout_columns(layouts: &[&Strategy]) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let is_shown = |column: &&Column| column.always || layouts.iter().any(|layout| (column.used)(layout));
    let columns: Vec<&Column> = COLUMNS.iter().filter(is_shown).collect();
    let row = |layout: &&Strategy| columns.iter().map(|column| (column.shown)(layout)).collect();
    (columns.iter().map(|column| column.title).collect(), layouts.iter().map(row).collect())
}
