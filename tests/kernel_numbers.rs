//! The attention core by matrix instructions, in bf16: its PTX for sm_80, run on the processor and compared with fp64.
//!
//! What runs is what NVRTC makes of the kernels, with instructions as the PTX ISA describes them
//! (`support/ptx_machine.rs`): fragments, copies that must be waited for, and accesses are as on a card, times and
//! rounding inside tensor cores are not. NVRTC and the packages are found as `kernel_code.rs` finds them.

#[path = "support/ptx_machine.rs"]
mod ptx_machine;

use std::env;
use std::path::PathBuf;

use cubecl::CubeCount;
use kernels::attention::{Attention, attention, attention_gradient};
use kernels::ptx::{Code, Toolkit, compile, list};
use kernels::{Element, ListedKernel, Queue};
use ptx_machine::{MEMORY, Program, rounded, widened};

const ARCHITECTURE: u32 = 80;
/// Key-value heads, queries of each, positions, widths of heads and values, linear biases.
const SHAPES: [(usize, usize, usize, [usize; 2], bool); 4] =
    [(2, 2, 150, [64, 64], true), (1, 1, 65, [24, 40], false), (1, 2, 70, [128, 128], true), (1, 1, 1, [8, 8], false)];
/// Difference that is allowed, over the largest number: roundings to bf16 of weights, of their gradients and of results.
const TOLERANCE: f64 = 1.0 / 128.0;

/// A matrix for each head, `[positions, heads, width]`.
struct Heads {
    heads: usize,
    width: usize,
    numbers: Vec<f64>,
}

impl Heads {
    fn zeros(positions: usize, heads: usize, width: usize) -> Heads {
        Heads { heads, width, numbers: vec![0.0; positions * heads * width] }
    }

    /// Numbers of bf16 from -2 to 2.
    fn random(positions: usize, heads: usize, width: usize, seed: u32) -> Heads {
        let mut state = seed.wrapping_mul(2_654_435_761);
        let mut numbers = Heads::zeros(positions, heads, width);
        numbers.numbers.fill_with(|| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            f64::from(widened(rounded(state as f32 / u32::MAX as f32 * 4.0 - 2.0)))
        });
        numbers
    }

    fn row(&self, position: usize, head: usize) -> &[f64] {
        let start = (position * self.heads + head) * self.width;
        &self.numbers[start..start + self.width]
    }

    fn add(&mut self, position: usize, head: usize, factor: f64, row: &[f64]) {
        let start = (position * self.heads + head) * self.width;
        let own = &mut self.numbers[start..start + self.width];
        own.iter_mut().zip(row).for_each(|(own, number)| *own += factor * number);
    }

    fn bytes(&self) -> Vec<u8> {
        self.numbers.iter().flat_map(|number| rounded(*number as f32).to_le_bytes()).collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Query, keys, values and the context's gradient.
struct Operands {
    core: Attention,
    slopes: Vec<f32>,
    tensors: [Heads; 4],
}

/// Context, logarithms `[heads, positions]`, and gradients of query, keys and values.
struct Results {
    context: Heads,
    logarithms: Vec<f64>,
    gradients: [Heads; 3],
}

impl Operands {
    fn new(
        (heads, queries, positions, [head_width, value_width], alibi): (usize, usize, usize, [usize; 2], bool),
    ) -> Operands {
        let all = heads * queries;
        let shapes = [(all, head_width), (heads, head_width), (heads, value_width), (all, value_width)];
        let mut seed = 0;
        let tensors = shapes.map(|(heads, width)| {
            seed += 1;
            Heads::random(positions, heads, width, seed)
        });
        let slope = |head: usize| if alibi { 0.1 * head as f32 - 0.15 } else { 0.0 };
        let scale = 0.8 / (head_width as f64).sqrt();
        let core = Attention { sequences: 1, positions, heads, queries, head_width, value_width, scale };
        Operands { core, slopes: (0..all).map(slope).collect(), tensors }
    }

    /// The core and its gradients in fp64.
    fn results(&self) -> Results {
        let Attention { positions, heads, queries, head_width, value_width, scale, .. } = self.core;
        let [query, keys, values, dcontext] = &self.tensors;
        let all = heads * queries;
        let mut context = Heads::zeros(positions, all, value_width);
        let mut logarithms = vec![0.0; all * positions];
        let mut gradients = [(all, head_width), (heads, head_width), (heads, value_width)]
            .map(|(heads, width)| Heads::zeros(positions, heads, width));
        for (head, position) in (0..all).flat_map(|head| (0..positions).map(move |position| (head, position))) {
            let (own, slope) = (head / queries, f64::from(self.slopes[head]));
            let score = |key: usize| dot(query.row(position, head), keys.row(key, own)) * scale + slope * key as f64;
            let scores: Vec<f64> = (0..=position).map(score).collect();
            let most = scores.iter().copied().fold(f64::MIN, f64::max);
            let logarithm = most + scores.iter().map(|score| (score - most).exp()).sum::<f64>().ln();
            logarithms[head * positions + position] = logarithm;
            let weights: Vec<f64> = scores.iter().map(|score| (score - logarithm).exp()).collect();
            weights
                .iter()
                .enumerate()
                .for_each(|(key, weight)| context.add(position, head, *weight, values.row(key, own)));
            let slants: Vec<f64> =
                (0..=position).map(|key| dot(dcontext.row(position, head), values.row(key, own))).collect();
            let along = dot(&weights, &slants);
            for (key, weight) in weights.iter().enumerate() {
                let slant = weight * (slants[key] - along) * scale;
                let [dquery, dkeys, dvalues] = &mut gradients;
                dquery.add(position, head, slant, keys.row(key, own));
                dkeys.add(key, own, slant, query.row(position, head));
                dvalues.add(key, own, *weight, dcontext.row(position, head));
            }
        }
        Results { context, logarithms, gradients }
    }

    /// The kernels that forward and backward send.
    fn kernels(&self) -> Vec<ListedKernel> {
        let list = list(ARCHITECTURE);
        let queue = Queue::List(&list);
        let [query, keys, values, dcontext] =
            self.tensors.each_ref().map(|tensor| queue.buffer(tensor.numbers.len(), Element::Brain));
        let [dquery, dkeys, dvalues, context] =
            [&query, &keys, &values, &dcontext].map(|like| queue.buffer(like.length, Element::Brain));
        let heads = self.slopes.len();
        let [slopes, logarithms] =
            [heads, heads * self.core.positions].map(|length| queue.buffer(length, Element::Single));
        let operands = [&query, &keys, &values, &slopes];
        attention(&queue, &self.core, operands, &context, &logarithms);
        let results = [&context, &logarithms, &dcontext];
        attention_gradient(&queue, &self.core, operands, results, [&dquery, &dkeys, &dvalues]);
        list.take_kernels()
    }
}

/// Runs a kernel on buffers, one after the other as its parameters are, and numbers: what the buffers hold then.
fn run(kernel: &ListedKernel, code: &Code, buffers: Vec<Vec<u8>>, scale: f32, positions: usize) -> Vec<Vec<u8>> {
    let mut memory = Vec::new();
    let mut parameters = Vec::new();
    let mut places = Vec::new();
    for buffer in &buffers {
        memory.resize(usize::next_multiple_of(memory.len(), 256), 0xff);
        places.push(memory.len());
        parameters.extend((MEMORY + memory.len() as u64).to_le_bytes());
        memory.extend(buffer);
    }
    // Numbers of a format after the other's, each in 8 bytes; then lengths of buffers, which kernels here do not read.
    parameters.extend(f64::from_bits(u64::from(scale.to_bits())).to_bits().to_le_bytes());
    parameters.extend((positions as u64).to_le_bytes());
    parameters.resize(parameters.len() + 8 * buffers.len(), 0xff);
    let CubeCount::Static(x, y, _) = kernel.cubes else { panic!("the number of cubes is known") };
    let program = Program::read(&code.ptx);
    program.run([x, y], kernel.units as usize, code.shared_memory, &mut memory, &parameters);
    places.iter().zip(&buffers).map(|(place, buffer)| memory[*place..place + buffer.len()].to_vec()).collect()
}

fn brain(bytes: &[u8]) -> Vec<f64> {
    bytes.chunks(2).map(|bits| f64::from(widened(u16::from_le_bytes([bits[0], bits[1]])))).collect()
}

fn single(bytes: &[u8]) -> Vec<f64> {
    let number = |bits: &[u8]| f32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]]);
    bytes.chunks(4).map(|bits| f64::from(number(bits))).collect()
}

fn singles(numbers: impl Iterator<Item = f32>) -> Vec<u8> {
    numbers.flat_map(f32::to_le_bytes).collect()
}

/// Compares beside numbers as large as `beside`: with one key the query's gradient is but rounding.
fn compare(name: &str, found: &[f64], expected: &[f64], tolerance: f64, beside: f64) {
    let largest = expected.iter().fold(beside, |largest, number| largest.max(number.abs()));
    let mut worst = 0.0_f64;
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs() / largest;
        assert!(error <= tolerance, "{name}, element {at}: {found}, expected {expected}, largest {largest}");
        worst = worst.max(error);
    }
    eprintln!("{name}: largest error {worst:.1e} of the largest number");
}

fn check(operands: &Operands, toolkit: &Toolkit) {
    let Attention { positions, head_width, value_width, scale, .. } = operands.core;
    let name = format!("{positions} positions, heads of {head_width} and {value_width}");
    let expected = operands.results();
    let kernels = operands.kernels();
    let code = |name: &str| {
        let kernel = kernels.iter().find(|kernel| kernel.name == name).expect("cards of sm_80 multiply tiles");
        (kernel, compile(kernel, ARCHITECTURE, toolkit).expect("it compiles"))
    };
    let [query, keys, values, dcontext] = operands.tensors.each_ref().map(Heads::bytes);
    let slopes = singles(operands.slopes.iter().copied());
    let poisoned = |like: &[u8]| vec![0xff; like.len()];
    let inputs = vec![query.clone(), keys.clone(), values.clone(), slopes];
    let (kernel, forward) = code("attention_tiles_kernel");
    let results = [inputs.clone(), vec![poisoned(&dcontext), vec![0xff; 4 * expected.logarithms.len()]]].concat();
    let found = run(kernel, &forward, results, scale as f32 * std::f32::consts::LOG2_E, positions);
    compare(&format!("{name}, context"), &brain(&found[4]), &expected.context.numbers, TOLERANCE, 0.0);
    compare(&format!("{name}, logarithms"), &single(&found[5]), &expected.logarithms, 1e-5, 1.0);

    // What the gradients share is another kernel's: here from the context that was found.
    let context = Heads { numbers: brain(&found[4]), ..expected.context };
    let rows = (0..context.heads).flat_map(|head| (0..positions).map(move |position| (position, head)));
    let along =
        rows.map(|(position, head)| dot(context.row(position, head), operands.tensors[3].row(position, head)) as f32);
    let inputs = [inputs, vec![dcontext.clone(), found[5].clone(), singles(along)]].concat();
    let (kernel, backward) = code("query_gradient_tiles_kernel");
    let of_query = run(kernel, &backward, [inputs.clone(), vec![poisoned(&query)]].concat(), scale as f32, positions);
    let (kernel, backward) = code("keys_gradient_tiles_kernel");
    let of_keys =
        run(kernel, &backward, [inputs, vec![poisoned(&keys), poisoned(&values)]].concat(), scale as f32, positions);
    for (part, found, expected) in [
        ("query", &of_query[7], &expected.gradients[0]),
        ("keys", &of_keys[7], &expected.gradients[1]),
        ("values", &of_keys[8], &expected.gradients[2]),
    ] {
        compare(&format!("{name}, gradient of {part}"), &brain(found), &expected.numbers, TOLERANCE, 1.0);
    }
}

#[test]
fn attention_by_matrix_instructions_is_that_of_fp64() {
    let folder = env::var_os("PLANWRIGHT_CUDA").map(PathBuf::from);
    let toolkit = Toolkit::in_packages(&folder.expect("PLANWRIGHT_CUDA names the folder of the CUDA packages"));
    std::thread::scope(|scope| {
        for shape in SHAPES {
            let toolkit = &toolkit;
            scope.spawn(move || check(&Operands::new(shape), toolkit));
        }
    });
}
