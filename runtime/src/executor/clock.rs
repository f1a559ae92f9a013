//! Where the time of a step goes: seconds by account, read from the clock where the account changes.

use std::time::Instant;

use hardware_profiles::device::OperatorClass;

/// What a rank does for a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Account {
    /// Operators of a kind.
    Operator(Work, Phase),
    /// Collectives of the tensor axis, the wait for other ranks included.
    Tensor,
    /// Gradients summed and parameters gathered over replicas, as far as the rank waits for it.
    Data,
    /// Messages between stages, the wait for them included.
    Pipeline,
    /// Sum of squares and optimizer.
    Optimizer,
    /// Values passed between blocks, at the ends of passes.
    MicroBatch,
    /// Loss and norm summed over ranks, and what else happens once a step.
    Step,
}

/// A kind of operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Matrix products.
    Product,
    /// The attention core in one operator.
    Attention,
    /// All others.
    Class(OperatorClass),
}

/// Why an operator is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Forward pass.
    Forward,
    /// Backward pass.
    Backward,
    /// Forward pass repeated in backward.
    Recomputation,
}

/// Kinds of operators.
const WORKS: usize = 2 + OperatorClass::ALL.len();
/// Phases.
const PHASES: usize = 3;
/// Accounts.
const ACCOUNTS: usize = WORKS * PHASES + 6;

/// Seconds by account.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times([f64; ACCOUNTS]);

impl Default for Times {
    fn default() -> Times {
        Times([0.0; ACCOUNTS])
    }
}

/// A clock that charges the time since its last reading.
#[derive(Clone, Debug)]
pub struct Clock {
    last: Instant,
    times: Times,
}

impl Account {
    fn number(self) -> usize {
        let operators = WORKS * PHASES;
        match self {
            Account::Operator(work, phase) => work.number() * PHASES + phase as usize,
            Account::Tensor => operators,
            Account::Data => operators + 1,
            Account::Pipeline => operators + 2,
            Account::Optimizer => operators + 3,
            Account::MicroBatch => operators + 4,
            Account::Step => operators + 5,
        }
    }
}

impl Work {
    /// All kinds.
    pub fn all() -> impl Iterator<Item = Work> {
        [Work::Product, Work::Attention].into_iter().chain(OperatorClass::ALL.into_iter().map(Work::Class))
    }

    fn number(self) -> usize {
        match self {
            Work::Product => 0,
            Work::Attention => 1,
            Work::Class(class) => 2 + class as usize,
        }
    }
}

impl Times {
    /// Seconds of an account.
    pub fn of(&self, account: Account) -> f64 {
        self.0[account.number()]
    }

    /// Seconds of all operators of a phase.
    pub fn of_phase(&self, phase: Phase) -> f64 {
        Work::all().map(|work| self.of(Account::Operator(work, phase))).sum()
    }

    /// Seconds of all accounts.
    pub fn total(&self) -> f64 {
        self.0.iter().sum()
    }

    /// The numbers, for an exchange between ranks.
    pub fn numbers(&self) -> &[f64] {
        &self.0
    }

    /// The numbers, to be set.
    pub fn numbers_mut(&mut self) -> &mut [f64] {
        &mut self.0
    }

    /// By account the median of several steps, so that what disturbed one step alone does not count, in the
    /// proportion in which they add up to the median of whole steps: delays meet another account in each step, and are
    /// in the median of none.
    pub fn typical(steps: &[Times]) -> Times {
        let middle = |mut seconds: Vec<f64>| {
            seconds.sort_by(f64::total_cmp);
            seconds.get(seconds.len() / 2).copied().unwrap_or(0.0)
        };
        let mut typical = Times::default();
        for (account, median) in typical.0.iter_mut().enumerate() {
            *median = middle(steps.iter().map(|times| times.0[account]).collect());
        }
        let (whole, parts) = (middle(steps.iter().map(Times::total).collect()), typical.total());
        if parts > 0.0 {
            typical.0.iter_mut().for_each(|seconds| *seconds *= whole / parts);
        }
        typical
    }
}

impl Clock {
    /// A clock that runs from now on.
    pub fn start() -> Clock {
        Clock { last: Instant::now(), times: Times::default() }
    }

    /// Charges the time since the last reading.
    pub fn charge(&mut self, account: Account) {
        let now = Instant::now();
        self.times.0[account.number()] += (now - self.last).as_secs_f64();
        self.last = now;
    }

    /// The charges so far.
    pub fn times(&self) -> Times {
        self.times
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accounts() -> Vec<Account> {
        let phases = [Phase::Forward, Phase::Backward, Phase::Recomputation];
        let operators = Work::all().flat_map(|work| phases.map(|phase| Account::Operator(work, phase)));
        let others =
            [Account::Tensor, Account::Data, Account::Pipeline, Account::Optimizer, Account::MicroBatch, Account::Step];
        operators.chain(others).collect()
    }

    #[test]
    fn every_account_has_a_place_of_its_own() {
        let mut numbers: Vec<usize> = accounts().into_iter().map(Account::number).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..ACCOUNTS).collect::<Vec<_>>());
    }

    #[test]
    fn charges_add_up_to_the_time_that_passed() {
        let start = Instant::now();
        let mut clock = Clock::start();
        for account in accounts() {
            std::thread::sleep(std::time::Duration::from_micros(100));
            clock.charge(account);
        }
        let times = clock.times();
        assert!(accounts().into_iter().all(|account| times.of(account) >= 1e-4), "{times:?}");
        assert!(times.total() <= start.elapsed().as_secs_f64());
    }

    #[test]
    fn one_slow_step_leaves_the_typical_one() {
        let step = |seconds: f64| Times([seconds; ACCOUNTS]);
        for (steps, expected) in [(vec![], 0.0), (vec![1.0], 1.0), (vec![1.0, 9.0, 2.0], 2.0)] {
            let steps: Vec<Times> = steps.into_iter().map(step).collect();
            assert_eq!(Times::typical(&steps), step(expected));
        }
    }

    #[test]
    fn a_typical_step_takes_the_median_of_steps_although_its_parts_take_turns_to_be_slow() {
        let steps: Vec<Times> = (0..3)
            .map(|slow| {
                let mut times = Times([0.0; ACCOUNTS]);
                (0..3).for_each(|account| times.0[account] = if account == slow { 4.0 } else { 1.0 });
                times
            })
            .collect();
        assert!((Times::typical(&steps).total() - 6.0).abs() < 1e-12);
    }
}
