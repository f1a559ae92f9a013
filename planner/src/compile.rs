//! Compiles a strategy into typed programs: a list of passes, each a function from a value to a value.
//!
//! | Pass | Function | Gives |
//! |---|---|---|
//! | graph | `ir::graph::build_graph` | forward operators of each block |
//! | differentiate | `differentiate` | backward operators, recomputation as repeated forward operators |
//! | insert collectives | `insert_collectives` | typed bodies, conversions where the typing rules ask for them |
//! | overlap | `overlap` | data-axis collectives of a body started early and waited for late |
//! | free | `insert_frees` | ends of lives |
//! | fuse | `fuse` | runs of instructions that one kernel computes |
//! | schedule | `schedule_stages` | passes of each stage by micro-batch, sums over replicas started layer by layer |
//! | update | `update_parameters` | norm, optimizer |
//! | memory | `ir::footprint::with_memory` | bytes of each stage at its fullest |

mod collectives;
mod frees;
mod fuse;
mod overlap;
mod schedule;
mod update;

use ir::derivative::{differentiate, undifferentiable};
use ir::graph::{BlockRole, ModelGraph};
use ir::model::ModelSpec;
use ir::placement::Placement;
use ir::program::{AttentionKernel, Program};
use ir::sharding::tensor_split;
use ir::strategy::{Strategy, not_programmed};

use collectives::insert_collectives;
use frees::insert_frees;
use fuse::fuse;
use overlap::overlap;

use schedule::schedule_stages;
use update::update_parameters;

/// Why the compiler cannot build a strategy yet, or `None` if it can.
pub fn not_executable(model: &ModelSpec, strategy: &Strategy) -> Option<String> {
    if let Some(reason) = undifferentiable(model) {
        return Some(reason.to_owned());
    }
    not_programmed(strategy).map(str::to_owned)
}

/// Compiles a strategy that [`not_executable`] has no objection to.
pub fn compile(model: &ModelSpec, graph: &ModelGraph, strategy: &Strategy, attention: AttentionKernel) -> Program {
    let split = tensor_split(model, strategy.tensor_parallel, strategy.sequence_parallel)
        .expect("the search keeps only degrees that split the model");
    let placement = Placement { split, strategy };
    let compile_block = |block: &ir::graph::Block| {
        let recompute = match block.role {
            BlockRole::Layers(_) => strategy.recompute,
            BlockRole::Embedding | BlockRole::Head => ir::strategy::Recompute::None,
        };
        fuse(insert_frees(overlap(insert_collectives(differentiate(block, model, recompute, attention), placement))))
    };
    let bodies: Vec<_> = graph.blocks.iter().map(compile_block).collect();
    let stages = schedule_stages(model, graph, &bodies, strategy);
    let stages = update_parameters(stages, &bodies, model, strategy);
    Program { attention, bodies, stages }
}
