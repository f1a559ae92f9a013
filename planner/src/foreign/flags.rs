//! Command-line flags as Python's argparse reads them: `--flag`, `--flag value`, `--flag=value`, quoted as in a shell.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use ir::error::Problem;
use ir::model::SIZE_LIMIT;

/// What flags start with.
const DASHES: &str = "--";
/// End of the names of scripts, before which flags belong to the launcher.
const SCRIPT: &str = ".py";

/// Flags with their values, and what was wrong so far.
#[derive(Debug)]
pub struct Flags {
    origin: String,
    given: BTreeMap<String, Vec<String>>,
    asked: BTreeSet<&'static str>,
    launcher: BTreeMap<String, Vec<String>>,
    /// What was wrong so far.
    pub problems: Vec<Problem>,
    /// What is odd but has a meaning.
    pub warnings: Vec<String>,
}

impl Flags {
    /// Splits a command line as a shell does; `origin` names it in errors.
    ///
    /// The flags of a launcher before the last script are kept apart.
    ///
    /// # Errors
    /// A quotation mark is not closed, or a word belongs to no flag.
    pub fn read(text: &str, origin: &str) -> Result<Flags, Problem> {
        let help = "close each quotation mark, and quote the whole once more for the shell";
        // The crate makes an empty word of a continued line that the shell joins.
        let joined = text.replace("\\\r\n", " ").replace("\\\n", " ");
        let words = shlex::split(&joined)
            .ok_or_else(|| Problem::new("a quotation mark or a backslash has no end", origin, help))?;
        let start = words.iter().rposition(|word| word.ends_with(SCRIPT)).map_or(0, |script| script + 1);
        let mut flags = Flags {
            origin: origin.to_owned(),
            given: BTreeMap::new(),
            asked: BTreeSet::new(),
            launcher: BTreeMap::new(),
            problems: Vec::new(),
            warnings: Vec::new(),
        };
        for (name, values) in grouped(&words[..start]).1 {
            flags.launcher.insert(name, values);
        }
        let (stray, given) = grouped(&words[start..]);
        if let Some(word) = stray.first() {
            let what = format!("`{word}` belongs to no flag");
            flags.problems.push(Problem::new(
                what,
                origin,
                "start with a flag such as --num-layers, or with a .py file",
            ));
        }
        for (name, values) in given {
            if flags.given.insert(name.clone(), values).is_some() {
                flags.warnings.push(format!("{name} is given twice; the last one counts"));
            }
        }
        Ok(flags)
    }

    /// Whether a flag without a value is given.
    pub fn has(&mut self, name: &'static str) -> bool {
        self.asked.insert(name);
        let Some(values) = self.given.get(name) else { return false };
        if let Some(value) = values.first() {
            let what = format!("{name} takes no value, but `{value}` follows it");
            self.refuse(what, name, "remove the value");
        }
        true
    }

    /// Whether a flag is given, whatever follows it.
    pub fn mentions(&mut self, name: &'static str) -> bool {
        self.asked.insert(name);
        self.given.contains_key(name)
    }

    /// Whether any of some flags without a value is given; all of them count as read.
    pub fn has_any(&mut self, names: &[&'static str]) -> bool {
        names.iter().filter(|name| self.has(name)).count() > 0
    }

    /// Whether any of some flags is given, whatever follows it; all of them count as read.
    pub fn mentions_any(&mut self, names: &[&'static str]) -> bool {
        names.iter().filter(|name| self.mentions(name)).count() > 0
    }

    /// The value of a flag as text.
    pub fn text(&mut self, name: &'static str) -> Option<String> {
        self.asked.insert(name);
        let values = self.given.get(name)?.clone();
        match values.as_slice() {
            [value] => Some(value.clone()),
            [] => {
                self.refuse(format!("{name} has no value"), name, "write its value after it");
                None
            }
            [first, second, ..] => {
                self.refuse(format!("{name} has two values, `{first}` and `{second}`"), name, "give it one value");
                None
            }
        }
    }

    /// The values of a flag that takes several.
    pub fn texts(&mut self, name: &'static str) -> Vec<String> {
        self.asked.insert(name);
        self.given.get(name).cloned().unwrap_or_default()
    }

    /// A whole number from 1 on.
    pub fn count(&mut self, name: &'static str) -> Option<u64> {
        let in_range = |number: &u64| (1..=SIZE_LIMIT).contains(number);
        self.parsed(name, &format!("a whole number from 1 to {SIZE_LIMIT}"), in_range)
    }

    /// A whole number from 0 on; 0 means none.
    pub fn count_or_none(&mut self, name: &'static str) -> Option<u64> {
        let in_range = |number: &u64| *number <= SIZE_LIMIT;
        self.parsed(name, &format!("a whole number to {SIZE_LIMIT}"), in_range).filter(|number| *number > 0)
    }

    /// A finite number.
    pub fn number(&mut self, name: &'static str) -> Option<f64> {
        self.parsed(name, "a number", |number: &f64| number.is_finite())
    }

    /// One of some words.
    pub fn word(&mut self, name: &'static str, words: &[&'static str]) -> Option<&'static str> {
        let text = self.text(name)?;
        let found = words.iter().find(|word| **word == text).copied();
        if found.is_none() {
            self.refuse(format!("{name} {text} is not known"), name, format!("legal values: {}", words.join(", ")));
        }
        found
    }

    /// The first of some flags for the same thing that is given.
    pub fn first_count(&mut self, names: &[&'static str]) -> Option<u64> {
        let found: Vec<Option<u64>> = names.iter().map(|name| self.count(name)).collect();
        found.into_iter().flatten().next()
    }

    fn parsed<T: FromStr>(&mut self, name: &'static str, kind: &str, legal: impl Fn(&T) -> bool) -> Option<T> {
        let text = self.text(name)?;
        // Python reads 220_000_000 as a number.
        let value = text.replace('_', "").parse().ok().filter(legal);
        if value.is_none() {
            let help = match text.contains('$') {
                true => format!("give {kind}; variables must be replaced before"),
                false => format!("give {kind}"),
            };
            self.refuse(format!("{name} is `{text}`"), name, help);
        }
        value
    }

    /// Notes something that the program would refuse.
    pub fn refuse(&mut self, what: impl Into<String>, name: &str, help: impl Into<String>) {
        self.problems.push(Problem::new(what, format!("{}, {name}", self.origin), help));
    }

    /// A number that the launcher before the script was given.
    pub fn launched(&self, names: &[&str]) -> Option<u64> {
        names.iter().find_map(|name| self.launcher.get(*name)?.first()?.parse().ok())
    }

    /// Flags that nothing has asked for.
    pub fn rest(&self) -> impl Iterator<Item = &str> {
        self.given.keys().map(String::as_str).filter(|name| !self.asked.contains(name))
    }

    /// Flags that something has asked for, given or not.
    pub fn asked(&self) -> impl Iterator<Item = &'static str> {
        self.asked.iter().copied()
    }
}

/// Words before the first flag, and flags with the words after each.
fn grouped(words: &[String]) -> (Vec<String>, Vec<(String, Vec<String>)>) {
    let (mut stray, mut given) = (Vec::new(), Vec::<(String, Vec<String>)>::new());
    // A flag quoted together with its value, as in bash arrays.
    let split = |word: &String| -> Vec<String> {
        match word.starts_with(DASHES) && word.contains(char::is_whitespace) && !word.contains('=') {
            true => shlex::split(word).unwrap_or_else(|| vec![word.clone()]),
            false => vec![word.clone()],
        }
    };
    for word in words.iter().flat_map(split) {
        if word.starts_with(DASHES) {
            match word.split_once('=') {
                Some((name, value)) => given.push((name.to_owned(), vec![value.to_owned()])),
                None => given.push((word, Vec::new())),
            }
        } else {
            match given.last_mut() {
                Some((_, values)) => values.push(word),
                None => stray.push(word),
            }
        }
    }
    (stray, given)
}
