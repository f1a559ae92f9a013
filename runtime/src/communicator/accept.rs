//! Connections that other hosts' ranks make for their groups, kept until the group asks for them.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use bytemuck::{Pod, Zeroable};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

/// Time between looks at whether connections are still awaited.
const LOOK: Duration = Duration::from_millis(100);
/// Time that a stranger has to say who it is.
const GREETING: Duration = Duration::from_secs(5);

/// What a rank says first on a connection.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct LinkGreeting {
    /// Number of the run, known to its ranks only.
    pub run: u64,
    /// Number of the group.
    pub group: u64,
    /// The rank that connects.
    pub rank: u64,
}

/// Takes connections for as long as it lives.
pub struct Acceptor {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// By group and rank.
    arrived: Mutex<BTreeMap<(u64, u64), TcpStream>>,
    changed: Condvar,
    closed: AtomicBool,
}

impl Acceptor {
    /// Starts to take connections of a run.
    ///
    /// # Errors
    /// Those of the system.
    pub fn start(listener: TcpListener, run: u64) -> io::Result<Acceptor> {
        listener.set_nonblocking(true)?;
        let shared = Arc::new(Shared::default());
        let acceptor = Acceptor { shared: shared.clone() };
        thread::spawn(move || {
            let time = Timespec::try_from(LOOK).expect("a fraction of a second");
            while !shared.closed.load(Ordering::Relaxed) {
                poll(&mut [PollFd::new(&listener, PollFlags::IN)], Some(&time)).ok();
                while let Ok((stream, _)) = listener.accept() {
                    let shared = shared.clone();
                    thread::spawn(move || shared.greet(stream, run));
                }
            }
        });
        Ok(acceptor)
    }

    /// The connection of a rank for a group, if it comes in time.
    pub fn take(&self, group: u64, rank: u64, time: Duration) -> Option<TcpStream> {
        let arrived = self.shared.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        let absent = |arrived: &mut BTreeMap<_, _>| !arrived.contains_key(&(group, rank));
        let waited = self.shared.changed.wait_timeout_while(arrived, time, absent);
        waited.unwrap_or_else(PoisonError::into_inner).0.remove(&(group, rank))
    }
}

impl Shared {
    fn greet(&self, mut stream: TcpStream, run: u64) {
        let mut greeting = LinkGreeting::zeroed();
        let read = stream
            .set_nonblocking(false)
            .and_then(|()| stream.set_read_timeout(Some(GREETING)))
            .and_then(|()| stream.read_exact(bytemuck::bytes_of_mut(&mut greeting)));
        if read.is_ok() && greeting.run == run {
            let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
            arrived.insert((greeting.group, greeting.rank), stream);
            self.changed.notify_all();
        }
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Relaxed);
    }
}

/// Connects to a rank's acceptor.
///
/// # Errors
/// Those of the system.
pub fn connect_link(address: SocketAddr, greeting: LinkGreeting, time: Duration) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&address, time)?;
    stream.write_all(bytemuck::bytes_of(&greeting))?;
    Ok(stream)
}
