//! Which rank was missing first, from what all of them last said.

use std::time::Duration;

use super::super::error::Cause;
use super::millis;

/// A rank that has missed so many heartbeats is missing, whatever else it said before.
const SILENCE: Duration = Duration::from_millis(1500);

/// What is known of a rank.
pub struct Known {
    /// Time since its last sign of life.
    pub silence: Duration,
    /// Ranks that it waits for, those waited for longest first.
    pub waits: Vec<u64>,
}

/// The rank that was missing first, given that some rank misses `suspect` because of `cause`.
///
/// A silent rank comes first. Otherwise the suspect may itself wait for another one: the chain of waits is
/// followed to a rank that waits for nobody, or around a circle back to the suspect.
pub fn judge(known: &[Known], suspect: u64, cause: Cause) -> (u64, Cause) {
    let silent = known.iter().zip(0..).map(|(rank, number)| (rank.silence, number)).max();
    if let Some((silence, number)) = silent
        && silence > SILENCE
    {
        return (number, Cause::Silent(millis(silence)));
    }
    let Cause::Late(_) = cause else { return (suspect, cause) };
    let mut chain = vec![suspect];
    while let Some(next) = next_in_chain(known, chain[chain.len() - 1]) {
        if chain.contains(&next) {
            return (suspect, cause);
        }
        chain.push(next);
    }
    (chain[chain.len() - 1], cause)
}

fn next_in_chain(known: &[Known], rank: u64) -> Option<u64> {
    known.get(usize::try_from(rank).ok()?)?.waits.first().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_missing_rank() {
        let late = || Cause::Late(5000);
        // Rank by rank: milliseconds of silence, and the rank it waits for.
        type Row = (&'static [(u64, Option<u64>)], u64, Cause, u64, bool);
        let rows: [Row; 6] = [
            (&[(0, Some(1)), (100, None)], 1, late(), 1, false),
            (&[(0, Some(1)), (100, Some(2)), (100, None)], 1, late(), 2, false),
            (&[(0, Some(1)), (100, Some(2)), (100, Some(1))], 1, late(), 1, false),
            (&[(0, Some(1)), (100, Some(2)), (2000, Some(3)), (0, None)], 1, late(), 2, true),
            (&[(0, Some(1)), (100, Some(2)), (100, None)], 1, Cause::Ended, 1, false),
            (&[(0, None), (100, None), (4000, None), (4900, None)], 1, late(), 3, true),
        ];
        for (row, (ranks, suspect, cause, expected, silent)) in rows.into_iter().enumerate() {
            let known: Vec<Known> = ranks
                .iter()
                .map(|(silence, wait)| Known {
                    silence: Duration::from_millis(*silence),
                    waits: wait.iter().copied().collect(),
                })
                .collect();
            let (rank, cause) = judge(&known, suspect, cause);
            assert_eq!((rank, matches!(cause, Cause::Silent(_))), (expected, silent), "row {row}");
        }
    }
}
