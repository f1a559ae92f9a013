//! Making an NCCL communicator of a group of ranks: one rank's unique id for all, over the ranks' own connections.

use std::ffi::{c_char, c_int};
use std::ptr;

use cudarc::nccl::sys::ncclConfig_t;
use ir::error::Problem;

use super::library::{Handle, IN_PROGRESS, Nccl, NcclFunctions, SUCCESS, UniqueId, readable_version};
use crate::communicator::{Error, Group};

/// What NCCL's headers write where nothing is chosen (`NCCL_CONFIG_UNDEF_INT`).
const UNDEFINED: c_int = c_int::MIN;
/// What marks a configuration (`NCCL_CONFIG_INITIALIZER`).
const MAGIC: u32 = 0xcafe_beef;
/// The header of which `ncclConfig_t` is, as `ncclGetVersion` counts.
const HEADER_VERSION: u32 = 23_000;

/// One unique id for all ranks of a group. All must have the same NCCL.
///
/// # Errors
/// `BadInput` on all ranks if versions differ; what ended the run.
pub fn agree_on_unique_id(host: &Group, functions: &NcclFunctions, version: u32) -> Result<UniqueId, Error> {
    let mut versions = vec![0_u32; host.size()];
    versions[host.position()] = version;
    host.all_gather(&mut versions)?;
    if let Some(other) = versions.iter().position(|other| *other != versions[0]) {
        let members = host.members();
        let [first, second] = [0, other].map(|place| (members[place].0, readable_version(versions[place])));
        let what = format!("rank {} has NCCL {}, rank {} has NCCL {}", first.0, first.1, second.0, second.1);
        return Err(Error::BadInput(vec![Problem::new(what, "libnccl.so.2", "install one NCCL on all hosts")]));
    }
    // A rank that cannot make an id says so with the first byte.
    let mut message = [0_u8; 1 + size_of::<UniqueId>()];
    let mut failed = None;
    if host.position() == 0 {
        match unique_id(functions) {
            Ok(id) => {
                message[0] = 1;
                message[1..].iter_mut().zip(id.internal).for_each(|(byte, sign)| *byte = sign.cast_unsigned());
            }
            Err(reason) => failed = Some(reason),
        }
    }
    host.broadcast(0, &mut message)?;
    if message[0] == 0 {
        let reason = failed.unwrap_or_else(|| format!("see the output of rank {}", host.members()[0].0));
        let what = format!("NCCL gives no unique id: {reason}");
        return Err(Error::BadInput(vec![Problem::new(
            what,
            "ncclGetUniqueId",
            "set NCCL_SOCKET_IFNAME to a network",
        )]));
    }
    let mut id = UniqueId { internal: [0; size_of::<UniqueId>()] };
    id.internal.iter_mut().zip(&message[1..]).for_each(|(sign, byte)| *sign = byte.cast_signed() as c_char);
    Ok(id)
}

#[allow(unsafe_code)]
fn unique_id(functions: &NcclFunctions) -> Result<UniqueId, String> {
    let mut id = UniqueId { internal: [0; size_of::<UniqueId>()] };
    // SAFETY: the pointer is to an id, which the call writes.
    match unsafe { (functions.get_unique_id)(&raw mut id) } {
        SUCCESS => Ok(id),
        result => Err(functions.explain(result, ptr::null_mut())),
    }
}

/// Starts to make a communicator of `size` ranks, of which this is the `place`-th; it may still be in progress.
///
/// # Errors
/// What NCCL said.
#[allow(unsafe_code)]
pub fn start_communicator(nccl: &Nccl, id: UniqueId, size: usize, place: usize) -> Result<Handle, String> {
    let mut communicator = ptr::null_mut();
    let [size, place] = [size, place].map(|number| c_int::try_from(number).expect("ranks fit 31 bits"));
    let mut config = config();
    // SAFETY: communicator and configuration are local, and the configuration says its size.
    let result = unsafe { (nccl.functions.init_rank_config)(&raw mut communicator, size, id, place, &raw mut config) };
    match result {
        SUCCESS | IN_PROGRESS => Ok(communicator),
        result => Err(nccl.functions.explain(result, communicator)),
    }
}

/// Nothing chosen but that calls do not block.
fn config() -> ncclConfig_t {
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: MAGIC,
        version: HEADER_VERSION,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
        graphUsageMode: UNDEFINED,
        numRmaCtx: UNDEFINED,
        maxP2pPeers: UNDEFINED,
    }
}
