//! What a rank knows of the run: whether it still goes on, what it waits for, what its neighbours report.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::board::{Board, Entry};
use super::control::Event;
use super::error::{Cause, Error, Loss, Report};

/// Time to wait for rank 0's judgement on a rank that did not come.
const JUDGEMENT: Duration = Duration::from_millis(1500);

/// Shared by all threads of a rank.
pub struct Watch {
    /// This rank.
    pub rank: u64,
    /// How long any wait may last.
    pub timeout: Duration,
    /// What this rank reports.
    pub entry: Entry,
    board: Board,
    /// Place on the board of each rank of the world; none for ranks of other hosts.
    places: Vec<Option<usize>>,
    /// Set with `state.loss`, to be read without the lock.
    lost: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
    events: Mutex<Sender<Event>>,
}

#[derive(Default)]
struct State {
    loss: Option<Loss>,
    finished: bool,
    /// By the waiting group's number: the rank it waits for, and since when.
    waits: BTreeMap<u64, (u64, Instant)>,
}

impl Watch {
    /// A watch over a run that begins; `events` leads to the thread that speaks with rank 0.
    pub fn new(rank: u64, timeout: Duration, board: Board, places: Vec<Option<usize>>, events: Sender<Event>) -> Watch {
        let place = places[usize::try_from(rank).expect("a rank")].expect("a rank is on its own host's board");
        Watch {
            rank,
            timeout,
            entry: board.entry(place),
            board,
            places,
            lost: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
            events: Mutex::new(events),
        }
    }

    /// What a rank of this host reports; none of another.
    pub fn report_of(&self, rank: u64) -> Option<Report> {
        let place = self.places.get(usize::try_from(rank).ok()?).copied().flatten()?;
        Some(self.board.read(place))
    }

    /// Whether the run goes on.
    ///
    /// # Errors
    /// What ended it.
    pub fn check(&self) -> Result<(), Error> {
        if !self.lost.load(Ordering::Acquire) {
            return Ok(());
        }
        let loss = self.lock().loss.clone();
        loss.map_or(Ok(()), |loss| Err(Error::Lost(loss)))
    }

    /// Ends the run on this rank, for the first reason that is given. True if it is the first.
    pub fn lose(&self, loss: Loss) -> bool {
        let mut state = self.lock();
        let first = state.loss.is_none() && !state.finished;
        if first {
            state.loss = Some(loss);
            self.lost.store(true, Ordering::Release);
        }
        self.changed.notify_all();
        first
    }

    /// Notes that all ranks have finished.
    pub fn finish(&self) {
        self.lock().finished = true;
        self.changed.notify_all();
    }

    /// Hands an event to the thread that speaks with rank 0.
    pub fn tell(&self, event: Event) {
        // After the end of that thread nobody is left to be told.
        self.events.lock().unwrap_or_else(PoisonError::into_inner).send(event).ok();
    }

    /// Notes that a group waits for a rank, or no longer waits.
    pub fn waiting(&self, group: u64, rank: Option<u64>) {
        let mut state = self.lock();
        match rank {
            Some(rank) => drop(state.waits.insert(group, (rank, Instant::now()))),
            None => drop(state.waits.remove(&group)),
        }
    }

    /// The ranks that this one waits for, those waited for longest first.
    pub fn waits(&self) -> Vec<u64> {
        let mut waits: Vec<(Instant, u64)> = self.lock().waits.values().map(|(rank, since)| (*since, *rank)).collect();
        waits.sort();
        waits.into_iter().map(|(_, rank)| rank).collect()
    }

    /// Says that `rank` did not come or that the link to it broke, and gives the judgement on what ended the run.
    pub fn suspect(&self, rank: u64, cause: Cause) -> Error {
        self.tell(Event::Suspicion { rank, cause: cause.clone() });
        self.wait_for_end(JUDGEMENT);
        let report = self.report_of(rank).unwrap_or_default();
        let loss = Loss { rank, cause, report };
        self.lose(loss.clone());
        self.check().err().unwrap_or(Error::Lost(loss))
    }

    /// Says that `rank` has not come for as long as a wait may last; otherwise as `suspect`.
    pub fn suspect_late(&self, rank: u64) -> Error {
        self.suspect(rank, Cause::Late(u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX)))
    }

    /// Ends the run on all ranks, and gives what ended it.
    pub fn abort(&self, loss: Loss) -> Error {
        self.tell(Event::Abort(loss.clone()));
        self.wait_for_end(JUDGEMENT);
        self.lose(loss.clone());
        self.check().err().unwrap_or(Error::Lost(loss))
    }

    /// Waits until the run ends; false if it did not in time.
    pub fn wait_for_end(&self, time: Duration) -> bool {
        let state = self.lock();
        let goes_on = |state: &mut State| state.loss.is_none() && !state.finished;
        let waited = self.changed.wait_timeout_while(state, time, goes_on);
        waited.is_ok_and(|(_, result)| !result.timed_out())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
