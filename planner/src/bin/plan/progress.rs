//! What happens beside a search: Ctrl-C ends it with the best so far, and a bar on a terminal shows how far it is.

use std::io::{IsTerminal, stderr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use planner::error::INTERRUPTED;
use planner::watch::Watch;
use signal_hook::consts::SIGINT;
use signal_hook::flag::{register, register_conditional_shutdown};

/// How long a search may take before a bar is worth showing.
const SILENCE: Duration = Duration::from_secs(1);
/// Time between two looks at a search.
const REFRESH: Duration = Duration::from_millis(100);

/// Does work that Ctrl-C ends early, and shows its progress on stderr if that is a terminal and the work takes long.
pub fn watched<T>(work: impl FnOnce(&Watch) -> T) -> T {
    let watch = Watch::default();
    end_on_interrupt(&watch);
    let (ended, end) = channel();
    let watch = &watch;
    thread::scope(|scope| {
        if stderr().is_terminal() {
            scope.spawn(move || show(watch, &end));
        }
        let result = work(watch);
        drop(ended);
        result
    })
}

/// The first interrupt asks the work to end, the second ends the program.
fn end_on_interrupt(watch: &Watch) {
    let stop = || Arc::clone(&watch.stop);
    let shutdown = register_conditional_shutdown(SIGINT, i32::from(INTERRUPTED), stop());
    // Where no handler can be set, an interrupt ends the program as it does any other.
    if shutdown.is_ok() {
        let _ = register(SIGINT, stop());
    }
}

fn show(watch: &Watch, end: &Receiver<()>) {
    let working = |time: Duration| end.recv_timeout(time) == Err(RecvTimeoutError::Timeout);
    if !working(SILENCE) {
        return;
    }
    let style = ProgressStyle::with_template("{bar:40} {pos} of {len}, {eta} left")
        .expect("the template names known fields only");
    let bar = ProgressBar::new_spinner().with_message("listing candidates");
    while working(REFRESH) {
        let total = watch.total.load(Ordering::Relaxed);
        if total == 0 {
            bar.tick();
            continue;
        }
        if bar.length().is_none() {
            bar.set_style(style.clone());
        }
        bar.set_length(total);
        bar.set_position(watch.done.load(Ordering::Relaxed));
    }
    bar.finish_and_clear();
}
