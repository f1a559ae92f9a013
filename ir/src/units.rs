//! Quantities with their units in the type, and their written form `GiB(80)` in RON files.
//!
//! GB is 10⁹ bytes, GiB is 2³⁰ bytes. Only meaningful arithmetic exists: `Bytes / BytesPerSecond`
//! gives `Seconds`, `Bytes + Seconds` does not compile. Reading goes through one `TryFrom` for each
//! quantity, which refuses NaN, infinite and negative numbers.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Sub};

use serde::{Deserialize, Serialize};

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "BytesText", into = "BytesText")]
pub struct Bytes(pub u64);

/// A duration in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "SecondsText", into = "SecondsText")]
pub struct Seconds(pub f64);

/// A number of floating-point operations; a multiply-add counts as two.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "FlopsText", into = "FlopsText")]
pub struct Flops(pub f64);

/// A bandwidth.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "BandwidthText", into = "BandwidthText")]
pub struct BytesPerSecond(pub f64);

/// A rate of floating-point operations, dense (never the sparse peak).
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "FlopRateText", into = "FlopRateText")]
pub struct FlopsPerSecond(pub f64);

/// A power.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "PowerText", into = "PowerText")]
pub struct Watts(pub f64);

/// An energy.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Joules(pub f64);

/// A sum of money.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "MoneyText", into = "MoneyText")]
pub struct UsDollars(pub f64);

/// A length of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum SequenceLength {
    /// A number of tokens.
    Tokens(u64),
}

/// The size of a global batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum BatchSize {
    /// A number of sequences.
    Sequences(u64),
    /// A number of tokens; divided by the sequence length it must give whole sequences.
    Tokens(u64),
}

impl Bytes {
    /// The value in GiB (2³⁰ bytes).
    pub fn gib(self) -> f64 {
        self.0 as f64 / (1u64 << 30) as f64
    }

    /// The nearest whole number of bytes of a product with a ratio.
    pub fn scale(self, ratio: f64) -> Bytes {
        Bytes((self.0 as f64 * ratio).round() as u64)
    }
}

impl Add for Bytes {
    type Output = Bytes;
    fn add(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Bytes) {
        *self = *self + other;
    }
}

impl Sub for Bytes {
    type Output = Bytes;
    /// Saturates at zero: a shortage is computed the other way round.
    fn sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }
}

impl Mul<u64> for Bytes {
    type Output = Bytes;
    fn mul(self, count: u64) -> Bytes {
        Bytes(self.0.saturating_mul(count))
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(values: I) -> Bytes {
        values.fold(Bytes(0), Add::add)
    }
}

impl Div<BytesPerSecond> for Bytes {
    type Output = Seconds;
    fn div(self, bandwidth: BytesPerSecond) -> Seconds {
        Seconds(self.0 as f64 / bandwidth.0)
    }
}

impl Div<FlopsPerSecond> for Flops {
    type Output = Seconds;
    fn div(self, rate: FlopsPerSecond) -> Seconds {
        Seconds(self.0 / rate.0)
    }
}

impl Mul<Seconds> for Watts {
    type Output = Joules;
    fn mul(self, time: Seconds) -> Joules {
        Joules(self.0 * time.0)
    }
}

/// Addition, scaling and sums of the quantities held as `f64`.
macro_rules! continuous_quantity {
    ($($name:ident),*) => {$(
        impl Add for $name {
            type Output = $name;
            fn add(self, other: $name) -> $name {
                $name(self.0 + other.0)
            }
        }
        impl AddAssign for $name {
            fn add_assign(&mut self, other: $name) {
                self.0 += other.0;
            }
        }
        impl Sub for $name {
            type Output = $name;
            fn sub(self, other: $name) -> $name {
                $name(self.0 - other.0)
            }
        }
        impl Mul<f64> for $name {
            type Output = $name;
            fn mul(self, factor: f64) -> $name {
                $name(self.0 * factor)
            }
        }
        impl Sum for $name {
            fn sum<I: Iterator<Item = $name>>(values: I) -> $name {
                values.fold($name(0.0), Add::add)
            }
        }
    )*};
}
continuous_quantity!(Seconds, Flops, BytesPerSecond, FlopsPerSecond, Joules, UsDollars);

impl Seconds {
    /// The longer of two durations.
    pub fn max(self, other: Seconds) -> Seconds {
        Seconds(self.0.max(other.0))
    }
}

impl SequenceLength {
    /// The number of tokens.
    pub fn tokens(self) -> u64 {
        let SequenceLength::Tokens(tokens) = self;
        tokens
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (value, unit) = match self.0 {
            b if b >= 1 << 40 => (b as f64 / (1u64 << 40) as f64, "TiB"),
            b if b >= 1 << 30 => (b as f64 / (1u64 << 30) as f64, "GiB"),
            b if b >= 1 << 20 => (b as f64 / (1u64 << 20) as f64, "MiB"),
            b => return write!(f, "{b} B"),
        };
        write!(f, "{value:.1} {unit}")
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            s if s >= 10.0 => write!(f, "{s:.1} s"),
            s if s >= 1.0 => write!(f, "{s:.2} s"),
            s if s >= 1e-3 => write!(f, "{:.1} ms", s * 1e3),
            s => write!(f, "{:.1} us", s * 1e6),
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename = "Bytes")]
enum BytesText {
    B(u64),
    KiB(f64),
    MiB(f64),
    GiB(f64),
    TiB(f64),
    MB(f64),
    GB(f64),
    TB(f64),
}

#[derive(Serialize, Deserialize)]
#[serde(rename = "Seconds")]
enum SecondsText {
    Seconds(f64),
    Millis(f64),
    Micros(f64),
    Minutes(f64),
    Hours(f64),
}

#[derive(Serialize, Deserialize)]
#[serde(rename = "Flops")]
enum FlopsText {
    Flops(f64),
    TeraFlops(f64),
}

#[derive(Serialize, Deserialize)]
#[serde(rename = "BytesPerSecond")]
#[allow(clippy::enum_variant_names, reason = "the variants are units as files write them")]
enum BandwidthText {
    BytesPerSecond(f64),
    GBPerSecond(f64),
    TBPerSecond(f64),
    GbitPerSecond(f64),
}

#[derive(Serialize, Deserialize)]
#[serde(rename = "FlopsPerSecond")]
#[allow(clippy::enum_variant_names, reason = "the variants are units as files write them")]
enum FlopRateText {
    FlopsPerSecond(f64),
    TeraFlopsPerSecond(f64),
}

#[derive(Serialize, Deserialize)]
#[serde(rename = "Watts")]
enum PowerText {
    Watts(f64),
}

#[derive(Serialize, Deserialize)]
#[serde(rename = "UsDollars")]
enum MoneyText {
    UsDollars(f64),
}

impl TryFrom<BytesText> for Bytes {
    type Error = String;
    fn try_from(text: BytesText) -> Result<Bytes, String> {
        let (value, unit) = match text {
            BytesText::B(value) => return Ok(Bytes(value)),
            BytesText::KiB(value) => (value, (1u64 << 10) as f64),
            BytesText::MiB(value) => (value, (1u64 << 20) as f64),
            BytesText::GiB(value) => (value, (1u64 << 30) as f64),
            BytesText::TiB(value) => (value, (1u64 << 40) as f64),
            BytesText::MB(value) => (value, 1e6),
            BytesText::GB(value) => (value, 1e9),
            BytesText::TB(value) => (value, 1e12),
        };
        let bytes = scaled(value, unit)?;
        if bytes >= u64::MAX as f64 {
            return Err(format!("{bytes:e} bytes is more than 2^64"));
        }
        Ok(Bytes(bytes.round() as u64))
    }
}

impl From<Bytes> for BytesText {
    fn from(bytes: Bytes) -> BytesText {
        BytesText::B(bytes.0)
    }
}

/// Reading and writing of one quantity: its variants with their factors, and the variant written.
macro_rules! written_as {
    ($name:ident, $text:ident, $written:ident, { $($unit:ident => $factor:expr),* }) => {
        impl TryFrom<$text> for $name {
            type Error = String;
            fn try_from(text: $text) -> Result<$name, String> {
                match text {
                    $($text::$unit(value) => scaled(value, $factor).map($name),)*
                }
            }
        }
        impl From<$name> for $text {
            fn from(quantity: $name) -> $text {
                $text::$written(quantity.0)
            }
        }
    };
}
written_as!(Seconds, SecondsText, Seconds, {
    Seconds => 1.0, Millis => 1e-3, Micros => 1e-6, Minutes => 60.0, Hours => 3600.0
});
written_as!(Flops, FlopsText, Flops, { Flops => 1.0, TeraFlops => 1e12 });
written_as!(BytesPerSecond, BandwidthText, BytesPerSecond, {
    BytesPerSecond => 1.0, GBPerSecond => 1e9, TBPerSecond => 1e12, GbitPerSecond => 1.25e8
});
written_as!(FlopsPerSecond, FlopRateText, FlopsPerSecond, {
    FlopsPerSecond => 1.0, TeraFlopsPerSecond => 1e12
});
written_as!(Watts, PowerText, Watts, { Watts => 1.0 });
written_as!(UsDollars, MoneyText, UsDollars, { UsDollars => 1.0 });

fn scaled(value: f64, unit: f64) -> Result<f64, String> {
    let scaled = value * unit;
    if scaled.is_finite() && scaled >= 0.0 {
        Ok(scaled)
    } else {
        Err(format!("the quantity {value:?} is out of bounds: it must be finite and not negative"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<T: for<'a> Deserialize<'a>>(text: &str) -> Result<T, String> {
        ron::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn written_units_are_read() {
        assert_eq!(read("GiB(80)"), Ok(Bytes(80 << 30)));
        assert_eq!(read("GB(80)"), Ok(Bytes(80_000_000_000)));
        assert_eq!(read("B(7)"), Ok(Bytes(7)));
        assert_eq!(read("Micros(10)"), Ok(Seconds(10.0 * 1e-6)));
        assert_eq!(read("Hours(2)"), Ok(Seconds(7200.0)));
        assert_eq!(read("Watts(400)"), Ok(Watts(400.0)));
        assert_eq!(read("UsDollars(1.3)"), Ok(UsDollars(1.3)));
        assert_eq!(read("GbitPerSecond(100)"), Ok(BytesPerSecond(12.5e9)));
        assert_eq!(read("TeraFlopsPerSecond(312)"), Ok(FlopsPerSecond(312e12)));
    }

    #[test]
    fn bad_quantities_are_refused() {
        for text in ["80", "GiB(-1)", "GiB(NaN)", "GiB(inf)", "Gigs(80)", "GiB(1e30)"] {
            assert!(read::<Bytes>(text).is_err(), "{text} was accepted");
        }
        assert!(read::<Seconds>("Micros(-3)").is_err());
    }

    #[test]
    fn quantities_survive_a_round_trip() {
        let bytes = ron::to_string(&Bytes(123)).and_then(|text| Ok(ron::from_str::<Bytes>(&text)?));
        assert_eq!(bytes, Ok(Bytes(123)));
        let time = ron::to_string(&Seconds(0.1 + 0.2)).and_then(|text| Ok(ron::from_str::<Seconds>(&text)?));
        assert_eq!(time, Ok(Seconds(0.1 + 0.2)));
    }

    #[test]
    fn arithmetic_keeps_units() {
        assert_eq!(Bytes(100) / BytesPerSecond(50.0), Seconds(2.0));
        assert_eq!(Flops(100.0) / FlopsPerSecond(50.0), Seconds(2.0));
        assert_eq!(Bytes(3) - Bytes(5), Bytes(0));
        assert_eq!(Watts(400.0) * Seconds(2.0), Joules(800.0));
    }
}
