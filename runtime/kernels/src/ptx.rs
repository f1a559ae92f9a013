//! Machine code of kernels for NVIDIA GPUs, made where there is none: CUDA C++, PTX by NVRTC, and ptxas on that.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use cubecl::features::Plane;
use cubecl::ir::{
    ContiguousElements, DeviceIdentity, DeviceProperties, HardwareProperties, MemoryDeviceProperties, MmaProperties,
    TargetProperties,
};
use cubecl::{CompilationError, Compiler, ExecutionMode};
use cubecl_core::cmma::MatrixLayout;
use cubecl_core::define_kernel;
use cubecl_cpp::cuda::arch::CudaArchitecture;
use cubecl_cpp::cuda::mma::manual::contiguous_elements_cuda;
use cubecl_cpp::shared::{CompilationOptions, CppCompiler, CppSupportedFeatures, register_mma_features};
use cubecl_cpp::target::Cuda;
use cudarc::nvrtc::{CompileError, CompileOptions, compile_ptx_with_opts};

use crate::{Element, KernelList, ListedKernel};

/// Where the parts of the CUDA toolkit lie that are needed; NVRTC itself is found as shared libraries are.
#[derive(Clone, Debug)]
pub struct Toolkit {
    /// Folders of headers: the CUDA runtime's and libcu++'s.
    pub includes: Vec<PathBuf>,
    /// The assembler.
    pub ptxas: PathBuf,
}

/// A kernel's code for one architecture.
#[derive(Clone, Debug)]
pub struct Code {
    /// CUDA C++.
    pub source: String,
    /// PTX.
    pub ptx: String,
    /// Bytes of shared memory of a cube.
    pub shared_memory: usize,
    /// As ptxas assembles it left alone: it stores a few bytes elsewhere where that lets one more cube run beside.
    pub assembled: Registers,
    /// As ptxas assembles it for a multiprocessor that runs a single cube: what the kernel needs.
    pub needed: Registers,
}

/// A kernel in the languages that compilers pass on.
#[derive(Clone, Debug)]
pub struct Written {
    /// CUDA C++.
    pub source: String,
    /// PTX.
    pub ptx: String,
    /// Bytes of shared memory of a cube.
    pub shared_memory: usize,
}

/// What a unit uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    /// Registers.
    pub count: u32,
    /// Bytes of memory outside registers: for what did not fit, and for arrays with computed indices.
    pub stack: u32,
}

/// Why a kernel has no code.
#[derive(Debug, thiserror::Error)]
pub enum CodeError {
    /// cubecl cannot write it in CUDA C++.
    #[error("kernel {0} cannot be written in CUDA C++: {1}")]
    Source(&'static str, Box<CompilationError>),
    /// NVRTC refuses it.
    #[error("NVRTC does not compile kernel {0}: {1:?}")]
    Ptx(&'static str, Box<CompileError>),
    /// ptxas could not be started.
    #[error("{0} does not start: {1}; it is part of the package nvidia-cuda-nvcc-cu12")]
    NoAssembler(PathBuf, io::Error),
    /// ptxas refuses it.
    #[error("ptxas does not assemble kernel {0}: {1}")]
    Assembler(&'static str, String),
}

impl Toolkit {
    /// That of the packages of NVIDIA in a folder.
    pub fn in_packages(folder: &Path) -> Toolkit {
        let includes = ["cuda_runtime/include", "cuda_cccl/include"].map(|part| folder.join(part));
        Toolkit { includes: includes.into(), ptxas: folder.join("cuda_nvcc/bin/ptxas") }
    }
}

/// An empty list for a GPU of an architecture: 80, 90 or 100.
pub fn list(architecture: u32) -> KernelList {
    KernelList::new(properties(architecture), target())
}

/// Code of a kernel for an architecture.
///
/// # Errors
/// Where one of the compilers refuses the kernel.
///
/// # Panics
/// If there is no NVRTC.
pub fn compile(kernel: &ListedKernel, architecture: u32, toolkit: &Toolkit) -> Result<Code, CodeError> {
    let Written { source, shared_memory, ptx } = write(kernel, architecture, toolkit)?;
    let alone = ptx.replace(".maxntid", ".minnctapersm 1\n.maxntid");
    Ok(Code {
        shared_memory,
        assembled: assemble(kernel.name, &ptx, architecture, toolkit)?,
        needed: assemble(kernel.name, &alone, architecture, toolkit)?,
        source,
        ptx,
    })
}

/// A kernel for an architecture as a GPU's driver would be given it.
///
/// # Errors
/// Where one of the compilers refuses the kernel.
///
/// # Panics
/// If there is no NVRTC.
pub fn write(kernel: &ListedKernel, architecture: u32, toolkit: &Toolkit) -> Result<Written, CodeError> {
    let name = kernel.name;
    let mut definition = define_kernel(&*kernel.kernel).map_err(|error| CodeError::Source(name, Box::new(error)))?;
    // As it is launched: lists hold kernels in the checked form.
    definition.settings.execution_mode = ExecutionMode::Unchecked;
    let written = CppCompiler::<Cuda>::default()
        .compile(definition, &options(architecture))
        .map_err(|error| CodeError::Source(name, Box::new(error)))?;
    let includes = toolkit.includes.iter().map(|folder| format!("--include-path={}", folder.display()));
    let options = CompileOptions {
        options: includes.chain([format!("--gpu-architecture=sm_{architecture}")]).collect(),
        ..CompileOptions::default()
    };
    let ptx = compile_ptx_with_opts(&written.source, options)
        .map_err(|error| CodeError::Ptx(name, Box::new(error)))?
        .to_src();
    Ok(Written { shared_memory: written.shared_memory_size, source: written.source, ptx })
}

/// What ptxas says of a kernel.
fn assemble(name: &'static str, ptx: &str, architecture: u32, toolkit: &Toolkit) -> Result<Registers, CodeError> {
    let refused = |error: io::Error| CodeError::Assembler(name, error.to_string());
    let folder = tempfile::tempdir().map_err(refused)?;
    let input = folder.path().join("kernel.ptx");
    std::fs::write(&input, ptx).map_err(refused)?;
    let output = Command::new(&toolkit.ptxas)
        .args(["-v".to_owned(), format!("-arch=sm_{architecture}"), "-o".to_owned()])
        .arg(folder.path().join("kernel.cubin"))
        .arg(&input)
        .output()
        .map_err(|error| CodeError::NoAssembler(toolkit.ptxas.clone(), error))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    match output.status.success() {
        true => {
            let [count, stack] = [" registers", " bytes stack frame"].map(|phrase| number_before(&said, phrase));
            Ok(Registers { count, stack })
        }
        false => Err(CodeError::Assembler(name, said)),
    }
}

/// The number in front of a phrase.
fn number_before(text: &str, phrase: &str) -> u32 {
    let before = text.find(phrase).map_or("", |end| &text[..end]);
    let digits = before.rfind(|c: char| !c.is_ascii_digit()).map_or(before, |end| &before[end + 1..]);
    digits.parse().expect("ptxas -v states it")
}

fn options(architecture: u32) -> CompilationOptions {
    CompilationOptions {
        supports_features: CppSupportedFeatures {
            grid_constants: true,
            clusters: architecture >= 90,
            fast_math: true,
            fast_tanh: true,
            elect_sync: architecture >= 90,
            dp4a: true,
        },
        ..CompilationOptions::default()
    }
}

/// What the CUDA runtime of cubecl says of a data-center GPU of the architecture, as far as kernels here ask.
fn properties(architecture: u32) -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: shared_memory_limit(architecture),
        max_cube_count: (i32::MAX as u32, 65_535, 65_535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: None,
        num_cpu_cores: None,
        last_level_cache_size: None,
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        max_vector_size: usize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let identity = DeviceIdentity {
        name: format!("sm_{architecture}"),
        fingerprint: format!("ptx_sm{architecture}"),
        physical: None,
    };
    let memory = MemoryDeviceProperties::new(1 << 34, 512);
    let timing = cubecl::profile::TimingMethod::Device;
    let mut properties = DeviceProperties::new(Default::default(), memory, hardware, timing, identity);
    cubecl_cpp::register_supported_types(&mut properties);
    properties.features.plane.insert(Plane::Ops);
    properties.features.plane.insert(Plane::Sync);
    properties.features.plane.insert(Plane::NonUniformControlFlow);
    properties.features.copy_async = true;
    properties.features.matmul.ldmatrix.insert(Element::Brain.kind());
    let architecture = CudaArchitecture { version: architecture, tensor_cores: true };
    register_mma_features(cubecl_cpp::cuda::supported_mma_combinations(&architecture), &mut properties);
    properties
}

/// Bytes of shared memory that a cube may ask for; source: NVIDIA, CUDA C++ Programming Guide 12.9, table
/// "Technical specifications per compute capability".
pub fn shared_memory_limit(architecture: u32) -> usize {
    match architecture {
        ..90 => 163 << 10,
        90.. => 227 << 10,
    }
}

fn target() -> TargetProperties {
    TargetProperties {
        mma: MmaProperties {
            register_size_bits: 32,
            const_plane_size: 32,
            register_layout_a: MatrixLayout::RowMajor,
            register_layout_b: MatrixLayout::ColMajor,
            register_layout_acc: MatrixLayout::RowMajor,
            register_duplication_a: 1,
            register_duplication_b: 1,
            register_duplication_acc: 1,
            contiguous_elements: ContiguousElements::new(contiguous_elements_cuda),
        },
    }
}
