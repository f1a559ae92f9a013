//! Rows of `tests/published/runs.csv` as models and layouts.

use cost_models::machine::Machine;
use ir::graph::build_graph;
use ir::model::{
    Attention, Bias, DEFAULT_NORM_EPSILON, DEFAULT_ROTARY_BASE, DType, FeedForward, ModelSpec, NormKind, Position,
    Vocabulary, Workload,
};
use ir::plan::Estimate;
use ir::strategy::{Recompute, Strategy, ZeroStage};
use ir::units::SequenceLength;
use planner::lower::estimate;
use planner::request::{FixedChoices, Request};
use planner::search::score_layout;

use super::layout;

/// Vocabulary rows of Megatron's GPT runs where the table states none.
const GPT_ROWS: u64 = 51_200;
/// Rows of BLOOM's embedding.
const BLOOM_ROWS: u64 = 250_880;

/// A published run of a GPT-style model.
#[derive(Clone, Debug)]
pub struct Row {
    pub id: String,
    pub gpu: String,
    pub gpus: u64,
    pub layers: u64,
    pub hidden: u64,
    pub heads: u64,
    pub sequence: u64,
    pub tensor: u64,
    pub pipeline: u64,
    pub data: u64,
    pub micro_batch: u64,
    pub batch: u64,
    pub precision: String,
    pub rows: u64,
    pub zero: ZeroStage,
    pub step_seconds: Option<f64>,
    pub memory_gib: Option<f64>,
    pub notes: String,
}

/// A predicted run.
#[derive(Clone, Debug)]
pub struct Predicted {
    pub strategy: Strategy,
    pub estimate: Estimate,
    pub fits: bool,
}

/// Rows whose layout and shape are stated.
pub fn rows() -> Vec<Row> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/published/runs.csv");
    let mut reader = csv::Reader::from_path(path).expect("the table is part of the repository");
    let headers = reader.headers().expect("the table has a header").clone();
    let rows = reader.records().map(|record| record.expect("the table is well-formed"));
    rows.filter_map(|record| {
        let cell = |name: &str| {
            let column = headers.iter().position(|header| header == name).expect("the column exists");
            record.get(column).unwrap_or_default()
        };
        let number = |name: &str| cell(name).parse::<u64>().ok();
        let bloom = cell("id").starts_with("bs176");
        Some(Row {
            id: cell("id").to_owned(),
            gpu: cell("gpu").to_owned(),
            gpus: number("gpus")?,
            layers: number("layers")?,
            hidden: number("hidden")?,
            heads: number("heads")?,
            sequence: number("seq_len")?,
            tensor: number("tp")?,
            pipeline: number("pp")?,
            data: number("dp")?,
            micro_batch: number("micro_batch")?,
            batch: number("global_batch")?,
            precision: cell("precision").to_owned(),
            rows: if bloom { BLOOM_ROWS } else { number("vocab").unwrap_or(GPT_ROWS) },
            zero: if bloom { ZeroStage::OptimizerState } else { ZeroStage::None },
            step_seconds: cell("measured_step_s").parse().ok(),
            memory_gib: cell("measured_peak_mem_gib").parse().ok(),
            notes: cell("notes").to_owned(),
        })
    })
    .collect()
}

fn model(row: &Row) -> ModelSpec {
    let bloom = row.id.starts_with("bs176");
    let even = row.hidden.is_multiple_of(row.heads);
    ModelSpec {
        name: row.id.clone(),
        source: "published run".to_owned(),
        num_layers: row.layers,
        hidden_size: row.hidden,
        attention: Attention::MultiHead {
            num_attention_heads: row.heads,
            num_key_value_heads: None,
            head_dim: (!even).then_some(row.hidden / row.heads),
        },
        feed_forward: FeedForward::Gelu { intermediate_size: 4 * row.hidden },
        norm: NormKind::LayerNorm,
        norm_epsilon: DEFAULT_NORM_EPSILON,
        bias: Bias::All,
        position: if bloom { Position::Alibi } else { Position::Learned },
        rotary_base: DEFAULT_ROTARY_BASE,
        vocabulary: Vocabulary { size: row.rows, padded: None },
        embedding_norm: row.id == "bs176-136",
        tied_embedding: true,
        max_sequence_length: SequenceLength::Tokens(row.sequence),
        sequence_length: None,
        global_batch: None,
        dtype: if row.precision == "bf16" { DType::BF16 } else { DType::FP16 },
        published_parameters: None,
        deviations: Vec::new(),
    }
}

/// Predicts a row from its layout, with full recomputation and 1F1B as all these runs had.
pub fn predict(row: &Row, machine: &Machine) -> Predicted {
    let request = Request {
        model: model(row),
        origin: row.id.clone(),
        workload: Workload { sequence_length: row.sequence, global_batch: row.batch },
        machine: machine.clone(),
        gpus: row.gpus,
        fixed: FixedChoices::default(),
        top: 1,
        executable_only: false,
    };
    let strategy = Strategy {
        zero_stage: row.zero,
        micro_batch: row.micro_batch,
        recompute: Recompute::Full,
        ..layout(row.tensor, row.pipeline, row.data, row.batch)
    };
    let graph = build_graph(&request.model);
    let scored = score_layout(&request, &graph, &strategy).expect("the row's degrees split its model");
    let fits = scored.fullest_stage().1 <= machine.usable_memory();
    Predicted { strategy: scored.strategy.clone(), estimate: estimate(&request, &graph, &scored), fits }
}
