//! Communication between ranks: collectives of groups, messages between stages, and the end of a run when a rank
//! is missing.
//!
//! - `launch` says who this rank is; [`World::connect`] meets the others (`rendezvous`), finds out who shares memory
//!   with whom (`topology`), and starts the heartbeats (`control`, `watch`, `board`).
//! - A [`Group`] runs its operations one after the other (`lane`): `movement` moves messages, `reduction` reduces
//!   them, both chunk by chunk (`chunk`) over the `wire` of the group's links: queues in shared memory (`ring`,
//!   `segment`) between ranks of one host, TCP (`stream`, `accept`) between others.
//! - `nccl` (a feature) is for groups of ranks on cards: they meet over a [`Group`], data goes through NCCL.
//! - Every wait ends: with what is waited for, with the timeout, or with the end of the run, which all ranks learn
//!   within a fraction of a second.

mod accept;
mod board;
mod chunk;
mod control;
mod element;
mod error;
mod group;
mod lane;
mod link;
#[cfg(feature = "mpi")]
mod message_passing;
mod movement;
#[cfg(feature = "nccl")]
pub mod nccl;
mod reduction;
mod rendezvous;
mod ring;
mod segment;
mod stream;
mod threads;
mod topology;
mod watch;
mod wire;

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::TcpListener;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bytemuck::Pod;
use ir::mesh::Rank;
use ir::program::Direction;

pub use chunk::{Operation, part};
pub use element::{Element, Reduction};
pub use error::{Cause, Error, Loss, Report};
pub use group::{Group, Pending};
pub use threads::run_ranks;

use crate::launch::Launch;
use control::Event;
use rendezvous::{Greeting, Meeting};
use topology::Topology;
use watch::Watch;
use wire::Identity;

/// How ranks of one host reach one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Through shared memory where the system allows it, else over TCP.
    Automatic,
    /// Over TCP, like ranks of different hosts.
    Tcp,
    /// All ranks through the hosts' own MPI, which must have started them. One world for each process.
    #[cfg(feature = "mpi")]
    Mpi,
}

/// How a rank communicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// How long any wait may last; 60 s unless the user says otherwise.
    pub timeout: Duration,
    /// How ranks of one host reach one another.
    pub transport: Transport,
}

impl Default for Options {
    fn default() -> Options {
        Options { timeout: Duration::from_secs(60), transport: Transport::Automatic }
    }
}

/// A rank's connection to all others. Dropped before [`World::finish`], it ends the run on all ranks.
pub struct World {
    rank: Rank,
    size: u64,
    topology: Arc<Topology>,
    watch: Arc<Watch>,
    /// By members: how many groups of these there are.
    ordinals: Mutex<BTreeMap<Vec<u64>, u64>>,
    channels: Mutex<BTreeMap<(u64, u64, Direction), Group>>,
    groups: Mutex<Vec<Group>>,
    control: Option<JoinHandle<()>>,
    finished: bool,
    /// MPI, which ends with this world if all ranks come to their end.
    #[cfg(feature = "mpi")]
    universe: Option<mpi::environment::Universe>,
}

/// Payload bytes that left this rank for others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// The group; sender and receiver for what goes between stages.
    pub members: Vec<Rank>,
    /// The kind of operation.
    pub operation: Operation,
    /// Bytes, headers apart.
    pub bytes: u64,
}

impl World {
    /// Meets all ranks of the run. They must have been started with the same number of ranks, program version and
    /// `terms`: names and values of what they are to run.
    ///
    /// # Errors
    /// `BadInput` on every rank if they were not; `Lost` if one does not come before the timeout.
    pub fn connect(launch: &Launch, terms: &[(&str, String)], options: Options) -> Result<World, Error> {
        let deadline = Instant::now() + options.timeout;
        let rank = launch.rank.0;
        #[cfg(feature = "mpi")]
        let message_passing = match options.transport {
            Transport::Mpi => Some(message_passing::start(rank, launch.world_size)?),
            Transport::Automatic | Transport::Tcp => None,
        };
        let listener = TcpListener::bind(&*rendezvous::listening_addresses(launch, 0));
        let (listener, port) = listener
            .and_then(|listener| listener.local_addr().map(|address| (listener, address.port())))
            .map_err(|error| topology::unable(rank, &error))?;
        let (mut meeting, greetings) = rendezvous::meet(launch, Greeting::new(launch, terms, port), deadline)?;
        let topology = Topology::survey(rank, &mut meeting, &greetings, options.transport, listener, deadline)?;
        #[cfg(feature = "mpi")]
        let (universe, shared) = message_passing.unzip();
        #[cfg(feature = "mpi")]
        let topology = topology.with_message_passing(shared);
        let (board, places) = topology.board();
        let (sender, events) = channel();
        let watch = Arc::new(Watch::new(rank, options.timeout, board, places, sender.clone()));
        let control = match meeting {
            Meeting::Server(readers) => control::serve(watch.clone(), readers, sender, events),
            Meeting::Client(reader) => control::join(watch.clone(), reader, sender, events),
        };
        Ok(World {
            rank: launch.rank,
            size: launch.world_size,
            topology: Arc::new(topology),
            watch,
            ordinals: Mutex::default(),
            channels: Mutex::default(),
            groups: Mutex::default(),
            control: Some(control.map_err(|error| topology::unable(rank, &error))?),
            finished: false,
            #[cfg(feature = "mpi")]
            universe,
        })
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Ranks of the run.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// A group of ranks, in this order. All its ranks must make it, and make groups of equal ranks in the same
    /// order; it is connected with its first operation.
    ///
    /// # Panics
    /// If this rank is not among the members, or they are not different ranks of the run.
    pub fn group(&self, members: &[Rank]) -> Group {
        let members: Vec<u64> = members.iter().map(|rank| rank.0).collect();
        let mut ordinals = lock(&self.ordinals);
        let ordinal = ordinals.entry(members.clone()).or_insert(0);
        *ordinal += 1;
        let list = members.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        let name = format!("ranks {list}");
        self.connect_later(members, &("group", *ordinal), name)
    }

    /// Sends a message to another stage; returns at once. Messages to one rank in one direction arrive in order.
    /// The schedule bounds how many are under way, and the verifier assumes that sends never wait.
    ///
    /// # Errors
    /// What ended the run. That of the message itself ends the run later.
    pub fn send<T: Pod + Send>(&self, to: Rank, direction: Direction, data: Vec<T>) -> Result<(), Error> {
        self.watch.check()?;
        drop(self.channel(self.rank, to, direction).start_send(1, data));
        Ok(())
    }

    /// Receives the next message of a rank in a direction, which must have as many elements as `data`.
    ///
    /// # Errors
    /// What ended the run.
    pub fn recv<T: Pod>(&self, from: Rank, direction: Direction, data: &mut [T]) -> Result<(), Error> {
        self.channel(from, self.rank, direction).recv(0, data)
    }

    /// Starts to receive the next message of a rank in a direction, which must have `length` elements.
    pub fn start_recv<T: Pod + Send>(&self, from: Rank, direction: Direction, length: usize) -> Pending<Vec<T>> {
        self.channel(from, self.rank, direction).start_recv(0, length)
    }

    /// Writes down the instruction that this rank begins, for others to name if it is lost. Texts are cut at 247
    /// bytes.
    pub fn report(&self, instruction: std::fmt::Arguments) {
        self.watch.entry.instruction(instruction);
    }

    /// Whether the run goes on; worth asking in long computations.
    ///
    /// # Errors
    /// What ended it.
    pub fn check(&self) -> Result<(), Error> {
        self.watch.check()
    }

    /// Ends the run on all ranks for a reason of this one. All waits of all ranks end with it.
    pub fn abort(&self, reason: &str) -> Error {
        self.give_up(Cause::Aborted(reason.to_owned()))
    }

    /// Payload bytes that left this rank so far, by group and operation, in the order in which groups were made.
    pub fn traffic(&self) -> Vec<Traffic> {
        let groups = lock(&self.groups);
        let entries = groups.iter().flat_map(|group| {
            Operation::ALL.into_iter().map(|operation| Traffic {
                members: group.members(),
                operation,
                bytes: group.bytes_sent(operation),
            })
        });
        entries.filter(|traffic| traffic.bytes > 0).collect()
    }

    /// Ends this rank's part of the run, once all ranks have come to their end.
    ///
    /// # Errors
    /// What ended the run before.
    pub fn finish(mut self) -> Result<(), Error> {
        self.watch.tell(Event::Finish);
        // Rank 0 judges who did not come; this is for the case that it says nothing.
        if !self.watch.wait_for_end(self.watch.timeout + Duration::from_secs(2)) {
            return Err(self.watch.suspect_late(0));
        }
        self.watch.check()?;
        self.finished = true;
        Ok(())
    }

    fn channel(&self, from: Rank, to: Rank, direction: Direction) -> Group {
        let mut channels = lock(&self.channels);
        let make = || {
            let name = format!("{direction:?} from rank {} to rank {}", from.0, to.0);
            self.connect_later(vec![from.0, to.0], &("channel", direction as u64), name)
        };
        channels.entry((from.0, to.0, direction)).or_insert_with(make).clone()
    }

    fn connect_later(&self, members: Vec<u64>, kind: &(&str, u64), name: String) -> Group {
        let different = (0..members.len()).all(|place| !members[..place].contains(&members[place]));
        assert!(different && members.iter().all(|rank| *rank < self.size), "members are different ranks of the run");
        let me = members.iter().position(|rank| *rank == self.rank.0).expect("a rank makes groups of its own only");
        let mut hasher = DefaultHasher::new();
        (&members, kind).hash(&mut hasher);
        // 0 and 1 mark free and unfinished announcements.
        let key = hasher.finish().max(2);
        let identity = Identity { key, members: members.into(), name: name.into(), watch: self.watch.clone() };
        let topology = self.topology.clone();
        let connected = identity.clone();
        let group = Group::new(me, identity, Box::new(move || topology.connect(me, connected)));
        lock(&self.groups).push(group.clone());
        group
    }

    fn give_up(&self, cause: Cause) -> Error {
        self.watch.abort(Loss { rank: self.rank.0, cause, report: self.watch.entry.report() })
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if thread::panicking() {
            self.give_up(Cause::Panicked);
        } else if !self.finished && self.watch.check().is_ok() {
            self.give_up(Cause::Aborted("it left before the end".to_owned()));
        }
        self.watch.tell(Event::Close);
        if let Some(control) = self.control.take() {
            control.join().ok();
        }
        // The end of MPI waits for all ranks, for ever if one is lost; then the end of the process must do.
        #[cfg(feature = "mpi")]
        if !self.finished {
            std::mem::forget(self.universe.take());
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
