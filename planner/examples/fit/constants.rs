//! Constants that published runs decide, what is believed of them without any run, and the profiles they belong to.

use cost_models::machine::Machine;
use planner::fitting::PULL;

use crate::{Sample, uses};

/// A constant that runs decide.
pub struct Constant {
    /// Field in the profile's file, after its section where another one has it too.
    pub field: &'static str,
    /// Least and largest value.
    pub range: (f64, f64),
    /// Value before any run is looked at; that of [`PRIORS`], or the profile's own, where absent.
    pub prior: Option<f64>,
    /// The number in a machine's profiles, if it has one.
    pub place: fn(&mut Machine) -> Option<&mut f64>,
    /// Weight of what is believed.
    pub pull: f64,
    /// What belongs to the unit in the file: `Micros`, `Millis` or nothing.
    pub unit: (&'static str, f64),
}

impl Constant {
    const fn new(
        field: &'static str,
        range: (f64, f64),
        prior: Option<f64>,
        place: fn(&mut Machine) -> Option<&mut f64>,
    ) -> Constant {
        Constant { field, range, prior, place, pull: PULL, unit: ("", 1.0) }
    }

    /// Of which machines differ by half of it or more, as links under contention do.
    const fn uncertain(self) -> Constant {
        Constant { pull: PULL / 16.0, ..self }
    }

    const fn in_micros(self) -> Constant {
        Constant { unit: ("Micros", 1e-6), ..self }
    }

    const fn in_millis(self) -> Constant {
        Constant { unit: ("Millis", 1e-3), ..self }
    }
}

/// Constants of stacks.
const STACK: [Constant; 17] = [
    Constant::new("matmul_speed", (0.5, 1.3), Some(0.92), |m| Some(&mut m.stack.kernels.matmul_speed.value)),
    Constant::new("streaming_speed", (0.2, 1.3), Some(0.8), |m| {
        m.stack.kernels.streaming_speed.as_mut().map(|x| &mut x.value)
    }),
    Constant::new("attention_speed", (0.2, 2.0), Some(0.9), |m| {
        m.stack.kernels.attention_speed.as_mut().map(|x| &mut x.value)
    }),
    Constant::new("host_launch", (1e-6, 2e-4), Some(5e-5), |m| {
        m.stack.kernels.host_launch.as_mut().map(|x| &mut x.value.0)
    })
    .in_micros(),
    Constant::new("launch_floor", (1e-6, 2e-5), Some(5e-06), |m| Some(&mut m.stack.kernels.launch_floor.value.0))
        .in_micros(),
    Constant::new("gradient_reduction", (0.0, 1.0), Some(0.8), |m| Some(&mut m.stack.overlap.gradient_reduction.value)),
    Constant::new("parameter_gather", (0.0, 1.0), Some(0.8), |m| Some(&mut m.stack.overlap.parameter_gather.value)),
    Constant::new("tensor", (0.0, 1.0), Some(0.3), |m| m.stack.overlap.tensor.as_mut().map(|x| &mut x.value)),
    Constant::new("occupancy", (0.0, 1.0), Some(0.1), |m| m.stack.overlap.occupancy.as_mut().map(|x| &mut x.value)),
    Constant::new("micro_batch", (1e-4, 0.06), Some(0.001), |m| Some(&mut m.stack.overhead.micro_batch.value.0))
        .in_millis(),
    Constant::new("step", (1e-3, 0.5), Some(0.03), |m| Some(&mut m.stack.overhead.step.value.0)).in_millis(),
    Constant::new("speed", (0.3, 1.5), Some(0.95), |m| {
        m.stack.kernels.low_precision.as_mut().map(|x| &mut x.speed.value)
    }),
    Constant::new("fp4_speed", (0.3, 1.5), Some(0.75), |m| {
        m.stack.kernels.low_precision.as_mut().and_then(|x| x.fp4_speed.as_mut()).map(|x| &mut x.value)
    }),
    Constant::new("grouped_speed", (0.2, 1.5), Some(0.8), |m| {
        m.stack.kernels.experts.as_mut().map(|x| &mut x.grouped_speed.value)
    }),
    Constant::new("routing", (1e-6, 1e-2), Some(0.0003), |m| {
        m.stack.kernels.experts.as_mut().map(|x| &mut x.routing.value.0)
    })
    .in_micros(),
    Constant::new("exchange_hidden", (0.0, 1.0), Some(0.5), |m| {
        m.stack.kernels.experts.as_mut().map(|x| &mut x.exchange_hidden.value)
    }),
    Constant::new("conversion_bytes", (0.0, 20.0), Some(3.0), |m| {
        m.stack.kernels.low_precision.as_mut().map(|x| &mut x.conversion_bytes.value)
    }),
];

/// Constants of devices.
const DEVICE: [Constant; 3] = [
    Constant::new("maximum", (0.3, 0.85), None, |m| Some(&mut m.device.matmul.maximum.value)),
    Constant::new("eights", (0.2, 1.0), None, |m| m.device.matmul.misaligned.as_mut().map(|x| &mut x.eights.value)),
    Constant::new("odd", (0.02, 1.0), None, |m| m.device.matmul.misaligned.as_mut().map(|x| &mut x.odd.value)),
];

/// Constants of clusters.
const CLUSTER: [Constant; 3] = [
    Constant::new("intra.efficiency", (0.1, 1.0), None, |m| Some(&mut m.cluster.intra.efficiency.value)).uncertain(),
    Constant::new("inter.efficiency", (0.1, 1.0), None, |m| Some(&mut m.cluster.inter.efficiency.value)).uncertain(),
    Constant::new("intra.hop_latency", (0.0, 2e-4), None, |m| Some(&mut m.cluster.intra.hop_latency.value.0))
        .in_micros(),
];

/// Constants that the software fixes, which no run decides.
const FIXED: [(&str, &str); 2] =
    [("megatron-2021", "gradient_reduction"), ("megatron-deepspeed-2022", "gradient_reduction")];

/// Values of single profiles before any run is looked at.
///
/// Clusters: what measurements of collectives say (nccl_busbw table of stas00/ml-engineering, VIA-Research/vTrain and
/// bigscience-workshop/bigscience, experiments/bandwidth): A100's NVLink as on vTrain's nodes, 229 of 300 GB/s; V100's
/// 124 of 150 GB/s; Jean Zay's network 5.06 of 12.5 GB/s on 4 nodes of A100, 6.8 on 16 of V100. Devices: the best achieved
/// matmul over the peak (stas00/ml-engineering, compute/accelerator/README.md, MAMF table), GB300 as GB200; products with
/// odd extents at half of the rate without tensor cores, 78 of 312 TFLOP/s on A100 (NVIDIA A100 data sheet): 0.125.
///
/// Stacks: FSDP of 2023 had FlashAttention's first kernels, 0.25 to 0.4 of A100's peak (arXiv 2307.08691, abstract), of
/// the 0.454 of its profile; that of 2024 the second ones, whose efficiency H100's profile has. Both run layers operator
/// by operator: PyTorch's own norm takes 509 us for both passes over 8192 x 4096 numbers of fp16 on A100 (pytorch/pytorch,
/// pull request 87445), at five passes 659 GB/s or 0.37 of what its memory streams, and its 10 of the 42 tensors that a
/// layer of GPT streams come with 6 more, the gradients of query, key and value that are concatenated:
/// 42 / (10 / 0.37 + 32 + 6) = 0.65.
const PRIORS: [(&str, &str, f64); 18] = [
    ("jean-zay-a100-80gb", "intra.efficiency", 0.7645),
    ("jean-zay-a100-80gb", "inter.efficiency", 0.405),
    ("jean-zay-a100-80gb", "intra.hop_latency", 2.6e-6),
    ("jean-zay-v100", "intra.efficiency", 0.827),
    ("jean-zay-v100", "inter.efficiency", 0.542),
    ("jean-zay-v100", "intra.hop_latency", 2.6e-6),
    ("a100-sxm-80gb", "maximum", 0.869),
    ("a100-sxm-80gb", "eights", 0.99),
    ("a100-sxm-80gb", "odd", 0.125),
    ("h100-sxm-80gb", "maximum", 0.803),
    ("b200-sxm-180gb", "maximum", 0.776),
    ("b300-sxm-288gb", "maximum", 0.786),
    ("gb200-186gb", "maximum", 0.729),
    ("gb300-288gb", "maximum", 0.729),
    ("fsdp-2023", "attention_speed", 0.716),
    ("fsdp-2024", "attention_speed", 1.0),
    ("fsdp-2023", "streaming_speed", 0.65),
    ("fsdp-2024", "streaming_speed", 0.65),
];

/// Profiles that take numbers from a fitted one: all of an equal chip's matmul block with its origin, or single numbers,
/// times a factor, that their own text explains.
pub const DERIVED: [Derived; 10] = [
    Derived { profile: "a100-sxm-40gb", of: "a100-sxm-80gb", fields: &["maximum", "eights", "odd"], factor: None },
    Derived { profile: "h200-sxm-141gb", of: "h100-sxm-80gb", fields: &["maximum"], factor: Some(1.0) },
    Derived { profile: "h100-sxm-hbm2e-96gb", of: "h100-sxm-80gb", fields: &["maximum"], factor: Some(0.922) },
    Derived {
        profile: "fsdp-compile-2024",
        of: "fsdp-2024",
        fields: &[
            "matmul_speed",
            "launch_floor",
            "host_launch",
            "speed",
            "conversion_bytes",
            "parameter_gather",
            "micro_batch",
            "step",
        ],
        factor: Some(1.0),
    },
    Derived { profile: "fsdp-compile-2024", of: "fsdp-2023", fields: &["occupancy"], factor: Some(1.0) },
    Derived { profile: "fsdp-te-2025", of: "fsdp-2023", fields: &["occupancy"], factor: Some(1.0) },
    Derived { profile: "megatron-2022", of: "megatron-2021", fields: MEGATRON, factor: Some(1.0) },
    Derived {
        profile: "alpa",
        of: "megatron-2021",
        fields: &["matmul_speed", "streaming_speed", "step"],
        factor: Some(1.0),
    },
    Derived { profile: "deepspeed-hf-2023", of: "fsdp-2023", fields: EAGER, factor: Some(1.0) },
    Derived { profile: "fsdp-te-2025", of: "megatron-core-2025", fields: TRANSFORMER_ENGINE, factor: Some(1.0) },
];

/// What Megatron of 2022 has of that of 2021.
const MEGATRON: &[&str] =
    &["matmul_speed", "launch_floor", "host_launch", "streaming_speed", "parameter_gather", "micro_batch", "step"];
/// What layers that run operator by operator have in common.
const EAGER: &[&str] = &[
    "matmul_speed",
    "launch_floor",
    "host_launch",
    "streaming_speed",
    "gradient_reduction",
    "parameter_gather",
    "micro_batch",
    "step",
];
/// Kernels of Transformer Engine.
const TRANSFORMER_ENGINE: &[&str] = &[
    "matmul_speed",
    "launch_floor",
    "host_launch",
    "streaming_speed",
    "attention_speed",
    "speed",
    "grouped_speed",
    "routing",
];

/// Numbers of a profile that are another's.
pub struct Derived {
    pub profile: &'static str,
    pub of: &'static str,
    pub fields: &'static [&'static str],
    /// What they are multiplied by; where absent the entry is copied with its origin.
    pub factor: Option<f64>,
}

/// Profiles whose constants are fitted together, since the same runs use them.
pub const GROUPS: [&[&str]; 4] = [
    &["jean-zay-a100-80gb", "megatron-deepspeed-2022", "a100-sxm-80gb", "fsdp-2023", "megatron-2021"],
    &[
        "megatron-core-2024",
        "megatron-core-2025",
        "megatron-core-2026",
        "megatron-core-plain",
        "fsdp-2024",
        "h100-sxm-80gb",
        "gb200-186gb",
        "gb300-288gb",
        "b300-sxm-288gb",
        "b200-sxm-180gb",
    ],
    &["maxtext-2024"],
    &["jean-zay-v100", "deepspeed-zero"],
];

/// A constant of one profile.
pub struct Scoped<'a> {
    pub profile: &'a str,
    pub constant: &'static Constant,
}

/// The constants that the profiles of a group have.
pub fn scoped<'a>(samples: &[Sample], group: &[&'a str]) -> Vec<Scoped<'a>> {
    let mut found = Vec::new();
    for profile in group {
        let Some(user) = samples.iter().find(|sample| uses(sample, profile)) else { continue };
        let mut machine = user.case.request.machine.clone();
        let constants: &'static [Constant] = match () {
            _ if machine.stack.name == *profile => &STACK,
            _ if machine.device.name == *profile => &DEVICE,
            _ => &CLUSTER,
        };
        let free = constants.iter().filter(|constant| !FIXED.contains(&(profile, constant.field)));
        let held = free.filter(|constant| (constant.place)(&mut machine).is_some());
        found.extend(held.map(|constant| Scoped { profile, constant }));
    }
    found
}

impl Scoped<'_> {
    /// The value before any run is looked at, where it is not the profile's own.
    pub fn prior(&self) -> Option<f64> {
        let of_profile =
            |(profile, field, _): &&(&str, &str, f64)| *profile == self.profile && *field == self.constant.field;
        PRIORS.iter().find(of_profile).map(|(_, _, value)| *value).or(self.constant.prior)
    }
}
