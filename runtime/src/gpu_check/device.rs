//! The device that is checked: its memory, and times on it.

use std::time::Instant;

use cubecl::client::Client;
use cubecl::future::block_on;
use cubecl::prelude::CubeElement;
use ir::error::Problem;
use ir::units::Bytes;
use kernels::{Buffer, Element, Queue};

pub use crate::device::Driver;
use crate::tensor::bf16;

/// Time that a round of calls should take at least, in seconds, so that starting them weighs little.
const ROUND: f64 = 0.02;
/// The most calls of a round.
const MOST_CALLS: usize = 1000;
/// Rounds of which the median counts.
const ROUNDS: usize = 5;

/// A device.
pub struct Device {
    client: Client,
    /// What runs its kernels.
    pub driver: Driver,
    /// Its name.
    pub name: String,
    /// What else its driver says of it.
    pub about: String,
    /// Its memory, where the driver says it.
    pub memory: Option<Bytes>,
    /// Streaming multiprocessors, where it has some.
    pub multiprocessors: Option<u64>,
}

impl Device {
    /// The first device of a driver. `location` is what asked for it.
    ///
    /// # Errors
    /// What is missing: the driver, a card, the compiler of kernels, or the feature that this program was built without.
    pub fn open(driver: Driver, location: &str) -> Result<Device, Problem> {
        let otherwise = match driver {
            Driver::Cuda => "check the kernels on a Vulkan driver with `gpu-check --driver wgpu`",
            Driver::Wgpu => "check those of an NVIDIA GPU with `gpu-check --driver cuda`",
        };
        let found = &driver.find(location, otherwise)?[0];
        let (client, about) = (found.open(location)?, found.about.clone());
        let properties = client.properties();
        let name = properties.identity.name.clone();
        let memory = properties.memory.max_memory().map(Bytes);
        let multiprocessors = properties.hardware.num_streaming_multiprocessors.map(u64::from);
        Ok(Device { client, driver, name, about, memory, multiprocessors })
    }

    /// Where its kernels are sent.
    pub fn queue(&self) -> Queue<'_> {
        Queue::Device(&self.client)
    }

    /// cubecl's handle of it.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Number formats that it says it has, fp32 first.
    pub fn formats(&self) -> Vec<Element> {
        let has = |element: &Element| self.client.properties().supports_type(element.kind());
        let formats: Vec<Element> = [Element::Single, Element::Brain].into_iter().filter(has).collect();
        assert!(formats.contains(&Element::Single), "every driver has fp32");
        formats
    }

    /// Each shape in each number format.
    pub fn in_each_format<T: Clone, const N: usize>(
        &self,
        shapes: [T; N],
    ) -> impl Iterator<Item = (T, Element)> + use<T, N> {
        let formats = self.formats();
        shapes.into_iter().flat_map(move |shape| formats.clone().into_iter().map(move |format| (shape.clone(), format)))
    }

    /// Memory that holds numbers.
    pub fn upload(&self, numbers: &[f32], element: Element) -> Buffer {
        let handle = match element {
            Element::Single => self.client.create_from_slice(f32::as_bytes(numbers)),
            Element::Brain => {
                let rounded: Vec<bf16> = numbers.iter().map(|number| bf16::from_f32(*number)).collect();
                self.client.create_from_slice(bf16::as_bytes(&rounded))
            }
            Element::Index => unreachable!("indices are not numbers"),
        };
        Buffer { handle, length: numbers.len(), element }
    }

    /// Memory that holds NaN: what a kernel does not write is seen.
    pub fn poisoned(&self, length: usize, element: Element) -> Buffer {
        self.upload(&vec![f32::NAN; length], element)
    }

    /// The numbers of a buffer, or why the device does not give them.
    pub fn read(&self, buffer: &Buffer) -> Result<Vec<f32>, String> {
        let bytes =
            self.client.read_one(buffer.handle.clone()).map_err(|error| format!("the device failed: {error}"))?;
        let numbers = match buffer.element {
            Element::Single => f32::from_bytes(&bytes).to_vec(),
            Element::Brain => bf16::from_bytes(&bytes).iter().map(|number| number.to_f32()).collect(),
            Element::Index => unreachable!("indices are not numbers"),
        };
        Ok(numbers[..buffer.length].to_vec())
    }

    /// Seconds of one call of `send`, whose kernels write `results`, as [`median_seconds`] measures them.
    ///
    /// # Errors
    /// What the device says of kernels that failed.
    pub fn seconds(&self, results: &[&Buffer], send: &dyn Fn()) -> Result<f64, String> {
        let wait = || {
            let handles: Vec<_> = results.iter().map(|buffer| &buffer.handle).collect();
            block_on(self.client.sync_buffers(handles)).map_err(|error| format!("the device failed: {error}"))
        };
        median_seconds(send, &wait)
    }
}

/// Seconds of one call of `send`, after which `wait` waits: the median of rounds of so many calls that they take long
/// enough to be measured.
///
/// # Errors
/// What `wait` says of calls that failed.
pub(super) fn median_seconds(send: &dyn Fn(), wait: &dyn Fn() -> Result<(), String>) -> Result<f64, String> {
    let round = |calls: usize| {
        let start = Instant::now();
        (0..calls).for_each(|_| send());
        wait().map(|()| start.elapsed().as_secs_f64() / calls as f64)
    };
    // The first call compiles; the second says how long one takes.
    round(1)?;
    let calls = ((ROUND / round(1)?) as usize).clamp(1, MOST_CALLS);
    let mut times = (0..ROUNDS).map(|_| round(calls)).collect::<Result<Vec<_>, _>>()?;
    times.sort_by(f64::total_cmp);
    Ok(times[ROUNDS / 2])
}
