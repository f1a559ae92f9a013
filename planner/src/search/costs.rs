//! Costs of blocks, each computed once for all layouts that share it.

use std::collections::BTreeMap;

use cost_models::step::{BlockTime, CostedBlock, PerBlock, Scenario, block_times, costed_blocks};
use ir::sharding::{TensorSplit, split_of};
use ir::strategy::{Recompute, Strategy, ZeroStage};

/// Which costs a layout has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostIndex(usize);

/// Costs by what they depend on: splits of the model with micro-batches, and for times recomputation too, whether
/// gradients are accumulated, and whether stages have several parts.
pub struct Costs<'a> {
    scenario: Scenario<'a>,
    indices: BTreeMap<(TensorSplit, u64), CostIndex>,
    blocks: Vec<PerBlock<CostedBlock>>,
    times: BTreeMap<(usize, Recompute, [bool; 2]), PerBlock<BlockTime>>,
}

impl<'a> Costs<'a> {
    /// No costs yet.
    pub fn new(scenario: Scenario<'a>) -> Costs<'a> {
        Costs { scenario, indices: BTreeMap::new(), blocks: Vec::new(), times: BTreeMap::new() }
    }

    /// The costs of a layout's blocks, which are computed if no layout before had them.
    pub fn index(&mut self, strategy: &Strategy) -> CostIndex {
        let split = split_of(self.scenario.model, strategy).expect("the space holds only degrees that split the model");
        *self.indices.entry((split, strategy.micro_batch)).or_insert_with(|| {
            self.blocks.push(costed_blocks(self.scenario, split, strategy.micro_batch));
            CostIndex(self.blocks.len() - 1)
        })
    }

    /// Costs of one execution of each block.
    pub fn blocks(&self, index: CostIndex) -> &PerBlock<CostedBlock> {
        &self.blocks[index.0]
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
