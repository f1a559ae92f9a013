//! Why communication ended.

use std::time::Duration;

use ir::error::Problem;
use ir::mesh::Rank;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why a rank cannot communicate, now or any more.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum Error {
    /// The ranks were not started for one run: exit code 2 on all of them.
    #[error("{}", list(.0))]
    BadInput(Vec<Problem>),
    /// A rank or link was lost: exit code 4 on all that are left.
    #[error("error: {0}")]
    Lost(Loss),
}

/// What ended the run, the same on all ranks that rank 0 could tell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Loss {
    /// The first rank that was missing, or that gave up.
    pub rank: u64,
    /// What became of it.
    pub cause: Cause,
    /// What it last reported.
    pub report: Report,
}

/// What became of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// It did not come to the start.
    NeverCame,
    /// Its process or connection ended.
    Ended,
    /// Its process is there but gave no sign of life for so many milliseconds: stopped, or cut off.
    Silent(u64),
    /// It lives but did not take part within so many milliseconds.
    Late(u64),
    /// It panicked.
    Panicked,
    /// It gave up, for a reason of its own.
    Aborted(String),
    /// It called another collective than its group.
    Mismatch(String),
}

/// What a rank says it is doing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The instruction it began last; empty before the first.
    pub instruction: String,
    /// The collective it began last, with its group and number; empty before the first.
    pub collective: String,
    /// Milliseconds since it began the later of the two.
    pub age: u64,
}

impl Error {
    /// The exit code of a rank that ends with this.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::BadInput(_) => 2,
            Error::Lost(_) => 4,
        }
    }
}

impl Loss {
    /// The rank.
    pub fn rank(&self) -> Rank {
        Rank(self.rank)
    }
}

impl std::fmt::Display for Loss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Loss { rank, cause, report } = self;
        let seconds = |millis: u64| Duration::from_millis(millis).as_secs_f64();
        match cause {
            Cause::NeverCame => write!(f, "rank {rank} never came to the start")?,
            Cause::Ended => write!(f, "rank {rank} was lost: its process or connection ended")?,
            Cause::Silent(time) => {
                write!(f, "rank {rank} was lost: no sign of life for {:.1} s", seconds(*time))?;
            }
            Cause::Late(time) => {
                write!(f, "rank {rank} is alive but did not take part for {:.1} s", seconds(*time))?;
            }
            Cause::Panicked => write!(f, "rank {rank} panicked")?,
            Cause::Aborted(reason) => write!(f, "rank {rank} gave up: {reason}")?,
            Cause::Mismatch(what) => write!(f, "rank {rank} and its group disagree: {what}")?,
        }
        let or_none = |text: &str| if text.is_empty() { "none".to_owned() } else { text.to_owned() };
        let (instruction, collective) = (or_none(&report.instruction), or_none(&report.collective));
        write!(
            f,
            "\n  --> last instruction: {instruction}, last collective: {collective}, {:.1} s before",
            seconds(report.age)
        )?;
        write!(f, "\n  help: {}", help(cause))
    }
}

fn help(cause: &Cause) -> &'static str {
    match cause {
        Cause::NeverCame => "start all ranks with the same MASTER_ADDR and MASTER_PORT, and look at that rank's output",
        Cause::Ended | Cause::Panicked => "look at that rank's output and its host's kernel log (out of memory?)",
        Cause::Silent(_) => {
            "look whether its host or the network between the hosts is gone, or the process was stopped"
        }
        Cause::Late(_) => "if it computes for so long, raise --timeout",
        Cause::Aborted(_) => "its own message says how to mend it",
        Cause::Mismatch(_) => "the plan's programs are at fault: `plan check` should refuse them; please report it",
    }
}

fn list(problems: &[Problem]) -> String {
    problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("\n")
}
