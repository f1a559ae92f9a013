//! A cluster file with what was measured on one device, for `plan --cluster`.

use hardware_profiles::device::{OperatorClass, OperatorRate};
use hardware_profiles::{
    ClusterFile, ClusterProfile, DeviceProfile, Sourced, builtin_clusters, builtin_devices, find_cluster, find_device,
    write_cluster_file,
};
use ir::provenance::Provenance;
use ir::units::{BytesPerSecond, FlopsPerSecond};

use super::Report;
use super::bandwidth::Timed;
use super::device::{Device, Driver};
use super::products::Computed;
use crate::Error;

/// Name of the cluster in the file.
const NAME: &str = "gpu-check";

/// The text of a cluster file: the built-in device of the card's name, or else one that is alike, with what was
/// measured in place of its numbers. Nothing was measured between cards: nodes have one.
///
/// # Errors
/// If what was measured makes no sense, as times of a broken clock.
pub fn profile(device: &Device, report: &Report) -> Result<String, Error> {
    let unknown = |error: hardware_profiles::Error| Error::BadInput(error.problems().to_vec());
    let base = base(device).map_err(unknown)?;
    let of_base = builtin_clusters().map_err(unknown)?.into_iter().find(|cluster| cluster.device == base.name);
    let cluster = match of_base {
        Some(cluster) => cluster,
        None => find_cluster("dgx-a100-80gb", "built-in clusters").map_err(unknown)?,
    };
    let measured = Measured { device, report };
    let device_profile = measured.device_profile(base);
    let source =
        format!("measured by `execute-plan gpu-check` on {}; links are those of {}", device.name, cluster.name);
    let cluster =
        ClusterProfile { name: NAME.to_owned(), source, device: device_profile.name.clone(), node_gpus: 1, ..cluster };
    let file = ClusterFile { cluster, device: Some(device_profile), stack: None };
    let text = write_cluster_file(&file);
    hardware_profiles::read_cluster_file(&text, "the measured profile").map_err(unknown)?;
    Ok(text)
}

/// The built-in device with the longest word of its name in the card's, such as `h200` in "NVIDIA H200".
pub(super) fn base(device: &Device) -> Result<DeviceProfile, hardware_profiles::Error> {
    if device.driver == Driver::Wgpu {
        return find_device("cpu-core", "built-in devices");
    }
    let card = device.name.to_lowercase();
    let words = |name: &str| name.split('-').next().map(str::to_owned).unwrap_or_default();
    let known = builtin_devices()?.into_iter().filter(|known| card.contains(&words(&known.name)));
    // Among devices of one name that with the nearest memory.
    let distance = |known: &DeviceProfile| device.memory.map_or(0, |memory| memory.0.abs_diff(known.memory.value.0));
    known.min_by_key(distance).map_or_else(|| find_device("a100-sxm-80gb", "built-in devices"), Ok)
}

struct Measured<'a> {
    device: &'a Device,
    report: &'a Report,
}

impl Measured<'_> {
    fn value<T: Clone>(&self, value: T, what: &str) -> Sourced<T> {
        let source = format!("{what}; `execute-plan gpu-check` on {}", self.device.name);
        Sourced { value, provenance: Provenance::Measured, source }
    }

    fn device_profile(&self, base: DeviceProfile) -> DeviceProfile {
        let mut profile = DeviceProfile { name: format!("{NAME}-device"), ..base };
        if let Some(memory) = self.device.memory {
            profile.memory = self.value(memory, "total memory, as the driver says");
        }
        if let Some(count) = self.device.multiprocessors {
            profile.matmul.multiprocessors = self.value(count, "as the driver says");
        }
        if let Some(bandwidth) = self.copy() {
            profile.memory_bandwidth = self.value(bandwidth, "bytes read and written by a copy, over its time");
            profile.memory_efficiency = self.value(1.0, "the bandwidth is one that was reached");
        }
        let rates = [("fp32", &mut profile.peak.fp32), ("bf16", &mut profile.peak.bf16)];
        let mut is_measured = false;
        for (format, rate) in rates {
            if let Some(fastest) = fastest(&self.report.products, format) {
                let what = format!("{} {}, the fastest product", fastest.kernel, fastest.sizes);
                *rate = fastest.flops_per_second.map(|rate| self.value(FlopsPerSecond(rate), &what));
                is_measured = true;
            }
        }
        if is_measured {
            profile.matmul.maximum = self.value(1.0, "the peak is that of the fastest product");
        }
        self.attention(&mut profile);
        profile.operators = CLASSES.into_iter().filter_map(|(class, pair)| self.operator_rate(class, pair)).collect();
        profile
    }

    /// Bandwidth of a copy, in the narrowest format that the device has.
    fn copy(&self) -> Option<BytesPerSecond> {
        self.report.bandwidth.iter().rev().find(|timed| timed.kernel == "copy")?.bytes_per_second.map(BytesPerSecond)
    }

    fn attention(&self, profile: &mut DeviceProfile) {
        let format = self.format();
        let seconds = |kernel: &str| {
            let all = self.report.attention.iter().filter(|it| it.kernel == kernel && it.format == format);
            all.filter_map(|it| Some((it.sizes.clone(), it.flops, it.time.seconds()?))).next_back()
        };
        let peak = fastest(&self.report.products, format).and_then(|it| it.flops_per_second);
        if let (Some((sizes, flops, forward)), Some((_, _, backward)), Some(peak)) =
            (seconds("attention"), seconds("attention_gradient"), peak)
        {
            let what = format!("causal half of the scores over the forward pass, {sizes}, {format}");
            profile.flash_attention_efficiency = self.value(flops / forward / peak, &what);
            let what = format!("backward over forward pass of the attention core, {sizes}, {format}");
            profile.flash_attention_backward = Some(self.value(backward / forward, &what));
        }
    }

    /// The narrowest number format that was measured: that of training where there is a choice.
    fn format(&self) -> &'static str {
        self.report.bandwidth.last().map_or("fp32", |timed| timed.format)
    }

    /// Rates of a class from kernels of its forward and backward passes.
    fn operator_rate(&self, class: OperatorClass, [forward, backward]: [&str; 2]) -> Option<OperatorRate> {
        let of = |kernel: &str| {
            let timed = self.report.bandwidth.iter().rev().find(|timed| timed.kernel == kernel)?;
            Some((timed, timed.time.seconds()?))
        };
        let (first, forward_seconds) = of(forward)?;
        let (_, backward_seconds) = of(backward)?;
        // Both rates are of the bytes that forward moves.
        let rate = |seconds: f64, kernel: &str| {
            let Timed { sizes, format, .. } = first;
            let what = format!("bytes of {forward} over the time of {kernel}, {sizes}, {format}");
            self.value(BytesPerSecond(first.bytes as f64 / seconds), &what)
        };
        Some(OperatorRate {
            class,
            forward: rate(forward_seconds, forward),
            backward: rate(backward_seconds, backward),
        })
    }
}

/// Kernels of the forward and backward pass that stand for a class.
const CLASSES: [(OperatorClass, [&str; 2]); 4] = [
    (OperatorClass::Norm, ["layer_norm", "layer_norm_gradient"]),
    (OperatorClass::Activation, ["bias_gelu", "bias_gelu_gradient"]),
    (OperatorClass::Loss, ["loss_statistics", "loss_gradient"]),
    (OperatorClass::Embedding, ["lookup", "lookup_gradient"]),
];

/// The fastest product in a number format.
fn fastest<'a>(products: &'a [Computed], format: &str) -> Option<&'a Computed> {
    let rate = |it: &&Computed| it.flops_per_second.unwrap_or_default();
    let known = products.iter().filter(|it| it.format == format && it.flops_per_second.is_some());
    known.max_by(|a, b| rate(a).total_cmp(&rate(b)))
}
