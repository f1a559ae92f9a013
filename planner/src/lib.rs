//! Enumerates layouts, scores them with the cost models, chooses one and lowers it to a plan.
//!
//! No constant of hardware and no formula of time stands here.

pub mod advice;
pub mod calibrate;
pub mod compare;
pub mod compile;
pub mod error;
pub mod examples;
pub mod explain;
pub mod export;
pub mod fitting;
pub mod foreign;
pub mod huggingface;
pub mod interval;
pub mod limits;
pub mod lower;
pub mod objective;
pub mod partition;
pub mod report;
pub mod request;
pub mod score;
pub mod search;
pub mod shapes;
pub mod space;
pub mod sweep;
pub mod training;
pub mod validate;
pub mod watch;
