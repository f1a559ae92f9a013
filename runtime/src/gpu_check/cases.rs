//! Every kernel on odd sizes, with results written over numbers that are none.
//!
//! A case computes with the reference what its kernels should leave, and compares. Kernels run in each number format
//! that the device says it has.

mod attention;
mod elementwise;
mod rows;
mod update;
mod vocabulary;

use super::checks::Checks;

/// A case: kernels that belong together.
pub type Case = fn(&mut Checks);

/// All cases by name.
pub const CASES: [(&str, Case); 11] = [
    ("bias_gelu", elementwise::bias_gelu_and_gradients),
    ("swiglu", elementwise::swiglu_and_gradients),
    ("dropout", elementwise::dropout_with_residual),
    ("norm", rows::norms_and_gradients),
    ("softmax", rows::scores_and_gradient),
    ("rotary", rows::rotary_there_and_back),
    ("attention", attention::attention_and_gradients),
    ("loss", vocabulary::cross_entropy_of_a_split_vocabulary),
    ("embedding", vocabulary::rows_of_tables),
    ("adamw", update::adamw_on_flat_shards),
    ("squares", update::squared_norm),
];
