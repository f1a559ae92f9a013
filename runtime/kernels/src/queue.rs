//! Where kernels are sent: to a device, or into a list of kernels to compile.

use std::sync::{Arc, Mutex, MutexGuard};

use cubecl::client::Client;
use cubecl::features::MmaConfig;
use cubecl::ir::{DeviceProperties, ElemType, FloatKind, TargetProperties, UIntKind};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl_core::device::{DeviceId, ServiceId};
use cubecl_core::environment::stream::StreamId;

/// Bytes that a unit reads or writes at once where rows allow it.
const ACCESS: usize = 16;
/// Cubes that keep a large device busy; more where each does little. A constant of the code and not of the
/// device, because the order of sums depends on it.
pub(crate) const BUSY: usize = 512;
/// The most cubes along one axis that every device takes.
const MOST_CUBES: usize = 65_535;

/// Number format of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// fp32.
    Single,
    /// bf16.
    Brain,
    /// Unsigned 32-bit integers: token ids.
    Index,
}

/// Memory of a device, contiguous.
#[derive(Clone, Debug)]
pub struct Buffer {
    /// The memory.
    pub handle: Handle,
    /// Number of elements.
    pub length: usize,
    /// Number format.
    pub element: Element,
}

/// Where kernels are sent.
pub enum Queue<'a> {
    /// They run on a device.
    Device(&'a Client),
    /// They are written down.
    List(&'a KernelList),
}

/// Kernels as they would run on a device of given properties.
#[derive(Debug)]
pub struct KernelList {
    properties: Arc<DeviceProperties>,
    target: Arc<TargetProperties>,
    kernels: Mutex<Vec<ListedKernel>>,
}

/// A kernel of a list.
pub struct ListedKernel {
    /// Name of the kernel's function.
    pub name: &'static str,
    /// Number of cubes.
    pub cubes: CubeCount,
    /// Number of units of a cube.
    pub units: u32,
    /// The kernel itself.
    pub kernel: Box<dyn CubeKernel>,
}

/// Sends a kernel into a queue: queue, function, cubes, units of a cube, arguments.
macro_rules! send {
    ($queue:expr, $kernel:ident, $cubes:expr, $units:expr, $($argument:expr),* $(,)?) => {
        match $queue {
            // SAFETY: the function around has checked that the buffers are as long as the kernel's indices reach.
            $crate::Queue::Device(client) => unsafe {
                $kernel::launch_unchecked(client, $cubes, cubecl::prelude::CubeDim::new_1d($units), $($argument),*)
            },
            $crate::Queue::List(list) => {
                let cubes = $cubes;
                let kernel = $kernel::create_dummy_kernel(
                    list.properties(), list.target(), cubes.clone(), cubecl::prelude::CubeDim::new_1d($units), $($argument),*
                );
                list.add(stringify!($kernel), cubes, $units, Box::new(kernel));
            }
        }
    };
}
pub(crate) use send;

impl Element {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Element::Single | Element::Index => 4,
            Element::Brain => 2,
        }
    }

    /// The element as cubecl names it.
    pub fn kind(self) -> ElemType {
        match self {
            Element::Single => ElemType::Float(FloatKind::F32),
            Element::Brain => ElemType::Float(FloatKind::BF16),
            Element::Index => ElemType::UInt(UIntKind::U32),
        }
    }

    /// Elements that are read at once, 16 bytes of them if `row` divides so.
    pub(crate) fn width(self, row: usize) -> usize {
        let mut width = ACCESS / self.bytes();
        while !row.is_multiple_of(width) {
            width /= 2;
        }
        width
    }
}

impl Buffer {
    /// Checks length and format.
    ///
    /// # Panics
    /// If the buffer has another.
    pub(crate) fn expect(&self, length: usize, element: Element) -> &Buffer {
        assert_eq!(
            (self.length, self.element),
            (length, element),
            "a kernel's buffer has the length and format it says"
        );
        self
    }

    /// The buffer as the argument that follows `inputs`, of vectors of `width` elements: the memory of an input is
    /// given as such, because compilers take different arguments for different memory.
    pub(crate) fn result(&self, width: usize, inputs: &[&Buffer]) -> BufferArg {
        match inputs.iter().position(|input| self.is_same(input)) {
            Some(position) => BufferArg::alias(position, self.length / width),
            None => self.argument(width),
        }
    }

    /// Whether the other is the same memory.
    fn is_same(&self, other: &Buffer) -> bool {
        let key = |buffer: &Buffer| buffer.handle.clone().binding().claim_key();
        key(self) == key(other)
    }

    /// The buffer as an argument of vectors of `width` elements.
    pub(crate) fn argument(&self, width: usize) -> BufferArg {
        // SAFETY: the handle was made for `length` elements.
        unsafe { BufferArg::from_raw_parts(self.handle.clone(), self.length / width) }
    }
}

/// Checks length and format of buffers that are alike.
///
/// # Panics
/// If one has another.
pub(crate) fn expect_all<const N: usize>(buffers: [&Buffer; N], length: usize, element: Element) {
    for buffer in buffers {
        buffer.expect(length, element);
    }
}

impl Queue<'_> {
    /// New memory with arbitrary contents.
    pub fn buffer(&self, length: usize, element: Element) -> Buffer {
        let bytes = length.max(1) * element.bytes();
        let handle = match self {
            Queue::Device(client) => client.empty(bytes),
            Queue::List(_) => {
                Handle::new(ServiceId::of::<KernelList>(DeviceId::new(0, 0)), StreamId::current(), bytes as u64)
            }
        };
        Buffer { handle, length, element }
    }

    /// Memory that holds indices.
    pub fn indices(&self, indices: &[u32]) -> Buffer {
        self.filled(u32::as_bytes(indices), indices.len(), Element::Index)
    }

    /// Memory that holds fp32 numbers.
    pub fn numbers(&self, numbers: &[f32]) -> Buffer {
        self.filled(f32::as_bytes(numbers), numbers.len(), Element::Single)
    }

    fn filled(&self, bytes: &[u8], length: usize, element: Element) -> Buffer {
        match self {
            Queue::Device(client) => Buffer { handle: client.create_from_slice(bytes), length, element },
            Queue::List(_) => self.buffer(length, element),
        }
    }

    fn properties(&self) -> &DeviceProperties {
        match self {
            Queue::Device(client) => client.properties(),
            Queue::List(list) => &list.properties,
        }
    }

    /// Bytes of shared memory of a cube.
    pub(crate) fn shared_memory(&self) -> usize {
        self.properties().hardware.max_shared_memory_size
    }

    /// Units of a cube that sums over its units, as many as wanted if it can be: whole planes, or without plane
    /// instructions a power of two.
    pub(crate) fn units_for(&self, wanted: usize, most: usize) -> usize {
        let units = if self.has_planes() { wanted.next_multiple_of(32) } else { wanted.next_power_of_two() };
        units.clamp(32, most)
    }

    /// Whether planes multiply tiles of bf16 with `mma.m16n8k16`, load them with `ldmatrix` and copy into shared memory
    /// while they work: NVIDIA's instructions from compute capability 8.0 on.
    pub(crate) fn has_matrix_instructions(&self) -> bool {
        let features = &self.properties().features;
        let [brain, single] = [Element::Brain, Element::Single].map(Element::kind);
        let product = MmaConfig { a_type: brain, b_type: brain, cd_type: single, m: 16, n: 8, k: 16 };
        let has_products = features.matmul.mma.contains(&product) && features.matmul.ldmatrix.contains(&brain);
        self.has_planes() && has_products && features.copy_async
    }

    /// Whether units of a plane can exchange numbers by instructions of their own.
    pub(crate) fn has_planes(&self) -> bool {
        let properties = self.properties();
        properties.features.plane.contains(cubecl::features::Plane::Ops) && properties.hardware.plane_size_min == 32
    }
}

impl KernelList {
    /// An empty list for a device.
    pub fn new(properties: DeviceProperties, target: TargetProperties) -> KernelList {
        KernelList { properties: Arc::new(properties), target: Arc::new(target), kernels: Mutex::default() }
    }

    /// Takes the kernels out, in the order in which they were sent.
    pub fn take_kernels(&self) -> Vec<ListedKernel> {
        std::mem::take(&mut self.kernels())
    }

    fn kernels(&self) -> MutexGuard<'_, Vec<ListedKernel>> {
        self.kernels.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(crate) fn properties(&self) -> Arc<DeviceProperties> {
        self.properties.clone()
    }

    pub(crate) fn target(&self) -> Arc<TargetProperties> {
        self.target.clone()
    }

    pub(crate) fn add(&self, name: &'static str, cubes: CubeCount, units: u32, kernel: Box<dyn CubeKernel>) {
        self.kernels().push(ListedKernel { name, cubes, units, kernel });
    }
}

impl ListedKernel {
    /// What tells kernels apart, as text: kernels of one text have one code.
    pub fn identity(&self) -> String {
        format!("{:?}", self.kernel.id())
    }
}

impl std::fmt::Debug for Queue<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Queue::Device(_) => "Device",
            Queue::List(_) => "List",
        })
    }
}

impl std::fmt::Debug for ListedKernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ListedKernel").field("name", &self.name).field("units", &self.units).finish_non_exhaustive()
    }
}

/// Cubes for so many units of work; kernels go on where work is left.
pub(crate) fn cubes_for(work: usize, units: u32) -> CubeCount {
    CubeCount::Static(work.div_ceil(units as usize).clamp(1, MOST_CUBES) as u32, 1, 1)
}
