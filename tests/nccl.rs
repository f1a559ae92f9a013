//! Groups of cards over a fake NCCL: operations against the `local` communicator, failures, and the real library's
//! unique id where it is installed.

#![allow(unsafe_code, reason = "the fake library reads and writes what ranks hand to it")]

#[path = "support/fake_nccl.rs"]
mod fake_nccl;

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use fake_nccl::{ABORTS, CARD_WAITS, SAID_VERSION};
use half::bf16;
use ir::mesh::Rank;
use runtime::communicator::nccl::{
    DeviceGroup, DeviceOperation, DeviceSlice, Nccl, NcclFunctions, Ordering, Transfer, agree_on_unique_id,
};
use runtime::communicator::{Cause, Error, Group, Options, Reduction, Transport, World, run_ranks};
use runtime::tensor::Format;

const SIZES: [u64; 4] = [1, 2, 3, 4];
/// Even and odd parts, and parts that are empty.
const LENGTHS: [usize; 5] = [1, 2, 7, 12, 1000];

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
    [Ordering::Host(Rc::new(|| {})), Ordering::Events]
}

fn singles(data: &mut [f32]) -> DeviceSlice {
    DeviceSlice { address: data.as_mut_ptr() as u64, length: data.len(), format: Format::Single }
}

fn brains(data: &mut [bf16]) -> DeviceSlice {
    DeviceSlice { address: data.as_mut_ptr() as u64, length: data.len(), format: Format::Brain }
}

/// A small whole number, so that sums are exact in every order.
fn message(rank: u64, length: usize) -> Vec<f32> {
    (0..length).map(|place| ((rank as usize * 31 + place * 17) % 64) as f32 - 20.0).collect()
}

fn run(group: &DeviceGroup, operation: &DeviceOperation) {
    group.start(operation).and_then(|pending| pending.wait()).and_then(|()| group.confirm()).expect("it goes well");
}

#[test]
fn operations_on_cards_give_what_local_ones_do() {
    for size in SIZES {
        on_ranks(size, 20, |world, all| {
            for ordering in orderings() {
                let cards = DeviceGroup::connect(all.clone(), fake(), ordering).expect("all ranks connect");
                for length in LENGTHS {
                    compare(&world, &all, &cards, length);
                }
                cards.finish().expect("all ranks finish");
            }
            assert!(CARD_WAITS.get() > 0, "one of the orderings lets the card wait");
            assert_eq!(ABORTS.get(), 0);
            world.finish().expect("all ranks finish");
        });
    }
}

fn compare(world: &World, all: &Group, cards: &DeviceGroup, length: usize) {
    let (rank, size) = (world.rank().0, all.size());
    for reduction in [Reduction::Sum, Reduction::Max] {
        let (mut card, mut local) = (message(rank, length), message(rank, length));
        run(cards, &DeviceOperation::AllReduce(reduction, singles(&mut card)));
        all.all_reduce(reduction, &mut local).expect("it goes well");
        assert_eq!(card, local, "all_reduce of {length}");
        let (mut card, mut local) = (message(rank, length), message(rank, length));
        run(cards, &DeviceOperation::ReduceScatter(reduction, singles(&mut card)));
        all.reduce_scatter(reduction, &mut local).expect("it goes well");
        assert_eq!(card, local, "reduce_scatter of {length}: other parts stay as they were");
    }
    let narrow: Vec<bf16> = message(rank, length).into_iter().map(bf16::from_f32).collect();
    let (mut card, mut local) = (narrow.clone(), narrow);
    run(cards, &DeviceOperation::AllGather(brains(&mut card)));
    all.all_gather(&mut local).expect("it goes well");
    assert_eq!(card, local, "all_gather of {length}");
    for root in 0..size {
        let (mut card, mut local) = (message(rank, length), message(rank, length));
        run(cards, &DeviceOperation::Broadcast(root, singles(&mut card)));
        all.broadcast(root, &mut local).expect("it goes well");
        assert_eq!(card, local, "broadcast of {length} from {root}");
    }
    let mut sent = message(rank, length * size);
    let mut card = vec![f32::NAN; length * size];
    let local = all.all_to_all(&sent).expect("it goes well");
    run(cards, &DeviceOperation::AllToAll(singles(&mut sent), singles(&mut card)));
    assert_eq!(card, local, "all_to_all of {length}");
}

#[test]
fn neighbours_send_to_each_other_at_once() {
    on_ranks(3, 20, |world, all| {
        let cards = DeviceGroup::connect(all, fake(), orderings()[0].clone()).expect("all ranks connect");
        let (me, size) = (cards.position(), cards.size());
        let (next, before) = ((me + 1) % size, (me + size - 1) % size);
        let mut sent = [message(me as u64, 5), message(me as u64 + 10, 5)];
        let [mut from_before, mut from_next] = [vec![0.0; 5], vec![0.0; 5]];
        let [forward, backward] = sent.each_mut().map(|data| singles(data));
        run(
            &cards,
            &DeviceOperation::Exchange(vec![
                Transfer::Send(next, forward),
                Transfer::Send(before, backward),
                Transfer::Receive(before, singles(&mut from_before)),
                Transfer::Receive(next, singles(&mut from_next)),
            ]),
        );
        assert_eq!(from_before, message(before as u64, 5));
        assert_eq!(from_next, message(next as u64 + 10, 5));
        cards.finish().expect("all ranks finish");
        world.finish().expect("all ranks finish");
    });
}

#[test]
fn a_rank_that_does_not_come_is_named_and_the_others_abort() {
    let results = on_ranks(3, 2, |world, all| {
        let cards = DeviceGroup::connect(all, fake(), orderings()[0].clone()).expect("all ranks connect");
        let mut data = message(0, 8);
        if world.rank() == Rank(1) {
            while world.check().is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
            return (world.check().err(), 1);
        }
        let operation = DeviceOperation::AllReduce(Reduction::Sum, singles(&mut data));
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
        let mut data = message(0, 8);
        let operation = DeviceOperation::AllReduce(Reduction::Sum, singles(&mut data));
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
            let mut data = message(0, 6);
            let _ = cards.start(&operation(singles(&mut data)));
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
