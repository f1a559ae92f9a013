//! Rates of what is bound by arithmetic: matrix products of cubek and cuBLASLt, and attention.

use cubek_matmul::multi_level;
use cubek_matmul::strategy::Strategy;
use kernels::attention::{Attention, attention, attention_gradient};
use kernels::{Buffer, Element};
use serde::Serialize;

use super::bandwidth::Time;
use super::checks::{Checks, held, name};
use super::device::{Device, Driver};
use crate::device::product::{self, Matrices};

/// Something bound by arithmetic and its time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Computed {
    /// What computes.
    pub kernel: String,
    /// Its sizes: rows x depth x columns of a product; sequences x positions x heads x width of attention.
    pub sizes: String,
    /// Number format of its tensors.
    pub format: &'static str,
    /// Operations, as executed: of attention the causal half.
    pub flops: f64,
    /// Time of a call, or why there is none.
    #[serde(flatten)]
    pub time: Time,
    /// Operations a second.
    pub flops_per_second: Option<f64>,
}

impl Computed {
    fn new(kernel: &str, sizes: String, element: Element, flops: f64, seconds: Result<f64, String>) -> Computed {
        let flops_per_second = seconds.as_ref().ok().map(|seconds| flops / seconds);
        Computed {
            kernel: kernel.to_owned(),
            sizes,
            format: name(element),
            flops,
            time: seconds.into(),
            flops_per_second,
        }
    }
}

/// Rows, depth and columns of a product `[rows, depth] · [depth, columns]`.
type Shape = [usize; 3];

/// A large product and those of GPT-2 1.5B with 8 sequences; the rest for a full check.
const ON_GPU: [Shape; 6] = [
    [8192, 8192, 8192],
    [8192, 1600, 4800],
    [8192, 1600, 6400],
    [8192, 4096, 4096],
    [16_384, 12_288, 12_288],
    [8192, 1600, 50_304],
];
const IN_SHORT: usize = 3;
const ON_CORES: [Shape; 1] = [[256, 256, 256]];
/// Where numbers are compared: no multiples of any tile.
const ODD: [Shape; 3] = [[1, 1, 1], [33, 65, 17], [130, 96, 200]];

/// Ways to multiply that cubek offers, by their name here.
fn strategies(device: &Device) -> Vec<(&'static str, Strategy)> {
    let automatic = ("cubek", Strategy::Auto);
    match device.driver {
        Driver::Wgpu => vec![automatic],
        Driver::Cuda => vec![
            automatic,
            ("cubek, mma", multi_level::Strategy::SimpleCyclicMma(Default::default()).into()),
            ("cubek, double buffering", multi_level::Strategy::DoubleCyclicCmma(Default::default()).into()),
            ("cubek, double buffering, mma", multi_level::Strategy::DoubleCyclicMma(Default::default()).into()),
            ("cubek, specialised", multi_level::Strategy::SpecializedCyclicCmma(Default::default()).into()),
            ("cubek, specialised, mma", multi_level::Strategy::SpecializedCyclicMma(Default::default()).into()),
        ],
    }
}

/// c = a · b, of whole rows; by `Strategy::Auto` as programs multiply.
fn multiply(device: &Device, strategy: &Strategy, shape: Shape, of: [&Buffer; 3]) -> Result<(), String> {
    let [rows, summed, columns] = shape;
    let strides = [[summed, 1], [columns, 1]];
    let matrices = Matrices { rows, summed, columns, strides, formats: [of[0].element, of[2].element] };
    let own = product::strategy(&matrices);
    let strategy = match (strategy, of[0].element) {
        (Strategy::Auto, _) => &own,
        (_, Element::Single) => return Err("tensor cores round fp32 operands: programs do without".to_owned()),
        (other, _) => other,
    };
    product::multiply(device.client(), strategy, &matrices, of)
}

/// Numbers of products of odd sizes against sums in fp64.
pub fn products_of_odd_sizes(checks: &mut Checks) {
    let device = checks.device;
    for ([rows, depth, columns], format) in device.in_each_format(ODD) {
        let [held_a, held_b] = [held(rows * depth, 1, 1.0, format), held(depth * columns, 2, 1.0, format)];
        let at = |place: usize| -> f64 {
            let (row, column) = (place / columns, place % columns);
            (0..depth).map(|k| f64::from(held_a[row * depth + k]) * f64::from(held_b[k * columns + column])).sum()
        };
        let expected: Vec<f64> = (0..rows * columns).map(at).collect();
        let [a, b] = [&held_a, &held_b].map(|numbers| device.upload(numbers, format));
        for (name, strategy) in strategies(device) {
            let c = device.poisoned(rows * columns, format);
            // What cannot multiply such shapes says so, and is no error; what computes must be right.
            if multiply(device, &strategy, [rows, depth, columns], [&a, &b, &c]).is_ok() {
                checks.compare(format!("{name} {rows} x {depth} x {columns}"), &c, &expected, 1e-5);
            }
        }
        compare_library(checks, [rows, depth, columns], format, [&held_a, &held_b], &expected);
    }
}

/// Rates of matrix products.
pub fn measure_products(device: &Device, full: bool) -> Vec<Computed> {
    let shapes: &[Shape] = match device.driver {
        Driver::Cuda if full => &ON_GPU,
        Driver::Cuda => &ON_GPU[..IN_SHORT],
        Driver::Wgpu => &ON_CORES,
    };
    let mut found = Vec::new();
    for (element, shape) in device.formats().into_iter().flat_map(|element| shapes.iter().map(move |it| (element, *it)))
    {
        let [rows, depth, columns] = shape;
        let [a, b, c] = [rows * depth, depth * columns, rows * columns].map(|length| filled(device, length, element));
        for (kernel, strategy) in strategies(device) {
            let send = || multiply(device, &strategy, shape, [&a, &b, &c]);
            // What is accepted once is so again.
            let seconds = send().and_then(|()| {
                device.seconds(&[&c], &|| {
                    send().ok();
                })
            });
            let flops = 2.0 * rows as f64 * depth as f64 * columns as f64;
            found.push(Computed::new(kernel, format!("{rows} x {depth} x {columns}"), element, flops, seconds));
        }
        found.extend(measure_library(device, shape, element));
    }
    found
}

/// cuBLASLt's numbers where a card has it; where it is missing, its times say so.
#[cfg(all(feature = "cuda", feature = "cublaslt"))]
fn compare_library(checks: &mut Checks, shape: Shape, format: Element, operands: [&[f32]; 2], expected: &[f64]) {
    let device = checks.device;
    if device.driver == Driver::Cuda
        && let Ok(found) = super::cublaslt::multiply(shape, format, operands)
    {
        let [rows, depth, columns] = shape;
        let found = device.upload(&found, format);
        checks.compare(format!("cuBLASLt {rows} x {depth} x {columns}"), &found, expected, 1e-5);
    }
}

#[cfg(not(all(feature = "cuda", feature = "cublaslt")))]
fn compare_library(_: &mut Checks, _: Shape, _: Element, _: [&[f32]; 2], _: &[f64]) {}

/// Rates of cuBLASLt's products, alone and with what follows them.
#[cfg(all(feature = "cuda", feature = "cublaslt"))]
fn measure_library(device: &Device, [rows, depth, columns]: Shape, element: Element) -> Vec<Computed> {
    use crate::cublaslt::Epilogue;
    let epilogues = [
        ("cuBLASLt", Epilogue::Nothing),
        ("cuBLASLt, bias and GeLU", Epilogue::BiasGelu),
        ("cuBLASLt, gradient of a bias", Epilogue::BiasGradient),
    ];
    if device.driver == Driver::Wgpu {
        return Vec::new();
    }
    let [a, b] = [random(rows * depth, element), random(depth * columns, element)];
    let flops = 2.0 * rows as f64 * depth as f64 * columns as f64;
    let row = |(kernel, epilogue)| {
        let seconds = super::cublaslt::measure([rows, depth, columns], element, epilogue, [&a, &b]);
        Computed::new(kernel, format!("{rows} x {depth} x {columns}"), element, flops, seconds)
    };
    epilogues.map(row).into()
}

#[cfg(not(all(feature = "cuda", feature = "cublaslt")))]
fn measure_library(_: &Device, _: Shape, _: Element) -> Vec<Computed> {
    Vec::new()
}

/// Random numbers, repeated where they are many: a card draws less power, and runs faster, on numbers that are all
/// alike.
fn random(length: usize, element: Element) -> Vec<f32> {
    let numbers = held(length.min(1 << 20), 1, 1.0, element);
    let mut all = numbers.repeat(length.div_ceil(numbers.len()));
    all.truncate(length);
    all
}

/// Memory with random numbers.
fn filled(device: &Device, length: usize, element: Element) -> Buffer {
    device.upload(&random(length, element), element)
}

/// Rates of the attention core, forward and backward.
pub fn measure_attention(device: &Device, full: bool) -> Vec<Computed> {
    let (shapes, width): (&[[usize; 3]], usize) = match device.driver {
        Driver::Cuda if full => (&[[4, 2048, 32], [1, 8192, 32], [8, 1024, 25]], 64),
        Driver::Cuda => (&[[8, 1024, 25]], 64),
        Driver::Wgpu => (&[[1, 128, 2]], 64),
    };
    let mut found = Vec::new();
    for (element, [sequences, positions, heads]) in
        device.formats().into_iter().flat_map(|element| shapes.iter().map(move |it| (element, *it)))
    {
        let scale = 1.0 / (width as f64).sqrt();
        let core = Attention { sequences, positions, heads, queries: 1, head_width: width, value_width: width, scale };
        let length = sequences * positions * heads * width;
        let [query, keys, values, dcontext, context, dquery, dkeys, dvalues] =
            [(); 8].map(|()| filled(device, length, element));
        let queue = device.queue();
        let slopes = queue.numbers(&vec![0.0; heads]);
        let logarithms = device.upload(&vec![0.0; sequences * positions * heads], Element::Single);
        let operands = [&query, &keys, &values, &slopes];
        // Two products forward and five backward, over the causal half of the scores.
        let seen = (sequences * heads * positions * (positions + 1) / 2) as f64;
        let product = 2.0 * seen * width as f64;
        let sizes = format!("{sequences} x {positions} x {heads} x {width}");
        let mut take = |kernel: &str, products: f64, results: &[&Buffer], send: &dyn Fn()| {
            let seconds = device.seconds(results, send);
            found.push(Computed::new(kernel, sizes.clone(), element, products * product, seconds));
        };
        take("attention", 2.0, &[&context], &|| attention(&queue, &core, operands, &context, &logarithms));
        take("attention_gradient", 5.0, &[&dquery, &dkeys, &dvalues], &|| {
            let results = [&context, &logarithms, &dcontext];
            attention_gradient(&queue, &core, operands, results, [&dquery, &dkeys, &dvalues]);
        });
    }
    found
}
