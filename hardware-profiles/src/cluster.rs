//! How accelerators are wired: links inside a node or NVLink domain, and network cards between them.

use ir::units::{Bytes, BytesPerSecond, Seconds, UsDollars};
use serde::{Deserialize, Serialize};

use crate::sourced::Sourced;

/// A homogeneous cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterProfile {
    /// Name, as given to `--cluster`.
    pub name: String,
    /// What the cluster is and where its shape was read.
    pub source: String,
    /// Name of the device profile.
    pub device: String,
    /// Accelerators of a node (one operating system).
    pub node_gpus: u64,
    /// Accelerators that reach one another by the fast links; `node_gpus` where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fast_domain_gpus: Option<u64>,
    /// Links inside the fast domain.
    pub intra: FastLinks,
    /// Network between fast domains.
    pub inter: Network,
    /// Price of an accelerator for an hour, with its share of node and network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_per_gpu_hour: Option<Sourced<UsDollars>>,
    /// How often runs fail, and what it takes to go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reliability: Option<Reliability>,
    /// The processors and their memory; without them nothing is offloaded to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<Host>,
}

/// How often runs fail, and what it takes to go on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reliability {
    /// Time of one accelerator between failures that end a run; n accelerators fail n times as often.
    pub mean_time_between_failures_per_gpu: Sourced<Seconds>,
    /// Time from a failure to the first step after it, without the steps that are done again.
    pub restart: Sourced<Seconds>,
    /// Bandwidth at which a node writes its part of a checkpoint while all nodes write.
    pub checkpoint_write_per_node: Sourced<BytesPerSecond>,
}

/// The processors of a node, and the way to them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Memory of a node.
    pub memory: Sourced<Bytes>,
    /// Share of it that system and data loading keep.
    pub reserved: Sourced<f64>,
    /// Peak bandwidth of a node's memory.
    pub memory_bandwidth: Sourced<BytesPerSecond>,
    /// Share of the peak that an optimizer on all cores reaches.
    pub memory_efficiency: Sourced<f64>,
    /// Bandwidth of one accelerator's link to the host in one direction.
    pub link_per_gpu_per_direction: Sourced<BytesPerSecond>,
    /// Share of it that all accelerators of a node reach at once with pinned memory.
    pub link_efficiency: Sourced<f64>,
}

/// Links inside a node or NVLink domain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FastLinks {
    /// Link bandwidth of one accelerator in one direction.
    pub bandwidth_per_gpu_per_direction: Sourced<BytesPerSecond>,
    /// Bus bandwidth of large ring collectives over the link bandwidth.
    pub efficiency: Sourced<f64>,
    /// Fixed time of a collective: launch and synchronisation.
    pub base_latency: Sourced<Seconds>,
    /// Time of a ring step without payload.
    pub hop_latency: Sourced<Seconds>,
}

/// Network between nodes or NVLink domains.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Network cards and who shares them.
    pub nics: Nics,
    /// Bandwidth of one card in one direction.
    pub bandwidth_per_nic_per_direction: Sourced<BytesPerSecond>,
    /// Bus bandwidth of large ring collectives over the card bandwidth.
    pub efficiency: Sourced<f64>,
    /// Most cards of a node that one group's ring can use at once; all of them where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nics_per_group: Option<Sourced<f64>>,
    /// Time of a ring step between nodes without payload.
    pub hop_latency: Sourced<Seconds>,
}

/// Number of network cards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Nics {
    /// Cards for each accelerator: other node sizes keep the ratio.
    PerGpu(Sourced<f64>),
    /// Cards of a whole node of the profile's size, shared by its accelerators.
    PerNode(Sourced<f64>),
}

impl ClusterProfile {
    /// Cards for each accelerator.
    pub fn nics_per_gpu(&self) -> f64 {
        match &self.inter.nics {
            Nics::PerGpu(count) => count.value,
            Nics::PerNode(count) => count.value / self.node_gpus as f64,
        }
    }
}
