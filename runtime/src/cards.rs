//! The GPUs of this host, as the NVIDIA driver tells of them, and what their kernels are compiled with.

use cubecl::cuda::install::cuda_path;
use cudarc::driver::result::{DriverError, device, init};
use cudarc::driver::sys::{self, CUdevice_attribute, CUresult};
use ir::error::Problem;

/// The oldest driver that serves, as `cuDriverGetVersion` counts: CUDA 12.0.
const OLDEST_DRIVER: i32 = 12_000;
/// Headers that generated kernels include, and what brings them.
const HEADERS: [(&str, &str); 2] =
    [("cuda_bf16.h", "nvidia-cuda-runtime-cu12"), ("nv/target", "nvidia-cuda-cccl-cu12")];

/// A GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Card {
    /// Its number among those that this process sees.
    pub index: usize,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// CUDA version of the driver, major and minor.
    pub driver: (u32, u32),
}

/// All GPUs that this process sees, at least one. `location` is what asked for one, `otherwise` what else would do.
///
/// # Errors
/// Why there is none: no driver, one that is too old or does not work, or no card.
pub fn find_cards(location: &str, otherwise: &str) -> Result<Vec<Card>, Problem> {
    let refuse = |what: String, help: &str| Problem::new(what, location, format!("{help}, or {otherwise}"));
    // SAFETY: loading runs the library's initialization, as linking with it would.
    #[allow(unsafe_code)]
    let installed = unsafe { sys::is_culib_present() };
    if !installed {
        let what = "there is no GPU to run on: no driver library libcuda.so or libcuda.so.1 is on this host";
        return Err(refuse(
            what.to_owned(),
            "install the NVIDIA driver (`nvidia-smi` then lists the cards; containers are started with `--gpus all`)",
        ));
    }
    let failed = |call: &str, error: DriverError| {
        let what = format!("there is no GPU to run on: the driver's {call} says {}", in_words(error));
        let chosen = std::env::var("CUDA_VISIBLE_DEVICES").map(|chosen| format!(" (CUDA_VISIBLE_DEVICES={chosen})"));
        refuse(what, &format!("see what `nvidia-smi` says{}", chosen.unwrap_or_default()))
    };
    init().map_err(|error| failed("cuInit", error))?;
    let driver = driver_version().map_err(|error| failed("cuDriverGetVersion", error))?;
    if driver < OLDEST_DRIVER {
        let (major, minor) = version(driver);
        let what = format!("the NVIDIA driver is of CUDA {major}.{minor}");
        return Err(refuse(what, "install the driver of CUDA 12 or newer"));
    }
    let count = device::get_count().map_err(|error| failed("cuDeviceGetCount", error))?;
    let cards = (0..count).map(|index| card(index, driver)).collect::<Result<Vec<_>, _>>();
    let cards = cards.map_err(|error| failed("cuDeviceGet", error))?;
    match cards.is_empty() {
        true => Err(failed("cuDeviceGetCount", DriverError(CUresult::CUDA_ERROR_NO_DEVICE))),
        false => Ok(cards),
    }
}

/// Checks that kernels can be compiled here: with NVRTC, and headers in the folder where cubecl looks for them.
///
/// # Errors
/// What is missing.
pub fn find_compiler(location: &str) -> Result<(), Problem> {
    // SAFETY: as in `find_cards`.
    #[allow(unsafe_code)]
    let installed = unsafe { cudarc::nvrtc::sys::is_culib_present() };
    if !installed {
        let help = "install CUDA's run-time compiler (PyPI nvidia-cuda-nvrtc-cu12 or the toolkit) and add its folder \
                    to LD_LIBRARY_PATH";
        return Err(Problem::new("kernels cannot be compiled: there is no libnvrtc.so.12", location, help));
    }
    let folder = cuda_path().map(|path| path.join("include")).unwrap_or_default();
    let missing = |header: &str| ![folder.join(header), folder.join("cccl").join(header)].iter().any(|it| it.exists());
    match HEADERS.iter().find(|(header, _)| missing(header)) {
        None => Ok(()),
        Some((header, package)) => {
            let what = match folder.as_os_str().is_empty() {
                true => format!("kernels cannot be compiled: CUDA_PATH is not set, so {header} is not found"),
                false => format!("kernels cannot be compiled: {header} is not in {}", folder.display()),
            };
            let help = format!(
                "set CUDA_PATH to a folder whose `include` holds CUDA's headers (toolkit, or PyPI {package}); docs/gpu.md \
                 shows how"
            );
            Err(Problem::new(what, location, help))
        }
    }
}

fn card(index: i32, driver: i32) -> Result<Card, DriverError> {
    let handle = device::get(index)?;
    // SAFETY: the handle is the driver's.
    #[allow(unsafe_code)]
    let attribute = |attribute| unsafe { device::get_attribute(handle, attribute) }.map(|number| number as u32);
    Ok(Card {
        index: index as usize,
        capability: (
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        driver: version(driver),
    })
}

fn driver_version() -> Result<i32, DriverError> {
    let mut version = 0;
    // SAFETY: the pointer is to one number, which the call writes.
    #[allow(unsafe_code)]
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result()?;
    Ok(version)
}

fn version(number: i32) -> (u32, u32) {
    let number = number.unsigned_abs();
    (number / 1000, number % 1000 / 10)
}

/// An error as the driver names and explains it, or its number.
fn in_words(error: DriverError) -> String {
    let text = |text: Result<&std::ffi::CStr, DriverError>| text.ok().map(|text| text.to_string_lossy().into_owned());
    match (text(error.error_name()), text(error.error_string())) {
        (Some(name), Some(meaning)) => format!("{name}: {meaning}"),
        _ => format!("CUresult {}", error.0 as u32),
    }
}
