//! Plans executed by ranks that are threads of the test.

#![allow(dead_code, reason = "each test uses a part")]

use std::collections::BTreeMap;
use std::ops::Range;

use ir::interpreter::{self, Sizes, StepInput, degrees_of};
use ir::placement::Placement;
use ir::plan::Plan;
use ir::program::Parameter;
use ir::reference::{Batch, initial_parameters, random_batch};
use ir::sharding::tensor_split;
use ir::traffic::{Collective, Link, step_traffic};
use runtime::communicator::{Options, Traffic, World, run_ranks};
use runtime::executor::{Executor, Held, MicroBatches, StepOptions};
use runtime::tensor::{Memory, Tensor};
use runtime::train::Dropout;

/// Steps with a clipped norm, which drop nothing.
pub const OPTIMIZER: StepOptions = StepOptions {
    dropout: Dropout { hidden: 0.0, attention: 0.0 },
    seed: 0,
    learning_rate: 1e-3,
    betas: (0.9, 0.95),
    epsilon: 1e-8,
    weight_decay: 0.1,
    clip: Some(0.5),
};

/// Parts of whole parameters by name, in runs: first element and numbers.
pub type Parts = BTreeMap<String, Vec<(u64, Vec<f32>)>>;

/// What a rank came to.
#[derive(Debug)]
pub struct RankRun {
    /// Losses of the steps.
    pub losses: Vec<f64>,
    /// Gradient norms of the steps.
    pub norms: Vec<f64>,
    /// Gradients of the first step, of the parts that the rank owns.
    pub gradients: Parts,
    /// Weights after the last step.
    pub weights: Parts,
    /// What was sent.
    pub traffic: Vec<Traffic>,
    /// Most bytes of tensors in a step.
    pub peak: u64,
    /// Loss of an evaluation before the first step.
    pub evaluation: f64,
    /// Logits of the first batch before the first step, on ranks of the last stage: token, first row of the
    /// vocabulary, numbers.
    pub logits: Vec<(usize, usize, Vec<f32>)>,
}

/// What is run: weights by name, a batch for each step, the optimizer.
pub struct Run {
    pub weights: BTreeMap<String, Vec<f64>>,
    pub batches: Vec<Batch>,
    pub optimizer: StepOptions,
    /// Whether weight decay applies to a parameter.
    pub decays: fn(&str) -> bool,
}

impl Run {
    /// Made-up weights and batches; weight decay applies to all.
    pub fn made_up(plan: &Plan, steps: u64, seed: u64, optimizer: StepOptions) -> Run {
        let (sequences, length) = (plan.workload.global_batch as usize, plan.workload.sequence_length as usize);
        Run {
            weights: initial_parameters(&plan.model, seed),
            batches: (0..steps).map(|step| random_batch(&plan.model, sequences, length, seed + step)).collect(),
            optimizer,
            decays: |_| true,
        }
    }
}

/// Executes a plan on processor cores, one thread a rank.
pub fn execute(plan: &Plan, run: &Run) -> Vec<RankRun> {
    execute_in(Memory::default, plan, run)
}

/// Executes a plan where the ranks' memory is, one thread a rank.
pub fn execute_in(memory: impl Fn() -> Memory + Sync, plan: &Plan, run: &Run) -> Vec<RankRun> {
    let ranks = plan.strategy.world_size();
    let results = run_ranks(ranks, 1, Options::default(), |world| {
        let world = world.expect("ranks find one another");
        let result = run_rank(memory(), plan, run, &world);
        world.finish().expect("all ranks end");
        result
    });
    results.expect("a port is free").into_iter().map(|result| result.expect("no rank panics")).collect()
}

fn run_rank(memory: Memory, plan: &Plan, run: &Run, world: &World) -> RankRun {
    let program = plan.program.as_ref().expect("the plan is executable");
    let decays = |name: &str, _: &Parameter| (run.decays)(name);
    let mut executor =
        Executor::in_memory(memory, plan, program, world, &decays, &mut |name, _, region, range, out| {
            let given = &run.weights[name];
            let mut at = 0;
            region.for_each_run(range, |start, length| {
                for index in start..start + length {
                    // Rows that padding adds come last and start as zeros.
                    out[at] = given.get(index as usize).copied().unwrap_or(0.0) as f32;
                    at += 1;
                }
            });
            Ok(())
        })
        .expect("the parameters are there");
    let evaluation = executor.evaluate(&of_replica(plan, &executor, &run.batches[0])).expect("the evaluation runs");
    let logits = first_logits(plan, &mut executor, &run.batches[0]);
    // Logits of a whole batch are more than a step ever holds.
    executor.memory.reset_peak();
    let before = world.traffic();
    let (mut losses, mut norms, mut gradients) = (Vec::new(), Vec::new(), Parts::new());
    for (number, batch) in run.batches.iter().enumerate() {
        let input = of_replica(plan, &executor, batch);
        let updated = executor.step(&input, &run.optimizer).expect("the step runs");
        losses.push(updated.loss);
        norms.push(updated.gradient_norm);
        if number == 0 {
            let gradient = |held: &Held| held.gradient.as_ref().expect("a step ends with all gradients").clone();
            gradients = parts(&executor, |held| (gradient(held), held.owned.clone()));
        }
    }
    let weights = parts(&executor, |held| {
        let all = 0..held.region.elements() as usize;
        (held.weight.clone(), if held.weight.len() == all.len() { all } else { held.owned.clone() })
    });
    let traffic = since(&before, world.traffic());
    RankRun { losses, norms, gradients, weights, traffic, peak: executor.memory.peak_bytes(), evaluation, logits }
}

fn first_logits(plan: &Plan, executor: &mut Executor, batch: &Batch) -> Vec<(usize, usize, Vec<f32>)> {
    let (replicas, replica) = (plan.strategy.data_parallel as usize, executor.place.place.data.index as usize);
    let tokens = (plan.strategy.micro_batch * plan.workload.sequence_length) as usize;
    let input = of_replica(plan, executor, batch);
    let parts = executor.logits(&input).expect("the forward passes run").into_iter().enumerate();
    let rows = parts.flat_map(|(number, part)| {
        let numbers = part.values.to_numbers();
        let rows: Vec<Vec<f32>> = numbers.chunks(numbers.len() / tokens).map(<[f32]>::to_vec).collect();
        let token = (number * replicas + replica) * tokens;
        rows.into_iter().zip(token..).map(move |(row, token)| (token, part.vocabulary_start, row))
    });
    rows.collect()
}

/// Elements of a rank's parameters: of each the tensor, and which elements of the region are wanted of it.
fn parts(executor: &Executor, choose: impl Fn(&Held) -> (Tensor, Range<usize>)) -> Parts {
    let of = |held: &Held| {
        let (tensor, range) = choose(held);
        let numbers = tensor.numbers().expect("the device works");
        let numbers = if numbers.len() == range.len() { &numbers[..] } else { &numbers[range.clone()] };
        let (mut runs, mut at) = (Vec::new(), 0);
        held.region.for_each_run(range.start as u64..range.end as u64, |start, length| {
            runs.push((start, numbers[at..at + length as usize].to_vec()));
            at += length as usize;
        });
        (held.name.clone(), runs)
    };
    executor.parameters.values().map(of).collect()
}

/// Whole parameters from the parts of all ranks; ranks that hold the same element must hold the same bits.
pub fn joined(runs: &[RankRun], part: impl Fn(&RankRun) -> &Parts) -> BTreeMap<String, Vec<f64>> {
    let mut whole: BTreeMap<String, BTreeMap<u64, f32>> = BTreeMap::new();
    for (name, pieces) in runs.iter().flat_map(part) {
        let elements = whole.entry(name.clone()).or_default();
        for (start, numbers) in pieces {
            for (index, number) in (*start..).zip(numbers) {
                let same = elements.insert(index, *number).is_none_or(|other| other.to_bits() == number.to_bits());
                assert!(same, "ranks hold different copies of {name}, element {index}");
            }
        }
    }
    let join = |(name, elements): (String, BTreeMap<u64, f32>)| {
        assert!(elements.keys().copied().eq(0..elements.len() as u64), "{name} has gaps");
        (name, elements.into_values().map(f64::from).collect())
    };
    whole.into_iter().map(join).collect()
}

/// What was sent since an earlier count.
fn since(before: &[Traffic], now: Vec<Traffic>) -> Vec<Traffic> {
    let earlier = |traffic: &Traffic| {
        let same = |other: &&Traffic| (&other.members, other.operation) == (&traffic.members, traffic.operation);
        before.iter().filter(same).map(|other| other.bytes).sum::<u64>()
    };
    let mut merged: Vec<Traffic> = Vec::new();
    for traffic in now {
        match merged.iter_mut().find(|other| (&other.members, other.operation) == (&traffic.members, traffic.operation))
        {
            Some(other) => other.bytes += traffic.bytes,
            None => merged.push(traffic),
        }
    }
    merged.into_iter().map(|traffic| Traffic { bytes: traffic.bytes - earlier(&traffic), ..traffic }).collect()
}

/// The micro-batches of a rank's replica.
fn of_replica(plan: &Plan, executor: &Executor, batch: &Batch) -> MicroBatches {
    let (replicas, replica) = (plan.strategy.data_parallel as usize, executor.place.place.data.index as usize);
    let length = plan.workload.sequence_length as usize;
    let size = plan.strategy.micro_batch as usize * length;
    let own = |ids: &[usize]| -> Vec<Vec<u32>> {
        let parts = ids.chunks(size).enumerate().filter(|(part, _)| part % replicas == replica);
        parts.map(|(_, ids)| ids.iter().map(|id| *id as u32).collect()).collect()
    };
    MicroBatches { tokens: own(&batch.tokens), targets: own(&batch.targets), positions: (0..length as u32).collect() }
}

/// What the reference interpreter makes of the same run: losses, norms, weights.
pub fn interpret(plan: &Plan, run: &Run) -> (Vec<f64>, Vec<f64>, BTreeMap<String, Vec<f64>>) {
    let program = plan.program.as_ref().expect("the plan is executable");
    let sizes = Sizes {
        micro_batch: plan.strategy.micro_batch as usize,
        sequence: plan.workload.sequence_length as usize,
        degrees: degrees_of(plan).expect("the plan is sound"),
    };
    let StepOptions { learning_rate, betas, epsilon, weight_decay, clip, .. } = run.optimizer;
    let optimizer = interpreter::Optimizer {
        learning_rate,
        beta1: betas.0,
        beta2: betas.1,
        epsilon,
        weight_decay,
        clip: clip.unwrap_or(f64::INFINITY),
    };
    let mut world = interpreter::World::new(program, sizes, &run.weights).expect("sound");
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for batch in &run.batches {
        let micro_batches = plan.strategy.num_micro_batches();
        let input = StepInput { tokens: &batch.tokens, targets: &batch.targets, micro_batches };
        let output = world.step(&input, &optimizer).expect("the program is sound");
        losses.push(output.loss);
        norms.push(output.gradient_norm);
    }
    (losses, norms, world.parameters().expect("copies agree"))
}

/// Bytes that all ranks sent, by kind of operation and number of members.
pub fn sent(runs: &[RankRun]) -> BTreeMap<(&'static str, usize), u64> {
    let mut sent = BTreeMap::new();
    for traffic in runs.iter().flat_map(|run| &run.traffic) {
        *sent.entry((traffic.operation.name(), traffic.members.len())).or_insert(0) += traffic.bytes;
    }
    sent
}

/// The same as the plan says, for one step.
pub fn planned(plan: &Plan) -> BTreeMap<(&'static str, usize), u64> {
    let program = plan.program.as_ref().expect("the plan is executable");
    let strategy = &plan.strategy;
    let split = tensor_split(&plan.model, strategy.tensor_parallel, strategy.sequence_parallel).expect("sound");
    let placement = Placement { split, strategy };
    let traffic = step_traffic(plan, program, split, strategy.num_micro_batches()).expect("the schedule is sound");
    let mut planned = BTreeMap::new();
    for ((link, collective), bytes) in traffic {
        let size = match link {
            Link::Axes(axes) => axes.iter().map(|axis| placement.degree(*axis) as usize).product(),
            Link::Neighbours(_) | Link::Ends => 2,
            Link::Stages => strategy.pipeline_parallel as usize,
        };
        let name = match collective {
            Collective::AllReduce => "all_reduce",
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::Send => "send",
        };
        *planned.entry((name, size)).or_insert(0) += bytes.0;
    }
    planned
}
