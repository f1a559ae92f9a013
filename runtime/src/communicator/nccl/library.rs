//! The functions of NCCL and of the CUDA driver that groups call, from their libraries.

use std::ffi::{CStr, c_char, c_int, c_uint};

pub use cudarc::nccl::sys::ncclUniqueId as UniqueId;
use cudarc::nccl::sys::{ncclConfig_t, ncclResult_t};
use ir::error::Problem;

pub use crate::library::Handle;
use crate::library::{find, functions};

/// NCCL's result of a call that is done.
pub const SUCCESS: c_int = ncclResult_t::ncclSuccess as c_int;
/// NCCL's result of a call that goes on.
pub const IN_PROGRESS: c_int = ncclResult_t::ncclInProgress as c_int;
/// The driver's answer that an event has not come yet (`CUDA_ERROR_NOT_READY`).
pub const NOT_READY: c_int = 600;

/// Names under which NCCL is looked for: wheels and run-time packages bring the first only.
const NCCL_NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
const DRIVER_NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
/// The oldest NCCL with communicators that do not block and can be finalized, as `ncclGetVersion` counts: 2.18.
const OLDEST: u32 = 21_800;

/// NCCL and the driver, and which NCCL it is.
#[derive(Debug)]
pub struct Nccl {
    /// NCCL's functions.
    pub functions: NcclFunctions,
    /// The driver's functions.
    pub driver: DriverFunctions,
    /// As `ncclGetVersion` counts: 21805 is 2.18.5.
    pub version: u32,
}

functions! {
    /// NCCL's functions (nccl.h). Counts are of elements; all results but texts are `ncclResult_t`.
    NcclFunctions {
        get_version: b"ncclGetVersion\0"(*mut c_int) -> c_int,
        get_unique_id: b"ncclGetUniqueId\0"(*mut UniqueId) -> c_int,
        init_rank_config: b"ncclCommInitRankConfig\0"(*mut Handle, c_int, UniqueId, c_int, *mut ncclConfig_t) -> c_int,
        get_async_error: b"ncclCommGetAsyncError\0"(Handle, *mut c_int) -> c_int,
        get_last_error: b"ncclGetLastError\0"(Handle) -> *const c_char,
        finalize: b"ncclCommFinalize\0"(Handle) -> c_int,
        destroy: b"ncclCommDestroy\0"(Handle) -> c_int,
        abort: b"ncclCommAbort\0"(Handle) -> c_int,
        group_start: b"ncclGroupStart\0"() -> c_int,
        group_end: b"ncclGroupEnd\0"() -> c_int,
        all_reduce: b"ncclAllReduce\0"(Handle, Handle, usize, c_uint, c_uint, Handle, Handle) -> c_int,
        reduce: b"ncclReduce\0"(Handle, Handle, usize, c_uint, c_uint, c_int, Handle, Handle) -> c_int,
        reduce_scatter: b"ncclReduceScatter\0"(Handle, Handle, usize, c_uint, c_uint, Handle, Handle) -> c_int,
        all_gather: b"ncclAllGather\0"(Handle, Handle, usize, c_uint, Handle, Handle) -> c_int,
        broadcast: b"ncclBroadcast\0"(Handle, Handle, usize, c_uint, c_int, Handle, Handle) -> c_int,
        send: b"ncclSend\0"(Handle, usize, c_uint, c_int, Handle, Handle) -> c_int,
        recv: b"ncclRecv\0"(Handle, usize, c_uint, c_int, Handle, Handle) -> c_int,
    }
}

functions! {
    /// The driver's functions (cuda.h); all results are `CUresult`.
    DriverFunctions {
        stream_create: b"cuStreamCreate\0"(*mut Handle, c_uint) -> c_int,
        stream_destroy: b"cuStreamDestroy_v2\0"(Handle) -> c_int,
        stream_wait_event: b"cuStreamWaitEvent\0"(Handle, Handle, c_uint) -> c_int,
        event_create: b"cuEventCreate\0"(*mut Handle, c_uint) -> c_int,
        event_record: b"cuEventRecord\0"(Handle, Handle) -> c_int,
        event_query: b"cuEventQuery\0"(Handle) -> c_int,
        event_destroy: b"cuEventDestroy_v2\0"(Handle) -> c_int,
    }
}

functions! {
    /// The driver's functions on all streams of a context at once, which exist from CUDA 12.5 on: only
    /// [`Ordering::Events`](super::Ordering) asks for them.
    ContextFunctions {
        context_get_current: b"cuCtxGetCurrent\0"(*mut Handle) -> c_int,
        context_record_event: b"cuCtxRecordEvent\0"(Handle, Handle) -> c_int,
        context_wait_event: b"cuCtxWaitEvent\0"(Handle, Handle) -> c_int,
    }
}

impl Nccl {
    /// Finds NCCL and the driver on this host.
    ///
    /// # Errors
    /// If either is missing, too old, or lacks a function.
    pub fn open() -> Result<Nccl, Problem> {
        Nccl::new(NcclFunctions::open()?, DriverFunctions::open()?)
    }

    /// NCCL from its functions and the driver's.
    ///
    /// # Errors
    /// If NCCL is too old.
    pub fn new(functions: NcclFunctions, driver: DriverFunctions) -> Result<Nccl, Problem> {
        let version = functions.version()?;
        Ok(Nccl { functions, driver, version })
    }
}

impl DriverFunctions {
    /// Finds the driver on this host.
    ///
    /// # Errors
    /// If it is missing or lacks a function.
    pub fn open() -> Result<DriverFunctions, Problem> {
        let help = "install the NVIDIA driver of CUDA 12 or newer; without a card use `--device cpu`";
        find("the CUDA driver", DRIVER_NAMES, help, DriverFunctions::of)
    }
}

impl ContextFunctions {
    /// Finds them in this host's driver.
    ///
    /// # Errors
    /// If the driver is missing or older than CUDA 12.5.
    pub fn open() -> Result<ContextFunctions, Problem> {
        let help = "install the NVIDIA driver of CUDA 12.5 or newer, or let the host wait (`Ordering::Host`)";
        find("the CUDA driver", DRIVER_NAMES, help, ContextFunctions::of)
    }
}

impl NcclFunctions {
    /// Finds NCCL on this host.
    ///
    /// # Errors
    /// If it is missing or lacks a function.
    pub fn open() -> Result<NcclFunctions, Problem> {
        let help = "install NCCL 2.18 or newer (PyPI nvidia-nccl-cu12, Debian libnccl2) and add the folder of \
                    libnccl.so.2 to LD_LIBRARY_PATH, or use `--communicator local`";
        find("NCCL", NCCL_NAMES, help, NcclFunctions::of)
    }

    /// The version, as `ncclGetVersion` counts.
    ///
    /// # Errors
    /// If it does not say, or is older than 2.18.
    #[allow(unsafe_code)]
    pub fn version(&self) -> Result<u32, Problem> {
        let mut version = 0;
        // SAFETY: the pointer is to one number, which the call writes.
        let result = unsafe { (self.get_version)(&raw mut version) };
        let help = "install NCCL 2.18 or newer (PyPI nvidia-nccl-cu12, Debian libnccl2)";
        match u32::try_from(version) {
            Ok(version) if result == SUCCESS && version >= OLDEST => Ok(version),
            Ok(version) if result == SUCCESS => {
                let what = format!("NCCL {} is too old", readable_version(version));
                Err(Problem::new(what, "ncclGetVersion", help))
            }
            _ => Err(Problem::new("NCCL does not say its version", "ncclGetVersion", help)),
        }
    }

    /// What NCCL says of a failed call: its result in words, and its last message if it has one.
    #[allow(unsafe_code)]
    pub(super) fn explain(&self, result: c_int, communicator: Handle) -> String {
        // SAFETY: NCCL allows a null communicator here, and gives a text of its own or null.
        let text = unsafe { (self.get_last_error)(communicator) };
        let text = match text.is_null() {
            true => String::new(),
            // SAFETY: the text ends with 0 and lives until the next call, which this thread does not make meanwhile.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        let meaning = match result {
            1 => "a CUDA call failed",
            2 => "a system call failed",
            3 => "an error inside NCCL",
            4 => "an argument is not valid",
            5 => "a call is not valid here",
            6 => "another rank failed or the network is gone",
            8 => "NCCL's own time is over",
            _ => "an unknown result",
        };
        match text.trim() {
            "" => format!("{meaning} (ncclResult {result}); NCCL_DEBUG=WARN says more"),
            text => format!("{meaning} (ncclResult {result}): {text}"),
        }
    }
}

/// A version as people write it.
pub fn readable_version(version: u32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}
