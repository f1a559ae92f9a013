//! The tree of the search: families of layouts whose blocks are split alike; in a family cases, which have the mesh,
//! the micro-batch and recomputation in common; in a case passes, which differ in schedule and parts; with each passes
//! layouts, which differ in sharding.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap};

use cost_models::step::{
    BlockTime, PerBlock, Scenario, StageContent, block_times, least_layer_memory, least_state_memory,
    pipeline_lower_bound_of, tail_lower_bound,
};
use ir::derivative::undifferentiable;
use ir::model::FeedForward;
use ir::strategy::{Recompute, Strategy, ZeroStage, not_programmed};
use ir::units::Seconds;

use super::costs::{CostIndex, Costs};
use super::expand::leanest;
use crate::partition::LayerCounts;
use crate::request::Request;
use crate::space::{Degrees, OpenMesh, Passes, Sharding, Space};

/// By how much a bound may exceed a time through sums in another order.
const TOLERANCE: f64 = 1e-9;

/// Layouts that differ in schedule and sharding only.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Index of the mesh.
    pub mesh: usize,
    /// Sequence parallelism.
    pub sequence_parallel: bool,
    /// Micro-batch.
    pub micro_batch: u64,
    /// Recomputation.
    pub recompute: Recompute,
    /// Costs of the blocks.
    pub costs: CostIndex,
}

/// Layouts whose blocks are split alike, whatever their micro-batches, stages and replicas.
#[derive(Clone, Debug)]
struct Family {
    meshes: Vec<usize>,
    sequence_parallel: bool,
}

/// What is left to do.
#[derive(Clone, Copy, Debug)]
pub enum Item {
    /// The costs of its blocks are not computed yet: the index of a family.
    Family(usize),
    /// Its passes are not bounded yet.
    Case(Case),
    /// Its layouts are not bounded yet: its case, and the index of the passes in its mesh.
    Passes(Case, usize),
    /// A layout that is not estimated yet.
    Layout(Leaf),
}

/// A layout.
#[derive(Clone, Copy, Debug)]
pub struct Leaf {
    /// What it has in common with others.
    pub case: Case,
    /// Index of its passes in its mesh.
    pub passes: usize,
    /// Index of its sharding in its mesh.
    pub sharding: usize,
    /// Its stage split as far as it is known.
    pub split: Split,
}

/// How much of a layout's stage split is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Nothing.
    Unknown,
    /// The layers of several parts a stage; not whether they fit into memory, nor which are computed again to fit.
    Parts(SplitIndex),
    /// All, and that it fits.
    Whole(SplitIndex),
}

/// Which of the splits that a tree keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitIndex(usize);

/// An item with a time that none of its layouts can beat.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    /// The bound.
    pub bound: f64,
    /// Layouts.
    pub count: u64,
    /// Whether some of them can be executed.
    pub executable: bool,
    /// What it is.
    pub item: Item,
}

/// When a node's turn is: the lowest bound's first, of equal ones that of the one which came first.
#[derive(Clone, Copy, Debug)]
struct Turn {
    bound: f64,
    node: usize,
}

/// Nodes by their bounds.
pub struct Tree<'a> {
    request: &'a Request,
    scenario: Scenario<'a>,
    /// Meshes with their open layouts.
    pub meshes: &'a [OpenMesh],
    families: Vec<Family>,
    /// Layers of each run.
    pub layers: LayerCounts,
    /// Whether programs of the model can be built.
    executable: bool,
    /// All nodes that were ever open.
    nodes: Vec<Node>,
    /// Those that still are.
    turns: BinaryHeap<Turn>,
    splits: Vec<Vec<StageContent>>,
}

impl PartialEq for Turn {
    fn eq(&self, other: &Turn) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Turn {}

impl PartialOrd for Turn {
    fn partial_cmp(&self, other: &Turn) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Turn {
    /// The greatest is what is done first.
    fn cmp(&self, other: &Turn) -> Ordering {
        other.bound.total_cmp(&self.bound).then(other.node.cmp(&self.node))
    }
}

impl<'a> Tree<'a> {
    /// The tree of a space with all families.
    pub fn new(
        request: &'a Request,
        scenario: Scenario<'a>,
        space: &'a Space,
        layers: LayerCounts,
        costs: &mut Costs,
    ) -> Tree<'a> {
        let executable = undifferentiable(&request.model).is_none();
        let meshes = &space.meshes;
        let families = families_of(meshes);
        let (nodes, turns, splits) = (Vec::new(), BinaryHeap::new(), Vec::new());
        let mut tree = Tree { request, scenario, meshes, families, layers, executable, nodes, turns, splits };
        for index in 0..tree.families.len() {
            let family = &tree.families[index];
            let layouts = family.meshes.iter().map(|mesh| &meshes[*mesh].layouts);
            let count = layouts.map(|layouts| layouts.count() / layouts.sequence_parallel.len() as u64).sum();
            let first = meshes[family.meshes[0]].degrees.plain(request.workload.global_batch);
            let bound = tree.family_bound(family, costs) + tree.step_overhead();
            tree.push(bound, count, tree.is_executable(&first), Item::Family(index));
        }
        tree
    }

    /// A time that no layout of a family can beat: the work of the batch at its largest micro-batch, over the stages.
    ///
    /// A pass of q times as many sequences takes at most q times as long: every product has at most q times the
    /// tiles, all other terms are a constant and a part that is proportional to the sequences, or the larger of such.
    /// So no smaller micro-batch that divides the one costed here makes the work of the whole batch less.
    fn family_bound(&self, family: &Family, costs: &mut Costs) -> Seconds {
        let meshes = || family.meshes.iter().map(|mesh| &self.meshes[*mesh]);
        let sizes = || meshes().flat_map(|mesh| mesh.layouts.passes.iter().map(|passes| passes.micro_batch));
        let degrees = meshes().next().expect("a family has a mesh").degrees;
        let smallest = sizes().min().expect("an open mesh has passes");
        if !whole_rows(self.request, degrees, smallest) {
            return Seconds(0.0);
        }
        let micro_batch = sizes().fold(1, least_common_multiple);
        // One micro-batch: nothing is accumulated.
        let plain = degrees.plain(micro_batch * degrees.data);
        // Blocks of stages with several parts take no longer than those of one.
        let parts = meshes().flat_map(|mesh| mesh.layouts.passes.iter().map(|passes| passes.virtual_stages));
        let virtual_stages = parts.max().unwrap_or(1);
        let sequence_parallel = family.sequence_parallel;
        let plain = Strategy { micro_batch, virtual_stages, sequence_parallel, ..plain };
        let costs_of = costs.index(&plain);
        let blocks = costs.blocks(costs_of);
        let whole = StageContent { embedding: true, layers: self.layers, head: true, ..StageContent::default() };
        let pass = |recompute: &Recompute| -> Seconds {
            let times = block_times(self.scenario, blocks, &Strategy { recompute: *recompute, ..plain.clone() });
            times.parts(&whole).map(|(count, block)| block.pass.total() * count as f64).sum()
        };
        // What a mesh has open of recomputation is the same for all.
        let passes_of = meshes().next().into_iter().flat_map(|mesh| mesh.layouts.recompute.iter().map(pass));
        let pass = passes_of.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or_default();
        let passes = self.request.workload.global_batch as f64 / (micro_batch * degrees.data) as f64;
        pass * (passes / degrees.pipeline as f64)
    }

    /// The node with the lowest bound.
    pub fn pop(&mut self) -> Option<Node> {
        self.turns.pop().map(|turn| self.nodes[turn.node])
    }

    /// Layouts that are left.
    pub fn count(&self) -> u64 {
        self.turns.iter().map(|turn| self.nodes[turn.node].count).sum()
    }

    fn push(&mut self, bound: Seconds, count: u64, executable: bool, item: Item) {
        let bound = bound.0 * (1.0 - TOLERANCE);
        self.turns.push(Turn { bound, node: self.nodes.len() });
        self.nodes.push(Node { bound, count, executable, item });
    }

    /// Replaces a family by its cases; gives the layouts of those whose bounds are above `limit`, and of those whose
    /// parameters or micro-batch alone do not fit into memory.
    ///
    /// What a layer keeps grows with the micro-batch, so larger ones than one that does not fit need no costs.
    pub fn push_cases(&mut self, family: usize, costs: &mut Costs, limit: f64) -> [u64; 2] {
        let Family { meshes, sequence_parallel } = self.families[family].clone();
        let usable = self.scenario.machine.usable_memory();
        let [mut slower, mut full] = [0, 0];
        let mut too_large = u64::MAX;
        for mesh in meshes {
            let OpenMesh { degrees, layouts } = &self.meshes[mesh];
            let plain = degrees.plain(self.request.workload.global_batch);
            let plain = Strategy { sequence_parallel, ..plain };
            let first = layouts.passes.iter().map(|passes| passes.micro_batch).min().unwrap_or(1);
            if too_large <= first || !self.holds_state(mesh, &Strategy { micro_batch: first, ..plain.clone() }, costs) {
                full += layouts.count() / layouts.sequence_parallel.len() as u64;
                continue;
            }
            for passes in layouts.passes.chunk_by(|a, b| a.micro_batch == b.micro_batch) {
                let micro_batch = passes[0].micro_batch;
                let strategy = Strategy { micro_batch, ..plain.clone() };
                if micro_batch < too_large {
                    let costs_of = costs.index(&strategy);
                    if least_layer_memory(costs.blocks(costs_of), self.layers) <= usable {
                        slower += self.push_cases_of(mesh, passes, &strategy, costs, limit);
                        continue;
                    }
                    too_large = micro_batch;
                }
                full += (passes.len() * layouts.sharding.len() * layouts.recompute.len()) as u64;
            }
        }
        [slower, full]
    }

    /// Whether the memory of a mesh's ranks holds weights, gradients and optimizer state, with some sharding.
    fn holds_state(&self, mesh: usize, plain: &Strategy, costs: &mut Costs) -> bool {
        let costs_of = costs.index(plain);
        let blocks = costs.blocks(costs_of);
        let usable = self.scenario.machine.usable_memory();
        let least =
            |sharding: &Sharding| least_state_memory(self.scenario, blocks, self.layers, &sharding.on(plain)) <= usable;
        leanest(&self.meshes[mesh].layouts.sharding).any(least)
    }

    /// Pushes the cases with a strategy's micro-batch, those whose bounds are above `limit` apart: their layouts.
    fn push_cases_of(
        &mut self,
        mesh: usize,
        passes: &[Passes],
        plain: &Strategy,
        costs: &mut Costs,
        limit: f64,
    ) -> u64 {
        let layouts = &self.meshes[mesh].layouts;
        let Strategy { micro_batch, sequence_parallel, .. } = *plain;
        let costs_of = costs.index(plain);
        let mut slower = 0;
        for &recompute in &layouts.recompute {
            let strategy = Strategy { recompute, ..plain.clone() };
            let executable = self.is_executable(&strategy);
            let case = Case { mesh, sequence_parallel, micro_batch, recompute, costs: costs_of };
            let bounds = passes.iter().map(|passes| {
                let strategy = passes.on(&strategy);
                let times = costs.times(costs_of, &strategy);
                self.pipeline_bound(costs, &times, case, &strategy)
            });
            let bound = bounds.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or_default();
            let count = (passes.len() * layouts.sharding.len()) as u64;
            if is_below(bound, limit) {
                self.push(bound, count, executable, Item::Case(case));
            } else {
                slower += count;
            }
        }
        slower
    }

    fn is_executable(&self, strategy: &Strategy) -> bool {
        self.executable && not_programmed(strategy).is_none()
    }

    /// The part of a step that is the same for all layouts.
    pub fn step_overhead(&self) -> Seconds {
        self.scenario.machine.stack.overhead.step.value
    }

    /// A time that no layout with a strategy's passes can beat, whatever it shards.
    pub fn pipeline_bound(
        &self,
        costs: &Costs,
        times: &PerBlock<BlockTime>,
        case: Case,
        strategy: &Strategy,
    ) -> Seconds {
        let blocks = costs.blocks(case.costs);
        pipeline_lower_bound_of(self.scenario, blocks, times, self.layers, strategy) + self.step_overhead()
    }

    /// Replaces a case by its passes; gives the layouts of those whose bounds are above `limit` of them, and of those
    /// that do not fit into memory.
    ///
    /// `slowest` is a time of a micro-batch on the slowest stage of passes that hold no less than 1F1B; none if these do
    /// not fit.
    pub fn push_passes(
        &mut self,
        case: Case,
        costs: &mut Costs,
        slowest: Option<f64>,
        limit: impl Fn(bool) -> f64,
    ) -> [u64; 2] {
        let layouts = &self.meshes[case.mesh].layouts;
        let count = layouts.sharding.len() as u64;
        let [mut slower, mut full] = [0, 0];
        for (index, _) in layouts.passes.iter().enumerate().filter(|(_, each)| each.micro_batch == case.micro_batch) {
            let strategy = self.unsharded(case, index);
            let executable = self.is_executable(&strategy);
            let times = costs.times(case.costs, &strategy);
            let bound = self.pipeline_bound(costs, &times, case, &strategy);
            let slowest = if strategy.schedule.holds_least() { slowest } else { Some(0.0) };
            let Some(slowest) = slowest else {
                full += count;
                continue;
            };
            let passes = Seconds(slowest) * strategy.num_micro_batches() as f64 + self.step_overhead();
            if is_below(bound.max(passes), limit(executable)) {
                self.push(bound.max(passes), count, executable, Item::Passes(case, index));
            } else {
                slower += count;
            }
        }
        [slower, full]
    }

    /// The layout of a case with 1F1B and nothing sharded.
    pub fn plain(&self, case: Case) -> Strategy {
        let plain = self.meshes[case.mesh].degrees.plain(self.request.workload.global_batch);
        let Case { micro_batch, sequence_parallel, recompute, .. } = case;
        Strategy { micro_batch, sequence_parallel, recompute, ..plain }
    }

    /// The layout of a case with one of its passes and nothing sharded.
    pub fn unsharded(&self, case: Case, passes: usize) -> Strategy {
        self.meshes[case.mesh].layouts.passes[passes].on(&self.plain(case))
    }

    /// A layout's choices, its stage split apart.
    pub fn strategy(&self, leaf: Leaf) -> Strategy {
        let sharding = self.meshes[leaf.case.mesh].layouts.sharding[leaf.sharding];
        sharding.on(&self.unsharded(leaf.case, leaf.passes))
    }

    /// Keeps a split.
    pub fn keep(&mut self, split: Vec<StageContent>) -> SplitIndex {
        self.splits.push(split);
        SplitIndex(self.splits.len() - 1)
    }

    /// A split that was kept.
    pub fn split(&self, index: SplitIndex) -> &[StageContent] {
        &self.splits[index.0]
    }

    /// Pushes a layout whose passes take `pipeline` at least, if its bound is below `limit` of it; gives whether it did.
    pub fn push_layout(
        &mut self,
        costs: &mut Costs,
        leaf: Leaf,
        pipeline: Seconds,
        limit: impl Fn(bool) -> f64,
    ) -> bool {
        let strategy = self.strategy(leaf);
        let executable = self.is_executable(&strategy);
        let times = costs.times(leaf.case.costs, &strategy);
        // ZeRO changes the times of passes from stage 2 on.
        let pipeline = match strategy.zero_stage >= ZeroStage::Gradients {
            true => pipeline.max(self.pipeline_bound(costs, &times, leaf.case, &strategy)),
            false => pipeline,
        };
        if !is_below(pipeline, limit(executable)) {
            return false;
        }
        let blocks = costs.blocks(leaf.case.costs);
        let bound = pipeline + tail_lower_bound(self.scenario, blocks, &times, self.layers, &strategy);
        self.push_bounded(leaf, bound, executable, limit)
    }

    /// Pushes a layout with its bound, if that is below `limit` of it; gives whether it did.
    pub fn push_bounded(&mut self, leaf: Leaf, bound: Seconds, executable: bool, limit: impl Fn(bool) -> f64) -> bool {
        let below = is_below(bound, limit(executable));
        if below {
            self.push(bound, 1, executable, Item::Layout(leaf));
        }
        below
    }
}

/// Whether a bound leaves a layout below a time.
pub fn is_below(bound: Seconds, limit: f64) -> bool {
    bound.0 * (1.0 - TOLERANCE) <= limit
}

fn families_of(meshes: &[OpenMesh]) -> Vec<Family> {
    let mut families: BTreeMap<(u64, u64, u64, [bool; 2]), Family> = BTreeMap::new();
    for (index, OpenMesh { degrees, layouts }) in meshes.iter().enumerate() {
        for &sequence_parallel in &layouts.sequence_parallel {
            let switches = [degrees.whole_experts, sequence_parallel];
            let key = (degrees.tensor, degrees.context, degrees.expert, switches);
            let family = families.entry(key).or_insert_with(|| Family { meshes: Vec::new(), sequence_parallel });
            family.meshes.push(index);
        }
    }
    families.into_values().collect()
}

/// Whether each expert gets a whole number of rows from a micro-batch: only then do products of larger ones have no
/// worse alignment.
fn whole_rows(request: &Request, degrees: Degrees, micro_batch: u64) -> bool {
    match request.model.feed_forward {
        FeedForward::Gelu { .. } | FeedForward::SwiGlu { .. } => true,
        FeedForward::MixtureOfExperts { num_experts, experts_per_token, .. } => {
            let tokens = micro_batch * request.workload.sequence_length / degrees.context;
            let ranks = if degrees.whole_experts { degrees.tensor } else { 1 };
            (tokens * experts_per_token * degrees.expert).is_multiple_of(num_experts * ranks)
        }
    }
}

fn least_common_multiple(a: u64, b: u64) -> u64 {
    let (mut divisor, mut rest) = (a, b);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    a / divisor * b
}
