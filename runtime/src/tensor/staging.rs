//! Tensors between the host's memory and a device's, and the steps for which a device's memory is laid out.

#[cfg(feature = "kernels")]
use std::ops::Range;

use super::{Format, Memory, Tensor};
use crate::Error;

#[cfg(feature = "kernels")]
use super::memory::Placed;
use super::memory::Storage;
#[cfg(feature = "kernels")]
use super::{Values, ValuesMut, size_of};
#[cfg(feature = "kernels")]
use crate::device::Device;

/// What a step is that has a layout of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StepKind {
    /// Forward, backward and update.
    Training,
    /// Forward passes only.
    Evaluation,
    /// Forward passes as far as the logits.
    Logits,
}

impl Memory {
    /// Memory of the host, for what meets other ranks; this one unless it is a device's.
    pub fn of_host(&self) -> Memory {
        #[cfg(feature = "kernels")]
        if self.device().is_some() {
            return Memory::default();
        }
        self.clone()
    }

    /// Whether it is a device's.
    pub fn is_on_device(&self) -> bool {
        #[cfg(feature = "kernels")]
        return self.device().is_some();
        #[cfg(not(feature = "kernels"))]
        false
    }

    /// Whether tensors of a number format can be computed with there.
    pub fn has(&self, format: Format) -> bool {
        #[cfg(feature = "kernels")]
        if let Some(device) = self.device() {
            return device.has(format);
        }
        let _ = format;
        true
    }

    /// Bytes that a device's tensors take of its memory, with the room between them; 0 before the first step and on the
    /// host.
    pub fn allocated_bytes(&self) -> u64 {
        #[cfg(feature = "kernels")]
        if let Some(device) = self.device() {
            return device.allocated_bytes() as u64;
        }
        0
    }

    /// Waits for what a device was asked to compute.
    ///
    /// # Errors
    /// A device that failed.
    pub fn wait(&self) -> Result<(), Error> {
        #[cfg(feature = "kernels")]
        if let Some(device) = self.device() {
            return device.wait();
        }
        Ok(())
    }

    /// Begins a step. If the answer is no, what follows computes nothing: it tells a device how long each tensor lives,
    /// and [`Memory::lay_out`] ends it.
    pub fn enter(&self, kind: StepKind, micro_batches: usize) -> bool {
        #[cfg(feature = "kernels")]
        if let Some(device) = self.device() {
            return device.enter(kind, micro_batches);
        }
        let _ = (kind, micro_batches);
        true
    }

    /// Lays a device's memory out after a first pass.
    ///
    /// # Errors
    /// A device with too little memory.
    pub fn lay_out(&self, kind: StepKind, micro_batches: usize) -> Result<(), Error> {
        #[cfg(feature = "kernels")]
        if let Some(device) = self.device() {
            return Ok(device.lay_out(kind, micro_batches)?);
        }
        let _ = (kind, micro_batches);
        Ok(())
    }

    /// Ends a step.
    pub fn leave(&self) {
        #[cfg(feature = "kernels")]
        if let Some(device) = self.device() {
            device.leave();
        }
    }

    /// Whether nothing is computed, nor sent.
    pub fn is_tracing(&self) -> bool {
        #[cfg(feature = "kernels")]
        if let Some(device) = self.device() {
            return device.is_tracing();
        }
        false
    }
}

impl Tensor {
    /// Whether the tensor is in a device's memory.
    pub fn is_on_device(&self) -> bool {
        match &*self.storage {
            Storage::Host(_) => false,
            #[cfg(feature = "kernels")]
            Storage::Device(_) => true,
        }
    }

    /// The tensor in the host's memory: itself if it is there. Waits for the device if not.
    ///
    /// # Errors
    /// A device that failed.
    pub fn on_host(&self, host: &Memory) -> Result<Tensor, Error> {
        #[cfg(feature = "kernels")]
        if let Storage::Device(placed) = &*self.storage {
            let mut tensor = Tensor::stale(host, &self.dims, placed.format);
            let bytes = placed.place.device().read(&self.buffer())?;
            match tensor.values_mut() {
                ValuesMut::Single(values) => bytemuck::cast_slice_mut(values).copy_from_slice(&bytes),
                ValuesMut::Brain(values) => bytemuck::cast_slice_mut(values).copy_from_slice(&bytes),
                ValuesMut::Index(values) => bytemuck::cast_slice_mut(values).copy_from_slice(&bytes),
            }
            return Ok(tensor);
        }
        let _ = host;
        Ok(self.clone())
    }

    /// A tensor of the host in `memory`: itself if that is the host's.
    pub fn into_memory(self, memory: &Memory) -> Tensor {
        #[cfg(feature = "kernels")]
        if memory.device().is_some() {
            let tensor = Tensor::stale(memory, &self.dims, self.format());
            tensor.copy_from(&self);
            return tensor;
        }
        let _ = memory;
        self
    }

    /// Puts the elements of a tensor of the host, of the same size and format, into this one of a device.
    ///
    /// # Panics
    /// If it is one of the host.
    pub(crate) fn copy_from(&self, host: &Tensor) {
        match &*self.storage {
            Storage::Host(_) => unreachable!("{} elements of the host are written where they are", host.len()),
            #[cfg(feature = "kernels")]
            Storage::Device(placed) => {
                let bytes: Vec<u8> = match host.values() {
                    Values::Single(values) => bytemuck::cast_slice(values).to_vec(),
                    Values::Brain(values) => bytemuck::cast_slice(values).to_vec(),
                    Values::Index(values) => bytemuck::cast_slice(values).to_vec(),
                };
                assert_eq!(bytes.len(), size_of(&self.dims) * placed.format.bytes(), "sizes and formats agree");
                placed.place.write(bytes);
            }
        }
    }

    /// The elements in fp32, wherever they are.
    ///
    /// # Errors
    /// A device that failed.
    pub fn numbers(&self) -> Result<Vec<f32>, Error> {
        Ok(self.on_host(&Memory::default())?.to_numbers())
    }
}

#[cfg(feature = "kernels")]
impl Tensor {
    /// The memory of a tensor of a device.
    ///
    /// # Panics
    /// If it is one of the host, or in a first pass, in which there is none.
    pub(crate) fn buffer(&self) -> kernels::Buffer {
        let Placed { place, format, len, .. } = self.placed();
        place.buffer(*len, *format)
    }

    /// The device of a tensor of a device.
    pub(crate) fn device(&self) -> Option<&Device> {
        match &*self.storage {
            Storage::Device(placed) => Some(placed.place.device()),
            Storage::Host(_) => None,
        }
    }

    /// Makes the elements of a tensor of a device zeros.
    pub(super) fn clear(&self) {
        let Placed { place, format, len, .. } = self.placed();
        place.clear(len * format.bytes());
    }

    /// Writes the elements of a tensor of a device.
    pub(super) fn write(&self, bytes: Vec<u8>) {
        self.placed().place.write(bytes);
    }

    /// Neighbouring elements of a tensor of a device: its memory if they are all, else a copy, because devices begin
    /// buffers at multiples of some number of bytes.
    pub(crate) fn part(&self, queue: &kernels::Queue, range: Range<usize>) -> kernels::Buffer {
        let whole = self.buffer();
        if range == (0..whole.length) {
            return whole;
        }
        let part = queue.buffer(range.len(), whole.element);
        kernels::copy::copy_part(queue, range.len(), (&whole, range.start), (&part, 0));
        part
    }

    fn placed(&self) -> &Placed {
        match &*self.storage {
            Storage::Device(placed) => placed,
            Storage::Host(_) => unreachable!("operators of a device get its tensors"),
        }
    }
}
