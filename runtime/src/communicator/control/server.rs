//! Rank 0's side of the control connections.

use std::io::BufReader;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::super::error::{Cause, Loss, Report};
use super::super::watch::Watch;
use super::judge::{Known, judge};
use super::{BEAT, Event, Message, beat, leave, listen, millis, prepare, say};

/// Time that the end of a process has to show itself, before a broken link alone is held against a rank.
const GRACE: Duration = Duration::from_millis(400);

/// A rank as rank 0 sees it.
struct Peer {
    stream: TcpStream,
    heard: Instant,
    report: Report,
    waits: Vec<u64>,
    finished: bool,
    gone: bool,
}

struct Server {
    watch: Arc<Watch>,
    /// Ranks 1, 2, ….
    peers: Vec<Peer>,
    finished: bool,
    /// Since when a rank is done and waits for the others.
    finishing: Option<Instant>,
    /// A suspicion and when it is to be judged.
    pending: Option<(Instant, u64, Cause)>,
}

/// Starts the threads that speak with ranks 1, 2, … over their connections; `events` ends with `Event::Close`.
///
/// # Errors
/// Those of the system.
pub fn serve(
    watch: Arc<Watch>,
    connections: Vec<BufReader<TcpStream>>,
    sender: Sender<Event>,
    events: Receiver<Event>,
) -> std::io::Result<JoinHandle<()>> {
    let mut peers = Vec::new();
    for (reader, rank) in connections.into_iter().zip(1..) {
        let stream = prepare(&reader)?;
        let (report, waits) = (Report::default(), Vec::new());
        peers.push(Peer { stream, heard: Instant::now(), report, waits, finished: false, gone: false });
        let sender = sender.clone();
        thread::spawn(move || listen(rank, reader, sender));
    }
    let mut server = Server { watch, peers, finished: false, finishing: None, pending: None };
    Ok(thread::spawn(move || {
        server.run(&events);
        leave(server.peers.iter().filter(|peer| !peer.gone).map(|peer| &peer.stream).collect(), &events);
    }))
}

impl Server {
    fn run(&mut self, events: &Receiver<Event>) {
        let mut next_beat = Instant::now();
        loop {
            if Instant::now() >= next_beat {
                next_beat = Instant::now() + BEAT;
                self.say_to_all(&beat(&self.watch));
                self.check_times();
            }
            self.judge_pending();
            let until = self.pending.as_ref().map_or(next_beat, |(time, ..)| next_beat.min(*time));
            match events.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Event::Close) | Err(RecvTimeoutError::Disconnected) => return,
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Heard(rank, message) => self.hear(rank, message),
            Event::Gone(rank) => {
                self.lose(rank, Cause::Ended);
                if let Some(peer) = self.peer(rank) {
                    peer.gone = true;
                }
            }
            Event::Suspicion { rank, cause } => self.suspect(rank, cause),
            Event::Abort(loss) => self.end(loss),
            Event::Finish => {
                self.finished = true;
                self.check_finished();
            }
            Event::Close => {}
        }
    }

    fn hear(&mut self, rank: u64, message: Message) {
        let Some(peer) = self.peer(rank) else { return };
        peer.heard = Instant::now();
        match message {
            Message::Beat(report, waits) => (peer.report, peer.waits) = (report, waits),
            Message::Suspicion(suspect, cause) => self.suspect(suspect, cause),
            Message::Lost(loss) => self.end(loss),
            Message::Finished => {
                peer.finished = true;
                self.check_finished();
            }
        }
    }

    fn peer(&mut self, rank: u64) -> Option<&mut Peer> {
        self.peers.get_mut(usize::try_from(rank.checked_sub(1)?).ok()?)
    }

    fn all_finished(&self) -> bool {
        self.finished && self.peers.iter().all(|peer| peer.finished)
    }

    fn check_finished(&mut self) {
        self.finishing.get_or_insert_with(Instant::now);
        if self.all_finished() {
            self.say_to_all(&Message::Finished);
            self.watch.finish();
        }
    }

    /// Looks for ranks that have been silent, or have not finished, for too long.
    fn check_times(&mut self) {
        let silences = self.peers.iter().zip(1..).map(|(peer, rank)| (peer.heard.elapsed(), rank));
        if let Some((silence, rank)) = silences.max()
            && silence > self.watch.timeout
        {
            self.lose(rank, Cause::Silent(millis(silence)));
        }
        let unfinished = std::iter::once(self.finished).chain(self.peers.iter().map(|peer| peer.finished)).zip(0..);
        let late = self.finishing.map(|since| since.elapsed()).filter(|time| *time > self.watch.timeout);
        if let (Some(time), Some((_, rank))) = (late, unfinished.into_iter().find(|(finished, _)| !finished)) {
            self.lose(rank, Cause::Late(millis(time)));
        }
    }

    /// A rank that is said to have ended has a moment to be seen ending; others are judged at once.
    fn suspect(&mut self, rank: u64, cause: Cause) {
        if self.pending.is_none() {
            let grace = if cause == Cause::Ended { GRACE } else { Duration::ZERO };
            self.pending = Some((Instant::now() + grace, rank, cause));
        }
    }

    fn judge_pending(&mut self) {
        if let Some((_, rank, cause)) = self.pending.take_if(|(time, ..)| Instant::now() >= *time) {
            let own = Known { silence: Duration::ZERO, waits: self.watch.waits() };
            let others =
                self.peers.iter().map(|peer| Known { silence: peer.heard.elapsed(), waits: peer.waits.clone() });
            let known: Vec<Known> = std::iter::once(own).chain(others).collect();
            let (rank, cause) = judge(&known, rank, cause);
            self.lose(rank, cause);
        }
    }

    fn lose(&mut self, rank: u64, cause: Cause) {
        let heard = self.peer(rank).map(|peer| {
            let age = peer.report.age + millis(peer.heard.elapsed());
            Report { age, ..peer.report.clone() }
        });
        let report = self.watch.report_of(rank).or(heard).unwrap_or_default();
        self.end(Loss { rank, cause, report });
    }

    /// Tells all before this process's own threads, which may end it at once.
    fn end(&mut self, loss: Loss) {
        if self.watch.check().is_ok() && !self.all_finished() {
            self.say_to_all(&Message::Lost(loss.clone()));
            self.watch.lose(loss);
        }
    }

    fn say_to_all(&mut self, message: &Message) {
        self.peers.iter_mut().for_each(|peer| say(&mut peer.stream, message));
    }
}
