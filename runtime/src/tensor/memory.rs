//! Memory of a rank's tensors: counted where it is taken, and used again by later tensors.
//!
//! A rank has one [`Memory`], which it hands to every operator, so that ranks in one process are counted
//! apart. Buffers that end are kept for tensors of about the same size, because fresh pages cost more than
//! the operators that fill them; kept and live bytes together never exceed the most that were ever live.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType, Shape};

use super::{Format, Values, ValuesMut, bf16};
#[cfg(feature = "kernels")]
use crate::device::{Device, Place};

/// Smallest buffer that is kept, in fp32 words: below, the allocator's own lists serve better.
const KEPT_FROM: usize = 1 << 12;

/// The memory of one rank: the host's, or a device's.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    pool: Arc<Mutex<Pool>>,
    #[cfg(feature = "kernels")]
    device: Option<Device>,
}

#[derive(Debug, Default)]
struct Pool {
    live: usize,
    peak: usize,
    held: usize,
    free: BTreeMap<usize, Vec<Vec<f32>>>,
}

/// Storage of one tensor and its clones.
#[derive(Debug)]
pub(super) enum Storage {
    /// Memory of the host.
    Host(Buffer),
    /// A place in a device's memory.
    #[cfg(feature = "kernels")]
    Device(Placed),
}

/// A tensor's place in a device's memory.
#[cfg(feature = "kernels")]
#[derive(Debug)]
pub(super) struct Placed {
    pub place: Place,
    pub format: Format,
    pub len: usize,
    memory: Memory,
}

/// Elements in memory of the host.
#[derive(Debug)]
pub(super) struct Buffer {
    /// `None` only while the buffer is dropped.
    storage: Option<FlexTensor>,
    format: Format,
    len: usize,
    memory: Memory,
}

impl Memory {
    /// Bytes of live tensors.
    pub fn live_bytes(&self) -> u64 {
        self.lock().live as u64
    }

    /// Most bytes of live tensors since the start or the last [`Memory::reset_peak`].
    pub fn peak_bytes(&self) -> u64 {
        self.lock().peak as u64
    }

    /// Lets the peak start again from what is live.
    pub fn reset_peak(&self) {
        let mut pool = self.lock();
        pool.peak = pool.live;
    }

    /// The memory of a device.
    #[cfg(feature = "kernels")]
    pub fn on(device: Device) -> Memory {
        Memory { device: Some(device), ..Memory::default() }
    }

    /// The device, if it is not the host's memory.
    #[cfg(feature = "kernels")]
    pub fn device(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    /// Storage with the elements of whatever held the memory before.
    pub(super) fn allocate(&self, len: usize, format: Format) -> Storage {
        #[cfg(feature = "kernels")]
        if let Some(device) = &self.device {
            let bytes = len * format.bytes();
            self.lock().count(bytes);
            return Storage::Device(Placed { place: device.begin(bytes), format, len, memory: self.clone() });
        }
        Storage::Host(self.allocate_on_host(len, format))
    }

    fn allocate_on_host(&self, len: usize, format: Format) -> Buffer {
        let bytes = len * format.bytes();
        let words = self.lock().take(bytes);
        let capacity = words.len() * size_of::<f32>() / format.bytes();
        let dtype = match format {
            Format::Single => DType::F32,
            Format::Brain => DType::BF16,
            Format::Index => DType::U32,
        };
        let layout = Layout::contiguous(Shape::from(vec![capacity]));
        let storage = Some(FlexTensor::new(Bytes::from_elems(words), layout, dtype));
        Buffer { storage, format, len, memory: self.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Pool {
    fn count(&mut self, bytes: usize) {
        self.live += bytes;
        self.peak = self.peak.max(self.live);
    }

    fn take(&mut self, bytes: usize) -> Vec<f32> {
        self.count(bytes);
        let words = bytes.div_ceil(size_of::<f32>());
        let fitting = self.free.range_mut(words..=words + words / 4).find(|(_, buffers)| !buffers.is_empty());
        if let Some(buffer) = fitting.and_then(|(_, buffers)| buffers.pop()) {
            self.held -= buffer.len() * size_of::<f32>();
            return buffer;
        }
        self.shrink();
        vec![0.0; words]
    }

    fn give_back(&mut self, bytes: usize, words: Vec<f32>) {
        self.live -= bytes;
        if words.len() >= KEPT_FROM {
            self.held += words.len() * size_of::<f32>();
            self.free.entry(words.len()).or_default().push(words);
            self.shrink();
        }
    }

    /// Gives kept buffers back to the system, smallest first, until they and the live ones fit under the peak.
    fn shrink(&mut self) {
        while self.live + self.held > self.peak {
            let Some(mut entry) = self.free.first_entry() else { return };
            match entry.get_mut().pop() {
                Some(buffer) => self.held -= buffer.len() * size_of::<f32>(),
                None => drop(entry.remove()),
            }
        }
    }
}

impl Buffer {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn format(&self) -> Format {
        self.format
    }

    pub(super) fn values(&self) -> Values<'_> {
        let storage = self.storage.as_ref().expect("only a dropped buffer has none");
        match self.format {
            Format::Single => Values::Single(&storage.storage::<f32>()[..self.len]),
            Format::Brain => Values::Brain(&storage.storage::<bf16>()[..self.len]),
            Format::Index => Values::Index(&storage.storage::<u32>()[..self.len]),
        }
    }

    pub(super) fn values_mut(&mut self) -> ValuesMut<'_> {
        let storage = self.storage.as_mut().expect("only a dropped buffer has none");
        match self.format {
            Format::Single => ValuesMut::Single(&mut storage.storage_mut::<f32>()[..self.len]),
            Format::Brain => ValuesMut::Brain(&mut storage.storage_mut::<bf16>()[..self.len]),
            Format::Index => ValuesMut::Index(&mut storage.storage_mut::<u32>()[..self.len]),
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(storage) = self.storage.take() else { return };
        let bytes = storage.data_arc();
        drop(storage);
        let words = Arc::into_inner(bytes).and_then(|bytes| bytes.try_into_vec::<f32>().ok());
        self.memory.lock().give_back(self.len * self.format.bytes(), words.unwrap_or_default());
    }
}

#[cfg(feature = "kernels")]
impl Drop for Placed {
    fn drop(&mut self) {
        self.memory.lock().live -= self.len * self.format.bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Tensor;
    use ir::graph::DimName;

    #[test]
    fn live_and_peak_bytes_follow_tensors() {
        let memory = Memory::default();
        let dims = [(DimName::Sequence, 5), (DimName::Hidden, 1001)];
        let first = Tensor::zeros(&memory, &dims, Format::Single);
        let second = Tensor::zeros(&memory, &dims, Format::Brain);
        assert_eq!(memory.live_bytes(), 5 * 1001 * 6);
        let shared = first.clone();
        drop(first);
        assert_eq!(memory.live_bytes(), 5 * 1001 * 6, "a clone keeps the storage");
        drop((shared, second));
        assert_eq!((memory.live_bytes(), memory.peak_bytes()), (0, 5 * 1001 * 6));
        memory.reset_peak();
        assert_eq!(memory.peak_bytes(), 0);
    }

    #[test]
    fn an_ended_buffer_serves_the_next_tensor_of_its_size() {
        let memory = Memory::default();
        let dims = [(DimName::Hidden, 10_000)];
        let first = Tensor::stale(&memory, &dims, Format::Single);
        let place = first.singles().as_ptr();
        drop(first);
        let second = Tensor::stale(&memory, &dims, Format::Single);
        assert_eq!(second.singles().as_ptr(), place);
        let pool = memory.lock();
        assert_eq!((pool.held, pool.live), (0, 40_000));
    }

    #[test]
    fn kept_and_live_buffers_stay_under_the_peak() {
        let memory = Memory::default();
        for size in [5_000, 9_000, 20_000, 7_000] {
            let dims = [(DimName::Hidden, size)];
            drop([0, 1].map(|_| Tensor::stale(&memory, &dims, Format::Single)));
            let pool = memory.lock();
            let kept: usize = pool.free.iter().map(|(words, buffers)| 4 * words * buffers.len()).sum();
            assert_eq!(kept, pool.held);
            assert!(pool.held + pool.live <= pool.peak, "size {size}");
        }
    }
}
