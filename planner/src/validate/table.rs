//! Tables of measured runs: columns read into what a run was and, apart from it, what was measured.

use csv::StringRecord;
use hardware_profiles::library::nearest;
use ir::error::Problem;
use ir::strategy::{Recompute, ZeroStage};

use crate::error::Error;

/// Columns that a table must have.
const NEEDED: [&str; 12] =
    ["id", "layers", "hidden", "heads", "seq_len", "gpu", "gpus", "tp", "pp", "dp", "global_batch", "framework"];

/// Columns that a table of a user's own runs must have; the rest may be blank or absent.
const NEEDED_OF_OWN: [&str; 6] = ["layers", "hidden", "heads", "seq_len", "gpus", "global_batch"];
/// Columns of which such a table must have one.
const MEASURED: [&str; 2] = ["measured_step_s", "measured_peak_mem_gib"];
/// All columns of a table of runs.
#[rustfmt::skip]
const COLUMNS: [&str; 43] = [
    "id", "source", "source_locator", "model_family", "layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab",
    "seq_len", "num_experts", "top_k", "gated_mlp", "params_b", "gpu", "gpu_mem_gb", "gpus", "gpus_per_node",
    "interconnect_intra", "interconnect_inter_gbps_per_gpu", "tp", "pp", "vpp", "dp", "cp", "ep", "sequence_parallel",
    "zero_stage", "recompute", "micro_batch", "global_batch", "precision", "flash_attention", "framework", "year",
    "measured_step_s", "measured_tokens_per_s_per_gpu", "measured_tflops_per_gpu", "tflops_convention",
    "measured_mfu", "measured_peak_mem_gib", "notes",
];

/// A row of a table.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Name of the row, for reports only.
    pub id: String,
    /// Where it was published, for reports only.
    pub source: String,
    /// What was run: all that a prediction may look at.
    pub run: Run,
    /// What was measured.
    pub measured: Measured,
}

/// A training run as its layout describes it; `None` where the table does not say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Run {
    /// Name of the model.
    pub family: String,
    /// Layers.
    pub layers: Option<u64>,
    /// Width of the residual stream.
    pub hidden: Option<u64>,
    /// Width between the feed-forward matrices; of one expert where there are experts.
    pub ffn_hidden: Option<u64>,
    /// Query heads.
    pub heads: Option<u64>,
    /// Key-value heads.
    pub kv_heads: Option<u64>,
    /// Tokens of the vocabulary.
    pub vocab: Option<u64>,
    /// Tokens of a sequence.
    pub seq_len: Option<u64>,
    /// Routed experts.
    pub num_experts: Option<u64>,
    /// Experts that see a token.
    pub top_k: Option<u64>,
    /// Whether the feed-forward part has a gate.
    pub gated_mlp: Option<bool>,
    /// Accelerator.
    pub gpu: String,
    /// Its memory in GB.
    pub gpu_mem_gb: Option<f64>,
    /// Accelerators.
    pub gpus: Option<u64>,
    /// Accelerators of a node.
    pub gpus_per_node: Option<u64>,
    /// Network bandwidth of an accelerator in Gbit/s.
    pub inter_gbps_per_gpu: Option<f64>,
    /// Tensor-parallel degree.
    pub tp: Option<u64>,
    /// Pipeline-parallel degree.
    pub pp: Option<u64>,
    /// Parts of the model on each stage.
    pub vpp: Option<u64>,
    /// Data-parallel degree.
    pub dp: Option<u64>,
    /// Context-parallel degree.
    pub cp: Option<u64>,
    /// Expert-parallel degree.
    pub ep: Option<u64>,
    /// Sequence parallelism.
    pub sequence_parallel: Option<bool>,
    /// ZeRO stage.
    pub zero_stage: Option<ZeroStage>,
    /// What backward computes again.
    pub recompute: Option<Recompute>,
    /// Sequences of a micro-batch.
    pub micro_batch: Option<u64>,
    /// Sequences of a step.
    pub global_batch: Option<u64>,
    /// `fp32`, `fp16`, `bf16`, `fp8` or `nvfp4`.
    pub precision: Option<String>,
    /// Whether attention is one kernel.
    pub flash_attention: Option<bool>,
    /// Software.
    pub framework: String,
    /// Year of the run.
    pub year: Option<u64>,
}

impl Run {
    /// Everything that a prediction looks at: equal for repeats of a run.
    pub fn configuration(&self) -> String {
        format!("{self:?}")
    }
}

/// What was measured; `None` where the table does not say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// Seconds of a step.
    pub step_seconds: Option<f64>,
    /// Peak memory in GiB.
    pub peak_memory_gib: Option<f64>,
    /// Whether the run ended out of memory.
    pub out_of_memory: bool,
    /// Day of the run where the notes name it: repeats on other days are other sweeps.
    pub day: Option<String>,
}

/// Reads a table; `origin` names it in errors.
///
/// # Errors
/// `Error::BadInput` with every missing column and every cell that is no number, by line.
pub fn read_table(text: &str, origin: &str) -> Result<Vec<Row>, Error> {
    read_rows(text, origin, |headers| missing(headers, &NEEDED, origin))
}

/// Reads a table of a user's own runs, which need not say what everybody there knows: a run without a name is called
/// by its place, blank degrees are 1, and replicas or accelerators follow from one another.
///
/// # Errors
/// `Error::BadInput` with every missing and every unknown column, and every cell that is no number, by line.
pub fn read_own_runs(text: &str, origin: &str) -> Result<Vec<Row>, Error> {
    let mut rows = read_rows(text, origin, |headers| {
        let mut problems = missing(headers, &NEEDED_OF_OWN, origin);
        problems.extend(headers.iter().filter_map(|header| unknown(header, origin)));
        if !headers.iter().any(|header| MEASURED.contains(&header)) {
            let what = format!("there is no column {}", MEASURED.map(|name| format!("`{name}`")).join(" or "));
            problems.push(Problem::new(what, origin, "say what was measured: seconds of a step, or peak GiB"));
        }
        problems
    })?;
    for (index, row) in rows.iter_mut().enumerate() {
        if row.id.is_empty() {
            row.id = format!("run {}", index + 1);
        }
        let run = &mut row.run;
        let degrees = [&mut run.tp, &mut run.pp, &mut run.cp].map(|degree| *degree.get_or_insert(1));
        if let (None, Some(gpus)) = (run.dp, run.gpus)
            && let Some(ranks) = degrees.into_iter().try_fold(1, u64::checked_mul)
        {
            run.dp = Some((gpus / ranks).max(1));
        }
    }
    Ok(rows)
}

fn missing(headers: &StringRecord, needed: &[&str], origin: &str) -> Vec<Problem> {
    let absent = needed.iter().filter(|name| !headers.iter().any(|header| header == **name));
    let problem =
        |name: &&str| Problem::new(format!("there is no column `{name}`"), origin, "give the table a header with it");
    absent.map(problem).collect()
}

fn unknown(header: &str, origin: &str) -> Option<Problem> {
    if COLUMNS.contains(&header) {
        return None;
    }
    let help = format!("leave it out, or mend its name; nearest: {}", nearest(COLUMNS, header));
    Some(Problem::new(format!("there is no meaning to column `{header}`"), format!("{origin}, line 1"), help))
}

fn read_rows(text: &str, origin: &str, check: impl Fn(&StringRecord) -> Vec<Problem>) -> Result<Vec<Row>, Error> {
    let mut reader = csv::ReaderBuilder::new().flexible(false).from_reader(text.as_bytes());
    let headers = reader.headers().map_err(|error| malformed(&error, origin))?.clone();
    let wrong = check(&headers);
    if !wrong.is_empty() {
        return Err(Error::BadInput(wrong));
    }
    let (mut rows, mut problems) = (Vec::new(), Vec::new());
    for record in reader.records() {
        let record = record.map_err(|error| malformed(&error, origin))?;
        let line = record.position().map_or(0, csv::Position::line);
        let mut cells = Cells { headers: &headers, record: &record, place: format!("{origin}, line {line}"), problems };
        rows.push(read_row(&mut cells));
        problems = cells.problems;
    }
    if rows.is_empty() && problems.is_empty() {
        problems.push(Problem::new("the table has no rows", origin, "give it one line for each run"));
    }
    if problems.is_empty() { Ok(rows) } else { Err(Error::BadInput(problems)) }
}

fn malformed(error: &csv::Error, origin: &str) -> Error {
    let line = error.position().map_or(1, csv::Position::line);
    let help = "write one run a line, with as many comma-separated cells as the header has";
    Problem::new(format!("this is no table: {error}"), format!("{origin}, line {line}"), help).into()
}

/// A line's cells, and what was wrong so far.
struct Cells<'a> {
    headers: &'a StringRecord,
    record: &'a StringRecord,
    place: String,
    problems: Vec<Problem>,
}

impl Cells<'_> {
    /// A cell's text; empty where blank or where the table has no such column.
    fn text(&self, column: &str) -> &str {
        let index = self.headers.iter().position(|header| header == column);
        index.and_then(|index| self.record.get(index)).unwrap_or_default().trim()
    }

    fn optional_text(&self, column: &str) -> Option<String> {
        Some(self.text(column)).filter(|text| !text.is_empty()).map(str::to_owned)
    }

    fn parse<T>(&mut self, column: &str, kind: &str, read: impl Fn(&str) -> Option<T>) -> Option<T> {
        let text = self.text(column).to_owned();
        if text.is_empty() {
            return None;
        }
        let value = read(&text);
        if value.is_none() {
            let what = format!("`{text}` in column {column} is not {kind}");
            self.problems.push(Problem::new(what, self.place.clone(), "mend the cell, or leave it blank"));
        }
        value
    }

    fn count(&mut self, column: &str) -> Option<u64> {
        self.parse(column, "a whole number from 1 on", |text| whole(text).filter(|count| *count > 0))
    }

    /// A whole number that may be blank or 0 for none.
    fn count_or_none(&mut self, column: &str) -> Option<u64> {
        self.parse(column, "a whole number", whole).filter(|count| *count > 0)
    }

    fn number(&mut self, column: &str) -> Option<f64> {
        let positive = |number: &f64| number.is_finite() && *number > 0.0;
        self.parse(column, "a positive number", |text| text.parse().ok().filter(positive))
    }

    fn switch(&mut self, column: &str) -> Option<bool> {
        self.parse(column, "0 or 1", |text| match whole(text) {
            Some(0) => Some(false),
            Some(1) => Some(true),
            _ if text.eq_ignore_ascii_case("false") => Some(false),
            _ if text.eq_ignore_ascii_case("true") => Some(true),
            _ => None,
        })
    }

    fn word(&mut self, column: &str, words: &[&str]) -> Option<String> {
        let known = |text: &str| Some(words.iter().find(|word| word.eq_ignore_ascii_case(text))?.to_string());
        self.parse(column, &format!("one of {}", words.join(", ")), known)
    }
}

/// A whole number, which programs that write tables may give a fraction of zeros.
fn whole(text: &str) -> Option<u64> {
    let digits = text.split_once('.').filter(|(_, fraction)| fraction.bytes().all(|digit| digit == b'0'));
    digits.map_or(text, |(digits, _)| digits).parse().ok()
}

fn read_row(cells: &mut Cells) -> Row {
    let run = Run {
        family: cells.text("model_family").to_owned(),
        layers: cells.count("layers"),
        hidden: cells.count("hidden"),
        ffn_hidden: cells.count("ffn_hidden"),
        heads: cells.count("heads"),
        kv_heads: cells.count("kv_heads"),
        vocab: cells.count("vocab"),
        seq_len: cells.count("seq_len"),
        num_experts: cells.count_or_none("num_experts"),
        top_k: cells.count_or_none("top_k"),
        gated_mlp: cells.switch("gated_mlp"),
        gpu: cells.text("gpu").to_owned(),
        gpu_mem_gb: cells.number("gpu_mem_gb"),
        gpus: cells.count("gpus"),
        gpus_per_node: cells.count("gpus_per_node"),
        inter_gbps_per_gpu: cells.number("interconnect_inter_gbps_per_gpu"),
        tp: cells.count("tp"),
        pp: cells.count("pp"),
        vpp: cells.count_or_none("vpp"),
        dp: cells.count("dp"),
        cp: cells.count_or_none("cp"),
        ep: cells.count_or_none("ep"),
        sequence_parallel: cells.switch("sequence_parallel"),
        zero_stage: cells.parse("zero_stage", "0, 1, 2 or 3", |text| u8::try_from(whole(text)?).ok()?.try_into().ok()),
        recompute: cells.parse("recompute", "one of none, selective, full", |text| {
            Recompute::ALL.into_iter().find(|recompute| recompute.name().eq_ignore_ascii_case(text))
        }),
        micro_batch: cells.count("micro_batch"),
        global_batch: cells.count("global_batch"),
        precision: cells.word("precision", &["fp32", "fp16", "bf16", "fp8", "nvfp4"]),
        flash_attention: cells.switch("flash_attention"),
        framework: cells.text("framework").to_owned(),
        year: cells.count("year"),
    };
    let measured = Measured {
        step_seconds: cells.number("measured_step_s"),
        peak_memory_gib: cells.number("measured_peak_mem_gib"),
        out_of_memory: cells.text("notes").to_lowercase().contains("out of memory"),
        day: day_of(cells.text("notes")),
    };
    Row {
        id: cells.text("id").to_owned(),
        source: cells.optional_text("source").unwrap_or_else(|| "unnamed".to_owned()),
        run,
        measured,
    }
}

/// The day after the word `date`.
fn day_of(notes: &str) -> Option<String> {
    let rest = &notes[notes.find("date ")? + "date ".len()..];
    let day: String = rest.chars().take_while(|letter| letter.is_ascii_digit() || *letter == '-').collect();
    (!day.is_empty()).then_some(day)
}
