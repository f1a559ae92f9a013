//! Products of cuBLASLt on the first card, in memory of its own and on a stream that nothing else uses.

use std::ptr;

use cudarc::driver::result;
use cudarc::driver::sys::CUdeviceptr;
use kernels::Element;

use super::device::median_seconds;
use super::nccl::{allocate, in_words, with_context};
use crate::cublaslt::{Addresses, Epilogue, Lt, Product, Rows, WORKSPACE};
use crate::tensor::{Format, bf16};

/// Memory of a product `[rows, summed] · [summed, columns]`: operands, result, bias, what GeLU keeps, workspace.
struct Held {
    product: Product,
    at: Addresses,
    results: usize,
}

/// c = a · b.
///
/// # Errors
/// That the library is missing, which begins with `skipped`, or what failed.
pub fn multiply(shape: [usize; 3], element: Element, [a, b]: [&[f32]; 2]) -> Result<Vec<f32>, String> {
    with_library(|lt| {
        let held = Held::new(shape, element, Epilogue::Nothing, [a, b])?;
        let found = held.send(lt).and_then(|()| held.results(element));
        held.free()?;
        found
    })
}

/// Seconds of a product.
///
/// # Errors
/// That the library is missing, which begins with `skipped`, or what failed.
pub fn measure(shape: [usize; 3], element: Element, epilogue: Epilogue, operands: [&[f32]; 2]) -> Result<f64, String> {
    with_library(|lt| {
        let held = Held::new(shape, element, epilogue, operands)?;
        let wait = || result::ctx::synchronize().map_err(in_words);
        // What is accepted once is so again.
        let seconds = held.send(lt).and_then(|()| {
            let send = || {
                held.send(lt).ok();
            };
            median_seconds(&send, &wait)
        });
        held.free()?;
        seconds
    })
}

fn with_library<R>(run: impl FnOnce(&Lt) -> Result<R, String>) -> Result<R, String> {
    with_context(|| {
        let lt = Lt::open().map_err(|problem| format!("skipped: {}", problem.what))?;
        run(&lt)
    })
}

impl Held {
    fn new(
        [rows, summed, columns]: [usize; 3],
        element: Element,
        epilogue: Epilogue,
        [a, b]: [&[f32]; 2],
    ) -> Result<Held, String> {
        let format = if element == Element::Brain { Format::Brain } else { Format::Single };
        let of = |stride: usize| Rows { format, turned: false, stride, batch_stride: 0 };
        let product = Product {
            rows,
            summed,
            columns,
            batches: 1,
            a: of(summed),
            b: of(columns),
            c: of(columns),
            accumulate: false,
            epilogue,
        };
        let results = rows * columns;
        let upload = |numbers: &[f32]| upload(numbers, element);
        let at = Addresses {
            a: upload(a)?,
            b: upload(b)?,
            c: upload(&vec![f32::NAN; results])?,
            bias: upload(&vec![0.5; columns])?,
            kept: allocate(results * element.bytes())?,
            workspace: allocate(WORKSPACE)?,
        };
        Ok(Held { product, at, results })
    }

    #[allow(unsafe_code)]
    fn send(&self, lt: &Lt) -> Result<(), String> {
        // SAFETY: the memory is as long as the product says, and the only stream that uses it is the context's first.
        unsafe { lt.multiply(&self.product, &self.at, ptr::null_mut()) }.map_err(|problem| problem.to_string())
    }

    #[allow(unsafe_code)]
    fn results(&self, element: Element) -> Result<Vec<f32>, String> {
        result::ctx::synchronize().map_err(in_words)?;
        // SAFETY: the memory holds as many numbers.
        unsafe {
            if element == Element::Brain {
                let mut found = vec![bf16::ZERO; self.results];
                result::memcpy_dtoh_sync(&mut found, self.at.c).map_err(in_words)?;
                return Ok(found.into_iter().map(bf16::to_f32).collect());
            }
            let mut found = vec![0.0; self.results];
            result::memcpy_dtoh_sync(&mut found, self.at.c).map_err(in_words)?;
            Ok(found)
        }
    }

    #[allow(unsafe_code)]
    fn free(self) -> Result<(), String> {
        let Addresses { a, b, c, bias, kept, workspace } = self.at;
        result::ctx::synchronize().map_err(in_words)?;
        // SAFETY: nothing uses the memory any more.
        unsafe { [a, b, c, bias, kept, workspace].into_iter().try_for_each(|address| result::free_sync(address)) }
            .map_err(in_words)
    }
}

/// New memory of the card that holds numbers.
#[allow(unsafe_code)]
fn upload(numbers: &[f32], element: Element) -> Result<CUdeviceptr, String> {
    let to = allocate(numbers.len() * element.bytes())?;
    // SAFETY: the memory is as long as the numbers.
    unsafe {
        match element {
            Element::Brain => {
                let rounded: Vec<bf16> = numbers.iter().map(|number| bf16::from_f32(*number)).collect();
                result::memcpy_htod_sync(to, &rounded)
            }
            Element::Single | Element::Index => result::memcpy_htod_sync(to, numbers),
        }
    }
    .map_err(in_words)?;
    Ok(to)
}
