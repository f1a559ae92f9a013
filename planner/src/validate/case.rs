//! A row's run as a model on a machine with the layouts that the row leaves possible.

use cost_models::machine::Machine;
use hardware_profiles::device::MatmulFormat;
use hardware_profiles::run_names::run_names;
use hardware_profiles::sourced::Sourced;
use hardware_profiles::{ClusterProfile, DeviceProfile, StackProfile, find_cluster, find_device, find_stack};
use ir::graph::{ModelGraph, build_graph};
use ir::model::{
    Attention, Bias, DEFAULT_NORM_EPSILON, DEFAULT_ROTARY_BASE, DType, FeedForward, ModelSpec, NormKind, Position,
    SIZE_LIMIT, Vocabulary, Workload, check_model,
};
use ir::sharding::{VOCABULARY_MULTIPLE, split_of};
use ir::strategy::{Recompute, ScheduleKind, Strategy, ZeroStage};
use ir::units::{BytesPerSecond, SequenceLength};

use super::families::{Family, family_of};
use super::table::Run;
use crate::request::{FixedChoices, Request};

/// Where names of profiles come from, for errors.
const ORIGIN: &str = "run_names.ron";
/// Bytes a second of a Gbit/s.
const GIGABIT: f64 = 0.125e9;
/// Bytes of a GB in a device's nominal memory.
const GIGABYTE: f64 = 1e9;
/// Widest expert degree that is tried where a row has none.
const MOST_EXPERTS: u64 = 1024;
/// Micro-batches that are tried where a row has none.
const MICRO_BATCHES: [u64; 4] = [1, 2, 4, 8];

/// A run that can be predicted.
#[derive(Clone, Debug)]
pub struct Case {
    /// Model, machine and workload.
    pub request: Request,
    /// The model's graph.
    pub graph: ModelGraph,
    /// Layouts that the row's blank cells leave possible.
    pub layouts: Vec<Strategy>,
    /// Whether cells that decide time were blank.
    pub open: bool,
    /// Name of the software as the row has it.
    pub framework: String,
}

/// Prepares a run.
///
/// # Errors
/// Why the run cannot be represented.
pub fn prepare(run: &Run) -> Result<Case, String> {
    prepare_on(run, machine_of(run)?)
}

/// Prepares a run on a machine, whatever its row says of accelerator and software.
///
/// # Errors
/// Why the run cannot be represented.
pub fn prepare_on(run: &Run, machine: Machine) -> Result<Case, String> {
    let model = model_of(run, machine.stack.offers.tensor_parallel)?;
    let layouts = layouts_of(run, &machine)?;
    check_model(&model, "row").map_err(|error| error.to_string())?;
    for strategy in &layouts {
        let split = split_of(&model, strategy);
        split.map_err(|error| format!("tensor degree {} does not split it: {error:?}", strategy.tensor_parallel))?;
    }
    let workload = Workload {
        sequence_length: needed(run.seq_len, "seq_len")?,
        global_batch: needed(run.global_batch, "global_batch")?,
    };
    let graph = build_graph(&model);
    let request = Request {
        model,
        origin: "row".to_owned(),
        workload,
        gpus: needed(run.gpus, "gpus")?,
        machine,
        fixed: FixedChoices::default(),
        top: 1,
        executable_only: false,
    };
    let open = layouts.len() > 1;
    Ok(Case { request, graph, layouts, open, framework: run.framework.clone() })
}

fn needed(cell: Option<u64>, column: &str) -> Result<u64, String> {
    match cell {
        Some(number) if number <= SIZE_LIMIT => Ok(number),
        Some(number) => Err(format!("{column} {number} is out of range")),
        None => Err(format!("{column} is blank")),
    }
}

fn machine_of(run: &Run) -> Result<Machine, String> {
    let names = run_names();
    let clusters = names.clusters(&run.gpu, &run.framework).map_err(|problem| problem.to_string())?;
    let stack = names.stack(&run.framework, run.year).map_err(|problem| problem.to_string())?;
    let find = |error: hardware_profiles::Error| error.to_string();
    let stack = find_stack(stack, ORIGIN).map_err(find)?;
    let mut known: Vec<(ClusterProfile, DeviceProfile)> = Vec::with_capacity(clusters.len());
    for name in clusters {
        let cluster = find_cluster(name, ORIGIN).map_err(find)?;
        let device = find_device(&cluster.device, ORIGIN).map_err(find)?;
        known.push((cluster, device));
    }
    let nearest = known.into_iter().min_by(|a, b| distance(run, a).total_cmp(&distance(run, b)));
    let (mut cluster, device) = nearest.ok_or_else(|| "no cluster has this accelerator".to_owned())?;
    if let Some(gbps) = run.inter_gbps_per_gpu {
        state_network(&mut cluster, gbps);
    }
    assemble(run, cluster, device, stack)
}

/// Device, cluster and stack as a run used them: its node size, its number format, its attention kernel.
///
/// # Errors
/// The device has no products of the run's format.
pub fn assemble(
    run: &Run,
    cluster: ClusterProfile,
    device: DeviceProfile,
    mut stack: StackProfile,
) -> Result<Machine, String> {
    if let Some(flash) = run.flash_attention {
        stack.kernels.flash_attention = flash;
    }
    // Gated models are trained without dropout; of others the family or else the stack's default says.
    stack.kernels.attention_dropout &= family_of(&run.family).dropout.unwrap_or(!is_gated(run));
    let node_gpus = run.gpus_per_node.unwrap_or(cluster.node_gpus);
    Ok(Machine { matmul_format: format_of(run, &device)?, device, cluster, stack, node_gpus })
}

/// How far memory and network that a row states are from a cluster's: the sum of the logarithms of their ratios.
fn distance(run: &Run, (cluster, device): &(ClusterProfile, DeviceProfile)) -> f64 {
    let memory = run.gpu_mem_gb.map_or(0.0, |gb| (gb * GIGABYTE / device.memory.value.0 as f64).ln().abs());
    let network = run.inter_gbps_per_gpu.map_or(0.0, |gbps| {
        let profile = cluster.inter.bandwidth_per_nic_per_direction.value.0 * cluster.nics_per_gpu();
        (gbps * GIGABIT / profile).ln().abs()
    });
    memory + network
}

/// Sets a cluster's network to the bandwidth that the row states.
fn state_network(cluster: &mut ClusterProfile, gbps: f64) {
    let per_card = gbps * GIGABIT / cluster.nics_per_gpu();
    let card = &mut cluster.inter.bandwidth_per_nic_per_direction;
    *card = Sourced { value: BytesPerSecond(per_card), source: "stated by the row".to_owned(), ..card.clone() };
}

fn format_of(run: &Run, device: &DeviceProfile) -> Result<MatmulFormat, String> {
    let format = match run.precision.as_deref() {
        Some("fp8") => MatmulFormat::Fp8,
        Some("nvfp4") => MatmulFormat::Fp4,
        _ => MatmulFormat::Model,
    };
    let supported = device.product_peak(format, dtype_of(run)).is_some();
    let reason = || format!("{} has no {} products", device.name, run.precision.as_deref().unwrap_or("such"));
    supported.then_some(format).ok_or_else(reason)
}

fn is_gated(run: &Run) -> bool {
    run.gated_mlp.unwrap_or(run.num_experts.is_some())
}

fn dtype_of(run: &Run) -> DType {
    match run.precision.as_deref() {
        Some("fp32") => DType::FP32,
        Some("fp16") => DType::FP16,
        _ => DType::BF16,
    }
}

fn model_of(run: &Run, tensor_parallel_stack: bool) -> Result<ModelSpec, String> {
    let family = family_of(&run.family);
    let gated = is_gated(run);
    let hidden = needed(run.hidden, "hidden")?;
    let sequence = needed(run.seq_len, "seq_len")?;
    let num_layers = needed(run.layers, "layers")?;
    let rows = run.vocab.unwrap_or(family.vocab);
    let padded = tensor_parallel_stack.then(|| rows.next_multiple_of(VOCABULARY_MULTIPLE * run.tp.unwrap_or(1)));
    let plain_bias = if gated { Bias::None } else { Bias::All };
    let plain_position = if gated { Position::Rotary } else { Position::Learned };
    Ok(ModelSpec {
        name: "row".to_owned(),
        source: "published run".to_owned(),
        num_layers,
        hidden_size: hidden,
        attention: attention_of(run, family, hidden)?,
        feed_forward: feed_forward_of(run, family, gated, [hidden, num_layers])?,
        norm: if gated { NormKind::RmsNorm } else { NormKind::LayerNorm },
        norm_epsilon: DEFAULT_NORM_EPSILON,
        bias: family.bias.unwrap_or(plain_bias),
        position: family.position.unwrap_or(plain_position),
        rotary_base: DEFAULT_ROTARY_BASE,
        rotary_scaling: None,
        vocabulary: Vocabulary { size: rows, padded },
        embedding_norm: false,
        tied_embedding: !family.untied.unwrap_or(gated),
        max_sequence_length: SequenceLength::Tokens(sequence),
        sequence_length: None,
        global_batch: None,
        dtype: dtype_of(run),
        published_parameters: None,
        deviations: Vec::new(),
    })
}

fn attention_of(run: &Run, family: Family, hidden: u64) -> Result<Attention, String> {
    let heads = needed(run.heads, "heads")?;
    if let Some(latent) = family.latent {
        return Ok(Attention::MultiLatent {
            num_attention_heads: heads,
            query_rank: latent.query_rank,
            key_value_rank: latent.key_value_rank,
            nope_head_dim: latent.nope,
            rope_head_dim: latent.rope,
            value_head_dim: latent.value,
        });
    }
    let even = hidden.is_multiple_of(heads);
    let head_dim = family.head_dim.or((!even).then_some(hidden / heads));
    Ok(Attention::MultiHead { num_attention_heads: heads, num_key_value_heads: run.kv_heads, head_dim })
}

fn feed_forward_of(run: &Run, family: Family, gated: bool, [hidden, layers]: [u64; 2]) -> Result<FeedForward, String> {
    let intermediate_size = run.ffn_hidden.unwrap_or(4 * hidden);
    let Some(num_experts) = run.num_experts else {
        return Ok(match gated {
            true => FeedForward::SwiGlu { intermediate_size },
            false => FeedForward::Gelu { intermediate_size },
        });
    };
    let first_dense_layers = family.dense_of(layers);
    Ok(FeedForward::MixtureOfExperts {
        num_experts,
        experts_per_token: needed(run.top_k, "top_k")?,
        intermediate_size,
        num_shared_experts: family.shared_experts,
        first_dense_layers,
        dense_intermediate_size: (first_dense_layers > 0).then_some(family.dense_width),
    })
}

/// Whether experts are whole on tensor ranks, which no column says: if they are spread over more ranks than replicas and
/// contexts.
fn leaves_experts_whole(run: &Run, machine: &Machine, ranks: u64) -> bool {
    let offered = run.num_experts.is_some() && machine.stack.offers.whole_experts.is_some();
    offered && !ranks.is_multiple_of(run.ep.unwrap_or(1))
}

/// The layouts that a row leaves possible: its own, with each setting of what it does not state.
///
/// Unstated recomputation is any that the stack offers, an unstated micro-batch any small one that divides the batch.
fn layouts_of(run: &Run, machine: &Machine) -> Result<Vec<Strategy>, String> {
    let gpus = needed(run.gpus, "gpus")?;
    let context = run.cp.unwrap_or(1);
    // Software without an axis leaves its cell blank, and one degree follows from the others.
    let offers = &machine.stack.offers;
    let tensor = needed(run.tp.or((!offers.tensor_parallel).then_some(1)), "tp")?;
    let pipeline = needed(run.pp.or((!offers.pipeline_parallel).then_some(1)), "pp")?;
    let others = tensor.saturating_mul(pipeline).saturating_mul(context);
    let data = needed(run.dp.or(Some(gpus / others).filter(|data| *data > 0)), "dp")?;
    let product = [tensor, pipeline, data, context].into_iter().try_fold(1, u64::checked_mul);
    if product != Some(gpus) {
        return Err(format!("tp {tensor} x pp {pipeline} x dp {data} x cp {context} is not {gpus} GPUs"));
    }
    let batch = needed(run.global_batch, "global_batch")?;
    if !batch.is_multiple_of(data) {
        return Err(format!("a batch of {batch} is not whole sequences on {data} replicas"));
    }
    let micro_batches = match run.micro_batch {
        Some(size) => vec![size],
        None => MICRO_BATCHES.into_iter().filter(|size| batch.is_multiple_of(size * data)).collect(),
    };
    if let Some(size) = run.micro_batch.filter(|size| !batch.is_multiple_of(size.saturating_mul(data))) {
        return Err(format!("a batch of {batch} is not whole micro-batches of {size} on {data} replicas"));
    }
    let recompute = match run.recompute {
        Some(stated) => vec![stated],
        None => Recompute::ALL.into_iter().filter(|some| machine.stack.offers.recompute.contains(some)).collect(),
    };
    let layers = needed(run.layers, "layers")?;
    let parts = parts_of(run, machine, [layers, pipeline])?;
    let sequence_parallel = run.sequence_parallel.unwrap_or(false) && tensor > 1;
    let plain = Strategy {
        context_parallel: context,
        zero_stage: run.zero_stage.unwrap_or(ZeroStage::None),
        sequence_parallel,
        whole_experts: sequence_parallel && leaves_experts_whole(run, machine, data * context),
        ..Strategy::plain([tensor, pipeline, data], batch)
    };
    let experts = experts_of(run, machine, plain.expert_ranks())?;
    let layouts = with_each(vec![plain], &micro_batches, |layout, size| layout.micro_batch = size);
    let layouts = with_each(layouts, &parts, |layout, parts| {
        layout.virtual_stages = parts;
        layout.schedule = if parts > 1 { ScheduleKind::Interleaved } else { ScheduleKind::OneForwardOneBackward };
    });
    let whole = |layout: &Strategy| layout.schedule.allows_micro_batches(batch / (layout.micro_batch * data), pipeline);
    let layouts: Vec<Strategy> = layouts.into_iter().filter(whole).collect();
    if layouts.is_empty() {
        return Err(format!("its micro-batches are not whole groups of {pipeline}, which interleaved stages need"));
    }
    let layouts = with_each(layouts, &experts, |layout, experts| layout.expert_parallel = experts);
    Ok(with_each(layouts, &recompute, |layout, recompute| layout.recompute = recompute))
}

/// Each layout with each value.
fn with_each<T: Copy>(layouts: Vec<Strategy>, values: &[T], set: impl Fn(&mut Strategy, T)) -> Vec<Strategy> {
    let with = |layout: &Strategy, value: T| {
        let mut layout = layout.clone();
        set(&mut layout, value);
        layout
    };
    layouts.iter().flat_map(|layout| values.iter().map(|value| with(layout, *value))).collect()
}

/// Expert degrees that a row leaves possible: where it states none, one, and the most that its experts and ranks divide
/// by if the stack spreads experts.
fn experts_of(run: &Run, machine: &Machine, ranks: u64) -> Result<Vec<u64>, String> {
    let Some(stated) = run.ep else {
        let most = run.num_experts.filter(|_| machine.stack.offers.expert_parallel.is_some()).unwrap_or(1).min(ranks);
        let divides =
            |degree: &u64| ranks.is_multiple_of(*degree) && run.num_experts.is_none_or(|n| n.is_multiple_of(*degree));
        let widest = (2..=most.min(MOST_EXPERTS)).rev().find(divides);
        return Ok([Some(1), widest].into_iter().flatten().collect());
    };
    if !ranks.is_multiple_of(stated) {
        return Err(format!("ep {stated} does not divide the {ranks} ranks that experts are spread over"));
    }
    if let Some(experts) = run.num_experts.filter(|experts| !experts.is_multiple_of(stated)) {
        return Err(format!("ep {stated} does not divide {experts} experts"));
    }
    Ok(vec![stated])
}

/// Parts of the model on a stage that a row leaves possible: where it states none, one, and as many as there are layers
/// on a stage if the stack's runs may interleave them.
fn parts_of(run: &Run, machine: &Machine, [layers, pipeline]: [u64; 2]) -> Result<Vec<u64>, String> {
    let Some(parts) = run.vpp else {
        let most = layers / pipeline;
        let interleaves = machine.stack.offers.interleaves_unstated;
        let open = interleaves && pipeline > 1 && most > 1 && layers.is_multiple_of(pipeline);
        return Ok(if open { vec![1, most] } else { vec![1] });
    };
    // Of many parts the first and the last may hold no layer beside the embedding and the head.
    if parts > 1 && pipeline.checked_mul(parts).is_none_or(|parts| parts > layers + 2) {
        return Err(format!("{layers} layers do not fill {parts} parts on each of {pipeline} stages"));
    }
    Ok(vec![parts])
}
