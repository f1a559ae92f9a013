//! NCCL with one rank: what a host with one GPU can show of it.

use std::rc::Rc;
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::CUdeviceptr;
use ir::mesh::Rank;

use crate::communicator::nccl::{
    ContextFunctions, DeviceGroup, DeviceOperation, DeviceSlice, Nccl, Ordering, readable_version,
};
use crate::communicator::{Group, Options, Reduction, run_ranks};
use crate::tensor::Format;

/// Elements of a message: no multiple of anything.
const LENGTH: usize = 100_003;

/// Runs every operation with one rank on the first card, and says what was seen.
///
/// # Errors
/// What failed; that NCCL is not installed begins with `skipped`.
pub fn check_nccl() -> Result<String, String> {
    let nccl = Arc::new(Nccl::open().map_err(|problem| format!("skipped: {}", problem.what))?);
    let version = readable_version(nccl.version);
    let results = run_ranks(1, 1, Options::default(), |world| {
        let world = world.map_err(|error| error.to_string())?;
        let seen = with_context(|| operations(&world.group(&[Rank(0)]), &nccl))?;
        world.finish().map_err(|error| error.to_string())?;
        Ok(seen)
    });
    let result = results.map_err(|error| error.to_string())?.into_iter().next().expect("there is one rank");
    let seen: Result<Vec<&str>, String> = result.map_err(|_| "the rank panicked".to_owned())?;
    Ok(format!("NCCL {version}: one rank keeps its numbers in every operation, {}", seen?.join(" and ")))
}

/// Makes the first card's context this thread's.
pub(super) fn with_context<R>(run: impl FnOnce() -> Result<R, String>) -> Result<R, String> {
    let card = result::device::get(0).map_err(in_words)?;
    // SAFETY: the card is the driver's, and its context is given back below.
    #[allow(unsafe_code)]
    unsafe {
        let context = result::primary_ctx::retain(card).map_err(in_words)?;
        let done = result::ctx::set_current(context).map_err(in_words).and_then(|()| run());
        result::primary_ctx::release(card).map_err(in_words)?;
        done
    }
}

/// All operations, in each way to order them with computations that the driver has.
fn operations(ranks: &Group, nccl: &Arc<Nccl>) -> Result<Vec<&'static str>, String> {
    // The host waits for the card before each operation; a failure then shows in the operation.
    let host = Ordering::Host(Rc::new(|| {
        result::ctx::synchronize().ok();
    }));
    let mut seen = Vec::new();
    let events = ContextFunctions::open().ok().map(|functions| ("ordered by events", Ordering::Events(functions)));
    for (name, ordering) in [("ordered by the host", host)].into_iter().chain(events) {
        let cards = DeviceGroup::connect(ranks.clone(), nccl.clone(), ordering).map_err(|error| error.to_string())?;
        for operation in 0..5 {
            keeps_numbers(&cards, operation)?;
        }
        cards.finish().map_err(|error| error.to_string())?;
        seen.push(name);
    }
    Ok(seen)
}

/// Runs an operation on numbers in the card's memory, which with one rank stay as they are.
#[allow(unsafe_code)]
fn keeps_numbers(cards: &DeviceGroup, operation: usize) -> Result<(), String> {
    let numbers: Vec<f32> = (0..LENGTH).map(|place| place as f32 - 1e4).collect();
    let bytes = size_of_val(&numbers[..]);
    // SAFETY: the memory is as long as the numbers, and is freed when nothing uses it any more.
    unsafe {
        let [from, to] = [allocate(bytes)?, allocate(bytes)?];
        result::memcpy_htod_sync(from, &numbers).map_err(in_words)?;
        result::memcpy_htod_sync(to, &vec![f32::NAN; LENGTH]).map_err(in_words)?;
        let [slice, other] = [from, to].map(|address| DeviceSlice { address, length: LENGTH, format: Format::Single });
        let (operation, written) = match operation {
            0 => (DeviceOperation::AllReduce(Reduction::Sum, slice), from),
            1 => (DeviceOperation::ReduceScatter(Reduction::Max, slice), from),
            2 => (DeviceOperation::AllGather(slice), from),
            3 => (DeviceOperation::Broadcast(0, slice), from),
            _ => (DeviceOperation::AllToAll(slice, other), to),
        };
        let done = cards.start(&operation).and_then(|pending| pending.wait()).and_then(|()| cards.confirm());
        done.map_err(|error| error.to_string())?;
        let mut found = vec![0.0_f32; LENGTH];
        result::memcpy_dtoh_sync(&mut found, written).map_err(in_words)?;
        [from, to].into_iter().try_for_each(|address| result::free_sync(address)).map_err(in_words)?;
        match found == numbers {
            true => Ok(()),
            false => Err(format!("{operation:?} changed the numbers of one rank")),
        }
    }
}

#[allow(unsafe_code)]
pub(super) fn allocate(bytes: usize) -> Result<CUdeviceptr, String> {
    // SAFETY: a context is current; whoever asks frees the memory.
    unsafe { result::malloc_sync(bytes) }.map_err(in_words)
}

pub(super) fn in_words(error: DriverError) -> String {
    format!("the driver says {error:?}")
}
