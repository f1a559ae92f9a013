//! A cluster file with what was measured on this machine, in place of the assumptions about ordinary hosts.

use std::fs;
use std::path::Path;
use std::time::Instant;

use hardware_profiles::cluster::Nics;
use hardware_profiles::device::{MatmulEdges, OperatorClass, OperatorRate};
use hardware_profiles::stack::{CopyRate, Waiting};
use hardware_profiles::{
    ClusterFile, ClusterProfile, DeviceProfile, Sourced, StackProfile, find_cluster, find_device, find_stack,
    write_cluster_file,
};
use ir::graph::DimName::Hidden;
use ir::plan::Plan;
use ir::program::Op;
use ir::provenance::Provenance;
use ir::units::{Bytes, BytesPerSecond, FlopsPerSecond, Seconds};

use super::Typical;
use super::links::{LinkRates, measure_links};
use super::products::{ProductRates, measure_products};
use crate::Error;
use crate::communicator::{Group, Reduction, World};
use crate::executor::{Account, Executor, Phase, StepWork, Times, Work};
use crate::operators::{Operand, Place, ResultShape, apply};
use crate::tensor::{Format, Memory, Tensor};

/// Share of the scores that a causal kernel computes.
const CAUSAL_SHARE: f64 = 0.5;
/// Small operators that are timed one by one.
const SMALL_OPERATORS: usize = 2000;

/// Where a run takes place.
#[derive(Clone, Copy)]
pub struct Circumstances<'a> {
    /// All ranks.
    pub world: &'a World,
    /// Their group, if there are several.
    pub all: Option<&'a Group>,
    /// Hosts of the run.
    pub hosts: u64,
    /// Where the profile will be written; its name is the cluster's.
    pub path: &'a Path,
}

/// What all ranks measured, equal on each.
struct Measured {
    /// Seconds of a step, over all ranks together.
    times: Times,
    /// Work of a step, over all ranks together.
    work: StepWork,
    /// Time of the step's products by the form that was fitted.
    formed: f64,
    products: ProductRates,
    links: Option<LinkRates>,
    floor: f64,
    /// Time between blocks for each micro-batch and rank.
    micro_batch: f64,
    /// What the rank that was last has to do once a step.
    step: f64,
    /// What the numbers are, in words.
    source: String,
}

/// Measures the machine, on all ranks at once, and gives the text of a cluster file for `plan --cluster`.
///
/// # Errors
/// What ended the run.
pub fn measure_profile(
    plan: &Plan,
    executor: &Executor,
    typical: &Typical,
    circumstances: &Circumstances,
) -> Result<String, Error> {
    let measured = measure(plan, executor, typical, circumstances)?;
    let unknown = |error: hardware_profiles::Error| Error::BadInput(error.problems().to_vec());
    let stem = circumstances.path.file_stem().and_then(|stem| stem.to_str()).unwrap_or("measured").to_owned();
    let device = device(find_device("cpu-core", "built-in devices").map_err(unknown)?, &measured, &stem);
    let ranks = circumstances.world.size();
    let cluster = find_cluster("cpu-host", "built-in clusters").map_err(unknown)?;
    let cluster = cluster_of(cluster, &measured, &device.name, stem, ranks, circumstances.hosts);
    let stack = stack(find_stack("planwright", "built-in stacks").map_err(unknown)?, &measured);
    let file = ClusterFile { cluster, device: Some(device), stack: Some(stack) };
    let text = write_cluster_file(&file);
    // What makes no sense comes from a clock or a memory that cannot be read, and is better found here.
    hardware_profiles::read_cluster_file(&text, "the profile").map_err(unknown)?;
    Ok(text)
}

fn measure(
    plan: &Plan,
    executor: &Executor,
    typical: &Typical,
    circumstances: &Circumstances,
) -> Result<Measured, Error> {
    let Circumstances { world, all, .. } = *circumstances;
    let micro_batches = plan.strategy.num_micro_batches();
    let mut work = executor.step_work(micro_batches);
    if let Some(all) = all {
        all.barrier()?;
    }
    let mut products = measure_products();
    let links = all.map(|all| measure_links(world, all)).transpose()?;
    let mut floor = [small_operator()];
    if let Some(all) = all {
        share(all, &mut products, &mut floor)?;
    }
    let seconds = |(shape, count): &(_, f64)| products.seconds(shape) * count;
    let mut formed = [work.products.iter().map(seconds).sum::<f64>()];
    if let Some(all) = all {
        all.all_reduce(Reduction::Sum, &mut formed)?;
        sum_over_ranks(all, &mut work)?;
    }
    let mut times = Times::default();
    for rank in &typical.times {
        times.numbers_mut().iter_mut().zip(rank.numbers()).for_each(|(sum, seconds)| *sum += seconds);
    }
    let ranks = typical.times.len() as f64;
    let once = |rank: &Times| rank.of(Account::Step);
    let threads = rayon::current_num_threads();
    let source = format!("{ranks} ranks with {threads} threads each, median of {} steps", typical.steps);
    Ok(Measured {
        micro_batch: times.of(Account::MicroBatch) / work.micro_batches,
        step: typical.times.iter().map(once).fold(f64::INFINITY, f64::min),
        times,
        work,
        formed: formed[0],
        products,
        links,
        floor: floor[0],
        source,
    })
}

/// Means over ranks.
fn share(all: &Group, products: &mut ProductRates, floor: &mut [f64]) -> Result<(), Error> {
    let [rows, columns, depth] = products.halves;
    let mut numbers = [products.rate, rows, columns, depth, products.error, floor[0]];
    all.all_reduce(Reduction::Sum, &mut numbers)?;
    let [rate, rows, columns, depth, error, small] = numbers.map(|sum| sum / all.size() as f64);
    *products = ProductRates { rate, halves: [rows, columns, depth], error };
    floor[0] = small;
    Ok(())
}

/// Adds the other ranks' work; micro-batches are counted on each rank.
fn sum_over_ranks(all: &Group, work: &mut StepWork) -> Result<(), Error> {
    let numbers = [work.attention_flops, work.micro_batches, work.accumulated_bytes, work.optimizer_bytes];
    let mut numbers = [&work.bytes[..], &numbers[..]].concat();
    all.all_reduce(Reduction::Sum, &mut numbers)?;
    let (bytes, others) = numbers.split_at(work.bytes.len());
    work.bytes.copy_from_slice(bytes);
    (work.attention_flops, work.micro_batches) = (others[0], others[1]);
    (work.accumulated_bytes, work.optimizer_bytes) = (others[2], others[3]);
    Ok(())
}

/// Time of an operator that has next to nothing to do.
fn small_operator() -> f64 {
    let memory = Memory::default();
    let dims = [(Hidden, 16)];
    let shape = ResultShape { memory: &memory, dims: &dims, format: Format::Single, place: Place::WHOLE };
    let tensor = Tensor::zeros(&memory, &dims, Format::Single);
    let start = Instant::now();
    for _ in 0..SMALL_OPERATORS {
        drop(apply(&Op::Add, vec![Operand::Borrowed(&tensor), Operand::Borrowed(&tensor)], &shape));
    }
    start.elapsed().as_secs_f64() / SMALL_OPERATORS as f64
}

impl Measured {
    fn value<T: Clone>(&self, value: T, what: &str) -> Sourced<T> {
        Sourced { value, provenance: Provenance::Measured, source: format!("{what}; {}", self.source) }
    }

    fn of(&self, work: Work, phase: Phase) -> f64 {
        self.times.of(Account::Operator(work, phase))
    }

    /// Bandwidth at which norm and optimizer pass over their state.
    fn streaming(&self) -> f64 {
        self.work.optimizer_bytes / self.times.of(Account::Optimizer)
    }
}

fn device(base: DeviceProfile, measured: &Measured, stem: &str) -> DeviceProfile {
    let mut device = DeviceProfile { name: format!("{stem}-rank"), ..base };
    let [rows, columns, depth] = measured.products.halves;
    let fit = format!("fitted to products of many shapes, mean error {:.1} %", measured.products.error * 100.0);
    let rate = measured.value(FlopsPerSecond(measured.products.rate), &format!("rate of large products, {fit}"));
    let widened = Sourced { source: format!("operands are widened to fp32; {}", rate.source), ..rate.clone() };
    device.peak.fp32 = Some(rate);
    (device.peak.bf16, device.peak.fp16) = (Some(widened.clone()), Some(widened));
    device.matmul.maximum = measured.value(1.0, "the peak is that of the fit");
    device.matmul.half_depth = measured.value(depth, &fit);
    device.matmul.edges =
        Some(MatmulEdges { rows: measured.value(rows, &fit), columns: measured.value(columns, &fit) });
    device.memory_bandwidth =
        measured.value(BytesPerSecond(measured.streaming()), "gradients, state and weights over norm and optimizer");
    device.memory_efficiency = measured.value(1.0, "the bandwidth is one that was reached");
    if let Some(bytes) = memory_of_host() {
        device.memory = measured.value(bytes, "memory of the host, shared by its ranks");
    }
    let attention = [Phase::Forward, Phase::Backward].map(|phase| measured.of(Work::Attention, phase));
    if attention[0] > 0.0 {
        let rate = measured.work.attention_flops * CAUSAL_SHARE / attention[0] / measured.products.rate;
        device.flash_attention_efficiency = measured.value(rate, "causal half of the scores over the forward pass");
        let backward = measured.value(attention[1] / attention[0], "backward over forward pass of the attention core");
        device.flash_attention_backward = Some(backward);
    }
    device.operators = OperatorClass::ALL.into_iter().filter_map(|class| operator_rate(measured, class)).collect();
    device
}

/// The rates of a class that the run has executed.
fn operator_rate(measured: &Measured, class: OperatorClass) -> Option<OperatorRate> {
    let bytes = measured.work.bytes[class as usize];
    let rate = |phase: Phase, what: &str| {
        let rate = bytes / measured.of(Work::Class(class), phase);
        (rate.is_finite() && rate > 0.0).then(|| measured.value(BytesPerSecond(rate), what))
    };
    Some(OperatorRate {
        class,
        forward: rate(Phase::Forward, "bytes of forward over the forward pass")?,
        backward: rate(Phase::Backward, "bytes of forward over the backward pass")?,
    })
}

/// `MemTotal` of the system, where it has one.
fn memory_of_host() -> Option<Bytes> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kibibytes << 10))
}

fn cluster_of(
    base: ClusterProfile,
    measured: &Measured,
    device: &str,
    name: String,
    ranks: u64,
    hosts: u64,
) -> ClusterProfile {
    let source = format!("measured by `execute-plan --profile` on {hosts} hosts: {}", measured.source);
    let node_gpus = ranks.div_ceil(hosts);
    let mut cluster = ClusterProfile { name, source, device: device.to_owned(), node_gpus, ..base };
    cluster.inter.nics = Nics::PerNode(measured.value(1.0, "ranks were not measured with other numbers of cards"));
    let Some(links) = measured.links else { return cluster };
    let bandwidth = |what: &str| measured.value(BytesPerSecond(links.bandwidth), what);
    cluster.intra.base_latency =
        measured.value(Seconds(links.base), "small all_reduce over all ranks, its messages apart");
    match hosts {
        1 => {
            let what = "all_reduce, all_gather and reduce_scatter of 256 KiB to 16 MiB over all ranks";
            cluster.intra.bandwidth_per_gpu_per_direction = bandwidth(what);
            cluster.intra.efficiency = measured.value(1.0, "the bandwidth is one that was reached");
            cluster.intra.hop_latency = measured.value(Seconds(links.hop), "small message from rank to rank");
        }
        _ => {
            let what = "all_reduce, all_gather and reduce_scatter of 256 KiB to 16 MiB over all hosts";
            cluster.inter.bandwidth_per_nic_per_direction = bandwidth(what);
            cluster.inter.efficiency = measured.value(1.0, "the bandwidth is one that was reached");
            cluster.inter.hop_latency = measured.value(Seconds(links.hop), "small message through all ranks");
        }
    }
    cluster
}

fn stack(base: StackProfile, measured: &Measured) -> StackProfile {
    let mut stack = base;
    stack.source = format!("{}; on processor cores every operator is a kernel of its own", stack.source);
    stack.kernels.fused.clear();
    stack.kernels.repeats_needed_only = true;
    // The cost model counts the accumulation of gradients apart, as a pass over memory.
    let accumulation = measured.work.accumulated_bytes / measured.streaming();
    let products = measured.of(Work::Product, Phase::Forward) + measured.of(Work::Product, Phase::Backward);
    let speed = measured.formed / (products - accumulation).max(products * 0.5);
    stack.kernels.matmul_speed = measured.value(speed, "time of the step's products by the fit over that in the step");
    stack.kernels.launch_floor = measured.value(Seconds(measured.floor), "mean time of an operator on 16 numbers");
    stack.overhead.micro_batch = measured.value(Seconds(measured.micro_batch), "time between blocks");
    stack.overhead.step = measured.value(Seconds(measured.step), "time of a step beside passes and optimizer");
    if let Some(links) = &measured.links {
        let what = "delay of products by an all_reduce of 4 MiB beside them, over its time alone";
        stack.overlap.occupancy = Some(measured.value(links.occupancy, what));
        let what = "delay of products by a small all_reduce after each few of them, over its time alone";
        let blocking = measured.value(Seconds(links.blocking), what);
        let started = measured.value(Seconds(links.started), &format!("{what}; started before the last product"));
        let what = format!("delay by each further all_reduce that is started with one; {what}");
        let further = measured.value(Seconds(links.further), &what);
        stack.overlap.waiting = Some(Waiting { blocking, started, further });
        let copied = |(size, rate): (usize, f64)| CopyRate {
            size: Bytes(size as u64),
            rate: measured.value(BytesPerSecond(rate), "copies of what has just been written, on all ranks at once"),
        };
        stack.overlap.copies = links.copies().map(copied).collect();
    }
    stack
}
