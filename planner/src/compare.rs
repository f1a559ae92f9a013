//! Two plans term by term: what differs between them, what each term costs, and what binds either.
//!
//! Plans of one model and one step size are compared by the seconds of a step. Where the tokens of a step differ, the
//! seconds of a million tokens are compared instead. The differences of the terms add up to the difference of the
//! whole in either unit.

use std::collections::BTreeSet;

use ir::mesh::StageId;
use ir::plan::{Binding, Estimate, MemoryTerm, Plan, TimeTerm};
use ir::units::{Bytes, Seconds};
use serde_json::{Map, Value, json};

use crate::limits::in_words;
use crate::report::json::strategy_value;

/// Tokens in which times are expressed where the steps of both plans hold different numbers.
const UNIT_TOKENS: f64 = 1e6;
/// End of the names of hashes.
const HASH: &str = "_hash";
/// Largest relative difference between a sum of terms and the step, as the verifier of plans allows.
const SUM_TOLERANCE: f64 = 1e-9;

/// The same quantity of both plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sides<T> {
    /// The first plan's.
    pub a: T,
    /// The second plan's.
    pub b: T,
}

/// What the times are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A step.
    Step,
    /// A million tokens.
    MillionTokens,
}

/// What a difference belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// The model.
    Model,
    /// Sequence length and batch.
    Workload,
    /// GPUs, cluster, device.
    Cluster,
    /// Software.
    Stack,
    /// The choices, the stage split included.
    Strategy,
}

/// A named value in which the plans differ.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// What it belongs to.
    pub subject: Subject,
    /// Name as in `plan --json`, or the path of a model's field.
    pub name: String,
    /// Both values; null where a plan has none.
    pub values: Sides<Value>,
}

/// What keeps a plan from being faster.
#[derive(Clone, Debug, PartialEq)]
pub struct Limit {
    /// The fullest stage.
    pub stage: StageId,
    /// Its share of the usable memory.
    pub memory_share: f64,
    /// What binds it as its search found, the heaviest first.
    pub bindings: Vec<Binding>,
    /// What binds, in words.
    pub sentence: String,
}

/// A comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// What the times are of.
    pub unit: Unit,
    /// Values that differ.
    pub differences: Vec<Difference>,
    /// Seconds by cause; a cause that one plan lacks is zero there.
    pub terms: Vec<(TimeTerm, Sides<Seconds>)>,
    /// Seconds altogether.
    pub total: Sides<Seconds>,
    /// GPU-hours of a billion tokens.
    pub gpu_hours: Sides<f64>,
    /// Memory of the fullest stage, by use.
    pub memory: Vec<(MemoryTerm, Sides<Bytes>)>,
    /// What binds each plan.
    pub limits: Sides<Limit>,
    /// What the reader should keep in mind.
    pub remarks: Vec<String>,
}

impl<T> Sides<T> {
    /// Both values of a function.
    pub fn of(plans: Sides<&Plan>, value: impl Fn(&Plan) -> T) -> Sides<T> {
        Sides { a: value(plans.a), b: value(plans.b) }
    }
}

impl Sides<Seconds> {
    /// Seconds that the second takes more.
    pub fn more(self) -> f64 {
        self.b.0 - self.a.0
    }
}

impl Subject {
    /// All subjects, in the order of reports.
    pub const ALL: [Subject; 5] =
        [Subject::Model, Subject::Workload, Subject::Cluster, Subject::Stack, Subject::Strategy];

    /// The word used in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Subject::Model => "model",
            Subject::Workload => "workload",
            Subject::Cluster => "cluster",
            Subject::Stack => "stack",
            Subject::Strategy => "strategy",
        }
    }
}

/// Compares two verified plans.
pub fn compare(a: &Plan, b: &Plan) -> Comparison {
    let plans = Sides { a, b };
    let tokens = Sides::of(plans, step_tokens);
    let unit = if tokens.a == tokens.b { Unit::Step } else { Unit::MillionTokens };
    let scale = Sides::of(plans, |plan| match unit {
        Unit::Step => 1.0,
        Unit::MillionTokens => UNIT_TOKENS / step_tokens(plan),
    });
    let in_unit = |seconds: Sides<Seconds>| Sides { a: seconds.a * scale.a, b: seconds.b * scale.b };
    let terms = time_terms(&a.estimate, &b.estimate).into_iter();
    let terms: Vec<_> = terms.map(|(term, seconds)| (term, in_unit(seconds))).collect();
    let total = in_unit(Sides::of(plans, |plan| plan.estimate.step));
    let sum: f64 = terms.iter().map(|(_, seconds)| seconds.more()).sum();
    assert!(
        (sum - total.more()).abs() <= SUM_TOLERANCE * (total.a.0 + total.b.0),
        "the verifier has checked that the terms of each plan add up to its step"
    );
    let differences = differences(plans);
    Comparison {
        unit,
        terms,
        total,
        gpu_hours: Sides::of(plans, gpu_hours),
        memory: fullest_memory(plans),
        limits: Sides::of(plans, limit),
        remarks: remarks(&differences, unit),
        differences,
    }
}

fn step_tokens(plan: &Plan) -> f64 {
    plan.workload.global_batch as f64 * plan.workload.sequence_length as f64
}

fn gpu_hours(plan: &Plan) -> f64 {
    1e9 / plan.estimate.tokens_per_second_per_gpu / 3600.0
}

/// Seconds of a step by cause in two estimates; a cause that one lacks is zero there.
pub fn time_terms(a: &Estimate, b: &Estimate) -> Vec<(TimeTerm, Sides<Seconds>)> {
    let names: BTreeSet<TimeTerm> = a.terms.keys().chain(b.terms.keys()).copied().collect();
    let time = |estimate: &Estimate, term| estimate.terms.get(&term).map_or(Seconds(0.0), |found| found.time);
    names.into_iter().map(|term| (term, Sides { a: time(a, term), b: time(b, term) })).collect()
}

/// Uses of memory on the fullest stage of each plan.
fn fullest_memory(plans: Sides<&Plan>) -> Vec<(MemoryTerm, Sides<Bytes>)> {
    let held = |plan: &Plan, term| {
        let stage = plan.stages.iter().find(|stage| stage.stage == plan.estimate.fullest_stage);
        stage.and_then(|stage| stage.memory.get(&term)).copied().unwrap_or(Bytes(0))
    };
    let stages = plans.a.stages.iter().chain(&plans.b.stages);
    let names: BTreeSet<MemoryTerm> = stages.flat_map(|stage| stage.memory.keys().copied()).collect();
    names.into_iter().map(|term| (term, Sides::of(plans, |plan| held(plan, term)))).collect()
}

/// What binds a plan: as its search found, whose predictions on other machines a plan file alone does not allow.
fn limit(plan: &Plan) -> Limit {
    let stage = plan.estimate.fullest_stage;
    let memory_share = plan.estimate.device_memory.0 as f64 / plan.inputs.usable_memory.0 as f64;
    let bindings = plan.search.limits.clone();
    let words = match in_words(&bindings, stage.0) {
        Some(words) => words,
        None if bindings.is_empty() => "limits that its file does not name".to_owned(),
        None => "nothing but the speed of matrix products".to_owned(),
    };
    let sentence = format!("{words}; stage {} uses {:.0} % of the usable memory", stage.0, memory_share * 100.0);
    Limit { stage, memory_share, bindings, sentence }
}

fn remarks(differences: &[Difference], unit: Unit) -> Vec<String> {
    let differs = |subject| differences.iter().any(|difference| difference.subject == subject);
    let mut remarks = Vec::new();
    if differs(Subject::Model) {
        remarks.push("the models differ: the times say what a token costs in each, not which layout is better");
    }
    if unit == Unit::MillionTokens {
        remarks.push("the steps hold different numbers of tokens: times are those of a million tokens");
    }
    if differs(Subject::Cluster) {
        remarks.push("the clusters differ: GPU-hours compare what is paid for, not the layouts alone");
    }
    if differs(Subject::Stack) {
        remarks.push("the stacks differ: a part of each difference is the software's, not the layout's");
    }
    remarks.into_iter().map(str::to_owned).collect()
}

fn differences(plans: Sides<&Plan>) -> Vec<Difference> {
    let mut found = Vec::new();
    for subject in Subject::ALL {
        let facts = Sides::of(plans, |plan| facts(plan, subject));
        let names: BTreeSet<&String> = facts.a.keys().chain(facts.b.keys()).collect();
        let value = |side: &Map<String, Value>, name: &str| side.get(name).cloned().unwrap_or(Value::Null);
        let values = |name: &str| Sides { a: value(&facts.a, name), b: value(&facts.b, name) };
        let differs = |name: &str| values(name).a != values(name).b;
        // A hash says something only of profiles that have the same name, and no recomputation is none in any split.
        let told = |name: &str| {
            let values = values(name);
            name.strip_suffix(HASH).is_some_and(differs) || (all_zero(&values.a) && all_zero(&values.b))
        };
        for name in names.into_iter().filter(|name| differs(name) && !told(name)) {
            found.push(Difference { subject, name: name.clone(), values: values(name) });
        }
    }
    found
}

fn all_zero(value: &Value) -> bool {
    value.as_array().is_some_and(|items| items.iter().all(|item| item.as_u64() == Some(0)))
}

/// A plan's named values of one subject.
fn facts(plan: &Plan, subject: Subject) -> Map<String, Value> {
    let inputs = &plan.inputs;
    let value = match subject {
        Subject::Model => {
            let mut fields = Map::new();
            let model = serde_json::to_value(&plan.model).expect("a model has text keys and finite numbers");
            flatten("", &model, &mut fields);
            fields.remove("source");
            return fields;
        }
        Subject::Workload => serde_json::to_value(plan.workload).expect("a workload is two numbers"),
        Subject::Cluster => json!({
            "gpus": plan.mesh.world_size(),
            "node_gpus": inputs.node_gpus,
            "fast_domain_gpus": inputs.fast_domain_gpus,
            "cluster": inputs.cluster,
            "cluster_hash": inputs.cluster_hash,
            "device": inputs.device,
            "device_hash": inputs.device_hash,
        }),
        Subject::Stack => json!({"stack": inputs.stack, "stack_hash": inputs.stack_hash}),
        Subject::Strategy => strategy_value(&plan.strategy, &plan.executable),
    };
    match value {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

/// The leaves of a value by their paths.
fn flatten(path: &str, value: &Value, leaves: &mut Map<String, Value>) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                flatten(&path, field, leaves);
            }
        }
        leaf => {
            leaves.insert(path.to_owned(), leaf.clone());
        }
    }
}
