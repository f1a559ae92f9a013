//! The lane of a group: its operations one after the other, on the caller's thread or on one of its own.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::chunk::Operation;
use super::error::{Cause, Error, Loss};
use super::wire::{Identity, Wire};

/// An operation that was started; it is told why if the group cannot be connected.
pub type Job = Box<dyn FnOnce(Result<&mut Wire, Error>) + Send>;
/// Connects the links of a group, with its first operation.
pub type Connect = Box<dyn FnOnce() -> Result<Wire, Error> + Send>;

/// Runs the operations of a group.
pub struct Lane {
    /// This rank's place in the group.
    pub me: usize,
    /// How the group is called.
    pub identity: Identity,
    links: Mutex<Links>,
    queue: Mutex<Queue>,
    changed: Condvar,
    sent: [AtomicU64; Operation::ALL.len()],
}

/// A lane as its users hold it; with the last of them its thread ends, once it has done its jobs.
pub struct Open(pub Arc<Lane>);

enum Links {
    Unconnected(Connect),
    Connected(Box<Wire>),
    Failed,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Jobs that wait or run.
    open: usize,
    has_thread: bool,
    closed: bool,
}

impl Lane {
    /// A lane whose links are connected with its first operation.
    pub fn new(me: usize, identity: Identity, connect: Connect) -> Lane {
        let links = Mutex::new(Links::Unconnected(connect));
        let (queue, changed) = (Mutex::default(), Condvar::new());
        Lane { me, identity, links, queue, changed, sent: Default::default() }
    }

    /// Adds payload bytes that left this rank.
    pub fn count(&self, operation: Operation, bytes: u64) {
        self.sent[operation.number()].fetch_add(bytes, Ordering::Relaxed);
    }

    /// Payload bytes that left this rank, once all operations that were started are done: the other side may have
    /// a message before this side has counted it.
    pub fn sent(&self, operation: Operation) -> u64 {
        self.await_started();
        self.sent[operation.number()].load(Ordering::Relaxed)
    }

    /// Runs an operation on this thread, once all that were started are done.
    pub fn now<T>(&self, run: impl FnOnce(Result<&mut Wire, Error>) -> T) -> T {
        self.await_started();
        self.with_wire(run)
    }

    fn await_started(&self) {
        let waited = self.changed.wait_while(lock(&self.queue), |queue| queue.open > 0);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Runs an operation on this thread if the lane is connected and none is under way, and the operation is ready.
    pub fn at_once<T>(&self, run: impl FnOnce(&mut Wire) -> Option<T>) -> Option<T> {
        if lock(&self.queue).open > 0 {
            return None;
        }
        match &mut *self.links.try_lock().ok()? {
            Links::Connected(wire) => run(wire),
            Links::Unconnected(_) | Links::Failed => None,
        }
    }

    /// Hands an operation to the lane's thread.
    pub fn push(lane: &Arc<Lane>, job: Job) {
        let mut queue = lock(&lane.queue);
        queue.jobs.push_back(job);
        queue.open += 1;
        if !queue.has_thread {
            queue.has_thread = true;
            let lane = lane.clone();
            thread::spawn(move || lane.work());
        }
        drop(queue);
        lane.changed.notify_all();
    }

    /// Does jobs in their order until the lane is closed.
    fn work(&self) {
        loop {
            let waited = self.changed.wait_while(lock(&self.queue), |queue| queue.jobs.is_empty() && !queue.closed);
            let job = waited.unwrap_or_else(PoisonError::into_inner).jobs.pop_front();
            let Some(job) = job else { return };
            if catch_unwind(AssertUnwindSafe(|| self.with_wire(job))).is_err() {
                let Identity { watch, .. } = &self.identity;
                watch.abort(Loss { rank: watch.rank, cause: Cause::Panicked, report: watch.entry.report() });
            }
            lock(&self.queue).open -= 1;
            self.changed.notify_all();
        }
    }

    fn with_wire<T>(&self, run: impl FnOnce(Result<&mut Wire, Error>) -> T) -> T {
        let mut links = lock(&self.links);
        if let Links::Unconnected(_) = &*links
            && let Links::Unconnected(connect) = std::mem::replace(&mut *links, Links::Failed)
        {
            match connect() {
                Ok(wire) => *links = Links::Connected(Box::new(wire)),
                Err(error) => return run(Err(error)),
            }
        }
        match &mut *links {
            Links::Connected(wire) => run(Ok(wire)),
            Links::Unconnected(_) | Links::Failed => run(Err(self.failed())),
        }
    }

    /// Why the links are not connected: what ended the run then.
    fn failed(&self) -> Error {
        let Identity { name, watch, .. } = &self.identity;
        let cause = Cause::Aborted(format!("{name} could not be connected"));
        watch.check().err().unwrap_or(Error::Lost(Loss { rank: watch.rank, cause, report: watch.entry.report() }))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        lock(&self.0.queue).closed = true;
        self.0.changed.notify_all();
    }
}

/// A lock that outlives a panic of one of its holders: the run ends by other means.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
