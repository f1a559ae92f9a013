//! The device that kernels run on, its memory, and the comparison of what they leave there.

use cubecl::client::Client;
use cubecl::prelude::CubeElement;
use ir::graph::DimName;
use ir::program::Op;
use kernels::{Buffer, Element, Queue};
use runtime::operators::{Operand, Place, ResultShape, apply};
use runtime::tensor::{Format, Memory, Tensor, bf16};

pub type Dims = Vec<(DimName, usize)>;

/// A device.
pub struct Device(Client);

/// The device, or the reason why there is none as a panic: a check that finds no device is no check.
pub fn device() -> Device {
    Device(cubecl::Device::Wgpu(Default::default()).client())
}

impl Device {
    pub fn queue(&self) -> Queue<'_> {
        Queue::Device(&self.0)
    }

    /// Number formats that the device says it has.
    pub fn formats(&self) -> Vec<Element> {
        let has = |element: &Element| self.0.properties().supports_type(element.kind());
        let formats: Vec<Element> = [Element::Single, Element::Brain].into_iter().filter(has).collect();
        assert!(formats.contains(&Element::Single), "the device has fp32");
        formats
    }

    pub fn upload(&self, numbers: &[f32], element: Element) -> Buffer {
        let handle = match element {
            Element::Single => self.0.create_from_slice(f32::as_bytes(numbers)),
            Element::Brain => {
                let rounded: Vec<bf16> = numbers.iter().map(|number| bf16::from_f32(*number)).collect();
                self.0.create_from_slice(bf16::as_bytes(&rounded))
            }
            Element::Index => unreachable!("indices are not numbers"),
        };
        Buffer { handle, length: numbers.len(), element }
    }

    /// Memory that holds NaN: what a kernel does not write is seen.
    pub fn poisoned(&self, length: usize, element: Element) -> Buffer {
        self.upload(&vec![f32::NAN; length], element)
    }

    pub fn read(&self, buffer: &Buffer) -> Vec<f32> {
        let bytes = self.0.read_one(buffer.handle.clone()).expect("the device ran what it was sent");
        let numbers = match buffer.element {
            Element::Single => f32::from_bytes(&bytes).to_vec(),
            Element::Brain => bf16::from_bytes(&bytes).iter().map(|number| number.to_f32()).collect(),
            Element::Index => unreachable!("indices are not numbers"),
        };
        numbers[..buffer.length].to_vec()
    }

    /// Compares what is in memory with what is expected: to `tolerance` times the largest number, and in bf16 to one
    /// rounding besides.
    pub fn check(&self, name: &str, buffer: &Buffer, expected: &[f32], tolerance: f64) {
        let found = self.read(buffer);
        assert_eq!(found.len(), expected.len(), "{name}");
        let largest = expected.iter().filter(|x| x.is_finite()).map(|x| f64::from(x.abs())).fold(0.0, f64::max);
        let mut worst = 0.0f64;
        for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
            if found == expected {
                continue;
            }
            let rounding = if buffer.element == Element::Brain { f64::from(expected.abs()) / 256.0 } else { 0.0 };
            let difference = (f64::from(*found) - f64::from(*expected)).abs();
            let right = difference <= tolerance * largest + rounding;
            assert!(right, "{name}: element {at} is {found}, expected {expected}, largest {largest}");
            worst = worst.max(difference / largest);
        }
        eprintln!("{name}, {:?}: largest difference {worst:.1e} of the largest number", buffer.element);
    }
}

/// Numbers as a buffer of the format holds them.
pub fn rounded(numbers: Vec<f32>, element: Element) -> Vec<f32> {
    match element {
        Element::Brain => numbers.into_iter().map(|number| bf16::from_f32(number).to_f32()).collect(),
        Element::Single | Element::Index => numbers,
    }
}

/// An fp32 tensor on the CPU.
pub fn tensor(dims: &Dims, numbers: &[f32]) -> Tensor {
    Tensor::from_numbers(&Memory::default(), dims, Format::Single, numbers)
}

/// An operator of the CPU in fp32.
pub fn operator(op: &Op, operands: &[&Tensor], dims: &Dims, place: Place) -> Tensor {
    let memory = Memory::default();
    let result = ResultShape { memory: &memory, dims, format: Format::Single, place };
    apply(op, operands.iter().map(|operand| Operand::Borrowed(operand)).collect(), &result)
}
