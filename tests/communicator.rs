//! Operations of the communicator against loops over all ranks, over shared memory and TCP, and what they move.

#[path = "support/contract.rs"]
mod contract;

use std::collections::BTreeMap;
use std::time::Duration;

use contract::LENGTHS;
use half::bf16;
use ir::mesh::Rank;
use ir::program::Direction;
use runtime::communicator::{
    Element, Error, Group, Operation, Options, Reduction, Traffic, Transport, World, run_ranks,
};
use runtime::launch::local::reserve_port;
#[cfg(feature = "mpi")]
use runtime::launch::read_launch;
use runtime::launch::{Address, Launch};

const SIZES: [u64; 5] = [1, 2, 3, 4, 8];

/// How the ranks of a test are connected: ranks as if on so many hosts, and the transport on a host.
const SHARED: (u64, Transport) = (1, Transport::Automatic);
const TCP: (u64, Transport) = (1, Transport::Tcp);
const TWO_HOSTS: (u64, Transport) = (2, Transport::Automatic);

/// Runs ranks and gives their results; a panic of a rank is one of the test.
fn on_ranks<R: Send>(size: u64, connection: (u64, Transport), run: impl Fn(&World, &Group) -> R + Sync) -> Vec<R> {
    let options = Options { timeout: Duration::from_secs(20), transport: connection.1 };
    let results = run_ranks(size, connection.0.min(size), options, |world| {
        let world = world.expect("all ranks come");
        let all = world.group(&(0..size).map(Rank).collect::<Vec<_>>());
        let result = run(&world, &all);
        world.finish().expect("all ranks finish");
        result
    });
    let results = results.expect("a port is free").into_iter();
    results.map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
}

/// A message whose elements differ between ranks and places, and whose sums depend on their order.
fn message<T>(rank: u64, length: usize, from: fn(f32) -> T) -> Vec<T> {
    contract::message(rank as usize, length, contract::order_shows, from)
}

/// Ranks that communicate between their hosts' memories.
struct Hosts<'a>(&'a World, &'a Group);

impl contract::Communicator for Hosts<'_> {
    fn size(&self) -> usize {
        self.1.size()
    }

    fn place(&self) -> usize {
        self.1.position()
    }

    fn all_reduce<T: Element>(&self, reduction: Reduction, data: &mut [T]) {
        self.1.all_reduce(reduction, data).expect("all ranks come");
    }

    fn reduce_scatter<T: Element>(&self, reduction: Reduction, data: &mut [T]) {
        self.1.reduce_scatter(reduction, data).expect("all ranks come");
    }

    fn all_gather<T: Element>(&self, data: &mut [T]) {
        self.1.all_gather(data).expect("all ranks come");
    }

    fn broadcast<T: Element>(&self, root: usize, data: &mut [T]) {
        self.1.broadcast(root, data).expect("all ranks come");
    }

    fn all_to_all<T: Element>(&self, data: &[T]) -> Vec<T> {
        self.1.all_to_all(data).expect("all ranks come")
    }

    fn exchange(&self, sent: [(usize, Vec<f32>); 2], received: [(usize, usize); 2]) -> [Vec<f32>; 2] {
        let directions = [Direction::Activation, Direction::Gradient];
        for ((to, data), direction) in sent.into_iter().zip(directions) {
            self.0.send(Rank(to as u64), direction, data).expect("goes on");
        }
        let mut directions = directions.into_iter();
        received.map(|(from, length)| {
            let mut data = vec![f32::NAN; length];
            let direction = directions.next().expect("as many as messages");
            self.0.recv(Rank(from as u64), direction, &mut data).expect("it was sent");
            data
        })
    }
}

fn check_contract(world: &World, all: &Group) {
    let ranks = Hosts(world, all);
    contract::check_reductions::<f32>(&ranks, contract::order_shows, |x| x);
    contract::check_reductions::<bf16>(&ranks, contract::order_shows, bf16::from_f32);
    contract::check_reductions::<f64>(&ranks, contract::order_shows, f64::from);
    contract::check_movements::<f32>(&ranks, |x| x);
    contract::check_movements::<bf16>(&ranks, bf16::from_f32);
    if all.size() > 2 {
        contract::check_messages(&ranks);
    }
    all.barrier().expect("all ranks come");
}

#[test]
fn operations_over_shared_memory() {
    for size in SIZES {
        on_ranks(size, SHARED, check_contract);
    }
}

#[test]
fn operations_over_tcp() {
    for size in SIZES {
        on_ranks(size, TCP, check_contract);
        on_ranks(size, TWO_HOSTS, check_contract);
    }
}

/// A process that `mpirun` started for the test below; MPI has one world for each process.
#[cfg(feature = "mpi")]
#[test]
fn message_passing_rank() {
    let Some(launch) = read_launch(|name| std::env::var(name).ok()).expect("variables of mpirun") else { return };
    let options = Options { timeout: Duration::from_secs(20), transport: Transport::Mpi };
    let world = World::connect(&launch, &[], options).expect("all ranks come");
    let all = world.group(&(0..world.size()).map(Rank).collect::<Vec<_>>());
    check_contract(&world, &all);
    if world.size() > 2 {
        exchange(&world, &all);
    }
    world.finish().expect("all ranks finish");
}

#[cfg(feature = "mpi")]
#[test]
fn operations_over_message_passing() {
    for size in SIZES {
        let mut command = std::process::Command::new("mpirun");
        command.args(["--allow-run-as-root", "--oversubscribe", "-n", &size.to_string()]);
        command.arg(std::env::current_exe().expect("a running program has a file"));
        match command.args(["--exact", "message_passing_rank"]).output() {
            Err(reason) => return println!("skipped: mpirun cannot be started: {reason}"),
            Ok(output) => {
                let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
                assert!(output.status.success(), "{size} ranks: {out}{err}");
                assert_eq!(out.matches("1 passed").count() as u64, size, "{out}{err}");
            }
        }
    }
}

#[test]
fn ranks_that_cannot_share_memory_use_tcp() {
    // One rank refuses, as one in a container of its own would have to; nobody may wait for it in memory.
    let port = reserve_port().expect("a port is free").port;
    let connect = |rank: u64| {
        let transport = if rank == 1 { Transport::Tcp } else { Transport::Automatic };
        let options = Options { timeout: Duration::from_secs(20), transport };
        let world = World::connect(&launch(rank, 3, port), &[], options).expect("all ranks come");
        let mut data = vec![rank as f32; 100_000];
        world.group(&[Rank(2), Rank(0), Rank(1)]).all_reduce(Reduction::Sum, &mut data).expect("all ranks come");
        world.finish().expect("all ranks finish");
        data
    };
    for data in start_each([0, 1, 2], connect) {
        assert!(data.iter().all(|sum| *sum == 3.0));
    }
}

#[test]
fn messages_between_stages_arrive_in_order_and_senders_do_not_wait() {
    for connection in [SHARED, TCP] {
        on_ranks(3, connection, exchange);
    }
}

/// Sends around a ring both ways; for three ranks and more.
fn exchange(world: &World, all: &Group) {
    let (rank, size) = (world.rank().0, world.size());
    let (next, before) = (Rank((rank + 1) % size), Rank((rank + size - 1) % size));
    // All send much more than fits into the queues before anyone receives.
    for message in 0..20_u32 {
        world.send(next, Direction::Activation, vec![message + 100 * rank as u32; 50_000]).expect("goes on");
        world.send(before, Direction::Gradient, vec![f32::from(message as u16); 3]).expect("goes on");
    }
    all.barrier().expect("all ranks come");
    for message in 0..20_u32 {
        let mut gradient = [0.0_f32; 3];
        world.recv(next, Direction::Gradient, &mut gradient).expect("it was sent");
        assert_eq!(gradient, [f32::from(message as u16); 3]);
        let activation = world.start_recv::<u32>(before, Direction::Activation, 50_000);
        assert_eq!(activation.wait().expect("it was sent"), vec![message + 100 * before.0 as u32; 50_000]);
    }
}

/// Bytes by operation, over all ranks.
fn sum_traffic(traffic: Vec<Vec<Traffic>>) -> BTreeMap<Operation, u64> {
    let mut sums = BTreeMap::new();
    for Traffic { operation, bytes, .. } in traffic.into_iter().flatten() {
        *sums.entry(operation).or_insert(0) += bytes;
    }
    sums
}

#[test]
fn bytes_are_those_of_the_definition() {
    for connection in [SHARED, TCP, TWO_HOSTS] {
        for size in SIZES {
            for length in LENGTHS {
                let length = length - length % size as usize;
                let traffic = on_ranks(size, connection, |world, all| {
                    let mut data = message::<f32>(world.rank().0, length, |x| x);
                    all.all_reduce(Reduction::Sum, &mut data).expect("all ranks come");
                    all.reduce_scatter(Reduction::Sum, &mut data).expect("all ranks come");
                    all.all_gather(&mut data).expect("all ranks come");
                    all.broadcast(0, &mut data).expect("all ranks come");
                    all.all_to_all(&data).expect("all ranks come");
                    if size > 1 && world.rank().0 == 1 {
                        world.send(Rank(0), Direction::Gradient, data.clone()).expect("goes on");
                    }
                    if size > 1 && world.rank().0 == 0 {
                        world.recv(Rank(1), Direction::Gradient, &mut data).expect("it was sent");
                    }
                    all.barrier().expect("all ranks come");
                    world.traffic()
                });
                let message = 4 * length as u64;
                let expected = [
                    (Operation::AllReduce, 2 * (size - 1) * message),
                    (Operation::ReduceScatter, (size - 1) * message),
                    (Operation::AllGather, (size - 1) * message),
                    (Operation::AllToAll, (size - 1) * message),
                    (Operation::Broadcast, (size - 1) * message),
                    (Operation::Send, if size > 1 { message } else { 0 }),
                ];
                let expected: BTreeMap<_, _> = expected.into_iter().filter(|(_, bytes)| *bytes > 0).collect();
                assert_eq!(sum_traffic(traffic), expected, "{length} over {size}, {connection:?}");
            }
        }
    }
}

#[test]
fn uneven_parts_move_as_many_bytes() {
    let traffic = on_ranks(4, SHARED, |world, all| {
        let mut data = message::<bf16>(world.rank().0, 100_001, bf16::from_f32);
        all.all_reduce(Reduction::Sum, &mut data).expect("all ranks come");
        world.traffic()
    });
    assert_eq!(sum_traffic(traffic), BTreeMap::from([(Operation::AllReduce, 2 * 3 * 2 * 100_001)]));
}

#[test]
fn started_operations_of_groups_run_beside_one_another() {
    for connection in [SHARED, TCP] {
        on_ranks(4, connection, |world, all| {
            let rank = world.rank().0;
            let rows = world.group(&[Rank(rank / 2 * 2), Rank(rank / 2 * 2 + 1)]);
            let columns = world.group(&[Rank(rank % 2), Rank(rank % 2 + 2)]);
            for round in 0..5 {
                let data = message::<f32>(rank, 200_001, |x| x);
                // Ranks start the groups in different orders; each group's own order is the same on all.
                let start_row = || rows.start_all_reduce(Reduction::Sum, data.clone());
                let start_column = || columns.start_reduce_scatter(Reduction::Sum, data.clone());
                let (row, column) = match (rank + round) % 2 {
                    0 => (start_row(), start_column()),
                    _ => {
                        let column = start_column();
                        (start_row(), column)
                    }
                };
                let gathered = columns.start_all_gather(message::<f32>(7, 1000, |x| x));
                let mut blocking = data.clone();
                all.all_reduce(Reduction::Max, &mut blocking).expect("all ranks come");
                let (row, column) = (row.wait().expect("all come"), column.wait().expect("all come"));
                assert_eq!(gathered.wait().expect("all come"), message::<f32>(7, 1000, |x| x));
                // A blocking operation of a group comes after those that were started.
                let later = rows.start_broadcast(0, vec![rank]);
                let mut last = [rank];
                rows.broadcast(1, &mut last).expect("all come");
                assert_eq!((later.wait().expect("all come"), last), (vec![rank / 2 * 2], [rank / 2 * 2 + 1]));
                let sum = |ranks: [u64; 2], place: usize| {
                    contract::order_shows(ranks[0] as usize, place) + contract::order_shows(ranks[1] as usize, place)
                };
                let (in_row, in_column) = ([rank / 2 * 2, rank / 2 * 2 + 1], [rank % 2, rank % 2 + 2]);
                assert!((0..data.len()).all(|place| row[place] == sum(in_row, place)));
                assert!(columns.part(data.len()).all(|place| column[place] == sum(in_column, place)));
            }
        });
    }
}

#[test]
fn other_operations_are_named_on_both_sides() {
    for connection in [SHARED, TCP] {
        let options = Options { timeout: Duration::from_secs(20), transport: connection.1 };
        let results = run_ranks(3, 1, options, |world| {
            let world = world.expect("all ranks come");
            let all = world.group(&[Rank(0), Rank(1), Rank(2)]);
            let length = if world.rank() == Rank(2) { 9 } else { 8 };
            all.all_reduce(Reduction::Sum, &mut vec![1.0_f32; length]).expect_err("lengths differ").to_string()
        });
        for message in results.expect("a port is free").into_iter().map(|result| result.expect("no panic")) {
            assert!(
                message.contains("all_reduce 1 on 32 bytes") && message.contains("all_reduce 1 on 36 bytes"),
                "{message}"
            );
        }
    }
}

#[test]
fn an_abort_a_panic_and_a_timeout_end_all_waits() {
    type Fault = fn(&World) -> String;
    let panics: Fault = |_| panic!("as the test wants");
    let aborts: Fault = |world| world.abort("no data left").to_string();
    let waits: Fault = |world| {
        while world.check().is_ok() {
            std::thread::sleep(Duration::from_millis(10));
        }
        world.check().expect_err("the others gave up").to_string()
    };
    for (fault, expected) in
        [(panics, "rank 2 panicked"), (aborts, "rank 2 gave up: no data left"), (waits, "rank 2 is alive but")]
    {
        for connection in [SHARED, TCP, TWO_HOSTS] {
            let options = Options { timeout: Duration::from_secs(2), transport: connection.1 };
            let results = run_ranks(4, connection.0, options, |world| {
                let world = world.expect("all ranks come");
                let all = world.group(&(0..4).map(Rank).collect::<Vec<_>>());
                all.barrier().expect("all ranks come");
                world.report(format_args!("forward of layer 3, rank {}", world.rank().0));
                if world.rank() == Rank(2) {
                    return fault(&world);
                }
                // Rank 3 waits for rank 2, rank 0 for rank 3, rank 1 for all: rank 2 is to be named.
                let error = match world.rank().0 {
                    3 => world.recv(Rank(2), Direction::Activation, &mut [0.0_f32]),
                    0 => world.recv(Rank(3), Direction::Activation, &mut [0.0_f32]),
                    _ => all.start_all_reduce(Reduction::Sum, vec![0.0_f32; 100_000]).wait().map(drop),
                };
                error.expect_err("rank 2 does not come").to_string()
            });
            let results = results.expect("a port is free");
            assert_eq!(results[2].is_err(), expected.contains("panicked"));
            for message in results.into_iter().flatten() {
                assert!(message.contains(expected), "{connection:?}: {message}");
                assert!(message.contains("last instruction: forward of layer 3, rank 2"), "{connection:?}: {message}");
                assert!(message.contains("barrier 1 of ranks 0, 1, 2, 3"), "{connection:?}: {message}");
            }
        }
    }
}

#[test]
fn ranks_of_different_runs_are_refused_on_all_ranks() {
    // World sizes and plans of ranks 0, 1, 2, and what all of them say.
    let rows = [
        ([3, 3, 3], ["a", "a", "b"], "rank 0 has plan a, rank 2 has b"),
        ([2, 3, 3], ["a", "a", "a"], "rank 0 has world size 2, rank 1 has 3"),
        ([3, 3, 2], ["a", "a", "a"], "rank 0 has world size 3, rank 2 has 2"),
    ];
    for (sizes, plans, expected) in rows {
        let port = reserve_port().expect("a port is free").port;
        let connect = |rank: u64| {
            let launch = launch(rank, sizes[rank as usize], port);
            let terms = [("plan", plans[rank as usize].to_owned())];
            World::connect(&launch, &terms, Options::default()).map(drop).expect_err("they differ")
        };
        for error in start_each([0, 1, 2], connect) {
            let Error::BadInput(problems) = &error else { panic!("{error}") };
            assert!(problems.iter().any(|problem| problem.what == expected), "{error}");
        }
    }
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let port = reserve_port().expect("a port is free").port;
    let options = Options { timeout: Duration::from_secs(1), ..Options::default() };
    let connect = |rank| {
        World::connect(&launch(rank, 3, port), &[], options).map(drop).expect_err("rank 1 is missing").to_string()
    };
    for error in start_each([0, 2], connect) {
        assert!(error.contains("rank 1 never came"), "{error}");
    }
}

/// Runs `connect` for each rank on a thread of its own.
fn start_each<R: Send, const N: usize>(ranks: [u64; N], connect: impl Fn(u64) -> R + Sync) -> Vec<R> {
    let connect = &connect;
    std::thread::scope(|scope| {
        let threads = ranks.map(|rank| scope.spawn(move || connect(rank)));
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

fn launch(rank: u64, world_size: u64, port: u16) -> Launch {
    let address = Address { host: "127.0.0.1".to_owned(), port };
    Launch { rank: Rank(rank), world_size, local_rank: rank, local_size: world_size, node: None, address }
}
