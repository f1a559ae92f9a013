//! Heartbeats and judgements: every rank keeps a connection to rank 0, which sees who is missing and tells all.
//!
//! Every quarter of a second each rank tells rank 0, and rank 0 tells all, that it lives, what it is doing and
//! whom it waits for. Rank 0 judges which rank was missing first and sends the judgement to all; if rank 0 itself
//! is missing, each rank sees it for itself. A connection that ends ends the run at once.

mod judge;
mod server;

use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::error::{Cause, Loss, Report};
use super::watch::Watch;
pub use server::serve;

/// Time between two heartbeats.
const BEAT: Duration = Duration::from_millis(250);
/// Longest message of a rank, in bytes.
const MESSAGE_LIMIT: u64 = 64 * 1024;
/// How long a rank may take to read a message before it counts as silent.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a rank that leaves waits for the other side to have read everything.
const LINGER: Duration = Duration::from_millis(300);

/// What the thread that speaks for a rank is told by the rank's other threads.
#[derive(Debug)]
pub enum Event {
    /// A rank said something.
    Heard(u64, Message),
    /// A rank's connection ended.
    Gone(u64),
    /// A rank did not come, or the link to it broke.
    Suspicion {
        /// The rank.
        rank: u64,
        /// What it looks like from here.
        cause: Cause,
    },
    /// This rank gives up.
    Abort(Loss),
    /// This rank is done and waits for the others.
    Finish,
    /// This rank leaves.
    Close,
}

/// What ranks say to one another.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Message {
    /// A sign of life: what the rank does and whom it waits for.
    Beat(Report, Vec<u64>),
    /// A rank did not come, or the link to it broke.
    Suspicion(u64, Cause),
    /// The run has ended.
    Lost(Loss),
    /// The sender is done; from rank 0, all are.
    Finished,
}

/// Reads messages until the connection ends, and hands them on.
pub fn listen(rank: u64, mut reader: BufReader<TcpStream>, events: Sender<Event>) {
    let mut line = Vec::new();
    loop {
        line.clear();
        let length = std::io::Read::take(&mut reader, MESSAGE_LIMIT).read_until(b'\n', &mut line);
        let message = length.ok().filter(|length| *length > 0).and_then(|_| serde_json::from_slice(&line).ok());
        let Some(message) = message else {
            events.send(Event::Gone(rank)).ok();
            return;
        };
        if events.send(Event::Heard(rank, message)).is_err() {
            return;
        }
    }
}

/// Writes a message; a connection that takes none is left to its reader to report.
fn say(stream: &mut TcpStream, message: &Message) {
    let mut line = serde_json::to_vec(message).expect("messages have no keys but texts");
    line.push(b'\n');
    stream.write_all(&line).ok();
}

fn beat(watch: &Watch) -> Message {
    Message::Beat(watch.entry.report(), watch.waits())
}

/// What a rank other than 0 knows of rank 0.
struct Client {
    watch: Arc<Watch>,
    stream: TcpStream,
    heard: Instant,
    report: Report,
    gone: bool,
}

/// Starts the thread that speaks with rank 0; `events` ends with `Event::Close`.
///
/// # Errors
/// Those of the system.
pub fn join(
    watch: Arc<Watch>,
    reader: BufReader<TcpStream>,
    sender: Sender<Event>,
    events: Receiver<Event>,
) -> std::io::Result<JoinHandle<()>> {
    let stream = prepare(&reader)?;
    thread::spawn(move || listen(0, reader, sender));
    Ok(thread::spawn(move || {
        let mut client = Client { watch, stream, heard: Instant::now(), report: Report::default(), gone: false };
        let mut next_beat = Instant::now();
        loop {
            if Instant::now() >= next_beat {
                say(&mut client.stream, &beat(&client.watch));
                next_beat = Instant::now() + BEAT;
                client.check_silence();
            }
            match events.recv_timeout(next_beat.saturating_duration_since(Instant::now())) {
                Ok(Event::Close) | Err(RecvTimeoutError::Disconnected) => break,
                Ok(event) => client.handle(event),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        leave(if client.gone { vec![] } else { vec![&client.stream] }, &events);
    }))
}

/// Ends connections whose other sides are still there, so that what was said last arrives: a connection with unread messages that is closed at once
/// may take them back.
fn leave(streams: Vec<&TcpStream>, events: &Receiver<Event>) {
    streams.iter().for_each(|stream| drop(stream.shutdown(Shutdown::Write)));
    let deadline = Instant::now() + LINGER;
    let mut open = streams.len();
    while open > 0
        && let Ok(event) = events.recv_timeout(deadline.saturating_duration_since(Instant::now()))
    {
        open -= usize::from(matches!(event, Event::Gone(_)));
    }
    streams.iter().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
}

/// The writing side of a connection whose reader waits for ever.
fn prepare(reader: &BufReader<TcpStream>) -> std::io::Result<TcpStream> {
    let stream = reader.get_ref().try_clone()?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    Ok(stream)
}

impl Client {
    fn handle(&mut self, event: Event) {
        match event {
            Event::Heard(_, message) => self.hear(message),
            Event::Gone(_) => {
                self.gone = true;
                self.lose_rank_0(Cause::Ended);
            }
            Event::Suspicion { rank, cause } => say(&mut self.stream, &Message::Suspicion(rank, cause)),
            Event::Abort(loss) => {
                if self.watch.check().is_ok() {
                    say(&mut self.stream, &Message::Lost(loss.clone()));
                    self.watch.lose(loss);
                }
            }
            Event::Finish => say(&mut self.stream, &Message::Finished),
            Event::Close => {}
        }
    }

    fn hear(&mut self, message: Message) {
        self.heard = Instant::now();
        match message {
            Message::Beat(report, _) => self.report = report,
            Message::Lost(loss) => drop(self.watch.lose(loss)),
            Message::Finished => self.watch.finish(),
            Message::Suspicion(..) => {}
        }
    }

    fn check_silence(&mut self) {
        let silence = self.heard.elapsed();
        if silence > self.watch.timeout {
            self.lose_rank_0(Cause::Silent(millis(silence)));
        }
    }

    fn lose_rank_0(&mut self, cause: Cause) {
        let heard = Report { age: self.report.age + millis(self.heard.elapsed()), ..self.report.clone() };
        let report = self.watch.report_of(0).unwrap_or(heard);
        self.watch.lose(Loss { rank: 0, cause, report });
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
