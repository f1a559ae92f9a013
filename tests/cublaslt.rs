//! Products by cuBLASLt over a fake of it that computes what it was told: layouts, transposes, batches, epilogues,
//! refusals, and the message where the library is missing.

#![allow(unsafe_code, reason = "the fake library reads and writes what products hand to it")]

#[path = "support/c_library.rs"]
mod c_library;
#[path = "support/fake_cublaslt.rs"]
mod fake_cublaslt;

use std::process::Command;
use std::ptr;

use c_library::make_library;
use fake_cublaslt::{ALIGNMENTS, ASKED, FINDS, LIVING, RESULT, SAID_VERSION, gelu, gelu_gradient};
use half::bf16;
use runtime::cublaslt::{Addresses, Epilogue, Lt, LtFunctions, Product, Rows};
use runtime::tensor::Format;

/// Numbers of a card in a format.
enum Memory {
    Single(Vec<f32>),
    Brain(Vec<bf16>),
}

impl Memory {
    fn new(format: Format, count: usize, seed: usize) -> Memory {
        let numbers = (0..count).map(|place| ((place * 37 + seed * 11) % 64) as f32 / 32.0 - 1.0);
        match format {
            Format::Single => Memory::Single(numbers.collect()),
            _ => Memory::Brain(numbers.map(bf16::from_f32).collect()),
        }
    }

    fn address(&self) -> u64 {
        match self {
            Memory::Single(numbers) => numbers.as_ptr() as u64,
            Memory::Brain(numbers) => numbers.as_ptr() as u64,
        }
    }

    fn get(&self, at: usize) -> f64 {
        match self {
            Memory::Single(numbers) => f64::from(numbers[at]),
            Memory::Brain(numbers) => f64::from(numbers[at].to_f32()),
        }
    }
}

const fn rows(format: Format, turned: bool, stride: usize, batch_stride: usize) -> Rows {
    Rows { format, turned, stride, batch_stride }
}

/// 5 x 7 · 7 x 8, the numbers of rows in memory apart by more than their length.
fn product(format: Format, [a_turned, b_turned]: [bool; 2], batches: usize, epilogue: Epilogue) -> Product {
    Product {
        rows: 5,
        summed: 7,
        columns: 8,
        batches,
        a: rows(format, a_turned, 9, 90),
        b: rows(format, b_turned, 11, 100),
        c: rows(format, false, 10, 60),
        accumulate: false,
        epilogue,
    }
}

/// A product's memory: a, b, c, bias, kept.
fn memory(product: &Product) -> [Memory; 5] {
    let of = |format, seed| Memory::new(format, 400, seed);
    let c = product.c.format;
    [of(product.a.format, 1), of(product.b.format, 2), of(c, 3), of(c, 4), of(c, 5)]
}

fn addresses(memory: &[Memory; 5]) -> Addresses {
    let [a, b, c, bias, kept] = memory.each_ref().map(Memory::address);
    Addresses { a, b, c, bias, kept, workspace: 1 << 20 }
}

fn at(of: Rows, batch: usize, row: usize, column: usize) -> usize {
    let (row, column) = if of.turned { (column, row) } else { (row, column) };
    batch * of.batch_stride + row * of.stride + column
}

/// c, and the numbers beside it, as a row-major product gives them.
fn expected(product: &Product, memory: &[Memory; 5]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let [a, b, c, bias, kept] = memory;
    let (mut found, mut pre, mut sums) = (Vec::new(), Vec::new(), vec![0.0; product.columns]);
    for batch in 0..product.batches {
        for row in 0..product.rows {
            for (column, sum) in sums.iter_mut().enumerate() {
                let term = |k| a.get(at(product.a, batch, row, k)) * b.get(at(product.b, batch, k, column));
                let mut number: f64 = (0..product.summed).map(term).sum();
                if product.accumulate {
                    number += c.get(at(product.c, batch, row, column));
                }
                number += match product.epilogue {
                    Epilogue::Bias | Epilogue::BiasGelu | Epilogue::BiasGeluKept { .. } => bias.get(column),
                    _ => 0.0,
                };
                pre.push(number);
                number = match product.epilogue {
                    Epilogue::BiasGelu | Epilogue::BiasGeluKept { .. } => gelu(number),
                    Epilogue::GeluGradient { stride } => number * gelu_gradient(kept.get(row * stride + column)),
                    _ => number,
                };
                *sum += number;
                found.push(number);
            }
        }
    }
    if product.epilogue == Epilogue::BiasGradient {
        let sum = |column| (0..product.summed).map(|k| b.get(at(product.b, 0, k, column))).sum();
        sums = (0..product.columns).map(sum).collect();
    }
    (found, pre, sums)
}

fn expect_near(name: &str, found: f64, expected: f64, format: Format) {
    let allowed = if format == Format::Brain { 1.0 / 128.0 } else { 1e-5 };
    assert!((found - expected).abs() <= allowed * expected.abs().max(1.0), "{name}: {found}, expected {expected}");
}

fn check(lt: &Lt, product: &Product) {
    let memory = memory(product);
    let (numbers, pre, sums) = expected(product, &memory);
    unsafe { lt.multiply(product, &addresses(&memory), ptr::null_mut()) }.expect("it is a product");
    let [_, _, c, bias, kept] = &memory;
    let format = product.c.format;
    for batch in 0..product.batches {
        for row in 0..product.rows {
            for column in 0..product.columns {
                let place = (batch * product.rows + row) * product.columns + column;
                let found = c.get(at(product.c, batch, row, column));
                expect_near(&format!("{product:?} {row}, {column}"), found, numbers[place], format);
                if let Epilogue::BiasGeluKept { stride } = product.epilogue {
                    expect_near("kept", kept.get(row * stride + column), pre[place], format);
                }
            }
        }
    }
    if matches!(product.epilogue, Epilogue::GeluGradient { .. } | Epilogue::BiasGradient) {
        for (column, sum) in sums.iter().enumerate() {
            expect_near(&format!("{product:?}, gradient of the bias"), bias.get(column), *sum, format);
        }
    }
}

fn lt() -> Lt {
    Lt::new(fake_cublaslt::functions()).expect("the fake is new enough")
}

#[test]
fn products_are_those_of_rows() {
    let lt = lt();
    let turns = [[false, false], [true, false], [false, true], [true, true]];
    let kept = Epilogue::BiasGeluKept { stride: 16 };
    let gradient = Epilogue::GeluGradient { stride: 8 };
    let epilogues = [Epilogue::Nothing, Epilogue::Bias, Epilogue::BiasGelu, kept, gradient, Epilogue::BiasGradient];
    for (format, turned) in [Format::Single, Format::Brain].into_iter().flat_map(|format| turns.map(|it| (format, it)))
    {
        for epilogue in epilogues {
            check(&lt, &product(format, turned, 1, epilogue));
        }
        check(&lt, &product(format, turned, 3, Epilogue::Nothing));
        check(&lt, &Product { accumulate: true, ..product(format, turned, 2, Epilogue::Nothing) });
        let into_single = product(Format::Brain, turned, 1, Epilogue::Nothing);
        check(&lt, &Product { c: rows(Format::Single, false, 10, 60), ..into_single });
    }
    drop(lt);
    assert_eq!(LIVING.get(), 0, "all that was made is given back");
}

#[test]
fn the_heuristic_is_asked_once_for_each_product_and_alignment() {
    let lt = lt();
    let plain = product(Format::Single, [false, false], 1, Epilogue::Nothing);
    let memory = memory(&plain);
    let here = addresses(&memory);
    let multiply = |at: &Addresses| unsafe { lt.multiply(&plain, at, ptr::null_mut()) }.expect("it is a product");
    multiply(&here);
    multiply(&here);
    assert_eq!(ASKED.get(), 1);
    let odd = Addresses { b: here.b + 4, ..here };
    multiply(&odd);
    assert_eq!(ASKED.get(), 2, "what lies elsewhere may need another algorithm");
    let told = ALIGNMENTS.take();
    assert_eq!((told[&5], told[&6] >= 4), (4, true), "our b is its A: {told:?}");
}

#[test]
fn what_does_not_fit_is_refused() {
    let lt = lt();
    let good = product(Format::Single, [false, false], 1, Epilogue::Nothing);
    let memory = memory(&good);
    let here = addresses(&memory);
    let refused = |product: &Product, at: &Addresses| {
        unsafe { lt.multiply(product, at, ptr::null_mut()) }.expect_err("it does not fit").to_string()
    };
    let kept = Epilogue::BiasGeluKept { stride: 12 };
    let index = rows(Format::Index, false, 9, 90);
    for (what, product, at) in [
        ("extent of 0", Product { rows: 0, ..good }, here),
        ("these formats", Product { a: index, b: index, ..good }, here),
        ("these formats", Product { c: rows(Format::Brain, false, 10, 60), ..good }, here),
        ("turned", Product { c: rows(Format::Single, true, 10, 60), ..good }, here),
        ("rows of b overlap", Product { b: rows(Format::Single, false, 7, 0), ..good }, here),
        ("rows of c overlap", Product { batches: 2, c: rows(Format::Single, false, 10, 30), ..good }, here),
        ("a lies at address 0x3", good, Addresses { a: 3, ..here }),
        ("no place for the bias", Product { epilogue: Epilogue::Bias, ..good }, Addresses { bias: 0, ..here }),
        ("several products", Product { batches: 2, epilogue: Epilogue::Bias, ..good }, here),
        ("what GeLU keeps", Product { epilogue: kept, ..good }, here),
        ("no workspace", good, Addresses { workspace: 0, ..here }),
    ] {
        let message = refused(&product, &at);
        assert!(message.contains(what), "{what}: {message}");
    }
    assert_eq!(ASKED.get(), 0, "none of them reached the library");
}

#[test]
fn failures_of_the_library_are_explained() {
    SAID_VERSION.set(110_805);
    let old = Lt::new(fake_cublaslt::functions()).expect_err("it is too old").to_string();
    assert!(old.contains("11.8.5") && old.contains("nvidia-cublas-cu12"), "{old}");
    SAID_VERSION.set(120_804);
    let lt = lt();
    let good = product(Format::Single, [false, false], 1, Epilogue::Nothing);
    let memory = memory(&good);
    let failed =
        || unsafe { lt.multiply(&good, &addresses(&memory), ptr::null_mut()) }.expect_err("it fails").to_string();
    FINDS.set(false);
    let none = failed();
    assert!(none.contains("no algorithm") && none.contains("cubek"), "{none}");
    assert_eq!(LIVING.get(), 1, "only the library's handle is left");
    FINDS.set(true);
    RESULT.set(13);
    let broken = failed();
    assert!(broken.contains("the card failed (cublasStatus 13)"), "{broken}");
}

/// Looked for by a process of its own, in a folder with a library that lacks functions, or with none.
#[test]
fn a_missing_library_says_what_to_install() {
    const FOUND: &str = "PLANWRIGHT_TEST_CUBLASLT";
    if let Some(expected) = std::env::var_os(FOUND) {
        let refused = LtFunctions::open().expect_err("there is no whole library").to_string();
        assert!(refused.contains(&*expected.to_string_lossy()) && refused.contains("nvidia-cublas-cu12"), "{refused}");
        return;
    }
    let folder = tempfile::tempdir().expect("there is room for a folder");
    for (expected, source) in [("a function is missing", "int cublasLtCreate(void) { return 0; }\n"), ("", "")] {
        let name = if source.is_empty() { "libnothing.so" } else { "libcublasLt.so.12" };
        make_library(folder.path(), name, source);
        let mut again = Command::new(std::env::current_exe().expect("a running program has a file"));
        again.args(["--exact", "a_missing_library_says_what_to_install"]);
        let output = again.env(FOUND, expected).env("LD_LIBRARY_PATH", folder.path()).output().expect("it starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}
