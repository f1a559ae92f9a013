//! Settings that a reader does not read itself, by what they mean for a prediction.

use ir::error::Problem;
use ir::text::read_ron;
use serde::Deserialize;

use super::{Settings, near};

/// Lists of names; a name stands for everything inside it too.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Others {
    /// Neither time nor memory depends on them.
    no_effect: Vec<String>,
    /// They change a step, but a prediction does not follow them; with what is assumed instead.
    assumed: Vec<(String, Vec<String>)>,
    /// With them the model or the run cannot be represented; with the reason.
    unrepresentable: Vec<(String, Vec<String>)>,
}

impl Others {
    /// Reads lists that are part of this program.
    pub(super) fn read(text: &str, name: &str) -> Others {
        read_ron(text, name).expect("a test of each reader reads its lists")
    }

    /// Sorts names that nothing has read; `asked` are those that the reader knows. Gives what cannot be represented.
    pub(super) fn sort<'a>(
        &'a self,
        rest: impl IntoIterator<Item = String>,
        asked: impl Iterator<Item = &'a str> + Clone,
        origin: &str,
        settings: &mut Settings,
    ) -> Vec<Problem> {
        let mut problems = Vec::new();
        for name in rest {
            if self.no_effect.iter().any(|known| holds(known, &name)) {
                settings.no_effect.push(name);
            } else if let Some(reason) = reason(&self.assumed, &name) {
                settings.assumed.push((name, reason.to_owned()));
            } else if let Some(reason) = reason(&self.unrepresentable, &name) {
                let help = "leave it out to predict the run without it";
                problems.push(Problem::new(format!("{name}: {reason}"), format!("{origin}, {name}"), help));
            } else {
                let near = near(self.names().chain(asked.clone()), &name);
                settings.unknown.push((name, near));
            }
        }
        problems
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        let grouped = self.assumed.iter().chain(&self.unrepresentable).flat_map(|(_, names)| names);
        self.no_effect.iter().chain(grouped).map(String::as_str)
    }
}

/// Asserts that no name is listed twice, or both listed and read.
#[cfg(test)]
pub(super) fn assert_disjoint(others: &Others, asked: &[&str]) {
    let mut listed: Vec<&str> = others.names().collect();
    listed.sort_unstable();
    let twice: Vec<_> = listed.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| pair[0]).collect();
    assert!(twice.is_empty(), "listed twice: {twice:?}");
    let both: Vec<_> = listed.iter().filter(|name| asked.contains(name)).collect();
    assert!(both.is_empty(), "listed and read: {both:?}");
}

fn reason<'a>(groups: &'a [(String, Vec<String>)], name: &str) -> Option<&'a str> {
    let group = groups.iter().find(|(_, names)| names.iter().any(|known| holds(known, name)));
    group.map(|(reason, _)| reason.as_str())
}

/// Whether a known name is a name or one of its sections.
fn holds(known: &str, name: &str) -> bool {
    name.strip_prefix(known).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}
