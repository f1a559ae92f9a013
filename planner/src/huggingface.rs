//! Reads a Hugging Face `config.json` as it is published and gives the model it describes.
//!
//! A model type is accepted only where its layers are exactly those of the graph that `ir` builds. A field
//! that changes them in a way this project cannot say is an error; one that changes numbers but no shape, such as
//! `rope_scaling`, becomes a deviation of the model, which is then planned but not executed. All other unknown
//! fields are ignored, among them `quantization_config` and `num_nextn_predict_layers`.
//! A missing field means what it means to the library transformers; where that is another number for each
//! model type, the field is required instead. The training step is not in such a file, so it stays open.

mod config;
#[cfg(test)]
mod tests;

use config::{Config, is_one_of, shown};
use ir::error::{Error, Problem};
use ir::model::{
    Attention, Bias, DEFAULT_NORM_EPSILON, DEFAULT_ROTARY_BASE, Deviation, FeedForward, ModelSpec, NormKind, Position,
    check_model,
};
use ir::units::SequenceLength;
use serde_json::{Map, Value};

/// BLOOM's training length (arXiv 2211.05100, table 3), for files without `seq_length`.
const BLOOM_SEQUENCE_LENGTH: u64 = 2048;
/// Width between GPT-2's and BLOOM's matrices, in hidden sizes, where no other is given (transformers, `n_inner`).
const GELU_EXPANSION: u64 = 4;

/// Names that transformers gives to GeLU, first by the error function, then by tanh.
const GELU: [&str; 7] =
    ["gelu", "gelu_python", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python_tanh", "gelu_accurate"];
/// Those of [`GELU`] that mean the error function.
const ERROR_FUNCTION_GELU: [&str; 2] = ["gelu", "gelu_python"];
/// Names that transformers gives to SiLU.
const SILU: [&str; 2] = ["silu", "swish"];
/// Endings of class names whose head is not a projection to the vocabulary.
const OTHER_HEADS: [&str; 4] =
    ["ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "DoubleHeadsModel"];

/// Model types that can be read, as `model_type` names them.
const MODEL_TYPES: [(&str, Family); 8] = [
    ("gpt2", Family::Gpt2),
    ("bloom", Family::Bloom),
    ("llama", Family::Llama),
    ("mistral", Family::Mistral),
    ("qwen2", Family::Qwen2),
    ("mixtral", Family::Mixtral),
    ("deepseek_v2", Family::DeepSeek),
    ("deepseek_v3", Family::DeepSeek),
];

/// Model types that are read alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Gpt2,
    Bloom,
    Llama,
    Mistral,
    Qwen2,
    Mixtral,
    DeepSeek,
}

/// Reads a Hugging Face `config.json` and checks the model it describes; `origin` names the file in errors.
///
/// # Errors
/// `Error::Syntax` where the text is no JSON object, `Error::Invalid` with every field that is missing, wrong
/// or not representable.
pub fn import_config(text: &str, origin: &str) -> Result<ModelSpec, Error> {
    let fields = read_object(text, origin)?;
    let (model_type, family) = find_family(&fields, origin)?;
    let mut config = Config { fields: &fields, origin, model_type, names: Vec::new(), problems: Vec::new() };
    refuse_other_heads(&mut config);
    let model = match family {
        Family::Gpt2 => gpt2(&mut config),
        Family::Bloom => bloom(&mut config),
        Family::Llama => llama(&mut config),
        Family::Mistral => mistral(&mut config),
        Family::Qwen2 => qwen2(&mut config),
        Family::Mixtral => mixtral(&mut config),
        Family::DeepSeek => deepseek(&mut config),
    };
    if !config.problems.is_empty() {
        return Err(Error::Invalid(config.problems));
    }
    check_model(&model, origin).map_err(|error| config.in_own_names(&error))?;
    Ok(model)
}

fn read_object(text: &str, origin: &str) -> Result<Map<String, Value>, Error> {
    let syntax = |what: String, location: String, help: &str| Error::Syntax(Problem::new(what, location, help));
    if text.trim().is_empty() {
        return Err(syntax("the file is empty".to_owned(), origin.to_owned(), "give the config.json of a model"));
    }
    let value: Value = serde_json::from_str(text).map_err(|error| {
        let message = error.to_string();
        let what = message.rsplit_once(" at line ").map_or(message.as_str(), |(what, _)| what);
        let location = format!("{origin}, line {}, column {}", error.line(), error.column());
        syntax(what.to_owned(), location, "mend the JSON at this place, or fetch the file again")
    })?;
    match value {
        Value::Object(fields) => Ok(fields),
        other => Err(syntax(
            format!("the file holds {}, not an object", shown(&other)),
            format!("{origin}, line 1, column 1"),
            "give the config.json of a model: fields between { and }",
        )),
    }
}

fn find_family(fields: &Map<String, Value>, origin: &str) -> Result<(&'static str, Family), Error> {
    let given = fields.get("model_type").unwrap_or(&Value::Null);
    let known = MODEL_TYPES.into_iter().find(|(name, _)| given.as_str() == Some(name));
    known.ok_or_else(|| {
        let what = match given {
            Value::Null => "model_type is missing".to_owned(),
            other => format!("model_type {} cannot be represented", shown(other)),
        };
        let names = MODEL_TYPES.map(|(name, _)| name).join(", ");
        let help = format!("supported are {names}; describe another model in a file like those in examples/");
        Error::Invalid(vec![Problem::new(what, format!("{origin}, field model_type"), help)])
    })
}

/// Refuses files of models that end in something else than a projection to the vocabulary.
fn refuse_other_heads(config: &mut Config) {
    let classes = config.fields.get("architectures").and_then(Value::as_array);
    let mut names = classes.into_iter().flatten().filter_map(Value::as_str);
    if let Some(name) = names.find(|name| OTHER_HEADS.iter().any(|head| name.ends_with(head))) {
        let what = format!("the head of {} is no projection to the vocabulary", shown(&Value::from(name)));
        config.add(what, "architectures", "give the config.json of the language model it was made from");
    }
}

fn gpt2(config: &mut Config) -> ModelSpec {
    config.refuse_true("add_cross_attention", "only decoders without an encoder can be planned");
    config.check_activation("activation_function", &GELU);
    let hidden_size = config.size("hidden_size", &["n_embd", "hidden_size"]);
    let inner = config.optional_size("intermediate_size", &["n_inner"]);
    ModelSpec {
        name: config.model_name(),
        source: config.source(),
        num_layers: config.size("num_layers", &["n_layer", "num_hidden_layers"]),
        hidden_size,
        attention: Attention::MultiHead {
            num_attention_heads: config.size("num_attention_heads", &["n_head", "num_attention_heads"]),
            num_key_value_heads: None,
            head_dim: None,
        },
        feed_forward: FeedForward::Gelu {
            intermediate_size: inner.unwrap_or(hidden_size.saturating_mul(GELU_EXPANSION)),
        },
        norm: NormKind::LayerNorm,
        norm_epsilon: config.number("norm_epsilon", &["layer_norm_epsilon", "layer_norm_eps"], DEFAULT_NORM_EPSILON),
        bias: Bias::All,
        position: Position::Learned,
        rotary_base: DEFAULT_ROTARY_BASE,
        rotary_scaling: None,
        vocabulary: config.vocabulary(),
        embedding_norm: false,
        tied_embedding: config.flag("tie_word_embeddings", true),
        max_sequence_length: SequenceLength::Tokens(
            config.size("max_sequence_length", &["n_positions", "max_position_embeddings"]),
        ),
        sequence_length: None,
        global_batch: None,
        dtype: config.dtype(),
        published_parameters: None,
        deviations: gpt2_deviations(config),
    }
}

/// What numbers of GPT-2 programs do not compute; dropout and upcasts are no such thing.
fn gpt2_deviations(config: &mut Config) -> Vec<Deviation> {
    let mut deviations = Vec::new();
    if config.find(&["activation_function"]).is_some_and(|(_, name)| is_one_of(name, &ERROR_FUNCTION_GELU)) {
        deviations.push(Deviation::ErrorFunctionGelu);
    }
    if !config.flag("scale_attn_weights", true) || config.flag("scale_attn_by_inverse_layer_idx", false) {
        deviations.push(Deviation::ScoreScale);
    }
    deviations
}

/// BLOOM; transformers ignores `n_inner` and `hidden_act`, whose GeLU is the tanh form always. `vocab_size` counts the padded rows.
fn bloom(config: &mut Config) -> ModelSpec {
    let field = "apply_residual_connection_post_layernorm";
    config.refuse_true(field, "only residual connections around the norm can be represented");
    config.check_activation("hidden_act", &GELU);
    let hidden_size = config.size("hidden_size", &["n_embed", "hidden_size"]);
    let length = config.optional_size("max_sequence_length", &["seq_length"]);
    ModelSpec {
        name: config.model_name(),
        source: config.source(),
        num_layers: config.size("num_layers", &["n_layer", "num_hidden_layers"]),
        hidden_size,
        attention: Attention::MultiHead {
            num_attention_heads: config.size("num_attention_heads", &["n_head", "num_attention_heads"]),
            num_key_value_heads: None,
            head_dim: None,
        },
        feed_forward: FeedForward::Gelu { intermediate_size: hidden_size.saturating_mul(GELU_EXPANSION) },
        norm: NormKind::LayerNorm,
        norm_epsilon: config.number("norm_epsilon", &["layer_norm_epsilon", "layer_norm_eps"], DEFAULT_NORM_EPSILON),
        bias: Bias::All,
        position: Position::Alibi,
        rotary_base: DEFAULT_ROTARY_BASE,
        rotary_scaling: None,
        vocabulary: config.vocabulary(),
        embedding_norm: true,
        tied_embedding: config.flag("tie_word_embeddings", true),
        max_sequence_length: SequenceLength::Tokens(length.unwrap_or(BLOOM_SEQUENCE_LENGTH)),
        sequence_length: None,
        global_batch: None,
        dtype: config.dtype(),
        published_parameters: None,
        deviations: Vec::new(),
    }
}

fn llama(config: &mut Config) -> ModelSpec {
    let bias = match (config.flag("attention_bias", false), config.flag("mlp_bias", false)) {
        (false, false) => Bias::None,
        (true, true) => Bias::All,
        (attention_bias, mlp_bias) => {
            let what = format!("attention_bias is {attention_bias} and mlp_bias is {mlp_bias}");
            let field = if attention_bias { "attention_bias" } else { "mlp_bias" };
            config.add(what, field, "only biases on all linear operators or on none can be represented");
            Bias::None
        }
    };
    let key_value_heads = config.optional_size("num_key_value_heads", &["num_key_value_heads"]);
    let attention = multi_head(config, key_value_heads);
    let feed_forward = swiglu(config);
    rotary_decoder(config, attention, feed_forward, bias)
}

fn mistral(config: &mut Config) -> ModelSpec {
    config.refuse_true("attention_bias", "only mistral models without biases can be represented");
    let key_value_heads = config.nullable_size("num_key_value_heads", "num_key_value_heads");
    let attention = multi_head(config, key_value_heads);
    let feed_forward = swiglu(config);
    rotary_decoder(config, attention, feed_forward, Bias::None)
}

fn qwen2(config: &mut Config) -> ModelSpec {
    let key_value_heads = config.nullable_size("num_key_value_heads", "num_key_value_heads");
    let attention = multi_head(config, key_value_heads);
    let feed_forward = swiglu(config);
    rotary_decoder(config, attention, feed_forward, Bias::QueryKeyValue)
}

fn mixtral(config: &mut Config) -> ModelSpec {
    config.refuse_true("attention_bias", "only mixtral models without biases can be represented");
    let key_value_heads = config.nullable_size("num_key_value_heads", "num_key_value_heads");
    let attention = multi_head(config, key_value_heads);
    let feed_forward = FeedForward::MixtureOfExperts {
        num_experts: config.size("num_experts", &["num_local_experts", "num_experts"]),
        experts_per_token: config.size("experts_per_token", &["num_experts_per_tok"]),
        intermediate_size: config.size("intermediate_size", &["intermediate_size"]),
        num_shared_experts: 0,
        first_dense_layers: 0,
        dense_intermediate_size: None,
    };
    rotary_decoder(config, attention, feed_forward, Bias::None)
}

/// DeepSeek-V2 and -V3; `num_key_value_heads` says nothing where every head has its own key and value.
fn deepseek(config: &mut Config) -> ModelSpec {
    for field in ["attention_bias", "mlp_bias"] {
        config.refuse_true(field, "only DeepSeek models without biases can be represented");
    }
    let attention = multi_latent(config);
    let feed_forward = deepseek_experts(config);
    rotary_decoder(config, attention, feed_forward, Bias::None)
}

/// What all models with rotary positions and RMS norm have in common.
fn rotary_decoder(config: &mut Config, attention: Attention, feed_forward: FeedForward, bias: Bias) -> ModelSpec {
    config.check_activation("hidden_act", &SILU);
    let defaults = rotary_defaults(config.model_type);
    let rotary = config.rotary(defaults.rotary_base);
    let mut deviations = rotary.deviations;
    if config.has_window() {
        deviations.push(Deviation::SlidingWindow);
    }
    ModelSpec {
        name: config.model_name(),
        source: config.source(),
        num_layers: config.size("num_layers", &["num_hidden_layers"]),
        hidden_size: config.size("hidden_size", &["hidden_size"]),
        attention,
        feed_forward,
        norm: NormKind::RmsNorm,
        norm_epsilon: config.number("norm_epsilon", &["rms_norm_eps", "layer_norm_eps"], defaults.norm_epsilon),
        bias,
        position: Position::Rotary,
        rotary_base: rotary.base,
        rotary_scaling: rotary.scaling,
        vocabulary: config.vocabulary(),
        embedding_norm: false,
        tied_embedding: config.flag("tie_word_embeddings", false),
        max_sequence_length: SequenceLength::Tokens(config.size("max_sequence_length", &["max_position_embeddings"])),
        sequence_length: None,
        global_batch: None,
        dtype: config.dtype(),
        published_parameters: None,
        deviations,
    }
}

/// Numbers that a file without them means.
struct RotaryDefaults {
    norm_epsilon: f64,
    rotary_base: f64,
}

/// Defaults of `rms_norm_eps` and `rope_theta` (transformers, configuration class of each model type).
fn rotary_defaults(model_type: &str) -> RotaryDefaults {
    match model_type {
        "mixtral" => RotaryDefaults { norm_epsilon: 1e-5, rotary_base: 1e6 },
        _ => RotaryDefaults { norm_epsilon: 1e-6, rotary_base: DEFAULT_ROTARY_BASE },
    }
}

fn multi_head(config: &mut Config, num_key_value_heads: Option<u64>) -> Attention {
    Attention::MultiHead {
        num_attention_heads: config.size("num_attention_heads", &["num_attention_heads"]),
        num_key_value_heads,
        head_dim: config.optional_size("head_dim", &["head_dim"]),
    }
}

fn swiglu(config: &mut Config) -> FeedForward {
    FeedForward::SwiGlu { intermediate_size: config.size("intermediate_size", &["intermediate_size"]) }
}

fn multi_latent(config: &mut Config) -> Attention {
    if config.fields.get("q_lora_rank") == Some(&Value::Null) {
        let help = "only latent attention with a compressed query can be represented";
        config.add("q_lora_rank is null: the query is not compressed", "q_lora_rank", help);
    }
    Attention::MultiLatent {
        num_attention_heads: config.size("num_attention_heads", &["num_attention_heads"]),
        query_rank: config.nullable_size("query_rank", "q_lora_rank").unwrap_or(0),
        key_value_rank: config.size("key_value_rank", &["kv_lora_rank"]),
        nope_head_dim: config.size("nope_head_dim", &["qk_nope_head_dim"]),
        rope_head_dim: config.size("rope_head_dim", &["qk_rope_head_dim"]),
        value_head_dim: config.size("value_head_dim", &["v_head_dim"]),
    }
}

fn deepseek_experts(config: &mut Config) -> FeedForward {
    if let Some((name, value)) = config.find(&["moe_layer_freq"])
        && *value != 1
    {
        let help = "only experts in every layer after the first dense ones can be represented";
        config.add(format!("{name} is {}", shown(value)), name, help);
    }
    let first_dense_layers = config.size("first_dense_layers", &["first_k_dense_replace"]);
    FeedForward::MixtureOfExperts {
        num_experts: config.size("num_experts", &["n_routed_experts", "num_local_experts", "num_experts"]),
        experts_per_token: config.size("experts_per_token", &["num_experts_per_tok"]),
        intermediate_size: config.size("intermediate_size", &["moe_intermediate_size"]),
        num_shared_experts: config.nullable_size("num_shared_experts", "n_shared_experts").unwrap_or(0),
        first_dense_layers,
        dense_intermediate_size: (first_dense_layers > 0)
            .then(|| config.size("dense_intermediate_size", &["intermediate_size"])),
    }
}
