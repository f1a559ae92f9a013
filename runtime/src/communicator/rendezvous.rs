//! The start of a run: all ranks meet at rank 0, agree on what they run, and learn where the others are.
//!
//! One line of JSON from each rank, one with all of them back; then as many exchanges of this kind as the start
//! needs. Disagreements are found by every rank for itself in the same lines, so all fail alike.

use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use ir::error::Problem;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::error::{Cause, Error, Loss, Report};
use crate::launch::{Address, Launch};

/// First word of a greeting; others are no ranks.
const GREETING: &str = "planwright";
/// Longest line, in bytes: all ranks' greetings.
const LINE_LIMIT: u64 = 16 * 1024 * 1024;
/// Time that the other ranks have to come and be told, once two disagree.
const DISAGREEMENT: Duration = Duration::from_secs(5);
/// Time that rank 0's judgement may take to arrive.
const REPLY: Duration = Duration::from_secs(1);

/// What a rank says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting {
    greeting: String,
    /// Version of this crate.
    pub version: String,
    /// Its rank.
    pub rank: u64,
    /// How many ranks it expects.
    pub world_size: u64,
    /// What it runs: names and values.
    pub terms: Vec<(String, String)>,
    /// Its host; ranks with equal texts may share memory.
    pub node: String,
    /// Its process.
    pub process: u32,
    /// Where it listens for connections of groups.
    pub port: u16,
    /// Its address as rank 0 sees it; none for rank 0.
    pub address: Option<IpAddr>,
}

/// This rank's connections at the start.
pub enum Meeting {
    /// Rank 0: to ranks 1, 2, ….
    Server(Vec<BufReader<TcpStream>>),
    /// Another rank: to rank 0.
    Client(BufReader<TcpStream>),
}

/// Rank 0's answer.
#[derive(Serialize, Deserialize)]
enum Reply {
    All(Vec<serde_json::Value>),
    Lost(Loss),
}

impl Greeting {
    /// The greeting of this process.
    pub fn new(launch: &Launch, terms: &[(&str, String)], port: u16) -> Greeting {
        Greeting {
            greeting: GREETING.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            rank: launch.rank.0,
            world_size: launch.world_size,
            terms: terms.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
            node: node_name(launch),
            process: std::process::id(),
            port,
            address: None,
        }
    }
}

/// Meets all ranks; gives their greetings in order of ranks.
///
/// # Errors
/// `BadInput` if they disagree, `Lost` if one does not come before the deadline.
pub fn meet(launch: &Launch, mine: Greeting, deadline: Instant) -> Result<(Meeting, Vec<Greeting>), Error> {
    let (meeting, greetings) = match launch.rank.0 {
        0 => receive_all(launch, mine, deadline)?,
        _ => {
            let stream = connect(&launch.address, deadline).ok_or_else(|| lost(0, Cause::NeverCame))?;
            let mut meeting = Meeting::Client(BufReader::new(stream));
            let greetings = meeting.exchange(&mine, deadline)?;
            (meeting, greetings)
        }
    };
    match disagreements(&greetings) {
        problems if problems.is_empty() => Ok((meeting, greetings)),
        problems => Err(Error::BadInput(problems)),
    }
}

impl Meeting {
    /// Gives every rank's value to every rank, in order.
    ///
    /// # Errors
    /// `Lost` if a rank ends or says nothing before the deadline.
    pub fn exchange<T: Serialize + DeserializeOwned>(&mut self, mine: &T, deadline: Instant) -> Result<Vec<T>, Error> {
        let mine = serde_json::to_value(mine).expect("messages have no keys but texts");
        let values = match self {
            Meeting::Client(reader) => {
                write_line(reader.get_mut(), &mine).map_err(|_| lost(0, Cause::Ended))?;
                match read_line(reader, deadline + REPLY).map_err(|_| lost(0, Cause::Ended))? {
                    Reply::All(values) => values,
                    Reply::Lost(loss) => return Err(Error::Lost(loss)),
                }
            }
            Meeting::Server(readers) => {
                let mut values = vec![mine];
                for rank in 1..=readers.len() {
                    match read_line(&mut readers[rank - 1], deadline) {
                        Ok(value) => values.push(value),
                        Err(_) => return Err(tell_loss(readers, rank as u64, Cause::Ended)),
                    }
                }
                let reply = Reply::All(values.clone());
                readers.iter_mut().for_each(|reader| drop(write_line(reader.get_mut(), &reply)));
                values
            }
        };
        let parsed: Result<Vec<T>, _> = values.into_iter().map(serde_json::from_value).collect();
        parsed.map_err(|_| lost(0, Cause::Mismatch("a message of the start has another form".to_owned())))
    }

    /// The address under which this rank reaches rank 0; none for rank 0.
    pub fn server_address(&self) -> Option<IpAddr> {
        match self {
            Meeting::Server(_) => None,
            Meeting::Client(reader) => reader.get_ref().peer_addr().ok().map(|address| address.ip()),
        }
    }
}

/// The addresses of which a rank listens at the first that the system allows: those of this host alone if all ranks
/// are here, else of all networks.
pub fn listening_addresses(launch: &Launch, port: u16) -> Vec<SocketAddr> {
    let found = (launch.address.host.as_str(), launch.address.port).to_socket_addrs();
    let one_host = launch.local_size == launch.world_size;
    let listening = |address: SocketAddr| match address.ip() {
        ip if one_host && ip.is_loopback() => ip,
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
    };
    let found = found.into_iter().flatten().map(listening);
    found.chain([Ipv4Addr::UNSPECIFIED.into()]).map(|ip| SocketAddr::new(ip, port)).collect()
}

/// Rank 0: listens until all ranks have come, and tells all who came.
fn receive_all(launch: &Launch, mine: Greeting, deadline: Instant) -> Result<(Meeting, Vec<Greeting>), Error> {
    let addresses = listening_addresses(launch, launch.address.port);
    let listener =
        TcpListener::bind(&*addresses).and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
    let listener = listener.map_err(|error| Error::BadInput(vec![port_taken(&launch.address, &error)]))?;
    let arrivals = await_arrivals(&listener, &mine, deadline);
    let (mut greetings, mut readers): (Vec<Greeting>, Vec<_>) = arrivals.into_iter().unzip();
    greetings.insert(0, mine);
    let present: BTreeSet<u64> = greetings.iter().map(|greeting| greeting.rank).collect();
    if disagreements(&greetings).is_empty()
        && let Some(missing) = (0..launch.world_size).find(|rank| !present.contains(rank))
    {
        return Err(tell_loss(&mut readers, missing, Cause::NeverCame));
    }
    let values = greetings.iter().map(|greeting| serde_json::to_value(greeting).expect("keys are texts")).collect();
    let reply = Reply::All(values);
    readers.iter_mut().for_each(|reader| drop(write_line(reader.get_mut(), &reply)));
    Ok((Meeting::Server(readers), greetings))
}

type Arrival = (Greeting, BufReader<TcpStream>);

/// The ranks that come, in order, until all are there or the time is over.
fn await_arrivals(listener: &TcpListener, mine: &Greeting, deadline: Instant) -> Vec<Arrival> {
    let (sender, receiver) = channel();
    let (mut greetings, mut arrivals) = (vec![mine.clone()], Vec::new());
    let mut deadline = deadline;
    while !is_complete(&greetings) && Instant::now() < deadline {
        accept(listener, deadline, &sender);
        for arrival in receiver.try_iter() {
            let arrival: Arrival = arrival;
            greetings.push(arrival.0.clone());
            arrivals.push(arrival);
            if !disagreements(&greetings).is_empty() {
                deadline = deadline.min(Instant::now() + DISAGREEMENT);
            }
        }
        thread::sleep(Duration::from_millis(2));
    }
    arrivals.sort_by_key(|(greeting, _)| greeting.rank);
    arrivals
}

/// Takes the connections that wait; each greeting is read on a thread, so that a silent stranger holds up nobody.
fn accept(listener: &TcpListener, deadline: Instant, sender: &Sender<Arrival>) {
    while let Ok((stream, address)) = listener.accept() {
        let sender = sender.clone();
        thread::spawn(move || {
            stream.set_nonblocking(false).ok();
            stream.set_nodelay(true).ok();
            let mut reader = BufReader::new(stream);
            let greeting: io::Result<Greeting> = read_line(&mut reader, deadline);
            if let Ok(mut greeting) = greeting
                && greeting.greeting == GREETING
            {
                greeting.address = Some(address.ip());
                sender.send((greeting, reader)).ok();
            }
        });
    }
}

/// Whether all ranks have come that any of those present expects.
fn is_complete(greetings: &[Greeting]) -> bool {
    let present: BTreeSet<u64> = greetings.iter().map(|greeting| greeting.rank).collect();
    let expected = greetings.iter().map(|greeting| greeting.world_size).max().unwrap_or(0);
    (0..expected).all(|rank| present.contains(&rank))
}

/// What ranks disagree on, each with both values.
fn disagreements(greetings: &[Greeting]) -> Vec<Problem> {
    let mut problems = Vec::new();
    let Some((first, others)) = greetings.split_first() else { return problems };
    let mut seen = BTreeSet::from([first.rank]);
    for other in others {
        let [of_first, of_other] = [first, other].map(values_of);
        for ((what, of_first), (_, of_other)) in of_first.into_iter().zip(of_other).filter(|(a, b)| a != b) {
            problems.push(Problem::new(
                format!("rank {} has {what} {of_first}, rank {} has {of_other}", first.rank, other.rank),
                "start of the ranks",
                "start all ranks with the same program, number of ranks, plan file and options",
            ));
        }
        if !seen.insert(other.rank) {
            problems.push(Problem::new(
                format!("two processes were started as rank {}", other.rank),
                "start of the ranks",
                "give each process a rank of its own, and each run a MASTER_PORT of its own",
            ));
        }
    }
    problems
}

/// What all ranks must say alike.
fn values_of(greeting: &Greeting) -> Vec<(String, String)> {
    let own = [("version", greeting.version.clone()), ("world size", greeting.world_size.to_string())];
    own.map(|(name, value)| (name.to_owned(), value)).into_iter().chain(greeting.terms.iter().cloned()).collect()
}

/// Connects to rank 0, which may start later; none after the deadline.
fn connect(address: &Address, deadline: Instant) -> Option<TcpStream> {
    while Instant::now() < deadline {
        let found = (address.host.as_str(), address.port).to_socket_addrs();
        for found in found.into_iter().flatten() {
            let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            if let Ok(stream) = TcpStream::connect_timeout(&found, left) {
                stream.set_nodelay(true).ok();
                return Some(stream);
            }
        }
        thread::sleep(Duration::from_millis(20));
    }
    None
}

/// The launcher's number of the host, else the boot and network namespace that the process lives in.
fn node_name(launch: &Launch) -> String {
    if let Some(node) = launch.node {
        return format!("node {node}");
    }
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net").map(|path| path.display().to_string()).unwrap_or_default();
    format!("{} {network}", boot.trim())
}

fn port_taken(address: &Address, error: &io::Error) -> Problem {
    Problem::new(
        format!("rank 0 cannot listen at port {}: {error}", address.port),
        "environment, MASTER_PORT",
        "set MASTER_PORT to a free port of rank 0's host for all ranks",
    )
}

fn lost(rank: u64, cause: Cause) -> Error {
    Error::Lost(Loss { rank, cause, report: Report::default() })
}

fn tell_loss(readers: &mut [BufReader<TcpStream>], rank: u64, cause: Cause) -> Error {
    let loss = Loss { rank, cause, report: Report::default() };
    let reply = Reply::Lost(loss.clone());
    readers.iter_mut().for_each(|reader| drop(write_line(reader.get_mut(), &reply)));
    Error::Lost(loss)
}

fn write_line<T: Serialize>(stream: &mut TcpStream, value: &T) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    stream.set_write_timeout(Some(REPLY))?;
    stream.write_all(&line)
}

fn read_line<T: DeserializeOwned>(reader: &mut BufReader<TcpStream>, deadline: Instant) -> io::Result<T> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    reader.get_ref().set_read_timeout(Some(left))?;
    let mut line = Vec::new();
    reader.by_ref().take(LINE_LIMIT).read_until(b'\n', &mut line)?;
    Ok(serde_json::from_slice(&line)?)
}
