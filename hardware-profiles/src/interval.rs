//! How much wider the interval of a prediction is where less is known of a run or of its like.

use std::sync::OnceLock;

use ir::text::read_ron;
use serde::Deserialize;

use crate::sourced::Sourced;

/// Factors of a stack's 90 % interval.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IntervalWidths {
    /// Where cells that decide time are blank.
    pub blank: Sourced<f64>,
    /// Outside what the stack was compared with.
    pub outside: Sourced<f64>,
}

/// The built-in factors.
pub fn interval_widths() -> &'static IntervalWidths {
    static WIDTHS: OnceLock<IntervalWidths> = OnceLock::new();
    WIDTHS.get_or_init(|| {
        let text = include_str!("../interval.ron");
        read_ron(text, "interval.ron").expect("a test reads the built-in factors")
    })
}
