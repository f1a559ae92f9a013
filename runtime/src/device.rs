//! A device that computes with kernels: one allocation that holds all tensors of a rank, and the queue of its kernels.
//!
//! The allocation has two parts. In front lies what lives between steps: weights, gradients, optimizer state. Behind it
//! lie the values of a step, whose places are laid out once for each kind of step: a first pass through the step
//! computes nothing and only notes when each tensor begins and ends. Later passes take the same places in the same
//! order. Kernels are queued; the host waits for the device only where it reads numbers.

mod driver;
mod lives;
mod operators;
pub(crate) mod product;
mod update;

use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard};

use cubecl::client::Client;
use cubecl::future::block_on;
use cubecl::server::Handle;
use ir::error::Problem;
use ir::units::Bytes;
use kernels::{Buffer, Element, KernelList, ListedKernel, Queue};

use crate::Error;
use crate::tensor::{Format, StepKind};

pub use driver::{Driver, Found};
use lives::{Layout, Lives};
use product::Matrices;

pub(crate) use operators::{
    accumulate, accumulate_contraction, accumulate_lookup, apply, apply_two, are_one_kernel, attention_gradients,
};
pub(crate) use update::adamw;

/// Bytes of the largest tensor: kernels count elements in 32 bits.
const LARGEST_TENSOR: usize = 1 << 33;

/// Bytes at whose multiples tensors of listed kernels begin: as on NVIDIA's GPUs.
const LISTED_ALIGNMENT: usize = 512;

/// A device with the memory of one rank; clones are the same device.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    kernels: Kernels,
    memory: Mutex<Arena>,
    constants: Mutex<BTreeMap<Constant, Buffer>>,
    /// Products that cubek was tried on, and whether they came out right.
    tried: Mutex<HashMap<Matrices, bool>>,
}

/// What becomes of kernels.
enum Kernels {
    /// A device runs them.
    Run(Client),
    /// They are listed; all numbers that the host reads are zeros.
    Listed(KernelList),
}

/// Numbers that operators need and that stay the same: which, and how they were made.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Constant {
    /// Slopes of attention heads: first head and number of all, first query and number of all, local ones of both.
    Slopes([usize; 6]),
    /// Zeros instead, for as many heads.
    NoSlopes(usize),
    /// Cosines and sines of rotary positions: how many, and bits of the frequencies.
    Turns(usize, Vec<u64>),
}

struct Arena {
    alignment: usize,
    /// Bytes of what lives between steps.
    state: usize,
    /// Bytes of the largest tensor of it.
    largest: usize,
    /// What was written to state before there was memory.
    written: Vec<(usize, Vec<u8>)>,
    memory: Option<(Handle, usize)>,
    layouts: BTreeMap<(StepKind, usize), Arc<Layout>>,
    mode: Mode,
    /// Whether steps begin with values of NaN.
    poisons: bool,
}

enum Mode {
    /// Between steps.
    Idle,
    /// A first pass, which computes nothing.
    Tracing(Lives),
    /// A pass: its layout, and the number of the tensor that begins next.
    Running(Arc<Layout>, usize),
}

/// Where a tensor lies.
#[derive(Debug)]
pub(crate) struct Place {
    device: Device,
    /// First byte.
    start: usize,
    /// Number among the lives of a first pass.
    traced: Option<usize>,
}

impl Device {
    /// The device of a client; the seam for every driver of cubecl.
    pub fn new(client: Client) -> Device {
        let alignment = (client.properties().memory.alignment as usize).max(16);
        Device::of(Kernels::Run(client), alignment)
    }

    /// A device that runs nothing and lists the kernels that it would run.
    pub fn listing(list: KernelList) -> Device {
        Device::of(Kernels::Listed(list), LISTED_ALIGNMENT)
    }

    fn of(kernels: Kernels, alignment: usize) -> Device {
        let memory = Arena {
            alignment,
            state: 0,
            largest: 0,
            written: Vec::new(),
            memory: None,
            layouts: BTreeMap::new(),
            mode: Mode::Idle,
            poisons: false,
        };
        Device(Arc::new(Inner {
            kernels,
            memory: Mutex::new(memory),
            constants: Mutex::default(),
            tried: Mutex::default(),
        }))
    }

    /// The device behind whatever Vulkan driver there is.
    ///
    /// # Errors
    /// A host without one.
    #[cfg(feature = "wgpu")]
    pub fn wgpu() -> Result<Device, Problem> {
        let found = Driver::Wgpu.find("this host", "leave this out")?;
        found[0].open("this host").map(Device::new)
    }

    /// The same device with memory of its own, as for another rank.
    ///
    /// # Panics
    /// If it lists its kernels.
    pub fn anew(&self) -> Device {
        match &self.0.kernels {
            Kernels::Run(client) => Device::new(client.clone()),
            Kernels::Listed(_) => panic!("a list is of one rank"),
        }
    }

    /// Whether the device computes with a number format.
    pub fn has(&self, format: Format) -> bool {
        match &self.0.kernels {
            Kernels::Run(client) => client.properties().supports_type(element_of(format).kind()),
            Kernels::Listed(_) => true,
        }
    }

    /// Takes the kernels of a list that were sent so far; none of a device that runs them.
    pub fn take_kernels(&self) -> Vec<ListedKernel> {
        match &self.0.kernels {
            Kernels::Run(_) => Vec::new(),
            Kernels::Listed(list) => list.take_kernels(),
        }
    }

    /// Bytes of the one allocation; 0 before the first step.
    pub fn allocated_bytes(&self) -> usize {
        self.arena().memory.as_ref().map_or(0, |(_, bytes)| *bytes)
    }

    /// Lets every step begin with values of NaN, so that what no kernel writes is seen.
    pub fn poison_values(&self) {
        self.arena().poisons = true;
    }

    /// Begins a step if its layout is known; if not, a first pass through it, which [`Device::lay_out`] ends.
    pub(crate) fn enter(&self, kind: StepKind, micro_batches: usize) -> bool {
        let mut arena = self.arena();
        let layout = arena.layouts.get(&(kind, micro_batches)).cloned();
        let known = layout.is_some();
        arena.mode = layout.map_or_else(|| Mode::Tracing(Lives::default()), |layout| Mode::Running(layout, 0));
        if let Some((_, bytes)) = arena.memory.as_ref().filter(|_| known && arena.poisons) {
            for (start, words) in parts(bytes - arena.state) {
                let values = arena.view(arena.state + start, words, Element::Single);
                kernels::elementwise::fill(&self.queue(), f32::NAN, &values);
            }
        }
        known
    }

    /// Ends a first pass: lays its tensors out, and makes or enlarges the allocation.
    ///
    /// # Errors
    /// A device with too little memory, or tensors too large for kernels.
    pub(crate) fn lay_out(&self, kind: StepKind, micro_batches: usize) -> Result<(), Problem> {
        let mut arena = self.arena();
        let Mode::Tracing(lives) = std::mem::replace(&mut arena.mode, Mode::Idle) else {
            unreachable!("a first pass was begun")
        };
        let layout = lives.layout(arena.alignment);
        let largest = layout.places.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0).max(arena.largest);
        if largest > LARGEST_TENSOR {
            let what = format!("a tensor of {} is too large for the kernels", Bytes(largest as u64));
            let help =
                format!("plan with smaller micro-batches or more ranks: {} is the most", Bytes(LARGEST_TENSOR as u64));
            return Err(Problem::new(what, "a rank's device", help));
        }
        let needed = (arena.state + layout.size).max(arena.alignment);
        arena.layouts.insert((kind, micro_batches), Arc::new(layout));
        if arena.memory.as_ref().is_some_and(|(_, bytes)| *bytes >= needed) {
            return Ok(());
        }
        let before = arena.memory.replace((self.allocate(needed)?, needed));
        for (start, words) in parts(arena.state) {
            let new = arena.view(start, words, Element::Index);
            match &before {
                Some((handle, bytes)) => {
                    kernels::copy::copy(&self.queue(), &view(handle, *bytes, start, words, Element::Index), &new);
                }
                None => kernels::elementwise::fill(&self.queue(), 0.0, &Buffer { element: Element::Single, ..new }),
            }
        }
        for (start, bytes) in std::mem::take(&mut arena.written) {
            let buffer = arena.view(start, bytes.len().div_ceil(4), Element::Index);
            self.upload(&buffer, bytes);
        }
        Ok(())
    }

    fn upload(&self, buffer: &Buffer, bytes: Vec<u8>) {
        if let Kernels::Run(client) = &self.0.kernels {
            client.write(&buffer.handle, cubecl::bytes::Bytes::from_bytes_vec(bytes));
        }
    }

    /// Memory of the device that is no part of its pool: cubecl's pool sizes its pages by the largest allocation, and
    /// gives no more than a part of the device at once.
    fn allocate(&self, bytes: usize) -> Result<Handle, Problem> {
        let refuse = |what: String| {
            let help = "plan with smaller micro-batches, more recomputation or more ranks, or end what else uses the \
                        device";
            Problem::new(what, "a rank's device", help)
        };
        let client = match &self.0.kernels {
            Kernels::Run(client) => client,
            Kernels::Listed(_) => return Ok(self.queue().buffer(bytes / 4, Element::Single).handle),
        };
        let (properties, wanted) = (&client.properties().memory, Bytes(bytes as u64));
        let most = properties.max_memory().unwrap_or(properties.max_page_size);
        if bytes as u64 > most {
            return Err(refuse(format!("the step needs {wanted} of a device that gives {} at most", Bytes(most))));
        }
        let handle = client.memory_dedicated_allocation((), |()| client.empty(bytes));
        match block_on(client.sync_buffers([&handle])) {
            Ok(()) => Ok(handle),
            Err(error) => {
                Err(refuse(format!("the step needs {wanted}, and the device does not give it: {}", said(&error))))
            }
        }
    }

    /// Ends a step.
    pub(crate) fn leave(&self) {
        self.arena().mode = Mode::Idle;
    }

    /// Whether a first pass is under way, which computes nothing.
    pub(crate) fn is_tracing(&self) -> bool {
        matches!(self.arena().mode, Mode::Tracing(_))
    }

    pub(crate) fn queue(&self) -> Queue<'_> {
        match &self.0.kernels {
            Kernels::Run(client) => Queue::Device(client),
            Kernels::Listed(list) => Queue::List(list),
        }
    }

    /// A place for a tensor that begins.
    pub(crate) fn begin(&self, bytes: usize) -> Place {
        let mut arena = self.arena();
        let state = arena.state;
        let alignment = arena.alignment;
        let (start, traced) = match &mut arena.mode {
            Mode::Idle => {
                arena.state += bytes.max(1).next_multiple_of(alignment);
                arena.largest = arena.largest.max(bytes);
                (state, None)
            }
            Mode::Tracing(lives) => (0, Some(lives.begin(bytes.max(1)))),
            Mode::Running(layout, next) => {
                let (start, laid) = layout.places[*next];
                assert_eq!(laid, bytes.max(1), "a step begins the tensors of its first pass");
                *next += 1;
                (state + start, None)
            }
        };
        Place { device: self.clone(), start, traced }
    }

    /// A constant, made by `numbers` when it is first needed.
    pub(crate) fn constant(&self, which: Constant, numbers: impl FnOnce() -> Vec<f32>) -> Buffer {
        let mut constants = self.0.constants.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        constants.entry(which).or_insert_with(|| self.queue().numbers(&numbers())).clone()
    }

    /// Whether `attempt` at a product comes out right, which is found out when it is first asked; never where kernels are
    /// listed.
    pub(crate) fn has_tried(
        &self,
        matrices: Matrices,
        attempt: impl FnOnce(&Client, &Matrices) -> Result<(), String>,
    ) -> bool {
        let Kernels::Run(client) = &self.0.kernels else { return false };
        let mut tried = self.0.tried.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *tried.entry(matrices).or_insert_with(|| {
            let ended = catch_unwind(AssertUnwindSafe(|| attempt(client, &matrices)));
            let wrong = ended.unwrap_or_else(|_| Err("it panicked".to_owned())).err();
            if let Some(wrong) = &wrong {
                eprintln!("products {matrices:?} are computed by tiles of our own: {wrong}");
            }
            wrong.is_none()
        })
    }

    /// Waits for the kernels that were queued.
    ///
    /// # Errors
    /// A device that failed.
    pub(crate) fn wait(&self) -> Result<(), Error> {
        match &self.0.kernels {
            Kernels::Run(client) => block_on(client.sync()).map_err(|error| failed(&error)),
            Kernels::Listed(_) => Ok(()),
        }
    }

    /// Bytes of a buffer; waits for the kernels that were queued before.
    ///
    /// # Errors
    /// A kernel that failed.
    pub(crate) fn read(&self, buffer: &Buffer) -> Result<Vec<u8>, Error> {
        let length = buffer.length * buffer.element.bytes();
        let client = match &self.0.kernels {
            Kernels::Run(client) => client,
            Kernels::Listed(_) => return Ok(vec![0; length]),
        };
        let bytes = client.read_one(buffer.handle.clone()).map_err(|error| failed(&error))?;
        Ok(bytes[..length].to_vec())
    }

    fn arena(&self) -> MutexGuard<'_, Arena> {
        self.0.memory.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Arena {
    fn view(&self, start: usize, length: usize, element: Element) -> Buffer {
        let (handle, all) = self.memory.as_ref().expect("memory is made before the first kernel");
        view(handle, *all, start, length, element)
    }
}

/// A part of an allocation of `all` bytes.
fn view(handle: &Handle, all: usize, start: usize, length: usize, element: Element) -> Buffer {
    let end = all - start - length.max(1) * element.bytes();
    let handle = handle.clone().offset_start(start as u64).offset_end(end as u64);
    Buffer { handle, length, element }
}

/// Neighbouring parts of so many bytes, none too large for kernels: their first bytes and their words.
fn parts(bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    let part = LARGEST_TENSOR / 2;
    (0..bytes).step_by(part).map(move |start| (start, (bytes - start).min(part) / Element::Index.bytes()))
}

fn failed(error: &impl std::fmt::Display) -> Error {
    let help = "out of memory, plan with smaller micro-batches or more ranks; else it is a fault of the program or of the \
                device's driver";
    Error::Device(Problem::new(format!("the device failed: {}", said(error)), "a kernel of this step", help))
}

/// What the device says, without how the program came there.
fn said(error: &impl std::fmt::Display) -> String {
    let text = error.to_string();
    let lines =
        text.lines().map(str::trim).take_while(|line| !line.starts_with("Backtrace") && !line.starts_with("0:"));
    lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

impl Place {
    /// The memory; there is none in a first pass.
    pub(crate) fn buffer(&self, length: usize, format: Format) -> Buffer {
        self.device.arena().view(self.start, length, element_of(format))
    }

    /// The device.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Writes zeros, with which state begins.
    pub(crate) fn clear(&self, bytes: usize) {
        let is_state = matches!(self.device.arena().mode, Mode::Idle);
        if !is_state || self.device.allocated_bytes() > 0 {
            self.write(vec![0; bytes]);
        }
    }

    /// Writes bytes; they are kept until there is memory.
    pub(crate) fn write(&self, mut bytes: Vec<u8>) {
        // Devices copy words; places are whole ones.
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let mut arena = self.device.arena();
        match (&arena.mode, &arena.memory) {
            (Mode::Tracing(_), _) => {}
            (_, None) => arena.written.push((self.start, bytes)),
            (_, Some(_)) => {
                let buffer = arena.view(self.start, bytes.len() / 4, Element::Index);
                drop(arena);
                self.device.upload(&buffer, bytes);
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let (Some(number), Mode::Tracing(lives)) = (self.traced, &mut self.device.arena().mode) {
            lives.end(number);
        }
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("allocated_bytes", &self.allocated_bytes()).finish_non_exhaustive()
    }
}

fn element_of(format: Format) -> Element {
    match format {
        Format::Single => Element::Single,
        Format::Brain => Element::Brain,
        Format::Index => Element::Index,
    }
}
