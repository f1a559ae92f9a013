//! Published config files, whole and with fields changed.

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
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 128256}"#;
const LLAMA_2_70B: &str = r#"{"_name_or_path": "llama-2-70b/", "hidden_act": "silu", "hidden_size": 8192,
    "intermediate_size": 28672, "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 64,
    "num_hidden_layers": 80, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": null, "tie_word_embeddings": false,
    "torch_dtype": "float16", "vocab_size": 32000}"#;
const MISTRAL: &str = r#"{"hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
    "torch_dtype": "bfloat16", "vocab_size": 32000}"#;
const MIXTRAL: &str = r#"{"hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
    "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
    "sliding_window": null, "torch_dtype": "bfloat16", "vocab_size": 32000}"#;
const QWEN2: &str = r#"{"hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
    "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "use_sliding_window": false, "vocab_size": 152064}"#;
const DEEPSEEK_V3: &str = r#"{"attention_bias": false, "first_k_dense_replace": 3, "hidden_act": "silu",
    "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": {"quant_method": "fp8"},
    "rms_norm_eps": 1e-06, "rope_scaling": {"factor": 40, "mscale": 1.0, "type": "yarn"}, "rope_theta": 10000,
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
        (GPT2, include_str!("../../../examples/gpt2-124m.ron")),
        (LLAMA_3_8B, include_str!("../../../examples/llama-3.1-8b.ron")),
        (MIXTRAL, include_str!("../../../examples/mixtral-8x7b.ron")),
        (QWEN2, include_str!("../../../examples/qwen2-7b.ron")),
        (DEEPSEEK_V3, include_str!("../../../examples/deepseek-v3.ron")),
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

/// What `plan import` makes of the fixtures' files is what tests of the runtime read.
#[test]
fn fixtures_are_imported_as_their_model_files_say() {
    let table = [
        (include_str!("../../../tests/fixtures/bloom/config.json"), include_str!("../../../tests/fixtures/bloom.ron")),
        (include_str!("../../../tests/fixtures/gpt2/config.json"), include_str!("../../../tests/fixtures/gpt2.ron")),
        (include_str!("../../../tests/fixtures/llama/config.json"), include_str!("../../../tests/fixtures/llama.ron")),
        (include_str!("../../../tests/fixtures/qwen2/config.json"), include_str!("../../../tests/fixtures/qwen2.ron")),
    ];
    for (config, model) in table {
        let model = ir::model::read_model(model, "fixture").unwrap_or_else(|error| panic!("{error}"));
        let imported = ModelSpec {
            source: model.source.clone(),
            sequence_length: model.sequence_length,
            global_batch: model.global_batch,
            ..import(config)
        };
        assert_eq!(imported, model);
    }
}

/// A deviation is planned, but the reason it is not executed follows it.
#[test]
fn deviations_say_why_a_model_is_not_executed() {
    let table = [
        (GPT2, r#""activation_function": "gelu""#, Some("GeLU by the error function")),
        (GPT2, r#""scale_attn_weights": false"#, Some("the root of the head's width")),
        (LLAMA_3_8B, r#""vocab_size": 128256"#, None),
        (LLAMA_3_8B, r#""rope_scaling": {"rope_type": "yarn", "factor": 4.0}"#, Some("scaled rotary frequencies")),
        (LLAMA_2_70B, r#""partial_rotary_factor": 0.5"#, Some("a part of each head")),
        (LLAMA_2_70B, r#""vocab_size": 32000"#, None),
        (MISTRAL, r#""sliding_window": 4096"#, Some("sliding attention windows")),
        (MISTRAL, r#""sliding_window": null"#, None),
    ];
    for (base, changes, expected) in table {
        let reason = ir::derivative::undifferentiable(&import(&with(base, changes)));
        match expected {
            Some(part) => assert!(reason.is_some_and(|reason| reason.contains(part)), "{changes}: {reason:?}"),
            None => assert_eq!(reason, None, "{changes}"),
        }
    }
}

/// Model files that were written before the two fields existed still read, and mean what they meant.
#[test]
fn a_model_file_without_epsilon_and_base_has_the_defaults() {
    let text = include_str!("../../../examples/llama-3.1-8b.ron");
    let old: String =
        text.lines().filter(|line| !line.contains("norm_epsilon") && !line.contains("rotary_base")).collect();
    let model = ir::model::read_model(&old, "old.ron").unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((model.norm_epsilon, model.rotary_base), (1e-5, 10_000.0));
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
    let numbers: Part = |model| format!("epsilon {:?} base {:?}", model.norm_epsilon, model.rotary_base);
    let deviations: Part = |model| format!("{:?}", model.deviations);
    let scaling: Part = |model| format!("{:?}", model.rotary_scaling);
    let table: [(&str, &str, Part, &str); 48] = [
        (GPT2, r#""n_inner": null"#, feed_forward, "Gelu { intermediate_size: 3072 }"),
        (GPT2, r#""n_inner": 1000"#, feed_forward, "Gelu { intermediate_size: 1000 }"),
        (GPT2, r#""scale_attn_by_inverse_layer_idx": true"#, deviations, "[ScoreScale]"),
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
        (GPT2, r#""layer_norm_epsilon": 1e-6"#, numbers, "epsilon 1e-6 base 10000.0"),
        (GPT2, r#""activation_function": "gelu_pytorch_tanh""#, deviations, "[]"),
        (GPT2, r#""activation_function": "gelu""#, deviations, "[ErrorFunctionGelu]"),
        (GPT2, r#""scale_attn_weights": false"#, deviations, "[ScoreScale]"),
        (BLOOM, r#""layer_norm_epsilon": null"#, numbers, "epsilon 1e-5 base 10000.0"),
        (BLOOM, r#""hidden_act": "gelu""#, deviations, "[]"),
        (LLAMA_2_70B, r#""rms_norm_eps": null"#, numbers, "epsilon 1e-6 base 10000.0"),
        (LLAMA_2_70B, r#""rope_theta": 5e5"#, numbers, "epsilon 1e-5 base 500000.0"),
        (LLAMA_2_70B, r#""rope_parameters": {"rope_theta": 7, "rope_type": "default"}"#, numbers, "base 7.0"),
        (LLAMA_2_70B, r#""rope_parameters": {"rope_theta": 7, "rope_type": "default"}"#, deviations, "[]"),
        (LLAMA_2_70B, r#""rope_parameters": {"rope_theta": 7.5}"#, deviations, "[]"),
        (LLAMA_2_70B, r#""rope_parameters": {"rope_type": "yarn"}"#, deviations, "[RotaryScaling]"),
        (LLAMA_2_70B, r#""rope_scaling": {"type": "linear", "factor": 2.0}"#, scaling, "Some(Linear { factor: 2.0 })"),
        (LLAMA_2_70B, r#""partial_rotary_factor": 0.5"#, deviations, "[PartialRotary]"),
        (LLAMA_2_70B, r#""sliding_window": 64"#, deviations, "[]"),
        (LLAMA_3_8B, r#""vocab_size": 128256"#, deviations, "[]"),
        (LLAMA_3_8B, r#""vocab_size": 128256"#, scaling, "low_frequency_factor: 1.0, high_frequency_factor: 4.0"),
        (MISTRAL, r#""sliding_window": null"#, deviations, "[]"),
        (MISTRAL, r#""sliding_window": 32768"#, deviations, "[]"),
        (MISTRAL, r#""sliding_window": 4096"#, deviations, "[SlidingWindow]"),
        (QWEN2, r#""sliding_window": 4096"#, deviations, "[]"),
        (QWEN2, r#""use_sliding_window": true"#, deviations, "[]"),
        (QWEN2, r#""use_sliding_window": true, "max_window_layers": 2"#, deviations, "[SlidingWindow]"),
        (MIXTRAL, r#""rope_theta": null, "rms_norm_eps": null"#, numbers, "epsilon 1e-5 base 1000000.0"),
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
        (LLAMA_2_70B, r#""rms_norm_eps": "1e-5""#, "rms_norm_eps is \"1e-5\", not a number @"),
        (LLAMA_2_70B, r#""rms_norm_eps": 0"#, "rms_norm_eps is 0 @ config.json, field rms_norm_eps"),
        (LLAMA_2_70B, r#""rope_theta": -1"#, "rope_theta is -1 @ config.json, field rope_theta"),
        (LLAMA_2_70B, r#""rope_parameters": {"rope_theta": 0}"#, "rope_theta is 0 @ config.json, field rope_theta"),
        (LLAMA_2_70B, r#""rope_scaling": 2"#, "rope_scaling is 2 @ config.json, field rope_scaling"),
        (
            LLAMA_2_70B,
            r#""rope_scaling": {"type": "linear"}"#,
            "rope_scaling has no factor @ config.json, field rope_sc",
        ),
        (LLAMA_2_70B, r#""rope_scaling": {"type": "linear", "factor": 0}"#, "factor is 0 @ config.json, field factor"),
        (LLAMA_3_8B, r#""num_key_value_heads": 5"#, "num_key_value_heads 5 does not divide"),
        (MISTRAL, r#""attention_bias": true"#, "attention_bias is true @"),
        (MIXTRAL, r#""num_experts_per_tok": 9"#, "num_experts_per_tok 9 exceeds num_experts 8 @ config.json, field"),
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
