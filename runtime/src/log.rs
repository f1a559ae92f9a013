//! What a run says of its steps: JSON lines for programs, one line a step for people.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use ir::error::Problem;
use ir::plan::Estimate;
use ir::units::{Bytes, Seconds};
use serde::{Deserialize, Serialize};

/// One step, as a line of `--log` has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Step, from 1.
    pub step: u64,
    /// Mean loss over the tokens of the step.
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Learning rate that the step used.
    pub learning_rate: f64,
    /// Tokens of the step over all ranks.
    pub tokens: u64,
    /// Time of the step.
    pub seconds: f64,
    /// Payload that ranks sent one another in the step, over all ranks.
    pub bytes_sent: u64,
    /// Largest rank's peak of live tensor buffers so far.
    pub peak_tensor_bytes: u64,
    /// Model FLOPs over time, ranks and dense peak; absent if the plan knows no peak.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Time of the step by the plan; absent while the batch is smaller than the plan's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_seconds: Option<f64>,
    /// Mean loss of the evaluation that followed the step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluation_loss: Option<f64>,
}

/// A log file that grows line by line.
#[derive(Debug)]
pub struct Log {
    file: File,
    path: PathBuf,
}

impl Log {
    /// Starts a log. What an earlier run wrote into the file stays as it is, unless `replace` says that it may go.
    ///
    /// # Errors
    /// A file that is not empty and may not be replaced, or cannot be written.
    pub fn create(path: &Path, replace: bool) -> Result<Log, Problem> {
        let wrong = |error: std::io::Error| cannot_write(path, &error);
        let file = OpenOptions::new().append(true).create(true).open(path).map_err(wrong)?;
        let length = file.metadata().map_err(wrong)?.len();
        match (length > 0, replace) {
            (true, true) => file.set_len(0).map_err(wrong)?,
            (true, false) => {
                let what = format!("the log holds {} of an earlier run", Bytes(length));
                let help = "name another file for this run, or give --force to replace it";
                return Err(Problem::new(what, path.display().to_string(), help));
            }
            (false, _) => {}
        }
        Ok(Log { file, path: path.to_owned() })
    }

    /// Appends a step in one write, so that a reader never sees half of it but in a crash of the machine.
    ///
    /// # Errors
    /// A full disk.
    pub fn write(&mut self, record: &StepRecord) -> Result<(), Problem> {
        let mut line = serde_json::to_string(record).expect("plain numbers always have a JSON form");
        line.push('\n');
        self.file.write_all(line.as_bytes()).map_err(|error| cannot_write(&self.path, &error))
    }
}

fn cannot_write(path: &Path, error: &std::io::Error) -> Problem {
    let what = format!("cannot write the log: {error}");
    Problem::new(what, path.display().to_string(), "name a file in a folder that can be written to")
}

/// MFU of a measured step: the plan's, times planned over measured time, times the part of the plan's batch that
/// was processed. `None` if the plan gives none.
///
/// The plan's MFU is model FLOPs over step time, ranks and dense peak, so ranks and peak cancel.
pub fn measured_mfu(estimate: &Estimate, seconds: f64, batch_fraction: f64) -> Option<f64> {
    let mfu = estimate.mfu * estimate.step.0 / seconds * batch_fraction;
    (estimate.mfu > 0.0 && mfu.is_finite()).then_some(mfu)
}

/// The line before the first step: what the columns mean and how MFU is computed.
pub fn opening_line(estimate: &Estimate, ranks: u64) -> String {
    format!("{ranks} ranks; the plan expects {} a step; MFU = {}", estimate.step, estimate.mfu_formula)
}

/// A step as people read it; `last` is the number of the run's last step.
pub fn progress_line(record: &StepRecord, last: u64) -> String {
    let mut parts = vec![
        format!("step {}/{last}", record.step),
        format!("loss {:.4}", record.loss),
        format!("gradient norm {:.3}", record.grad_norm),
        format!("learning rate {:.3e}", record.learning_rate),
        format!("{} tokens/s", thousands(record.tokens as f64 / record.seconds)),
        step_time(record),
    ];
    parts.extend(record.mfu.map(|mfu| format!("MFU {:.1} %", mfu * 100.0)));
    parts.push(format!("tensors {}", Bytes(record.peak_tensor_bytes)));
    parts.extend(record.evaluation_loss.map(|loss| format!("evaluation loss {loss:.4}")));
    parts.join(" | ")
}

fn step_time(record: &StepRecord) -> String {
    let measured = Seconds(record.seconds);
    match record.predicted_seconds {
        Some(predicted) => {
            let deviation = (record.seconds / predicted - 1.0) * 100.0;
            format!("{measured} (plan {}, {deviation:+.0} %)", Seconds(predicted))
        }
        None => measured.to_string(),
    }
}

/// A rate with three digits and a unit of thousands: 950, 12.3 k, 4.56 M.
fn thousands(rate: f64) -> String {
    let (value, unit) = match rate {
        rate if rate >= 1e6 => (rate / 1e6, " M"),
        rate if rate >= 1e3 => (rate / 1e3, " k"),
        rate => (rate, ""),
    };
    let digits = if value < 10.0 {
        2
    } else if value < 100.0 {
        1
    } else {
        0
    };
    format!("{value:.digits$}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::plan::read_plan;

    fn record(step: u64) -> StepRecord {
        StepRecord {
            step,
            loss: 5.25,
            grad_norm: 1.5,
            learning_rate: 3e-4,
            tokens: 4096,
            seconds: 0.125,
            bytes_sent: 1 << 20,
            peak_tensor_bytes: 3 << 30,
            mfu: None,
            predicted_seconds: None,
            evaluation_loss: None,
        }
    }

    fn estimate() -> Estimate {
        let path = format!("{}/../tests/golden/gpt2-8.plan.ron", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(path).expect("the golden plan exists");
        read_plan(&text, "golden").expect("sound").estimate
    }

    #[test]
    fn lines_hold_the_promised_fields() {
        let found = serde_json::to_string(&record(1)).expect("plain numbers");
        let expected = concat!(
            r#"{"step":1,"loss":5.25,"grad_norm":1.5,"learning_rate":0.0003,"tokens":4096,"seconds":0.125,"#,
            r#""bytes_sent":1048576,"peak_tensor_bytes":3221225472}"#
        );
        assert_eq!(found, expected);
    }

    #[test]
    fn a_log_grows_and_replaces_another_only_if_told_to() {
        let folder = tempfile::TempDir::new().expect("a scratch folder");
        let path = folder.path().join("run.jsonl");
        let read = || std::fs::read_to_string(&path).expect("readable");
        let line = |step| serde_json::to_string(&record(step)).expect("plain numbers") + "\n";
        std::fs::write(&path, "").expect("writable");
        for (replace, first) in [(false, 1), (true, 5)] {
            let mut log = Log::create(&path, replace).expect("nothing is in the way");
            (first..first + 2).for_each(|step| log.write(&record(step)).expect("written"));
            assert_eq!(read(), line(first) + &line(first + 1));
            let problem = Log::create(&path, false).expect_err("there is a log");
            assert!(problem.what.ends_with(" of an earlier run"), "{problem}");
            assert_eq!(read(), line(first) + &line(first + 1), "an earlier log stays");
        }
        let problem = Log::create(folder.path(), true).expect_err("a folder is no log");
        assert!(problem.what.contains("cannot write the log"), "{problem}");
    }

    #[test]
    fn progress_lines_read_well() {
        let full =
            StepRecord { mfu: Some(0.4123), predicted_seconds: Some(0.1), evaluation_loss: Some(5.5), ..record(7) };
        let expected =
            "step 7/20 | loss 5.2500 | gradient norm 1.500 | learning rate 3.000e-4 | 32.8 k tokens/s | 125.0 ms";
        assert_eq!(progress_line(&record(7), 20), format!("{expected} | tensors 3.0 GiB"));
        let more = "(plan 100.0 ms, +25 %) | MFU 41.2 % | tensors 3.0 GiB | evaluation loss 5.5000";
        assert_eq!(progress_line(&full, 20), format!("{expected} {more}"));
        for (rate, expected) in
            [(0.5, "0.50"), (950.0, "950"), (1234.0, "1.23 k"), (123_456.0, "123 k"), (4.56e6, "4.56 M")]
        {
            assert_eq!(thousands(rate), expected);
        }
    }

    #[test]
    fn mfu_follows_time_and_batch() {
        let estimate = estimate();
        let rows = [(1.0, 1.0, 1.0), (2.0, 1.0, 0.5), (0.5, 0.25, 0.5)];
        for (slower, batch_fraction, expected) in rows {
            let found = measured_mfu(&estimate, estimate.step.0 * slower, batch_fraction).expect("the plan has an MFU");
            assert!((found / estimate.mfu - expected).abs() < 1e-12, "{slower} {batch_fraction}: {found}");
        }
        assert_eq!(measured_mfu(&Estimate { mfu: 0.0, ..estimate.clone() }, 1.0, 1.0), None);
        assert!(opening_line(&estimate, 8).starts_with("8 ranks; the plan expects "));
        assert!(opening_line(&estimate, 8).ends_with(&estimate.mfu_formula));
    }
}
