//! The `config.json` that tells the library transformers how to compute an exported model.

use ir::model::{Attention, Bias, DType, FeedForward, ModelSpec};
use ir::rotary::RotaryScaling;
use serde_json::{Value, json};

use super::architecture::Architecture;

/// Fields of a model in the names of its architecture; it has no dropout and no tokens of special meaning.
pub(super) fn config(architecture: Architecture, model: &ModelSpec) -> Value {
    let own = match architecture {
        Architecture::Bloom => bloom(model),
        Architecture::Gpt2 => gpt2(model),
        Architecture::Llama => llama(model),
        Architecture::Qwen2 => qwen2(model),
    };
    let mut fields = json!({
        "bos_token_id": null,
        "eos_token_id": null,
        "pad_token_id": null,
        "tie_word_embeddings": model.tied_embedding,
        // Read by versions before and after the field was called `dtype`.
        "torch_dtype": match model.dtype {
            DType::BF16 => "bfloat16",
            DType::FP16 => "float16",
            DType::FP32 => "float32",
        },
        "use_cache": true,
        "vocab_size": model.vocabulary.rows(),
    });
    merge(&mut fields, own);
    fields
}

fn merge(fields: &mut Value, more: Value) {
    if let (Value::Object(fields), Value::Object(more)) = (fields, more) {
        fields.extend(more);
    }
}

fn bloom(model: &ModelSpec) -> Value {
    json!({
        "apply_residual_connection_post_layernorm": false,
        "architectures": ["BloomForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "hidden_size": model.hidden_size,
        "layer_norm_epsilon": model.norm_epsilon,
        "model_type": "bloom",
        "n_head": model.attention.num_attention_heads(),
        "n_layer": model.num_layers,
        "seq_length": model.max_sequence_length.tokens(),
    })
}

fn gpt2(model: &ModelSpec) -> Value {
    json!({
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "layer_norm_epsilon": model.norm_epsilon,
        "model_type": "gpt2",
        "n_embd": model.hidden_size,
        "n_head": model.attention.num_attention_heads(),
        "n_inner": intermediate_size(model),
        "n_layer": model.num_layers,
        "n_positions": model.max_sequence_length.tokens(),
        "resid_pdrop": 0.0,
        "scale_attn_weights": true,
    })
}

fn llama(model: &ModelSpec) -> Value {
    let biases = model.bias == Bias::All;
    let mut fields = rotary(model);
    let own = json!({
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": biases,
        "head_dim": head_dim(model),
        "mlp_bias": biases,
        "model_type": "llama",
    });
    merge(&mut fields, own);
    fields
}

fn qwen2(model: &ModelSpec) -> Value {
    let mut fields = rotary(model);
    merge(
        &mut fields,
        json!({
            "architectures": ["Qwen2ForCausalLM"],
            "head_dim": head_dim(model),
            "model_type": "qwen2",
            "use_sliding_window": false,
        }),
    );
    fields
}

/// What Llama and Qwen2 have in common. `rope_theta` is read by versions before and after `rope_parameters`.
fn rotary(model: &ModelSpec) -> Value {
    json!({
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "intermediate_size": intermediate_size(model),
        "max_position_embeddings": model.max_sequence_length.tokens(),
        "num_attention_heads": model.attention.num_attention_heads(),
        "num_hidden_layers": model.num_layers,
        "num_key_value_heads": model.attention.num_key_value_heads(),
        "rms_norm_eps": model.norm_epsilon,
        "rope_scaling": model.rotary_scaling.map(rope_scaling),
        "rope_theta": model.rotary_base,
    })
}

fn rope_scaling(scaling: RotaryScaling) -> Value {
    match scaling {
        RotaryScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
        RotaryScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_length } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_frequency_factor,
            "high_freq_factor": high_frequency_factor,
            "original_max_position_embeddings": original_length,
        }),
    }
}

fn intermediate_size(model: &ModelSpec) -> u64 {
    match model.feed_forward {
        FeedForward::Gelu { intermediate_size }
        | FeedForward::SwiGlu { intermediate_size }
        | FeedForward::MixtureOfExperts { intermediate_size, .. } => intermediate_size,
    }
}

fn head_dim(model: &ModelSpec) -> u64 {
    let of_hidden = model.hidden_size / model.attention.num_attention_heads();
    match model.attention {
        Attention::MultiHead { head_dim, .. } => head_dim.unwrap_or(of_hidden),
        Attention::MultiLatent { value_head_dim, .. } => value_head_dim,
    }
}
