//! Ranks as threads of one process, for tests and measurements.

use std::any::Any;
use std::io;
use std::thread;

use ir::mesh::Rank;

use super::{Error, Options, World};
use crate::launch::local::reserve_port;
use crate::launch::{Address, Launch};

/// Runs `run` on `world_size` threads, one rank each, as if they lived on `nodes` hosts: those of different hosts
/// communicate over TCP. Gives the result or panic of each.
///
/// # Errors
/// If no port is free.
pub fn run_ranks<R: Send>(
    world_size: u64,
    nodes: u64,
    options: Options,
    run: impl Fn(Result<World, Error>) -> R + Sync,
) -> io::Result<Vec<Result<R, Box<dyn Any + Send>>>> {
    let reserved = reserve_port()?;
    let run = &run;
    Ok(thread::scope(|scope| {
        let launches = (0..world_size).map(|rank| launch(rank, world_size, nodes, reserved.port));
        let start = |launch: Launch| scope.spawn(move || run(World::connect(&launch, &[], options)));
        let threads: Vec<_> = launches.map(start).collect();
        threads.into_iter().map(thread::ScopedJoinHandle::join).collect()
    }))
}

fn launch(rank: u64, world_size: u64, nodes: u64, port: u16) -> Launch {
    let local_size = world_size.div_ceil(nodes);
    Launch {
        rank: Rank(rank),
        world_size,
        local_rank: rank % local_size,
        local_size,
        node: Some(rank / local_size),
        address: Address { host: "127.0.0.1".to_owned(), port },
    }
}
