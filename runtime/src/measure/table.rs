//! The table "predicted against measured" at the end of a run.

use ir::plan::{Estimate, TimeTerm};
use ir::units::{Bytes, Seconds};

use super::Typical;
use crate::executor::{Account, Phase, Times};

/// Predicted and measured seconds of a part of the step.
struct Row {
    name: &'static str,
    predicted: f64,
    measured: f64,
}

/// The table. The measured parts are those of the rank that waits least for other stages, as the plan's are those
/// of the slowest stage. Each is a median of its own, so that they need not add up to the step.
///
/// Of a step on devices, whose memory is given, there is only the whole: the host sends kernels ahead of them.
pub fn comparison(estimate: &Estimate, typical: &Typical, device_memory: Option<Bytes>) -> String {
    let ranks = typical.times.len();
    let waiting = |rank: &usize| typical.times[*rank].of(Account::Pipeline);
    let slowest = (0..ranks).min_by(|a, b| waiting(a).total_cmp(&waiting(b))).unwrap_or(0);
    let rows = rows(estimate, &typical.times[slowest], typical.seconds);
    let steps = if typical.steps == 1 { "step".to_owned() } else { format!("{} steps", typical.steps) };
    let mut text = format!("predicted against measured, rank {slowest} of {ranks}, median of {steps}:\n");
    text += &format!("  {:<24} {:>10} {:>10}  {}\n", "", "predicted", "measured", "off by, of the step");
    let known = if device_memory.is_some() { rows.len() - 1 } else { 0 };
    for Row { name, predicted, measured } in &rows[known..] {
        let off = (measured - predicted) / typical.seconds * 100.0;
        let [predicted, measured] = [predicted, measured].map(|seconds| Seconds(*seconds).to_string());
        text += &format!("  {name:<24} {predicted:>10} {measured:>10}  {off:+.1} %\n");
    }
    if let Some(measured) = device_memory {
        let [predicted, measured] = [estimate.allocator_peak, measured].map(|bytes| bytes.to_string());
        text += &format!("  {:<24} {predicted:>10} {measured:>10}\n", "tensors, fullest rank");
    }
    text
}

fn rows(estimate: &Estimate, times: &Times, step: f64) -> Vec<Row> {
    let predicted = |terms: &[TimeTerm]| -> f64 {
        terms.iter().filter_map(|term| estimate.terms.get(term)).map(|term| term.time.0).sum()
    };
    let parts = [
        ("compute", &[TimeTerm::Compute][..], times.of_phase(Phase::Forward) + times.of_phase(Phase::Backward)),
        ("recomputation", &[TimeTerm::Recomputation], times.of_phase(Phase::Recomputation)),
        ("tensor communication", &[TimeTerm::TensorCommunication], times.of(Account::Tensor)),
        ("pipeline and bubble", &[TimeTerm::PipelineCommunication, TimeTerm::Bubble], times.of(Account::Pipeline)),
        ("data communication", &[TimeTerm::DataCommunication], times.of(Account::Data)),
        ("optimizer", &[TimeTerm::Optimizer], times.of(Account::Optimizer)),
    ];
    let overhead = times.of(Account::MicroBatch) + times.of(Account::Step);
    let mut rows: Vec<Row> =
        parts.into_iter().map(|(name, terms, measured)| Row { name, predicted: predicted(terms), measured }).collect();
    rows.push(Row { name: "overhead", predicted: predicted(&[TimeTerm::Overhead]), measured: overhead });
    rows.push(Row { name: "step", predicted: estimate.step.0, measured: step });
    rows
}
