//! Fitted numbers put into the profiles' files.

use std::error::Error;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use planner::interval::format_name;

use crate::constants::{Constant, DERIVED, Derived, Scoped};
use crate::report::{Width, Widths, tells};
use crate::{Sample, uses};

/// Where profiles lie.
const FOLDER: &str = "hardware-profiles";

/// Puts values into the profiles' files: `field: Origin(VALUE, "source")` keeps its field and gets a new rest.
pub fn write(constants: &[Scoped], values: &[f64], samples: &[Sample]) -> Result<(), Box<dyn Error>> {
    for (Scoped { profile, constant }, value) in constants.iter().zip(values) {
        let runs = samples.iter().filter(|sample| uses(sample, profile)).count();
        let source = format!("least error of step times on {runs} runs of tests/published/runs.csv");
        let entry = format!("Fitted({}, \"{source}; planner/examples/fit\"),", shown(constant, *value));
        replace(profile, |text| Some((entry_of(text, constant.field)?, entry.clone())))?;
        for derived in
            DERIVED.iter().filter(|derived| derived.of == *profile && derived.fields.contains(&constant.field))
        {
            write_derived(derived, constant, *value, &entry)?;
        }
    }
    Ok(())
}

/// Puts a fitted number into a profile that takes it from another.
fn write_derived(derived: &Derived, constant: &Constant, value: f64, entry: &str) -> Result<(), Box<dyn Error>> {
    replace(derived.profile, |text| {
        let place = entry_of(text, constant.field)?;
        let Some(factor) = derived.factor else { return Some((place, entry.to_owned())) };
        let begin = place.start + text[place.clone()].find('(')? + 1;
        let end = place.start + text[place.clone()].find(", \"")?;
        Some((begin..end, shown(constant, value * factor)))
    })
}

/// A value as files have it, with its unit.
fn shown(constant: &Constant, value: f64) -> String {
    let (unit, scale) = constant.unit;
    let number = format!("{:.4}", value / scale);
    let number = number.trim_end_matches('0').trim_end_matches('.');
    if unit.is_empty() { number.to_owned() } else { format!("{unit}({number})") }
}

/// The rest of the line after `field: `, in its section where the field names one.
fn entry_of(text: &str, field: &str) -> Option<Range<usize>> {
    let (section, field) = field.split_once('.').unwrap_or(("", field));
    let start = if section.is_empty() { 0 } else { text.find(&format!(" {section}: ("))? };
    let key = format!(" {field}: ");
    let begin = start + text[start..].find(&key)? + key.len();
    Some(begin..begin + text[begin..].find('\n')?)
}

fn path_of(profile: &str) -> Result<PathBuf, Box<dyn Error>> {
    let folders = ["stacks", "devices", "clusters"].map(|folder| Path::new(FOLDER).join(folder));
    let mut paths = folders.map(|folder| folder.join(format!("{profile}.ron"))).into_iter();
    Ok(paths.find(|path| path.exists()).ok_or_else(|| format!("{profile} has no file"))?)
}

/// Replaces a range of a profile's text.
fn replace(profile: &str, change: impl Fn(&str) -> Option<(Range<usize>, String)>) -> Result<(), Box<dyn Error>> {
    let path = path_of(profile)?;
    let mut text = fs::read_to_string(&path)?;
    let (place, new) = change(&text).ok_or_else(|| format!("{} lacks a field", path.display()))?;
    text.replace_range(place, &new);
    Ok(fs::write(path, text)?)
}

/// Puts widths of intervals into the stacks' files, and what they are widened by into its own.
pub fn write_widths(samples: &[Sample], widths: &Widths) -> Result<(), Box<dyn Error>> {
    widths.stacks.iter().try_for_each(|width| write_interval(samples, width))?;
    let path = Path::new(FOLDER).join("interval.ron");
    let mut text = fs::read_to_string(&path)?;
    for (field, value) in [("blank", widths.blank), ("outside", widths.outside)] {
        let key = format!("  {field}: Fitted(");
        let begin = text.find(&key).ok_or("interval.ron lacks a field")? + key.len();
        let end = begin + text[begin..].find(", \"").ok_or("interval.ron lacks a source")?;
        text.replace_range(begin..end, &format!("{value:.2}"));
    }
    Ok(fs::write(path, text)?)
}

/// Puts the width of an interval into the stack's file, with what the runs behind it had.
fn write_interval(samples: &[Sample], width: &Width) -> Result<(), Box<dyn Error>> {
    let of_stack = || {
        let all = (0..samples.len()).filter(|index| tells(samples, *index)).map(|index| &samples[index]);
        all.filter(|sample| sample.case.request.machine.stack.name == width.stack)
    };
    let list = |name: fn(&Sample) -> &str| {
        let mut names: Vec<String> = of_stack().map(|sample| format!("\"{}\"", name(sample))).collect();
        names.sort();
        names.dedup();
        names.join(", ")
    };
    let format: fn(&Sample) -> &str = |sample| {
        let request = &sample.case.request;
        format_name(request.machine.matmul_format, request.model.dtype)
    };
    let entry = format!(
        "  relative_error_90: Fitted({:.3}, \"90 % of {} runs of tests/published/runs.csv, held out of a fit in folds of \
         configurations; planner/examples/fit, --folds\"),\n  compared: (\n    devices: [{}],\n    frameworks: [{}],\n    \
         formats: [{}],\n    most_gpus: {},\n  ),\n)\n",
        width.value,
        width.runs,
        list(|sample| &sample.case.request.machine.device.name),
        list(|sample| &sample.case.framework),
        list(format),
        of_stack().map(|sample| sample.case.request.gpus).max().unwrap_or(0),
    );
    replace(&width.stack, |text| Some((text.find("  relative_error_90: ")?..text.len(), entry.clone())))
}
