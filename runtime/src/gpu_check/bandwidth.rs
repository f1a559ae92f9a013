//! Bandwidth that memory-bound kernels reach, beside that of a copy.

use kernels::activation::{bias_gelu, bias_gelu_gradient, swiglu, swiglu_gradient};
use kernels::copy::copy;
use kernels::dropout::{Mask, dropout};
use kernels::loss::{self, Statistics};
use kernels::norm::{Norm, norm, norm_gradient};
use kernels::optimizer::{AdamW, State, WeightDecay, adamw, sum_of_squares};
use kernels::rotary::{Heads, Turns, rotary};
use kernels::softmax::{Scores, masked_softmax, masked_softmax_gradient};
use kernels::traffic::Traffic;
use kernels::{Buffer, Element, embedding};
use serde::Serialize;

use super::checks::name;
use super::device::{Device, Driver};
use super::reference::ids;

/// A memory-bound kernel and its time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Timed {
    /// The kernel.
    pub kernel: &'static str,
    /// Its sizes.
    pub sizes: String,
    /// Number format of its tensors.
    pub format: &'static str,
    /// Bytes that it must move.
    pub bytes: usize,
    /// Time of a call, or why there is none.
    #[serde(flatten)]
    pub time: Time,
    /// Bytes over time.
    pub bytes_per_second: Option<f64>,
    /// That over the bandwidth of a copy in the same number format.
    pub share_of_copy: Option<f64>,
}

/// A measured time.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Time {
    /// Seconds of a call.
    Seconds(f64),
    /// What the device said instead.
    Failed(String),
}

/// Sizes that tensors of one kernel have: on a GPU larger than its cache.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    rows: usize,
    columns: usize,
    /// Sequences of `rows` tokens are this long.
    positions: usize,
    heads: usize,
    head_width: usize,
    score_rows: usize,
    vocabulary: usize,
    tokens: usize,
    parameters: usize,
}

const ON_GPU: Sizes = Sizes {
    rows: 16_384,
    columns: 4096,
    positions: 2048,
    heads: 32,
    head_width: 128,
    score_rows: 65_536,
    vocabulary: 50_304,
    tokens: 4096,
    parameters: 1 << 26,
};
const ON_CORES: Sizes = Sizes {
    rows: 512,
    columns: 1024,
    positions: 256,
    heads: 8,
    head_width: 128,
    score_rows: 1024,
    vocabulary: 5024,
    tokens: 64,
    parameters: 1 << 19,
};

impl Time {
    /// Seconds, if it was measured.
    pub fn seconds(&self) -> Option<f64> {
        match self {
            Time::Seconds(seconds) => Some(*seconds),
            Time::Failed(_) => None,
        }
    }
}

impl From<Result<f64, String>> for Time {
    fn from(measured: Result<f64, String>) -> Time {
        measured.map_or_else(Time::Failed, Time::Seconds)
    }
}

/// Times of one kernel after the other.
struct Measurement<'a> {
    device: &'a Device,
    element: Element,
    sizes: Sizes,
    found: Vec<Timed>,
}

/// Times of all memory-bound kernels in each number format, a copy first in each.
pub fn measure_bandwidth(device: &Device) -> Vec<Timed> {
    let sizes = match device.driver {
        Driver::Cuda => ON_GPU,
        Driver::Wgpu => ON_CORES,
    };
    let mut found = Vec::new();
    for element in device.formats() {
        let mut measurement = Measurement { device, element, sizes, found: Vec::new() };
        measurement.copies();
        measurement.activations();
        measurement.norms();
        measurement.scores();
        measurement.vocabulary();
        measurement.update();
        found.extend(measurement.found);
    }
    found
}

impl Measurement<'_> {
    /// Memory with small numbers. On a device its contents do not change a kernel's time.
    fn buffer(&self, length: usize, element: Element) -> Buffer {
        self.device.upload(&vec![0.5; length], element)
    }

    fn time(&mut self, kernel: &'static str, sizes: String, traffic: Traffic, results: &[&Buffer], send: &dyn Fn()) {
        let (bytes, format) = (traffic.bytes(self.element), name(self.element));
        let time: Time = self.device.seconds(results, send).into();
        let bytes_per_second = time.seconds().map(|seconds| bytes as f64 / seconds);
        let copy = self.found.first().map_or(bytes_per_second, |copy| copy.bytes_per_second);
        let share_of_copy = bytes_per_second.zip(copy).map(|(own, copy)| own / copy);
        self.found.push(Timed { kernel, sizes, format, bytes, time, bytes_per_second, share_of_copy });
    }

    fn copies(&mut self) {
        let Sizes { rows, columns, .. } = self.sizes;
        let [x, y] = [(); 2].map(|()| self.buffer(rows * columns, self.element));
        let queue = self.device.queue();
        let traffic = Traffic::Copy { elements: rows * columns };
        self.time("copy", format!("{rows} x {columns}"), traffic, &[&y], &|| copy(&queue, &x, &y));
    }

    fn activations(&mut self) {
        let Sizes { rows, columns, .. } = self.sizes;
        let (elements, sizes) = (rows * columns, || format!("{rows} x {columns}"));
        let [x, up, dy, y, dup] = [(); 5].map(|()| self.buffer(elements, self.element));
        let (row, sums) = (self.buffer(columns, self.element), self.buffer(columns, Element::Single));
        let queue = self.device.queue();
        let traffic = Traffic::BiasGelu { elements };
        self.time("bias_gelu", sizes(), traffic, &[&y], &|| bias_gelu(&queue, &x, &row, &y));
        let traffic = Traffic::BiasGeluGradient { elements };
        let send = || bias_gelu_gradient(&queue, [&x, &row, &dy], &y, &sums, false);
        self.time("bias_gelu_gradient", sizes(), traffic, &[&y, &sums], &send);
        self.time("swiglu", sizes(), Traffic::Swiglu { elements }, &[&y], &|| swiglu(&queue, [&x, &up], &y));
        let send = || swiglu_gradient(&queue, [&x, &up, &dy], [&y, &dup]);
        self.time("swiglu_gradient", sizes(), Traffic::SwigluGradient { elements }, &[&y, &dup], &send);
        let positions = rows as u32;
        let mask =
            Mask { key: [1, 2], counter_high: [3, 4], probability: 0.1, first_sequence: 0, positions: (0, positions) };
        let send = || dropout(&queue, &mask, [1, rows, columns], &x, Some(&up), &y);
        self.time("dropout", sizes(), Traffic::Dropout { elements }, &[&y], &send);
    }

    fn norms(&mut self) {
        let Sizes { rows, columns, .. } = self.sizes;
        let elements = rows * columns;
        let [x, residual, dy, y, sum] = [(); 5].map(|()| self.buffer(elements, self.element));
        let row = self.buffer(columns, self.element);
        let [dweight, dbias] = [(); 2].map(|()| self.buffer(columns, Element::Single));
        let queue = self.device.queue();
        for (centered, forward, backward) in
            [(true, "layer_norm", "layer_norm_gradient"), (false, "rms_norm", "rms_norm_gradient")]
        {
            let settings = Norm { centered, epsilon: 1e-5, columns };
            let (bias, dbias) = (centered.then_some(&row), centered.then_some(&dbias));
            let send = || norm(&queue, &settings, &x, Some((&residual, &sum)), &row, bias, &y);
            let sizes = format!("{rows} x {columns}");
            self.time(forward, sizes.clone(), Traffic::Norm { elements }, &[&y, &sum], &send);
            let send =
                || norm_gradient(&queue, &settings, [&x, &row, &dy], Some(&residual), &y, (&dweight, dbias), false);
            self.time(backward, sizes, Traffic::NormGradient { elements }, &[&y, &dweight], &send);
        }
    }

    fn scores(&mut self) {
        let Sizes { score_rows: rows, positions, heads, head_width, rows: tokens, .. } = self.sizes;
        let [x, dy, y] = [(); 3].map(|()| self.buffer(rows * positions, self.element));
        let queue = self.device.queue();
        let scores = Scores { heads: rows / positions, positions, keys: positions };
        let slopes = queue.numbers(&vec![0.0; scores.heads]);
        let sizes = || format!("{} x {positions} x {positions}", scores.heads);
        let send = || masked_softmax(&queue, &scores, 0.125, [&x, &slopes], &y);
        self.time("softmax", sizes(), Traffic::MaskedSoftmax { rows, positions }, &[&y], &send);
        let send = || masked_softmax_gradient(&queue, &scores, 0.125, [&x, &dy], &y);
        self.time("softmax_gradient", sizes(), Traffic::MaskedSoftmaxGradient { rows, positions }, &[&y], &send);
        let elements = tokens * heads * head_width;
        let [x, y] = [(); 2].map(|()| self.buffer(elements, self.element));
        let turns = Turns::new(&queue, positions, head_width, 10_000.0);
        let send = || rotary(&queue, &turns, Heads { between: heads, back: false }, &x, &y);
        let traffic = Traffic::Rotary { elements, positions, head_width };
        self.time("rotary", format!("{tokens} x {heads} x {head_width}"), traffic, &[&y], &send);
    }

    fn vocabulary(&mut self) {
        let Sizes { vocabulary: columns, tokens, columns: width, .. } = self.sizes;
        let logits = self.buffer(tokens * columns, self.element);
        let queue = self.device.queue();
        let targets = ids(tokens, columns, 1);
        let chosen = queue.indices(&targets);
        let numbers = [(); 4].map(|()| self.buffer(tokens, Element::Single));
        let of = Statistics { largest: &numbers[0], sum: &numbers[1], picked: &numbers[2] };
        let vocabulary = loss::Vocabulary { start: 0, columns, used: columns };
        let sizes = || format!("{tokens} x {columns}");
        let send = || loss::statistics(&queue, &vocabulary, &logits, &chosen, of);
        let traffic = Traffic::LossStatistics { logits: logits.length };
        self.time("loss_statistics", sizes(), traffic, &[&numbers[0], &numbers[1]], &send);
        let send = || loss::gradient(&queue, &vocabulary, &logits, &chosen, of, &numbers[3]);
        self.time("loss_gradient", sizes(), Traffic::LossGradient { logits: logits.length }, &[&logits], &send);
        let (table, total) =
            (self.buffer(columns * width, self.element), self.buffer(columns * width, Element::Single));
        let y = self.buffer(tokens * width, self.element);
        let sizes = || format!("{tokens} of {columns} x {width}");
        let send = || embedding::lookup(&queue, &table, width, &chosen, 0, &y);
        self.time("lookup", sizes(), Traffic::Lookup { elements: y.length }, &[&y], &send);
        let named = targets.iter().collect::<std::collections::BTreeSet<_>>().len() * width;
        let send = || embedding::lookup_gradient(&queue, &chosen, &y, 0, &total);
        self.time("lookup_gradient", sizes(), Traffic::LookupGradient { elements: y.length, named }, &[&total], &send);
    }

    fn update(&mut self) {
        let elements = self.sizes.parameters;
        let [master, first, second, gradient] = [(); 4].map(|()| self.buffer(elements, Element::Single));
        let written = (self.element == Element::Brain).then(|| self.buffer(elements, self.element));
        let queue = self.device.queue();
        let settings = AdamW { learning_rate: 1e-3, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, step: 1 };
        let decay = WeightDecay::new(&queue, &[(elements, 0.1)]);
        let one = queue.numbers(&[1.0]);
        let send = || {
            let state = State { master: &master, first: &first, second: &second, parameter: written.as_ref() };
            adamw(&queue, &settings, &decay, &gradient, &one, state);
        };
        self.time("adamw", elements.to_string(), Traffic::Adamw { elements }, &[&master], &send);
        if self.element == Element::Single {
            let send = || sum_of_squares(&queue, &gradient, &one, false);
            self.time("sum_of_squares", elements.to_string(), Traffic::SumOfSquares { elements }, &[&one], &send);
        }
    }
}
