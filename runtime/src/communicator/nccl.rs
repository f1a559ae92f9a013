//! Groups of ranks that communicate between their cards' memories: NCCL, with the waits of this communicator.
//!
//! - `library` finds NCCL and the driver, `meeting` makes a communicator of a group of ranks, `group` runs operations.
//! - NCCL never blocks here: its communicators are made without (`blocking = 0`), operations run on a stream of their
//!   own, and every wait of the host looks at the stream, at NCCL, at the other ranks and at the clock. What ends a
//!   wait early aborts the communicator, so that no kernel keeps waiting for a rank that is lost.
//! - Sums are formed by NCCL in the elements' own format; only `local` forms sums of bf16 in fp32.

mod group;
mod library;
mod meeting;

pub use group::{DeviceGroup, DeviceOperation, DevicePending, DeviceSlice, Ordering, Transfer};
pub use library::{
    ContextFunctions, DriverFunctions, Handle, IN_PROGRESS, NOT_READY, Nccl, NcclFunctions, SUCCESS, UniqueId,
    readable_version,
};
pub use meeting::agree_on_unique_id;
