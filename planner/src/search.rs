//! Exact search: a tree of layouts, done in the order of its lower bounds until no bound can win.

mod costs;
mod expand;
mod nearest;
mod score;
mod tree;

use std::cmp::Ordering;
use std::collections::BTreeMap;

use cost_models::memory::StageMemory;
use cost_models::step::{Scenario, StageContent, StepPrediction};
use ir::derivative::undifferentiable;
use ir::graph::ModelGraph;
use ir::model::{MAX_LAYER_RUNS, layer_runs};
use ir::plan::StopReason;
use ir::strategy::Strategy;
use ir::units::{Bytes, Seconds};

use crate::partition::LayerCounts;
use crate::request::Request;
use crate::space::{Pruning, Rejection, enumerate};
use crate::watch::Watch;
use expand::search_node;
use tree::Tree;

pub use costs::Costs;
pub use nearest::nearest_miss;
pub use score::{partition_of, score_as_run, score_given_split, score_layout};

/// A layout with its stage split and what it should cost.
#[derive(Clone, Debug)]
pub struct Scored {
    /// The layout.
    pub strategy: Strategy,
    /// What each part of the model holds, those of the first stage first.
    pub contents: Vec<StageContent>,
    /// Predicted step.
    pub prediction: StepPrediction,
    /// Memory of each stage's ranks.
    pub memory: Vec<StageMemory>,
    /// Host memory of a node with the ranks of the stage that needs the most.
    pub host_memory: Bytes,
}

/// What a search found.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Layouts that fit, best first; at most as many as asked for.
    pub best: Vec<Scored>,
    /// The best layout that can be executed, where it is another than the best.
    pub executable: Option<Scored>,
    /// Candidates of the stated space.
    pub enumerated: u64,
    /// Candidates that were estimated and fit.
    pub feasible: u64,
    /// Candidates left out, by rule.
    pub pruned: BTreeMap<Pruning, u64>,
    /// Candidates out, by reason.
    pub rejected: BTreeMap<Rejection, u64>,
    /// Why the search stopped.
    pub stop_reason: StopReason,
}

impl Scored {
    /// The fullest stage and its ranks' device use.
    pub fn fullest_stage(&self) -> (usize, Bytes) {
        let uses = self.memory.iter().map(StageMemory::device_use).enumerate();
        uses.max_by(|a, b| a.1.cmp(&b.1).then(b.0.cmp(&a.0))).unwrap_or((0, Bytes(0)))
    }

    /// Order of preference: time, then memory, then the lexicographically smallest strategy.
    fn precedes(&self, other: &Scored) -> Ordering {
        let time = self.prediction.step.0.total_cmp(&other.prediction.step.0);
        let memory = || self.fullest_stage().1.cmp(&other.fullest_stage().1);
        time.then_with(memory).then_with(|| self.strategy.cmp(&other.strategy))
    }
}

/// The scenario of a request.
pub fn scenario<'a>(request: &'a Request, graph: &'a ModelGraph) -> Scenario<'a> {
    Scenario { model: &request.model, graph, workload: request.workload, machine: &request.machine }
}

/// Layers of each run of a model.
pub fn run_lengths(request: &Request) -> LayerCounts {
    let mut lengths = [0; MAX_LAYER_RUNS];
    for (length, run) in lengths.iter_mut().zip(layer_runs(&request.model)) {
        *length = run.count;
    }
    lengths
}

/// Searches the stated space of a checked request.
///
/// The result is the optimum: a layout is left out only under a rule of [`Pruning`], the last of which
/// compares a true lower bound with the worst of the `top` layouts reported, and of executable ones with the best.
pub fn search(request: &Request, graph: &ModelGraph) -> Outcome {
    search_watched(request, graph, &Watch::default())
}

/// [`search`], which ends with what it has once the watch says so: the rest is then not proven to be worse.
pub fn search_watched(request: &Request, graph: &ModelGraph, watch: &Watch) -> Outcome {
    search_remembering(request, graph, watch, &mut costs(request, graph))
}

/// [`search_watched`], which adds the costs that it computes to those that it is given.
pub fn search_remembering(request: &Request, graph: &ModelGraph, watch: &Watch, costs: &mut Costs) -> Outcome {
    let seeks_executable = undifferentiable(&request.model).is_none();
    search_for(request, graph, watch, costs, Found::new(request, seeks_executable, ENDLESS))
}

/// [`search_watched`] for the best layouts only, whether or not they can be executed.
pub fn search_best(request: &Request, graph: &ModelGraph, watch: &Watch) -> Outcome {
    search_within(request, graph, watch, &mut costs(request, graph), ENDLESS)
}

/// [`search_best`] of layouts that take no longer than a time, with costs of the same model on a machine that differs in
/// nothing but its memory.
pub fn search_within(
    request: &Request,
    graph: &ModelGraph,
    watch: &Watch,
    costs: &mut Costs,
    longest: Seconds,
) -> Outcome {
    search_for(request, graph, watch, costs, Found::new(request, false, longest))
}

/// No costs yet.
pub fn costs<'a>(request: &'a Request, graph: &'a ModelGraph) -> Costs<'a> {
    Costs::new(scenario(request, graph))
}

/// A time that every layout is within.
const ENDLESS: Seconds = Seconds(f64::INFINITY);

fn search_for(request: &Request, graph: &ModelGraph, watch: &Watch, costs: &mut Costs, mut found: Found) -> Outcome {
    let scenario = scenario(request, graph);
    let space = enumerate(request);
    let mut tree = Tree::new(request, scenario, &space, run_lengths(request), costs);
    let mut interrupted = 0;
    watch.begin(tree.count());
    while let Some(node) = tree.pop() {
        if node.bound > found.limit(true) {
            found.prune(Pruning::SlowerThanReported, node.count + tree.count());
            break;
        }
        if watch.stopped() {
            interrupted = node.count + tree.count();
            break;
        }
        search_node(scenario, node, &mut tree, costs, &mut found);
        watch.reach(found.done());
    }
    let Found { best, executable, feasible, pruned, rejected, .. } = found;
    let mut outcome = Outcome {
        executable: executable.filter(|scored| best.first().is_none_or(|best| best.strategy != scored.strategy)),
        best,
        enumerated: space.enumerated,
        feasible,
        pruned: space.pruned,
        rejected: space.rejected,
        stop_reason: if interrupted > 0 { StopReason::Interrupted } else { StopReason::Optimal },
    };
    outcome.pruned.extend(pruned);
    outcome.pruned.extend((interrupted > 0).then_some((Pruning::Interrupted, interrupted)));
    outcome.rejected.extend(rejected);
    outcome
}

/// What a search has found so far, and how many layouts it is done with.
struct Found {
    top: usize,
    seeks_executable: bool,
    longest: Seconds,
    best: Vec<Scored>,
    executable: Option<Scored>,
    feasible: u64,
    pruned: BTreeMap<Pruning, u64>,
    rejected: BTreeMap<Rejection, u64>,
}

impl Found {
    fn new(request: &Request, seeks_executable: bool, longest: Seconds) -> Found {
        Found {
            top: request.top.max(1),
            seeks_executable,
            longest,
            best: Vec::new(),
            executable: None,
            feasible: 0,
            pruned: BTreeMap::new(),
            rejected: BTreeMap::new(),
        }
    }

    fn prune(&mut self, rule: Pruning, count: u64) {
        if count > 0 {
            *self.pruned.entry(rule).or_default() += count;
        }
    }

    fn reject(&mut self, reason: Rejection, count: u64) {
        if count > 0 {
            *self.rejected.entry(reason).or_default() += count;
        }
    }

    /// Layouts that are done with.
    fn done(&self) -> u64 {
        self.feasible + self.pruned.values().chain(self.rejected.values()).sum::<u64>()
    }

    /// The time above which a layout is of no interest.
    fn limit(&self, executable: bool) -> f64 {
        let time = |scored: Option<&Scored>| scored.map_or(self.longest, |scored| scored.prediction.step).0;
        let worst = time(self.best.get(self.top - 1));
        if executable && self.seeks_executable { worst.max(time(self.executable.as_ref())) } else { worst }
    }

    fn add(&mut self, scored: Scored, executable: bool) {
        self.feasible += 1;
        let better = |other: &Scored| scored.precedes(other) == Ordering::Less;
        if executable && self.seeks_executable && self.executable.as_ref().is_none_or(better) {
            self.executable = Some(scored.clone());
        }
        insert(&mut self.best, scored, self.top);
    }
}

fn insert(best: &mut Vec<Scored>, scored: Scored, most: usize) {
    let place = best.partition_point(|other| other.precedes(&scored).is_lt());
    if place < most {
        best.insert(place, scored);
        best.truncate(most);
    }
}
