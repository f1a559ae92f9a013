//! What the columns of a table do not say of a model, by its family's published configuration.

use ir::model::{Bias, Position};

/// Shape of a family beside what a table's columns say; sources are the models' configuration files.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Family {
    /// Letters and digits that names of the family contain, in lower case.
    fragment: &'static str,
    /// Width of a head where it is not hidden size over heads.
    pub head_dim: Option<u64>,
    /// Multi-head latent attention.
    pub latent: Option<Latent>,
    /// Experts that see every token.
    pub shared_experts: u64,
    /// Dense layers at the start, and of how many layers.
    pub dense_layers: (u64, u64),
    /// Width of the dense layers' feed-forward part.
    pub dense_width: u64,
    /// Biases, where the feed-forward part does not tell.
    pub bias: Option<Bias>,
    /// Positions, where the feed-forward part does not tell.
    pub position: Option<Position>,
    /// Whether the head has weights of its own, where the feed-forward part does not tell.
    pub untied: Option<bool>,
    /// Whether training drops attention weights, where the feed-forward part and the stack do not tell.
    pub dropout: Option<bool>,
    /// Vocabulary where the table has none.
    pub vocab: u64,
}

/// Widths of multi-head latent attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latent {
    /// Compressed query.
    pub query_rank: u64,
    /// Compressed key and value.
    pub key_value_rank: u64,
    /// A head's part without position.
    pub nope: u64,
    /// A head's rotary part.
    pub rope: u64,
    /// A value head.
    pub value: u64,
}

/// A family of which the columns say everything.
pub const PLAIN: Family = Family {
    fragment: "",
    head_dim: None,
    latent: None,
    shared_experts: 0,
    dense_layers: (0, 1),
    dense_width: 0,
    bias: None,
    position: None,
    untied: None,
    dropout: None,
    vocab: 51_200,
};

/// DeepSeek-V2's and V3's attention (arXiv 2405.04434, section 3.1.2; 2412.19437, section 4.2).
const DEEPSEEK: Latent = Latent { query_rank: 1536, key_value_rank: 512, nope: 128, rope: 64, value: 128 };

/// Known families; the first whose fragment a name contains counts.
const FAMILIES: [Family; 8] = [
    Family {
        fragment: "deepseekv3",
        latent: Some(DEEPSEEK),
        shared_experts: 1,
        dense_layers: (3, 61),
        dense_width: 18_432,
        ..PLAIN
    },
    Family {
        fragment: "deepseekv2",
        latent: Some(DEEPSEEK),
        shared_experts: 2,
        dense_layers: (1, 60),
        dense_width: 12_288,
        ..PLAIN
    },
    Family { fragment: "qwen3", head_dim: Some(128), ..PLAIN },
    Family { fragment: "gptoss", head_dim: Some(64), bias: Some(Bias::All), ..PLAIN },
    Family {
        fragment: "nemotron",
        bias: Some(Bias::None),
        position: Some(Position::Rotary),
        untied: Some(true),
        ..PLAIN
    },
    Family { fragment: "mpt", bias: Some(Bias::None), ..PLAIN },
    Family { fragment: "bloom", position: Some(Position::Alibi), dropout: Some(false), ..PLAIN },
    Family { fragment: "grok", vocab: 131_072, ..PLAIN },
];

/// The family of a model's name.
pub fn family_of(name: &str) -> Family {
    let letters: String =
        name.chars().filter(char::is_ascii_alphanumeric).map(|letter| letter.to_ascii_lowercase()).collect();
    FAMILIES.into_iter().find(|family| letters.contains(family.fragment)).unwrap_or(PLAIN)
}

impl Family {
    /// Dense layers of a model of `layers`, of which at least one is kept when a model is cut.
    pub fn dense_of(&self, layers: u64) -> u64 {
        let (dense, of) = self.dense_layers;
        if dense == 0 { 0 } else { (dense * layers / of).max(1) }
    }
}
