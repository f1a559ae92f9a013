//! Operations of a group of ranks on memory of their cards.

use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::ops::Range;
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::nccl::sys::{ncclDataType_t, ncclRedOp_t};
use ir::error::Problem;

use super::library::{ContextFunctions, DriverFunctions, Handle, IN_PROGRESS, NOT_READY, Nccl, SUCCESS};
use super::meeting::{agree_on_unique_id, start_communicator};
use crate::communicator::chunk::{Operation, part};
use crate::communicator::error::{Cause, Error, Loss};
use crate::communicator::wire::Identity;
use crate::communicator::{Group, Reduction};
use crate::tensor::Format;

/// Looks without sleeping: most operations that are waited for are nearly done.
const LOOKS: u32 = 200;
/// Sleep between later looks.
const SLEEP: Duration = Duration::from_micros(50);
/// A stream that does not wait for the default one (`CU_STREAM_NON_BLOCKING`).
const NON_BLOCKING: u32 = 1;
/// An event without times (`CU_EVENT_DISABLE_TIMING`).
const NO_TIMING: u32 = 2;

/// Neighbouring elements in a card's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSlice {
    /// Address of the first.
    pub address: u64,
    /// How many they are.
    pub length: usize,
    /// Their format.
    pub format: Format,
}

/// A message of an exchange between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// To the group's rank of this place.
    Send(usize, DeviceSlice),
    /// From it.
    Receive(usize, DeviceSlice),
}

/// An operation of a group, with the meaning of [`Group`]'s operation of its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceOperation {
    /// Reduces over all ranks.
    AllReduce(Reduction, DeviceSlice),
    /// Reduces this rank's part over all ranks, in place.
    ReduceScatter(Reduction, DeviceSlice),
    /// Fills the slice with the parts of all ranks.
    AllGather(DeviceSlice),
    /// Gives rank i the i-th of equal parts of the first slice; the second gets such parts from all ranks.
    AllToAll(DeviceSlice, DeviceSlice),
    /// Fills the slice with that of the rank of this place.
    Broadcast(usize, DeviceSlice),
    /// Messages that are under way together, so that two ranks may send to each other.
    Exchange(Vec<Transfer>),
}

/// How operations and computations wait for each other. Computations run on streams that are not known here.
#[derive(Clone)]
pub enum Ordering {
    /// The host waits: for computations with this function before an operation, and for an operation before
    /// computations go on.
    Host(Rc<dyn Fn()>),
    /// The card waits, through events of its context (CUDA 12.5 on).
    Events(ContextFunctions),
}

/// Ranks that communicate between their cards. Belongs to the thread that made it, as the card's context does.
/// Operations run in the order in which they are started, which must be the same on all ranks.
pub struct DeviceGroup {
    nccl: Arc<Nccl>,
    host: Group,
    ordering: Ordering,
    communicator: Handle,
    stream: Handle,
    /// All events that were made, and those that nothing waits for.
    events: RefCell<Vec<Handle>>,
    idle: RefCell<Vec<Handle>>,
    /// The event of the last operation, while it may be under way.
    last: Cell<Option<Handle>>,
    started: Cell<u64>,
    aborted: Cell<bool>,
}

/// An operation under way.
#[must_use]
pub struct DevicePending<'a> {
    group: &'a DeviceGroup,
    event: Handle,
}

impl DeviceSlice {
    /// Some of its elements.
    pub fn part(self, range: Range<usize>) -> DeviceSlice {
        assert!(range.start <= range.end && range.end <= self.length, "a part lies within its slice");
        let address = self.address + (range.start * self.format.bytes()) as u64;
        DeviceSlice { address, length: range.len(), ..self }
    }

    fn pointer(self) -> Handle {
        assert!(self.address != 0 || self.length == 0, "a slice with elements has an address");
        self.address as Handle
    }

    fn data_type(self) -> u32 {
        let data_type = match self.format {
            Format::Single => ncclDataType_t::ncclFloat32,
            Format::Brain => ncclDataType_t::ncclBfloat16,
            Format::Index => ncclDataType_t::ncclUint32,
        };
        data_type as u32
    }
}

impl DeviceGroup {
    /// Makes a group of the ranks of `host`, on the card whose context is this thread's. All of them must make it.
    ///
    /// # Errors
    /// `BadInput` if the ranks' NCCL differ or the thread has no context; what ended the run.
    #[allow(unsafe_code)]
    pub fn connect(host: Group, nccl: Arc<Nccl>, ordering: Ordering) -> Result<DeviceGroup, Error> {
        let id = agree_on_unique_id(&host, &nccl.functions, nccl.version)?;
        let mut stream = ptr::null_mut();
        // SAFETY: the pointer is to a handle, which the call writes.
        let result = unsafe { (nccl.driver.stream_create)(&raw mut stream, NON_BLOCKING) };
        if result != SUCCESS {
            let help = "the card's context must be current on this thread";
            let what = format!("no stream for communication: CUresult {result}");
            return Err(Error::BadInput(vec![Problem::new(what, "cuStreamCreate", help)]));
        }
        let mut group = DeviceGroup {
            nccl,
            host,
            ordering,
            communicator: ptr::null_mut(),
            stream,
            events: RefCell::default(),
            idle: RefCell::default(),
            last: Cell::default(),
            started: Cell::default(),
            aborted: Cell::default(),
        };
        let (size, place) = (group.size(), group.position());
        group.say(format_args!("start of NCCL in {}", group.identity().name));
        group.communicator =
            start_communicator(&group.nccl, id, size, place).map_err(|reason| group.give_up("start", &reason))?;
        group.until("start", || group.call_is_done("start"))?;
        Ok(group)
    }

    /// Number of its ranks.
    pub fn size(&self) -> usize {
        self.host.size()
    }

    /// This rank's place among them.
    pub fn position(&self) -> usize {
        self.host.position()
    }

    /// Starts an operation once what was computed before is there.
    ///
    /// # Errors
    /// What ended the run.
    ///
    /// # Panics
    /// If places are not of this group, parts of an all_to_all are not equal, slices differ in format, or a slice has
    /// elements but no address.
    pub fn start(&self, operation: &DeviceOperation) -> Result<DevicePending<'_>, Error> {
        self.identity().watch.check()?;
        let name = operation.name();
        self.started.set(self.started.get() + 1);
        self.say(format_args!("{name} {} of {}", self.started.get(), self.identity().name));
        let event = self.event()?;
        match &self.ordering {
            Ordering::Host(computed) => computed(),
            Ordering::Events(context) => {
                self.driver(name, |driver| {
                    // SAFETY: the event is this group's, the context this thread's.
                    #[allow(unsafe_code)]
                    unsafe {
                        let recorded = (context.context_record_event)(current(context)?, event);
                        driver_result(recorded)?;
                        driver_result((driver.stream_wait_event)(self.stream, event, 0))
                    }
                })?;
            }
        }
        let result = self.issue(operation);
        self.checked(name, result)?;
        self.until(name, || self.call_is_done(name))?;
        // SAFETY: event and stream are this group's.
        #[allow(unsafe_code)]
        self.driver(name, |driver| driver_result(unsafe { (driver.event_record)(event, self.stream) }))?;
        self.last.set(Some(event));
        Ok(DevicePending { group: self, event })
    }

    /// Waits until all operations that were started are done: what an error on the card shows at the latest.
    ///
    /// # Errors
    /// What ended the run.
    pub fn confirm(&self) -> Result<(), Error> {
        match self.last.take() {
            Some(event) => self.until("operations", || self.event_has_come(event)),
            None => Ok(()),
        }
    }

    /// Ends the communicator once all ranks have come to this.
    ///
    /// # Errors
    /// What ended the run.
    #[allow(unsafe_code)]
    pub fn finish(self) -> Result<(), Error> {
        self.confirm()?;
        // SAFETY: the communicator is this group's and nothing is under way.
        let result = unsafe { (self.nccl.functions.finalize)(self.communicator) };
        self.checked("end", result)?;
        self.until("end", || self.call_is_done("end"))
    }

    /// Calls NCCL. Uneven parts go one by one, since NCCL's parts are equal.
    #[allow(unsafe_code)]
    fn issue(&self, operation: &DeviceOperation) -> c_int {
        let (calls, size, me) = (&self.nccl.functions, self.size(), self.position());
        let (communicator, stream) = (self.communicator, self.stream);
        let even = |slice: DeviceSlice| slice.length.is_multiple_of(size);
        // SAFETY: communicator and stream are this group's; whoever starts an operation answers for its slices, and
        // parts lie within them.
        unsafe {
            match operation {
                DeviceOperation::AllReduce(reduction, slice) => {
                    let (data, kind) = (slice.pointer(), slice.data_type());
                    (calls.all_reduce)(data, data, slice.length, kind, in_nccl(*reduction), communicator, stream)
                }
                DeviceOperation::ReduceScatter(reduction, slice) if even(*slice) => {
                    let own = slice.part(part(slice.length, me, size));
                    let (kind, how) = (slice.data_type(), in_nccl(*reduction));
                    (calls.reduce_scatter)(slice.pointer(), own.pointer(), own.length, kind, how, communicator, stream)
                }
                DeviceOperation::ReduceScatter(reduction, slice) => self.together((0..size).map(|root| {
                    let of_root = slice.part(part(slice.length, root, size));
                    let (data, kind, how) = (of_root.pointer(), slice.data_type(), in_nccl(*reduction));
                    (calls.reduce)(data, data, of_root.length, kind, how, to_int(root), communicator, stream)
                })),
                DeviceOperation::AllGather(slice) if even(*slice) => {
                    let own = slice.part(part(slice.length, me, size));
                    let kind = slice.data_type();
                    (calls.all_gather)(own.pointer(), slice.pointer(), own.length, kind, communicator, stream)
                }
                DeviceOperation::AllGather(slice) => self
                    .together((0..size).map(|root| self.broadcast(root, slice.part(part(slice.length, root, size))))),
                DeviceOperation::Broadcast(root, slice) => self.broadcast(*root, *slice),
                DeviceOperation::AllToAll(from, to) => {
                    assert!(
                        from.format == to.format && from.length == to.length,
                        "an all_to_all keeps format and size"
                    );
                    assert!(even(*from), "the parts of an all_to_all are equal");
                    let parts = |place| part(from.length, place, size);
                    self.together((0..size).flat_map(|place| {
                        let (sent, received) = (from.part(parts(place)), to.part(parts(place)));
                        [Transfer::Send(place, sent), Transfer::Receive(place, received)]
                            .map(|each| self.transfer(each))
                    }))
                }
                DeviceOperation::Exchange(transfers) => {
                    self.together(transfers.iter().map(|transfer| self.transfer(*transfer)))
                }
            }
        }
    }

    /// Issues several calls as one, so that none waits for another.
    #[allow(unsafe_code)]
    fn together(&self, calls: impl Iterator<Item = c_int>) -> c_int {
        // SAFETY: the calls have no arguments.
        let start = unsafe { (self.nccl.functions.group_start)() };
        if start != SUCCESS {
            return start;
        }
        let failed = calls.fold(SUCCESS, |first, result| if is_failure(first) { first } else { result });
        // SAFETY: as above; a group that was started is ended whatever its calls gave.
        let end = unsafe { (self.nccl.functions.group_end)() };
        if is_failure(failed) { failed } else { end }
    }

    #[allow(unsafe_code)]
    fn broadcast(&self, root: usize, slice: DeviceSlice) -> c_int {
        assert!(root < self.size(), "the root is a rank of the group");
        let (data, kind) = (slice.pointer(), slice.data_type());
        let broadcast = self.nccl.functions.broadcast;
        // SAFETY: as in `issue`.
        unsafe { broadcast(data, data, slice.length, kind, to_int(root), self.communicator, self.stream) }
    }

    #[allow(unsafe_code)]
    fn transfer(&self, transfer: Transfer) -> c_int {
        let (Transfer::Send(place, slice) | Transfer::Receive(place, slice)) = transfer;
        assert!(place < self.size(), "a message goes between ranks of the group");
        let (data, length, kind, place) = (slice.pointer(), slice.length, slice.data_type(), to_int(place));
        let calls = &self.nccl.functions;
        // SAFETY: as in `issue`.
        unsafe {
            match transfer {
                Transfer::Send(..) => (calls.send)(data, length, kind, place, self.communicator, self.stream),
                Transfer::Receive(..) => (calls.recv)(data, length, kind, place, self.communicator, self.stream),
            }
        }
    }

    /// Waits on the host until something is done.
    fn until(&self, what: &str, done: impl Fn() -> Result<bool, Error>) -> Result<(), Error> {
        let Identity { watch, key, .. } = self.identity();
        let (since, mut looks) = (Instant::now(), 0);
        // NCCL does not say which rank is missing. Each rank says that it waits for the next one, and a chain of waits
        // leads to the rank that waits for nobody.
        let members = self.host.members();
        let next = members[(self.position() + 1) % members.len()].0;
        let mut wait = || loop {
            if done()? {
                return Ok(());
            }
            looks += 1;
            if looks <= LOOKS {
                std::hint::spin_loop();
                continue;
            }
            watch.check()?;
            if looks == LOOKS + 1 {
                watch.waiting(*key, Some(next));
            }
            if since.elapsed() > watch.timeout {
                return Err(match next == watch.rank {
                    true => self.give_up(what, "NCCL does not come to an end"),
                    false => watch.suspect_late(next),
                });
            }
            std::thread::sleep(SLEEP);
        };
        let result = wait();
        if looks > LOOKS {
            watch.waiting(*key, None);
        }
        if result.is_err() {
            self.abort();
        }
        result
    }

    /// Whether NCCL's last call has been done.
    #[allow(unsafe_code)]
    fn call_is_done(&self, what: &str) -> Result<bool, Error> {
        let mut state = SUCCESS;
        // SAFETY: the communicator is this group's, the pointer to one number.
        let result = unsafe { (self.nccl.functions.get_async_error)(self.communicator, &raw mut state) };
        self.checked(what, result)?;
        self.checked(what, state)?;
        Ok(state == SUCCESS)
    }

    /// Whether the stream has come to an event. NCCL is asked too: a stream may stand still after an error.
    #[allow(unsafe_code)]
    fn event_has_come(&self, event: Handle) -> Result<bool, Error> {
        // SAFETY: the event is this group's.
        match unsafe { (self.nccl.driver.event_query)(event) } {
            SUCCESS => Ok(true),
            NOT_READY => self.call_is_done("operations").map(|_| false),
            result => Err(self.give_up("operations", &format!("the card failed (CUresult {result})"))),
        }
    }

    fn event(&self) -> Result<Handle, Error> {
        if let Some(event) = self.idle.borrow_mut().pop() {
            return Ok(event);
        }
        let mut event = ptr::null_mut();
        // SAFETY: the pointer is to a handle, which the call writes.
        #[allow(unsafe_code)]
        self.driver("event", |driver| driver_result(unsafe { (driver.event_create)(&raw mut event, NO_TIMING) }))?;
        self.events.borrow_mut().push(event);
        Ok(event)
    }

    fn driver(&self, what: &str, call: impl FnOnce(&DriverFunctions) -> Result<(), c_int>) -> Result<(), Error> {
        call(&self.nccl.driver).map_err(|result| self.give_up(what, &format!("the driver gives CUresult {result}")))
    }

    fn checked(&self, what: &str, result: c_int) -> Result<(), Error> {
        match is_failure(result) {
            true => Err(self.give_up(what, &self.nccl.functions.explain(result, self.communicator))),
            false => Ok(()),
        }
    }

    /// Ends the run on all ranks.
    fn give_up(&self, what: &str, reason: &str) -> Error {
        self.abort();
        let Identity { name, watch, .. } = self.identity();
        let cause = Cause::Aborted(format!("NCCL, {what} of {name}: {reason}"));
        watch.abort(Loss { rank: watch.rank, cause, report: watch.entry.report() })
    }

    /// Ends the kernels that wait for other ranks.
    #[allow(unsafe_code)]
    fn abort(&self) {
        if !self.aborted.replace(true) && !self.communicator.is_null() {
            // SAFETY: the communicator is this group's and is not used any more.
            unsafe { (self.nccl.functions.abort)(self.communicator) };
        }
    }

    fn say(&self, what: std::fmt::Arguments) {
        self.identity().watch.entry.collective(what);
    }

    fn identity(&self) -> &Identity {
        self.host.identity()
    }
}

impl DevicePending<'_> {
    /// Lets what is computed from here on wait for the operation.
    ///
    /// # Errors
    /// What ended the run, as far as it shows by now.
    pub fn wait(self) -> Result<(), Error> {
        let DevicePending { group, event } = self;
        match &group.ordering {
            Ordering::Host(_) => group.until("operations", || group.event_has_come(event))?,
            Ordering::Events(context) => {
                // SAFETY: the event is this group's, the context this thread's.
                #[allow(unsafe_code)]
                group.driver("operations", |_| {
                    driver_result(unsafe { (context.context_wait_event)(current(context)?, event) })
                })?;
                group.call_is_done("operations")?;
            }
        }
        // A wait that was given to the card holds for what the event stood for then: it may be recorded anew.
        group.idle.borrow_mut().push(event);
        if group.last.get() == Some(event) && matches!(group.ordering, Ordering::Host(_)) {
            group.last.set(None);
        }
        Ok(())
    }
}

impl Drop for DeviceGroup {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        let failed = self.identity().watch.check().is_err() || std::thread::panicking();
        if failed || self.last.get().is_some() {
            self.abort();
        }
        // SAFETY: these are this group's and nothing uses them any more; NCCL frees a communicator that was aborted.
        unsafe {
            if !self.aborted.get() && !self.communicator.is_null() {
                (self.nccl.functions.destroy)(self.communicator);
            }
            for event in self.events.take() {
                (self.nccl.driver.event_destroy)(event);
            }
            (self.nccl.driver.stream_destroy)(self.stream);
        }
    }
}

impl DeviceOperation {
    fn name(&self) -> &'static str {
        let operation = match self {
            DeviceOperation::AllReduce(..) => Operation::AllReduce,
            DeviceOperation::ReduceScatter(..) => Operation::ReduceScatter,
            DeviceOperation::AllGather(_) => Operation::AllGather,
            DeviceOperation::AllToAll(..) => Operation::AllToAll,
            DeviceOperation::Broadcast(..) => Operation::Broadcast,
            DeviceOperation::Exchange(_) => Operation::Send,
        };
        operation.name()
    }
}

/// This thread's context.
#[allow(unsafe_code)]
fn current(functions: &ContextFunctions) -> Result<Handle, c_int> {
    let mut context = ptr::null_mut();
    // SAFETY: the pointer is to a handle, which the call writes.
    driver_result(unsafe { (functions.context_get_current)(&raw mut context) })?;
    Ok(context)
}

fn is_failure(result: c_int) -> bool {
    result != SUCCESS && result != IN_PROGRESS
}

fn driver_result(result: c_int) -> Result<(), c_int> {
    match result {
        0 => Ok(()),
        failure => Err(failure),
    }
}

fn in_nccl(reduction: Reduction) -> u32 {
    let reduction = match reduction {
        Reduction::Sum => ncclRedOp_t::ncclSum,
        Reduction::Max => ncclRedOp_t::ncclMax,
    };
    reduction as u32
}

fn to_int(place: usize) -> c_int {
    c_int::try_from(place).expect("ranks fit 31 bits")
}
