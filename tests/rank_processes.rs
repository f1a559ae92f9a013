//! Ranks as real processes: on two hosts, and with one that is killed, stopped or panics, so that all others end
//! in time and name it.
//!
//! The test program starts itself again as its ranks; launcher variables make it one.

#[path = "support/namespaces.rs"]
mod namespaces;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use ir::mesh::Rank;
use ir::program::Direction;
use namespaces::{FIRST_HOST, Namespaces, ip};
use runtime::communicator::{Error, Options, Reduction, Transport, World};
use runtime::launch::local::{Ended, ReservedPort, reserve_port, start_local_ranks};
use runtime::launch::read_launch;
use rustix::process::{Pid, Signal, kill_process};

/// How long any wait of a rank lasts here.
const TIMEOUT: Duration = Duration::from_secs(2);

/// What a rank of this test does: a loop of steps with collectives, messages and started operations, until it is
/// ended. Does nothing in the test run itself.
#[test]
fn rank() {
    let Some(launch) = read_launch(|name| std::env::var(name).ok()).expect("variables of this test") else { return };
    let transport = match std::env::var("RANK_TRANSPORT").as_deref() {
        Ok("tcp") => Transport::Tcp,
        #[cfg(feature = "mpi")]
        Ok("mpi") => Transport::Mpi,
        _ => Transport::Automatic,
    };
    let world = World::connect(&launch, &[], Options { timeout: TIMEOUT, transport }).expect("all ranks come");
    if let Err(error) = run_steps(&world).and_then(|()| world.finish()) {
        eprintln!("{error}");
        std::process::exit(error.exit_code().into());
    }
    std::process::exit(0);
}

#[allow(clippy::print_stdout)]
fn run_steps(world: &World) -> Result<(), Error> {
    let (rank, size) = (world.rank().0, world.size());
    let all = world.group(&(0..size).map(Rank).collect::<Vec<_>>());
    let pair = world.group(&[Rank(rank / 2 * 2), Rank(rank / 2 * 2 + 1)]);
    let panics = std::env::var("RANK_PANICS").is_ok_and(|value| value == rank.to_string());
    let steps: u64 = std::env::var("RANK_STEPS").ok().and_then(|text| text.parse().ok()).unwrap_or(u64::MAX);
    for step in 0..steps {
        world.report(format_args!("forward of step {step} on rank {rank}"));
        let started = pair.start_all_reduce(Reduction::Sum, vec![1.0_f32; 100_000]);
        world.send(Rank((rank + 1) % size), Direction::Activation, vec![rank; 1000])?;
        world.recv(Rank((rank + size - 1) % size), Direction::Activation, &mut [0_u64; 1000])?;
        started.wait()?;
        let mut data = vec![1.0_f32; 10_000];
        all.all_reduce(Reduction::Sum, &mut data)?;
        assert!(data.iter().all(|sum| *sum == size as f32), "the sum over {size} ranks");
        if step == 3 {
            println!("ready");
        }
        assert!(!(panics && step == 5), "as the test wants");
    }
    Ok(())
}

/// Starts local ranks that run a script, when another test asks for it, and ends with their exit code.
#[test]
fn parent() {
    if let Ok(script) = std::env::var("PARENT_OF_RANKS") {
        let ended = start_local_ranks(Path::new("/bin/sh"), &["-c".into(), script.into()], 2);
        match ended.expect("sh can be started") {
            Ended::With(code) => std::process::exit(code),
            Ended::Stopped(signal) => std::process::exit(128 + i32::from(signal.number())),
        }
    }
}

fn start_parent(script: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().expect("a running program has a file"));
    command.args(["--exact", "parent", "--nocapture"]).env("PARENT_OF_RANKS", script).stdout(Stdio::piped());
    command.spawn().expect("this program starts")
}

#[test]
fn ranks_hear_of_the_parents_signals() {
    // A rank that acts on SIGUSR1 and goes on until SIGTERM.
    let script = "trap 'echo saved' USR1; trap 'exit 6' TERM; echo started; while :; do sleep 0.02; done";
    let mut parent = start_parent(script);
    let mut lines = BufReader::new(parent.stdout.take().expect("a pipe")).lines();
    let mut await_both = |wanted: &str| {
        let mut ranks = BTreeSet::new();
        while ranks.len() < 2 {
            let line = lines.next().expect("two ranks speak").expect("a text");
            ranks.extend(line.strip_suffix(wanted).map(str::to_owned));
        }
        assert!(ranks.iter().eq(["[rank 0] ", "[rank 1] "]), "{ranks:?}");
    };
    await_both("started");
    for _ in 0..2 {
        signal(&parent, Signal::USR1);
        await_both("saved");
    }
    signal(&parent, Signal::TERM);
    assert_eq!(parent.wait().expect("a process of this test").code(), Some(6), "ranks that stop by themselves");
}

#[test]
fn local_ranks_do_not_outlive_their_parent() {
    let mut parent = start_parent("echo started $$; exec sleep 600");
    let mut lines = BufReader::new(parent.stdout.take().expect("a pipe")).lines();
    let mut ranks = BTreeMap::new();
    while ranks.len() < 2 {
        let line = lines.next().expect("two ranks start").expect("a text");
        if let Some((prefix, process)) = line.split_once(" started ") {
            ranks.insert(prefix.to_owned(), process.to_owned());
        }
    }
    assert_eq!(ranks.keys().collect::<Vec<_>>(), ["[rank 0]", "[rank 1]"]);
    signal(&parent, Signal::KILL);
    parent.wait().expect("a process of this test");
    let deadline = Instant::now() + Duration::from_secs(5);
    while ranks.values().any(|process| is_running(process)) {
        assert!(Instant::now() < deadline, "ranks outlive their parent");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether a process is there and is more than an entry that nobody has asked for its exit code.
fn is_running(process: &str) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/stat"));
    status.is_ok_and(|status| !status.rsplit(')').next().unwrap_or_default().trim_start().starts_with('Z'))
}

struct Ranks {
    children: Vec<Child>,
    outputs: Vec<BufReader<ChildStdout>>,
    _port: ReservedPort,
}

/// How ranks are started.
#[derive(Clone, Copy)]
struct Setting<'a> {
    ranks: u64,
    /// Hosts that they live on, or pretend to.
    nodes: u64,
    transport: &'a str,
    /// The rank that panics, if any.
    panics: &'a str,
    /// Steps after which they finish, if any.
    steps: &'a str,
    /// Network namespaces of the hosts, if they have their own.
    namespaces: Option<&'a Namespaces>,
}

const PLAIN: Setting = Setting { ranks: 4, nodes: 1, transport: "any", panics: "", steps: "", namespaces: None };

fn command(setting: Setting, rank: u64) -> Command {
    let program = std::env::current_exe().expect("a running program has a file");
    let mut command = match setting.namespaces {
        None => Command::new(program),
        Some(namespaces) => {
            let mut command = Command::new("ip");
            let node = usize::try_from(rank * setting.nodes / setting.ranks).expect("a node");
            command.args(["netns", "exec", &namespaces.names[node]]).arg(program);
            command
        }
    };
    command.args(["--exact", "rank", "--nocapture"]).env("RUST_BACKTRACE", "0");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Starts ranks and waits until all have made some steps.
fn start(setting: Setting) -> Ranks {
    let Setting { ranks, nodes, transport, panics, steps, namespaces } = setting;
    let port = reserve_port().expect("a port is free");
    let mut children = Vec::new();
    for rank in 0..ranks {
        let mut command = command(setting, rank);
        for (name, value) in [("RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", ranks / nodes)] {
            command.env(name, value.to_string());
        }
        // In namespaces of their own the ranks find out for themselves who shares a host.
        if namespaces.is_none() {
            command.env("GROUP_RANK", (rank * nodes / ranks).to_string());
        }
        command.env("MASTER_ADDR", if namespaces.is_some() { FIRST_HOST } else { "127.0.0.1" });
        command.env("MASTER_PORT", port.port.to_string()).env("RANK_TRANSPORT", transport);
        command.env("RANK_PANICS", panics).env("RANK_STEPS", steps);
        children.push(command.spawn().expect("the program starts"));
    }
    let pipes = children.iter_mut().map(|child| child.stdout.take().expect("a pipe"));
    let mut outputs: Vec<_> = pipes.map(BufReader::new).collect();
    for output in &mut outputs {
        let mut line = String::new();
        while !line.contains("ready") {
            line.clear();
            assert!(output.read_line(&mut line).expect("a text") > 0, "a rank ended too early");
        }
    }
    Ranks { children, outputs, _port: port }
}

fn signal(child: &Child, signal: Signal) {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, signal).expect("a process of this test");
}

/// Standard error of a rank once it has ended, with its exit code; all wait for the same deadline.
fn end(child: &mut Child, deadline: Instant) -> (i32, String) {
    let code = loop {
        if let Some(status) = child.try_wait().expect("a process of this test") {
            break status.code().unwrap_or(-1);
        }
        assert!(Instant::now() < deadline, "a rank did not end in time");
        std::thread::sleep(Duration::from_millis(10));
    };
    let mut text = String::new();
    let mut pipe: ChildStderr = child.stderr.take().expect("a pipe");
    pipe.read_to_string(&mut text).expect("a text");
    (code, text)
}

/// The lost rank's fate ends all others with code 4 within the timeout and two seconds.
fn check(lost: usize, setting: Setting, fate: Option<Signal>, expected: &str) {
    let panics = if fate.is_none() { lost.to_string() } else { String::new() };
    let mut ranks = start(Setting { panics: &panics, ..setting });
    if let Some(fate) = fate {
        std::thread::sleep(Duration::from_millis(300));
        signal(&ranks.children[lost], fate);
    }
    let deadline = Instant::now() + TIMEOUT + Duration::from_secs(2);
    for rank in (0..ranks.children.len()).filter(|rank| *rank != lost) {
        let (code, text) = end(&mut ranks.children[rank], deadline);
        let (nodes, transport) = (setting.nodes, setting.transport);
        let row = format!("{fate:?} of rank {lost} on {nodes} nodes over {transport}, rank {rank} says\n{text}");
        assert_eq!(code, 4, "{row}");
        assert!(text.contains(&format!("rank {lost} {expected}")), "{row}");
        assert!(text.contains("last instruction: forward of step "), "{row}");
        assert!(text.contains(&format!("on rank {lost}, last collective: ")), "{row}");
    }
    signal_if_alive(&mut ranks.children[lost]);
    ranks.outputs.clear();
}

fn signal_if_alive(child: &mut Child) {
    child.kill().ok();
    child.wait().expect("a process of this test");
}

const KILLED: &str = "was lost: its process or connection ended";
const TCP: Setting = Setting { transport: "tcp", ..PLAIN };
const TWO_NODES: Setting = Setting { nodes: 2, ..PLAIN };

#[test]
fn killed_ranks_are_named() {
    for lost in [0, 1, 3] {
        for setting in [PLAIN, TCP, TWO_NODES] {
            check(lost, setting, Some(Signal::KILL), KILLED);
        }
    }
}

#[test]
fn stopped_ranks_are_named() {
    for lost in [0, 2] {
        for setting in [PLAIN, TWO_NODES] {
            check(lost, setting, Some(Signal::STOP), "was lost: no sign of life for");
        }
    }
}

#[test]
fn ranks_that_panic_are_named() {
    for lost in [0, 3] {
        for setting in [PLAIN, TWO_NODES] {
            check(lost, setting, None, "panicked");
        }
    }
}

#[test]
fn eight_ranks_under_mpirun() {
    let transports = if cfg!(feature = "mpi") { ["any", "mpi"].as_slice() } else { &["any"] };
    for transport in transports {
        let mut command = Command::new("mpirun");
        command.args(["--allow-run-as-root", "--oversubscribe", "-n", "8"]);
        command.arg(std::env::current_exe().expect("a running program has a file"));
        command.args(["--exact", "rank", "--nocapture"]).env("RANK_TRANSPORT", transport).env("RANK_STEPS", "10");
        match command.output() {
            Err(reason) => return println!("skipped: mpirun cannot be started: {reason}"),
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "{transport}: {text}");
                assert_eq!(String::from_utf8_lossy(&output.stdout).matches("ready").count(), 8, "{transport}: {text}");
            }
        }
    }
}

#[test]
fn eight_ranks_in_two_network_namespaces() {
    let namespaces = match Namespaces::new() {
        Ok(namespaces) => namespaces,
        Err(reason) => return println!("skipped: no network namespaces can be made: {reason}"),
    };
    let setting = Setting { ranks: 8, nodes: 2, namespaces: Some(&namespaces), ..PLAIN };
    let mut ranks = start(Setting { steps: "10", ..setting });
    let deadline = Instant::now() + Duration::from_secs(60);
    for child in &mut ranks.children {
        let (code, text) = end(child, deadline);
        assert_eq!(code, 0, "{text}");
    }
    check(5, setting, Some(Signal::KILL), KILLED);
    check(0, setting, Some(Signal::KILL), KILLED);
    check_cut(setting, &namespaces);
}

/// With the cable cut, the ranks of the first host miss one of the second, and those miss rank 0.
fn check_cut(setting: Setting, namespaces: &Namespaces) {
    let mut ranks = start(setting);
    ip(&format!("-n {} link set cable down", namespaces.names[0])).expect("the cable is there");
    let deadline = Instant::now() + TIMEOUT + Duration::from_secs(2);
    for (rank, child) in ranks.children.iter_mut().enumerate() {
        let (code, text) = end(child, deadline);
        let missing = if rank < 4 { ["rank 4 ", "rank 5 ", "rank 6 ", "rank 7 "].as_slice() } else { &["rank 0 "] };
        let named = missing.iter().any(|name| text.contains(&format!("error: {name}was lost: no sign of life for")));
        assert!(code == 4 && named, "rank {rank} says {code}\n{text}");
    }
}
