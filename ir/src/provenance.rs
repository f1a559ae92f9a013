//! Where a number comes from, weakest first, so that a result carries the weakest of its inputs.

use serde::{Deserialize, Serialize};

/// Origin of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Provenance {
    /// Nobody measured or published it for this case.
    Assumed,
    /// A vendor's data sheet.
    Datasheet,
    /// A constant fitted to measurements, or computed from such constants.
    Fitted,
    /// Read from a measurement.
    Measured,
}

impl Provenance {
    /// The word printed in tables.
    pub fn name(self) -> &'static str {
        match self {
            Provenance::Assumed => "assumed",
            Provenance::Datasheet => "datasheet",
            Provenance::Fitted => "fitted",
            Provenance::Measured => "measured",
        }
    }
}
