//! Settings in files of nested sections, JSON or TOML, read by their paths.

use std::collections::BTreeSet;

use ir::error::Problem;
use ir::model::SIZE_LIMIT;
use serde_json::{Map, Value};

/// What some programs write where they decide themselves.
const AUTO: &str = "auto";

/// A file's settings, and what was wrong so far.
#[derive(Debug)]
pub(super) struct Tree {
    origin: String,
    root: Map<String, Value>,
    asked: BTreeSet<&'static str>,
    /// What was wrong so far.
    pub problems: Vec<Problem>,
}

impl Tree {
    /// Settings of a file; `origin` names it in errors.
    pub(super) fn new(root: Map<String, Value>, origin: &str) -> Tree {
        Tree { origin: origin.to_owned(), root, asked: BTreeSet::new(), problems: Vec::new() }
    }

    /// The value at a path such as `training.seq_len`; `None` where absent, null or left to the program.
    pub(super) fn value(&mut self, path: &'static str) -> Option<Value> {
        self.asked.insert(path);
        let mut names = path.split('.');
        let mut found = self.root.get(names.next()?)?;
        for name in names {
            found = found.as_object()?.get(name)?;
        }
        (!found.is_null() && found.as_str() != Some(AUTO)).then(|| found.clone())
    }

    /// A whole number from 1 on.
    pub(super) fn count(&mut self, path: &'static str) -> Option<u64> {
        self.parsed(path, &format!("a whole number from 1 to {SIZE_LIMIT}"), |value| {
            // JSON files write 5e8 too.
            let number = value.as_u64().or(value.as_f64().filter(|n| n.fract() == 0.0 && *n >= 0.0).map(|n| n as u64));
            number.filter(|number| (1..=SIZE_LIMIT).contains(number))
        })
    }

    /// A whole number from 1 on, or a number below 1 for "decide yourself".
    pub(super) fn count_or_open(&mut self, path: &'static str) -> Option<u64> {
        let open = self.value(path)?.as_i64().is_some_and(|number| number < 1);
        if open { None } else { self.count(path) }
    }

    /// A switch.
    pub(super) fn switch(&mut self, path: &'static str) -> Option<bool> {
        self.parsed(path, "true or false", Value::as_bool)
    }

    /// A text.
    pub(super) fn text(&mut self, path: &'static str) -> Option<String> {
        self.parsed(path, "a text in quotation marks", |value| value.as_str().map(str::to_owned))
    }

    /// One of some words, capitals and small letters alike.
    pub(super) fn word(&mut self, path: &'static str, words: &[&'static str]) -> Option<&'static str> {
        let text = self.text(path)?;
        let found = words.iter().find(|word| word.eq_ignore_ascii_case(&text)).copied();
        if found.is_none() {
            self.refuse(format!("{path} is `{text}`"), path, format!("legal values: {}", words.join(", ")));
        }
        found
    }

    fn parsed<T>(&mut self, path: &'static str, kind: &str, read: impl Fn(&Value) -> Option<T>) -> Option<T> {
        let value = self.value(path)?;
        let found = read(&value);
        if found.is_none() {
            self.refuse(format!("{path} is {value}"), path, format!("give {kind}"));
        }
        found
    }

    /// The first of some paths of the same setting that has a number.
    pub(super) fn first_count(&mut self, paths: &[&'static str]) -> Option<u64> {
        let found: Vec<Option<u64>> = paths.iter().map(|path| self.count(path)).collect();
        found.into_iter().flatten().next()
    }

    /// Whether any of some switches is on; all of them count as read.
    pub(super) fn any(&mut self, paths: &[&'static str]) -> bool {
        paths.iter().filter(|path| self.switch(path).unwrap_or(false)).count() > 0
    }

    /// Notes something that the program would refuse.
    pub(super) fn refuse(&mut self, what: impl Into<String>, path: &str, help: impl Into<String>) {
        self.problems.push(Problem::new(what, format!("{}, {path}", self.origin), help));
    }

    /// Paths of values that nothing has asked for.
    pub(super) fn rest(&self) -> Vec<String> {
        let mut paths = Vec::new();
        leaves("", &self.root, &mut paths);
        let told = |path: &String| {
            self.asked
                .iter()
                .any(|asked| path.strip_prefix(asked).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
        };
        paths.retain(|path| !told(path));
        paths
    }

    /// Paths that something has asked for, given or not.
    pub(super) fn asked(&self) -> impl Iterator<Item = &'static str> {
        self.asked.iter().copied()
    }
}

/// Paths of all values that are no sections; an empty section is a value.
fn leaves(path: &str, fields: &Map<String, Value>, paths: &mut Vec<String>) {
    for (name, value) in fields {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        match value {
            Value::Object(inner) if !inner.is_empty() => leaves(&path, inner, paths),
            _ => paths.push(path),
        }
    }
}
