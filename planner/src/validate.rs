//! Predictions of measured runs: a table's rows read, predicted from their layouts alone, and compared.

pub mod case;
mod families;
pub mod summary;
pub mod table;

use std::collections::BTreeMap;

use cost_models::memory::StageMemory;
use ir::plan::TimeTerm;
use ir::strategy::Strategy;
use ir::units::{Bytes, Seconds};

use crate::interval::{Circumstances, interval};
use crate::request::Request;
use crate::search::{Scored, score_as_run};
use case::{Case, prepare};
use table::Row;

/// How far predicted memory may exceed the device's for a layout to count as possible: the run took place, so that
/// an unstated choice is the fastest that is not clearly impossible.
const DOUBT: f64 = 1.6;

/// What a run should take.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// Seconds of a step.
    pub step: Seconds,
    /// 90 % interval of it.
    pub interval: (Seconds, Seconds),
    /// Memory of the fullest rank as the driver counts it.
    pub device_memory: Bytes,
    /// The same as the framework's allocator counts it.
    pub allocator_peak: Bytes,
    /// Whether it fits into the device.
    pub fits: bool,
    /// Name of the stack.
    pub stack: String,
    /// The layout that was predicted, blank cells filled in.
    pub strategy: Strategy,
    /// Seconds by cause.
    pub terms: BTreeMap<TimeTerm, Seconds>,
}

/// A row with its prediction, or why there is none.
#[derive(Clone, Debug)]
pub struct Validated {
    /// The row.
    pub row: Row,
    /// Its prediction.
    pub prediction: Result<Prediction, String>,
}

/// Predicts every row of a table.
pub fn validate(rows: Vec<Row>) -> Vec<Validated> {
    rows.into_iter()
        .map(|row| {
            let prediction = prepare(&row.run).and_then(|case| predict(&case));
            Validated { row, prediction }
        })
        .collect()
}

/// Predicts a prepared run: of the layouts that it leaves possible the fastest, else the leanest.
///
/// # Errors
/// Why the layout cannot be represented.
pub fn predict(case: &Case) -> Result<Prediction, String> {
    let scored: Vec<Scored> =
        case.layouts.iter().filter_map(|layout| score_as_run(&case.request, &case.graph, layout)).collect();
    let usable = case.request.machine.usable_memory();
    let fits = |scored: &Scored| scored.fullest_stage().1 <= usable;
    let possible = usable.scale(DOUBT);
    let fastest = scored.iter().filter(|scored| scored.fullest_stage().1 <= possible);
    let fastest = fastest.min_by(|a, b| a.prediction.step.0.total_cmp(&b.prediction.step.0));
    let leanest = || scored.iter().min_by_key(|scored| scored.fullest_stage().1);
    let Some(chosen) = fastest.or_else(leanest) else { return Err("its layers cannot be split so".to_owned()) };
    let step = chosen.prediction.step;
    Ok(Prediction {
        step,
        interval: interval(step, circumstances(case)),
        device_memory: chosen.fullest_stage().1,
        allocator_peak: chosen.memory.iter().map(StageMemory::allocator_peak).max().unwrap_or(Bytes(0)),
        fits: fits(chosen),
        stack: case.request.machine.stack.name.clone(),
        strategy: chosen.strategy.clone(),
        terms: chosen.prediction.terms.clone(),
    })
}

/// What a case's interval depends on.
pub fn circumstances(case: &Case) -> Circumstances<'_> {
    let Request { machine, model, gpus, .. } = &case.request;
    let framework = Some(case.framework.as_str()).filter(|name| !name.is_empty());
    Circumstances { machine, dtype: model.dtype, gpus: *gpus, framework, open: case.open }
}
