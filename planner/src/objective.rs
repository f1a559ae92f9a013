//! What layouts are judged by beside the time of a step: GPU-hours, money and energy.
//!
//! For one number of GPUs all of them rise with the time of a step, so that a search has one optimum whatever the
//! objective; they differ when numbers of GPUs are compared.

use cost_models::machine::Machine;
use ir::error::Problem;
use ir::provenance::Provenance;
use ir::units::{Joules, Seconds, UsDollars};

/// Seconds of an hour.
const HOUR: f64 = 3600.0;

/// What is to be small; tokens per GPU-hour are to be many, so GPU-hours for the same tokens few.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Objective {
    /// Time.
    #[default]
    Step,
    /// Tokens per GPU-hour.
    TokensPerGpuHour,
    /// Money.
    Cost,
    /// Energy of the accelerators.
    Energy,
}

/// What some time on some GPUs takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expense {
    /// How long.
    pub time: Seconds,
    /// GPUs times hours.
    pub gpu_hours: f64,
    /// At the cluster's price, if it has one.
    pub cost: Option<UsDollars>,
    /// Of the accelerators at their boards' limit, if the device's is known. Hosts, network and cooling are not in it.
    pub energy: Option<Joules>,
}

impl Objective {
    /// The word used in flags and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Objective::Step => "step",
            Objective::TokensPerGpuHour => "tokens-per-gpu-hour",
            Objective::Cost => "cost",
            Objective::Energy => "energy",
        }
    }

    /// The value of equal work that is to be small; `None` if the profiles do not tell it.
    pub fn of(self, expense: &Expense) -> Option<f64> {
        match self {
            Objective::Step => Some(expense.time.0),
            Objective::TokensPerGpuHour => Some(expense.gpu_hours),
            Objective::Cost => expense.cost.map(|cost| cost.0),
            Objective::Energy => expense.energy.map(|energy| energy.0),
        }
    }
}

/// What `time` on `gpus` GPUs takes.
pub fn expense(machine: &Machine, gpus: u64, time: Seconds) -> Expense {
    let gpu_hours = gpus as f64 * time.0 / HOUR;
    Expense {
        time,
        gpu_hours,
        cost: machine.cluster.price_per_gpu_hour.as_ref().map(|price| price.value * gpu_hours),
        energy: machine.device.board_power.as_ref().map(|power| power.value * (time * gpus as f64)),
    }
}

/// Where price and power come from, as far as they are known.
pub fn expense_provenance(machine: &Machine) -> [Option<Provenance>; 2] {
    [
        machine.cluster.price_per_gpu_hour.as_ref().map(|price| price.provenance),
        machine.device.board_power.as_ref().map(|power| power.provenance),
    ]
}

/// Refuses an objective that the profiles do not tell.
///
/// # Errors
/// A problem that names the field to fill.
pub fn check_objective(objective: Objective, machine: &Machine) -> Result<(), Problem> {
    let (profile, name, field, example) = match objective {
        Objective::Step | Objective::TokensPerGpuHour => return Ok(()),
        Objective::Cost if machine.cluster.price_per_gpu_hour.is_some() => return Ok(()),
        Objective::Energy if machine.device.board_power.is_some() => return Ok(()),
        Objective::Cost => ("cluster", &machine.cluster.name, "price_per_gpu_hour", "UsDollars(2.5)"),
        Objective::Energy => ("device", &machine.device.name, "board_power", "Watts(700)"),
    };
    Err(Problem::new(
        format!("{profile} {name} has no {field}, which objective {} needs", objective.name()),
        format!("--objective {}", objective.name()),
        format!("write `{field}: Assumed({example}, \"…\")` into a {profile} of a --cluster file, or choose another"),
    ))
}
