//! Types that every part of Planwright shares, and the checks on them.
//!
//! Reads and writes no files, knows no formula of time, and never searches.

pub mod error;
pub mod graph;
pub mod mesh;
pub mod model;
pub mod plan;
pub mod provenance;
pub mod sharding;
pub mod strategy;
pub mod text;
pub mod units;
pub mod verify;
