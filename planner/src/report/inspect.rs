//! The text that `plan inspect` prints: the whole plan, one stage, or one rank.

use std::collections::BTreeSet;

use ir::mesh::Rank;
use ir::plan::{BlockShards, Executable, MemoryTerm, Plan, Stage};

use super::program::stage_program;
use super::summary::{Heading, estimate_lines, header};
use super::table;
use crate::explain::describe;

/// Most stages listed one a line.
const LISTED_STAGES: usize = 64;

/// The whole plan.
pub fn whole(plan: &Plan) -> String {
    let mut text = header(&Heading::of_plan(plan), &[]);
    text += &format!("{}\n", describe(&plan.strategy));
    text += &estimate_lines(plan, &plan.estimate);
    match &plan.executable {
        Executable::Yes => text += "executable: yes\n",
        Executable::No(reason) => text += &format!("executable: no ({reason})\n"),
    }
    let axes: Vec<String> = plan.mesh.axes.iter().map(|(axis, degree)| format!("{} {degree}", axis.name())).collect();
    text += &format!("\nmesh: {} (last axis runs fastest)\n", axes.join(" x "));
    text += &table(
        &["axis", "groups", "ranks", "stride", "first group"],
        plan.groups.iter().map(|family| {
            let members = family.members(Rank(0));
            vec![
                family.axis.name().to_owned(),
                family.count.to_string(),
                family.size.to_string(),
                family.stride.to_string(),
                first_members(&members),
            ]
        }),
    );
    text += "\nstages\n";
    text += &stage_table(plan);
    text + "\nparameters of a rank, by block\n" + &parameter_table(&plan.parameter_shards)
}

/// One stage: what it holds, how long it takes, where its memory goes.
pub fn stage(plan: &Plan, stage: &Stage) -> String {
    let mut text = format!(
        "stage {} of {}: ranks {} to {}{}, {}\n",
        stage.stage.0,
        plan.stages.len(),
        stage.ranks.0,
        stage.ranks.1 - 1,
        if plan.strategy.mesh_order.is_usual() { "" } else { " of the first replica" },
        content(stage)
    );
    text += &format!(
        "{} parameters a rank, {} micro-batches in flight, forward {}, backward {}\n\n",
        stage.parameters_per_rank, stage.in_flight, stage.forward, stage.backward
    );
    let rows = stage.memory.iter().map(|(term, bytes)| vec![term.name().to_owned(), format!("{:.2}", bytes.gib())]);
    let total = vec!["device use".to_owned(), format!("{:.2}", stage.device_memory().gib())];
    text += &table(&["memory", "GiB"], rows.chain([total]));
    let held: BTreeSet<&str> = held_blocks(plan, stage).into_iter().collect();
    let blocks: Vec<BlockShards> =
        plan.parameter_shards.iter().filter(|block| held.contains(block.block.as_str())).cloned().collect();
    text += "\n";
    text += &parameter_table(&blocks);
    match &plan.program {
        Some(program) => text + "\n" + &stage_program(plan, program, stage),
        None => text,
    }
}

/// One rank: its place in the mesh, its groups, and its stage.
pub fn rank(plan: &Plan, rank: Rank, stage_of_rank: &Stage) -> String {
    let place: Vec<String> =
        plan.mesh.coordinate(rank).into_iter().map(|(axis, index)| format!("{} {index}", axis.name())).collect();
    let mut text = format!("rank {} of {}: {}\n", rank.0, plan.mesh.world_size(), place.join(", "));
    text += &format!("node {}, local rank {}\n\n", rank.0 / plan.inputs.node_gpus, rank.0 % plan.inputs.node_gpus);
    let rows = plan.groups.iter().map(|family| {
        vec![family.axis.name().to_owned(), family.size.to_string(), first_members(&family.members(rank))]
    });
    text += &table(&["group along", "ranks", "members"], rows);
    text + "\n" + &stage(plan, stage_of_rank)
}

fn stage_table(plan: &Plan) -> String {
    let columns = [
        "stage",
        "ranks",
        "holds",
        "parameters/rank",
        "forward",
        "backward",
        "in flight",
        "weights GiB",
        "activations GiB",
        "GiB",
    ];
    let shown = plan.stages.len().min(LISTED_STAGES);
    let rows = plan.stages[..shown].iter().map(|stage| {
        let part = |term| stage.memory.get(&term).map_or("-".to_owned(), |bytes| format!("{:.2}", bytes.gib()));
        vec![
            stage.stage.0.to_string(),
            format!("{}-{}", stage.ranks.0, stage.ranks.1 - 1),
            content(stage),
            stage.parameters_per_rank.to_string(),
            stage.forward.to_string(),
            stage.backward.to_string(),
            stage.in_flight.to_string(),
            part(MemoryTerm::Weights),
            part(MemoryTerm::Activations),
            format!("{:.1}", stage.device_memory().gib()),
        ]
    });
    let mut text = table(&columns, rows);
    if shown < plan.stages.len() {
        text += &format!("… and {} more: `--stage N` or `--json` show them\n", plan.stages.len() - shown);
    }
    text
}

fn content(stage: &Stage) -> String {
    let part = |(first, end): (u64, u64)| match end - first {
        0 => "no layer".to_owned(),
        1 => format!("layer {first}"),
        _ => format!("layers {first}-{}", end - 1),
    };
    let layers = stage.parts().map(part).collect::<Vec<_>>().join(", ");
    let ends = [(stage.embedding, "embedding + "), (stage.head, " + head")];
    let shown = |(held, text): (bool, &'static str)| if held { text } else { "" };
    format!("{}{layers}{}", shown(ends[0]), shown(ends[1]))
}

fn parameter_table(blocks: &[BlockShards]) -> String {
    let rows = blocks.iter().flat_map(|block| {
        block.parameters.iter().map(|shard| {
            let shape: Vec<String> = shard.shape.iter().map(|(name, extent)| format!("{name:?} {extent}")).collect();
            let split: Vec<String> = shard.split.iter().map(|(name, ways)| format!("{name:?} / {ways}")).collect();
            vec![
                format!("{} x {}", block.block, block.count),
                shard.name.clone(),
                shape.join(" x "),
                if split.is_empty() { "replicated".to_owned() } else { split.join(", ") },
                shard.local_elements().to_string(),
            ]
        })
    });
    table(&["block", "parameter", "whole shape", "tensor axis", "elements/rank"], rows)
}

fn held_blocks<'a>(plan: &'a Plan, stage: &Stage) -> Vec<&'a str> {
    let mut held = Vec::new();
    let mut start = 0;
    for block in &plan.parameter_shards {
        let name = block.block.as_str();
        let holds = match name {
            "embedding" => stage.embedding,
            "head" => stage.head,
            _ => {
                let end = start + block.count;
                let overlaps = stage.parts().any(|(first, last)| first < end && start < last);
                start = end;
                overlaps
            }
        };
        if holds {
            held.push(name);
        }
    }
    held
}

/// A group's ranks; long groups are shortened.
fn first_members(members: &[Rank]) -> String {
    let shown: Vec<String> = members.iter().take(8).map(|rank| rank.0.to_string()).collect();
    let rest = if members.len() > 8 { ", …" } else { "" };
    format!("{}{rest}", shown.join(", "))
}
