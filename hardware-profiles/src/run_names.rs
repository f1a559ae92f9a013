//! Names that tables of published runs use, and the profiles that they mean.

use std::sync::OnceLock;

use ir::error::Problem;
use ir::text::read_ron;
use serde::Deserialize;

use crate::library::nearest;

/// The names that this version knows.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunNames {
    /// Accelerators.
    pub gpus: Vec<GpuName>,
    /// Software.
    pub frameworks: Vec<FrameworkName>,
    /// Names of either kind that have no profile.
    pub unsupported: Vec<UnsupportedName>,
}

/// An accelerator's name.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuName {
    /// As tables have it.
    pub name: String,
    /// Clusters with it; memory and network of a run decide between them, else the first is meant.
    pub clusters: Vec<String>,
    /// Clusters of one place, which only what was run there tells.
    #[serde(default)]
    pub sites: Vec<Site>,
}

/// A cluster that only some frameworks' runs come from.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Site {
    /// The cluster.
    pub cluster: String,
    /// Names of the frameworks.
    pub frameworks: Vec<String>,
}

/// A framework's name.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrameworkName {
    /// As tables have it.
    pub name: String,
    /// Stacks by the first year from which the name means them, earliest first.
    pub stacks: Vec<StackFrom>,
}

/// The stack that a name means from a year on.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackFrom {
    /// First year.
    pub from: u64,
    /// Name of the stack.
    pub stack: String,
}

/// A name without a profile.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnsupportedName {
    /// As tables have it.
    pub name: String,
    /// Why.
    pub reason: String,
}

/// The built-in names.
pub fn run_names() -> &'static RunNames {
    static NAMES: OnceLock<RunNames> = OnceLock::new();
    NAMES.get_or_init(|| {
        let text = include_str!("../run_names.ron");
        read_ron(text, "run_names.ron").expect("a test reads the built-in names")
    })
}

impl GpuName {
    /// Clusters with it, those of single places included.
    pub fn all_clusters(&self) -> impl Iterator<Item = &str> {
        self.clusters.iter().chain(self.sites.iter().map(|site| &site.cluster)).map(String::as_str)
    }
}

impl RunNames {
    /// Clusters that an accelerator's name means in runs of a framework.
    ///
    /// # Errors
    /// A problem with the nearest names, or with the reason why there is no profile.
    pub fn clusters(&self, gpu: &str, framework: &str) -> Result<Vec<&str>, Problem> {
        let Some(known) = self.gpus.iter().find(|known| known.name == gpu) else {
            return Err(self.unknown("accelerator", gpu, self.gpus.iter().map(|known| &*known.name)));
        };
        let here = |site: &&Site| site.frameworks.iter().any(|name| name == framework);
        let sites = known.sites.iter().filter(here).map(|site| &*site.cluster);
        Ok(known.clusters.iter().map(|name| &**name).chain(sites).collect())
    }

    /// The stack that a framework's name means in a year; without a year the latest.
    ///
    /// # Errors
    /// A problem with the nearest names, or with the reason why there is no profile.
    pub fn stack(&self, framework: &str, year: Option<u64>) -> Result<&str, Problem> {
        let Some(known) = self.frameworks.iter().find(|known| known.name == framework) else {
            return Err(self.unknown("framework", framework, self.frameworks.iter().map(|known| &*known.name)));
        };
        let begun = |stack: &&StackFrom| year.is_none_or(|year| stack.from <= year);
        let stack = known.stacks.iter().rev().find(begun).or(known.stacks.first());
        Ok(stack.map_or("", |stack| &stack.stack))
    }

    fn unknown<'a>(&self, kind: &str, name: &str, known: impl Iterator<Item = &'a str>) -> Problem {
        if let Some(unsupported) = self.unsupported.iter().find(|unsupported| unsupported.name == name) {
            return Problem::new(unsupported.reason.clone(), format!("{kind} `{name}`"), "leave the run out");
        }
        let help = format!("nearest: {}", nearest(known, name));
        Problem::new(format!("the {kind} is not known"), format!("`{name}`"), help)
    }
}
