//! Types that every part of Planwright shares, and the checks on them.
//!
//! Reads and writes no files, knows no formula of time, and never searches.

pub mod derivative;
pub mod distribution;
pub mod error;
pub mod footprint;
pub mod graph;
#[cfg(feature = "interpreter")]
pub mod interpreter;
pub mod kernel;
pub mod mesh;
pub mod model;
pub mod pipeline;
pub mod placement;
pub mod plan;
pub mod program;
pub mod provenance;
#[cfg(feature = "interpreter")]
pub mod reference;
pub mod rotary;
pub mod schedule;
pub mod sharding;
pub mod strategy;
pub mod text;
pub mod traffic;
pub mod units;
pub mod verify;
