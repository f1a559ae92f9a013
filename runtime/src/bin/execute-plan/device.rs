//! `--device`: where a rank computes.

use ir::error::Problem;
use runtime::launch::Launch;
use runtime::tensor::Memory;

use crate::arguments::Device;

/// What else would do where there is no device.
const OTHERWISE: &str = "leave --device out";

/// The devices that this host's ranks compute on; none are processor cores.
#[cfg(feature = "kernels")]
pub struct Devices(Option<(runtime::device::Driver, Vec<runtime::device::Found>)>);

/// Processor cores.
#[cfg(not(feature = "kernels"))]
pub struct Devices;

#[cfg(feature = "kernels")]
impl Devices {
    /// Finds them; opens none.
    ///
    /// # Errors
    /// What is missing on this host or in this program.
    pub fn find(device: Device) -> Result<Devices, Problem> {
        use runtime::device::Driver;

        let driver = match device {
            Device::Cpu => return Ok(Devices(None)),
            Device::Cuda => Driver::Cuda,
            Device::Wgpu => Driver::Wgpu,
        };
        Ok(Devices(Some((driver, driver.find(&location(driver), OTHERWISE)?))))
    }

    /// The memory of a rank, on the device of its number among the ranks of its host; ranks take turns where there are
    /// fewer devices.
    ///
    /// # Errors
    /// A device that cannot be opened.
    pub fn memory_of(&self, launch: &Launch) -> Result<Memory, Problem> {
        let Devices(Some((driver, found))) = self else { return Ok(Memory::default()) };
        let count = found.len() as u64;
        if launch.local_rank == 0 && launch.local_size > count {
            let devices = if count == 1 { "1 device".to_owned() } else { format!("{count} devices") };
            eprintln!("{} ranks of this host share {devices} that this process sees", launch.local_size);
        }
        let own = &found[(launch.local_rank % count) as usize];
        Ok(Memory::on(runtime::device::Device::new(own.open(&location(*driver))?)))
    }
}

#[cfg(feature = "kernels")]
fn location(driver: runtime::device::Driver) -> String {
    format!("--device {}", driver.name())
}

#[cfg(not(feature = "kernels"))]
impl Devices {
    /// Says that this program has no kernels for any but processor cores.
    ///
    /// # Errors
    /// That.
    pub fn find(device: Device) -> Result<Devices, Problem> {
        let name = match device {
            Device::Cpu => return Ok(Devices),
            Device::Cuda => "cuda",
            Device::Wgpu => "wgpu",
        };
        Err(Problem::new(
            format!("this program was built without its feature `{name}`, and runs on processor cores only"),
            format!("--device {name}"),
            format!("{OTHERWISE}, or build it with `--features {name}`"),
        ))
    }

    /// The host's memory.
    ///
    /// # Errors
    /// None.
    pub fn memory_of(&self, _launch: &Launch) -> Result<Memory, Problem> {
        Ok(Memory::default())
    }
}
