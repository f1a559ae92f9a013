//! Starts the ranks of one host as processes and ends all of them with the first failure.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::fd::OwnedFd;
use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with};
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag::{register, register_usize};

/// Exit code of a run of which a rank was lost.
pub const LOST: i32 = 4;
/// Exit code of a run that stopped by request after saving.
const STOPPED: i32 = 6;
/// Exit codes of failures from the most to the least telling: those that one rank finds out for itself come
/// before the loss that all the others report.
const TELLING: [i32; 5] = [2, 3, 5, 1, LOST];
/// Time that ranks have to end by themselves after the first failure, and again after the signal to end.
const GRACE: Duration = Duration::from_secs(2);

/// How local ranks came to their end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With the most telling exit code of all: 0 only if every rank gave 0.
    With(i32),
    /// Because this process was asked to end them.
    Stopped(StopSignal),
}

/// What ends ranks on request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopSignal {
    /// SIGINT, such as Ctrl-C sends.
    Interrupt,
    /// SIGTERM, such as schedulers send.
    Terminate,
    /// SIGUSR1, such as schedulers send some time before the limit. Ranks decide what it means to them; it ends those
    /// that do not.
    User,
}

impl StopSignal {
    const ALL: [StopSignal; 3] = [StopSignal::Interrupt, StopSignal::Terminate, StopSignal::User];

    /// The signal's name.
    pub fn name(self) -> &'static str {
        match self {
            StopSignal::Interrupt => "SIGINT",
            StopSignal::Terminate => "SIGTERM",
            StopSignal::User => "SIGUSR1",
        }
    }

    /// The signal's number. Shells show a program that ended by it as 128 more.
    pub fn number(self) -> u8 {
        let number = match self {
            StopSignal::Interrupt => SIGINT,
            StopSignal::Terminate => SIGTERM,
            StopSignal::User => SIGUSR1,
        };
        u8::try_from(number).expect("signals are numbers below 65")
    }
}

/// The signals to this process so far.
struct Received {
    /// The number of the last that asks for the end, 0 before the first.
    stop: Arc<AtomicUsize>,
    /// Whether there was a SIGUSR1 that was not passed on yet.
    user: Arc<AtomicBool>,
}

/// A started rank.
struct RankProcess {
    child: Child,
    /// Its exit code; 4 if a signal ended it before it was told to end.
    code: Option<i32>,
    /// The signal that ended it.
    signal: Option<i32>,
    output: Vec<JoinHandle<()>>,
}

/// Starts `world_size` processes of `program`, one rank each, and waits for all of them.
///
/// Ranks find their place in torchrun's variables and share the cores (`RAYON_NUM_THREADS`). Their output is
/// passed on line by line behind `[rank N] `. The first failure ends all: the others have two seconds to say
/// what they know, then get SIGTERM, then SIGKILL. SIGINT or SIGTERM to this process are passed on as SIGTERM at
/// once, with SIGKILL two seconds later; SIGUSR1 is passed on as it is. From the first call on this process does not
/// end by them itself. Ranks do not outlive this process. Call it from the main thread, whose end they take for the end of the process.
///
/// # Errors
/// If no port is free or a process cannot be started; those already started are ended.
pub fn start_local_ranks(program: &Path, arguments: &[OsString], world_size: u64) -> io::Result<Ended> {
    let received = listen_for_signals()?;
    let reserved = reserve_port()?;
    let port = reserved.port;
    let mut ranks = Vec::new();
    for rank in 0..world_size {
        match start_rank(program, arguments, rank, world_size, port) {
            Ok(process) => ranks.push(process),
            Err(error) => {
                end_all(&mut ranks, Duration::ZERO);
                return Err(error);
            }
        }
    }
    while ranks.iter().any(|rank| rank.code.is_none()) {
        ranks.iter_mut().for_each(poll);
        if received.user.swap(false, Ordering::Relaxed) {
            signal_all(&ranks, Signal::USR1);
        }
        if stop_signal(&received).is_some() {
            end_all(&mut ranks, Duration::ZERO);
        } else if ranks.iter().any(|rank| rank.code.is_some_and(is_failure)) {
            end_all(&mut ranks, GRACE);
        }
        thread::sleep(Duration::from_millis(10));
    }
    let codes: Vec<i32> = ranks.iter().filter_map(|rank| rank.code).collect();
    drain(&ranks);
    let by_user = ranks.iter().any(|rank| rank.signal == Some(SIGUSR1)).then_some(StopSignal::User);
    Ok(match (stop_signal(&received).or(by_user), most_telling(&codes)) {
        // Ranks that had something of their own to say go before the request.
        (Some(signal), LOST) => Ended::Stopped(signal),
        (_, code) => Ended::With(code),
    })
}

/// Notes signals instead of ending by them.
fn listen_for_signals() -> io::Result<Received> {
    let received = Received { stop: Arc::default(), user: Arc::default() };
    for signal in [SIGINT, SIGTERM] {
        register_usize(signal, Arc::clone(&received.stop), usize::try_from(signal).expect("a positive number"))?;
    }
    register(SIGUSR1, Arc::clone(&received.user))?;
    Ok(received)
}

fn stop_signal(received: &Received) -> Option<StopSignal> {
    let number = received.stop.load(Ordering::Relaxed);
    StopSignal::ALL.into_iter().find(|signal| usize::from(signal.number()) == number)
}

/// Threads for each of `ranks` ranks that share this host's cores.
pub fn threads_per_rank(ranks: u64) -> usize {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    (cores / usize::try_from(ranks).unwrap_or(usize::MAX).max(1)).max(1)
}

/// A port of this host that nobody else is given while this is held; rank 0 can listen at it all the same.
pub struct ReservedPort {
    /// The port.
    pub port: u16,
    _socket: OwnedFd,
}

/// Reserves a port for a rendezvous: its socket is bound but does not listen, so that another one that reuses
/// addresses, as listeners do, can be bound to it too.
///
/// # Errors
/// If no port is free.
pub fn reserve_port() -> io::Result<ReservedPort> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?;
    let address = SocketAddr::try_from(getsockname(&socket)?)?;
    Ok(ReservedPort { port: address.port(), _socket: socket })
}

fn start_rank(program: &Path, arguments: &[OsString], rank: u64, world: u64, port: u16) -> io::Result<RankProcess> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    for (name, value) in [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", world)] {
        command.env(name, value.to_string());
    }
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string()).env("GROUP_RANK", "0");
    command.env_remove("TORCHELASTIC_USE_AGENT_STORE");
    command.env("RAYON_NUM_THREADS", threads_per_rank(world).to_string());
    die_with_parent(&mut command);
    let mut child = command.spawn()?;
    let prefix = format!("[rank {rank}] ");
    let output = [
        child.stdout.take().map(|pipe| pass_on(pipe, io::stdout(), prefix.clone())),
        child.stderr.take().map(|pipe| pass_on(pipe, io::stderr(), prefix.clone())),
    ];
    Ok(RankProcess { child, code: None, signal: None, output: output.into_iter().flatten().collect() })
}

/// Has the kernel kill the child when this process ends, however it ends.
#[allow(unsafe_code)]
fn die_with_parent(command: &mut Command) {
    let parent = Pid::from_raw(i32::try_from(std::process::id()).unwrap_or_default());
    let prepare = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have ended before the line above.
        if getppid() == parent { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
    };
    // SAFETY: between fork and exec the closure makes two system calls; it allocates nothing and takes no lock.
    unsafe { command.pre_exec(prepare) };
}

fn pass_on(pipe: impl Read + Send + 'static, mut to: impl Write + Send + 'static, prefix: String) -> JoinHandle<()> {
    thread::spawn(move || {
        let mut reader = BufReader::new(pipe);
        let mut line = prefix.clone().into_bytes();
        while reader.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
            if !line.ends_with(b"\n") {
                line.push(b'\n');
            }
            // One write for each line, so that lines of different ranks do not mix. Without a reader the run goes on.
            to.write_all(&line).and_then(|()| to.flush()).ok();
            line.truncate(prefix.len());
        }
    })
}

/// Waits for the rest of the output, but not for processes that ranks left behind with their pipes.
fn drain(ranks: &[RankProcess]) {
    let deadline = Instant::now() + Duration::from_secs(1);
    let open = || ranks.iter().flat_map(|rank| &rank.output).any(|handle| !handle.is_finished());
    while open() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(5));
    }
}

fn poll(rank: &mut RankProcess) {
    if rank.code.is_none() {
        rank.code = match rank.child.try_wait() {
            Ok(None) => None,
            Ok(Some(status)) => {
                rank.signal = status.signal();
                Some(status.code().unwrap_or(LOST))
            }
            Err(_) => Some(LOST),
        };
    }
}

fn is_failure(code: i32) -> bool {
    code != 0 && code != STOPPED
}

/// Waits for all, then asks them to end, then kills them.
fn end_all(ranks: &mut [RankProcess], patience: Duration) {
    for (signal, patience) in [(Signal::TERM, patience), (Signal::KILL, GRACE)] {
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline && ranks.iter().any(|rank| rank.code.is_none()) {
            ranks.iter_mut().for_each(poll);
            thread::sleep(Duration::from_millis(10));
        }
        signal_all(ranks, signal);
    }
}

/// Sends a signal to the ranks that have not ended.
fn signal_all(ranks: &[RankProcess], signal: Signal) {
    for rank in ranks.iter().filter(|rank| rank.code.is_none()) {
        if let Some(pid) = i32::try_from(rank.child.id()).ok().and_then(Pid::from_raw) {
            kill_process(pid, signal).ok();
        }
    }
}

/// The exit code of the run from those of its ranks.
fn most_telling(codes: &[i32]) -> i32 {
    let failed = |code: &i32| codes.contains(code);
    let known = TELLING.iter().copied().find(failed);
    match known {
        Some(code) => code,
        None if codes.iter().copied().any(is_failure) => LOST,
        None => codes.iter().copied().max().unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(script: &str, world_size: u64, expected: i32) {
        let arguments = ["-c".into(), script.into()];
        let code = start_local_ranks(Path::new("/bin/sh"), &arguments, world_size).expect("sh can be started");
        assert_eq!(code, Ended::With(expected), "{script}");
    }

    #[test]
    fn exit_codes_of_real_processes() {
        check("exit 0", 3, 0);
        check("test $RANK = $LOCAL_RANK && test $WORLD_SIZE = 2 && test $LOCAL_WORLD_SIZE = 2", 2, 0);
        check("test $RANK = 1 && exit 5; exec sleep 600", 3, 5);
        check("test $RANK = 0 && kill -9 $$; exec sleep 600", 2, 4);
        check("test $RANK = 1 && exit 101; trap '' TERM; while :; do sleep 600; done", 2, 4);
    }

    #[test]
    fn the_most_telling_code_wins() {
        let rows: [(&[i32], i32); 9] = [
            (&[0, 0], 0),
            (&[4, 5, 4], 5),
            (&[0, 101], 4),
            (&[2, 2, 4], 2),
            (&[6, 6], 6),
            (&[6, 0], 6),
            (&[6, 4], 4),
            (&[0, -1], 4),
            (&[], 0),
        ];
        for (codes, expected) in rows {
            assert_eq!(most_telling(codes), expected, "{codes:?}");
        }
    }
}
