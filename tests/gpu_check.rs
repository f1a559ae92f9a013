//! `execute-plan gpu-check`: what it says without a GPU, and a whole check on whatever Vulkan driver there is.

#[cfg(feature = "wgpu")]
mod support;

use std::process::{Command, Output};

use serde_json::Value;

fn gpu_check(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_execute-plan"));
    command.arg("gpu-check").args(arguments).output().expect("the program starts")
}

#[test]
fn what_this_program_cannot_run_kernels_with_is_bad_input() {
    let runs: &[(&str, bool)] = &[("wgpu", cfg!(feature = "wgpu")), ("cuda", cfg!(feature = "cuda"))];
    for (driver, _) in runs.iter().filter(|(_, built)| !built) {
        let output = gpu_check(&["--driver", driver, "--json"]);
        assert_eq!(output.status.code(), Some(2));
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(message.contains("built without") && message.contains(&format!("--features {driver}")), "{message}");
        let json: Value = serde_json::from_slice(&output.stdout).expect("JSON where it was asked for");
        assert_eq!(json["error"]["where"], "execute-plan gpu-check");
    }
}

#[cfg(feature = "wgpu")]
mod on_vulkan {
    use std::fs;

    use cost_models::machine::Machine;
    use hardware_profiles::device::MatmulFormat;
    use hardware_profiles::{find_stack, read_cluster_file};
    use ir::graph::build_graph;
    use ir::provenance::Provenance;
    use planner::request::FixedChoices;
    use planner::search::search;
    use runtime::gpu_check::pytorch;

    use super::{Value, gpu_check, support};

    /// The JSON's numbers, the tables' rows, and a cluster file with which a plan is found.
    #[test]
    fn a_check_writes_tables_and_a_profile_that_planning_accepts() {
        let folder = tempfile::tempdir().expect("there is room for a folder");
        let out = folder.path().join("report");
        let output = gpu_check(&["--driver", "wgpu", "--json", "--out", out.to_str().expect("a plain path")]);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{message}");
        let json: Value = serde_json::from_slice(&output.stdout).expect("JSON where it was asked for");
        assert_eq!(json["driver"], "wgpu");
        let rows = |part: &str| json[part].as_array().expect("a list").clone();
        assert!(rows("numbers").len() > 100);
        for comparison in rows("numbers") {
            assert!(comparison["wrong"].is_null(), "{comparison}");
            assert!(comparison["largest_error"].as_f64() <= comparison["tolerance"].as_f64(), "{comparison}");
        }
        for timed in rows("bandwidth") {
            let [bytes, seconds, rate] =
                ["bytes", "seconds", "bytes_per_second"].map(|field| timed[field].as_f64().expect("a number"));
            assert!((bytes / seconds / rate - 1.0).abs() < 1e-9 && timed["share_of_copy"].is_f64(), "{timed}");
        }
        for computed in [rows("products"), rows("attention")].concat() {
            assert!(computed["flops_per_second"].as_f64().is_some_and(|rate| rate > 0.0), "{computed}");
        }
        let trained = &rows("steps")[0];
        assert!(trained["tokens_per_second"].as_f64().is_some_and(|rate| rate > 0.0), "{trained}");
        assert!(trained["losses"][1].as_f64() < trained["losses"][0].as_f64(), "{trained}");
        assert!(json["ranks"]["done"].as_str().is_some_and(|said| said.starts_with("4 ranks")), "{}", json["ranks"]);
        let text = fs::read_to_string(out.join("report.md")).expect("it was written");
        for part in ["| copy |", "| adamw |", "| attention_gradient |", "| cubek |", "| tiny |", "PyTorch", "NCCL"] {
            assert!(text.contains(part), "{part} in: {text}");
        }
        let written = fs::read_to_string(out.join("report.json")).expect("it was written");
        assert_eq!(serde_json::from_str::<Value>(&written).expect("JSON"), json);

        let text = fs::read_to_string(out.join("profile.ron")).expect("it was written");
        let file = read_cluster_file(&text, "profile.ron").expect("it is a cluster file");
        let device = file.device.expect("it holds its device");
        assert_eq!(device.memory_bandwidth.provenance, Provenance::Measured);
        assert_eq!(device.operators.len(), 4);
        let stack = find_stack("planwright", "built-in stacks").expect("it is built in");
        let machine =
            Machine { device, cluster: file.cluster, stack, node_gpus: 1, matmul_format: MatmulFormat::Model };
        let request = support::request(support::example("tiny"), machine, 1, FixedChoices::default());
        let outcome = search(&request, &build_graph(&request.model));
        assert!(!outcome.best.is_empty(), "a layout fits");
    }

    /// PyTorch's program on processor cores, where this host has it.
    #[test]
    fn pytorch_times_every_operator() {
        let operators: Vec<pytorch::Operator> = vec![
            ("product", vec![32, 64, 16], "bf16"),
            ("attention", vec![1, 16, 2, 8], "fp32"),
            ("copy", vec![8, 16], "fp32"),
            ("bias_gelu", vec![8, 16], "fp32"),
            ("swiglu", vec![8, 16], "fp32"),
            ("layer_norm", vec![8, 16], "fp32"),
            ("rms_norm", vec![8, 16], "fp32"),
            ("loss", vec![8, 16], "fp32"),
        ];
        match pytorch::run("cpu", &operators) {
            Err(reason) => println!("{reason}"),
            Ok(rows) => {
                assert_eq!(rows.len(), 2 * operators.len(), "{rows:?}");
                for row in rows.iter().filter(|row| row.mode == "eager") {
                    assert!(row.forward.is_some_and(|seconds| seconds > 0.0), "{row:?}");
                    let is_plain = ["product", "copy"].contains(&row.kernel.as_str());
                    assert_eq!(row.backward.is_none(), is_plain, "{row:?}");
                }
            }
        }
    }
}
