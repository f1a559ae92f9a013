//! The file that `--cluster` takes: a cluster whose device is built in, or a cluster together with its device and,
//! where its speeds were measured with one software, that software's stack.

use ir::text::{read_ron, write_ron};
use serde::{Deserialize, Serialize};

use crate::cluster::ClusterProfile;
use crate::device::DeviceProfile;
use crate::library::{
    Error, at_field, check_at_most, check_cluster, check_positive, check_stack, read_cluster, refuse,
};
use crate::stack::StackProfile;

/// Depth of brackets that are written one field a line.
const WRITTEN_DEPTH: usize = 4;

/// A cluster, and what its file says beside it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterFile {
    /// The cluster.
    pub cluster: ClusterProfile,
    /// Its device, under the name that the cluster gives; a built-in one where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceProfile>,
    /// The stack that is used unless the user names another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stack: Option<StackProfile>,
}

/// Reads a cluster file: `(cluster: (…), device: (…), stack: (…))` with `cluster` first, or the cluster alone.
///
/// # Errors
/// `Error::Text` where it is malformed, `Error::Invalid` with every number that makes no sense.
pub fn read_cluster_file(text: &str, origin: &str) -> Result<ClusterFile, Error> {
    if !first_field(text).starts_with("cluster") {
        return Ok(ClusterFile { cluster: read_cluster(text, origin)?, device: None, stack: None });
    }
    let file: ClusterFile = read_ron(text, origin)?;
    let mut problems = check_cluster(&file.cluster, &format!("{origin}, cluster"));
    if let Some(device) = &file.device {
        problems.extend(check_device(device, &format!("{origin}, device")));
        if device.name != file.cluster.device {
            let what = format!("the cluster's device is `{}`, the file's `{}`", file.cluster.device, device.name);
            problems.push(at_field(what, origin, "cluster.device", "give both one name"));
        }
    }
    if let Some(stack) = &file.stack {
        problems.extend(check_stack(stack, &format!("{origin}, stack")));
    }
    refuse(problems)?;
    Ok(file)
}

/// The text of a cluster file.
pub fn write_cluster_file(file: &ClusterFile) -> String {
    write_ron(file, WRITTEN_DEPTH)
}

/// The text from the first field on, or from where none can begin.
fn first_field(text: &str) -> &str {
    let text = after_comments(text);
    text.strip_prefix('(').map_or(text, after_comments)
}

fn after_comments(text: &str) -> &str {
    let mut rest = text.trim_start();
    loop {
        let end = match rest.get(..2) {
            Some("//") => rest.find('\n'),
            Some("/*") => rest.find("*/").map(|place| place + 1),
            _ => return rest,
        };
        rest = end.map_or("", |end| rest[end + 1..].trim_start());
    }
}

/// Every number of a device that makes no sense.
fn check_device(device: &DeviceProfile, origin: &str) -> Vec<ir::error::Problem> {
    let peaks = [("peak.bf16", &device.peak.bf16), ("peak.fp16", &device.peak.fp16), ("peak.fp32", &device.peak.fp32)];
    let mut positive = vec![
        ("memory".to_owned(), device.memory.value.0 as f64),
        ("memory_bandwidth".to_owned(), device.memory_bandwidth.value.0),
        ("memory_efficiency".to_owned(), device.memory_efficiency.value),
        ("matmul.maximum".to_owned(), device.matmul.maximum.value),
        ("matmul.multiprocessors".to_owned(), device.matmul.multiprocessors.value as f64),
        ("flash_attention_efficiency".to_owned(), device.flash_attention_efficiency.value),
    ];
    let present = peaks.into_iter().filter_map(|(name, peak)| Some((name.to_owned(), peak.as_ref()?.value.0)));
    positive.extend(present);
    let second = device.flash_attention_2_efficiency.as_ref();
    positive.extend(second.map(|share| ("flash_attention_2_efficiency".to_owned(), share.value)));
    let backward = device.flash_attention_backward.as_ref();
    positive.extend(backward.map(|ratio| ("flash_attention_backward".to_owned(), ratio.value)));
    positive.extend(device.board_power.as_ref().map(|power| ("board_power".to_owned(), power.value.0)));
    for rate in &device.operators {
        positive.push((format!("operators.{:?}.forward", rate.class), rate.forward.value.0));
        positive.push((format!("operators.{:?}.backward", rate.class), rate.backward.value.0));
    }
    let positive: Vec<(&str, f64)> = positive.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    let mut halves = vec![("matmul.half_depth", device.matmul.half_depth.value)];
    if let Some(edges) = &device.matmul.edges {
        halves.extend([("matmul.edges.rows", edges.rows.value), ("matmul.edges.columns", edges.columns.value)]);
    }
    let mut problems = check_positive(origin, &positive);
    problems.extend(halves.into_iter().filter_map(|(field, half)| check_at_most(origin, field, half, f64::MAX)));
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::library::{find_cluster, find_device, find_stack};

    fn whole() -> ClusterFile {
        ClusterFile {
            cluster: find_cluster("cpu-host", "test").expect("it is built in"),
            device: Some(find_device("cpu-core", "test").expect("it is built in")),
            stack: Some(find_stack("planwright", "test").expect("it is built in")),
        }
    }

    #[test]
    fn files_give_back_what_was_written() {
        let only_cluster = ClusterFile { device: None, stack: None, ..whole() };
        for file in [whole(), only_cluster.clone()] {
            for before in ["", "// a comment\n", "/* one */ // two\n  "] {
                let text = format!("{before}{}", write_cluster_file(&file));
                assert_eq!(read_cluster_file(&text, "test"), Ok(file.clone()), "{text}");
            }
        }
        let text = write_ron(&only_cluster.cluster, WRITTEN_DEPTH);
        assert_eq!(read_cluster_file(&text, "test"), Ok(only_cluster), "{text}");
    }

    #[test]
    fn every_senseless_number_is_named() {
        let text = write_cluster_file(&whole());
        let rows = [
            (
                "multiprocessors: Assumed(1,",
                "multiprocessors: Assumed(0,",
                "m.ron, device, field matmul.multiprocessors",
            ),
            (
                "memory_efficiency: Assumed(0.8,",
                "memory_efficiency: Assumed(0,",
                "m.ron, device, field memory_efficiency",
            ),
            ("matmul_speed: Assumed(1.0,", "matmul_speed: Assumed(0,", "m.ron, stack, field kernels.matmul_speed"),
            ("node_gpus: 8", "node_gpus: 0", "m.ron, cluster, field node_gpus"),
            ("name: \"cpu-core\"", "name: \"other\"", "m.ron, field cluster.device"),
        ];
        for (from, to, place) in rows {
            assert!(text.contains(from), "{from} in {text}");
            let problems = read_cluster_file(&text.replacen(from, to, 1), "m.ron").expect_err("it makes no sense");
            let places: Vec<&str> = problems.problems().iter().map(|problem| problem.location.as_str()).collect();
            assert_eq!(places, [place]);
        }
    }
}
