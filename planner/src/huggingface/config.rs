//! Reading the fields of a `config.json`, with every problem noted on the way.

use ir::error::{Error, Problem};
use ir::model::{DType, Deviation, Vocabulary};
use ir::rotary::RotaryScaling;
use serde_json::{Map, Value};

/// Longest name taken from `_name_or_path`; leaves room for an extension in a file name.
const NAME_LIMIT: usize = 100;
/// Window of Mistral's and Qwen2's files without one (transformers, `sliding_window`).
const DEFAULT_WINDOW: u64 = 4096;
/// Longest part of a wrong value that a message repeats.
const SHOWN_LIMIT: usize = 40;

/// The file's fields, and what was found while reading them.
///
/// A field that cannot be read is noted as a problem and stands in as zero until all problems are reported.
pub(super) struct Config<'a> {
    pub(super) fields: &'a Map<String, Value>,
    pub(super) origin: &'a str,
    pub(super) model_type: &'static str,
    /// Fields of `ModelSpec` and the fields of the file that they were read from.
    pub(super) names: Vec<(&'static str, &'static str)>,
    pub(super) problems: Vec<Problem>,
}

/// What a file says of rotary embedding.
pub(super) struct Rotary {
    pub(super) base: f64,
    pub(super) scaling: Option<RotaryScaling>,
    pub(super) deviations: Vec<Deviation>,
}

impl<'a> Config<'a> {
    pub(super) fn add(&mut self, what: impl Into<String>, field: &str, help: impl Into<String>) {
        self.problems.push(Problem::new(what, format!("{}, field {field}", self.origin), help));
    }

    /// The first of a field's names that is present and not null; another with another value is a problem.
    pub(super) fn find(&mut self, names: &[&'static str]) -> Option<(&'static str, &'a Value)> {
        let fields = self.fields;
        let mut present =
            names.iter().filter_map(|name| fields.get(*name).filter(|v| !v.is_null()).map(|v| (*name, v)));
        let (name, value) = present.next()?;
        if let Some((other, second)) = present.find(|(_, second)| *second != value) {
            let what = format!("{name} is {} but {other} is {}", shown(value), shown(second));
            self.add(what, other, "the two name one quantity: keep the right one");
        }
        Some((name, value))
    }

    pub(super) fn size(&mut self, field: &'static str, names: &[&'static str]) -> u64 {
        match self.optional_size(field, names) {
            Some(size) => size,
            None => self.missing(names),
        }
    }

    pub(super) fn optional_size(&mut self, field: &'static str, names: &[&'static str]) -> Option<u64> {
        let (name, value) = self.find(names)?;
        self.names.push((field, name));
        Some(value.as_u64().unwrap_or_else(|| {
            let what = format!("{name} is {}, not a whole number", shown(value));
            self.add(what, name, "give a whole number without a sign, a fraction or quotes");
            0
        }))
    }

    /// A field that may be null, but has no meaning of its own where it is absent.
    pub(super) fn nullable_size(&mut self, field: &'static str, name: &'static str) -> Option<u64> {
        if !self.fields.contains_key(name) {
            self.missing(&[name]);
        }
        self.optional_size(field, &[name])
    }

    /// A number that need not be whole.
    pub(super) fn number(&mut self, field: &'static str, names: &[&'static str], default: f64) -> f64 {
        let Some((name, value)) = self.find(names) else { return default };
        self.names.push((field, name));
        self.float(name, value)
    }

    fn float(&mut self, name: &str, value: &Value) -> f64 {
        value.as_f64().unwrap_or_else(|| {
            self.add(format!("{name} is {}, not a number", shown(value)), name, "give a number without quotes");
            1.0
        })
    }

    /// Rotary embedding: `rope_theta` and `rope_scaling`, or `rope_parameters` since transformers 5.
    pub(super) fn rotary(&mut self, default_base: f64) -> Rotary {
        let base = self.number("rotary_base", &["rope_theta"], default_base);
        let mut rotary = Rotary { base, scaling: None, deviations: Vec::new() };
        for name in ["rope_scaling", "rope_parameters"] {
            let Some((_, value)) = self.find(&[name]) else { continue };
            let Some(fields) = value.as_object() else {
                self.add(format!("{name} is {}", shown(value)), name, "give an object, or leave the field out");
                continue;
            };
            if let Some(base) = fields.get("rope_theta").filter(|base| !base.is_null()) {
                self.names.push(("rotary_base", "rope_theta"));
                rotary.base = self.float("rope_theta", base);
            }
            match fields.get("rope_type").or_else(|| fields.get("type")).map(Value::as_str) {
                Some(Some("default")) => {}
                None if name == "rope_parameters" => {}
                Some(Some("linear")) => {
                    rotary.scaling = Some(RotaryScaling::Linear {
                        factor: self.part(name, fields, "rotary_scaling.factor", "factor"),
                    });
                }
                Some(Some("llama3")) => rotary.scaling = Some(self.llama3_scaling(name, fields)),
                _ => rotary.deviations.push(Deviation::RotaryScaling),
            }
            if fields.get("partial_rotary_factor").is_some_and(is_partial) {
                rotary.deviations.push(Deviation::PartialRotary);
            }
        }
        if self.find(&["partial_rotary_factor"]).is_some_and(|(_, factor)| is_partial(factor)) {
            rotary.deviations.push(Deviation::PartialRotary);
        }
        rotary.deviations.sort_unstable();
        rotary.deviations.dedup();
        rotary
    }

    fn llama3_scaling(&mut self, name: &'static str, fields: &Map<String, Value>) -> RotaryScaling {
        let [factor, low_frequency_factor, high_frequency_factor, original_length] = [
            ("rotary_scaling.factor", "factor"),
            ("rotary_scaling.low_frequency_factor", "low_freq_factor"),
            ("rotary_scaling.high_frequency_factor", "high_freq_factor"),
            ("rotary_scaling.original_length", "original_max_position_embeddings"),
        ]
        .map(|(field, part)| self.part(name, fields, field, part));
        let original_length = original_length as u64;
        RotaryScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_length }
    }

    /// A number inside the object `name`.
    fn part(&mut self, name: &str, fields: &Map<String, Value>, field: &'static str, part: &'static str) -> f64 {
        self.names.push((field, part));
        match fields.get(part) {
            Some(value) => self.float(&format!("{name}.{part}"), value),
            None => {
                self.add(
                    format!("{name} has no {part}"),
                    name,
                    format!("add {part}, as the model's authors publish it"),
                );
                1.0
            }
        }
    }

    /// Whether queries of some layers see fewer positions than the longest sequence has.
    ///
    /// Qwen2's file switches windows on by `use_sliding_window`, from layer `max_window_layers` on; those of
    /// Mistral and Mixtral have one where `sliding_window` is not null; other models have none.
    pub(super) fn has_window(&mut self) -> bool {
        let (switched_on, default_window) = match self.model_type {
            "qwen2" => (self.flag("use_sliding_window", false), Some(DEFAULT_WINDOW)),
            "mistral" => (true, Some(DEFAULT_WINDOW)),
            "mixtral" => (true, None),
            _ => (false, None),
        };
        let whole = |name: &str| self.fields.get(name).and_then(Value::as_u64);
        let window = self.fields.get("sliding_window").map_or(default_window, Value::as_u64);
        let longest = whole("max_position_embeddings").unwrap_or(u64::MAX);
        let layers = whole("num_hidden_layers").unwrap_or(u64::MAX);
        let somewhere = self.model_type != "qwen2" || whole("max_window_layers").unwrap_or(0) < layers;
        switched_on && somewhere && window.is_some_and(|window| window < longest)
    }

    pub(super) fn missing(&mut self, names: &[&'static str]) -> u64 {
        let names = names.join(" or ");
        let help = format!("add it; transformers writes it for every model_type {}", self.model_type);
        self.add(format!("{names} is missing"), &names, help);
        0
    }

    pub(super) fn flag(&mut self, name: &'static str, default: bool) -> bool {
        let Some((_, value)) = self.find(&[name]) else { return default };
        value.as_bool().unwrap_or_else(|| {
            self.add(format!("{name} is {}", shown(value)), name, "write true or false, without quotes");
            default
        })
    }

    pub(super) fn refuse_true(&mut self, name: &'static str, help: &str) {
        if self.flag(name, false) {
            self.add(format!("{name} is true"), name, help);
        }
    }

    /// The activation, where it is named; the default of each model type can be represented.
    pub(super) fn check_activation(&mut self, name: &'static str, accepted: &[&str]) {
        let Some((_, value)) = self.find(&[name]) else { return };
        if !is_one_of(value, accepted) {
            let help = format!("layers of model_type {} can have {}", self.model_type, accepted.join(", "));
            self.add(format!("{name} {} cannot be represented", shown(value)), name, help);
        }
    }

    pub(super) fn dtype(&mut self) -> DType {
        let Some((name, value)) = self.find(&["dtype", "torch_dtype"]) else { return DType::BF16 };
        match value.as_str().map(|given| given.trim_start_matches("torch.")) {
            Some("bfloat16") => DType::BF16,
            Some("float16") => DType::FP16,
            Some("float32") => DType::FP32,
            _ => {
                let help = "write bfloat16, float16 or float32";
                self.add(format!("{name} is {}", shown(value)), name, help);
                DType::BF16
            }
        }
    }

    pub(super) fn vocabulary(&mut self) -> Vocabulary {
        let size = self.size("vocabulary.size", &["vocab_size"]);
        // The check reports the rows apart from the tokens; the file has one number for both.
        self.names.push(("vocabulary.padded", "vocab_size"));
        Vocabulary { size, padded: None }
    }

    /// The last component of `_name_or_path`, if a file can be called so, else the model type.
    pub(super) fn model_name(&self) -> String {
        let path = self.fields.get("_name_or_path").and_then(Value::as_str).unwrap_or("");
        let last = path.trim_end_matches(['/', '\\']).rsplit(['/', '\\']).next().unwrap_or("");
        let usable = last.len() <= NAME_LIMIT
            && last.starts_with(|c: char| c.is_ascii_alphanumeric())
            && last.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
        if usable { last.to_owned() } else { self.model_type.to_owned() }
    }

    pub(super) fn source(&self) -> String {
        format!("Hugging Face config.json, model_type {}", self.model_type)
    }

    /// The problems of a checked `ModelSpec`, in the names that the file uses.
    ///
    /// One of a derived number, say a width of `4 * n_embd`, only counts if none is of the file's own fields.
    pub(super) fn in_own_names(&self, error: &Error) -> Error {
        let mut own: Vec<Problem> = error.problems().iter().filter_map(|problem| self.renamed(problem)).collect();
        own.dedup();
        Error::Invalid(if own.is_empty() { error.problems().to_vec() } else { own })
    }

    fn renamed(&self, problem: &Problem) -> Option<Problem> {
        let location = |field: &str| format!("{}, field {field}", self.origin);
        let (field, name) = self.names.iter().find(|(field, _)| problem.location == location(field))?;
        let what = match problem.what.strip_prefix(field) {
            Some(rest) => format!("{name}{rest}"),
            None => problem.what.clone(),
        };
        Some(Problem::new(what, location(name), problem.help.clone()))
    }
}

fn is_partial(factor: &Value) -> bool {
    !factor.is_null() && factor.as_f64() != Some(1.0)
}

/// Whether a value is one of some names.
pub(super) fn is_one_of(value: &Value, names: &[&str]) -> bool {
    value.as_str().is_some_and(|given| names.contains(&given))
}

/// A value as JSON writes it, cut to a length that a message can hold.
pub(super) fn shown(value: &Value) -> String {
    match value {
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {
            let text = value.to_string();
            match text.char_indices().nth(SHOWN_LIMIT) {
                Some((end, _)) => format!("{}...", &text[..end]),
                None => text,
            }
        }
    }
}
