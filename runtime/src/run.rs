//! A run of a plan on one rank: weights, data, steps, log.

mod limits;
mod terms;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hardware_profiles::files::{PLAN_LIMIT, read_text};
use ir::distribution::SplitAxis;
use ir::error::Problem;
use ir::graph::DimName;
use ir::mesh::Rank;
use ir::plan::Plan;
use ir::program::{Parameter, Program};
use ir::units::Bytes;

use crate::Error;
use crate::communicator::{Group, Options, Reduction, Transport, World};
use crate::data::{BatchShape, Source, Sources, open_corpus, read_micro_batch, sample_index, synthetic};
use crate::executor::{Executor, MicroBatches, StepOptions};
use crate::gather::export_weights;
use crate::initial::{Initialisation, fill_initial};
use crate::launch::Launch;
use crate::log::{Log, StepRecord, measured_mfu, opening_line, progress_line};
use crate::measure::{Circumstances, Steps, comparison, measure_profile};
use crate::random::Region;
use crate::tensor::Memory;
use crate::train::{
    Progress, TrainConfig, check_against, has_weight_decay, learning_rate, micro_batches_at, read_train,
};
use crate::weights::{Checkpoint, DimRange};

use limits::check_device;
use terms::terms;

/// What to run.
#[derive(Clone, Debug)]
pub struct Request {
    /// The training file; the defaults without it.
    pub train: Option<PathBuf>,
    /// Where tokens come from.
    pub data: Data,
    /// Steps of the run.
    pub steps: u64,
    /// In place of the training file's seed.
    pub seed: Option<u64>,
    /// A Hugging Face checkpoint with the first weights.
    pub weights: Option<PathBuf>,
    /// Where to write the last weights, as a Hugging Face checkpoint.
    pub export: Option<PathBuf>,
    /// Where to write a line for each step.
    pub log: Option<PathBuf>,
    /// Replace the log of an earlier run.
    pub force: bool,
    /// Where to write what the run and measurements after it say of the machine.
    pub profile: Option<PathBuf>,
    /// Only evaluate, on `steps` batches.
    pub evaluate: bool,
    /// How long ranks wait for one another.
    pub timeout: Duration,
    /// How they reach one another.
    pub transport: Transport,
    /// Where a rank keeps its tensors, and so what computes: the host's processor cores, or a device of its own.
    pub memory: Memory,
}

/// Where tokens come from.
#[derive(Clone, Debug)]
pub enum Data {
    /// `PREFIX.bin` and `PREFIX.idx`.
    Corpus(PathBuf),
    /// Random ids.
    Synthetic,
}

/// A request with everything opened that can be wrong before ranks meet.
pub struct Prepared {
    config: TrainConfig,
    sources: Sources,
    weights: Option<Checkpoint>,
}

/// Reads and opens what a request names.
///
/// # Errors
/// `Error::BadInput` with what is wrong with the training file, the data or the weights.
pub fn prepare_run(plan: &Plan, request: &Request) -> Result<Prepared, Error> {
    let bad = |error: ir::error::Error| Error::BadInput(error.problems().to_vec());
    let one = |problem: Problem| Error::BadInput(vec![problem]);
    let (mut config, origin) = match &request.train {
        Some(path) => {
            let origin = path.display().to_string();
            let text = read_text(path, PLAN_LIMIT).map_err(one)?;
            (read_train(&text, &origin).map_err(bad)?, origin)
        }
        None => (TrainConfig::default(), "train.ron".to_owned()),
    };
    check_against(&config, &plan.strategy, &origin).map_err(bad)?;
    config.seed = request.seed.unwrap_or(config.seed);
    let vocabulary = plan.model.vocabulary.rows();
    let held_out = config.evaluation.map_or(0.0, |evaluation| evaluation.held_out);
    let sources = match &request.data {
        Data::Corpus(prefix) => open_corpus(prefix, vocabulary, held_out).map_err(one)?,
        Data::Synthetic => synthetic(config.seed, u32::try_from(vocabulary).unwrap_or(u32::MAX)),
    };
    let weights = request.weights.as_deref().map(|path| Checkpoint::open(path, &plan.model).map_err(bad));
    Ok(Prepared { config, sources, weights: weights.transpose()? })
}

/// Meets the other ranks and runs. All ranks must call it with equal plans and requests. Gives what rank 0 has to
/// report at the end.
///
/// # Errors
/// Exit code 2 for ranks that were not started alike, 4 for a lost rank, 5 for numbers that are none.
pub fn run_rank(plan: &Plan, request: &Request, prepared: &Prepared, launch: &Launch) -> Result<String, Error> {
    check_device(plan, request)?;
    let options = Options { timeout: request.timeout, transport: request.transport };
    let world = World::connect(launch, &terms(plan, request, prepared), options)?;
    let hosts = launch.world_size.div_ceil(launch.local_size);
    let ended = Run::new(plan, request, prepared, &world).and_then(|mut run| run.run(hosts));
    match ended {
        // Every rank found the same.
        Ok(_) | Err(Error::Numerical(_)) => {
            world.finish()?;
            ended
        }
        Err(error) => {
            if !matches!(error, Error::Lost(_)) {
                world.abort("see its own message");
            }
            Err(error)
        }
    }
}

/// One rank on its way through a run.
struct Run<'a> {
    plan: &'a Plan,
    request: &'a Request,
    prepared: &'a Prepared,
    world: &'a World,
    executor: Executor<'a>,
    /// All ranks, for what the log says of them.
    all: Option<Group>,
    log: Option<Log>,
    progress: Progress,
    /// Bytes that this rank had sent before the step.
    sent: u64,
    /// Steps of the plan's batch.
    steps: Steps,
}

impl<'a> Run<'a> {
    fn new(plan: &'a Plan, request: &'a Request, prepared: &'a Prepared, world: &'a World) -> Result<Run<'a>, Error> {
        let program = plan.program.as_ref().expect("the caller checked that the plan is executable");
        let first = world.rank().0 == 0;
        let log = request.log.as_deref().filter(|_| first).map(|path| Log::create(path, request.force)).transpose()?;
        let executor = start_executor(plan, program, request, prepared, world)?;
        let all: Vec<Rank> = (0..world.size()).map(Rank).collect();
        let all = (all.len() > 1).then(|| world.group(&all));
        let progress = Progress::default();
        Ok(Run { plan, request, prepared, world, executor, all, log, progress, sent: 0, steps: Steps::default() })
    }

    fn run(&mut self, hosts: u64) -> Result<String, Error> {
        if self.request.evaluate {
            let loss = self.evaluate(&self.prepared.sources.training, self.request.steps)?;
            return Ok(format!("loss {loss:.6} over {} batches\n", self.request.steps));
        }
        self.say(&opening_line(&self.plan.estimate, self.world.size()));
        while self.progress.steps < self.request.steps {
            let record = self.step()?;
            if record.predicted_seconds.is_some() {
                self.steps.times.push(self.executor.times());
                self.steps.seconds.push(record.seconds);
            }
            if let Some(log) = &mut self.log {
                log.write(&record).map_err(|problem| Error::BadInput(vec![problem]))?;
            }
            let interval = self.prepared.config.log_interval;
            if record.step.is_multiple_of(interval) || record.step == self.request.steps {
                self.say(&progress_line(&record, self.request.steps));
            }
        }
        if let Some(directory) = &self.request.export {
            export_weights(self.plan, &self.executor, self.world, directory)?;
            self.say(&format!("weights written to {}", directory.display()));
        }
        self.report(hosts)
    }

    /// Compares with the plan, and measures the machine if that is asked for.
    fn report(&self, hosts: u64) -> Result<String, Error> {
        let typical = self.steps.typical(self.world.rank().0 as usize, self.all.as_ref())?;
        if let Some(path) = &self.request.profile {
            let Some(typical) = &typical else {
                let what = "no step had the plan's batch, so that there is nothing to measure";
                return Err(Problem::new(what, "--profile", "run until the batch has grown, or without ramp-up").into());
            };
            let circumstances = Circumstances { world: self.world, all: self.all.as_ref(), hosts, path };
            let text = measure_profile(self.plan, &self.executor, typical, &circumstances)?;
            if self.world.rank().0 == 0 {
                let wrong = |error: std::io::Error| {
                    let help = "name a file in a folder that can be written to";
                    Problem::new(format!("cannot write the profile: {error}"), path.display().to_string(), help)
                };
                std::fs::write(path, text).map_err(wrong)?;
                self.say(&format!("profile written to {}", path.display()));
            }
        }
        let allocated = self.allocated()?;
        Ok(typical.map_or(String::new(), |typical| comparison(&self.plan.estimate, &typical, allocated)))
    }

    /// What the fullest rank's tensors take of its device; none on processor cores.
    fn allocated(&self) -> Result<Option<Bytes>, Error> {
        if !self.executor.memory.is_on_device() {
            return Ok(None);
        }
        let mut most = [self.executor.memory.allocated_bytes() as f64];
        if let Some(all) = &self.all {
            all.all_reduce(Reduction::Max, &mut most)?;
        }
        Ok(Some(Bytes(most[0] as u64)))
    }

    /// Prints on rank 0, which speaks for all.
    fn say(&self, line: &str) {
        if self.world.rank().0 == 0 {
            eprintln!("{line}");
        }
    }

    fn step(&mut self) -> Result<StepRecord, Error> {
        let config = &self.prepared.config;
        let (plan, strategy) = (self.plan, &self.plan.strategy);
        let micro_batches = micro_batches_at(config, strategy, self.progress.samples);
        let rate = learning_rate(config, self.progress);
        let input = self.read(&self.prepared.sources.training, self.progress.samples, micro_batches)?;
        let options = StepOptions::of(config, rate);
        let start = Instant::now();
        let updated = self.executor.step(&input, &options)?;
        let seconds = start.elapsed().as_secs_f64();
        let sequences = micro_batches * strategy.micro_batch * strategy.data_parallel;
        self.progress = Progress { steps: self.progress.steps + 1, samples: self.progress.samples + sequences };
        let [seconds, bytes_sent, peak] = self.over_ranks(seconds)?;
        let evaluation = config.evaluation.filter(|evaluation| self.progress.steps.is_multiple_of(evaluation.interval));
        let evaluation =
            evaluation.map(|evaluation| self.evaluate(&self.prepared.sources.evaluation, evaluation.steps));
        let whole_batch = sequences == plan.workload.global_batch;
        Ok(StepRecord {
            step: self.progress.steps,
            loss: updated.loss,
            grad_norm: updated.gradient_norm,
            learning_rate: rate,
            tokens: sequences * plan.workload.sequence_length,
            seconds,
            bytes_sent: bytes_sent as u64,
            peak_tensor_bytes: peak as u64,
            mfu: measured_mfu(&plan.estimate, seconds, sequences as f64 / plan.workload.global_batch as f64),
            predicted_seconds: whole_batch.then_some(plan.estimate.step.0),
            evaluation_loss: evaluation.transpose()?,
        })
    }

    /// The slowest rank's time, the bytes that all sent in the step, and the largest peak.
    fn over_ranks(&mut self, seconds: f64) -> Result<[f64; 3], Error> {
        let sent: u64 = self.world.traffic().iter().map(|traffic| traffic.bytes).sum();
        let mut sum = [(sent - self.sent) as f64];
        let mut most = [seconds, self.executor.memory.peak_bytes() as f64];
        if let Some(all) = &self.all {
            all.all_reduce(Reduction::Sum, &mut sum)?;
            all.all_reduce(Reduction::Max, &mut most)?;
        }
        // What this exchange sent belongs to no step.
        self.sent = self.world.traffic().iter().map(|traffic| traffic.bytes).sum();
        Ok([most[0], sum[0], most[1]])
    }

    /// The mean loss over the first `batches` global batches of a source.
    fn evaluate(&mut self, source: &Source, batches: u64) -> Result<f64, Error> {
        let strategy = &self.plan.strategy;
        let mut sum = 0.0;
        for batch in 0..batches {
            let input = self.read(source, batch * strategy.global_batch, strategy.num_micro_batches())?;
            sum += self.executor.evaluate(&input)?;
        }
        self.sent = self.world.traffic().iter().map(|traffic| traffic.bytes).sum();
        Ok(sum / batches as f64)
    }

    /// The micro-batches of this rank's replica; stages between the ends read none.
    fn read(&self, source: &Source, consumed: u64, micro_batches: u64) -> Result<MicroBatches, Error> {
        let strategy = &self.plan.strategy;
        let length = self.plan.workload.sequence_length;
        let shape = BatchShape { data_parallel: strategy.data_parallel, micro_batch: strategy.micro_batch };
        let place = &self.executor.place;
        let reads = place.stage == 0 || place.stage + 1 == place.stages;
        let mut input = MicroBatches { positions: (0..length as u32).collect(), ..MicroBatches::default() };
        for micro_batch in 0..micro_batches {
            let (tokens, targets) = match reads {
                true => {
                    let replica = place.place.on(SplitAxis::Data).index;
                    let first = sample_index(consumed, shape, micro_batch, replica, 0);
                    read_micro_batch(source, first, strategy.micro_batch, length as usize)
                        .map_err(|problem| Error::BadInput(vec![problem]))?
                }
                false => (Vec::new(), Vec::new()),
            };
            input.tokens.push(tokens);
            input.targets.push(targets);
        }
        Ok(input)
    }
}

/// A rank with its first weights: read, or made up from the seed.
fn start_executor<'a>(
    plan: &'a Plan,
    program: &'a Program,
    request: &Request,
    prepared: &Prepared,
    world: &'a World,
) -> Result<Executor<'a>, Error> {
    let config = &prepared.config;
    let settings = Initialisation::of(config, &plan.model);
    let decays = |name: &str, parameter: &Parameter| has_weight_decay(&config.optimizer, name, parameter);
    let mut fill =
        |name: &str, parameter: &Parameter, region: &Region, range: std::ops::Range<u64>, out: &mut [f32]| {
            match &prepared.weights {
                None => fill_initial(&settings, name, parameter, region, range, out),
                Some(checkpoint) => {
                    let elements = range.start as usize..range.end as usize;
                    let read = checkpoint.read_elements(name, &dim_ranges(parameter, region), elements);
                    out.copy_from_slice(&read.map_err(|problem| Error::BadInput(vec![problem]))?);
                }
            }
            Ok(())
        };
    Executor::in_memory(request.memory.clone(), plan, program, world, &decays, &mut fill)
}

fn dim_ranges(parameter: &Parameter, region: &Region) -> Vec<DimRange> {
    let range = |((name, _), span): (&(DimName, u64), &crate::random::Span)| DimRange {
        name: *name,
        start: span.start,
        length: span.length,
    };
    parameter.shape.iter().zip(&region.spans).map(range).collect()
}

/// The folder that a path names is free for an export.
///
/// # Errors
/// `Error::BadInput` if something is there already.
pub fn check_export(path: &Path) -> Result<(), Error> {
    let occupied = path.is_file() || std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_some());
    match occupied {
        true => Err(Error::BadInput(vec![Problem::new(
            "weights would be written over what is there",
            path.display().to_string(),
            "name a folder that does not exist or is empty",
        )])),
        false => Ok(()),
    }
}
