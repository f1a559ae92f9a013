//! The links of one group, as its operations use them: chunks out, chunks in, and waiting.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use super::chunk::{CHUNK_BYTES, Header, Operation, chunk_count};
use super::error::{Cause, Error, Loss};
use super::link::Link;
use super::ring::Bell;
use super::watch::Watch;

/// Looks without sleeping before others get the core: about a microsecond. More of them cost more than they gain
/// wherever ranks share cores with anything (measured with 2 and 4 ranks on 2 busy cores).
const SPINS: u32 = 20;
/// Further looks between which the core is offered to others, before sleeping.
const YIELDS: u32 = 20;
/// Longest sleep between looks at whether the run goes on.
const SLEEP: Duration = Duration::from_millis(20);
/// Longest sleep of a group with links of both kinds, since one sleep cannot watch both.
const SHORT_SLEEP: Duration = Duration::from_micros(200);

/// The links of a rank to the others of a group.
pub struct Wire {
    /// The rank's place in the group.
    pub me: usize,
    /// By place in the group; none at `me`.
    links: Vec<Option<Link>>,
    /// Where this rank sleeps, if any link goes through memory.
    bell: Option<Bell>,
    identity: Identity,
    sequence: u64,
    patience: Patience,
}

/// Why a link exists.
const OTHERS: &str = "operations reach for the links of other ranks only";

/// How a group is called.
#[derive(Clone)]
pub struct Identity {
    /// Its number, equal on all its ranks.
    pub key: u64,
    /// Its ranks.
    pub members: Arc<[u64]>,
    /// Its name in messages.
    pub name: Arc<str>,
    /// The run it belongs to.
    pub watch: Arc<Watch>,
}

/// An operation under way.
#[derive(Clone, Copy)]
pub struct Call {
    sequence: u64,
    operation: Operation,
    total: u64,
}

/// How long a rank has waited.
#[derive(Default)]
struct Patience {
    looks: u32,
    since: Option<Instant>,
    /// The bell's count when it was armed.
    armed: Option<u32>,
    /// The rank that is said to be waited for.
    told: Option<u64>,
}

impl Wire {
    /// A wire over links that are connected.
    pub fn new(me: usize, links: Vec<Option<Link>>, bell: Option<Bell>, identity: Identity) -> Wire {
        Wire { me, links, bell, identity, sequence: 0, patience: Patience::default() }
    }

    /// Ranks of the group.
    pub fn size(&self) -> usize {
        self.links.len()
    }

    /// The other ranks' places, beginning behind this one's so that not all begin with the same.
    pub fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, size) = (self.me, self.size());
        (1..size).map(move |step| (me + step) % size)
    }

    /// Begins an operation on a message of `total` bytes.
    ///
    /// # Errors
    /// If the run has ended.
    pub fn begin(&mut self, operation: Operation, total: usize) -> Result<Call, Error> {
        let Identity { name, watch, .. } = &self.identity;
        watch.check()?;
        self.sequence += 1;
        let sequence = self.sequence;
        watch.entry.collective(format_args!("{} {sequence} of {name}", operation.name()));
        Ok(Call { sequence, operation, total: total as u64 })
    }

    /// Sends a chunk; false if there is no room now.
    ///
    /// # Errors
    /// If the link is broken.
    pub fn send(&mut self, peer: usize, call: &Call, phase: u32, chunk: &[u8]) -> Result<bool, Error> {
        let Call { sequence, operation, total } = *call;
        let length = u32::try_from(chunk.len()).expect("a chunk");
        let header = Header { sequence, total, operation: operation.number() as u32, phase, length, padding: 0 };
        let sent = self.link(peer).send(&header, chunk);
        sent.map_err(|_| self.broken(peer))
    }

    /// Whether a message to a rank can be sent without waiting.
    pub fn has_room(&self, peer: usize, bytes: usize) -> bool {
        self.links[peer].as_ref().is_some_and(|link| link.room() >= chunk_count(bytes, CHUNK_BYTES))
    }

    /// The phase of the chunk that waits from a rank, if one does.
    ///
    /// # Errors
    /// If the link is broken, or the chunk belongs to another operation.
    pub fn receive(&mut self, peer: usize, call: &Call) -> Result<Option<u32>, Error> {
        let received = self.link(peer).receive();
        match received.map_err(|_| self.broken(peer))? {
            None => Ok(None),
            Some(header) => {
                let found = (header.sequence, header.operation as usize, header.total);
                if found != (call.sequence, call.operation.number(), call.total) {
                    return Err(self.mismatch(peer, call, &header));
                }
                Ok(Some(header.phase))
            }
        }
    }

    /// The chunk that waits from a rank, of `length` bytes as both sides count.
    pub fn chunk(&self, peer: usize, length: usize) -> &[u8] {
        self.links[peer].as_ref().expect(OTHERS).chunk(length)
    }

    /// Lets go of the chunk that waits from a rank.
    pub fn release(&mut self, peer: usize) {
        self.link(peer).release();
    }

    /// Hands on what links still keep; true if nothing is left.
    ///
    /// # Errors
    /// If a link is broken.
    pub fn flush(&mut self) -> Result<bool, Error> {
        let mut done = true;
        for peer in 0..self.links.len() {
            if let Some(link) = &mut self.links[peer] {
                done &= link.flush().map_err(|_| self.broken(peer))?;
            }
        }
        Ok(done)
    }

    /// Ends an operation; gives the payload bytes that left this rank.
    pub fn end(&mut self) -> u64 {
        self.progress();
        self.links.iter_mut().flatten().map(Link::take_sent).sum()
    }

    /// Notes that something moved.
    pub fn progress(&mut self) {
        if self.patience.armed.is_some()
            && let Some(bell) = &self.bell
        {
            bell.disarm();
        }
        if self.patience.told.is_some() {
            self.identity.watch.waiting(self.identity.key, None);
        }
        self.patience = Patience::default();
    }

    /// Waits a while, since nothing moved; `missing` is the rank that something is expected from first.
    ///
    /// # Errors
    /// If the run has ended, or nothing has moved for the run's timeout.
    pub fn wait(&mut self, missing: usize) -> Result<(), Error> {
        self.patience.looks += 1;
        match self.patience.looks {
            looks if looks <= SPINS => std::hint::spin_loop(),
            looks if looks <= SPINS + YIELDS => std::thread::yield_now(),
            _ => self.sleep(missing)?,
        }
        Ok(())
    }

    fn sleep(&mut self, missing: usize) -> Result<(), Error> {
        let watch = &self.identity.watch;
        watch.check()?;
        let rank = self.identity.members[missing];
        let since = *self.patience.since.get_or_insert_with(Instant::now);
        if self.patience.told != Some(rank) {
            watch.waiting(self.identity.key, Some(rank));
            self.patience.told = Some(rank);
        }
        if since.elapsed() > watch.timeout {
            return Err(watch.suspect_late(rank));
        }
        let streams = self.links.iter().flatten().any(|link| matches!(link, Link::Stream(_)));
        match (&self.bell, self.patience.armed) {
            (bell, _) if streams => self.poll_streams(if bell.is_some() { SHORT_SLEEP } else { SLEEP }),
            (Some(bell), None) => self.patience.armed = Some(bell.arm()),
            (Some(bell), Some(rings)) => {
                bell.sleep(rings, SLEEP);
                self.patience.armed = Some(bell.arm());
            }
            (None, _) => std::thread::sleep(SHORT_SLEEP),
        }
        Ok(())
    }

    /// Sleeps until a connection can go on.
    fn poll_streams(&self, time: Duration) {
        let streams = self.links.iter().flatten().filter_map(|link| match link {
            Link::Stream(link) => {
                let reads = if link.is_ready() { PollFlags::empty() } else { PollFlags::IN };
                let writes = if link.is_writing() { PollFlags::OUT } else { PollFlags::empty() };
                Some(PollFd::new(link.stream(), reads | writes))
            }
            _ => None,
        });
        let time = Timespec::try_from(time).expect("a fraction of a second");
        poll(&mut streams.collect::<Vec<PollFd>>(), Some(&time)).ok();
    }

    fn link(&mut self, peer: usize) -> &mut Link {
        self.links[peer].as_mut().expect(OTHERS)
    }

    fn broken(&self, peer: usize) -> Error {
        self.identity.watch.suspect(self.identity.members[peer], Cause::Ended)
    }

    fn mismatch(&self, peer: usize, call: &Call, header: &Header) -> Error {
        let Identity { members, name, watch, .. } = &self.identity;
        let other = Operation::ALL.get(header.operation as usize).map_or("nothing known", |operation| operation.name());
        let what = format!(
            "in {name} rank {} calls {} {} on {} bytes, rank {} calls {other} {} on {} bytes",
            watch.rank,
            call.operation.name(),
            call.sequence,
            call.total,
            members[peer],
            header.sequence,
            header.total
        );
        watch.abort(Loss { rank: members[peer], cause: Cause::Mismatch(what), report: watch.entry.report() })
    }
}
