//! Damaged plan texts: an error that points at the place, or a sound plan; never a panic or a hang.
//!
//! Runs for `FUZZ_SECONDS` (60 by default; 600 for a long run).

use std::time::{Duration, Instant};

use ir::plan::read_plan;
use ir::verify::verify;

const DEFAULT_SECONDS: u64 = 60;
/// Longest that one text may take.
const LIMIT: Duration = Duration::from_secs(10);

/// A sequence of pseudo-random numbers (xorshift; Marsaglia 2003).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit.max(1) as u64) as usize
    }
}

fn texts() -> Vec<String> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");
    let entries = std::fs::read_dir(folder).expect("the golden folder exists");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("readable").path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read_to_string(path).expect("UTF-8")).collect()
}

/// A text with a few changes: bytes and lines dropped, doubled and moved, numbers made extreme.
fn damaged(text: &str, random: &mut Random) -> String {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    for _ in 0..=random.below(3) {
        let line = random.below(lines.len());
        let other = random.below(lines.len());
        match random.below(7) {
            0 => drop(lines.remove(line)),
            1 => lines.insert(line, lines[other].clone()),
            2 => lines.swap(line, other),
            3 => lines.truncate(line.max(1)),
            4 => lines[line] = change_number(&lines[line], random),
            5 => lines[line] = change_number(&lines[line], random),
            _ => {
                let characters: Vec<char> = lines[line].chars().collect();
                let at = random.below(characters.len());
                lines[line] = characters.iter().enumerate().filter(|(i, _)| *i != at).map(|(_, c)| *c).collect();
            }
        }
        if lines.is_empty() {
            break;
        }
    }
    lines.join("\n")
}

fn change_number(line: &str, random: &mut Random) -> String {
    let digits: Vec<usize> = line.char_indices().filter(|(_, c)| c.is_ascii_digit()).map(|(at, _)| at).collect();
    if digits.is_empty() {
        return line.to_owned();
    }
    let at = digits[random.below(digits.len())];
    let values = ["0", "1", "2", "3", "7", "-1", "4294967295", "18446744073709551615", "1e308", "99999999999999999999"];
    let end = line[at..].find(|c: char| !c.is_ascii_digit()).map_or(line.len(), |length| at + length);
    format!("{}{}{}", &line[..at], values[random.below(values.len())], &line[end..])
}

#[test]
fn damaged_plans_are_errors() {
    let seconds = std::env::var("FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(DEFAULT_SECONDS);
    let end = Instant::now() + Duration::from_secs(seconds);
    let texts = texts();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut malformed, mut rejected, mut sound) = (0u64, 0u64, 0u64);
    while Instant::now() < end {
        let text = damaged(&texts[random.below(texts.len())], &mut random);
        let started = Instant::now();
        match read_plan(&text, "damaged.plan.ron") {
            Err(error) => {
                malformed += 1;
                assert!(error.problems()[0].location.contains("damaged.plan.ron"), "{error}");
            }
            Ok(plan) => match verify(&plan, "damaged.plan.ron").first() {
                Some(problem) => {
                    rejected += 1;
                    assert!(problem.location.contains("damaged.plan.ron"), "{problem}");
                }
                None => sound += 1,
            },
        }
        assert!(started.elapsed() < LIMIT, "took {:?}:\n{text}", started.elapsed());
    }
    println!("{malformed} malformed, {rejected} rejected, {sound} sound");
    assert!(malformed > 0 && rejected > 0);
}
