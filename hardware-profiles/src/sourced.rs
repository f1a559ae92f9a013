//! A number with its origin: `Datasheet(GiB(80), "NVIDIA A100 data sheet")`.

use ir::provenance::Provenance;
use serde::{Deserialize, Serialize};

/// A value, what kind of origin it has, and the document, table or measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "SourcedText<T>", into = "SourcedText<T>")]
pub struct Sourced<T: Clone> {
    /// The number.
    pub value: T,
    /// Kind of origin.
    pub provenance: Provenance,
    /// Document, page or table; for a measurement what, how and when.
    pub source: String,
}

#[derive(Serialize, Deserialize)]
#[serde(rename = "Sourced")]
enum SourcedText<T> {
    Measured(T, String),
    Fitted(T, String),
    Datasheet(T, String),
    Assumed(T, String),
}

impl<T: Clone> From<SourcedText<T>> for Sourced<T> {
    fn from(text: SourcedText<T>) -> Sourced<T> {
        let (value, provenance, source) = match text {
            SourcedText::Measured(value, source) => (value, Provenance::Measured, source),
            SourcedText::Fitted(value, source) => (value, Provenance::Fitted, source),
            SourcedText::Datasheet(value, source) => (value, Provenance::Datasheet, source),
            SourcedText::Assumed(value, source) => (value, Provenance::Assumed, source),
        };
        Sourced { value, provenance, source }
    }
}

impl<T: Clone> From<Sourced<T>> for SourcedText<T> {
    fn from(sourced: Sourced<T>) -> SourcedText<T> {
        let Sourced { value, provenance, source } = sourced;
        match provenance {
            Provenance::Measured => SourcedText::Measured(value, source),
            Provenance::Fitted => SourcedText::Fitted(value, source),
            Provenance::Datasheet => SourcedText::Datasheet(value, source),
            Provenance::Assumed => SourcedText::Assumed(value, source),
        }
    }
}
