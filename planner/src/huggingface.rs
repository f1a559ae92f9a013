//! Reads a Hugging Face `config.json` as it is published and gives the model it describes.
//!
//! A model type is accepted only where its layers are exactly those of the graph that `ir` builds. A field
//! that changes them in a way this project cannot say is an error; all other unknown fields are ignored,
//! among them `sliding_window`, `rope_scaling`, `quantization_config` and `num_nextn_predict_layers`.
//! A missing field means what it means to the library transformers; where that is another number for each
//! model type, the field is required instead. The training step is not in such a file, so it stays open.

mod config;

use config::{Config, shown};
use ir::error::{Error, Problem};
use ir::model::{Attention, Bias, FeedForward, ModelSpec, NormKind, Position, check_model};
use ir::units::SequenceLength;
use serde_json::{Map, Value};

/// BLOOM's training length (arXiv 2211.05100, table 3), for files without `seq_length`.
const BLOOM_SEQUENCE_LENGTH: u64 = 2048;
/// Width between GPT-2's and BLOOM's matrices, in hidden sizes, where no other is given (transformers, `n_inner`).
const GELU_EXPANSION: u64 = 4;

/// Names that transformers gives to GeLU and its approximations by tanh.
const GELU: [&str; 7] =
    ["gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python", "gelu_python_tanh", "gelu_accurate"];
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
        bias: Bias::All,
        position: Position::Learned,
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
    }
}

/// BLOOM; `n_inner` is ignored, as transformers ignores it. `vocab_size` counts the padded rows.
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
        bias: Bias::All,
        position: Position::Alibi,
        vocabulary: config.vocabulary(),
        embedding_norm: true,
        tied_embedding: config.flag("tie_word_embeddings", true),
        max_sequence_length: SequenceLength::Tokens(length.unwrap_or(BLOOM_SEQUENCE_LENGTH)),
        sequence_length: None,
        global_batch: None,
        dtype: config.dtype(),
        published_parameters: None,
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
    ModelSpec {
        name: config.model_name(),
        source: config.source(),
        num_layers: config.size("num_layers", &["num_hidden_layers"]),
        hidden_size: config.size("hidden_size", &["hidden_size"]),
        attention,
        feed_forward,
        norm: NormKind::RmsNorm,
        bias,
        position: Position::Rotary,
        vocabulary: config.vocabulary(),
        embedding_norm: false,
        tied_embedding: config.flag("tie_word_embeddings", false),
        max_sequence_length: SequenceLength::Tokens(config.size("max_sequence_length", &["max_position_embeddings"])),
        sequence_length: None,
        global_batch: None,
        dtype: config.dtype(),
        published_parameters: None,
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

#[cfg(test)]
mod tests {
    use ir::graph::count_parameters;

    use super::*;

    const GPT2: &str = r#"{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "resid_pdrop": 0.1, "summary_type": "cls_index", "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}}"#;
    const BLOOM: &str = r#"{"apply_residual_connection_post_layernorm": false, "architectures": ["BloomForCausalLM"],
        "attention_softmax_in_fp32": true, "model_type": "bloom", "n_embed": 14336, "n_layer": 70,
        "num_attention_heads": 112, "pretraining_tp": 4, "slow_but_exact": false, "vocab_size": 250880}"#;
    const LLAMA_3_8B: &str = r#"{"_name_or_path": "meta-llama/Llama-3.1-8B", "architectures": ["LlamaForCausalLM"],
        "attention_bias": false, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 128256}"#;
    const LLAMA_2_70B: &str = r#"{"_name_or_path": "llama-2-70b/", "hidden_act": "silu", "hidden_size": 8192,
        "intermediate_size": 28672, "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 64,
        "num_hidden_layers": 80, "num_key_value_heads": 8, "rope_scaling": null, "tie_word_embeddings": false,
        "torch_dtype": "float16", "vocab_size": 32000}"#;
    const MISTRAL: &str = r#"{"hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "sliding_window": 4096, "torch_dtype": "bfloat16", "vocab_size": 32000}"#;
    const MIXTRAL: &str = r#"{"hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "router_aux_loss_coef": 0.02, "sliding_window": null, "torch_dtype": "bfloat16", "vocab_size": 32000}"#;
    const QWEN2: &str = r#"{"hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
        "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "use_sliding_window": false, "vocab_size": 152064}"#;
    const DEEPSEEK_V3: &str = r#"{"attention_bias": false, "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": {"quant_method": "fp8"},
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280}"#;
    const DEEPSEEK_V2: &str = r#"{"attention_bias": false, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 5120, "intermediate_size": 12288, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v2", "moe_intermediate_size": 1536, "moe_layer_freq": 1, "n_routed_experts": 160,
        "n_shared_experts": 2, "num_attention_heads": 128, "num_experts_per_tok": 6, "num_hidden_layers": 60,
        "num_key_value_heads": 128, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 102400}"#;

    /// A published file with some fields changed; `changes` is the inside of a JSON object.
    fn with(text: &str, changes: &str) -> String {
        let mut fields = read_object(text, "base").expect("the published file is an object");
        fields.extend(read_object(&format!("{{{changes}}}"), "changes").expect("the changes are fields"));
        Value::Object(fields).to_string()
    }

    fn without(text: &str, names: &[&str]) -> String {
        let mut fields = read_object(text, "base").expect("the published file is an object");
        fields.retain(|name, _| !names.contains(&name.as_str()));
        Value::Object(fields).to_string()
    }

    fn import(text: &str) -> ModelSpec {
        import_config(text, "config.json").unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn published_files_give_the_published_counts() {
        let table = [
            (GPT2, "gpt2", 124_439_808),
            (BLOOM, "bloom", 176_247_271_424),
            (LLAMA_3_8B, "Llama-3.1-8B", 8_030_261_248),
            (LLAMA_2_70B, "llama-2-70b", 68_976_648_192),
            (MISTRAL, "mistral", 7_241_732_096),
            (MIXTRAL, "mixtral", 46_702_792_704),
            (QWEN2, "qwen2", 7_615_616_512),
            (DEEPSEEK_V2, "deepseek_v2", 235_741_434_880),
            (DEEPSEEK_V3, "deepseek_v3", 671_026_404_352),
        ];
        for (text, name, parameters) in table {
            let model = import(text);
            assert_eq!((model.name.as_str(), count_parameters(&model)), (name, parameters));
            assert_eq!((model.sequence_length, model.global_batch), (None, None), "{name}");
        }
    }

    /// The examples describe the same models; only names, sources and the training step differ.
    #[test]
    fn published_files_agree_with_the_examples() {
        let table = [
            (GPT2, include_str!("../../examples/gpt2-124m.ron")),
            (LLAMA_3_8B, include_str!("../../examples/llama-3.1-8b.ron")),
            (MIXTRAL, include_str!("../../examples/mixtral-8x7b.ron")),
            (QWEN2, include_str!("../../examples/qwen2-7b.ron")),
            (DEEPSEEK_V3, include_str!("../../examples/deepseek-v3.ron")),
        ];
        for (text, example) in table {
            let example = ir::model::read_model(example, "example").unwrap_or_else(|error| panic!("{error}"));
            let model = ModelSpec {
                name: example.name.clone(),
                source: example.source.clone(),
                sequence_length: example.sequence_length,
                global_batch: example.global_batch,
                published_parameters: example.published_parameters,
                ..import(text)
            };
            assert_eq!(model, example);
        }
    }

    #[test]
    fn a_field_reaches_the_model() {
        type Part = fn(&ModelSpec) -> String;
        let name: Part = |model| model.name.clone();
        let attention: Part = |model| format!("{:?}", model.attention);
        let feed_forward: Part = |model| format!("{:?}", model.feed_forward);
        let bias: Part = |model| format!("{:?}", model.bias);
        let dtype: Part = |model| format!("{:?}", model.dtype);
        let tied: Part = |model| model.tied_embedding.to_string();
        let length: Part = |model| model.max_sequence_length.tokens().to_string();
        let table: [(&str, &str, Part, &str); 24] = [
            (GPT2, r#""n_inner": null"#, feed_forward, "Gelu { intermediate_size: 3072 }"),
            (GPT2, r#""n_inner": 1000"#, feed_forward, "Gelu { intermediate_size: 1000 }"),
            (GPT2, r#""scale_attn_by_inverse_layer_idx": true"#, tied, "true"),
            (GPT2, r#""tie_word_embeddings": false"#, tied, "false"),
            (GPT2, r#""torch_dtype": null"#, dtype, "BF16"),
            (BLOOM, r#""seq_length": 4096"#, length, "4096"),
            (BLOOM, r#""hidden_size": 14336"#, length, "2048"),
            (BLOOM, r#""n_inner": 7"#, feed_forward, "Gelu { intermediate_size: 57344 }"),
            (LLAMA_3_8B, r#""torch_dtype": "float16""#, dtype, "FP16"),
            (LLAMA_3_8B, r#""torch_dtype": null, "dtype": "float32""#, dtype, "FP32"),
            (LLAMA_3_8B, r#""attention_bias": true, "mlp_bias": true"#, bias, "All"),
            (LLAMA_3_8B, r#""tie_word_embeddings": true"#, tied, "true"),
            (LLAMA_3_8B, r#""num_key_value_heads": null"#, attention, "num_key_value_heads: None"),
            (LLAMA_3_8B, r#""head_dim": 64"#, attention, "head_dim: Some(64)"),
            (LLAMA_3_8B, r#""head_dim": null"#, attention, "head_dim: None"),
            (LLAMA_3_8B, r#""_name_or_path": "C:\\models\\my_llama""#, name, "my_llama"),
            (LLAMA_3_8B, r#""_name_or_path": "a/b c""#, name, "llama"),
            (LLAMA_3_8B, r#""_name_or_path": "..""#, name, "llama"),
            (LLAMA_3_8B, r#""_name_or_path": """#, name, "llama"),
            (LLAMA_3_8B, r#""_name_or_path": 5"#, name, "llama"),
            (MISTRAL, r#""num_key_value_heads": null"#, attention, "num_key_value_heads: None"),
            (QWEN2, r#""hidden_act": "swish""#, bias, "QueryKeyValue"),
            (DEEPSEEK_V3, r#""n_shared_experts": null"#, feed_forward, "num_shared_experts: 0"),
            (DEEPSEEK_V3, r#""first_k_dense_replace": 0"#, feed_forward, "dense_intermediate_size: None"),
        ];
        for (base, changes, part, expected) in table {
            let found = part(&import(&with(base, changes)));
            assert!(found.contains(expected), "{changes} gave {found}, not {expected}");
        }
        assert_eq!(import(&without(LLAMA_3_8B, &["num_key_value_heads"])).attention.num_key_value_heads(), 32);
    }

    /// Each problem's first line and location, as `what @ where`.
    fn problems(text: &str) -> Vec<String> {
        let error = import_config(text, "config.json").expect_err("the file is wrong");
        let short = |problem: &Problem| format!("{} @ {}", problem.what, problem.location);
        assert!(error.problems().iter().all(|problem| !problem.help.is_empty()));
        error.problems().iter().map(short).collect()
    }

    #[test]
    fn a_field_that_cannot_be_represented_is_refused() {
        let table = [
            (GPT2, r#""activation_function": "relu""#, "activation_function \"relu\" cannot be represented @"),
            (GPT2, r#""activation_function": 3"#, "activation_function 3 cannot be represented @"),
            (GPT2, r#""add_cross_attention": true"#, "add_cross_attention is true @"),
            (GPT2, r#""architectures": ["GPT2DoubleHeadsModel"]"#, "the head of \"GPT2DoubleHeadsModel\" is no"),
            (GPT2, r#""n_head": 7"#, "n_head 7 does not divide hidden_size 768 @ config.json, field n_head"),
            (GPT2, r#""n_layer": 0"#, "n_layer is 0 @ config.json, field n_layer"),
            (GPT2, r#""n_layer": -1"#, "n_layer is -1, not a whole number @ config.json, field n_layer"),
            (GPT2, r#""n_layer": 1.5"#, "n_layer is 1.5, not a whole number @"),
            (GPT2, r#""n_layer": "12""#, "n_layer is \"12\", not a whole number @"),
            (GPT2, r#""n_layer": [12]"#, "n_layer is a list, not a whole number @"),
            (GPT2, r#""n_layer": 1e30"#, "n_layer is 1e+30, not a whole number @"),
            (GPT2, r#""n_embd": 18446744073709551615"#, "n_embd is 18446744073709551615 @ config.json, field n_embd"),
            (GPT2, r#""n_embd": 134217736, "n_head": 1"#, "intermediate_size is 536870944 @"),
            (GPT2, r#""hidden_size": 64"#, "n_embd is 768 but hidden_size is 64 @ config.json, field hidden_size"),
            (GPT2, r#""vocab_size": 0"#, "vocab_size is 0 @ config.json, field vocab_size"),
            (GPT2, r#""tie_word_embeddings": "yes""#, "tie_word_embeddings is \"yes\" @"),
            (GPT2, r#""model_type": "gpt_neox""#, "model_type \"gpt_neox\" cannot be represented @"),
            (GPT2, r#""model_type": 3"#, "model_type 3 cannot be represented @ config.json, field model_type"),
            (BLOOM, r#""apply_residual_connection_post_layernorm": true"#, "post_layernorm is true @"),
            (LLAMA_3_8B, r#""attention_bias": true"#, "attention_bias is true and mlp_bias is false @"),
            (LLAMA_3_8B, r#""mlp_bias": true"#, "mlp_bias is true @ config.json, field mlp_bias"),
            (LLAMA_3_8B, r#""mlp_bias": 1"#, "mlp_bias is 1 @"),
            (LLAMA_3_8B, r#""hidden_act": "gelu""#, "hidden_act \"gelu\" cannot be represented @"),
            (LLAMA_3_8B, r#""torch_dtype": "float8_e4m3fn""#, "torch_dtype is \"float8_e4m3fn\" @"),
            (LLAMA_3_8B, r#""dtype": "float16""#, "dtype is \"float16\" but torch_dtype is \"bfloat16\" @"),
            (LLAMA_3_8B, r#""num_key_value_heads": 5"#, "num_key_value_heads 5 does not divide"),
            (MISTRAL, r#""attention_bias": true"#, "attention_bias is true @"),
            (
                MIXTRAL,
                r#""num_experts_per_tok": 9"#,
                "num_experts_per_tok 9 exceeds num_experts 8 @ config.json, field",
            ),
            (DEEPSEEK_V3, r#""q_lora_rank": null"#, "q_lora_rank is null: the query is not compressed @"),
            (DEEPSEEK_V3, r#""moe_layer_freq": 2"#, "moe_layer_freq is 2 @ config.json, field moe_layer_freq"),
            (DEEPSEEK_V3, r#""moe_layer_freq": [0, 1]"#, "moe_layer_freq is a list @"),
            (DEEPSEEK_V3, r#""attention_bias": true"#, "attention_bias is true @"),
            (DEEPSEEK_V3, r#""first_k_dense_replace": 62"#, "first_k_dense_replace 62 exceeds num_layers 61 @"),
        ];
        for (base, changes, expected) in table {
            let found = problems(&with(base, changes));
            assert!(found.len() == 1 && found[0].contains(expected), "{changes} gave {found:?}, not {expected}");
        }
    }

    #[test]
    fn missing_fields_are_reported_together() {
        let table: [(&str, &[&str], &[&str]); 5] = [
            (GPT2, &["n_head", "vocab_size"], &["n_head or num_attention_heads is missing", "vocab_size is missing"]),
            (MISTRAL, &["num_key_value_heads"], &["num_key_value_heads is missing"]),
            (DEEPSEEK_V3, &["q_lora_rank", "v_head_dim"], &["q_lora_rank is missing", "v_head_dim is missing"]),
            (DEEPSEEK_V3, &["n_shared_experts"], &["n_shared_experts is missing"]),
            (LLAMA_3_8B, &["model_type"], &["model_type is missing @ config.json, field model_type"]),
        ];
        for (base, names, expected) in table {
            let found = problems(&without(base, names));
            let all = found.len() == expected.len() && found.iter().zip(expected).all(|(f, e)| f.starts_with(e));
            assert!(all, "without {names:?}: {found:?}, not {expected:?}");
        }
    }

    #[test]
    fn malformed_text_is_a_syntax_error() {
        let deep = "[".repeat(100_000);
        let table = [
            ("", "the file is empty @ config.json"),
            ("[1, 2]", "the file holds a list, not an object @ config.json, line 1, column 1"),
            ("{\"n_layer\":\n 12,}", "trailing comma @ config.json, line 2, column 5"),
            ("{\"n_layer\": NaN}", "expected value @ config.json, line 1, column 13"),
            ("{\"n_layer\": 1", "EOF while parsing an object @ config.json, line 1, column 13"),
            (deep.as_str(), "recursion limit exceeded @ config.json, line 1, column 128"),
        ];
        for (text, expected) in table {
            assert!(matches!(import_config(text, "config.json"), Err(Error::Syntax(_))), "{expected}");
            assert_eq!(problems(text), [expected]);
        }
    }

    #[test]
    fn no_value_of_a_field_panics() {
        let values = ["null", "true", "0", "-1", "0.5", "1e300", "18446744073709551615", "\"\"", "[]", "{}"];
        for text in [GPT2, BLOOM, LLAMA_3_8B, MISTRAL, MIXTRAL, QWEN2, DEEPSEEK_V2, DEEPSEEK_V3] {
            for name in read_object(text, "base").expect("the published file is an object").keys() {
                for value in values {
                    let result = import_config(&with(text, &format!("{name:?}: {value}")), "config.json");
                    assert!(result.is_ok() || result.is_err_and(|error| !error.problems().is_empty()));
                }
            }
        }
    }

    #[test]
    fn an_unknown_model_type_lists_the_known() {
        let error = import_config(r#"{"model_type": "t5"}"#, "config.json").expect_err("t5 is no decoder");
        for (name, _) in MODEL_TYPES {
            assert!(error.to_string().contains(name), "{name} is not listed in {error}");
        }
    }

    #[test]
    fn long_values_are_cut_between_characters() {
        let text = with(GPT2, &format!(r#""model_type": "{}""#, "é".repeat(1000)));
        assert!(problems(&text)[0].len() < 200);
    }
}
