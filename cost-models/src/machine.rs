//! The machine that a prediction is made for: device, cluster and software stack together.

use hardware_profiles::device::MatmulFormat;
use hardware_profiles::{ClusterProfile, DeviceProfile, StackProfile};
use ir::model::DType;
use ir::provenance::Provenance;
use ir::units::{Bytes, BytesPerSecond, FlopsPerSecond, Seconds};

/// Device, cluster and stack, with the node size in use.
#[derive(Clone, Debug)]
pub struct Machine {
    /// The accelerator.
    pub device: DeviceProfile,
    /// How accelerators are wired.
    pub cluster: ClusterProfile,
    /// The training software.
    pub stack: StackProfile,
    /// Accelerators of a node, as the user gave them.
    pub node_gpus: u64,
    /// Number format of the layers' matrix products.
    pub matmul_format: MatmulFormat,
}

impl Machine {
    /// Accelerators that reach one another by the fast links.
    pub fn fast_domain_gpus(&self) -> u64 {
        self.cluster.fast_domain_gpus.unwrap_or(self.node_gpus).max(self.node_gpus)
    }

    /// Dense matrix peak for a number format; zero where the device has none.
    pub fn peak_rate(&self, dtype: DType) -> FlopsPerSecond {
        self.device.peak_rate(dtype).map_or(FlopsPerSecond(0.0), |peak| peak.value)
    }

    /// Bandwidth of streaming kernels.
    pub fn streaming_bandwidth(&self) -> BytesPerSecond {
        let speed = self.stack.kernels.streaming_speed.as_ref().map_or(1.0, |speed| speed.value);
        self.device.memory_bandwidth.value * self.device.memory_efficiency.value * speed
    }

    /// Time that ranks wait for one another at a collective that the computation stops for, and at one that was
    /// started before.
    pub fn waiting(&self) -> [Seconds; 2] {
        let waiting = self.stack.overlap.waiting.as_ref();
        waiting.map_or([Seconds(0.0); 2], |waiting| [waiting.blocking.value, waiting.started.value])
    }

    /// Time that `collectives` started together take beyond one of them and their payload.
    pub fn further(&self, collectives: u64) -> Seconds {
        let waiting = self.stack.overlap.waiting.as_ref();
        waiting.map_or(Seconds(0.0), |waiting| waiting.further.value * collectives.saturating_sub(1) as f64)
    }

    /// Time to copy a tensor into the order that a collective needs, or out of it.
    ///
    /// The rate is that of the profile's sizes on either side, weighted by the logarithm of the size.
    pub fn copy_time(&self, tensor: Bytes) -> Seconds {
        let rates = &self.stack.overlap.copies;
        let above = rates.partition_point(|copy| copy.size < tensor);
        let (Some(near), Some(far)) = (rates.get(above.saturating_sub(1)), rates.get(above).or(rates.last())) else {
            return Seconds(0.0);
        };
        let log = |bytes: Bytes| (bytes.0.max(1) as f64).ln();
        let span = log(far.size) - log(near.size);
        let share = if span > 0.0 { (log(tensor) - log(near.size)) / span } else { 0.0 };
        tensor / BytesPerSecond(near.rate.value.0 + (far.rate.value.0 - near.rate.value.0) * share)
    }

    /// Memory that a plan may use: the device's, less the stack's margin.
    pub fn usable_memory(&self) -> Bytes {
        self.device.memory.value.scale(1.0 - self.stack.memory.safety_margin.value)
    }

    /// Weakest origin of the numbers behind computation times.
    pub fn compute_provenance(&self, dtype: DType) -> Provenance {
        let peak = self.device.peak_rate(dtype).map_or(Provenance::Assumed, |peak| peak.provenance);
        let matmul = &self.device.matmul;
        let parts =
            [matmul.maximum.provenance, matmul.half_depth.provenance, self.stack.kernels.matmul_speed.provenance];
        parts.into_iter().fold(peak, Provenance::min)
    }

    /// Weakest origin of the numbers behind collectives inside a fast domain.
    pub fn intra_provenance(&self) -> Provenance {
        let links = &self.cluster.intra;
        let latency = links.base_latency.provenance.min(links.hop_latency.provenance);
        links.bandwidth_per_gpu_per_direction.provenance.min(links.efficiency.provenance).min(latency)
    }

    /// Weakest origin of the numbers behind transfers between fast domains.
    pub fn inter_provenance(&self) -> Provenance {
        let network = &self.cluster.inter;
        let bandwidth = network.bandwidth_per_nic_per_direction.provenance.min(network.efficiency.provenance);
        let group = network.nics_per_group.as_ref().map_or(Provenance::Measured, |count| count.provenance);
        bandwidth.min(group)
    }

    /// Weakest origin of the numbers behind an update in host memory.
    pub fn host_provenance(&self) -> Provenance {
        self.cluster.host.as_ref().map_or(Provenance::Assumed, |host| {
            let memory = host.memory_bandwidth.provenance.min(host.memory_efficiency.provenance);
            memory.min(host.link_per_gpu_per_direction.provenance).min(host.link_efficiency.provenance)
        })
    }
}
