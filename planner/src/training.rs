//! A whole training: steps for a number of tokens, what failures add, and what it takes.

use cost_models::goodput::{Interruptions, checkpoint_interval, goodput};
use ir::provenance::Provenance;
use ir::units::{Bytes, Seconds};

use crate::objective::{Expense, expense};
use crate::request::Request;

/// A training of a number of tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Training {
    /// Tokens asked for.
    pub tokens: u64,
    /// Steps, the last one perhaps of fewer new tokens.
    pub steps: u64,
    /// If nothing ever fails and nothing is saved.
    pub undisturbed: Seconds,
    /// Failures and checkpoints, if the cluster tells them.
    pub failures: Option<Failures>,
    /// What it takes, failures and checkpoints included as far as they are known.
    pub expense: Expense,
}

/// Failures and checkpoints of a training.
#[derive(Clone, Debug, PartialEq)]
pub struct Failures {
    /// Mean times of failure, checkpoint and restart.
    pub interruptions: Interruptions,
    /// Size of a checkpoint.
    pub checkpoint: Bytes,
    /// Steps between two checkpoints.
    pub interval_steps: u64,
    /// The time of these steps.
    pub interval: Seconds,
    /// Share of the time in which steps are made that stay.
    pub goodput: f64,
    /// Expected failures.
    pub count: f64,
    /// Weakest origin of the cluster's numbers.
    pub provenance: Provenance,
}

/// A training of `tokens` in steps of `step`, with checkpoints of `checkpoint` bytes.
pub fn training(request: &Request, tokens: u64, step: Seconds, checkpoint: Bytes) -> Training {
    let per_step = request.workload.global_batch.saturating_mul(request.workload.sequence_length).max(1);
    let steps = tokens.div_ceil(per_step);
    let undisturbed = step * steps as f64;
    let failures = failures(request, step, checkpoint, undisturbed);
    let time = failures.as_ref().map_or(undisturbed, |failures| Seconds(undisturbed.0 / failures.goodput));
    Training { tokens, steps, undisturbed, expense: expense(&request.machine, request.gpus, time), failures }
}

fn failures(request: &Request, step: Seconds, checkpoint: Bytes, undisturbed: Seconds) -> Option<Failures> {
    let reliability = request.machine.cluster.reliability.as_ref()?;
    let each = &reliability.mean_time_between_failures_per_gpu;
    let write = &reliability.checkpoint_write_per_node;
    let nodes = (request.gpus / request.machine.node_gpus).max(1);
    let interruptions = Interruptions {
        mean_time_between_failures: Seconds(each.value.0 / request.gpus as f64),
        checkpoint: checkpoint / (write.value * nodes as f64),
        restart: reliability.restart.value,
    };
    let interval_steps = (checkpoint_interval(interruptions).0 / step.0).round().max(1.0);
    let interval = step * interval_steps;
    let goodput = goodput(interruptions, interval);
    Some(Failures {
        interruptions,
        checkpoint,
        interval_steps: interval_steps as u64,
        interval,
        goodput,
        count: undisturbed.0 / goodput / interruptions.mean_time_between_failures.0,
        provenance: each.provenance.min(write.provenance).min(reliability.restart.provenance),
    })
}

/// Reads a number of tokens: a whole number, or a number with suffix K, M, B or T (10³, 10⁶, 10⁹, 10¹²).
///
/// # Errors
/// What is wrong with the text, in words.
pub fn read_tokens(text: &str) -> Result<u64, String> {
    let wrong = || "give a number of tokens, such as 300B, 1.4T or 20000000 (suffixes K, M, B, T)".to_owned();
    let (number, exponent) = match text.chars().last().map(|last| last.to_ascii_uppercase()) {
        Some('K') => (&text[..text.len() - 1], 3),
        Some('M') => (&text[..text.len() - 1], 6),
        Some('B') => (&text[..text.len() - 1], 9),
        Some('T') => (&text[..text.len() - 1], 12),
        _ => (text, 0),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || number.contains('.') && !digits(fraction) {
        return Err(wrong());
    }
    let fraction = fraction.trim_end_matches('0');
    if fraction.len() > exponent {
        return Err(format!("{text} is no whole number of tokens"));
    }
    let padded = format!("{whole}{fraction}{}", "0".repeat(exponent - fraction.len()));
    match padded.parse() {
        Ok(0) => Err("give at least 1 token".to_owned()),
        Ok(tokens) => Ok(tokens),
        Err(_) => Err(format!("{text} is more than {} tokens", u64::MAX)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_read_exactly() {
        let rows = [
            ("1", 1),
            ("20000000", 20_000_000),
            ("300B", 300_000_000_000),
            ("366b", 366_000_000_000),
            ("1.4T", 1_400_000_000_000),
            ("0.5K", 500),
            ("1.250M", 1_250_000),
            ("007", 7),
            ("18446744073709551615", u64::MAX),
        ];
        for (text, expected) in rows {
            assert_eq!(read_tokens(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        let rows =
            ["", "B", ".5B", "5.B", "1e9", "-3B", "+3B", "3 B", "3G", "0", "0.0T", "1.5", "1.2345K", "٣B", "99999999T"];
        for text in rows {
            assert!(read_tokens(text).is_err(), "{text}");
        }
    }
}
