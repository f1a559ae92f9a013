//! Ranks of the real `execute-plan` that are killed, stopped or abort in the middle of a step, and runs that are
//! asked to end: all other ranks say who was missing and end in time, and no process is left.

#[path = "support/programs.rs"]
mod programs;
mod support;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStderr, ExitStatus, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use ir::model::ModelSpec;
use programs::{command, degrees, plan, write};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use support::small::{Family, Shape, small_model};
use tempfile::TempDir;

const RANKS: u64 = 8;
/// What `--timeout` says here.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Time that ranks have to end after the timeout, and local ranks after the request to end.
const GRACE: Duration = Duration::from_secs(2);

/// One run at a time starts, so that all get to their steps on a small machine.
static START: Mutex<()> = Mutex::new(());

/// A run without end on eight ranks, at some point of a step.
struct Run {
    parent: Child,
    ranks: BTreeMap<u64, Pid>,
    stderr: BufReader<ChildStderr>,
    _folder: TempDir,
}

/// Starts a run, and gives it back some time after its second step.
fn start(delay: Duration) -> Run {
    let folder = TempDir::new().expect("a scratch folder");
    let shape = Shape { family: Family::Gpt2, tied: true, heads: 8, key_value_heads: 8, layers: 4, vocabulary: 211 };
    let model: ModelSpec = small_model(shape);
    write(folder.path(), "plan", &plan(&model, 8, 32, degrees(2, 2, 2)));
    let _one = START.lock();
    let mut command = command(folder.path(), "plan --synthetic --steps 1000000000 --timeout 5");
    // A group of its own, as a shell gives one to each command.
    let mut parent = command.stderr(Stdio::piped()).process_group(0).spawn().expect("the program starts");
    let mut stderr = BufReader::new(parent.stderr.take().expect("a pipe"));
    let mut line = String::new();
    while !line.contains("step 2/") {
        line.clear();
        assert!(stderr.read_line(&mut line).expect("a text") > 0, "the run ended too early");
    }
    let ranks = ranks_of(parent.id());
    assert!(ranks.keys().copied().eq(0..RANKS), "{ranks:?}");
    thread::sleep(delay);
    Run { parent, ranks, stderr, _folder: folder }
}

/// The children of a process by the rank that their environment names.
fn ranks_of(parent: u32) -> BTreeMap<u64, Pid> {
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).expect("a running process");
    let rank = |process: &str| {
        let environment = fs::read(format!("/proc/{process}/environ")).expect("a running process");
        let number = environment.split(|byte| *byte == 0).find_map(|variable| variable.strip_prefix(b"RANK="));
        String::from_utf8_lossy(number.expect("a rank")).parse().expect("a number")
    };
    let process = |text: &str| text.parse().ok().and_then(Pid::from_raw).expect("a process");
    children.split_whitespace().map(|text| (rank(text), process(text))).collect()
}

/// Whether a process is there and is more than an entry that nobody has asked for its exit code.
fn is_running(process: Pid) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/stat", process.as_raw_nonzero()));
    status.is_ok_and(|status| !status.rsplit(')').next().unwrap_or_default().trim_start().starts_with('Z'))
}

fn signal(process: Pid, signal: Signal) {
    kill_process(process, signal).expect("a process of this test");
}

impl Run {
    fn parent(&self) -> Pid {
        Pid::from_child(&self.parent)
    }

    /// Waits until the ranks have ended for which `which` is true.
    fn await_ranks(&self, name: &str, time: Duration, which: impl Fn(u64) -> bool) {
        let deadline = Instant::now() + time;
        let left = || self.ranks.iter().filter(|(rank, process)| which(**rank) && is_running(**process));
        while left().next().is_some() {
            assert!(Instant::now() < deadline, "{name}: ranks {:?} did not end in time", left().collect::<Vec<_>>());
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// The parent's end and what was said since the second step.
    fn end(&mut self) -> (ExitStatus, String) {
        let mut text = String::new();
        self.stderr.read_to_string(&mut text).expect("messages are UTF-8");
        (self.parent.wait().expect("a process of this test"), text)
    }
}

impl Drop for Run {
    /// A test that fails leaves no run behind.
    fn drop(&mut self) {
        self.parent.kill().ok();
        self.parent.wait().ok();
    }
}

/// The message of a rank, whose lines come behind its prefix.
fn message(text: &str, rank: u64) -> String {
    let prefix = format!("[rank {rank}] ");
    text.lines().filter_map(|line| line.strip_prefix(&prefix)).collect::<Vec<_>>().join("\n")
}

/// The fate of one rank ends all others in time; they name it, its last instruction and its last collective.
fn check_lost(lost: u64, fate: Signal, delay: u64, expected: &str) {
    let mut run = start(Duration::from_millis(delay));
    let name = format!("{fate:?} of rank {lost} after {delay} ms");
    signal(run.ranks[&lost], fate);
    run.await_ranks(&name, TIMEOUT + GRACE, |rank| rank != lost);
    run.await_ranks(&name, 3 * GRACE, |_| true);
    let (status, text) = run.end();
    assert_eq!(status.code(), Some(4), "{name}: {text}");
    for rank in (0..RANKS).filter(|rank| *rank != lost) {
        let message = message(&text, rank);
        let pieces = [&format!("error: rank {lost} {expected}"), "last instruction: ", ", last collective: "];
        assert!(pieces.iter().all(|piece| message.contains(*piece)), "{name}, rank {rank}: {text}");
        assert!(!message.contains(": none"), "{name}, rank {rank}: the lost rank reported nothing\n{text}");
    }
}

const ENDED: &str = "was lost: its process or connection ended";
const SILENT: &str = "was lost: no sign of life for ";

#[test]
fn killed_ranks_are_named() {
    for (lost, delay) in [(0, 13), (3, 0), (6, 57), (7, 31)] {
        check_lost(lost, Signal::KILL, delay, ENDED);
    }
}

#[test]
fn ranks_that_abort_are_named() {
    for (lost, delay) in [(0, 41), (5, 7)] {
        check_lost(lost, Signal::ABORT, delay, ENDED);
    }
}

#[test]
fn stopped_ranks_are_named() {
    // Mostly waiting, so all at once.
    thread::scope(|scope| {
        for (lost, delay) in [(0, 23), (2, 3), (7, 47)] {
            scope.spawn(move || check_lost(lost, Signal::STOP, delay, SILENT));
        }
    });
}

/// Who is told to end.
#[derive(Clone, Copy, Debug)]
enum To {
    Parent,
    /// All processes of a command, as by Ctrl-C.
    Group,
}

#[test]
fn runs_end_when_they_are_asked_to() {
    // With a rank that does not react, and without.
    let rows = [
        (To::Parent, Signal::TERM, "SIGTERM", 143, None),
        (To::Parent, Signal::INT, "SIGINT", 130, None),
        (To::Group, Signal::INT, "SIGINT", 130, None),
        (To::Parent, Signal::TERM, "SIGTERM", 143, Some(4)),
        // Passed on as it is; it ends ranks that make nothing of it.
        (To::Parent, Signal::USR1, "SIGUSR1", 138, None),
    ];
    for (to, request, called, code, stopped) in rows {
        let mut run = start(Duration::from_millis(20));
        let name = format!("{request:?} to {to:?}, {stopped:?} stopped");
        if let Some(rank) = stopped {
            signal(run.ranks[&rank], Signal::STOP);
        }
        match to {
            To::Parent => signal(run.parent(), request),
            To::Group => kill_process_group(run.parent(), request).expect("a group of this test"),
        }
        run.await_ranks(&name, 2 * GRACE, |_| true);
        let (status, text) = run.end();
        assert_eq!(status.code(), Some(code), "{name}: {text}");
        assert!(text.contains(&format!("error: {called} stopped the run before its end\n")), "{name}: {text}");
    }
}

#[test]
fn ranks_do_not_outlive_a_killed_parent() {
    let mut run = start(Duration::from_millis(5));
    signal(run.parent(), Signal::KILL);
    run.await_ranks("a killed parent", GRACE, |_| true);
    let (status, text) = run.end();
    assert_eq!(status.signal(), Some(9), "{text}");
}

#[test]
fn a_lone_rank_ends_by_the_signal() {
    let folder = TempDir::new().expect("a scratch folder");
    let shape = Shape { family: Family::Bloom, tied: true, heads: 4, key_value_heads: 4, layers: 1, vocabulary: 19 };
    write(folder.path(), "plan", &plan(&small_model(shape), 8, 8, degrees(1, 1, 1)));
    let status = end_of_lone_rank(folder.path());
    assert_eq!(status.signal(), Some(15), "{status:?}");
}

fn end_of_lone_rank(folder: &Path) -> ExitStatus {
    let mut command = command(folder, "plan --synthetic --steps 1000000000 --log log");
    let mut child = command.stderr(Stdio::null()).spawn().expect("the program starts");
    while fs::metadata(folder.join("log")).map_or(0, |log| log.len()) == 0 {
        assert!(child.try_wait().expect("a process of this test").is_none(), "the run ended too early");
        thread::sleep(Duration::from_millis(5));
    }
    signal(Pid::from_child(&child), Signal::TERM);
    child.wait().expect("a process of this test")
}
