//! The model that Megatron's flags describe.

use ir::model::{
    Attention, Bias, DEFAULT_NORM_EPSILON, DEFAULT_ROTARY_BASE, DType, Deviation, FeedForward, ModelSpec, NormKind,
    Position, Vocabulary,
};
use ir::rotary::RotaryScaling;
use ir::sharding::VOCABULARY_MULTIPLE;
use ir::units::SequenceLength;

use super::{Fork, noted};
use crate::foreign::flags::Flags;
use crate::foreign::{Launcher, Settings};

/// Tokens of GPT-2's vocabulary, Megatron's own example, where flags name no size.
const GPT2_VOCABULARY: u64 = 50_257;
/// Tokens of Llama 2's vocabulary.
const LLAMA2_VOCABULARY: u64 = 32_000;
/// Experts that see a token where no flag says (Megatron-LM, `moe_router_topk`).
const DEFAULT_TOP_K: u64 = 2;
/// The same in Megatron-DeepSpeed.
const DEEPSPEED_TOP_K: u64 = 1;
/// What `--use-rope-scaling` means beside its factor: the factors of low and high frequencies, and tokens of a sequence
/// in pre-training (Megatron-Core, `RotaryEmbedding`).
pub(crate) const LLAMA3_SCALING: (f64, f64, u64) = (1.0, 4.0, 8192);
/// Longest pattern of layers that is built.
const LONGEST_PATTERN: usize = 1 << 14;
/// Unit to which Megatron rounds the default width of a gated feed-forward part.
const GATED_UNIT: u64 = 64;

/// The model; `None` where its shape is incomplete, which is noted.
pub(super) fn read_model(
    flags: &mut Flags,
    fork: Fork,
    launcher: &Launcher,
    settings: &mut Settings,
    defaults: &mut Vec<&'static str>,
) -> Option<ModelSpec> {
    let given = launcher.model.as_ref();
    let shape = [
        ("--num-layers", flags.first_count(&["--num-layers", "--encoder-num-layers", "--decoder-num-layers"])),
        ("--hidden-size", flags.count("--hidden-size")),
        ("--num-attention-heads", flags.count("--num-attention-heads")),
    ];
    let feed_forward = read_feed_forward(flags, fork, shape[1].1.unwrap_or(1), shape[0].1.unwrap_or(1), settings);
    let attention = read_attention(flags, fork, shape[2].1.unwrap_or(1));
    let sequence = flags.first_count(&["--seq-length", "--encoder-seq-length"]);
    let maximum = flags.count("--max-position-embeddings");
    let Positions { position, rotary_base, rotary_scaling, deviations } = read_position(flags, settings);
    let vocabulary = read_vocabulary(flags, given.is_none(), defaults);
    let norm = read_norm(flags);
    let model = ModelSpec {
        name: "megatron-flags".to_owned(),
        source: "flags of a launch".to_owned(),
        num_layers: shape[0].1.unwrap_or(1),
        hidden_size: shape[1].1.unwrap_or(1),
        attention,
        feed_forward,
        norm,
        norm_epsilon: flags
            .number("--norm-epsilon")
            .or(flags.number("--layernorm-epsilon"))
            .unwrap_or(DEFAULT_NORM_EPSILON),
        bias: read_bias(flags),
        position,
        rotary_base,
        rotary_scaling,
        vocabulary,
        embedding_norm: flags.has("--embed-layernorm"),
        tied_embedding: !flags.has("--untie-embeddings-and-output-weights"),
        max_sequence_length: SequenceLength::Tokens(maximum.or(sequence).unwrap_or(1)),
        sequence_length: sequence.map(SequenceLength::Tokens),
        global_batch: None,
        dtype: read_dtype(flags),
        published_parameters: None,
        deviations,
    };
    check_positions(flags, sequence, maximum);
    match given {
        Some(given) => agreed(flags, given, &shape),
        None => {
            let complete: Vec<Option<u64>> = shape.into_iter().map(|(name, value)| noted(flags, name, value)).collect();
            let sequence = sequence.or(launcher.sequence_length);
            let sequence = if sequence.is_none() { noted(flags, "--seq-length", None) } else { sequence };
            (complete.iter().all(Option::is_some) && sequence.is_some()).then_some(model)
        }
    }
}

/// A model file's model, which the flags must not contradict.
fn agreed(flags: &mut Flags, given: &ModelSpec, shape: &[(&'static str, Option<u64>)]) -> Option<ModelSpec> {
    let own = [given.num_layers, given.hidden_size, given.attention.num_attention_heads()];
    for ((name, value), own) in shape.iter().zip(own) {
        if let Some(value) = value.filter(|value| *value != own) {
            let what = format!("{name} is {value}, but the model file says {own}");
            flags.refuse(what, name, "leave out --model, or give the model that the flags describe");
        }
    }
    Some(ModelSpec { dtype: read_dtype(flags), ..given.clone() })
}

fn check_positions(flags: &mut Flags, sequence: Option<u64>, maximum: Option<u64>) {
    if let (Some(sequence), Some(maximum)) = (sequence, maximum)
        && sequence > maximum
    {
        let what = format!("--seq-length {sequence} exceeds --max-position-embeddings {maximum}");
        flags.refuse(what, "--max-position-embeddings", format!("give at least {sequence}"));
    }
}

fn read_dtype(flags: &mut Flags) -> DType {
    match (flags.has("--bf16"), flags.has("--fp16")) {
        (true, true) => {
            flags.refuse("--bf16 and --fp16 are both given", "--bf16", "keep one of the two");
            DType::BF16
        }
        (true, false) => DType::BF16,
        (false, true) => DType::FP16,
        (false, false) => DType::FP32,
    }
}

fn read_norm(flags: &mut Flags) -> NormKind {
    // It stores the weight less one, and computes the same.
    flags.has("--apply-layernorm-1p");
    match flags.word("--normalization", &["LayerNorm", "RMSNorm", "layernorm", "rmsnorm"]) {
        Some("RMSNorm" | "rmsnorm") => NormKind::RmsNorm,
        _ => NormKind::LayerNorm,
    }
}

fn read_bias(flags: &mut Flags) -> Bias {
    match (flags.has("--disable-bias-linear"), flags.has("--add-qkv-bias")) {
        (false, _) => Bias::All,
        (true, true) => Bias::QueryKeyValue,
        (true, false) => Bias::None,
    }
}

fn read_attention(flags: &mut Flags, fork: Fork, heads: u64) -> Attention {
    let latent = flags.has("--multi-latent-attention");
    let ranks = [flags.count_or_none("--q-lora-rank"), flags.count("--kv-lora-rank")];
    let widths = [flags.count("--qk-head-dim"), flags.count("--qk-pos-emb-head-dim"), flags.count("--v-head-dim")];
    let grouped = flags.has("--group-query-attention");
    let groups = flags.count("--num-query-groups");
    let key_value = flags.count("--num-key-value-heads");
    let head_dim = flags.count("--kv-channels");
    if latent {
        if ranks[0].is_none() {
            let help = "give the rank; queries that are not compressed cannot be represented";
            flags.refuse("--multi-latent-attention without --q-lora-rank", "--q-lora-rank", help);
        }
        // Defaults of Megatron-LM, _add_mla_args.
        return Attention::MultiLatent {
            num_attention_heads: heads,
            query_rank: ranks[0].unwrap_or(1),
            key_value_rank: ranks[1].unwrap_or(32),
            nope_head_dim: widths[0].unwrap_or(128),
            rope_head_dim: widths[1].unwrap_or(64),
            value_head_dim: widths[2].unwrap_or(128),
        };
    }
    if groups.is_some() && !grouped && fork != Fork::DeepSpeed {
        let warning = "--num-query-groups counts only with --group-query-attention: predicted with a key-value head for \
                       each query head";
        flags.warnings.push(warning.to_owned());
    }
    let num_key_value_heads = if grouped { Some(groups.unwrap_or(1)) } else { key_value };
    Attention::MultiHead { num_attention_heads: heads, num_key_value_heads, head_dim }
}

fn read_feed_forward(flags: &mut Flags, fork: Fork, hidden: u64, layers: u64, settings: &mut Settings) -> FeedForward {
    let glu = flags.word("--glu-activation", &["geglu", "liglu", "reglu", "swiglu"]).is_some();
    let gated = [flags.has("--swiglu"), flags.has("--quick-geglu"), glu];
    for name in ["--squared-relu", "--openai-gelu"] {
        if flags.has(name) {
            settings.assumed.push((name.to_owned(), "the activation is predicted as GeLU by tanh".to_owned()));
        }
    }
    let swiglu = gated[0];
    let gated = gated.into_iter().any(|gated| gated);
    let default = match swiglu && fork != Fork::DeepSpeed {
        true => hidden * 8 / 3 / GATED_UNIT * GATED_UNIT,
        false => 4 * hidden,
    };
    let width = flags.count("--ffn-hidden-size").unwrap_or(default.max(1));
    let expert_width = flags.count("--moe-ffn-hidden-size");
    let top_k = flags.first_count(&["--moe-router-topk", "--topk"]);
    let shared = flags.count("--moe-shared-expert-intermediate-size");
    let frequency = flags.text("--moe-layer-freq");
    let num_experts = flags.texts("--num-experts").first().cloned().unwrap_or_default();
    if num_experts.is_empty() || num_experts == "0" {
        return match gated {
            true => FeedForward::SwiGlu { intermediate_size: width },
            false => FeedForward::Gelu { intermediate_size: width },
        };
    }
    let num_experts = num_experts.parse().unwrap_or_else(|_| {
        flags.refuse(format!("--num-experts is `{num_experts}`"), "--num-experts", "give a whole number");
        1
    });
    if !gated {
        let help = "give --swiglu; experts of two matrices cannot be represented";
        flags.refuse("experts without a gate", "--num-experts", help);
    }
    let intermediate_size = expert_width.unwrap_or(width);
    let first_dense_layers = frequency.map_or(0, |text| dense_layers(flags, &text, layers));
    let default_top_k = if fork == Fork::DeepSpeed { DEEPSPEED_TOP_K } else { DEFAULT_TOP_K };
    FeedForward::MixtureOfExperts {
        num_experts,
        experts_per_token: top_k.unwrap_or(default_top_k),
        intermediate_size,
        num_shared_experts: shared.map_or(0, |shared| shared_experts(shared, intermediate_size, settings)),
        first_dense_layers,
        dense_intermediate_size: (first_dense_layers > 0).then_some(width),
    }
}

/// A shared expert's width as a number of routed experts' widths.
fn shared_experts(width: u64, each: u64, settings: &mut Settings) -> u64 {
    let count = ((width as f64 / each as f64).round() as u64).max(1);
    if count * each != width {
        let reason = format!("a shared width of {width} is predicted as {}", count * each);
        settings.assumed.push(("--moe-shared-expert-intermediate-size".to_owned(), reason));
    }
    count
}

/// Dense layers at the start by `--moe-layer-freq`: 1, or a pattern such as `([0]*3+[1]*58)`.
fn dense_layers(flags: &mut Flags, text: &str, layers: u64) -> u64 {
    let pattern: Vec<u64> = match text.trim().parse::<usize>() {
        Ok(1) => return 0,
        Ok(frequency) if frequency > 1 => (0..(layers as usize).min(LONGEST_PATTERN))
            .map(|layer| u64::from(layer.is_multiple_of(frequency)))
            .collect(),
        Ok(_) | Err(_) => repeated(text).unwrap_or_default(),
    };
    let dense = pattern.iter().take_while(|expert| **expert == 0).count();
    let rest = &pattern[dense..];
    if pattern.len() as u64 != layers || rest.iter().any(|expert| *expert != 1) {
        let what =
            format!("--moe-layer-freq {text} is no pattern of dense layers first and experts after for {layers}");
        flags.refuse(what, "--moe-layer-freq", format!("such as `([0]*1+[1]*{})`, or 1", layers.saturating_sub(1)));
        return 0;
    }
    dense as u64
}

/// The numbers of a Python list expression of `[…]`, `*`, `+` and parentheses.
fn repeated(text: &str) -> Option<Vec<u64>> {
    let text: String = text.chars().filter(|letter| !letter.is_whitespace()).collect();
    let (list, rest) = sum(&text, LONGEST_PATTERN)?;
    return rest.is_empty().then_some(list);

    fn sum(text: &str, longest: usize) -> Option<(Vec<u64>, &str)> {
        let (mut list, mut rest) = product(text, longest)?;
        while let Some(after) = rest.strip_prefix('+') {
            let (more, after) = product(after, longest)?;
            list.extend(more);
            rest = after;
        }
        Some((list, rest))
    }

    fn product(text: &str, longest: usize) -> Option<(Vec<u64>, &str)> {
        let (mut list, mut rest) = match text.strip_prefix('(') {
            Some(inner) => {
                let (list, after) = sum(inner, longest)?;
                (list, after.strip_prefix(')')?)
            }
            None => {
                let (items, after) = text.strip_prefix('[')?.split_once(']')?;
                (items.split(',').map(|item| item.parse().ok()).collect::<Option<Vec<u64>>>()?, after)
            }
        };
        while let Some(after) = rest.strip_prefix('*') {
            let digits = after.chars().take_while(char::is_ascii_digit).count();
            let times: usize = after[..digits].parse().ok()?;
            if list.len().checked_mul(times)? > longest {
                return None;
            }
            list = list.repeat(times);
            rest = &after[digits..];
        }
        Some((list, rest))
    }
}

/// How positions enter, and what of it programs do not compute.
struct Positions {
    position: Position,
    rotary_base: f64,
    rotary_scaling: Option<RotaryScaling>,
    deviations: Vec<Deviation>,
}

fn read_position(flags: &mut Flags, settings: &mut Settings) -> Positions {
    const KINDS: [&str; 10] =
        ["learned_absolute", "absolute", "rope", "rotary", "alibi", "yarn", "mrope", "relative", "none", "learned"];
    let kind = flags.word("--position-embedding-type", &KINDS).unwrap_or("learned_absolute");
    let rotary = flags.has("--use-rotary-position-embeddings");
    let alibi = flags.has("--use-alibi-position-embeddings");
    // It had a meaning together with rotary positions only, and has none any more.
    flags.has("--no-position-embedding");
    let base = flags.number("--rotary-base").unwrap_or(DEFAULT_ROTARY_BASE);
    let share = flags.number("--rotary-percent").unwrap_or(1.0);
    let scaling = read_scaling(flags);
    // The factor is of YaRN, whatever the type.
    let yarn = [
        kind == "yarn",
        flags.word("--rope-type", &["rope", "yarn"]) == Some("yarn"),
        flags.number("--rotary-scaling-factor").is_some_and(|factor| factor != 1.0),
    ];
    let window = flags.mentions("--window-size");
    let position = match kind {
        _ if rotary => Position::Rotary,
        _ if alibi => Position::Alibi,
        "rope" | "rotary" | "yarn" => Position::Rotary,
        "alibi" => Position::Alibi,
        "none" | "mrope" | "relative" => {
            let reason = format!("{kind} positions are predicted as rotary ones");
            settings.assumed.push(("--position-embedding-type".to_owned(), reason));
            Position::Rotary
        }
        _ => Position::Learned,
    };
    let rope = position == Position::Rotary;
    let deviations = [
        (rope && yarn.contains(&true), Deviation::RotaryScaling),
        (rope && share < 1.0, Deviation::PartialRotary),
        (window, Deviation::SlidingWindow),
    ];
    if window {
        let reason = "every query is predicted to see the whole sequence".to_owned();
        settings.assumed.push(("--window-size".to_owned(), reason));
    }
    let deviations = deviations.into_iter().filter(|(holds, _)| *holds).map(|(_, deviation)| deviation).collect();
    Positions {
        position,
        rotary_base: if rope { base } else { DEFAULT_ROTARY_BASE },
        rotary_scaling: scaling.filter(|_| rope),
        deviations,
    }
}

/// Scaling as Llama 3.1 has it, or by one factor.
fn read_scaling(flags: &mut Flags) -> Option<RotaryScaling> {
    let factor = flags.number("--rope-scaling-factor").unwrap_or(8.0);
    let interpolated = flags.number("--rotary-seq-len-interpolation-factor").filter(|factor| *factor != 1.0);
    let (low_frequency_factor, high_frequency_factor, original_length) = LLAMA3_SCALING;
    let llama3 = RotaryScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_length };
    let linear = interpolated.map(|factor| RotaryScaling::Linear { factor });
    if flags.has("--use-rope-scaling") { Some(llama3) } else { linear }
}

/// The vocabulary with the rows that Megatron adds for one tensor rank; those for more are added later.
fn read_vocabulary(flags: &mut Flags, needed: bool, defaults: &mut Vec<&'static str>) -> Vocabulary {
    let unit = flags.count("--make-vocab-size-divisible-by").unwrap_or(VOCABULARY_MULTIPLE);
    let fixed = flags.first_count(&["--padded-vocab-size", "--pad-vocab-size-to"]);
    let unpadded = [flags.has("--no-pad-vocab-size"), flags.has("--disable-pad-vocab-size")];
    let tokenizer = flags.text("--tokenizer-type");
    let stated = flags.count("--vocab-size").or(fixed);
    let size = stated.unwrap_or_else(|| match tokenizer.as_deref() {
        Some("GPT2BPETokenizer") => GPT2_VOCABULARY,
        Some("Llama2Tokenizer") => LLAMA2_VOCABULARY,
        _ => {
            if needed {
                defaults.push("vocabulary of GPT-2");
            }
            GPT2_VOCABULARY
        }
    });
    let tensor = flags.first_count(&["--tensor-model-parallel-size", "--model-parallel-size"]).unwrap_or(1);
    let padded = match (fixed, unpadded.into_iter().any(|off| off)) {
        (Some(rows), _) => rows,
        (None, true) => size,
        (None, false) => size.next_multiple_of(unit.saturating_mul(tensor)),
    };
    Vocabulary { size, padded: Some(padded) }
}
