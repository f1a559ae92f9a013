//! What a running search tells others and hears from them: how far it is, and whether to end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Shared by a search and whoever watches it.
#[derive(Debug, Default)]
pub struct Watch {
    /// Once set, searches end at their next step with the best that they have.
    pub stop: Arc<AtomicBool>,
    /// Steps that are done: candidates of a search, or numbers of GPUs of a sweep.
    pub done: AtomicU64,
    /// Steps in all; 0 until they are counted.
    pub total: AtomicU64,
}

impl Watch {
    /// Whether searches have to end.
    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Says how many steps there are.
    pub fn begin(&self, total: u64) {
        self.total.store(total, Ordering::Relaxed);
    }

    /// Says that one more step is done.
    pub fn advance(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    /// Says how many steps are done.
    pub fn reach(&self, done: u64) {
        self.done.store(done, Ordering::Relaxed);
    }

    /// A watch for a search that is one step of this: it ends with this, and its own steps are not seen.
    pub fn of_a_step(&self) -> Watch {
        Watch { stop: Arc::clone(&self.stop), ..Watch::default() }
    }
}
