//! Devices, clusters and software stacks as data.
//!
//! The files under `devices/`, `clusters/` and `stacks/` are compiled into the binary; a user's own
//! file of the same form is read by [`read_cluster_file`] or [`read_stack`]. No formula uses the numbers here.

pub mod cluster;
pub mod cluster_file;
pub mod device;
pub mod files;
pub mod interval;
pub mod library;
pub mod run_names;
pub mod sourced;
pub mod stack;

pub use cluster::ClusterProfile;
pub use cluster_file::{ClusterFile, read_cluster_file, write_cluster_file};
pub use device::DeviceProfile;
pub use library::{
    Error, builtin_clusters, builtin_devices, builtin_stacks, find_cluster, find_device, find_stack, read_cluster,
    read_stack,
};
pub use sourced::Sourced;
pub use stack::StackProfile;
