//! What all ranks of a run must have been started with alike, by name.

use std::path::PathBuf;

use ir::plan::Plan;
use ir::text::content_hash;

use super::{Data, Prepared, Request};
use crate::data::Source;
use crate::train::TrainConfig;

/// Names and values that ranks compare when they meet. Left out are `--log`, which only rank 0 reads, and `--timeout`.
pub fn terms(plan: &Plan, request: &Request, prepared: &Prepared) -> Vec<(&'static str, String)> {
    let settings = TrainConfig { seed: 0, ..prepared.config.clone() };
    vec![
        ("plan hash", content_hash(plan)),
        ("training settings", content_hash(&settings)),
        ("seed", prepared.config.seed.to_string()),
        ("steps", request.steps.to_string()),
        ("--evaluate", if request.evaluate { "on" } else { "off" }.to_owned()),
        ("device", if request.memory.is_on_device() { "with kernels" } else { "processor cores" }.to_owned()),
        ("transport", format!("{:?}", request.transport)),
        ("data", data_of(request, prepared)),
        ("--weights", path_of(&request.weights)),
        ("--export", path_of(&request.export)),
        ("--profile", path_of(&request.profile)),
    ]
}

fn data_of(request: &Request, prepared: &Prepared) -> String {
    match (&request.data, &prepared.sources.training) {
        (Data::Corpus(prefix), Source::Corpus { corpus, .. }) => {
            format!("{} with index {}", prefix.display(), corpus.index_hash())
        }
        (Data::Corpus(_), Source::Synthetic { .. }) | (Data::Synthetic, _) => "random tokens".to_owned(),
    }
}

fn path_of(path: &Option<PathBuf>) -> String {
    path.as_deref().map_or("none".to_owned(), |path| path.display().to_string())
}
