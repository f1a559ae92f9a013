//! What runs kernels, and the devices that it has on this host.

use std::panic::{AssertUnwindSafe, catch_unwind};

use cubecl::client::Client;
use ir::error::Problem;

/// What runs kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// NVIDIA's driver.
    Cuda,
    /// Any Vulkan driver: a check of the numbers where there is no GPU.
    Wgpu,
}

/// A device that is there and was not opened yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    driver: Driver,
    /// Its number among those that this process sees.
    index: usize,
    /// What its driver says of it.
    pub about: String,
}

impl Driver {
    /// The devices that this process sees and can compile kernels for, at least one. `location` is what asked for them,
    /// `otherwise` what else would do.
    ///
    /// # Errors
    /// What is missing: the driver, a card, the compiler of kernels, or the feature that this program was built without.
    pub fn find(self, location: &str, otherwise: &str) -> Result<Vec<Found>, Problem> {
        match self {
            Driver::Cuda => find_cuda(location, otherwise),
            Driver::Wgpu => find_wgpu(location, otherwise),
        }
    }

    /// What the driver is called on the command line, which is also the feature that this program needs for it.
    pub fn name(self) -> &'static str {
        match self {
            Driver::Cuda => "cuda",
            Driver::Wgpu => "wgpu",
        }
    }
}

impl Found {
    /// Opens the device. `location` is what asked for it.
    ///
    /// # Errors
    /// What its driver says, such as that others have taken all its memory.
    pub fn open(&self, location: &str) -> Result<Client, Problem> {
        catch_unwind(AssertUnwindSafe(|| self.client())).map_err(|panic| {
            let said = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            let what = format!(
                "device {} of the driver {} cannot be opened: {}",
                self.index,
                self.driver.name(),
                said.unwrap_or("see the message above")
            );
            Problem::new(what, location, "see whether other programs use it, and what its driver's own tools say")
        })
    }

    fn client(&self) -> Client {
        match self.driver {
            #[cfg(feature = "cuda")]
            Driver::Cuda => cubecl::Device::Cuda(burn_cuda::CudaDevice { index: self.index }).client(),
            #[cfg(feature = "wgpu")]
            Driver::Wgpu => cubecl::Device::Wgpu(cubecl::wgpu::WgpuDevice::default()).client(),
            #[cfg(not(all(feature = "cuda", feature = "wgpu")))]
            _ => unreachable!("devices are found by drivers that this program was built for"),
        }
    }
}

#[cfg(feature = "cuda")]
fn find_cuda(location: &str, otherwise: &str) -> Result<Vec<Found>, Problem> {
    let cards = crate::cards::find_cards(location, otherwise)?;
    crate::cards::find_compiler(location)?;
    let found = |card: crate::cards::Card| {
        let (capability, driver) = (card.capability, card.driver);
        let about =
            format!("compute capability {}.{}, driver of CUDA {}.{}", capability.0, capability.1, driver.0, driver.1);
        Found { driver: Driver::Cuda, index: card.index, about }
    };
    Ok(cards.into_iter().map(found).collect())
}

#[cfg(not(feature = "cuda"))]
fn find_cuda(location: &str, otherwise: &str) -> Result<Vec<Found>, Problem> {
    Err(built_without(Driver::Cuda, location, otherwise))
}

#[cfg(feature = "wgpu")]
fn find_wgpu(location: &str, otherwise: &str) -> Result<Vec<Found>, Problem> {
    if !cubecl::Device::enumerate_all().iter().any(|device| matches!(device, cubecl::Device::Wgpu(_))) {
        let help =
            format!("install one (Debian's mesa-vulkan-drivers and libvulkan1 run on processor cores), or {otherwise}");
        return Err(Problem::new("there is no Vulkan driver with a device on this host", location, help));
    }
    Ok(vec![Found { driver: Driver::Wgpu, index: 0, about: "Vulkan".to_owned() }])
}

#[cfg(not(feature = "wgpu"))]
fn find_wgpu(location: &str, otherwise: &str) -> Result<Vec<Found>, Problem> {
    Err(built_without(Driver::Wgpu, location, otherwise))
}

#[cfg(not(all(feature = "cuda", feature = "wgpu")))]
fn built_without(driver: Driver, location: &str, otherwise: &str) -> Problem {
    let name = driver.name();
    let what = format!("this program was built without its feature `{name}`");
    Problem::new(what, location, format!("build it with `--features {name}`, or {otherwise}"))
}
