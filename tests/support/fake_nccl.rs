//! NCCL and the driver for tests on hosts without a card: "device" memory is this process's, ranks are its threads.
//!
//! An operation is posted, not done; the last rank that posts it does it for all. An event has come when the
//! operation before it on its stream was done.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use half::bf16;
use runtime::communicator::nccl::{
    ContextFunctions, DriverFunctions, Handle, IN_PROGRESS, NOT_READY, NcclFunctions, SUCCESS, UniqueId,
};

/// The version that the fake says unless told otherwise.
pub const VERSION: c_int = 22_905;

thread_local! {
    /// What this rank's `ncclGetVersion` says.
    pub static SAID_VERSION: Cell<c_int> = const { Cell::new(VERSION) };
    /// Communicators that this rank aborted.
    pub static ABORTS: Cell<u32> = const { Cell::new(0) };
    /// Waits of the card that this rank asked for.
    pub static CARD_WAITS: Cell<u32> = const { Cell::new(0) };
    static GROUPED: RefCell<Option<Vec<Call>>> = const { RefCell::new(None) };
    static GROUP_OF: Cell<Handle> = const { Cell::new(ptr::null_mut()) };
    static GROUP_STREAM: Cell<Handle> = const { Cell::new(ptr::null_mut()) };
}

static IDS: AtomicU64 = AtomicU64::new(1);
static MEETINGS: Mutex<BTreeMap<u64, Arc<Meeting>>> = Mutex::new(BTreeMap::new());

/// What ranks have posted under one number, by place.
type Posted = Vec<(usize, Vec<Call>)>;

/// The ranks of one unique id.
struct Meeting {
    size: usize,
    posts: Mutex<BTreeMap<u64, Posted>>,
    done: AtomicU64,
}

struct Communicator {
    meeting: Arc<Meeting>,
    place: usize,
    posted: Cell<u64>,
}

/// What a stream or an event stands behind.
#[derive(Clone, Default)]
struct Behind(Option<(Arc<Meeting>, u64)>);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    AllReduce,
    Reduce(usize),
    ReduceScatter,
    AllGather,
    Broadcast(usize),
    Send(usize),
    Receive(usize),
}

#[derive(Clone, Copy)]
struct Call {
    kind: Kind,
    from: usize,
    to: usize,
    count: usize,
    data_type: c_uint,
    reduction: c_uint,
}

/// All functions of the fake.
pub fn functions() -> NcclFunctions {
    NcclFunctions {
        get_version,
        get_unique_id,
        init_rank_config,
        get_async_error,
        get_last_error,
        finalize: ends_well,
        destroy,
        abort,
        group_start,
        group_end,
        all_reduce,
        reduce,
        reduce_scatter,
        all_gather,
        broadcast,
        send,
        recv,
    }
}

/// The fake's driver.
pub fn driver() -> DriverFunctions {
    DriverFunctions {
        stream_create: create_behind,
        stream_destroy: destroy_behind,
        stream_wait_event: waits_for_event,
        event_create: create_behind,
        event_record,
        event_query,
        event_destroy: destroy_behind,
    }
}

/// What a driver of CUDA 12.5 and newer has besides.
pub fn context() -> ContextFunctions {
    ContextFunctions { context_get_current, context_record_event: records_context, context_wait_event: context_waits }
}

/// A call that fails on this rank with "a CUDA call failed".
pub unsafe extern "C" fn failing_all_reduce(
    _: Handle,
    _: Handle,
    _: usize,
    _: c_uint,
    _: c_uint,
    _: Handle,
    _: Handle,
) -> c_int {
    1
}

/// NCCL that gives no unique id: a system call fails.
pub unsafe extern "C" fn no_unique_id(_: *mut UniqueId) -> c_int {
    2
}

/// NCCL whose calls never come to an end.
pub unsafe extern "C" fn always_in_progress(_: Handle, state: *mut c_int) -> c_int {
    unsafe { *state = IN_PROGRESS };
    SUCCESS
}

unsafe extern "C" fn get_version(version: *mut c_int) -> c_int {
    unsafe { *version = SAID_VERSION.get() };
    SUCCESS
}

unsafe extern "C" fn get_unique_id(id: *mut UniqueId) -> c_int {
    let number = IDS.fetch_add(1, Ordering::Relaxed).to_ne_bytes();
    let id = unsafe { &mut *id };
    id.internal.iter_mut().zip(number).for_each(|(sign, byte)| *sign = byte.cast_signed());
    SUCCESS
}

unsafe extern "C" fn init_rank_config(
    communicator: *mut Handle,
    size: c_int,
    id: UniqueId,
    place: c_int,
    config: *mut cudarc::nccl::sys::ncclConfig_t,
) -> c_int {
    assert_eq!(unsafe { (*config).blocking }, 0, "calls do not block");
    let number = u64::from_ne_bytes(std::array::from_fn(|place| id.internal[place].cast_unsigned()));
    let [size, place] = [size, place].map(|number| usize::try_from(number).expect("not negative"));
    let new = || Arc::new(Meeting { size, posts: Mutex::default(), done: AtomicU64::new(0) });
    let meeting = MEETINGS.lock().expect("no panic").entry(number).or_insert_with(new).clone();
    assert_eq!(meeting.size, size);
    let made = Communicator { meeting, place, posted: Cell::new(0) };
    unsafe { *communicator = Box::into_raw(Box::new(made)).cast() };
    IN_PROGRESS
}

unsafe extern "C" fn get_async_error(_: Handle, state: *mut c_int) -> c_int {
    unsafe { *state = SUCCESS };
    SUCCESS
}

unsafe extern "C" fn get_last_error(_: Handle) -> *const c_char {
    c"the fake card fell off the bus".as_ptr()
}

unsafe extern "C" fn ends_well(_: Handle) -> c_int {
    SUCCESS
}

unsafe extern "C" fn destroy(communicator: Handle) -> c_int {
    drop(unsafe { Box::from_raw(communicator.cast::<Communicator>()) });
    SUCCESS
}

unsafe extern "C" fn abort(communicator: Handle) -> c_int {
    ABORTS.set(ABORTS.get() + 1);
    unsafe { destroy(communicator) }
}

unsafe extern "C" fn group_start() -> c_int {
    GROUPED.with_borrow_mut(|grouped| assert!(grouped.replace(Vec::new()).is_none(), "groups are not nested"));
    SUCCESS
}

unsafe extern "C" fn group_end() -> c_int {
    let calls = GROUPED.take().expect("a group was started");
    if !calls.is_empty() {
        post(GROUP_OF.get(), GROUP_STREAM.get(), calls);
    }
    IN_PROGRESS
}

/// Functions of NCCL that post a call: their arguments before communicator and stream, and what is posted.
macro_rules! posts {
    ($($name:ident($($argument:ident: $type:ty),*) => $kind:expr, $buffers:expr, $count:expr, $format:expr;)*) => {$(
        unsafe extern "C" fn $name($($argument: $type,)* communicator: Handle, stream: Handle) -> c_int {
            issue($kind, $buffers, $count, $format, [communicator, stream])
        }
    )*};
}

posts! {
    all_reduce(from: Handle, to: Handle, count: usize, data: c_uint, reduction: c_uint)
        => Kind::AllReduce, [from, to], count, [data, reduction];
    reduce(from: Handle, to: Handle, count: usize, data: c_uint, reduction: c_uint, root: c_int)
        => Kind::Reduce(root as usize), [from, to], count, [data, reduction];
    reduce_scatter(from: Handle, to: Handle, count: usize, data: c_uint, reduction: c_uint)
        => Kind::ReduceScatter, [from, to], count, [data, reduction];
    all_gather(from: Handle, to: Handle, count: usize, data: c_uint)
        => Kind::AllGather, [from, to], count, [data, 0];
    broadcast(from: Handle, to: Handle, count: usize, data: c_uint, root: c_int)
        => Kind::Broadcast(root as usize), [from, to], count, [data, 0];
    send(from: Handle, count: usize, data: c_uint, peer: c_int)
        => Kind::Send(peer as usize), [from, from], count, [data, 0];
    recv(to: Handle, count: usize, data: c_uint, peer: c_int)
        => Kind::Receive(peer as usize), [to, to], count, [data, 0];
}

fn issue(
    kind: Kind,
    [from, to]: [Handle; 2],
    count: usize,
    [data_type, reduction]: [c_uint; 2],
    [communicator, stream]: [Handle; 2],
) -> c_int {
    let call = Call { kind, from: from as usize, to: to as usize, count, data_type, reduction };
    let alone = GROUPED.with_borrow_mut(|grouped| match grouped {
        Some(calls) => {
            calls.push(call);
            false
        }
        None => true,
    });
    GROUP_OF.set(communicator);
    GROUP_STREAM.set(stream);
    if alone {
        post(communicator, stream, vec![call]);
    }
    IN_PROGRESS
}

/// Posts a rank's calls; with the last rank's they are done for all.
fn post(communicator: Handle, stream: Handle, calls: Vec<Call>) {
    let communicator = unsafe { &*communicator.cast::<Communicator>() };
    let meeting = &communicator.meeting;
    communicator.posted.set(communicator.posted.get() + 1);
    let number = communicator.posted.get();
    unsafe { *stream.cast::<Behind>() = Behind(Some((meeting.clone(), number))) };
    let mut posts = meeting.posts.lock().expect("no panic");
    let posted = posts.entry(number).or_default();
    posted.push((communicator.place, calls));
    if posted.len() == meeting.size {
        let mut all = posts.remove(&number).expect("it is there");
        all.sort_by_key(|(place, _)| *place);
        run(&all.into_iter().map(|(_, calls)| calls).collect::<Vec<_>>());
        meeting.done.store(number, Ordering::Release);
    }
}

/// Does the calls of all ranks, by place.
fn run(ranks: &[Vec<Call>]) {
    if ranks.iter().flatten().any(|call| matches!(call.kind, Kind::Send(_) | Kind::Receive(_))) {
        return exchange(ranks);
    }
    for place in 0..ranks[0].len() {
        let calls: Vec<Call> = ranks.iter().map(|calls| calls[place]).collect();
        let first = calls[0];
        assert!(calls.iter().all(|call| (call.kind, call.count) == (first.kind, first.count)), "ranks agree");
        let inputs =
            |count: usize| calls.iter().map(|call| read(call.from, count, first.data_type)).collect::<Vec<_>>();
        let reduced = |count: usize| {
            let mut inputs = inputs(count).into_iter();
            let first_input = inputs.next().expect("a rank");
            inputs.fold(first_input, |sum, next| {
                let pairs = sum.into_iter().zip(next);
                pairs.map(|(a, b)| if first.reduction == 2 { a.max(b) } else { a + b }).collect()
            })
        };
        let count = first.count;
        match first.kind {
            Kind::AllReduce => {
                let result = reduced(count);
                calls.iter().for_each(|call| write(call.to, &result, first.data_type));
            }
            Kind::Reduce(root) => write(calls[root].to, &reduced(count), first.data_type),
            Kind::ReduceScatter => {
                let result = reduced(count * ranks.len());
                let parts = calls.iter().zip(0..);
                parts.for_each(|(call, place)| {
                    write(call.to, &result[place * count..(place + 1) * count], first.data_type)
                });
            }
            Kind::AllGather => {
                let result = inputs(count).concat();
                calls.iter().for_each(|call| write(call.to, &result, first.data_type));
            }
            Kind::Broadcast(root) => {
                let result = read(calls[root].from, count, first.data_type);
                calls.iter().for_each(|call| write(call.to, &result, first.data_type));
            }
            Kind::Send(_) | Kind::Receive(_) => unreachable!("messages are exchanged"),
        }
    }
}

/// Matches sends and receives between two ranks in their order.
fn exchange(ranks: &[Vec<Call>]) {
    for (to, calls) in ranks.iter().enumerate() {
        for (from, sender) in ranks.iter().enumerate() {
            let receives = calls.iter().filter(|call| call.kind == Kind::Receive(from));
            let sends = sender.iter().filter(|call| call.kind == Kind::Send(to));
            assert_eq!(receives.clone().count(), sends.clone().count(), "each message is sent and received");
            for (send, receive) in sends.zip(receives) {
                assert_eq!((send.count, send.data_type), (receive.count, receive.data_type), "both sides agree");
                write(receive.to, &read(send.from, send.count, send.data_type), send.data_type);
            }
        }
    }
}

/// fp32 (7) and bf16 (9) as NCCL numbers them; every test's number is exact in fp32.
fn read(address: usize, count: usize, data_type: c_uint) -> Vec<f32> {
    if count == 0 {
        return Vec::new();
    }
    match data_type {
        7 => unsafe { std::slice::from_raw_parts(address as *const f32, count) }.to_vec(),
        9 => unsafe { std::slice::from_raw_parts(address as *const bf16, count) }.iter().map(|x| x.to_f32()).collect(),
        other => panic!("no test sends data type {other}"),
    }
}

fn write(address: usize, numbers: &[f32], data_type: c_uint) {
    for (place, number) in numbers.iter().enumerate() {
        match data_type {
            7 => unsafe { *(address as *mut f32).add(place) = *number },
            _ => unsafe { *(address as *mut bf16).add(place) = bf16::from_f32(*number) },
        }
    }
}

unsafe extern "C" fn create_behind(made: *mut Handle, _: c_uint) -> c_int {
    unsafe { *made = Box::into_raw(Box::new(Behind::default())).cast() };
    0
}

unsafe extern "C" fn destroy_behind(behind: Handle) -> c_int {
    drop(unsafe { Box::from_raw(behind.cast::<Behind>()) });
    0
}

unsafe extern "C" fn event_record(event: Handle, stream: Handle) -> c_int {
    unsafe { *event.cast::<Behind>() = (*stream.cast::<Behind>()).clone() };
    0
}

unsafe extern "C" fn event_query(event: Handle) -> c_int {
    let Behind(behind) = unsafe { &*event.cast::<Behind>() };
    match behind {
        Some((meeting, number)) if meeting.done.load(Ordering::Acquire) < *number => NOT_READY,
        _ => 0,
    }
}

unsafe extern "C" fn waits_for_event(_: Handle, _: Handle, _: c_uint) -> c_int {
    CARD_WAITS.set(CARD_WAITS.get() + 1);
    0
}

unsafe extern "C" fn context_get_current(context: *mut Handle) -> c_int {
    unsafe { *context = ptr::dangling_mut() };
    0
}

unsafe extern "C" fn records_context(_: Handle, _: Handle) -> c_int {
    0
}

unsafe extern "C" fn context_waits(_: Handle, _: Handle) -> c_int {
    CARD_WAITS.set(CARD_WAITS.get() + 1);
    0
}
