//! Sums of numbers that a step's operators give, read at its end: until then a device is not waited for.

use std::ops::Range;

use crate::Error;
use crate::optimizer::sum_of_squares;
use crate::tensor::Tensor;

/// A sum under way.
#[derive(Debug, Default)]
pub struct Sum {
    on_host: f64,
    #[cfg(feature = "kernels")]
    on_device: Option<(crate::device::Device, kernels::Buffer)>,
}

impl Sum {
    /// Adds the one element of a tensor.
    pub fn add(&mut self, number: &Tensor) {
        #[cfg(feature = "kernels")]
        if let Some(device) = number.device() {
            return self.send(device, |queue, total, adds| {
                use kernels::elementwise::{Unary, unary};
                unary(queue, Unary::Copy, 1.0, &number.buffer(), total, adds);
            });
        }
        self.on_host += f64::from(number.singles()[0]);
    }

    /// Adds the squares of elements of a tensor.
    pub fn add_squares(&mut self, tensor: &Tensor, range: Range<usize>) {
        #[cfg(feature = "kernels")]
        if let Some(device) = tensor.device() {
            return self.send(device, |queue, total, adds| {
                kernels::optimizer::sum_of_squares(queue, &tensor.part(queue, range), total, adds);
            });
        }
        self.on_host += sum_of_squares(&tensor.singles()[range]);
    }

    /// The sum; waits for the device.
    ///
    /// # Errors
    /// A device that failed.
    pub fn value(&self) -> Result<f64, Error> {
        #[cfg(feature = "kernels")]
        if let Some((device, total)) = &self.on_device {
            let bytes = device.read(total)?;
            return Ok(bytemuck::pod_collect_to_vec::<u8, f32>(&bytes).into_iter().map(f64::from).sum());
        }
        Ok(self.on_host)
    }

    #[cfg(feature = "kernels")]
    fn send(&mut self, device: &crate::device::Device, kernel: impl FnOnce(&kernels::Queue, &kernels::Buffer, bool)) {
        if device.is_tracing() {
            return;
        }
        let adds = self.on_device.is_some();
        let new = || (device.clone(), device.queue().buffer(1, kernels::Element::Single));
        let (device, total) = self.on_device.get_or_insert_with(new);
        kernel(&device.queue(), total, adds);
    }
}
