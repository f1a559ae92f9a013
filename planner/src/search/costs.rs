//! Costs of blocks, each computed once for all layouts that share it.

use std::collections::{BTreeMap, HashMap};

use cost_models::block::{BlockStructure, block_structure};
use cost_models::pipeline::{StageTime, pipeline_time};
use cost_models::step::{BlockTime, CostedBlock, PerBlock, Scenario, block_times, costed_block, costed_blocks_by};
use ir::graph::{Block, BlockRole};
use ir::pipeline::Pipeline;
use ir::sharding::{TensorSplit, split_of};
use ir::strategy::{Recompute, Strategy, ZeroStage};
use ir::units::Seconds;

/// Which costs a layout has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostIndex(usize);

/// Costs by what they depend on: splits of the model with micro-batches, and for times recomputation too, whether
/// gradients are accumulated, and whether stages have several parts.
pub struct Costs<'a> {
    scenario: Scenario<'a>,
    indices: BTreeMap<(TensorSplit, u64), CostIndex>,
    blocks: Vec<PerBlock<CostedBlock>>,
    structures: BTreeMap<BlockRole, BlockStructure>,
    costed: BTreeMap<(BlockRole, TensorSplit, u64), CostedBlock>,
    times: BTreeMap<(usize, Recompute, [bool; 2]), PerBlock<BlockTime>>,
    pipelines: Pipelines,
}

/// Times of pipelines by the parts' times, of stages with several parts: layouts that differ in sharding share them.
#[derive(Default)]
pub struct Pipelines(HashMap<(Pipeline, Vec<u64>), Seconds>);

impl<'a> Costs<'a> {
    /// No costs yet.
    pub fn new(scenario: Scenario<'a>) -> Costs<'a> {
        let pipelines = Pipelines::default();
        let structure = |block: &Block| (block.role, block_structure(block, scenario.machine));
        let structures = scenario.graph.blocks.iter().map(structure).collect();
        let (indices, costed, times) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Costs { scenario, indices, blocks: Vec::new(), structures, costed, times, pipelines }
    }

    /// The costs of a layout's blocks, which are computed if no layout before had them.
    pub fn index(&mut self, strategy: &Strategy) -> CostIndex {
        let split = split_of(self.scenario.model, strategy).expect("the space holds only degrees that split the model");
        *self.indices.entry((split, strategy.micro_batch)).or_insert_with(|| {
            let costed = |block: &Block| {
                // What holds no experts is the same however these are spread.
                let split = match split.local_expert_parameters(block) > 0 {
                    true => split,
                    false => TensorSplit { expert_parallel: 1, expert_tensor_parallel: 1, ..split },
                };
                let key = (block.role, split, strategy.micro_batch);
                let structure = &self.structures[&block.role];
                let cost = || costed_block(self.scenario, block, structure, split, strategy.micro_batch);
                *self.costed.entry(key).or_insert_with(cost)
            };
            self.blocks.push(costed_blocks_by(self.scenario.graph, costed));
            CostIndex(self.blocks.len() - 1)
        })
    }

    /// Costs of one execution of each block.
    pub fn blocks(&self, index: CostIndex) -> &PerBlock<CostedBlock> {
        &self.blocks[index.0]
    }

    /// Costs of one execution of each block, and the times of pipelines.
    pub fn blocks_and_pipelines(&mut self, index: CostIndex) -> (&PerBlock<CostedBlock>, &mut Pipelines) {
        (&self.blocks[index.0], &mut self.pipelines)
    }

    /// Times of a micro-batch on each block under a layout.
    pub fn times(&mut self, index: CostIndex, strategy: &Strategy) -> PerBlock<BlockTime> {
        let (scenario, blocks) = (self.scenario, &self.blocks[index.0]);
        if strategy.zero_stage >= ZeroStage::Gradients {
            return block_times(scenario, blocks, strategy);
        }
        let several = [strategy.num_micro_batches() > 1, strategy.virtual_stages > 1];
        let key = (index.0, strategy.recompute, several);
        *self.times.entry(key).or_insert_with(|| block_times(scenario, blocks, strategy))
    }
}

impl Pipelines {
    /// [`pipeline_time`], computed once for equal parts.
    pub fn time(&mut self, pipeline: Pipeline, parts: &[StageTime], transfer: Seconds) -> Seconds {
        if pipeline.virtual_stages == 1 {
            return pipeline_time(pipeline, parts, transfer);
        }
        let times = parts.iter().flat_map(|part| [part.forward, part.backward, part.weights]);
        let key = times.chain([transfer]).map(|time| time.0.to_bits()).collect();
        *self.0.entry((pipeline, key)).or_insert_with(|| pipeline_time(pipeline, parts, transfer))
    }
}
