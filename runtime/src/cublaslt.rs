//! Matrix products by NVIDIA's cuBLASLt, with what follows or goes beside them in the same pass: bias, GeLU, and the
//! gradients of both.
//!
//! - `library` finds cuBLASLt; [`Lt`] keeps, for each [`Product`] that was asked for, its description and the first
//!   algorithm of the library's heuristic.
//! - Matrices are row-major here and column-major there: the library is told cᵀ = bᵀ · aᵀ. Sums are fp32.
//! - Nothing waits: a product is put into the caller's stream, which orders it with what else uses its memory.
//!
//! Nothing of this has run on a GPU yet; what the library is told is checked against a fake of it.

mod library;

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtEpilogue_t, cublasLtMatmulDescAttributes_t, cublasLtMatmulPreferenceAttributes_t,
    cublasLtMatrixLayoutAttribute_t, cublasStatus_t, cudaDataType,
};
use ir::error::Problem;

pub use crate::library::Handle;
use crate::tensor::Format;
pub use library::{Algorithm, Found, LtFunctions, readable_version};

/// Bytes of workspace that algorithms may use; source: NVIDIA, cuBLAS 12.9, section "cublasSetWorkspace", which
/// recommends 32 MiB for the Hopper architecture and less for others.
pub const WORKSPACE: usize = 32 << 20;

/// Rows of numbers that lie in a card's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rows {
    /// Number format, fp32 or bf16.
    pub format: Format,
    /// Whether the rows in memory are the matrix's columns.
    pub turned: bool,
    /// Elements from a row in memory to the next.
    pub stride: usize,
    /// Elements from one product's matrix to the next's.
    pub batch_stride: usize,
}

/// What happens in the pass of a product c = a · b.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// Nothing else.
    Nothing,
    /// c = a · b + bias, of a bias for each column.
    Bias,
    /// c = GeLU(a · b + bias), in the form with tanh.
    BiasGelu,
    /// The same, and a · b + bias is kept for backward, rows `stride` elements apart.
    BiasGeluKept {
        /// Elements from a kept row to the next, a multiple of 8.
        stride: usize,
    },
    /// c = a · b · GeLU'(kept), and the sum of c over its rows, the gradient of the bias.
    GeluGradient {
        /// Elements from a kept row to the next, a multiple of 8.
        stride: usize,
    },
    /// c = a · b, and the sum of b over its rows: for a weight's gradient from input and output gradient, the bias's.
    BiasGradient,
}

/// Products c = a · b, or c += a · b, of so many `[rows, summed]` and `[summed, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// Rows of a and c.
    pub rows: usize,
    /// What is summed over.
    pub summed: usize,
    /// Columns of b and c.
    pub columns: usize,
    /// Products, one after the other.
    pub batches: usize,
    /// The left operand.
    pub a: Rows,
    /// The right operand.
    pub b: Rows,
    /// The result.
    pub c: Rows,
    /// Whether to add to what c holds.
    pub accumulate: bool,
    /// What else is done.
    pub epilogue: Epilogue,
}

/// Addresses in a card's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// The left operand.
    pub a: u64,
    /// The right operand.
    pub b: u64,
    /// The result.
    pub c: u64,
    /// The bias, or where its gradient goes, in c's format; read by no other epilogue.
    pub bias: u64,
    /// What is kept of GeLU, in c's format; read by no other epilogue.
    pub kept: u64,
    /// [`WORKSPACE`] bytes.
    pub workspace: u64,
}

/// cuBLASLt, for one thread and one card.
#[derive(Debug)]
pub struct Lt {
    functions: LtFunctions,
    handle: Handle,
    /// The library's version.
    pub version: usize,
    plans: RefCell<HashMap<(Product, [u32; 3]), Plan>>,
}

/// What the library is told of a product.
#[derive(Debug)]
struct Plan {
    description: Handle,
    /// Of its A, B and C, which are our b, a and c.
    layouts: [Handle; 3],
    algorithm: Algorithm,
    workspace: usize,
}

impl Lt {
    /// Finds cuBLASLt on this host; a context of the card is current.
    ///
    /// # Errors
    /// If it is missing, too old, or cannot use the card.
    pub fn open() -> Result<Lt, Problem> {
        Lt::new(LtFunctions::open()?)
    }

    /// cuBLASLt from its functions.
    ///
    /// # Errors
    /// If it is too old or cannot use the card.
    #[allow(unsafe_code)]
    pub fn new(functions: LtFunctions) -> Result<Lt, Problem> {
        let version = functions.version()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the pointer is to one handle, which the call writes.
        succeed("cublasLtCreate", unsafe { (functions.create)(&raw mut handle) })?;
        Ok(Lt { functions, handle, version, plans: RefCell::default() })
    }

    /// Puts a product into a stream.
    ///
    /// # Errors
    /// If sizes or addresses do not fit together, or the library has no algorithm for them or fails.
    ///
    /// # Safety
    /// The memory is as long as the product says and as the stream's order keeps it.
    #[allow(unsafe_code)]
    pub unsafe fn multiply(&self, product: &Product, at: &Addresses, stream: Handle) -> Result<(), Problem> {
        check(product, at)?;
        let key = (*product, [at.b, at.a, at.c].map(alignment));
        if !self.plans.borrow().contains_key(&key) {
            let plan = self.plan(product, key.1)?;
            self.plans.borrow_mut().insert(key, plan);
        }
        let plans = self.plans.borrow();
        let plan = &plans[&key];
        self.point(plan, product, at)?;
        let (one, start) = (1.0_f32, if product.accumulate { 1.0_f32 } else { 0.0 });
        let [left, right, base] = plan.layouts;
        // SAFETY: the handles live as long as this, and the caller answers for the memory.
        let status = unsafe {
            (self.functions.matmul)(
                self.handle,
                plan.description,
                (&raw const one).cast(),
                at.b as *const c_void,
                left,
                at.a as *const c_void,
                right,
                (&raw const start).cast(),
                at.c as *const c_void,
                base,
                at.c as *mut c_void,
                base,
                &raw const plan.algorithm,
                at.workspace as *mut c_void,
                plan.workspace,
                stream,
            )
        };
        succeed("cublasLtMatmul", status)
    }

    /// Describes a product and asks for an algorithm that serves where operands and result are aligned so.
    fn plan(&self, product: &Product, alignments: [u32; 3]) -> Result<Plan, Problem> {
        let Product { rows, summed, columns, batches, a, b, c, .. } = *product;
        let mut plan = Plan {
            description: ptr::null_mut(),
            layouts: [ptr::null_mut(); 3],
            algorithm: Algorithm { data: [0; 8] },
            workspace: 0,
        };
        let described = self.describe(product, &mut plan.description).and_then(|()| {
            for (layout, of, high, wide) in [(0, b, summed, columns), (1, a, rows, summed), (2, c, rows, columns)] {
                self.lay_out(&of, high, wide, batches, &mut plan.layouts[layout])?;
            }
            self.choose(product, alignments, &mut plan)
        });
        if described.is_err() {
            self.forget(&plan);
        }
        described.map(|()| plan)
    }

    #[allow(unsafe_code)]
    fn describe(&self, product: &Product, description: &mut Handle) -> Result<(), Problem> {
        use cublasLtMatmulDescAttributes_t as Attribute;
        let [compute, scale] = [cublasComputeType_t::CUBLAS_COMPUTE_32F as c_uint, cudaDataType::CUDA_R_32F as c_uint];
        // SAFETY: the pointer is to one handle, which the call writes.
        let status = unsafe { (self.functions.description_create)(description, compute, scale) };
        succeed("cublasLtMatmulDescCreate", status)?;
        // `CUBLAS_OP_T` and `CUBLAS_OP_N`.
        let turned = |of: Rows| c_int::from(of.turned);
        // What is a row in memory here is a column there, and a's and b's places are changed.
        self.set(*description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &turned(product.b))?;
        self.set(*description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &turned(product.a))?;
        let epilogue = match product.epilogue {
            Epilogue::Nothing => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            Epilogue::Bias => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            Epilogue::BiasGelu => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_BIAS,
            Epilogue::BiasGeluKept { .. } => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            Epilogue::GeluGradient { .. } => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DGELU_BGRAD,
            Epilogue::BiasGradient => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BGRADA,
        };
        self.set(*description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &(epilogue as c_uint))?;
        if let Epilogue::BiasGeluKept { stride } | Epilogue::GeluGradient { stride } = product.epilogue {
            self.set(*description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(stride as i64))?;
        }
        Ok(())
    }

    #[allow(unsafe_code)]
    fn lay_out(
        &self,
        rows: &Rows,
        high: usize,
        wide: usize,
        batches: usize,
        layout: &mut Handle,
    ) -> Result<(), Problem> {
        use cublasLtMatrixLayoutAttribute_t as Attribute;
        let (row_length, count) = if rows.turned { (high, wide) } else { (wide, high) };
        let kind = data_type(rows.format) as c_uint;
        // SAFETY: the pointer is to one handle, which the call writes.
        let status = unsafe {
            (self.functions.layout_create)(layout, kind, row_length as u64, count as u64, rows.stride as i64)
        };
        succeed("cublasLtMatrixLayoutCreate", status)?;
        if batches > 1 {
            let set = |attribute: Attribute, value: *const c_void, bytes: usize| {
                // SAFETY: the value is as long as is said.
                let status = unsafe { (self.functions.layout_set)(*layout, attribute as c_uint, value, bytes) };
                succeed("cublasLtMatrixLayoutSetAttribute", status)
            };
            let (count, offset) = (batches as i32, rows.batch_stride as i64);
            set(Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (&raw const count).cast(), size_of::<i32>())?;
            set(Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, (&raw const offset).cast(), size_of::<i64>())?;
        }
        Ok(())
    }

    /// Takes the first algorithm of the heuristic.
    #[allow(unsafe_code)]
    fn choose(&self, product: &Product, alignments: [u32; 3], plan: &mut Plan) -> Result<(), Problem> {
        let mut preference = ptr::null_mut();
        // SAFETY: the pointer is to one handle, which the call writes.
        succeed("cublasLtMatmulPreferenceCreate", unsafe { (self.functions.preference_create)(&raw mut preference) })?;
        let mut found = Found {
            algo: plan.algorithm,
            workspaceSize: 0,
            state: cublasStatus_t::CUBLAS_STATUS_SUCCESS,
            wavesCount: 0.0,
            reserved: [0; 4],
        };
        let mut count: c_int = 0;
        let [left, right, base] = plan.layouts;
        let asked = self.prefer(preference, alignments).map(|()| {
            let requested = 1;
            // SAFETY: the handles were made above, and there is room for the result that is asked for.
            unsafe {
                (self.functions.heuristic)(
                    self.handle,
                    plan.description,
                    left,
                    right,
                    base,
                    base,
                    preference,
                    requested,
                    &raw mut found,
                    &raw mut count,
                )
            }
        });
        // SAFETY: the preference was made above and is given back once.
        unsafe { (self.functions.preference_destroy)(preference) };
        let asked = asked?;
        if count == 0 || found.state != cublasStatus_t::CUBLAS_STATUS_SUCCESS {
            let what = format!("cuBLASLt has no algorithm for {product:?}");
            return Err(Problem::new(what, "cublasLtMatmulAlgoGetHeuristic", "multiply it by cubek's products"));
        }
        succeed("cublasLtMatmulAlgoGetHeuristic", asked)?;
        plan.algorithm = found.algo;
        plan.workspace = found.workspaceSize;
        Ok(())
    }

    /// Says how much workspace there is, and how operands and result are aligned.
    #[allow(unsafe_code)]
    fn prefer(&self, preference: Handle, [left, right, base]: [u32; 3]) -> Result<(), Problem> {
        use cublasLtMatmulPreferenceAttributes_t as Attribute;
        let set = |attribute: Attribute, value: *const c_void, bytes: usize| {
            // SAFETY: the value is as long as is said.
            let status = unsafe { (self.functions.preference_set)(preference, attribute as c_uint, value, bytes) };
            succeed("cublasLtMatmulPreferenceSetAttribute", status)
        };
        let most: usize = WORKSPACE;
        set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (&raw const most).cast(), size_of::<usize>())?;
        for (attribute, bytes) in [
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, left),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, right),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, base),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, base),
        ] {
            set(attribute, (&raw const bytes).cast(), size_of::<u32>())?;
        }
        Ok(())
    }

    /// Tells the library where bias and kept numbers lie.
    fn point(&self, plan: &Plan, product: &Product, at: &Addresses) -> Result<(), Problem> {
        use cublasLtMatmulDescAttributes_t as Attribute;
        if has_bias(product.epilogue) {
            self.set(plan.description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &at.bias)?;
        }
        if has_kept(product.epilogue) {
            self.set(plan.description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &at.kept)?;
        }
        Ok(())
    }

    #[allow(unsafe_code)]
    fn set<T>(&self, description: Handle, attribute: cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), Problem> {
        let value: *const T = value;
        // SAFETY: the value is as long as is said.
        let status =
            unsafe { (self.functions.description_set)(description, attribute as c_uint, value.cast(), size_of::<T>()) };
        succeed("cublasLtMatmulDescSetAttribute", status)
    }

    /// Gives back what a plan holds.
    #[allow(unsafe_code)]
    fn forget(&self, plan: &Plan) {
        // SAFETY: what is not null was made by the library and is given back once.
        unsafe {
            for layout in plan.layouts.into_iter().filter(|layout| !layout.is_null()) {
                (self.functions.layout_destroy)(layout);
            }
            if !plan.description.is_null() {
                (self.functions.description_destroy)(plan.description);
            }
        }
    }
}

impl Drop for Lt {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        let plans = self.plans.take();
        plans.values().for_each(|plan| self.forget(plan));
        // SAFETY: the handle was made by the library and is given back once.
        unsafe { (self.functions.destroy)(self.handle) };
    }
}

/// The largest power of two up to 256, more than which no algorithm asks for, that an address is a multiple of.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

const fn has_bias(epilogue: Epilogue) -> bool {
    !matches!(epilogue, Epilogue::Nothing)
}

const fn has_kept(epilogue: Epilogue) -> bool {
    matches!(epilogue, Epilogue::BiasGeluKept { .. } | Epilogue::GeluGradient { .. })
}

fn data_type(format: Format) -> cudaDataType {
    match format {
        Format::Brain => cudaDataType::CUDA_R_16BF,
        Format::Single => cudaDataType::CUDA_R_32F,
        Format::Index => unreachable!("products are of numbers, which was checked"),
    }
}

/// Checks that sizes, strides, formats and addresses fit together.
fn check(product: &Product, at: &Addresses) -> Result<(), Problem> {
    let Product { rows, summed, columns, batches, a, b, c, .. } = *product;
    let refuse = |what: String, help: &str| Err(Problem::new(what, format!("{product:?}"), help));
    if [rows, summed, columns, batches].contains(&0) {
        return refuse("a product has an extent of 0".to_owned(), "leave out what is empty");
    }
    let is_number = |of: &Rows| of.format != Format::Index;
    if !(is_number(&a) && a.format == b.format && (c.format == a.format || c.format == Format::Single)) {
        let help = "a and b have one format, fp32 or bf16; c has the same or fp32";
        return refuse("cuBLASLt does not multiply these formats here".to_owned(), help);
    }
    if c.turned {
        return refuse("the result is turned".to_owned(), "change a and b, and turn both");
    }
    for (name, of, high, wide, address) in
        [("a", a, rows, summed, at.a), ("b", b, summed, columns, at.b), ("c", c, rows, columns, at.c)]
    {
        let (row_length, count) = if of.turned { (high, wide) } else { (wide, high) };
        if of.stride < row_length || (batches > 1 && name == "c" && of.batch_stride < (count - 1) * of.stride) {
            return refuse(format!("rows of {name} overlap"), "make strides as long as what lies between them");
        }
        let bytes = if of.format == Format::Brain { 2 } else { 4 };
        if address == 0 || !address.is_multiple_of(bytes) {
            return refuse(format!("{name} lies at address {address:#x}"), "give the address of a card's memory");
        }
    }
    if has_bias(product.epilogue) && at.bias == 0 {
        return refuse("there is no place for the bias".to_owned(), "give its address, or `Epilogue::Nothing`");
    }
    if batches > 1 && product.epilogue != Epilogue::Nothing {
        return refuse("several products have an epilogue".to_owned(), "one bias belongs to one product");
    }
    if let Epilogue::BiasGeluKept { stride } | Epilogue::GeluGradient { stride } = product.epilogue
        && (stride < columns || !stride.is_multiple_of(8) || at.kept == 0 || !at.kept.is_multiple_of(16))
    {
        let help = "keep rows in multiples of 8 elements, from an address that is a multiple of 16 on";
        return refuse("what GeLU keeps does not lie as cuBLASLt wants it".to_owned(), help);
    }
    match at.workspace {
        0 => refuse("there is no workspace".to_owned(), "give the address of 32 MiB of a card's memory"),
        _ => Ok(()),
    }
}

/// The library's result as ours.
fn succeed(function: &str, status: c_uint) -> Result<(), Problem> {
    let meaning = match status {
        0 => return Ok(()),
        1 => "the library was not initialized",
        3 => "there is not enough memory",
        7 => "an argument is not valid",
        8 => "the card is too old",
        13 => "the card failed",
        14 => "an error inside cuBLASLt",
        15 => "cuBLASLt does not offer this",
        _ => "an unknown result",
    };
    let help = "set CUBLASLT_LOG_LEVEL=2 to see more, or multiply by cubek's products";
    Err(Problem::new(format!("{meaning} (cublasStatus {status})"), function, help))
}
