//! Training steps on the device: GPT-2 by plans that this program carries, in tokens a second and MFU beside what the
//! plan predicts; and ranks that share the device beside ranks on processor cores.

use std::time::{Duration, Instant};

use hardware_profiles::device::DeviceProfile;
use ir::graph::count_parameters;
use ir::model::DType;
use ir::plan::{Plan, read_plan};
use ir::program::Parameter;
use serde::Serialize;

use super::device::{Device, Driver};
use super::profile::base;
use super::pytorch::{StepRow, run_steps};
use super::reference::ids;
use crate::communicator::{Options, World, run_ranks};
use crate::device;
use crate::executor::{Executor, MicroBatches, StepOptions, Updated};
use crate::initial::{Initialisation, fill_initial};
use crate::tensor::{Format, Memory};
use crate::train::{TrainConfig, has_weight_decay};

/// Plans of one card: GPT-2 with sequences of 1024 tokens, and a model that a slow device trains too.
const GPT2: [(&str, &str); 3] = [
    ("gpt2-124m", include_str!("../../../tests/golden/gpt2-124m-1.plan.ron")),
    ("gpt2-774m", include_str!("../../../tests/golden/gpt2-774m-1.plan.ron")),
    ("gpt2-1.5b", include_str!("../../../tests/golden/gpt2-1.5b-1.plan.ron")),
];
const IN_SHORT: usize = 1;
const SMALL: (&str, &str) = ("tiny", include_str!("../../../tests/golden/tiny-1.plan.ron"));
/// Two stages of two ranks.
const FOUR_RANKS: (&str, &str) = ("tiny", include_str!("../../../tests/golden/tiny-tp2-pp2.plan.ron"));
/// The most steps that are timed of a model.
const MOST_STEPS: u32 = 10;
/// Time for the steps of one model, the first ones apart; a Vulkan driver, which checks numbers only, gets a tenth.
const BUDGET: Duration = Duration::from_secs(40);
/// How long ranks wait for one another: kernels are compiled in the first step.
const PATIENCE: Duration = Duration::from_secs(240);
/// Relative difference of losses between ranks on the device and on processor cores, and of gradient norms.
const TOLERANCE: f64 = 1e-5;
/// What MFU is computed from.
pub const FORMULA: &str = "(6 N + 6 L C T) FLOPs a token, N parameters, L layers of width C, T tokens of a sequence \
                           (llm.c), over the dense peak of the data sheet";

/// Steps of a model, or why there are none.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trained {
    /// The model.
    pub model: String,
    /// Number format of its weights and activations.
    pub format: &'static str,
    /// Parameters, tied ones once.
    pub parameters: u64,
    /// Tokens of a step.
    pub tokens: u64,
    /// Sequences of a micro-batch.
    pub micro_batch: u64,
    /// Steps that were timed.
    pub steps: u32,
    /// Mean seconds of a step, or why there are none.
    #[serde(flatten)]
    pub time: super::Time,
    /// Tokens of a second.
    pub tokens_per_second: Option<f64>,
    /// Model FLOPs over time and peak, if the card's peak is known.
    pub mfu: Option<f64>,
    /// Seconds of a step by the plan.
    pub predicted_seconds: f64,
    /// The device that the plan is for.
    pub predicted_for: String,
    /// Losses of the first and last step, all on the same tokens.
    pub losses: Option<[f64; 2]>,
    /// Bytes of the device that tensors take.
    pub memory_bytes: u64,
}

/// What steps of a model came to.
struct Seen {
    seconds: f64,
    steps: u32,
    losses: [f64; 2],
    memory_bytes: u64,
}

/// Steps of GPT-2, or of a small model on a device that is slow.
pub fn measure_steps(device: &Device, full: bool) -> Vec<Trained> {
    let plans: &[(&str, &str)] = match device.driver {
        Driver::Cuda if full => &GPT2,
        Driver::Cuda => &GPT2[..IN_SHORT],
        Driver::Wgpu => &[SMALL],
    };
    let peak = known_peak(device);
    plans.iter().map(|(name, text)| trained(device, &built_in(name, text), peak)).collect()
}

/// The same models in PyTorch, on an NVIDIA GPU.
///
/// # Errors
/// If PyTorch is not installed, finds no GPU, or there is no GPU to compare.
pub fn steps_in_pytorch(device: &Device, full: bool) -> Result<Vec<StepRow>, String> {
    if device.driver == Driver::Wgpu {
        return Err("skipped: PyTorch is compared on NVIDIA GPUs only".to_owned());
    }
    let plans = if full { &GPT2[..] } else { &GPT2[..IN_SHORT] };
    let rows = plans.iter().map(|(name, text)| run_steps("cuda", &built_in(name, text)));
    Ok(rows.collect::<Result<Vec<_>, _>>()?.concat())
}

/// A plan that this program carries.
fn built_in(name: &str, text: &str) -> Plan {
    read_plan(text, name).expect("a test writes and reads the plans that this program carries")
}

fn trained(device: &Device, plan: &Plan, peak: Option<f64>) -> Trained {
    let memory = Memory::on(device::Device::new(device.client().clone()));
    let format = if plan.model.dtype == DType::FP32 { Format::Single } else { Format::Brain };
    let budget = match device.driver {
        Driver::Cuda => BUDGET,
        Driver::Wgpu => BUDGET / 10,
    };
    let seen = match memory.has(format) {
        true => on_ranks(plan, &|| memory.clone(), &|executor| time_steps(plan, executor, budget))
            .map(|ranks| ranks.into_iter().next()),
        false => Err("skipped: the device does not compute in bf16".to_owned()),
    };
    let seen = seen.map(|first| first.expect("there is a rank"));
    let parameters = count_parameters(&plan.model);
    let tokens = plan.workload.global_batch * plan.workload.sequence_length;
    let known = seen.as_ref().ok();
    let tokens_per_second = known.map(|seen| tokens as f64 / seen.seconds);
    let (layers, width) = (plan.model.num_layers, plan.model.hidden_size);
    let flops = 6.0 * (parameters + layers * width * plan.workload.sequence_length) as f64;
    Trained {
        model: plan.model.name.clone(),
        format: if format == Format::Single { "fp32" } else { "bf16" },
        parameters,
        tokens,
        micro_batch: plan.strategy.micro_batch,
        steps: known.map_or(0, |seen| seen.steps),
        tokens_per_second,
        mfu: tokens_per_second.zip(peak).filter(|_| format == Format::Brain).map(|(rate, peak)| rate * flops / peak),
        predicted_seconds: plan.estimate.step.0,
        predicted_for: plan.inputs.device.clone(),
        losses: known.map(|seen| seen.losses),
        memory_bytes: known.map_or(0, |seen| seen.memory_bytes),
        time: seen.map(|seen| seen.seconds).into(),
    }
}

/// Dense bf16 peak of the data sheet of a card whose profile is built in.
fn known_peak(device: &Device) -> Option<f64> {
    let DeviceProfile { peak, .. } = base(device).ok().filter(|_| device.driver == Driver::Cuda)?;
    peak.bf16.map(|peak| peak.value.0)
}

/// Times steps on the same tokens: one to compile kernels and lay memory out, one to see how long one takes, and as
/// many as fit into the budget.
fn time_steps(plan: &Plan, executor: &mut Executor, budget: Duration) -> Result<Seen, String> {
    let input = batch(plan);
    let step = |executor: &mut Executor| executor.step(&input, &options()).map_err(|error| error.to_string());
    let first = step(executor)?;
    let timed = |executor: &mut Executor, steps: u32| {
        executor.memory.wait().map_err(|error| error.to_string())?;
        let start = Instant::now();
        let mut last = first;
        for _ in 0..steps {
            last = step(executor)?;
        }
        executor.memory.wait().map_err(|error| error.to_string())?;
        Ok::<_, String>((start.elapsed().as_secs_f64(), last))
    };
    let (second, _) = timed(executor, 1)?;
    let steps = ((budget.as_secs_f64() / second) as u32).clamp(1, MOST_STEPS);
    let (seconds, last) = timed(executor, steps)?;
    let losses = [first.loss, last.loss];
    // Weights begin small: all tokens are about equally likely.
    let blind = (plan.model.vocabulary.size as f64).ln();
    match (losses[0] / blind - 1.0).abs() < 0.1 && losses[1] < losses[0] {
        true => {
            let memory_bytes = executor.memory.allocated_bytes();
            Ok(Seen { seconds: seconds / f64::from(steps), steps, losses, memory_bytes })
        }
        false => {
            Err(format!("the loss goes from {} to {}, and should begin near {blind:.2} and fall", losses[0], losses[1]))
        }
    }
}

/// Steps of a model on two stages of two ranks that share the device, beside the same on processor cores.
///
/// # Errors
/// What differs or failed.
pub fn compare_ranks(device: &Device) -> Result<String, String> {
    let plan = built_in(FOUR_RANKS.0, FOUR_RANKS.1);
    let on_device = || Memory::on(device::Device::new(device.client().clone()));
    let run = |memory: &(dyn Fn() -> Memory + Sync)| {
        on_ranks(&plan, memory, &|executor| {
            let (input, options) = (batch(&plan), options());
            let steps = (0..2).map(|_| executor.step(&input, &options).map_err(|error| error.to_string()));
            steps.collect::<Result<Vec<Updated>, String>>()
        })
    };
    let (on_device, on_cores) = (run(&on_device)?, run(&Memory::default)?);
    let mut worst = 0.0_f64;
    for (found, wanted) in on_device.iter().flatten().zip(on_cores.iter().flatten()) {
        for (what, found, wanted) in
            [("loss", found.loss, wanted.loss), ("gradient norm", found.gradient_norm, wanted.gradient_norm)]
        {
            let part = (found / wanted - 1.0).abs();
            if part.is_nan() || part > TOLERANCE {
                return Err(format!("a {what} of ranks that share the device is {found}, on processor cores {wanted}"));
            }
            worst = worst.max(part);
        }
    }
    let ranks = on_device.len();
    Ok(format!(
        "{ranks} ranks (two stages of two) share the device: losses and norms within {worst:.1e} of processor cores'"
    ))
}

/// What each rank of a plan comes to, as threads of this process.
fn on_ranks<R: Send>(
    plan: &Plan,
    memory: &(dyn Fn() -> Memory + Sync),
    run: &(dyn Fn(&mut Executor) -> Result<R, String> + Sync),
) -> Result<Vec<R>, String> {
    let ranks = plan.strategy.world_size();
    let options = Options { timeout: PATIENCE, ..Options::default() };
    let results = run_ranks(ranks, 1, options, |world| {
        let world: World = world.map_err(|error| error.to_string())?;
        let program = plan.program.as_ref().expect("the plans that this program carries are executable");
        let config = training();
        let settings = Initialisation::of(&config, &plan.model);
        let decays = |name: &str, parameter: &Parameter| has_weight_decay(&config.optimizer, name, parameter);
        let mut executor = Executor::in_memory(
            memory(),
            plan,
            program,
            &world,
            &decays,
            &mut |name, parameter, region, range, out| {
                fill_initial(&settings, name, parameter, region, range, out);
                Ok(())
            },
        )
        .map_err(|error| error.to_string())?;
        let seen = run(&mut executor).inspect_err(|_| {
            world.abort("see its own message");
        })?;
        drop(executor);
        world.finish().map_err(|error| error.to_string())?;
        Ok(seen)
    });
    let results = results.map_err(|error| error.to_string())?;
    results.into_iter().map(|rank| rank.map_err(|_| "a rank panicked".to_owned())?).collect()
}

/// Random tokens for the only replica.
fn batch(plan: &Plan) -> MicroBatches {
    let length = plan.workload.sequence_length as usize;
    let tokens = plan.strategy.micro_batch as usize * length;
    let limit = plan.model.vocabulary.size as usize;
    let make = |first: u64| {
        (0..plan.strategy.num_micro_batches()).map(|number| ids(tokens, limit, first + number)).collect::<Vec<_>>()
    };
    MicroBatches { tokens: make(1), targets: make(1 << 32), positions: (0..length as u32).collect() }
}

fn training() -> TrainConfig {
    TrainConfig { seed: 1, ..TrainConfig::default() }
}

fn options() -> StepOptions {
    let config = training();
    StepOptions::of(&config, config.optimizer.learning_rate)
}
