//! The functions of cuBLASLt that products call, from its library.

use std::ffi::{c_int, c_uint, c_void};

use cudarc::cublaslt::sys::{cublasLtMatmulAlgo_t, cublasLtMatmulHeuristicResult_t};
use ir::error::Problem;

use crate::library::{Handle, find, functions};

/// An algorithm, as the library describes it.
pub type Algorithm = cublasLtMatmulAlgo_t;
/// An algorithm that the heuristic found, and the workspace that it needs.
pub type Found = cublasLtMatmulHeuristicResult_t;

/// Names under which the library is looked for, those of CUDA 12 and 13.
const NAMES: [&str; 2] = ["libcublasLt.so.12", "libcublasLt.so.13"];
/// The oldest library with the numbers that are used here, as `cublasLtGetVersion` counts: that of CUDA 12.0.
const OLDEST: usize = 120_000;

functions! {
    /// cuBLASLt's functions (cublasLt.h). All results but the version are `cublasStatus_t`.
    LtFunctions {
        get_version: b"cublasLtGetVersion\0"() -> usize,
        create: b"cublasLtCreate\0"(*mut Handle) -> c_uint,
        destroy: b"cublasLtDestroy\0"(Handle) -> c_uint,
        description_create: b"cublasLtMatmulDescCreate\0"(*mut Handle, c_uint, c_uint) -> c_uint,
        description_set: b"cublasLtMatmulDescSetAttribute\0"(Handle, c_uint, *const c_void, usize) -> c_uint,
        description_destroy: b"cublasLtMatmulDescDestroy\0"(Handle) -> c_uint,
        layout_create: b"cublasLtMatrixLayoutCreate\0"(*mut Handle, c_uint, u64, u64, i64) -> c_uint,
        layout_set: b"cublasLtMatrixLayoutSetAttribute\0"(Handle, c_uint, *const c_void, usize) -> c_uint,
        layout_destroy: b"cublasLtMatrixLayoutDestroy\0"(Handle) -> c_uint,
        preference_create: b"cublasLtMatmulPreferenceCreate\0"(*mut Handle) -> c_uint,
        preference_set: b"cublasLtMatmulPreferenceSetAttribute\0"(Handle, c_uint, *const c_void, usize) -> c_uint,
        preference_destroy: b"cublasLtMatmulPreferenceDestroy\0"(Handle) -> c_uint,
        heuristic: b"cublasLtMatmulAlgoGetHeuristic\0"(
            Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut Found, *mut c_int
        ) -> c_uint,
        matmul: b"cublasLtMatmul\0"(
            Handle, Handle, *const c_void, *const c_void, Handle, *const c_void, Handle, *const c_void,
            *const c_void, Handle, *mut c_void, Handle, *const Algorithm, *mut c_void, usize, Handle
        ) -> c_uint,
    }
}

impl LtFunctions {
    /// Finds cuBLASLt on this host.
    ///
    /// # Errors
    /// If it is missing, lacks a function or is too old.
    pub fn open() -> Result<LtFunctions, Problem> {
        let help = "install cuBLAS of CUDA 12 (PyPI nvidia-cublas-cu12, Debian libcublas12) and add the folder of \
                    libcublasLt.so.12 to LD_LIBRARY_PATH";
        find("cuBLASLt", NAMES, help, LtFunctions::of)
    }

    /// The version, as `cublasLtGetVersion` counts: 120804 is 12.8.4.
    ///
    /// # Errors
    /// If it is too old.
    #[allow(unsafe_code)]
    pub fn version(&self) -> Result<usize, Problem> {
        // SAFETY: the function takes nothing.
        let version = unsafe { (self.get_version)() };
        match version >= OLDEST {
            true => Ok(version),
            false => Err(Problem::new(
                format!("cuBLASLt {} is too old", readable_version(version)),
                "cublasLtGetVersion",
                "install cuBLAS of CUDA 12.0 or newer (PyPI nvidia-cublas-cu12)",
            )),
        }
    }
}

/// A version as people write it.
pub fn readable_version(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}
