//! Groups of cards over a fake NCCL: the operations that all communicators promise, failures, and the real library's
//! unique id where it is installed.

#![allow(unsafe_code, reason = "the fake library reads and writes what ranks hand to it")]

#[path = "support/c_library.rs"]
mod c_library;
#[path = "support/contract.rs"]
mod contract;
#[path = "support/fake_nccl.rs"]
mod fake_nccl;

use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use c_library::make_library;
use fake_nccl::{ABORTS, CARD_WAITS, SAID_VERSION};
use half::bf16;
use ir::mesh::Rank;
use runtime::communicator::nccl::{
    ContextFunctions, DeviceGroup, DeviceOperation, DeviceSlice, DriverFunctions, Nccl, NcclFunctions, Ordering,
    Transfer, agree_on_unique_id,
};
use runtime::communicator::{Cause, Element, Error, Group, Options, Reduction, Transport, World, run_ranks};
use runtime::tensor::Format;

const SIZES: [u64; 4] = [1, 2, 3, 4];

/// Runs ranks and gives their results; a panic of a rank is one of the test.
fn on_ranks<R: Send>(size: u64, seconds: u64, run: impl Fn(World, Group) -> R + Sync) -> Vec<R> {
    let options = Options { timeout: Duration::from_secs(seconds), transport: Transport::Automatic };
    let results = run_ranks(size, 1, options, |world| {
        let world = world.expect("all ranks come");
        let all = world.group(&(0..size).map(Rank).collect::<Vec<_>>());
        run(world, all)
    });
    let results = results.expect("a port is free").into_iter();
    results.map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
}

fn fake() -> Arc<Nccl> {
    Arc::new(Nccl::new(fake_nccl::functions(), fake_nccl::driver()).expect("the fake is new enough"))
}

fn orderings() -> [Ordering; 2] {
    [Ordering::Host(Rc::new(|| {})), Ordering::Events(fake_nccl::context())]
}

/// Elements of a format of NCCL.
fn slice<T: Element>(data: &mut [T]) -> DeviceSlice {
    let format = if size_of::<T>() == 2 { Format::Brain } else { Format::Single };
    DeviceSlice { address: data.as_mut_ptr() as u64, length: data.len(), format }
}

fn run(group: &DeviceGroup, operation: &DeviceOperation) {
    group.start(operation).and_then(|pending| pending.wait()).and_then(|()| group.confirm()).expect("it goes well");
}

/// Ranks that communicate between their cards' memories.
struct Cards<'a>(&'a DeviceGroup);

impl contract::Communicator for Cards<'_> {
    fn size(&self) -> usize {
        self.0.size()
    }

    fn place(&self) -> usize {
        self.0.position()
    }

    fn all_reduce<T: Element>(&self, reduction: Reduction, data: &mut [T]) {
        run(self.0, &DeviceOperation::AllReduce(reduction, slice(data)));
    }

    fn reduce_scatter<T: Element>(&self, reduction: Reduction, data: &mut [T]) {
        run(self.0, &DeviceOperation::ReduceScatter(reduction, slice(data)));
    }

    fn all_gather<T: Element>(&self, data: &mut [T]) {
        run(self.0, &DeviceOperation::AllGather(slice(data)));
    }

    fn broadcast<T: Element>(&self, root: usize, data: &mut [T]) {
        run(self.0, &DeviceOperation::Broadcast(root, slice(data)));
    }

    fn all_to_all<T: Element>(&self, data: &[T]) -> Vec<T> {
        let (mut sent, mut received) = (data.to_vec(), data.to_vec());
        run(self.0, &DeviceOperation::AllToAll(slice(&mut sent), slice(&mut received)));
        received
    }

    fn exchange(&self, mut sent: [(usize, Vec<f32>); 2], received: [(usize, usize); 2]) -> [Vec<f32>; 2] {
        let mut found = received.map(|(_, length)| vec![f32::NAN; length]);
        let sends = sent.iter_mut().map(|(to, data)| Transfer::Send(*to, slice(data)));
        let receives = received.iter().zip(&mut found).map(|((from, _), data)| Transfer::Receive(*from, slice(data)));
        run(self.0, &DeviceOperation::Exchange(sends.chain(receives).collect()));
        found
    }
}

#[test]
fn operations_on_cards() {
    for size in SIZES {
        on_ranks(size, 20, |world, all| {
            for ordering in orderings() {
                let cards = DeviceGroup::connect(all.clone(), fake(), ordering).expect("all ranks connect");
                let ranks = Cards(&cards);
                contract::check_reductions::<f32>(&ranks, contract::whole, |x| x);
                contract::check_reductions::<bf16>(&ranks, contract::whole, bf16::from_f32);
                contract::check_movements::<f32>(&ranks, |x| x);
                contract::check_movements::<bf16>(&ranks, bf16::from_f32);
                if size > 2 {
                    contract::check_messages(&ranks);
                }
                cards.finish().expect("all ranks finish");
            }
            assert!(CARD_WAITS.get() > 0, "one of the orderings lets the card wait");
            assert_eq!(ABORTS.get(), 0);
            world.finish().expect("all ranks finish");
        });
    }
}

/// A driver as of CUDA 12.0 to 12.4, which is a library without the functions on contexts: made with the C compiler
/// that links these tests, and found by a process of its own.
#[test]
fn older_drivers_serve_where_the_host_waits() {
    const FOUND: &str = "PLANWRIGHT_TEST_DRIVER";
    if std::env::var_os(FOUND).is_some() {
        DriverFunctions::open().expect("it has what groups need");
        let refused = ContextFunctions::open().expect_err("it has no functions on contexts").to_string();
        assert!(refused.contains("cuCtx") && refused.contains("CUDA 12.5"), "{refused}");
        return;
    }
    let folder = tempfile::tempdir().expect("there is room for a folder");
    let names = ["StreamCreate", "StreamDestroy_v2", "StreamWaitEvent", "EventCreate", "EventRecord", "EventQuery"];
    let functions = names.into_iter().chain(["EventDestroy_v2", "CtxGetCurrent"]);
    let source: String = functions.map(|name| format!("int cu{name}(void) {{ return 0; }}\n")).collect();
    make_library(folder.path(), "libcuda.so.1", &source);
    let mut again = Command::new(std::env::current_exe().expect("a running program has a file"));
    again.args(["--exact", "older_drivers_serve_where_the_host_waits"]);
    let output = again.env(FOUND, "1").env("LD_LIBRARY_PATH", folder.path()).output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn a_rank_that_does_not_come_is_named_and_the_others_abort() {
    let results = on_ranks(3, 2, |world, all| {
        let cards = DeviceGroup::connect(all, fake(), orderings()[0].clone()).expect("all ranks connect");
        let mut data = vec![0.0_f32; 8];
        if world.rank() == Rank(1) {
            while world.check().is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
            return (world.check().err(), 1);
        }
        let operation = DeviceOperation::AllReduce(Reduction::Sum, slice(&mut data));
        let lost = cards.start(&operation).and_then(|pending| pending.wait()).err();
        (lost, ABORTS.get())
    });
    for (error, aborts) in results {
        let Some(Error::Lost(loss)) = error else { panic!("{error:?}") };
        assert_eq!(loss.rank, 1, "{loss}");
        assert!(matches!(loss.cause, Cause::Late(_)), "{loss}");
        assert_eq!(aborts, 1);
    }
}

#[test]
fn a_call_that_fails_ends_the_run_with_what_nccl_says() {
    let results = on_ranks(2, 5, |world, all| {
        let mut functions = fake_nccl::functions();
        if world.rank() == Rank(1) {
            functions.all_reduce = fake_nccl::failing_all_reduce;
        }
        let nccl = Arc::new(Nccl::new(functions, fake_nccl::driver()).expect("new enough"));
        let cards = DeviceGroup::connect(all, nccl, orderings()[0].clone()).expect("all ranks connect");
        let mut data = vec![0.0_f32; 8];
        let operation = DeviceOperation::AllReduce(Reduction::Sum, slice(&mut data));
        (cards.start(&operation).and_then(|pending| pending.wait()).err(), ABORTS.get())
    });
    for (error, aborts) in results {
        let text = error.expect("the run has ended").to_string();
        for part in ["rank 1 gave up", "all_reduce of ranks 0, 1", "a CUDA call failed", "fell off the bus"] {
            assert!(text.contains(part), "{part} in: {text}");
        }
        assert_eq!(aborts, 1);
    }
}

#[test]
fn a_start_that_never_ends_is_given_up() {
    let results = on_ranks(2, 1, |world, all| {
        let functions = NcclFunctions { get_async_error: fake_nccl::always_in_progress, ..fake_nccl::functions() };
        let nccl = Arc::new(Nccl::new(functions, fake_nccl::driver()).expect("new enough"));
        let error = DeviceGroup::connect(all, nccl, orderings()[0].clone()).err();
        drop(world);
        (error, ABORTS.get())
    });
    for (error, aborts) in results {
        assert!(matches!(error, Some(Error::Lost(_))), "{error:?}");
        assert_eq!(aborts, 1);
    }
}

#[test]
fn all_ranks_need_one_nccl_that_gives_an_id() {
    let bad_input = |error: Option<Error>, parts: &[&str]| {
        let Some(Error::BadInput(problems)) = error else { panic!("{error:?}") };
        let text = problems[0].to_string();
        parts.iter().for_each(|part| assert!(text.contains(part), "{part} in: {text}"));
    };
    let results = on_ranks(3, 5, |world, all| {
        SAID_VERSION.set(if world.rank() == Rank(2) { 22_103 } else { fake_nccl::VERSION });
        DeviceGroup::connect(all, fake(), orderings()[0].clone()).err()
    });
    results.into_iter().for_each(|error| bad_input(error, &["rank 0 has NCCL 2.29.5", "rank 2 has NCCL 2.21.3"]));
    let results = on_ranks(2, 5, |_world, all| {
        let functions = NcclFunctions { get_unique_id: fake_nccl::no_unique_id, ..fake_nccl::functions() };
        let nccl = Arc::new(Nccl::new(functions, fake_nccl::driver()).expect("new enough"));
        DeviceGroup::connect(all, nccl, orderings()[0].clone()).err()
    });
    results.into_iter().for_each(|error| bad_input(error, &["no unique id", "NCCL_SOCKET_IFNAME"]));
    SAID_VERSION.set(21_602);
    let old = Nccl::new(fake_nccl::functions(), fake_nccl::driver()).expect_err("it is too old").to_string();
    assert!(old.contains("NCCL 2.16.2 is too old"), "{old}");
}

#[test]
fn arguments_that_no_plan_has_are_refused() {
    let refused = |operation: fn(DeviceSlice) -> DeviceOperation, why: &str| {
        let results = run_ranks(1, 1, Options::default(), |world| {
            let world = world.expect("it comes");
            let all = world.group(&[Rank(0)]);
            let cards = DeviceGroup::connect(all, fake(), orderings()[0].clone()).expect("it connects");
            let mut data = vec![0.0_f32; 6];
            let _ = cards.start(&operation(slice(&mut data)));
        });
        let panic = results.expect("a port is free").remove(0).expect_err("it is refused");
        let text = panic
            .downcast_ref::<&str>()
            .map_or_else(|| panic.downcast_ref::<String>().cloned().unwrap_or_default(), |text| (*text).to_owned());
        assert!(text.contains(why), "{why} in: {text}");
    };
    refused(|slice| DeviceOperation::Broadcast(1, slice), "the root is a rank");
    refused(|slice| DeviceOperation::Exchange(vec![Transfer::Send(3, slice)]), "between ranks of the group");
    refused(|slice| DeviceOperation::AllGather(DeviceSlice { address: 0, ..slice }), "has an address");
    refused(|slice| DeviceOperation::AllToAll(slice, slice.part(0..3)), "keeps format and size");
}

/// The library's own id needs no card. CI installs the library; elsewhere the test says why it skips.
#[test]
fn the_real_library_gives_one_unique_id_to_all() {
    let functions = match NcclFunctions::open() {
        Ok(functions) => functions,
        Err(problem) => {
            println!("skipped: {problem}");
            assert!(problem.to_string().contains("LD_LIBRARY_PATH"), "{problem}");
            return;
        }
    };
    let version = functions.version().expect("it says its version");
    let ids = on_ranks(3, 20, |world, all| {
        let id = agree_on_unique_id(&all, &functions, version).expect("all agree");
        world.finish().expect("all ranks finish");
        id.internal
    });
    assert!(ids.iter().all(|id| *id == ids[0] && id.iter().any(|byte| *byte != 0)));
    if let Err(problem) = Nccl::open() {
        let text = problem.to_string();
        assert!(text.contains("libcuda.so.1") && text.contains("--device cpu"), "{text}");
    }
}
