//! Every kernel in fp32 and bf16 as machine code for sm_80, sm_90 and sm_100, compiled where there is no GPU.
//!
//! No kernel may need memory for what registers should hold, no cube more shared memory than the architecture has;
//! kernels must move memory 16 bytes at a time, and multiply matrices in bf16 by matrix instructions. `docs/kernels.md`
//! holds the numbers;
//! `BLESS=1` writes it anew. `PLANWRIGHT_CUDA` names the folder of the packages `nvidia-cuda-nvcc-cu12`,
//! `nvidia-cuda-runtime-cu12` and `nvidia-cuda-cccl-cu12`; NVRTC must be found as `libnvrtc.so`.

use std::path::{Path, PathBuf};
use std::{env, fs};

use kernels::activation::{bias_gelu, bias_gelu_gradient, swiglu, swiglu_gradient};
use kernels::attention::{Attention, attention, attention_gradient};
use kernels::copy::{copy, copy_part};
use kernels::dropout::{Mask, dropout};
use kernels::elementwise::{Binary, Unary, binary, fill, unary};
use kernels::norm::{Norm, norm, norm_gradient};
use kernels::optimizer::{AdamW, State, WeightDecay, adamw, sum_of_squares};
use kernels::product::{Products, products};
use kernels::ptx::{Code, Registers, Toolkit, compile, list, shared_memory_limit};
use kernels::reduce::{Fold, reduce};
use kernels::rotary::{Heads, Turns, rotary};
use kernels::softmax::{Scores, masked_softmax, masked_softmax_gradient, softmax, softmax_gradient};
use kernels::strided::{Axis, Loops};
use kernels::{Element, ListedKernel, Queue, embedding, loss, mask};

const ARCHITECTURES: [u32; 3] = [80, 90, 100];
/// Tokens of the kernels that are compiled; nothing but the number of cubes depends on it.
const TOKENS: usize = 2048;

/// Kernels whose time is that of the memory they move, in vectors.
fn moves_memory(kernel: &str) -> bool {
    !matches!(kernel, "sum_kernel" | "rescale_kernel" | "losses_kernel" | "pick_kernel" | "product_kernel")
}

/// Kernels whose products are those of matrix instructions.
fn multiplies_tiles(kernel: &str) -> bool {
    kernel.contains("_tiles_")
}

fn toolkit() -> Toolkit {
    let folder = env::var_os("PLANWRIGHT_CUDA").map(PathBuf::from);
    Toolkit::in_packages(&folder.expect("PLANWRIGHT_CUDA names the folder of the CUDA packages"))
}

/// Kernels of a model's layers, by the width of its residual stream.
fn send_layer_kernels(queue: &Queue, element: Element, columns: usize) {
    let rows = || queue.buffer(TOKENS * columns, element);
    let [row, sums] = [queue.buffer(columns, element), queue.buffer(columns, Element::Single)];
    bias_gelu(queue, &rows(), &row, &rows());
    bias_gelu_gradient(queue, [&rows(), &row, &rows()], &rows(), &sums, false);
    swiglu(queue, [&rows(), &rows()], &rows());
    swiglu_gradient(queue, [&rows(), &rows(), &rows()], [&rows(), &rows()]);
    let mask =
        Mask { key: [1, 2], counter_high: [3, 4], probability: 0.1, first_sequence: 0, positions: (0, TOKENS as u32) };
    dropout(queue, &mask, [1, TOKENS, columns], &rows(), Some(&rows()), &rows());
    for centered in [true, false] {
        let settings = Norm { centered, epsilon: 1e-5, columns };
        let bias = centered.then_some(&row);
        norm(queue, &settings, &rows(), Some((&rows(), &rows())), &row, bias, &rows());
        let total = (&sums, centered.then_some(&sums));
        norm_gradient(queue, &settings, [&rows(), &row, &rows()], Some(&rows()), &rows(), total, true);
    }
    let ids = queue.buffer(TOKENS, Element::Index);
    embedding::lookup(queue, &queue.buffer(1000 * columns, element), columns, &ids, 0, &rows());
    embedding::lookup_gradient(queue, &ids, &rows(), 0, &queue.buffer(1000 * columns, Element::Single));
}

/// Kernels of attention without matrix products, by the number of keys.
fn send_score_kernels(queue: &Queue, element: Element, keys: usize) {
    let scores = Scores { heads: 2, positions: 64, keys };
    let all = || queue.buffer(2 * 64 * keys, element);
    masked_softmax(queue, &scores, 0.125, [&all(), &queue.buffer(2, Element::Single)], &all());
    masked_softmax_gradient(queue, &scores, 0.125, [&all(), &all()], &all());
}

/// Kernels of the attention core.
fn send_attention_kernels(queue: &Queue, element: Element, width: usize) {
    let core = Attention {
        sequences: 1,
        positions: 1024,
        heads: 2,
        queries: 2,
        head_width: width,
        value_width: width,
        scale: 0.125,
    };
    let [query, keys] = [4, 2].map(|heads| queue.buffer(1024 * heads * width, element));
    let [slopes, logarithms] = [4, 4096].map(|count| queue.buffer(count, Element::Single));
    let operands = [&query, &keys, &keys, &slopes];
    attention(queue, &core, operands, &query, &logarithms);
    attention_gradient(queue, &core, operands, [&query, &logarithms, &query], [&query, &keys, &keys]);
}

/// Kernels of which there is one for all models.
fn send_other_kernels(queue: &Queue, element: Element) {
    let heads = || queue.buffer(TOKENS * 12 * 64, element);
    let turns = Turns::new(queue, TOKENS, 64, 10_000.0);
    rotary(queue, &turns, Heads { between: 12, back: false }, &heads(), &heads());
    let vocabulary = loss::Vocabulary { start: 0, columns: 50_304, used: 50_257 };
    let (logits, ids) = (queue.buffer(TOKENS * 50_304, element), queue.buffer(TOKENS, Element::Index));
    let numbers = [(); 4].map(|()| queue.buffer(TOKENS, Element::Single));
    let of = loss::Statistics { largest: &numbers[0], sum: &numbers[1], picked: &numbers[2] };
    loss::statistics(queue, &vocabulary, &logits, &ids, of);
    loss::rescale(queue, of, &numbers[3]);
    loss::losses(queue, of, &numbers[3]);
    loss::gradient(queue, &vocabulary, &logits, &ids, of, &numbers[3]);
    let shard = || queue.buffer(1 << 20, Element::Single);
    let settings = AdamW { learning_rate: 1e-3, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, step: 1 };
    let decay = WeightDecay::new(queue, &[(1 << 20, 0.1)]);
    let [master, first, second] = [(); 3].map(|()| shard());
    let parameter = (element == Element::Brain).then(|| queue.buffer(1 << 20, element));
    let state = State { master: &master, first: &first, second: &second, parameter: parameter.as_ref() };
    adamw(queue, &settings, &decay, &shard(), &queue.buffer(1, Element::Single), state);
    sum_of_squares(queue, &queue.buffer(1 << 20, element), &queue.buffer(1, Element::Single), false);
}

/// Products without matrix instructions: forward, gradient of the input, gradient of the weight into fp32.
fn send_products(queue: &Queue, element: Element) {
    let (width, wide) = (768, 3072);
    let [x, y, weight] = [TOKENS * width, TOKENS * wide, width * wide].map(|length| queue.buffer(length, element));
    let gradient = queue.buffer(width * wide, Element::Single);
    let axis = |extent: usize, strides: [usize; 3]| Axis { extent, strides };
    let none = Loops::new(&[]);
    let product =
        |rows: Axis, columns: Axis, summed: Axis| Products { rows, columns, summed, outer: none, inner: none };
    let forward = product(axis(TOKENS, [width, 0, wide]), axis(wide, [0, 1, 1]), axis(width, [1, wide, 0]));
    products(queue, &forward, [&x, &weight], &y, false);
    let of_input = product(axis(TOKENS, [wide, 0, width]), axis(width, [0, wide, 1]), axis(wide, [1, 1, 0]));
    products(queue, &of_input, [&y, &weight], &x, false);
    let of_weight = product(axis(width, [1, 0, wide]), axis(wide, [0, 1, 1]), axis(TOKENS, [width, wide, 0]));
    products(queue, &of_weight, [&x, &y], &gradient, true);
}

/// Operators that stand alone in programs.
fn send_plain_kernels(queue: &Queue, element: Element) {
    let columns = 768;
    let rows = |element: Element| queue.buffer(TOKENS * columns, element);
    for f in [Unary::Scale, Unary::Exp, Unary::Log, Unary::Gelu, Unary::Silu] {
        unary(queue, f, 0.5, &rows(element), &rows(element), false);
    }
    unary(queue, Unary::Copy, 1.0, &rows(element), &rows(Element::Single), true);
    unary(queue, Unary::Copy, 1.0, &rows(Element::Single), &rows(element), false);
    fill(queue, 0.0, &rows(element));
    copy(queue, &rows(element), &rows(element));
    copy_part(queue, 1024, (&rows(element), 2048), (&rows(element), 0));
    let axis = |extent: usize, strides: [usize; 3]| Axis { extent, strides };
    let same = Loops::new(&[axis(TOKENS * columns, [1, 1, 1])]);
    for f in
        [Binary::Add, Binary::Subtract, Binary::Multiply, Binary::Divide, Binary::GeluGradient, Binary::SiluGradient]
    {
        binary(queue, f, &same, [&rows(element), &rows(element)], &rows(element));
    }
    let row = Loops::new(&[axis(TOKENS, [columns, 0, columns]), axis(columns, [1, 1, 1])]);
    binary(queue, Binary::Add, &row, [&rows(element), &queue.buffer(columns, element)], &rows(element));
    let column = Loops::new(&[axis(TOKENS, [columns, 1, columns]), axis(columns, [1, 0, 1])]);
    binary(queue, Binary::Subtract, &column, [&rows(element), &queue.buffer(TOKENS, element)], &rows(element));
    let (kept, folded) = (Loops::new(&[axis(columns, [1, 1, 0])]), Loops::new(&[axis(TOKENS, [columns, 0, 0])]));
    reduce(queue, Fold::Sum, [&kept, &folded], &rows(element), &queue.buffer(columns, Element::Single), true);
    let (kept, folded) = (Loops::new(&[axis(TOKENS, [columns, 1, 0])]), Loops::new(&[axis(columns, [1, 0, 0])]));
    for fold in [Fold::Sum, Fold::Maximum] {
        reduce(queue, fold, [&kept, &folded], &rows(element), &queue.buffer(TOKENS, element), false);
    }
    let ids = queue.buffer(TOKENS, Element::Index);
    mask::mask_columns(queue, columns, 700, &rows(element), &rows(element));
    mask::pick(queue, columns, [&rows(element), &ids], 0, &queue.buffer(TOKENS, element));
    mask::pick_gradient(queue, columns, [&ids, &queue.buffer(1, element)], 0, &rows(element));
    let scores = Scores { heads: 2, positions: 64, keys: 1024 };
    let (all, slopes) = (|| queue.buffer(2 * 64 * 1024, element), queue.buffer(2, Element::Single));
    mask::scale_mask(queue, &scores, 0.125, f32::MIN, [&all(), &slopes], &all());
    softmax(queue, &scores, &all(), &all());
    softmax_gradient(queue, &scores, [&all(), &all()], &all());
}

/// Kernels of one architecture with what they were made for.
fn kernels(architecture: u32) -> Vec<(String, ListedKernel)> {
    let mut kernels: Vec<(String, ListedKernel)> = Vec::new();
    let mut take = |what: String, send: &dyn Fn(&Queue)| {
        let list = list(architecture);
        send(&Queue::List(&list));
        kernels.extend(list.take_kernels().into_iter().map(|kernel| (what.clone(), kernel)));
    };
    for (element, name) in [(Element::Single, "fp32"), (Element::Brain, "bf16")] {
        for columns in [768, 1600, 4096, 8192, 14_336] {
            take(format!("{name}, {columns} columns"), &|queue| send_layer_kernels(queue, element, columns));
        }
        for keys in [1024, 8192] {
            take(format!("{name}, {keys} keys"), &|queue| send_score_kernels(queue, element, keys));
        }
        for width in [64, 128] {
            take(format!("{name}, heads of {width}"), &|queue| send_attention_kernels(queue, element, width));
        }
        take(name.to_owned(), &|queue| send_other_kernels(queue, element));
        take(format!("{name}, products"), &|queue| send_products(queue, element));
        take(format!("{name}, alone"), &|queue| send_plain_kernels(queue, element));
    }
    kernels
}

/// Accesses to global memory of 16 bytes, and others.
fn accesses(code: &Code) -> (usize, usize) {
    let is_access = |line: &&str| ["ld.global", "st.global", "cp.async.c"].iter().any(|it| line.contains(it));
    // Copies into shared memory past the first cache are of 16 bytes.
    let wide = [".v4.b32", ".v4.f32", ".v4.u32", ".v2.b64", ".v2.u64", "cp.async.cg"];
    let wide = |line: &&str| wide.iter().any(|it| line.contains(it));
    let lines: Vec<&str> = code.ptx.lines().filter(is_access).collect();
    let wide = lines.iter().filter(|line| wide(line)).count();
    (wide, lines.len() - wide)
}

const HEAD: &str = "\
# Machine code of the GPU kernels

For each architecture: registers that a unit needs; registers and bytes of stack as ptxas assembles the kernel left
alone; bytes of shared memory of a cube; accesses to global memory of 16 bytes and others in the code; matrix
instructions, where kernels multiply tiles. With the registers that it needs no kernel has a stack. Left alone, ptxas
keeps a few bytes in memory where one more cube then fits beside; how drivers choose is not known here, and none of
these kernels has run on a GPU.

Written by `BLESS=1 cargo test -p kernels --features ptx --test kernel_code`, with NVRTC and ptxas 12.9.86.

| Kernel | For | Units | sm_80 | sm_90 | sm_100 |
|---|---|---|---|---|---|
";

/// The table's cell of a kernel, and what is wrong with it.
fn cell(kernel: &ListedKernel, architecture: u32, toolkit: &Toolkit) -> (String, Option<String>) {
    let code = match compile(kernel, architecture, toolkit) {
        Ok(code) => code,
        Err(error) => return (String::new(), Some(error.to_string())),
    };
    let (wide, narrow) = accesses(&code);
    let products = code.ptx.matches("mma.sync").count();
    let Code { needed, assembled, shared_memory, .. } = code;
    let problem = if needed.stack > 0 {
        Some(format!("{} bytes of stack", needed.stack))
    } else if shared_memory > shared_memory_limit(architecture) {
        Some(format!("{shared_memory} bytes of shared memory"))
    } else if wide == 0 && moves_memory(kernel.name) {
        Some("no access of 16 bytes".to_owned())
    } else if products == 0 && multiplies_tiles(kernel.name) {
        Some("no matrix instruction".to_owned())
    } else {
        None
    };
    let Registers { count, stack } = assembled;
    let products = if products > 0 { format!("; {products}") } else { String::new() };
    (format!(" {}; {count}, {stack} B; {shared_memory} B; {wide}/{narrow}{products} |", needed.count), problem)
}

/// The table's column of an architecture: each kernel with its cell, and what is wrong with it.
fn column(architecture: u32, toolkit: &Toolkit) -> Vec<(String, String, Option<String>)> {
    let row = |(what, kernel): (String, ListedKernel)| {
        let (cell, problem) = cell(&kernel, architecture, toolkit);
        let problem = problem.map(|problem| format!("{}, {what}, sm_{architecture}: {problem}", kernel.name));
        (format!("| {} | {what} | {} |", kernel.name, kernel.units), cell, problem)
    };
    kernels(architecture).into_iter().map(row).collect()
}

#[test]
fn kernels_fit_registers_and_move_whole_vectors() {
    let toolkit = toolkit();
    let mut table = String::from(HEAD);
    let columns = std::thread::scope(|scope| {
        let columns = ARCHITECTURES.map(|architecture| {
            scope.spawn({
                let toolkit = &toolkit;
                move || column(architecture, toolkit)
            })
        });
        columns.map(|column| column.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    let mut problems = Vec::new();
    for row in 0..columns[0].len() {
        let mut line = columns[0][row].0.clone();
        for column in &columns {
            assert_eq!(column[row].0, columns[0][row].0, "architectures have the same kernels");
            line += &column[row].1;
            problems.extend(column[row].2.clone());
        }
        if !table.contains(&line) {
            table = table + &line + "\n";
        }
    }
    assert!(problems.is_empty(), "{}\n{table}", problems.join("\n"));
    compare(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/kernels.md"), &table);
}

fn compare(path: &Path, table: &str) {
    if env::var_os("BLESS").is_some() {
        fs::create_dir_all(path.parent().expect("it lies in a folder")).expect("folders can be made");
        fs::write(path, table).expect("the table can be written");
    }
    let kept = fs::read_to_string(path).unwrap_or_default();
    let differs = table.lines().zip(kept.lines()).find(|(new, old)| new != old);
    assert!(kept == table, "{} is out of date (BLESS=1 renews it): {differs:?}", path.display());
}
