//! What SLURM says in lists: hosts of a job and tasks of each host.

/// First host of the step's (else the job's) list of hosts, such as `gpu[007-009,12],login1`.
pub fn first_host(lookup: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let list =
        lookup("SLURM_STEP_NODELIST").or_else(|| lookup("SLURM_JOB_NODELIST")).or_else(|| lookup("SLURM_NODELIST"))?;
    let (mut host, mut inside, mut taken) = (String::new(), false, false);
    for letter in list.trim().chars() {
        match letter {
            '[' => (inside, taken) = (true, true),
            ']' => inside = false,
            ',' | '-' if inside => taken = false,
            ',' => break,
            _ if !inside || taken => host.push(letter),
            _ => {}
        }
    }
    Some(host).filter(|host| !host.is_empty())
}

/// Tasks of a node, from lists such as `4(x2),1`.
pub fn tasks_of_node(node: u64, lookup: &dyn Fn(&str) -> Option<String>) -> Option<u64> {
    let list = lookup("SLURM_STEP_TASKS_PER_NODE").or_else(|| lookup("SLURM_TASKS_PER_NODE"))?;
    let mut first = 0;
    for entry in list.split(',') {
        let (tasks, nodes) = match entry.trim().split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.trim_end_matches(')').parse().ok()?),
            None => (entry.trim(), 1),
        };
        first += nodes;
        if node < first {
            return tasks.parse().ok();
        }
    }
    None
}

/// A port below the ephemeral range that steps of different jobs seldom share.
pub fn port_of_job(lookup: &dyn Fn(&str) -> Option<String>) -> u16 {
    let number = |name: &str| lookup(name).and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0);
    let offset = (number("SLURM_JOB_ID") * 16 + number("SLURM_STEP_ID") % 16) % 12_000;
    20_000 + u16::try_from(offset).expect("below 12000")
}
