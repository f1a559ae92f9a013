//! Where the ranks are: which share memory, under which address the others are reached; and the links of a group.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Transport;
use super::accept::{Acceptor, LinkGreeting, connect_link};
use super::board::{Board, ENTRY_BYTES};
use super::error::{Cause, Error, Loss, Report};
use super::link::Link;
#[cfg(feature = "mpi")]
use super::message_passing::MessagePassing;
use super::rendezvous::{Greeting, Meeting};
use super::ring::{Bell, SharedLink, segment_bytes};
use super::segment::Segment;
use super::stream::StreamLink;
use super::wire::{Identity, Wire};

/// Groups that the ranks of a host may have.
const GROUPS: usize = 4096;
/// The host's segment: the run's number, the announcements of groups' segments, the board.
const ANNOUNCEMENTS: usize = 128;
const BOARD: usize = ANNOUNCEMENTS + 16 * GROUPS;
/// An announcement that is being written.
const RESERVED: u64 = 1;
/// Shortest time that a connection gets to be made.
const CONNECTION: Duration = Duration::from_secs(1);
/// Time between looks for something that another rank does.
const LOOK: Duration = Duration::from_millis(1);
/// Time between looks at whether the run goes on.
const CHECK: Duration = Duration::from_millis(20);

/// What every rank knows of the others.
pub struct Topology {
    /// This rank.
    pub rank: u64,
    run: u64,
    processes: Vec<u32>,
    addresses: Vec<SocketAddr>,
    acceptor: Acceptor,
    /// If all links go through MPI.
    #[cfg(feature = "mpi")]
    message_passing: Option<Arc<MessagePassing>>,
    /// The host's segment, if this rank shares memory with others.
    host: Arc<Segment>,
    /// By rank: its place among the ranks that share memory with this one.
    places: Vec<Option<usize>>,
}

/// What a rank offers to those of its host.
#[derive(Serialize, Deserialize)]
struct Offer {
    /// A number that strangers do not know.
    secret: u64,
    /// The descriptor of the host's segment, from the host's first rank.
    descriptor: Option<i32>,
}

impl Topology {
    /// Finds out together with all other ranks who shares memory with whom. Starts to take connections.
    ///
    /// # Errors
    /// `Lost` if a rank is lost meanwhile, or this one cannot take part.
    pub fn survey(
        rank: u64,
        meeting: &mut Meeting,
        greetings: &[Greeting],
        transport: Transport,
        listener: TcpListener,
        deadline: Instant,
    ) -> Result<Topology, Error> {
        let node = &greetings[index(rank)].node;
        let of_host = greetings.iter().filter(|other| other.node == *node);
        let neighbours: Vec<u64> = of_host.map(|other| other.rank).collect();
        let may_share = transport == Transport::Automatic && neighbours.len() > 1;
        let own = if may_share && neighbours[0] == rank { create_host_segment(neighbours.len()) } else { None };
        let (secret, descriptor) = own.as_ref().map_or((random(), None), |(secret, own)| (*secret, own.descriptor()));
        let offers = meeting.exchange(&Offer { secret, descriptor }, deadline)?;
        let first = index(neighbours[0]);
        let host = match own {
            Some((_, segment)) => Some(segment),
            None if may_share => open_host_segment(greetings[first].process, &offers[first], neighbours.len()),
            None => None,
        };
        let opened = meeting.exchange(&host.is_some(), deadline)?;
        let host = host.filter(|_| neighbours.iter().all(|rank| opened[index(*rank)]));
        let sharing = if host.is_some() { neighbours } else { vec![rank] };
        let places = greetings.iter().map(|other| sharing.iter().position(|rank| *rank == other.rank)).collect();
        let host = host.map_or_else(|| Segment::private(host_bytes(1)), Ok);
        let parts = host.and_then(|host| Ok((host, Acceptor::start(listener, offers[0].secret)?)));
        let (host, acceptor) = parts.map_err(|error| unable(rank, &error))?;
        Ok(Topology {
            rank,
            run: offers[0].secret,
            processes: greetings.iter().map(|greeting| greeting.process).collect(),
            addresses: addresses(greetings, meeting.server_address()),
            acceptor,
            #[cfg(feature = "mpi")]
            message_passing: None,
            host: Arc::new(host),
            places,
        })
    }

    /// The same, with all links through MPI if it is given.
    #[cfg(feature = "mpi")]
    pub fn with_message_passing(self, message_passing: Option<Arc<MessagePassing>>) -> Topology {
        Topology { message_passing, ..self }
    }

    /// The board of the ranks that share memory, and the places of ranks on it.
    pub fn board(&self) -> (Board, Vec<Option<usize>>) {
        (Board::new(self.host.clone(), BOARD), self.places.clone())
    }

    /// Connects this rank, at place `me`, to the others of a group.
    ///
    /// # Errors
    /// What ended the run meanwhile.
    pub fn connect(&self, me: usize, identity: Identity) -> Result<Wire, Error> {
        identity.watch.entry.collective(format_args!("connection of {}", identity.name));
        #[cfg(feature = "mpi")]
        if let Some(shared) = &self.message_passing {
            let link = |peer: u64| Link::Message(Box::new(shared.link(peer, identity.key)));
            let links = identity.members.iter().map(|peer| (*peer != self.rank).then(|| link(*peer))).collect();
            return Ok(Wire::new(me, links, None, identity));
        }
        let local: Vec<usize> = (0..identity.members.len()).filter(|place| self.shares(&identity, *place)).collect();
        let segment = if local.len() > 1 { Some(Arc::new(self.group_segment(&identity, &local)?)) } else { None };
        let own = local.iter().position(|place| *place == me).expect("a rank shares memory with itself");
        let mut links = Vec::new();
        for peer in 0..identity.members.len() {
            let local_peer = local.iter().position(|place| *place == peer);
            links.push(match (local_peer, &segment) {
                _ if peer == me => None,
                (Some(local_peer), Some(segment)) => {
                    Some(Link::Shared(SharedLink::new(segment.clone(), own, local_peer, local.len())))
                }
                _ => Some(Link::Stream(Box::new(self.stream(&identity, identity.members[peer])?))),
            });
        }
        let bell = segment.map(|segment| Bell::new(segment, own));
        Ok(Wire::new(me, links, bell, identity))
    }

    fn shares(&self, identity: &Identity, place: usize) -> bool {
        self.places[index(identity.members[place])].is_some()
    }

    /// The memory of a group's ranks on this host, made by the first of them.
    fn group_segment(&self, identity: &Identity, local: &[usize]) -> Result<Segment, Error> {
        let bytes = segment_bytes(local.len());
        let first = identity.members[local[0]];
        if first == self.rank {
            let segment = Segment::create(bytes).and_then(|segment| {
                let descriptor = segment.descriptor().expect("a segment that was created");
                self.announce(identity.key, descriptor).map(|()| segment)
            });
            return segment.map_err(|error| self.give_up(identity, &error));
        }
        let descriptor = self.wait_for(identity, first, |_| {
            std::thread::sleep(LOOK);
            self.announced(identity.key)
        })?;
        Segment::open(self.processes[index(first)], descriptor, bytes).map_err(|error| self.give_up(identity, &error))
    }

    /// A connection to a rank: the higher rank connects to the lower one.
    fn stream(&self, identity: &Identity, peer: u64) -> Result<StreamLink, Error> {
        let stream = if peer > self.rank {
            self.wait_for(identity, peer, |time| self.acceptor.take(identity.key, peer, time))?
        } else {
            let greeting = LinkGreeting { run: self.run, group: identity.key, rank: self.rank };
            self.wait_for(identity, peer, |time| {
                let connected = connect_link(self.addresses[index(peer)], greeting, time.max(CONNECTION));
                connected.inspect_err(|_| std::thread::sleep(LOOK)).ok()
            })?
        };
        StreamLink::new(stream).map_err(|error| self.give_up(identity, &error))
    }

    /// Looks for something that `rank` does, until it is there, the run ends or the time is over.
    fn wait_for<T>(
        &self,
        identity: &Identity,
        rank: u64,
        mut look: impl FnMut(Duration) -> Option<T>,
    ) -> Result<T, Error> {
        let watch = &identity.watch;
        let start = Instant::now();
        watch.waiting(identity.key, Some(rank));
        let found = loop {
            watch.check()?;
            if let Some(found) = look(CHECK) {
                break found;
            }
            if start.elapsed() > watch.timeout {
                return Err(watch.suspect_late(rank));
            }
        };
        watch.waiting(identity.key, None);
        Ok(found)
    }

    /// Publishes the descriptor of a group's segment to the ranks of this host.
    fn announce(&self, group: u64, descriptor: i32) -> io::Result<()> {
        for place in 0..GROUPS {
            let entry = self.announcement(group, place);
            if entry[0].compare_exchange(0, RESERVED, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                entry[1].store(u64::from(descriptor.cast_unsigned()), Ordering::Relaxed);
                entry[0].store(group, Ordering::Release);
                return Ok(());
            }
        }
        Err(io::ErrorKind::OutOfMemory.into())
    }

    fn announced(&self, group: u64) -> Option<i32> {
        for place in 0..GROUPS {
            let entry = self.announcement(group, place);
            match entry[0].load(Ordering::Acquire) {
                0 => return None,
                found if found == group => return i32::try_from(entry[1].load(Ordering::Relaxed)).ok(),
                _ => {}
            }
        }
        None
    }

    /// The entry at a group's own place in the table, or `step` places behind it.
    fn announcement(&self, group: u64, step: usize) -> &[AtomicU64] {
        let place = (usize::try_from(group % GROUPS as u64).expect("a place") + step) % GROUPS;
        self.host.words(ANNOUNCEMENTS + 16 * place, 2)
    }

    fn give_up(&self, identity: &Identity, error: &io::Error) -> Error {
        let cause = Cause::Aborted(format!("cannot connect {}: {error}", identity.name));
        identity.watch.abort(Loss { rank: self.rank, cause, report: identity.watch.entry.report() })
    }
}

fn host_bytes(ranks: usize) -> usize {
    BOARD + ranks * ENTRY_BYTES
}

/// The segment of a host's ranks, with a secret as its first word; none if the system gives no memory.
fn create_host_segment(ranks: usize) -> Option<(u64, Segment)> {
    let segment = Segment::create(host_bytes(ranks)).ok()?;
    let secret = random();
    segment.words(0, 1)[0].store(secret, Ordering::Release);
    Some((secret, segment))
}

/// The segment that the host's first rank offers; none if it cannot be opened from here, or is another one.
fn open_host_segment(process: u32, offer: &Offer, ranks: usize) -> Option<Segment> {
    let segment = Segment::open(process, offer.descriptor?, host_bytes(ranks)).ok()?;
    let secret = segment.words(0, 1)[0].load(Ordering::Acquire);
    (secret == offer.secret).then_some(segment)
}

/// Under which address each rank is reached from here. A rank that rank 0 sees on its own host, or rank 0 itself,
/// is where this rank reached rank 0.
fn addresses(greetings: &[Greeting], server: Option<IpAddr>) -> Vec<SocketAddr> {
    let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let address = |greeting: &Greeting| match (greeting.address, server) {
        (Some(address), Some(server)) if address.is_loopback() => server,
        (Some(address), _) => address,
        (None, server) => server.unwrap_or(local),
    };
    greetings.iter().map(|greeting| SocketAddr::new(address(greeting), greeting.port)).collect()
}

/// Why a rank cannot take part.
pub fn unable(rank: u64, error: &io::Error) -> Error {
    let cause = Cause::Aborted(format!("cannot share memory or listen: {error}"));
    Error::Lost(Loss { rank, cause, report: Report::default() })
}

/// A number that other processes cannot guess.
fn random() -> u64 {
    let mut bytes = [0; 8];
    // Without a source of randomness strangers are kept out by the number of the group alone.
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).ok();
    u64::from_le_bytes(bytes)
}

fn index(rank: u64) -> usize {
    usize::try_from(rank).expect("a rank")
}
