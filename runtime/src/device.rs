//! A device that computes with kernels: one allocation that holds all tensors of a rank, and the queue of its kernels.
//!
//! The allocation has two parts. In front lies what lives between steps: weights, gradients, optimizer state. Behind it
//! lie the values of a step, whose places are laid out once for each kind of step: a first pass through the step
//! computes nothing and only notes when each tensor begins and ends. Later passes take the same places in the same
//! order. Kernels are queued; the host waits for the device only where it reads numbers.

mod lives;
mod operators;
mod product;
mod update;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use cubecl::bytes::Bytes;
use cubecl::client::Client;
use cubecl::server::Handle;
use ir::error::Problem;
use kernels::{Buffer, Element, Queue};

use crate::Error;
use crate::tensor::{Format, StepKind};

use lives::{Layout, Lives};

pub(crate) use operators::{
    accumulate, accumulate_contraction, accumulate_lookup, apply, apply_two, are_one_kernel, attention_gradients,
};
pub(crate) use update::adamw;

/// A device with the memory of one rank; clones are the same device.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    client: Client,
    memory: Mutex<Arena>,
    constants: Mutex<BTreeMap<Constant, Buffer>>,
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
        let memory = Arena {
            alignment,
            state: 0,
            written: Vec::new(),
            memory: None,
            layouts: BTreeMap::new(),
            mode: Mode::Idle,
            poisons: false,
        };
        Device(Arc::new(Inner { client, memory: Mutex::new(memory), constants: Mutex::default() }))
    }

    /// The device behind whatever Vulkan driver there is.
    ///
    /// # Errors
    /// A host without one.
    #[cfg(feature = "wgpu")]
    pub fn wgpu() -> Result<Device, Problem> {
        vulkan_client("this host").map(Device::new)
    }

    /// The same device with memory of its own, as for another rank.
    pub fn anew(&self) -> Device {
        Device::new(self.0.client.clone())
    }

    /// Whether the device computes with a number format.
    pub fn has(&self, format: Format) -> bool {
        self.0.client.properties().supports_type(element_of(format).kind())
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
            let words = (bytes - arena.state) / Element::Single.bytes();
            kernels::elementwise::fill(&self.queue(), f32::NAN, &arena.view(arena.state, words, Element::Single));
        }
        known
    }

    /// Ends a first pass: lays its tensors out, and makes or enlarges the allocation.
    pub(crate) fn lay_out(&self, kind: StepKind, micro_batches: usize) {
        let mut arena = self.arena();
        let Mode::Tracing(lives) = std::mem::replace(&mut arena.mode, Mode::Idle) else {
            unreachable!("a first pass was begun")
        };
        let layout = lives.layout(arena.alignment);
        let needed = (arena.state + layout.size).max(arena.alignment);
        arena.layouts.insert((kind, micro_batches), Arc::new(layout));
        if arena.memory.as_ref().is_none_or(|(_, bytes)| *bytes < needed) {
            let before = arena.memory.take();
            arena.memory = Some((self.0.client.empty(needed), needed));
            let state = arena.state / Element::Index.bytes();
            if before.is_none() && state > 0 {
                kernels::elementwise::fill(&self.queue(), 0.0, &arena.view(0, state, Element::Single));
            }
            if let Some((handle, bytes)) = before.filter(|_| state > 0) {
                let end = (bytes - arena.state) as u64;
                let old = Buffer { handle: handle.offset_end(end), length: state, element: Element::Index };
                kernels::copy::copy(&self.queue(), &old, &arena.view(0, state, Element::Index));
            }
            for (start, bytes) in std::mem::take(&mut arena.written) {
                let buffer = arena.view(start, bytes.len().div_ceil(4), Element::Index);
                self.0.client.write(&buffer.handle, Bytes::from_bytes_vec(bytes));
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
        Queue::Device(&self.0.client)
    }

    /// A place for a tensor that begins.
    pub(crate) fn begin(&self, bytes: usize) -> Place {
        let mut arena = self.arena();
        let state = arena.state;
        let alignment = arena.alignment;
        let (start, traced) = match &mut arena.mode {
            Mode::Idle => {
                arena.state += bytes.max(1).next_multiple_of(alignment);
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

    /// Bytes of a buffer; waits for the kernels that were queued before.
    ///
    /// # Errors
    /// A kernel that failed.
    pub(crate) fn read(&self, buffer: &Buffer) -> Result<Vec<u8>, Error> {
        let bytes = self.0.client.read_one(buffer.handle.clone()).map_err(|error| {
            let help = "this is a fault of the program or of the device's driver";
            Error::Device(Problem::new(format!("the device failed: {error:?}"), "a kernel of this step", help))
        })?;
        Ok(bytes[..buffer.length * buffer.element.bytes()].to_vec())
    }

    fn arena(&self) -> MutexGuard<'_, Arena> {
        self.0.memory.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Arena {
    fn view(&self, start: usize, length: usize, element: Element) -> Buffer {
        let (handle, all) = self.memory.as_ref().expect("memory is made before the first kernel");
        let end = all - start - length.max(1) * element.bytes();
        let handle = handle.clone().offset_start(start as u64).offset_end(end as u64);
        Buffer { handle, length, element }
    }
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
                self.device.0.client.write(&buffer.handle, Bytes::from_bytes_vec(bytes));
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

/// The client of whatever Vulkan driver there is. `location` is what asked for it.
///
/// # Errors
/// A host without one.
#[cfg(feature = "wgpu")]
pub(crate) fn vulkan_client(location: &str) -> Result<Client, Problem> {
    if !cubecl::Device::enumerate_all().iter().any(|device| matches!(device, cubecl::Device::Wgpu(_))) {
        let help = "install one: Debian's mesa-vulkan-drivers and libvulkan1 run on processor cores";
        return Err(Problem::new("there is no Vulkan driver with a device on this host", location, help));
    }
    Ok(cubecl::Device::Wgpu(cubecl::wgpu::WgpuDevice::default()).client())
}

fn element_of(format: Format) -> Element {
    match format {
        Format::Single => Element::Single,
        Format::Brain => Element::Brain,
        Format::Index => Element::Index,
    }
}
